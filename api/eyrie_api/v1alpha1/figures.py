"""Figures of a job or an endpoint: one definition each, drawn by the console and by whoever else reads it."""

from datetime import datetime
from typing import Literal

from pydantic import JsonValue

from eyrie_api.v1alpha1.model import Frozen

FigureName = Literal["leaderboard", "throughput", "tau-throughput", "tuning", "operating-map", "pareto", "hardware",
                     "acceptance", "acceptance-by-position", "canary", "training-loss", "training-acceptance",
                     "training-accuracy", "training-speedup", "training-learning-rate", "training-gradient-norm",
                     "training-speed", "load-throughput", "load-latency", "load-latency-by-rate", "load-categories",
                     "load-acceptance"]
"""Those named training are the charts of a job's curves (`v1alpha1.curves`), those named load of `eyrie load`."""


class FigureSummary(Frozen):
    """One figure that there is data for."""

    name: FigureName
    title: str
    caption: str
    """How to read it, in one sentence."""

    rows: int
    """Values it is drawn from; more when another stage has finished."""

    changed_at: datetime | None = None
    """Of live traffic: the time of the newest value."""


class AbsentFigure(Frozen):
    """A figure without data."""

    name: FigureName
    reason: str
    """Why there is none, and what would change that."""


class FigureList(Frozen):
    """The figures that there is data for so far."""

    items: tuple[FigureSummary, ...]
    absent: tuple[AbsentFigure, ...] = ()
    """Of an endpoint, those without data."""


class Figure(FigureSummary):
    """A figure as a Vega-Lite 5 specification."""

    spec: dict[str, JsonValue]
    """Without a theme. `data.values` holds every value that is drawn, one flat object per row."""

    themes: dict[Literal["light", "dark"], dict[str, JsonValue]]
    """Vega-Lite `config` for a light and a dark background: one of them becomes `spec.config`."""
