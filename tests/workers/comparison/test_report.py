"""What a comparison says of figures that are known: ranks, intervals, claims, and the answer to its question."""

from pathlib import Path

import pytest

from eyrie_api.v1alpha1.model import Interval
from eyrie_workers.comparison.answer import answer
from eyrie_workers.comparison.claims import reaches
from eyrie_workers.comparison.forms import OFF
from eyrie_workers.comparison.plots import draw
from eyrie_workers.comparison.render import markdown
from eyrie_workers.comparison.report import CompareReport, MeasuredBlocks, choose, swapped
from tests.workers.comparison.ledger import Made, entries_of, report_of

FAMILY = {
    "EAGLE-1": Made(1.5), "EAGLE-2": Made(1.9, 2), "EAGLE-1 chain": Made(1.4), "EAGLE-3": Made(2.4, 3, 0.4),
    "EAGLE-3 chain": Made(2.0, 3), "n-gram": Made(1.1, 0, 0.01)}


def verdict_of(report: CompareReport, aspect: str) -> str:
    return next(claim.verdict for claim in report.claims if claim.aspect == aspect)


def test_tau_acceptance_and_costs_are_those_of_the_rounds() -> None:
    variant = report_of({"EAGLE-3": Made(2.0, 3, 0.4)}).named("EAGLE-3")
    assert variant is not None
    figures = variant.overall
    assert figures.tau == 4.0
    assert (figures.tau_interval.low, figures.tau_interval.high) == pytest.approx((4.0, 4.0))
    assert figures.acceptance == (1.0, 1.0, 1.0)
    assert figures.draft_ms == pytest.approx(400.0)
    assert figures.draft_share == pytest.approx(0.4)
    assert figures.round_cost == pytest.approx(1.4)
    assert figures.nodes_per_round == 4.0
    assert figures.speedup == pytest.approx(2.0, rel=0.05)
    assert figures.speedup_interval.low < figures.speedup < figures.speedup_interval.high
    assert (figures.blocks, figures.requests, figures.identical) == (16, 16, 16)


def test_every_load_temperature_and_suite_has_its_figures() -> None:
    variant = report_of(FAMILY).named("EAGLE-2")
    assert variant is not None
    for load in (1, 4):
        for temperature in (None, 0.0, 1.0):
            for suite in (None, "chat", "code"):
                assert variant.at(load, temperature, suite).blocks == 16 // (2 if temperature is not None else 1) // (
                    2 if suite else 1)
    with pytest.raises(StopIteration):
        variant.at(2)


def test_off_is_its_own_measure() -> None:
    variant = report_of(FAMILY).named(OFF)
    assert variant is not None
    assert (variant.overall.speedup, variant.overall.tau, variant.overall.round_cost) == (1.0, 1.0, 1.0)


def test_the_leaderboard_is_by_speed_and_an_variant_that_changed_the_output_comes_last() -> None:
    report = report_of({**FAMILY, "EAGLE-3": Made(2.4, changed_output=True)})
    assert [one.variant.title for one in report.variants] == [
        "EAGLE-3 chain", "EAGLE-2", "EAGLE-1", "EAGLE-1 chain", "n-gram", OFF, "EAGLE-3"]
    assert [one.rank for one in report.variants] == list(range(1, 8))
    assert report.winner == "EAGLE-3 chain"
    assert "NOT lossless" in answer(report)
    assert not report.variants[-1].lossless


def test_the_right_drafter_is_said_to_be_right() -> None:
    report = report_of(FAMILY)
    words = answer(report)
    assert report.winner == "EAGLE-3"
    assert words.startswith("Yes: EAGLE-3 (tree 4/2/8) is the fastest of 6 variants, 2.4")
    assert "Surely slower: EAGLE-3 chain, EAGLE-2, EAGLE-1, EAGLE-1 chain, n-gram." in words
    assert "Without any training n-gram" in words
    assert "still leads" in words
    assert "token by token" in words


def test_the_wrong_drafter_is_said_to_be_wrong_with_the_ratio() -> None:
    words = answer(report_of({"EAGLE-3": Made(1.5), "DDTree": Made(2.0)}))
    assert words.startswith("No: DDTree (tree 4/2/8) is fastest")
    assert "the ratio is 1.3" in words


def test_what_scatters_more_than_it_differs_is_not_distinguished() -> None:
    report = report_of({"EAGLE-3": Made(1.98, jitter=0.05), "DDTree": Made(2.2, jitter=0.2)})
    pair = report.comparison("DDTree", "EAGLE-3")
    assert pair is not None
    assert pair.outcome == "indistinguishable"
    words = answer(report)
    assert words.startswith("It may be: DDTree")
    assert "indistinguishable from EAGLE-3" in words


def test_when_nothing_is_surely_faster_it_is_left_off() -> None:
    report = report_of({"EAGLE-3": Made(1.01, jitter=0.2), "n-gram": Made(0.9)})
    assert report.winner == OFF
    assert "leave speculation off" in answer(report)
    assert "not surely faster" in answer(report)


def test_a_fast_variant_that_changes_the_output_is_not_chosen() -> None:
    report = report_of({"EAGLE-3": Made(3.0, changed_output=True)})
    assert choose(report.variants) == OFF
    assert "NOT lossless" in answer(report)


def test_where_the_leader_changes_with_the_load_it_is_said() -> None:
    words = answer(report_of({"EAGLE-3": Made(2.0, at_load=0.5), "EAGLE-3 chain": Made(1.8)}))
    assert "With 4 at once it reaches 1.0" in words
    assert "EAGLE-3 chain (chain 4/1/5) leads there" in words
    assert "With 4 at once nothing is faster" in answer(report_of({"EAGLE-3": Made(2.0, at_load=0.4)}))


def test_without_the_family_in_question_the_question_is_left_open() -> None:
    report = report_of({"Medusa": Made(1.5)})
    assert "EAGLE-3 was not compared" in answer(report)
    slow = answer(report_of({"Medusa": Made(0.8)}))
    assert slow.startswith("EAGLE-3 was not compared, so the question stays open. Of the others, none")
    failed = report.model_copy(update={"failed": {"eagle3": "LossDiverged: x"}})
    assert "was not trained (LossDiverged" in answer(failed)


def test_claims_hold_where_the_figures_bear_them_out() -> None:
    report = report_of(FAMILY)
    assert verdict_of(report, "EAGLE-2 over EAGLE-1") == "holds"
    assert verdict_of(report, "Tree over chain (EAGLE-3)") == "holds"
    assert verdict_of(report, "EAGLE-3's acceptance over EAGLE-2's") == "holds"


def test_claims_that_the_figures_contradict_do_not_hold_here() -> None:
    report = report_of(FAMILY)
    assert verdict_of(report, "EAGLE-3 over EAGLE-2") == "does not hold here"  # 1.26x, not 1.4x
    assert verdict_of(report, "EAGLE-2's speed-up") == "does not hold here"
    assert verdict_of(report, "EAGLE-1's acceptance rate") == "does not hold here"


def test_claims_about_who_is_not_there_are_not_measured() -> None:
    report = report_of(FAMILY)
    assert verdict_of(report, "DDTree over DFlash") == "not measured"
    assert verdict_of(report, "EAGLE-3 gains from more data") == "not measured"
    assert report_of({"Medusa": Made(1.5)}).rows == ()


@pytest.mark.parametrize(("low", "high", "least", "said"), [
    (1.1, 1.5, 1.2, "holds"), (1.05, 1.15, 1.2, "does not hold here"), (0.9, 1.3, 1.2, "indistinguishable"),
    (0.7, 0.9, 1.0, "does not hold here"), (1.3, 1.3, 1.0, "indistinguishable")])
def test_a_number_is_reached_by_an_interval_above_one_that_holds_it(
        low: float, high: float, least: float, said: str) -> None:
    assert reaches(Interval(low=low, high=high), least) == said


def test_swapping_a_pair_inverts_every_figure() -> None:
    pair = MeasuredBlocks(entries_of(FAMILY)).pair("EAGLE-3", "EAGLE-1", 1)
    back = swapped(pair)
    assert (pair.outcome, back.outcome) == ("faster", "slower")
    assert back.ratio * pair.ratio == pytest.approx(1.0)
    assert back.interval.low < back.ratio < back.interval.high
    assert (swapped(back).one, swapped(back).outcome) == (pair.one, pair.outcome)


def test_the_page_has_every_variant_every_claim_and_the_three_versions() -> None:
    report = report_of(FAMILY)
    page = markdown(report.model_copy(update={"verdict": answer(report), "notes": ("one seed",)}), ["speedup"])
    for one in report.variants:
        assert f"| {one.variant.title} |" in page
    for claim in report.claims:
        assert claim.aspect in page
    assert "| Training | story | required (hours) |" in page
    assert "![speedup](plots/speedup.svg)" in page
    assert "- one seed" in page


def test_every_figure_is_drawn_as_png_and_svg(tmp_path: Path) -> None:
    paths = draw(report_of(FAMILY), tmp_path)
    assert {path.name for path in paths} == {f"{name}.{kind}" for kind in ("png", "svg") for name in (
        "speedup", "acceptance", "round-cost", "concurrency")}
