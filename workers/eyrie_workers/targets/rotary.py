"""Rotary position embedding of the drafter (RoFormer, arXiv:2104.09864), in the element order of checkpoints.

Llama's half-rotation: element i of a head's first half is paired with element i of its second. The target's forward
pass reorders weights to rotate complex numbers instead; here the weights are trained and exported under their own
names, so the order is the one that serving engines expect. Angles are computed in float64 and applied in the dtype of
the activations.

    T rows, E head size
"""

import torch
from torch import Tensor

from eyrie_workers.targets.config import RopeConfig


class Rotary:
    """A table of cosines and sines for positions 0 .. num_positions - 1."""

    def __init__(self, rope: RopeConfig, head_dim: int, num_positions: int) -> None:
        self.num_positions = num_positions
        frequencies = torch.tensor(rope.inverse_frequencies(head_dim), dtype=torch.float64)
        angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequencies
        self._table = torch.stack([angles.cos(), angles.sin()], 1).float()

    def at(self, positions_T: Tensor) -> Tensor:
        """[T] -> [T, 2, E / 2] cosines and sines."""
        return self._table.index_select(0, positions_T)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate x [T, ..., E], row t by cos_sin[t] of [T, 2, E / 2]."""
    cos, sin = cos_sin.view(x.shape[0], 2, *(1,) * (x.dim() - 2), -1).to(x.dtype).unbind(1)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
