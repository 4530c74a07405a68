"""Values that no number, text, time or address can hold: each is refused with a problem, and nothing answers 500.

The campaign `fuzz` draws such values for every route; here is one request of each kind, on SQLite and PostgreSQL.
"""

import json
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from eyrie_api.contract.status import Problem
from eyrie_api.database.rendering import encode_cursor
from eyrie_api.errors import InvalidInput
from eyrie_api.http.middleware import check_text
from eyrie_api.http.routes.jobs import JOBS
from tests.api.conftest import Running
from tests.api.samples import job_body

TOO_LARGE = str(2**63)
SURROGATE = "%ed%a0%80"


def refused(answer: httpx.Response, *statuses: int) -> Problem:
    assert answer.status_code in statuses, answer.text
    problem = Problem.model_validate_json(answer.content)
    assert problem.hint
    return problem


@pytest.mark.parametrize("path", [
    f"{JOBS}/{SURROGATE}", f"{JOBS}?label={SURROGATE}=x", f"{JOBS}?name={SURROGATE}", f"{JOBS}/{'a' * 4000}",
    f"{JOBS}/x/logs/{'a' * 4000}", f"{JOBS}/x/artifacts/{'a/' * 2000}b", f"{JOBS}/x/events?after={TOO_LARGE}",
    f"{JOBS}?limit={TOO_LARGE}", f"/v1alpha1/endpoints/{'a' * 4000}",
    f"/v1alpha1/endpoints/x/history?before={'9' * 400}",
    f"/v1alpha1/leaderboard?target={'a' * 4000}", f"/v1alpha1/leaderboard?target={SURROGATE}"])
def test_no_path_or_query_answers_500(server: Running, path: str) -> None:
    answer = httpx.get(server.url + path, headers={"Accept": "application/json"}, timeout=30)
    if answer.status_code != 200:
        refused(answer, 404, 422)


@pytest.mark.parametrize("when", [datetime.min, datetime.max])
def test_a_cursor_of_the_first_or_last_year_is_a_page_or_refused(server: Running, when: datetime) -> None:
    answer = httpx.get(server.url + JOBS, params={"cursor": encode_cursor(when.replace(tzinfo=UTC), "job-x")},
                       timeout=60)
    if answer.status_code != 200:
        refused(answer, 422)


@pytest.mark.parametrize("last", [TOO_LARGE, "9" * 400, "1e309"])
def test_an_event_id_that_no_database_can_hold_is_refused(server: Running, last: str) -> None:
    job = httpx.post(server.url + JOBS, json=job_body(), timeout=30).json()["id"]
    answer = httpx.get(f"{server.url}{JOBS}/{job}/events", timeout=30,
                       headers={"Last-Event-ID": last, "Accept": "application/json"})
    refused(answer, 422)


@pytest.mark.parametrize(("changes", "said"), [
    ('{"train": {"learning_rate": 1e400}}', "/train/learning_rate: must be a finite number"),
    ('{"train": {"learning_rate": -1e400}}', "/train/learning_rate: must be a finite number"),
    ('{"train": {"epochs": 1e400}}', "/train/epochs: must be a finite number"),
    (f'{{"train": {{"learning_rate": {"9" * 4000}}}}}', "/train/learning_rate: must be a number"),
    (f'{{"train": {{"seed": {TOO_LARGE}}}}}', "/train/seed: must be less than or equal to"),
    (r'{"labels": {"a": "\ud800"}}', r"character \ud800 at /labels/a"),
    (r'{"labels": {"\ud800": "a"}}', r"character \ud800 at /labels/\ud800"),
    (r'{"name": "a\u0000"}', r"character \u0000 at /name"),
    (r'{"target": {"model": "org/name", "revision": "\u0000"}}', r"character \u0000 at /target/revision"),
    (r'{"target": {"model": "org/name", "revision": "\ud800"}}', r"character \ud800 at /target/revision"),
    (f'{{"target": {{"model": "{"x/" * 2000}"}}}}', "target.model 'x/x/"),
    (f'{{"data": {{"sources": [{{"path": "/{"x/" * 2000}"}}]}}}}', "data.sources[0].path: data file '/x/x/"),
    (r'{"data": {"sources": [{"path": "/a\u0000b"}]}}', r"character \u0000 at /data/sources/0/path")])
def test_no_number_text_or_path_of_a_job_answers_500(server: Running, changes: str, said: str) -> None:
    for path in (JOBS, "/v1alpha1/plans"):
        body = json.dumps(job_body())[:-1] + ", " + changes[1:]  # the last of two members of one name counts
        answer = httpx.post(server.url + path, content=body, headers={"Content-Type": "application/json"}, timeout=30)
        assert said in refused(answer, 422).detail


@pytest.mark.parametrize(("text", "found"), [
    (r'"\ud800"', "ud800"), (r'"\uDC00\uD800"', "uDC00"), (r'"\ud83d\ud83d"', "ud83d"), (r'{"a\u0000": 1}', "u0000"),
    (r'"\\\udfff"', "udfff"), (r'"\ud83d\ude00 \n\u00e4 \\ud800 \\u0000 \u0001"', None), ("", None),
    ('"\u00e4 \U0001f600"', None), (r'"\u12', None)])
def test_text_is_checked_where_bodies_enter_and_escaped_backslashes_and_whole_pairs_pass(
        text: str, found: str | None) -> None:
    if found is None:
        check_text(text.encode())
        return
    with pytest.raises(InvalidInput, match=found):
        check_text(text.encode())


def test_the_place_of_the_text_is_named() -> None:
    for body, place in ((rb'{"labels": {"a": ["x", "\ud800"]}}', "/labels/a/1"), (rb'{"a": {"\u0000": 1}}', r"/a/\x00"),
                        (rb'{"a": "\ud800"', "byte 7")):
        with pytest.raises(InvalidInput) as refused:
            check_text(body)
        assert f" at {place}" in refused.value.message


@pytest.mark.parametrize("body", [b'"\xff"', b'"\xed\xa0\x80"', '"x"'.encode("utf-16")])
def test_a_body_that_is_not_utf_8_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidInput, match="not UTF-8"):
        check_text(body)


@pytest.mark.parametrize("url", ["http://../x", "https://a..b/x", "https://.example.com/", f"https://{'a' * 300}/",
                                 "https://[::1", "https://a:99999/", "https://%00/"])
def test_a_webhook_to_a_host_that_cannot_be_is_refused_or_fails_alone(server: Running, url: str) -> None:
    answer: Any = httpx.post(server.url + "/v1alpha1/webhooks", json={"url": url}, timeout=30)
    if answer.status_code == 201:
        hook = answer.json()["webhook"]["id"]
        answer = httpx.post(f"{server.url}/v1alpha1/webhooks/{hook}/ping", timeout=30)
    assert answer.status_code < 500, answer.text


def test_every_number_that_a_request_may_hold_has_bounds(server: Running) -> None:
    document = httpx.get(server.url + "/openapi.json", timeout=30).json()
    without: set[str] = set()
    seen: set[str] = set()

    def walk(node: Any, place: str) -> None:
        if isinstance(node, list):
            for each in node:
                walk(each, place)
        elif isinstance(node, dict) and "$ref" in node:
            name = node["$ref"].rpartition("/")[2]
            if name not in seen:
                seen.add(name)
                walk(document["components"]["schemas"][name], name)
        elif isinstance(node, dict):
            if node.get("type") in ("integer", "number") and not {"const", "enum"} & set(node) and not (
                    {"minimum", "exclusiveMinimum"} & set(node) and {"maximum", "exclusiveMaximum"} & set(node)):
                without.add(place)
            for key, value in node.items():
                if key not in ("example", "examples", "default"):
                    walk(value, f"{place}.{key}")

    for path, operations in document["paths"].items():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                walk(parameter["schema"], f"{path} {parameter['name']}")
            for content in operation.get("requestBody", {}).get("content", {}).values():
                walk(content["schema"], path)
    assert len(seen) > 20
    assert not without
