"""What the pages of one job derive from the API's answers: files by stage, differences of two documents. Pure."""

import json
from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import JsonValue

from eyrie_api.v1alpha1.stages import STAGES
from eyrie_api.v1alpha1.status import StageFile


@dataclass(frozen=True)
class StageFiles:
    """The files of one stage, of all its keys."""

    stage: str
    files: tuple[StageFile, ...]

    @property
    def size_bytes(self) -> int:
        """Of all files together."""
        return sum(one.size_bytes for one in self.files)


def by_stage(files: Iterable[StageFile]) -> tuple[StageFiles, ...]:
    """In order of stage; stages without files are left out."""
    listed = tuple(files)
    found = (StageFiles(stage, tuple(one for one in listed if one.stage == stage)) for stage in STAGES)
    return tuple(one for one in found if one.files)


@dataclass(frozen=True)
class Difference:
    """A field that two documents do not have with the same value."""

    pointer: str
    """JSON pointer (RFC 6901)."""

    mine: str | None
    """JSON text; None where the document has no such field."""

    other: str | None


def differences(mine: JsonValue, other: JsonValue, pointer: str = "") -> tuple[Difference, ...]:
    """Fields in which two JSON documents differ, in order of the first one. Lists are compared by index.

    Objects and lists are descended into where both documents have one, else shown whole. Equal fields are left out.
    """
    if isinstance(mine, dict) and isinstance(other, dict):
        names = (*mine, *(name for name in other if name not in mine))
        pairs = [(name.replace("~", "~0").replace("/", "~1"), name in mine, mine.get(name), name in other,
                  other.get(name)) for name in names]
    elif isinstance(mine, list) and isinstance(other, list):
        pairs = [(str(at), at < len(mine), mine[at] if at < len(mine) else None, at < len(other),
                  other[at] if at < len(other) else None) for at in range(max(len(mine), len(other)))]
    else:
        texts = json.dumps(mine, ensure_ascii=False), json.dumps(other, ensure_ascii=False)
        return () if texts[0] == texts[1] else (Difference(pointer, *texts),)
    found: list[Difference] = []
    for name, in_mine, my_value, in_other, other_value in pairs:
        below = f"{pointer}/{name}"
        if in_mine and in_other:
            found += differences(my_value, other_value, below)
        else:
            found.append(Difference(below, json.dumps(my_value, ensure_ascii=False) if in_mine else None,
                                    json.dumps(other_value, ensure_ascii=False) if in_other else None))
    return tuple(found)
