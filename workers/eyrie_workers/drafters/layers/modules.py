"""Parts of a decoder layer that several families have: modules with the parameters, and the arithmetic after attention.

    after attention    h = x + W_o attended        y = h + W_d (silu(g) * u),   [g u] = W_gu rms(h)

The parameters are `nn.Module`s under the names engines load. Training uses them joined by input, in the compute dtype
(`PostAttention`); decoding has them packed, with the norm folded in (`drafters.layers.proposer`).

    T rows, H hidden, I intermediate, q and k widths of the query and key heads
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eyrie_workers.training.fused import mlp
from eyrie_workers.training.matmul import linear


class Norm(nn.Module):
    """The weight of one RMSNorm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class AttentionProjections(nn.Module):
    """Projections to q, k, v from inputs of `input_size`, and from the attended values to the residual stream."""

    def __init__(self, input_size: int, hidden_size: int, query_size: int, key_size: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(input_size, query_size, bias=False)
        self.k_proj = nn.Linear(input_size, key_size, bias=False)
        self.v_proj = nn.Linear(input_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, hidden_size, bias=False)


class GatedMlp(nn.Module):
    """Gate, up and down projection of a gated MLP."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)


@dataclass(frozen=True)
class PostAttention:
    """Output projection, norm and MLP of a decoder layer, in training. Matrices in the compute dtype, norm as stored.

    out [H, q]   norm [H]   gate_up [2I, H]   down [H, I]
    """

    out: Tensor
    norm: Tensor
    gate_up: Tensor
    down: Tensor
    rms_eps: float

    @classmethod
    def of(cls, attention: AttentionProjections, norm: Norm, gated: GatedMlp, rms_eps: float,
           dtype: torch.dtype) -> "PostAttention":
        """The parameters joined where they share an input; gradients flow to them."""
        return cls(out=attention.o_proj.weight.to(dtype), norm=norm.weight,
                   gate_up=torch.cat([gated.gate_proj.weight, gated.up_proj.weight]).to(dtype),
                   down=gated.down_proj.weight.to(dtype), rms_eps=rms_eps)

    def __call__(self, x_TH: Tensor, attended_TQ: Tensor, recompute: bool = False) -> Tensor:
        """[T, H] residual stream and [T, q] attended values -> [T, H]. recompute: see `training.fused.mlp`."""
        x_TH = x_TH + linear(attended_TQ, self.out)
        return mlp(x_TH, self.norm, self.gate_up, self.down, self.rms_eps, recompute)
