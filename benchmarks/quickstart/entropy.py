"""Confidence of a target: the entropy of its next-token distribution along its own answers.

Drafters of every family are accepted where the target is confident. Targets are therefore compared for speculation by
their confidence in their own answers, not by their loss on other text: nats per token and the probability of the
likeliest token, greedily and at temperature 1.

    python -m benchmarks.quickstart.entropy --target .eyrie/targets/quickstart-large [--num 48] [--library]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from benchmarks.quickstart.corpus.streams import held_out
from benchmarks.quickstart.library import library_held_out
from eyrie_api.contract.engine import SamplingSpec
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.errors import EyrieError
from eyrie_workers.speculation.engine import Engine, Request
from eyrie_workers.targets.loading import load_target, resolve
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.targets.templates import ChatTokenizer

_SEED = 3
_CONCURRENCY = 16


@dataclass(frozen=True)
class Confidence:
    """Means over the tokens of some answers."""

    tokens: int
    entropy: float
    """Nats per token."""

    top1: float
    """Probability of the likeliest token."""


def questions(num: int, *, library: bool) -> Iterator[dict[str, Any]]:
    """Held-out conversations, each up to its last user message."""
    for conversation in islice((library_held_out if library else held_out)(_SEED), num):
        row = conversation.row()
        messages = row["messages"]
        last = max(place for place, message in enumerate(messages) if message["role"] == "user")
        yield {**row, "messages": messages[:last + 1]}


def answers(target: TargetModel, tokenizer: ChatTokenizer, rows: Sequence[dict[str, Any]], temperature: float,
            max_new_tokens: int) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer ids of every row, by the target."""
    asked = [Request(id=str(number), prompt_ids=tokenizer.render(row["messages"], row.get("tools")), seed=number,
                     max_new_tokens=max_new_tokens, sampling=SamplingSpec(temperature=temperature),
                     stop_ids=tuple(tokenizer.eos_ids)) for number, row in enumerate(rows)]
    said = Engine(target, None, max_concurrency=_CONCURRENCY).generate(asked)
    return [(list(request.prompt_ids), answer.token_ids) for request, answer in zip(asked, said, strict=True)]


@torch.inference_mode()
def confidence(target: TargetModel, texts: Sequence[tuple[list[int], list[int]]]) -> Confidence:
    """Of the target in the answers of `texts`, teacher-forced at temperature 1."""
    tokens, entropy, top1 = 0, 0.0, 0.0
    for prompt, answer in texts:
        ((_, last),) = target.hidden_states([torch.tensor(prompt + answer)], (1,))
        chances = target.logits(last[len(prompt) - 1:-1]).float().softmax(-1)
        tokens += len(answer)
        entropy += float(torch.special.entr(chances).sum())
        top1 += float(chances.amax(-1).sum())
    return Confidence(tokens, entropy / tokens, top1 / tokens)


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns the exit code."""
    parser = argparse.ArgumentParser(description="Entropy of a target along its own answers.")
    parser.add_argument("--target", default="quickstart")
    parser.add_argument("--num", type=int, default=48, help="held-out prompts")
    parser.add_argument("--tokens", type=int, default=96, help="maximum tokens of an answer")
    parser.add_argument("--library", action="store_true", help="prompts from Python's library instead of the templates")
    args = parser.parse_args(argv)
    try:
        path = resolve(TargetSpec(model=args.target))
        target, tokenizer = load_target(path), ChatTokenizer(path)
    except EyrieError as error:
        print(f"error: {error.reason}: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    rows = list(questions(args.num, library=args.library))
    for temperature in (0.0, 1.0):
        found = confidence(target, answers(target, tokenizer, rows, temperature, args.tokens))
        print(f"{args.target}, temperature {temperature:g}: {found.entropy:.3f} nats per token, likeliest token "
              f"{found.top1:.3f}, over {found.tokens} tokens of {len(rows)} answers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
