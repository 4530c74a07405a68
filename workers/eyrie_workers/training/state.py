"""The saved state of a training run: one file, from which it resumes bit for bit.

The state holds the parameters, the optimizer's moments, the counters, and the reports of checkpoints already exported.
It holds no random state and no data iterator: the documents of a step and the initial weights are functions of
(seed, step). A run resumed from step n therefore computes step n + 1 as the uninterrupted run would have, to the last
bit on the same machine and thread count.

Tensors go into a safetensors file (no pickle: a state file may come from a shared disk), numbers into its metadata; the
file is written to a temporary name and renamed, so the newest one is always complete. It is copied to host memory
(`take_snapshot`) and written in a thread (`StateWriter`): a step waits for the copy, not for the disk.

The digest of what the run depends on (spec, data, dtype) is part of the state: a state written under other settings is
refused, because continuing it would mix two runs.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from eyrie_api.errors import ArtifactCorrupt, Conflict
from eyrie_workers.targets.device import CPU

FORMAT = 1
_PARAMETER, _MOMENT = "parameter.", "optimizer."


@dataclass(frozen=True)
class Counters:
    step: int = 0
    """Optimizer steps done."""

    tokens: int = 0
    """Packed tokens seen."""

    supervised_tokens: int = 0
    """Token predictions compared with the target, over all unrolled steps."""

    computed_tokens: int = 0
    """The same, including those that pad to a round number of rows."""

    flops: float = 0.0
    """Arithmetic the steps needed (`drafters.eagle3.drafter`)."""

    seconds: float = 0.0
    data_wait_s: float = 0.0
    spent_s: float = 0.0
    """What `train.max_seconds` limits: seconds of steps, and of what ran between them; the mean of all processes."""

    first_s: float = 0.0
    """Of them, those of the first step."""

    loss_ema: float | None = None
    """Smoothed training loss, for display."""


Moments = Sequence[Mapping[str, Tensor]]
"""The optimizer's state of each trainable parameter (`training.distributed`), in their order."""


def trainable_parameters(drafter: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in drafter.named_parameters() if parameter.requires_grad]


@dataclass(frozen=True)
class Snapshot:
    """A state in host memory: training continues while it is written."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


def take_snapshot(drafter: nn.Module, moments: Moments, counters: Counters, digest: str,
                  notes: Mapping[str, Any]) -> Snapshot:
    """A copy of the state.

    digest   of everything the run depends on; `load_state` requires the same.
    notes    JSON-able: the reports of checkpoints exported so far.
    """
    tensors = {_PARAMETER + name: _host_copy(parameter) for name, parameter in drafter.named_parameters()}
    # Moments under the names of their parameters: the file does not depend on how many processes hold them.
    for (name, _), kept in zip(trainable_parameters(drafter), moments, strict=True):
        for key, value in kept.items():
            tensors[f"{_MOMENT}{key}.{name}"] = _host_copy(torch.as_tensor(value))
    return Snapshot(tensors, {"format": str(FORMAT), "digest": digest, "counters": json.dumps(counters.__dict__),
                              "notes": json.dumps(notes)})


def _host_copy(x: Tensor) -> Tensor:
    return x.detach().to(device=CPU, copy=True, memory_format=torch.contiguous_format)


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write a snapshot to `path`, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.aside")
    metadata = {**snapshot.metadata, "sha256": _checksum(snapshot.tensors, snapshot.metadata)}
    save_file(dict(snapshot.tensors), aside, metadata=metadata)
    # On disk before the rename: after a power failure the name must not refer to an incomplete file.
    with aside.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(aside, path)


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 of names, metadata and bytes. safetensors checks the header alone: training would go on from a flipped
    bit in a tensor."""
    sha = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for name, tensor in sorted(tensors.items()):
        sha.update(name.encode())
        sha.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


class StateWriter:
    """Writes snapshots to one file, each in a thread of its own; at most one is being written.

    The thread is joined before the next snapshot, before the program reports that it has stopped or finished, and at
    its end. Killed in between, the program leaves the snapshot before: a complete state of an earlier step.
    """

    def __init__(self, path: Path, write: Callable[[Path, Snapshot], None] = write_snapshot) -> None:
        self._path, self._write = path, write
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="training-state")
        self._pending: Future[None] | None = None

    def start(self, snapshot: Snapshot) -> None:
        """Begin to write. Raises what writing the snapshot before raised."""
        self.wait()  # at most one at a time: two would write to one temporary name
        self._pending = self._pool.submit(self._write, self._path, snapshot)

    def wait(self) -> None:
        """Return when the last snapshot is on disk. Raises what writing it raised."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._pool.shutdown()


def load_state(path: Path, drafter: nn.Module, digest: str) -> tuple[Counters, dict[str, Any], Moments] | None:
    """Load saved parameters into `drafter`; returns counters, notes and moments, or None when there is no file. Raises
    Conflict when the state belongs to other settings, ArtifactCorrupt when it cannot be read or does not fit."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise ArtifactCorrupt(f"training state {path} is not readable: {error}",
                              "delete it to train from the beginning") from error
    # Another digest is another run: its next step would be of neither.
    if metadata.get("format") != str(FORMAT) or metadata.get("digest") != digest:
        raise Conflict(f"training state {path} was written under other settings or from other data",
                       "delete it to train from the beginning, or give an empty directory")
    kept = metadata.pop("sha256", None)
    if kept != _checksum(tensors, metadata):
        raise ArtifactCorrupt(f"training state {path} differs from its checksum",
                              "delete it to train from the beginning")
    # `optimizer.<moment>.<parameter>`: the name of a moment has no dot.
    moments: dict[str, dict[str, Tensor]] = {name: {} for name, _ in trainable_parameters(drafter)}
    for key, value in tensors.items():
        if key.startswith(_MOMENT):
            moment, name = key.removeprefix(_MOMENT).split(".", 1)
            if name in moments:
                moments[name][moment] = value
    try:
        with torch.no_grad():
            for name, parameter in drafter.named_parameters():
                parameter.copy_(tensors[_PARAMETER + name])
    except (KeyError, RuntimeError) as error:
        raise ArtifactCorrupt(f"training state {path} does not fit the drafter: {error}",
                              "delete it to train from the beginning") from error
    return Counters(**json.loads(metadata["counters"])), json.loads(metadata["notes"]), [*moments.values()]
