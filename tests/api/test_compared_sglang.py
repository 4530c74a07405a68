"""Compared answers where SGLang serves: the answer without the drafter, from another revision or from the proof."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from eyrie_api.database.engine import Database
from eyrie_api.http.compared_answers import RunSoFar, are_equal
from eyrie_api.settings import Settings
from tests.api.conftest import serving
from tests.api.sglang_endpoint import PROMPT, Engines, add_sglang_endpoint, two_engines
from tests.api.test_compared_answers import events

DATABASES = ("sqlite",)  # the rows that are read, of endpoints and jobs, are tested on both elsewhere
BODY = {"prompt": PROMPT, "max_tokens": 32}
PROMPTS = "/v1alpha1/endpoints/default/recorded-prompts"
GONE = "http://127.0.0.1:1/v1"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with two_engines(tmp_path_factory.mktemp("engines")) as found:
        yield found


def compared(settings: Settings, database: Database, body: dict[str, Any] = BODY) -> list[tuple[str, dict[str, Any]]]:
    with serving(settings, database) as server:
        url = f"{server.url}/v1alpha1/endpoints/default/compare"
        return events(httpx.post(url, json=body, timeout=120, trust_env=False))


def runs(found: list[tuple[str, dict[str, Any]]], run: str) -> list[dict[str, Any]]:
    return [event for name, event in found if name == "progress" and event["run"] == run]


def test_during_a_canary_the_revision_without_a_drafter_answers_the_other_side(
        settings: Settings, database: Database, engines: Engines) -> None:
    engines.route(canary=True)
    add_sglang_endpoint(settings, database, engines.url, None, canary=True)
    found = compared(settings, database)
    assert found[-1] == ("end", {"equal": True})
    assert {name for name, _ in found[:-1]} == {"progress"}
    assert {event["revision"] for event in runs(found, "drafted")} == {2}, "whatever the canary's share"
    assert {event["revision"] for event in runs(found, "undrafted")} == {1}
    chunks = {run: [one["num_tokens"] for event in runs(found, run) for one in event["rounds"]]
              for run in ("drafted", "undrafted")}
    assert max(chunks["drafted"]) > 1
    assert max(chunks["undrafted"]) == 1
    texts = {run: "".join(one["text"] for event in runs(found, run) for one in event["rounds"]) for run in chunks}
    assert texts["drafted"] == texts["undrafted"] == engines.answer(PROMPT, 32).text


def test_on_a_cluster_each_revision_of_a_canary_is_asked_at_its_own_address(
        settings: Settings, database: Database, engines: Engines) -> None:
    urls = {1: f"{engines.plain_url}/v1", 2: f"{engines.drafting_url}/v1"}
    add_sglang_endpoint(settings, database, GONE, None, canary=True, urls=urls)
    found = compared(settings, database)
    assert found[-1] == ("end", {"equal": True})
    assert {event["revision"] for event in runs(found, "drafted")} == {2}
    assert {event["revision"] for event in runs(found, "undrafted")} == {1}
    assert max(one["num_tokens"] for event in runs(found, "drafted") for one in event["rounds"]) > 1
    assert max(one["num_tokens"] for event in runs(found, "undrafted") for one in event["rounds"]) == 1


def test_where_the_drafter_alone_serves_the_answer_that_the_proof_recorded_is_returned_and_compared(
        settings: Settings, database: Database, engines: Engines) -> None:
    engines.route(canary=False)
    recorded = engines.answer(PROMPT, 24)
    job = add_sglang_endpoint(settings, database, engines.url, (recorded,))
    found = compared(settings, database)
    assert [event for name, event in found if name == "recorded"] == [{
        "run": "undrafted", "job_id": job, "text": recorded.text, "num_tokens": 24, "is_cut": True,
        "tokens_per_s": pytest.approx(10.0)}]
    assert runs(found, "undrafted") == []
    assert runs(found, "drafted")[-1]["num_tokens"] > 24, "the recorded answer was cut earlier"
    assert found[-1] == ("end", {"equal": True})


def test_a_recorded_answer_that_differs_is_said_to_differ(
        settings: Settings, database: Database, engines: Engines) -> None:
    engines.route(canary=False)
    other = engines.answer(PROMPT, 24).model_copy(update={"text": "Something else."})
    add_sglang_endpoint(settings, database, engines.url, (other,))
    assert compared(settings, database)[-1] == ("end", {"equal": False})


def test_an_address_that_does_not_name_the_revision_is_not_taken_for_the_one_without_a_drafter(
        settings: Settings, database: Database, engines: Engines) -> None:
    recorded = engines.answer(PROMPT, 24)
    add_sglang_endpoint(settings, database, f"{engines.drafting_url}/v1", (recorded,), canary=True)
    found = compared(settings, database)
    assert [event["text"] for name, event in found if name == "recorded"] == [recorded.text]
    assert runs(found, "undrafted") == []


def test_for_another_prompt_the_reason_is_given_with_prompts_that_were_recorded(
        settings: Settings, database: Database, engines: Engines) -> None:
    engines.route(canary=False)
    recorded = engines.answer(PROMPT, 8)
    asked = tuple(recorded.model_copy(update={"prompt": f"{number}: {'why ' * 30}"}) for number in range(5))
    job = add_sglang_endpoint(settings, database, engines.url, asked)
    found = compared(settings, database)
    (why,) = [event for name, event in found if name == "unavailable"]
    assert why["run"] == "undrafted"
    assert "the proof recorded no answer to this prompt" in why["message"]
    assert "lists all 5" in why["hint"]
    assert '"0: why why' in why["hint"]
    assert '"3: why' not in why["hint"]
    assert found[-1] == ("end", {"equal": None})
    with serving(settings, database) as server:
        listed = httpx.get(server.url + PROMPTS, trust_env=False).json()
    assert listed == {"job_id": job, "prompts": [one.prompt for one in asked]}


@pytest.mark.parametrize("kept", ["no file", "another engine's"])
def test_a_proof_without_answers_of_the_serving_engine_offers_no_prompts(
        kept: str, settings: Settings, database: Database) -> None:
    if kept == "no file":
        add_sglang_endpoint(settings, database, GONE, None)
    else:
        add_sglang_endpoint(settings, database, GONE, (), engine="embedded")
    with serving(settings, database) as server:
        listed = httpx.get(server.url + PROMPTS, trust_env=False).json()
    assert listed == {"job_id": None, "prompts": []}
    (why,) = [event for name, event in compared(settings, database) if name == "unavailable"]
    assert "this version has proven" in why["hint"]


@pytest.mark.parametrize(("drafted", "undrafted", "is_cut", "equal"), [
    ("one two", "one two", False, True), ("one two three", "one two", True, True), ("one two", "one two", True, True),
    ("one two three", "one two", False, False), ("one", "one two", True, False), ("one tvo", "one two", True, False),
    ("caf\u00e9 au", "caf\ufffd", True, True)])
def test_texts_are_equal_up_to_the_shorter_one_where_it_was_cut(
        drafted: str, undrafted: str, is_cut: bool, equal: bool) -> None:
    assert are_equal(RunSoFar("drafted", traced=False, text=drafted),
                     RunSoFar("undrafted", traced=False, text=undrafted, is_cut=is_cut)) is equal
