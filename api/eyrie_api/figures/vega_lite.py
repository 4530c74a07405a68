"""What figures share: parts of Vega-Lite specifications, and colours and sizes for a light and a dark background.

A figure's `data.values` holds everything that is drawn, as flat rows with the same fields, so that a table of them says
the same.

Categories are the colours of Okabe and Ito (2008), which stay apart for readers who are colour-blind; yellow and black
are left out for want of contrast. No figure distinguishes by colour alone: each series also has its own shape, or is
named in the row or in the cell.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Literal, overload

from pydantic import JsonValue

from eyrie_api.contract.figures import Figure, FigureName

Theme = Literal["light", "dark"]

SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"
INK = "ink"
"""The style of marks in the colour of text."""

FONT = "system-ui, 'Segoe UI', sans-serif"
SHAPES: tuple[str, ...] = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross")
CATEGORIES: dict[Theme, tuple[str, ...]] = {
    "light": ("#0072b2", "#b85000", "#007a5a", "#a8467e", "#2f7fae", "#5f6770"),
    "dark": ("#56b4e9", "#e69f00", "#2fc79a", "#e58fbe", "#9fc3ff", "#b5bcc5")}
DASHES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("solid", ()), ("dashed", (8, 4)), ("dotted", (2, 3)), ("dash-dot", (12, 3, 2, 3)), ("short dashes", (5, 2)),
    ("sparse dots", (1, 5)), ("longest dashes", (14, 5)), ("dash-dot-dot", (8, 3, 2, 3, 2, 3)))
"""Patterns of lines, by their names for readers. Of a figure: `pattern or SOLID`."""

SOLID = (1, 0)  # Vega-Lite's pattern of a line without gaps

PAGE: dict[Theme, dict[str, str]] = {
    "light": {"ink": "#1b1f24", "quiet": "#57606a", "rule": "#d0d7de", "paper": "#ffffff"},
    "dark": {"ink": "#e6edf3", "quiet": "#9da7b3", "rule": "#30363d", "paper": "#0d1117"}}
"""Text, lines of axes, grids and background. The console's style sheet has the same, which a test compares."""


def _theme(theme: Theme) -> dict[str, JsonValue]:
    ink, quiet, rule = (PAGE[theme][name] for name in ("ink", "quiet", "rule"))
    text: dict[str, JsonValue] = {"labelColor": ink, "titleColor": ink, "labelFontSize": 12, "titleFontSize": 12}
    return {
        "background": "transparent", "font": FONT,
        # The page names the drawing as a whole and has a table of its values: no ARIA role for each mark.
        "aria": False,
        "view": {"stroke": rule},
        "axis": text | {"titleFontWeight": "normal", "gridColor": rule, "domainColor": quiet, "tickColor": quiet,
                        "labelLimit": 240, "labelSeparation": 4},
        "legend": text | {"orient": "bottom", "symbolSize": 90, "labelLimit": 300, "columns": 2},
        "header": text, "text": {"color": ink}, "rule": {"color": quiet}, "style": {INK: {"color": ink}},
        "range": {"category": list(CATEGORIES[theme]), "symbol": list(SHAPES)},
    }


THEMES: dict[Theme, dict[str, JsonValue]] = {"light": _theme("light"), "dark": _theme("dark")}

Row = dict[str, Any]


def figure(name: FigureName, title: str, caption: str, rows: list[Row], body: Row,
           changed_at: datetime | None = None) -> Figure:
    spec = {"$schema": SCHEMA, "description": f"{title}. {caption}", "data": {"values": rows}} | body
    return Figure.model_validate({"name": name, "title": title, "caption": caption, "rows": len(rows), "spec": spec,
                                  "themes": THEMES, "changed_at": changed_at})


def number(field: str, title: str | None) -> Row:
    """An axis of numbers, which need not begin at zero."""
    axis: Row = {"field": field, "type": "quantitative", "scale": {"zero": False}}
    return axis if title is None else axis | {"title": title}


def ordinal(field: str, title: str) -> Row:
    """An axis of a few values in their order."""
    return {"field": field, "type": "ordinal", "title": title, "axis": {"labelAngle": 0}}


def series(field: str, rows: Iterable[Row]) -> Row:
    """Colour or shape by the values of a field, in their order."""
    # Colour and shape share one legend only where both have the same explicit domain.
    domain = list(dict.fromkeys(row[field] for row in rows))
    return {"field": field, "type": "nominal", "title": None, "sort": None, "scale": {"domain": domain}}


def tips(rows: Iterable[Row]) -> list[Row]:
    """What is shown of a row that is pointed at."""
    return [{"field": field} for field in next(iter(rows), {}) if field != "label"]


def layer(mark: str, encoding: Row, where: str = "", **style: Any) -> Row:
    """Marks of one kind, of the rows that an expression selects; empty: of all."""
    drawn: Row = {"mark": {"type": mark} | style, "encoding": encoding}
    return {"transform": [{"filter": where}]} | drawn if where else drawn


def points(rows: Iterable[Row], across: Row, colour: Row, size: int = 70, where: str = "") -> Row:
    """Filled points with all values of a row as tooltip. Their colour is their shape too."""
    return layer("point", across | {"color": colour, "shape": colour, "tooltip": tips(rows)}, where,
                 filled=True, size=size, opacity=1)


def layered(layers: list[Row], height: int | Row = 280, width: int = 520) -> Row:
    """The body of a figure, or a panel of one. Only the points have a legend: the others would add one without
    shapes."""
    return {"width": width, "height": height, "layer": layers,
            "resolve": {"legend": {"color": "independent", "shape": "independent"}}}


def dashes(number: int) -> list[list[int]]:
    """The first patterns of lines, as a figure has them."""
    return [list(pattern or SOLID) for _, pattern in DASHES[:number]]


@overload
def rounded(value: float) -> float: ...
@overload
def rounded(value: float | None) -> float | None: ...
def rounded(value: float | None) -> float | None:
    """Six digits: enough for any picture, and short in a table."""
    return None if value is None else float(f"{value:.6g}")
