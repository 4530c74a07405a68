"""Log probabilities are the target's own: those of its forward pass over the finished text, whatever drafts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eyrie_api.contract.engine import DraftTreeShape, SamplingSpec
from eyrie_api.errors import InvalidInput
from eyrie_workers.speculation.engine import Engine, Request
from eyrie_workers.speculation.verify import TokenLogprobs, emitted_logprobs
from eyrie_workers.targets.loading import load_target
from eyrie_workers.targets.model import TargetModel
from tests.tiny import tiny_target
from tests.workers.speculation.drafters import OracleDrafter, RandomDrafter

CHAIN = DraftTreeShape(num_steps=4, top_k=1, num_draft_tokens=5)
TREE = DraftTreeShape(num_steps=4, top_k=3, num_draft_tokens=14)
GREEDY = SamplingSpec(temperature=0.0)
SAMPLED = SamplingSpec(temperature=0.6, top_p=0.9, top_k=40)
Answer = tuple[list[int], list[TokenLogprobs]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return load_target(tiny_target(tmp_path_factory.mktemp("target") / "t", "qwen3", seed=5, initializer_range=0.15))


def requests(sampling: SamplingSpec, *, top_logprobs: int | None = 5, num_tokens: int = 20) -> list[Request]:
    generator = torch.Generator().manual_seed(2)
    return [Request(f"r{i}", torch.randint(3, 320, (length,), generator=generator).tolist(), num_tokens, sampling,
                    seed=100 + i, top_logprobs=top_logprobs) for i, length in enumerate((5, 23, 1, 60))]


def answers(engine: Engine, asked: Sequence[Request], tree: DraftTreeShape | None = None) -> list[Answer]:
    engine.tree = tree
    for request in asked:
        engine.submit(request)
    found: dict[str, Answer] = {request.id: ([], []) for request in asked}
    while engine.num_running or engine.num_waiting:
        for output in engine.step():
            found[output.id][0].extend(output.token_ids)
            found[output.id][1].extend(output.logprobs)
    return list(found.values())


def assert_equal_values(found: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    assert [[token for token, _ in one.top] for one in found] == [[token for token, _ in one.top] for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert [one.logprob, *(value for _, value in one.top)] == pytest.approx(
            [other.logprob, *(value for _, value in other.top)], abs=1e-4)


def teacher_forced(target: TargetModel, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """[T, V]: the log-softmax before each token of the answer, from one pass over prompt and answer."""
    [(_, last)] = target.hidden_states([torch.tensor([*prompt, *answer])], ())
    return target.logits(last[len(prompt) - 1:-1]).float().log_softmax(dim=-1)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_no_drafter_shape_or_batch_changes_a_log_probability(sampling: SamplingSpec, target: TargetModel) -> None:
    asked = requests(sampling)
    plain = answers(Engine(target), asked)
    assert all(len(tokens) == len(found) == 20 for tokens, found in plain)
    oracle = OracleDrafter(320, target=target)
    for drafter, shape, concurrency in ((RandomDrafter(320), CHAIN, 3), (RandomDrafter(320), TREE, 1),
                                        (oracle, CHAIN, 1), (oracle, TREE, 3)):
        engine = Engine(target, drafter, max_concurrency=concurrency)
        drafted = answers(engine, asked, shape)
        assert [tokens for tokens, _ in drafted] == [tokens for tokens, _ in plain]
        for (_, found), (_, expected) in zip(drafted, plain, strict=True):
            assert_equal_values(found, expected)
    assert engine.stats.rounds < 4 * 20  # of the oracle's trees: several tokens came from one pass


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_log_probabilities_are_those_of_the_targets_forward_pass_before_temperature(
        shape: DraftTreeShape | None, sampling: SamplingSpec, target: TargetModel) -> None:
    asked = requests(sampling)
    engine = Engine(target, OracleDrafter(320, target=target), max_concurrency=2)
    for request, (tokens, found) in zip(asked, answers(engine, asked, shape), strict=True):
        expected = teacher_forced(target, request.prompt_ids, tokens)
        own = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor([one.logprob for one in found]), own, atol=1e-4, rtol=0)
        values, ids = expected.topk(5)
        assert [[token for token, _ in one.top] for one in found] == ids.tolist()
        torch.testing.assert_close(torch.tensor([[value for _, value in one.top] for one in found]), values,
                                   atol=1e-4, rtol=0)
        if sampling == GREEDY:
            assert [one.top[0][0] for one in found] == tokens


def test_a_request_gets_its_own_number_of_alternatives_and_one_without_gets_none(target: TargetModel) -> None:
    asked = [replace(request, top_logprobs=top) for request, top in
             zip(requests(GREEDY), (None, 0, 3, 1000), strict=True)]
    engine = Engine(target, OracleDrafter(320, target=target), max_concurrency=4)
    (_, none), *others = answers(engine, asked, TREE)
    assert none == []
    for (tokens, found), most in zip(others, (0, 3, 320), strict=True):
        assert len(found) == len(tokens)
        assert {len(one.top) for one in found} == {most}


def test_tokens_dropped_after_a_stop_id_or_the_limit_have_no_entries(target: TargetModel) -> None:
    request = requests(GREEDY, num_tokens=40)[0]
    [(whole, values)] = answers(Engine(target), [request])
    stop = whole[11]
    cut = whole.index(stop) + 1
    for limited in (replace(request, stop_ids=(stop,)), replace(request, max_new_tokens=cut)):
        engine = Engine(target, OracleDrafter(320, target=target, spoil_every=0))
        [(tokens, found)] = answers(engine, [limited], CHAIN)
        assert tokens == whole[:cut]
        assert_equal_values(found, values[:cut])


def test_a_request_that_fails_keeps_the_entries_of_the_tokens_before(tmp_path: Path, target: TargetModel) -> None:
    request = requests(GREEDY)[0]
    [(whole, values)] = answers(Engine(target), [request])
    at = next(place for place, token in enumerate(whole)
              if place and token not in (*request.prompt_ids, *whole[:place]))
    damaged = load_target(tiny_target(tmp_path / "t", "qwen3", seed=5, initializer_range=0.15))
    damaged.embed_weight = damaged.embed_weight.clone()
    damaged.embed_weight[whole[at]] = torch.nan
    engine = Engine(damaged, OracleDrafter(320, target=target), tree=TREE)
    engine.submit(request)
    tokens: list[int] = []
    found: list[TokenLogprobs] = []
    errors = []
    while engine.num_running or engine.num_waiting:
        for output in engine.advance():
            tokens, found = tokens + output.token_ids, found + output.logprobs
            errors += [output.error] if output.error is not None else []
    assert len(errors) == 1
    assert 0 < len(tokens) <= at + 1
    assert tokens == whole[:len(tokens)]
    assert_equal_values(found, values[:len(tokens)])


def test_half_precision_logits_are_normalised_in_float32() -> None:
    logits = torch.randn(1, 2, 50, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    [[first]] = emitted_logprobs(logits, [[1, 0]], [[7]], [2])
    expected = logits[0, 1].float().log_softmax(-1)
    assert first.logprob == expected[7].item()
    assert first.top == tuple(zip(expected.topk(2).indices.tolist(), expected.topk(2).values.tolist(), strict=True))


def test_a_negative_number_of_alternatives_is_refused(target: TargetModel) -> None:
    with pytest.raises(InvalidInput, match="top_logprobs is -1"):
        Engine(target).submit(Request("x", [3], 1, top_logprobs=-1))
