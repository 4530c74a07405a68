"""Where arithmetic happens: the machine's GPU if there is one, else its processor.

A tensor that nobody placed must land beside those it meets. Rather than hand a device through every function, the few
rooms that compute (a forward pass, a round of the engine, an objective) open `on(device)`: whatever is made inside,
without a device of its own, is made there. On a processor that is the way things are, and `on` does nothing.

Files are read, packed and checked on the processor; what is loaded for computing is moved once, by whoever loads it.

EYRIE_DEVICE overrides the choice (`cpu`, `cuda`, `cuda:1`).
"""

import os
from contextlib import AbstractContextManager, nullcontext

import torch

from eyrie_api.errors import InvalidInput

CPU = torch.device("cpu")


def chosen() -> torch.device:
    """The device of this process: EYRIE_DEVICE, else the GPU that torchrun gave it or the first, else the processor.

    Raises InvalidInput when EYRIE_DEVICE names none that is here.
    """
    asked = os.environ.get("EYRIE_DEVICE")
    if asked is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else CPU
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise InvalidInput(f"EYRIE_DEVICE {asked!r} is no device", "give cpu, cuda or cuda:<number>") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(f"EYRIE_DEVICE is {asked!r} and no GPU is to be seen here",
                           "unset it, or install a CUDA build of torch on a machine with a GPU")
    return device


def on(device: torch.device) -> AbstractContextManager[object]:
    """Tensors made inside without a device of their own are made on this one."""
    return nullcontext() if device.type == "cpu" else device
