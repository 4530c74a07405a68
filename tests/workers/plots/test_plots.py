"""Figures and tables of measurements, from reports made for the purpose."""

from eyrie_workers.comparison.tables import well_founded
from eyrie_workers.load.plots import drawings
from tests.benchmarks.tuner import predicted_against_measured
from tests.pipelines.rehearsal.rehearsal_stage import load_report
from tests.workers.plots.synthetic import benchmark_report, tuned_by_prediction


def test_predictions_of_the_tuner_are_compared_with_what_was_measured() -> None:
    report = tuned_by_prediction()
    outcomes = [(t.setting, t.concurrency, t.predicted_speedup, t.predicted_speedup * 1.1) for t in report.trials]
    assert "off by 9.1%" in predicted_against_measured(outcomes, "").get_suptitle()


def test_positions_that_hardly_any_round_reached_are_not_shown() -> None:
    cell = benchmark_report("default-step-1", 0.8).cells[0]
    rare = cell.model_copy(update={"accepted_histogram": (20, 20, 3), "acceptance": (0.53, 0.13)})
    assert well_founded(rare.acceptance, rare.accepted_histogram) == (0.53, 0.13)
    assert well_founded(rare.acceptance, (20, 5, 2)) == (0.53,)


def test_a_load_test_gets_the_figures_that_it_has_data_for() -> None:
    load = load_report((1, 4), ("off", "candidate"), 2.0)
    assert [name for name, _ in drawings(load)] == ["load-throughput", "load-latency"]
