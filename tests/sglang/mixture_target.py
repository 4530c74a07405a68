"""The shipped Llama as a checkpoint of another architecture, Qwen2-MoE, which the reference forward pass does not know.

    python -m tests.sglang.mixture_target --out DIR

Each dense MLP becomes four experts, two of which are active per token. The experts compute the same MLP scaled by
1 + `spread` * k: with 0 the model is the Llama, with a little it still answers like it and a wrong choice of experts
changes its hidden states. The routers are random, the shared experts add nothing, and the biases of Qwen's attention
are 0.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eyrie_api.contract.targets import TargetSpec
from eyrie_workers.targets.loading import QUICKSTART, resolve

NUM_EXPERTS, ACTIVE = 4, 2
_SHARED_SIZE = 16


def begin_from_quickstart(directory: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A new directory with the shipped target's tokenizer; its config and its weights. An existing one is replaced."""
    source = resolve(TargetSpec(model=QUICKSTART))
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(source / name, directory / name)
    return json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")


def write_mixture(directory: Path, spread: float = 0.02, seed: int = 0) -> Path:
    """Write the checkpoint with its tokenizer; return its directory. An existing one is replaced."""
    config, llama = begin_from_quickstart(directory)
    hidden, width = config["hidden_size"], config["intermediate_size"]
    config |= {
        "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": ACTIVE, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "moe_intermediate_size": width, "shared_expert_intermediate_size": _SHARED_SIZE, "use_sliding_window": False,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for name, weight in llama.items():
        prefix, dense, projection = name.partition(".mlp.")
        if not dense:
            weights[name] = weight
            continue
        for expert in range(NUM_EXPERTS):
            scale = 1.0 + spread * expert if projection == "down_proj.weight" else 1.0
            weights[f"{prefix}.mlp.experts.{expert}.{projection}"] = weight * scale
    for layer in range(config["num_hidden_layers"]):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        for name in ("q_proj", "k_proj", "v_proj"):
            weights[f"{attention}.{name}.bias"] = torch.zeros(len(weights[f"{attention}.{name}.weight"]))
        weights[f"{mlp}.gate.weight"] = torch.randn(NUM_EXPERTS, hidden, generator=generator)
        weights[f"{mlp}.shared_expert_gate.weight"] = torch.zeros(1, hidden)
        for name, shape in (("gate_proj", (_SHARED_SIZE, hidden)), ("up_proj", (_SHARED_SIZE, hidden)),
                            ("down_proj", (hidden, _SHARED_SIZE))):
            weights[f"{mlp}.shared_expert.{name}.weight"] = torch.zeros(shape)
    stored = {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def main() -> None:
    """Write the checkpoint into the directory given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    print(write_mixture(parser.parse_args().out))


if __name__ == "__main__":
    main()
