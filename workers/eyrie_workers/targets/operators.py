"""Operators that targets and drafters share: row-invariant products, the RMS norm, the output head, rotary positions.

*Products whose result for a row does not depend on the number of rows* (`Linear`). A drafted round runs six or sixteen
tokens where plain decoding runs one. If a library picks another kernel for another number of rows, the sums run in
another order, the last bits differ, and a near-tie between two tokens may resolve differently: the output would no
longer be the target's own. MKL's float32 path does exactly that (sgemv for one to three rows, sgemm above; measured:
rows differ for M in {1, 2, 3}). oneDNN with weights packed for a block of 16 rows does not: rows were bitwise equal for
every M from 1 to 300, with bias and with fused addition, in float32 and bfloat16, one thread and two (torch 2.13.0;
tests/workers/targets repeats it). It is also the faster one: at 256 x 1408 in float32, 8 rows cost 78 us against 255
us, because each weight is read once. Packed weights are a second copy in an opaque layout; a caller that needs the
plain matrix keeps it.

*The output head* maps a target's final states to its logits:

    logits = c * tanh(z / c),  z = scale * (states @ weight.T)

`scale` is 1 for most targets; Granite divides its logits (`logits_scaling`), Cohere multiplies them (`logit_scale`).
Gemma bounds them by a soft cap c (`final_logit_softcapping`). Every distribution of the target that a drafter is
trained on is computed here, or by `training.objective` in blocks, with `capped` applied to each.

*Rotary position embedding of the drafter* (RoFormer, arXiv:2104.09864), in the element order of checkpoints: Llama's
half-rotation, where element i of a head's first half is paired with element i of its second. The target's forward pass
reorders weights to rotate complex numbers instead; a drafter's weights are trained and exported under their own names,
so the order is the one that serving engines expect. Angles are computed in float64 and applied in the dtype of the
activations.
"""

# M or T rows, I inputs, O outputs, V vocabulary, H hidden, E head size

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eyrie_workers.targets.config import RopeConfig

# Packing for one row makes oneDNN choose a different kernel when M is 1 (measured); 16 holds for all M with torch
# 2.13.0. With 2.11.0+cu130 none does on a CPU: float32 rows are rounded by M, and nearly equal logits may swap places.
_PACKED_ROWS = 16


class Linear:
    """y = x W^T + b for two-dimensional x, with the weight packed where oneDNN can."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight [O, I], bias [O] or None."""
        self.bias = bias
        # oneDNN computes in bfloat16 only where the processor has AVX-512 or AVX-NE-CONVERT, and raises elsewhere.
        self.packed = weight.device.type == "cpu" and torch.backends.mkldnn.is_available() and (
            weight.dtype == torch.float32
            or (weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())))
        weight = weight.detach().contiguous()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, I] -> [M, O]."""
        if self.packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
            return y
        return F.linear(x, self._weight, self.bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + x W^T + b as one operation: x [M, I], residual [M, O] -> [M, O]."""
        if self.packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self.bias, "add")
            return y
        return residual + F.linear(x, self._weight, self.bias)


def rms_normalise(x: Tensor, eps: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) along the last dimension (arXiv:1910.07467); the caller applies the weight.

    Four small operations (5.4 us for 8 x 256 against 10 us for torch's composite rms_norm), row-invariant (measured as
    above). `eps` is a tensor without dimensions, so that no constant is boxed per call.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()


@dataclass(frozen=True)
class OutputHead:
    """Output matrix [V, H], its scale included, and the bound of the logits; None: no bound."""

    weight_VH: Tensor
    soft_cap: float | None = None

    @staticmethod
    def of(weight_VH: Tensor, scale: float = 1.0, soft_cap: float | None = None) -> "OutputHead":
        """With the scale multiplied into a copy of the matrix, rounded to its dtype; the scales in use are powers of
        two, which round nothing."""
        return OutputHead(weight_VH if scale == 1.0 else weight_VH * scale, soft_cap)

    def capped(self, products: Tensor) -> Tensor:
        """Logits of products `states @ weight_VH.T`, of any shape; in place where they are bounded."""
        if self.soft_cap is None:
            return products
        return products.div_(self.soft_cap).tanh_().mul_(self.soft_cap)

    def logits(self, states: Tensor) -> Tensor:
        """[..., H] states after the final norm -> [..., V] float32."""
        return self.capped((states.to(self.weight_VH.dtype) @ self.weight_VH.T).to(torch.float32))


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
