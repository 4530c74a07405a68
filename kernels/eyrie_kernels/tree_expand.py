"""Expansion and reranking of a draft tree by cumulative log-probability (EAGLE-2, arXiv:2406.16858).

    expand   the K most probable children of each frontier node, where a child's score is its parent's score + its
             log-probability; and the K best of all W * K children, which are the next frontier
    rerank   the M best of all C candidates as a tree, in the order of their expansion, so that parents come before
             children. A child's score never exceeds its parent's, and of equal scores the earlier candidate is kept, so
             the parent of a kept candidate is kept too.

Plain PyTorch computes and sorts a log-softmax of [B, W, D] to keep K of D numbers. Here one program per slice of a
node's logits reads it once and writes its K largest values, its maximum and its sum of exponentials; one small program
per row merges the slices. Lower bound: memory traffic, the logits read once.

`rerank` needs no sort: a candidate is kept if fewer than M others are better, which C * C comparisons decide (C is a
few hundred), and its index in the tree is 1 + the number of kept candidates before it.

    B rows, W frontier nodes, D draft vocabulary, K children of a node, C candidates, N = M + 1 nodes with the root
"""

from typing import NamedTuple

import torch
from torch import Tensor

from eyrie_kernels.compiler import jit, launch, next_power_of_two, runs_kernels, tl

NO_TOKEN = -1
_SLICE, _BLOCK_C, _BLOCK_J = 2048, 128, 64


class Expanded(NamedTuple):
    """tokens [B, W, K] int64 draft ids, most probable first; scores [B, W, K] cumulative; frontier [B, K] int64: the
    best children as indices into W * K, best first."""

    tokens: Tensor
    scores: Tensor
    frontier: Tensor


class Tree(NamedTuple):
    """tokens, parents [B, N] int64 and scores [B, N]; node 0 is the root, its own parent, NO_TOKEN, score 0."""

    tokens: Tensor
    parents: Tensor
    scores: Tensor


# --- the specification, and the CPU form -------------------------------------------------------------------------


def _largest(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of the last axis, equal values in order of index. `topk` guarantees no order among equals."""
    values, index = x.sort(dim=-1, descending=True, stable=True)
    return values[..., :count], index[..., :count]


def reference_expand(logits_BWD: Tensor, scores_BW: Tensor, width: int) -> Expanded:
    """The specification of `expand`."""
    width = min(width, logits_BWD.shape[-1])
    logits = logits_BWD.to(scores_BW.dtype)
    best, tokens = _largest(logits, width)
    scores = scores_BW.unsqueeze(-1) + best - logits.logsumexp(-1, keepdim=True)
    return Expanded(tokens, scores, _largest(scores.flatten(1), width)[1])


def _expand_by_torch(logits: Tensor, scores: Tensor, width: int) -> Expanded:
    """The CPU form, with `topk` instead of a stable sort: among equal values it may keep others than the reference."""
    best, tokens = logits.topk(width)
    children = scores.unsqueeze(-1) + best.to(scores.dtype) - logits.to(scores.dtype).logsumexp(-1, keepdim=True)
    return Expanded(tokens, children, children.flatten(1).topk(width).indices)


def reference_rerank(tokens_BC: Tensor, parents_BC: Tensor, scores_BC: Tensor, num_draft_tokens: int) -> Tree:
    """The specification of `rerank`, and its CPU form."""
    (num_rows, num_grown), device = tokens_BC.shape, tokens_BC.device
    num_kept = min(num_draft_tokens - 1, num_grown)
    kept = _largest(scores_BC, num_kept)[1].sort(dim=1).values
    node_of = torch.zeros(num_rows, num_grown + 1, dtype=torch.int64, device=device)  # column 0 is the root
    node_of.scatter_(1, kept + 1, torch.arange(1, num_kept + 1, device=device).expand(num_rows, -1))
    tree = _bare(num_rows, num_draft_tokens, scores_BC)
    tree.tokens[:, 1:num_kept + 1] = tokens_BC.gather(1, kept)
    tree.parents[:, 1:num_kept + 1] = node_of.gather(1, parents_BC.gather(1, kept) + 1)
    tree.scores[:, 1:num_kept + 1] = scores_BC.gather(1, kept)
    return tree


def _bare(num_rows: int, num_nodes: int, scores: Tensor) -> Tree:
    """Trees of a root and empty nodes: NO_TOKEN, parent 0, score -inf."""
    tree = Tree(torch.full((num_rows, num_nodes), NO_TOKEN, device=scores.device),
                torch.zeros(num_rows, num_nodes, dtype=torch.int64, device=scores.device),
                scores.new_full((num_rows, num_nodes), -torch.inf))
    tree.scores[:, 0] = 0.0
    return tree


# --- kernels -----------------------------------------------------------------------------------------------------


@jit
def _slice_kernel(logits, values, ids, mosts, totals, width, K: tl.constexpr, SLICE: tl.constexpr):
    """One slice of one node's logits: its K largest values, its maximum and its sum of exponentials."""
    WIDE = values.dtype.element_ty
    node = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = tl.arange(0, SLICE)
    here = part * SLICE + at
    x = tl.load(logits + node * width + here, here < width, other=-float("inf")).to(WIDE)
    most = tl.max(x, 0)
    slot = node * tl.num_programs(1) + part
    tl.store(mosts + slot, most)
    tl.store(totals + slot, tl.sum(tl.exp(x - most), 0))
    for rank in range(K):
        best = tl.max(x, 0)
        index = tl.argmax(x, 0, tie_break_left=True)
        tl.store(values + slot * K + rank, best)
        tl.store(ids + slot * K + rank, part * SLICE + index)
        x = tl.where(at == index, -float("inf"), x)


@jit
def _merge_kernel(values, ids, mosts, totals, scores, tokens, children, frontier, num_nodes, num_parts, kept,
                  K: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr,
                  BLOCK_K: tl.constexpr):
    """One row: each node's children from the K largest values of its slices, and the next frontier."""
    WIDE = values.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, BLOCK_W)
    real = w < num_nodes
    node = row * num_nodes + w
    p = tl.arange(0, BLOCK_P)
    of_part = real[:, None] & (p < num_parts)[None, :]
    most_p = tl.load(mosts + node[:, None] * num_parts + p[None, :], of_part, other=-float("inf"))
    total_p = tl.load(totals + node[:, None] * num_parts + p[None, :], of_part, other=0.0)
    # The node's log-sum-exp, from the maximum and the sum of exponentials of each slice.
    most = tl.where(real, tl.max(most_p, 1), 0.0)
    total = tl.sum(tl.where(of_part, total_p * tl.exp(most_p - most[:, None]), 0.0), 1)
    lse = most + tl.log(tl.where(real, total, 1.0))
    base = tl.load(scores + node, real, other=0.0).to(WIDE) - lse
    lane = tl.arange(0, BLOCK_V)
    x = tl.load(values + node[:, None] * num_parts * K + lane[None, :],
                real[:, None] & (lane < num_parts * K)[None, :], other=-float("inf"))
    k = tl.arange(0, BLOCK_K)
    grown = tl.zeros([BLOCK_W, BLOCK_K], WIDE) - float("inf")
    # Slices are in order and each has its values in descending order, equal ones by index: the leftmost maximum is thus
    # the one of lowest draft id.
    for rank in range(K):
        best = tl.max(x, 1)
        index = tl.argmax(x, 1, tie_break_left=True)
        score = base + best
        token = tl.load(ids + node * num_parts * K + index, real, other=0)
        tl.store(tokens + node * K + rank, token.to(tl.int64), real)
        tl.store(children + node * K + rank, score, real)
        grown = tl.where((k == rank)[None, :] & real[:, None], score[:, None], grown)
        x = tl.where(lane[None, :] == index[:, None], -float("inf"), x)
    flat = tl.reshape(grown, [BLOCK_W * BLOCK_K])
    cell = tl.arange(0, BLOCK_W * BLOCK_K)
    for rank in range(kept):
        index = tl.argmax(flat, 0, tie_break_left=True)
        # `flat` has rows of BLOCK_K, padded; the frontier counts in rows of K.
        tl.store(frontier + row * kept + rank, (index // BLOCK_K * K + index % BLOCK_K).to(tl.int64))
        flat = tl.where(cell == index, -float("inf"), flat)


@jit
def _stays_kernel(scores, stays, num_grown, num_kept, BLOCK_C: tl.constexpr, BLOCK_J: tl.constexpr):
    """1 for each candidate of a block that is among the row's `num_kept` best, else 0."""
    row = tl.program_id(0).to(tl.int64) * num_grown
    i = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mine = tl.load(scores + row + i, i < num_grown, other=-float("inf"))
    better = tl.zeros([BLOCK_C], tl.int32)
    for start in range(0, num_grown, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        other = tl.load(scores + row + j, j < num_grown, other=-float("inf"))
        before = (other[None, :] > mine[:, None]) | ((other[None, :] == mine[:, None]) & (j[None, :] < i[:, None]))
        better += tl.sum((before & (j < num_grown)[None, :]).to(tl.int32), 1)
    tl.store(stays + row + i, (better < num_kept).to(tl.int32), i < num_grown)


@jit
def _number_kernel(stays, num_grown, BLOCK: tl.constexpr):
    """Replace the 1 of each kept candidate of a row by its node's index, a running count; others stay 0."""
    row = tl.program_id(0).to(tl.int64) * num_grown
    i = tl.arange(0, BLOCK)
    stay = tl.load(stays + row + i, i < num_grown, other=0)
    tl.store(stays + row + i, tl.cumsum(stay, 0) * stay, i < num_grown)


@jit
def _place_kernel(tokens, parents, scores, node_of, to_tokens, to_parents, to_scores, num_grown, num_nodes,
                  BLOCK: tl.constexpr):
    """Copy the kept candidates of a block to their nodes; the parent -1 becomes node 0."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row * num_grown + i
    node = tl.load(node_of + at, i < num_grown, other=0)
    stays = node > 0
    to = row * num_nodes + node
    parent = tl.load(parents + at, stays, other=-1)
    above = tl.load(node_of + row * num_grown + parent, stays & (parent >= 0), other=0)
    tl.store(to_tokens + to, tl.load(tokens + at, stays, other=0), stays)
    tl.store(to_parents + to, above.to(tl.int64), stays)
    tl.store(to_scores + to, tl.load(scores + at, stays, other=0.0), stays)


@torch.no_grad()
def expand(logits_BWD: Tensor, scores_BW: Tensor, width: int) -> Expanded:
    """The children of a frontier, and the next frontier.

    logits   [B, W, D]  the drafter's logits at each frontier node; finite.
    scores   [B, W]     the nodes' cumulative log-probabilities, float32 or float64: sums and results have this dtype.
    width    K; reduced to D if D is smaller.
    """
    rows, num_nodes, vocab = logits_BWD.shape
    width = min(width, vocab)
    if not runs_kernels(logits_BWD):
        return _expand_by_torch(logits_BWD, scores_BW, width)
    logits, scores, parts = logits_BWD.contiguous(), scores_BW.contiguous(), -(-vocab // _SLICE)
    mosts = scores.new_empty(rows * num_nodes, parts)
    totals, values = torch.empty_like(mosts), scores.new_empty(rows * num_nodes, parts, width)
    ids = torch.empty(values.shape, dtype=torch.int32, device=logits.device)
    launch(_slice_kernel, (rows * num_nodes, parts), logits, values, ids, mosts, totals, vocab, K=width, SLICE=_SLICE)
    tokens = torch.empty(rows, num_nodes, width, dtype=torch.int64, device=logits.device)
    children = scores.new_empty(tokens.shape)
    frontier = torch.empty(rows, width, dtype=torch.int64, device=logits.device)
    launch(_merge_kernel, (rows,), values, ids, mosts, totals, scores, tokens, children, frontier, num_nodes, parts,
           width, K=width, BLOCK_W=next_power_of_two(num_nodes), BLOCK_P=next_power_of_two(parts),
           BLOCK_V=next_power_of_two(parts * width), BLOCK_K=next_power_of_two(width), num_warps=8)
    return Expanded(tokens, children, frontier)


@torch.no_grad()
def rerank(tokens_BC: Tensor, parents_BC: Tensor, scores_BC: Tensor, num_draft_tokens: int) -> Tree:
    """Keep the best `num_draft_tokens - 1` candidates of each row under a root.

    tokens   [B, C] int64
    parents  [B, C] int64  candidate indices, each below its child's; -1 for the root.
    scores   [B, C] float  a child's score never exceeds its parent's.
    """
    if not runs_kernels(scores_BC):
        return reference_rerank(tokens_BC, parents_BC, scores_BC, num_draft_tokens)
    tokens, parents, scores = tokens_BC.contiguous(), parents_BC.contiguous(), scores_BC.contiguous()
    rows, num_grown = tokens.shape
    node_of = torch.empty(rows, num_grown, dtype=torch.int32, device=tokens.device)
    tree, blocks = _bare(rows, num_draft_tokens, scores), -(-num_grown // _BLOCK_C)
    launch(_stays_kernel, (rows, blocks), scores, node_of, num_grown, num_draft_tokens - 1, BLOCK_C=_BLOCK_C,
           BLOCK_J=_BLOCK_J)
    launch(_number_kernel, (rows,), node_of, num_grown, BLOCK=next_power_of_two(num_grown))
    launch(_place_kernel, (rows, blocks), tokens, parents, scores, node_of, *tree, num_grown, num_draft_tokens,
           BLOCK=_BLOCK_C)
    return tree
