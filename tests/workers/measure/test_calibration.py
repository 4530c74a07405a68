"""Which nodes were right, and what their confidences say of it."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.calibration.measure import Proposal, calibrate, curve, evaluate, measure, wilson
from benchmarks.calibration.plot import draw
from eyrie_api.contract.engine import DraftTreeShape, SamplingSpec
from eyrie_api.errors import InvalidInput
from eyrie_workers.drafters.ngram import NgramDrafter
from eyrie_workers.speculation.engine import Engine, Request
from eyrie_workers.targets.loading import load_target
from eyrie_workers.targets.model import TargetModel
from tests.tiny import tiny_target
from tests.workers.speculation.drafters import OracleDrafter, RandomDrafter

SHAPE = DraftTreeShape(num_steps=3, top_k=2, num_draft_tokens=9)


def test_a_node_is_accepted_when_its_whole_path_is_how_the_text_went_on() -> None:
    #            root -> 5 -> 6 -> 9,  5 -> 7,  root -> 8 -> 6
    log = math.log
    proposal = Proposal(1, (-1, 5, 8, 6, 7, 6, 9), (0, 0, 0, 1, 1, 2, 3),
                        (0.0, log(.6), log(.2), log(.3), log(.06), log(.1), log(.15)))
    nodes = evaluate(proposal, [3, 4, 5, 6, 1])
    assert [node.accepted for node in nodes] == [True, False, True, False, False, False]
    assert [node.parent_accepted for node in nodes] == [True, True, True, True, False, True]
    assert [node.rank for node in nodes] == [0, 1, 0, 1, 0, 0]
    assert [round(node.step, 3) for node in nodes] == [.6, .2, .5, .1, .5, .5]
    assert len(evaluate(proposal, [3, 4, 5])) == 2  # of what comes after the end nobody knows


def test_empty_nodes_are_not_judged() -> None:
    assert evaluate(Proposal(0, (-1, -1), (0, 0), (0.0, -math.inf)), [1, 2, 3]) == []


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60))
def test_every_outcome_is_in_the_bin_of_its_confidence(outcomes: list[tuple[float, bool]]) -> None:
    found = curve(outcomes)
    assert found.count == len(outcomes)
    assert sum(one.accepted for one in found.bins) == sum(right for _, right in outcomes)
    for one in found.bins:
        if one.count:
            assert one.low - 1e-9 <= one.confidence <= one.high + 1e-9
            assert one.accepted_low - 1e-9 <= one.share <= one.accepted_high + 1e-9
    assert 0 <= found.error <= 1


def test_a_calibrated_drafter_has_no_error_and_an_overconfident_one_the_excess() -> None:
    honest = [(0.25, number % 4 == 0) for number in range(400)]
    assert curve(honest).error == pytest.approx(0.0)
    assert curve([(0.95, right) for _, right in honest]).error == pytest.approx(0.7)
    hopeless = [(0.01, False)] * 3600
    assert curve([*honest, *hopeless]).error_likely == pytest.approx(0.0)
    assert curve([(0.95, right) for _, right in honest] + hopeless).error == pytest.approx(0.07 + 0.009)


def test_the_interval_of_a_share_is_wilsons() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)  # Newcombe, Stat. Med. 17 (1998)
    assert wilson(0, 20)[0] == 0.0


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return load_target(tiny_target(tmp_path_factory.mktemp("target") / "tiny", seed=5, num_layers=2,
                                   initializer_range=0.15))


def asked(temperature: float) -> list[Request]:
    return [Request(str(i), [5 + i, 9, 30 - i], 12, SamplingSpec(temperature=temperature), seed=i) for i in range(3)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_nodes_accepted_are_the_draft_tokens_the_engine_accepted(temperature: float, target: TargetModel) -> None:
    drafter = OracleDrafter(320, target=target, spoil_every=3)
    nodes, rounds, tokens = measure(target, drafter, asked(temperature), SHAPE)
    unwatched = Engine(target, OracleDrafter(320, target=target, spoil_every=3))
    answers = [unwatched.generate([one], SHAPE)[0] for one in asked(temperature)]
    histograms = [answer.accepted_histogram for answer in answers]
    assert tokens == sum(len(answer.token_ids) for answer in answers)
    assert rounds == sum(sum(histogram) for histogram in histograms)
    # Where the answer ends within a round, accepted nodes may lie beyond what was emitted.
    emitted = sum(length * count for histogram in histograms for length, count in enumerate(histogram))
    assert 0 <= sum(node.accepted for node in nodes) - emitted <= len(answers)


def test_a_report_is_drawn(tmp_path: Path, target: TargetModel) -> None:
    report = calibrate(target, OracleDrafter(320, target=target), asked(0.0), SHAPE, ("tiny", "oracle"), 0.0)
    assert report.path.count > report.step.count > 0
    best, second = report.by_rank[:2]
    assert best.accepted / best.count > second.accepted / second.count
    paths = draw(report, tmp_path)
    assert [path.name for path in paths] == ["calibration.png", "calibration.svg"]
    assert "share accepted" in paths[1].read_text()
    guesses = calibrate(target, RandomDrafter(320), asked(0.0), SHAPE, ("tiny", "random"), 0.0)
    assert guesses.by_rank[0].accepted / guesses.by_rank[0].count < best.accepted / best.count


def test_a_drafter_that_proposes_nothing_is_refused(target: TargetModel) -> None:
    with pytest.raises(InvalidInput, match="proposed nothing"):
        measure(target, NgramDrafter(), [Request("a", [7], 1)], SHAPE)
