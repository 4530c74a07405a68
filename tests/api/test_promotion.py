"""The promotion policy: every question it asks of benchmark and proof, what refuses, and what is stored of it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.load import LoadCell, LoadComparison, LoadLevel, LoadReport, LoadSpec, Quantiles
from eyrie_api.contract.promotion import PromotionPolicy
from eyrie_api.contract.prove import ParityReport, ProveReport, SampledParityReport
from eyrie_api.contract.reports import BenchmarkReport, Interval, PromotionCheck, PromotionDecision
from eyrie_api.contract.tuning import OFF, DrafterUse, NeededTau, OperatingMap, OperatingPoint, Setting
from eyrie_api.decisions.certification import certification
from eyrie_api.decisions.promotion import (
    comparable_suites,
    decide,
    decide_job,
    decision_reason,
    on_suites,
    proven_tau,
    summarize_decision,
)
from tests.api.samples import benchmark_report
from tests.workers.plots.synthetic import tuned_by_prediction

STEADY = benchmark_report("a-step-1", {"chat": (2.0, 1.8), "math": (2.2, 2.0)})
LOSSY = benchmark_report("c-step-3", {"chat": (4.0, 4.0), "math": (4.0, 4.0)}, lossless=False)
SUITES = ("chat", "math")
CHAIN = Setting(tree=DraftTreeShape())


def cell(tau: float | None = None, ttft_p99: float = 0.1, ttft_p50: float = 0.05, requests: int = 200,
         lost: int = 0) -> LoadCell:
    seconds = Quantiles(mean=0.05, p50=ttft_p50, p90=0.3, p99=ttft_p99)
    return LoadCell(requests=requests, completed=requests - lost, failed={"http-500": lost} if lost else {},
                    output_tokens=960, seconds=9.6, tokens_per_s=100.0, tokens_per_s_per_user=50.0, ttft_s=seconds,
                    inter_token_s=seconds, end_to_end_s=seconds, tau=tau)


def against(variant: str, level: int, ratio: float, **changes: Any) -> LoadComparison:
    near = Interval(low=ratio - 0.05, high=ratio + 0.05)
    return LoadComparison.model_validate({
        "variant": variant, "baseline": "off", "mode": "closed", "level": level, "throughput_ratio": ratio,
        "throughput_interval": near, "user_ratio": ratio, "user_interval": near, "ttft_p99_ratio": 1.0,
        "compared": 12, "identical": 12} | changes)


def load_report(*comparisons: LoadComparison, loads: tuple[int, ...] = (1, 4), taus: dict[int, float] | None = None,
                ttft_p99: float = 0.1, candidate: LoadCell | None = None) -> LoadReport:
    variants = {"off": "no drafter"} | {one.variant: "drafted" for one in comparisons}
    given = {"candidate": candidate} if candidate else {}
    levels = [LoadLevel(variant=variant, mode="closed", level=load,
                        total=given.get(variant) or cell((taus or {}).get(load), ttft_p99))
              for variant in variants for load in loads]
    return LoadReport(model="m", spec=LoadSpec(concurrencies=loads), variants=variants, levels=tuple(levels),
                      comparisons=comparisons, environment=STEADY.environment, seconds=1.0)


def chart(*settings: tuple[int, Setting], finding: str = "") -> OperatingMap:
    return OperatingMap(finding=finding, points=tuple(
        OperatingPoint(concurrency=load, setting=setting, speedup=1.0, tokens_per_s=100.0, measured=True)
        for load, setting in settings))


GOOD_LOAD = load_report(against("candidate", 1, 2.0), against("candidate", 4, 1.5))
GOOD_PROMPT = load_report(against("candidate", 1, 1.6), loads=(1,))


def proof_of(report: BenchmarkReport, load: LoadReport | None = GOOD_LOAD, changed: LoadReport | None = GOOD_PROMPT,
             use: DrafterUse | None = None, *, parity: bool = True) -> ProveReport:
    shown = ParityReport(
        engine="embedded", prompts=12, identical=12 if parity else 3, tree=DraftTreeShape(), histogram=(1, 2),
        reference_histogram=(1, 2), tau=3.0, tau_interval=Interval(low=2.9, high=3.1), reference_tau=3.0,
        passed=parity, reasons=("token-identical",) if parity else ("layer ids are shifted by one",))
    return ProveReport(checkpoint=report.checkpoint, path="/d", engine="embedded",
                       use=use or DrafterUse(drafter_dir="/d", setting=CHAIN), parity=shown, load=load,
                       changed_prompt=changed, environment=report.environment, seconds=1.0)


def judge(policy: PromotionPolicy, candidate: BenchmarkReport, incumbent: BenchmarkReport | None = None,
          suites: tuple[str, ...] = SUITES) -> PromotionDecision:
    """Decide on a candidate whose proof is in order."""
    return decide(policy, candidate, incumbent, suites, proof_of(candidate))


def refused(decision: PromotionDecision) -> list[str]:
    return [check.name for check in decision.checks if not check.passed]


@pytest.mark.parametrize(("policy", "candidate", "parity", "reason"), [
    (PromotionPolicy(), STEADY, True, "Promoted"),
    (PromotionPolicy(mode="manual"), STEADY, True, "AwaitsApproval"),
    (PromotionPolicy(mode="never"), STEADY, True, "PromotionOff"),
    (PromotionPolicy(min_speedup=9.0), STEADY, True, "NotFaster"),
    (PromotionPolicy(min_speedup=9.0), STEADY, False, "NotFaster"),
    (PromotionPolicy(), STEADY, False, "ChecksFailed"),
    (PromotionPolicy(), LOSSY, True, "ChecksFailed")])
def test_a_faster_drafter_that_another_check_refuses_is_not_called_slow(
        policy: PromotionPolicy, candidate: BenchmarkReport, parity: bool, reason: str) -> None:
    assert decision_reason(decide(policy, candidate, None, SUITES, proof_of(candidate, parity=parity))) == reason


def the(decision: PromotionDecision, name: str) -> PromotionCheck:
    return next(check for check in decision.checks if check.name == name)


# Of rivals.


def job_on(path: str, **suites: str) -> JobSpec:
    return JobSpec.model_validate({
        "target": {"model": "quickstart"}, "data": {"sources": [{"path": path}]},
        "benchmark": {"suites": [{"name": name, "path": where} for name, where in suites.items()]}})


def test_an_incumbents_benchmark_counts_on_the_same_prompts_alone() -> None:
    ours = job_on("new.jsonl", asked="held-out", chat="quickstart:chat", own="a.jsonl")
    its = job_on("old.jsonl", asked="held-out", chat="quickstart:chat", own="b.jsonl")
    assert comparable_suites(ours, its) == {"chat"}  # what was held out of other data is another suite
    assert comparable_suites(ours, ours) == {"asked", "chat", "own"}
    incumbent = benchmark_report("old-step-1", {"chat": (1.5, 1.5), "asked": (9.0, 9.0)})
    seen = on_suites(incumbent, comparable_suites(ours, its))
    assert seen is not None
    decision = judge(PromotionPolicy(), STEADY, seen)
    assert the(decision, "incumbent").figure == pytest.approx(1.9)  # of chat, which both answered
    assert the(decision, "incumbent").passed
    assert on_suites(incumbent, {"other"}) is None


def test_a_candidate_must_beat_the_best_rival_by_the_margin_and_beyond_its_interval() -> None:
    policy = PromotionPolicy(must_beat="rivals", min_speedup_over_incumbent=1.02)

    def against_rival(speedup: float, policy: PromotionPolicy = policy, **changes: Any) -> PromotionDecision:
        rival = benchmark_report("rival-x", {"chat": (speedup, speedup), "math": (speedup, speedup)})
        slow = benchmark_report("rival-slow", {"chat": (1.0,), "math": (1.0,)})
        rivals = [one.model_copy(update={"rival": True} | changes) for one in (slow, rival)]
        return decide(policy, STEADY, None, SUITES, proof_of(STEADY), [STEADY, *rivals])

    assert against_rival(1.5).promote
    assert refused(against_rival(1.99)) == ["rival", "rival:chat"]  # less than the margin of 2 %, and slower in chat
    faster = against_rival(2.5)
    assert (faster.verdict, refused(faster)) == ("no-drafter", ["rival", "rival:chat", "rival:math"])
    assert "rival-x is faster" in the(faster, "rival").words
    reported = against_rival(2.5, PromotionPolicy())
    assert reported.promote  # by default a faster rival is a reason that refuses nothing
    assert any("rival-x is faster" in reason for reason in reported.reasons)
    dropped = against_rival(2.5, cells=(), dropped="it reads states of 48")
    assert dropped.promote
    assert any("rival-x was not compared: it reads states of 48" in reason for reason in dropped.reasons)


def test_a_tuned_rival_is_compared_in_its_own_best_shape_and_under_load() -> None:
    policy = PromotionPolicy(must_beat="rivals")
    untuned = benchmark_report("rival-x", {"chat": (1.0, 1.0), "math": (1.0, 1.0)}).model_copy(update={"rival": True})
    tuned = untuned.model_copy(update={"cells": benchmark_report("x", {"chat": (3.0, 3.0), "math": (3.0, 3.0)}).cells})

    def judged(rival: BenchmarkReport, under_load: float) -> PromotionDecision:
        load = load_report(against("candidate", 1, 2.0), against("candidate", 4, 1.5),
                           against("rival", 1, under_load), against("rival", 4, under_load))
        return decide(policy, STEADY, None, SUITES, proof_of(STEADY, load), [STEADY, untuned], rival)

    faster = judged(tuned, 1.0)
    assert refused(faster) == ["rival", "rival:chat", "rival:math"]
    assert "both tuned" in the(faster, "rival").words
    assert refused(judged(untuned, 1.9)) == ["rival-loads"]  # sqrt(2.0 * 1.5) / 1.9 is 0.91
    assert judged(untuned, 1.2).promote


def test_n_gram_look_up_is_compared_by_tuning_and_refuses_nothing() -> None:
    lookup = benchmark_report("rival-ngram", {"chat": (9.0, 9.0), "math": (9.0, 9.0)}).model_copy(
        update={"rival": True, "family": "ngram"})
    assert decide(PromotionPolicy(must_beat="rivals"), STEADY, None, SUITES, proof_of(STEADY), [STEADY, lookup]).promote


def test_an_advantage_over_a_rival_that_is_within_the_interval_does_not_count() -> None:
    wide = Interval(low=1.2, high=2.8)
    noisy = STEADY.model_copy(update={"cells": tuple(
        cell.model_copy(update={"speedup_interval": wide}) for cell in STEADY.cells)})
    rival = benchmark_report("rival-x", {"chat": (1.7, 1.7), "math": (1.7, 1.7)}).model_copy(update={"rival": True})
    policy = PromotionPolicy(must_beat="rivals")
    assert refused(decide(policy, noisy, None, SUITES, proof_of(noisy), [noisy, rival])) == ["rival"]
    unsure = policy.model_copy(update={"require_confidence": False})
    assert decide(unsure, noisy, None, SUITES, proof_of(noisy), [noisy, rival]).promote


# Of the benchmark.


def test_a_lossless_faster_candidate_is_promoted_over_nothing_and_every_suite_is_named() -> None:
    decision = judge(PromotionPolicy(), STEADY)
    assert (decision.promote, decision.verdict) == (True, "promote")
    assert decision.candidate_speedup == pytest.approx(2.0)
    assert all(any(suite in reason for reason in decision.reasons) for suite in SUITES)


def test_one_slow_cell_in_a_required_suite_keeps_the_bare_target() -> None:
    slow = benchmark_report("s", {"chat": (3.0, 1.04), "math": (3.0, 3.0)})
    decision = judge(PromotionPolicy(min_speedup=1.05), slow)
    assert (decision.promote, decision.verdict) == (False, "no-drafter")
    assert "chat: 1.04x over no drafter at temperature 1, its slowest, below the required 1.05x" in decision.reasons


def test_a_slow_suite_that_is_not_required_does_not_matter() -> None:
    slow = benchmark_report("s", {"chat": (0.5,), "math": (3.0,)})
    assert judge(PromotionPolicy(), slow, suites=("math",)).promote


def test_a_required_suite_that_was_not_measured_refuses() -> None:
    decision = judge(PromotionPolicy(), STEADY, suites=(*SUITES, "code"))
    assert not decision.promote
    assert "code: required, but not measured" in decision.reasons


def test_a_changed_output_refuses_unless_the_policy_allows_it() -> None:
    assert judge(PromotionPolicy(), LOSSY).verdict == "no-drafter"
    assert judge(PromotionPolicy(require_identical=False), LOSSY).verdict == "promote"


def test_answers_that_differ_by_near_ties_alone_count_as_identical() -> None:
    cells = tuple(cell.model_copy(update={"near_ties": cell.prompts - cell.identical}) for cell in LOSSY.cells)
    decision = judge(PromotionPolicy(), LOSSY.model_copy(update={"cells": cells}))
    assert decision.verdict == "promote"
    assert any("after a near-tie of two logits" in reason for reason in decision.reasons)


def test_a_candidate_none_of_whose_answers_could_be_compared_is_not_called_identical() -> None:
    cells = tuple(cell.model_copy(update={"compared": False}) for cell in STEADY.cells)
    decision = judge(PromotionPolicy(), STEADY.model_copy(update={"cells": cells}))
    assert decision.verdict == "no-drafter"
    assert any("no output was compared" in reason for reason in decision.reasons)


def test_the_incumbent_stays_when_the_candidate_is_better_by_less_than_the_margin() -> None:
    slightly = benchmark_report("n", {"chat": (2.01, 1.81), "math": (2.21, 2.01)})
    decision = judge(PromotionPolicy(min_speedup_over_incumbent=1.02), slightly, STEADY)
    assert (decision.promote, decision.verdict) == (False, "keep-incumbent")
    assert (decision.candidate_speedup, decision.incumbent_speedup) == pytest.approx((2.01, 2.0))


def test_a_better_average_that_gives_up_a_required_suite_is_refused() -> None:
    lopsided = benchmark_report("n", {"chat": (1.5, 1.5), "math": (4.0, 4.0)})
    decision = judge(PromotionPolicy(), lopsided, STEADY)
    assert decision.verdict == "keep-incumbent"
    assert any("chat" in reason and "slower" in reason for reason in decision.reasons)


def test_a_clearly_better_candidate_replaces_the_incumbent() -> None:
    better = benchmark_report("n", {"chat": (2.5, 2.2), "math": (2.7, 2.4)})
    assert judge(PromotionPolicy(), better, STEADY).verdict == "promote"


@pytest.mark.parametrize(("mode", "verdict"), [("manual", "awaits-approval"), ("never", "no-drafter")])
def test_a_policy_that_leaves_it_to_people_does_not_promote(mode: str, verdict: str) -> None:
    decision = judge(PromotionPolicy(mode=mode), STEADY)  # type: ignore[arg-type]
    assert (decision.promote, decision.verdict) == (False, verdict)
    assert any(mode in reason for reason in decision.reasons)


def test_manual_mode_does_not_offer_for_approval_what_the_policy_refuses() -> None:
    assert judge(PromotionPolicy(mode="manual"), LOSSY, STEADY).verdict == "keep-incumbent"


@given(st.floats(0.5, 5.0), st.floats(0.5, 5.0))
def test_whatever_is_promoted_beats_both_margins(new: float, old: float) -> None:
    policy = PromotionPolicy()
    decision = judge(policy, benchmark_report("n", {"chat": (new,)}), benchmark_report("o", {"chat": (old,)}),
                     ("chat",))
    assert decision.promote == (new >= policy.min_speedup and new >= old * policy.min_speedup_over_incumbent)


# Of the proof.


def test_nothing_is_promoted_that_was_not_proven_in_the_serving_engine() -> None:
    decision = decide(PromotionPolicy(), STEADY, None, SUITES)
    assert (decision.promote, refused(decision)) == (False, ["proof"])
    assert "not proven in the serving engine" in decision.reasons
    another = decide(PromotionPolicy(), STEADY, None, SUITES, proof_of(LOSSY))
    assert refused(another) == ["proof"]
    assert "of c-step-3, not of a-step-1" in another.reasons[3]


def test_every_check_is_stored_with_its_figure_bound_and_interval() -> None:
    decision = judge(PromotionPolicy(), STEADY, STEADY)
    assert [check.name for check in decision.checks] == [
        "identical", "suite:chat", "suite:math", "incumbent", "incumbent:chat", "incumbent:math", "parity", "load:1",
        "ttft:1", "answered:1", "load:4", "ttft:4", "answered:4", "changed-prompt"]
    load = the(decision, "load:4")
    assert (load.figure, load.bound, load.interval) == (1.5, 1.05, Interval(low=1.45, high=1.55))
    assert tuple(check.words for check in decision.checks) == decision.reasons
    assert PromotionDecision.model_validate_json(decision.model_dump_json()) == decision


def test_an_engine_that_does_not_serve_what_was_trained_refuses_with_its_cause() -> None:
    decision = decide(PromotionPolicy(), STEADY, None, SUITES, proof_of(STEADY, parity=False))
    assert refused(decision) == ["parity"]
    assert "layer ids are shifted by one" in the(decision, "parity").words


def test_an_answer_that_drafting_changes_under_load_refuses_whatever_one_user_sees() -> None:
    proof = proof_of(STEADY)
    assert decide(PromotionPolicy(), STEADY, None, SUITES, proof.model_copy(
        update={"loaded_parity": proof.parity})).promote
    changed = proof.model_copy(update={"loaded_parity": proof_of(STEADY, parity=False).parity})
    decision = decide(PromotionPolicy(), STEADY, None, SUITES, changed)
    assert (refused(decision), decision_reason(decision)) == (["parity-load"], "ChecksFailed")


@pytest.mark.parametrize("found", [{"identical": 11}, {"p_value": 0.0005, "power": 1.0}])
def test_sampled_answers_that_drafting_changes_refuse_and_are_not_lossless(found: dict[str, float]) -> None:
    sampled = SampledParityReport.model_validate(
        {"engine": "embedded", "prompts": 12, "answers": 12, "passed": False, "reasons": ("they differ",)} | found)
    proof = proof_of(STEADY).model_copy(update={"sampled_parity": sampled})
    decision = decide(PromotionPolicy(), STEADY, None, SUITES, proof)
    assert refused(decision) == ["parity-sampled"]
    assert (decision_reason(decision), certification(decision)) == ("ChecksFailed", "not-lossless")
    passed = proof.model_copy(update={"sampled_parity": sampled.model_copy(update={"passed": True})})
    assert decide(PromotionPolicy(), STEADY, None, SUITES, passed).promote


def test_an_engine_whose_samples_cannot_be_compared_refuses_nothing_and_the_decision_says_so() -> None:
    sampled = SampledParityReport(engine="sglang", prompts=0, answers=0, passed=None, reasons=("not compared: greedy",))
    decision = decide(PromotionPolicy(), STEADY, None, SUITES, proof_of(STEADY).model_copy(
        update={"sampled_parity": sampled}))
    assert decision.promote
    assert "not compared: greedy" in decision.reasons
    assert "parity-sampled" not in {check.name for check in decision.checks}


@pytest.mark.parametrize(("load", "names"), [
    (load_report(against("candidate", 1, 2.0), against("candidate", 4, 1.02)), ["load:4"]),
    (load_report(against("candidate", 1, 2.0)), ["load:4"]),
    (load_report(against("candidate", 1, 2.0), against("candidate", 4, 1.4, throughput_interval=Interval(
        low=0.9, high=1.9))), ["load:4"]),
    (load_report(against("candidate", 1, 2.0, ttft_p99_ratio=1.6), loads=(1,), candidate=cell(ttft_p99=0.16)),
     ["ttft:1"]),
    (load_report(against("candidate", 1, 2.0, ttft_p99_ratio=None), against("candidate", 4, 1.5)), ["ttft:1"]),
    (load_report(against("candidate", 1, 2.0, by_category={"chat": 1.1, "math": 2.0}),
                 against("candidate", 4, 1.5, by_category={"chat": 0.8, "math": 2.0})), ["load-suite:chat"]),
], ids=["too slow", "not asked", "perhaps luck", "late first token", "first token unknown", "a suite loses"])
def test_one_declared_load_that_is_not_good_enough_refuses(load: LoadReport, names: list[str]) -> None:
    assert refused(decide(PromotionPolicy(), STEADY, None, SUITES, proof_of(STEADY, load))) == names


def test_confidence_and_an_absolute_bound_on_the_first_token_are_the_policys_to_ask() -> None:
    unsure = load_report(against("candidate", 1, 1.4, throughput_interval=Interval(low=0.9, high=1.9)), loads=(1,))
    assert decide(PromotionPolicy(require_confidence=False), STEADY, None, SUITES, proof_of(STEADY, unsure)).promote
    late = load_report(against("candidate", 1, 2.0), loads=(1,), ttft_p99=0.4)
    assert decide(PromotionPolicy(max_ttft_p99_s=0.5), STEADY, None, SUITES, proof_of(STEADY, late)).promote
    assert refused(decide(PromotionPolicy(max_ttft_p99_s=0.3), STEADY, None, SUITES, proof_of(STEADY, late))) == [
        "ttft:1"]


def test_few_requests_are_judged_by_their_median_since_their_p99_is_one_disturbed_request() -> None:
    one_late = cell(ttft_p99=0.9, requests=24)
    disturbed = load_report(against("candidate", 1, 2.0, ttft_p99_ratio=9.0), loads=(1,), candidate=one_late)
    assert decide(PromotionPolicy(), STEADY, None, SUITES, proof_of(STEADY, disturbed)).promote
    late = load_report(against("candidate", 1, 2.0), loads=(1,), candidate=cell(ttft_p50=0.2, requests=24))
    assert refused(decide(PromotionPolicy(), STEADY, None, SUITES, proof_of(STEADY, late))) == ["ttft:1"]


def test_a_first_token_that_nobody_feels_to_be_later_passes_whatever_the_ratio() -> None:
    few = cell(ttft_p50=0.09, requests=16)  # without a drafter 0.05 s
    load = load_report(against("candidate", 1, 2.0), loads=(1,), candidate=few)
    decision = decide(PromotionPolicy(), STEADY, None, SUITES, proof_of(STEADY, load))
    assert decision.promote
    assert "1.80x that of no drafter, above 1.50x and only 40 ms later" in the(decision, "ttft:1").words
    strict = PromotionPolicy(ttft_tolerance_s=0.03)
    assert refused(decide(strict, STEADY, None, SUITES, proof_of(STEADY, load))) == ["ttft:1"]


def noisy(ratio: float, low: float, high: float, **changes: Any) -> LoadReport:
    return load_report(against("candidate", 1, ratio, pairs=50, throughput_interval=Interval(low=low, high=high),
                               **changes), loads=(1,), candidate=cell(requests=24))


@pytest.mark.parametrize(("load", "undecided", "reason"), [
    (noisy(1.1, 0.78, 1.55), True, "TooNoisy"), (noisy(1.02, 0.95, 1.1), True, "TooNoisy"),
    (noisy(0.9, 0.8, 1.01), False, "NotFaster"), (noisy(1.03, 1.01, 1.06), False, "NotFaster"),
], ids=["as in a busy demo", "neither", "cannot reach the bound", "faster, and not by enough"])
def test_an_interval_from_slower_to_fast_enough_decides_nothing(load: LoadReport, undecided: bool, reason: str) -> None:
    decision = decide(PromotionPolicy(), STEADY, None, SUITES, proof_of(STEADY, load))
    assert (decision.promote, decision.undecided, the(decision, "load:1").undecided) == (False, undecided, undecided)
    assert decision_reason(decision) == reason


def on_chat(*cells: tuple[float, float, float]) -> BenchmarkReport:
    """The speed-up on chat, with its interval, at each temperature."""
    report = benchmark_report("a-step-1", {"chat": tuple(speed for speed, *_ in cells)})
    return report.model_copy(update={"cells": tuple(
        cell.model_copy(update={"prompts": 2, "speedup_interval": Interval(low=low, high=high)})
        for cell, (_, low, high) in zip(report.cells, cells, strict=True))})


@pytest.mark.parametrize(("candidate", "confident", "reason"), [
    (on_chat((0.84, 0.04, 15.8)), True, "TooNoisy"), (on_chat((0.84, 0.7, 1.0)), True, "NotFaster"),
    (on_chat((0.84, 0.04, 15.8)), False, "NotFaster"),
    (on_chat((0.84, 0.04, 15.8), (0.9, 0.8, 1.0)), True, "NotFaster"),
    (on_chat((0.84, 0.04, 15.8), (1.9, 1.8, 2.0)), True, "TooNoisy")],
    ids=["two prompts", "surely slower", "without confidence", "surely slower when sampled", "faster when sampled"])
def test_a_suite_that_is_too_short_to_show_that_it_is_slower_decides_nothing(
        candidate: BenchmarkReport, confident: bool, reason: str) -> None:
    decision = judge(PromotionPolicy(require_confidence=confident), candidate, suites=("chat",))
    assert (refused(decision), decision_reason(decision)) == (["suite:chat"], reason)
    assert ("of 2 prompts does not show" in the(decision, "suite:chat").words) == (reason == "TooNoisy")


def test_what_is_too_noisy_says_what_disturbed_it_and_what_would_be_enough() -> None:
    proof = proof_of(STEADY, noisy(1.2, 0.9, 1.6)).model_copy(update={"disturbed": "other work used 40 %"})
    words = the(decide(PromotionPolicy(), STEADY, None, SUITES, proof), "load:1").words
    # Half a width of 0.288 in logarithms after 50 pairs, of which 9.6 s each were measured; log 1.2 is 0.182.
    assert "after 50 pairs of blocks, other work used 40 %" in words
    assert "about 125 would be enough, 1 min (prove.most_pairs)" in words
    assert "eyrie retry JOB --from prove" in words


def test_a_slower_suite_refuses_even_where_a_load_is_too_noisy_to_decide() -> None:
    slow = noisy(1.1, 0.78, 1.55, by_category={"chat": 0.5, "math": 2.0})
    decision = decide(PromotionPolicy(), STEADY, None, SUITES, proof_of(STEADY, slow))
    assert (refused(decision), decision.undecided) == (["load:1", "load-suite:chat"], False)


def test_a_late_first_token_refuses_when_its_interval_shows_it() -> None:
    late = {"ttft_ratio": 2.5, "ttft_interval": Interval(low=1.2, high=5.0)}
    slow = cell(ttft_p50=0.2, requests=24)
    unsure = load_report(against("candidate", 1, 2.0, pairs=12, **late), loads=(1,), candidate=slow)
    proof = proof_of(STEADY, unsure).model_copy(update={"disturbed": "GPU 0 was slowed down by heat"})
    decision = decide(PromotionPolicy(), STEADY, None, SUITES, proof)
    assert (refused(decision), decision_reason(decision)) == (["ttft:1"], "TooNoisy")
    assert "too noisy to decide, GPU 0 was slowed down by heat" in the(decision, "ttft:1").words
    late["ttft_interval"] = Interval(low=2.0, high=3.1)
    shown = load_report(against("candidate", 1, 2.0, pairs=12, **late), loads=(1,), candidate=slow)
    decision = decide(PromotionPolicy(), STEADY, None, SUITES, proof_of(STEADY, shown))
    assert (refused(decision), decision_reason(decision)) == (["ttft:1"], "ChecksFailed")


def test_a_candidate_that_fails_requests_its_target_would_have_answered_is_refused() -> None:
    lossy = load_report(against("candidate", 1, 2.0), loads=(1,), candidate=cell(lost=2))
    decision = decide(PromotionPolicy(), STEADY, None, SUITES, proof_of(STEADY, lossy))
    assert refused(decision) == ["answered:1"]
    assert "2 http-500" in the(decision, "answered:1").words


@pytest.mark.parametrize(("ratios", "promoted"), [((1.6, 1.3), True), ((1.5, 1.3), False)])
def test_an_incumbent_asked_in_the_same_run_is_beaten_by_the_margin_over_the_loads_together(
        ratios: tuple[float, float], promoted: bool) -> None:
    load = load_report(against("candidate", 1, ratios[0]), against("candidate", 4, ratios[1]),
                       against("incumbent", 1, 1.5), against("incumbent", 4, 1.3))
    older = benchmark_report("o", {"chat": (1.5, 1.5), "math": (1.5, 1.5)})
    decision = decide(PromotionPolicy(), STEADY, older, SUITES, proof_of(STEADY, load))
    assert decision.promote == promoted
    assert decision.verdict == ("promote" if promoted else "keep-incumbent")
    assert the(decision, "incumbent-loads").bound == 1.02


def test_a_drafter_that_dies_of_another_system_prompt_is_refused() -> None:
    for changed in (against("candidate", 1, 0.9), against("candidate", 1, 1.6, identical=11)):
        proof = proof_of(STEADY, changed=load_report(changed, loads=(1,)))
        assert refused(decide(PromotionPolicy(), STEADY, None, SUITES, proof)) == ["changed-prompt"]
    unasked = proof_of(STEADY, changed=None)  # prove.system_prompt is empty
    assert decide(PromotionPolicy(), STEADY, None, SUITES, unasked).promote


def test_where_the_map_says_off_nothing_is_claimed_but_slower_is_not_forgiven() -> None:
    use = DrafterUse(drafter_dir="/d", setting=CHAIN, map=chart((1, CHAIN), (4, OFF)))

    def with_four_users(ratio: float) -> PromotionDecision:
        load = load_report(against("candidate", 1, 2.0), against("candidate", 4, ratio))
        return decide(PromotionPolicy(), STEADY, None, SUITES, proof_of(STEADY, load, use=use))

    assert with_four_users(0.98).promote
    assert refused(with_four_users(0.8)) == ["load:4"]


def test_off_everywhere_is_no_drafter_with_the_finding_as_the_reason() -> None:
    use = DrafterUse(setting=OFF, map=chart((1, OFF), (4, OFF), finding="one verified token costs as much as two"))
    proof = ProveReport(checkpoint=STEADY.checkpoint, path="/d", engine="embedded", use=use, skipped="nothing to prove",
                        environment=STEADY.environment, seconds=0.0)
    decision = decide(PromotionPolicy(), STEADY, None, SUITES, proof)
    assert (decision.verdict, refused(decision)) == ("no-drafter", ["speculation-pays"])
    assert decision.reasons[0] == "one verified token costs as much as two"
    assert decide(PromotionPolicy(), STEADY, STEADY, SUITES, proof).verdict == "keep-incumbent"


def test_ngram_lookup_is_promoted_by_the_same_questions() -> None:
    use = DrafterUse(setting=Setting(method="ngram", tree=DraftTreeShape()))
    assert decide(PromotionPolicy(), STEADY, None, SUITES, proof_of(STEADY, use=use)).promote


def test_ngram_lookup_may_win_where_the_drafter_is_no_faster_than_nothing() -> None:
    weak = benchmark_report("a-step-1", {"chat": (0.9, 0.8), "math": (1.0, 0.9)})
    ngram = Setting(method="ngram", tree=DraftTreeShape())
    for use in (DrafterUse(setting=ngram), DrafterUse(setting=ngram, map=chart((1, ngram), (4, OFF)))):
        decision = decide(PromotionPolicy(), weak, weak, SUITES, proof_of(weak, use=use))
        assert not any(check.name.startswith("suite:") for check in decision.checks)
    decision = decide(PromotionPolicy(), weak, None, SUITES, proof_of(weak, use=DrafterUse(setting=ngram)))
    assert decision.promote
    assert decision.candidate_speedup == pytest.approx((2.0 * 1.5) ** 0.5), "what the proof measured of it"
    # Used beside the drafter, it excuses nothing of the drafter's.
    both = DrafterUse(drafter_dir="/d", setting=ngram, map=chart((1, ngram), (4, CHAIN)))
    assert "suite:chat" in refused(decide(PromotionPolicy(), weak, None, SUITES, proof_of(weak, use=both)))
    # And look-up that changes answers is refused as a drafter is.
    changed = proof_of(weak, use=DrafterUse(setting=ngram), parity=False)
    assert "parity" in refused(decide(PromotionPolicy(), weak, None, SUITES, changed))


def test_live_traffic_is_held_against_the_lowest_tau_of_the_proof_and_of_sampled_benchmarks() -> None:
    def with_taus(at_one: float, at_four: float) -> LoadReport:
        return load_report(against("candidate", 1, 2.0), against("candidate", 4, 1.5), taus={1: at_one, 4: at_four})

    assert proven_tau(STEADY, proof_of(STEADY, with_taus(3.4, 2.8))) == 2.8
    sampled = pytest.approx(3.8)  # at temperature 1; greedily 4.2
    assert proven_tau(STEADY, proof_of(STEADY, with_taus(4.4, 4.1))) == sampled
    assert proven_tau(STEADY, proof_of(STEADY)) == proven_tau(STEADY) == sampled
    follows = DrafterUse(drafter_dir="/d", setting=CHAIN, map=chart((1, CHAIN), (4, OFF)))
    assert proven_tau(STEADY, proof_of(STEADY, with_taus(3.4, 1.0), use=follows)) == 3.4
    ngram = DrafterUse(setting=Setting(method="ngram", tree=DraftTreeShape()))
    assert proven_tau(STEADY, proof_of(STEADY, with_taus(4.4, 4.1), use=ngram)) == 4.1


def test_a_job_whose_drafter_is_not_fast_enough_says_which_tau_it_would_need_and_others_do_not() -> None:
    spec = JobSpec.model_validate({
        "target": {"model": "quickstart"}, "data": {"sources": [{"path": "quickstart"}]},
        "benchmark": {"suites": [{"name": name, "path": f"quickstart:{name}"} for name in SUITES]},
        "prove": {"concurrencies": [1, 4]}})
    needed_tau = tuple(NeededTau(users=users, num_steps=3, tau=tau) for users, tau in ((1, 1.4), (4, 2.9)))
    tuned = tuned_by_prediction().model_copy(update={"needed_tau": needed_tau})

    def reasons(proof: ProveReport, final: BenchmarkReport = STEADY) -> str:
        report = tuned.model_copy(update={"final": final})
        return summarize_decision(decide_job(spec, [final], report, proof, None))

    needed = "with 4 users at once a chain of 3 needs tau 2.90 for 1.05x and has 2.00"
    slow = load_report(against("candidate", 1, 2.0), against("candidate", 4, 0.9))
    assert needed in reasons(proof_of(STEADY, slow))
    assert "with 1 user" not in reasons(proof_of(STEADY, slow)).partition("What would")[0]
    off = ProveReport(checkpoint=STEADY.checkpoint, path="/d", engine="embedded", use=DrafterUse(setting=OFF),
                      skipped="nothing to prove", environment=STEADY.environment, seconds=0.0)
    assert needed in reasons(off)
    weak = benchmark_report("a-step-1", {"chat": (1.0, 0.9), "math": (1.0, 0.9)})
    assert "with 1 user at once a chain of 3 needs tau 1.40" in reasons(proof_of(weak), weak)
    noisy = load_report(against("candidate", 1, 2.0), against(
        "candidate", 4, 1.1, throughput_interval=Interval(low=0.8, high=1.4), pairs=20))
    use = DrafterUse(drafter_dir="/d", setting=CHAIN, map=chart((1, CHAIN), (4, OFF)))
    for fine in (proof_of(STEADY), proof_of(STEADY, parity=False), proof_of(STEADY, noisy),
                 proof_of(STEADY, slow, use=use)):
        assert "needs tau" not in reasons(fine)
