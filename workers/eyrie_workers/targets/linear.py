"""Matrix products whose result for a row does not depend on the number of rows in the product.

A drafted round runs six or sixteen tokens where plain decoding runs one. If a library picks another kernel for
another number of rows, the sums run in another order, the last bits differ, and a near-tie between two tokens may
resolve differently: the output would no longer be the target's own. MKL's float32 path does exactly that (sgemv for one
to three rows, sgemm above; measured: rows differ for M in {1, 2, 3}). oneDNN with weights packed for a block of 16 rows
does not: rows were bitwise equal for every M from 1 to 300, with bias and with fused addition, in float32 and bfloat16,
one thread and two (torch 2.13.0; tests/workers/targets repeats it). It is also the faster one: at 256 x 1408 in
float32, 8 rows cost 78 us against 255 us, because each weight is read once.

Packed weights are a second copy in an opaque layout; a caller that needs the plain matrix keeps it.
"""

# M rows, I inputs, O outputs

import torch
import torch.nn.functional as F
from torch import Tensor

# Packing for one row makes oneDNN choose a different kernel when M is 1 (measured); 16 holds for all M.
_PACKED_ROWS = 16


class Linear:
    """y = x W^T + b for two-dimensional x, with the weight packed where oneDNN can."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight [O, I], bias [O] or None."""
        self.bias = bias
        self.packed = weight.device.type == "cpu" and _can_pack(weight.dtype)
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


def _can_pack(dtype: torch.dtype) -> bool:
    """oneDNN computes in bfloat16 only where the processor has AVX-512 or AVX-NE-CONVERT, and raises elsewhere."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


def rms_normalise(x: Tensor, eps: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) along the last dimension (arXiv:1910.07467); the caller applies the weight.

    Four small operations (5.4 us for 8 x 256 against 10 us for torch's composite rms_norm), row-invariant (measured as
    above). `eps` is a tensor without dimensions, so that no constant is boxed per call.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
