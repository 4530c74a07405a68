"""A drafter on disk, of whatever family: `config.json`, `model.safetensors`, and its card. What all families share.

A checkpoint is written into a directory aside, flushed and renamed: it is there whole or not at all. What has to be in
it is its family's to say; `exact_tensors` says it for names and shapes, because the engines' loaders do not: SGLang's
skip what they do not know and leave random what they miss.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eyrie_api.errors import ArtifactMissing, Permanent
from eyrie_workers.drafters.checkpoint.card import Card, write_card
from eyrie_workers.drafters.eagle3.directory_format import CARD, CONFIG, README, WEIGHTS
from eyrie_workers.targets.config import RopeConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CheckpointInvalid(Permanent):
    """A drafter checkpoint that a serving engine would load wrongly, or not at all."""

    exit_code = 65
    reason = "CheckpointInvalid"


def write_checkpoint(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor],
                     card: Card | None) -> None:
    """Write a checkpoint to `directory`, replacing what is there, atomically. None as `card`: no card is written."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    aside = directory.with_name(f".{directory.name}.aside")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    save_file(dict(tensors), aside / WEIGHTS, metadata={"format": "pt"})
    (aside / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    if card is not None:
        write_card(aside, card)
    for path in (*aside.iterdir(), aside):
        _flush(path)
    if directory.exists():  # the same step exported again after an interruption: same bytes, so any order is safe
        shutil.rmtree(directory)
    os.replace(aside, directory)
    _flush(directory.parent)


def as_stored(tensors: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """The tensors as a file takes them: on the host, contiguous, sharing no memory, numbers in `dtype`."""
    wanted = _DTYPES[dtype]
    return {name: (tensor.to(wanted) if tensor.is_floating_point() else tensor).detach().cpu().contiguous().clone()
            for name, tensor in tensors.items()}


def files_of(directory: Path) -> list[Path]:
    """The files of a checkpoint, in order of name."""
    return sorted(path for name in (CARD, CONFIG, README, WEIGHTS) if (path := directory / name).is_file())


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` of a checkpoint. Raises ArtifactMissing or CheckpointInvalid."""
    try:
        found = json.loads((directory / CONFIG).read_text())
    except FileNotFoundError:
        raise ArtifactMissing(f"no drafter in {directory}: {CONFIG} is missing",
                              "give the directory of an exported drafter") from None
    except json.JSONDecodeError as error:
        raise CheckpointInvalid(f"{directory / CONFIG} is not JSON: {error}", "export the drafter again") from error
    if not isinstance(found, dict):
        raise CheckpointInvalid(f"{directory / CONFIG} is not a JSON object", "export the drafter again")
    return found


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, by the names they are stored under, where `targets.device.device_scope` says.

    Raises ArtifactMissing or CheckpointInvalid.
    """
    path = directory / WEIGHTS
    if not path.is_file():
        raise ArtifactMissing(f"no drafter in {directory}: {WEIGHTS} is missing",
                              "give the directory of an exported drafter")
    try:
        with safe_open(path, framework="pt", device=str(torch.get_default_device())) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise CheckpointInvalid(f"{path} is not a readable safetensors file: {error}",
                                "copy or export the drafter again") from error


def exact_tensors(drafter: str, found: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Exactly the expected names with the expected shapes, or CheckpointInvalid naming every one that is not.

    drafter   what to call it in the message
    """
    missing = [f"{name} is missing" for name in expected if name not in found]
    unknown = [f"{name} is not known" for name in found if name not in expected]
    shapes = [f"{name} has shape {list(found[name].shape)}, not {list(shape)}" for name, shape in expected.items()
              if name in found and tuple(found[name].shape) != tuple(shape)]
    if faults := [*missing, *unknown, *shapes]:
        raise CheckpointInvalid(f"drafter {drafter}: {'; '.join(faults)}",
                                "export the drafter again; its config.json and its tensors are not of one drafter")


def rope_json(rope: RopeConfig) -> dict[str, Any]:
    """Rotary settings as `rope_parameters` (and, where the kind is no default, `rope_scaling`) holds them."""
    written: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        written["factor"] = rope.factor
    if rope.kind == "llama3":
        written |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor,
                    "original_max_position_embeddings": rope.original_max_position}
    return written


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
