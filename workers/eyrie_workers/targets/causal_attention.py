"""Causal attention within texts that are stored end to end, over all earlier tokens or a sliding window of them.

Neither a T x T matrix of scores nor one of a mask is built for a window:

    flash attention      bfloat16 and float16 on a GPU: one call for all texts and any window (`varlen_attn`)
    blocks of queries    otherwise, for a text longer than its window W: the queries in blocks of W, each over its own
                         block of keys and the one before, which contain every window of the block. Scores are T x 2W
    one call per text    otherwise

Both windowed forms sum in another order than a masked T x T product and equal it within rounding. Without a window the
results on the CPU are those of `scaled_dot_product_attention` to the bit.
"""

# M tokens of all texts, T tokens of one, W window, B blocks, Q query heads, G key-value heads, E head dimension

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eyrie_api.planning.target_config import SLIDING
from eyrie_workers.targets.config import TargetConfig

_LONGEST_FLASH_HEAD = 256


class CausalAttention:
    """`model.Attend` for whole texts."""

    def __init__(self, config: TargetConfig, lengths: Sequence[int], dtype: torch.dtype, device: torch.device,
                 store: Callable[[int, Tensor], None] | None = None) -> None:
        """store: is given the number of every layer and its keys, then values, [M, 2G, E]."""
        self.dtype = dtype
        self._config, self._store = config, store
        self._lengths = list(lengths)
        self._starts = starts_of(lengths, device) if len(lengths) > 1 else None  # once for all layers

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        """heads [M, Q + 2G, E] -> [M, Q * E]."""
        config = self._config
        if self._store is not None:
            self._store(layer, heads[:, config.num_heads:])
        q, k, v = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        window = config.sliding_window if config.layer_types[layer] == SLIDING else None
        return packed_causal(q, k, v, self._lengths, self._starts, window)


def starts_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """[texts + 1] int32: where each text begins."""
    starts = torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32, device="cpu")
    return starts.to(device, non_blocking=True)


def packed_causal(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], starts: Tensor | None = None,
                  window: int | None = None) -> Tensor:
    """Attention within each of some texts: q [M, Q, E], k and v [M, G, E] -> [M, Q * E]. Differentiable."""
    if len(lengths) == 1:
        return causal(q, k, v, window)
    if _flash_applies(q):
        starts = starts_of(lengths, q.device) if starts is None else starts
        return _flash(q, k, v, starts, max(lengths), window)
    return torch.cat([causal(*text, window) for text in zip(
        q.split(list(lengths)), k.split(list(lengths)), v.split(list(lengths)), strict=True)])


def causal(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """One text's attention: q [T, Q, E], k and v [T, G, E] -> [T, Q * E]; `window` counts the token itself."""
    length = q.shape[0]
    if _flash_applies(q):
        return _flash(q, k, v, torch.arange(2, dtype=torch.int32, device=q.device) * length, length, window)
    if window is not None and window < length:
        return _windowed(q, k, v, window)
    return _attend(q[None], k[None], v[None], None)[0].flatten(1)


def _flash_applies(q: Tensor) -> bool:
    return (q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16)
            and q.shape[-1] % 8 == 0 and q.shape[-1] <= _LONGEST_FLASH_HEAD)


def _flash(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, window: int | None) -> Tensor:
    """starts [texts + 1] int32 -> [M, Q * E]."""
    # Here: older versions of torch lack the module, and the CPU does without it.
    from torch.nn.attention.varlen import varlen_attn

    # Its window counts the tokens before the token itself.
    left = -1 if window is None else window - 1
    mixed = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(left, 0), **_grouped())
    assert isinstance(mixed, Tensor)
    return mixed.flatten(1)


@cache
def _grouped() -> dict[str, Any]:
    """The argument for grouped heads; torch 2.11, which many images have, takes them without one."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _windowed(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attention of a text with T > W in blocks of W queries."""
    length = q.shape[0]
    num_blocks = -(-length // window)

    def blocks(x: Tensor) -> Tensor:  # [T, ., E] -> [B, W, ., E], zeros at the end
        return F.pad(x, (0, 0, 0, 0, 0, num_blocks * window - length)).unflatten(0, (num_blocks, window))

    q_BWQE, k_BWGE, v_BWGE = blocks(q), blocks(k), blocks(v)
    # Of query i, which stands at W + i among the keys of its block. Padding is later than every query of the text.
    ages = torch.arange(window, 2 * window, device=q.device)[:, None] - torch.arange(2 * window, device=q.device)
    keys, values = (torch.cat([x[:-1], x[1:]], dim=1) for x in (k_BWGE, v_BWGE))  # block b behind block b - 1
    later = _attend(q_BWQE[1:], keys, values, (ages >= 0) & (ages < window))
    # The first block has nothing before it: causal alone.
    first = _attend(q_BWQE[:1], k_BWGE[:1], v_BWGE[:1], None)
    return torch.cat([first, later]).flatten(0, 1)[:length].flatten(1)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q [B, T, Q, E], k and v [B, ., G, E] -> [B, T, Q, E]; causal without a mask."""
    repeats = q.shape[2] // k.shape[2]
    if q.device.type == "cuda" and repeats > 1:
        # The memory-efficient kernel, the only one for float32, takes no grouped heads; without it all scores are
        # stored.
        k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, is_causal=mask is None,
        enable_gqa=True)
    return mixed.transpose(1, 2)
