"""Is what we trained what the engine serves? The parity gate: a drafter passes it before it is promoted.

Two questions to one serving engine, on the same prompts, greedy:

    lossless   the answer with the drafter equals the same engine's answer without it, token by token
    the same   in every round it accepts as many draft tokens as our reference engine does (`speculation.engine`)

The second is what finds a drafter that is served wrongly: layer ids off by one, a vocabulary map misread or a norm
flag flipped lose no answer, raise no error and cost most of the speed. Histograms of accepted lengths are compared
prompt by prompt. In float32 they are equal, digit for digit; what differs must be explained one by one, a changed token
by a near-tie of the target's two best (`losslessness`), a changed round by near-ties of the drafter whose deciding
otherwise gives exactly the served rounds (`retracing`). In half precision near-ties are no exception, so up to 2 % of
rounds may stay unexplained as long as the reference's tau lies within the served one's interval. That share was chosen:
SGLang on CPU in bfloat16 needed none of it (1 of 414 rounds differed, explained); no GPU has been run.

When it fails, the known mistakes are tried (`suspects`): the one that reproduces the served rounds is named.

`prove_parity` asks, loads the reference and decides; `judge` is the decision alone, a function of values.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np

from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.draft_tree import DraftTreeShape
from eyrie_api.v1alpha1.model import Interval
from eyrie_api.v1alpha1.prove import ParityReport
from eyrie_api.v1alpha1.serving import EngineKind
from eyrie_workers.engines.process import EngineFailed
from eyrie_workers.intervals import FloatArray, acceptance_length, add_histograms, interval_around, standard_error
from eyrie_workers.measurement.parity.evidence import Evidence
from eyrie_workers.measurement.parity.served_answers import ask_all

_UNEXPLAINED_SHARE = {"float32": 0.0, "bfloat16": 0.02, "float16": 0.02}
"""Of all rounds, how many may differ without a near-tie that explains them."""

_MOST_SEARCHED = 6
"""Prompts without an explanation after which no more are searched: it is not rounding then."""

_TRIED_ON = 4
"""Prompts on which suspects are tried: those whose served rounds differ most from the reference's."""


def prove_parity(kind: EngineKind, plain_url: str, drafted_url: str, model: str, target_dir: Path, drafter_dir: Path,
                 tree: DraftTreeShape, prompts: Sequence[Sequence[int]], max_new_tokens: int, dtype: str,
                 pause: Callable[[], None] = lambda: None, in_flight: int = 1) -> ParityReport:
    """Ask both servers, retrace with the reference engine, judge.

    plain_url    the engine without a drafter, drafted_url with it; base URLs, without /v1
    drafter_dir  the drafter as trained. The server may hold a copy of it elsewhere
    prompts      token ids; two dozen of varied kinds make the interval useful
    dtype        what the engine computes in; the reference computes in the same
    pause        called between prompts
    in_flight    prompts asked at a time; above 1 the engine batches

    A drafted engine that ends or breaks off is a failed report. Raises EngineFailed when the undrafted one does,
    InvalidInput without prompts, and what loading the target and the drafter raises.
    """
    if not prompts:
        raise InvalidInput("parity has no prompts", "give at least one")
    plain = ask_all(kind, plain_url, model, prompts, max_new_tokens, in_flight=in_flight, pause=pause)
    from eyrie_workers.measurement.parity.reference import Reference  # torch

    reference = Reference(target_dir, drafter_dir, kind, tree, dtype)
    try:
        drafted = ask_all(kind, drafted_url, model, prompts, max_new_tokens, in_flight=in_flight, pause=pause)
    except EngineFailed as error:
        own = [reference.histogram(prompt, len(one.token_ids)) for prompt, one in zip(prompts, plain, strict=True)]
        return unanswered(kind, tree, add_histograms(own), len(prompts), error.message)
    evidence, searched = [], 0
    for index, (prompt, one, other) in enumerate(zip(prompts, plain, drafted, strict=True)):
        found = reference.examine(f"prompt {index}", prompt, one, other, search=searched < _MOST_SEARCHED)
        searched += found.deviations is None
        evidence.append(found)
        pause()
    suspicion = ""
    if searched:
        worst = sorted((index for index, found in enumerate(evidence) if found.deviations is None),
                       key=lambda index: -_changed_rounds(evidence[index]))[:_TRIED_ON]
        suspicion = reference.diagnose([(prompts[index], drafted[index]) for index in worst])
    return judge(kind, tree, dtype, evidence, suspicion)


def judge(kind: EngineKind, tree: DraftTreeShape, dtype: str, evidence: Sequence[Evidence],
          suspicion: str = "") -> ParityReport:
    """Decide by the rule of the module's essay. `suspicion` names a likely cause of unexplained rounds."""
    diverged = [found for found in evidence if not found.identical]
    ties = sum(found.divergence_is_tie for found in diverged)
    histogram = add_histograms([found.histogram for found in evidence])
    reference = add_histograms([found.reference_histogram for found in evidence])
    explained = sum(found.deviations or 0 for found in evidence)
    unexplained = sum(_changed_rounds(found) for found in evidence if found.deviations is None)
    tau, reference_tau, interval = acceptance_length(histogram), acceptance_length(reference), _tau_interval(evidence)
    strangers = [found.target_differs for found in evidence if found.target_differs]
    share = unexplained / max(1, sum(histogram), sum(reference))
    same = unexplained == 0 or (share <= _UNEXPLAINED_SHARE[dtype]
                                and interval.low <= reference_tau <= interval.high)
    reasons = [f"{len(evidence) - len(diverged)} of {len(evidence)} answers are identical with and without the drafter"]
    if len(diverged) > ties:
        reasons.append(f"{len(diverged) - ties} answers differ by more than a rounding tie: this drafter must not be "
                       "served by this engine; report it with the engine's version")
    if strangers:
        reasons.append(f"the engine's target is not ours, beyond rounding ({strangers[0]}): serve the target the "
                       "drafter was trained for, at the same revision and dtype")
    reasons.append(f"tau {tau:.3f} served, {reference_tau:.3f} in the reference engine, {tree.label()}")
    if explained or unexplained:
        reasons.append(f"rounds accepted otherwise than in the reference: {explained} explained by near-ties, "
                       f"{unexplained} not, of {sum(histogram)}")
    if not same:
        reasons.append(suspicion or "no known mistake reproduces the served rounds: compare config.json and tensors of "
                       "the served directory with the trained one (eyrie check-drafter)")
    if sum(histogram[1:]) == 0 and sum(reference[1:]) == 0:
        reasons.append("no draft token was accepted in either engine: parity says nothing of such a drafter")
    return ParityReport(
        engine=kind, prompts=len(evidence), identical=len(evidence) - len(diverged),
        divergences=tuple(found.divergence for found in diverged), explained=ties, tree=tree, histogram=histogram,
        reference_histogram=reference, tau=tau, tau_interval=interval, reference_tau=reference_tau,
        rounds_explained=explained, rounds_unexplained=unexplained,
        passed=len(diverged) == ties and same and not strangers, reasons=tuple(reasons))


def unanswered(kind: EngineKind, tree: DraftTreeShape, reference_histogram: tuple[int, ...], num_prompts: int,
               error: str) -> ParityReport:
    """The report on a drafted engine that ended or broke off."""
    return ParityReport(
        engine=kind, prompts=num_prompts, identical=0, tree=tree, histogram=(), reference_histogram=reference_histogram,
        tau=1.0, tau_interval=Interval(low=1.0, high=1.0), reference_tau=acceptance_length(reference_histogram),
        passed=False, reasons=(
            f"the engine with the drafter did not answer: {error}",
            "likely cause when it loaded well and ended on its first drafts: d2t holds target ids where offsets "
            "belong, so that drafts lie outside the vocabulary; run eyrie check-drafter on the served directory"))


def _changed_rounds(found: Evidence) -> int:
    """At least how many rounds must change to turn one histogram into the other."""
    pairs = list(zip_longest(found.histogram, found.reference_histogram, fillvalue=0))
    return max(sum(max(0, a - b) for a, b in pairs), sum(max(0, b - a) for a, b in pairs))


def _tau_interval(evidence: Sequence[Evidence]) -> Interval:
    """95 % interval of the served tau, prompts resampled."""
    tau = acceptance_length(add_histograms([found.histogram for found in evidence]))
    fields: FloatArray = np.array([[sum(found.histogram), sum(k * n for k, n in enumerate(found.histogram))]
                                   for found in evidence], dtype=np.float64)
    drawn: FloatArray = fields[fields[:, 0] > 0]  # an answer of one token has no round
    if len(drawn) < 2:
        return Interval(low=tau, high=tau)
    error = standard_error(drawn, lambda sums: 1.0 + sums[:, 1] / sums[:, 0])
    return interval_around(tau, error, len(drawn))
