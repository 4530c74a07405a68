"""Writes a hidden-state store shard by shard, so that a kill loses at most the open shard.

The order of every step is the point:

    1. the shard is written under a hidden name and flushed to disk;
    2. it is renamed to its place;
    3. the index that lists it replaces the old index.

Killed before 3, the shard is not in the index and is removed when the writer opens the directory again; the caller then
goes on with row `num_rows`. That demands that rows come in the same order every time, which the caller owes (`capture`
takes them in the order of `rows.jsonl`). One writer per directory: the stage program's lock sees to it.

The index is rewritten whole after each shard: about 100 bytes per row, against tens of megabytes of states per shard.
"""

import os
from pathlib import Path

from pydantic import ValidationError
from safetensors.torch import save_file

from eyrie_api.artifacts import digest_file, write_model
from eyrie_api.errors import ArtifactCorrupt, Conflict
from eyrie_workers.features.layout import (
    INDEX,
    FeatureRow,
    ShardEntry,
    StoreIndex,
    StoreLayout,
    join_rows,
    shard_name,
)


def read_index(directory: Path) -> StoreIndex | None:
    """The index of a store, None when there is none. Raises ArtifactCorrupt when it cannot be read."""
    path = directory / INDEX
    try:
        return StoreIndex.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ArtifactCorrupt(f"{path} is not a readable store index: {error.errors()[0]['msg']}",
                              "delete the directory and capture again") from error


class FeatureWriter:
    """Appends whole shards to a store; opening an unfinished store goes on after its last whole shard."""

    def __init__(self, directory: Path, layout: StoreLayout) -> None:
        """Open or create the store in `directory`.

        Raises Conflict when the directory holds states of another layout, and ArtifactCorrupt when a listed shard is
        gone or has another size.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        found = read_index(directory)
        if found is not None and found.layout != layout:
            raise Conflict(f"{directory} holds hidden states of another layout ({_difference(found.layout, layout)})",
                           "capture into an empty directory, or delete this one")
        self._index = found or StoreIndex(layout=layout)
        self._check_listed()
        self._remove_unlisted()
        write_model(directory / INDEX, self._index)

    @property
    def layout(self) -> StoreLayout:
        """What every row must look like."""
        return self._index.layout

    @property
    def index(self) -> StoreIndex:
        """The store so far."""
        return self._index

    @property
    def num_rows(self) -> int:
        """Rows in whole shards: where the caller goes on."""
        return sum(shard.rows for shard in self._index.shards)

    @property
    def row_ids(self) -> list[str]:
        """Ids of the rows in whole shards, in order."""
        return [row_id for shard in self._index.shards for row_id in shard.row_ids]

    @property
    def paths(self) -> list[Path]:
        """Every file of the store, for the manifest."""
        return [self._directory / INDEX, *(self._directory / shard.name for shard in self._index.shards)]

    def write_shard(self, rows: list[FeatureRow]) -> ShardEntry:
        """Append one whole shard. Raises ValueError for no rows, or a row that does not fit the layout."""
        if not rows:
            raise ValueError("a shard needs at least one row")
        tensors = join_rows(rows, self.layout)
        path = self._directory / shard_name(len(self._index.shards))
        aside = path.with_name(f".{path.name}.part")
        save_file(tensors, aside)
        aside.chmod(0o644)  # safetensors makes files for their owner alone; a pod of another user reads them
        _flush(aside)
        os.replace(aside, path)
        entry = ShardEntry(name=path.name, rows=len(rows), tokens=tensors["token_ids"].shape[0],
                           size_bytes=path.stat().st_size, sha256=digest_file(path),
                           row_ids=tuple(row.row_id for row in rows))
        self._index = self._index.model_copy(update={"shards": (*self._index.shards, entry)})
        write_model(self._directory / INDEX, self._index)
        return entry

    def _check_listed(self) -> None:
        for shard in self._index.shards:
            path = self._directory / shard.name
            if not path.is_file() or path.stat().st_size != shard.size_bytes:
                raise ArtifactCorrupt(f"{path} is listed in {INDEX} but is gone or has another size",
                                      "delete the directory and capture again")

    def _remove_unlisted(self) -> None:
        listed = {shard.name for shard in self._index.shards}
        patterns = ("shard-*.safetensors", ".shard-*.part", f".{INDEX}.*")  # the last: an index that was being written
        for path in [path for pattern in patterns for path in self._directory.glob(pattern)]:
            if path.name not in listed:
                path.unlink()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _difference(found: StoreLayout, wanted: StoreLayout) -> str:
    one, other = found.model_dump(), wanted.model_dump()
    return ", ".join(f"{name}: {one[name]} instead of {other[name]}" for name in one if one[name] != other[name])
