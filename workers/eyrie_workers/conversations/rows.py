"""An answered row, what identifies a set of them, and the ledger that collects them.

`rows.jsonl` is its own ledger. While the stage runs, each answer is one line, appended and flushed in the order
answers arrive; run again after a kill, the torn last line is cut off and the rows that are there are not asked for
again. At the end the file is rewritten once in the order of the selection, so that the artifact does not depend on who
finished first.

A row carries token ids, never text alone: text tokenised again is not always what the target wrote (`ids_exact` says
whether the ids are the target's own), and the drafter learns ids.

`rows.meta.json` names the target and everything else that decides what an answer is. Rows of another target or another
sampling are refused, here and in capture.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue, ValidationError

from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing
from eyrie_api.v1alpha1.model import Digest, Frozen

ROWS = "rows.jsonl"
META = "rows.meta.json"


class RowSampling(Frozen):
    """How one answer was drawn."""

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int


class AnsweredRow(Frozen):
    """One prompt and the target's own answer to it."""

    id: str
    source: str
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
    """Whether answer_ids are the ids the target produced, or its text tokenised again."""

    ids_differ: bool = False
    """Whether ids tokenised again are known to be others than the target's."""

    reasoning: str = ""
    """What the endpoint gave apart from the text."""

    tool_calls: tuple[dict[str, JsonValue], ...] = ()
    """As the endpoint read them out of the answer."""

    turn: int = 0
    """With `turns: all`: which question of its conversation this answers."""


class RowsMeta(Frozen):
    """What the rows of a directory have in common."""

    format_version: Literal[1] = 1
    target_digest: Digest
    answers_digest: Digest
    """Of data, exclusions, sampling and seed: whatever decides which prompts are asked and what the answers are."""


class Ledger:
    """Answered rows of one directory, by id; opening it cuts off a line that a kill left half written."""

    def __init__(self, path: Path) -> None:
        """Open or create the ledger. Raises ArtifactCorrupt when a line before the last cannot be read."""
        self._path = path
        self._places: dict[str, tuple[int, int]] = {}
        path.touch()
        self._size = self._scan()
        os.truncate(path, self._size)
        self._file = path.open("ab")

    def __contains__(self, row_id: str) -> bool:
        return row_id in self._places

    def __len__(self) -> int:
        return len(self._places)

    def append(self, row: AnsweredRow) -> None:
        """Keep one answer. It survives a kill from here on."""
        line = row.model_dump_json().encode() + b"\n"
        self._file.write(line)
        self._file.flush()
        self._places[row.id] = (self._size, len(line))
        self._size += len(line)

    def read(self, row_id: str) -> AnsweredRow:
        """One answered row."""
        offset, length = self._places[row_id]
        with self._path.open("rb") as file:
            file.seek(offset)
            return AnsweredRow.model_validate_json(file.read(length))

    def put_in_order(self, row_ids: Iterable[str],
                     wanted: Callable[[AnsweredRow], bool] = lambda _: True) -> Iterator[AnsweredRow]:
        """Rewrite the file with the rows of `row_ids` that are answered and wanted, in that order, and nothing else.

        Yields each row, wanted or not; the new file takes the place of the old when the iteration ends.
        """
        aside = self._path.with_name(f".{self._path.name}.part")
        places: dict[str, tuple[int, int]] = {}
        size = 0
        with self._path.open("rb") as old, aside.open("wb") as new:
            for row_id in row_ids:
                if row_id not in self._places or row_id in places:
                    continue
                offset, length = self._places[row_id]
                old.seek(offset)
                line = old.read(length)
                row = AnsweredRow.model_validate_json(line)
                if wanted(row):
                    new.write(line)
                    places[row_id], size = (size, length), size + length
                yield row
            new.flush()
            os.fsync(new.fileno())
        self._file.close()
        os.replace(aside, self._path)
        self._places, self._size = places, size
        self._file = self._path.open("ab")

    def close(self) -> None:
        """Let the file go."""
        self._file.close()

    def _scan(self) -> int:
        size = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    if not line.endswith(b"\n"):
                        raise ValueError("no end of line")
                    row = AnsweredRow.model_validate_json(line)
                except ValueError as error:  # pydantic's ValidationError is one
                    if file.read(1):
                        raise ArtifactCorrupt(f"{self._path}, line {number} is not an answered row",
                                              "delete that line and run again: its prompt is answered anew") from error
                    return size
                self._places[row.id] = (size, len(line))
                size += len(line)
        return size


def read_rows(path: Path) -> Iterator[AnsweredRow]:
    """Answered rows of a finished regenerate stage, in order. Raises ArtifactMissing or ArtifactCorrupt."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield AnsweredRow.model_validate_json(line)
                except ValidationError as error:
                    raise ArtifactCorrupt(f"{path}, line {number} is not an answered row: {error.errors()[0]['msg']}",
                                          "run regenerate again") from error
    except FileNotFoundError:
        raise ArtifactMissing(f"no {path}", "run regenerate first") from None


def read_meta(directory: Path) -> RowsMeta | None:
    """What the rows in a directory belong to; None when nothing says. Raises ArtifactCorrupt when unreadable."""
    path = directory / META
    try:
        return RowsMeta.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ArtifactCorrupt(f"{path} is not readable: {error.errors()[0]['msg']}", "run regenerate again") from error
