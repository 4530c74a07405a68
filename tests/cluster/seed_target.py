"""Trains the rehearsal's target, a small Olmo 3: `python -m tests.cluster.seed_target --out DIRECTORY`.

The course of `quickstart-olmo` (benchmarks.quickstart.pretrain) with half of its layers and a fraction of its
text: a few minutes on two idle cores. It may be killed and started again.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.quickstart.pretrain import COURSES, QUICKSTART_OLMO, run

NUM_LAYERS = 8
"""The fewest of which three layers are captured as of a deep model, windows in three of four."""


def main() -> None:
    """Train it."""
    parser = argparse.ArgumentParser(description="Train a small Olmo 3.")
    parser.add_argument("--out", type=Path, required=True, help="target directory to write; its state is beside it")
    parser.add_argument("--tokens", type=int, required=True, help="tokens to train on")
    args = parser.parse_args()
    torch.set_num_threads(1)  # on shared cores two threads wait for each other
    course = COURSES[QUICKSTART_OLMO]
    work = args.out.with_name(f"{args.out.name}-work")
    work.mkdir(parents=True, exist_ok=True)
    recipe = replace(course.recipe, tokens=args.tokens, practice_from=args.tokens, practice_until=args.tokens,
                     orthogonal=False, learning_rate=course.recipe.learning_rate / 2)
    run(replace(course, shape=replace(course.shape, num_layers=NUM_LAYERS), recipe=recipe), args.out, work,
        num_validation=40, num_tokenizer=1000)


if __name__ == "__main__":
    main()
