"""Keys and values a drafter of decoder layers keeps of every row, and attention over them from new tokens.

One buffer for all layers: [layer, row, place, key and value heads, head]. Settled keys lie from place 0 on in order of
position; what a round of drafting adds lies behind them, to be written over by the next settled ones. A pass of
`targets.model` finds its keys here: new tokens are written to the places named, and see what `visible` says.

Unlike the target's (`speculation.cache`), rows here are any rows, and no sum needs to be exact: a drafter whose last
bits differ proposes another token at worst.

    B rows, N new tokens of each, L places, K kv heads, W query heads per kv head, E head size
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from eyrie_workers.targets.config import TargetConfig


class DrafterKVCache:
    """The buffer."""

    def __init__(self, config: TargetConfig, num_rows: int, places: int, dtype: torch.dtype) -> None:
        self.config = config
        self.settled = [0] * num_rows
        """Settled keys of each row."""

        self.data = torch.zeros(config.num_layers, num_rows, places, 2 * config.num_kv_heads, config.head_dim,
                                dtype=dtype)

    def write(self, layer: int, rows: Sequence[int], places_BN: Tensor, kv: Tensor) -> None:
        """kv [B, N, 2K, E]: keys, then values."""
        kept = self.data[layer]
        if len(rows) == 1:  # one request is the common case on one machine: a slice, not a scatter
            first = int(places_BN[0, 0])
            stop = min(first + kv.shape[1], kept.shape[1])
            kept[rows[0], first:stop] = kv[0, : stop - first]
        else:
            # Padding at the end of a row's new tokens may point beyond the buffer; the last place is nobody's.
            kept[torch.tensor(rows)[:, None], places_BN.clamp(max=kept.shape[1] - 1)] = kv


class NewTokens:
    """`targets.model.Attend` of N new tokens of each of some rows, at successive places from `first` on."""

    def __init__(self, kept: DrafterKVCache, rows: Sequence[int], first: Sequence[int], num_new: int,
                 visible_BNL: Tensor | None) -> None:
        """visible_BNL: which of the first L places a new token sees; None: all, for every token of every row."""
        self.dtype = kept.data.dtype
        self._kept, self._rows, self._num_new = kept, list(rows), num_new
        self._length = max(first) + num_new
        self._places_BN = torch.tensor(list(first))[:, None] + torch.arange(num_new)
        repeats = kept.config.num_heads // kept.config.num_kv_heads
        self._mask = None if visible_BNL is None else visible_BNL.repeat(1, repeats, 1)[:, None]

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        """heads [B * N, Q + 2K, E] -> [B * N, Q * E]."""
        config, rows, new = self._kept.config, len(self._rows), self._num_new
        heads = heads.view(rows, new, -1, config.head_dim)
        self._kept.write(layer, self._rows, self._places_BN, heads[:, :, config.num_heads:])
        if rows == 1:
            kept = self._kept.data[layer, self._rows[0]: self._rows[0] + 1, : self._length]
        else:
            kept = self._kept.data[layer, :, : self._length].index_select(0, torch.tensor(self._rows))
        keys, values = kept.transpose(1, 2).chunk(2, 1)
        q = heads[:, :, : config.num_heads].unflatten(2, (config.num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q.flatten(2, 3), keys, values, attn_mask=self._mask)
        return mixed.view(rows, config.num_kv_heads, -1, new, config.head_dim).permute(0, 3, 1, 2, 4).reshape(
            rows * new, -1)


def behind(first: Sequence[int], num_new: int) -> Tensor | None:
    """`visible` of tokens that follow one another: each sees what lies before it, and itself."""
    if num_new == 1 and len(first) == 1:
        return None
    last_BN1 = (torch.tensor(list(first))[:, None] + torch.arange(num_new))[:, :, None]
    return torch.arange(max(first) + num_new) <= last_BN1


def beside(settled: Sequence[int], among_BNM: Tensor) -> Tensor | None:
    """`visible` of scratch tokens: all settled keys of the row, and of the M scratch keys behind them those of
    `among_BNM`; the new tokens are the last N of the M."""
    num_new, num_scratch = among_BNM.shape[1:]
    if len(settled) == 1:
        if bool(among_BNM.all()):
            return None
        return torch.cat([among_BNM.new_ones(1, num_new, settled[0]), among_BNM], 2)
    settled_B1 = torch.tensor(list(settled))[:, None]
    visible_BL = torch.arange(max(settled) + num_scratch) < settled_B1
    places = (settled_B1 + torch.arange(num_scratch))[:, None].expand(-1, num_new, -1)
    return visible_BL[:, None].repeat(1, num_new, 1).scatter_(2, places, among_BNM)
