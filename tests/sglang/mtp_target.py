"""The shipped Llama as checkpoints of other architectures, GLM-4.5-MoE and MiMo, with one MTP layer behind their last.

    python -m tests.sglang.mtp_target --out DIR

All layers are dense (`first_k_dense_replace`), attention has no biases or head norms and rotates whole heads, so the
target computes what the Llama computes. The MTP layer is random but for its input matrix, which passes the target's
hidden state through: it drafts, and seldom well. As in SGLang's class, its MLP is a mixture of experts.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from eyrie_api.planning.drafter_rules import expected_tensors
from eyrie_api.planning.sglang_support import MTP_LAYER
from tests.sglang.mixture_target import begin_from_quickstart

NUM_EXPERTS, ACTIVE, _EXPERT_SIZE = 4, 2, 32


def write_mtp_target(directory: Path, *, with_mtp: bool = True, seed: int = 0, spread: float = 0.0) -> Path:
    """Write the checkpoint with its tokenizer; return its directory. An existing one is replaced.

    spread   of what the layer reads of the token before
    """
    config, weights = begin_from_quickstart(directory)
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    config |= {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "partial_rotary_factor": 1.0,
        "use_qk_norm": False, "attention_bias": False, "first_k_dense_replace": layers,
        "n_routed_experts": NUM_EXPERTS, "num_experts_per_tok": ACTIVE, "moe_intermediate_size": _EXPERT_SIZE,
        "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": int(with_mtp),
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if with_mtp:
        weights |= _mtp_layer(f"model.layers.{layers}", weights, hidden, torch.Generator().manual_seed(seed), spread)
    stored = {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_mimo_target(directory: Path, seed: int = 0) -> Path:
    """The shipped Llama as MiMo, whose layers are Qwen 2's: biases on q, k and v, here zero. The MTP layer passes the
    target's state through `input_proj`; the rest of it is random, as small as in `write_mtp_target`."""
    config, weights = begin_from_quickstart(directory)
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    config.pop("attention_bias", None)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights |= {name.replace(".weight", ".bias"): torch.zeros(weight.shape[0]) for name, weight in weights.items()
                if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))}
    generator, hidden = torch.Generator().manual_seed(seed), config["hidden_size"]
    for name, shape in expected_tensors("mtp", config).items():
        is_norm = len(shape) == 1 and name.endswith("norm.weight")
        weights[name] = torch.ones(shape) if is_norm else 0.02 * torch.randn(shape, generator=generator)
    weights[f"{MTP_LAYER}input_proj.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)
    stored = {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _mtp_layer(prefix: str, weights: dict[str, torch.Tensor], hidden: int, generator: torch.Generator,
               spread: float) -> dict[str, torch.Tensor]:
    def random(*shape: int) -> torch.Tensor:
        return 0.02 * torch.randn(shape, generator=generator)

    layer = {name: torch.ones(hidden) for name in (
        "enorm.weight", "hnorm.weight", "shared_head.norm.weight", "input_layernorm.weight",
        "post_attention_layernorm.weight")}
    layer["eh_proj.weight"] = torch.cat((spread * torch.randn(hidden, hidden, generator=generator), torch.eye(hidden)),
                                        dim=1)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        layer[f"self_attn.{name}.weight"] = random(*weights[f"model.layers.0.self_attn.{name}.weight"].shape)
    layer["mlp.gate.weight"] = random(NUM_EXPERTS, hidden)
    layer["mlp.gate.e_score_correction_bias"] = torch.zeros(NUM_EXPERTS)
    for expert in ("shared_experts", *(f"experts.{number}" for number in range(NUM_EXPERTS))):
        layer |= {f"mlp.{expert}.gate_proj.weight": random(_EXPERT_SIZE, hidden),
                  f"mlp.{expert}.up_proj.weight": random(_EXPERT_SIZE, hidden),
                  f"mlp.{expert}.down_proj.weight": random(hidden, _EXPERT_SIZE)}
    return {f"{prefix}.{name}": weight for name, weight in layer.items()}


def main() -> None:
    """Write the checkpoint into the directory given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    print(write_mtp_target(parser.parse_args().out))


if __name__ == "__main__":
    main()
