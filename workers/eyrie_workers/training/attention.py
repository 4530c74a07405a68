"""Attention of one unrolled step: the document's step-0 keys, and the root's own keys of the steps since.

At step s the root i looks at the step-0 keys of positions <= i of its document and at the keys its own draft left at
steps 1 .. s: exactly the cache a serving engine holds in a round that began at i. (EAGLE-3 section 3.1 draws it as a
diagonal mask; the diagonal is one dot product per step, not a matrix.) So the softmax splits in two,

    over the shared keys    a tile product, log-sum-exp kept:    (o_0, lse_0)
    over the own keys       s dot products:                       z_1 .. z_s
    w = softmax(lse_0, z_1 .. z_s);   out = w_0 o_0 + sum_r w_r v_r

and only the first half is large. `TileAttention` computes it and, backwards, computes the scores again from q, k and
lse instead of keeping them (FlashAttention, arXiv:2205.14135): with G = dL/dout and g = dL/dlse,

    P = exp(QK' - lse)     dV = P' G     dS = P * (G V' - rowsum(G * out) + g)     dQ = dS K     dK = dS' Q

On a GPU the same is one kernel, without tiles (`eyrie_kernels.packed_attention`).

A drafter with a sliding window of w keys sees the w latest positions, its own included: at step s root i looks at
step-0 keys j > i + s - w and at its own keys r > s - w. The first is a mask that moves with the step, the second drops
whole steps.

    R roots, S steps, G documents of a tile, K kv heads, W query heads per kv head, E head size, Lq/Lk queries/keys
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eyrie_kernels.packed_attention import KeyRanges, key_ranges, packed_attention
from eyrie_workers.training.unroll_plan import AttentionTile, UnrollPlan

# What a query may not look at. Finite, because a window may hide every key of a tile from a late step: the log-sum-exp
# is then about -1e30, the tile's weight in the merge exactly 0, and nothing is nan. Beside any visible key, exp(-1e30)
# is exactly 0 as well.
_HIDDEN = -1e30

# Scores made at a time: 256 Ki floats are 1 MiB, a core's own cache.
_PART_ELEMENTS = 1 << 18


class _Move(torch.autograd.Function):
    """`out[to] = x[source]` for distinct `to` and distinct `source`; other rows of `out` are zero.

    Distinctness makes the gradient a copy as well: exact, parallel, and the same on every run, which a scatter-add
    is not.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor | None, to: Tensor | None, num_rows: int) -> Tensor:
        ctx.save_for_backward(source, to)
        ctx.num_source_rows = x.shape[0]
        return _moved(x, source, to, num_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        source, to = ctx.saved_tensors
        return _moved(grad, to, source, ctx.num_source_rows), None, None, None


def _moved(x: Tensor, source: Tensor | None, to: Tensor | None, num_rows: int) -> Tensor:
    picked = x if source is None else x.index_select(0, source)
    if to is None:
        return picked
    return x.new_zeros((num_rows, *x.shape[1:])).index_copy_(0, to, picked)


def pick(x: Tensor, index: Tensor) -> Tensor:
    """Rows `index` of x; the indices are distinct."""
    out: Tensor = _Move.apply(x, index, None, index.numel())
    return out


def place(x: Tensor, cells: Tensor, num_cells: int, source: Tensor | None = None) -> Tensor:
    """[num_cells, ...] with the rows of x (or its rows `source`) at the distinct `cells`, zeros elsewhere."""
    out: Tensor = _Move.apply(x, source, cells, num_cells)
    return out


def first(x: Tensor, num_rows: int) -> Tensor:
    """The first rows of x; x itself, without a copy of its gradient, when that is all of them."""
    return x if x.shape[0] == num_rows else x[:num_rows]


class TileAttention(torch.autograd.Function):
    """softmax(q k') v of one tile with its log-sum-exp; q comes scaled.

    q [G*K, W*Lq, E]   k, v [G*K, Lk, E]   hidden [G, 1, Lq, Lk] bool   ->   out like q, lse [G*K, W*Lq] float32

    Scores exist for a few heads, or a few queries of one head, at a time: as many as stay in a core's own cache. So
    memory does not grow with the square of a document's length.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=_wide(q.dtype))
        for part in _parts(q, k):
            scores = _scores(q, k, hidden, part)
            most = scores.amax(-1, keepdim=True)
            total = scores.sub_(most).exp_().sum(-1, keepdim=True)
            out[part.cells] = torch.bmm(scores.to(v.dtype), v[part.heads]).div_(total)
            lse[part.cells] = most.add_(total.log_()).squeeze(-1)
        ctx.save_for_backward(q, k, v, hidden, out, lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, hidden, out, lse = ctx.saved_tensors
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        shift = grad_lse - torch.linalg.vecdot(grad_out.to(lse.dtype), out.to(lse.dtype))
        for part in _parts(q, k):
            heads, cells = part.heads, part.cells
            probabilities = _scores(q, k, hidden, part).sub_(lse[cells].unsqueeze(-1)).exp_()
            grad_v[heads].baddbmm_(probabilities.to(v.dtype).transpose(1, 2), grad_out[cells])
            grad_scores = torch.bmm(grad_out[cells], v[heads].transpose(1, 2)).to(lse.dtype)
            grad_scores = grad_scores.add_(shift[cells].unsqueeze(-1)).mul_(probabilities).to(q.dtype)
            grad_q[cells] = torch.bmm(grad_scores, k[heads])
            grad_k[heads].baddbmm_(grad_scores.transpose(1, 2), q[cells])
        return grad_q, grad_k, grad_v, None


@dataclass(frozen=True)
class _Part:
    """Some key-value heads, and of each the same run of query cells."""

    heads: slice
    queries: slice

    @property
    def cells(self) -> tuple[slice, slice]:
        return self.heads, self.queries


def _parts(q: Tensor, k: Tensor) -> list[_Part]:
    num_heads, num_queries, num_keys = q.shape[0], q.shape[1], k.shape[1]
    queries = max(1, min(num_queries, _PART_ELEMENTS // num_keys))
    heads = max(1, _PART_ELEMENTS // (num_queries * num_keys))
    return [_Part(slice(head, min(head + heads, num_heads)), slice(query, min(query + queries, num_queries)))
            for head in range(0, num_heads, heads) for query in range(0, num_queries, queries)]


def _scores(q: Tensor, k: Tensor, hidden: Tensor, part: _Part) -> Tensor:
    """[heads, queries, Lk] of one part, hidden ones at `_HIDDEN`."""
    num_documents, _, num_queries, num_keys = hidden.shape
    scores = torch.bmm(q[part.cells], k[part.heads].transpose(1, 2)).to(_wide(q.dtype))
    per_document = q.shape[0] // num_documents
    document = (slice(None) if num_documents == 1
                else torch.arange(part.heads.start, part.heads.stop, device=q.device) // per_document)
    if part.queries == slice(0, q.shape[1]):
        scores.view(scores.shape[0], -1, num_queries, num_keys).masked_fill_(hidden[document], _HIDDEN)
    else:
        query = torch.arange(part.queries.start, part.queries.stop, device=q.device) % num_queries
        scores.masked_fill_(hidden[document, 0][:, query], _HIDDEN)
    return scores


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class SharedKeys:
    """The step-0 keys and values of a batch, used by every step; tiled once, if at all."""

    def __init__(self, plan: UnrollPlan, k_TKE: Tensor, v_TKE: Tensor, window: int | None = None) -> None:
        self._layout = plan
        self.k_TKE, self.v_TKE, self.window = k_TKE, v_TKE, window

    @cached_property
    def _tiles(self) -> list[tuple[AttentionTile, Tensor, Tensor]]:
        return [(tile, _tiled(tile, self.k_TKE), _tiled(tile, self.v_TKE)) for tile in self._layout.tiles]

    def key_ranges(self, step: int) -> KeyRanges:
        """The step-0 keys that each root sees at a step, as the kernel reads them."""
        roots = self._layout.roots[:self._layout.alive[step]]
        return key_ranges(roots, roots - self._layout.positions[roots], step, self.window)

    def attend(self, q_RKWE: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Attention of the first R roots, scaled queries, over the shared keys at `step`: out [R, K, W, E] and
        lse [R, K, W]."""
        kv_heads, per_kv, head = q_RKWE.shape[1:]
        index, sizes = self._layout.query_cells(step)
        cells = place(q_RKWE, index, sum(sizes))
        outs, lses = [], []
        for q, (tile, k, v) in zip(cells.split(list(sizes)), self._tiles, strict=True):
            num_queries = tile.num_queries[step]
            if num_queries == 0:
                continue
            shape = (tile.num_blocks, num_queries, kv_heads, per_kv)
            tiled = q.view(*shape, head).permute(0, 2, 3, 1, 4).reshape(-1, per_kv * num_queries, head)
            out, lse = TileAttention.apply(tiled, k, v, tile.mask_at(step, self.window))
            back = (tile.num_blocks, kv_heads, per_kv, num_queries)
            outs.append(out.view(*back, head).permute(0, 3, 1, 2, 4).reshape(-1, kv_heads, per_kv, head))
            lses.append(lse.view(*back).permute(0, 3, 1, 2).reshape(-1, kv_heads, per_kv))
        return pick(torch.cat(outs), index), pick(torch.cat(lses), index)


def _tiled(tile: AttentionTile, x_TKE: Tensor) -> Tensor:
    cells = place(x_TKE, tile.key_cell, tile.num_blocks * tile.num_keys, tile.key_index)
    return cells.view(tile.num_blocks, tile.num_keys, *x_TKE.shape[1:]).transpose(1, 2).flatten(0, 1).contiguous()


def attend(q_RKWE: Tensor, shared: SharedKeys, own: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of the first R roots at one step.

    q_RKWE   [R, K, W, E]  rotated queries.
    own      keys and values [R_r, K, E] of steps 1 .. s with R_r >= R; empty at step 0.
    returns  [R, K, W, E]
    """
    if q_RKWE.is_cuda:
        return attend_by_kernel(q_RKWE, shared, own)
    q_RKWE = q_RKWE * q_RKWE.shape[-1] ** -0.5
    out, lse = shared.attend(q_RKWE, len(own))
    if shared.window is not None:
        own = own[-shared.window:]
    if not own:
        return out
    num_roots = q_RKWE.shape[0]
    keys, values = (torch.stack([first(part, num_roots) for part in parts], 2) for parts in zip(*own, strict=True))
    return joined(q_RKWE, out, lse, keys, values)


def attend_by_kernel(q_RKWE: Tensor, shared: SharedKeys, own: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """`attend` as a GPU does it."""
    return packed_attention(q_RKWE, shared.k_TKE, shared.v_TKE, own, shared.key_ranges(len(own)))


def joined(q_RKWE: Tensor, out_RKWE: Tensor, lse_RKW: Tensor, keys_RKSE: Tensor, values_RKSE: Tensor) -> Tensor:
    """Attention over the shared keys (`out`, `lse`) and some of each root's own, as one softmax; q comes scaled."""
    wide = lse_RKW.dtype
    own_scores = q_RKWE.to(wide) @ keys_RKSE.to(wide).transpose(-1, -2)  # [R, K, W, s]
    weights = torch.cat([lse_RKW.unsqueeze(-1), own_scores], -1).softmax(-1)
    mixed_RKWE = weights[..., 1:] @ values_RKSE.to(wide)
    return torch.addcmul(mixed_RKWE, weights[..., :1], out_RKWE.to(wide)).to(out_RKWE.dtype)
