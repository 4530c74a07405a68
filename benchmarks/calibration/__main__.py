"""`python -m benchmarks.calibration`: writes calibration.json, .png and .svg of one drafter."""

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.calibration.measure import calibrate, prompts_for
from benchmarks.calibration.plot import draw
from eyrie_api.artifacts import write_model
from eyrie_api.contract.engine import SamplingSpec
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.errors import EyrieError
from eyrie_workers.drafters.family import open_drafter
from eyrie_workers.measure.tuner.profile import whole_tree
from eyrie_workers.targets.loading import load_target, resolve


def main(arguments: list[str] | None = None) -> int:
    """Measure one drafter; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calibration",
                                     description="Confidence of a drafter against acceptance: JSON, PNG, SVG.")
    parser.add_argument("--target", default="quickstart")
    parser.add_argument("--drafter", type=Path, required=True, help="directory of an exported drafter")
    parser.add_argument("--out", type=Path, required=True, help="directory for calibration.json, .png and .svg")
    parser.add_argument("--max-prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-steps", type=int, default=5)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=None)
    given = parser.parse_args(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    try:
        directory = resolve(TargetSpec(model=given.target, dtype="float32"))
        target = load_target(directory)
        requests = prompts_for(directory, given.max_prompts, given.max_new_tokens,
                               SamplingSpec(temperature=given.temperature))
        report = calibrate(target, open_drafter(given.drafter, target), requests,
                           whole_tree(given.num_steps, given.top_k), (given.target, given.drafter.name),
                           given.temperature)
    except EyrieError as error:
        print(f"{error.reason}: {error}", file=sys.stderr)
        return error.exit_code
    given.out.mkdir(parents=True, exist_ok=True)
    write_model(given.out / "calibration.json", report)
    for path in (given.out / "calibration.json", *draw(report, given.out)):
        print(path)
    print(f"{report.path.count} nodes in {report.rounds} rounds: ECE {report.path.error:.3f} along the path "
          f"({report.path.error_likely:.3f} without the lowest bin), {report.step.error:.3f} of a step "
          f"({report.step.error_likely:.3f}); right by rank: "
          + ", ".join(f"{one.accepted / max(1, one.count):.3f}" for one in report.by_rank))
    return 0


if __name__ == "__main__":
    sys.exit(main())
