"""The report of an experiment: `<name>.json`, `<name>.svg` and `<name>.md`. Pure except for `write`.

A page has the findings, the figures, the method, the limits and the command that repeats the experiment. It warns of
other work that ran on the machine, because timings are then unreliable.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from benchmarks.figure_style import SETTINGS
from eyrie_api.artifacts import write_atomically, write_model
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.reports import Environment
from eyrie_workers.machine import ProcessorTime, cpu_count, environment, interference


class ExperimentReport(Frozen):
    """The report of one experiment."""

    name: str
    claim: str
    """The published claim."""

    found: tuple[str, ...]
    """Sentences; the index has the first."""

    measured: str
    """The method: data, drafters, seeds, prompts, temperature, shape."""

    limits: tuple[str, ...]
    columns: tuple[str, ...]
    table: tuple[tuple[str, ...], ...]
    timed: bool
    """Whether its figures are computed from seconds rather than counts."""

    short: bool
    command: str
    disturbed: str | None
    environment: Environment
    seconds: float


@dataclass(frozen=True)
class ExperimentResult:
    """The findings of an experiment; `build_report` adds environment and date."""

    found: Sequence[str]
    measured: str
    limits: Sequence[str]
    columns: Sequence[str]
    table: Iterable[Sequence[str]]
    figure: Callable[[], Figure]
    """Drawn under `figure_style.SETTINGS`."""

    timed: bool = False


@dataclass
class MachineWatch:
    """Detects other work on the machine while an experiment runs."""

    begun: ProcessorTime | None = field(default_factory=ProcessorTime.now)

    def disturbed(self) -> str | None:
        """A warning about other work since the start; None when there was little."""
        return interference(self.begun, ProcessorTime.now(), cpu_count(), os.getloadavg()[0])


def build_report(name: str, claim: str, result: ExperimentResult, *, short: bool, command: str, watch: MachineWatch,
                 seconds: float) -> ExperimentReport:
    """The report of a result."""
    return ExperimentReport(
        name=name, claim=claim, found=tuple(result.found), measured=result.measured, limits=tuple(result.limits),
        columns=tuple(result.columns), table=tuple(tuple(row) for row in result.table), timed=result.timed,
        short=short, command=command, disturbed=watch.disturbed(), environment=environment("float32"), seconds=seconds)


def write(report: ExperimentReport, figure: Callable[[], Figure], out: Path) -> list[Path]:
    """Write the three files."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{report.name}.{ending}" for ending in ("svg", "json", "md")]
    # Letters as text: a tenth of the size of letters as outlines, and they can be searched.
    with matplotlib.rc_context(SETTINGS | {"svg.fonttype": "none"}):
        figure().savefig(paths[0], metadata={"Date": None})
    write_model(paths[1], report)
    write_atomically(paths[2], page(report))
    return paths


def where(report: ExperimentReport) -> str:
    """Date, machine and versions."""
    e = report.environment
    return (f"{e.date[:10]}, {e.hardware}, {e.threads} of {e.cpu_count} processors used, torch {e.torch}, {e.dtype}, "
            f"code {e.code_version}; {report.seconds:.0f} s beyond what was prepared before.")


def page(report: ExperimentReport) -> str:
    """The report as Markdown."""
    lines = [f"# {title(report.name)}", "", f"*Claim:* {report.claim}", "", f"**Found.** {report.found[0]}", "",
             *(sentence + "\n" for sentence in report.found[1:]),
             f"![{report.name}]({report.name}.svg)", "", *markdown_table(report.columns, report.table), "",
             f"**How.** {report.measured}", "", f"Measured {where(report)}", *notes(report), "",
             "**What this cannot show.** " + " ".join(report.limits), "", f"Repeat: `{report.command}`", ""]
    return "\n".join(lines)


def notes(report: ExperimentReport) -> list[str]:
    """Warnings about the validity of the figures."""
    warnings = []
    if report.short:
        warnings.append("This is the short form, with fewer conversations, seeds and prompts: a test of the command.")
    if report.disturbed:
        warnings.append(f"{report.disturbed[0].upper()}{report.disturbed[1:]}." if report.timed else
                    "Other work ran on the machine; nothing here is timed.")
    return warnings


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    lines = ["| " + " | ".join(row) + " |" for row in (columns, *rows)]
    return [lines[0], "|" + "---|" * len(columns), *lines[1:]]


def title(name: str) -> str:
    """`data_amount` as a heading."""
    words = name.replace("_", " ")
    return words[0].upper() + words[1:]


def index(reports: Iterable[ExperimentReport]) -> str:
    """README of a directory of reports."""
    rows = [(f"[{title(a.name)}]({a.name}.md)", a.claim,
             a.found[0] + " (short form)" * a.short + " (machine disturbed)" * (a.timed and a.disturbed is not None))
            for a in sorted(reports, key=lambda a: a.name)]
    return "\n".join([
        "# Experiments", "",
        "Published claims about drafters, and what was measured here. Each experiment is one command (`make "
        "experiments` runs all), one page, one plot.", "", *markdown_table(("", "the claim", "found here"), rows), "",
        "Confidence against acceptance of your own drafter: "
        "`python -m benchmarks.calibration`.", ""])
