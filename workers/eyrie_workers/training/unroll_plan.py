"""Where the unroll computes: which positions begin a draft, how long each lives, and how attention is tiled. Pure.

**Roots.** In serving a round grows from position i only when token i+1 is a settled token of the answer (the root of
the draft tree), and its step s proposes token i+2+s. So position i is a root of the unroll when `loss_mask[i+1]`, and
its step s is alive while all of tokens i+2 .. i+2+s belong to the answer. A draft that outlives the answer is never
served, a prompt position never drafts: neither is computed. (Peers supervise by the mask of token i, which drops the
first answer tokens and teaches the ones after the answer's end.)

**Prefixes.** Roots are ordered by how many steps they live, longest first: the roots alive at step s are then the first
`alive[s]`, and "drop the dead" is a slice. With one layer, a position that is no root only lends its key and value; its
attention, MLP and logits are never needed.

**Tiles.** Step 0 of every position is a key for the later roots of its own document, at every step. Blocks of a
document's queries, of similar size, are stacked into a tile [G, Lq, Lk] of attention scores; later steps compute its
first queries only. A tile is the one place with padding, inside attention alone and bounded by `_MAX_TILE_WASTE`;
documents in one tile share an axis, never a score.

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

# A document's queries are cut into blocks of so many, for each looks at no key behind its last; and into no more blocks
# than this, for every block copies its keys.
QUERY_BLOCK, _MAX_BLOCKS = 128, 8


@dataclass(frozen=True)
class Tile:
    """Documents whose attention runs as one batched product."""

    num_documents: int
    queries_at: tuple[int, ...]
    """[S] most queries a document has at each step: non-increasing. The first is Lq."""

    num_keys: int
    """Lk"""

    key_index: Tensor
    """Packed position of each real key: source of a copy into the tile's [G * Lk] cells."""

    key_cell: Tensor
    """Cell of each real key, same order."""

    query_positions: Tensor
    """[G, Lq] int64 position of each query within its document; 0 in unused cells, to stay finite. A document's queries
    stand by decreasing life: those of step s are the first."""

    @cached_property
    def hidden(self) -> Tensor:
        """[G, 1, Lq, Lk] bool, True where a query may not look. Made when first asked for: a kernel never asks."""
        keys = torch.arange(self.num_keys, device=self.query_positions.device)
        return keys > self.query_positions[:, None, :, None]

    def hidden_at(self, step: int, window: int | None) -> Tensor:
        """`hidden` at an unrolled step, when a position sees no further back than `window` positions."""
        num_queries = self.queries_at[step]
        hidden = self.hidden[:, :, :num_queries]
        if window is None:
            return hidden
        oldest = self.query_positions[:, :num_queries] + (step - window + 1)
        return hidden | (torch.arange(self.num_keys, device=hidden.device) < oldest[:, None, :, None])


@dataclass(frozen=True)
class UnrollLayout:
    """Everything index-like about one batch's unroll."""

    roots: Tensor
    """[R] int64 packed positions, by decreasing life, then ascending."""

    positions: Tensor
    """[T] int64 position of each packed token within its document: its rope position."""

    alive: tuple[int, ...]
    """[S] roots alive at each step: non-increasing, alive[0] = R."""

    tiles: tuple[Tile, ...]
    seats: Tensor
    """[R, 3] int64 of each root: its tile, its document in the tile, its rank among that document's queries."""

    life: Tensor
    """[T] int64 steps each packed position lives."""

    starts: Tensor
    """[documents + 1] int64 where each document begins, and the last one's end."""

    def to(self, device: torch.device) -> "UnrollLayout":
        """The same layout, its indices on a device. Planning itself is done on the processor."""
        if self.roots.device == device:
            return self
        tiles = tuple(replace(tile, key_index=tile.key_index.to(device), key_cell=tile.key_cell.to(device),
                              query_positions=tile.query_positions.to(device)) for tile in self.tiles)
        roots, positions, seats, life, starts = (one.to(device) for one in (
            self.roots, self.positions, self.seats, self.life, self.starts))
        return UnrollLayout(roots, positions, self.alive, tiles, seats, life, starts)

    def query_cells(self, step: int) -> tuple[Tensor, tuple[int, ...]]:
        """[R_s] cell of each root alive at `step` in the tiles' query cells laid end to end, and each tile's cells."""
        queries = torch.tensor([tile.queries_at[step] for tile in self.tiles])
        sizes = [tile.num_documents * tile.queries_at[step] for tile in self.tiles]
        bases = torch.tensor([0, *accumulate(sizes)])
        tile, document, rank = self.seats[: self.alive[step]].unbind(1)
        return bases[tile] + document * queries[tile] + rank, tuple(sizes)

    @property
    def num_supervised(self) -> int:
        """Token predictions over all steps: the work of the unroll."""
        return sum(self.alive)

    def teacher_positions(self) -> Tensor:
        """Ascending packed positions whose final state some step compares with: step s of root i asks i + 1 + s."""
        asked_T = torch.zeros(self.positions.numel(), dtype=torch.bool, device=self.roots.device)
        for step, num_alive in enumerate(self.alive):
            asked_T[self.roots[:num_alive] + 1 + step] = True
        return asked_T.nonzero().squeeze(1)


def lives(loss_mask: np.ndarray, ttt_length: int) -> np.ndarray:
    """Steps each position of ONE document lives as a root: 0 where it is none.

    loss_mask  [T] bool   token t was produced by the target.
    returns    [T] int64  min(S, number of answer tokens in a row from i+2 on) where token i+1 is an answer token.
    """
    length = loss_mask.shape[0]
    position = np.arange(length + 2)
    padded = np.concatenate([loss_mask, [False, False]])
    # First position at or after t that is no answer token: running minimum from the right.
    stop = np.minimum.accumulate(np.where(padded, length, position)[::-1])[::-1]
    after = np.minimum(stop[2:] - position[2:], ttt_length)
    return np.where(padded[1:-1], np.maximum(after, 0), 0)


def lay_out(loss_mask: Tensor, lengths: Sequence[int], ttt_length: int, deep: Tensor | None = None,
            query_block: int = QUERY_BLOCK, *, chosen: Tensor | None = None) -> UnrollLayout:
    """Plan the unroll of one batch.

    loss_mask  [T] bool, documents end to end.
    lengths    tokens of each document, summing to T.
    deep       [T] bool, positions whose draft goes on after step 0; None: all.
    query_block  queries of one document that share a tile's rows of keys, at most.
    chosen     [T] bool, positions that may be roots; None: all.
    """
    mask = loss_mask.numpy()
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    life = np.concatenate([lives(mask[a:b], ttt_length) for a, b in pairwise(starts)])
    if deep is not None:
        life = np.where(deep.numpy(), life, np.minimum(life, 1))
    if chosen is not None:
        life = np.where(chosen.numpy(), life, 0)
    return _laid_out(life, starts, ttt_length, query_block)


def _laid_out(life: np.ndarray, starts: np.ndarray, ttt_length: int, query_block: int) -> UnrollLayout:
    positions = np.arange(life.shape[0]) - np.repeat(starts[:-1], np.diff(starts))
    roots = np.flatnonzero(life)
    roots = roots[np.argsort(-life[roots], kind="stable")]
    alive = tuple(int((life[roots] > step).sum()) for step in range(ttt_length))
    tiles, seats_T = _tiles(life, starts, ttt_length, query_block)
    return UnrollLayout(roots=torch.from_numpy(roots), positions=torch.from_numpy(positions), alive=alive, tiles=tiles,
                        seats=torch.from_numpy(seats_T[roots]), life=torch.from_numpy(life),
                        starts=torch.from_numpy(starts))


def parts(layout: UnrollLayout, most_roots: int) -> list[UnrollLayout]:
    """The same unroll as several, of at most `most_roots` neighbouring roots each, that may run one after the other:
    roots of a batch meet in nothing but the step-0 keys."""
    roots = layout.roots.sort().values
    if roots.numel() <= most_roots:
        return [layout]
    cut = []
    for some in roots.chunk(-(-roots.numel() // most_roots)):
        life = torch.zeros_like(layout.life)
        life[some] = layout.life[some]
        cut.append(_laid_out(life.numpy(), layout.starts.numpy(), len(layout.alive), QUERY_BLOCK))
    return cut


def _blocks(queries: np.ndarray, size: int) -> list[np.ndarray]:
    """Runs of a document's queries. Each needs the keys up to its own last query: the later half of a long document's
    keys is no key of the first half's queries."""
    size = max(size, -(-queries.size // _MAX_BLOCKS))
    return [queries[at:at + size] for at in range(0, queries.size, size)]


def _tiles(life: np.ndarray, starts: np.ndarray, ttt_length: int,
           query_block: int) -> tuple[tuple[Tile, ...], np.ndarray]:
    """Stack blocks of queries with their documents' keys, similar sizes together; also the seat of every root."""
    blocks = []
    for start, end in pairwise(starts.tolist()):
        for queries in _blocks(np.flatnonzero(life[start:end]), query_block):
            blocks.append((int(queries[-1]) + 1, start, queries[np.argsort(-life[start + queries], kind="stable")]))
    blocks.sort(key=lambda block: (-block[0], -block[2].size, block[1]))
    seats = np.full((life.shape[0], 3), -1)
    tiles: list[Tile] = []
    for members in _group([(keys, queries.size, start) for keys, start, queries in blocks]):
        chosen = [blocks[member] for member in members]
        num_queries, num_keys = max(block[2].size for block in chosen), chosen[0][0]
        query_positions = np.zeros((len(chosen), num_queries), dtype=np.int64)
        key_index, key_cell = [], []
        for row, (keys, start, queries) in enumerate(chosen):
            query_positions[row, : queries.size] = queries
            key_index.append(start + np.arange(keys))
            key_cell.append(row * num_keys + np.arange(keys))
            seats[start + queries] = np.stack([np.full(queries.size, len(tiles)), np.full(queries.size, row),
                                               np.arange(queries.size)], 1)
        lifetimes = [life[start + queries] for _, start, queries in chosen]
        queries_at = tuple(max(int((lived > step).sum()) for lived in lifetimes) for step in range(ttt_length))
        tiles.append(Tile(len(chosen), queries_at, num_keys, torch.from_numpy(np.concatenate(key_index)),
                          torch.from_numpy(np.concatenate(key_cell)), torch.from_numpy(query_positions)))
    return tuple(tiles), seats


def _group(sizes: list[tuple[int, int, int]]) -> list[list[int]]:
    """Consecutive groups of (keys, queries, document) whose common rectangle wastes at most `_MAX_TILE_WASTE`, no
    document twice in one: a key is copied once into a tile, so that its gradient is a copy as well."""
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
