"""The device of this process: a GPU if there is one, else the CPU.

A tensor created without a device must be on the device of the tensors it meets. Functions that compute (a forward pass,
a round of the engine, an objective) open `device_scope(device)` instead of passing a device through every call: tensors
created inside without an explicit device are created there. For the CPU the scope does nothing.

Files are read, packed and checked on the CPU; the code that loads weights for computing moves them once.

EYRIE_DEVICE overrides the choice (`cpu`, `cuda`, `cuda:1`).
"""

import os
from contextlib import AbstractContextManager, nullcontext

import torch

from eyrie_api.errors import InvalidInput

CPU = torch.device("cpu")


def default_device() -> torch.device:
    """The device of this process: EYRIE_DEVICE, else the GPU of its LOCAL_RANK (default 0), else the CPU.

    Raises InvalidInput when EYRIE_DEVICE is not a device of this machine.
    """
    asked = os.environ.get("EYRIE_DEVICE")
    if asked is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else CPU
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise InvalidInput(f"EYRIE_DEVICE {asked!r} is not a device", "give cpu, cuda or cuda:<number>") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(f"EYRIE_DEVICE is {asked!r}, but torch sees no GPU",
                           "unset it, or install a CUDA build of torch on a machine with a GPU")
    return device


def device_scope(device: torch.device) -> AbstractContextManager[object]:
    """Within the scope, tensors created without an explicit device are created on `device`."""
    return nullcontext() if device.type == "cpu" else device
