"""Tiny random targets of many architectures: `model_type`, and what its config needs beyond the common sizes."""

from typing import Any

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
           "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
_LATENT = _ROUTED | {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
                     "v_head_dim": 16, "num_key_value_heads": 4, "head_dim": 8}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
           "linear_value_head_dim": 16}

COMMON: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 96, "num_experts_per_tok": 1,
                    "interleave_moe_layer_step": 2, "attention_chunk_size": 16},
    "mistral": {"sliding_window": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 1},
    "qwen3": {},
    "qwen3_moe": _EXPERTS | {"decoder_sparse_step": 1},
    "qwen3_next": _EXPERTS | _LINEAR | {"shared_expert_intermediate_size": 32},
    "qwen3_5_text": _LINEAR,
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 8, "tie_word_embeddings": True},
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window": 8, "tie_word_embeddings": True},
    "gemma4_text": {"global_head_dim": 16, "sliding_window": 8, "hidden_size_per_layer_input": 0,
                    "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 320, "tie_word_embeddings": True},
    "phi3": {},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "glm4": {},
    "glm4_moe": _ROUTED | {"partial_rotary_factor": 0.5},
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
                "attention_multiplier": 0.25},
    "granitemoehybrid": {"logits_scaling": 8.0, "layer_types": ["mamba", "attention", "mamba", "attention"],
                         "num_local_experts": 4, "num_experts_per_tok": 2, "mamba_n_heads": 8, "mamba_d_head": 16,
                         "mamba_d_state": 16, "shared_intermediate_size": 64},
    "cohere2": {"logit_scale": 0.0625, "sliding_window": 8, "tie_word_embeddings": True},
    "olmo2": {},
    "olmo3": {"sliding_window": 8},
    "smollm3": {},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    "jamba": {},
    "apertus": {},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "seed_oss": {},
    "ernie4_5": {},
    "exaone4": {"sliding_window": 8},
}

RUN_IN_SGLANG: tuple[str, ...] = (
    "llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3", "deepseek_v3", "glm4_moe", "olmo3",
)
"""Served with a drafter in the real SGLang on a CPU by tests/sglang: states as transformers', answers as without."""
