"""The report of a run as one HTML page: what promotion asks of the figures, the benchmark, the tuning map, the proof.

Kubeflow shows it in a frame and may run no script in it, so the figures of `eyrie_api.figures` are tables of their
values here; the console draws them. The file is complete: it loads nothing. Every value is escaped. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from eyrie_api.contract.figures import Figure, FigureName
from eyrie_api.contract.prove import ProveReport
from eyrie_api.contract.reports import BenchmarkReport, TuneReport
from eyrie_api.contract.status import JobReport
from eyrie_api.decisions.promotion import decide_job, summarize_decision
from eyrie_api.figures.job_figures import figures_of
from eyrie_pipelines.runner import JobFile

_SHOWN: dict[FigureName, str] = {"throughput": "Benchmark", "tuning": "Draft-tree shapes",
                                 "operating-map": "Tuning map", "needed-tau": "Acceptance that would pay",
                                 "pareto": "Proof under load"}
"""The figure without a section of its own has the values of two others."""

_VERDICTS = {"promote": "By the figures of this run the drafter is promoted.",
             "awaits-approval": "By the figures of this run the drafter may be promoted by hand.",
             "keep-incumbent": "By the figures of this run the drafter is not promoted: what serves now is kept.",
             "no-drafter": "By the figures of this run the drafter is not promoted: the target serves without one."}
_UNDECIDED = "The measurements of this run are too noisy to decide: what serves now is kept."


@dataclass(frozen=True)
class ReportSection:
    """A part of the page: a paragraph, and a table of texts, whose first column names the row."""

    title: str
    text: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def html(job: JobFile, benchmarks: Sequence[BenchmarkReport], tuned: TuneReport, proof: ProveReport) -> str:
    # Stages do not see the database, in which the benchmark of the serving drafter is.
    decision = decide_job(job.spec, benchmarks, tuned, proof, incumbent=None)
    figures = {figure.name: figure for figure in figures_of(JobReport(
        job_id=job.id, name=job.spec.name, target=job.spec.target.model, phase="Running", seconds={},
        benchmark=tuple(benchmarks), tune=tuned, prove=proof,
        devices_per_server=job.spec.engine.tp_size))}
    sections = [
        ReportSection("Promotion", "The control plane decides when the run has ended. It also compares with the "
                      "benchmark of the drafter that serves then, which this page does not know.",
                      ["check", "passed", "finding"],
                      [[check.name, _text(check.passed), check.words] for check in decision.checks]),
        *(_section(title, figures[name]) for name, title in _SHOWN.items() if name in figures),
        ReportSection("Finding of the tuner", tuned.finding)]
    where = tuned.environment
    facts = [("Job", job.id), *((name.capitalize(), value) for name, value in job.run_parameters().items()),
             ("Machine", f"{where.hardware}, {where.threads} threads, torch {where.torch}, {where.dtype}"),
             ("Measured", f"{where.date[:10]}, code {where.code_version}"),
             ("Intervals", "95 %; speed-up is over the same engine without a drafter")]
    verdict = _UNDECIDED if decision.undecided else _VERDICTS[decision.verdict]
    return _TEMPLATE.render(title=f"Drafter for {job.spec.target.model}", facts=facts, sections=sections,
                            decision=[verdict, summarize_decision(decision)])


def _section(title: str, figure: Figure) -> ReportSection:
    data = figure.spec["data"]
    assert isinstance(data, dict)
    values = data["values"]
    assert isinstance(values, list)
    rows = [row for row in values if isinstance(row, dict)]
    columns = [name for name in rows[0] if name != "label"]
    return ReportSection(title, f"{figure.title}.", [name.replace("_", " ") for name in columns],
                         [[_text(row[name]) for name in columns] for row in rows])


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_TEMPLATE = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
                        trim_blocks=True, lstrip_blocks=True).get_template("run_report.html")
