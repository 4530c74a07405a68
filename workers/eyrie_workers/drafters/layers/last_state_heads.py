"""Arithmetic that Medusa's and Hydra's heads share. Both read the target's state after the final norm."""

import torch
import torch.nn.functional as F
from torch import Tensor

from eyrie_workers.speculation.protocol import CommittedTokens

UNLIMITED_LENGTH = 2**31 - 1
"""`max_length` of proposers without positions."""


def residual_silu(x: Tensor, inner: Tensor) -> Tensor:
    """x + SiLU(inner), in x's dtype."""
    return x + F.silu(inner.to(x.dtype))


def last_states(pairs: CommittedTokens) -> Tensor:
    """[B, H] the first aux state of each row's last pair."""
    rows = torch.arange(pairs.lengths.numel(), device=pairs.aux.device)
    return pairs.aux[rows, (pairs.lengths - 1).to(pairs.aux.device), 0]
