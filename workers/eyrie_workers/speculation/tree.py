"""Draft trees: expanded by confidence, reranked to a fixed size, flattened for one verification pass. Three kinds.

*Dynamic* (EAGLE-2, arXiv:2406.16858), for drafters that predict one token at a time. In three steps, batched over rows:

    expand   each drafter pass runs the `top_k` nodes of the last depth with the highest scores and keeps `top_k`
             children of each; a node's score is the product of confidences along its path, which predicts acceptance;
    rerank   of all candidates, the `num_draft_tokens - 1` with the highest score stay. A child's score never exceeds
             its parent's, and on ties the earlier node wins, so the nodes that stay always form a tree;
    flatten  the nodes that stay, in the order of expansion: parents before children, root first.

*Static*: one topology for all rows and rounds, fixed before the drafter runs; each node takes the candidate of its
rank, and the drafter runs the nodes that have children, and no others. EAGLE-1 (arXiv:2401.15077, section 4.1) drafts
such a tree, chosen by hand; Medusa (arXiv:2401.10774, section 2.3.3) and Sequoia (arXiv:2402.12374, section 3.1)
compute it: if the candidate of rank r is accepted with probability p_r at every node, a node is accepted with the
product of p along its path, and the tree of N nodes with the most accepted tokens has the N nodes of the largest
products. The product falls with every step and with every rank, so best-first search finds these nodes, and they form a
tree. It is EAGLE-2's baseline. As in the dynamic tree, at most `top_k` nodes of a depth have children, so both need the
same memory.

*From marginals*, for drafters that predict all depths at once, independently of the path. Medusa's heads and a diffused
block (DFlash, arXiv:2602.06036) give for each depth d a distribution p_d over tokens. A path's probability of being
accepted is then taken to be the product P(t_1 .. t_d) = p_1(t_1) p_2(t_2) .. p_d(t_d), and the tree of N nodes with the
highest expected acceptance consists of the N most probable prefixes: a prefix is never less probable than its
extensions, so they form a tree (DDTree, arXiv:2604.12989). A prefix of depth d is among them only if its first d - 1
tokens are, so extending the N best prefixes of each depth finds them all. Only the top_k most probable tokens of a
depth are considered. DDTree's best-first search over a heap visits fewer prefixes, but on the host: it would read every
depth's best tokens from the device, a wait per round that the tensor form does not have. No more depths are predicted
than there are logits for: nodes beyond hold NO_TOKEN.

A chain is the tree with top_k 1. All functions are functions of tensors; the drafter enters as a `StepFunction`.

SGLang expands, scores, reranks and verifies by the same rules (0.5.23: `select_top_k_tokens`,
`organize_draft_results`), with one difference. It stores the keys of a depth by slot of the frontier and does not move
them when the next frontier is selected; a node then sees the keys of whichever node occupied its slot before, which is
an ancestor as long as the order of the frontier lasts. `branch_keys="frontier_slots"` does the same. On the quickstart
drafter it changes 4 % of the trees of shape 5/4/16 and no accepted length among 157 rounds; chains are not affected.
"""

# B rows, N nodes of the final tree, C candidate nodes, K top-k, D draft vocabulary, H hidden, M scratch keys,
# S depths of marginals, W prefixes extended at a depth

import heapq
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_workers.speculation.noise import RowNoise
from eyrie_workers.speculation.protocol import NO_TOKEN, DraftStep, DraftTree, StepFunction
from eyrie_workers.targets.device import upload

BranchKeys = Literal["ancestors", "frontier_slots"]
"""Which scratch keys a node sees: those of its ancestors, or those written at its slot of the frontier (SGLang)."""

NodeOrder = Literal["expansion", "score"]
"""Order of a tree's nodes: that of expansion, or by score, best first. Parents precede children in both."""

# Probability that the candidate of each rank is the target's greedy token, given that its path is accepted. Measured on
# an EAGLE-3 drafter of the quickstart target (480 conversations, 6 epochs; 562 positions of 16 prompts of its suites):
#     python -m benchmarks.calibration --drafter DIR --out DIR --num-steps 4 --top-k 8
# counted 416, 48, 16, 11, 11, 6, 3, 4; the last two are pooled, so that probabilities do not rise.
ACCEPTED_BY_RANK = (0.740, 0.085, 0.028, 0.020, 0.020, 0.011, 0.006, 0.006)


@dataclass(frozen=True)
class Candidates:
    """All candidates below the root, in the order of expansion. Parents are candidate indices, -1 for the root."""

    tokens: Tensor
    """[B, C] int64"""
    parents: Tensor
    """[B, C] int64"""
    scores: Tensor
    """[B, C] float: log of the product of confidences along the path"""


class Topology(NamedTuple):
    """A tree's nodes, the root first, depth by depth.

    parents   index of each node's parent, smaller than its own; the root is its own parent
    ranks     rank of a node among its parent's candidates: 0 the best; 0 for the root. Siblings have ranks 0, 1, 2, ..
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]


class TreeLevel(NamedTuple):
    """One depth of a topology, as the drafter expands it. A *parent* is a node of the depth above that has children."""

    nodes: tuple[int, ...]
    width: int
    """Candidates needed of one parent, at most."""

    candidates: tuple[int, ...]
    """Of each node: index of its candidate when every parent above yields `width` of them: parent * width + rank."""

    parents: tuple[int, ...]
    """Of each node: its parent, as a node."""

    expanded: tuple[int, ...]
    """Nodes that have children: the parents of the next depth."""

    expanded_parents: tuple[int, ...]
    """Of each of `expanded`: index of its parent among the parents of this depth."""


def accepted_at(rank: int) -> float:
    """Acceptance probability of a rank: measured for the first ranks, beyond them falling with its square (Sequoia)."""
    last = len(ACCEPTED_BY_RANK)
    return ACCEPTED_BY_RANK[rank] if rank < last else ACCEPTED_BY_RANK[-1] * (last / (rank + 1)) ** 2


@cache
def static_topology(shape: DraftTreeShape) -> Topology:
    """The `num_draft_tokens` nodes, root included, with the largest acceptance probability, at most `num_steps` deep.

    A function of the shape's three numbers alone. With top_k 1 it is the chain.
    """
    num_steps, top_k, num_draft_tokens = shape.num_steps, shape.top_k, shape.num_draft_tokens
    taken: list[tuple[int, ...]] = [()]  # each node as the ranks along its path
    parents_at = [0] * num_steps  # nodes of each depth that have children
    heap: list[tuple[float, tuple[int, ...]]] = [(-accepted_at(0), (0,))]
    while len(taken) < num_draft_tokens:
        minus, path = heapq.heappop(heap)
        above, rank = len(path) - 1, path[-1]
        if rank == 0:
            if parents_at[above] == top_k:
                continue  # top_k nodes of this depth have children already; siblings of this node have the same parent
            parents_at[above] += 1
        taken.append(path)
        # Two successors: the next sibling (divide out this rank, multiply by the next), and the best child.
        if rank + 1 < top_k:
            heapq.heappush(heap, (minus * accepted_at(rank + 1) / accepted_at(rank), (*path[:-1], rank + 1)))
        if len(path) < num_steps:
            heapq.heappush(heap, (minus * accepted_at(0), (*path, 0)))
    # Breadth first, then by rank: parents precede children, as `DraftTree` requires.
    taken.sort(key=lambda path: (len(path), path))
    node_of = {path: node for node, path in enumerate(taken)}
    return Topology(tuple(node_of[path[:-1]] for path in taken), tuple(path[-1] if path else 0 for path in taken))


@cache
def levels(topology: Topology) -> tuple[TreeLevel, ...]:
    """The depths below the root, in order."""
    parents, ranks = topology
    with_children = set(parents)
    result: list[TreeLevel] = []
    above: tuple[int, ...] = (0,)
    while nodes := tuple(node for node, parent in enumerate(parents) if node and parent in above):
        width = 1 + max(ranks[node] for node in nodes)
        expanded = tuple(node for node in nodes if node in with_children)
        result.append(TreeLevel(nodes, width, tuple(above.index(parents[node]) * width + ranks[node] for node in nodes),
                                tuple(parents[node] for node in nodes), expanded,
                                tuple(above.index(parents[node]) for node in expanded)))
        above = expanded
    return tuple(result)


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


def build_limited_tree(first: DraftStep, step: StepFunction, shape: DraftTreeShape, num_steps: int,
                       vocabulary: Tensor | None = None, noise: RowNoise | None = None) -> DraftTree:
    """`build_draft_tree` of a drafter that looks `num_steps` ahead; NO_TOKEN at deeper nodes."""
    limited = shape
    if shape.num_steps > num_steps:  # with as many nodes as such a tree can have
        max_nodes = 1 + shape.top_k + (num_steps - 1) * shape.top_k**2
        limited = DraftTreeShape(num_steps=num_steps, top_k=shape.top_k, static=shape.static,
                                 num_draft_tokens=min(shape.num_draft_tokens, max_nodes))
    tree = build_draft_tree(first, step, limited, vocabulary, noise)
    num_rows, size = tree.tokens.shape
    if size == shape.num_draft_tokens:
        return tree
    # Padding nodes are children of the node before them, so that a chain remains a chain.
    more = torch.arange(size - 1, shape.num_draft_tokens - 1, device=tree.parents.device).expand(num_rows, -1)
    return DraftTree(torch.cat([tree.tokens, torch.full_like(more, NO_TOKEN)], 1), torch.cat([tree.parents, more], 1),
                     torch.cat([tree.scores, tree.scores.new_full(more.shape, -torch.inf)], 1), num_filled=size)


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
        # A chain proposes the most confident token; under noise that is the one the target will most likely draw.
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
    lists = [topology.parents, *(part for level in of_levels for part in (
        level.nodes, level.candidates, level.parents, level.expanded, level.expanded_parents))]
    parents, *indices = upload([*chain.from_iterable(lists)]).split([*map(len, lists)])  # all in one copy
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


def build_tree_from_marginals(logits_BSD: Tensor, shape: DraftTreeShape, vocabulary: Tensor | None = None,
          noise: RowNoise | None = None) -> DraftTree:
    """The tree of each row's most probable prefixes, or the static one; the chain of most probable tokens for top_k 1.

    logits_BSD  of depths 1 .. S. Nodes deeper than S hold NO_TOKEN.
    vocabulary  [D] int64 target id of each draft id; None when both vocabularies are the same.
    noise       of the same rows; None when all are greedy.
    """
    # 1. Each depth's best tokens, best first. In half precision many of them would tie.
    logits_BSD = logits_BSD[:, : shape.num_steps].float()
    if noise is None:
        confidence_BSD = logits_BSD.log_softmax(-1)
    else:
        confidence_BSD = torch.cat([noise.confidence(logits_BSD[:, depth - 1: depth], depth, vocabulary)
                                    for depth in range(1, logits_BSD.shape[1] + 1)], 1)
    best_BSK, tokens_BSK = confidence_BSD.topk(min(shape.top_k, logits_BSD.shape[-1]), -1)
    if vocabulary is not None:
        tokens_BSK = vocabulary[tokens_BSK]
    # 2. The tree over them; for top_k 1 a chain, padded to its number of nodes.
    num_rows, depths, _ = best_BSK.shape
    if shape.top_k > 1 and shape.static:
        return _static(best_BSK, tokens_BSK, static_topology(shape))
    if shape.top_k > 1:
        return _most_probable(best_BSK, tokens_BSK, shape.num_draft_tokens)
    tokens = tokens_BSK.new_full((num_rows, shape.num_draft_tokens), NO_TOKEN)
    tokens[:, 1: depths + 1] = tokens_BSK[:, :, 0]
    scores = best_BSK.new_full((num_rows, shape.num_draft_tokens), -torch.inf)
    scores[:, 0] = 0.0
    scores[:, 1: depths + 1] = best_BSK[:, :, 0].cumsum(1)
    parents = torch.arange(-1, shape.num_draft_tokens - 1, device=tokens.device).clamp_(min=0)
    return DraftTree(tokens, parents.expand(num_rows, -1), scores, num_filled=depths + 1)


def _most_probable(best_BSK: Tensor, tokens_BSK: Tensor, num_nodes: int) -> DraftTree:
    """The most probable prefixes, most probable first. Sums are float64: paths differ by little, and depths add up."""
    num_rows, depths, width = best_BSK.shape
    tokens, parents, scores = [], [], []
    frontier_BW = tokens_BSK.new_full((num_rows, 1), -1)  # candidate indices of the prefixes to extend; -1 the root
    frontier_scores_BW = torch.zeros(num_rows, 1, dtype=torch.float64, device=best_BSK.device)
    num_candidates = 0
    for depth in range(depths):
        extended = (frontier_scores_BW[:, :, None] + best_BSK[:, depth, None]).flatten(1)  # [B, W * K]
        tokens.append(tokens_BSK[:, depth].repeat(1, frontier_BW.shape[1]))
        parents.append(frontier_BW.repeat_interleave(width, dim=1))
        scores.append(extended)
        frontier_scores_BW, chosen = extended.topk(min(num_nodes - 1, extended.shape[1]))
        frontier_BW = num_candidates + chosen
        num_candidates += extended.shape[1]
    tree = rerank(Candidates(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1)), num_nodes, "score")
    return DraftTree(tree.tokens, tree.parents, tree.scores.float(), tree.num_filled)


def _static(best_BSK: Tensor, tokens_BSK: Tensor, topology: Topology) -> DraftTree:
    num_rows, depths, width = best_BSK.shape
    num_nodes, (places, paths, num_filled) = len(topology.parents), _places(topology, depths, width)
    parents_N, token_N, path_X = upload([*topology.parents, *places, *paths]).split([num_nodes, num_nodes, len(paths)])
    values = torch.cat([best_BSK.flatten(1), best_BSK.new_full((num_rows, 1), -torch.inf),
                        best_BSK.new_zeros(num_rows, 1)], 1)
    tokens = torch.cat([tokens_BSK.flatten(1), tokens_BSK.new_full((num_rows, 1), NO_TOKEN)], 1)
    scores_BN = values.index_select(1, path_X).unflatten(1, (num_nodes, -1)).sum(-1)
    return DraftTree(tokens.index_select(1, token_N), parents_N.expand(num_rows, -1), scores_BN, num_filled)


@cache
def _places(topology: Topology, depths: int, width: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Where a static tree's nodes find their values among S * K ranked tokens, then one missing value, then zero: of
    each node; of each node the tokens on its path, padded with the zero to one length; and the number of nodes filled.
    """
    missing, zero = depths * width, depths * width + 1
    tokens = [missing]  # of the root
    paths: list[tuple[int, ...]] = [()]
    for parent, rank in zip(topology.parents[1:], topology.ranks[1:], strict=True):
        depth = len(paths[parent])
        place = depth * width + rank if depth < depths and rank < width else missing
        tokens.append(place)
        paths.append((*paths[parent], place))
    longest = max(map(len, paths))
    filled = [node for node, place in enumerate(tokens) if place != missing]
    return (tuple(tokens), tuple(place for path in paths for place in (*path, *[zero] * (longest - len(path)))),
            1 + max(filled, default=0))
