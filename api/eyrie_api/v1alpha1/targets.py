"""Which targets Eyrie understands, as data: the API refuses the others before a worker has loaded anything.

Architecture names are the entries of `architectures` in a Hugging Face `config.json`. Adding a family means teaching
`eyrie_workers.targets` its forward pass first, and then naming it here.
"""

SUPPORTED_ARCHITECTURES: tuple[str, ...] = (
    "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM")

QUICKSTART = "quickstart"
"""The model, conversations and suites shipped with Eyrie; `quickstart:<suite>` names one suite."""

QUICKSTART_SUITE_NAMES: tuple[str, ...] = ("chat", "math", "code", "tools")

HELD_OUT = "held-out"
"""The suite made of the prompts split off the job's own data."""
