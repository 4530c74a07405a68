"""All experiments, one after the other, over the same answers, states and drafters.

    python -m tests.benchmarks.experiments [--short] [--out DIR] [--work DIR] [--only NAME ...]

An account that is there already, of the same form and target, is not made again: delete it to repeat it.
"""

import sys
import time
from collections.abc import Sequence

from eyrie_api.errors import EyrieError
from tests.benchmarks.experiments import (
    acceptance_throughput,
    calibration,
    crossover,
    data_amount,
    depth_width,
    layer_choice,
    on_policy,
    training_vs_served,
)
from tests.benchmarks.experiments.account import Account
from tests.benchmarks.experiments.program import carry_out, command_line, command_of, write_index

# What is timed comes first: the machine is as quiet as when it was started.
EXPERIMENTS = (acceptance_throughput, training_vs_served, crossover, depth_width, calibration, on_policy, data_amount,
               layer_choice)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing; returns the exit code."""
    names = [module.NAME for module in EXPERIMENTS]
    parser = command_line("All experiments.")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these and no others")
    told = parser.parse_args(argv)
    began = time.monotonic()
    for number, module in enumerate((module for module in EXPERIMENTS if module.NAME in told.only), start=1):
        file = told.out / f"{module.NAME}.json"
        if file.exists() and Account.model_validate_json(file.read_bytes()).command == command_of(module.NAME, told):
            print(f"{module.NAME} is there: {file}")
            continue
        print(f"-- {module.NAME} ({number} of {len(told.only)}, {time.monotonic() - began:.0f} s so far)", flush=True)
        try:
            carry_out(module.NAME, module.CLAIM, module.measure, told)
        except EyrieError as error:
            print(f"error: {error.reason}: {error.message}\nhint: {error.hint}", file=sys.stderr)
            return error.exit_code
    write_index(told.out)
    print(f"{told.out}, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
