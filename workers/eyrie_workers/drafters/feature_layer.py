"""One decoder layer over the target's final state and the token after it, in training: EAGLE-1's, and an MTP layer.

    x_i    = state f_i + token e(token i+1)      f the target's state after its final norm; at deeper steps f'
    f'_i+1 = the layer from its attention on, of x_i over x_0 .. x_i               logits of token i+2 = lm_head f'_i+1

Embedding and lm_head are the target's: frozen, not saved. Norms and biases of a family are in its `Projection`s.
EAGLE-3, whose attention alone reads the token, is `drafters.eagle3.drafter`; decoding is in `drafters.layer_proposer`.

    T packed tokens, R roots, H hidden, O outputs, K kv heads, W query heads per kv head, E head size
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eyrie_api.contract.training import TrainSpec
from eyrie_workers.drafters.initialisation import TargetEmbeddings
from eyrie_workers.hidden_states.packed_batch import PackedBatch
from eyrie_workers.targets.config import TargetConfig
from eyrie_workers.targets.operators import Rotary
from eyrie_workers.training.attention import SharedKeys, attend, gather_rows, leading_rows
from eyrie_workers.training.numerics import PostAttention, apply_rotary, linear, normed_linear, rms_norm, round_up_rows
from eyrie_workers.training.objective import Objective, Prediction
from eyrie_workers.training.unroll_plan import UnrollPlan


@dataclass(frozen=True)
class Projection:
    """A matrix [O, H] in the compute dtype; the norm of its input and the bias of its output as stored, if it has them.
    """

    weight: Tensor
    norm: Tensor | None = None
    bias: Tensor | None = None

    def __call__(self, x_TH: Tensor, eps: float) -> Tensor:
        y_TO = (linear(x_TH, self.weight) if self.norm is None
                else normed_linear(x_TH.to(self.norm.dtype), self.norm, self.weight, eps).to(self.norm.dtype))
        return y_TO if self.bias is None else y_TO.to(self.bias.dtype) + self.bias


@dataclass(frozen=True)
class FeatureLayer:
    config: TargetConfig
    dtype: torch.dtype
    """Of the residual stream."""

    state: Projection
    token: Projection
    query: Projection
    key_value: Projection
    post_attention: PostAttention
    final_norm: Tensor | None = None
    """Of f'; None: none."""

    reads_first_token: bool = True
    """Whether position 0 of a text reads the token after it."""

    def states(self, features_TH: Tensor) -> Tensor:
        """The features' share of x: [T, H]."""
        return self.state(features_TH, self.config.rms_eps).to(self.dtype)

    def queries(self, x_TH: Tensor, angles: Tensor) -> Tensor:
        """Rotated q [T, K, W, E]."""
        q_TQ = self.query(x_TH, self.config.rms_eps)
        return apply_rotary(q_TQ.unflatten(-1, (self.config.num_kv_heads, -1, self.config.head_dim)), angles)

    def keys(self, x_TH: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated k, and v, each [T, K, E]."""
        k_TKE, v_TKE = (part.unflatten(-1, (-1, self.config.head_dim))
                        for part in self.key_value(x_TH, self.config.rms_eps).chunk(2, -1))
        return apply_rotary(k_TKE, angles), v_TKE

    def unroll(self, rotary: Rotary, embed_VH: Tensor, documents: PackedBatch, plan: UnrollPlan,
               recompute: bool = False) -> Iterator[Tensor]:
        """f' [R_s, H] of each step with roots, on true tokens; after step 0 from the layer's own f'. Step 0 reads the
        last layer of `documents.aux`. Other positions than roots compute keys and values only."""
        token_TH = self.token(embed_VH.index_select(0, documents.token_ids), self.config.rms_eps).to(self.dtype)
        # 1. Position i pairs with token i+1. The last position of a document has no such token; no root attends to its
        #    key.
        next_TH = torch.cat([token_TH[1:], token_TH[-1:]])
        if not self.reads_first_token:
            next_TH = next_TH.masked_fill(plan.positions.eq(0)[:, None], 0.0)
        x_TH = self.states(documents.aux[:, -1].to(self.dtype)) + next_TH
        shared = SharedKeys(plan, *self.keys(x_TH, rotary.at(plan.positions)))
        own: list[tuple[Tensor, Tensor]] = []  # rotated keys and values of the roots at steps 1 .. s
        x_RH = state_RH = gather_rows(x_TH, plan.roots)
        for step, alive in enumerate(plan.alive):
            if alive == 0:
                return
            roots = plan.roots[:alive]
            angles = rotary.at(plan.positions[roots] + step)
            if step > 0:  # 2. the layer's own state replaces the target's; the token is the true one
                x_RH = self.states(leading_rows(state_RH, alive)) + gather_rows(token_TH, roots + 1 + step)
                own.append(self.keys(x_RH, angles))
            # 3. Attention over the document's keys of step 0 and the root's own, and what follows it.
            attended = attend(self.queries(x_RH, angles), shared, own)
            state_RH = self.post_attention(x_RH, attended.flatten(1), recompute)
            if self.final_norm is not None:
                state_RH = rms_norm(state_RH, self.final_norm, self.config.rms_eps)
            yield state_RH


class FeatureObjective(Objective[Any]):
    """Trains a drafter with a `config` and a `feature_layer(dtype)`; a family adds its plan and its arithmetic."""

    def __init__(self, drafter: Any, embeddings: TargetEmbeddings, spec: TrainSpec, max_positions: int,
                 dtype: torch.dtype) -> None:
        config: TargetConfig = drafter.config
        super().__init__(drafter, config.vocab_size, embeddings.output_head, spec, dtype=dtype)
        self._embed_VH, self._head_VH, self._spec = embeddings.embed, embeddings.lm_head_as(dtype), spec
        self._rotary = Rotary(config.rope, config.head_dim, max_positions + self.steps)

    def predict(self, documents: PackedBatch, plan: UnrollPlan, evaluating: bool) -> Prediction:
        """f' of every root and step."""
        layer: FeatureLayer = self.drafter.feature_layer(self.dtype)
        states = tuple(layer.unroll(self._rotary, self._embed_VH, documents, plan, self._recompute))
        return Prediction(states, self._head_VH,
                          computed=sum(round_up_rows(alive, self.device) for alive in plan.alive if alive))
