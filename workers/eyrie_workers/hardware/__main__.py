"""The comparison of hardware as a program (`eyrie compare-hardware` starts it).

    python -m eyrie_workers.hardware --profiles FILE --proof JOB_DIR/stages/prove --concurrency 1,4 --out DIR

    profiles:
      - {name: h200-x2, price_per_hour: 7.0, num_devices: 2, gpus: ["0", "1"]}
      - {name: b200, price_per_hour: 5.0, off_url: "http://b200-off/v1", drafted_url: "http://b200/v1"}

Progress goes to stderr. The result goes to stdout, as tables or, with --json, as the report; DIR gets `report.json` and
`report.html`.
"""

import argparse
import contextlib
import sys
from pathlib import Path

from pydantic import ValidationError
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from eyrie_api.artifacts import write_atomically, write_model
from eyrie_api.cli.spec import read_document
from eyrie_api.cli.verbs import Screen
from eyrie_api.decisions.hardware_choice import compare_hardware, sentence
from eyrie_api.errors import EyrieError, InvalidInput
from eyrie_api.v1alpha1.hardware import HardwareProfile, HardwareProfiles, HardwareReport
from eyrie_api.v1alpha1.load import LoadSpec
from eyrie_api.v1alpha1.rules import rule_of
from eyrie_workers.comparison.progress import ProgressPrinter
from eyrie_workers.hardware.measuring import Proof, measure
from eyrie_workers.hardware.page import COLUMNS, html, speeds
from eyrie_workers.hardware.presence import check_present
from eyrie_workers.measurement.benchmark.session import measuring
from eyrie_workers.stage_program import INTERRUPTED_EXIT_CODE, Interrupted, Stage

REPORT, PAGE = "report.json", "report.html"


def build_parser() -> argparse.ArgumentParser:
    """The command-line parser."""
    parser = argparse.ArgumentParser(
        prog="eyrie compare-hardware",
        description="Serve a job's drafter, and no drafter, on several machines or parts of one: speed and money.")
    parser.add_argument("--profiles", type=Path, required=True, metavar="FILE", help="YAML or JSON: see the docs")
    parser.add_argument("--proof", type=Path, required=True, metavar="DIR", help="<home>/jobs/<job>/stages/prove")
    parser.add_argument("--concurrency", default="1,4,16", metavar="N,N,...", help="users at once; default 1,4,16")
    parser.add_argument("--requests", type=int, default=32, help="per load and server (at least two per user)")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="limit of generated tokens per request")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--min-user-speed", type=float, default=0.0, metavar="TOKENS/S",
                        help="recommend nothing that is slower for one user")
    parser.add_argument("--out", type=Path, default=Path("hardware"), help="directory of the report and the logs")
    parser.add_argument("--json", action="store_true", help="print the report instead of tables")
    return parser


def read_profiles(file: Path) -> tuple[HardwareProfile, ...]:
    """Raises InvalidInput naming the field."""
    try:
        return HardwareProfiles.model_validate(read_document(file, "--profiles", "`profiles:`")).profiles
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "profiles"
        raise InvalidInput(f"--profiles {file}: {where}: {rule_of(first)} (got {str(first['input'])[:200]})",
                           "see docs/serving.md, hardware compared") from None


def read_load(given: argparse.Namespace) -> LoadSpec:
    """The load of every server. Raises InvalidInput."""
    try:
        return LoadSpec(concurrencies=tuple(int(part) for part in given.concurrency.split(",")),
                        requests=given.requests, repeats=2, max_new_tokens=given.max_new_tokens,
                        temperature=given.temperature, seed=given.seed)
    except ValueError as error:
        raise InvalidInput(f"--concurrency {given.concurrency}, --requests {given.requests}: "
                           f"{' '.join(str(error).split())[:300]}", "give positive whole numbers") from None


def view(report: HardwareReport) -> RenderableType:
    """The table of all variants, and the recommendation at each load."""
    table = Table(*(title.upper() for title in COLUMNS))
    for row in speeds(report).rows:
        table.add_row(*row)
    return Group(table, *(Text(sentence(choice, report)) for choice in report.choices))


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    given = build_parser().parse_args(argv)
    screen = Screen(as_json=given.json)
    try:
        profiles, proof, load = read_profiles(given.profiles), Proof.read(given.proof), read_load(given)
        check_present(profiles, proof.spec.engine.kind)
        given.out.mkdir(parents=True, exist_ok=True)
        stage = Stage(given.out, quiet=True)
        with ProgressPrinter() as progress, contextlib.redirect_stdout(progress.lines):
            progress.begin("compare-hardware", given.out)
            with measuring(stage):
                report = compare_hardware(profiles, measure(profiles, proof, load, stage), given.min_user_speed)
        write_model(given.out / REPORT, report)
        write_atomically(given.out / PAGE, html(report))
    except EyrieError as error:
        screen.error(error)
        return error.exit_code
    except (Interrupted, KeyboardInterrupt):
        screen.note("stopped")
        return INTERRUPTED_EXIT_CODE
    screen.show(report, view(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
