"""A validation finding: severity, rule code, description and hint."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """An error is what SGLang refuses, or loads wrongly without a message. A warning does not stop serving."""

    severity: Severity
    code: str
    """Identifier of the rule; stable, for programs and tests."""

    what: str
    hint: str

    def as_json(self) -> dict[str, Any]:
        """The finding as `--json` prints it and the `eyrie` command reads it."""
        return asdict(self)


def error(code: str, what: str, hint: str) -> Finding:
    """A finding with which the drafter must not be served."""
    return Finding("error", code, what, hint)


def warning(code: str, what: str, hint: str) -> Finding:
    """A finding that does not prevent serving."""
    return Finding("warning", code, what, hint)


def errors_first(findings: list[Finding]) -> tuple[Finding, ...]:
    """The findings ordered by severity, errors first; the order within a severity is kept."""
    return tuple(sorted(findings, key=lambda finding: finding.severity != "error"))
