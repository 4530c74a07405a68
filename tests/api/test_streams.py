"""Events by SSE and JSON, logs that grow, artifacts, reports, endpoints: through the real client over real HTTP."""

import http.client  # sends a path as it is written; httpx would tidy it first
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from eyrie_api.artifacts import digest_bytes
from eyrie_api.client import Client, Unreachable
from eyrie_api.contract.status import Event, Job, StageStatus
from eyrie_api.decisions.leaderboard import MeasuredCheckpoint
from eyrie_api.errors import ArtifactCorrupt, Conflict, InvalidInput, NotFound, TargetNotFound
from eyrie_api.http import event_fanout
from eyrie_api.http.routes import streams
from eyrie_api.http.routes.jobs import JOBS
from tests.api.conftest import Running
from tests.api.samples import (
    NOW,
    benchmark_report,
    ended,
    finish_stage,
    job_spec,
    record_event,
    record_metrics,
    set_stage,
)


@pytest.fixture
def job(server: Running) -> Job:
    return server.client.create_job(job_spec())


def in_thread(events: Iterator[Event]) -> tuple[threading.Thread, list[str]]:
    """Read a live stream beside the test; the list grows as events come."""
    seen: list[str] = []

    def read() -> None:
        for event in events:
            seen.append(event.reason)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread, seen


def test_events_come_live_and_the_stream_ends_with_the_job(server: Running, job: Job) -> None:
    thread, seen = in_thread(server.client.events(job.id))
    for number in range(3):
        record_event(server.control.jobs, job.id, f"Step{number}", "x")
    server.control.jobs.save_status(job.id, ended("Succeeded"))
    record_event(server.control.jobs, job.id, "Last", "written after the end")
    thread.join(60)
    assert not thread.is_alive()
    assert seen[:4] == ["Accepted", "Step0", "Step1", "Step2"]
    assert list(server.client.events(job.id))[-1].reason == "Last"


def test_a_stream_resumes_behind_the_last_event_id_and_misses_nothing(server: Running, job: Job) -> None:
    record_event(server.control.jobs, job.id, "First", "x")
    first = server.control.jobs.events(job.id)[-1]
    record_event(server.control.jobs, job.id, "Second", "line one\nline two")
    server.control.jobs.save_status(job.id, ended("Failed"))
    headers = {"Accept": "text/event-stream", "Last-Event-ID": str(first.id)}
    text = httpx.get(f"{server.url}{JOBS}/{job.id}/events", headers=headers).text
    assert f"id: {first.id}\n" not in text
    assert "event: Second\n" in text
    assert text.rstrip().endswith("event: end\ndata: {}")
    assert [one.message for one in server.client.events(job.id, first.id)] == ["line one\nline two"]


def test_after_the_end_a_reader_that_has_everything_gets_204(server: Running, job: Job) -> None:
    server.control.jobs.save_status(job.id, ended("Failed"))
    last = server.control.jobs.events(job.id)[-1].id
    headers = {"Accept": "text/event-stream", "Last-Event-ID": str(last)}
    assert httpx.get(f"{server.url}{JOBS}/{job.id}/events", headers=headers).status_code == 204
    assert list(server.client.events(job.id, last)) == []


def test_a_silent_stream_sends_heartbeats(server: Running, job: Job) -> None:
    with httpx.stream("GET", f"{server.url}{JOBS}/{job.id}/events", timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        beats = (line for line in response.iter_lines() if line == ": heartbeat")
        assert [next(beats), next(beats)] == [": heartbeat"] * 2


def test_events_are_a_json_list_for_those_who_ask_for_json(server: Running, job: Job) -> None:
    events = list(server.client.events(job.id, follow=False))
    assert [event.reason for event in events] == ["Accepted"]
    assert list(server.client.events(job.id, events[-1].id, follow=False)) == []


def test_more_events_than_a_batch_are_all_streamed_in_order(
        server: Running, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((event_fanout, "_MAX_BATCH"), (streams, "_BATCH")):
        monkeypatch.setattr(module, name, 20)
    for number in range(50):
        record_event(server.control.jobs, job.id, "Tick", str(number))
    server.control.jobs.save_status(job.id, ended("Succeeded"))
    streamed = [event.message for event in server.client.events(job.id)][1:]
    assert streamed == [str(number) for number in range(50)]


@pytest.mark.parametrize("last", ["abc", "-1", "1.5", "9" * 40, "\u0663".encode()])
def test_a_last_event_id_that_is_none_is_refused(server: Running, job: Job, last: str | bytes) -> None:
    answer = httpx.get(f"{server.url}{JOBS}/{job.id}/events", headers={b"Last-Event-ID": last})  # type: ignore[dict-item]
    assert answer.status_code == 422


def test_a_stream_of_a_deleted_job_ends(server: Running, job: Job) -> None:
    thread, seen = in_thread(server.client.events(job.id))
    while not seen:
        thread.join(0.01)
    server.control.jobs.save_status(job.id, ended("Failed"))
    server.control.jobs.delete(job.id)
    thread.join(60)
    assert not thread.is_alive()


def test_a_log_is_read_whole_or_followed_until_its_stage_ends(server: Running, job: Job) -> None:
    directory = server.control.settings.stage_dir(job.id, "train", "base")
    directory.mkdir(parents=True)
    log = directory / "log.txt"
    log.write_text("first\n")
    running = StageStatus(stage="train", key="base", state="Running", started_at=NOW)
    set_stage(server.control.jobs, job.id, running)
    assert list(server.client.logs(job.id, "train", "base")) == ["first"]
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(server.client.logs(job.id, "train", "base", follow=True)),
                              daemon=True)
    reader.start()
    with log.open("a") as file:
        file.write("second\n")
    set_stage(server.control.jobs, job.id, running.model_copy(update={"state": "Succeeded"}))
    reader.join(60)
    assert lines == ["first", "second"]


def test_a_log_that_is_not_there_says_which_are(server: Running, job: Job) -> None:
    set_stage(server.control.jobs, job.id, StageStatus(stage="capture", state="Running", started_at=NOW))
    with pytest.raises(NotFound, match="has no log") as caught:
        list(server.client.logs(job.id, "train", "base"))
    assert "capture" in caught.value.hint


@pytest.mark.parametrize("key", ["../../..", "..", "a/b", "A", "x" * 64])
def test_a_log_key_that_is_a_path_is_refused(server: Running, job: Job, key: str) -> None:
    with pytest.raises(InvalidInput):
        list(server.client.logs(job.id, "train", key))


def test_metrics_are_series(server: Running, job: Job) -> None:
    record_metrics(server.control.jobs, job.id, "train", "base", [("train/loss", 1, 2.0, NOW)])
    (series,) = server.client.metrics(job.id, stage="train")
    assert (series.name, series.key, series.points[0].value) == ("train/loss", "base", 2.0)


@pytest.fixture
def measured(server: Running, job: Job) -> Job:
    """A job with one benchmarked checkpoint, in rows and on disk."""
    report = benchmark_report("base-step-9", {"chat": (2.0, 1.5)})
    key = "base-step-9"
    finish_stage(server.control.settings.stage_dir(job.id, "benchmark", key), "benchmark", report,
                 {"plots/a b.svg": b"<svg/>", "cells.json": b"[]"}, job.id)
    measured = MeasuredCheckpoint(job.id, "eagle3", "quickstart", False, report)
    server.control.results.record(measured, "stages/train/base/checkpoints/base-step-9")
    return job


def test_artifacts_are_listed_and_downloaded_with_their_digest(server: Running, measured: Job, tmp_path: Path) -> None:
    files = {file.path: file for file in server.client.artifacts(measured.id)}
    assert set(files) == {"plots/a b.svg", "cells.json"}
    path = server.client.download(files["plots/a b.svg"], tmp_path)
    assert path.read_bytes() == b"<svg/>"
    assert files["cells.json"].sha256 == digest_bytes(b"[]")
    assert server.client.artifacts(measured.id, stage="train") == ()


@pytest.mark.parametrize("path", ["../../../../eyrie.db", "..%2f..%2f..%2feyrie.db", "%2e%2e/%2e%2e/eyrie.db",
                                  "/etc/passwd", "%2Fetc%2Fpasswd", "manifest.json", "plots", "plots/../cells.json",
                                  ""])
def test_nothing_but_a_listed_file_can_be_downloaded(server: Running, measured: Job, path: str) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    url = f"{JOBS}/{measured.id}/artifacts/benchmark/{path}?key=base-step-9"
    connection = http.client.HTTPConnection(host, int(port))
    connection.request("GET", url)
    answer = connection.getresponse()
    assert answer.status == 404
    assert b"urn:eyrie:problem:NotFound" in answer.read()
    connection.close()


def test_a_link_planted_in_a_stage_is_not_followed(server: Running, measured: Job, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    place = server.control.settings.stage_dir(measured.id, "benchmark", "base-step-9") / "cells.json"
    place.unlink()
    os.symlink(tmp_path / "secret", place)
    answer = httpx.get(f"{server.url}{JOBS}/{measured.id}/artifacts/benchmark/cells.json?key=base-step-9")
    assert (answer.status_code, ArtifactCorrupt.reason in answer.text) == (500, True)


def test_a_download_that_was_altered_on_disk_is_noticed(server: Running, measured: Job, tmp_path: Path) -> None:
    file = next(one for one in server.client.artifacts(measured.id) if one.path == "cells.json")
    (server.control.settings.stage_dir(measured.id, "benchmark", "base-step-9") / "cells.json").write_bytes(b"{}")
    with pytest.raises(ArtifactCorrupt):
        server.client.download(file, tmp_path)
    answer = httpx.get(f"{server.url}{JOBS}/{measured.id}/artifacts/benchmark/cells.json?key=base-step-9")
    assert (answer.status_code, ArtifactCorrupt.reason in answer.text) == (500, True), "whoever asks"


def test_the_report_gathers_what_is_measured_so_far(server: Running, measured: Job) -> None:
    report = server.client.report(measured.id)
    assert [one.checkpoint for one in report.benchmark] == ["base-step-9"]
    assert (report.train, report.tune) == ((), None)
    assert report.seconds == {"benchmark": 3.0, "total": 3.0}
    assert report.leaderboard[0].rank == 1


def test_the_leaderboard_is_filtered_by_the_query(server: Running, measured: Job) -> None:
    assert [one.job_id for one in server.client.leaderboard(target="quickstart", lossless=True)] == [measured.id]
    assert server.client.leaderboard(tuned=True) == ()
    assert server.client.leaderboard(job_id="job-other") == ()


def test_a_measured_drafter_is_promoted_rolled_back_and_switched_off_and_on(server: Running, measured: Job) -> None:
    with pytest.raises(NotFound):
        server.client.endpoint("default")
    endpoint = server.client.promote("default", job_id=measured.id)
    assert (endpoint.active_revision, endpoint.candidate_revision) == (None, 2)
    revision = endpoint.revisions[-1]
    assert revision.drafter_dir == str(
        server.control.settings.job_dir(measured.id) / "stages/train/base/checkpoints/base-step-9")
    assert (revision.checkpoint, revision.speedup) == ("base-step-9", 1.75)
    server.control.endpoints.activate("default", 2, "http://127.0.0.1:9/v1")
    assert server.client.rollback("default").candidate_revision == 1
    assert server.client.rollback("default", revision=2).candidate_revision is None
    assert server.client.off("default").desired == "off"
    assert server.client.on("default").desired == "on"
    assert [one.name for one in server.client.endpoints().items] == ["default"]
    lookup = benchmark_report("rival-ngram", {"chat": (9.0,)}).model_copy(update={"rival": True, "family": "ngram"})
    server.control.results.record(MeasuredCheckpoint(measured.id, "ngram", "quickstart", False, lookup), "")
    assert server.client.promote("default", job_id=measured.id).candidate_revision is None  # the best drafter serves
    use = server.client.promote("default", job_id=measured.id, checkpoint="rival-ngram").revisions[-1].use
    assert (use.setting.method, use.drafter_dir) == ("ngram", None)
    with pytest.raises(NotFound, match="no measured checkpoint 'x'"):
        server.client.promote("default", job_id=measured.id, checkpoint="x")


def test_an_endpoint_name_that_is_no_label_is_refused(server: Running, measured: Job) -> None:
    with pytest.raises(InvalidInput, match="name"):
        server.client.promote("Not_A_Label", job_id=measured.id)


def test_the_client_raises_the_servers_errors_with_their_hint(server: Running, job: Job) -> None:
    with pytest.raises(TargetNotFound) as caught:
        server.client.create_job(job_spec(target={"model": "/nowhere"}))
    assert "quickstart" in caught.value.hint
    with pytest.raises(Conflict):
        server.client.retry(job.id)
    with pytest.raises(NotFound):
        server.client.job("../../version")


def test_the_client_waits_for_the_end_of_a_job(server: Running, job: Job) -> None:
    with pytest.raises(TimeoutError):
        server.client.wait(job.id, timeout_s=0.05, poll_s=0.01)
    phases: list[str] = []

    def note(seen: Job) -> None:
        phases.append(seen.status.phase)
        server.control.jobs.save_status(job.id, ended("Succeeded"))

    assert server.client.wait(job.id, timeout_s=60, poll_s=0.01, on_change=note).status.phase == "Succeeded"
    assert phases == ["Pending", "Succeeded"]


def test_a_server_that_is_not_there_is_unreachable_with_the_hint() -> None:
    with Client("http://127.0.0.1:9", timeout_s=2) as client:
        with pytest.raises(Unreachable) as caught:
            client.jobs()
        assert "eyrie up" in caught.value.hint
        assert not client.is_ready()
    with pytest.raises(InvalidInput, match="not a URL"):
        Client("http://host:port")


def test_an_event_id_that_a_reader_made_up_hides_nothing_from_the_next_reader(server: Running, job: Job) -> None:
    url, headers = f"{server.url}{JOBS}/{job.id}/events", {"Last-Event-ID": "9" * 15}
    with httpx.stream("GET", url, headers=headers, timeout=60) as silent:
        assert ": heartbeat" in silent.iter_lines()
        thread, seen = in_thread(server.client.events(job.id))
        while "Accepted" not in seen:
            thread.join(0.01)
        record_event(server.control.jobs, job.id, "Later", "x")
        server.control.jobs.save_status(job.id, ended("Failed"))
        thread.join(60)
    assert not thread.is_alive()
    assert seen == ["Accepted", "Later"]


def test_readers_of_one_job_and_of_others_all_see_everything_whoever_came_first(server: Running) -> None:
    jobs = [server.client.create_job(job_spec()) for _ in range(3)]
    readers = [in_thread(Client(server.url).events(job.id)) for job in jobs for _ in range(2)]
    for number in range(10):
        for job in jobs:
            record_event(server.control.jobs, job.id, f"Step{number}", "x")
        readers.append(in_thread(Client(server.url).events(jobs[0].id)))
    for job in jobs:
        server.control.jobs.save_status(job.id, ended("Succeeded"))
    for thread, seen in readers:
        thread.join(60)
        assert not thread.is_alive()
        assert seen == ["Accepted", *(f"Step{number}" for number in range(10))]
