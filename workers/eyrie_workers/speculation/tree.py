"""Draft trees: grown by confidence, cut to size, laid out for one verification pass.

EAGLE-2 (arXiv:2406.16858) in three steps, batched over rows:

    expand   each drafter pass runs the `top_k` most promising nodes of the last depth and keeps `top_k` children of
             each; promise is the product of confidences along the path, which predicts acceptance well;
    rerank   of all nodes grown, the `num_draft_tokens - 1` with the highest product stay. A child's product never
             exceeds its parent's, and on ties the earlier node wins, so what stays is always a tree;
    flatten  the nodes that stay, in the order they were grown: parents before children, root first.

A shape that is `static` is not grown by confidence: its nodes are fixed beforehand (`speculation.static_tree`), and
each takes the guess of its rank. The drafter runs the nodes that have children, and no others.

Everything here is a function of tensors; the drafter enters as a `StepFunction`. A chain is the tree with top_k 1.

SGLang grows, scores, reranks and verifies by the same rules (0.5.23: `select_top_k_tokens`, `organize_draft_results`),
with one difference. It keeps the keys of a depth where they were written, by place in the frontier, and does not move
them when the next frontier is picked; a node then sees the keys of whoever held its place before, which is an ancestor
as long as the order of the frontier lasts. `branch_keys="frontier_slots"` does the same. On the quickstart drafter it
changes 4 % of the trees of shape 5/4/16 and no accepted length among 157 rounds; chains are not touched.
"""

# B rows, N nodes of the final tree, C candidate nodes grown, K top-k, D draft vocabulary, H hidden, M scratch keys

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from eyrie_api.v1alpha1.draft_tree import DraftTreeShape
from eyrie_workers.speculation.noise import RowNoise
from eyrie_workers.speculation.protocol import NO_TOKEN, DraftStep, DraftTree, StepFunction
from eyrie_workers.speculation.static_tree import levels, static_topology

BranchKeys = Literal["ancestors", "frontier_slots"]
"""Which scratch keys a node sees: those of its ancestors, or those written at its place in the frontier (SGLang)."""


@dataclass(frozen=True)
class _Candidates:
    """All nodes below the root, in the order they were grown. Parents are candidate indices, -1 for the root."""

    tokens: Tensor
    """[B, C] int64"""
    parents: Tensor
    """[B, C] int64"""
    scores: Tensor
    """[B, C] float: log of the product of confidences along the path"""


def build_draft_tree(first: DraftStep, step: StepFunction, shape: DraftTreeShape, vocabulary: Tensor | None = None,
         noise: RowNoise | None = None, branch_keys: BranchKeys = "ancestors") -> DraftTree:
    """Grow one tree per row, `shape.num_steps` deep.

    first       logits [B, 1, D] and hidden [B, 1, H] of the last settled pair of each row: pass one of num_steps
    step        runs the drafter for the following passes
    vocabulary  [D] int64 target id of each draft id; None when both vocabularies are the same
    noise       of the same rows; None when all are greedy
    branch_keys what the nodes of a dynamic tree attend to; a chain's nodes see everything before them either way
    returns     trees whose root token is NO_TOKEN: the engine knows the last settled token, the drafter need not
    """
    if shape.top_k == 1:
        return _grow_chain(first, step, shape, vocabulary, noise)
    if shape.static:
        return _grow_static(first, step, shape, vocabulary, noise)
    return rerank(_expand(first, step, shape, vocabulary, noise, branch_keys), shape.num_draft_tokens)


def _confidence(logits: Tensor, depth: int, vocabulary: Tensor | None, noise: RowNoise | None) -> Tensor:
    if noise is None:
        return torch.log_softmax(logits, dim=-1)
    return noise.confidence(logits, depth, vocabulary)


def _grow_chain(first: DraftStep, step: StepFunction, shape: DraftTreeShape, vocabulary: Tensor | None,
                noise: RowNoise | None) -> DraftTree:
    logits, hidden = first
    num_rows = logits.shape[0]
    tokens, scores = [logits.new_full((num_rows, 1), NO_TOKEN, dtype=torch.int64)], [logits.new_zeros(num_rows, 1)]
    for depth in range(1, shape.num_steps + 1):
        best, ids = _confidence(logits, depth, vocabulary, noise).max(dim=-1)
        tokens.append(ids if vocabulary is None else vocabulary.index_select(0, ids.flatten()).view_as(ids))
        scores.append(scores[-1] + best)
        if depth < shape.num_steps:
            mask = torch.ones(num_rows, 1, depth, dtype=torch.bool, device=logits.device)
            logits, hidden = step(tokens[-1], hidden, mask, depth)
    parents = torch.arange(-1, shape.num_steps, device=logits.device).clamp_(min=0)
    return DraftTree(torch.cat(tokens, 1), parents.expand(num_rows, -1), torch.cat(scores, 1))


def _expand(first: DraftStep, step: StepFunction, shape: DraftTreeShape, vocabulary: Tensor | None,
            noise: RowNoise | None, branch_keys: BranchKeys) -> _Candidates:
    """Grow top_k + (num_steps - 1) * top_k^2 candidates (fewer when the draft vocabulary is smaller than top_k)."""
    num_rows, device = first.logits.shape[0], first.logits.device
    width = min(shape.top_k, first.logits.shape[-1])
    scores, ids = _confidence(first.logits, 1, vocabulary, noise)[:, 0].topk(width)
    tokens = [ids if vocabulary is None else vocabulary[ids]]
    parents = [torch.full((num_rows, width), -1, dtype=torch.int64, device=device)]
    all_scores = [scores]
    # The frontier: candidate index, token and parent's state of each node to run, and the scratch keys it sees.
    frontier = torch.arange(width, device=device).expand(num_rows, -1)
    frontier_tokens, frontier_scores = tokens[0], scores
    hidden = first.hidden.expand(-1, width, -1)
    own = torch.eye(width, dtype=torch.bool, device=device).expand(num_rows, -1, -1)
    mask = own
    num_grown = width
    for depth in range(1, shape.num_steps):
        logits, states = step(frontier_tokens, hidden, mask, depth)
        best, ids = _confidence(logits, depth + 1, vocabulary, noise).topk(width)
        children = (ids if vocabulary is None else vocabulary[ids]).flatten(1)
        child_scores = (frontier_scores[:, :, None] + best).flatten(1)
        tokens.append(children)
        parents.append(frontier.repeat_interleave(width, dim=1))
        all_scores.append(child_scores)
        if depth + 1 < shape.num_steps:
            frontier_scores, chosen = child_scores.topk(width)
            frontier_tokens = children.gather(1, chosen)
            come_from = chosen // width
            hidden = states.gather(1, come_from[:, :, None].expand(-1, -1, states.shape[-1]))
            if branch_keys == "ancestors":
                mask = mask.gather(1, come_from[:, :, None].expand(-1, -1, mask.shape[-1]))
            mask = torch.cat([mask, own], dim=2)
            frontier = num_grown + chosen
        num_grown += width * width
    return _Candidates(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(all_scores, 1))


def _grow_static(first: DraftStep, step: StepFunction, shape: DraftTreeShape, vocabulary: Tensor | None,
                 noise: RowNoise | None) -> DraftTree:
    logits, states = first
    num_rows, device = logits.shape[0], logits.device
    topology = static_topology(shape)
    parents = torch.tensor(topology.parents, device=device)
    tokens = torch.full((num_rows, shape.num_draft_tokens), NO_TOKEN, dtype=torch.int64, device=device)
    scores = torch.full((num_rows, shape.num_draft_tokens), -torch.inf, dtype=logits.dtype, device=device)
    scores[:, 0] = 0.0
    mask = torch.zeros(1, 1, 0, dtype=torch.bool, device=device)  # [1, K, M] of the nodes that were run last
    for depth, level in enumerate(levels(topology), start=1):
        nodes, guesses = torch.tensor(level.nodes, device=device), torch.tensor(level.guesses, device=device)
        best, ids = _confidence(logits, depth, vocabulary, noise).topk(min(level.width, logits.shape[-1]))
        if best.shape[-1] < level.width:  # a draft vocabulary smaller than the tree is wide: nodes without a token
            missing = (0, level.width - best.shape[-1])
            best, ids = F.pad(best, missing, value=-torch.inf), F.pad(ids, missing, value=NO_TOKEN)
        guessed = ids.flatten(1).index_select(1, guesses)
        if vocabulary is not None:
            guessed = torch.where(guessed == NO_TOKEN, NO_TOKEN, vocabulary[guessed])
        tokens[:, nodes] = guessed
        scores[:, nodes] = scores[:, parents[nodes]] + best.flatten(1).index_select(1, guesses)
        if level.inner:
            inner, under = torch.tensor(level.inner, device=device), torch.tensor(level.under, device=device)
            own = torch.eye(len(level.inner), dtype=torch.bool, device=device)[None]
            mask = torch.cat([mask.index_select(1, under), own], 2)
            logits, states = step(tokens[:, inner].clamp(min=0), states.index_select(1, under),
                                  mask.expand(num_rows, -1, -1), depth)
    return DraftTree(tokens, parents.expand(num_rows, -1), scores)


def rerank(grown: _Candidates, num_draft_tokens: int) -> DraftTree:
    """Keep the `num_draft_tokens - 1` best candidates of each row, parents before children, under a root.

    A row with fewer candidates is filled up with NO_TOKEN nodes under the root.
    """
    num_rows, num_grown = grown.tokens.shape
    device = grown.tokens.device
    num_kept = min(num_draft_tokens - 1, num_grown)
    # Stable: on ties the earlier candidate wins, and a parent is always earlier than its child.
    order = grown.scores.sort(dim=1, descending=True, stable=True).indices[:, :num_kept]
    kept = order.sort(dim=1).values
    node_of = torch.zeros(num_rows, num_grown + 1, dtype=torch.int64, device=device)  # column 0 stands for the root
    node_of.scatter_(1, kept + 1, torch.arange(1, num_kept + 1, device=device).expand(num_rows, -1))
    tokens = torch.full((num_rows, num_draft_tokens), NO_TOKEN, dtype=torch.int64, device=device)
    parents = torch.zeros(num_rows, num_draft_tokens, dtype=torch.int64, device=device)
    scores = torch.full((num_rows, num_draft_tokens), -torch.inf, dtype=grown.scores.dtype, device=device)
    tokens[:, 1:num_kept + 1] = grown.tokens.gather(1, kept)
    parents[:, 1:num_kept + 1] = node_of.gather(1, grown.parents.gather(1, kept) + 1)
    scores[:, 0] = 0.0
    scores[:, 1:num_kept + 1] = grown.scores.gather(1, kept)
    return DraftTree(tokens, parents, scores)


def ancestors(parents: Tensor, max_depth: int) -> Tensor:
    """Which nodes lie on each node's path to the root, itself and the root included.

    parents   [B, N] int64    each smaller than its node's index; the root is its own parent
    returns   [B, N, N] bool  [b, n, m]: m is n or an ancestor of n. Its row sums minus one are the nodes' depths.
    """
    num_nodes = parents.shape[1]
    seen = torch.eye(num_nodes, dtype=torch.bool, device=parents.device).repeat(parents.shape[0], 1, 1)
    above = parents
    for _ in range(max_depth):
        seen.scatter_(2, above[:, :, None], True)
        above = parents.gather(1, above)
    return seen


def is_chain(parents: Tensor) -> bool:
    """Whether every node's parent is the node before it, in all rows."""
    num_nodes = parents.shape[1]
    expected = torch.arange(-1, num_nodes - 1, device=parents.device).clamp_(min=0)
    return torch.equal(parents, expected.expand_as(parents))
