"""Attention of one step of the TTT unroll over packed documents, forward and backward.

At step s the root at packed position i looks at the step-0 keys of its own document up to position i, and at one key
per later step on its own diagonal: those its own draft left at steps 1 .. s (EAGLE-3, arXiv:2503.01840). With a sliding
window of w keys it looks no further back than w positions, its own, i + s, included: at step-0 keys j > i + s - w and
at own keys r > s - w. All of it is one softmax,

    out = sum_j P_j v_j + sum_r P_r v_r,    P = softmax over both of scale q k

computed blockwise with a running maximum, the log-sum-exp kept. Neither scores nor masks exist beyond a block, and a
block of queries reads the keys from its first query's first to its last query's last: no padding, no other document.
Backwards the scores are computed again (FlashAttention, arXiv:2205.14135; the scheme of arXiv:2307.08691). With
G = d loss / d out and delta = rowsum(G * out):

    P = exp(scale q k' - lse)     dS = P * (G v' - delta)     dq = scale (dS k + sum_r dS_r k_r)
    dk = scale dS' q     dv = P' G     and for own keys   dk_r = scale dS_r q     dv_r = P_r G

A key's gradient is summed by the one program that owns it, over all queries that see it: no atomics, so the same input
gives the same bits. Whom a key is seen by is again a range, because queries are taken in the order of their positions:
`sight` finds that order and the ranges once per batch and step, on the device, and any number of layers use it.

On the CPU the same ranges are walked by torch, a block of queries at a time.

    R roots alive at this step, T packed tokens, K kv heads, W query heads per kv head, E head size, S own keys each
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eyrie_kernels.compiler import INTERPRETING, dot, jit, launch, next_power_of_two, runs_kernels, tl
from eyrie_kernels.timing import Machine, Timing, main, seconds

# A score nobody may see. Finite, so that a query whose keys all lie further on has no nan on the way: what it summed
# meanwhile is multiplied by exp(-1e30) = 0 when its first key comes, and every query has one in the end.
_HIDDEN = -1e30


@dataclass(frozen=True)
class Blocks:
    """Queries and keys that a program takes at a time."""

    queries: int
    keys: int


# bfloat16: 64 x 64 by eight warps; by four, heads of 128 put 2 to 3 KiB per thread aside (Triton 3.9, sm_80, compiled
# ahead). float32 and float64 are for tests and small models.
_BLOCKS = {2: Blocks(64, 64), 4: Blocks(32, 32), 8: Blocks(16, 16)}
_WARPS = {2: 8, 4: 8, 8: 4}
_OWN_QUERIES = 16
_CPU_QUERIES = 128


@dataclass(frozen=True)
class Sight:
    """Who sees whom at one step. Made by `sight`."""

    order_R: Tensor
    """int64: the roots, ascending by packed position."""

    last_R: Tensor
    """int32, in that order: the last step-0 key each sees."""

    first_R: Tensor
    """int32, in that order: the first; behind `last` if the window hides them all."""

    num_own: int
    """Own keys that the window leaves, the latest of them."""


def sight(root_R: Tensor, start_R: Tensor, step: int, window: int | None = None) -> Sight:
    """The plan of one step.

    root_R   [R] packed position of each root, distinct.
    start_R  [R] packed position at which its document starts.
    step     the unrolled step: as many own keys does each root have.
    window   keys that a position sees, its own included; None: all.
    """
    order = root_R.argsort()
    last = root_R[order].to(torch.int32)
    first, num_own = start_R[order].to(torch.int32), step
    if window is not None:
        first, num_own = torch.maximum(first, last + (step - window + 1)), min(step, window)
    return Sight(order, last, first, num_own)


# --- the specification -------------------------------------------------------------------------------------------


def reference_packed_attention(q_RKWE: Tensor, k_TKE: Tensor, v_TKE: Tensor, own: Sequence[tuple[Tensor, Tensor]],
                               root_R: Tensor, start_R: Tensor, window: int | None = None) -> Tensor:
    """What `packed_attention` computes at step len(own), as one dense product with a mask; gradients by autograd."""
    (num_roots, _, _, head), step = q_RKWE.shape, len(own)
    position_T = torch.arange(k_TKE.shape[0], device=q_RKWE.device)
    visible = (position_T <= root_R[:, None]) & (position_T >= start_R[:, None])
    if window is not None:
        visible &= position_T > root_R[:, None] + step - window
        own = own[max(0, step - window):]
    scores = torch.einsum("rkwe,tke->rkwt", q_RKWE, k_TKE).masked_fill(~visible[:, None, None], -torch.inf)
    scores = torch.cat([scores, *((q_RKWE * k[:num_roots, :, None]).sum(-1, keepdim=True) for k, _ in own)], -1)
    weights = (scores * head**-0.5).softmax(-1)
    out = torch.einsum("rkwt,tke->rkwe", weights[..., :k_TKE.shape[0]], v_TKE)
    for number, (_, v) in enumerate(own):
        out = out + weights[..., k_TKE.shape[0] + number, None] * v[:num_roots, :, None]
    return out


# --- the CPU's way: the same ranges, by torch -----------------------------------------------------------------------


def _blocks_by_torch(q: Tensor, k: Tensor, own_k: Tensor,
                     seen: Sight) -> Iterator[tuple[Tensor, slice, Tensor, Tensor]]:
    """Of each block of queries: their roots [M], the shared keys in their range, the queries [K, W*M, E], and the
    scores [K, W*M, L + S] of both kinds of keys."""
    num_roots, kv_heads, per_kv, head = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    for start in range(0, num_roots, _CPU_QUERIES):
        block = slice(start, start + _CPU_QUERIES)
        roots, last, first = seen.order_R[block], seen.last_R[block], seen.first_R[block]
        low, high = int(first[0]), int(last[-1]) + 1
        keys = slice(min(low, high), high)
        mine = q[roots].permute(1, 2, 0, 3).reshape(kv_heads, -1, head)
        shared = (mine @ k[keys].permute(1, 2, 0)).to(wide)
        position = torch.arange(keys.start, keys.stop)
        hidden = (position > last[:, None]) | (position < first[:, None])
        shared.view(kv_heads, per_kv, *hidden.shape).masked_fill_(hidden, _HIDDEN / head**-0.5)
        at = own_k[:, roots].permute(2, 1, 3, 0)  # [K, M, E, S]
        diagonal = mine.view(kv_heads, per_kv, -1, 1, head).to(wide) @ at.to(wide).unsqueeze(1)
        scores = torch.cat([shared, diagonal.view(*shared.shape[:2], own_k.shape[0])], -1)
        yield roots, keys, mine, scores.mul_(head**-0.5)


def _own_rows(own: Tensor, roots: Tensor, per_kv: int, wide: torch.dtype) -> Tensor:
    """[S, R, K, E] -> [K, W*M, S, E] of a block's roots."""
    return own[:, roots].to(wide).permute(2, 1, 0, 3).repeat(1, per_kv, 1, 1)


def _forward_by_torch(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor,
                      seen: Sight) -> tuple[Tensor, Tensor]:
    _, kv_heads, per_kv, head = q.shape
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    for roots, keys, _, scores in _blocks_by_torch(q, k, own_k, seen):
        total = scores.logsumexp(-1, keepdim=True)
        weights, length = scores.sub_(total).exp_(), keys.stop - keys.start
        mixed = (weights[..., :length].to(v.dtype) @ v[keys].transpose(0, 1)).to(lse.dtype)
        if own_k.shape[0]:
            mixed += (weights[..., None, length:] @ _own_rows(own_v, roots, per_kv, lse.dtype)).squeeze(-2)
        back = (kv_heads, per_kv, roots.numel())
        out[roots] = mixed.view(*back, head).permute(2, 0, 1, 3).to(out.dtype)
        lse[roots] = total.view(back).permute(2, 0, 1)
    return out, lse


def _backward_by_torch(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, out: Tensor,
                       lse: Tensor, seen: Sight) -> tuple[Tensor, ...]:
    _, kv_heads, per_kv, head = q.shape
    wide, scale = lse.dtype, head**-0.5
    grad_q, grad_own_k, grad_own_v = torch.empty_like(q), torch.zeros_like(own_k), torch.zeros_like(own_v)
    grad_k, grad_v = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    delta = torch.linalg.vecdot(grad.to(wide), out.to(wide))
    for roots, keys, mine, scores in _blocks_by_torch(q, k, own_k, seen):
        length, rows = keys.stop - keys.start, (kv_heads, per_kv * roots.numel(), 1)
        weights = scores.sub_(lse[roots].permute(1, 2, 0).reshape(rows)).exp_()
        upstream = grad[roots].permute(1, 2, 0, 3).reshape(kv_heads, -1, head)
        grad_v[keys] += (weights[..., :length].to(v.dtype).mT @ upstream).transpose(0, 1)
        own_values = _own_rows(own_v, roots, per_kv, wide)
        into = torch.cat([(upstream @ v[keys].permute(1, 2, 0)).to(wide),
                          (own_values @ upstream.to(wide).unsqueeze(-1)).squeeze(-1)], -1)
        into = into.sub_(delta[roots].permute(1, 2, 0).reshape(rows)).mul_(weights).mul_(scale)
        shared = into[..., :length].to(q.dtype)
        grad_k[keys] += (shared.mT @ mine).transpose(0, 1)
        found = (shared @ k[keys].transpose(0, 1)).to(wide)
        if own_k.shape[0]:
            found += (into[..., None, length:] @ _own_rows(own_k, roots, per_kv, wide)).squeeze(-2)
            split = (kv_heads, per_kv, roots.numel(), -1)
            for grads, factor, rows_of in ((grad_own_k, into, mine), (grad_own_v, weights, upstream)):
                both = torch.einsum("kwms,kwme->smke", factor[..., length:].reshape(split),
                                    rows_of.to(wide).view(split))
                grads[:, roots] = both.to(grads.dtype)
        grad_q[roots] = found.view(kv_heads, per_kv, -1, head).permute(2, 0, 1, 3).to(q.dtype)
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_own_k, grad_own_v


# --- kernels -----------------------------------------------------------------------------------------------------


@jit
def _fold(score, most, total):
    """A new maximum, and by how much what was summed so far shrinks; for one score per row."""
    new = tl.maximum(most, score)
    shrink = tl.exp(most - new)
    p = tl.exp(score - new)
    return p, new, total * shrink + p, shrink


@jit
def _forward_kernel(q, k, v, own_k, own_v, out, lse, order, last, first, low, high, num_roots, own_stride, num_own,
                    SCALE: tl.constexpr, KV_HEADS: tl.constexpr, PER_KV: tl.constexpr, HEAD: tl.constexpr,
                    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, HIDDEN: tl.constexpr,
                    INTERPRETED: tl.constexpr):
    """One block of queries of one head."""
    WIDE = lse.dtype.element_ty
    block = tl.program_id(0)
    head = tl.program_id(1)
    kv = head // PER_KV
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    e = tl.arange(0, BLOCK_E)
    real = m < num_roots
    cell = real[:, None] & (e[None, :] < HEAD)
    root = tl.load(order + m, real, other=0)
    until = tl.load(last + m, real, other=-1)
    since = tl.load(first + m, real, other=0)
    row = (root * KV_HEADS * PER_KV + head) * HEAD
    own_row = (root * KV_HEADS + kv) * HEAD
    queries = tl.load(q + row[:, None] + e[None, :], cell, other=0.0)
    most = tl.zeros([BLOCK_M], WIDE) + HIDDEN
    total = tl.zeros([BLOCK_M], WIDE)
    mixed = tl.zeros([BLOCK_M, BLOCK_E], WIDE)
    begin = tl.load(low + block)
    end = tl.load(high + block)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        of_key = (n.to(tl.int64) * KV_HEADS + kv) * HEAD
        key_cell = (n < end)[:, None] & (e[None, :] < HEAD)
        keys = tl.load(k + of_key[:, None] + e[None, :], key_cell, other=0.0)
        values = tl.load(v + of_key[:, None] + e[None, :], key_cell, other=0.0)
        visible = (n[None, :] <= until[:, None]) & (n[None, :] >= since[:, None])
        scores = tl.where(visible, dot(queries, tl.trans(keys), INTERPRETED) * SCALE, HIDDEN)
        new = tl.maximum(most, tl.max(scores, 1))
        shrink = tl.exp(most - new)
        p = tl.exp(scores - new[:, None])
        total = total * shrink + tl.sum(p, 1)
        mixed = mixed * shrink[:, None] + dot(p.to(v.dtype.element_ty), values, INTERPRETED)
        most = new
    for own in range(num_own):
        at = own * own_stride + own_row
        key = tl.load(own_k + at[:, None] + e[None, :], cell, other=0.0).to(WIDE)
        value = tl.load(own_v + at[:, None] + e[None, :], cell, other=0.0).to(WIDE)
        p, most, total, shrink = _fold(tl.sum(queries.to(WIDE) * key, 1) * SCALE, most, total)
        mixed = mixed * shrink[:, None] + p[:, None] * value
    total = tl.where(real, total, 1.0)
    tl.store(out + row[:, None] + e[None, :], (mixed / total[:, None]).to(out.dtype.element_ty), cell)
    tl.store(lse + root * KV_HEADS * PER_KV + head, most + tl.log(total), real)


@jit
def _query_grad_kernel(q, k, v, own_k, own_v, out, lse, grad, delta, grad_q, order, last, first, low, high, num_roots,
                       own_stride, num_own, SCALE: tl.constexpr, KV_HEADS: tl.constexpr, PER_KV: tl.constexpr,
                       HEAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
                       INTERPRETED: tl.constexpr):
    """dq of one block of queries of one head; leaves delta for the other two."""
    WIDE = lse.dtype.element_ty
    block = tl.program_id(0)
    head = tl.program_id(1)
    kv = head // PER_KV
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    e = tl.arange(0, BLOCK_E)
    real = m < num_roots
    cell = real[:, None] & (e[None, :] < HEAD)
    root = tl.load(order + m, real, other=0)
    until = tl.load(last + m, real, other=-1)
    since = tl.load(first + m, real, other=0)
    row = (root * KV_HEADS * PER_KV + head) * HEAD
    own_row = (root * KV_HEADS + kv) * HEAD
    queries = tl.load(q + row[:, None] + e[None, :], cell, other=0.0)
    upstream = tl.load(grad + row[:, None] + e[None, :], cell, other=0.0)
    produced = tl.load(out + row[:, None] + e[None, :], cell, other=0.0)
    norm = tl.load(lse + root * KV_HEADS * PER_KV + head, real, other=0.0)
    less = tl.sum(upstream.to(WIDE) * produced.to(WIDE), 1)
    tl.store(delta + root * KV_HEADS * PER_KV + head, less, real)
    found = tl.zeros([BLOCK_M, BLOCK_E], WIDE)
    begin = tl.load(low + block)
    end = tl.load(high + block)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        of_key = (n.to(tl.int64) * KV_HEADS + kv) * HEAD
        key_cell = (n < end)[:, None] & (e[None, :] < HEAD)
        keys = tl.load(k + of_key[:, None] + e[None, :], key_cell, other=0.0)
        values = tl.load(v + of_key[:, None] + e[None, :], key_cell, other=0.0)
        visible = (n[None, :] <= until[:, None]) & (n[None, :] >= since[:, None])
        scores = dot(queries, tl.trans(keys), INTERPRETED) * SCALE
        p = tl.where(visible, tl.exp(tl.where(visible, scores, norm[:, None]) - norm[:, None]), 0.0)
        slope = p * (dot(upstream, tl.trans(values), INTERPRETED) - less[:, None]) * SCALE
        found += dot(slope.to(k.dtype.element_ty), keys, INTERPRETED)
    for own in range(num_own):
        at = own * own_stride + own_row
        key = tl.load(own_k + at[:, None] + e[None, :], cell, other=0.0).to(WIDE)
        value = tl.load(own_v + at[:, None] + e[None, :], cell, other=0.0).to(WIDE)
        p = tl.exp(tl.sum(queries.to(WIDE) * key, 1) * SCALE - norm)
        slope = p * (tl.sum(upstream.to(WIDE) * value, 1) - less) * SCALE
        found += slope[:, None] * key
    tl.store(grad_q + row[:, None] + e[None, :], found.to(grad_q.dtype.element_ty), cell)


@jit
def _own_grad_kernel(q, own_k, own_v, lse, grad, delta, grad_own_k, grad_own_v, num_roots, own_stride,
                     SCALE: tl.constexpr, KV_HEADS: tl.constexpr, PER_KV: tl.constexpr, HEAD: tl.constexpr,
                     BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """dk and dv of one own key of some roots and one kv head."""
    WIDE = lse.dtype.element_ty
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    kv = tl.program_id(1)
    e = tl.arange(0, BLOCK_E)
    real = m < num_roots
    cell = real[:, None] & (e[None, :] < HEAD)
    root = m.to(tl.int64)
    at = tl.program_id(2).to(tl.int64) * own_stride + (root * KV_HEADS + kv) * HEAD
    key = tl.load(own_k + at[:, None] + e[None, :], cell, other=0.0).to(WIDE)
    value = tl.load(own_v + at[:, None] + e[None, :], cell, other=0.0).to(WIDE)
    to_key = tl.zeros([BLOCK_M, BLOCK_E], WIDE)
    to_value = tl.zeros([BLOCK_M, BLOCK_E], WIDE)
    for w in range(PER_KV):
        of_head = root * KV_HEADS * PER_KV + kv * PER_KV + w
        queries = tl.load(q + of_head[:, None] * HEAD + e[None, :], cell, other=0.0).to(WIDE)
        upstream = tl.load(grad + of_head[:, None] * HEAD + e[None, :], cell, other=0.0).to(WIDE)
        norm = tl.load(lse + of_head, real, other=0.0)
        p = tl.exp(tl.sum(queries * key, 1) * SCALE - norm)
        slope = p * (tl.sum(upstream * value, 1) - tl.load(delta + of_head, real, other=0.0)) * SCALE
        to_key += slope[:, None] * queries
        to_value += p[:, None] * upstream
    tl.store(grad_own_k + at[:, None] + e[None, :], to_key.to(grad_own_k.dtype.element_ty), cell)
    tl.store(grad_own_v + at[:, None] + e[None, :], to_value.to(grad_own_v.dtype.element_ty), cell)


@jit
def _key_grad_kernel(q, k, v, lse, grad, delta, grad_k, grad_v, order, last, first, low, high, num_keys,
                     SCALE: tl.constexpr, KV_HEADS: tl.constexpr, PER_KV: tl.constexpr, HEAD: tl.constexpr,
                     BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, INTERPRETED: tl.constexpr):
    """dk and dv of one block of step-0 keys of one kv head."""
    WIDE = lse.dtype.element_ty
    block = tl.program_id(0)
    kv = tl.program_id(1)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    e = tl.arange(0, BLOCK_E)
    key_cell = (n < num_keys)[:, None] & (e[None, :] < HEAD)
    of_key = (n.to(tl.int64) * KV_HEADS + kv) * HEAD
    keys = tl.load(k + of_key[:, None] + e[None, :], key_cell, other=0.0)
    values = tl.load(v + of_key[:, None] + e[None, :], key_cell, other=0.0)
    to_key = tl.zeros([BLOCK_N, BLOCK_E], WIDE)
    to_value = tl.zeros([BLOCK_N, BLOCK_E], WIDE)
    begin = tl.load(low + block)
    end = tl.load(high + block)
    for w in range(PER_KV):
        for start in range(begin, end, BLOCK_M):
            m = start + tl.arange(0, BLOCK_M)
            real = m < end
            root = tl.load(order + m, real, other=0)
            until = tl.load(last + m, real, other=-1)
            since = tl.load(first + m, real, other=0)
            of_head = root * KV_HEADS * PER_KV + kv * PER_KV + w
            cell = real[:, None] & (e[None, :] < HEAD)
            queries = tl.load(q + of_head[:, None] * HEAD + e[None, :], cell, other=0.0)
            upstream = tl.load(grad + of_head[:, None] * HEAD + e[None, :], cell, other=0.0)
            norm = tl.load(lse + of_head, real, other=0.0)
            less = tl.load(delta + of_head, real, other=0.0)
            visible = (n[:, None] <= until[None, :]) & (n[:, None] >= since[None, :])
            scores = dot(keys, tl.trans(queries), INTERPRETED) * SCALE
            p = tl.where(visible, tl.exp(tl.where(visible, scores, norm[None, :]) - norm[None, :]), 0.0)
            to_value += dot(p.to(q.dtype.element_ty), upstream, INTERPRETED)
            slope = p * (dot(values, tl.trans(upstream), INTERPRETED) - less[None, :]) * SCALE
            to_key += dot(slope.to(q.dtype.element_ty), queries, INTERPRETED)
    tl.store(grad_k + of_key[:, None] + e[None, :], to_key.to(grad_k.dtype.element_ty), key_cell)
    tl.store(grad_v + of_key[:, None] + e[None, :], to_value.to(grad_v.dtype.element_ty), key_cell)


def _query_ranges(seen: Sight, size: int) -> tuple[Tensor, Tensor]:
    """The keys [low, high) that each block of `size` queries looks at."""
    low = seen.first_R[::size].contiguous()  # both grow with the position
    ends = torch.arange(size - 1, seen.last_R.numel() + size - 1, size, device=low.device)
    high = seen.last_R[ends.clamp(max=seen.last_R.numel() - 1)] + 1
    return low, high


def _key_ranges(seen: Sight, num_keys: int, size: int) -> tuple[Tensor, Tensor]:
    """The queries [low, high), in order, that look at each block of `size` keys."""
    begin = torch.arange(0, num_keys, size, device=seen.last_R.device, dtype=torch.int32)
    low = torch.searchsorted(seen.last_R, begin, out_int32=True)
    high = torch.searchsorted(seen.first_R, (begin + size - 1).clamp(max=num_keys - 1), right=True, out_int32=True)
    return low, high


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, seen: Sight) -> Tensor:
        ctx.seen = seen
        if runs_kernels(q):
            out, lse = _forward_by_kernel(q, k, v, own_k, own_v, seen)
        else:
            out, lse = _forward_by_torch(q, k, v, own_k, own_v, seen)
        ctx.save_for_backward(q, k, v, own_k, own_v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept: tuple[Tensor, ...] = ctx.saved_tensors
        by: Callable[..., tuple[Tensor, ...]] = _backward_by_kernel if runs_kernels(grad) else _backward_by_torch
        return *by(grad.contiguous(), *kept, ctx.seen), None


def _shape(q: Tensor) -> tuple[Blocks, dict[str, Any]]:
    """Block sizes, and the constants that all kernels share."""
    _, kv_heads, per_kv, head = q.shape
    return _BLOCKS[q.element_size()], {"SCALE": head**-0.5, "KV_HEADS": kv_heads, "PER_KV": per_kv, "HEAD": head,
                                       "BLOCK_E": max(16, next_power_of_two(head))}


def _forward_by_kernel(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor,
                       seen: Sight) -> tuple[Tensor, Tensor]:
    num_roots, kv_heads, per_kv, _ = q.shape
    blocks, constants = _shape(q)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    launch(_forward_kernel, (-(-num_roots // blocks.queries), kv_heads * per_kv), q, k, v, own_k, own_v, out, lse,
           seen.order_R, seen.last_R, seen.first_R, *_query_ranges(seen, blocks.queries), num_roots, own_k.stride(0),
           own_k.shape[0], **constants, BLOCK_M=blocks.queries, BLOCK_N=blocks.keys, HIDDEN=_HIDDEN,
           INTERPRETED=INTERPRETING, num_warps=_WARPS[q.element_size()])
    return out, lse


def _backward_by_kernel(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, out: Tensor,
                        lse: Tensor, seen: Sight) -> tuple[Tensor, ...]:
    (num_roots, kv_heads, per_kv, _), num_keys, num_own = q.shape, k.shape[0], own_k.shape[0]
    blocks, constants = _shape(q)
    delta, grad_q = torch.empty_like(lse), torch.empty_like(q)
    grad_k, grad_v, grad_own_k, grad_own_v = (torch.empty_like(part) for part in (k, v, own_k, own_v))
    query_blocks = -(-num_roots // blocks.queries)
    planned = seen.order_R, seen.last_R, seen.first_R
    launch(_query_grad_kernel, (query_blocks, kv_heads * per_kv), q, k, v, own_k, own_v, out, lse, grad, delta, grad_q,
           *planned, *_query_ranges(seen, blocks.queries), num_roots, own_k.stride(0), num_own, **constants,
           BLOCK_M=blocks.queries, BLOCK_N=blocks.keys, INTERPRETED=INTERPRETING, num_warps=_WARPS[q.element_size()])
    launch(_own_grad_kernel, (-(-num_roots // _OWN_QUERIES), kv_heads, num_own), q, own_k, own_v, lse, grad, delta,
           grad_own_k, grad_own_v, num_roots, own_k.stride(0), **constants, BLOCK_M=_OWN_QUERIES)
    launch(_key_grad_kernel, (-(-num_keys // blocks.keys), kv_heads), q, k, v, lse, grad, delta, grad_k, grad_v,
           *planned, *_key_ranges(seen, num_keys, blocks.keys), num_keys, **constants, BLOCK_M=blocks.queries,
           BLOCK_N=blocks.keys, INTERPRETED=INTERPRETING, num_warps=_WARPS[q.element_size()])
    return grad_q, grad_k, grad_v, grad_own_k, grad_own_v


def packed_attention(q_RKWE: Tensor, k_TKE: Tensor, v_TKE: Tensor, own: Sequence[tuple[Tensor, Tensor]],
                     seen: Sight) -> Tensor:
    """Attention of the roots alive at step len(own), scaled by E ** -0.5.

    q_RKWE       [R, K, W, E]  rotated queries, in the order in which `sight` was given the roots.
    k_TKE, v_TKE [T, K, E]     rotated keys and values of step 0.
    own          keys and values [R_r, K, E] of steps 1 .. s, R_r >= R; their first R rows belong to the queries' roots.
    seen         `sight(roots, starts, len(own), window)`
    returns      [R, K, W, E]; gradients to q, k, v and own.
    """
    num_roots = q_RKWE.shape[0]
    if num_roots == 0:
        return q_RKWE * 0  # nobody looks; an empty batch still has a gradient
    kept = own[len(own) - seen.num_own:]
    own_k, own_v = (torch.stack([pair[side][:num_roots] for pair in kept]) if kept
                    else k_TKE.new_empty(0, num_roots, *k_TKE.shape[1:]) for side in (0, 1))
    q, k, v = (part.contiguous() for part in (q_RKWE, k_TKE, v_TKE))
    out: Tensor = _PackedAttention.apply(q, k, v, own_k, own_v, seen)
    return out


def bench(machine: Machine) -> list[Timing]:
    """The last of seven steps over documents of mixed lengths, forward and backward, against its arithmetic."""
    tokens, kv_heads, per_kv, head, dtype = (16_384, 8, 4, 128, torch.bfloat16) if machine.cuda else (
        1024, 2, 2, 64, torch.float32)
    lengths = [tokens // 2, tokens // 4, tokens // 8, tokens // 8]
    start = torch.repeat_interleave(torch.tensor([0, *lengths[:-1]]).cumsum(0), torch.tensor(lengths))
    start = start.to(machine.device)
    root = torch.arange(tokens, device=machine.device)
    q, k, v = (torch.randn(tokens, *shape, dtype=dtype, device=machine.device, requires_grad=True)
               for shape in ((kv_heads, per_kv, head), (kv_heads, head), (kv_heads, head)))
    own = [(torch.randn_like(k), torch.randn_like(k)) for _ in range(6)]
    seen, upstream = sight(root, start, len(own)), torch.randn_like(q)
    once = 4 * kv_heads * per_kv * head * int((root - start + 1 + len(own)).sum())
    shape = f"T={tokens} K={kv_heads} W={per_kv} E={head} {dtype}".replace("torch.", "")

    def both() -> None:
        torch.autograd.grad(packed_attention(q, k, v, own, seen), (q, k, v), upstream)

    with torch.no_grad():
        forward = seconds(lambda: packed_attention(q, k, v, own, seen), machine)
    rate = machine.flops(dtype)
    return [Timing("packed_attention.forward", shape, forward, once / rate, "flops"),
            # two products forward, four backward; making the scores again is not counted
            Timing("packed_attention.both", shape, seconds(both, machine), 3 * once / rate, "flops")]


if __name__ == "__main__":
    main(bench)
