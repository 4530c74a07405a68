"""Our engine on the prompts that a serving engine answered: the reference half of the parity gate (`parity`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from eyrie_api.v1alpha1.draft_tree import DraftTreeShape
from eyrie_api.v1alpha1.serving import EngineKind
from eyrie_workers.drafters.registry import open_drafter
from eyrie_workers.measurement.benchmark.losslessness import explain
from eyrie_workers.measurement.parity.evidence import Evidence
from eyrie_workers.measurement.parity.known_misconfigurations import suspects
from eyrie_workers.measurement.parity.round_replay import Retracer, Rounds, histogram_of, reference_rounds
from eyrie_workers.measurement.parity.served_answers import WHOLE_LAST_ROUND, Served
from eyrie_workers.speculation.engine import Engine
from eyrie_workers.speculation.protocol import Drafter
from eyrie_workers.speculation.tree import BranchKeys
from eyrie_workers.targets.loading import load_target


@runtime_checkable
class GrowsTrees(Protocol):
    """A drafter whose trees are grown by confidence, and which can be told how the engine keeps their keys."""

    branch_keys: BranchKeys


@runtime_checkable
class ReadsText(Protocol):
    """A drafter that reads the text itself, which an engine may begin at its second token."""

    reads_first_token: bool


class Reference:
    """Target and drafter, loaded as the serving engine would have to compute them."""

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
        """The reference engine's own rounds for an answer of `length` tokens."""
        longest = min(len(prompt) + length + self._tree.num_steps + 2, self.target.config.max_position_embeddings)
        engine = Engine(self.target, drafter or self.drafter, max_length=longest)
        return reference_rounds(engine, self._tree, prompt, length)

    def histogram(self, prompt: Sequence[int], length: int, drafter: Drafter | None = None) -> tuple[int, ...]:
        """The same as a histogram, counted as the serving engine counts."""
        return self._counted(self.rounds(prompt, length, drafter).accepted, length)

    def examine(self, name: str, prompt: Sequence[int], plain: Served, drafted: Served, *, search: bool) -> Evidence:
        """Compare one prompt's answers and rounds; `search` for near-ties where they differ."""
        answer, line, tie, stranger = drafted.token_ids, "", False, ""
        divergence = explain(self.target, name, prompt, plain.token_ids, answer)
        if divergence is not None:
            line, tie = divergence.line(self._dtype), divergence.is_tie(self._dtype)
        own = self.rounds(prompt, len(answer))
        histogram = self._counted(own.accepted, len(answer))
        deviations: int | None = 0
        if own.token_ids != answer or histogram != drafted.histogram:
            retracer = Retracer(self.target, self.drafter, self._tree, self._dtype, prompt, answer)
            gap = retracer.target_gap()
            if gap is not None and not gap.is_tie:
                stranger = f"{name}, position {gap.position}: {gap.gap:.3g} logits below our target's choice"
            if own.token_ids != answer:
                histogram = self._counted(retracer.rounds(), len(answer))
            if histogram != drafted.histogram:
                starts = retracer.explain(drafted.histogram, whole_last_round=self._whole) if search else None
                deviations = None if starts is None else len(starts)
        return Evidence(name, divergence is None, drafted.histogram, histogram, line, tie, deviations, stranger)

    def diagnose(self, answered: Sequence[tuple[Sequence[int], Served]]) -> str:
        """Which known mistake reproduces the rounds of these prompts, in words; empty when none does."""
        best, said = 0, ""
        for suspect in suspects(self._directory, self.target, self._branch_keys):
            same = sum(self.histogram(prompt, len(served.token_ids), suspect.drafter) == served.histogram
                       for prompt, served in answered)
            if same > best:
                best = same
                said = (f"likely cause: the engine {suspect.cause}; built into the reference, that reproduces the "
                        f"served rounds of {same} of {len(answered)} prompts exactly. Hint: {suspect.hint}")
        return said

    def _counted(self, accepted: Sequence[int], length: int) -> tuple[int, ...]:
        return histogram_of(accepted, length, whole_last_round=self._whole)
