"""Runs an experiment: command line, machine load during the run, report.

    python -m benchmarks.experiments.<name> [--short] [--out DIR] [--work DIR] [--target T] [--threads N]
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
from benchmarks.experiments.workspace import FULL, SHORT, Workspace
from eyrie_api.errors import EyrieError

README = "README.md"


def command_line(description: str) -> argparse.ArgumentParser:
    """The options that all experiments have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--short", action="store_true",
                        help="fewer conversations, seeds and prompts: a test of the command")
    parser.add_argument("--out", type=Path, default=Path(".eyrie/experiments"),
                        help="for <name>.md, .html, .svg and .json")
    parser.add_argument("--work", type=Path, help="shared and resumed; default: .eyrie/experiments/work[-short]")
    parser.add_argument("--target", default="quickstart")
    parser.add_argument("--threads", type=int, help="processors to use; default: all")
    return parser


def command_of(name: str, options: argparse.Namespace) -> str:
    """The command that repeats an experiment."""
    return f"python -m benchmarks.experiments.{name}" + (" --short" if options.short else "") + (
        f" --target {options.target}" if options.target != "quickstart" else "")


def workspace_of(options: argparse.Namespace) -> Workspace:
    """The shared workspace of a command line."""
    work = options.work or Path(".eyrie/experiments") / ("work-short" if options.short else "work")
    return Workspace(work, SHORT if options.short else FULL, target=options.target, threads=options.threads)


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
