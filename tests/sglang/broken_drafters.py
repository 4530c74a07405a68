"""Drafters with typical export errors. Eyrie's reader rejects some; SGLang loads all without a warning."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def copy_drafter(drafter: Path, to: Path) -> Path:
    """A copy that a test may modify."""
    return Path(shutil.copytree(drafter, to))


def edit_config(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((directory / CONFIG).read_text())
    change(config)
    (directory / CONFIG).write_text(json.dumps(config))


def layers_shifted(directory: Path) -> None:
    """`hidden_states` indices where SGLang expects the outputs of layers: each one higher."""
    def change(config: dict[str, Any]) -> None:
        nested = config["eagle_config"]
        nested["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in nested["eagle_aux_hidden_state_layer_ids"]]

    edit_config(directory, change)


def ids_for_offsets(directory: Path) -> None:
    """d2t holds the target ids themselves."""
    tensors = load_file(directory / WEIGHTS)
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def norm_flipped(directory: Path) -> None:
    """The drafter's own state is fed back after its norm, though it was trained before it."""
    edit_config(directory, lambda config: config.update(norm_output=not config.get("norm_output", False)))
