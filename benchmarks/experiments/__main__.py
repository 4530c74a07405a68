"""All experiments, one after the other, over the same answers, states and drafters.

    python -m benchmarks.experiments [--short] [--job demo|published] [--out DIR] [--work DIR] [--only NAME ...]

An experiment whose report exists, with the same scale and target, is not run again: delete the report to repeat it.
"""

import sys
import time
from collections.abc import Sequence

from benchmarks.experiments import (
    acceptance_throughput,
    block_heads,
    calibration,
    crossover,
    data_amount,
    depth_width,
    families,
    layer_choice,
    learning_rates,
    on_policy,
    one_choice,
    training_vs_served,
)
from benchmarks.experiments.program import PUBLISHED_JOB, command_line, command_of, run_experiment, write_index
from benchmarks.experiments.report import ExperimentReport
from eyrie_api.errors import EyrieError

# Timed experiments run first, while the machine is as quiet as at the start.
EXPERIMENTS = (families, acceptance_throughput, training_vs_served, crossover, depth_width, calibration, on_policy,
               data_amount, one_choice, block_heads, learning_rates, layer_choice)
LEFT_OUT = {PUBLISHED_JOB: (on_policy, layer_choice), "demo": (learning_rates,)}
"""By job: those that need the shipped target's corpus or a target trained for them, and the one that needs a target
wider than the shipped one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing; returns the exit code."""
    names = [module.NAME for module in EXPERIMENTS]
    parser = command_line("All experiments.")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these and no others")
    options = parser.parse_args(argv)
    began = time.monotonic()
    chosen = [module for module in EXPERIMENTS if module.NAME in options.only
              and module not in LEFT_OUT[options.job]]
    for name in set(options.only) - {module.NAME for module in chosen}:
        print(f"{name} is left out: the target of the job {options.job} lacks what it needs")
    for number, module in enumerate(chosen, start=1):
        file = options.out / f"{module.NAME}.json"
        command = command_of(module.NAME, options)
        if file.exists() and ExperimentReport.model_validate_json(file.read_bytes()).command == command:
            print(f"{module.NAME} exists: {file}")
            continue
        elapsed_s = time.monotonic() - began
        print(f"-- {module.NAME} ({number} of {len(chosen)}, {elapsed_s:.0f} s so far)", flush=True)
        try:
            run_experiment(module.NAME, module.CLAIM, module.measure, options)
        except EyrieError as error:
            print(f"error: {error.reason}: {error.message}\nhint: {error.hint}", file=sys.stderr)
            return error.exit_code
    write_index(options.out)
    print(f"{options.out}, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
