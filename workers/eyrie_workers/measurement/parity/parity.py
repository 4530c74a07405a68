"""The parity gate: whether the serving engine runs the drafter as trained. A drafter passes it before promotion.

Two properties of one serving engine are checked, greedily, on the same prompts:

    lossless   the answer with the drafter equals the same engine's answer without it, token by token
    parity     every round accepts as many draft tokens as in the reference engine (`speculation.engine`)

The second detects a misconfigured drafter: layer ids off by one, a misread vocabulary map or a wrong norm flag change
no answer and raise no error, but lose most of the speed-up. Histograms of accepted lengths are compared prompt by
prompt. In float32 they are equal. Every difference must be explained: a changed token by a near-tie of the target's two
largest logits (`decisions.near_ties`), a changed round by near-ties of the drafter that, decided the other way, give
exactly the served rounds (`round_replay`). In half precision near-ties are common, so up to 2 % of rounds may stay
unexplained. That share was chosen: SGLang on CPU in bfloat16 needed none of it (1 of 414 rounds differed, explained);
SGLang on a GPU has not been tried. tau decides nothing: with layer ids shifted by one it fell only from 3.45 to 3.37
in another engine.

When the check fails, known misconfigurations are tried (`known_misconfigurations`); the report names the one that
reproduces the served rounds.

`prove_parity` queries the servers, loads the reference and decides; `decide` is the decision alone, a pure function.
Where the reference cannot hold the target, `compare_answers` decides by the first property alone, and the report says
so.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.engine import DraftTreeShape, EngineKind
from eyrie_api.v1alpha1.model import Interval
from eyrie_api.v1alpha1.prove import ParityReport
from eyrie_workers.engines.process import EngineFailed
from eyrie_workers.intervals import acceptance_interval, acceptance_length, add_histograms
from eyrie_workers.measurement.parity.evidence import Evidence
from eyrie_workers.measurement.parity.served_answers import Served, request_answers

if TYPE_CHECKING:
    from eyrie_workers.measurement.parity.reference import Reference

_UNEXPLAINED_SHARE = {"float32": 0.0, "bfloat16": 0.02, "float16": 0.02}
"""Share of all rounds that may differ without an explaining near-tie."""

_MOST_SEARCHED = 6
"""Unexplained prompts after which the search for near-ties stops: rounding is not the cause then."""

_TRIED_ON = 4
"""Prompts on which misconfigurations are tried: those whose served rounds differ most from the reference's."""


def prove_parity(kind: EngineKind, plain_url: str, drafted_url: str, model: str, target_dir: Path, drafter_dir: Path,
                 tree: DraftTreeShape, prompts: Sequence[Sequence[int]], max_new_tokens: int, dtype: str,
                 pause: Callable[[], None] = lambda: None, in_flight: int = 1) -> ParityReport:
    """Query both servers, replay the rounds in the reference engine, decide.

    plain_url    base URL of the engine without a drafter, without /v1; drafted_url: with the drafter
    drafter_dir  the drafter as trained; the server may use a copy of it
    prompts      token ids; about two dozen of varied kinds make the interval useful
    dtype        of the engine's computation; the reference uses the same
    pause        called between prompts
    in_flight    concurrent requests; above 1 the engine batches

    A drafted engine that exits or drops a connection gives a failed report. Raises EngineFailed when the undrafted one
    does, InvalidInput without prompts, and the errors of loading the target and the drafter.
    """
    if not prompts:
        raise InvalidInput("parity has no prompts", "give at least one")
    plain = request_answers(kind, plain_url, model, prompts, max_new_tokens, in_flight=in_flight, pause=pause)
    try:
        drafted = request_answers(kind, drafted_url, model, prompts, max_new_tokens, in_flight=in_flight, pause=pause)
    except EngineFailed as error:
        return report_without_answers(kind, tree, len(prompts), error.message)
    from eyrie_workers.measurement.parity.reference import Reference  # torch

    reference = Reference(target_dir, drafter_dir, kind, tree, dtype)
    return replay_parity(reference, kind, tree, dtype, prompts, plain, drafted, pause)


def replay_parity(reference: "Reference", kind: EngineKind, tree: DraftTreeShape, dtype: str,
                  prompts: Sequence[Sequence[int]], plain: Sequence[Served], drafted: Sequence[Served],
                  pause: Callable[[], None] = lambda: None) -> ParityReport:
    """Replay the rounds of given answers in the reference engine, and decide."""
    evidence, searched = [], 0
    for index, (prompt, one, other) in enumerate(zip(prompts, plain, drafted, strict=True)):
        found = reference.examine(f"prompt {index}", prompt, one, other, search=searched < _MOST_SEARCHED)
        searched += found.deviations is None
        evidence.append(found)
        pause()
    likely_cause = ""
    if searched:
        worst = sorted((index for index, found in enumerate(evidence) if found.deviations is None),
                       key=lambda index: -_changed_rounds(evidence[index]))[:_TRIED_ON]
        likely_cause = reference.diagnose([(prompts[index], drafted[index]) for index in worst])
    return decide(kind, tree, dtype, evidence, likely_cause)


def compare_answers(kind: EngineKind, tree: DraftTreeShape, plain: Sequence[Served], drafted: Sequence[Served],
                    divergence: Callable[[int], tuple[str, bool]], why_not_replayed: str) -> ParityReport:
    """Decide by the answers alone, where the rounds cannot be replayed or need not be. Pure but for `divergence`.

    divergence   of prompt number i: a line for the report, and whether it is a near-tie
    """
    lines, ties = [], 0
    for index, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        if one.token_ids != other.token_ids:
            line, is_tie = divergence(index)
            lines.append(line)
            ties += is_tie
    histogram = add_histograms([one.histogram for one in drafted])
    reasons = [_identical_words(len(plain), len(lines)), *_different_words(len(lines) - ties), why_not_replayed]
    return ParityReport(
        engine=kind, prompts=len(plain), identical=len(plain) - len(lines), divergences=tuple(lines), explained=ties,
        tree=tree, histogram=histogram, tau=acceptance_length(histogram),
        tau_interval=acceptance_interval(np.array([_rounds_and_accepted(one.histogram) for one in drafted])),
        passed=len(lines) == ties, reasons=tuple(reasons))


def _identical_words(num_prompts: int, num_diverged: int) -> str:
    return f"{num_prompts - num_diverged} of {num_prompts} answers are identical with and without the drafter"


def _different_words(num_unexplained: int) -> list[str]:
    return [f"{num_unexplained} answers differ by more than a rounding tie: this drafter must not be served by this "
            "engine; report it with the engine's version"] if num_unexplained else []


def _rounds_and_accepted(histogram: Sequence[int]) -> tuple[float, float]:
    return float(sum(histogram)), float(sum(k * n for k, n in enumerate(histogram)))


def decide(kind: EngineKind, tree: DraftTreeShape, dtype: str, evidence: Sequence[Evidence],
          likely_cause: str = "") -> ParityReport:
    """Decide by the rule in the module docstring. `likely_cause` is of the unexplained rounds. Pure."""
    diverged = [found for found in evidence if not found.identical]
    ties = sum(found.divergence_is_tie for found in diverged)
    histogram = add_histograms([found.histogram for found in evidence])
    reference = add_histograms([found.reference_histogram for found in evidence])
    explained = sum(found.deviations or 0 for found in evidence)
    unexplained = sum(_changed_rounds(found) for found in evidence if found.deviations is None)
    tau, reference_tau, interval = acceptance_length(histogram), acceptance_length(reference), _tau_interval(evidence)
    other_target = [found.target_differs for found in evidence if found.target_differs]
    share = unexplained / max(1, sum(histogram), sum(reference))
    same = share <= _UNEXPLAINED_SHARE[dtype]
    reasons = [_identical_words(len(evidence), len(diverged)), *_different_words(len(diverged) - ties)]
    if other_target:
        reasons.append(f"the engine's target differs from ours beyond rounding ({other_target[0]}): serve the target "
                       "the drafter was trained for, at the same revision and dtype")
    reasons.append(f"tau {tau:.3f} served, {reference_tau:.3f} in the reference engine, {tree.label()}")
    if explained or unexplained:
        reasons.append(f"rounds accepted otherwise than in the reference: {explained} explained by near-ties, "
                       f"{unexplained} not, of {sum(histogram)}")
    if not same:
        reasons.append(likely_cause or "no known misconfiguration reproduces the served rounds: compare config.json "
                       "and tensors of the served directory with the trained one (eyrie check-drafter)")
    if sum(histogram[1:]) == 0 and sum(reference[1:]) == 0:
        reasons.append("no draft token was accepted in either engine: parity cannot be shown for such a drafter")
    return ParityReport(
        engine=kind, prompts=len(evidence), identical=len(evidence) - len(diverged),
        divergences=tuple(found.divergence for found in diverged), explained=ties, tree=tree, histogram=histogram,
        reference_histogram=reference, tau=tau, tau_interval=interval, reference_tau=reference_tau,
        rounds_explained=explained, rounds_unexplained=unexplained,
        passed=len(diverged) == ties and same and not other_target, reasons=tuple(reasons))


def report_without_answers(kind: EngineKind, tree: DraftTreeShape, num_prompts: int, error: str) -> ParityReport:
    """The report on a drafted engine that exited or dropped a connection."""
    return ParityReport(
        engine=kind, prompts=num_prompts, identical=0, tree=tree, histogram=(), tau=1.0,
        tau_interval=Interval(low=1.0, high=1.0), passed=False, reasons=(
            f"the engine with the drafter did not answer: {error}",
            "likely cause when it loaded and exited on its first drafts: d2t holds target ids instead of offsets, so "
            "draft ids lie outside the vocabulary; run eyrie check-drafter on the served directory"))


def _changed_rounds(found: Evidence) -> int:
    """Lower bound on the rounds that must change to turn one histogram into the other."""
    pairs = list(zip_longest(found.histogram, found.reference_histogram, fillvalue=0))
    return max(sum(max(0, a - b) for a, b in pairs), sum(max(0, b - a) for a, b in pairs))


def _tau_interval(evidence: Sequence[Evidence]) -> Interval:
    """95 % interval of the served tau, prompts resampled."""
    return acceptance_interval(np.array([_rounds_and_accepted(found.histogram) for found in evidence]))
