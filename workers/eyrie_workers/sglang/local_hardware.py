"""The hardware of this machine: its profile, and which GPUs each server of a stage computes on.

Separate from `planning.sglang_attention`, which the control plane imports and which therefore must not reach torch.
"""

import os
from collections.abc import Sequence

import torch

from eyrie_api.errors import InvalidInput
from eyrie_api.planning.sglang_attention import SglangHardware, profile

GpuGroup = tuple[str, ...]
"""Ids for CUDA_VISIBLE_DEVICES; empty: the server sees what the stage sees."""


def visible_gpus() -> GpuGroup:
    """Ids of the GPUs that this process sees."""
    if not torch.cuda.is_available():
        return ()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(given.split(",")) if given else tuple(str(number) for number in range(torch.cuda.device_count()))


def own_gpus() -> GpuGroup:
    """Ids of the GPUs that this process was given by CUDA_VISIBLE_DEVICES; empty when it was given none."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible_gpus() if given and os.environ.get("EYRIE_DEVICE") != "cpu" else ()


def gpu_groups(visible: Sequence[str], tp_size: int, num_gpus: int | None) -> tuple[GpuGroup, ...]:
    """The GPUs of as many servers as there are groups of `tp_size`; one empty group without a GPU.

    num_gpus   use at most so many; None: all

    Raises InvalidInput when fewer are visible than requested.
    """
    wanted = num_gpus or tp_size
    if not visible and wanted == 1:
        return ((),)
    if len(visible) < wanted:
        field = "engine.num_gpus" if num_gpus else "engine.tp_size"
        raise InvalidInput(f"{field} is {wanted} and this process sees {len(visible)} GPUs",
                           "lower it, request more GPUs in placement, or check CUDA_VISIBLE_DEVICES")
    used = visible[:num_gpus]
    return tuple(tuple(used[first:first + tp_size]) for first in range(0, len(used) - tp_size + 1, tp_size))


def detect_hardware() -> SglangHardware:
    """The profile of the first GPU, or of the CPU without one."""
    if not torch.cuda.is_available():
        return profile("cpu")
    properties = torch.cuda.get_device_properties(0)
    memory_gib = properties.total_memory / 2**30
    if torch.version.hip:
        return SglangHardware(properties.name, "rocm", 0, memory_gib)
    return SglangHardware(properties.name, "cuda", 10 * properties.major + properties.minor, memory_gib)
