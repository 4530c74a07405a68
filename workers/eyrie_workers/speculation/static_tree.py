"""The static draft tree: one topology for all rows and rounds, fixed before the drafter runs.

EAGLE-1 (arXiv:2401.15077, section 4.1) drafts such a tree, chosen by hand; Medusa (arXiv:2401.10774, section 2.3.3) and
Sequoia (arXiv:2402.12374, section 3.1) compute it: if the candidate of rank r is accepted with probability p_r at every
node, a node is accepted with the product of p along its path, and the tree of N nodes with the most accepted tokens has
the N nodes of the largest products. The product falls with every step and with every rank, so best-first search finds
these nodes, and they form a tree.

EAGLE-2 uses the drafter's confidence in each candidate instead, round by round; the static tree is its baseline. As in
the dynamic tree, at most `top_k` nodes of a depth have children, so both need the same memory.
"""

import heapq
from functools import cache
from typing import NamedTuple

from eyrie_api.v1alpha1.engine import DraftTreeShape

# Probability that the candidate of each rank is the target's greedy token, given that its path is accepted. Measured on
# an EAGLE-3 drafter of the quickstart target (480 conversations, 6 epochs; 562 positions of 16 prompts of its suites):
#     python -m tests.benchmarks.calibration --drafter DIR --out DIR --num-steps 4 --top-k 8
# counted 416, 48, 16, 11, 11, 6, 3, 4; the last two are pooled, so that probabilities do not rise.
ACCEPTED_BY_RANK = (0.740, 0.085, 0.028, 0.020, 0.020, 0.011, 0.006, 0.006)


class Topology(NamedTuple):
    """A tree's nodes, the root first, depth by depth.

    parents   index of each node's parent, smaller than its own; the root is its own parent
    ranks     rank of a node among its parent's candidates: 0 the best; 0 for the root. Siblings have ranks 0, 1, 2, ..
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]


class Level(NamedTuple):
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


def static_topology(shape: DraftTreeShape) -> Topology:
    """The `num_draft_tokens` nodes, root included, with the largest acceptance probability, at most `num_steps` deep.

    A function of the shape's three numbers alone. With top_k 1 it is the chain.
    """
    return _topology(shape.num_steps, shape.top_k, shape.num_draft_tokens)


@cache
def _topology(num_steps: int, top_k: int, num_draft_tokens: int) -> Topology:
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
def levels(topology: Topology) -> tuple[Level, ...]:
    """The depths below the root, in order."""
    parents, ranks = topology
    with_children = set(parents)
    result: list[Level] = []
    above: tuple[int, ...] = (0,)
    while nodes := tuple(node for node, parent in enumerate(parents) if node and parent in above):
        width = 1 + max(ranks[node] for node in nodes)
        expanded = tuple(node for node in nodes if node in with_children)
        result.append(Level(nodes, width, tuple(above.index(parents[node]) * width + ranks[node] for node in nodes),
                            tuple(parents[node] for node in nodes), expanded,
                            tuple(above.index(parents[node]) for node in expanded)))
        above = expanded
    return tuple(result)
