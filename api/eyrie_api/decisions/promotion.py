"""Decides whether a candidate replaces the incumbent; every check has figures and a sentence. Pure.

All checks run even after one has failed, so that the stored decision is complete.

Checks of the benchmark, measured in the reference engine:

1. `identical`: every output equals the target's, or differs by near-ties alone (`require_identical`,
   `decisions.near_ties`).
2. `suite:<name>`: every required suite reaches the speed-up over no drafter at every temperature (`min_speedup`). One
   below it whose interval reaches it is undecided (`require_confidence`): its prompts are too few, also the further
   ones that the tune stage has measured then.
3. `incumbent`: the mean speed-up exceeds the incumbent's by the margin (`min_speedup_over_incumbent`), and
   `incumbent:<suite>`: no required suite is slower than the incumbent's, since a mean may hide one slow suite.
   Speed-ups are ratios to the same engine without a drafter, so reports of different days are comparable, on the same
   prompts (`comparable_suites`): a suite held out of other data is another suite. Without a common one the proof alone
   compares, which serves both the same prompts.
   `rival` and `rival:<suite>`, with `must_beat: rivals`: the same of the best rival, best against best: both in their
   tuned shapes, with an interval of the ratio above 1 (`require_confidence`). Where the rival could not be tuned, and
   with `must_beat: incumbent`, the benchmarks in the tree of `benchmark.tree` are compared. N-gram look-up and no
   drafter are compared by tuning, so they need no check here.

Checks of the proof, measured in the serving engine (`ProveReport`):

4. `proof`, `parity`: the proof exists, is of this checkpoint, and the engine serves what was trained.
   `parity-load`: at the highest declared load no answer was changed by drafting. `parity-sampled`: at temperature 1
   answers from the same seeds are identical, or those of the engine's own noise may come from one distribution. An
   engine that cannot be compared has no such check, and the reasons say so.
5. `load:<users>`: every declared load reaches the speed-up over no drafter, with an interval above 1
   (`require_confidence`). Where the operating map says `off`, the interval must only not lie below 1. An interval that
   has both a slow-down and the required speed-up in it is undecided (`decisions.evidence`).
6. `load-suite:<name>`: no required suite is slower than without a drafter; mean over the declared loads that draft.
7. `ttft:<users>`: the ratio of the time to first token is within its bound, or the difference is below
   `ttft_tolerance_s`; at p99, or the geometric mean over pairs where a level has fewer than `_KNOWS_P99` requests: then
   a ratio above the bound refuses when its interval is above it too. If set, `max_ttft_p99_s` bounds p99 as well.
   `answered:<users>`: no more requests failed than without a drafter.
8. `incumbent-loads`: the speed-up over the incumbent reaches the margin; mean over the declared loads, same run.
   `rival-loads`: the same over the tuned rival, with `must_beat: rivals`.
9. `changed-prompt`: with another system prompt the speed-up reaches `min_speedup_changed_prompt`, and with
   `require_identical` the outputs are identical.

When every check that fails is undecided, the decision is: what serves is kept, and the reason is `TooNoisy`.

Where the drafter is not fast enough at a load, `decide_job` adds the tau that it would need there and what would change
it (`decisions.what_would_pay`).

When tuning found `off` best at every declared load, that is the reason, and no check of the proof runs. When it found
n-gram look-up best and the drafter at no load, the checks of the benchmark, which measures the drafter, are skipped;
`parity` and the load checks decide.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from math import exp, log
from statistics import fmean
from typing import Literal

from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.load import LoadCell, LoadComparison, LoadReport
from eyrie_api.contract.model import Interval
from eyrie_api.contract.promotion import PromotionPolicy
from eyrie_api.contract.prove import ParityReport, ProveReport
from eyrie_api.contract.reports import BenchmarkReport, PromotionCheck, PromotionDecision, TuneReport
from eyrie_api.contract.targets import HELD_OUT
from eyrie_api.decisions.evidence import first_token_standing, pairs_needed, speedup_standing, suite_standing
from eyrie_api.decisions.leaderboard import WITHOUT_DRAFTER, mean_speedup, suite_means
from eyrie_api.decisions.near_ties import is_lossless
from eyrie_api.decisions.what_would_pay import at_once, what_would_pay

Verdict = Literal["promote", "keep-incumbent", "no-drafter", "awaits-approval"]

OFF, CANDIDATE, INCUMBENT, RIVAL = "off", "candidate", "incumbent", "rival"
"""Variants of the proof's load test."""

_OF_SPEED = ("suite", "incumbent", "rival", "load", "load-suite", "incumbent-loads", "rival-loads")
"""Checks, by their name before a colon, that compare tokens per second."""

_NEVER = "promotion.mode is never"

_KNOWS_P99 = 100
"""With fewer requests p99 is the slowest request, so a single outlier would decide: with 16 requests of 4 users it was
1.08x that of no drafter in one run of the demo and 1.79x in the next, the median 1.10x."""


def decide(policy: PromotionPolicy, candidate: BenchmarkReport, incumbent: BenchmarkReport | None,
           required_suites: Sequence[str], proof: ProveReport | None = None,
           benchmarks: Sequence[BenchmarkReport] = (), rival: BenchmarkReport | None = None) -> PromotionDecision:
    """The verdict of `policy` on `candidate`, with every check.

    `incumbent` is the report of the drafter that serves now, or None when the target serves without one, or it was
    measured on other prompts alone.
    `benchmarks` are all of the job, the rivals' included, untuned; `rival` is the best rival's after tuning, if it was
    tuned.
    `keep-incumbent` and `no-drafter` name what continues to serve; `awaits-approval` means that all checks passed and
    `promotion.mode` is manual.
    """
    checks = []
    if proof is not None and proof.use.setting.method == "off":
        finding = proof.use.map.finding if proof.use.map is not None else ""
        checks.append(PromotionCheck(name="speculation-pays", passed=False, words=finding or proof.skipped or
                                     "tuning found no declared load at which speculation pays"))
    over_rivals = [] if without_drafter(proof) else [
        *_beats_rival(policy, *_best_against_best(candidate, benchmarks, rival), required_suites)]
    if not without_drafter(proof):
        checks.append(_identical(policy, candidate))
        checks += (_beats_no_drafter(policy, candidate, suite) for suite in required_suites)
        if incumbent is not None:
            checks += _beats_incumbent(policy, candidate, incumbent, required_suites)
        checks += over_rivals if policy.must_beat == "rivals" else []
    checks += _proof_checks(policy, candidate, required_suites, proof)
    if policy.must_beat == "rivals" and proof is not None and proof.load is not None and _has_variant(proof, RIVAL):
        checks.append(_beats_under_load(policy, proof.load, RIVAL))
    passed = all(check.passed for check in checks)
    reasons = [check.words for check in checks]
    if policy.must_beat != "rivals":
        reasons += [check.words for check in over_rivals if not check.passed]
    reasons += (f"{report.checkpoint} was not compared: {report.dropped}" for report in benchmarks if report.dropped)
    if without_drafter(proof):
        reasons.append("tuning chose n-gram look-up: the benchmark, which is of the drafter, decides nothing")
    if proof is not None and proof.sampled_parity is not None and proof.sampled_parity.passed is None:
        reasons += proof.sampled_parity.reasons
    serves = incumbent is not None or _has_variant(proof, INCUMBENT)
    if not serves:
        reasons.append("no incumbent: compared with no drafter alone")
    unchanged: Verdict = "keep-incumbent" if serves else "no-drafter"
    verdict: Verdict = "promote" if passed else unchanged
    if passed and policy.mode == "manual":
        verdict = "awaits-approval"
        reasons.append("promotion.mode is manual: promote it by hand once you agree")
    elif policy.mode == "never":
        verdict = unchanged
        reasons.append(_NEVER)
    return PromotionDecision(
        promote=verdict == "promote", verdict=verdict, reasons=tuple(reasons), checks=tuple(checks),
        candidate_speedup=proven_speedup(candidate, proof),
        undecided=not passed and policy.mode != "never" and all(check.passed or check.undecided for check in checks),
        incumbent_speedup=None if incumbent is None else mean_speedup(incumbent))


def decide_job(spec: JobSpec, benchmarks: Sequence[BenchmarkReport], tuned: TuneReport, proof: ProveReport,
               incumbent: BenchmarkReport | None) -> PromotionDecision:
    """`decide` on the reports of a job's stages; `benchmarks` has the tuned checkpoint and the tuned rival."""
    final, rival = tuned_finals(tuned, benchmarks)
    required = [suite.name for suite in spec.benchmark.suites if suite.required]
    decision = decide(spec.promotion, final, incumbent, required, proof, benchmarks, rival)
    words = what_would_pay(tuned, _slow_loads(spec, decision, proof), spec.promotion.min_speedup)
    return decision.model_copy(update={"reasons": (*decision.reasons, words)}) if words else decision


def _slow_loads(spec: JobSpec, decision: PromotionDecision, proof: ProveReport) -> list[int]:
    """Loads at which the drafter was measured to be not fast enough against no drafter. Suites have one user."""
    failed = {check.name for check in decision.checks if not check.passed and not check.undecided
              and (check.figure is not None or check.name == "speculation-pays")}
    suites = any(name.startswith("suite:") for name in failed)
    return sorted(load for load in {1, *spec.prove.concurrencies}
                  if (f"load:{load}" in failed and not _is_off(proof, load)) or (load == 1 and suites)
                  or ("speculation-pays" in failed and load in spec.prove.concurrencies))


def tuned_finals(tuned: TuneReport, benchmarks: Sequence[BenchmarkReport]) \
        -> tuple[BenchmarkReport, BenchmarkReport | None]:
    """The final measurements of tuning: of the selected checkpoint, and of the best rival if it was tuned too. Tuning
    does not know whether a checkpoint is a rival, and of which family: their benchmarks say so."""
    of = {report.checkpoint: report for report in benchmarks}
    mine = of[tuned.final.checkpoint]
    final = tuned.final.model_copy(update={"rival": mine.rival, "family": mine.family})
    if tuned.rival is None:
        return final, None
    its = of[tuned.rival.checkpoint]
    return final, tuned.rival.final.model_copy(update={"rival": True, "family": its.family})


def comparable_suites(ours: JobSpec, its: JobSpec) -> frozenset[str]:
    """Names of the suites whose prompts are the same in two jobs."""
    of_others = {suite.name: suite.path for suite in its.benchmark.suites}
    return frozenset(suite.name for suite in ours.benchmark.suites if of_others.get(suite.name) == suite.path and (
        suite.path != HELD_OUT or ours.data == its.data))


def on_suites(report: BenchmarkReport, suites: Collection[str]) -> BenchmarkReport | None:
    """A report without the cells of other suites; None when no cell is left."""
    cells = tuple(cell for cell in report.cells if cell.suite in suites)
    return report.model_copy(update={"cells": cells}) if cells else None


def decision_reason(decision: PromotionDecision) -> str:
    """The verdict as the reason of a condition and of an endpoint's history. A drafter that was refused for something
    other than its speed is not `NotFaster`."""
    if decision.undecided:
        return "TooNoisy"
    if decision.verdict != "no-drafter":
        return {"promote": "Promoted", "keep-incumbent": "IncumbentKept", "awaits-approval": "AwaitsApproval"}[
            decision.verdict]
    failed = [check for check in decision.checks if not check.passed]
    if not failed:
        return "PromotionOff" if _NEVER in decision.reasons else "NotFaster"
    slow = any(check.name == "speculation-pays" or (check.figure is not None
                                                    and check.name.partition(":")[0] in _OF_SPEED) for check in failed)
    return "NotFaster" if slow else "ChecksFailed"


def summarize_decision(decision: PromotionDecision) -> str:
    """The checks that failed; if none did, the number of checks and the speed-ups at the declared loads."""
    failed = [check.words for check in decision.checks if not check.passed]
    checked = {check.words for check in decision.checks}
    rest = [reason for reason in decision.reasons if reason not in checked]
    if failed or not decision.checks:
        return "; ".join([*failed, *rest])
    loads = [check.words for check in decision.checks if check.name.startswith("load:")]
    return "; ".join([f"all {len(decision.checks)} checks passed", *loads, *rest])


def without_drafter(proof: ProveReport | None) -> bool:
    """Whether the proof is of n-gram look-up and the drafter is used at no load."""
    if proof is None or proof.use.setting.method != "ngram":
        return False
    points = proof.use.map.points if proof.use.map is not None else ()
    return all(point.setting.method != "drafter" for point in points)


def proven_speedup(final: BenchmarkReport, proof: ProveReport | None = None) -> float:
    """The speed-up stored with a revision: the mean of the final benchmark; for n-gram look-up, which the benchmark
    does not measure, the geometric mean over the declared loads."""
    if proof is None or proof.load is None or not without_drafter(proof):
        return mean_speedup(final)
    seen = [ratio.throughput_ratio for users in proof.load.spec.concurrencies
            if (ratio := _comparison(proof.load, CANDIDATE, OFF, users)) is not None]
    return _geometric_mean(seen) if seen else mean_speedup(final)


def proven_tau(final: BenchmarkReport, proof: ProveReport | None = None) -> float:
    """The acceptance length with which live traffic is compared: the minimum of two figures.

    - The lowest of the proof's load test over the declared loads, because an engine that follows its operating map
      drafts less under more load. Loads at which it does not draft are left out.
    - The mean of the final benchmark at its highest temperature, because the proof decodes greedily, live traffic
      samples, and sampled tokens are accepted less often: with the greedy figure alone, sampled traffic would be
      reported as drift. Not for n-gram look-up, which the benchmark does not measure.
    """
    seen: list[float] = []
    if proof is not None and proof.load is not None:
        seen = [level.total.tau for level in proof.load.levels
                if level.variant == CANDIDATE and level.total.tau is not None
                and not (level.mode == "closed" and _is_off(proof, round(level.level)))]
    if not seen or (proof is not None and proof.use.setting.method == "drafter"):
        hottest = max(cell.temperature for cell in final.cells)
        seen.append(fmean(cell.tau for cell in final.cells if cell.temperature == hottest))
    return min(seen)


# Checks of the benchmark.


def _identical(policy: PromotionPolicy, candidate: BenchmarkReport) -> PromotionCheck:
    cells = [cell for cell in candidate.cells if cell.compared]
    prompts = sum(cell.prompts for cell in cells)
    same, ties = sum(cell.identical for cell in cells), sum(cell.near_ties for cell in cells)
    passed, words = True, f"{candidate.checkpoint}: every prompt's output is identical to the target's"
    if ties:
        words += f", {ties} of {prompts} after a near-tie of two logits"
    if not prompts:
        passed = not policy.require_identical
        words = (f"{candidate.checkpoint}: no output was compared with the target's, since sampled answers of this "
                 "engine cannot be: add temperature 0 to benchmark.temperatures and tune.temperatures")
    elif not is_lossless(prompts, same, ties):
        passed = not policy.require_identical
        allows = "allows" if passed else "forbids"
        words = (f"{candidate.checkpoint}: {prompts - same - ties} of {prompts} outputs differ from the target's, "
                 f"which promotion.require_identical {allows}")
    return PromotionCheck(name="identical", passed=passed, figure=float(same), bound=float(prompts), words=words)


def _beats_no_drafter(policy: PromotionPolicy, candidate: BenchmarkReport, suite: str) -> PromotionCheck:
    cells = [cell for cell in candidate.cells if cell.suite == suite]
    name, bound = f"suite:{suite}", policy.min_speedup
    if not cells:
        return PromotionCheck(name=name, passed=False, bound=bound, words=f"{suite}: required, but not measured")
    slowest = min(cells, key=lambda cell: cell.speedup)
    ok, interval = slowest.speedup >= bound, slowest.speedup_interval
    # One temperature at which it is surely too slow is enough to refuse.
    undecided = not ok and policy.require_confidence and all(
        suite_standing(bound, cell.speedup, cell.speedup_interval) != "failed" for cell in cells)
    words = (f"{suite}: {slowest.speedup:.2f}x over no drafter at temperature {slowest.temperature:g}, its slowest, "
             f"{_sign(ok)} the required {bound:.2f}x")
    if undecided:
        words += (f", which its interval [{interval.low:.2f}, {interval.high:.2f}] of {slowest.prompts} prompts does "
                  "not show: too noisy to decide, raise the suite's max_prompts")
    return PromotionCheck(name=name, passed=ok, figure=slowest.speedup, bound=bound, interval=interval,
                          undecided=undecided, words=words)


def _beats_incumbent(policy: PromotionPolicy, candidate: BenchmarkReport, incumbent: BenchmarkReport,
                     required_suites: Sequence[str]) -> Iterator[PromotionCheck]:
    common = on_suites(candidate, suite_means(incumbent))
    if common is None:
        return
    new, old = mean_speedup(common), mean_speedup(incumbent)
    needed = old * policy.min_speedup_over_incumbent
    words = (f"{new:.3f}x on average against {old:.3f}x of incumbent {incumbent.checkpoint}: {_sign(new >= needed)} "
             f"the required {needed:.3f}x (margin {policy.min_speedup_over_incumbent:.3f})")
    yield PromotionCheck(name="incumbent", passed=new >= needed, figure=new, bound=needed, words=words)
    for suite in required_suites:
        if suite in suite_means(incumbent):
            yield from _not_slower(INCUMBENT, "the incumbent", candidate, incumbent, suite)
        else:
            yield PromotionCheck(name=f"incumbent:{suite}", passed=True, figure=suite_means(candidate).get(suite),
                                 words=f"{suite}: incumbent was not measured there")


def _not_slower(variant: str, name: str, mine: BenchmarkReport, other: BenchmarkReport,
                suite: str) -> Iterator[PromotionCheck]:
    """`incumbent:<suite>` or `rival:<suite>`, where both were measured on it."""
    own, its = suite_means(mine).get(suite), suite_means(other).get(suite)
    if own is not None and its is not None:
        words = f"{suite}: {own:.2f}x against {its:.2f}x of {name}, {'not slower' if own >= its else 'slower'}"
        yield PromotionCheck(name=f"{variant}:{suite}", passed=own >= its, figure=own, bound=its, words=words)


def _best_against_best(candidate: BenchmarkReport, benchmarks: Sequence[BenchmarkReport], tuned: BenchmarkReport | None
                       ) -> tuple[BenchmarkReport | None, BenchmarkReport | None, str]:
    """Candidate and rival as they are compared, and how: both tuned where the rival was."""
    if tuned is not None:
        return candidate, tuned, "both tuned"
    mine = next((report for report in benchmarks if report.checkpoint == candidate.checkpoint), None)
    measured = [report for report in benchmarks if report.rival and report.dropped is None
                and report.family not in WITHOUT_DRAFTER and report.checkpoint != candidate.checkpoint]
    return mine, max(measured, key=mean_speedup, default=None), "both untuned"


def _beats_rival(policy: PromotionPolicy, mine: BenchmarkReport | None, best: BenchmarkReport | None, how: str,
                 required_suites: Sequence[str]) -> Iterator[PromotionCheck]:
    if mine is None or best is None:
        return
    ratio, bound = mean_speedup(mine) / mean_speedup(best), policy.min_speedup_over_incumbent
    width = exp(math.hypot(_relative_width(mine), _relative_width(best)))
    interval = Interval(low=ratio / width, high=ratio * width)
    sure = interval.low > 1.0 or not policy.require_confidence
    words = (f"{ratio:.3f}x [{interval.low:.2f}, {interval.high:.2f}] {best.checkpoint}, the best rival, {how}: "
             f"{_sign(ratio >= bound)} the required {bound:.3f}x")
    if not sure:
        words += ", and its interval reaches below 1 (promotion.require_confidence)"
    if ratio < 1.0:
        words += (f". {best.checkpoint} is faster: train longer, submit the job with promotion.rivals promote, or "
                  "promote it by hand, untuned and unproven (eyrie endpoints promote)")
    yield PromotionCheck(name="rival", passed=ratio >= bound and sure, figure=ratio, bound=bound, interval=interval,
                         words=words)
    for suite in required_suites:
        yield from _not_slower(RIVAL, best.checkpoint, mine, best, suite)


def _relative_width(report: BenchmarkReport) -> float:
    """Half the width of the interval of a report's mean speed-up, relative to it; cells are independent."""
    halves = [(cell.speedup_interval.high - cell.speedup_interval.low) / 2 for cell in report.cells]
    return math.hypot(*halves) / len(halves) / mean_speedup(report)


# Checks of the proof.


def _proof_checks(policy: PromotionPolicy, candidate: BenchmarkReport, required_suites: Sequence[str],
                  proof: ProveReport | None) -> Iterator[PromotionCheck]:
    if proof is not None and proof.use.setting.method == "off":
        return
    if proof is None or proof.parity is None or proof.load is None:
        yield PromotionCheck(name="proof", passed=False, words="not proven in the serving engine")
        return
    if proof.checkpoint != candidate.checkpoint:
        yield PromotionCheck(name="proof", passed=False, words=(
            f"not proven in the serving engine: the proof is of {proof.checkpoint}, not of {candidate.checkpoint}"))
        return
    parity = proof.parity
    reasons = "; ".join(parity.reasons) or ("identical" if parity.passed else "no reason given")
    yield PromotionCheck(name="parity", passed=parity.passed, figure=float(parity.identical),
                         bound=float(parity.prompts), interval=parity.tau_interval,
                         words=f"parity in the {proof.engine} engine: {reasons}")
    if (loaded := proof.loaded_parity) is not None:
        yield PromotionCheck(name="parity-load", passed=loaded.passed, bound=float(loaded.prompts),
                             figure=float(loaded.identical + loaded.explained), words=(
                                 f"parity under load in the {proof.engine} engine: {'; '.join(loaded.reasons)}"))
    if (sampled := proof.sampled_parity) is not None and sampled.passed is not None:
        figure, bound = sampled.p_value, None
        if sampled.identical is not None:
            figure, bound = float(sampled.identical + sampled.explained), float(sampled.answers)
        yield PromotionCheck(name="parity-sampled", passed=sampled.passed, figure=figure, bound=bound, words=(
            f"sampled parity in the {proof.engine} engine: {'; '.join(sampled.reasons)}"))
    for users in proof.load.spec.concurrencies:
        yield from checks_at_load(policy, proof.load, users, is_off=_is_off(proof, users), disturbed=proof.disturbed)
    yield from _suites_under_load(proof, proof.load, required_suites)
    if _has_variant(proof, INCUMBENT):
        yield _beats_under_load(policy, proof.load, INCUMBENT)
    if proof.changed_prompt is not None:
        yield _survives_changed_prompt(policy, proof.changed_prompt, proof.changed_parity, proof.disturbed)


def checks_at_load(policy: PromotionPolicy, load: LoadReport, users: int, *, is_off: bool = False, disturbed: str = "",
                   again: str = "eyrie retry JOB --from prove") -> Iterator[PromotionCheck]:
    """`load:<users>`, `ttft:<users>` and `answered:<users>` of the variants OFF and CANDIDATE.

    is_off   the candidate does not draft at this load
    again    the command that measures again
    """
    seen, name, bound = _comparison(load, CANDIDATE, OFF, users), f"load:{users}", policy.min_speedup
    if seen is None:
        yield PromotionCheck(name=name, passed=False, bound=bound,
                             words=f"{at_once(users)}: declared, but not compared with no drafter in the serving "
                                   "engine")
        return
    ratio, interval = seen.throughput_ratio, seen.throughput_interval
    between, undecided = f"[{interval.low:.2f}, {interval.high:.2f}]", False
    if is_off:
        ok, bound = interval.high >= 1.0, 1.0
        words = (f"{at_once(users)}: the operating map switches speculation off; {ratio:.2f}x {between}, "
                 f"{'not shown to be' if ok else 'shown to be'} slower than no drafter")
    else:
        standing = speedup_standing(policy, ratio, interval)
        ok, undecided = standing == "passed", standing == "open" and interval.low <= 1.0
        words = (f"{at_once(users)}: {ratio:.2f}x {between} over no drafter in the serving engine, "
                 f"{_sign(ratio >= bound)} the required {bound:.2f}x")
        if undecided:
            words += f": {_what_would_be_enough(load, seen, bound, disturbed, again)}"
    yield PromotionCheck(name=name, passed=ok, figure=ratio, bound=bound, interval=interval, undecided=undecided,
                         words=words)
    yield _first_token(policy, load, seen, users, disturbed)
    mine, bare = _cell(load, CANDIDATE, users), _cell(load, OFF, users)
    if mine is not None and bare is not None:
        failed, excused = (sum(cell.failed.values()) for cell in (mine, bare))
        failures = ", ".join(f"{count} {reason}" for reason, count in sorted(mine.failed.items())) or "none"
        yield PromotionCheck(name=f"answered:{users}", passed=failed <= excused, figure=float(failed),
                             bound=float(excused), words=f"{at_once(users)}: {failed} of {mine.requests} requests "
                                                         f"failed ({failures}), {excused} without a drafter")


def _what_would_be_enough(load: LoadReport, seen: LoadComparison, bound: float, disturbed: str, again: str) -> str:
    """What to do about an interval that is too wide, and what widened it."""
    needed = pairs_needed(seen.throughput_ratio, seen.throughput_interval, seen.pairs, bound)
    enough = ""
    if needed is not None:
        cells = [_cell(load, variant, round(seen.level)) for variant in (seen.variant, seen.baseline)]
        minutes = sum(cell.seconds for cell in cells if cell is not None) * needed / seen.pairs / 60.0
        enough = f"; at this noise about {needed} would be enough, {max(1.0, minutes):.0f} min (prove.most_pairs)"
    noisy = _too_noisy(disturbed, f" after {seen.pairs} pairs of blocks")
    return f"{noisy}{enough}. Measure again on a quiet machine: {again}"


def _too_noisy(disturbed: str, after: str = "") -> str:
    return f"too noisy to decide{after}{f', {disturbed}' if disturbed else ''}"


def _first_token(policy: PromotionPolicy, load: LoadReport, seen: LoadComparison, users: int,
                 disturbed: str) -> PromotionCheck:
    name, bound, quantile, ratio = f"ttft:{users}", policy.max_ttft_p99_ratio, "p99", seen.ttft_p99_ratio
    mine, bare = _cell(load, CANDIDATE, users), _cell(load, OFF, users)
    own, its = (None if cell is None else cell.ttft_s for cell in (mine, bare))
    later, interval, few = math.inf, None, ""
    if mine is not None and bare is not None and own is not None and its is not None:
        later = own.p99 - its.p99
        if min(mine.completed, bare.completed) < _KNOWS_P99:
            quantile, ratio, interval = "typical", seen.ttft_ratio, seen.ttft_interval
            if ratio is None:  # not measured in pairs
                quantile, ratio = "median", own.p50 / max(its.p50, 1e-9)
            later = own.p50 - its.p50
            few = (f" (of {mine.completed} requests p99 is one: {own.p99:.3f} s against {its.p99:.3f} s; raise "
                   f"prove.requests to {_KNOWS_P99} to have it judged)")
    if ratio is None:
        return PromotionCheck(name=name, passed=False, bound=bound,
                              words=f"{at_once(users)}: p99 time to first token was not measured")
    standing = first_token_standing(policy, ratio, interval, later)
    ok, undecided = standing == "passed", standing == "open"
    words = (f"{at_once(users)}: {quantile} time to first token {ratio:.2f}x that of no drafter, "
             f"{'within' if ratio <= bound else 'above'} {bound:.2f}x")
    if ok and ratio > bound:
        words += f" and only {later * 1e3:.0f} ms later (promotion.ttft_tolerance_s)"
    if undecided and interval is not None:
        words += (f", which its interval [{interval.low:.2f}, {interval.high:.2f}] does not show: "
                  f"{_too_noisy(disturbed)}")
    words += few
    if policy.max_ttft_p99_s is not None:
        worst = None if own is None else own.p99
        within = worst is not None and worst <= policy.max_ttft_p99_s
        took = "not measured in seconds" if worst is None else f"p99 {worst:.3f} s"
        words += f"; {took}, {'within' if within else 'not within'} {policy.max_ttft_p99_s:g} s"
        ok, undecided = ok and within, undecided and within
    return PromotionCheck(name=name, passed=ok, figure=ratio, bound=bound, interval=interval, undecided=undecided,
                          words=words)


def _suites_under_load(proof: ProveReport, load: LoadReport,
                       required_suites: Sequence[str]) -> Iterator[PromotionCheck]:
    """One check per suite over all loads, because a single load has only a few requests of each suite."""
    drafting = [ratio for users in load.spec.concurrencies if not _is_off(proof, users)
                if (ratio := _comparison(load, CANDIDATE, OFF, users)) is not None]
    for suite in required_suites:
        ratios = [ratio.by_category[suite] for ratio in drafting if suite in ratio.by_category]
        if ratios:
            mean = _geometric_mean(ratios)
            words = (f"{suite}: {mean:.2f}x over no drafter for its users at the declared loads, "
                     f"{'not slower' if mean >= 1.0 else 'slower'}")
            yield PromotionCheck(name=f"load-suite:{suite}", passed=mean >= 1.0, figure=mean, bound=1.0, words=words)


def _beats_under_load(policy: PromotionPolicy, load: LoadReport, other: str) -> PromotionCheck:
    """Candidate against incumbent or rival."""
    ratios, bound, name = [], policy.min_speedup_over_incumbent, f"{other}-loads"
    for users in load.spec.concurrencies:
        direct = _comparison(load, CANDIDATE, other, users)
        mine, its = _comparison(load, CANDIDATE, OFF, users), _comparison(load, other, OFF, users)
        if direct is not None:
            ratios.append(direct.throughput_ratio)
        elif mine is not None and its is not None:
            ratios.append(mine.throughput_ratio / its.throughput_ratio)
        else:
            return PromotionCheck(name=name, passed=False, bound=bound,
                                  words=f"the {other} was not measured at every declared load")
    mean = _geometric_mean(ratios)
    words = (f"{mean:.3f}x the {other} over the declared loads, measured in turn in the same run: "
             f"{_sign(mean >= bound)} the required {bound:.3f}x")
    return PromotionCheck(name=name, passed=mean >= bound, figure=mean, bound=bound, words=words)


def _survives_changed_prompt(policy: PromotionPolicy, load: LoadReport, answers: ParityReport | None,
                             disturbed: str) -> PromotionCheck:
    seen = [ratio for ratio in load.comparisons if (ratio.variant, ratio.baseline) == (CANDIDATE, OFF)]
    bound = policy.min_speedup_changed_prompt
    if not seen:
        return PromotionCheck(name="changed-prompt", passed=False, bound=bound,
                              words="with another system prompt: not compared with no drafter")
    slowest = min(seen, key=lambda ratio: ratio.user_ratio)
    compared = sum(ratio.compared for ratio in seen)
    differ = compared - sum(ratio.identical for ratio in seen)
    if answers is not None:  # these are judged by near-ties; under load, answers are compared by their digests alone
        compared, differ = answers.prompts, answers.prompts - answers.identical - answers.explained
    ok, same = slowest.user_ratio >= bound, not differ or not policy.require_identical
    undecided = not ok and same and bool(slowest.pairs) and slowest.throughput_interval.high >= bound
    words = (f"with another system prompt: {slowest.user_ratio:.2f}x over no drafter, {_sign(ok)} the required "
             f"{bound:.2f}x; {differ or 'no'} of {compared} outputs differ")
    if undecided:
        words += f"; {_too_noisy(disturbed, f' after {slowest.pairs} pairs of blocks')}"
    return PromotionCheck(name="changed-prompt", passed=ok and same, figure=slowest.user_ratio, bound=bound,
                          interval=slowest.user_interval, undecided=undecided, words=words)


def _comparison(load: LoadReport, variant: str, baseline: str, users: int) -> LoadComparison | None:
    return next((ratio for ratio in load.comparisons if (ratio.variant, ratio.baseline, ratio.mode, ratio.level)
                 == (variant, baseline, "closed", float(users))), None)


def _cell(load: LoadReport, variant: str, users: int) -> LoadCell | None:
    return next((level.total for level in load.levels
                 if (level.variant, level.mode, level.level) == (variant, "closed", float(users))), None)


def _has_variant(proof: ProveReport | None, variant: str) -> bool:
    return proof is not None and proof.load is not None and variant in proof.load.variants


def _is_off(proof: ProveReport, users: int) -> bool:
    return proof.use.map is not None and proof.use.map.at(users).setting.method == "off"


def _geometric_mean(ratios: Sequence[float]) -> float:
    # Clamped: a variant that answered nothing has ratio 0, whose log is a domain error.
    return exp(fmean(log(max(ratio, 1e-9)) for ratio in ratios))


def _sign(ok: bool) -> str:
    return ">=" if ok else "below"
