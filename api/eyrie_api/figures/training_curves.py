"""The curves of a training run: which charts there are, and how their values follow from the metrics of a job.

`CHARTS` is the one definition. `curves_of` computes what `GET /v1alpha1/jobs/ID/curves` answers. The console's page
draws that answer, of chosen runs and steps, and again whenever values arrive (`static/curves.js`); `eyrie plots` draws
it as files. Both have titles, labels, names and values from here and compute none of them.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import count, takewhile
from typing import NamedTuple

from eyrie_api.contract import figures as contract
from eyrie_api.contract.status import MetricSeries
from eyrie_api.figures.vega_lite import CATEGORIES, DASHES, SOLID, THEMES, Row, figure, number, rounded, series, tips

Values = Mapping[int, float]
"""By optimizer step."""

Metrics = Mapping[str, Values]
"""Of one run, by name."""


class Line(NamedTuple):
    """What a chart draws of one run; the number is that of `contract.Curve`."""

    number: int
    name: str
    values: Values


class CurveChart(NamedTuple):
    name: contract.FigureName
    title: str
    caption: str
    y_label: str
    lines: Callable[[Metrics], list[Line]]


def logged(*names: str) -> Callable[[Metrics], list[Line]]:
    return lambda run: [Line(number, name, run[name]) for number, name in enumerate(names) if name in run]


def by_position(quantity: str) -> Callable[[Metrics], list[Line]]:
    """The metric of each position of the draft, from the first on."""

    def lines(run: Metrics) -> list[Line]:
        names = takewhile(run.__contains__, (f"{quantity}/{position}" for position in count()))
        return [Line(position, name, run[name]) for position, name in enumerate(names)]

    return lines


def speedups(run: Metrics) -> list[Line]:
    """1 + a[0] + a[0] a[1] + ... of the acceptance a, at the steps that all positions of a depth have.

    That of the whole depth is the metric `theoretical_speedup`; those of smaller depths are derived here.
    """
    acceptance = by_position("acceptance")(run)
    lines = logged("theoretical_speedup")(run)
    product = total = dict.fromkeys(acceptance[0].values, 1.0) if acceptance else {}
    for depth, position in enumerate(acceptance[:-1], start=1):
        product = {step: product[step] * value for step, value in position.values.items() if step in product}
        total = {step: total[step] + value for step, value in product.items()}
        lines.append(Line(depth, f"theoretical_speedup/{depth}", total))
    return lines


X_LABEL = "optimizer step"
CHARTS = (
    CurveChart("training-loss", "Loss", "Of the training batches and of the evaluations.", "loss",
               logged("loss", "evaluation_loss")),
    CurveChart("training-acceptance", "Conditional acceptance by position",
               "How often the draft token at a position is accepted, given that the one before was; of evaluations.",
               "conditional acceptance", by_position("acceptance")),
    CurveChart("training-accuracy", "Accuracy by position",
               "Top-1 agreement with the target at each step of the unrolled drafter; of evaluations.",
               "top-1 agreement", by_position("accuracy")),
    CurveChart("training-speedup", "Theoretical speed-up by depth",
               "Tokens per target pass if drafting and verifying were free; /1 is of depth 1 alone, and the one "
               "without a number of the whole depth.", "tokens per target pass", speedups),
    CurveChart("training-learning-rate", "Learning rate", "Of each optimizer step.", "learning rate",
               logged("learning_rate")),
    CurveChart("training-gradient-norm", "Gradient norm", "Before clipping.", "gradient norm", logged("grad_norm")),
    CurveChart("training-speed", "Tokens per second", "Tokens trained on.", "tokens per second",
               logged("tokens_per_s")),
)
LATEST = (("Loss", "loss"), ("Evaluation loss", "evaluation_loss"), ("Speed-up", "theoretical_speedup"))
"""Metrics whose latest values are listed by run."""

RUNG = "rung"
"""The metric of a rung's decision: 1 went on, 0 ended."""


def curves_of(metrics: Iterable[MetricSeries]) -> contract.TrainingCurves:
    """Every chart with its values. The metrics are those of the stage `train`."""
    values: dict[str, dict[str, Values]] = {}
    for line in metrics:
        if line.points:
            values.setdefault(line.key, {})[line.name] = {point.step: point.value for point in line.points}
    # run-2 before run-10: text and numbers alternate.
    runs = {key: values[key] for key in sorted(values, key=lambda key: [
        int(part) if number % 2 else part for number, part in enumerate(re.split(r"(\d+)", key))])}
    charts = []
    for chart in CHARTS:
        curves = tuple(
            contract.Curve(key=key, name=name, number=place, steps=steps,
                           values=tuple(rounded(points[step]) for step in steps))
            for key, run in runs.items() for place, name, points in chart.lines(run)
            for steps in (tuple(sorted(points)),))
        charts.append(contract.Chart(name=chart.name, title=chart.title, caption=chart.caption, x_label=X_LABEL,
                                     y_label=chart.y_label, curves=curves))
    return contract.TrainingCurves(
        charts=tuple(charts),
        runs=tuple(contract.CurveRun(
            key=key, label=key or "training", step=max(max(points) for points in run.values()),
            ended=RUNG in run and _last(run[RUNG]) == 0, latest=tuple(
                contract.LatestValue(title=title, value=rounded(_last(run[name])) if name in run else None)
                for title, name in LATEST)) for key, run in runs.items()),
        rungs=_rungs(runs), themes=THEMES,
        dashes=tuple(contract.Dash(name=name, pattern=pattern) for name, pattern in DASHES))


def _last(values: Values) -> float:
    return values[max(values)]


def _rungs(runs: Mapping[str, Metrics]) -> tuple[contract.RungDecision, ...]:
    decided: dict[int, dict[str, float]] = {}
    for key, run in runs.items():
        for step, value in run.get(RUNG, {}).items():
            decided.setdefault(step, {})[key] = value
    return tuple(contract.RungDecision(step=step, went_on=tuple(key for key, value in of.items() if value > 0),
                                       ended=tuple(key for key, value in of.items() if value <= 0))
                 for step, of in sorted(decided.items()))


_LEGEND: Row = {"legend": {"symbolSize": 900}}  # lines of 30 pixels: the longest pattern has 21


def training_figures(curves: contract.TrainingCurves) -> tuple[contract.Figure, ...]:
    """The curves as files: a figure for every chart that has values."""
    return tuple(_drawn(chart, curves) for chart in curves.charts if chart.curves)


def _drawn(chart: contract.Chart, curves: contract.TrainingCurves) -> contract.Figure:
    labels = {run.key: run.label for run in curves.runs}
    rows: list[Row] = [{"run": labels[curve.key], "series": curve.name, "step": step, "value": value}
                       for curve in chart.curves for step, value in zip(curve.steps, curve.values, strict=True)]
    encoding = {"x": number("step", chart.x_label), "y": number("value", chart.y_label), "tooltip": tips(rows)}
    # As `contract.Curve.number` says; `static/curves.js` follows the same rule.
    names = {curve.name: curve.number for curve in chart.curves}
    if len(labels) > 1:
        encoding["color"] = series("run", [{"run": label} for label in labels.values()]) | _LEGEND
    else:
        encoding["color"] = series("series", rows) | _LEGEND
        names = {name: place // len(CATEGORIES["light"]) for name, place in names.items()}
    if any(names.values()):
        patterns = [list(curves.dashes[place % len(curves.dashes)].pattern or SOLID) for place in names.values()]
        encoding["strokeDash"] = series("series", rows) | _LEGEND | {
            "scale": {"domain": list(names), "range": patterns}}
    return figure(chart.name, chart.title, chart.caption, rows, {
        "width": 520, "height": 280, "mark": {"type": "line", "strokeWidth": 1.5}, "encoding": encoding})
