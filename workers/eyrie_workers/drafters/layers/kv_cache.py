"""The KV cache of drafters with several decoder layers, and attention of new tokens over it.

One buffer for all layers: [layer, row, index, key and value heads, head]. Settled keys start at index 0, ordered by
position; scratch keys of a drafting round follow them and are overwritten by the next settled ones. `NewTokens` is the
attention of a pass of `targets.model`: it writes the keys of the new tokens and attends to the keys of a mask.

Unlike in the target's cache (`speculation.cache`), the rows of a pass can be any rows, and sums need not be bit-exact:
rounding differences can change proposals, never the output.

    B rows, N new tokens of each, M scratch keys, L indices, K kv heads, W query heads per kv head, E head size
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from eyrie_workers.targets.config import TargetConfig


class DrafterKVCache:
    """Keys and values of all rows and layers."""

    def __init__(self, config: TargetConfig, num_rows: int, length: int, dtype: torch.dtype) -> None:
        self.config = config
        self.settled = [0] * num_rows
        """Number of settled keys of each row."""

        self.data = torch.zeros(config.num_layers, num_rows, length, 2 * config.num_kv_heads, config.head_dim,
                                dtype=dtype)

    def write(self, layer: int, rows: Sequence[int], index_BN: Tensor, kv: Tensor) -> None:
        """kv [B, N, 2K, E]: keys, then values."""
        cached = self.data[layer]
        if len(rows) == 1:  # the common case on one machine: a slice instead of a scatter
            first = int(index_BN[0, 0])
            stop = min(first + kv.shape[1], cached.shape[1])
            cached[rows[0], first:stop] = kv[0, : stop - first]
        else:
            # Padding after a row's new tokens may lie outside the buffer; no row uses the last index.
            cached[torch.tensor(rows)[:, None], index_BN.clamp(max=cached.shape[1] - 1)] = kv


class NewTokens:
    """`targets.model.Attend` of N new tokens of each of some rows, at consecutive indices from `first` on."""

    def __init__(self, cache: DrafterKVCache, rows: Sequence[int], first: Sequence[int], num_new: int,
                 visible_BNL: Tensor | None) -> None:
        """visible_BNL: which of the first L keys a new token attends to; None: all keys, for every token."""
        self.dtype = cache.data.dtype
        self._cache, self._rows, self._num_new = cache, list(rows), num_new
        self._length = max(first) + num_new
        self._index_BN = torch.tensor(list(first))[:, None] + torch.arange(num_new)
        repeats = cache.config.num_heads // cache.config.num_kv_heads
        self._mask = None if visible_BNL is None else visible_BNL.repeat(1, repeats, 1)[:, None]

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        """heads [B * N, Q + 2K, E] -> [B * N, Q * E]."""
        config, rows, new = self._cache.config, len(self._rows), self._num_new
        heads = heads.view(rows, new, -1, config.head_dim)
        self._cache.write(layer, self._rows, self._index_BN, heads[:, :, config.num_heads:])
        if rows == 1:
            cached = self._cache.data[layer, self._rows[0]: self._rows[0] + 1, : self._length]
        else:
            cached = self._cache.data[layer, :, : self._length].index_select(0, torch.tensor(self._rows))
        keys, values = cached.transpose(1, 2).chunk(2, 1)
        q = heads[:, :, : config.num_heads].unflatten(2, (config.num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q.flatten(2, 3), keys, values, attn_mask=self._mask)
        return attended.view(rows, config.num_kv_heads, -1, new, config.head_dim).permute(0, 3, 1, 2, 4).reshape(
            rows * new, -1)


def causal_mask(first: Sequence[int], num_new: int) -> Tensor | None:
    """`visible_BNL` of consecutive tokens of the text: each attends to all earlier keys and its own."""
    if num_new == 1 and len(first) == 1:
        return None
    last_BN1 = (torch.tensor(list(first))[:, None] + torch.arange(num_new))[:, :, None]
    return torch.arange(max(first) + num_new) <= last_BN1


def scratch_mask(settled: Sequence[int], scratch_BNM: Tensor) -> Tensor | None:
    """`visible_BNL` of scratch tokens: each attends to all settled keys of its row and to the keys of `scratch_BNM`
    among the M scratch keys; the new tokens are the last N of the M."""
    num_new, num_scratch = scratch_BNM.shape[1:]
    if len(settled) == 1:
        if bool(scratch_BNM.all()):
            return None
        return torch.cat([scratch_BNM.new_ones(1, num_new, settled[0]), scratch_BNM], 2)
    settled_B1 = torch.tensor(list(settled))[:, None]
    visible_BL = torch.arange(max(settled) + num_scratch) < settled_B1
    index_BNM = (settled_B1 + torch.arange(num_scratch))[:, None].expand(-1, num_new, -1)
    return visible_BL[:, None].repeat(1, num_new, 1).scatter_(2, index_BNM, scratch_BNM)
