"""The reference engine on the prompts that a serving engine answered: the reference half of the parity gate."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from eyrie_api.v1alpha1.engine import DraftTreeShape, EngineKind
from eyrie_workers.drafters.registry import open_drafter
from eyrie_workers.measurement.benchmark.losslessness import explain
from eyrie_workers.measurement.parity.evidence import Evidence
from eyrie_workers.measurement.parity.known_misconfigurations import known_misconfigurations
from eyrie_workers.measurement.parity.round_replay import RoundReplay, Rounds, histogram_of, reference_rounds
from eyrie_workers.measurement.parity.served_answers import WHOLE_LAST_ROUND, Served
from eyrie_workers.speculation.engine import Engine
from eyrie_workers.speculation.protocol import Drafter
from eyrie_workers.speculation.tree import BranchKeys
from eyrie_workers.targets.device import default_device, free_bytes
from eyrie_workers.targets.loading import load_target, weight_bytes

_KEPT_FREE = 2**30
"""For activations, caches and the drafter."""


def why_not_held(target_dir: Path, dtype: str) -> str | None:
    """Why the reference engine cannot hold the target in `dtype` now, with both numbers; None when it can."""
    needed = weight_bytes(target_dir, dtype) + _KEPT_FREE
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
        self._directory, self._tree, self._dtype = drafter_dir, tree, dtype
        self._whole = WHOLE_LAST_ROUND[kind]
        self._branch_keys: BranchKeys = "frontier_slots" if kind == "sglang" else "ancestors"
        if isinstance(self.drafter, GrowsTrees):
            self.drafter.branch_keys = self._branch_keys
        if isinstance(self.drafter, ReadsText):
            self.drafter.reads_first_token = kind != "sglang"

    def rounds(self, prompt: Sequence[int], length: int, drafter: Drafter | None = None) -> Rounds:
        """The reference engine's rounds for an answer of `length` tokens."""
        longest = min(len(prompt) + length + self._tree.num_steps + 2, self.target.config.max_position_embeddings)
        engine = Engine(self.target, drafter or self.drafter, max_length=longest)
        return reference_rounds(engine, self._tree, prompt, length)

    def histogram(self, prompt: Sequence[int], length: int, drafter: Drafter | None = None) -> tuple[int, ...]:
        """`rounds` as a histogram, counted as the serving engine counts."""
        return self._counted(self.rounds(prompt, length, drafter).accepted, length)

    def divergence(self, name: str, prompt: Sequence[int], plain: Served, drafted: Served) -> tuple[str, bool]:
        """The first difference of two answers as a line, and whether it is a near-tie; ("", False) for equal ones."""
        found = explain(self.target, name, prompt, plain.token_ids, drafted.token_ids)
        return ("", False) if found is None else (found.line(self._dtype), found.is_tie(self._dtype))

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
