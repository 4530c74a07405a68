"""Reading and writing of drafter directories: `config.json`, `model.safetensors` and the card, for every family.

A checkpoint is written to a temporary directory, flushed and renamed, so that it is complete or absent. Its contents
are defined by its family. Names and shapes are compared with the expected ones, because the engines' loaders do not:
SGLang's skip unknown tensors and leave missing ones random.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eyrie_api.errors import ArtifactMissing, Permanent, UnsupportedTarget
from eyrie_api.planning.drafter_rules import (
    Finding,
    Header,
    TargetSizes,
    config_rules,
    expected_tensors,
    fit_rules,
    tensor_rules,
)
from eyrie_workers.drafters.card import CARD, CONFIG, README, WEIGHTS, Card, write_card
from eyrie_workers.targets.config import RopeConfig, TargetConfig, parse_drafter_config
from eyrie_workers.targets.loading import stored_tensors

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CheckpointInvalid(Permanent):
    """A drafter checkpoint that an engine would load wrongly, or refuse."""

    exit_code = 65


def write_checkpoint(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor],
                     card: Card | None = None, copies: Sequence[Path] = ()) -> None:
    """Write a checkpoint to `directory`, replacing an existing one, atomically, with the `card` if there is one, and
    with copies of those files of `copies` that exist."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = directory.with_name(f".{directory.name}.temporary")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, temporary / WEIGHTS, metadata={"format": "pt"})
    (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    if card is not None:
        write_card(temporary, card)
    for file in copies:
        if file.is_file():
            shutil.copy2(file, temporary)
    for path in (*temporary.iterdir(), temporary):
        _flush(path)
    if directory.exists():  # the same step exported again after an interruption: the bytes are equal
        shutil.rmtree(directory)
    os.replace(temporary, directory)
    _flush(directory.parent)  # the name


def as_stored(tensors: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """The tensors as safetensors stores them: on the CPU, contiguous, without shared memory, floats in `dtype`."""
    wanted = _DTYPES[dtype]
    return {name: (tensor.to(wanted) if tensor.is_floating_point() else tensor).detach().cpu().contiguous().clone()
            for name, tensor in tensors.items()}


def files_of(directory: Path) -> list[Path]:
    return sorted(path for name in (CARD, CONFIG, README, WEIGHTS) if (path := directory / name).is_file())


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` of a checkpoint. Raises ArtifactMissing or CheckpointInvalid."""
    try:
        config = json.loads((directory / CONFIG).read_text())
    except OSError:
        raise ArtifactMissing(f"no drafter in {directory}: {CONFIG} is missing",
                              "give the directory of an exported drafter") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointInvalid(f"{directory / CONFIG} is not JSON: {error}", "export the drafter again") from error
    if not isinstance(config, dict):
        raise CheckpointInvalid(f"{directory / CONFIG} is not a JSON object", "export the drafter again")
    return config


def parse_decoder(drafter: str, config: Mapping[str, Any]) -> TargetConfig:
    """The decoder layers that a drafter's `config.json` describes. Raises CheckpointInvalid for those that Eyrie does
    not compute."""
    try:
        return parse_drafter_config(config)
    except UnsupportedTarget as error:
        raise CheckpointInvalid(f"drafter {drafter}: {error.message}", error.hint) from error


def read_checkpoint(directory: Path, family: str,
                    target: TargetConfig | None = None) -> tuple[dict[str, Any], TargetConfig, dict[str, Tensor]]:
    """`config.json`, the decoder layers that it describes, and the tensors of a drafter of layers, for this target if
    one is given. Raises ArtifactMissing, or CheckpointInvalid listing the violations of the format."""
    written = read_config(directory)
    refuse(directory.name, config_rules(family, written))
    config, tensors = parse_decoder(directory.name, written), read_tensors(directory)
    refuse(directory.name, tensor_rules(headers_of(tensors), expected_tensors(family, written)))
    if target is not None:
        refuse_another_target(directory.name, family, written, target)
    return written, config, tensors


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by their names in the file, on the default device (`targets.device.device_scope`).
    Raises ArtifactMissing or CheckpointInvalid."""
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


def read_weights(directory: Path) -> dict[str, Tensor]:
    """The tensors of a directory by their names in its files: safetensors, else `pytorch_model.bin`, of which only
    tensors are loaded and no code. Raises ArtifactMissing, ArtifactCorrupt."""
    tensors = dict(chain.from_iterable(map(stored_tensors, sorted(directory.glob("*.safetensors")))))
    pickled = directory / "pytorch_model.bin"
    if not tensors and pickled.is_file():
        tensors = torch.load(pickled, map_location="cpu", weights_only=True)  # loads tensors only, no code
    if not tensors:
        raise ArtifactMissing(f"no weights in {directory}", f"give a directory with {WEIGHTS} or {pickled.name}")
    return tensors


def headers_of(tensors: Mapping[str, Tensor]) -> dict[str, Header]:
    return {name: Header(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in tensors.items()}


def refuse(drafter: str, findings: Iterable[Finding]) -> None:
    """Raises CheckpointInvalid with all errors among the findings, and the hint of the first. `drafter` names it."""
    if faults := [finding for finding in findings if finding.severity == "error"]:
        raise CheckpointInvalid(f"drafter {drafter}: {'; '.join(fault.what for fault in faults)}", faults[0].hint)


def refuse_another_target(drafter: str, family: str, config: Mapping[str, Any], target: TargetConfig) -> None:
    """Raises CheckpointInvalid for a drafter that is not of the target, by the sizes of its `config.json`."""
    sizes = TargetSizes(target.hidden_size, target.vocab_size, target.num_layers, target.eos_token_ids)
    for fault in fit_rules(f"drafter {drafter}", family, config, sizes):
        raise CheckpointInvalid(fault.what, fault.hint)


def rope_json(rope: RopeConfig) -> dict[str, Any]:
    """Rotary settings in the format of `rope_parameters` and `rope_scaling`."""
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
