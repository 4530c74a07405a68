"""DFlash2's additions to DFlash's block: local convolutions and a selector (z-lab/dflash, `dflash/model.py`).

Experimental: `drafter.causal_head: selector` has the selector alone, `dflash2` both. Names and formulas are those of
SGLang 0.5.23 (`srt/models/dflash.py`: `DFlashGroupedConv`, `CandidateSelector`).

    convolution   around every attention and MLP, within a block; a group g of channels shares what is added:
                    k_{i,t,c} = base_{t,c} + delta_{i,t,g(c)}      y_{i,c} = sum_t k_{i,t,c} x_{i-t,c},   x_{<0} = 0
                  one kernel for the sublayer's normed input, one for its output; both deltas are projections of the
                  normed input before the convolution
    selector      the `top_k` tokens b with the highest logits u_s(b) of each position, given the token a before it:
                    score_s(a, b) = u_s(b) + <A[a] * (H h_s), B[b]>

u are the target's logits, times `output_multiplier`, through a soft cap where there is one. The distribution of a step
is the softmax of the scores over the candidates, so that a tree grows by token, as with a Markov head.

Training adds the cross-entropy of that softmax to the block's own loss, with the true token before each position; a
true token that is no candidate takes the place of the last one (NVIDIA/Model-Optimizer, `HFDFlash2Model`). Here u has
no gradient of it: the block learns from its own loss. B starts at zero: a new selector takes the highest marginal. A
new convolution passes on its own place alone, but for its deltas. Evaluation counts hits of the marginals.

    R rows, C block positions, S steps, H hidden, G groups, K candidates, N nodes or predictions, V vocabulary,
    E rank of the selector
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyrie_workers.speculation.protocol import DraftStep
from eyrie_workers.training.numerics import linear

CANDIDATES = 16
"""K of a new selector."""

_ROWS = 256  # whose logits over the whole vocabulary are held at once


@torch.no_grad()
def likeliest(states_NH: Tensor, head_VH: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The highest logits of each row and their tokens, both [N, K], and the log-sum-exp [N] of all; in float32 at
    least."""
    parts = []
    for rows_MH in states_NH.split(_ROWS):
        logits_MV = linear(rows_MH, head_VH)
        logits_MV = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32))
        parts.append((*logits_MV.topk(top_k, -1), logits_MV.logsumexp(-1)))
    logits, ids, total = zip(*parts, strict=True)
    return torch.cat(logits), torch.cat(ids), torch.cat(total)


CandidateSteps = Callable[[Tensor, int], DraftStep]
"""The step after some nodes [R, N] of one depth, for one block, whose candidates of each step are chosen already."""


def among_candidates(scores_RNK: Tensor, ids_RK: Tensor, vocab_size: int) -> DraftStep:
    """Logits [R, N, V] of one step from the scores of its candidates, -inf outside them."""
    logits_RNV = scores_RNK.new_full((*scores_RNK.shape[:2], vocab_size), -torch.inf)
    index_RNK = ids_RK[:, None].expand_as(scores_RNK)
    return DraftStep(logits_RNV.scatter(-1, index_RNK, scores_RNK), scores_RNK.new_zeros(*scores_RNK.shape[:2], 0))


@dataclass(frozen=True)
class SelectorConfig:
    top_k: int
    rank: int
    output_multiplier: float
    soft_cap: float | None

    @classmethod
    def of(cls, own: Mapping[str, Any]) -> "SelectorConfig":
        """From `dflash_config`, without faults."""
        return cls(own["selector_top_k"], own["selector_rank"], float(own.get("output_multiplier") or 1.0),
                   float(own["final_logit_softcapping"]) if own.get("final_logit_softcapping") else None)

    def json(self) -> dict[str, Any]:
        """What an export has of it."""
        cap = {} if self.soft_cap is None else {"final_logit_softcapping": self.soft_cap}
        return {"selector_rank": self.rank, "selector_top_k": self.top_k, "output_multiplier": self.output_multiplier,
                **cap}


class CandidateSelector(nn.Module):
    def __init__(self, config: SelectorConfig, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.config, self.top_k = config, min(config.top_k, vocab_size)
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, config.rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, config.rank))
        self.hidden_projection = nn.Linear(hidden_size, config.rank, bias=False)

    def unary(self, u: Tensor) -> Tensor:
        """The scores u of candidates, from the products of states and the target's output matrix."""
        u = u * self.config.output_multiplier
        return u if (cap := self.config.soft_cap) is None else (u / cap).tanh() * cap

    def losses(self, states_NH: Tensor, head_VH: Tensor, scale: float, previous_N: Tensor, true_N: Tensor) -> Tensor:
        """[N] cross-entropy of the true token among the candidates.

        states_NH   after the final norm          head_VH  the target's output matrix times `scale`
        previous_N  token before each proposed one
        """
        u_NK, ids_NK, _ = likeliest(states_NH, head_VH, self.top_k)
        with torch.no_grad():
            absent_N = (ids_NK != true_N[:, None]).all(1)
            u_true_N = (states_NH.to(u_NK.dtype) * head_VH[true_N]).sum(-1)
            u_NK[:, -1] = torch.where(absent_N, u_true_N, u_NK[:, -1])
            ids_NK[:, -1] = torch.where(absent_N, true_N, ids_NK[:, -1])
        context_NE = self.predecessor_codebook[previous_N] * self.hidden_projection(states_NH)
        scores_NK = self.unary(u_NK / scale) + torch.einsum("ne,nke->nk", context_NE, self.successor_codebook[ids_NK])
        return F.cross_entropy(scores_NK, (ids_NK == true_N[:, None]).to(torch.int8).argmax(1), reduction="none")

    def steps(self, states_RSH: Tensor, logits_RSV: Tensor, _anchor_RH: Tensor, _embed_VH: Tensor) -> CandidateSteps:
        """For one block, from the products of its states with the output matrix. The rest is for LiLiCorr's head."""
        u_RSK, ids_RSK = logits_RSV.topk(self.top_k, -1)
        unary_RSK, hidden_RSE = self.unary(u_RSK.float()), self.hidden_projection(states_RSH)

        def step(tokens_RN: Tensor, depth: int) -> DraftStep:
            context_RNE = self.predecessor_codebook[tokens_RN] * hidden_RSE[:, depth, None]
            scores_RNK = unary_RSK[:, depth, None] + torch.einsum(
                "rne,rke->rnk", context_RNE, self.successor_codebook[ids_RSK[:, depth]])
            return among_candidates(scores_RNK, ids_RSK[:, depth], self.predecessor_codebook.shape[0])

        return step


class GroupedConvolution(nn.Module):
    """The parameters of one sublayer's convolutions."""

    def __init__(self, taps: int, group_size: int, hidden_size: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.empty(2, taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * taps * (hidden_size // group_size), bias=False)


class Convolutions:
    """`targets.model.Around`: the convolutions of all sublayers of a drafter."""

    def __init__(self, tensors: Mapping[str, Tensor], block_size: int) -> None:
        """`block_size`: positions of a block, until another is set."""
        self._tensors, self.block_size = tensors, block_size

    def before(self, layer: int, sublayer: str, x_MH: Tensor) -> tuple[Tensor, Tensor]:
        """The convolved input, and the kernel of the output."""
        name = f"layers.{layer}.{sublayer}_conv."
        base_2TH = self._tensors[f"{name}base_kernel"]
        taps = base_2TH.shape[1]
        delta_M2TG = F.linear(x_MH, self._tensors[f"{name}kernel_projection.weight"]).unflatten(-1, (2, taps, -1))
        width = x_MH.shape[-1] // delta_M2TG.shape[-1]
        kernel_M2TH = base_2TH + delta_M2TG.repeat_interleave(width, -1)
        return self.after(x_MH, kernel_M2TH[:, 0]), kernel_M2TH[:, 1]

    def after(self, x_MH: Tensor, kernel_MTH: Tensor) -> Tensor:
        x_RCH, kernel_RCTH = (part.unflatten(0, (-1, self.block_size)) for part in (x_MH, kernel_MTH))
        shifted = [F.pad(x_RCH, (0, 0, tap, 0))[:, : self.block_size] for tap in range(kernel_RCTH.shape[2])]
        return (kernel_RCTH * torch.stack(shifted, 2)).sum(2).flatten(0, 1)
