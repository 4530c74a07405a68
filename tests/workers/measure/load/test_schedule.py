"""The order of a load test: levels, blocks, prompts and arrivals as a function of the spec."""

import pytest

from eyrie_api.contract.load import LoadSpec
from eyrie_workers.data.suites import Prompt
from eyrie_workers.measure.load.client import LoadRequest
from eyrie_workers.measure.load.schedule import (
    RequestLevel,
    arrivals,
    blocks,
    draw_prompts,
    levels,
    num_requests,
    total_requests,
)
from tests.workers.measure.load.servers import prompts


def test_levels_are_ascending_and_unique() -> None:
    spec = LoadSpec(concurrencies=(4, 1, 4), rates_per_s=(2.5, 0.5))
    assert [level.label() for level in levels(spec)] == ["1 user", "4 users", "0.5 requests/s", "2.5 requests/s"]


def test_the_order_of_the_variants_turns_round_from_block_to_block() -> None:
    spec = LoadSpec(concurrencies=(1, 2), repeats=3, requests=4)
    order = [block.variant for repeat in blocks(prompts(4), ["a", "b"], spec) for block in repeat]
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a", "a", "b", "b", "a"]


def test_all_variants_receive_the_same_requests_and_the_next_repeat_continues() -> None:
    spec = LoadSpec(concurrencies=(1,), repeats=2, requests=4)
    (first, second), (third, _) = blocks(prompts(8), ["a", "b"], spec)
    assert first.requests == second.requests
    assert [request.prompt.id for request in first.requests] == ["p0", "p1", "p2", "p3"]
    assert [request.prompt.id for request in third.requests] == ["p4", "p5", "p6", "p7"]


def test_prompts_are_drawn_from_the_categories_in_turn_however_many_each_has() -> None:
    mixed = [Prompt(f"{category}{i}", category, ()) for category, num in (("a", 1), ("b", 3)) for i in range(num)]
    assert [prompt.id for prompt in draw_prompts(mixed, 0, 7)] == ["a0", "b0", "a0", "b1", "a0", "b2", "a0"]


def test_warm_up_draws_from_the_end_and_runs_before_the_first_repeat_only() -> None:
    spec = LoadSpec(concurrencies=(1,), repeats=2, requests=2, warmup_requests=2)
    warmed = [[request.prompt.id for request in block.warmup] for (block,) in blocks(prompts(8), ["a"], spec)]
    assert warmed == [["p6", "p7"], []]


def test_every_one_of_several_users_sends_at_least_two_requests_and_a_single_user_one() -> None:
    assert num_requests(LoadSpec(requests=1), RequestLevel("closed", 1.0)) == 1
    assert num_requests(LoadSpec(requests=1), RequestLevel("closed", 2.0)) == 4
    spec = LoadSpec(concurrencies=(64,), rates_per_s=(64.0,), requests=10, warmup_requests=0)
    assert [num_requests(spec, level) for level in levels(spec)] == [128, 10]
    assert total_requests(2, spec) == 2 * 138


def test_arrivals_are_a_poisson_process_fixed_by_the_seed() -> None:
    level = RequestLevel("open", 4.0)
    times = arrivals(LoadSpec(), level, 0, 20_000)
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] == pytest.approx(5_000, rel=0.03)  # the standard error of the sum is 0.7 %
    assert times == arrivals(LoadSpec(), level, 0, 20_000)
    assert times != arrivals(LoadSpec(seed=1), level, 0, 20_000)
    assert times != arrivals(LoadSpec(), level, 1, 20_000)


def test_another_system_prompt_replaces_the_prompts_own() -> None:
    messages = ({"role": "system", "content": "old"}, {"role": "user", "content": "hello"})
    request = LoadRequest(Prompt("p", "a", messages), 0, 0)
    assert request.prompt.messages_with(None) == list(messages)
    assert request.prompt.messages_with("new") == [
        {"role": "system", "content": "new"}, {"role": "user", "content": "hello"}]


def test_a_request_has_the_same_seed_in_every_variant_and_another_in_the_next_repeat() -> None:
    prompt = prompts(1)[0]
    first, again = (LoadRequest(prompt, 0, 3).seed(LoadSpec()) for _ in range(2))
    assert first == again
    assert first != LoadRequest(prompt, 1, 3).seed(LoadSpec())
    assert 0 <= first < 2**31
