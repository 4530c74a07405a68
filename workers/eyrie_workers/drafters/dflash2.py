"""DFlash2's additions to DFlash's block: local convolutions and a selector (z-lab/dflash, `dflash/model.py`).

Experimental. The selector is trained here (`drafter.causal_head: selector`); drafters with convolutions come from
others, and are drafted with. Names and formulas are those of SGLang 0.5.23 (`srt/models/dflash.py`:
`DFlashGroupedConv`, `CandidateSelector`).

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
no gradient of it: the block learns from its own loss. B starts at zero: a new selector takes the highest marginal.
Evaluation counts hits of the marginals.

    R rows, C block positions, S steps, H hidden, G groups, K candidates, N nodes or predictions, V vocabulary,
    E rank of the selector
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyrie_workers.speculation.protocol import DraftStep
from eyrie_workers.training.numerics import linear

SELECTOR = "candidate_selector."
CANDIDATES = 16
"""K of a new selector."""

_ROWS = 256  # whose logits over the whole vocabulary are held at once


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


class CandidateSelector(nn.Module):
    """The selector in training."""

    def __init__(self, top_k: int, rank: int, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.top_k = min(top_k, vocab_size)
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def losses(self, states_NH: Tensor, head_VH: Tensor, previous_N: Tensor, true_N: Tensor) -> Tensor:
        """[N] cross-entropy of the true token among the candidates.

        states_NH   after the final norm          head_VH  the target's output matrix
        previous_N  token before each proposed one
        """
        with torch.no_grad():
            u, ids = [], []
            for rows_MH, true_M in zip(states_NH.split(_ROWS), true_N.split(_ROWS), strict=True):
                logits_MV = linear(rows_MH, head_VH)
                u_MK, ids_MK = logits_MV.topk(self.top_k, -1)
                absent_M = (ids_MK != true_M[:, None]).all(1)
                u_MK[:, -1] = torch.where(absent_M, logits_MV.gather(1, true_M[:, None])[:, 0], u_MK[:, -1])
                ids_MK[:, -1] = torch.where(absent_M, true_M, ids_MK[:, -1])
                u.append(u_MK)
                ids.append(ids_MK)
            u_NK, ids_NK = torch.cat(u), torch.cat(ids)
        context_NE = self.predecessor_codebook[previous_N] * self.hidden_projection(states_NH)
        scores_NK = u_NK + torch.einsum("ne,nke->nk", context_NE, self.successor_codebook[ids_NK])
        return F.cross_entropy(scores_NK, (ids_NK == true_N[:, None]).to(torch.int8).argmax(1), reduction="none")


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


class Selector:
    def __init__(self, config: SelectorConfig, tensors: Mapping[str, Tensor]) -> None:
        self._config = config
        self._before_VR, self._after_VR = (tensors[f"{SELECTOR}{name}_codebook"] for name in ("predecessor",
                                                                                               "successor"))
        self._project = tensors[f"{SELECTOR}hidden_projection.weight"]

    def steps(self, states_RSH: Tensor, logits_RSV: Tensor) -> "SelectorSteps":
        """For one block: the target's logits are read once."""
        u_RSK, ids_RSK = logits_RSV.topk(min(self._config.top_k, logits_RSV.shape[-1]), -1)
        u_RSK = u_RSK.float() * self._config.output_multiplier
        if self._config.soft_cap is not None:
            u_RSK = (u_RSK / self._config.soft_cap).tanh() * self._config.soft_cap
        return SelectorSteps(u_RSK, ids_RSK, F.linear(states_RSH, self._project), self._before_VR, self._after_VR)


@dataclass(frozen=True)
class SelectorSteps:
    unary_RSK: Tensor
    ids_RSK: Tensor
    hidden_RSE: Tensor
    before_VR: Tensor
    after_VR: Tensor

    def __call__(self, tokens_RN: Tensor, depth: int) -> DraftStep:
        """Logits [R, N, V] of the tokens after nodes of one depth, -inf outside the candidates."""
        context_RNE = self.before_VR[tokens_RN] * self.hidden_RSE[:, depth, None]
        scores_RNK = self.unary_RSK[:, depth, None] + torch.einsum(
            "rne,rke->rnk", context_RNE, self.after_VR[self.ids_RSK[:, depth]])
        logits_RNV = scores_RNK.new_full((*tokens_RN.shape, self.before_VR.shape[0]), -torch.inf)
        index_RNK = self.ids_RSK[:, depth, None].expand_as(scores_RNK)
        return DraftStep(logits_RNV.scatter(-1, index_RNK, scores_RNK), scores_RNK.new_zeros(*tokens_RN.shape, 0))
