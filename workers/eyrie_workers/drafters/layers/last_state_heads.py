"""Arithmetic that Medusa's and Hydra's heads share. Both read the target's state after the final norm."""

import torch.nn.functional as F
from torch import Tensor

from eyrie_workers.speculation.protocol import CommittedIndices, CommittedTokens

UNLIMITED_LENGTH = 2**31 - 1
"""`max_length` of proposers without positions."""


def residual_silu(x: Tensor, inner: Tensor) -> Tensor:
    """x + SiLU(inner), in x's dtype."""
    return x + F.silu(inner.to(x.dtype))


def last_states(pairs: CommittedTokens, indices: CommittedIndices) -> Tensor:
    """[B, H] the first aux state of each row's last pair."""
    return pairs.aux[:, :, 0].flatten(0, 1).index_select(0, indices.last)
