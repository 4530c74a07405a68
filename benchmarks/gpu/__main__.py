"""A GPU measured in 13 minutes at most: `python -m benchmarks.gpu --out .eyrie/bench` (`make bench-gpu`).

Correctness first, then kernels relative to their floors and to libraries, a training step's MFU, capture and decoding
(`benchmarks.gpu.sections`). Each section is a process of its own with a time limit: one that fails, hangs or
breaks the CUDA context costs its own figures alone. Written after every section:

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
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.sections import SECTIONS, Bench
from tests.gpu.sizes import NO_GPU, REAL, TINY, this_device

_TARGET_LIMIT_S = 100.0


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
        print(json.dumps(run(names[0], bench_in(given.work, tiny=given.tiny))))
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {"device": device_name(), "date": datetime.now(UTC).isoformat(timespec="seconds"),
                                "sizes": (TINY if given.tiny else REAL).name, "versions": versions(), "sections": {}}
    with tempfile.TemporaryDirectory(prefix="eyrie-gpu-") as work:
        for name in names:
            began = time.perf_counter()
            outcome = here(name, Path(work)) if given.tiny else apart(name, Path(work))
            document["sections"][name] = outcome | {"seconds": round(time.perf_counter() - began, 1)}
            print(f"{name}: {outcome.get('error', 'done')}, {time.perf_counter() - began:.1f} s", flush=True)
            (given.out / "gpu.json").write_text(json.dumps(document, indent=2) + "\n")
            (given.out / "gpu.md").write_text(page(document))
    return 1 if any("error" in outcome for outcome in document["sections"].values()) else 0


def bench_in(work: Path, *, tiny: bool) -> Bench:
    """What a section gets."""
    return Bench(TINY if tiny else REAL, this_device(), work, budget_s=0.0 if tiny else 1.0)


def run(name: str, bench: Bench) -> list[dict[str, Any]]:
    """One section's figures."""
    if name == "target":  # of the sections after it
        bench.sizes.target(bench.target)
        return []
    torch.manual_seed(0)
    return SECTIONS[name][0](bench)


def here(name: str, work: Path) -> dict[str, Any]:
    """A section in this process."""
    try:
        return {"rows": run(name, bench_in(work, tiny=True))}
    except Exception as error:  # noqa: BLE001 - whatever a section raises, the others are measured
        return {"error": f"{type(error).__name__}: {error}"}


def apart(name: str, work: Path) -> dict[str, Any]:
    """A section in a process of its own, ended at its limit. Its figures are the last line that it prints."""
    limit_s = SECTIONS[name][1] if name in SECTIONS else _TARGET_LIMIT_S
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(work), "--work", str(work),
               "--sections", name]
    try:
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"ended after its limit of {limit_s:g} s"}
    lines = ended.stdout.splitlines()
    if ended.returncode or not lines:
        return {"error": f"exit code {ended.returncode}"}
    return {"rows": json.loads(lines[-1])}


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
        elif outcome["rows"]:
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
