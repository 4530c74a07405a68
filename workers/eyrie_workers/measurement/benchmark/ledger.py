"""An append-only file of finished work, so that a killed measurement loses at most the prompt it was on.

The first line names what the entries belong to (a digest of the spec); a ledger of something else is set aside, not
mixed in. A line is whole or, after a kill in the middle of a write, the last and without its newline: such a tail is
cut off when the file is opened again.
"""

import json
import os
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import ValidationError

from eyrie_api.errors import ArtifactCorrupt
from eyrie_api.v1alpha1.model import Frozen

EntryT = TypeVar("EntryT", bound=Frozen)


class Ledger(Generic[EntryT]):
    """Entries of one kind, in the order they were finished."""

    def __init__(self, path: Path, kind: type[EntryT], belongs_to: str) -> None:
        """Open or begin the ledger at `path`. Raises ArtifactCorrupt if a whole line in it cannot be read."""
        self.path = path
        self.entries: list[EntryT] = []
        self.set_aside: Path | None = None
        lines = _whole_lines(path)
        if lines and json.loads(lines[0]) != {"belongs_to": belongs_to}:
            self.set_aside = path.with_name(f"{path.name}.stale")
            os.replace(path, self.set_aside)
            lines = []
        if not lines:
            path.write_text(json.dumps({"belongs_to": belongs_to}) + "\n")
        for number, line in enumerate(lines[1:], start=2):
            try:
                self.entries.append(kind.model_validate_json(line))
            except ValidationError as error:
                raise ArtifactCorrupt(f"{path} line {number} is not readable: {error.errors()[0]['msg']}",
                                      "delete the file; the stage measures again") from error

    def append(self, entry: EntryT) -> None:
        """Add one finished entry; it is on disk when this returns."""
        with self.path.open("a") as file:
            file.write(entry.model_dump_json() + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.entries.append(entry)


def _whole_lines(path: Path) -> list[str]:
    """The lines that end in a newline; a torn tail is removed from the file."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) != len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return whole.decode().split("\n")[:-1]
