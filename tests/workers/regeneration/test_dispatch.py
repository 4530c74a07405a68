"""Requests go where the least are in flight; an endpoint that fails is left alone, longer each time, and comes back."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyrie_api.contract.engine import SamplingSpec
from eyrie_api.contract.regeneration import RegenerateSpec
from eyrie_api.errors import Transient
from eyrie_workers.regeneration.answers import (
    AnswerRetokenizer,
    GeneratedAnswer,
    GenerationOutcome,
    GenerationRequest,
)
from eyrie_workers.regeneration.endpoint import GenerationEndpoint
from eyrie_workers.regeneration.online import FIRST_BACKOFF_S, MAX_BACKOFF_S, OnlineClient, RequestRoute, RequestRoutes
from eyrie_workers.targets.templates import ChatTokenizer
from tests.tiny import tiny_target
from tests.workers.regeneration.openai_double import Troubles, openai_double


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(1, 5))
def test_the_next_request_goes_to_an_endpoint_with_the_least_in_flight(endings: list[int], num: int) -> None:
    routes, open_ = RequestRoutes([f"http://{i}" for i in range(num)]), list[RequestRoute]()
    for ending in endings:
        if ending and open_:
            routes.answered(open_.pop(ending % len(open_)))
        else:
            least = min(route.in_flight for route in routes.all)
            open_.append(route := routes.take(0.0))
            assert route.in_flight == least + 1
    assert sum(route.in_flight for route in routes.all) == len(open_)


def test_an_endpoint_that_fails_rests_longer_each_time_and_one_request_tries_it() -> None:
    routes, now, rests = RequestRoutes(["a", "b"]), 0.0, []
    sick, well = routes.all
    for _ in range(9):
        while (route := routes.take(now)) is not sick:  # until its rest is over
            routes.answered(route)
            now = max(now, sick.unavailable_until)
        assert routes.take(now) is well  # while one tries it, nobody else does
        routes.answered(well)
        routes.failed(sick, now)
        rests.append(sick.unavailable_until - now)
    assert rests[:3] == [FIRST_BACKOFF_S, 2 * FIRST_BACKOFF_S, 4 * FIRST_BACKOFF_S]
    assert rests[-1] == MAX_BACKOFF_S
    assert routes.take(sick.unavailable_until) is sick
    routes.answered(sick)
    assert sick.failures == 0


def test_when_all_rest_the_one_whose_rest_ends_first_is_asked() -> None:
    routes = RequestRoutes(["a", "b"])
    for wish_s in (20.0, 10.0):
        routes.failed(routes.take(0.0), 0.0, wish_s)
    assert not routes.has_available(5.0)
    assert routes.take(5.0).url == "b"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(tiny_target(tmp_path_factory.mktemp("target")))


def asked(tokenizer: ChatTokenizer, urls: tuple[str, ...], num: int, **changes: float) -> list[GenerationOutcome]:
    prompts = []
    for i in range(num):
        messages = [{"role": "user", "content": f"What is {i}?"}]
        prompts.append(GenerationRequest(f"{i:032x}", messages, [], tokenizer.render(messages), seed=i))
    spec = RegenerateSpec.model_validate({"engine": "openai", "endpoints": urls, "sampling": SamplingSpec(),
                                          "max_new_tokens": 16, "max_retries": 3, "concurrency": 4} | changes)
    endpoint = GenerationEndpoint(spec, "tiny")
    engine = OnlineClient(endpoint, AnswerRetokenizer(tokenizer), lambda *_: None, first_delay_s=0.001)
    return list(engine.answers(iter(prompts), lambda: None))


def test_a_dead_endpoint_costs_no_row_and_the_living_share_the_rest(tokenizer: ChatTokenizer) -> None:
    with openai_double() as one, openai_double() as two, openai_double(Troubles(everything=503)) as sick:
        outcomes = asked(tokenizer, (sick.url, one.url, "http://127.0.0.1:1/v1", two.url), 40)
        assert len(one.bodies) + len(two.bodies) == 40
        assert min(len(one.bodies), len(two.bodies)) > 0
        assert len(sick.bodies) < 40
    assert sorted(outcome.row_id for outcome in outcomes) == [f"{i:032x}" for i in range(40)]
    assert all(isinstance(outcome, GeneratedAnswer) for outcome in outcomes)


def test_a_row_is_given_up_at_its_deadline(tokenizer: ChatTokenizer) -> None:
    gate = threading.Event()
    with openai_double(Troubles(gate=gate)) as service:
        with pytest.raises(Transient, match="no answer within regenerate"):
            asked(tokenizer, (service.url,), 1, deadline_s=0.2)
        gate.set()


def test_endpoints_are_named_once_and_only_for_the_engine_that_asks_many() -> None:
    spec = RegenerateSpec(engine="openai", base_url="http://a/v1/", endpoints=("http://b/v1", "http://a/v1"))
    assert spec.base_urls == ("http://a/v1", "http://b/v1")
    assert RegenerateSpec(engine="openai", endpoints=("http://b/v1",)).base_urls == ("http://b/v1",)
    with pytest.raises(ValueError, match=r"regenerate\.endpoints is for regenerate\.engine 'openai'"):
        RegenerateSpec(engine="openai-batch", endpoints=("http://b/v1",))


def test_the_ids_an_endpoint_cannot_give_are_checked_against_what_it_counted(tokenizer: ChatTokenizer) -> None:
    with openai_double() as service:
        service.troubles.completion_tokens = 3
        (answer,) = asked(tokenizer, (service.url,), 1)
        assert isinstance(answer, GeneratedAnswer)
        assert (answer.ids_exact, answer.ids_differ) == (False, len(answer.answer_ids) not in (3, 4))
        service.troubles.completion_tokens = len(answer.answer_ids)
        (answer,) = asked(tokenizer, (service.url,), 1)
    assert isinstance(answer, GeneratedAnswer)
    assert not answer.ids_differ


def test_sglang_gives_its_ids_where_it_is_asked_in_its_own_words(tokenizer: ChatTokenizer) -> None:
    with openai_double(Troubles(forbid_token_ids=True, know_sglext=True)) as service:
        outcomes = asked(tokenizer, (service.url,), 6)
    assert all(isinstance(outcome, GeneratedAnswer) and outcome.ids_exact for outcome in outcomes)
