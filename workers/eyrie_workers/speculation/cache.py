"""The target's KV cache, and attention over it from the nodes of a draft tree.

One buffer for a few layers: [layer, slot, position, key and value heads, head]. A slot is one request; cache position
p holds the token at text position p, and the nodes of a round follow the committed text in tree order. After
verification `commit` copies the accepted nodes to their text positions. Occupied slots are contiguous from 0, so
attention reads a slice and never gathers.

Exactness. A draft tree stores a token's keys in another order than plain decoding does, so sums over keys run in
another order, and float32 attention would differ in its last bits (torch's SDPA: measured 0 of 40 rows bitwise equal).
In exact mode keys, values and the whole attention are float64 and the result is rounded once to float32: two orders of
summation then differ by about 1e-16, which survives rounding to float32 only when a value lies within 1e-16 of a
rounding boundary - one in some 10^8. Together with row-invariant products (`targets.operators`) verification reproduces
plain decoding bit for bit in practice; tests/workers/speculation counts.

Buffers grow on demand (`grown`), so memory follows the longest text in use, not the target's maximum context. Growth
copies one buffer after the other: it never takes more than a buffer in addition. `_LAYERS_TOGETHER` is a compromise of
that and of the operations of `commit`, whose launches cost more than their bytes in a small target. The masks of a
round are [B, R * N, L]; next to the keys and values of all layers, which the pass reads anyway, that is
little while a round has tens of nodes.
"""

# B rows, N nodes, L cache positions, M = B * N tokens, Q query heads, G key-value heads, R = Q / G, E head dimension

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from eyrie_api.planning.target_config import SLIDING
from eyrie_workers.targets.config import TargetConfig
from eyrie_workers.targets.device import upload

INITIAL_POSITIONS = 256
_LEAST_GROWTH = 64
_MOST_UNUSED = 4096
_LAYERS_TOGETHER = 4


def grown(buffer: Tensor, dim: int, length: int) -> Tensor:
    """The buffer itself if `dim` has at least `length` positions, else a longer one with the same contents, then zeros.

    Buffers grow by an eighth, so that a text of T tokens copies O(T) positions and a ninth of a buffer is unused at
    most; short ones grow by `_LEAST_GROWTH`, long ones by `_MOST_UNUSED`.
    """
    held = buffer.shape[dim]
    if length <= held:
        return buffer
    shape = [*buffer.shape]
    shape[dim] = max(length, held + min(max(held // 8, _LEAST_GROWTH), _MOST_UNUSED))
    # Zeros, not uninitialised memory: a masked position has weight 0, and 0 * NaN would still be NaN.
    longer = buffer.new_zeros(shape)
    longer.narrow(dim, 0, held).copy_(buffer)
    return longer


class KVCache:
    """Keys and values of `num_slots` requests."""

    def __init__(self, config: TargetConfig, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.num_slots = num_slots
        self.dtype = dtype
        """Type of keys, values and attention."""
        shape = (num_slots, INITIAL_POSITIONS, 2 * config.num_kv_heads, config.head_dim)
        self._buffers = [torch.zeros(min(_LAYERS_TOGETHER, config.num_layers - first), *shape, dtype=dtype,
                                     device=device) for first in range(0, config.num_layers, _LAYERS_TOGETHER)]
        self._layers = [layer for buffer in self._buffers for layer in buffer]

    @property
    def capacity(self) -> int:
        return self._buffers[0].shape[2]

    def reserve(self, capacity: int) -> None:
        """Grow the buffers to at least `capacity` positions per slot."""
        if capacity <= self.capacity:
            return
        self._layers.clear()  # a view would keep its buffer until the last one has grown
        for index in range(len(self._buffers)):
            self._buffers[index] = grown(self._buffers[index], 2, capacity)
        self._layers = [layer for buffer in self._buffers for layer in buffer]

    def layer(self, layer: int) -> Tensor:
        """[slots, L, 2G, E] of one layer: keys, then values."""
        return self._layers[layer]

    def write_prompt(self, slot: int, layer: int, kv: Tensor) -> None:
        """Store a prompt's keys, then values, [T, 2G, E]."""
        self._layers[layer][slot, :kv.shape[0]] = kv

    def commit(self, slots: Sequence[int], starts: Sequence[int], nodes: Sequence[Sequence[int]]) -> None:
        """Copy accepted nodes to their text positions: node nodes[b][d] of slots[b], stored at starts[b] + node, goes
        to starts[b] + d. Rows whose nodes are already in place cost nothing."""
        sources: list[int] = []
        targets: list[int] = []
        for slot, start, path in zip(slots, starts, nodes, strict=True):
            base = slot * self.capacity + start
            for depth, node in enumerate(path):
                if node != depth:
                    sources.append(base + node)
                    targets.append(base + depth)
        if not sources:
            return
        read, written = upload([sources, targets])
        for buffer in self._buffers:
            flat = buffer.view(len(buffer), self.num_slots * self.capacity, -1)
            # Sources and targets may overlap: index_select copies all sources before the first write.
            flat.index_copy_(1, written, flat.index_select(1, read))

    def clear_slot(self, slot: int) -> None:
        """Zero a slot whose keys may be NaN: a masked position has weight 0, and 0 * NaN is NaN."""
        for buffer in self._buffers:
            buffer[:, slot] = 0.0

    def copy_slot(self, source: int, target: int, length: int) -> None:
        for buffer in self._buffers:
            buffer[:, target, :length] = buffer[:, source, :length]


class TreeAttention:
    """Attention of N nodes in each of the first B slots: over the slot's committed text and the node's own path."""

    def __init__(self, cache: KVCache, starts: Tensor, seen: Tensor | None, depths: Tensor, model_dtype: torch.dtype,
                 max_start: int) -> None:
        """Compute write indices and masks, which all layers share.

        starts   [B] int64          committed tokens of each slot; its nodes are stored behind them
        seen     [B, N, N] bool     `tree.ancestors`; None for chains, where a node sees all nodes before it
        depths   [B, N] int64
        """
        self.dtype = cache.dtype
        self._cache = cache
        self._model_dtype = model_dtype
        self._num_rows, self._num_nodes = depths.shape
        self._length = max_start + self._num_nodes
        cache.reserve(self._length)
        device = depths.device
        slots = torch.arange(self._num_rows, device=device)[:, None]
        nodes = torch.arange(self._num_nodes, device=device)
        self._index = (slots * cache.capacity + starts[:, None] + nodes).flatten()
        self._first = max_start if self._num_rows == 1 else None
        window = cache.config.sliding_window if SLIDING in cache.config.layer_types else None
        self._full = self._mask(starts, seen, depths, None)
        self._sliding = self._mask(starts, seen, depths, window) if window is not None else None

    def _mask(self, starts: Tensor, seen: Tensor | None, depths: Tensor, window: int | None) -> Tensor | None:
        """Additive mask [B, 1, R * N, L]; None when every node sees every position."""
        num_rows, num_nodes = depths.shape
        if num_rows == 1 and num_nodes == 1 and window is None:
            return None
        device = depths.device
        positions = torch.arange(self._length, device=device)
        ahead = positions - starts[:, None]  # [B, L]: negative for committed text, else a node index
        if seen is None:
            seen = torch.ones(num_nodes, num_nodes, dtype=torch.bool, device=device).tril().expand(num_rows, -1, -1)
        node = ahead.clamp(0, num_nodes - 1)
        # Committed text is visible to every node; of the tree, a node's ancestors and itself; nothing behind the tree.
        of_node = seen.gather(2, node[:, None, :].expand(-1, num_nodes, -1))
        visible = torch.where((ahead < 0)[:, None, :], True, of_node & (ahead < num_nodes)[:, None, :])
        if window is not None:
            # The window counts text positions: a tree node's position follows from its depth, not from its cache slot.
            key_ahead = torch.where(ahead < 0, ahead, depths.gather(1, node))
            visible &= (depths[:, :, None] - key_ahead[:, None, :]) < window
        config = self._cache.config
        additive = torch.zeros(visible.shape, dtype=self.dtype, device=device).masked_fill_(~visible, -torch.inf)
        return additive.repeat(1, config.num_heads // config.num_kv_heads, 1)[:, None]

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        """heads [M, Q + 2G, E] -> [M, Q * E] in the model's dtype."""
        config = self._cache.config
        rows, nodes, groups, size = self._num_rows, self._num_nodes, config.num_kv_heads, config.head_dim
        repeats = config.num_heads // groups
        kept = self._cache.layer(layer)
        # The nodes' keys and values are stored behind the committed text before attention reads both. With one row they
        # are a slice; several rows have different lengths, so each node has an index of its own.
        if self._first is not None:
            kept[0, self._first:self._length] = heads[:, config.num_heads:]
        else:
            kept.view(-1, 2 * groups, size).index_copy_(0, self._index, heads[:, config.num_heads:])
        kept = kept[:rows, :self._length]
        # Grouped-query attention: the R query heads of a key head become R * N queries of it, so keys are not repeated.
        q = heads[:, :config.num_heads].view(rows, nodes, groups, repeats, size)
        q = q.permute(0, 2, 3, 1, 4).reshape(rows, groups, repeats * nodes, size)
        k, v = kept[:, :, :groups].transpose(1, 2), kept[:, :, groups:].transpose(1, 2)
        mask = self._full if config.layer_types[layer] != SLIDING else self._sliding
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        mixed = mixed.view(rows, groups, repeats, nodes, size).permute(0, 3, 1, 2, 4)
        out = torch.empty(mixed.shape, dtype=self._model_dtype, device=mixed.device).copy_(mixed)
        return out.view(rows * nodes, -1)
