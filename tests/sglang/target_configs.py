"""Configurations of one small target per family SGLang treats differently. No weights: only `config.json` is read."""

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 256
_SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
_WINDOWS = ["sliding_attention", "full_attention"] * 4
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen3-moe": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **_EXPERTS},
    "qwen3-next": {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", **_EXPERTS,
                   "layer_types": ["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"] * 3
                   + ["full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                   "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
                   "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1},
    "gpt-oss": {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 4,
                "num_experts_per_tok": 2, "sliding_window": 128, "layer_types": _WINDOWS},
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 128,
               "layer_types": _WINDOWS, "query_pre_attn_scalar": 16, "hidden_activation": "gelu_pytorch_tanh"},
    "olmo3": {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": 128,
              "layer_types": _WINDOWS},
    "deepseek-v3": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 4,
                    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2,
                    "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "kv_lora_rank": 32,
                    "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
                    "routed_scaling_factor": 1.0, "norm_topk_prob": True, "topk_method": "noaux_tc",
                    "scoring_func": "sigmoid"},
    # fp8: of the methods, one whose configuration SGLang reads on every machine
    "llama-fp8": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "quantization_config": {
        "quant_method": "fp8", "activation_scheme": "dynamic"}},
}


def write_target(root: Path, name: str) -> Path:
    """A directory with the configuration of a family."""
    return _write(root / name, _SHAPE | TARGETS[name])


def write_drafter(root: Path, name: str = "drafter", **changes: Any) -> Path:
    """A directory with the configuration of an EAGLE-3 drafter of these targets."""
    return _write(root / name, _SHAPE | {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "draft_vocab_size": 128, "target_hidden_size": 64} | changes)


def _write(directory: Path, config: dict[str, Any]) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory
