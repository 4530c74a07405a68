"""Predictions against the thing itself: the replay of a shape is what that shape does when it decodes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie_api.contract.engine import DraftServing, DraftTreeShape, SamplingSpec
from eyrie_api.contract.tuning import OFF, DraftTime, Setting, StepTime
from eyrie_workers.drafters.family import open_drafter
from eyrie_workers.drafters.ngram import NgramDrafter
from eyrie_workers.measure.tuner.predict import (
    NEVER,
    Costs,
    ReplayedRounds,
    distribution_of_largest,
    locate,
    needed_taus,
    predict,
    replay,
    undrafted,
)
from eyrie_workers.measure.tuner.profile import KnownAnswer, trace, whole_tree
from eyrie_workers.speculation.engine import Engine, Request
from eyrie_workers.speculation.protocol import DraftStep, DraftTree
from eyrie_workers.speculation.tree import build_draft_tree
from eyrie_workers.speculation.verify import accept_path
from eyrie_workers.targets.loading import load_target
from tests.tiny import tiny_target
from tests.workers.measure.tiny_bench import random_drafter

DEPTH, VOCAB = 4, 6
SHAPES = st.builds(
    lambda steps, width, share: DraftTreeShape(
        num_steps=steps, top_k=width, num_draft_tokens=steps + 1 if width == 1 else round(
            steps + 1 + share * (width + (steps - 1) * width**2 - steps))),
    st.integers(1, DEPTH), st.integers(1, 4), st.floats(0.0, 1.0))


def grown(seed: int, shape: DraftTreeShape) -> DraftTree:
    """A tree whose confidences depend on the path alone, as a drafter's do."""
    def logits(paths: list[tuple[int, ...]]) -> torch.Tensor:
        rows = [torch.randn(VOCAB, generator=torch.Generator().manual_seed(hash((seed, *path)) % 2**31))
                for path in paths]
        return torch.stack(rows)[None]

    def step(tokens: torch.Tensor, hidden: torch.Tensor, mask: torch.Tensor, depth: int) -> DraftStep:
        paths = [(*(int(t) for t in hidden[0, i, :depth - 1]), int(tokens[0, i])) for i in range(tokens.shape[1])]
        state = torch.zeros(1, len(paths), DEPTH)
        for i, path in enumerate(paths):
            state[0, i, :len(path)] = torch.tensor(path)
        return DraftStep(logits(paths), state)

    return build_draft_tree(DraftStep(logits([()]), torch.zeros(1, 1, DEPTH)), step, shape)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10_000), shape=SHAPES, text=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6))
def test_a_whole_tree_tells_what_every_shape_of_its_width_accepts(seed: int, shape: DraftTreeShape,
                                                                  text: list[int]) -> None:
    whole, own = grown(seed, whole_tree(DEPTH, shape.top_k)), grown(seed, shape)
    following = np.array([[*text, *[-1] * DEPTH][:DEPTH]])
    located = locate(whole.tokens.numpy(), whole.parents.numpy(), whole.scores.double().numpy(), following, DEPTH)
    held = int((located.needed[0, shape.num_steps - 1] <= shape.num_draft_tokens).sum())
    # What verification would accept if the target went on with `text`.
    depths = [0]
    for parent in own.parents[0, 1:].tolist():
        depths.append(depths[parent] + 1)
    choices = [text[depth] if depth < len(text) else -7 for depth in depths]
    assert held == len(accept_path(own.tokens[0].tolist(), own.parents[0].tolist(), choices).nodes) - 1
    assert located.filled[0, shape.num_steps - 1] >= shape.num_draft_tokens


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), width=st.integers(1, 4), steps=st.integers(1, DEPTH - 1),
       text=st.lists(st.integers(0, VOCAB - 1), min_size=DEPTH, max_size=DEPTH))
def test_more_nodes_and_more_depth_never_hold_less(seed: int, width: int, steps: int, text: list[int]) -> None:
    whole = grown(seed, whole_tree(DEPTH, width))
    needed = locate(whole.tokens.numpy(), whole.parents.numpy(), whole.scores.double().numpy(), np.array([text]),
                    DEPTH).needed[0]
    for of_depth in needed:  # a node stays only if those above it do
        assert (np.diff(of_depth) >= 0).all()
    most = whole.tokens.shape[1]
    assert (needed[steps] <= most).sum() >= (needed[steps - 1] <= most).sum()
    assert (needed[steps - 1][steps:] == NEVER).all()


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Engine, list[Request], list[KnownAnswer]]:
    """Two engines over one target, with a drafter and with look-up, and its answers."""
    root: Path = tmp_path_factory.mktemp("predict")
    path = tiny_target(root / "target", "llama", seed=5, initializer_range=0.05)  # it repeats itself
    target = load_target(path)
    generator = torch.Generator().manual_seed(3)
    asked = [Request(f"r{i}", torch.randint(3, 12, (length,), generator=generator).tolist(), 30 + i,
                     SamplingSpec(temperature=0.0 if i < 3 else 0.7), seed=7 + i)
             for i, length in enumerate((30, 3, 40, 9, 25))]
    texts = [answer.token_ids for answer in Engine(target, max_concurrency=5).generate(asked)]
    answers = [KnownAnswer(tuple(r.prompt_ids), tuple(text), r.sampling.temperature, r.seed)
               for r, text in zip(asked, texts, strict=True)]
    drafter = open_drafter(random_drafter(root / "drafter", path), target)
    return (Engine(target, drafter, max_concurrency=2), Engine(target, NgramDrafter(), max_concurrency=2), asked,
            answers)


@pytest.mark.parametrize("engine", [0, 1], ids=["trained family", "look-up"])
def test_the_replay_of_a_shape_is_what_the_engine_does_in_that_shape(
        engine: int, answered: tuple[Engine, Engine, list[Request], list[KnownAnswer]]) -> None:
    decoding, asked, answers = answered[engine], answered[2], answered[3]
    drafter = decoding.drafter
    assert drafter is not None
    traces = trace(decoding.target, drafter, answers, 5, (1, 3), lambda: None, rows_at_once=2)
    accepted = 0
    for steps, width, nodes in ((1, 1, 2), (3, 1, 4), (5, 1, 6), (3, 3, 5), (5, 3, 12), (2, 3, 12)):
        shape = DraftTreeShape(num_steps=steps, top_k=width, num_draft_tokens=nodes)
        for request, done, one in zip(asked, decoding.generate(asked, shape), traces[width], strict=True):
            replayed = replay(one, shape)
            assert replayed.histogram[: len(done.accepted_histogram)] == tuple(done.accepted_histogram), request.id
            assert replayed.rounds == done.rounds
            accepted += len(done.token_ids) - 1 - done.rounds
    assert accepted > 10  # the drafts were taken often enough to distinguish the two


@given(st.dictionaries(st.integers(1, 9), st.integers(1, 20), min_size=1), st.integers(1, 16))
def test_the_largest_of_more_rows_is_no_smaller(passes: dict[int, int], rows: int) -> None:
    def mean(num: int) -> float:
        return sum(nodes * share for nodes, share in distribution_of_largest(passes, num).items())

    assert sum(distribution_of_largest(passes, rows).values()) == pytest.approx(1.0)
    assert mean(1) == pytest.approx(sum(n * c for n, c in passes.items()) / sum(passes.values()))
    assert mean(rows) <= mean(rows + 1) + 1e-9


def setting(steps: int, width: int = 1, nodes: int = 0) -> Setting:
    return Setting(tree=DraftTreeShape(num_steps=steps, top_k=width, num_draft_tokens=nodes or steps + 1))


def costs() -> Costs:
    """A pass costs 10 ms and 1 ms per node and row; a step of drafting 2 ms."""
    def verify(rows: int, nodes: int, tree: bool = False) -> StepTime:
        return StepTime(concurrency=rows, temperature=0.0, verified_tokens=nodes, tree=tree, rounds=9,
                        verify_s=0.01 + 0.001 * rows * nodes + (0.002 if tree else 0.0))

    def draft(rows: int, steps: int) -> DraftTime:
        return DraftTime(concurrency=rows, temperature=0.0, setting=setting(steps), draft_s=0.002 * steps, rounds=9)

    return Costs([verify(rows, nodes) for rows in (1, 8) for nodes in (1, 3, 9)] + [verify(1, 16, True)],
                 [draft(rows, steps) for rows in (1, 8) for steps in (2, 8)], {"off": 0.02, "drafter": 0.03})


def test_costs_are_read_off_the_lines_between_measurements() -> None:
    measured = costs()
    assert measured.verify_s(1, 0.0, 6, False) == pytest.approx(0.016)
    assert measured.verify_s(4, 0.0, 1, False) == pytest.approx(0.014)  # between concurrencies
    assert measured.verify_s(1, 0.0, 16, True) == pytest.approx(0.028)  # branching has its own curve
    assert measured.draft_s(1, 0.0, setting(5)) == pytest.approx(0.010)
    assert measured.draft_s(1, 0.0, OFF) == 0.0


def test_a_setting_that_waits_for_step_rates_has_the_slowest_steps_of_as_many_tokens_or_fewer() -> None:
    waiting = Setting(tree=DraftTreeShape(num_steps=3, num_draft_tokens=4, draft=DraftServing(step_rates=())))

    def seconds(of: Costs) -> dict[int, float]:
        filled = of.with_step_rates(waiting)
        assert filled.label() == waiting.label() == "3/1/4/by-confidence"
        assert of.with_step_rates(filled) == filled
        assert filled.tree is not None
        return {rate.batch_tokens: 1.0 / rate.steps_per_s for rate in filled.tree.draft.step_rates or ()}

    measured = costs()
    hot, two = (StepTime(concurrency=2, temperature=temperature, verified_tokens=1, verify_s=0.03, rounds=9)
                for temperature in (1.0, 0.0))
    assert seconds(measured) == pytest.approx(
        {1: 0.017, 2: 0.018, 3: 0.019, 4: 0.02, 8: 0.024, 16: 0.032, 24: 0.04, 32: 0.048})
    assert seconds(replace(measured, step_times=[*measured.step_times, hot, two])) == pytest.approx(
        {1: 0.017, 2: 0.036, 3: 0.036, 4: 0.036, 6: 0.036, 8: 0.036, 16: 0.036, 24: 0.04, 32: 0.048})
    assert measured.with_step_rates(setting(3)) == setting(3)


def test_speculation_pays_alone_and_stops_paying_under_load() -> None:
    done = {OFF: {0.0: undrafted([61])},
            setting(4): {0.0: ReplayedRounds(tokens=61, requests=1, histogram=(10, 0, 10, 0, 10), passes={5: 30})}}
    alone, crowded = (predict(done, rows, costs(), OFF) for rows in (1, 8))
    # 0.03 s of prompt, then 30 rounds of 15 ms and 8 ms, against 0.02 s and 60 passes of 11 ms.
    assert alone[setting(4)].speedup == pytest.approx((0.02 + 60 * 0.011) / (0.03 + 30 * 0.023))
    assert alone[setting(4)].tau == pytest.approx(3.0)
    assert alone[OFF].speedup == crowded[OFF].speedup == 1.0
    assert crowded[setting(4)].speedup < alone[setting(4)].speedup


@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("bound", [1.0, 1.05, 1.3])
def test_a_chain_with_the_tau_that_it_needs_is_predicted_as_fast_as_asked_for(rows: int, bound: float) -> None:
    done = {OFF: {0.0: undrafted([121])}, setting(4): {0.0: ReplayedRounds(
        tokens=121, requests=1, histogram=(120,), passes={5: 120})}}
    (needed,) = needed_taus(done, [rows], costs(), OFF, bound)
    assert (needed.users, needed.num_steps) == (rows, 4)
    assert needed.tau is not None
    rounds = round(120 / needed.tau)  # of so few rounds tau is a fraction
    drafted = ReplayedRounds(tokens=121, requests=1, histogram=(rounds,), passes={5: rounds})
    speedup = predict({OFF: done[OFF], setting(4): {0.0: drafted}}, rows, costs(), OFF)[setting(4)].speedup
    assert speedup == pytest.approx(bound, rel=0.02)


def test_no_tau_is_enough_for_an_impossible_bound_and_a_depth_has_one_row_and_trees_and_look_up_none() -> None:
    drawn = DraftTreeShape(num_steps=2, num_draft_tokens=3, verification="rejection")
    done = {each: {0.0: undrafted([121])} for each in (
        OFF, setting(8), setting(2), Setting(tree=drawn), setting(4, 4, 8),
        Setting(method="ngram", tree=setting(3).tree))}
    needed = needed_taus(done, [1, 8], costs(), OFF, 2.2)
    assert [(row.users, row.num_steps) for row in needed] == [(1, 2), (1, 8), (8, 2), (8, 8)]
    assert [row.tau is None for row in needed] == [True, False, True, True]
    assert needed_taus({OFF: {0.0: undrafted([1])}, setting(2): {0.0: undrafted([1])}}, [1], costs(), OFF, 1.05) == ()
