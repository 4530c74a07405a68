"""Attention of one step of the TTT unroll over packed documents, forward and backward.

At step s the root at packed position i attends to the step-0 keys of its own document up to position i, and to one key
per later step, which its own draft produced at steps 1 .. s (EAGLE-3, arXiv:2503.01840). With a sliding window of w
keys it attends no further back than w positions, its own, i + s, included: to step-0 keys j > i + s - w and to own keys
r > s - w. All of it is one softmax,

    out = sum_j P_j v_j + sum_r P_r v_r,    P = softmax over both of scale q k

computed blockwise with a running maximum, the log-sum-exp kept. Neither scores nor masks exist beyond a block, and a
block of queries reads the keys from its first query's first to its last query's last: no padding, no other document.
The backward pass computes the scores again (FlashAttention, arXiv:2205.14135; the scheme of arXiv:2307.08691). With
G = d loss / d out and delta = rowsum(G * out):

    P = exp(scale q k' - lse)     dS = P * (G v' - delta)     dq = scale (dS k + sum_r dS_r k_r)
    dk = scale dS' q     dv = P' G     and for own keys   dk_r = scale dS_r q     dv_r = P_r G

A key's gradient is summed by the one program that owns it, over all queries that see it: no atomics, so the same input
gives the same bits. The queries that see a key are again a range, because queries are processed in the order of their
positions: `key_ranges` computes that order and the ranges once per batch and step, on the device, for any number of
layers.

CPU tensors are computed by the dense formula; training on a CPU uses `eyrie_workers.training.attention`.

    R roots alive at this step, T packed tokens, K kv heads, W query heads per kv head, E head size, S own keys each
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eyrie_kernels.compiler import INTERPRETING, dot, jit, launch, next_power_of_two, runs_kernels, tl

# Score of a masked key. Finite, so that a query whose visible keys all come later has no nan until then: what it summed
# before is multiplied by exp(-1e30) = 0 at its first visible key, and every query has one in the end.
_HIDDEN = -1e30


@dataclass(frozen=True)
class Blocks:
    """How a program of one kernel works: the queries and keys that it processes at a time, and by how many warps."""

    queries: int
    keys: int
    warps: int
    stages: int = 2
    """Blocks of the loop that are loaded ahead."""


Kernel = Literal["forward", "query_grad", "key_grad"]
# By the size of an element. bfloat16: the fastest of those measured on an H200 with heads of 128 (docs/results/gpu.md).
# float32 and float64 are for tests and small models.
_BLOCKS: dict[int, dict[Kernel, Blocks]] = {
    2: {"forward": Blocks(64, 64, 4, 3), "query_grad": Blocks(128, 64, 8, 3), "key_grad": Blocks(32, 64, 4, 3)},
    4: dict.fromkeys(("forward", "query_grad", "key_grad"), Blocks(32, 32, 8)),
    8: dict.fromkeys(("forward", "query_grad", "key_grad"), Blocks(16, 16, 4))}
# bfloat16 heads of 256: those blocks do not fit a multiprocessor. Right on an H100 (docs/results/gpu.md), not timed.
_BLOCKS_OF_WIDE_HEADS: dict[Kernel, Blocks] = {
    "forward": Blocks(64, 64, 8), "query_grad": Blocks(64, 32, 8), "key_grad": Blocks(32, 64, 8)}
_OWN_QUERIES = 16


@dataclass(frozen=True)
class KeyRanges:
    """The step-0 keys that each query attends to at one step. Computed by `key_ranges`."""

    order_R: Tensor
    """int64: the roots, ascending by packed position."""

    last_R: Tensor
    """int32, in that order: the last step-0 key that each attends to."""

    first_R: Tensor
    """int32, in that order: the first one; greater than `last_R` if the window excludes all."""

    num_own: int
    """Number of own keys inside the window; these are the latest ones."""


def key_ranges(root_R: Tensor, start_R: Tensor, step: int, window: int | None = None) -> KeyRanges:
    """Order and ranges of one step.

    root_R   [R] packed position of each root, distinct.
    start_R  [R] packed position at which its document starts.
    step     the unrolled step, and so the number of own keys of each root.
    window   positions that a query attends to, its own included; None: all.
    """
    order = root_R.argsort()
    last = root_R[order].to(torch.int32)
    first, num_own = start_R[order].to(torch.int32), step
    if window is not None:
        first, num_own = torch.maximum(first, last + (step - window + 1)), min(step, window)
    return KeyRanges(order, last, first, num_own)


# --- the specification -------------------------------------------------------------------------------------------


def _dense_attention(q_RKWE: Tensor, k_TKE: Tensor, v_TKE: Tensor, own: Sequence[tuple[Tensor, Tensor]],
                     visible_RT: Tensor) -> Tensor:
    """One softmax over the visible shared keys and the own keys, as dense products with a mask."""
    (num_roots, _, _, head), num_keys = q_RKWE.shape, k_TKE.shape[0]
    # Scores and softmax in at least float32, products in the inputs' dtype: as the kernel does.
    wide = torch.promote_types(q_RKWE.dtype, torch.float32)
    scores = torch.einsum("rkwe,tke->rkwt", q_RKWE, k_TKE).to(wide)
    scores = scores.masked_fill(~visible_RT[:, None, None], -torch.inf)
    scores = torch.cat([scores, *((q_RKWE * k[:num_roots, :, None]).to(wide).sum(-1, keepdim=True) for k, _ in own)],
                       -1)
    weights = (scores * head**-0.5).softmax(-1)
    out = torch.einsum("rkwt,tke->rkwe", weights[..., :num_keys].to(v_TKE.dtype), v_TKE).to(wide)
    for number, (_, v) in enumerate(own):
        out = out + weights[..., num_keys + number, None] * v[:num_roots, :, None]
    return out.to(q_RKWE.dtype)


def reference_packed_attention(q_RKWE: Tensor, k_TKE: Tensor, v_TKE: Tensor, own: Sequence[tuple[Tensor, Tensor]],
                               root_R: Tensor, start_R: Tensor, window: int | None = None) -> Tensor:
    """The specification of `packed_attention` at step len(own), without key ranges; gradients by autograd."""
    step = len(own)
    position_T = torch.arange(k_TKE.shape[0], device=q_RKWE.device)
    visible = (position_T <= root_R[:, None]) & (position_T >= start_R[:, None])
    if window is not None:
        visible &= position_T > root_R[:, None] + step - window
        own = own[max(0, step - window):]
    return _dense_attention(q_RKWE, k_TKE, v_TKE, own, visible)


def _visible(ranges: KeyRanges, num_keys: int) -> Tensor:
    """[R, T] bool, in the order of the queries: the step-0 keys that each attends to."""
    position_T = torch.arange(num_keys, device=ranges.last_R.device)
    in_order = (position_T >= ranges.first_R[:, None]) & (position_T <= ranges.last_R[:, None])
    return torch.empty_like(in_order).index_copy_(0, ranges.order_R, in_order)


# --- kernels -----------------------------------------------------------------------------------------------------


@jit
def _fold(score, most, total):
    """One step of the online softmax, with one score per row: (its weight, new maximum, new sum, factor that rescales
    what was summed before)."""
    new = tl.maximum(most, score)
    shrink = tl.exp(most - new)
    p = tl.exp(score - new)
    return p, new, total * shrink + p, shrink


@jit
def _forward_kernel(q, k, v, own_k, own_v, out, lse, last, first, low, high, num_roots, own_stride, num_own,
                    SCALE: tl.constexpr, KV_HEADS: tl.constexpr, PER_KV: tl.constexpr, HEAD: tl.constexpr,
                    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, HIDDEN: tl.constexpr,
                    INTERPRETED: tl.constexpr):
    """Output and log-sum-exp of one block of queries of one head."""
    WIDE = lse.dtype.element_ty
    block = tl.program_id(0)
    head = tl.program_id(1)
    kv = head // PER_KV
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    e = tl.arange(0, BLOCK_E)
    real = m < num_roots
    cell = real[:, None] & (e[None, :] < HEAD)
    root = m.to(tl.int64)
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
def _query_grad_kernel(q, k, v, own_k, own_v, out, lse, grad, delta, grad_q, last, first, low, high, num_roots,
                       own_stride, num_own, SCALE: tl.constexpr, KV_HEADS: tl.constexpr, PER_KV: tl.constexpr,
                       HEAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
                       INTERPRETED: tl.constexpr):
    """dq of one block of queries of one head; writes delta for the other two kernels."""
    WIDE = lse.dtype.element_ty
    block = tl.program_id(0)
    head = tl.program_id(1)
    kv = head // PER_KV
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    e = tl.arange(0, BLOCK_E)
    real = m < num_roots
    cell = real[:, None] & (e[None, :] < HEAD)
    root = m.to(tl.int64)
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
    to_query = tl.zeros([BLOCK_M, BLOCK_E], WIDE)
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
        # Masked scores are replaced before `exp`, which could overflow on them.
        p = tl.where(visible, tl.exp(tl.where(visible, scores, norm[:, None]) - norm[:, None]), 0.0)
        slope = p * (dot(upstream, tl.trans(values), INTERPRETED) - less[:, None]) * SCALE
        to_query += dot(slope.to(k.dtype.element_ty), keys, INTERPRETED)
    for own in range(num_own):
        at = own * own_stride + own_row
        key = tl.load(own_k + at[:, None] + e[None, :], cell, other=0.0).to(WIDE)
        value = tl.load(own_v + at[:, None] + e[None, :], cell, other=0.0).to(WIDE)
        p = tl.exp(tl.sum(queries.to(WIDE) * key, 1) * SCALE - norm)
        slope = p * (tl.sum(upstream.to(WIDE) * value, 1) - less) * SCALE
        to_query += slope[:, None] * key
    tl.store(grad_q + row[:, None] + e[None, :], to_query.to(grad_q.dtype.element_ty), cell)


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
def _key_grad_kernel(q, k, v, lse, grad, delta, grad_k, grad_v, last, first, low, high, num_keys,
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
            root = m.to(tl.int64)
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


def _key_spans(ranges: KeyRanges, size: int) -> tuple[Tensor, Tensor]:
    """The keys [low, high) that each block of `size` queries reads."""
    low = ranges.first_R[::size].contiguous()  # `first_R` and `last_R` both ascend
    ends = torch.arange(size - 1, ranges.last_R.numel() + size - 1, size, device=low.device)
    high = ranges.last_R[ends.clamp(max=ranges.last_R.numel() - 1)] + 1
    return low, high


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, ranges: KeyRanges) -> Tensor:
        ctx.ranges = ranges
        out, lse = _forward(_in_order(q, ranges), k, v, _in_order(own_k, ranges, 1), _in_order(own_v, ranges, 1),
                            ranges)
        out = _in_place(out, ranges)
        ctx.save_for_backward(q, k, v, own_k, own_v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, own_k, own_v, out, lse), ranges = ctx.saved_tensors, ctx.ranges
        grad, q, out = (_in_order(rows, ranges) for rows in (grad, q, out))
        own_k, own_v = (_in_order(rows, ranges, 1) for rows in (own_k, own_v))
        grad_q, grad_k, grad_v, grad_own_k, grad_own_v = _backward(grad, q, k, v, own_k, own_v, out, lse, ranges)
        return (_in_place(grad_q, ranges), grad_k, grad_v, _in_place(grad_own_k, ranges, 1),
                _in_place(grad_own_v, ranges, 1), None)


# Rows are copied into the order of the queries' positions and back, so that a program reads neighbouring rows and loads
# them ahead without waiting for their addresses. By its bytes the copying is at most a tenth of their time.
def _in_order(rows: Tensor, ranges: KeyRanges, dim: int = 0) -> Tensor:
    return rows.index_select(dim, ranges.order_R)


def _in_place(rows: Tensor, ranges: KeyRanges, dim: int = 0) -> Tensor:
    return torch.empty_like(rows).index_copy_(dim, ranges.order_R, rows)


def _constants(q: Tensor) -> dict[str, Any]:
    """What all kernels share."""
    _, kv_heads, per_kv, head = q.shape
    return {"SCALE": head**-0.5, "KV_HEADS": kv_heads, "PER_KV": per_kv, "HEAD": head,
            "BLOCK_E": max(16, next_power_of_two(head))}


def _settings(q: Tensor, kernel: Kernel) -> tuple[Blocks, dict[str, Any]]:
    """Block sizes of one kernel, and its constants."""
    wide = q.element_size() == 2 and q.shape[-1] > 128
    blocks = (_BLOCKS_OF_WIDE_HEADS if wide else _BLOCKS[q.element_size()])[kernel]
    return blocks, _constants(q) | {"BLOCK_M": blocks.queries, "BLOCK_N": blocks.keys, "INTERPRETED": INTERPRETING,
                                    "num_warps": blocks.warps, "num_stages": blocks.stages}


def _forward(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, ranges: KeyRanges) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; rows of roots in order, here and in `_backward`."""
    num_roots, kv_heads, per_kv, _ = q.shape
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    blocks, settings = _settings(q, "forward")
    launch(_forward_kernel, (-(-num_roots // blocks.queries), kv_heads * per_kv), q, k, v, own_k, own_v, out, lse,
           ranges.last_R, ranges.first_R, *_key_spans(ranges, blocks.queries), num_roots, own_k.stride(0),
           own_k.shape[0], HIDDEN=_HIDDEN, **settings)
    return out, lse


def _backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, out: Tensor, lse: Tensor,
              ranges: KeyRanges) -> tuple[Tensor, ...]:
    (num_roots, kv_heads, per_kv, _), num_keys, num_own = q.shape, k.shape[0], own_k.shape[0]
    delta, grad_q = torch.empty_like(lse), torch.empty_like(q)
    grad_k, grad_v, grad_own_k, grad_own_v = (torch.empty_like(part) for part in (k, v, own_k, own_v))
    blocks, settings = _settings(q, "query_grad")
    launch(_query_grad_kernel, (-(-num_roots // blocks.queries), kv_heads * per_kv), q, k, v, own_k, own_v, out, lse,
           grad, delta, grad_q, ranges.last_R, ranges.first_R, *_key_spans(ranges, blocks.queries), num_roots,
           own_k.stride(0), num_own, **settings)
    launch(_own_grad_kernel, (-(-num_roots // _OWN_QUERIES), kv_heads, num_own), q, own_k, own_v, lse, grad, delta,
           grad_own_k, grad_own_v, num_roots, own_k.stride(0), **_constants(q), BLOCK_M=_OWN_QUERIES)
    blocks, settings = _settings(q, "key_grad")
    # The queries [low, high), in order, that read each block of keys. `last_R` and `first_R` both ascend: skip queries
    # whose last key comes before the block, stop at the first query whose first key comes after it.
    begin = torch.arange(0, num_keys, blocks.keys, device=ranges.last_R.device, dtype=torch.int32)
    low = torch.searchsorted(ranges.last_R, begin, out_int32=True)
    high = torch.searchsorted(ranges.first_R, (begin + blocks.keys - 1).clamp(max=num_keys - 1), right=True,
                              out_int32=True)
    launch(_key_grad_kernel, (-(-num_keys // blocks.keys), kv_heads), q, k, v, lse, grad, delta, grad_k, grad_v,
           ranges.last_R, ranges.first_R, low, high, num_keys, **settings)
    return grad_q, grad_k, grad_v, grad_own_k, grad_own_v


def packed_attention(q_RKWE: Tensor, k_TKE: Tensor, v_TKE: Tensor, own: Sequence[tuple[Tensor, Tensor]],
                     ranges: KeyRanges) -> Tensor:
    """Attention of the roots alive at step len(own), scaled by E ** -0.5.

    q_RKWE       [R, K, W, E]  rotated queries, in the order of the roots that `key_ranges` was given.
    k_TKE, v_TKE [T, K, E]     rotated keys and values of step 0.
    own          keys and values [R_r, K, E] of steps 1 .. s, R_r >= R; their first R rows belong to the queries' roots.
    ranges       `key_ranges(roots, starts, len(own), window)`
    returns      [R, K, W, E]; gradients to q, k, v and own.
    """
    num_roots = q_RKWE.shape[0]
    if num_roots == 0:
        return q_RKWE * 0  # no query reads a key; an empty batch still has a gradient
    visible_own = own[len(own) - ranges.num_own:]
    if not runs_kernels(q_RKWE):
        return _dense_attention(q_RKWE, k_TKE, v_TKE, visible_own, _visible(ranges, k_TKE.shape[0]))
    own_k, own_v = (torch.stack([pair[side][:num_roots] for pair in visible_own]) if visible_own
                    else k_TKE.new_empty(0, num_roots, *k_TKE.shape[1:]) for side in (0, 1))
    q, k, v = (part.contiguous() for part in (q_RKWE, k_TKE, v_TKE))
    out: Tensor = _PackedAttention.apply(q, k, v, own_k, own_v, ranges)
    return out
