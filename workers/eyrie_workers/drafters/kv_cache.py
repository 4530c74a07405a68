"""The KV cache of drafters with decoder layers, and attention of new tokens over it.

One buffer for all layers: [layer, row, index, key and value heads, head]. Settled keys start at index 0, ordered by
position; scratch keys of a drafting round follow them and are overwritten by the next settled ones. `NewTokens` is the
attention of a pass of `targets.model`: it writes the keys of the new tokens and attends to the keys of a mask. The
buffer grows with the longest text in it.

Unlike in the target's cache (`speculation.cache`), the rows of a pass can be any rows, and sums need not be bit-exact:
rounding differences can change proposals, never the output.

What a pass allocates. Keys and values are read in place where the rows of the pass are neighbours in the buffer, in
any order; the engine gives out the lowest free row, so they are while no row between them is free. Others are copied,
[B, L, K, E] per layer (`attend_rows`). Masks are [B, N, L] with tens of new tokens N; a prompt, where N is L, has
attention without a mask (`targets.causal_attention`).

    B rows, N new tokens of each, M scratch keys, L indices, K kv heads, W query heads per kv head, E head size
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from eyrie_workers.speculation.cache import INITIAL_POSITIONS, grown
from eyrie_workers.targets.config import RopeConfig
from eyrie_workers.targets.device import upload


class RowLengths(NamedTuple):
    """Rows of a pass and their numbers of settled keys: on the host, where one row is addressed by slices, and on the
    device for several."""

    rows: Sequence[int]
    lengths: Sequence[int]
    rows_B: Tensor
    lengths_B1: Tensor

    @staticmethod
    def of(rows: Sequence[int], lengths: Sequence[int]) -> "RowLengths":
        """Both on the device of the current scope, in one copy that the host does not wait for."""
        rows_B, lengths_B = upload([rows, lengths]).unbind(0)
        return RowLengths(rows, lengths, rows_B, lengths_B[:, None])


def attend_rows(q_BKXE: Tensor, keys_RLKE: Tensor, values_RLKE: Tensor, mask: Tensor | None,
                chosen: RowLengths) -> Tensor:
    """Attention of B rows over their keys and values among the R rows of a buffer: [B, K, X, E].

    mask  [B, 1, X, L] bool: which keys a query attends to; None: all

    A draft step has few queries and many keys. Where the rows are neighbours in another order, the queries are
    therefore reordered, and keys and values are not copied.
    """
    first, num_rows = min(chosen.rows), len(chosen.rows)
    if max(chosen.rows) - first + 1 != num_rows:
        keys, values = (x.index_select(0, chosen.rows_B) for x in (keys_RLKE, values_RLKE))
        return F.scaled_dot_product_attention(q_BKXE, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask)
    keys, values = (x[first: first + num_rows].transpose(1, 2) for x in (keys_RLKE, values_RLKE))
    if [*chosen.rows] == [*range(first, first + num_rows)]:
        return F.scaled_dot_product_attention(q_BKXE, keys, values, attn_mask=mask)
    place_B = chosen.rows_B - first
    q_BKXE = torch.empty_like(q_BKXE).index_copy_(0, place_B, q_BKXE)
    mask = None if mask is None else torch.empty_like(mask).index_copy_(0, place_B, mask)
    return F.scaled_dot_product_attention(q_BKXE, keys, values, attn_mask=mask).index_select(0, place_B)


class LayerConfig(Protocol):
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rope(self) -> RopeConfig: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def sliding_window(self) -> int | None: ...


class DrafterKVCache:
    def __init__(self, config: LayerConfig, num_layers: int, num_rows: int, dtype: torch.dtype) -> None:
        self.config = config
        self.settled = [0] * num_rows
        """Number of settled keys of each row."""

        self.data = torch.zeros(num_layers, num_rows, INITIAL_POSITIONS, 2 * config.num_kv_heads, config.head_dim,
                                dtype=dtype)

    def reserve(self, length: int) -> None:
        self.data = grown(self.data, 2, length)

    def write(self, layer: int, chosen: RowLengths, kv: Tensor, offset: int = 0) -> None:
        """kv [B, N, 2K, E], keys then values, `offset` indices behind the settled keys."""
        cached, num_new = self.data[layer], kv.shape[1]
        if len(chosen.rows) == 1:  # the common case on one machine: a slice instead of a scatter
            first = chosen.lengths[0] + offset
            cached[chosen.rows[0], first: first + num_new] = kv[0]
        else:
            cached[chosen.rows_B[:, None], chosen.lengths_B1 + torch.arange(offset, offset + num_new)] = kv


class NewTokens:
    """`targets.model.Attend` of N new tokens of each of some rows, `offset` indices behind the settled keys."""

    def __init__(self, cache: DrafterKVCache, chosen: RowLengths, num_new: int, visible_BNL: Tensor | None,
                 offset: int = 0) -> None:
        """visible_BNL: which of the first L keys a new token attends to; None: all keys, for every token."""
        self.dtype = cache.data.dtype
        self._cache, self._chosen, self._num_new, self._offset = cache, chosen, num_new, offset
        self._length = max(chosen.lengths) + offset + num_new
        cache.reserve(self._length)
        repeats = cache.config.num_heads // cache.config.num_kv_heads  # query heads that share a mask
        self._mask = None if visible_BNL is None else visible_BNL.repeat(1, repeats, 1)[:, None]

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        """heads [B * N, Q + 2K, E] -> [B * N, Q * E]."""
        config, rows, new = self._cache.config, len(self._chosen.rows), self._num_new
        heads = heads.view(rows, new, -1, config.head_dim)  # [B, N, Q + 2K, E]
        self._cache.write(layer, self._chosen, heads[:, :, config.num_heads:], self._offset)
        # All rows of the buffer, as a view: `attend_rows` picks those of this pass without a copy where it can.
        keys, values = self._cache.data[layer, :, : self._length].chunk(2, 2)
        q = heads[:, :, : config.num_heads].unflatten(2, (config.num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
        attended = attend_rows(q.flatten(2, 3), keys, values, self._mask, self._chosen)
        return attended.view(rows, config.num_kv_heads, -1, new, config.head_dim).permute(0, 3, 1, 2, 4).reshape(
            rows * new, -1)


def causal_mask(chosen: RowLengths, num_new: int) -> Tensor | None:
    """`visible_BNL` of consecutive tokens of the text: each attends to all earlier keys and its own."""
    if num_new == 1 and len(chosen.rows) == 1:
        return None
    # The last key that each new token sees is its own.
    last_BN1 = (chosen.lengths_B1 + torch.arange(num_new))[:, :, None]
    return torch.arange(max(chosen.lengths) + num_new) <= last_BN1


def scratch_mask(chosen: RowLengths, scratch_BNM: Tensor) -> Tensor:
    """`visible_BNL` of scratch tokens: each attends to all settled keys of its row and to the keys of `scratch_BNM`
    among the M scratch keys; the new tokens are the last N of the M."""
    num_new, num_scratch = scratch_BNM.shape[1:]
    if len(chosen.rows) == 1:
        return torch.cat([scratch_BNM.new_ones(1, num_new, chosen.lengths[0]), scratch_BNM], 2)
    visible_BL = torch.arange(max(chosen.lengths) + num_scratch) < chosen.lengths_B1
    index_BNM = (chosen.lengths_B1 + torch.arange(num_scratch))[:, None].expand(-1, num_new, -1)
    return visible_BL[:, None].repeat(1, num_new, 1).scatter_(2, index_BNM, scratch_BNM)


def all_scratch_mask(chosen: RowLengths, num_new: int, num_scratch: int) -> Tensor | None:
    """`scratch_mask` where every new token attends to all M scratch keys; None for one row, which attends to all keys.
    """
    if len(chosen.rows) == 1:
        return None
    visible_BL = torch.arange(max(chosen.lengths) + num_scratch) < chosen.lengths_B1 + num_scratch
    return visible_BL[:, None].expand(-1, num_new, -1)
