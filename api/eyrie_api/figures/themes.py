"""Colours and sizes that every figure shares, for a light and a dark background.

Categories are the colours of Okabe and Ito (2008), which stay apart for readers who are colour-blind; yellow and black
are left out for want of contrast. No figure distinguishes by colour alone: each series also has its own shape, or is
named in the row or in the cell.
"""

from typing import Literal

from pydantic import JsonValue

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


def _theme(ink: str, quiet: str, rule: str, theme: Theme) -> dict[str, JsonValue]:
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


THEMES: dict[Theme, dict[str, JsonValue]] = {"light": _theme("#1b1f24", "#57606a", "#d0d7de", "light"),
                                             "dark": _theme("#e6edf3", "#9da7b3", "#30363d", "dark")}
