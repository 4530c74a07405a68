"""The training curves of a job, made of its metrics: what its page draws live, for files.

One figure for each quantity, with a line for each series and run; a run is a candidate of the job. The page draws the
same series with another library (`console/static/curves.js`), which redraws a hundred runs in a tenth of a second.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from eyrie_api.figures.vega_lite import Row, figure, number, rounded, series, tips
from eyrie_api.v1alpha1.figures import Figure, FigureName
from eyrie_api.v1alpha1.status import MetricSeries


class Curve(NamedTuple):
    """One line: a quantity of one run by optimiser step."""

    run: str
    name: str
    values: Mapping[int, float]


class Quantity(NamedTuple):
    """What one figure shows."""

    figure: FigureName
    title: str
    caption: str
    unit: str
    pattern: str


_QUANTITIES = (
    Quantity("training-loss", "Loss", "Of the training's batches and of its evaluations.", "loss",
             r"(evaluation_)?loss"),
    Quantity("training-acceptance", "Conditional acceptance by position",
             "How often the draft token at a position is accepted, given that the one before was; of evaluations.",
             "P(accepted | the one before was)", r"acceptance/\d+"),
    Quantity("training-accuracy", "Accuracy by position",
             "Top-1 agreement with the target at each step of the unrolled drafter; of evaluations.",
             "top-1 agreement with the target", r"accuracy/\d+"),
    Quantity("training-speedup", "Theoretical speed-up by depth",
             "Tokens per target pass if drafting and verifying were free; /1 is of depth 1 alone, and the one without "
             "a number of the whole depth.", "tokens per target pass", r"theoretical_speedup(/\d+)?"),
    Quantity("training-learning-rate", "Learning rate", "Of each optimiser step.", "learning rate", "learning_rate"),
    Quantity("training-gradient-norm", "Gradient norm", "Before clipping.", "gradient norm", "grad_norm"),
    Quantity("training-speed", "Tokens per second", "That were trained on.", "tokens per second", "tokens_per_s"),
)


def training_figures(metrics: Iterable[MetricSeries]) -> tuple[Figure, ...]:
    """Every curve there is data for. The metrics are those of the stage `train`."""
    curves = [Curve(one.key or "training", one.name, {point.step: point.value for point in one.points})
              for one in metrics if one.points]
    curves += [speedup for run in dict.fromkeys(one.run for one in curves) for speedup in _by_depth(run, curves)]
    found = []
    for quantity in _QUANTITIES:
        # `loss` before `evaluation_loss`, and position 2 before 10.
        shown = sorted((one for one in curves if re.fullmatch(quantity.pattern, one.name)),
                       key=lambda one: (one.run, len(one.name), one.name))
        if shown:
            found.append(_drawn(quantity, shown))
    return tuple(found)


def _by_depth(run: str, curves: Sequence[Curve]) -> list[Curve]:
    """1 + a[0] + a[0] a[1] + ... at each depth but the deepest, which is `theoretical_speedup` itself."""
    known = {one.name: one.values for one in curves if one.run == run}
    found: list[Curve] = []
    product: Mapping[int, float] | None = None
    total: Mapping[int, float] = {}
    while (acceptance := known.get(f"acceptance/{len(found)}")) is not None:
        steps = acceptance if product is None else acceptance.keys() & product.keys()
        product = {step: acceptance[step] * (1.0 if product is None else product[step]) for step in sorted(steps)}
        total = {step: total.get(step, 1.0) + value for step, value in product.items()}
        found.append(Curve(run, f"theoretical_speedup/{len(found) + 1}", total))
    return found[:-1]


def _drawn(quantity: Quantity, curves: Sequence[Curve]) -> Figure:
    rows: list[Row] = [{"run": one.run, "series": one.name, "step": step, "value": rounded(value)}
                       for one in curves for step, value in sorted(one.values.items())]
    runs, names = (list(dict.fromkeys(row[field] for row in rows)) for field in ("run", "series"))
    # Of one run its series have colours; of several the runs have them, and their series are dashed.
    colour, dashed = ("run", "series") if len(runs) > 1 else ("series", "run")
    encoding = {"x": number("step", "optimiser step"), "y": number("value", quantity.unit),
                "color": series(colour, rows), "tooltip": tips(rows)}
    if len(runs) > 1 and len(names) > 1:
        encoding["strokeDash"] = series(dashed, rows)
    ends = ", ".join(f"{one.name} {rounded(one.values[max(one.values)]):.4g}" for one in curves)
    title = f"{quantity.title}: {ends}" if len(curves) <= 2 else quantity.title
    return figure(quantity.figure, title, quantity.caption, rows, {
        "width": 520, "height": 280, "mark": {"type": "line", "strokeWidth": 1.5}, "encoding": encoding})
