"""Where the unroll computes: which positions begin a draft, how long each lives, and how attention is tiled. Pure.

**Roots.** In serving a round grows from position i only when token i+1 is a settled token of the answer (the root of
the draft tree), and its step s proposes token i+2+s. So position i is a root of the unroll when `loss_mask[i+1]`, and
its step s is alive while all of tokens i+2 .. i+2+s belong to the answer. A draft that outlives the answer is never
served, a prompt position never drafts: neither is computed. (Peers supervise by the mask of token i, which drops the
first answer tokens and teaches the ones after the answer's end.)

**Prefixes.** Roots are ordered by how many steps they live, longest first: the roots alive at step s are then the first
`alive[s]`, and "drop the dead" is a slice. With one layer, a position that is no root only lends its key and value; its
attention, MLP and logits are never needed.

**Tiles.** Step 0 of every position is a key for the later roots of its own document, at every step. Documents of
similar size are stacked into a tile [G, Lq, Lk] of attention scores. A tile is the one place with padding, inside
attention alone and bounded by `_MAX_TILE_WASTE`; documents in one tile share an axis, never a score.

    T packed tokens, R roots, S steps, G documents of a tile, Lq its most roots, Lk its most keys
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

# Attention is a few percent of a step's arithmetic, so up to 40 % more of it costs less than launching more tiles.
_MAX_TILE_WASTE = 1.4


@dataclass(frozen=True)
class Tile:
    """Documents whose attention runs as one batched product."""

    num_documents: int
    num_queries: int
    """Lq"""

    num_keys: int
    """Lk"""

    key_index: Tensor
    """Packed position of each real key: source of a copy into the tile's [G * Lk] cells."""

    key_cell: Tensor
    """Cell of each real key, same order."""

    hidden: Tensor
    """[G, 1, Lq, Lk] bool, True where a query may not look. Unused query cells see key 0, to stay finite."""

    query_positions: Tensor
    """[G, Lq] int64 position of each query within its document; 0 in unused cells."""

    def hidden_at(self, step: int, window: int | None) -> Tensor:
        """`hidden` at an unrolled step, when a position sees no further back than `window` positions."""
        if window is None:
            return self.hidden
        oldest = self.query_positions + (step - window + 1)
        return self.hidden | (torch.arange(self.num_keys) < oldest[:, None, :, None])


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
    query_cell: Tensor
    """[R] cell of each root in the tiles' query cells laid end to end (G * Lq each)."""

    num_query_cells: int

    @property
    def num_supervised(self) -> int:
        """Token predictions over all steps: the work of the unroll."""
        return sum(self.alive)


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


def lay_out(loss_mask: Tensor, lengths: Sequence[int], ttt_length: int, deep: Tensor | None = None) -> UnrollLayout:
    """Plan the unroll of one batch.

    loss_mask  [T] bool, documents end to end.
    lengths    tokens of each document, summing to T.
    deep       [T] bool, positions whose draft goes on after step 0; None: all.
    """
    mask = loss_mask.numpy()
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    life = np.concatenate([lives(mask[a:b], ttt_length) for a, b in pairwise(starts)])
    if deep is not None:
        life = np.where(deep.numpy(), life, np.minimum(life, 1))
    positions = np.concatenate([np.arange(length) for length in lengths])
    roots = np.flatnonzero(life)
    roots = roots[np.argsort(-life[roots], kind="stable")]
    alive = tuple(int((life[roots] > step).sum()) for step in range(ttt_length))
    tiles, query_cell_T, num_cells = _tiles(life, starts)
    return UnrollLayout(roots=torch.from_numpy(roots), positions=torch.from_numpy(positions), alive=alive, tiles=tiles,
                        query_cell=torch.from_numpy(query_cell_T[roots]), num_query_cells=num_cells)


def _tiles(life: np.ndarray, starts: np.ndarray) -> tuple[tuple[Tile, ...], np.ndarray, int]:
    """Stack documents of similar size; also the query cell of every root (by packed position) and how many cells."""
    documents = []
    for start, end in pairwise(starts.tolist()):
        queries = np.flatnonzero(life[start:end])
        if queries.size:
            documents.append((int(queries[-1]) + 1, start, queries))
    documents.sort(key=lambda document: (-document[0], -document[2].size, document[1]))
    query_cell, num_cells, tiles = np.full(life.shape[0], -1), 0, []
    for members in _group([(keys, queries.size) for keys, _, queries in documents]):
        chosen = [documents[member] for member in members]
        num_queries, num_keys = max(d[2].size for d in chosen), chosen[0][0]
        hidden = np.ones((len(chosen), 1, num_queries, num_keys), dtype=bool)
        hidden[..., 0] = False
        query_positions = np.zeros((len(chosen), num_queries), dtype=np.int64)
        key_index, key_cell = [], []
        for row, (keys, start, queries) in enumerate(chosen):
            hidden[row, 0, : queries.size] = np.arange(num_keys)[None, :] > queries[:, None]
            query_positions[row, : queries.size] = queries
            key_index.append(start + np.arange(keys))
            key_cell.append(row * num_keys + np.arange(keys))
            query_cell[start + queries] = num_cells + row * num_queries + np.arange(queries.size)
        num_cells += len(chosen) * num_queries
        tiles.append(Tile(len(chosen), num_queries, num_keys, torch.from_numpy(np.concatenate(key_index)),
                          torch.from_numpy(np.concatenate(key_cell)), torch.from_numpy(hidden),
                          torch.from_numpy(query_positions)))
    return tuple(tiles), query_cell, num_cells


def _group(sizes: list[tuple[int, int]]) -> list[list[int]]:
    """Consecutive groups of (keys, queries) whose common rectangle wastes at most `_MAX_TILE_WASTE`."""
    groups: list[list[int]] = []
    real = most_keys = most_queries = 0
    for index, (keys, queries) in enumerate(sizes):
        grown_keys, grown_queries = max(most_keys, keys), max(most_queries, queries)
        if groups and (len(groups[-1]) + 1) * grown_keys * grown_queries <= _MAX_TILE_WASTE * (real + keys * queries):
            groups[-1].append(index)
            real, most_keys, most_queries = real + keys * queries, grown_keys, grown_queries
        else:
            groups.append([index])
            real, most_keys, most_queries = keys * queries, keys, queries
    return groups
