"""Figures and tables of measurements, from reports made for the purpose."""

from benchmarks.tuner import predicted_against_measured
from tests.workers.plots.synthetic import tuned_by_prediction


def test_predictions_of_the_tuner_are_compared_with_what_was_measured() -> None:
    report = tuned_by_prediction()
    outcomes = [(t.setting, t.concurrency, t.predicted_speedup, t.predicted_speedup * 1.1) for t in report.trials]
    assert "off by 9.1%" in predicted_against_measured(outcomes, "").get_suptitle()
