"""LiLiCorr's head of a DFlash block (arXiv:2608.20530): the likeliest tokens of all positions are compared at once.

Experimental. Each of the S positions keeps the K tokens with the highest log-probabilities under the marginals. A small
transformer without a mask reads these S * K candidates; from a candidate b of one position to a candidate c of the
next, and from the settled text to a first token, the scores are cosines:

    x_sb      W_t e(b) + W_h h_s + mlp(features of b) + slot_s + rank_b         e the target's embedding
    features  log p, p, log p less the highest, rank / (K - 1), whether it is the first
    a         rms(W_c c_i), c_i the fused features of the last settled position
    f_sb      silu(W_f [y_sb ; a ; y_sb * a]),   y behind the layers and a norm
    score     scale * cos(W_out f_sb, W_in f_{s+1,c})       of the first position: scale * cos(W_a a, W_in f_0c)

A step's distribution is the softmax of the scores from the token chosen before it; the marginals enter by the features
alone. Names and formulas are those of SGLang 0.5.23 (`srt/models/lilicorr.py`, `srt/speculative/lilicorr_utils.py`),
which commits the highest score of each step. With several requests at once it keeps one c of the last batch: after a
request has come or gone, a round may read a neighbour's, or none. That costs accepted tokens and changes no answer.

Training (NVIDIA/Model-Optimizer, `hf_lilicorr.py`, the recipe `base`) adds to the block's loss, at the true tokens up
to the first that is no candidate, and in blocks that lie in the answer as a whole:

    1/4 cross-entropy of the scores after the true token
    1/4 sum_c q(c) max(0, z(true) - z(c)),   q the softmax of the scores, z the target's logits

There they are means over such predictions; here they have the weights of the block's own loss, so that early tokens
count more. The features have no gradient (it would cost two more products with the output matrix); h_s and c_i have.

    R blocks, S slots (steps), K candidates, H hidden, W width of the head, P = S * K, V vocabulary
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from eyrie_workers.drafters.dflash2 import CandidateSteps, among_candidates, likeliest
from eyrie_workers.speculation.protocol import DraftStep
from eyrie_workers.training.objective import Supervision

_CROSS_ENTROPY, _REJECTION = 0.25, 0.25
_NUM_FEATURES = 5
_BLOCKS = 512  # scored at once; where there are more, scores are computed again for their gradient


@dataclass(frozen=True)
class LiLiCorrConfig:
    """The fields of `dflash_config` that begin with `lilicorr_`; by default those of the published recipe."""

    hidden_size: int
    """W; 0: the block's."""

    factor_dim: int
    candidate_topk: int = 8
    num_layers: int = 2
    num_heads: int = 8
    mlp_ratio: float = 2.0
    vector_eps: float = 1e-4
    """Least length by which a vector is divided."""

    logit_scale: float = 8.0

    @classmethod
    def of(cls, own: Mapping[str, Any]) -> "LiLiCorrConfig":
        """From `dflash_config`, without faults."""
        return cls(**{name: own[f"lilicorr_{name}"] for name in cls.__dataclass_fields__})

    def json(self) -> dict[str, Any]:
        return {f"lilicorr_{name}": getattr(self, name) for name in self.__dataclass_fields__}


class _Mlp(nn.Module):
    def __init__(self, width: int, inner: int, out: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(width, inner), nn.Linear(inner, out)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.up_proj(x)))
        return out


class _Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x_RPW: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self._num_heads, -1)).transpose(1, 2) for part in F.linear(
            x_RPW, self.in_proj_weight, self.in_proj_bias).chunk(3, -1))
        out: Tensor = self.out_proj(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))
        return out


class _Layer(nn.Module):
    def __init__(self, config: LiLiCorrConfig, width: int, eps: float) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        self.attn = _Attention(width, config.num_heads)
        self.mlp = _Mlp(width, int(width * config.mlp_ratio), width)

    def forward(self, x_RPW: Tensor, bias: Tensor) -> Tensor:
        x_RPW = x_RPW + self.attn(self.attn_norm(x_RPW), bias)
        return x_RPW + self.mlp(self.mlp_norm(x_RPW))


class LiLiCorrHead(nn.Module):
    def __init__(self, config: LiLiCorrConfig, num_slots: int, hidden_size: int, eps: float) -> None:
        """num_slots: S of the trained block. eps: of the norms."""
        super().__init__()
        width, heads = config.hidden_size or hidden_size, config.num_heads
        self.config, self._num_slots = config, num_slots
        self.token_proj = None if width == hidden_size else nn.Linear(hidden_size, width)
        self.pass_hidden_proj, self.context_proj = nn.Linear(hidden_size, width), nn.Linear(hidden_size, width)
        self.feature_norm, self.feature_mlp = nn.LayerNorm(_NUM_FEATURES), _Mlp(_NUM_FEATURES, width, width)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, num_slots, 1, width))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, config.candidate_topk, width))
        self.relative_slot_bias = nn.Parameter(torch.zeros(heads, 2 * num_slots + 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(heads))
        self.layers = nn.ModuleList(_Layer(config, width, eps) for _ in range(config.num_layers))
        self.output_norm, self.anchor_norm = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head, self.in_head, self.anchor_out_head = (nn.Linear(width, config.factor_dim) for _ in range(3))

    def scores(self, ids_RSK: Tensor, log_p_RSK: Tensor, states_RSH: Tensor, anchor_RH: Tensor,
               embed_VH: Tensor) -> tuple[Tensor, Tensor]:
        """Of the first slot's candidates [R, K], and from each candidate of a slot to each of the next
        [R, S - 1, K, K], in float32 at least. A block may have fewer slots than the trained one."""
        dtype, (num_slots, num_candidates) = self.slot_embedding.dtype, ids_RSK.shape[1:]
        # 1. Candidates: token, state, features, slot and rank.
        embedded = F.embedding(ids_RSK, embed_VH).to(dtype)
        x_RSKW = (embedded if self.token_proj is None else self.token_proj(embedded)) + self.pass_hidden_proj(
            states_RSH.to(dtype)).unsqueeze(2)
        rank = torch.arange(num_candidates, device=ids_RSK.device).to(log_p_RSK.dtype).expand_as(log_p_RSK)
        features = torch.stack([log_p_RSK, log_p_RSK.exp(), log_p_RSK - log_p_RSK[..., :1],
                                rank / max(1, num_candidates - 1), (rank == 0).to(rank.dtype)], -1)
        x_RSKW = x_RSKW + self.feature_mlp(self.feature_norm(features.to(dtype)))
        x_RSKW = x_RSKW + self.slot_embedding[0, :, :num_slots] + self.rank_embedding[0, :, :, :num_candidates]
        # 2. All candidates read one another, with a bias for each distance between slots.
        slot_P = torch.arange(num_slots, device=ids_RSK.device).repeat_interleave(num_candidates)
        distance_PP = slot_P[:, None] - slot_P
        bias = self.relative_slot_bias[:, distance_PP + self._num_slots] + (
            (distance_PP == 0) * self.same_slot_bias[:, None, None])
        x_RPW = x_RSKW.flatten(1, 2)
        for layer in self.layers:
            x_RPW = layer(x_RPW, bias.to(dtype)[None])
        # 3. Unit vectors out of each candidate and into it, given the last settled position.
        y_RSKW = self.output_norm(x_RPW).unflatten(1, (num_slots, num_candidates))
        anchor_RW = self.anchor_norm(self.context_proj(anchor_RH.to(dtype)))
        anchor_RSKW = anchor_RW[:, None, None].expand_as(y_RSKW)
        factors = F.silu(self.factor_input_proj(torch.cat([y_RSKW, anchor_RSKW, y_RSKW * anchor_RSKW], -1)))
        leaving, entering, first = (F.normalize(part, dim=-1, eps=self.config.vector_eps) for part in (
            self.out_head(factors), self.in_head(factors), self.anchor_out_head(anchor_RW)))
        start_RK, pair_RSKK = torch.einsum("rf,rkf->rk", first, entering[:, 0]), (
            leaving[:, :-1] @ entering[:, 1:].transpose(-1, -2))
        wide = torch.promote_types(dtype, torch.float32)
        return self.config.logit_scale * start_RK.to(wide), self.config.logit_scale * pair_RSKK.to(wide)

    def losses(self, states: Sequence[Tensor], true: Sequence[Tensor], anchor_RH: Tensor, head_VH: Tensor,
               embed_VH: Tensor) -> Callable[[Supervision], Tensor]:
        """[N] the two terms of each prediction, once the target's distributions are known.

        states, true  of the steps with roots: [R_s, H] after the final norm, [R_s] the true tokens; R_0 >= R_1 >= ..
        """
        sizes = [of.shape[0] for of in states]
        whole = sizes[-1] if len(sizes) == self._num_slots else 0  # the first roots of every step
        if whole == 0:  # a gradient of 0 for every parameter, as other processes may have one
            nothing = torch.stack([parameter.sum() * 0 for parameter in self.parameters()]).sum()
            return lambda _supervision: nothing.expand(sum(sizes))
        states_RSH, true_RS = (torch.stack([part[:whole] for part in parts], 1) for parts in (states, true))
        top_k = min(self.config.candidate_topk, head_VH.shape[0])
        logits, ids, total = likeliest(states_RSH.flatten(0, 1), head_VH, top_k)
        ids_RSK = ids.unflatten(0, (whole, -1))
        log_p_RSK = (logits - total[:, None]).view(ids_RSK.shape)
        parts = zip(*(of.split(_BLOCKS) for of in (ids_RSK, log_p_RSK, states_RSH, anchor_RH)), strict=True)
        scored = [checkpoint(self.scores, ids_PSK, log_p_PSK, states_PSH, anchor_PH, embed_VH, use_reentrant=False)
                  if whole > _BLOCKS else self.scores(ids_PSK, log_p_PSK, states_PSH, anchor_PH, embed_VH)
                  for ids_PSK, log_p_PSK, states_PSH, anchor_PH in parts]
        start_RK, pair_RSKK = (torch.cat(of) for of in zip(*scored, strict=True))
        is_true_RSK = ids_RSK == true_RS[..., None]
        place_RS = is_true_RSK.to(torch.int8).argmax(-1)
        reached_RS = is_true_RSK.any(-1).to(torch.int8).cumprod(1)  # the true token and all before it are candidates
        from_true = pair_RSKK.gather(2, place_RS[:, :-1, None, None].expand(-1, -1, 1, top_k)).squeeze(2)
        log_q_RSK = torch.cat([start_RK[:, None], from_true], 1).log_softmax(-1)
        starts_S = torch.tensor([sum(sizes[:step]) for step in range(len(sizes))], device=ids.device)
        index_P = (torch.arange(whole, device=ids.device)[:, None] + starts_S).flatten()

        def against(supervision: Supervision) -> Tensor:
            log_p_RSK = supervision.log_probabilities(index_P, ids).view(ids_RSK.shape)
            worse_RSK = (log_p_RSK.gather(-1, place_RS[..., None]) - log_p_RSK).clamp_min(0).to(log_q_RSK.dtype)
            each_RS = (_REJECTION * (log_q_RSK.exp() * worse_RSK).sum(-1)
                       - _CROSS_ENTROPY * log_q_RSK.gather(-1, place_RS[..., None]).squeeze(-1))
            return each_RS.new_zeros(sum(sizes)).index_copy(0, index_P, (each_RS * reached_RS).flatten())

        return against

    def steps(self, states_RSH: Tensor, logits_RSV: Tensor, anchor_RH: Tensor, embed_VH: Tensor) -> CandidateSteps:
        """For one block, from the target's logits."""
        wide = logits_RSV.float()
        log_p_RSK, ids_RSK = wide.topk(min(self.config.candidate_topk, wide.shape[-1]), -1)
        start_RK, pair_RSKK = self.scores(ids_RSK, log_p_RSK - wide.logsumexp(-1, keepdim=True), states_RSH, anchor_RH,
                                          embed_VH)

        def step(tokens_RN: Tensor, depth: int) -> DraftStep:
            if depth == 0:
                scores_RNK = start_RK[:, None].expand(-1, tokens_RN.shape[1], -1)
            else:
                place_RN = (ids_RSK[:, depth - 1, None] == tokens_RN[..., None]).to(torch.int8).argmax(-1)
                scores_RNK = pair_RSKK[:, depth - 1].gather(1, place_RN[..., None].expand(-1, -1, start_RK.shape[-1]))
            return among_candidates(scores_RNK, ids_RSK[:, depth], wide.shape[-1])

        return step
