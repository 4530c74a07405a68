"""Draw the curves of a job's training, and its acceptance and load figures, from its files.

    python -m eyrie_workers.stages.plots --job-dir D --out DIR

A job that is still training has learning curves. Figures without data are left out. Those for which the REST API has a
definition (`eyrie_api.figures`) are not drawn here: `eyrie plots` writes them.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from eyrie_api.errors import EyrieError
from eyrie_api.program_exit import report_error
from eyrie_api.v1alpha1.reports import TrainReport
from eyrie_workers.figure_style import SETTINGS, save
from eyrie_workers.job_record import JobRecord, Series, read_job
from eyrie_workers.load import plots as load_plots
from eyrie_workers.measurement.benchmark import plots as benchmark_plots
from eyrie_workers.training import plots as training_plots

Drawing = tuple[str, Callable[[], Figure]]


def drawings(record: JobRecord) -> Iterator[Drawing]:
    """Name and factory of every figure there is data for."""
    candidates = {report.candidate: report for report in record.train}
    for candidate in sorted(candidates.keys() | record.training_series.keys()):
        yield from _training(candidate, candidates.get(candidate), record.training_series.get(candidate, {}))
    if record.benchmarks:
        best = benchmark_plots.best_of(record.benchmarks)
        yield f"acceptance-{best.checkpoint}", lambda: benchmark_plots.acceptance_by_position(best)
    if record.prove and record.prove.load:
        yield from load_plots.drawings(record.prove.load)


def _training(candidate: str, report: TrainReport | None, series: Series) -> Iterator[Drawing]:
    """Curves from the metric series, or through the checkpoints when a run logged none."""
    detail = (f"{report.supervised_tokens} supervised tokens, {report.steps} steps, {len(report.checkpoints)} "
              f"checkpoints, draft vocabulary {report.vocabulary.draft_vocab_size}" if report else "still training")
    accuracy = training_plots.steps_of(series, "accuracy") or (
        training_plots.checkpoint_curves(report, "accuracy") if report else [])
    conditional = training_plots.steps_of(series, "acceptance") or (
        training_plots.checkpoint_curves(report, "conditional_acceptance") if report else [])
    if accuracy:
        yield f"learning-{candidate}", lambda: training_plots.learning_curves(candidate, accuracy, detail)
    if conditional:
        speedups = training_plots.cumulative_speedup(conditional)
        yield f"conditional-{candidate}", lambda: training_plots.acceptance_curves(candidate, conditional, detail)
        yield f"theoretical-{candidate}", lambda: training_plots.speedup_curves(candidate, speedups, detail)


def draw_all(job_dir: Path, out: Path) -> list[Path]:
    """Write PNG and SVG of every figure; returns the paths."""
    with matplotlib.rc_context(SETTINGS):
        return [path for name, make in drawings(read_job(job_dir)) for path in save(make(), out, name)]


def main(argv: list[str] | None = None) -> int:
    """The program; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m eyrie_workers.stages.plots", description="Draw a job's figures.")
    parser.add_argument("--job-dir", type=Path, required=True, help="the job's directory (holds `stages/`)")
    parser.add_argument("--out", type=Path, required=True, help="directory for the PNG and SVG files")
    arguments = parser.parse_args(argv)
    try:
        paths = draw_all(arguments.job_dir, arguments.out)
    except EyrieError as error:
        return report_error(error)
    for path in paths:
        print(path)
    if not paths:
        print("nothing to draw yet: no stage has logged metrics or finished")
    return 0


if __name__ == "__main__":
    sys.exit(main())
