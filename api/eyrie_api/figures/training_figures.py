"""The curves of a training as Vega-Lite specifications, for files: what `training_curves` defines, one figure for each
chart."""

from eyrie_api.figures.themes import CATEGORIES, SOLID
from eyrie_api.figures.vega_lite import Row, figure, number, series, tips
from eyrie_api.v1alpha1.curves import Chart, TrainingCurves
from eyrie_api.v1alpha1.figures import Figure

_LEGEND: Row = {"legend": {"symbolSize": 900}}  # lines of 30 pixels: the longest pattern has 21


def training_figures(curves: TrainingCurves) -> tuple[Figure, ...]:
    """Every chart that has values."""
    return tuple(_drawn(chart, curves) for chart in curves.charts if chart.curves)


def _drawn(chart: Chart, curves: TrainingCurves) -> Figure:
    labels = {run.key: run.label for run in curves.runs}
    rows: list[Row] = [{"run": labels[one.key], "series": one.name, "step": step, "value": value}
                       for one in chart.curves for step, value in zip(one.steps, one.values, strict=True)]
    encoding = {"x": number("step", chart.x_label), "y": number("value", chart.y_label), "tooltip": tips(rows)}
    # As `contract.Curve.number` says; the page follows the same rule.
    names = {one.name: one.number for one in chart.curves}
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
