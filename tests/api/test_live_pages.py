"""The streams of the console's pages, over real HTTP: what changes arrives, once for all readers, until access ends."""

import json
import threading
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from eyrie_api.clock import utc_now
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.stages import StageName
from eyrie_api.contract.status import Progress, StageStatus
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.projects import ApiKeys
from eyrie_api.http.console import pages
from eyrie_api.http.live_pages import LivePages, PageKey, Render, is_due
from eyrie_api.settings import Settings
from tests.api.conftest import Running, serving
from tests.api.samples import ended, job_spec, record_event, set_stage

TOKEN = "installation-token-of-this-test"
Message = tuple[str, str]


def messages(answer: httpx.Response) -> Iterator[Message]:
    """(event, its data) of an event stream, without its heartbeats."""
    return ((event, str(data)) for event, data in events(answer) if event != "heartbeat")


def heartbeats(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    return (data for event, data in events(answer) if event == "heartbeat")


def events(answer: httpx.Response) -> Iterator[tuple[str, Any]]:
    assert answer.status_code == 200, answer.read()
    assert answer.headers["content-type"].startswith("text/event-stream")
    event = ""
    for line in answer.iter_lines():
        if line.startswith("event: "):
            event = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield event, json.loads(line.removeprefix("data: "))


def part(received: Iterator[tuple[str, Any]]) -> str:
    """The next live part."""
    return next(str(data) for event, data in received if event == "live")


def shows(received: Iterator[Message], *words: str) -> str:
    """The first live part with all of the words."""
    return next(html for event, html in received if event == "live" and all(one in html for one in words))


def advance(server: Running, job_id: str, stage: StageName, done: int) -> None:
    set_stage(server.control.jobs, job_id, StageStatus(
        stage=stage, state="Running", progress=Progress(done=done, total=100, unit="rows")))


def test_progress_events_and_the_end_of_a_job_arrive_on_one_stream(server: Running) -> None:
    job = server.client.create_job(job_spec(name="nightly"))
    with httpx.stream("GET", f"{server.url}/console/jobs/{job.id}/live", timeout=60) as answer:
        received = messages(answer)
        shows(received, 'id="live"', "nightly", "eyrie cancel")
        for done in (25, 50):
            advance(server, job.id, "capture", done)
            shows(received, f"{done} % of 100 rows")
        record_event(server.control.jobs, job.id, "Slower", "the disk is busy")
        shows(received, "the disk is busy")
        server.control.jobs.save_status(job.id, ended("Succeeded"))
        shows(received, "Succeeded", "eyrie delete")
        assert list(received) == [("end", "{}")]


def test_the_stream_of_an_ended_job_ends_and_a_later_one_has_it_once(server: Running) -> None:
    job = server.client.create_job(job_spec())
    path = f"{server.url}/console/jobs/{job.id}/live"
    with httpx.stream("GET", path, timeout=60) as answer:
        received = messages(answer)
        next(received)
        server.control.jobs.save_status(job.id, ended("Failed"))
        assert [event for event, _ in received] == ["live", "end"]
    with httpx.stream("GET", path, timeout=60) as later:
        assert [event for event, _ in messages(later)] == ["live", "end"]
    assert httpx.get(f"{server.url}/console/jobs/never/live").status_code == 404


def test_home_and_an_endpoint_arrive_as_they_change(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyrie_api.http.live_pages._REFRESH_S", {True: 30.0, False: 0.1})
    endpoints = Endpoints(server.control.database)
    endpoints.create("assistant", TargetSpec(model="quickstart"), EndpointServeSpec(), "tiny")
    with (httpx.stream("GET", f"{server.url}/console/live", timeout=60) as home,
          httpx.stream("GET", f"{server.url}/console/endpoints/assistant/live", timeout=60) as one):
        at_home, at_one = messages(home), messages(one)
        shows(at_home, "No job yet")
        shows(at_one, "Endpoint assistant")
        server.client.create_job(job_spec(name="nightly"))
        shows(at_home, "nightly", "assistant")
        endpoints.propose("assistant", job_id=None, checkpoint="base-step-7", drafter_dir="/d", reason="better",
                          tau=2.5, tree=DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4))
        shows(at_one, "base-step-7", "Roll back")


def test_a_page_of_older_jobs_keeps_to_them_while_new_ones_arrive_and_readers_of_a_page_share_it(
        server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyrie_api.http.live_pages._REFRESH_S", {True: 30.0, False: 0.1})
    monkeypatch.setattr("eyrie_api.http.console.pages.NEWEST_JOBS", 2)
    keys, original = list[PageKey](), LivePages.stream

    def stream(mine: LivePages, key: PageKey, render: Render) -> AsyncIterator[bytes]:
        keys.append(key)
        return original(mine, key, render)

    monkeypatch.setattr(LivePages, "stream", stream)
    old = server.client.create_job(job_spec(name="night-0"))
    for number in (1, 2):
        server.client.create_job(job_spec(name=f"night-{number}"))
    cursor = server.client.jobs(limit=2).next_cursor
    with (httpx.stream("GET", f"{server.url}/console/live", timeout=60) as first,
          httpx.stream("GET", f"{server.url}/console/live", timeout=60) as second,
          httpx.stream("GET", f"{server.url}/console/live?before={cursor}", timeout=60) as older):
        at_first, at_second, at_older = messages(first), messages(second), messages(older)
        shows(at_first, "night-1", "Older jobs")
        shows(at_second, "night-1")
        stream_of = f'data-stream="/console/live?before={cursor}"'
        assert "night-1" not in shows(at_older, "night-0", "Newest jobs", stream_of)
        server.client.create_job(job_spec(name="night-3"))
        assert "night-1<" not in shows(at_first, "night-3", "night-2")
        server.control.jobs.save_status(old.id, ended("Succeeded"))
        changed = shows(at_older, "night-0", "Succeeded")
        assert not [name for name in ("night-1", "night-2", "night-3") if name in changed]
    assert sorted(keys.count(one) for one in set(keys)) == [1, 2], "equal keys are one page"


def test_a_silent_stream_sends_heartbeats_with_their_interval_and_nothing_else(server: Running) -> None:
    job = server.client.create_job(job_spec())
    with httpx.stream("GET", f"{server.url}/console/jobs/{job.id}/live", timeout=60) as answer:
        received = events(answer)
        beat = ("heartbeat", {"interval_s": 0.2, "stale": None})
        assert next(received) == beat
        part(received)
        assert [next(received) for _ in range(4)] == [beat] * 4


def test_a_stream_says_while_the_database_fails_since_when_its_page_is_not_current_and_goes_on_by_itself(
        server: Running) -> None:
    job = server.client.create_job(job_spec(name="nightly"))
    path, opened = f"{server.url}/console/jobs/{job.id}/live", utc_now()
    with httpx.stream("GET", path, timeout=60) as answer, httpx.stream("GET", path, timeout=60) as waiting:
        received = events(answer)
        assert next(received)[1]["stale"] is None
        assert "nightly" in part(received)
        rename_table(server, "stages", "elsewhere")
        stale = next(data["stale"] for event, data in received if event == "heartbeat" and data["stale"] is not None)
        assert stale["reason"] == "the database is unavailable"
        assert opened < datetime.fromisoformat(stale["since"]) < utc_now()
        assert [next(received)[1]["stale"] for _ in range(3)] == [stale] * 3, "the time stays"
        assert next(one["stale"] for one in heartbeats(waiting) if one["stale"]) == stale, "to each reader"
        rename_table(server, "elsewhere", "stages")
        advance(server, job.id, "capture", 25)
        assert any("25 % of 100 rows" in one for one in until_current(received))


def test_a_stream_says_that_its_page_is_not_rendered_without_the_reason_inside_until_it_is(
        server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyrie_api.http.live_pages._REFRESH_S", {True: 30.0, False: 0.1})
    job, original, is_broken = server.client.create_job(job_spec()), pages.rendered, threading.Event()

    def rendered(template: str, values: Any) -> str:
        if is_broken.is_set():
            raise ValueError("a secret of the server")
        return original(template, values)

    monkeypatch.setattr(pages, "rendered", rendered)
    with httpx.stream("GET", f"{server.url}/console/jobs/{job.id}/live", timeout=60) as answer:
        received = events(answer)
        part(received)
        is_broken.set()
        advance(server, job.id, "capture", 25)
        stale = next(data["stale"] for event, data in received if event == "heartbeat" and data["stale"] is not None)
        assert stale["reason"] == "the server cannot render this page; its log says why"
        is_broken.clear()
        after = until_current(received)
        assert any("25 % of 100 rows" in one for one in after)
        assert "secret" not in str(after)


def until_current(received: Iterator[tuple[str, Any]]) -> list[str]:
    """The live parts until a heartbeat says that the page is current and it shows a progress."""
    parts, is_current = list[str](), False
    for event, data in received:
        parts += [data] if event == "live" else []
        is_current = data["stale"] is None if event == "heartbeat" else is_current
        if is_current and any(" % of " in one for one in parts):
            break
    return parts


def rename_table(server: Running, name: str, to: str) -> None:
    """A database that fails in reading what pages show."""
    with server.control.database.engine.begin() as connection:
        connection.execute(text(f"ALTER TABLE {name} RENAME TO {to}"))


def test_a_page_is_rendered_once_for_all_who_may_see_the_same(
        server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    job, rendered, original = server.client.create_job(job_spec()), list[str](), pages.rendered

    def counted(template: str, values: Any) -> str:
        rendered.append(template)
        return original(template, values)

    monkeypatch.setattr(pages, "rendered", counted)
    seen: list[list[str]] = [[] for _ in range(12)]

    def read(into: list[str]) -> None:
        with httpx.stream("GET", f"{server.url}/console/jobs/{job.id}/live", timeout=60) as answer:
            for event, html in messages(answer):
                into += [html] if event == "live" else []

    readers = [threading.Thread(target=read, args=(into,), daemon=True) for into in seen]
    for reader in readers:
        reader.start()
    while not all(seen):  # whoever comes after the end has a page of its own
        readers[0].join(0.05)
    for done in range(5):
        advance(server, job.id, "capture", done)
    server.control.jobs.save_status(job.id, ended("Succeeded"))
    for reader in readers:
        reader.join(60)
        assert not reader.is_alive()
    assert all("Succeeded" in one[-1] for one in seen)
    assert rendered.count("job_live.html") < len(readers), "one rendering for each change, not for each reader"
    assert not server.control.database.engine.pool.checkedout(), "no stream holds a connection"  # type: ignore[attr-defined]


def test_a_revoked_key_ends_the_stream_and_opens_no_other(
        settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyrie_api.http.authentication.CACHED_S", 0.0)
    monkeypatch.setattr("eyrie_api.http.middleware._REAUTHENTICATE_S", 0.1)
    with serving(settings.model_copy(update={"token": TOKEN}), database) as server:
        job = server.client.create_job(job_spec())
        key, secret = ApiKeys(database).create(name="k", role="viewer", everywhere=True)
        with httpx.Client(base_url=server.url, timeout=60) as browser:
            browser.post("/console/sign-in", headers={"authorization": f"Bearer {secret}"}).raise_for_status()
            with browser.stream("GET", f"/console/jobs/{job.id}/live") as answer:
                received = messages(answer)
                assert "<button" not in next(received)[1], "a viewer's page"
                ApiKeys(database).revoke(key.id)
                assert list(received) == []
            assert browser.get(f"/console/jobs/{job.id}/live").status_code == 401


def test_after_a_restart_of_the_server_a_new_stream_has_the_page_as_it_is(
        settings: Settings, database: Database) -> None:
    with serving(settings, database) as server:
        job = server.client.create_job(job_spec())
        with httpx.stream("GET", f"{server.url}/console/jobs/{job.id}/live", timeout=60) as answer:
            shows(messages(answer), "Pending")
    with serving(settings, database) as server:
        advance(server, job.id, "capture", 75)
        with httpx.stream("GET", f"{server.url}/console/jobs/{job.id}/live", timeout=60) as answer:
            shows(messages(answer), "75 % of 100 rows")


def test_a_page_takes_at_most_a_hundredth_of_the_processor_however_often_it_changes() -> None:
    assert is_due(True, age_s=float("inf"), stale_s=30.0, took_s=0.0), "the first time"
    assert is_due(True, age_s=0.5, stale_s=30.0, took_s=0.005)
    assert not is_due(True, age_s=0.5, stale_s=30.0, took_s=0.05)
    assert is_due(True, age_s=5.0, stale_s=30.0, took_s=0.05)
    assert not is_due(False, age_s=5.0, stale_s=5.0, took_s=0.1), "stale, and rendering takes too long"
    assert is_due(False, age_s=10.0, stale_s=5.0, took_s=0.1)


def test_one_long_rendering_keeps_no_reader_waiting() -> None:
    assert not is_due(True, age_s=9.0, stale_s=30.0, took_s=5.0)
    assert is_due(True, age_s=10.0, stale_s=30.0, took_s=5.0)
