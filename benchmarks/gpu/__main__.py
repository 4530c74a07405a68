"""A GPU measured in 21 minutes at most: `python -m benchmarks.gpu --out .eyrie/bench` (`make bench-gpu`).

Correctness first, then kernels relative to their floors and to libraries, a training step's MFU, capture and decoding
(`benchmarks.gpu.sections`), and rounds of SGLang where it is installed (`benchmarks.gpu.sglang_rounds`). Each section
is a process of its own with a time limit: one that fails, hangs or breaks the CUDA context costs the figures that it
has not printed yet. Written after every figure:

    gpu.json    the figures, the device's name, the versions
    gpu.md      the same as a page for docs/results

`--tiny` runs the same code in this process at tiny sizes, also on a CPU: it shows that the benchmark works, and its
figures mean nothing. This is a benchmark, not a test: it decides nothing.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.sections import SECTIONS
from tests.gpu.sizes import NO_GPU, REAL, TINY, this_device

_TARGET_LIMIT_S = 100.0
_ROW = "row: "
"""Before a figure in the output of a section's process."""


def main(argv: Sequence[str]) -> int:
    """The program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of gpu.json and gpu.md")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, in this process, also without a GPU")
    parser.add_argument("--sections", default=",".join(["target", *SECTIONS]), help="default: %(default)s")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if not given.tiny and not torch.cuda.is_available():
        print(f"error: {NO_GPU}\nhint: --tiny runs the same code on the CPU", file=sys.stderr)
        return 1
    names = given.sections.split(",")
    if given.work is not None:  # the process of one section
        for row in run(names[0], bench_in(given.work, tiny=given.tiny)):
            print(_ROW + json.dumps(row), flush=True)
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {"device": device_name(), "date": datetime.now(UTC).isoformat(timespec="seconds"),
                                "sizes": (TINY if given.tiny else REAL).name, "versions": versions(), "sections": {}}
    with tempfile.TemporaryDirectory(prefix="eyrie-gpu-") as work:
        for name in names:
            began, rows = time.perf_counter(), list[Row]()
            outcome = document["sections"][name] = {"rows": rows, "seconds": 0.0}
            try:
                for row in (run(name, bench_in(Path(work), tiny=True)) if given.tiny else apart(name, Path(work))):
                    rows.append(row)
                    write(given.out, document)
            except Exception as error:  # noqa: BLE001 - whatever a section raises, the others are measured
                outcome["error"] = f"{type(error).__name__}: {error}"
            outcome["seconds"] = round(time.perf_counter() - began, 1)
            print(f"{name}: {outcome.get('error', 'done')}, {outcome['seconds']} s", flush=True)
            write(given.out, document)
    return 1 if any("error" in outcome for outcome in document["sections"].values()) else 0


def bench_in(work: Path, *, tiny: bool) -> Bench:
    """What a section gets."""
    return Bench(TINY if tiny else REAL, this_device(), work, budget_s=0.0 if tiny else 1.0)


def write(out: Path, document: Mapping[str, Any]) -> None:
    """Figures and page, as far as they are known."""
    (out / "gpu.json").write_text(json.dumps(document, indent=2) + "\n")
    (out / "gpu.md").write_text(page(document))


def run(name: str, bench: Bench) -> Iterable[Row]:
    """One section's figures."""
    if name == "target":  # of the sections after it
        bench.sizes.target(bench.target)
        return []
    torch.manual_seed(0)
    return SECTIONS[name][0](bench)


def apart(name: str, work: Path) -> Iterator[Row]:
    """A section's figures as it prints them, in a process of its own that is ended at its limit."""
    limit_s = SECTIONS[name][1] if name in SECTIONS else _TARGET_LIMIT_S
    return printed_rows([sys.executable, "-m", "benchmarks.gpu", "--out", str(work), "--work", str(work),
                         "--sections", name], limit_s)


def printed_rows(command: Sequence[str], limit_s: float) -> Iterator[Row]:
    """What a program prints as rows. Raises TimeoutError at its limit, RuntimeError when it fails."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(limit_s, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(_ROW):
                    yield json.loads(line.removeprefix(_ROW))
            process.wait()
        finally:
            timer.cancel()
            process.kill()  # nothing where it has ended
    if time.perf_counter() - began >= limit_s:
        raise TimeoutError(f"ended after its limit of {limit_s:g} s")
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}")


def device_name() -> str:
    """Name of the device as torch gives it."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def versions() -> dict[str, str | None]:
    """The versions that figures depend on."""
    found: dict[str, str | None] = {"python": sys.version.split()[0], "cuda": torch.version.cuda}
    for name in ("torch", "triton", "transformers", "liger-kernel"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def page(document: Mapping[str, Any]) -> str:
    """The page for docs/results. Pure."""
    listed = ", ".join(f"{name} {found or 'not installed'}" for name, found in document["versions"].items())
    parts = [f"# {document['device']}\n\n`make bench-gpu`, {document['date']}, sizes `{document['sizes']}` "
             f"(`tests/gpu/sizes.py`); {listed}.\n"]
    if document["sizes"] != REAL.name:
        parts.append("**Tiny sizes: these figures mean nothing.**\n")
    for name, outcome in document["sections"].items():
        parts.append(f"## {name.capitalize()}\n\nTook {outcome['seconds']} s.\n")
        if "error" in outcome:
            parts.append(f"**Failed: {outcome['error']}**\n")
        if outcome["rows"]:
            parts.append(table(outcome["rows"]))
    return "\n".join(parts)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a Markdown table with a column for every key; long sets of columns are written as lines. Pure."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if len(columns) > 8:
        return "".join("".join(f"- {key}: {shown(value)}\n" for key, value in row.items()) + "\n" for row in rows)
    lines = [columns, ["---"] * len(columns), *([shown(row.get(key, "")) for key in columns] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def shown(value: Any) -> str:
    """A figure with four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
