"""Runs an experiment: command line, machine load during the run, report.

    python -m benchmarks.experiments.<name> [--short] [--job demo|published] [--out DIR] [--work DIR]

The jobs are those of `make demo` and `make demo-published`, which say what is experimented on. The published target is
made where it is missing.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.experiments.report import (
    ExperimentReport,
    ExperimentResult,
    MachineWatch,
    build_report,
    index,
    write,
)
from benchmarks.experiments.workspace import FULL, PUBLISHED, SHORT, Workspace
from benchmarks.published.demo import TARGET, local_job
from benchmarks.published.target import make
from eyrie_api.errors import EyrieError

README = "README.md"
PUBLISHED_JOB = "published"


def command_line(description: str) -> argparse.ArgumentParser:
    """The options that all experiments have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--short", action="store_true",
                        help="fewer conversations, seeds and prompts: a test of the command")
    parser.add_argument("--job", choices=["demo", PUBLISHED_JOB], default="demo", help="whose target, data and suites")
    parser.add_argument("--out", type=Path, default=Path(".eyrie/experiments"), help="for <name>.md, .svg and .json")
    parser.add_argument("--work", type=Path, help="shared and resumed; default: .eyrie/experiments/work[-JOB][-short]")
    return parser


def command_of(name: str, options: argparse.Namespace) -> str:
    """The command that repeats an experiment."""
    return f"python -m benchmarks.experiments.{name}" + (" --short" if options.short else "") + (
        f" --job {options.job}" if options.job != "demo" else "")


def workspace_of(options: argparse.Namespace) -> Workspace:
    """The shared workspace of a command line."""
    published = options.job == PUBLISHED_JOB
    work = options.work or Path(".eyrie/experiments") / (
        "work" + f"-{options.job}" * published + "-short" * options.short)
    if published:
        make(TARGET)
    return Workspace(work, SHORT if options.short else PUBLISHED if published else FULL,
                     local_job(TARGET) if published else None)


def run_experiment(name: str, claim: str, measure: Callable[[Workspace], ExperimentResult],
                   options: argparse.Namespace) -> ExperimentReport:
    """Measure, and write the report and the index; returns the report."""
    watch, began = MachineWatch(), time.monotonic()
    result = measure(workspace_of(options))
    report = build_report(name, claim, result, short=options.short, command=command_of(name, options), watch=watch,
                   seconds=time.monotonic() - began)
    for path in write(report, result.figure, options.out):
        print(path)
    print("\n".join(report.found), flush=True)
    write_index(options.out)
    return report


def write_index(out: Path) -> None:
    """Write the README of all reports in a directory."""
    reports = [ExperimentReport.model_validate_json(path.read_bytes()) for path in sorted(out.glob("*.json"))]
    (out / README).write_text(index(reports))


def main(name: str, claim: str, measure: Callable[[Workspace], ExperimentResult],
         argv: Sequence[str] | None = None) -> int:
    """One experiment as a program; returns the exit code."""
    try:
        run_experiment(name, claim, measure, command_line(claim).parse_args(argv))
    except EyrieError as error:
        print(f"error: {error.reason}: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    return 0
