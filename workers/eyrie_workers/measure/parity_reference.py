"""The reference engine on the prompts that a serving engine answered, and its rounds replayed along those answers.

Two engines that serve one drafter must accept the same draft tokens in the same rounds. They sum in different orders,
so a choice that depends on the last bits may differ without either being wrong. A difference is explained only if
deciding such near-ties the other way reproduces exactly the served rounds:

    round      identified by its start: for a given text, the proposal at a position depends on the text before it, not
               on the rounds that led there. So a(p), the tokens accepted by the round that starts at p, is a function,
               and the rounds of an answer are the path p -> p + a(p) + 1
    near-tie   a start at which a(p) changes when the drafter's logits are perturbed within the rounding error of the
               dtype; the values found are the admissible ones there
    answer     explained when a path that takes a(p) or another admissible value at each start has exactly the served
               histogram. The smallest number of deviations is reported

The text is the served answer, including tokens that our target would not have chosen; `target_gap` measures how far
such choices are from ours.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from eyrie_api.contract.engine import DraftTreeShape, EngineKind
from eyrie_api.contract.prove import ParityReport
from eyrie_api.decisions.near_ties import is_near_tie
from eyrie_api.errors import UnsupportedTarget
from eyrie_workers.drafters.family import open_drafter
from eyrie_workers.measure.benchmark.losslessness import explain
from eyrie_workers.measure.known_misconfigurations import known_misconfigurations
from eyrie_workers.measure.parity import WHOLE_LAST_ROUND, Evidence, Served, changed_rounds, decide
from eyrie_workers.speculation.engine import Engine, Request
from eyrie_workers.speculation.noise import RowNoise
from eyrie_workers.speculation.protocol import CommittedTokens, Drafter
from eyrie_workers.speculation.tree import BranchKeys
from eyrie_workers.targets.device import default_device, device_scope, free_bytes
from eyrie_workers.targets.loading import load_target, weight_bytes
from eyrie_workers.targets.model import TargetModel

# T tokens, A aux layers, H hidden, V vocabulary, D draft vocabulary

_DRAFTER_RELATIVE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 4e-3}
"""Relative error of a drafter's logit, after the few roundings of its own layers that a different batching reorders."""

_JITTERS = 12
"""Perturbed proposals per start: two equal candidates keep one order in all of them with probability 1 / 4096."""

_MOST_DEVIATIONS = 4  # per answer; more deviations in a few dozen rounds are not plausible as near-ties


@dataclass(frozen=True)
class Rounds:
    """The reference engine's answer to one prompt, and its rounds."""

    token_ids: tuple[int, ...]
    accepted: tuple[int, ...]
    """Draft tokens accepted by each round, up to the round that completes the answer; none truncated."""


def reference_rounds(engine: Engine, tree: DraftTreeShape, prompt: Sequence[int], length: int) -> Rounds:
    """Run the reference engine until the answer has `length` tokens; the last round may go beyond."""
    engine.tree = tree
    # Decoding continues past `length`, so that the last round is not truncated.
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

    whole_last_round   the last round counts all accepted tokens; otherwise those within the answer
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
    """Rounding as noise on the drafter's logits: every logit moves by up to half of `relative` of the largest."""

    relative: float
    seed: int

    def confidence(self, logits: Tensor, depth: int, vocabulary: Tensor | None = None) -> Tensor:
        """`RowNoise.confidence` of greedy rows with perturbed logits."""
        generator = torch.Generator().manual_seed(self.seed * 64 + depth)
        moved = torch.rand(logits.shape, generator=generator).sub_(0.5).mul_(self.relative * float(logits.abs().max()))
        return torch.log_softmax(logits + moved.to(logits), dim=-1)


@dataclass(frozen=True)
class Gap:
    """A served token that is not the reference target's choice."""

    position: int  # in the answer
    gap: float  # difference to the largest logit
    is_tie: bool  # whether it is a near-tie (`eyrie_api.decisions.near_ties`)


class RoundReplay:
    """One served answer, the reference target's hidden states for it, and the reference drafter's proposals along it.
    """

    def __init__(self, target: TargetModel, drafter: Drafter, tree: DraftTreeShape, dtype: str,
                 prompt: Sequence[int], answer: Sequence[int]) -> None:
        self._drafter, self._tree, self._dtype, self._relative = drafter, tree, dtype, _DRAFTER_RELATIVE[dtype]
        self._num_prompt, self._length = len(prompt), len(answer)
        self._text, self._device = [*prompt, *answer], target.device
        with torch.inference_mode():
            # The text goes on with the tokens that a last round may accept beyond the end of the answer.
            for _ in range(min(tree.num_steps, target.config.max_position_embeddings - len(self._text))):
                ((_, last_TH),) = target.hidden_states([torch.tensor(self._text)], ())
                self._text.append(int(target.logits(last_TH[-1:]).argmax()))
            ((self._aux_TAH, last_TH),) = target.hidden_states([torch.tensor(self._text)], drafter.aux_layers)
            self._logits_TV = target.logits(last_TH).double().cpu()
        with device_scope(self._device):
            self._state = drafter.new_state(1)
        self._settled: int | None = None
        self._accepted: dict[tuple[int, int], int] = {}

    def target_gap(self) -> Gap | None:
        """The served token furthest from the reference target's choice; None when all are its choice."""
        first, last = self._num_prompt - 1, self._num_prompt - 1 + self._length
        logits_TV = self._logits_TV[first:last]
        served = torch.tensor(self._text[first + 1: last + 1])
        largest, own = logits_TV.amax(-1), logits_TV.gather(1, served[:, None])[:, 0]
        gaps = [Gap(place, most - mine, is_near_tie(most - mine, max(abs(most), abs(mine)), self._dtype))
                for place, (most, mine) in enumerate(zip(largest.tolist(), own.tolist(), strict=True)) if mine < most]
        return max(gaps, key=lambda gap: (not gap.is_tie, gap.gap), default=None)

    def accepted(self, start: int, jitter: int = 0) -> int:
        """a(start); with `jitter` > 0, under the perturbation of that seed."""
        if (start, jitter) in self._accepted:
            return self._accepted[start, jitter]
        with torch.inference_mode(), device_scope(self._device):
            self._settle(self._num_prompt + start - 1)
            noise = None
            if jitter:
                noise = _Jitter(torch.ones(1, dtype=torch.float64), torch.zeros(1, 0, 0), self._relative, jitter)
            grown = self._drafter.propose(self._state, [0], self._tree, noise)
        tokens, parents = grown.tokens[0].tolist(), grown.parents[0].tolist()
        # Greedy verification: follow the text down the tree until no child carries the next token.
        node, count = 0, 0
        for token in self._text[self._num_prompt + start:]:
            node = next((child for child in range(node + 1, len(tokens))
                         if parents[child] == node and tokens[child] == token), -1)
            if node < 0:
                break
            count += 1
        self._accepted[start, jitter] = count
        return count

    def rounds(self) -> tuple[int, ...]:
        """a(p) along the path from the first round to the end of the answer."""
        counts, start = [], 1
        while start < self._length:
            counts.append(self.accepted(start))
            start += counts[-1] + 1
        return tuple(counts)

    def admissible(self, start: int) -> tuple[int, ...]:
        """a(start), then the other values it takes within rounding."""
        usual = self.accepted(start)
        others = {self.accepted(start, jitter) for jitter in range(1, _JITTERS + 1)} - {usual}
        return (usual, *sorted(others))

    def _settle(self, num_pairs: int) -> None:
        """Make the drafter's state that of the first `num_pairs` pairs of the text."""
        held = self._settled
        if held == num_pairs:
            return
        # Drafter states only grow: going back to an earlier start begins again from the prompt.
        if held is None or held > num_pairs:
            self._drafter.admit(self._state, 0, self._text[: self._num_prompt])
            held = 0
        self._drafter.extend(self._state, CommittedTokens(
            rows=[0], starts=[held], tokens=[self._text[held + 1: num_pairs + 1]],
            aux=self._aux_TAH[None, held:num_pairs]))
        self._settled = num_pairs

    def explain(self, served: Sequence[int], *, whole_last_round: bool) -> tuple[int, ...] | None:
        """The smallest set of starts whose near-ties, decided the other way, give the histogram `served`.

        Depth-first search over paths through the answer. None when near-ties cannot explain the histogram.
        """
        dead_ends: set[tuple[int, tuple[int, ...], int]] = set()

        def search(start: int, left: tuple[int, ...], most: int) -> tuple[int, ...] | None:
            """Deviations, at most `most`, of a path from `start` whose rounds are exactly `left`."""
            if start >= self._length:
                return () if not any(left) else None
            # Paths that meet at one start with the same rounds left have the same continuations.
            if (start, left, most) in dead_ends:
                return None
            usual = self.accepted(start)
            for count in self.admissible(start) if most else (usual,):
                entered = _counted(start, count, self._length, whole_last_round)
                if entered >= len(left) or left[entered] == 0:
                    continue  # the served answer has no such round left
                rest = (*left[:entered], left[entered] - 1, *left[entered + 1:])
                deviates = count != usual
                onward = search(start + count + 1, rest, most - deviates)
                if onward is not None:
                    return (start, *onward) if deviates else onward
            dead_ends.add((start, left, most))
            return None

        # Iterative deepening: the first bound with a solution has the fewest deviations.
        paths = (search(1, tuple(served), most) for most in range(_MOST_DEVIATIONS + 1))
        return next((starts for starts in paths if starts is not None), None)


_MOST_SEARCHED = 6
"""Unexplained prompts after which the search for near-ties stops: rounding is not the cause then."""

_TRIED_ON = 4
"""Prompts on which misconfigurations are tried: those whose served rounds differ most from the reference's."""

_KEPT_FREE = 2**30  # for activations, caches and the drafter


def why_not_held(target_dir: Path, dtype: str) -> str | None:
    """Why the reference engine cannot hold the target in `dtype` now, with both numbers; None when it can."""
    try:
        needed = weight_bytes(target_dir, dtype) + _KEPT_FREE
    except UnsupportedTarget as error:  # quantised in a form that SGLang alone reads
        return error.message
    free = free_bytes(default_device())
    if free is None or needed <= free:
        return None
    return f"{needed / 2**30:.1f} GiB are needed and {free / 2**30:.1f} GiB are free on the device"


@runtime_checkable
class GrowsTrees(Protocol):
    """A drafter whose trees are grown by confidence, with a setting for how the engine stores their keys."""

    branch_keys: BranchKeys


@runtime_checkable
class ReadsText(Protocol):
    """A drafter that reads the text itself; an engine may omit the first token."""

    reads_first_token: bool


class Reference:
    """Target and drafter, configured to compute what the serving engine computes."""

    def __init__(self, target_dir: Path, drafter_dir: Path, kind: EngineKind, tree: DraftTreeShape, dtype: str) -> None:
        self.target = load_target(target_dir, dtype)
        self.drafter = open_drafter(drafter_dir, self.target)
        self._directory, self._kind, self._tree, self._dtype = drafter_dir, kind, tree, dtype
        self._whole = WHOLE_LAST_ROUND[kind]
        self._branch_keys: BranchKeys = "frontier_slots" if kind == "sglang" else "ancestors"
        if isinstance(self.drafter, GrowsTrees):
            self.drafter.branch_keys = self._branch_keys
        if isinstance(self.drafter, ReadsText):
            self.drafter.reads_first_token = kind != "sglang"

    def rounds(self, prompt: Sequence[int], length: int, drafter: Drafter | None = None) -> Rounds:
        longest = min(len(prompt) + length + self._tree.num_steps + 2, self.target.config.max_position_embeddings)
        engine = Engine(self.target, drafter or self.drafter, max_length=longest)
        return reference_rounds(engine, self._tree, prompt, length)

    def histogram(self, prompt: Sequence[int], length: int, drafter: Drafter | None = None) -> tuple[int, ...]:
        """`rounds` as a histogram, counted as the serving engine counts."""
        return self._counted(self.rounds(prompt, length, drafter).accepted, length)

    def divergence(self, name: str, prompt: Sequence[int], plain: Served, drafted: Served) -> tuple[str, bool]:
        """The first difference of two answers as a line, and whether it is a near-tie; ("", False) for equal ones."""
        difference = explain(self.target, name, prompt, plain.token_ids, drafted.token_ids)
        return ("", False) if difference is None else (difference.line(self._dtype), difference.is_tie(self._dtype))

    def examine(self, name: str, prompt: Sequence[int], plain: Served, drafted: Served, *, search: bool) -> Evidence:
        """Compare one prompt's answers and rounds. `search` for explaining near-ties where rounds differ."""
        answer, target_differs = drafted.token_ids, ""
        line, tie = self.divergence(name, prompt, plain, drafted)
        own = self.rounds(prompt, len(answer))
        histogram = self._counted(own.accepted, len(answer))
        deviations: int | None = 0
        if own.token_ids != answer or histogram != drafted.histogram:
            replay = RoundReplay(self.target, self.drafter, self._tree, self._dtype, prompt, answer)
            gap = replay.target_gap()
            if gap is not None and not gap.is_tie:
                target_differs = f"{name}, position {gap.position}: {gap.gap:.3g} logits below our target's choice"
            # Rounds are comparable on the same text only: drafts are replayed along the served answer.
            if own.token_ids != answer:
                histogram = self._counted(replay.rounds(), len(answer))
            if histogram != drafted.histogram:
                starts = replay.explain(drafted.histogram, whole_last_round=self._whole) if search else None
                deviations = None if starts is None else len(starts)
        return Evidence(name, plain.token_ids == answer, drafted.histogram, histogram, line, tie, deviations,
                        target_differs)

    def replay_parity(self, prompts: Sequence[Sequence[int]], plain: Sequence[Served], drafted: Sequence[Served],
                      pause: Callable[[], None] = lambda: None) -> ParityReport:
        """Replay the rounds of these answers and decide. `pause` is called after each prompt and may raise."""
        evidence, searched, likely_cause = [], 0, ""
        for index, (prompt, undrafted, served) in enumerate(zip(prompts, plain, drafted, strict=True)):
            evidence.append(self.examine(f"prompt {index}", prompt, undrafted, served,
                                         search=searched < _MOST_SEARCHED))
            searched += evidence[-1].deviations is None
            pause()
        if searched:
            worst = sorted((index for index, answer in enumerate(evidence) if answer.deviations is None),
                           key=lambda index: -changed_rounds(evidence[index]))[:_TRIED_ON]
            likely_cause = self.diagnose([(prompts[index], drafted[index]) for index in worst])
        return decide(self._kind, self._tree, self._dtype, evidence, likely_cause)

    def diagnose(self, answered: Sequence[tuple[Sequence[int], Served]]) -> str:
        """A sentence naming the misconfiguration that reproduces the rounds of most prompts; empty when none does."""
        best, sentence = 0, ""
        for tried in known_misconfigurations(self._directory, self.target, self._branch_keys):
            same = sum(self.histogram(prompt, len(served.token_ids), tried.drafter) == served.histogram
                       for prompt, served in answered)
            if same > best:
                best = same
                sentence = (f"likely cause: the engine {tried.cause}; built into the reference, that reproduces the "
                            f"served rounds of {same} of {len(answered)} prompts exactly. Hint: {tried.hint}")
        return sentence

    def _counted(self, accepted: Sequence[int], length: int) -> tuple[int, ...]:
        return histogram_of(accepted, length, whole_last_round=self._whole)
