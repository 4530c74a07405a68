"""Figures of a job's report: which there are, the values in them, and that Vega-Lite takes them."""

import json
from typing import Any

import pytest

from eyrie_api.contract.figures import Figure
from eyrie_api.contract.status import Job, JobStatus
from eyrie_api.contract.tuning import OFF
from eyrie_api.decisions.job_report import report_of
from eyrie_api.errors import NotFound
from eyrie_api.figures.job_figures import figure_of, figures_of
from tests.api.figures.job_values import NAMES, job_report
from tests.api.samples import NOW, benchmark_report, job_spec


def rows_of(figure: Figure) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = figure.model_dump()["spec"]["data"]["values"]
    return rows


def test_a_finished_job_has_every_figure_and_a_new_one_none() -> None:
    report = job_report()
    assert tuple(one.name for one in figures_of(report)) == NAMES
    assert figures_of(report.model_copy(update={"benchmark": (), "tune": None, "prove": None, "leaderboard": ()})) == ()


def test_a_figure_without_data_is_refused_with_those_there_are() -> None:
    report = job_report().model_copy(update={"prove": None})
    with pytest.raises(NotFound) as refused:
        figure_of(report, "pareto")
    assert "leaderboard, throughput, tau-throughput" in (refused.value.hint or "")


def test_every_row_is_flat_and_has_the_same_fields_so_that_it_is_a_table() -> None:
    for figure in figures_of(job_report()):
        rows = rows_of(figure)
        assert len(rows) == figure.rows > 0
        assert {tuple(row) for row in rows} == {tuple(rows[0])}
        assert all(isinstance(value, str | int | float | bool | None) for row in rows for value in row.values())


def test_the_leaderboard_has_the_interval_of_every_entry_in_its_order() -> None:
    report = job_report()
    rows = rows_of(figure_of(report, "leaderboard"))
    assert [(row["rank"], row["checkpoint"]) for row in rows] == [(one.rank, one.checkpoint)
                                                                  for one in report.leaderboard]
    assert all(row["low"] < row["speedup"] < row["high"] for row in rows)
    unknown = tuple(one.model_copy(update={"speedup_interval": None, "tuned": True}) for one in report.leaderboard)
    without = figure_of(report.model_copy(update={"leaderboard": unknown}), "leaderboard")
    assert {(row["low"], row["high"]) for row in rows_of(without)} == {(None, None)}
    assert rows_of(without)[0]["checkpoint"] == "default-step-300 (tuned)"


def test_throughput_has_every_cell_with_its_interval_best_checkpoint_first() -> None:
    report = job_report()
    rows = rows_of(figure_of(report, "throughput"))
    assert len(rows) == sum(len(one.cells) for one in report.benchmark)
    best = max(report.benchmark, key=lambda one: one.speedup)
    assert rows[0]["checkpoint"] == best.checkpoint
    assert rows[0]["low"] < rows[0]["speedup"] < rows[0]["high"]


def test_a_rival_that_was_dropped_is_not_drawn() -> None:
    dropped = benchmark_report("rival", {"chat": (1.0,)}).model_copy(update={"cells": (), "dropped": "no weights"})
    report = job_report()
    rows = rows_of(figure_of(report.model_copy(update={"benchmark": (*report.benchmark, dropped)}), "throughput"))
    assert "rival" not in {row["checkpoint"] for row in rows}


def test_tuning_brackets_predictions_and_marks_one_winner() -> None:
    rows = rows_of(figure_of(job_report(), "tuning"))
    assert {row["known_by"] for row in rows} == {"measurement", "prediction"}
    assert all(row["label"].startswith("(") == (row["known_by"] == "prediction") for row in rows)
    assert [(row["num_steps"], row["top_k"]) for row in rows if row["winner"]] == [(5, 1)]


def test_the_operating_map_has_one_choice_per_load_and_says_where_off_is_best() -> None:
    report = job_report()
    assert report.tune is not None
    assert report.tune.map is not None
    figure = figure_of(report, "operating-map")
    chosen = [row for row in rows_of(figure) if row["chosen"]]
    assert [row["concurrency"] for row in chosen] == [point.concurrency for point in report.tune.map.points]
    assert [row["setting"] for row in chosen if row["concurrency"] == report.tune.map.crossover] == [OFF.label()]
    assert "crossover" in json.dumps(figure.spec)


def test_the_needed_tau_is_shown_with_the_drafters_and_marked_where_that_is_enough() -> None:
    report = job_report()
    assert report.tune is not None
    rows = rows_of(figure_of(report, "needed-tau"))
    assert [(row["users"], row["num_steps"], row["needed_tau"]) for row in rows] == [
        (one.users, one.num_steps, one.tau and pytest.approx(one.tau, rel=1e-5)) for one in report.tune.needed_tau]
    assert {(row["users"], row["num_steps"]) for row in rows if row["known_by"] == "measurement"} == {(1, 5), (8, 5)}
    for row in rows:
        assert row["enough"] == (row["needed_tau"] is not None and row["tau"] >= row["needed_tau"])
        assert row["label"].endswith("2.00" if row["known_by"] == "measurement" else "(2.00)")
        assert row["label"].startswith("none") == (row["needed_tau"] is None)
    assert {row["enough"] for row in rows} == {True, False}
    early = report.model_copy(update={"tune": report.tune.model_copy(update={"needed_tau": ()})})
    assert "needed-tau" not in {one.name for one in figures_of(early)}


def test_pareto_has_a_point_per_variant_and_number_of_users() -> None:
    rows = rows_of(figure_of(job_report(), "pareto"))
    assert [(row["variant"], row["users"]) for row in rows] == [
        (variant, users) for variant in ("off", "candidate") for users in (1, 4, 16, 64)]


def test_pareto_is_of_each_gpu_of_a_server() -> None:
    report = job_report()
    assert report.prove is not None
    assert report.prove.load is not None
    of_four = figure_of(report.model_copy(update={"devices_per_server": 4}), "pareto")
    for row in rows_of(of_four):
        assert row["tokens_per_s_per_device"] == pytest.approx(row["tokens_per_s"] / 4, rel=1e-5)
    layer = of_four.spec["layer"][0]  # type: ignore[index]
    assert layer["encoding"]["y"]["field"] == "tokens_per_s_per_device"  # type: ignore[index,call-overload]
    assert "on 4 devices" in of_four.caption


def test_the_report_of_a_job_has_the_gpus_of_its_servers() -> None:
    spec = job_spec(engine={"kind": "sglang", "tp_size": 4})
    job = Job(id="job-1", created_at=NOW, updated_at=NOW, spec=spec, status=JobStatus())
    assert report_of(job, (), ()).devices_per_server == 4


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_vega_lite_draws_every_figure(theme: Any) -> None:
    vl_convert = pytest.importorskip("vl_convert", reason="pip install 'eyrie[plots]'")
    for figure in figures_of(job_report()):
        drawn = vl_convert.vegalite_to_svg(figure.spec | {"config": figure.themes[theme]}, vl_version="5.21")
        assert drawn.count("<path") > figure.rows
        for words in ("NaN", "undefined"):
            assert words not in drawn, figure.name
