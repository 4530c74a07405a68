"""The values of quantised weights, W = (q - z) * s, from the tensors that a checkpoint stores for them.

Computed in float32, so that the one rounding is that to the dtype of the model. Which tensors there are and what they
hold is `eyrie_api.planning.quantised`; no kernel of a method is needed, so this runs on a CPU too. It is not all that a
serving engine computes: those that also quantise activations round what the weights are multiplied with.

Sources: DeepSeek-V3 (arXiv:2412.19437, section 3.3: a scale for each block), GPTQ (arXiv:2210.17323), AWQ
(arXiv:2306.00978), and the layout of files that AutoGPTQ, AutoAWQ and compressed-tensors write. The tests compare
with transformers' and compressed-tensors' own code.
"""

# R rows, C columns of the matrix; G scales of a row

from collections.abc import Callable

import torch
from torch import Tensor

from eyrie_api.planning.quantised import Matrix, Quantisation

_AWQ_LANES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where a word of AWQ holds its first, second, ... value: 0, 2, 4, 6, 1, 3, 5, 7 from the low bits."""


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The floats of 4 bits (OCP Microscaling Formats 1.0, section 5.3.3)."""


def dequantise(matrix: Matrix, quantisation: Quantisation, read: Callable[[str], Tensor]) -> Tensor:
    """[R, C] float32, or [experts, C, R] of the experts of MXFP4. `read` returns a stored tensor by its name."""
    stored, bits = {part: read(name) for part, name in matrix.parts.items()}, quantisation.bits
    q, zero, scale, group = stored["weight"], stored.get("zero"), stored["scale"].float(), stored.get("group")
    if quantisation.method == "mxfp4":
        halves = torch.stack([q & 15, q >> 4], dim=-1).flatten(-2).long()  # of each byte the low one first
        values = torch.tensor(_E2M1, device=q.device)[halves]
        return torch.ldexp(values, (scale - 127).unsqueeze(-1)).flatten(2).transpose(1, 2)
    is_packed = q.dtype == torch.int32
    if quantisation.method in ("gptq", "awq"):  # transposed; GPTQ packs columns of W, and both the rows of its zeros
        lanes = _AWQ_LANES if quantisation.method == "awq" else None
        q, scale = unpack(q, bits, lanes).T if lanes else unpack(q.T, bits), scale.T
        zero = None if zero is None else unpack(zero, bits, lanes).T + quantisation.zero_offset
    elif is_packed:
        q, zero = unpack(q, bits), None if zero is None else unpack(zero.T, bits).T[:matrix.shape[0]]
    values_RC = q.float()
    if zero is not None:
        values_RC = values_RC - _spread(zero.float(), matrix, group)
    elif is_packed:  # words hold values without a sign: the middle of their range is zero
        values_RC = values_RC - 2.0 ** (bits - 1)
    return values_RC * _spread(scale, matrix, group)


def unpack(words: Tensor, bits: int, lanes: tuple[int, ...] | None = None) -> Tensor:
    """[., n] int32 -> [., n * 32 / bits]: the values of each word from its low bits up, or in the order of `lanes`."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    values = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return (values if lanes is None else values[..., list(lanes)]).flatten(1)


def _spread(grid: Tensor, matrix: Matrix, group: Tensor | None) -> Tensor:
    """A value for each block, or for each row and group of columns -> what broadcasts to [R, C]."""
    grid = grid.reshape(*grid.shape, *(1, 1)[grid.dim():])
    (num_rows, num_columns), (rows, columns) = matrix.shape, matrix.block
    if grid.shape[0] > 1 and rows > 1:
        grid = grid.repeat_interleave(rows, 0)[:num_rows]
    if group is not None:
        return grid[:, group.long()]
    return grid.repeat_interleave(columns, 1)[:, :num_columns] if grid.shape[1] > 1 else grid
