"""The report of a run as one HTML page: what promotion asks of the figures, the benchmark, the tuning map, the proof.

The figures are those of `eyrie_api.figures`, each as the table of its values: a page in Kubeflow may run no script, and
the console draws the same figures. Pure.
"""

from collections.abc import Sequence

from eyrie_api.decisions.promotion import decide_job, summarize_decision
from eyrie_api.figures.job_figures import figures_of
from eyrie_api.v1alpha1.figures import Figure, FigureName
from eyrie_api.v1alpha1.prove import ProveReport
from eyrie_api.v1alpha1.reports import BenchmarkReport, PromotionDecision, TuneReport
from eyrie_api.v1alpha1.status import JobReport
from eyrie_pipelines.runner import JobFile
from eyrie_workers.report_page.page import ReportPage, Section, Table, render

_SHOWN: dict[FigureName, str] = {"throughput": "Benchmark", "tuning": "Draft-tree shapes",
                                 "operating-map": "Tuning map", "pareto": "Proof under load"}
"""The figure without a section of its own has the values of two others."""

_VERDICTS = {"promote": "By the figures of this run the drafter is promoted.",
             "awaits-approval": "By the figures of this run the drafter may be promoted by hand.",
             "keep-incumbent": "By the figures of this run the drafter is not promoted: what serves now is kept.",
             "no-drafter": "By the figures of this run the drafter is not promoted: the target serves without one."}


def html(job: JobFile, benchmarks: Sequence[BenchmarkReport], tuned: TuneReport, proof: ProveReport) -> str:
    """The whole page."""
    # Stages do not see the database, in which the benchmark of the serving drafter is.
    decision = decide_job(job.spec, benchmarks, tuned, proof, incumbent=None)
    figures = {one.name: one for one in figures_of(JobReport(
        job_id=job.id, name=job.spec.name, target=job.spec.target.model, phase="Running", seconds={},
        benchmark=tuple(benchmarks), tune=tuned, prove=proof,
        devices_per_server=job.spec.engine.tp_size))}
    sections = [Section("Promotion", [
        "The control plane decides when the run has ended. It also compares with the benchmark of the drafter that "
        "serves then, which this page does not know."], table=_checks(decision))]
    sections += [_section(title, figures[name]) for name, title in _SHOWN.items() if name in figures]
    sections.append(Section("Finding of the tuner", [tuned.finding]))
    return render(ReportPage(None, f"Drafter for {job.spec.target.model}",
                             [_VERDICTS[decision.verdict], summarize_decision(decision)],
                             _facts(job, tuned), sections))


def _checks(decision: PromotionDecision) -> Table:
    return Table(["check", "passed", "finding"],
                 [[one.name, _text(one.passed), one.words] for one in decision.checks])


def _section(title: str, figure: Figure) -> Section:
    data = figure.spec["data"]
    assert isinstance(data, dict)
    rows = data["values"]
    assert isinstance(rows, list)
    found = [row for row in rows if isinstance(row, dict)]
    columns = [name for name in found[0] if name != "label"]
    return Section(title, [f"{figure.title}."], table=Table(
        [name.replace("_", " ") for name in columns], [[_text(row[name]) for name in columns] for row in found]))


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _facts(job: JobFile, tuned: TuneReport) -> list[tuple[str, str]]:
    where = tuned.environment
    return [("Job", job.id), *((name.capitalize(), value) for name, value in job.run_parameters().items()),
            ("Machine", f"{where.hardware}, {where.threads} threads, torch {where.torch}, {where.dtype}"),
            ("Measured", f"{where.date[:10]}, code {where.code_version}"),
            ("Intervals", "95 %; speed-up is over the same engine without a drafter")]
