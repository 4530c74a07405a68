"""An answered row, what identifies a set of them, and the ledger that collects them.

`rows.jsonl` is its own ledger. While the stage runs, each answer is one line, appended and flushed in the order
answers arrive; a resumed run truncates a torn last line and does not ask again for the rows that are there. At the end
the file is rewritten once in the order of the selection, so that the artifact does not depend on the order of arrival.

A row carries token ids, never text alone: tokenising the text again does not always give the ids that the target
generated (`ids_exact` tells which they are), and the drafter is trained on ids.

`rows.meta.json` holds the digest of the target and of everything else that decides what an answer is. Rows of another
target or another sampling are refused, here and in capture.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue, ValidationError

from eyrie_api.artifacts import read_manifest
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing
from eyrie_api.v1alpha1.model import Digest, Frozen
from eyrie_api.v1alpha1.rules import first_problem
from eyrie_api.v1alpha1.stages import FileEntry
from eyrie_workers.catalog import ROWS_FILE
from eyrie_workers.jsonl_ledger import Extent, JsonlLedger, decode_line, reason_of
from eyrie_workers.left_in_store import open_binary

ROWS = ROWS_FILE
META = "rows.meta.json"


class RowSampling(Frozen):
    """The sampling parameters of one answer."""

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int


class AnsweredRow(Frozen):
    """One prompt and the target's own answer to it."""

    id: str
    source: str
    """Path of the source."""

    source_name: str = ""
    """What `data.mix` calls the source; empty in rows of earlier versions."""

    line: int
    category: str
    prompt_ids: tuple[int, ...] = Field(min_length=1)
    answer_ids: tuple[int, ...] = Field(min_length=1)
    """Ends with an end-of-sequence token exactly when finish_reason is `stop`."""

    finish_reason: Literal["stop", "length"]
    text: str
    sampling: RowSampling
    seed: int
    ids_exact: bool
    """True when answer_ids are the ids the target generated, False when its text was tokenised again."""

    ids_differ: bool = False
    """Whether the ids tokenised again are known to differ from the target's."""

    reasoning: str = ""
    """Reasoning that the endpoint returned in a field of its own."""

    tool_calls: tuple[dict[str, JsonValue], ...] = ()
    """Tool calls as the endpoint parsed them from the answer."""

    turn: int = 0
    """With `turns: all`: index of the answered turn in its conversation."""

    key: str = ""
    """Digest of all that the answer is a function of (`regeneration.earlier_answers`). Empty in rows of earlier
    versions, which are not reused."""

    generated_by: str = ""
    """The earlier job that generated the answer; empty where it was generated here."""


class RowsMeta(Frozen):
    """What the rows of a directory have in common."""

    format_version: Literal[1] = 1
    target_digest: Digest
    answers_digest: Digest
    """Digest of data, exclusions, sampling and seed: all that decides which prompts are sent and what is answered."""


class RowLedger(JsonlLedger[AnsweredRow]):
    """Answered rows of one directory, by id. Holds positions in memory, not rows."""

    def __init__(self, path: Path) -> None:
        """Open or create the ledger. Raises ArtifactCorrupt when a complete line cannot be read."""
        self._by_id: dict[str, Extent] = {}
        self.in_store: tuple[FileEntry, ...] = ()
        """The finished file, where it is in an artifact store instead of at `path`."""

        # No fsync: a power failure costs some answers, which are requested again; an fsync per answer costs more.
        super().__init__(path, AnsweredRow, fsync=False,
                         hint="delete that line and run again: its prompt is answered again")

    def __contains__(self, row_id: str) -> bool:
        return row_id in self._by_id

    def __len__(self) -> int:
        return len(self._by_id)

    def row(self, row_id: str) -> AnsweredRow:
        """One answered row."""
        return self.read(self._by_id[row_id])

    def put_in_order(self, row_ids: Iterable[str],
                     keep: Callable[[AnsweredRow], bool] = lambda _: True) -> Iterator[AnsweredRow]:
        """Rewrite the file with the rows of `row_ids` that are answered and that `keep` accepts, in that order.

        Yields each answered row, kept or not. The new file replaces the old one when the iteration ends; a kill before
        that leaves the old file.
        """
        part = self.path.with_name(f".{self.path.name}.part")
        placed: dict[str, Extent] = {}
        size = 0
        with self.path.open("rb") as old, part.open("wb") as new:
            for row_id in row_ids:
                if row_id not in self._by_id or row_id in placed:
                    continue
                offset, length = self._by_id[row_id]
                old.seek(offset)
                line = old.read(length)
                row = decode_line(line, AnsweredRow)
                if keep(row):
                    new.write(line)
                    placed[row_id], size = Extent(size, length), size + length
                yield row
            new.flush()
            os.fsync(new.fileno())
        os.replace(part, self.path)
        self._by_id, self._extents, self._size = placed, list(placed.values()), size

    def _add(self, entry: AnsweredRow, extent: Extent) -> None:
        super()._add(entry, extent)
        self._by_id[entry.id] = extent


def read_rows(path: Path) -> Iterator[AnsweredRow]:
    """Answered rows of a finished regenerate stage, in order. A file that is in a store has not been compared with its
    manifest before: it is here, at its end. Raises ArtifactMissing or ArtifactCorrupt."""
    sha = None if path.is_file() else hashlib.sha256()
    try:
        file = open_binary(path)
    except FileNotFoundError:
        raise ArtifactMissing(f"no {path}", "run regenerate first") from None
    with file:
        for number, line in enumerate(file, start=1):
            if sha is not None:
                sha.update(line)
            try:
                yield decode_line(line, AnsweredRow)
            except ValueError as error:
                raise ArtifactCorrupt(f"{path}, line {number} is not an answered row: {reason_of(error)}",
                                      "run regenerate again") from error
    if sha is not None:
        listed = {entry.path: entry.sha256 for entry in read_manifest(path.parent).files}
        if listed.get(path.name) != f"sha256:{sha.hexdigest()}":
            raise ArtifactCorrupt(f"{path.name} in the artifact store differs from the digest in its manifest",
                                  "run regenerate again")


def read_meta(directory: Path) -> RowsMeta | None:
    """The metadata of a directory's rows, None where the file is missing. Raises ArtifactCorrupt when unreadable."""
    path = directory / META
    try:
        return RowsMeta.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ArtifactCorrupt(f"{path} is not readable: {first_problem(error)}", "run regenerate again") from error
