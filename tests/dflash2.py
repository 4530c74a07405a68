"""A DFlash2 drafter out of a DFlash one, with a random selector and convolutions near the identity."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eyrie_api.planning.drafter_rules import expected_tensors


def make_dflash2(directory: Path, own: Mapping[str, Any], selector: float, convolutions: float) -> Path:
    """Change the export in `directory`. selector, convolutions: scale of the random weights of each."""
    config = json.loads((directory / "config.json").read_text())
    config["architectures"] = ["DFlash2DraftModel"]
    config["dflash_config"] |= own
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(11)
    for name, shape in expected_tensors("dflash", config).items():
        if name not in tensors:
            scale = convolutions if "_conv." in name else selector
            tensors[name] = torch.randn(shape, generator=generator) * scale
            if name.endswith("base_kernel"):
                tensors[name][:, 0] += 1.0
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory
