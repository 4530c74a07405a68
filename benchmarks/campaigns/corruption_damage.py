"""What the parts of `benchmarks.campaigns.corruption` share: kinds of damage, verdicts, and what a part is."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

Damage = Literal["flipped", "truncated", "emptied", "older"]
DAMAGES: tuple[Damage, ...] = ("flipped", "truncated", "emptied", "older")

Verdict = tuple[str, dict[str, object]]
"""One of GOOD, or the rule that was broken, with facts."""

GOOD = ("refused", "made again", "answered")


class Part(Protocol):
    """Files of one kind, and what reads them."""

    def build(self) -> None:
        """Make the files, unless an earlier campaign did."""

    def files(self) -> Sequence[Any]:
        """What can be damaged; printed in the report."""

    def damaged(self, file: Any, damage: Damage, rng: random.Random) -> bytes | None:
        """A file's bytes after the damage; None where it does not apply."""

    def try_case(self, file: Any, data: bytes) -> Verdict:
        """Damage, run what reads the file, judge."""

    def close(self) -> None:
        """Stop what was started."""


def damage_bytes(data: bytes, damage: Damage, rng: random.Random, older: Path | None = None) -> bytes | None:
    """The bytes after the damage; None where it does not apply or changes nothing."""
    changed: bytes | None = None
    if damage == "flipped" and data:
        bit = rng.randrange(8 * len(data))
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        changed = bytes(flipped)
    elif damage == "truncated" and len(data) > 1:
        changed = data[:rng.randrange(1, len(data))]
    elif damage == "emptied":
        changed = b""
    elif damage == "older" and older is not None and older.is_file():
        changed = older.read_bytes()
    return None if changed == data else changed
