"""Attention of one unrolled step: the document's step-0 keys, and the root's own keys of the steps since.

At step s the root i looks at the step-0 keys of positions <= i of its document and at the keys its own draft left at
steps 1 .. s: exactly the cache a serving engine holds in a round that began at i. (EAGLE-3 section 3.1 draws it as a
diagonal mask; the diagonal is one dot product per step, not a matrix.) So the softmax splits in two,

    over the shared keys    a tile product, log-sum-exp kept:    (o_0, lse_0)
    over the own keys       s dot products:                       z_1 .. z_s
    w = softmax(lse_0, z_1 .. z_s);   out = w_0 o_0 + sum_r w_r v_r

and only the first half is large. `TileAttention` computes it and, backwards, computes the scores again from q, k and
lse instead of keeping them (FlashAttention, arXiv:2205.14135): with G = dL/dout and g = dL/dlse,

    P = exp(QK' c - lse)     dV = P' G     dS = P * (G V' - rowsum(G * out) + g)     dQ = c dS K     dK = c dS' Q

A drafter with a sliding window of w keys sees the w latest positions, its own included: at step s root i looks at
step-0 keys j > i + s - w and at its own keys r > s - w. The first is a mask that moves with the step, the second drops
whole steps.

    R roots, S steps, G documents of a tile, K kv heads, W query heads per kv head, E head size, Lq/Lk queries/keys
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eyrie_workers.training.layout import Tile, UnrollLayout

# What a query may not look at. Finite, because a window may hide every key of a tile from a late step: the log-sum-exp
# is then about -1e30, the tile's weight in the merge exactly 0, and nothing is nan. Beside any visible key, exp(-1e30)
# is exactly 0 as well.
_HIDDEN = -1e30


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


class TileAttention(torch.autograd.Function):
    """softmax(q k' c) v of one tile with its log-sum-exp.

    q [G*K, W*Lq, E]   k, v [G*K, Lk, E]   hidden [G, 1, Lq, Lk] bool   ->   out like q, lse [G*K, W*Lq] float32
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        scores = _scores(q, k, hidden, scale)
        lse = scores.logsumexp(-1)
        out = torch.bmm(scores.sub_(lse.unsqueeze(-1)).exp_().to(v.dtype), v)
        ctx.save_for_backward(q, k, v, hidden, out, lse)
        ctx.scale = scale
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, hidden, out, lse = ctx.saved_tensors
        probabilities = _scores(q, k, hidden, ctx.scale).sub_(lse.unsqueeze(-1)).exp_()
        grad_out = grad_out.contiguous()
        grad_v = torch.bmm(probabilities.to(v.dtype).transpose(1, 2), grad_out)
        shift = grad_lse - (grad_out * out).sum(-1, dtype=torch.float32)
        grad_scores = torch.bmm(grad_out, v.transpose(1, 2)).float().add_(shift.unsqueeze(-1)).mul_(probabilities)
        grad_scores = grad_scores.mul_(ctx.scale).to(q.dtype)
        return torch.bmm(grad_scores, k), torch.bmm(grad_scores.transpose(1, 2), q), grad_v, None, None


def _scores(q: Tensor, k: Tensor, hidden: Tensor, scale: float) -> Tensor:
    num_documents, _, num_queries, num_keys = hidden.shape
    scores = torch.bmm(q, k.transpose(1, 2)).float().mul_(scale)
    scores.view(num_documents, -1, num_queries, num_keys).masked_fill_(hidden, _HIDDEN)
    return scores


class SharedKeys:
    """The step-0 keys and values of a batch, tiled once and used by every step."""

    def __init__(self, layout: UnrollLayout, k_TKE: Tensor, v_TKE: Tensor, window: int | None = None) -> None:
        self._layout = layout
        self.window = window
        self._tiles = [(tile, _tiled(tile, k_TKE), _tiled(tile, v_TKE)) for tile in layout.tiles]

    def attend(self, q_RKWE: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Attention of the first R roots over the shared keys at `step`: out [R, K, W, E] and lse [R, K, W]."""
        layout, (num_roots, kv_heads, per_kv, head) = self._layout, q_RKWE.shape
        cells = place(q_RKWE, layout.query_cell[:num_roots], layout.num_query_cells)
        sizes = [tile.num_documents * tile.num_queries for tile, _, _ in self._tiles]
        outs, lses = [], []
        for q, (tile, k, v) in zip(cells.split(sizes), self._tiles, strict=True):
            shape = (tile.num_documents, tile.num_queries, kv_heads, per_kv)
            tiled = q.view(*shape, head).permute(0, 2, 3, 1, 4).reshape(-1, per_kv * tile.num_queries, head)
            out, lse = TileAttention.apply(tiled, k, v, tile.hidden_at(step, self.window), head**-0.5)
            back = (tile.num_documents, kv_heads, per_kv, tile.num_queries)
            outs.append(out.view(*back, head).permute(0, 3, 1, 2, 4).reshape(-1, kv_heads, per_kv, head))
            lses.append(lse.view(*back).permute(0, 3, 1, 2).reshape(-1, kv_heads, per_kv))
        index = layout.query_cell[:num_roots]
        return pick(torch.cat(outs), index), pick(torch.cat(lses), index)


def _tiled(tile: Tile, x_TKE: Tensor) -> Tensor:
    cells = place(x_TKE, tile.key_cell, tile.num_documents * tile.num_keys, tile.key_index)
    return cells.view(tile.num_documents, tile.num_keys, *x_TKE.shape[1:]).transpose(1, 2).flatten(0, 1)


def attend(q_RKWE: Tensor, shared: SharedKeys, own: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of the first R roots at one step.

    q_RKWE   [R, K, W, E]  rotated queries.
    own      keys and values [R_r, K, E] of steps 1 .. s with R_r >= R; empty at step 0.
    returns  [R, K, W, E]
    """
    out, lse = shared.attend(q_RKWE, len(own))
    if shared.window is not None:
        own = own[-shared.window:]
    if not own:
        return out
    num_roots, scale = q_RKWE.shape[0], q_RKWE.shape[-1] ** -0.5
    keys = [key[:num_roots].unsqueeze(2) for key, _ in own]
    own_scores = [(q_RKWE * key).sum(-1, dtype=torch.float32) * scale for key in keys]
    weights = torch.stack([lse, *own_scores]).softmax(0).to(out.dtype).unsqueeze(-1)
    for weight, part in zip(weights.unbind(0), [out, *(value[:num_roots].unsqueeze(2) for _, value in own)],
                            strict=True):
        out = weight * part if part is out else out + weight * part
    return out
