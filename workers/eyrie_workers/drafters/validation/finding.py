"""One thing a check has to say about a drafter: how bad, which, what, and what to do about it."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """An error is what SGLang would refuse, or load wrongly without a word. A warning is what it survives."""

    severity: Severity
    code: str
    """Which rule: stable, for machines and tests."""

    what: str
    hint: str

    def as_json(self) -> dict[str, Any]:
        """For --json and for the `eyrie` command, which reads this and renders."""
        return asdict(self)


def error(code: str, what: str, hint: str) -> Finding:
    """A finding the drafter must not be served with."""
    return Finding("error", code, what, hint)


def warning(code: str, what: str, hint: str) -> Finding:
    """A finding to know about."""
    return Finding("warning", code, what, hint)
