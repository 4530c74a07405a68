"""Which (position, step) pairs of a packed batch are unrolled, and how their attention is tiled. Pure index arithmetic.

**Roots.** In serving, a round drafts from position i only when token i+1 is an accepted token of the answer (the root
of the draft tree), and its step s proposes token i+2+s. Training does the same: position i is a root when
`loss_mask[i+1]`, and it is unrolled at step s while all of tokens i+2 .. i+2+s belong to the answer. Drafts past the
end of the answer and drafts from prompt positions never occur in serving, so neither is computed. (Masking by token i,
as other trainers do, drops the first answer tokens and trains on tokens after the answer's end.)

**Prefixes.** Roots are sorted by their number of steps, most first: the roots alive at step s are then the first
`alive[s]`, and dropping finished roots is a slice. With one layer, a position that is no root contributes only its key
and value; its attention, MLP and logits are never needed.

**Tiles.** The step-0 key of every position is read by the later roots of its own document, at every step. Blocks of a
document's queries, of similar size, are stacked into a tile [G, Lq, Lk] of attention scores; later steps compute its
first queries only. A tile is the only place with padding, inside attention and bounded by `_MAX_TILE_WASTE`; documents
in one tile share a batch axis, never a score. Tiles are of the CPU alone; the GPU's kernel reads ranges of keys.

    T packed tokens, R roots, S steps, G blocks of a tile, Lq its most roots, Lk its most keys
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

# Attention is a few percent of a step's arithmetic, so up to 40 % more of it costs less than launching more tiles.
_MAX_TILE_WASTE = 1.4

# Queries per block of a document: a block reads no key behind its last query. And the most blocks of a document,
# because every block copies its keys.
QUERY_BLOCK, _MAX_BLOCKS = 128, 8


@dataclass(frozen=True)
class AttentionTile:
    """Blocks of queries whose attention runs as one batched matrix product."""

    num_blocks: int
    """G"""

    num_queries: tuple[int, ...]
    """[S] most queries of a block at each step: non-increasing. The first is Lq."""

    num_keys: int
    """Lk"""

    key_index: Tensor
    """Packed position of each real key: source of a copy into the tile's [G * Lk] cells."""

    key_cell: Tensor
    """Cell of each real key, same order."""

    query_positions: Tensor
    """[G, Lq] int64 position of each query within its document; 0 in unused cells, so that their softmax is finite. A
    block's queries are sorted by decreasing number of steps: those of step s are the first."""

    @cached_property
    def causal_mask(self) -> Tensor:
        """[G, 1, Lq, Lk] bool, True where a key lies behind the query. Built at first use: the GPU kernel needs none.
        """
        keys = torch.arange(self.num_keys, device=self.query_positions.device)
        return keys > self.query_positions[:, None, :, None]

    def mask_at(self, step: int, window: int | None) -> Tensor:
        """[G, 1, Lq, Lk] bool, True where a query of `step` may not attend; `window` keys are visible, or all."""
        num_queries = self.num_queries[step]
        masked = self.causal_mask[:, :, :num_queries]
        if window is None:
            return masked
        # At step s the query stands at position i + s: its window begins s positions later than at step 0.
        oldest = self.query_positions[:, :num_queries] + (step - window + 1)
        return masked | (torch.arange(self.num_keys, device=masked.device) < oldest[:, None, :, None])


@dataclass(frozen=True)
class UnrollPlan:
    """All indices of one batch's unroll."""

    roots: Tensor
    """[R] int64 packed positions, by decreasing number of steps, then ascending."""

    positions: Tensor
    """[T] int64 position of each packed token within its document: its rope position."""

    alive: tuple[int, ...]
    """[S] roots alive at each step: non-increasing, alive[0] = R."""

    target_positions: Tensor
    """Ascending packed positions whose final state some step of the batch is compared with: step s of root i needs
    i + 1 + s. The same in every part of a split plan."""

    starts: tuple[int, ...]
    """[documents + 1] first packed position of each document, and the end of the last."""

    query_block: int
    """Most queries of one document in a block of a tile."""

    def to(self, device: torch.device) -> "UnrollPlan":
        """The same plan with its indices on a device. Planning itself runs on the CPU."""
        if self.roots.device == device:
            return self
        # A blocking copy waits for everything that the GPU still has to do.
        roots, positions, target_positions = (x.to(device, non_blocking=True)
                                              for x in (self.roots, self.positions, self.target_positions))
        return replace(self, roots=roots, positions=positions, target_positions=target_positions)

    @property
    def tiles(self) -> tuple[AttentionTile, ...]:
        return self._tiling[0]

    @cached_property
    def _tiling(self) -> tuple[tuple[AttentionTile, ...], Tensor]:
        """The tiles, and [R, 3] int64 of each root: its tile, its block in the tile, its rank among the block's
        queries. Built at first use, and so never for a GPU, whose kernel needs none."""
        num_steps, roots = np.zeros(self.positions.numel(), dtype=np.int64), self.roots.numpy()
        num_steps[roots] = (np.arange(roots.size)[:, None] < np.array(self.alive)).sum(1)
        tiles, slots_T = _tiles(num_steps, self.starts, len(self.alive), self.query_block)
        return tiles, torch.from_numpy(slots_T[roots])

    def query_cells(self, step: int) -> tuple[Tensor, tuple[int, ...]]:
        """[R_s] cell of each root alive at `step` in the concatenated query cells of all tiles, and cells per tile."""
        tiles, slots_R3 = self._tiling
        queries = torch.tensor([tile.num_queries[step] for tile in tiles])
        sizes = [tile.num_blocks * tile.num_queries[step] for tile in tiles]
        bases = torch.tensor([0, *accumulate(sizes)])
        tile, block, rank = slots_R3[: self.alive[step]].unbind(1)
        return bases[tile] + block * queries[tile] + rank, tuple(sizes)

    @property
    def num_predictions(self) -> int:
        """Token predictions over all steps: the work of the unroll."""
        return sum(self.alive)

    @property
    def num_visible(self) -> int:
        """Keys that attention reads, summed over all roots and steps. Of a plan on the CPU."""
        return sum(int(self.positions[self.roots[:alive]].sum()) + alive * (1 + step)
                   for step, alive in enumerate(self.alive))


def count_steps(loss_mask: np.ndarray, ttt_length: int) -> np.ndarray:
    """Steps that each position of ONE document is unrolled: 0 where it is no root.

    loss_mask  [T] bool   token t was produced by the target.
    returns    [T] int64  min(S, number of consecutive answer tokens from i+2 on) where token i+1 is an answer token.
    """
    length = loss_mask.shape[0]
    position = np.arange(length + 2)
    padded = np.concatenate([loss_mask, [False, False]])
    # First position at or after t that is no answer token: running minimum from the right.
    stop = np.minimum.accumulate(np.where(padded, length, position)[::-1])[::-1]
    after = np.minimum(stop[2:] - position[2:], ttt_length)
    return np.where(padded[1:-1], np.maximum(after, 0), 0)


def plan_unroll(loss_mask: Tensor, lengths: Sequence[int], ttt_length: int, deep: Tensor | None = None,
                query_block: int = QUERY_BLOCK, *, chosen: Tensor | None = None) -> UnrollPlan:
    """Plan the unroll of one batch.

    loss_mask    [T] bool, documents end to end.
    lengths      tokens of each document, summing to T.
    deep         [T] bool, positions unrolled beyond step 0; None: all.
    query_block  most queries of one document in a block.
    chosen       [T] bool, positions that may be roots; None: all.
    """
    mask, starts = loss_mask.numpy(), tuple(accumulate(lengths, initial=0))
    # Per document: a run of answer tokens must not continue into the next one.
    num_steps = np.concatenate([count_steps(mask[a:b], ttt_length) for a, b in pairwise(starts)])
    if deep is not None:
        num_steps = np.where(deep.numpy(), num_steps, np.minimum(num_steps, 1))
    if chosen is not None:
        num_steps = np.where(chosen.numpy(), num_steps, 0)
    roots = np.flatnonzero(num_steps)
    # Stable: roots with equally many steps stay ascending, so the order of sums does not depend on the sort.
    roots = roots[np.argsort(-num_steps[roots], kind="stable")]
    alive = tuple(int((num_steps[roots] > step).sum()) for step in range(ttt_length))
    # The target is computed once at each of these, whatever number of (root, step) pairs reads it.
    needed = np.zeros(num_steps.size, dtype=bool)
    for step, num_alive in enumerate(alive):
        needed[roots[:num_alive] + 1 + step] = True
    positions = np.arange(num_steps.size) - np.repeat(starts[:-1], lengths)
    return UnrollPlan(torch.from_numpy(roots), torch.from_numpy(positions), alive,
                      torch.from_numpy(np.flatnonzero(needed)), starts, query_block)


def split_plan(plan: UnrollPlan, max_roots: int) -> list[UnrollPlan]:
    """The same unroll as several plans of at most `max_roots` neighbouring roots each, which may run one after the
    other: roots of a batch share nothing but the step-0 keys. All parts are cut in one pass over the roots."""
    num_roots, num_steps = plan.roots.numel(), len(plan.alive)
    if num_roots <= max_roots:
        return [plan]
    size = -(-num_roots // -(-num_roots // max_roots))  # parts of equal size, the last one smaller
    part_R = torch.empty_like(plan.roots)
    part_R[plan.roots.argsort()] = torch.arange(num_roots) // size
    # Roots alive at each step of each part: those that have more steps than it.
    steps_R = (torch.arange(num_roots)[:, None] < torch.tensor(plan.alive)).sum(1)
    counts = torch.bincount(part_R * (num_steps + 1) + steps_R, minlength=-(-num_roots // size) * (num_steps + 1))
    alive = counts.view(-1, num_steps + 1).flip(1).cumsum(1).flip(1)[:, 1:].tolist()
    # Stable: within a part the roots keep their order, most steps first.
    roots = plan.roots[part_R.argsort(stable=True)].split(size)
    return [replace(plan, roots=members, alive=tuple(steps)) for members, steps in zip(roots, alive, strict=True)]


def _blocks(queries: np.ndarray, size: int) -> list[np.ndarray]:
    """Runs of a document's queries. A run reads the keys up to its own last query, so the first half of a long document
    is not multiplied with the keys of its second half."""
    size = max(size, -(-queries.size // _MAX_BLOCKS))
    return [queries[at:at + size] for at in range(0, queries.size, size)]


def _tiles(num_steps: np.ndarray, starts: Sequence[int], ttt_length: int,
           query_block: int) -> tuple[tuple[AttentionTile, ...], np.ndarray]:
    """Stack blocks of queries with their documents' keys, similar sizes together; also the slot of every root."""
    # 1. Cut each document's queries into blocks (keys, start of the document, queries by decreasing number of steps).
    blocks = []
    for start, end in pairwise(starts):
        for queries in _blocks(np.flatnonzero(num_steps[start:end]), query_block):
            by_steps = np.argsort(-num_steps[start + queries], kind="stable")
            blocks.append((int(queries[-1]) + 1, start, queries[by_steps]))
    # 2. Sort by size, so that neighbours fit one rectangle; the start breaks ties, so that the plan is reproducible.
    blocks.sort(key=lambda block: (-block[0], -block[2].size, block[1]))
    slots = np.full((num_steps.shape[0], 3), -1)
    tiles: list[AttentionTile] = []
    # 3. Each group of blocks becomes one tile, padded to its most keys and its most queries.
    for members in _group([(keys, queries.size, start) for keys, start, queries in blocks]):
        chosen = [blocks[member] for member in members]
        num_queries, num_keys = max(block[2].size for block in chosen), chosen[0][0]
        query_positions = np.zeros((len(chosen), num_queries), dtype=np.int64)
        key_index, key_cell = [], []
        for row, (keys, start, queries) in enumerate(chosen):
            query_positions[row, : queries.size] = queries
            key_index.append(start + np.arange(keys))
            key_cell.append(row * num_keys + np.arange(keys))
            slots[start + queries] = np.stack([np.full(queries.size, len(tiles)), np.full(queries.size, row),
                                               np.arange(queries.size)], 1)
        steps_of_blocks = [num_steps[start + queries] for _, start, queries in chosen]
        num_queries_at = tuple(max(int((steps > step).sum()) for steps in steps_of_blocks)
                               for step in range(ttt_length))
        tiles.append(AttentionTile(
            len(chosen), num_queries_at, num_keys, torch.from_numpy(np.concatenate(key_index)),
            torch.from_numpy(np.concatenate(key_cell)), torch.from_numpy(query_positions)))
    return tuple(tiles), slots


def _group(sizes: list[tuple[int, int, int]]) -> list[list[int]]:
    """Consecutive groups of (keys, queries, document) whose common rectangle wastes at most `_MAX_TILE_WASTE`, no
    document twice in one: a key is then copied once into a tile, and its gradient is a copy as well."""
    groups: list[list[int]] = []
    real = most_keys = most_queries = 0
    inside: set[int] = set()
    for index, (keys, queries, document) in enumerate(sizes):
        grown_keys, grown_queries = max(most_keys, keys), max(most_queries, queries)
        fits = groups and document not in inside
        if fits and (len(groups[-1]) + 1) * grown_keys * grown_queries <= _MAX_TILE_WASTE * (real + keys * queries):
            groups[-1].append(index)
            real, most_keys, most_queries = real + keys * queries, grown_keys, grown_queries
        else:
            groups.append([index])
            inside = set()
            real, most_keys, most_queries = keys * queries, keys, queries
        inside.add(document)
    return groups
