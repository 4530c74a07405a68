"""Small host numbers copied to the device of the current scope without waiting for it.

A copy from ordinary (pageable) memory makes the host wait until the GPU has finished all earlier work, so a round that
uploads an index per draft step waits per draft step. Copies from pinned memory are queued like kernels. torch keeps a
pinned block until the copy has run, so the caller may drop it.

Indices of a round are therefore uploaded together where they are known together, and derived on the device where
arithmetic suffices.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Numbers = Sequence[int] | Sequence[Sequence[int]] | Sequence[float] | Sequence[Sequence[float]]


def upload(values: Numbers, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor of `values` on the device of the current `device_scope`."""
    device = torch.get_default_device()
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=True).to(device, non_blocking=True)
