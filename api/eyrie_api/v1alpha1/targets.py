"""Which targets Eyrie understands, as data: the API refuses the others before a worker has loaded anything.

Architecture names are the entries of `architectures` in a Hugging Face `config.json`. Adding a family means teaching
`eyrie_workers.targets` its forward pass first, and then naming it here.
"""

import os
from pathlib import Path

SUPPORTED_ARCHITECTURES: tuple[str, ...] = (
    "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM")

QUICKSTART = "quickstart"
"""The model, conversations and suites shipped with Eyrie; `quickstart:<suite>` names one suite."""

QUICKSTART_LARGE = "quickstart-large"
"""A deeper target of less predictable text. Not shipped: `python -m tests.benchmarks.quickstart.pretrain --larger`."""

QUICKSTART_HYBRID = "quickstart-hybrid"
"""A target with windows in three layers of four. Not shipped: `... --hybrid`."""

TRAINED_HERE: dict[str, str] = {
    QUICKSTART_LARGE: "python -m tests.benchmarks.quickstart.pretrain --larger",
    QUICKSTART_HYBRID: "python -m tests.benchmarks.quickstart.pretrain --hybrid"}
"""Targets by name that a command makes on this machine, and the command."""


def trained_here(name: str) -> Path:
    """Where a target of `TRAINED_HERE` lies: below EYRIE_HOME, or ~/.eyrie, whatever the working directory."""
    return Path(os.environ.get("EYRIE_HOME", "~/.eyrie")).expanduser().absolute() / "targets" / name


QUICKSTART_SUITE_NAMES: tuple[str, ...] = ("chat", "math", "code", "tools")

HELD_OUT = "held-out"
"""The suite made of the prompts split off the job's own data."""
