"""Following objects of a kind: from a list, from version to version, over errors, and over versions that are gone."""

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eyrie_operator.cluster import client
from eyrie_operator.cluster.client import Cluster
from tests.operator.cluster.apiserver import ApiServer, serving

API = "eyrie.dev/v1alpha1"
JOBS = f"/apis/{API}/namespaces/team/drafterjobs"
DEADLINE_S = 60.0
"""For an event that is a millisecond away: tests share the machine."""


class Followed:
    """The DrafterJobs of a server, and the events that a watch of them reported."""

    def __init__(self, server: ApiServer) -> None:
        self.server, self.stopping = server, threading.Event()
        self.events: queue.Queue[tuple[str, str, int | None]] = queue.Queue()

    def follow(self) -> None:
        def handle_event(event: str, raw: dict[str, Any]) -> None:
            self.events.put((event, raw["metadata"]["name"], raw.get("spec", {}).get("step")))

        Cluster().watch(API, "DrafterJob", None, self.stopping, handle_event)

    def put(self, name: str, step: int = 0) -> None:
        self.server.put(f"{JOBS}/{name}", {"kind": "DrafterJob", "metadata": {"name": name, "namespace": "team"},
                                           "spec": {"step": step}})

    def delete(self, name: str) -> None:
        self.server.answer("DELETE", f"{JOBS}/{name}", {}, {})

    def reported(self, number: int) -> list[tuple[str, str, int | None]]:
        """The next events."""
        return [self.events.get(timeout=DEADLINE_S) for _ in range(number)]


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Followed]:
    monkeypatch.setattr(client, "_WATCH_PAUSE_S", 0.001)
    monkeypatch.setattr(client, "_WATCH_RETRY_S", 0.001)
    followed = Followed(ApiServer((API,)))
    with serving(followed.server, tmp_path, monkeypatch):
        thread = threading.Thread(target=followed.follow, daemon=True)
        thread.start()
        yield followed
        followed.stopping.set()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert followed.events.empty()


def test_every_change_is_reported_once_and_in_order_over_many_watches(jobs: Followed) -> None:
    jobs.put("a")
    assert jobs.reported(1) == [("ADDED", "a", 0)]
    for step in range(1, 6):
        jobs.put("a", step)
    jobs.put("b")
    assert jobs.reported(6) == [*(("MODIFIED", "a", step) for step in range(1, 6)), ("ADDED", "b", 0)]
    jobs.delete("a")
    assert jobs.reported(1) == [("DELETED", "a", 5)]
    assert jobs.server.requests["GET"] == 1  # listed once


def test_after_its_version_is_gone_it_lists_again_and_reports_what_is_missing_as_deleted(jobs: Followed) -> None:
    for name in ("a", "b"):
        jobs.put(name)
    assert jobs.reported(2) == [("ADDED", "a", 0), ("ADDED", "b", 0)]
    jobs.server.away = True
    del jobs.server.objects[f"{JOBS}/a"]
    jobs.put("c")
    jobs.server.forget()
    jobs.server.away = False
    assert jobs.reported(3) == [("ADDED", "b", 0), ("ADDED", "c", 0), ("DELETED", "a", None)]
    jobs.put("b", 2)
    assert jobs.reported(1) == [("MODIFIED", "b", 2)]


def test_a_kind_that_is_not_served_yet_is_waited_for_and_that_is_logged_once(
        jobs: Followed, caplog: pytest.LogCaptureFixture) -> None:
    jobs.put("a")
    assert jobs.reported(1) == [("ADDED", "a", 0)]
    jobs.server.apis = ()  # a chart may start the operator before the API server serves its definitions
    jobs.server.forget()
    listed = jobs.server.requests["GET"]
    while jobs.server.requests["GET"] < listed + 3:
        jobs.stopping.wait(0.001)
    jobs.server.apis = (API,)
    assert jobs.reported(1) == [("ADDED", "a", 0)]
    assert len([one for one in caplog.records if "changes of DrafterJob are not seen" in one.message]) == 1


def test_changes_while_the_server_is_away_are_reported_when_it_is_back(jobs: Followed) -> None:
    jobs.put("a")
    assert jobs.reported(1) == [("ADDED", "a", 0)]
    jobs.server.away = True
    jobs.put("a", 1)
    jobs.put("a", 2)
    asked = jobs.server.requests["WATCH"]
    while jobs.server.requests["WATCH"] < asked + 3:
        jobs.stopping.wait(0.001)
    jobs.server.away = False
    assert jobs.reported(2) == [("MODIFIED", "a", 1), ("MODIFIED", "a", 2)]
    assert jobs.server.requests["GET"] == 1
