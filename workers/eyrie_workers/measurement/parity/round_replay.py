"""Our reference engine's rounds on another engine's answer, and which of their differences are near-ties.

Two engines that serve one drafter must accept the same draft tokens in the same rounds. They sum in different orders,
though, so where a choice hangs on the last bits they may part without either being wrong. Here a difference is not
excused because such a choice existed, but only if deciding such choices the other way leads to exactly what was served:

    a round      is its start: given the text, what a drafter proposes at a position depends on the text before it, not
                 on how rounds led there. So a(p), tokens accepted by the round that starts at p, is a function, and the
                 rounds of an answer are the walk p -> p + a(p) + 1
    a near-tie   is a start at which a(p) changes when the drafter's logits are moved by as much as the dtype leaves
                 open; the values found are what may be accepted there
    an answer    is explained when some walk, taking a(p) or another admissible value at each start, has exactly the
                 histogram that was served. The fewest deviations are what is reported

The text is the served answer itself, also where our target would have chosen otherwise; `target_gap` says how far off
such choices are.
"""

# T tokens, A aux layers, H hidden, V vocabulary, D draft vocabulary

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyrie_api.v1alpha1.draft_tree import DraftTreeShape
from eyrie_workers.measurement.benchmark.losslessness import TIE_RELATIVE
from eyrie_workers.speculation.engine import Engine, Request
from eyrie_workers.speculation.noise import RowNoise
from eyrie_workers.speculation.protocol import CommittedTokens, Drafter
from eyrie_workers.targets.device import device_scope
from eyrie_workers.targets.model import TargetModel

_JITTERS = 12
"""Disturbed proposals per start: two equal candidates stay in one order in all of them with probability 1 / 4096."""

_MOST_DEVIATIONS = 4
"""Per answer. More near-ties than this in a few dozen rounds is not what near-ties look like."""


@dataclass(frozen=True)
class Rounds:
    """What the reference engine did with one prompt."""

    token_ids: tuple[int, ...]
    accepted: tuple[int, ...]
    """Draft tokens accepted, round by round, up to the one that completed the answer's length; all of them whole."""


def reference_rounds(engine: Engine, tree: DraftTreeShape, prompt: Sequence[int], length: int) -> Rounds:
    """Let the reference engine answer until it has `length` tokens, and whatever else its last round brought."""
    engine.tree = tree
    # It decodes past `length`, so that the round which gets there is counted whole.
    room = engine.max_length - len(prompt)
    engine.submit(Request("reference", prompt, min(length + tree.num_steps + 1, room)))
    tokens: list[int] = []
    accepted: list[int] = []
    while len(tokens) < length:
        for progress in engine.step():
            tokens += progress.token_ids
            accepted += progress.accepted
    engine.cancel("reference")
    return Rounds(tuple(tokens[:length]), tuple(accepted))


def histogram_of(accepted: Sequence[int], length: int, *, whole_last_round: bool) -> tuple[int, ...]:
    """Rounds by accepted tokens, for an answer of `length` tokens whose first came from the prefill.

    whole_last_round   the last round counts all it accepted; else the tokens that reached the answer
    """
    counted, position = [], 1
    for count in accepted:
        counted.append(_counted(position, count, length, whole_last_round))
        position += count + 1
    return tuple(counted.count(k) for k in range(max(counted, default=-1) + 1))


def _counted(start: int, accepted: int, length: int, whole_last_round: bool) -> int:
    return accepted if whole_last_round else min(accepted, length - start - 1)


@dataclass(frozen=True)
class _Jitter(RowNoise):
    """Rounding, as noise on the drafter's logits: every logit moves by up to half of `relative` of the largest."""

    relative: float
    seed: int

    def confidence(self, logits: Tensor, depth: int, vocabulary: Tensor | None = None) -> Tensor:
        """`RowNoise.confidence` of greedy rows whose drafter was computed a little differently."""
        generator = torch.Generator().manual_seed(self.seed * 64 + depth)
        moved = torch.rand(logits.shape, generator=generator).sub_(0.5).mul_(self.relative * float(logits.abs().max()))
        return torch.log_softmax(logits + moved.to(logits), dim=-1)


@dataclass(frozen=True)
class Gap:
    """A served token that is not the reference target's choice."""

    position: int
    """In the answer."""

    gap: float
    """Logits below the choice."""

    is_tie: bool
    """Rounding may explain it."""


class Retracer:
    """One served answer, with the reference target's states of it and the reference drafter's proposals along it."""

    def __init__(self, target: TargetModel, drafter: Drafter, tree: DraftTreeShape, dtype: str,
                 prompt: Sequence[int], answer: Sequence[int]) -> None:
        self._drafter, self._tree, self._relative = drafter, tree, TIE_RELATIVE[dtype]
        self._num_prompt, self._length = len(prompt), len(answer)
        self._text, self._device = [*prompt, *answer], target.device
        with torch.inference_mode():
            self._continue(target)
            ((self._aux_TAH, last_TH),) = target.hidden_states([torch.tensor(self._text)], drafter.aux_layers)
            self._logits_TV = target.logits(last_TH).double().cpu()
        with device_scope(self._device):
            self._state = drafter.new_state(1, min(len(self._text) + 1, drafter.max_length), tree)
        self._settled: int | None = None
        self._accepted: dict[tuple[int, int], int] = {}

    def _continue(self, target: TargetModel) -> None:
        """Lengthen the text by what a last round may accept beyond the answer's end."""
        for _ in range(self._tree.num_steps):
            if len(self._text) >= target.config.max_position_embeddings:
                return
            ((_, last_TH),) = target.hidden_states([torch.tensor(self._text)], ())
            self._text.append(int(target.logits(last_TH[-1:]).argmax()))

    def target_gap(self) -> Gap | None:
        """The served token that the reference target likes least; None when it would have said the same throughout."""
        first, last = self._num_prompt - 1, self._num_prompt - 1 + self._length
        logits_TV = self._logits_TV[first:last]
        said = torch.tensor(self._text[first + 1: last + 1])
        gaps = logits_TV.amax(-1) - logits_TV.gather(1, said[:, None])[:, 0]
        # Of several, the one furthest beyond what rounding explains there.
        beyond = gaps - self._relative * logits_TV.abs().amax(-1)
        worst = int(torch.where(gaps > 0, beyond, -torch.inf).argmax())
        if float(gaps[worst]) == 0.0:
            return None
        return Gap(worst, float(gaps[worst]), bool(beyond[worst] <= 0))

    def accepted(self, start: int, jitter: int = 0) -> int:
        """a(start); with `jitter`, under that disturbance."""
        if (start, jitter) not in self._accepted:
            self._accepted[start, jitter] = self._propose(start, jitter)
        return self._accepted[start, jitter]

    def _propose(self, start: int, jitter: int) -> int:
        with torch.inference_mode(), device_scope(self._device):
            self._settle(self._num_prompt + start - 1)
            noise = None
            if jitter:
                noise = _Jitter(torch.ones(1, dtype=torch.float64), torch.zeros(1, 0, 0), self._relative, jitter)
            grown = self._drafter.propose(self._state, torch.tensor([0]), self._tree, noise)
        tokens, parents = grown.tokens[0].tolist(), grown.parents[0].tolist()
        node, count = 0, 0
        for token in self._text[self._num_prompt + start:]:
            node = next((child for child in range(node + 1, len(tokens))
                         if parents[child] == node and tokens[child] == token), -1)
            if node < 0:
                break
            count += 1
        return count

    def rounds(self) -> tuple[int, ...]:
        """a(p) along the walk from the first round to the answer's end."""
        counts, start = [], 1
        while start < self._length:
            counts.append(self.accepted(start))
            start += counts[-1] + 1
        return tuple(counts)

    def admissible(self, start: int) -> tuple[int, ...]:
        """a(start), then what else rounding may make of it."""
        usual = self.accepted(start)
        others = {self.accepted(start, jitter) for jitter in range(1, _JITTERS + 1)} - {usual}
        return (usual, *sorted(others))

    def _settle(self, num_pairs: int) -> None:
        """Have the drafter hold the first `num_pairs` pairs of the text, none of them from a round after them."""
        held = self._settled
        if held == num_pairs:
            return
        if held is None or held > num_pairs:
            self._drafter.admit(self._state, 0, self._text[: self._num_prompt])
            held = 0
        self._drafter.extend(self._state, CommittedTokens(
            rows=torch.tensor([0]), starts=torch.tensor([held]), lengths=torch.tensor([num_pairs - held]),
            tokens=torch.tensor([self._text[held + 1: num_pairs + 1]]), aux=self._aux_TAH[None, held:num_pairs]))
        self._settled = num_pairs

    def explain(self, served: Sequence[int], *, whole_last_round: bool) -> tuple[int, ...] | None:
        """The starts at which near-ties fell otherwise so that the rounds come out as `served`, as few as possible.

        None when near-ties cannot explain it.
        """
        hopeless: set[tuple[int, tuple[int, ...], int]] = set()

        def walk(start: int, left: tuple[int, ...], most: int) -> tuple[int, ...] | None:
            """Deviations of a walk from `start` that uses up exactly the rounds `left`."""
            if start >= self._length:
                return () if not any(left) else None
            if (start, left, most) in hopeless:
                return None
            usual = self.accepted(start)
            for count in self.admissible(start) if most else (usual,):
                entered = _counted(start, count, self._length, whole_last_round)
                if entered >= len(left) or left[entered] == 0:
                    continue
                rest = (*left[:entered], left[entered] - 1, *left[entered + 1:])
                deviates = count != usual
                onward = walk(start + count + 1, rest, most - deviates)
                if onward is not None:
                    return (start, *onward) if deviates else onward
            hopeless.add((start, left, most))
            return None

        found = (walk(1, tuple(served), most) for most in range(_MOST_DEVIATIONS + 1))
        return next((starts for starts in found if starts is not None), None)
