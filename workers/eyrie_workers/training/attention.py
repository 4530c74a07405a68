"""Attention of one unrolled step: over the document's step-0 keys, and over the root's own keys of steps 1 .. s.

At step s the root i attends to the step-0 keys of positions <= i of its document and to the keys that its own draft
wrote at steps 1 .. s: the KV cache of a serving engine in a round that began at i. (EAGLE-3 section 3.1 draws it as a
diagonal mask; the diagonal is one dot product per step, not a matrix.) So the softmax splits in two,

    over the shared keys    a tile product, log-sum-exp kept:    (o_0, lse_0)
    over the own keys       s dot products:                       z_1 .. z_s
    w = softmax(lse_0, z_1 .. z_s);   out = w_0 o_0 + sum_r w_r v_r

and only the first part is large. `TileAttention` computes it; its backward pass computes the scores again from q, k
and lse instead of saving them (FlashAttention, arXiv:2205.14135): with G = dL/dout and g = dL/dlse,

    P = exp(QK' - lse)     dV = P' G     dS = P * (G V' - rowsum(G * out) + g)     dQ = dS K     dK = dS' Q

On a GPU all of it is one kernel without tiles (`eyrie_kernels.packed_attention`).

A block of DFlash (`attend_block`) is the same softmax: its positions are further query heads of the root, and its keys,
which all of them see, are the root's own keys.

A drafter with a sliding window of w keys sees the w latest positions, its own included: at step s root i attends to
step-0 keys j > i + s - w and its own keys r > s - w. The first is a mask that moves with the step, the second drops
whole steps.

    R roots, S steps, C block positions, G blocks of a tile, K kv heads, W query heads per kv head, E head size,
    Lq/Lk queries/keys
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eyrie_kernels.packed_attention import KeyRanges, key_ranges, packed_attention
from eyrie_workers.training.unroll_plan import AttentionTile, UnrollPlan

# Score of a masked key. Finite, because a window may mask every key of a tile at a late step: the log-sum-exp is then
# about -1e30, the tile's weight in the merge exactly 0, and nothing is nan. Next to any visible key, exp(-1e30) is
# exactly 0 as well.
_MASKED = -1e30

# Scores computed at a time: 256 Ki floats are 1 MiB, a core's own cache.
_PART_ELEMENTS = 1 << 18


class _Move(torch.autograd.Function):
    """`out[to] = x[source]` for distinct `to` and distinct `source`; other rows of `out` are zero.

    Because the indices are distinct, the gradient is a copy as well: exact, parallel, and the same on every run,
    which a scatter-add is not.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor | None, to: Tensor | None, num_rows: int) -> Tensor:
        ctx.save_for_backward(source, to)
        ctx.num_source_rows = x.shape[0]
        return _moved_rows(x, source, to, num_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        source, to = ctx.saved_tensors
        return _moved_rows(grad, to, source, ctx.num_source_rows), None, None, None


def _moved_rows(x: Tensor, source: Tensor | None, to: Tensor | None, num_rows: int) -> Tensor:
    picked = x if source is None else x.index_select(0, source)
    if to is None:
        return picked
    return x.new_zeros((num_rows, *x.shape[1:])).index_copy_(0, to, picked)


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows `index` of x; the indices are distinct."""
    out: Tensor = _Move.apply(x, index, None, index.numel())
    return out


def scatter_rows(x: Tensor, cells: Tensor, num_cells: int, source: Tensor | None = None) -> Tensor:
    """[num_cells, ...] with the rows of x (or its rows `source`) at the distinct `cells`, zeros elsewhere."""
    out: Tensor = _Move.apply(x, source, cells, num_cells)
    return out


def leading_rows(x: Tensor, num_rows: int) -> Tensor:
    """The first rows of x; x itself, without a copy of its gradient, when that is all of them."""
    return x if x.shape[0] == num_rows else x[:num_rows]


class TileAttention(torch.autograd.Function):
    """softmax(q k') v of one tile with its log-sum-exp; q is scaled.

    q [G*K, W*Lq, E]   k, v [G*K, Lk, E]   masked [G, 1, Lq, Lk] bool   ->   out like q, lse [G*K, W*Lq] float32

    Scores exist for a few heads, or a few queries of one head, at a time: as many as fit a core's own cache. So memory
    does not grow with the square of a document's length.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=_wide(q.dtype))
        for heads, cells in _parts(q, k):
            # Products in the inputs' dtype; scores, softmax and log-sum-exp in at least float32. The division by the
            # total comes after the product with v: it touches E numbers per query instead of Lk.
            scores = _scores(q, k, masked, cells)
            most = scores.amax(-1, keepdim=True)
            total = scores.sub_(most).exp_().sum(-1, keepdim=True)
            out[cells] = torch.bmm(scores.to(v.dtype), v[heads]).div_(total)
            lse[cells] = most.add_(total.log_()).squeeze(-1)
        ctx.save_for_backward(q, k, v, masked, out, lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, masked, out, lse = ctx.saved_tensors
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        # g - rowsum(G * out), the same for all keys of a query.
        shift = grad_lse - torch.linalg.vecdot(grad_out.to(lse.dtype), out.to(lse.dtype))
        for heads, cells in _parts(q, k):
            # P from the saved log-sum-exp: no second pass for the maximum. Then dV, dS, dQ and dK of the docstring.
            probabilities = _scores(q, k, masked, cells).sub_(lse[cells].unsqueeze(-1)).exp_()
            grad_v[heads].baddbmm_(probabilities.to(v.dtype).transpose(1, 2), grad_out[cells])
            grad_scores = torch.bmm(grad_out[cells], v[heads].transpose(1, 2)).to(lse.dtype)
            grad_scores = grad_scores.add_(shift[cells].unsqueeze(-1)).mul_(probabilities).to(q.dtype)
            grad_q[cells] = torch.bmm(grad_scores, k[heads])
            grad_k[heads].baddbmm_(grad_scores.transpose(1, 2), q[cells])
        return grad_q, grad_k, grad_v, None


_Cells = tuple[slice, slice]
"""Some key-value heads, and the same range of query cells of each."""


def _parts(q: Tensor, k: Tensor) -> list[tuple[slice, _Cells]]:
    """The heads of each part, and its cells."""
    num_heads, num_queries, num_keys = q.shape[0], q.shape[1], k.shape[1]
    queries = max(1, min(num_queries, _PART_ELEMENTS // num_keys))
    heads = max(1, _PART_ELEMENTS // (num_queries * num_keys))
    return [(of_part, (of_part, slice(query, min(query + queries, num_queries))))
            for of_part in (slice(head, min(head + heads, num_heads)) for head in range(0, num_heads, heads))
            for query in range(0, num_queries, queries)]


def _scores(q: Tensor, k: Tensor, masked: Tensor, cells: _Cells) -> Tensor:
    """[heads, queries, Lk] of one part in at least float32, masked ones at `_MASKED`."""
    (num_blocks, _, num_queries, num_keys), (heads, queries) = masked.shape, cells
    # Query cells of a head are W repetitions of the block's queries, so one mask serves all W heads of a block.
    scores = torch.bmm(q[cells], k[heads].transpose(1, 2)).to(_wide(q.dtype))
    kv_heads = q.shape[0] // num_blocks
    block = (slice(None) if num_blocks == 1
             else torch.arange(heads.start, heads.stop, device=q.device) // kv_heads)
    if queries == slice(0, q.shape[1]):
        scores.view(scores.shape[0], -1, num_queries, num_keys).masked_fill_(masked[block], _MASKED)
    else:
        query = torch.arange(queries.start, queries.stop, device=q.device) % num_queries
        scores.masked_fill_(masked[block, 0][:, query], _MASKED)
    return scores


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class SharedKeys:
    """The step-0 keys and values of a batch, read by every step; copied into tiles once, on the CPU alone."""

    def __init__(self, plan: UnrollPlan, k_TKE: Tensor, v_TKE: Tensor, window: int | None = None) -> None:
        self._plan = plan
        self.k_TKE, self.v_TKE, self.window = k_TKE, v_TKE, window

    @cached_property
    def _tiles(self) -> list[tuple[AttentionTile, Tensor, Tensor]]:
        return [(tile, _tiled(tile, self.k_TKE), _tiled(tile, self.v_TKE)) for tile in self._plan.tiles]

    def key_ranges(self, step: int) -> KeyRanges:
        """The step-0 keys that each root sees at a step, as the kernel reads them."""
        roots = self._plan.roots[:self._plan.alive[step]]
        return key_ranges(roots, roots - self._plan.positions[roots], step, self.window)

    def attend(self, q_RKWE: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Attention of the first R roots, queries scaled, over the shared keys at `step`: out [R, K, W, E] and
        lse [R, K, W]."""
        kv_heads, per_kv, head = q_RKWE.shape[1:]
        # 1. Copy the alive roots' queries into their cells of the tiles; unused cells are zero.
        index, sizes = self._plan.query_cells(step)
        cells = scatter_rows(q_RKWE, index, sum(sizes))
        outs, lses = [], []
        for q, (tile, k, v) in zip(cells.split(list(sizes)), self._tiles, strict=True):
            num_queries = tile.num_queries[step]
            if num_queries == 0:
                continue
            # 2. Per tile [G, Lq, K, W, E] -> [G*K, W*Lq, E]: the W query heads of a kv head share one product.
            shape = (tile.num_blocks, num_queries, kv_heads, per_kv)
            tiled = q.view(*shape, head).permute(0, 2, 3, 1, 4).reshape(-1, per_kv * num_queries, head)
            out, lse = TileAttention.apply(tiled, k, v, tile.mask_at(step, self.window))
            # 3. Back to cells.
            back = (tile.num_blocks, kv_heads, per_kv, num_queries)
            outs.append(out.view(*back, head).permute(0, 3, 1, 2, 4).reshape(-1, kv_heads, per_kv, head))
            lses.append(lse.view(*back).permute(0, 3, 1, 2).reshape(-1, kv_heads, per_kv))
        # 4. And from cells to roots.
        return gather_rows(torch.cat(outs), index), gather_rows(torch.cat(lses), index)


def _tiled(tile: AttentionTile, x_TKE: Tensor) -> Tensor:
    cells = scatter_rows(x_TKE, tile.key_cell, tile.num_blocks * tile.num_keys, tile.key_index)
    return cells.view(tile.num_blocks, tile.num_keys, *x_TKE.shape[1:]).transpose(1, 2).flatten(0, 1).contiguous()


def attend(q_RKWE: Tensor, shared: SharedKeys, own: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of the first R roots at one step.

    q_RKWE   [R, K, W, E]  rotated queries.
    own      keys and values [R_r, K, E] of steps 1 .. s with R_r >= R; empty at step 0.
    returns  [R, K, W, E]
    """
    if q_RKWE.is_cuda:
        return packed_attention(q_RKWE, shared.k_TKE, shared.v_TKE, own, shared.key_ranges(len(own)))
    # 1. Scale the queries: R rows once, instead of every score.
    q_RKWE = q_RKWE * q_RKWE.shape[-1] ** -0.5
    # 2. The shared keys.
    out, lse = shared.attend(q_RKWE, len(own))
    # 3. The own keys: step s has s of them, of which the window keeps the latest.
    if shared.window is not None:
        own = own[-shared.window:]
    if not own:
        return out
    # Earlier steps had more roots; those alive now are their first rows.
    num_roots = q_RKWE.shape[0]
    keys, values = (torch.stack([leading_rows(part, num_roots) for part in parts], 2)
                    for parts in zip(*own, strict=True))
    return merge_softmax(q_RKWE, out, lse, keys, values)


def attend_block(q_RCKWE: Tensor, shared: SharedKeys, k_RCKE: Tensor, v_RCKE: Tensor) -> Tensor:
    """Attention of every position of each root's block: over the step-0 keys up to the root and the block's own keys,
    in both directions.

    q_RCKWE         [R, C, K, W, E]  rotated queries of all R roots of the plan.
    k_RCKE, v_RCKE  [R, C, K, E]     the block's rotated keys, and its values.
    returns         [R, C, K, W, E]
    """
    # Block positions and query heads are all queries of one kv head: [R, K, C, W, E] as [R, K, C * W, E].
    q_RKCWE = q_RCKWE.transpose(1, 2)
    q_RKXE = q_RKCWE.flatten(2, 3)
    if q_RCKWE.is_cuda:
        own = tuple(zip(k_RCKE.unbind(1), v_RCKE.unbind(1), strict=True))
        ranges = replace(shared.key_ranges(0), num_own=len(own))
        attended = packed_attention(q_RKXE, shared.k_TKE, shared.v_TKE, own, ranges)
    else:
        q_RKXE = q_RKXE * q_RKXE.shape[-1] ** -0.5
        attended = merge_softmax(q_RKXE, *shared.attend(q_RKXE, 0), k_RCKE.transpose(1, 2), v_RCKE.transpose(1, 2))
    return attended.view(q_RKCWE.shape).transpose(1, 2)


def merge_softmax(q_RKWE: Tensor, out_RKWE: Tensor, lse_RKW: Tensor, keys_RKSE: Tensor, values_RKSE: Tensor) -> Tensor:
    """Attention over the shared keys (`out`, `lse`) and some of each root's own, as one softmax; q is scaled."""
    # The shared keys enter the softmax as one entry whose score is their log-sum-exp and whose value is their output.
    wide = lse_RKW.dtype
    own_scores = q_RKWE.to(wide) @ keys_RKSE.to(wide).transpose(-1, -2)  # [R, K, W, s]
    weights = torch.cat([lse_RKW.unsqueeze(-1), own_scores], -1).softmax(-1)
    mixed_RKWE = weights[..., 1:] @ values_RKSE.to(wide)
    return torch.addcmul(mixed_RKWE, weights[..., :1], out_RKWE.to(wide)).to(out_RKWE.dtype)
