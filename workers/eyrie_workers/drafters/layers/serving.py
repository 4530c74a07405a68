"""Drafters of one decoder layer as the engine drives them: settled pairs in, draft trees out (`speculation.protocol`).

`LayerServer` is that layer with a KV cache between its two halves; which layer it is, a `ServedLayer` says: EAGLE-3's
here, EAGLE-1's in `drafters.eagle1`. A settled pair at position i leaves one key and one value and nothing else; of the
pairs taken in by one `extend`, only the last runs attention, MLP and output, because only from there does drafting go
on. A draft step adds scratch keys behind the settled ones; the next `extend` writes over them.

A draft step is many small operations, so what can be done once is done once, in the `ServedLayer`: norm weights are
folded into the matrices that follow them, rotary pairs are laid side by side so that turning them is one complex
product, products are packed (`targets.linear`), and where the vocabulary is small enough the token's share of the
layer's input is a table. The arithmetic is that of training up to rounding: tests/workers/drafters hold the two faces
together.

    B rows, T pairs, A aux layers, H hidden, Q = q + k + v widths, L keys, M scratch keys, N nodes of this step,
    K kv heads, W query heads per kv head, E head size, D draft vocabulary
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from eyrie_api.v1alpha1.draft_tree import DraftTreeShape
from eyrie_workers.drafters.eagle3.model import Eagle3Config, Eagle3Drafter
from eyrie_workers.speculation.noise import RowNoise
from eyrie_workers.speculation.protocol import CommittedTokens, DrafterState, DraftStep, DraftTree
from eyrie_workers.speculation.tree import BranchKeys, build_draft_tree
from eyrie_workers.targets.config import TargetConfig
from eyrie_workers.targets.linear import Linear, rms_normalise

# The token's half as a table: [V, Q]. Beyond this size (large vocabularies) it is computed for each token instead.
MAX_TABLE_BYTES = 64 * 2**20


@dataclass
class LayerState:
    """Keys, values and the last predictions of every row.

    keys, values [rows, max_length + scratch, K, E]   logits [rows, D]   hidden [rows, H]: of each row's last pair
    """

    keys: Tensor
    values: Tensor
    logits: Tensor
    hidden: Tensor
    settled: list[int] = field(default_factory=list)
    """Pairs each row holds."""

    scratch: list[int] = field(default_factory=list)
    """Depth of each scratch key of the round under way."""


class ServedLayer(Protocol):
    """One decoder layer, cut at its attention. q and k come with the members of each rotary pair side by side
    (`pairs_together`)."""

    def fuse(self, aux_TAH: Tensor) -> Tensor:
        """The target's states -> [T, H], the state a pair begins from."""
        ...

    def enter(self, hidden_TH: Tensor, tokens_T: Tensor) -> tuple[Tensor, Tensor]:
        """A state and the token after it -> the residual stream [T, H], and q, k, v [T, Q]."""
        ...

    def finish(self, residual_TH: Tensor, attended_TQ: Tensor) -> Tensor:
        """What follows attention: [T, H]"""
        ...

    def predict(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [T, D], and the state to feed back, [T, H]"""
        ...


class _Eagle3Layer:
    """The layer's matrices with norms folded in, in the order a step uses them."""

    def __init__(self, drafter: Eagle3Drafter, embed_VH: Tensor, dtype: torch.dtype) -> None:
        weights, config = drafter.weights(torch.float32), drafter.config
        num_turned, head = config.num_heads + config.num_kv_heads, config.head_dim
        self._eps = torch.tensor(config.rms_eps, dtype=dtype)
        self._fc_norm = torch.stack(weights.fc_norm).to(dtype) if weights.fc_norm else None
        self._joined_norm = weights.input_norm is not None
        self._fc = Linear((weights.fc if weights.input_norm is None else weights.fc * weights.input_norm).to(dtype))
        hidden_qkv = pairs_together(weights.hidden_qkv * weights.hidden_norm, num_turned, head)
        embed_qkv = pairs_together(weights.embed_qkv * weights.input_layernorm, num_turned, head)
        self._hidden_qkv, self._embed_qkv = Linear(hidden_qkv.to(dtype)), Linear(embed_qkv.to(dtype))
        self._out, self._down = Linear(weights.out.to(dtype)), Linear(weights.down.to(dtype))
        self._gate_up = Linear((weights.gate_up * weights.post_attention_layernorm).to(dtype))
        self._norm = weights.norm.to(dtype) if config.norm_output else None
        self._lm_head = Linear((weights.lm_head * weights.norm).to(dtype))
        self._embed_VH = embed_VH
        table_bytes = embed_VH.shape[0] * embed_qkv.shape[0] * dtype.itemsize
        self._table_VQ = self._embed_half(embed_VH) if table_bytes <= MAX_TABLE_BYTES else None

    def _embed_half(self, embed_TH: Tensor) -> Tensor:
        return self._embed_qkv(rms_normalise(embed_TH, self._eps))

    def fuse(self, aux_TAH: Tensor) -> Tensor:
        """[T, A, H] -> [T, H]"""
        aux_TAH = aux_TAH.to(self._eps.dtype)
        if self._fc_norm is not None:
            aux_TAH = rms_normalise(aux_TAH, self._eps) * self._fc_norm
        joined_TC = aux_TAH.flatten(-2)
        return self._fc(rms_normalise(joined_TC, self._eps) if self._joined_norm else joined_TC)

    def enter(self, hidden_TH: Tensor, tokens_T: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] as it came, and [T, Q]"""
        if self._table_VQ is not None:
            token_half = self._table_VQ.index_select(0, tokens_T)
        else:
            token_half = self._embed_half(self._embed_VH.index_select(0, tokens_T))
        return hidden_TH, self._hidden_qkv.add(rms_normalise(hidden_TH, self._eps), token_half)

    def finish(self, residual_TH: Tensor, attended_TQ: Tensor) -> Tensor:
        """[T, H]"""
        hidden_TH = self._out.add(attended_TQ, residual_TH)
        gate, up = self._gate_up(rms_normalise(hidden_TH, self._eps)).chunk(2, -1)
        return self._down.add(F.silu(gate).mul_(up), hidden_TH)

    def predict(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
        """[T, D] and the state to feed back, [T, H]"""
        normed = rms_normalise(hidden_TH, self._eps)
        return self._lm_head(normed), hidden_TH if self._norm is None else normed * self._norm


def pairs_together(weight_QH: Tensor, num_turned: int, head: int) -> Tensor:
    """Rows of q and k with the two members of each rotary pair made neighbours; q.k is blind to a common order."""
    turned = weight_QH[: num_turned * head].unflatten(0, (num_turned, 2, head // 2)).transpose(1, 2).flatten(0, 2)
    return torch.cat([turned, weight_QH[num_turned * head:]])


class LayerServer:
    """`speculation.protocol.Drafter` over one layer."""

    def __init__(self, layer: ServedLayer, config: Eagle3Config | TargetConfig, aux_layers: tuple[int, ...],
                 dtype: torch.dtype, draft_ids_D: Tensor | None = None) -> None:
        """`layer` as `config` shapes it.

        aux_layers   `hidden_states` indices of the states `fuse` is given.
        dtype        what drafting runs in.
        draft_ids_D  [D] int64 target id of each draft id; None when both vocabularies are the same.
        """
        self.branch_keys: BranchKeys = "ancestors"
        self._config, self._aux_layers, self._dtype = config, aux_layers, dtype
        self._served, self._draft_ids_D = layer, draft_ids_D
        self._frequencies = torch.tensor(config.rope.inverse_frequencies(config.head_dim), dtype=torch.float64)
        self._turns = torch.empty(0, 1, config.head_dim // 2, dtype=torch.complex64)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """`hidden_states` indices the drafter was trained on."""
        return self._aux_layers

    @property
    def max_length(self) -> int:
        """Longest text it can follow."""
        return self._config.max_position_embeddings

    def new_state(self, num_rows: int, max_length: int, max_shape: DraftTreeShape) -> LayerState:
        """Caches for `num_rows` rows of `max_length` pairs, with room for the scratch keys of `max_shape`."""
        config = self._config
        num_outputs = config.vocab_size if self._draft_ids_D is None else self._draft_ids_D.numel()
        places = max_length + max_shape.num_steps * max_shape.top_k + 1
        if self._turns.shape[0] < places:
            angles = torch.arange(places, dtype=torch.float64)[:, None, None] * self._frequencies
            self._turns = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
        shape = (num_rows, places, config.num_kv_heads, config.head_dim)
        return LayerState(
            keys=torch.zeros(shape, dtype=self._dtype), values=torch.zeros(shape, dtype=self._dtype),
            logits=torch.zeros(num_rows, num_outputs, dtype=self._dtype),
            hidden=torch.zeros(num_rows, config.hidden_size, dtype=self._dtype), settled=[0] * num_rows)

    def admit(self, state: DrafterState, row: int, prompt: Sequence[int]) -> None:
        """Forget the row. The prompt itself is not needed: its pairs follow."""
        assert isinstance(state, LayerState)
        state.settled[row] = 0

    @torch.inference_mode()
    def extend(self, state: DrafterState, pairs: CommittedTokens) -> None:
        """Write keys and values of the pairs; predict from the last pair of each row."""
        assert isinstance(state, LayerState)
        num_rows, num_pairs = pairs.tokens.shape
        fused_TH = self._served.fuse(pairs.aux.flatten(0, 1))
        # Padding is written beyond a row's end: there nobody reads before the next extend has written.
        places = (pairs.starts[:, None] + torch.arange(num_pairs)).clamp_(max=state.keys.shape[1] - 1)
        residual_TH, qkv_TQ = self._served.enter(fused_TH, pairs.tokens.flatten())
        q, k, v = self._heads(qkv_TQ, places)
        rows = pairs.rows.tolist()
        _write(state, rows, places, k, v)
        for row, length in zip(rows, (pairs.starts + pairs.lengths).tolist(), strict=True):
            state.settled[row] = length
        last_B = torch.arange(num_rows) * num_pairs + pairs.lengths - 1
        q_last = q.flatten(0, 1).index_select(0, last_B).unsqueeze(1)
        step = self._layer(state, rows, residual_TH.index_select(0, last_B), q_last, None, 0)
        state.logits.index_copy_(0, pairs.rows, step.logits.flatten(0, 1))
        state.hidden.index_copy_(0, pairs.rows, step.hidden.flatten(0, 1))

    @torch.inference_mode()
    def propose(self, state: DrafterState, rows: Tensor, shape: DraftTreeShape,
                noise: RowNoise | None = None) -> DraftTree:
        """Grow one tree per row from the predictions `extend` left."""
        assert isinstance(state, LayerState)
        own, row_list = state, rows.tolist()
        first = DraftStep(state.logits.index_select(0, rows)[:, None], state.hidden.index_select(0, rows)[:, None])

        def step(tokens: Tensor, hidden: Tensor, mask: Tensor, depth: int) -> DraftStep:
            return self._step(own, row_list, tokens, hidden, mask, depth)

        return build_draft_tree(first, step, shape, self._draft_ids_D, noise, self.branch_keys)

    def _step(self, state: LayerState, rows: list[int], tokens_BN: Tensor, hidden_BNH: Tensor, mask_BNM: Tensor,
              depth: int) -> DraftStep:
        """`protocol.StepFunction` of these rows."""
        num_nodes, num_scratch = tokens_BN.shape[1], mask_BNM.shape[2]
        state.scratch[num_scratch - num_nodes:] = [depth] * num_nodes
        if len(rows) == 1 and num_scratch == depth and self._dtype == torch.float32:  # a chain so far
            return self._lone_step(state, rows[0], tokens_BN, hidden_BNH, depth)
        settled_B1 = torch.tensor([[state.settled[row]] for row in rows])
        positions_BN = (settled_B1 + (depth - 1)).expand(-1, num_nodes)
        residual_TH, qkv_TQ = self._served.enter(hidden_BNH.flatten(0, 1), tokens_BN.flatten())
        q, k, v = self._heads(qkv_TQ, positions_BN)
        _write(state, rows, settled_B1 + torch.arange(num_scratch - num_nodes, num_scratch), k, v)
        return self._layer(state, rows, residual_TH, q, mask_BNM, depth)

    def _lone_step(self, state: LayerState, row: int, tokens_11: Tensor, hidden_11H: Tensor, depth: int) -> DraftStep:
        """`_step` for one node of one row, the common case on one machine: the same arithmetic in fewer calls.

        Such a step is bound by the number of its calls, not by their work; positions are plain numbers here, so that
        heads are turned, written and read through views.
        """
        config, place = self._config, state.settled[row] + depth - 1
        num_turned = config.num_heads + config.num_kv_heads
        residual_1H, qkv_1Q = self._served.enter(hidden_11H[0], tokens_11[0])
        heads = qkv_1Q.view(-1, config.head_dim)
        turned, keys, values = heads[:num_turned], state.keys[row], state.values[row]
        torch.view_as_complex(turned.view(num_turned, -1, 2)).mul_(self._turns[place])
        keys[place], values[place] = turned[config.num_heads:], heads[num_turned:]
        first = 0 if config.sliding_window is None else max(0, place + 1 - config.sliding_window)
        attended = F.scaled_dot_product_attention(
            turned[: config.num_heads].view(1, config.num_kv_heads, -1, config.head_dim),
            keys[first: place + 1].transpose(0, 1)[None], values[first: place + 1].transpose(0, 1)[None])
        logits_1D, hidden_1H = self._served.predict(self._served.finish(residual_1H, attended.view(1, -1)))
        return DraftStep(logits_1D[None], hidden_1H[None])

    def _heads(self, qkv_TQ: Tensor, positions_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q [B, N, K, W, E] and k [B, N, K, E], and v [B, N, K, E]; T = B * N."""
        config, (rows, nodes) = self._config, positions_BN.shape
        heads = qkv_TQ.view(rows * nodes, -1, config.head_dim)
        num_turned = config.num_heads + config.num_kv_heads
        # Half-precision numbers have no complex kind: such heads are turned in float32.
        turned = heads[:, :num_turned].float()
        torch.view_as_complex(turned.unflatten(-1, (-1, 2))).mul_(self._turns.index_select(0, positions_BN.flatten()))
        turned = turned.to(self._dtype)
        q = turned[:, : config.num_heads].view(rows, nodes, config.num_kv_heads, -1, config.head_dim)
        k = turned[:, config.num_heads:].view(rows, nodes, config.num_kv_heads, config.head_dim)
        v = heads[:, num_turned:].view(rows, nodes, config.num_kv_heads, config.head_dim)
        return q, k, v

    def _layer(self, state: LayerState, rows: list[int], residual_TH: Tensor, q_BNKWE: Tensor,
               mask_BNM: Tensor | None, depth: int) -> DraftStep:
        """Attention over settled and scratch keys, then the rest of the layer."""
        num_rows, num_nodes, kv_heads, per_kv, head = q_BNKWE.shape
        keys, values, visible = _seen(state, rows, mask_BNM, depth, self._config.sliding_window)
        q = q_BNKWE.permute(0, 2, 3, 1, 4).reshape(num_rows, kv_heads, per_kv * num_nodes, head)
        if visible is not None:
            visible = visible[:, None, None].expand(-1, 1, per_kv, -1, -1).flatten(2, 3)
        attended = F.scaled_dot_product_attention(q, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=visible)
        back = attended.view(num_rows, kv_heads, per_kv, num_nodes, head).permute(0, 3, 1, 2, 4)
        hidden_TH = self._served.finish(residual_TH, back.reshape(num_rows * num_nodes, -1))
        logits_TD, hidden_TH = self._served.predict(hidden_TH)
        return DraftStep(logits_TD.view(num_rows, num_nodes, -1), hidden_TH.view(num_rows, num_nodes, -1))


class Eagle3Server(LayerServer):
    """One loaded Eagle3Drafter over its target's embedding."""

    def __init__(self, drafter: Eagle3Drafter, embed_VH: Tensor) -> None:
        """`embed_VH` is the target's embedding [V, H]; its dtype is the dtype drafting runs in."""
        with torch.inference_mode():
            layer, vocabulary = _Eagle3Layer(drafter, embed_VH, embed_VH.dtype), drafter.vocabulary
            ids = None if vocabulary.size == vocabulary.vocab_size else vocabulary.ids.to(embed_VH.device)
        super().__init__(layer, drafter.config, drafter.config.aux_layers, embed_VH.dtype, ids)


def _write(state: LayerState, rows: list[int], places_BN: Tensor, k_BNKE: Tensor, v_BNKE: Tensor) -> None:
    if len(rows) == 1:  # one request is the common case on one machine: a slice, not a scatter
        first = int(places_BN[0, 0])
        stop = first + min(places_BN.shape[1], state.keys.shape[1] - first)
        state.keys[rows[0], first:stop] = k_BNKE[0, : stop - first]
        state.values[rows[0], first:stop] = v_BNKE[0, : stop - first]
        return
    index = torch.tensor(rows)[:, None]
    state.keys[index, places_BN] = k_BNKE
    state.values[index, places_BN] = v_BNKE


def _seen(state: LayerState, rows: list[int], mask_BNM: Tensor | None, depth: int,
          window: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values [B, L, K, E] of the rows, and which a node of `depth` sees: [B, N, L] bool, None when it is all.

    A node of depth d stands at position settled + d - 1 (d = 0: the last settled pair itself), so of `window` keys it
    sees the settled ones from settled + d - window on, and those scratch keys that are less than `window` depths up.
    """
    settled = [state.settled[row] for row in rows]
    num_nodes, num_scratch = (1, 0) if mask_BNM is None else mask_BNM.shape[1:]
    length = max(settled) + num_scratch
    hidden_before = 0 if window is None else depth - window  # relative to the settled pairs of a row
    if mask_BNM is not None and window is not None and depth > window:
        mask_BNM = mask_BNM & (torch.tensor(state.scratch[:num_scratch]) > depth - window)
    if len(rows) == 1:
        first = 0 if window is None else min(max(0, settled[0] + hidden_before), length)
        if mask_BNM is None or num_scratch == depth:  # a chain sees everything before it, as far as its window goes
            keys, values = (cache[rows[0]: rows[0] + 1, first:length] for cache in (state.keys, state.values))
            return keys, values, None
        first = min(first, settled[0])
        keys, values = (cache[rows[0]: rows[0] + 1, first:length] for cache in (state.keys, state.values))
        return keys, values, torch.cat([mask_BNM.new_ones(1, num_nodes, settled[0] - first), mask_BNM], 2)
    index = torch.tensor(rows)
    keys, values = (cache[:, :length].index_select(0, index) for cache in (state.keys, state.values))
    settled_B1, places_L = torch.tensor(settled)[:, None], torch.arange(length)
    visible_BL = places_L < settled_B1
    if window is not None:
        visible_BL &= places_L >= settled_B1 + hidden_before
    visible = visible_BL[:, None].repeat(1, num_nodes, 1)
    if mask_BNM is not None:
        places = (settled_B1 + torch.arange(num_scratch))[:, None].expand(-1, num_nodes, -1)
        visible.scatter_(2, places, mask_BNM)
    return keys, values, visible
