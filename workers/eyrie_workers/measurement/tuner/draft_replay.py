"""Drafting along known texts: the model calls of `measurement.tuner.predict`. One target pass per text.

Each answer is a row of the drafter. The target's states for all its positions come from one teacher-forced pass. Then
all rows step through their answers together, one position at a time: propose the deepest tree of every width, locate
the continuation in it, settle one pair. Batching the rows makes visiting every position cheaper than decoding, because
the drafter's small matrices are read once for all rows.

Independent of the drafter's family: everything goes through `speculation.protocol`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eyrie_api.v1alpha1.engine import DraftTreeShape
from eyrie_workers.measurement.tuner.predict import ContinuationNodes, IntArray, Trace, locate
from eyrie_workers.speculation.noise import NoiseTable, RowNoise
from eyrie_workers.speculation.protocol import CommittedTokens, Drafter, DrafterState
from eyrie_workers.targets.device import device_scope
from eyrie_workers.targets.model import TargetModel

_MOST_NODES = 512  # of a DraftTreeShape


@dataclass(frozen=True)
class KnownAnswer:
    """A prompt and its answer, to draft along."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    temperature: float
    seed: int


def whole_tree(num_steps: int, top_k: int) -> DraftTreeShape:
    """The shape of every node that can be grown at this depth and width, up to the limit of a shape."""
    grown = num_steps + 1 if top_k == 1 else 1 + top_k + (num_steps - 1) * top_k**2
    return DraftTreeShape(num_steps=num_steps, top_k=top_k, num_draft_tokens=min(grown, _MOST_NODES))


def trace(target: TargetModel, drafter: Drafter, answers: Sequence[KnownAnswer], num_steps: int, widths: Iterable[int],
          between: Callable[[], None], rows_at_once: int = 16) -> dict[int, list[Trace]]:
    """By width, the trace of every answer, in the order given. `between` is called at every position."""
    with device_scope(target.device):
        return _traced(target, drafter, answers, [whole_tree(num_steps, width) for width in sorted(set(widths))],
                       between, rows_at_once)


def _traced(target: TargetModel, drafter: Drafter, answers: Sequence[KnownAnswer], shapes: Sequence[DraftTreeShape],
            between: Callable[[], None], rows_at_once: int) -> dict[int, list[Trace]]:
    found: dict[int, dict[int, Trace]] = {shape.top_k: {} for shape in shapes}
    # One temperature per batch: greedy rows then draft without noise, as when decoding.
    order = sorted(range(len(answers)), key=lambda i: (answers[i].temperature, -len(answers[i].token_ids)))
    for temperature in sorted({answer.temperature for answer in answers}):
        same = [i for i in order if answers[i].temperature == temperature]
        for start in range(0, len(same), rows_at_once):
            batch = same[start:start + rows_at_once]
            replayed = _Batch(target, drafter, [answers[i] for i in batch], shapes).run(between)
            for shape, traces in zip(shapes, replayed, strict=True):
                found[shape.top_k] |= dict(zip(batch, traces, strict=True))
    return {width: [traces[i] for i in range(len(answers))] for width, traces in found.items()}


class _Batch:
    """Some answers of one temperature, replayed together."""

    def __init__(self, target: TargetModel, drafter: Drafter, answers: Sequence[KnownAnswer],
                 shapes: Sequence[DraftTreeShape]) -> None:
        self.drafter, self.answers, self.shapes = drafter, answers, shapes
        self.vocab_size = target.config.vocab_size
        self.state: DrafterState = drafter.new_state(len(answers))
        texts = [torch.tensor([*answer.prompt_ids, *answer.token_ids]) for answer in answers]
        self.aux = [aux for aux, _ in target.hidden_states(texts, drafter.aux_layers)]
        self.tables = [NoiseTable(answer.seed, self.vocab_size) for answer in answers]
        for row, (answer, aux) in enumerate(zip(answers, self.aux, strict=True)):
            drafter.admit(self.state, row, answer.prompt_ids)
            drafter.extend(self.state, CommittedTokens(
                [row], [0], [[*answer.prompt_ids[1:], answer.token_ids[0]]], aux[None, :len(answer.prompt_ids)]))

    @torch.inference_mode()
    def run(self, between: Callable[[], None]) -> list[list[Trace]]:
        """Traces of every row, by shape."""
        num_steps = self.shapes[0].num_steps
        kept: list[list[list[ContinuationNodes]]] = [[[] for _ in self.answers] for _ in self.shapes]
        longest = max(len(answer.token_ids) for answer in self.answers)
        for position in range(longest - 1):
            between()
            rows = [row for row, answer in enumerate(self.answers) if position < len(answer.token_ids) - 1]
            following = _following([self.answers[row].token_ids for row in rows], position + 1, num_steps)
            # 1. For each width: propose at this position, find the answer's next tokens in the tree.
            for shape, of_rows in zip(self.shapes, kept, strict=True):
                tree = self.drafter.propose(self.state, rows, shape, self._noise(rows, position))
                located = locate(tree.tokens.cpu().numpy(), tree.parents.cpu().numpy(),
                                 tree.scores.double().cpu().numpy(), following, num_steps)
                for index, row in enumerate(rows):
                    of_rows[row].append(ContinuationNodes(located.needed[index], located.filled[index]))
            # 2. Commit the answer's own next token, whatever was proposed.
            self._settle(rows, position)
        return [[_trace_of(answer, located, num_steps) for answer, located in zip(self.answers, of_rows, strict=True)]
                for of_rows in kept]

    def _noise(self, rows: Sequence[int], position: int) -> RowNoise | None:
        """The engine's noise for the token after `position` and those behind it."""
        temperature = self.answers[0].temperature
        if temperature == 0.0:
            return None
        ahead = [self.tables[row].at(len(self.answers[row].prompt_ids) + position + 1, self.shapes[0].num_steps + 1)
                 for row in rows]
        return RowNoise(torch.full((len(rows),), temperature, dtype=torch.float64), torch.stack(ahead))

    def _settle(self, rows: Sequence[int], position: int) -> None:
        starts = [len(self.answers[row].prompt_ids) + position for row in rows]
        tokens = [[self.answers[row].token_ids[position + 1]] for row in rows]
        aux = torch.stack([self.aux[row][start:start + 1] for row, start in zip(rows, starts, strict=True)])
        self.drafter.extend(self.state, CommittedTokens(rows, starts, tokens, aux))


def _following(texts: Sequence[Sequence[int]], start: int, length: int) -> IntArray:
    """[B, length]: the tokens from `start`, -1 beyond the end."""
    return np.array([[*text[start:start + length], *[-1] * (length - len(text[start:start + length]))]
                     for text in texts], dtype=np.int64)


def _trace_of(answer: KnownAnswer, located: Sequence[ContinuationNodes], num_steps: int) -> Trace:
    needed = np.array([one.needed for one in located], dtype=np.int64).reshape(-1, num_steps, num_steps)
    filled = np.array([one.filled for one in located], dtype=np.int64).reshape(-1, num_steps)
    return Trace(len(answer.token_ids), ContinuationNodes(needed, filled))
