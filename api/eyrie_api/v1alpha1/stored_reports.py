"""Reports of `eyrie compare`, `eyrie compare-hardware` and the experiments, as the REST API keeps and shows them."""

import json
from datetime import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue, StringConstraints

from eyrie_api.v1alpha1.model import Frozen

ReportKind = Literal["comparison", "hardware", "experiment"]
Sentence = Annotated[str, StringConstraints(min_length=1, max_length=2000, pattern=r"^[^\x00-\x1f\x7f]+$")]

MAX_PAGE_CHARACTERS = 4 << 20
"""Several times the page of a comparison of all families, which has its figures in it."""

MAX_BODY_BYTES = 8 << 20
"""Page and figures of a report together, in place of EYRIE_MAX_BODY_BYTES where that is less."""


def _without_nul(text: str) -> str:
    if "\0" in text:  # PostgreSQL has no such text
        raise ValueError("has a NUL character")
    return text


def _encodable(report: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """JSON may have halves of surrogate pairs, which no response could be made of."""
    try:
        json.dumps(report, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("has half of a surrogate pair, which is no text") from None
    return report


class StoreReport(Frozen):
    """A report to be kept: what its program wrote as `.json` and `.html`."""

    kind: ReportKind
    title: Sentence
    decision: tuple[Sentence, ...] = Field(min_length=1, max_length=32)
    """What was found, one sentence each."""

    report: Annotated[dict[str, JsonValue], AfterValidator(_encodable)]
    """All figures, as the program wrote them."""

    page: Annotated[str, Field(min_length=1, max_length=MAX_PAGE_CHARACTERS), AfterValidator(_without_nul)]
    """One self-contained HTML page. It is shown without script, and nothing that it names is loaded."""


class StoredReport(Frozen):
    """A report of a project. It does not change."""

    id: str
    """Of its project and contents: the same report is kept once."""

    project: str
    kind: ReportKind
    title: str
    decision: tuple[str, ...]
    size_bytes: int
    created_by: str
    created_at: datetime
    """When it was pushed."""


class StoredReportList(Frozen):
    """One page of reports, newest first."""

    items: tuple[StoredReport, ...]
    next_cursor: str | None = None


class StoredReportFigures(StoredReport):
    """A report with all figures."""

    report: dict[str, JsonValue]
    """As its program wrote them; the fields depend on `kind`."""
