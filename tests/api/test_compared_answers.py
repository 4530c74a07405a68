"""Answers compared through the control plane: real requests to a real engine behind a real gateway."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from eyrie_api.access.roles import Principal
from eyrie_api.access.scope import Scope
from eyrie_api.contract.access import CreateProject, Role
from eyrie_api.contract.engine import DraftTreeShape, EngineSpec
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.tuning import DrafterUse, Setting
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.projects import ApiKeys, Projects
from eyrie_api.errors import InvalidInput
from eyrie_api.http.compared_answers import RunSoFar
from eyrie_api.settings import Settings
from eyrie_workers.engines.process import EngineCommand, start_engine
from tests.api.conftest import serving
from tests.workers.engines.request_fields import Served, behind_gateway

DATABASES = ("sqlite",)  # the rows that are read, of endpoints and jobs, are tested on both elsewhere
TREE = DraftTreeShape(num_steps=4, top_k=2, num_draft_tokens=8)
COMPARE = "/v1alpha1/endpoints/default/compare"
BODY = {"prompt": "Explain electricity in three sentences.", "max_tokens": 48}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    engine = start_engine(EngineCommand(target="quickstart", model="quickstart", threads=1, max_concurrency=2,
                                        use=DrafterUse(setting=Setting(method="ngram", tree=TREE))),
                          tmp_path_factory.mktemp("engine"))
    try:
        with behind_gateway(engine.wait_ready(120), "quickstart", tmp_path_factory.mktemp("gateway")) as found:
            yield found
    finally:
        engine.stop()


def add_endpoint(database: Database, url: str | None, name: str = "default", **serve: Any) -> Endpoints:
    endpoints = Endpoints(database)
    endpoints.create(name, TargetSpec(model="quickstart"), EndpointServeSpec(**serve), "quickstart")
    if url is not None:
        endpoints.activate(name, 1, url)
    return endpoints


def events(answer: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for message in answer.text.split("\n\n")[:-1]:
        name, data = message.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def asked(settings: Settings, database: Database, body: dict[str, Any] = BODY) -> httpx.Response:
    with serving(settings, database) as server:
        return httpx.post(server.url + COMPARE, json=body, timeout=120, trust_env=False)


def test_both_answers_are_equal_and_their_rounds_compose_them(
        settings: Settings, database: Database, served: Served) -> None:
    add_endpoint(database, f"{str(served.client.base_url).rstrip('/')}/v1")
    found = events(asked(settings, database))
    assert found[-1] == ("end", {"equal": True})
    assert {name for name, _ in found[:-1]} == {"progress"}
    alone = served.asked(messages=[{"role": "user", "content": BODY["prompt"]}], max_tokens=48)
    nodes = {}
    for run in ("drafted", "undrafted"):
        mine = [event for _, event in found[:-1] if event["run"] == run]
        rounds = [one for event in mine for one in event["rounds"]]
        tokens = [token for one in rounds for token in one["tokens"]]
        assert "".join(token["token"] for token in tokens) == alone["choices"][0]["message"]["content"]
        last = mine[-1]
        assert last["num_tokens"] == len(tokens) == alone["usage"]["completion_tokens"]
        assert last["num_rounds"] == len(rounds) - 1
        assert last["tau"] == pytest.approx((len(tokens) - 1) / (len(rounds) - 1))
        assert last["tokens_per_s"] > 0
        assert last["revision"] == 1
        nodes[run] = [len(one["nodes"]) for one in rounds[1:]]
        assert sum(token["drafted"] for token in tokens) == sum(
            node["accepted"] for one in rounds for node in one["nodes"])
    assert max(nodes["drafted"]) > 1
    assert set(nodes["undrafted"]) == {1}, "the drafter was left out"


@pytest.mark.parametrize(("body", "field"), [
    ({"prompt": ""}, "/prompt"), ({"prompt": "x", "max_tokens": 0}, "/max_tokens"), ({}, "/prompt"),
    ({"prompt": "x", "temperature": 1}, "/temperature")])
def test_a_request_that_is_wrong_is_refused_by_field(
        body: dict[str, Any], field: str, settings: Settings, database: Database) -> None:
    add_endpoint(database, "http://127.0.0.1:1/v1")
    answer = asked(settings, database, body)
    assert answer.status_code == 422
    assert field in answer.text


def test_an_endpoint_that_is_off_or_not_there_yet_says_what_to_do(settings: Settings, database: Database) -> None:
    endpoints = add_endpoint(database, None)
    early = asked(settings, database)
    assert (early.status_code, early.json()["hint"]) == (409, "eyrie endpoints shows its conditions")
    endpoints.set_desired("default", "off")
    off = asked(settings, database)
    assert (off.status_code, off.json()["hint"]) == (409, "eyrie endpoints on default")


@pytest.mark.parametrize(("role", "project", "status"), [
    ("viewer", "team", 403), ("operator", "team", 200), ("admin", "team", 200), ("admin", "other", 404)])
def test_comparing_needs_the_role_of_an_operator_in_the_endpoints_project(
        role: Role, project: str, status: int, settings: Settings, database: Database) -> None:
    for name in ("team", "other"):
        Projects(database).create(CreateProject(name=name))
    Endpoints(database).create("default", TargetSpec(model="quickstart"), EndpointServeSpec(), "quickstart", "team")
    Endpoints(database).activate("default", 1, "http://127.0.0.1:1/v1")
    admin = Scope(Principal(subject="user:boss", roles={project: "admin"}), project)
    secret = ApiKeys(database, scope=admin).create(name="k", role=role)[1]
    with serving(settings.model_copy(update={"token": "installation"}), database) as server:
        headers = {"authorization": f"Bearer {secret}"}
        answer = httpx.post(server.url + COMPARE, json=BODY, headers=headers, timeout=60, trust_env=False)
        assert answer.status_code == status, answer.text
        page = httpx.get(server.url + "/console/endpoints/default/compare", headers=headers, trust_env=False)
        assert page.status_code == (404 if status == 404 else 200)
        assert ("your role reads only" in page.text) == (status == 403)


def test_an_engine_that_does_not_answer_is_an_event_with_a_hint(settings: Settings, database: Database) -> None:
    add_endpoint(database, "http://127.0.0.1:1/v1")
    found = events(asked(settings, database))
    assert [name for name, _ in found] == ["failed", "failed", "end"]
    assert all(event["hint"] for _, event in found[:-1])
    assert found[-1][1] == {"equal": None}


def test_what_the_engine_refuses_is_said_in_its_words(settings: Settings, database: Database, served: Served) -> None:
    add_endpoint(database, f"{str(served.client.base_url).rstrip('/')}/v1")
    found = events(asked(settings, database, {"prompt": "word " * 4000}))
    assert [name for name, _ in found] == ["failed", "failed", "end"]
    assert "context" in found[0][1]["message"]
    assert "shorten the prompt" in found[0][1]["hint"]


def test_of_sglang_chunks_are_runs_of_tokens_and_the_undrafted_answer_is_unavailable_with_the_reason(
        settings: Settings, database: Database) -> None:
    endpoints = add_endpoint(database, "http://127.0.0.1:1/v1", engine=EngineSpec(kind="sglang"))
    endpoints.propose("default", job_id=None, checkpoint="c", drafter_dir="/d", reason="trained")
    endpoints.activate("default", 2)
    unavailable = events(asked(settings, database))[1]
    assert unavailable[0] == "unavailable"
    assert unavailable[1]["run"] == "undrafted"
    assert "SGLang cannot leave its drafter out" in unavailable[1]["message"]
    run, taken = RunSoFar("drafted", traced=False), []
    for now_s, (text, so_far, reason) in enumerate((("", 1, None), ("A b", 4, None), (" c", 6, None), ("", 6, "stop"))):
        taken.append(run.take({"choices": [{"delta": {"content": text}, "finish_reason": reason}],
                               "usage": {"prompt_tokens": 3, "completion_tokens": so_far}}, float(now_s)))
    rounds = [(one.text, one.num_tokens) for progress in taken if progress is not None for one in progress.rounds]
    assert rounds == [("", 1), ("A b", 3), (" c", 2)]
    assert taken[2] is not None
    assert (taken[2].tau, taken[2].tokens_per_s, taken[2].num_rounds) == (2.5, 2.5, 2)
    assert taken[3] is None
    assert (run.is_complete, run.text) == (True, "A b c")
    with pytest.raises(InvalidInput, match="too many"):
        run.take({"error": {"message": "too many"}}, 5.0)
