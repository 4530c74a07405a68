"""Attention of a draft tree's nodes during verification, over the accepted tokens and each node's path from the root.

The cache of a row contains the keys of its accepted tokens in slots 0 .. start - 1, then those of the round's nodes in
tree order. Node n attends to every accepted token, to itself and to its ancestors (SpecInfer's tree mask,
arXiv:2305.09781); with a sliding window only to positions less than `window` before its own, which is start + its
depth. Inference only: there is no gradient.

A round has few queries and many keys: its cost is reading the cache, which reaches full bandwidth only if enough
programs read concurrently. Keys are therefore split among programs (flash-decoding); each writes an output and a
log-sum-exp, and a second kernel merges them. Query heads that share a key head are rows of one block, so a key is read
once for all of them. Programs read a row's length on the device, so the host need not be synchronised.

Lower bound: memory traffic, the keys and values of the accepted tokens read once.

    B rows, N nodes, L slots of the cache, Q query heads, G key-value heads, R = Q / G, E head size
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from eyrie_kernels.compiler import INTERPRETING, dot, jit, launch, next_power_of_two, runs_kernels, tl

_HIDDEN = -1e30  # finite, so no nan: a part without a visible key gets weight exp(-1e30) = 0

# Keys are split until there are about this many programs: two for each of an H100's 132 multiprocessors.
_PROGRAMS = 264


def _visible(num_places: int, starts_B: Tensor, seen_BNN: Tensor, window: int | None) -> Tensor:
    """[B, N, L] bool: whether a node attends to a slot."""
    num_nodes = seen_BNN.shape[1]
    ahead = torch.arange(num_places, device=starts_B.device) - starts_B[:, None]  # below 0: accepted tokens; else nodes
    node, depth = ahead.clamp(0, num_nodes - 1), seen_BNN.sum(-1) - 1
    of_node = seen_BNN.gather(2, node[:, None, :].expand(-1, num_nodes, -1)) & (ahead < num_nodes)[:, None, :]
    visible = torch.where((ahead < 0)[:, None, :], True, of_node)
    if window is not None:
        place = torch.where(ahead < 0, ahead, depth.gather(1, node))
        visible &= (depth[:, :, None] - place[:, None, :]) < window
    return visible


def reference_tree_attention(q_BNQE: Tensor, k_BLGE: Tensor, v_BLGE: Tensor, starts_B: Tensor, seen_BNN: Tensor,
                             window: int | None = None) -> Tensor:
    """The specification of `tree_attention`: one dense product with a mask."""
    visible = _visible(k_BLGE.shape[1], starts_B, seen_BNN, window)
    q = q_BNQE.unflatten(2, (k_BLGE.shape[2], -1))
    scores = torch.einsum("bngre,blge->bgrnl", q, k_BLGE) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~visible[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("bgrnl,blge->bngre", weights, v_BLGE).flatten(2, 3)


def _by_torch(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, seen: Tensor, window: int | None,
              length: int) -> Tensor:
    """The CPU form: PyTorch's attention over the first `length` slots. Query heads that share a key head are stacked as
    further queries of that head."""
    rows, nodes, heads, size = q.shape
    groups = k.shape[2]
    stacked = q.view(rows, nodes, groups, -1, size).permute(0, 2, 3, 1, 4).reshape(rows, groups, -1, size)
    visible = _visible(length, starts, seen, window).repeat(1, heads // groups, 1).unsqueeze(1)
    mixed = F.scaled_dot_product_attention(stacked, k[:, :length].transpose(1, 2), v[:, :length].transpose(1, 2),
                                           attn_mask=visible)
    return mixed.view(rows, groups, -1, nodes, size).permute(0, 3, 1, 2, 4).reshape(q.shape)


@jit
def _part_kernel(q, k, v, starts, seen, depths, part, lse, num_nodes, row_blocks, share, k_row, k_place, k_head, v_row,
                 v_place, v_head, SCALE: tl.constexpr, WINDOW: tl.constexpr, GROUPS: tl.constexpr,
                 REPEATS: tl.constexpr, HEAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                 BLOCK_E: tl.constexpr, HIDDEN: tl.constexpr, INTERPRETED: tl.constexpr):
    """One block of queries of one key head over one share of a row's slots: output and log-sum-exp."""
    WIDE = lse.dtype.element_ty
    row = tl.program_id(0) // row_blocks
    group = tl.program_id(1)
    split = tl.program_id(2)
    m = (tl.program_id(0) % row_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    e = tl.arange(0, BLOCK_E)
    real = m < num_nodes * REPEATS
    node = m % num_nodes
    head = group * REPEATS + m // num_nodes
    at = (row.to(tl.int64) * num_nodes + node) * (GROUPS * REPEATS) + head
    cell = real[:, None] & (e[None, :] < HEAD)
    queries = tl.load(q + at[:, None] * HEAD + e[None, :], cell, other=0.0)
    start = tl.load(starts + row).to(tl.int32)
    depth = tl.load(depths + row * num_nodes + node, real, other=0).to(tl.int32)
    end = tl.minimum((split + 1) * share, start + num_nodes)
    most = tl.zeros([BLOCK_M], WIDE) + HIDDEN
    total = tl.zeros([BLOCK_M], WIDE)
    mixed = tl.zeros([BLOCK_M, BLOCK_E], WIDE)
    k += row.to(tl.int64) * k_row + group * k_head
    v += row.to(tl.int64) * v_row + group * v_head
    # Online softmax: running maximum `most`, sum `total` and weighted values `mixed`, rescaled when the maximum grows.
    for first in range(split * share, end, BLOCK_N):
        place = first + tl.arange(0, BLOCK_N)
        inside = place < end
        key_cell = inside[:, None] & (e[None, :] < HEAD)
        keys = tl.load(k + place.to(tl.int64)[:, None] * k_place + e[None, :], key_cell, other=0.0)
        values = tl.load(v + place.to(tl.int64)[:, None] * v_place + e[None, :], key_cell, other=0.0)
        ahead = place - start
        is_node = (ahead >= 0) & inside
        path = tl.load(seen + (row * num_nodes + node)[:, None] * num_nodes + ahead[None, :],
                       real[:, None] & is_node[None, :], other=0)
        visible = inside[None, :] & ((ahead < 0)[None, :] | (path != 0))
        if WINDOW > 0:
            level = tl.load(depths + row * num_nodes + ahead, is_node, other=0).to(tl.int32)
            level = tl.where(ahead < 0, ahead, level)  # position minus `start`, as `depth` is the query's
            visible = visible & (depth[:, None] - level[None, :] < WINDOW)
        scores = tl.where(visible, dot(queries, tl.trans(keys), INTERPRETED) * SCALE, HIDDEN)
        new = tl.maximum(most, tl.max(scores, 1))
        shrink = tl.exp(most - new)
        p = tl.exp(scores - new[:, None])
        total = total * shrink + tl.sum(p, 1)
        mixed = mixed * shrink[:, None] + dot(p.to(v.dtype.element_ty), values, INTERPRETED)
        most = new
    counted = tl.where(total > 0, total, 1.0)  # 0: the split lies behind the row's last slot
    to = split.to(tl.int64) * (tl.num_programs(0) // row_blocks) * num_nodes * (GROUPS * REPEATS) + at
    tl.store(part + to[:, None] * HEAD + e[None, :], mixed / counted[:, None], cell)
    tl.store(lse + to, most + tl.log(counted), real)


@jit
def _merge_kernel(part, lse, out, num_splits, num_queries, HEAD: tl.constexpr, BLOCK_S: tl.constexpr,
                  BLOCK_E: tl.constexpr, HIDDEN: tl.constexpr):
    """Merge the parts of one query, weighted by exp(log-sum-exp)."""
    query = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    e = tl.arange(0, BLOCK_E)
    at = s.to(tl.int64) * num_queries + query
    sizes = tl.load(lse + at, s < num_splits, other=HIDDEN)
    weights = tl.where(s < num_splits, tl.exp(sizes - tl.max(sizes, 0)), 0.0)
    parts = tl.load(part + at[:, None] * HEAD + e[None, :], (s < num_splits)[:, None] & (e < HEAD)[None, :], other=0.0)
    mixed = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + query * HEAD + e, mixed.to(out.dtype.element_ty), e < HEAD)


def _by_kernel(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, seen: Tensor, window: int | None,
               length: int) -> Tensor:
    rows, nodes, heads, size = q.shape
    groups, wide = k.shape[2], torch.promote_types(q.dtype, torch.float32)
    if k.stride(-1) != 1 or v.stride(-1) != 1:  # the kernel reads a head's elements with stride 1
        k, v = k.contiguous(), v.contiguous()
    block_m = min(64 if q.element_size() == 2 else 16, max(16, next_power_of_two(nodes * heads // groups)))
    block_n = {2: 64, 4: 32, 8: 16}[q.element_size()]
    row_blocks = -(-nodes * (heads // groups) // block_m)
    # At most one split per block of keys, and at most 64: the merge loads all parts of a query as one block.
    splits = min(max(1, _PROGRAMS // (rows * row_blocks * groups)), -(-length // block_n), 64)
    share = -(-length // (splits * block_n)) * block_n
    part = torch.empty(splits, rows, nodes, heads, size, dtype=wide, device=q.device)
    lse = torch.empty(part.shape[:-1], dtype=wide, device=q.device)
    depths, block_e = seen.sum(-1, dtype=torch.int32) - 1, max(16, next_power_of_two(size))
    launch(_part_kernel, (rows * row_blocks, groups, splits), q, k, v, starts, seen.view(torch.uint8), depths, part,
           lse, nodes, row_blocks, share, *k.stride()[:3], *v.stride()[:3], SCALE=size**-0.5, WINDOW=window or 0,
           GROUPS=groups, REPEATS=heads // groups, HEAD=size, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_E=block_e,
           HIDDEN=_HIDDEN, INTERPRETED=INTERPRETING)
    out = torch.empty_like(q)
    launch(_merge_kernel, (rows * nodes * heads,), part, lse, out, splits, rows * nodes * heads, HEAD=size,
           BLOCK_S=next_power_of_two(splits), BLOCK_E=block_e, HIDDEN=_HIDDEN)
    return out


@torch.no_grad()
def tree_attention(q_BNQE: Tensor, k_BLGE: Tensor, v_BLGE: Tensor, starts_B: Tensor, seen_BNN: Tensor, max_start: int,
                   window: int | None = None) -> Tensor:
    """Attention of N nodes of each row, scaled by E ** -0.5.

    q          [B, N, Q, E]
    k, v       [B, L, G, E]  views of the cache, the nodes' keys in slots start .. start + N - 1; L >= max_start + N
    starts     [B] int       number of accepted tokens of each row, at most `max_start`
    seen       [B, N, N] bool  [b, n, m]: m is n or an ancestor of n; parents before children (workers' `ancestors`)
    max_start  known on the host, so that no length is copied from the device
    window     positions that a node attends to, its own included; None: all
    returns    [B, N, Q, E]
    """
    length = max_start + q_BNQE.shape[1]
    by = _by_kernel if runs_kernels(q_BNQE) else _by_torch
    return by(q_BNQE.contiguous(), k_BLGE, v_BLGE, starts_B, seen_BNN.contiguous(), window, length)
