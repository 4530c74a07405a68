"""The curves of a training: every chart with its values, drawn by the console and written as files by `eyrie plots`."""

from typing import Literal

from pydantic import JsonValue

from eyrie_api.v1alpha1.figures import FigureName
from eyrie_api.v1alpha1.model import Frozen


class Curve(Frozen):
    """One line of a chart: a quantity of one run by optimiser step."""

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
    """One training: that of a candidate."""

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
    """All charts of a job's trainings, those without values so far included."""

    charts: tuple[Chart, ...]
    runs: tuple[CurveRun, ...]
    rungs: tuple[RungDecision, ...]
    themes: dict[Literal["light", "dark"], dict[str, JsonValue]]
    """Vega-Lite `config` for a light and a dark background. `range.category` has the colours, used in turn."""

    dashes: tuple[Dash, ...]
    """Used in turn."""
