"""Decoding with EAGLE-3 drafters: the layer's matrices packed for `drafters.layers.proposer`.

    T rows, A aux layers, H hidden, Q = q + k + v widths, D draft vocabulary, V vocabulary
"""

import torch
from torch import Tensor

from eyrie_workers.drafters.eagle3.model import Eagle3Drafter
from eyrie_workers.drafters.layers.proposer import (
    InferencePostAttention,
    LayerProposer,
    TokenProjection,
    adjacent_rotary_pairs,
    target_ids,
)
from eyrie_workers.targets.operators import Linear, rms_normalise


class _InferenceLayer:
    """`InferenceLayer`: the matrices with norms folded in, in the order a step uses them."""

    def __init__(self, drafter: Eagle3Drafter, embed_VH: Tensor, dtype: torch.dtype) -> None:
        weights, config = drafter.weights(torch.float32), drafter.config
        num_rotated, head_dim = config.num_heads + config.num_kv_heads, config.head_dim
        self._eps = torch.tensor(config.rms_eps, dtype=dtype)
        self._fc_norm = torch.stack(weights.fc_norm).to(dtype) if weights.fc_norm else None
        self._norm_before_fc = weights.input_norm is not None
        self._fc = Linear((weights.fc if weights.input_norm is None else weights.fc * weights.input_norm).to(dtype))
        hidden_qkv = adjacent_rotary_pairs(weights.hidden_qkv * weights.hidden_norm, num_rotated, head_dim)
        embed_qkv = adjacent_rotary_pairs(weights.embed_qkv * weights.input_layernorm, num_rotated, head_dim)
        self._hidden_qkv, self._embed_qkv = Linear(hidden_qkv.to(dtype)), Linear(embed_qkv.to(dtype))
        self._post_attention = InferencePostAttention(weights.post_attention, dtype)
        self._norm = weights.norm.to(dtype) if config.norm_output else None
        self._lm_head = Linear((weights.lm_head * weights.norm).to(dtype))
        self._token_qkv = TokenProjection(embed_VH, self._embed_half, embed_qkv.shape[0])

    def _embed_half(self, embed_TH: Tensor) -> Tensor:
        return self._embed_qkv(rms_normalise(embed_TH, self._eps))

    def fuse(self, aux_TAH: Tensor) -> Tensor:
        """[T, A, H] -> [T, H]"""
        aux_TAH = aux_TAH.to(self._eps.dtype)
        if self._fc_norm is not None:
            aux_TAH = rms_normalise(aux_TAH, self._eps) * self._fc_norm
        concatenated_TC = aux_TAH.flatten(-2)
        return self._fc(rms_normalise(concatenated_TC, self._eps) if self._norm_before_fc else concatenated_TC)

    def enter(self, hidden_TH: Tensor, tokens_T: Tensor) -> tuple[Tensor, Tensor]:
        """The state unchanged [T, H], and q, k, v [T, Q]"""
        return hidden_TH, self._hidden_qkv.add(rms_normalise(hidden_TH, self._eps), self._token_qkv(tokens_T))

    def finish(self, residual_TH: Tensor, attended_TQ: Tensor) -> Tensor:
        """[T, H]"""
        return self._post_attention(residual_TH, attended_TQ)

    def predict(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
        """[T, D] and the state to feed back, [T, H]"""
        normed = rms_normalise(hidden_TH, self._eps)
        return self._lm_head(normed), hidden_TH if self._norm is None else normed * self._norm


class Eagle3Proposer(LayerProposer):
    """An Eagle3Drafter with its target's embedding, for decoding."""

    def __init__(self, drafter: Eagle3Drafter, embed_VH: Tensor) -> None:
        """`embed_VH` is the target's embedding [V, H]; drafting computes in its dtype."""
        with torch.inference_mode():
            layer = _InferenceLayer(drafter, embed_VH, embed_VH.dtype)
            ids = target_ids(drafter.vocabulary, embed_VH.device)
        super().__init__(layer, drafter.config, drafter.config.aux_layers, embed_VH.dtype, ids)
