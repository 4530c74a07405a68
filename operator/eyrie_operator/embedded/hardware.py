"""Whether another engine fits this machine next to those that run, and which GPUs it gets.

Free memory is read from `nvidia-smi` and /proc/meminfo: the control plane does not load torch. A machine whose GPUs
cannot be read this way (AMD) counts as large enough, as it did before this check existed. The decision is pure.
"""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from eyrie_api.v1alpha1.engine import EngineSpec
from eyrie_api.v1alpha1.tuning import DrafterUse
from eyrie_workers.engines.sglang.profiles import PROCESSES_BYTES, weights_on_disk

_GIB = 2**30
_WORKSPACE_BYTES = 4 * _GIB
"""Of each GPU: CUDA context, graphs, and a KV pool to serve at least a few requests."""

_QUERY = ["nvidia-smi", "--query-gpu=index,memory.free", "--format=csv,noheader,nounits"]
_QUERY_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class FreeMemory:
    """What is free on this machine now."""

    main_bytes: int
    gpus: dict[str, int] | None = None
    """Free bytes by GPU index; None without a GPU, or where they cannot be read."""


@dataclass(frozen=True)
class Room:
    """Where an engine may start."""

    gpus: tuple[str, ...] = ()
    """For CUDA_VISIBLE_DEVICES; empty: not restricted."""

    missing: str = ""
    """Why it does not fit, with the numbers; empty: it does."""


def find_room(engine: EngineSpec, weights: int, free: FreeMemory) -> Room:
    """Choose the GPUs with the most free memory, or find that there is no room. Pure.

    weights   bytes of target and drafter together, as stored
    """
    if free.gpus is None:
        needed = weights + PROCESSES_BYTES[engine.kind]
        if needed > free.main_bytes:
            return Room(missing=f"another engine needs about {needed / _GIB:.1f} GiB of main memory and "
                                f"{free.main_bytes / _GIB:.1f} GiB are free")
        return Room()
    needed = weights // engine.tp_size + _WORKSPACE_BYTES
    by_size = sorted(free.gpus.items(), key=lambda row: -row[1])
    fitting = [gpu for gpu, size in by_size if size >= needed]
    if len(fitting) < engine.tp_size:
        return Room(missing=f"another engine needs {engine.tp_size} GPUs with about {needed / _GIB:.1f} GiB free, and "
                            f"{len(fitting)} of {len(free.gpus)} have that")
    return Room(gpus=tuple(sorted(fitting[: engine.tp_size])))


def free_memory() -> FreeMemory:
    """The free memory of this machine."""
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    main = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 2**63)
    return FreeMemory(main, _free_gpus())


def _free_gpus() -> dict[str, int] | None:
    if shutil.which(_QUERY[0]) is None:
        return None
    try:
        shown = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True).stdout
        rows = [line.split(",") for line in shown.splitlines() if line.strip()]
        return {index.strip(): int(mib) * 2**20 for index, mib in rows} or None
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def weight_bytes(target: Path, use: DrafterUse) -> int:
    """Bytes of the safetensors files of target and drafter."""
    drafter = [Path(use.drafter_dir)] if use.drafter_dir is not None and use.setting.method == "drafter" else []
    return sum(map(weights_on_disk, (target, *drafter)))
