"""Decoding with drafters of one decoder layer: settled pairs in, draft trees out (`speculation.protocol`).

`LayerProposer` runs the layer with a KV cache; a subclass has the weights: EAGLE-3's is in `drafters.eagle3.family`,
EAGLE-1's in `drafters.eagle1`. A settled pair at position i leaves one key and one value.
Of the pairs of one `extend`, only the last runs attention, MLP and output, because drafting continues from there only.
A draft step appends scratch keys after the settled ones; the next `extend` overwrites them.
Caches and the table of rotations grow with the longest text. With a window only its keys are gathered and masked.

A draft step is many small operations, so the constructor precomputes what it can: norm weights are folded into the
matrices that follow them, the two elements of each rotary pair are adjacent so that a rotation is one complex product,
matrices are packed (`Linear`), and where the vocabulary is small enough the token's share of the layer's input
is a table. The result equals that of training up to rounding; tests/workers/drafters compare the two.

    B rows, T pairs, A aux layers, H hidden, Q = q + k + v widths, L keys, M scratch keys, N nodes of this step,
    K kv heads, W query heads per kv head, E head size, D draft vocabulary
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_workers.drafters.kv_cache import DrafterKVCache, LayerConfig, RowLengths, attend_rows
from eyrie_workers.speculation.cache import INITIAL_POSITIONS
from eyrie_workers.speculation.noise import RowNoise
from eyrie_workers.speculation.protocol import CommittedTokens, DrafterState, DraftStep, DraftTree
from eyrie_workers.speculation.tree import BranchKeys, build_draft_tree
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.model import pairs_together
from eyrie_workers.targets.operators import Linear, rms_normalise
from eyrie_workers.training.numerics import PostAttention

# Largest table [V, Q] of a `token_projection`, on every device. For larger vocabularies the product is computed for
# each token instead: the table of a 128k vocabulary would take more memory than the drafter.
MAX_TABLE_BYTES = 64 * 2**20


@dataclass
class LayerState:
    """KV cache and last predictions of every row.

    logits [rows, D]   hidden [rows, H]: of each row's last pair
    """

    cache: DrafterKVCache
    logits: Tensor
    hidden: Tensor
    scratch: list[int] = field(default_factory=list)
    """Depth of each scratch key of the current round."""


def token_projection(embed_VH: Tensor, project: Callable[[Tensor], Tensor], width: int) -> Callable[[Tensor], Tensor]:
    """[T] token ids -> [T, width]: `project` of their embeddings [T, H], which takes each row by itself. Computed once
    for the whole vocabulary where the table is small enough."""
    if embed_VH.shape[0] * width * embed_VH.dtype.itemsize <= MAX_TABLE_BYTES:
        table_VQ = project(embed_VH)
        return lambda tokens_T: table_VQ.index_select(0, tokens_T)
    return lambda tokens_T: project(embed_VH.index_select(0, tokens_T))


def target_ids(vocabulary: DraftVocabulary, device: torch.device) -> Tensor | None:
    """[D] target id of each draft id; None when both vocabularies are the same."""
    return None if vocabulary.size == vocabulary.vocab_size else vocabulary.ids.to(device)


class LayerProposer(ABC):
    """`speculation.protocol.Drafter` over one decoder layer, split at its attention; a family adds what is before it
    and what predicts. The constructor of a family runs in `torch.inference_mode`."""

    def __init__(self, config: LayerConfig, aux_layers: tuple[int, ...], dtype: torch.dtype, weights: PostAttention,
                 draft_ids_D: Tensor | None = None) -> None:
        """
        aux_layers   `hidden_states` indices of the states passed to `fuse`.
        dtype        of the products.
        weights      of the layer after its attention, in float32.
        draft_ids_D  [D] int64 target id of each draft id; None when both vocabularies are the same.
        """
        self.branch_keys: BranchKeys = "ancestors"
        self.aux_layers, self.max_length = aux_layers, config.max_position_embeddings
        self._config, self._dtype, self._draft_ids_D = config, dtype, draft_ids_D
        self._out, self._down = Linear(weights.out.to(dtype)), Linear(weights.down.to(dtype))
        self._gate_up = Linear((weights.gate_up * weights.norm).to(dtype))
        self._eps = torch.tensor(weights.rms_eps, dtype=dtype)
        self._frequencies = torch.tensor(config.rope.inverse_frequencies(config.head_dim), dtype=torch.float64)
        self._rotations = self._rotations_up_to(INITIAL_POSITIONS)

    @abstractmethod
    def fuse(self, aux_TAH: Tensor) -> Tensor:
        """The target's states -> [T, H], the input state of a pair."""

    @abstractmethod
    def enter(self, hidden_TH: Tensor, tokens_T: Tensor) -> tuple[Tensor, Tensor]:
        """A state and the token after it -> the residual stream [T, H], and q, k, v [T, Q], with the elements of each
        rotary pair of q and k adjacent (`adjacent_pairs`)."""

    @abstractmethod
    def predict(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [T, D], and the state to feed back, [T, H]"""

    def finish(self, residual_TH: Tensor, attended_TQ: Tensor) -> Tensor:
        """The part of the layer after attention: [T, H] and [T, q] -> [T, H]"""
        hidden_TH = self._out.add(attended_TQ, residual_TH)
        gate, up = self._gate_up(rms_normalise(hidden_TH, self._eps)).chunk(2, -1)
        return self._down.add(F.silu(gate).mul_(up), hidden_TH)

    def adjacent_pairs(self, qkv_QH: Tensor) -> Tensor:
        """Rows of a joined q, k, v matrix with the two elements of each rotary pair of q and k adjacent. Attention
        scores do not change: q and k are permuted alike."""
        config = self._config
        rotated = (config.num_heads + config.num_kv_heads) * config.head_dim
        return torch.cat([pairs_together(qkv_QH[:rotated], config.head_dim), qkv_QH[rotated:]])

    def _rotations_up_to(self, length: int) -> Tensor:
        """[L, 1, E / 2] exp(i * position * frequency)"""
        angles = torch.arange(length, dtype=torch.float64)[:, None, None] * self._frequencies
        return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)

    def new_state(self, num_rows: int) -> LayerState:
        config = self._config
        num_outputs = config.vocab_size if self._draft_ids_D is None else self._draft_ids_D.numel()
        return LayerState(DrafterKVCache(config, 1, num_rows, self._dtype),
                          logits=torch.zeros(num_rows, num_outputs, dtype=self._dtype),
                          hidden=torch.zeros(num_rows, config.hidden_size, dtype=self._dtype))

    def _reserve(self, state: LayerState, length: int) -> None:
        state.cache.reserve(length)
        if self._rotations.shape[0] < state.cache.data.shape[2]:
            self._rotations = self._rotations_up_to(state.cache.data.shape[2])

    def admit(self, state: DrafterState, row: int, prompt: Sequence[int]) -> None:
        assert isinstance(state, LayerState)
        state.cache.settled[row] = 0

    @torch.inference_mode()
    def extend(self, state: DrafterState, pairs: CommittedTokens) -> None:
        """Write keys and values of the pairs; predict from the last pair of each row."""
        assert isinstance(state, LayerState)
        indices, num_pairs = pairs.indices(), pairs.aux.shape[1]
        self._reserve(state, max(pairs.starts) + num_pairs)
        # 1. q, k and v of all pairs. The rest of the layer runs for each row's last pair alone.
        fused_TH = self.fuse(pairs.aux.flatten(0, 1))
        residual_TH, qkv_TQ = self.enter(fused_TH, indices.tokens.flatten())
        before = RowLengths(pairs.rows, pairs.starts, indices.rows, indices.starts[:, None])
        q, kv = self._heads(qkv_TQ, before.lengths_B1 + torch.arange(num_pairs))
        # 2. Keys and values. Padding is written after a row's end, where every index is overwritten by an extend before
        #    it is read.
        state.cache.write(0, before, kv)
        for row, length in zip(pairs.rows, pairs.ends, strict=True):
            state.cache.settled[row] = length
        # 3. The prediction from which drafting continues.
        after = RowLengths(pairs.rows, pairs.ends, indices.rows, indices.ends[:, None])
        q_last = q.flatten(0, 1).index_select(0, indices.last).unsqueeze(1)
        step = self._attend(state, after, residual_TH.index_select(0, indices.last), q_last, None, 0)
        state.logits.index_copy_(0, indices.rows, step.logits.flatten(0, 1))
        state.hidden.index_copy_(0, indices.rows, step.hidden.flatten(0, 1))

    @torch.inference_mode()
    def propose(self, state: DrafterState, rows: Sequence[int], shape: DraftTreeShape,
                noise: RowNoise | None = None) -> DraftTree:
        """Grow one tree per row from the predictions `extend` left."""
        assert isinstance(state, LayerState)
        own, chosen = state, RowLengths.of(rows, [state.cache.settled[row] for row in rows])
        # Scratch keys of the whole round: at most top_k nodes at each step.
        self._reserve(state, max(chosen.lengths) + shape.num_steps * shape.top_k)
        first = DraftStep(state.logits.index_select(0, chosen.rows_B)[:, None],
                          state.hidden.index_select(0, chosen.rows_B)[:, None])

        def step(tokens: Tensor, hidden: Tensor, mask: Tensor, depth: int) -> DraftStep:
            return self._step(own, chosen, tokens, hidden, mask, depth)

        return build_draft_tree(first, step, shape, self._draft_ids_D, noise, self.branch_keys)

    def _step(self, state: LayerState, chosen: RowLengths, tokens_BN: Tensor, hidden_BNH: Tensor, mask_BNM: Tensor,
              depth: int) -> DraftStep:
        num_nodes, num_scratch = tokens_BN.shape[1], mask_BNM.shape[2]
        state.scratch[num_scratch - num_nodes:] = [depth] * num_nodes
        if len(chosen.rows) == 1 and num_scratch == depth and self._dtype == torch.float32:  # one node at every depth
            return self._chain_step(state, chosen.rows[0], tokens_BN, hidden_BNH, depth)
        positions_BN = (chosen.lengths_B1 + (depth - 1)).expand(-1, num_nodes)
        residual_TH, qkv_TQ = self.enter(hidden_BNH.flatten(0, 1), tokens_BN.flatten())
        q, kv = self._heads(qkv_TQ, positions_BN)
        state.cache.write(0, chosen, kv, num_scratch - num_nodes)
        return self._attend(state, chosen, residual_TH, q, mask_BNM, depth)

    def _chain_step(self, state: LayerState, row: int, tokens_11: Tensor, hidden_11H: Tensor, depth: int) -> DraftStep:
        """`_step` for a chain of one row, the common case on one machine: the same arithmetic in fewer calls.

        Such a step is bound by the number of operations, not by their work. Positions are Python integers here, so that
        heads are rotated, written and read through views.
        """
        config, index = self._config, state.cache.settled[row] + depth - 1
        num_rotated = config.num_heads + config.num_kv_heads
        residual_1H, qkv_1Q = self.enter(hidden_11H[0], tokens_11[0])
        heads = qkv_1Q.view(-1, config.head_dim)
        cached = state.cache.data[0, row]
        torch.view_as_complex(heads[:num_rotated].view(num_rotated, -1, 2)).mul_(self._rotations[index])
        cached[index] = heads[config.num_heads:]
        first = 0 if config.sliding_window is None else max(0, index + 1 - config.sliding_window)
        keys, values = cached[first: index + 1].transpose(0, 1)[None].chunk(2, 1)
        attended = F.scaled_dot_product_attention(
            heads[: config.num_heads].view(1, config.num_kv_heads, -1, config.head_dim), keys, values)
        logits_1D, hidden_1H = self.predict(self.finish(residual_1H, attended.reshape(1, -1)))
        return DraftStep(logits_1D[None], hidden_1H[None])

    def _heads(self, qkv_TQ: Tensor, positions_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated q [B, N, K, W, E], and rotated k, then v [B, N, 2 K, E]; T = B * N. Overwrites `qkv_TQ`."""
        config, (rows, nodes) = self._config, positions_BN.shape
        heads = qkv_TQ.view(rows * nodes, -1, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        # There are no half-precision complex products: such heads are rotated in float32.
        rotated = heads[:, :num_rotated].float()
        rotations = self._rotations.index_select(0, positions_BN.flatten())
        torch.view_as_complex(rotated.unflatten(-1, (-1, 2))).mul_(rotations)
        if rotated.dtype != heads.dtype:  # else it is a view of them
            heads[:, :num_rotated] = rotated
        q = heads[:, : config.num_heads].view(rows, nodes, config.num_kv_heads, -1, config.head_dim)
        return q, heads[:, config.num_heads:].view(rows, nodes, -1, config.head_dim)

    def _attend(self, state: LayerState, chosen: RowLengths, residual_TH: Tensor, q_BNKWE: Tensor,
               mask_BNM: Tensor | None, depth: int) -> DraftStep:
        """Attention over settled and scratch keys, then the rest of the layer."""
        num_rows, num_nodes, kv_heads, per_kv, head = q_BNKWE.shape
        window = self._config.sliding_window
        cached, visible = _visible_keys(state, chosen, mask_BNM, depth, window)
        keys, values = cached.chunk(2, 2)
        q = q_BNKWE.permute(0, 2, 3, 1, 4).reshape(num_rows, kv_heads, per_kv * num_nodes, head)
        if visible is not None:
            visible = visible[:, None, None].expand(-1, 1, per_kv, -1, -1).flatten(2, 3)
        if window is None:
            attended = attend_rows(q, keys, values, visible, chosen)
        else:
            attended = F.scaled_dot_product_attention(q, keys.transpose(1, 2), values.transpose(1, 2),
                                                      attn_mask=visible)
        back = attended.view(num_rows, kv_heads, per_kv, num_nodes, head).permute(0, 3, 1, 2, 4)
        hidden_TH = self.finish(residual_TH, back.reshape(num_rows * num_nodes, -1))
        logits_TD, hidden_TH = self.predict(hidden_TH)
        return DraftStep(logits_TD.view(num_rows, num_nodes, -1), hidden_TH.view(num_rows, num_nodes, -1))


def _visible_keys(state: LayerState, chosen: RowLengths, mask_BNM: Tensor | None, depth: int,
                  window: int | None) -> tuple[Tensor, Tensor | None]:
    """Keys and values, and which of them a node of `depth` attends to: [B, N, L] bool, or None for all.

    With a window they are those of the chosen rows, [B, L, 2 K, E]; without, of all rows of the cache, for
    `attend_rows`.

    A node of depth d has position settled + d - 1 (d = 0: the last settled pair itself). With a window it attends to
    the settled keys from settled + d - window on, and to the scratch keys less than `window` depths above it. Keys
    before the window are not read: L is then at most window + M, however long the text is.
    """
    num_nodes, num_scratch = (1, 0) if mask_BNM is None else mask_BNM.shape[1:]
    if mask_BNM is not None and window is not None and depth > window:
        # Scratch keys are in order of depth: those outside the window come first.
        num_outside = sum(above <= depth - window for above in state.scratch[:num_scratch])
        mask_BNM = mask_BNM & (torch.arange(num_scratch) >= num_outside)
    # The first settled key that a node sees, and the number of keys from there to the last scratch key.
    firsts = [0 if window is None else min(max(0, length + depth - window), length) for length in chosen.lengths]
    num_keys = max(length - first for length, first in zip(chosen.lengths, firsts, strict=True)) + num_scratch
    if len(chosen.rows) == 1:
        row, first, stop = chosen.rows[0], firsts[0], chosen.lengths[0] + num_scratch
        if mask_BNM is not None and num_scratch == depth:  # in a chain every earlier key is an ancestor
            mask_BNM = None
            first = max(first, stop - window) if window is not None else first
        cached = state.cache.data[0, slice(None) if window is None else slice(row, row + 1), first:stop]
        if mask_BNM is not None:
            mask_BNM = torch.cat([mask_BNM.new_ones(1, num_nodes, chosen.lengths[0] - first), mask_BNM], 2)
        return cached, mask_BNM
    if window is None:
        first_B1, cached = torch.zeros_like(chosen.lengths_B1), state.cache.data[0, :, :num_keys]
    else:
        first_B1 = torch.minimum((chosen.lengths_B1 + (depth - window)).clamp_(min=0), chosen.lengths_B1)
        cached = state.cache.data[0, chosen.rows_B[:, None], first_B1 + torch.arange(num_keys)]
    num_settled_B1 = chosen.lengths_B1 - first_B1
    visible = (torch.arange(num_keys) < num_settled_B1)[:, None].repeat(1, num_nodes, 1)
    if mask_BNM is not None:
        scratch_BNM = (num_settled_B1 + torch.arange(num_scratch))[:, None].expand(-1, num_nodes, -1)
        visible.scatter_(2, scratch_BNM, mask_BNM)
    return cached, visible
