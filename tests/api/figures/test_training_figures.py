"""Training curves as figures: which there are, the values in them, and that Vega-Lite takes them."""

from typing import Any

import pytest

from eyrie_api.figures.training_figures import training_figures
from eyrie_api.v1alpha1.status import MetricPoint, MetricSeries
from tests.api.samples import NOW


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


def rows_of(figure: Any) -> list[dict[str, Any]]:
    return figure.model_dump()["spec"]["data"]["values"]  # type: ignore[no-any-return]


def test_a_training_has_a_figure_of_each_quantity_and_one_without_metrics_none() -> None:
    assert [one.name for one in training_figures(training())] == [
        "training-loss", "training-acceptance", "training-accuracy", "training-speedup", "training-learning-rate",
        "training-gradient-norm", "training-speed"]
    assert training_figures(()) == ()
    assert [one.name for one in training_figures([logged("loss", {1: 2.0}), logged("rung", {1: 1.0})])] == [
        "training-loss"]


def test_the_speed_up_of_each_depth_is_of_the_acceptance_up_to_it() -> None:
    speedup = next(one for one in training_figures(training()) if one.name == "training-speedup")
    values = {(row["series"], row["step"]): row["value"] for row in rows_of(speedup)}
    assert values == {("theoretical_speedup", 200): 2.24, ("theoretical_speedup/1", 100): 1.5,
                      ("theoretical_speedup/1", 200): 1.8, ("theoretical_speedup/2", 100): 1.75,
                      ("theoretical_speedup/2", 200): 2.2}


def test_of_one_run_series_have_colours_and_of_several_the_runs_have_them() -> None:
    one, several = training_figures(training())[0], training_figures((*training("a"), *training("b")))[0]
    assert one.spec["encoding"]["color"]["field"] == "series"  # type: ignore[index,call-overload]
    assert several.spec["encoding"]["color"]["field"] == "run"  # type: ignore[index,call-overload]
    assert several.spec["encoding"]["strokeDash"]["field"] == "series"  # type: ignore[index,call-overload]
    assert one.title == "Loss: loss 4, evaluation_loss 2"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_vega_lite_draws_them(theme: Any) -> None:
    vl_convert = pytest.importorskip("vl_convert", reason="pip install 'eyrie[plots]'")
    for figure in training_figures((*training("a"), *training("b"))):
        drawn = vl_convert.vegalite_to_svg(figure.spec | {"config": figure.themes[theme]}, vl_version="5.21")
        assert "optimiser step" in drawn
        assert "NaN" not in drawn
