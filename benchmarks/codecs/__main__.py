"""`python -m benchmarks.codecs`: writes the JSON report and the plot of all codecs, and prints a table."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.codecs.measure import run
from benchmarks.codecs.plot import draw
from eyrie_api.artifacts import write_model
from eyrie_api.errors import EyrieError


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What each codec costs in bytes, error and acceptance length.")
    parser.add_argument("--target", default="quickstart")
    parser.add_argument("--out", type=Path, default=Path(".eyrie/bench/codecs.json"),
                        help="JSON report; rows, stores, drafters and the plot go next to it")
    parser.add_argument("--ways", nargs="+", default=["bfloat16", "int8", "fp8", "int4", "int8+top16"],
                        help="codecs, each alone or with +topK; float32 always takes part")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--epochs", type=float, default=6.0)
    parser.add_argument("--draft-vocab-size", type=int, default=1536)
    parser.add_argument("--prompts", type=int, default=12, help="of each suite")
    parser.add_argument("--tokens", type=int, default=64, help="per answer")
    parser.add_argument("--threads", type=int)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trial; returns the exit code."""
    options = parse(argv)
    try:
        report = run(options)
    except EyrieError as error:
        print(f"error: {error.reason}: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    write_model(options.out, report)
    for path in draw(report, options.out.parent):
        print(path)
    print(f"{'stored as':12} {'B/token':>8} {'of plain':>8} {'aux error':>9} {'worst':>7} {'teacher KL':>10} "
          f"{'tau':>14} {'lost':>15}")
    for way in report.ways:
        print(f"{way.name:12} {way.bytes_per_token:8.0f} {way.share_of_bfloat16:8.3f} "
              f"{fmean(way.aux_error.values()):9.5f} {way.aux_error_worst:7.4f} {way.teacher_kl:10.2e} "
              f"{way.tau:6.3f} +- {way.tau_spread:.3f} {way.lost:+.3f} +- {way.lost_spread:.3f}")
    print(f"another seed changes tau by {report.seed_spread:.3f}; int4 after a Hadamard rotation would err by "
          f"{report.hadamard_int4_error:.4f}; {report.seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
