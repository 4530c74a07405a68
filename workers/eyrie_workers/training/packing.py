"""The documents of each optimiser step: a pure function of (lengths, seed, step).

Documents are packed end to end; nothing is padded, so a step costs what its tokens cost. Every epoch is a fresh
permutation drawn from (seed, epoch). The permutation is cut into as few batches as `max_tokens` allows, and then as
evenly as that number allows: a greedy cut leaves a last batch of any size, whose few tokens would weigh as much as a
full batch. A document longer than `max_tokens` is a batch of its own.

Because a step's documents depend on the step's number alone, the position to resume from is that number: no iterator
state is saved, and a run interrupted anywhere repeats no document and skips none.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from eyrie_api.errors import NoUsableData


@dataclass(frozen=True)
class StepPlan:
    """The documents of one optimiser step."""

    step: int
    epoch: float
    """Epochs finished before this step, plus the finished fraction of the current one."""

    rows: tuple[int, ...]


def split_held_out(num_rows: int, fraction: float, seed: int, max_held_out: int) -> tuple[list[int], list[int]]:
    """Row numbers to train on and to evaluate on: disjoint, ascending, together all rows.

    At least one row is held out as soon as there are two; a single row is trained on and evaluated on nothing.
    """
    wanted = min(max_held_out, max(1, round(num_rows * fraction))) if num_rows > 1 else 0
    order = np.random.default_rng((seed, 0x5EED)).permutation(num_rows)
    return sorted(order[wanted:].tolist()), sorted(order[:wanted].tolist())


def cut_evenly(lengths: Sequence[int], max_tokens: int) -> list[range]:
    """Cut a sequence of documents into the fewest consecutive batches of at most `max_tokens`, as even as possible.

    lengths   tokens of each document, in order, each > 0.
    returns   ranges of positions that cover the sequence in order. A batch exceeds `max_tokens` only when it is one
              document that does.

    Among all cuts with the fewest batches this takes the one whose largest batch is smallest: a bisection over the
    capacity, each trial one greedy pass over the running sum.
    """
    if not lengths:
        return []
    ends = np.cumsum(lengths).tolist()
    fewest = len(_greedy_cut(ends, max_tokens))
    # Invariant: `high` is enough capacity for the fewest batches, `low` is not.
    low, high = 0, max_tokens
    while high - low > 1:
        middle = (low + high) // 2
        if len(_greedy_cut(ends, middle)) <= fewest:
            high = middle
        else:
            low = middle
    return _greedy_cut(ends, high)


def _greedy_cut(ends: list[int], capacity: int) -> list[range]:
    batches, start, used = [], 0, 0
    while start < len(ends):
        stop = max(start + 1, bisect_right(ends, used + capacity))
        batches.append(range(start, stop))
        start, used = stop, ends[stop - 1]
    return batches


@dataclass(frozen=True)
class Schedule:
    """Every step of a run, addressable by number."""

    rows: Sequence[int]
    """The training rows (see `split_held_out`)."""

    lengths: Sequence[int]
    """Tokens of every row of the store, indexed by row number."""

    max_tokens: int
    epochs: float
    seed: int
    max_steps: int | None = None
    _epochs: dict[int, list[tuple[int, ...]]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.rows:
            raise NoUsableData("no captured row is left to train on",
                               "give more conversations, or check why their answers were quarantined")

    def epoch(self, number: int) -> list[tuple[int, ...]]:
        """The batches of one epoch, each the row numbers of its documents."""
        if number not in self._epochs:
            order = np.random.default_rng((self.seed, number)).permutation(np.asarray(self.rows)).tolist()
            cuts = cut_evenly([self.lengths[row] for row in order], self.max_tokens)
            if len(self._epochs) > 2:  # steps are read in order: keep the current epoch and its neighbours
                self._epochs.pop(min(self._epochs))
            self._epochs[number] = [tuple(order[cut.start:cut.stop]) for cut in cuts]
        return self._epochs[number]

    @cached_property
    def _first_steps(self) -> list[int]:
        """First step of each epoch, and after the last the number of steps."""
        firsts = [0]
        whole, part = int(self.epochs), self.epochs - int(self.epochs)
        for number in range(whole):
            firsts.append(firsts[-1] + len(self.epoch(number)))
        if part > 1e-9:
            firsts.append(firsts[-1] + max(1, round(part * len(self.epoch(whole)))))
        return firsts

    @property
    def num_steps_of_epochs(self) -> int:
        """Optimiser steps of all epochs, whatever `max_steps`."""
        return self._first_steps[-1]

    @cached_property
    def num_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return min(self.num_steps_of_epochs, self.max_steps or self.num_steps_of_epochs)

    def at(self, step: int) -> StepPlan:
        """The documents of step `step`, 0 <= step < num_steps."""
        assert 0 <= step < self.num_steps
        number = bisect_right(self._first_steps, step) - 1
        batches = self.epoch(number)
        index = step - self._first_steps[number]
        return StepPlan(step=step, epoch=number + index / len(batches), rows=batches[index])


def checkpoint_steps(num_steps: int, num_checkpoints: int) -> list[int]:
    """The step counts after which a drafter is exported: evenly spaced, distinct, the last at the end."""
    return sorted({max(1, round(num_steps * k / num_checkpoints)) for k in range(1, num_checkpoints + 1)})
