"""Figures of a job or an endpoint, one definition each, drawn by the console and other readers; and the curves of a
training run: every chart with its values."""

from datetime import datetime
from typing import Literal

from pydantic import JsonValue

from eyrie_api.contract.model import Frozen

FigureName = Literal["leaderboard", "throughput", "tau-throughput", "tuning", "operating-map", "needed-tau", "pareto",
                     "hardware", "acceptance", "acceptance-by-position", "canary", "training-loss",
                     "training-acceptance", "training-accuracy", "training-speedup", "training-learning-rate",
                     "training-gradient-norm", "training-speed", "load-throughput", "load-latency",
                     "load-latency-by-rate", "load-categories", "load-acceptance"]
"""Those named training are the charts of a job's curves (`TrainingCurves`), those named load of `eyrie load-test`."""


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


class Curve(Frozen):
    """One line of a chart: a quantity of one run by optimizer step."""

    key: str
    """Of the run."""

    name: str
    """The quantity, named as metrics are: loss, acceptance/2, theoretical_speedup/2."""

    number: int
    """Its place among all lines that the chart can have of a run. Of one run it chooses the colour, and after the last
    colour the next dash; of several runs, which have the colours, it chooses the dash."""

    steps: tuple[int, ...]
    values: tuple[float, ...]
    """At these steps, with six digits."""


class Chart(Frozen):
    """What one chart shows."""

    name: FigureName
    title: str
    caption: str
    x_label: str
    y_label: str
    """The quantity with its unit, if it has one."""

    curves: tuple[Curve, ...]
    """By run, and of each in the order of their numbers; none while there are no values."""


class LatestValue(Frozen):
    """The latest value of one quantity."""

    title: str
    value: float | None


class CurveRun(Frozen):
    """The training run of one candidate."""

    key: str
    """Of the candidate; empty if the job has one alone."""

    label: str
    step: int
    """The latest that has a metric."""

    ended: bool
    """By a rung of the sweep."""

    latest: tuple[LatestValue, ...]
    """The same quantities for every run."""


class RungDecision(Frozen):
    """What a rung of the sweep decided, by the keys of the runs."""

    step: int
    went_on: tuple[str, ...]
    ended: tuple[str, ...]


class Dash(Frozen):
    """How a line is broken."""

    name: str
    pattern: tuple[int, ...]
    """Lengths of dash and gap in turn; empty for a solid line."""


class TrainingCurves(Frozen):
    """All charts of a job's training runs, those without values so far included."""

    charts: tuple[Chart, ...]
    runs: tuple[CurveRun, ...]
    rungs: tuple[RungDecision, ...]
    themes: dict[Literal["light", "dark"], dict[str, JsonValue]]
    """Vega-Lite `config` for a light and a dark background. `range.category` has the colours, used in turn."""

    dashes: tuple[Dash, ...]
    """Used in turn."""
