"""The source of every row of a store, in a file next to its index: `sources.json`.

Training needs it where candidates train on mixes of the sources (`data.mix`). It is a file of its own, so that the
format of shards, index and stream plan is the same with and without it, and so that a store's digest is that of its
states.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from eyrie_api.artifacts import read_sealed, write_sealed
from eyrie_api.contract.model import Frozen
from eyrie_api.errors import ArtifactCorrupt
from eyrie_workers.hidden_states.storage_backend import StorageBackend

SOURCES = "sources.json"
_HINT = "retry the job: capture writes it again"


class RowSources(Frozen):
    """`sources.json`."""

    format_version: Literal[1] = 1
    names: tuple[str, ...]
    """As in `data.mix`."""

    rows: tuple[int, ...]
    """For each row of the store, in order, the index of its source among `names`."""

    @property
    def of_rows(self) -> list[str]:
        return [self.names[index] for index in self.rows]


def write_row_sources(directory: Path, of_rows: Sequence[str]) -> Path:
    index = {name: number for number, name in enumerate(dict.fromkeys(of_rows))}
    path = directory / SOURCES
    write_sealed(path, RowSources(names=tuple(index), rows=tuple(index[name] for name in of_rows)))
    return path


def read_row_sources(backend: StorageBackend, num_rows: int | None = None) -> list[str] | None:
    """The source of each row of a store; None where it is not known. Raises ArtifactCorrupt, also for another number of
    rows than `num_rows`."""
    data = backend.file(SOURCES)
    if data is None:
        return None
    try:
        sources = read_sealed(data, RowSources).of_rows
    except (ValueError, IndexError) as error:
        raise ArtifactCorrupt(f"{SOURCES} in {backend.name} cannot be read: {error}", _HINT) from error
    if num_rows not in (None, len(sources)):
        raise ArtifactCorrupt(f"{SOURCES} in {backend.name} names the sources of {len(sources)} rows, and the store "
                              f"has {num_rows}", _HINT)
    return sources
