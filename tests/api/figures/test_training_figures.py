"""Training curves: which charts there are, the values in them, and that files have the same ones."""

from typing import Any

import pytest

from eyrie_api.cli.plots import figures_of_job
from eyrie_api.contract.figures import Chart, TrainingCurves
from eyrie_api.contract.status import MetricPoint, MetricSeries
from eyrie_api.figures.training_curves import CHARTS, LATEST, RUNG, curves_of, training_figures
from eyrie_api.http.console.pages import HERE
from eyrie_api.planning.resolve import derive
from tests.api.conftest import Running
from tests.api.samples import NOW, job_spec, record_metrics

NAMES = ["training-loss", "training-acceptance", "training-accuracy", "training-speedup", "training-learning-rate",
         "training-gradient-norm", "training-speed"]


def logged(name: str, values: dict[int, float], key: str = "base") -> MetricSeries:
    points = tuple(MetricPoint(step=step, time=NOW, value=value) for step, value in values.items())
    return MetricSeries(name=name, stage="train", key=key, points=points)


def training(key: str = "base") -> tuple[MetricSeries, ...]:
    """Three positions, evaluated at steps 100 and 200."""
    evaluated = {f"acceptance/{place}": {100: 0.5, 200: value} for place, value in enumerate((0.8, 0.5, 0.1))}
    evaluated |= {"accuracy/0": {100: 0.4, 200: 0.6}, "theoretical_speedup": {200: 2.24},
                  "evaluation_loss": {100: 3.0, 200: 2.0}}
    steps = {"loss": {10: 5.0, 20: 4.0}, "learning_rate": {10: 1e-4}, "grad_norm": {10: 1.0}, "tokens_per_s": {10: 9.0}}
    return tuple(logged(name, values, key) for name, values in (steps | evaluated).items())


def chart(curves: TrainingCurves, name: str) -> Chart:
    return next(one for one in curves.charts if one.name == name)


def rows_of(figure: Any) -> list[dict[str, Any]]:
    return figure.model_dump()["spec"]["data"]["values"]  # type: ignore[no-any-return]


def encoding_of(metrics: tuple[MetricSeries, ...], name: str) -> Any:
    [found] = [one for one in training_figures(curves_of(metrics)) if one.name == name]
    return found.spec["encoding"]


def test_all_charts_are_defined_before_there_is_a_value_and_files_are_of_those_that_have_some() -> None:
    assert [one.name for one in curves_of(()).charts] == NAMES
    assert training_figures(curves_of(())) == ()
    assert [one.name for one in training_figures(curves_of(training()))] == NAMES
    only = curves_of([logged("loss", {1: 2.0}), logged(RUNG, {1: 1.0}), logged("acceptance/0", {})])
    assert [one.name for one in training_figures(only)] == ["training-loss"]


def test_the_speed_up_of_each_depth_is_of_the_acceptance_up_to_it() -> None:
    speedups = chart(curves_of(training()), "training-speedup").curves
    assert {one.name: dict(zip(one.steps, one.values, strict=True)) for one in speedups} == {
        "theoretical_speedup": {200: 2.24}, "theoretical_speedup/1": {100: 1.5, 200: 1.8},
        "theoretical_speedup/2": {100: 1.75, 200: 2.2}}


def test_the_speed_up_of_a_depth_is_known_at_steps_that_all_its_positions_have() -> None:
    acceptance = ({1: 0.5, 2: 0.8}, {2: 0.5}, {2: 0.1})
    found = curves_of([logged(f"acceptance/{place}", of) for place, of in enumerate(acceptance)])
    assert [(one.name, one.steps, one.values) for one in chart(found, "training-speedup").curves] == [
        ("theoretical_speedup/1", (1, 2), (1.5, 1.8)), ("theoretical_speedup/2", (2,), (2.2,))]


def test_positions_and_runs_are_ordered_by_their_numbers() -> None:
    found = curves_of([logged(f"accuracy/{place}", {1: 0.5}, key) for key in ("run-10", "run-2")
                       for place in sorted(range(12), key=str)])
    assert [(one.key, one.name, one.number) for one in chart(found, "training-accuracy").curves] == [
        (key, f"accuracy/{place}", place) for key in ("run-2", "run-10") for place in range(12)]


def test_a_run_has_its_latest_values_and_rungs_say_who_went_on() -> None:
    found = curves_of((*training("a"), logged(RUNG, {200: 1.0}, "a"), logged(RUNG, {200: 0.0}, "b"),
                       logged("loss", {300: 3.0}, "b")))
    assert [(one.key, one.label, one.step, one.ended) for one in found.runs] == [
        ("a", "a", 200, False), ("b", "b", 300, True)]
    assert [[(one.title, one.value) for one in run.latest] for run in found.runs] == [
        [("Loss", 4.0), ("Evaluation loss", 2.0), ("Speed-up", 2.24)],
        [("Loss", 3.0), ("Evaluation loss", None), ("Speed-up", None)]]
    assert [one.model_dump() for one in found.rungs] == [{"step": 200, "went_on": ("a",), "ended": ("b",)}]
    assert [(one.key, one.label) for one in curves_of(training("")).runs] == [("", "training")]


def test_of_one_run_series_have_colours_and_of_several_the_runs_have_them() -> None:
    one, several = (encoding_of(metrics, "training-loss") for metrics in (
        training(), (*training("a"), *training("b"))))
    assert one["color"]["field"] == "series"
    assert "strokeDash" not in one
    assert several["color"]["field"] == "run"
    assert several["strokeDash"]["field"] == "series"
    assert several["strokeDash"]["scale"] == {"domain": ["loss", "evaluation_loss"], "range": [[1, 0], [8, 4]]}


def test_of_one_run_series_beyond_the_colours_are_dashed() -> None:
    metrics = tuple(logged(f"accuracy/{place}", {1: 0.5}) for place in range(7))
    assert encoding_of(metrics, "training-accuracy")["strokeDash"]["scale"]["range"] == 6 * [[1, 0]] + [[8, 4]]


def test_files_have_the_words_names_and_values_that_the_api_answers_the_page(server: Running) -> None:
    jobs = server.control.jobs
    job = jobs.submit(derive(job_spec()))
    for key in ("a", "b"):
        for one in training(key):
            record_metrics(jobs, job.id, "train", key, [
                (one.name, point.step, point.value / 3, NOW) for point in one.points])
    found = server.client.curves(job.id)
    files = figures_of_job(server.client, job.id)
    assert [one.name for one in files] == NAMES
    for figure, defined in zip(files, found.charts, strict=True):
        encoding: Any = figure.spec["encoding"]
        assert (figure.title, figure.caption) == (defined.title, defined.caption)
        assert (encoding["x"]["title"], encoding["y"]["title"]) == (defined.x_label, defined.y_label)
        assert [tuple(row.values()) for row in rows_of(figure)] == [
            (one.key, one.name, step, value) for one in defined.curves
            for step, value in zip(one.steps, one.values, strict=True)]


def test_the_script_and_the_page_have_no_words_and_no_metrics_of_their_own() -> None:
    defined = curves_of(training())
    words = {text for one in CHARTS for text in (one.title, one.caption, one.y_label)}
    words |= {text for pair in LATEST for text in pair} | {defined.charts[0].x_label}
    words |= {one.name.partition("/")[0] for of in defined.charts for one in of.curves}
    for path in (HERE / "static/curves.js", HERE / "templates/curves_panel.html"):
        text = path.read_text(encoding="utf-8")
        assert [word for word in words if word in text] == [], path.name


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_vega_lite_draws_them(theme: Any) -> None:
    vl_convert = pytest.importorskip("vl_convert", reason="pip install 'eyrie[plots]'")
    for figure in training_figures(curves_of((*training("a"), *training("b")))):
        drawn = vl_convert.vegalite_to_svg(figure.spec | {"config": figure.themes[theme]}, vl_version="5.21")
        assert "optimizer step" in drawn
        assert "NaN" not in drawn
