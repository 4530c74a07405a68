"""The device of this process: a GPU if there is one, else the CPU; and small host numbers copied to it without waiting.

A tensor created without a device must be on the device of the tensors it meets. Functions that compute (a forward pass,
a round of the engine, an objective) open `device_scope(device)` instead of passing a device through every call: tensors
created inside without an explicit device are created there. For the CPU the scope does nothing.

Files are read, packed and checked on the CPU; the code that loads weights for computing moves them once.

EYRIE_DEVICE overrides the choice (`cpu`, `cuda`, `cuda:1`). Among the processes of torchrun each takes the GPU of its
LOCAL_RANK. `default_device` also makes the GPU the current one of the process: Triton launches kernels, and CUDA
creates contexts and streams, on the current GPU and not on the one that holds the tensors. It also turns cuDNN's
attention off in the process.

EYRIE_TARGET_DEVICE (`cuda:1`, or `cuda:6,cuda:7` for several processes) gives the target devices of its own
where `capture.mode` is `stream`.

`upload`: a copy from ordinary (pageable) memory makes the host wait until the GPU has finished all earlier work, so a
round that uploads an index per draft step waits per draft step. Copies from pinned memory are queued like kernels.
Indices of a round are therefore uploaded together where they are known together, and derived on the device where
arithmetic suffices.
"""

import contextlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from eyrie_api.errors import InvalidInput
from eyrie_workers.machine import version_notes

CPU = torch.device("cpu")


def default_device() -> torch.device:
    """The device of this process, made the current one. Every program that computes calls this before it does. Raises
    InvalidInput where the device that was asked for, or the GPUs that are there, cannot be used."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = choose_device(os.environ, num_gpus)
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            raise InvalidInput(f"torch {torch.__version__} sees {num_gpus} GPUs, but Triton is not installed",
                               "install the Triton of this torch (pip install triton), or set EYRIE_DEVICE=cpu")
        torch.cuda.set_device(device)
        # For each new length of the keys cuDNN builds a plan, which takes it longer than a round of decoding; other
        # kernels for attention need none (pytorch/pytorch#155958).
        torch.backends.cuda.enable_cudnn_sdp(False)
        _report_versions()
    elif "EYRIE_DEVICE" not in os.environ:
        refuse_unusable_gpus(os.environ, torch.version.cuda, sorted(Path("/dev").glob("nvidia[0-9]*")))
    return device


@cache
def _report_versions() -> None:
    """Once per process, on stderr, which is the log of a stage."""
    for note in version_notes():
        print(f"note: {note}", file=sys.stderr)


def choose_device(environment: Mapping[str, str], num_gpus: int) -> torch.device:
    """EYRIE_DEVICE, else the GPU of LOCAL_RANK (default 0), else the CPU. Pure. Raises InvalidInput when EYRIE_DEVICE
    is not a device of this machine, and when there are more processes than GPUs."""
    asked = environment.get("EYRIE_DEVICE")
    rank, num_processes = int(environment.get("LOCAL_RANK", "0")), int(environment.get("LOCAL_WORLD_SIZE", "1"))
    if asked is None and num_gpus == 0:
        return CPU
    try:
        device = torch.device(asked or "cuda")
    except RuntimeError as error:
        raise InvalidInput(f"EYRIE_DEVICE {asked!r} is not a device", "give cpu, cuda or cuda:<number>") from error
    if device.type == "cpu":
        return CPU
    if device.type != "cuda":
        raise InvalidInput(f"EYRIE_DEVICE is {asked!r}, and Eyrie computes on CUDA devices and CPUs only",
                           "give cpu, cuda or cuda:<number>")
    if num_gpus == 0:
        raise InvalidInput(f"EYRIE_DEVICE is {asked!r}, but torch {torch.__version__} sees no GPU",
                           "set EYRIE_DEVICE=cpu, or install a CUDA build of torch on a machine with a GPU")
    if num_processes > num_gpus:
        raise InvalidInput(f"{num_processes} processes on this machine, one per GPU, but torch sees {num_gpus} GPUs",
                           f"set num_gpus (torchrun's --nproc-per-node) to at most {num_gpus}, or EYRIE_DEVICE=cpu to "
                           "train on processors")
    if device.index is not None and num_processes > 1:
        raise InvalidInput(f"EYRIE_DEVICE is {asked!r}, one GPU for {num_processes} processes",
                           "set EYRIE_DEVICE=cuda, and choose GPUs by CUDA_VISIBLE_DEVICES")
    if device.index is not None and device.index >= num_gpus:
        raise InvalidInput(f"EYRIE_DEVICE is {asked!r}, but torch sees {num_gpus} GPUs",
                           f"give cuda:0 to cuda:{num_gpus - 1}")
    return torch.device("cuda", rank if device.index is None else device.index)


def free_bytes(device: torch.device) -> int | None:
    """Memory of the device that this process can still take: of a GPU also what its allocator holds unused, of the host
    within the limit of its control group. None where it is not known."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    left = _left_of_limit(Path("/sys/fs/cgroup"))
    known = [] if left is None else [left]
    with contextlib.suppress(OSError):
        known += [int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines()
                  if line.startswith("MemAvailable:")]
    return min(known, default=None)


def _left_of_limit(group: Path) -> int | None:
    """Bytes below the limit of a control group (version 2); the page cache counts as free. None without a limit."""
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        stats = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + int(stats.get("inactive_file", 0))


def target_device() -> torch.device | None:
    """The device of a target that computes states while a drafter trains (`hidden_states.streaming`); None: this
    process's own.

    Raises InvalidInput when EYRIE_TARGET_DEVICE names what this machine does not have.
    """
    return choose_target_device(os.environ, torch.cuda.device_count() if torch.cuda.is_available() else 0)


def choose_target_device(environment: Mapping[str, str], num_gpus: int) -> torch.device | None:
    """The entry of EYRIE_TARGET_DEVICE for this process: its devices are given to the processes of the machine in turn.
    Pure."""
    asked = environment.get("EYRIE_TARGET_DEVICE")
    if asked is None:
        return None
    devices = []
    for name in asked.split(","):
        try:
            device = torch.device(name.strip())
        except RuntimeError:
            device = torch.device("meta")
        if device.type != "cpu" and (device.type != "cuda" or device.index is None or device.index >= num_gpus):
            raise InvalidInput(f"EYRIE_TARGET_DEVICE {asked!r}: {name!r} is neither cpu nor one of the {num_gpus} GPUs "
                               "that torch sees", "give devices separated by commas, for example cuda:6,cuda:7, or "
                               "unset it to compute the states on the trainer's own device")
        devices.append(device)
    return devices[int(environment.get("LOCAL_RANK", "0")) % len(devices)]


def refuse_unusable_gpus(environment: Mapping[str, str], built_for: str | None, nodes: list[Path]) -> None:
    """Raises InvalidInput where a CUDA build of torch sees none of the GPUs that this machine gives to the process.

    built_for   CUDA version of this torch; None for a CPU build, which is installed on purpose.
    nodes       the GPUs' device files; a container has those of its own GPUs only.

    Without this a driver too old for the torch that is installed means hours on the CPU and no error.
    """
    hidden = environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if built_for is not None and nodes and not hidden:
        try:
            driver = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
        except (OSError, IndexError):
            driver = "no NVIDIA driver is loaded"
        raise InvalidInput(f"this machine has {len(nodes)} GPUs, and torch {torch.__version__}, built for CUDA "
                           f"{built_for}, can use none of them ({driver})",
                           f"install a driver that supports CUDA {built_for}, or the torch for the driver's CUDA; "
                           "EYRIE_DEVICE=cpu computes on processors")


def device_scope(device: torch.device) -> AbstractContextManager[object]:
    """Within the scope, tensors created without an explicit device are created on `device`."""
    return nullcontext() if device.type == "cpu" else device


Numbers = Sequence[int] | Sequence[Sequence[int]] | Sequence[float] | Sequence[Sequence[float]]


def upload(values: Numbers, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor of `values` on the device of the current `device_scope`."""
    device = torch.get_default_device()
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=True).to(device, non_blocking=True)
