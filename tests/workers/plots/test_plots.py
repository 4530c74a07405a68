"""The plot program, run on a whole job, on a job under way, and on no job at all."""

from pathlib import Path

import pytest

from eyrie_api.errors import NotFound
from eyrie_api.v1alpha1.prove import ProveReport
from eyrie_api.v1alpha1.tuning import DrafterUse
from eyrie_workers.job_record import read_job, read_series
from eyrie_workers.measurement.benchmark.plots import well_founded
from eyrie_workers.stages.plots import draw_all, drawings, main
from eyrie_workers.training.plots import checkpoint_curves, cumulative_speedup
from tests.benchmarks.tuner import predicted_against_measured
from tests.pipelines.rehearsal.rehearsal_stage import load_report
from tests.workers.plots.synthetic import (
    benchmark_report,
    finished_job,
    train_report,
    tuned_by_prediction,
    write_metrics,
    write_stage,
)

PNG = b"\x89PNG\r\n\x1a\n"


def test_a_finished_job_gets_its_curves_as_png_and_svg(tmp_path: Path) -> None:
    paths = draw_all(finished_job(tmp_path / "job"), tmp_path / "plots")
    assert {path.stem for path in paths} == {
        "learning-default", "conditional-default", "theoretical-default", "acceptance-default-step-300"}
    for path in paths:
        head = path.read_bytes()[:200]
        assert head.startswith(PNG) if path.suffix == ".png" else b"<?xml" in head


def test_a_job_still_training_gets_the_curves_it_has(tmp_path: Path) -> None:
    write_metrics(tmp_path, "default", 50)
    names = [name for name, _ in drawings(read_job(tmp_path))]
    assert names == ["learning-default", "conditional-default", "theoretical-default"]


def test_a_run_without_metric_series_is_drawn_through_its_checkpoints(tmp_path: Path) -> None:
    write_stage(tmp_path, "train", "default", train_report())
    names = [name for name, _ in drawings(read_job(tmp_path))]
    assert "learning-default" in names


def test_a_directory_that_is_no_job_is_refused_with_the_hint(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotFound, match="stages"):
        read_job(tmp_path)
    assert main(["--job-dir", str(tmp_path), "--out", str(tmp_path / "out")]) == NotFound.exit_code
    assert "holds `stages/`" in capsys.readouterr().err


def test_a_step_logged_again_by_a_resumed_run_keeps_its_last_value(tmp_path: Path) -> None:
    line = '{"kind":"metric","time":"2026-01-01T00:00:00Z","name":"loss","step":3,"value":%s}\n'
    path = tmp_path / "events.jsonl"
    path.write_text(line % 2.0 + line % 1.0 + '{"kind":"metric","ti')
    assert read_series(path) == {"loss": [(3, 1.0)]}


def test_theoretical_speedup_of_perfect_acceptance_is_depth_plus_one() -> None:
    curves = cumulative_speedup([[(1.0, 1.0), (2.0, 1.0)]] * 3)
    assert [curve[-1][1] for curve in curves] == [2.0, 3.0, 4.0]


def test_theoretical_speedup_agrees_with_its_definition_by_hand() -> None:
    curves = cumulative_speedup([[(1.0, 0.8)], [(1.0, 0.5)]])
    assert [curve[0][1] for curve in curves] == pytest.approx([1.8, 1.8 + 0.4])


def test_checkpoint_curves_have_one_point_per_checkpoint_and_one_curve_per_step() -> None:
    curves = checkpoint_curves(train_report(steps=(10, 20)), "accuracy")
    assert len(curves) == 7
    assert [x for x, _ in curves[0]] == [10, 20]


def test_predictions_of_the_tuner_are_compared_with_what_was_measured() -> None:
    report = tuned_by_prediction()
    outcomes = [(t.setting, t.concurrency, t.predicted_speedup, t.predicted_speedup * 1.1) for t in report.trials]
    assert "off by 9.1%" in predicted_against_measured(outcomes, "").get_suptitle()


def test_positions_that_hardly_any_round_reached_are_not_drawn() -> None:
    cell = benchmark_report("default-step-1", 0.8).cells[0]
    rare = cell.model_copy(update={"accepted_histogram": (20, 20, 3), "acceptance": (0.53, 0.13)})
    assert well_founded(rare.acceptance, rare.accepted_histogram) == (0.53, 0.13)
    assert well_founded(rare.acceptance, (20, 5, 2)) == (0.53,)


def test_a_proven_job_gets_the_figures_of_its_load_test(tmp_path: Path) -> None:
    load = load_report((1, 4), ("off", "candidate"), 2.0)
    write_stage(tmp_path, "prove", "", ProveReport(
        checkpoint="c", path="x", engine="embedded", use=DrafterUse(), load=load, environment=load.environment,
        seconds=1.0))
    assert [name for name, _ in drawings(read_job(tmp_path))] == ["load-throughput", "load-latency"]
