"""What the traffic of endpoints shows now, by REST and on the first page."""

import re
from datetime import timedelta
from html import unescape
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from eyrie_api.contract.access import Quotas
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.status import Condition
from eyrie_api.database.endpoint_history import Histories
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.projects import Projects
from eyrie_api.decisions.alerts import ExhaustedQuota
from eyrie_api.http.server import create_app
from eyrie_api.planning.resolve import derive
from eyrie_api.settings import Settings
from tests.api.figures.endpoint_values import serve_drafter, watch
from tests.api.samples import ManualClock, job_spec


@pytest.fixture
def client(settings: Settings, database: Database) -> httpx.Client:
    return TestClient(create_app(settings, database=database), base_url="http://127.0.0.1:8642")


def traffic_of(client: httpx.Client, name: str = "chat") -> dict[str, Any]:
    answer = client.get("/v1alpha1/traffic")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = next(one for one in answer.json()["items"] if one["endpoint"] == name)
    return found


def candidate(database: Database, clock: ManualClock, drafter: str, name: str = "chat") -> int:
    return Endpoints(database, clock).propose(name, job_id=None, checkpoint=drafter, tree=DraftTreeShape(),
                                              drafter_dir=f"/d/{drafter}", reason="test", tau=3.0).number


def drifted(database: Database, clock: ManualClock, revision: int, once: str) -> None:
    Histories(database, clock).record("chat", "drift", "TrafficDrifted", "stayed low", once=once, revision=revision)


def test_a_window_without_counted_rounds_has_requests_alone_in_traffic_and_metrics(
        client: httpx.Client, database: Database, clock: ManualClock) -> None:
    revision = serve_drafter(database, clock)
    Histories(database, clock).record_window("chat", revision, None, 5.0, None, accepted=(3.0,), requests=60.0,
                                             seconds=60.0)
    window = traffic_of(client)["window"]
    assert (window["tau"], window["requests_per_s"], window["accepted_per_round"]) == (None, 1.0, [])
    scraped = client.get("/metrics")
    assert scraped.status_code == 200
    assert 'eyrie_endpoint_requests_per_second{name="chat"} 1.0' in scraped.text
    assert "eyrie_endpoint_accepted_tokens{" not in scraped.text


def test_tau_requests_and_tokens_per_second_are_of_the_latest_window_since_the_revision_serves(
        client: httpx.Client, database: Database, clock: ManualClock) -> None:
    first = serve_drafter(database, clock)
    assert traffic_of(client) == {"endpoint": "chat", "revision": first, "window": None, "canary": None, "drift": None}
    watch(database, clock, first, (3.0, 2.7))
    window = traffic_of(client)["window"]
    assert (window["tau"], window["proven_tau"]) == (2.7, 3.0)
    assert (window["requests_per_s"], window["tokens_per_s"]) == (1.5, 90.0)
    assert window["until"].startswith(clock.now.isoformat()[:19])
    assert window["since"].startswith((clock.now - timedelta(seconds=60)).isoformat()[:19])
    clock.pass_(60.0)
    serve_drafter(database, clock)
    assert traffic_of(client)["window"] is None, "the window is of the revision before"
    endpoints = Endpoints(database, clock)
    endpoints.roll_back("chat")
    endpoints.activate("chat", first)
    assert traffic_of(client)["window"] is None, "the window is of the time before"
    watch(database, clock, first, (2.9,))
    assert traffic_of(client)["window"]["tau"] == 2.9
    endpoints.set_desired("chat", "off")
    assert traffic_of(client)["window"] is None


def test_requests_per_second_are_shown_where_no_acceptance_is_watched(
        client: httpx.Client, database: Database, clock: ManualClock) -> None:
    revision = serve_drafter(database, clock)
    Histories(database, clock).record_window("chat", revision, None, 0.0, None, requests=90.0, seconds=60.0)
    window = traffic_of(client)["window"]
    assert (window["tau"], window["proven_tau"], window["requests_per_s"]) == (None, None, 1.5)
    assert "<td class=\"n\">1.5</td>" in client.get("/").text
    page = client.get("/console/endpoints/chat").text
    assert "1.5 requests/s, no acceptance watched" in page
    assert "90 requests in 60 s" in page
    assert client.get("/v1alpha1/endpoints/chat/figures").json()["items"] == []


def scraped(client: httpx.Client) -> dict[str, float]:
    """The series of endpoints at /metrics, without their common beginning."""
    lines = (line for line in client.get("/metrics").text.splitlines() if line.startswith("eyrie_endpoint_"))
    return {name.removeprefix("eyrie_endpoint_"): float(value) for name, value in (line.split(" ") for line in lines)}


def test_prometheus_gets_of_each_endpoint_its_state_and_what_the_latest_window_recorded(
        client: httpx.Client, database: Database, clock: ManualClock) -> None:
    revision, endpoints = serve_drafter(database, clock), Endpoints(database, clock)
    fresh = {'state{name="chat",state="Serving"}': 0.0, 'state{name="chat",state="NotServing"}': 1.0,
             'state{name="chat",state="Off"}': 0.0, 'revision{name="chat"}': revision, 'drafted{name="chat"}': 1.0,
             'proven_tau{name="chat"}': 3.0, 'drifted{name="chat"}': 0.0}
    assert scraped(client) == fresh, "there is no window yet"
    endpoints.observe("chat", conditions=(
        Condition(type="Serving", status="True", reason="Healthy", last_transition_time=clock.now),))
    watch(database, clock, revision, (3.0, 2.4))
    drifted(database, clock, revision, "drift/1")
    assert scraped(client) == fresh | {
        'state{name="chat",state="Serving"}': 1.0, 'state{name="chat",state="NotServing"}': 0.0,
        'tau{name="chat"}': 2.4, 'accepted_tokens{name="chat",position="1"}': 0.64,
        'accepted_tokens{name="chat",position="2"}': 0.4, 'requests_per_second{name="chat"}': 1.5,
        'tokens_per_second{name="chat"}': 90.0,
        'window_end_timestamp_seconds{name="chat"}': clock.now.timestamp(), 'drifted{name="chat"}': 1.0}
    endpoints.set_desired("chat", "off")
    off = scraped(client)
    assert (off['state{name="chat",state="Off"}'], off['state{name="chat",state="Serving"}']) == (1.0, 0.0)
    assert 'tau{name="chat"}' not in off


def test_prometheus_gets_of_the_target_alone_that_it_does_not_draft(
        client: httpx.Client, database: Database, clock: ManualClock) -> None:
    serve_drafter(database, clock)
    endpoints = Endpoints(database, clock)
    endpoints.roll_back("chat", 1)
    endpoints.activate("chat", 1)
    Histories(database, clock).record_window("chat", 1, None, 0.0, None, requests=90.0, seconds=60.0)
    found = scraped(client)
    assert (found['revision{name="chat"}'], found['drafted{name="chat"}']) == (1.0, 0.0)
    assert found['requests_per_second{name="chat"}'] == 1.5
    assert [name for name in found if name.startswith(("tau", "proven_tau", "accepted_tokens"))] == []


def test_a_window_of_an_earlier_version_has_no_requests(
        client: httpx.Client, database: Database, clock: ManualClock) -> None:
    Histories(database, clock).record_window("chat", serve_drafter(database, clock), 2.9, 200.0, 3.0)
    window = traffic_of(client)["window"]
    assert (window["tau"], window["requests_per_s"], window["tokens_per_s"], window["since"]) == (2.9, None, None, None)


def test_a_canary_is_shown_with_its_share_for_as_long_as_it_is_one(
        client: httpx.Client, database: Database, clock: ManualClock) -> None:
    serve_drafter(database, clock)
    endpoints, second = Endpoints(database, clock), candidate(database, clock, "b")
    assert traffic_of(client)["canary"] is None
    for share in (0.2, 0.5):
        endpoints.canary("chat", second, share)
        found = traffic_of(client)["canary"]
        assert (found["revision"], found["share"]) == (second, share)
    third = candidate(database, clock, "c")
    assert traffic_of(client)["canary"] is None
    endpoints.canary("chat", third, 0.2)
    endpoints.activate("chat", third)
    assert traffic_of(client)["canary"] is None


def test_drift_is_current_until_a_window_recovers_or_retraining_starts_or_another_revision_serves(
        client: httpx.Client, database: Database, clock: ManualClock) -> None:
    first = serve_drafter(database, clock)
    watch(database, clock, first, (2.4,))
    drifted(database, clock, first, "drift/1")
    watch(database, clock, first, (2.5,))
    assert traffic_of(client)["drift"] == {
        "since": traffic_of(client)["drift"]["since"], "message": "stayed low", "has_job": False}
    watch(database, clock, first, (2.6,))
    assert traffic_of(client)["drift"] is None, "2.55 is the bound"
    drifted(database, clock, first, "drift/2")
    assert traffic_of(client)["drift"] is not None
    Histories(database, clock).record("chat", "retraining", "RetrainingStarted", "x", once="r", revision=first)
    assert traffic_of(client)["drift"] is None
    drifted(database, clock, first, "drift/3")
    clock.pass_(60.0)
    serve_drafter(database, clock)
    assert traffic_of(client)["drift"] is None


def test_the_first_page_reads_the_history_of_all_endpoints_at_once(
        client: httpx.Client, database: Database, clock: ManualClock) -> None:
    from sqlalchemy import event

    statements: list[str] = []
    event.listen(database.engine, "before_cursor_execute", lambda *given: statements.append(given[2]))

    def asked() -> int:
        statements.clear()
        assert client.get("/").status_code == 200
        return len(statements)

    watch(database, clock, serve_drafter(database, clock, "one"), (2.9,), "one")
    of_one = asked()
    for number in range(4):
        watch(database, clock, serve_drafter(database, clock, f"more-{number}"), (2.9,), f"more-{number}")
    assert asked() == of_one


def test_the_first_page_shows_what_the_traffic_shows(
        client: httpx.Client, database: Database, clock: ManualClock) -> None:
    first = serve_drafter(database, clock)
    serve_drafter(database, clock, "idle")
    watch(database, clock, first, (2.4,))
    drifted(database, clock, first, "drift/1")
    Endpoints(database, clock).canary("idle", candidate(database, clock, "b", "idle"), 0.25)
    shown = " ".join(unescape(re.sub(r"<[^>]+>", " ", client.get("/").text)).split())
    for words in ("2.40 1.5", "Canary revision 3 gets 25 % since", "not measured",
                  "Endpoint chat: the traffic has drifted since", "stayed low hint: train a drafter on recent traffic"):
        assert words in shown, words


def test_a_quota_of_jobs_that_is_used_up_is_found_where_the_caller_has_a_role(
        client: httpx.Client, database: Database, clock: ManualClock) -> None:
    projects, jobs = Projects(database, clock), Jobs(database, clock)
    projects.set_quotas("default", Quotas(max_jobs=2, max_gpus=0))
    jobs.submit(derive(job_spec()))
    assert projects.used_up() == ()
    jobs.submit(derive(job_spec()))
    assert projects.used_up() == (ExhaustedQuota("default", "jobs", 2, 2),)
    assert "Project default has used up its quota: 2 of 2 jobs" in client.get("/").text
