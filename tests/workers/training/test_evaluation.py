"""Accuracy, conditional acceptance and the theoretical speed-up, against counting by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyrie_workers.training.evaluation import Evaluation, HitCounts, evaluate
from eyrie_workers.training.objective import Outcome
from tests.workers.drafters.test_eagle3_proposer import random_documents, random_drafter
from tests.workers.training.test_objective import objective

HITS = st.lists(st.lists(st.booleans(), min_size=1, max_size=5), min_size=1, max_size=12)


@given(roots=HITS)
def test_counts_follow_each_root_until_its_first_miss(roots: list[list[bool]]) -> None:
    roots = sorted(roots, key=len, reverse=True)
    per_step = [torch.tensor([hits[step] for hits in roots if len(hits) > step]) for step in range(5)]
    counts = HitCounts(5)
    counts.add(Outcome(torch.tensor(0.0), 0, tuple(hits for hits in per_step if hits.numel())))
    counted = counts.evaluation()
    for step in range(5):
        alive = [hits for hits in roots if len(hits) > step]
        right = [hits for hits in alive if all(hits[:step])]
        assert (counted.predicted[step], counted.hit[step], counted.hit_before[step], counted.hit_so_far[step]) == (
            len(alive), sum(hits[step] for hits in alive), len(right), sum(hits[step] for hits in right))


def test_theoretical_speedup_is_one_plus_the_sum_of_cumulative_acceptance() -> None:
    evaluation = Evaluation(predicted=(10, 10, 8), hit=(8, 5, 8), hit_before=(10, 8, 4), hit_so_far=(8, 4, 4), loss=0.0)
    assert evaluation.accuracy == (0.8, 0.5, 1.0)
    assert evaluation.acceptance == (0.8, 0.5, 1.0)
    assert abs(evaluation.theoretical_speedup - (1 + 0.8 + 0.4 + 0.4)) < 1e-12


def test_a_steps_confidences_are_calibrated_on_roots_that_came_to_it() -> None:
    generator, counts, roots = torch.Generator().manual_seed(2), HitCounts(3), 40_000
    logits = [3.0 * torch.randn(roots, generator=generator) for _ in range(2)]
    hits = [torch.rand(roots, generator=generator) < torch.sigmoid(logits[step] / temperature)
            for step, temperature in enumerate((2.0, 0.5))]
    hits[1] &= hits[0]  # of roots that missed before, none hits: they must not be counted
    for part in range(4):
        rows = slice(part * roots // 4, (part + 1) * roots // 4)
        counts.add(Outcome(torch.tensor(0.0), roots, tuple(of[rows] for of in hits), tuple(of[rows] for of in logits)))
    first, second, none = counts.evaluation().temperatures
    assert (first, second, none) == (pytest.approx(2.0, rel=0.06), pytest.approx(0.5, rel=0.06), 1.0)
    twice = counts.evaluation(lambda sums: 2 * sums)  # two processes
    assert twice.temperatures == (first, second, none)
    assert twice.hit == tuple(2 * hit for hit in counts.evaluation().hit)
    plain = HitCounts(3)
    plain.add(Outcome(torch.tensor(0.0), roots, tuple(hits)))
    assert plain.evaluation().temperatures == ()


def test_no_predictions_are_no_acceptance_and_no_speedup() -> None:
    evaluation = Evaluation((0, 0), (0, 0), (0, 0), (0, 0), 0.0)
    assert evaluation.acceptance == (0.0, 0.0)
    assert evaluation.theoretical_speedup == 1.0


def test_batches_add_up_to_the_whole() -> None:
    drafter = random_drafter()
    one, other = random_documents((14, 11)), random_documents((9,), seed=6)
    whole = evaluate(objective(drafter), [one, other])
    parts = [evaluate(objective(drafter), [part]) for part in (one, other)]
    for field in ("predicted", "hit", "hit_before", "hit_so_far"):
        assert getattr(whole, field) == tuple(
            a + b for a, b in zip(*(getattr(part, field) for part in parts), strict=True))
