"""Draft trees: expanded by confidence, reranked to a fixed size, flattened for one verification pass.

EAGLE-2 (arXiv:2406.16858) in three steps, batched over rows:

    expand   each drafter pass runs the `top_k` nodes of the last depth with the highest scores and keeps `top_k`
             children of each; a node's score is the product of confidences along its path, which predicts acceptance;
    rerank   of all candidates, the `num_draft_tokens - 1` with the highest score stay. A child's score never exceeds
    its
             parent's, and on ties the earlier node wins, so the nodes that stay always form a tree;
    flatten  the nodes that stay, in the order of expansion: parents before children, root first.

The nodes of a `static` shape are fixed beforehand (`speculation.static_tree`), and each takes the candidate of its
rank. The drafter runs the nodes that have children, and no others.

All functions are functions of tensors; the drafter enters as a `StepFunction`. A chain is the tree with top_k 1.

SGLang expands, scores, reranks and verifies by the same rules (0.5.23: `select_top_k_tokens`,
`organize_draft_results`), with one difference. It stores the keys of a depth by slot of the frontier and does not move
them when the next frontier is selected; a node then sees the keys of whichever node occupied its slot before, which is
an ancestor as long as the order of the frontier lasts. `branch_keys="frontier_slots"` does the same. On the quickstart
drafter it changes 4 % of the trees of shape 5/4/16 and no accepted length among 157 rounds; chains are not affected.
"""

# B rows, N nodes of the final tree, C candidate nodes, K top-k, D draft vocabulary, H hidden, M scratch keys

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from eyrie_api.v1alpha1.engine import DraftTreeShape
from eyrie_workers.speculation.noise import RowNoise
from eyrie_workers.speculation.protocol import NO_TOKEN, DraftStep, DraftTree, StepFunction
from eyrie_workers.speculation.static_tree import levels, static_topology
from eyrie_workers.speculation.upload import upload

BranchKeys = Literal["ancestors", "frontier_slots"]
"""Which scratch keys a node sees: those of its ancestors, or those written at its slot of the frontier (SGLang)."""

NodeOrder = Literal["expansion", "score"]
"""Order of a tree's nodes: that of expansion, or by score, best first. Parents precede children in both."""


@dataclass(frozen=True)
class Candidates:
    """All candidates below the root, in the order of expansion. Parents are candidate indices, -1 for the root."""

    tokens: Tensor
    """[B, C] int64"""
    parents: Tensor
    """[B, C] int64"""
    scores: Tensor
    """[B, C] float: log of the product of confidences along the path"""


def build_draft_tree(first: DraftStep, step: StepFunction, shape: DraftTreeShape, vocabulary: Tensor | None = None,
         noise: RowNoise | None = None, branch_keys: BranchKeys = "ancestors") -> DraftTree:
    """Build one draft tree per row, `shape.num_steps` deep.

    first       logits [B, 1, D] and hidden [B, 1, H] of the last committed pair of each row: pass one of num_steps
    step        runs the drafter for the following passes
    vocabulary  [D] int64 target id of each draft id; None when both vocabularies are the same
    noise       of the same rows; None when all are greedy
    branch_keys keys that the nodes of a dynamic tree attend to; a chain's nodes see all nodes before them either way
    returns     trees whose root token is NO_TOKEN: the engine fills it in
    """
    if shape.top_k == 1:
        return _build_chain(first, step, shape, vocabulary, noise)
    if shape.static:
        return _build_static(first, step, shape, vocabulary, noise)
    return rerank(_expand(first, step, shape, vocabulary, noise, branch_keys), shape.num_draft_tokens)


def _confidence(logits: Tensor, depth: int, vocabulary: Tensor | None, noise: RowNoise | None) -> Tensor:
    if noise is None:
        return torch.log_softmax(logits, dim=-1)
    return noise.confidence(logits, depth, vocabulary)


def _build_chain(first: DraftStep, step: StepFunction, shape: DraftTreeShape, vocabulary: Tensor | None,
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
            noise: RowNoise | None, branch_keys: BranchKeys) -> Candidates:
    """Expand top_k + (num_steps - 1) * top_k^2 candidates (fewer when the draft vocabulary is smaller than top_k)."""
    num_rows, device = first.logits.shape[0], first.logits.device
    width = min(shape.top_k, first.logits.shape[-1])
    scores, ids = _confidence(first.logits, 1, vocabulary, noise)[:, 0].topk(width)
    tokens = [ids if vocabulary is None else vocabulary[ids]]
    parents = [torch.full((num_rows, width), -1, dtype=torch.int64, device=device)]
    all_scores = [scores]
    # The frontier: candidate index, token and parent's state of each node to run, and the scratch keys it sees. The
    # first frontier is all children of the root; each sees its own key only.
    frontier = torch.arange(width, device=device).expand(num_rows, -1)
    frontier_tokens, frontier_scores = tokens[0], scores
    hidden = first.hidden.expand(-1, width, -1)
    own = torch.eye(width, dtype=torch.bool, device=device).expand(num_rows, -1, -1)
    mask = own
    num_candidates = width
    for depth in range(1, shape.num_steps):
        logits, states = step(frontier_tokens, hidden, mask, depth)
        # Children of every frontier node, scored by the log-product along their paths.
        best, ids = _confidence(logits, depth + 1, vocabulary, noise).topk(width)
        children = (ids if vocabulary is None else vocabulary[ids]).flatten(1)
        child_scores = (frontier_scores[:, :, None] + best).flatten(1)
        tokens.append(children)
        parents.append(frontier.repeat_interleave(width, dim=1))
        all_scores.append(child_scores)
        if depth + 1 < shape.num_steps:
            # The next frontier: the best `width` of all width^2 children of this depth.
            frontier_scores, selected = child_scores.topk(width)
            frontier_tokens = children.gather(1, selected)
            parent_slot = selected // width
            hidden = states.gather(1, parent_slot[:, :, None].expand(-1, -1, states.shape[-1]))
            if branch_keys == "ancestors":
                # A node inherits its parent's visible keys; without the gather it keeps those of its slot (SGLang).
                mask = mask.gather(1, parent_slot[:, :, None].expand(-1, -1, mask.shape[-1]))
            mask = torch.cat([mask, own], dim=2)
            frontier = num_candidates + selected
        num_candidates += width * width
    return Candidates(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(all_scores, 1))


def _build_static(first: DraftStep, step: StepFunction, shape: DraftTreeShape, vocabulary: Tensor | None,
                 noise: RowNoise | None) -> DraftTree:
    logits, states = first
    num_rows, device = logits.shape[0], logits.device
    topology = static_topology(shape)
    of_levels = levels(topology)
    parents, *indices = _uploaded([topology.parents, *(part for level in of_levels for part in (
        level.nodes, level.candidates, level.parents, level.expanded, level.expanded_parents))])
    tokens = torch.full((num_rows, shape.num_draft_tokens), NO_TOKEN, dtype=torch.int64, device=device)
    scores = torch.full((num_rows, shape.num_draft_tokens), -torch.inf, dtype=logits.dtype, device=device)
    scores[:, 0] = 0.0
    mask = torch.zeros(1, 1, 0, dtype=torch.bool, device=device)  # [1, K, M] of the nodes of the last pass
    for depth, level in enumerate(of_levels, start=1):
        nodes, candidates, above_nodes, expanded, above = indices[5 * (depth - 1): 5 * depth]
        best, ids = _confidence(logits, depth, vocabulary, noise).topk(min(level.width, logits.shape[-1]))
        if best.shape[-1] < level.width:  # the draft vocabulary is smaller than the width: some nodes have no token
            missing = (0, level.width - best.shape[-1])
            best, ids = F.pad(best, missing, value=-torch.inf), F.pad(ids, missing, value=NO_TOKEN)
        drafted = ids.flatten(1).index_select(1, candidates)
        if vocabulary is not None:
            drafted = torch.where(drafted == NO_TOKEN, NO_TOKEN, vocabulary[drafted])
        tokens[:, nodes] = drafted
        scores[:, nodes] = scores[:, above_nodes] + best.flatten(1).index_select(1, candidates)
        if level.expanded:
            # Each node sees its parent's visible keys and its own.
            own = torch.eye(len(level.expanded), dtype=torch.bool, device=device)[None]
            mask = torch.cat([mask.index_select(1, above), own], 2)
            logits, states = step(tokens[:, expanded].clamp(min=0), states.index_select(1, above),
                                  mask.expand(num_rows, -1, -1), depth)
    return DraftTree(tokens, parents.expand(num_rows, -1), scores)


def _uploaded(lists: Sequence[Sequence[int]]) -> Sequence[Tensor]:
    """Each list as a tensor, all in one copy."""
    return upload([number for numbers in lists for number in numbers]).split([len(numbers) for numbers in lists])


def rerank(candidates: Candidates, num_draft_tokens: int, order: NodeOrder = "expansion") -> DraftTree:
    """Keep the `num_draft_tokens - 1` best candidates of each row, parents before children, under a root.

    A row with fewer candidates is padded with NO_TOKEN nodes under the root.
    """
    num_rows, num_candidates = candidates.tokens.shape
    device = candidates.tokens.device
    num_kept = min(num_draft_tokens - 1, num_candidates)
    # Stable: on ties the earlier candidate wins, and a parent is always earlier than its child.
    kept = candidates.scores.sort(dim=1, descending=True, stable=True).indices[:, :num_kept]
    if order == "expansion":
        kept = kept.sort(dim=1).values
    # Candidate indices become node indices.
    node_of = torch.zeros(num_rows, num_candidates + 1, dtype=torch.int64, device=device)  # column 0 is the root
    node_of.scatter_(1, kept + 1, torch.arange(1, num_kept + 1, device=device).expand(num_rows, -1))
    tokens = torch.full((num_rows, num_draft_tokens), NO_TOKEN, dtype=torch.int64, device=device)
    parents = torch.zeros(num_rows, num_draft_tokens, dtype=torch.int64, device=device)
    scores = torch.full((num_rows, num_draft_tokens), -torch.inf, dtype=candidates.scores.dtype, device=device)
    tokens[:, 1:num_kept + 1] = candidates.tokens.gather(1, kept)
    parents[:, 1:num_kept + 1] = node_of.gather(1, candidates.parents.gather(1, kept) + 1)
    scores[:, 0] = 0.0
    scores[:, 1:num_kept + 1] = candidates.scores.gather(1, kept)
    return DraftTree(tokens, parents, scores, num_filled=num_kept + 1)


def ancestors(parents: Tensor, max_depth: int) -> Tensor:
    """Which nodes lie on each node's path to the root, itself and the root included.

    parents   [B, N] int64    each smaller than its node's index; the root is its own parent
    returns   [B, N, N] bool  [b, n, m]: m is n or an ancestor of n. Its row sums minus one are the nodes' depths.
    """
    num_nodes = parents.shape[1]
    seen = torch.eye(num_nodes, dtype=torch.bool, device=parents.device).repeat(parents.shape[0], 1, 1)
    above = parents
    # One step towards the root per iteration; the root is its own parent, so shallow nodes stay there.
    for _ in range(max_depth):
        seen.scatter_(2, above[:, :, None], True)
        above = parents.gather(1, above)
    return seen
