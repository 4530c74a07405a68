"""The frame of every experiment: arguments, the machine watched, the account written.

    python -m tests.benchmarks.experiments.<name> [--short] [--out DIR] [--work DIR] [--target T] [--threads N]
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from eyrie_api.errors import EyrieError
from tests.benchmarks.experiments.account import Account, Finding, Watch, index, tell, write
from tests.benchmarks.experiments.place import FULL, SHORT, Place

README = "README.md"


def command_line(description: str) -> argparse.ArgumentParser:
    """What all experiments are told."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--short", action="store_true", help="fewer conversations, seeds and prompts: does it run?")
    parser.add_argument("--out", type=Path, default=Path(".eyrie/experiments"), help="for <name>.md, .svg and .json")
    parser.add_argument("--work", type=Path, help="shared and resumed; default: .eyrie/experiments/work[-short]")
    parser.add_argument("--target", default="quickstart")
    parser.add_argument("--threads", type=int, help="processors to use; default: all")
    return parser


def command_of(name: str, told: argparse.Namespace) -> str:
    """The command that repeats an experiment."""
    return f"python -m tests.benchmarks.experiments.{name}" + (" --short" if told.short else "") + (
        f" --target {told.target}" if told.target != "quickstart" else "")


def place_of(told: argparse.Namespace) -> Place:
    """The shared place of a command line."""
    work = told.work or Path(".eyrie/experiments") / ("work-short" if told.short else "work")
    return Place(work, SHORT if told.short else FULL, target=told.target, threads=told.threads)


def carry_out(name: str, claim: str, measure: Callable[[Place], Finding], told: argparse.Namespace) -> Account:
    """Measure, tell, write; returns the account."""
    watch, began = Watch(), time.monotonic()
    finding = measure(place_of(told))
    account = tell(name, claim, finding, short=told.short, command=command_of(name, told), watch=watch,
                   seconds=time.monotonic() - began)
    for path in write(account, finding.figure, told.out):
        print(path)
    print("\n".join(account.found), flush=True)
    write_index(told.out)
    return account


def write_index(out: Path) -> None:
    """README of all accounts in a directory."""
    accounts = [Account.model_validate_json(path.read_bytes()) for path in sorted(out.glob("*.json"))]
    (out / README).write_text(index(accounts))


def main(name: str, claim: str, measure: Callable[[Place], Finding], argv: Sequence[str] | None = None) -> int:
    """One experiment as a program; returns the exit code."""
    try:
        carry_out(name, claim, measure, command_line(claim).parse_args(argv))
    except EyrieError as error:
        print(f"error: {error.reason}: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    return 0
