"""A report as one HTML file: the decision first, then tables, then figures with a table behind each. Pure.

The file is complete. Pictures are in it as `data:` URLs, once for a light and once for a dark screen, and its
Content-Security-Policy permits nothing else: no script, no request. A report gives its values as text in
`ReportPage`; this module decides only how they look. Every value is escaped.

A picture keeps its size, and scrolls in its own box on a narrow screen: reduced to the width of a phone its letters
would be too small to read.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from eyrie_api.v1alpha1.stored_reports import ReportKind
from eyrie_workers.figure_style import Picture


@dataclass(frozen=True)
class Table:
    """Cells as text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    """What the cells are over: loads, suites, temperatures."""

    header: int = 0
    """Index of the column that names the row."""


@dataclass(frozen=True)
class PageFigure:
    """A picture, and the table of what it shows."""

    picture: Picture
    table: Table


@dataclass(frozen=True)
class Section:
    """A part of the page, in this order: paragraphs, list, table, figures."""

    title: str
    paragraphs: Sequence[str] = ()
    items: Sequence[str] = ()
    table: Table | None = None
    figures: Sequence[PageFigure] = ()


@dataclass(frozen=True)
class ReportPage:
    """What a page says. `eyrie reports push` reads kind, title and decision from the HTML."""

    kind: ReportKind | None
    """None for a page that is not pushed to the server, which has its figures already."""

    title: str
    decision: Sequence[str]
    """One sentence each."""

    facts: Sequence[tuple[str, str]]
    """How it was measured: name and value."""

    sections: Sequence[Section]


def render(page: ReportPage) -> str:
    """The page as HTML."""
    return _TEMPLATE.render(page=page)


def _data_url(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


_ENVIRONMENT = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
                           trim_blocks=True, lstrip_blocks=True)
_ENVIRONMENT.filters["data_url"] = _data_url
_TEMPLATE = _ENVIRONMENT.get_template("page.html")
