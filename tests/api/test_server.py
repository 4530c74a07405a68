"""The HTTP surface on a real port: jobs, idempotency, problems, guards, OpenAPI, and noise."""

import importlib.metadata
import json
import re
import socket
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from eyrie_api.artifacts import code_version
from eyrie_api.client import Client
from eyrie_api.contract.status import Job, Problem
from eyrie_api.database.engine import Database
from eyrie_api.database.migrations import upgrade
from eyrie_api.errors import EyrieError, Transient
from eyrie_api.http import problems
from eyrie_api.http.routes.jobs import EXAMPLES, JOBS
from eyrie_api.settings import Settings
from tests.api.conftest import Running
from tests.api.samples import ended, job_body, job_spec

QUICKSTART = EXAMPLES["quickstart"]["value"]


def problem(response: httpx.Response, status: int, reason: str) -> Problem:
    """The response, proved to be a whole problem document."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == problems.MEDIA_TYPE
    document = Problem.model_validate_json(response.content)
    assert document.type == problems.TYPE_PREFIX + reason
    assert document.status == status
    assert document.hint, f"no hint in {document}"
    return document


def post(server: Running, path: str, body: Any = None, **options: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, **options)


def test_a_job_is_accepted_with_its_location_and_its_chores_are_woken(
        settings: Settings, database: Database, serve: Callable[..., Any]) -> None:
    woken: list[None] = []
    with serve(settings, database, wake=lambda: woken.append(None)) as server:
        response = post(server, JOBS, QUICKSTART)
        assert response.status_code == 202
        job = Job.model_validate_json(response.content)
        assert response.headers["location"] == f"{JOBS}/{job.id}"
        assert Job.model_validate_json(httpx.get(server.url + response.headers["location"]).content) == job
        assert len(woken) == 1


def test_the_document_of_a_job_is_answered_as_it_was_submitted(server: Running) -> None:
    body = job_body(train={"epochs": 3}, drafter={"family": "eagle3"})
    job = post(server, JOBS, body).json()
    assert (job["spec"]["target"]["dtype"], job["spec"]["train"]["ttt_length"]) == ("float32", 7)
    assert httpx.get(f"{server.url}{JOBS}/{job['id']}/submitted").json() == body
    assert server.client.submitted(job["id"]) == body


def test_the_same_key_and_body_make_one_job_and_answer_the_same(server: Running) -> None:
    first, second = (post(server, JOBS, QUICKSTART, headers={"Idempotency-Key": "k1"}) for _ in range(2))
    assert first.json() == second.json()
    assert (first.status_code, second.status_code) == (202, 202)
    assert "idempotency-replayed" not in first.headers
    assert second.headers["idempotency-replayed"] == "true"
    assert len(server.client.jobs().items) == 1


def test_the_same_key_with_another_body_is_refused(server: Running) -> None:
    post(server, JOBS, QUICKSTART, headers={"Idempotency-Key": "k1"})
    answer = post(server, JOBS, job_body(name="other"), headers={"Idempotency-Key": "k1"})
    problem(answer, 422, "IdempotencyMismatch")


def test_a_refused_request_gives_its_key_back(server: Running) -> None:
    bad = job_body(target={"model": "/nowhere"})
    for _ in range(2):
        problem(post(server, JOBS, bad, headers={"Idempotency-Key": "k1"}), 422, "TargetNotFound")
    assert post(server, JOBS, QUICKSTART, headers={"Idempotency-Key": "k1"}).status_code == 202


def test_an_idempotency_key_that_is_too_long_is_refused(server: Running) -> None:
    problem(post(server, JOBS, QUICKSTART, headers={"Idempotency-Key": "k" * 256}), 422, "InvalidInput")


def test_jobs_are_listed_in_pages_and_by_label(server: Running) -> None:
    for number in range(3):
        post(server, JOBS, job_body(labels={"n": str(number)}))
    page = httpx.get(server.url + JOBS, params={"limit": 2}).json()
    rest = httpx.get(server.url + JOBS, params={"limit": 2, "cursor": page["next_cursor"]}).json()
    assert (len(page["items"]), len(rest["items"]), rest["next_cursor"]) == (2, 1, None)
    found = httpx.get(server.url + JOBS, params={"label": "n=1"}).json()["items"]
    assert [one["spec"]["labels"] for one in found] == [{"n": "1"}]
    problem(httpx.get(server.url + JOBS, params={"label": "n"}), 422, "InvalidInput")
    problem(httpx.get(server.url + JOBS, params={"cursor": "!"}), 422, "InvalidInput")


def test_cancel_retry_and_delete_follow_the_jobs_state(server: Running) -> None:
    job_id = post(server, JOBS, QUICKSTART).json()["id"]
    problem(post(server, f"{JOBS}/{job_id}/retry"), 409, "Conflict")
    answer = post(server, f"{JOBS}/{job_id}/cancel")
    assert (answer.status_code, answer.json()["status"]["phase"]) == (202, "Cancelling")
    assert httpx.delete(f"{server.url}{JOBS}/{job_id}").status_code == 202
    server.control.jobs.save_status(job_id, ended("Cancelled"))
    assert httpx.delete(f"{server.url}{JOBS}/{job_id}").status_code == 204
    problem(httpx.get(f"{server.url}{JOBS}/{job_id}"), 404, "NotFound")


def test_validation_names_pointer_value_and_rule(server: Running) -> None:
    body = job_body(train={"learning_rate": 7, "schedule": "linear"}, name="Not A Label")
    document = problem(post(server, JOBS, body), 422, "InvalidInput")
    assert [(one["pointer"], one["value"]) for one in document.errors] == [
        ("/name", "Not A Label"), ("/train/learning_rate", 7), ("/train/schedule", "linear")]
    assert all(one["rule"] for one in document.errors)
    assert "/name" in document.detail
    assert "2 more" in document.detail


def test_a_misspelt_field_is_answered_with_the_right_one(server: Running) -> None:
    document = problem(post(server, JOBS, job_body(train={"learning_rat": 1})), 422, "InvalidInput")
    assert document.hint == "did you mean 'learning_rate'?"


def test_a_rule_between_fields_says_which_and_what_instead(server: Running) -> None:
    tree = {"num_steps": 5, "top_k": 1, "num_draft_tokens": 9}
    document = problem(post(server, JOBS, job_body(benchmark={"tree": tree})), 422, "InvalidInput")
    assert document.errors[0]["pointer"] == "/benchmark/tree"
    assert "num_steps + 1 = 6" in document.detail


def test_query_errors_name_the_parameter(server: Running) -> None:
    document = problem(httpx.get(server.url + JOBS, params={"limit": "many"}), 422, "InvalidInput")
    assert (document.errors[0]["parameter"], document.errors[0]["value"]) == ("limit", "many")


@pytest.mark.parametrize(("path", "most"), [(JOBS, 200), ("/v1alpha1/waiting", 1000), ("/v1alpha1/audit", 500),
                                            ("/v1alpha1/endpoints/default/history", 500)])
def test_a_page_size_out_of_range_is_refused(server: Running, path: str, most: int) -> None:
    for limit in (0, -1, most + 1):
        document = problem(httpx.get(server.url + path, params={"limit": limit}), 422, "InvalidInput")
        assert document.errors[0]["parameter"] == "limit"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'"\\ud800"', b"[" * 100_000, b"NaN",
                                     b'{"target": {"model": "\\ud800"}, "data": {"sources": []}}', b"1" * 5000,
                                     b"9" * 400])
def test_a_body_that_is_no_job_is_a_problem_whatever_it_is(server: Running, content: bytes) -> None:
    response = httpx.post(server.url + JOBS, content=content, headers={"Content-Type": "application/json"})
    problem(response, 422, "InvalidInput")


def test_a_label_with_a_nul_is_stored_or_refused(server: Running) -> None:
    assert post(server, JOBS, job_body(labels={"team": "\0"})).status_code in (202, 422)


def test_a_job_has_at_most_64_labels(server: Running) -> None:
    labels = {f"label-{number}": "x" for number in range(65)}
    document = problem(post(server, JOBS, job_body(labels=labels)), 422, "InvalidInput")
    assert document.errors[0]["pointer"] == "/labels"
    del labels["label-64"]
    assert post(server, JOBS, job_body(labels=labels)).status_code == 202


def test_an_unknown_route_and_a_wrong_method_are_problems(server: Running) -> None:
    problem(httpx.get(server.url + "/v1alpha1/nothing"), 404, "NotFound")
    for path in ("/v1alpha1/jobs/a%00b", "/v1alpha1/jobs?name=%00", "/v1alpha1/jobs?project=%00"):
        problem(httpx.get(server.url + path), 422, "InvalidInput")
    for query in ("label=a=b&" * 3000, "name=" + "x" * 9000, "label=a=b&" * 17):
        problem(httpx.get(f"{server.url}{JOBS}?{query}"), 422, "InvalidInput")
    answer = httpx.put(server.url + JOBS, json={})
    problem(answer, 405, "MethodNotAllowed")
    assert answer.headers["allow"] == "GET, POST"


def test_the_page_of_the_api_shows_every_request_and_loads_nothing_from_elsewhere(shared: Running) -> None:
    page, document = httpx.get(shared.url + "/docs"), _document(shared.url)
    assert page.status_code == 200
    assert re.findall(r"(?:src|href)=\"(?!#|/openapi.json)", page.text) == []
    assert "<script" not in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for path, methods in document["paths"].items():
        for method in methods:
            assert f"<b>{method.upper()}</b> <code>{path}</code>" in page.text


def test_a_selection_by_a_form_whose_fields_are_empty_is_in_the_document(shared: Running) -> None:
    document = _document(shared.url)
    [temperature] = [one["schema"] for one in document["paths"][f"{JOBS}/{{job_id}}/figures"]["get"]["parameters"]
                     if one["name"] == "temperature"]
    assert {"const": ""} in temperature["anyOf"]


def test_every_integer_of_a_path_or_query_is_bounded_so_that_a_database_can_hold_it(shared: Running) -> None:
    document = _document(shared.url)
    unbounded, seen = [], 0
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            for parameter in operation.get("parameters", ()):
                for kind in parameter["schema"].get("anyOf", [parameter["schema"]]):
                    seen += kind.get("type") == "integer"
                    if kind.get("type") == "integer" and not kind.get("maximum", 2**63) < 2**63:
                        unbounded.append(f"{method} {path}: {parameter['name']}")
    assert seen > 5
    assert unbounded == []


def test_a_body_that_is_not_json_by_name_is_refused(server: Running) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        answer = httpx.post(server.url + JOBS, content=json.dumps(QUICKSTART), headers={"Content-Type": kind})
        problem(answer, 415, "UnsupportedMediaType")
    problem(httpx.post(server.url + JOBS, content=b"{}"), 415, "UnsupportedMediaType")


def test_an_oversized_body_is_refused_by_its_announcement_and_by_its_bytes(
        settings: Settings, database: Database, serve: Callable[..., Any]) -> None:
    with serve(settings.model_copy(update={"max_body_bytes": 2048}), database) as server:
        big = job_body(labels={"a": "x" * 4000})
        problem(post(server, JOBS, big), 413, "TooLarge")
        chunks = (json.dumps(big).encode()[start:start + 500] for start in range(0, 5000, 500))
        answer = httpx.post(server.url + JOBS, content=chunks, headers={"Content-Type": "application/json"})
        problem(answer, 413, "TooLarge")
        assert post(server, JOBS, QUICKSTART).status_code == 202


def test_a_token_is_demanded_where_one_is_set_except_by_the_probes(
        settings: Settings, database: Database, serve: Callable[..., Any]) -> None:
    token = "correct-horse-battery"
    with serve(settings.model_copy(update={"token": token}), database) as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {token}"},
                        {"Authorization": "Bearer"}, {"Authorization": "Bearer \u00e9".encode("latin-1")}):
            answer = httpx.get(server.url + JOBS, headers=headers)  # type: ignore[arg-type]
            problem(answer, 401, "Unauthorized")
            assert answer.headers["www-authenticate"].startswith("Bearer")
        assert httpx.get(server.url + "/healthz", timeout=60).status_code == 200
        assert httpx.get(server.url + "/readyz").status_code == 200
        assert httpx.get(server.url + JOBS, headers={"Authorization": f"Bearer {token}"}).status_code == 200
        assert server.client.jobs().items == ()


def test_a_bind_others_can_reach_has_a_token_even_when_none_was_set(settings: Settings) -> None:
    public = settings.model_copy(update={"host": "0.0.0.0"})
    token = public.required_token()
    assert token is not None
    assert len(token) >= 32
    assert public.required_token() == token, "kept for the next start"
    assert (public.home / "token").stat().st_mode & 0o077 == 0
    assert settings.required_token() is None


def test_a_web_page_cannot_reach_a_loopback_server_by_a_name_of_its_own(server: Running) -> None:
    problem(httpx.get(server.url + JOBS, headers={"Host": "evil.example"}), 403, "Forbidden")
    for host in ("localhost:1", "127.0.0.1", "[::1]:8642"):
        assert httpx.get(server.url + JOBS, headers={"Host": host}).status_code == 200
    problem(httpx.get(server.url + JOBS, headers={"Host": "["}), 403, "Forbidden")


def test_a_web_page_of_another_origin_changes_nothing(server: Running) -> None:
    cancel = f"{server.url}{JOBS}/job-x/cancel"
    for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"},
                    {"Sec-Fetch-Site": "same-site"}, {"Origin": "http://127.0.0.1:3000"}):
        problem(httpx.post(cancel, headers=headers), 403, "Forbidden")
    problem(httpx.get(server.url + JOBS, headers={"Origin": "https://evil.example"}), 403, "Forbidden")
    same = {"Origin": server.url, "Sec-Fetch-Site": "same-origin"}
    problem(httpx.post(cancel, headers=same), 404, "NotFound")
    followed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert httpx.get(server.url + JOBS, headers=followed).status_code == 200


def test_a_plan_comes_with_its_assumptions(server: Running, tmp_path: Path) -> None:
    from tests.api.samples import target_directory

    body = job_body(target={"model": str(target_directory(tmp_path / "t"))})
    plan = post(server, "/v1alpha1/plans", body).json()
    aux = 3 * (64 + 2) + 5  # three states of 64 values in int8 with their scales, id and mask
    assert aux < plan["bytes_per_token"] < aux + 64 + 2, "answer tokens have a final state besides"
    assert plan["fits_disk"] is True
    assert len(plan["assumptions"]) > 10
    assert server.client.jobs().items == (), "a plan runs nothing"


def test_readiness_names_what_does_not_run(settings: Settings, database: Database, serve: Callable[..., Any]) -> None:
    with serve(settings, database, checks={"chores": lambda: False}) as server:
        answer = httpx.get(server.url + "/readyz")
        assert "chores" in problem(answer, 503, "Transient").detail
        assert answer.headers["retry-after"] == "5"
        assert httpx.get(server.url + "/healthz", timeout=60).status_code == 200


def test_prometheus_sees_jobs_by_phase_outbox_events_and_latency_by_route(server: Running) -> None:
    post(server, JOBS, QUICKSTART)
    httpx.get(f"{server.url}{JOBS}/job-x")
    text = httpx.get(server.url + "/metrics").text
    assert 'eyrie_jobs{phase="Pending"} 1.0' in text
    assert "eyrie_outbox_depth 1.0" in text
    assert "eyrie_events 1.0" in text
    assert 'eyrie_http_requests_total{method="GET",route="/v1alpha1/jobs/{job_id}",status="404"} 1.0' in text
    assert "eyrie_http_request_duration_seconds_bucket" in text


def test_the_version_names_the_source(server: Running) -> None:
    version = server.client.version()
    assert version.code_version.startswith(version.version.split("+")[0])


def test_a_checkout_that_is_not_installed_serves_and_names_its_source(
        settings: Settings, database: Database, serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def version_of(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    code_version()  # kept for the process: other tests read it
    monkeypatch.setattr(importlib.metadata, "version", version_of)
    with serve(settings, database) as server:
        assert server.client.version().version == "0+source"


def test_openapi_has_examples_that_validate_and_problems_as_refusals(shared: Running) -> None:
    document = _document(shared.url)
    create = document["paths"][JOBS]["post"]
    examples = create["requestBody"]["content"]["application/json"]["examples"]
    for example in examples.values():
        job_spec(**example["value"])
    schemas = document["components"]["schemas"]
    assert "Problem" in schemas
    assert "ValidationError" not in json.dumps(document)
    assert create["responses"]["422"]["content"] == {
        problems.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    assert "Drafter steps unrolled" in schemas["TrainSpec"]["properties"]["ttt_length"]["description"]


def _references(value: Any) -> set[str]:
    if isinstance(value, dict):
        found = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return found.union(*map(_references, value.values()))
    return set().union(*map(_references, value)) if isinstance(value, list) else set()


def test_every_reference_of_the_openapi_document_leads_somewhere(shared: Running) -> None:
    document = _document(shared.url)
    for reference in _references(document):
        place = document
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]


def every_error_class(kind: type[EyrieError] = EyrieError) -> list[type[EyrieError]]:
    return [kind, *(deeper for child in kind.__subclasses__() for deeper in every_error_class(child))]


KNOWN = sorted({one for one in every_error_class() if one.__module__.startswith("eyrie_api")
                and one.__name__ != "Refused"}, key=lambda one: one.__name__)


@pytest.mark.parametrize("kind", KNOWN, ids=lambda kind: kind.__name__)
def test_every_error_class_is_a_problem_with_its_hint_and_comes_back_as_itself(kind: type[EyrieError]) -> None:
    error = kind("the field is wrong", "set it right")
    response = problems.refuse(error, "/x")
    assert response.status_code == kind.http_status
    document = Problem.model_validate_json(bytes(response.body))
    assert (document.detail, document.hint, document.status) == ("the field is wrong", "set it right", kind.http_status)
    assert ("retry-after" in response.headers) is issubclass(kind, Transient)
    with pytest.raises(EyrieError) as caught:
        Client()._check(httpx.Response(response.status_code, content=bytes(response.body)))
    again = caught.value
    assert (again.reason, again.http_status, again.message) == (kind.reason, kind.http_status, "the field is wrong")


def test_a_bug_in_a_handler_is_a_problem_without_its_secrets(
        settings: Settings, database: Database, serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(settings, database) as server:
        with database.engine.connect() as connection:  # a real fault: the table is gone
            connection.exec_driver_sql("DROP TABLE labels")
            connection.exec_driver_sql("DROP TABLE events")
            connection.commit()
        answer = httpx.get(f"{server.url}{JOBS}", params={"label": "a=b"})
        assert "labels" not in problem(answer, 500, "InternalError").detail


# OpenAPI fuzz in small: whatever is sent to whatever is described, the answer is described too, and never a 500.

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4), max_leaves=12)
FIELDS = ("target", "data", "train", "sweep", "benchmark", "labels", "name", "capture", "serve", "tune", "promotion")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.api.conftest import serving

    settings = Settings(home=tmp_path_factory.mktemp("fuzz"))
    database = Database(settings.resolved_database_url)
    upgrade(database)
    with serving(settings, database) as running:
        yield running
    database.close()


@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=4) | JSON_VALUES,
       st.sampled_from([JOBS, "/v1alpha1/plans", "/v1alpha1/endpoints/x/promote", "/v1alpha1/endpoints/x/rollback"]))
def test_no_body_makes_the_server_fail(shared: Running, body: Any, path: str) -> None:
    if isinstance(body, dict):
        body = QUICKSTART | body
    text = json.dumps(body)  # NaN and Infinity included, as Python writes them
    answer = httpx.post(shared.url + path, content=text, headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 202, 404, 409, 422), (text, answer.text)
    if answer.is_error:
        assert Problem.model_validate_json(answer.content).hint


@cache
def _document(url: str) -> Any:
    """Computed at a server's first request: 0.6 s of CPU."""
    return httpx.get(url + "/openapi.json", timeout=60).json()


@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_no_path_or_query_makes_the_server_fail(shared: Running, data: st.DataObject) -> None:
    document = _document(shared.url)
    path, methods = data.draw(st.sampled_from(sorted(document["paths"].items())))
    method = data.draw(st.sampled_from(sorted(methods)))
    words = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
    words |= st.sampled_from(["..", "%2e%2e", "\x00", "-1"])
    for parameter in methods[method].get("parameters", ()):
        if parameter["in"] == "path":
            filled = httpx.QueryParams({"x": data.draw(words)}).__str__().removeprefix("x=") or "x"
            path = path.replace("{" + parameter["name"] + "}", filled)
    query = {one["name"]: data.draw(words) for one in methods[method].get("parameters", ()) if one["in"] == "query"
             and one["name"] != "follow" and data.draw(st.booleans())}
    answer = httpx.request(method, shared.url + path, params=query, headers={"Accept": "application/json"})
    assert answer.status_code < 500, (method, path, query, answer.text)


def test_a_request_that_is_not_http_ends_without_harm(server: Running) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as raw:
        raw.sendall(b"\x16\x03\x01nonsense\r\n\r\n")
        assert b"400" in raw.recv(1024)
    assert httpx.get(server.url + "/healthz", timeout=60).status_code == 200
