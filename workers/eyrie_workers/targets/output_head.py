"""The map from a target's final states to its logits.

    logits = c * tanh(z / c),  z = scale * (states @ weight.T)

`scale` is 1 for most targets; Granite divides its logits (`logits_scaling`), Cohere multiplies them (`logit_scale`).
Gemma bounds them by a soft cap c (`final_logit_softcapping`). Every distribution of the target that a drafter is
trained on is computed here, or by `training.objective` in blocks, with `capped` applied to each.
"""

# V vocabulary, H hidden

from dataclasses import dataclass

import torch
from torch import Tensor


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
