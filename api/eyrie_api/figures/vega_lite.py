"""Parts of Vega-Lite specifications that figures share.

A figure's `data.values` holds everything that is drawn, as flat rows with the same fields, so that a table of them says
the same.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, overload

from eyrie_api.figures.themes import SCHEMA, THEMES
from eyrie_api.v1alpha1.figures import Figure, FigureName

Row = dict[str, Any]

# Only the points have a legend: the other layers would add one without shapes.
OWN_LEGENDS: Mapping[str, Any] = {"legend": {"color": "independent", "shape": "independent"}}


def figure(name: FigureName, title: str, caption: str, rows: list[Row], body: Row,
           changed_at: datetime | None = None) -> Figure:
    """The figure of these rows, drawn as `body` says."""
    spec = {"$schema": SCHEMA, "description": f"{title}. {caption}", "data": {"values": rows}} | body
    return Figure.model_validate({"name": name, "title": title, "caption": caption, "rows": len(rows), "spec": spec,
                                  "themes": THEMES, "changed_at": changed_at})


def number(field: str, title: str | None) -> Row:
    """An axis of numbers, which need not begin at zero."""
    made: Row = {"field": field, "type": "quantitative", "scale": {"zero": False}}
    return made if title is None else made | {"title": title}


def series(field: str, rows: Iterable[Row]) -> Row:
    """Colour or shape by the values of a field, in their order."""
    # Colour and shape share one legend only where both have the same explicit domain.
    domain = list(dict.fromkeys(row[field] for row in rows))
    return {"field": field, "type": "nominal", "title": None, "sort": None, "scale": {"domain": domain}}


def tips(rows: Iterable[Row]) -> list[Row]:
    """What is shown of a row that is pointed at."""
    return [{"field": field} for field in next(iter(rows), {}) if field != "label"]


@overload
def rounded(value: float) -> float: ...
@overload
def rounded(value: float | None) -> float | None: ...
def rounded(value: float | None) -> float | None:
    """Six digits: enough for any picture, and short in a table."""
    return None if value is None else float(f"{value:.6g}")
