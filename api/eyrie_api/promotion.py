"""Whether a candidate replaces the incumbent, and why, in words. Pure.

Four questions, all asked even when the first is answered with no, so that the reasons tell the whole story:

1. Did any output differ from the target's? (`require_identical`)
2. Is it faster than no drafter by the margin in every required suite, at every temperature? (`min_speedup`)
3. Is it faster than the incumbent by the margin on average? (`min_speedup_over_incumbent`)
4. Is it at least as fast as the incumbent in every required suite? An average may hide a suite that was given up.

Speed-ups are ratios against the same engine undrafted, so reports of different days may be compared.
"""

from collections.abc import Sequence
from typing import Literal

from eyrie_api.leaderboard import mean_speedup, suite_means
from eyrie_api.v1alpha1.job import PromotionPolicy
from eyrie_api.v1alpha1.reports import BenchmarkReport, PromotionDecision

Verdict = Literal["promote", "keep-incumbent", "no-drafter", "awaits-approval"]


def decide(policy: PromotionPolicy, candidate: BenchmarkReport, incumbent: BenchmarkReport | None,
           required_suites: Sequence[str]) -> PromotionDecision:
    """The verdict of `policy` on `candidate`, with every reason.

    `incumbent` is the report of what serves now, or None when nothing but the bare target does. `keep-incumbent` and
    `no-drafter` name what goes on serving; `awaits-approval` means that all is well and a person has to say so.
    """
    checks = [
        _identical(policy, candidate),
        *(_beats_no_drafter(policy, candidate, suite) for suite in required_suites),
        *(_beats_incumbent(policy, candidate, incumbent, required_suites) if incumbent is not None else ()),
    ]
    passed = all(ok for ok, _ in checks)
    reasons = [words for _, words in checks]
    if incumbent is None:
        reasons.append("no incumbent: compared with no drafter alone")
    kept: Verdict = "no-drafter" if incumbent is None else "keep-incumbent"
    verdict: Verdict = "promote" if passed else kept
    if passed and policy.mode == "manual":
        verdict = "awaits-approval"
        reasons.append("promotion.mode is manual: promote it by hand once you agree")
    elif policy.mode == "never":
        verdict = kept
        reasons.append("promotion.mode is never")
    return PromotionDecision(
        promote=verdict == "promote", verdict=verdict, reasons=tuple(reasons),
        candidate_speedup=mean_speedup(candidate),
        incumbent_speedup=None if incumbent is None else mean_speedup(incumbent))


def _identical(policy: PromotionPolicy, candidate: BenchmarkReport) -> tuple[bool, str]:
    if candidate.lossless:
        return True, f"{candidate.checkpoint}: every prompt's output is identical to the target's"
    differed = sum(cell.prompts - cell.identical for cell in candidate.cells)
    words = f"{candidate.checkpoint}: {differed} of {sum(c.prompts for c in candidate.cells)} outputs differ"
    if policy.require_identical:
        return False, words + " from the target's, and promotion.require_identical is set"
    return True, words + " from the target's, which promotion.require_identical allows"


def _beats_no_drafter(policy: PromotionPolicy, candidate: BenchmarkReport, suite: str) -> tuple[bool, str]:
    cells = [cell for cell in candidate.cells if cell.suite == suite]
    if not cells:
        return False, f"{suite}: required, but not measured"
    slowest = min(cells, key=lambda cell: cell.speedup)
    ok = slowest.speedup >= policy.min_speedup
    sign = ">=" if ok else "below"
    return ok, (f"{suite}: {slowest.speedup:.2f}x over no drafter at temperature {slowest.temperature:g}, its slowest, "
                f"{sign} the required {policy.min_speedup:.2f}x")


def _beats_incumbent(policy: PromotionPolicy, candidate: BenchmarkReport, incumbent: BenchmarkReport,
                     required_suites: Sequence[str]) -> list[tuple[bool, str]]:
    new, old = mean_speedup(candidate), mean_speedup(incumbent)
    needed = old * policy.min_speedup_over_incumbent
    ok = new >= needed
    checks = [(ok, f"{new:.3f}x on average against {old:.3f}x of incumbent {incumbent.checkpoint}: "
                   f"{'>=' if ok else 'below'} the required {needed:.3f}x (margin "
                   f"{policy.min_speedup_over_incumbent:.3f})")]
    new_by_suite, old_by_suite = suite_means(candidate), suite_means(incumbent)
    for suite in required_suites:
        if suite not in old_by_suite:
            checks.append((True, f"{suite}: incumbent was not measured there"))
        elif suite in new_by_suite:
            faster = new_by_suite[suite] >= old_by_suite[suite]
            checks.append((faster, f"{suite}: {new_by_suite[suite]:.2f}x against {old_by_suite[suite]:.2f}x of the "
                                   f"incumbent, {'not slower' if faster else 'slower'}"))
    return checks
