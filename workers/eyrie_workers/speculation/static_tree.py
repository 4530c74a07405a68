"""The tree of fixed branching: one shape for all rows and rounds, chosen before any drafter is asked.

EAGLE-1 (arXiv:2401.15077, section 4.1) drafts such a tree, picked by hand; Medusa (arXiv:2401.10774, section 2.3.3) and
Sequoia (arXiv:2402.12374, section 3.1) choose it: if the guess of rank r is right with chance p_r wherever the drafter
stands, a node is accepted with the product of p along its path, and the tree of N nodes with the most accepted tokens
is the N nodes of the largest products. A path's product falls with every step and with every rank, so best-first
search finds them, and they form a tree.

What EAGLE-2 adds is to ask the drafter, round by round, how sure it is of each guess. The static tree is what that is
compared with. As in the dynamic tree, at most `top_k` nodes of a depth have children, so both need the same memory.
"""

import heapq
from functools import cache
from typing import NamedTuple

from eyrie_api.v1alpha1.draft_tree import DraftTreeShape

# Chance that the guess of each rank is the target's greedy choice, the path to it being right. Measured on an EAGLE-3
# drafter of the quickstart target (480 conversations, 6 epochs; 562 positions of 16 prompts of its suites):
#     python -m tests.benchmarks.calibration --drafter DIR --out DIR --num-steps 4 --top-k 8
# counted 416, 48, 16, 11, 11, 6, 3, 4; the last two are pooled, so that chances fall.
ACCEPTED_BY_RANK = (0.740, 0.085, 0.028, 0.020, 0.020, 0.011, 0.006, 0.006)


class Topology(NamedTuple):
    """A tree's nodes, the root first, depth by depth.

    parents   index of each node's parent, smaller than its own; the root is its own parent
    ranks     which of its parent's guesses a node is: 0 the best; 0 for the root. Siblings have ranks 0, 1, 2, ..
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]


class Level(NamedTuple):
    """One depth of a topology, as it is grown. A *runner* is a node of the depth above that has children, in order."""

    nodes: tuple[int, ...]
    width: int
    """Guesses wanted of a runner, at most."""

    guesses: tuple[int, ...]
    """Of each node: which guess it is, when every runner above makes `width` of them: runner * width + rank."""

    inner: tuple[int, ...]
    """Nodes that have children: the runners of the next depth."""

    under: tuple[int, ...]
    """Of each of `inner`: the runner above it."""


def accepted_at(rank: int) -> float:
    """The prior: as measured for the first ranks, falling with the square of the rank beyond (a power law, Sequoia)."""
    last = len(ACCEPTED_BY_RANK)
    return ACCEPTED_BY_RANK[rank] if rank < last else ACCEPTED_BY_RANK[-1] * (last / (rank + 1)) ** 2


def static_topology(shape: DraftTreeShape) -> Topology:
    """The `num_draft_tokens` nodes, root included, of the largest chance to be accepted, at most `num_steps` deep.

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
                continue  # this depth's parents are chosen: its siblings would be children of the same node
            parents_at[above] += 1
        taken.append(path)
        if rank + 1 < top_k:
            heapq.heappush(heap, (minus * accepted_at(rank + 1) / accepted_at(rank), (*path[:-1], rank + 1)))
        if len(path) < num_steps:
            heapq.heappush(heap, (minus * accepted_at(0), (*path, 0)))
    taken.sort(key=lambda path: (len(path), path))
    node_of = {path: node for node, path in enumerate(taken)}
    return Topology(tuple(node_of[path[:-1]] for path in taken), tuple(path[-1] if path else 0 for path in taken))


@cache
def levels(topology: Topology) -> tuple[Level, ...]:
    """The depths below the root, in order."""
    parents, ranks = topology
    inner = set(parents)
    found: list[Level] = []
    above: tuple[int, ...] = (0,)
    while nodes := tuple(node for node, parent in enumerate(parents) if node and parent in above):
        width = 1 + max(ranks[node] for node in nodes)
        runners = tuple(node for node in nodes if node in inner)
        found.append(Level(nodes, width, tuple(above.index(parents[node]) * width + ranks[node] for node in nodes),
                           runners, tuple(above.index(parents[node]) for node in runners)))
        above = runners
    return tuple(found)
