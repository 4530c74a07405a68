"""vLLM 0.32.0's classes of the architectures in `catalog`. Data, found by `tests/vllm/eagle3_support.py`; tests/vllm
scans the installed wheel again and compares."""

VLLM_VERSION = "0.32.0"

DRAFTED: tuple[str, ...] = (
    "ApertusForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Ernie4_5ForCausalLM",
    "Gemma4ForCausalLM", "GptOssForCausalLM", "GraniteForCausalLM", "Llama4ForCausalLM", "LlamaForCausalLM",
    "MiniMaxM2ForCausalLM", "MistralForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM", "Phi3ForCausalLM",
    "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM",
    "SeedOssForCausalLM", "SmolLM3ForCausalLM",
)
"""Those that it captures hidden states of for an EAGLE-3 drafter, some of them through its backend of transformers."""

SERVED: tuple[str, ...] = (
    "Cohere2ForCausalLM", "Exaone4ForCausalLM", "FalconH1ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM",
    "Glm4ForCausalLM", "Glm4MoeForCausalLM", "GraniteMoeHybridForCausalLM", "JambaForCausalLM",
    "MixtralForCausalLM", "Qwen2MoeForCausalLM",
)
"""Those that it serves without."""
