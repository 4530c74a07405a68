"""DrafterJobs that wait for a quota: their rows, the route that lists them, and the home page."""

import re
from datetime import timedelta
from html import unescape
from typing import Any

import httpx
from sqlalchemy import event

from eyrie_api.access.roles import Principal
from eyrie_api.access.scope import Scope
from eyrie_api.contract.resources import WaitingList, WaitingObject
from eyrie_api.database.engine import Database
from eyrie_api.database.quotas import WaitingObjects
from eyrie_api.decisions.alerts import alerts_of
from tests.api.conftest import Running
from tests.api.samples import NOW


def waiting(name: str = "night", minutes: float = 0.0, **changes: Any) -> WaitingObject:
    return WaitingObject.model_validate({
        "namespace": "team-a", "name": name, "uid": f"uid-{name}", "project": "team", "reason": "QuotaReached",
        "message": "project 'team' may have 8 GPUs and has 8", "hint": "wait until a job ends",
        "since": NOW + timedelta(minutes=minutes), **changes})


def test_a_row_comes_back_as_it_was_written_and_is_replaced_and_removed(database: Database) -> None:
    rows, one = WaitingObjects(database), waiting()
    assert rows.find("team-a", "night") is None
    rows.record(one)
    assert rows.find("team-a", "night") == one
    changed = one.model_copy(update={"message": "project 'team' may have 8 GPUs and has 7"})
    rows.record(changed)
    assert rows.all() == (changed,)
    rows.remove(one)
    rows.remove(one)
    assert rows.all() == ()


def test_the_row_of_a_younger_object_of_the_same_name_is_not_removed(database: Database) -> None:
    rows, younger = WaitingObjects(database), waiting(uid="uid-2")
    rows.record(younger)
    rows.remove(waiting(uid="uid-1"))
    assert rows.all() == (younger,)


def test_the_longest_wait_comes_first_and_the_rest_is_counted_in_one_statement(database: Database) -> None:
    rows = WaitingObjects(database)
    for number in (2, 0, 1):
        rows.record(waiting(f"night-{number}", minutes=number))
    statements: list[str] = []
    event.listen(database.engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    listed = rows.list(limit=2)
    assert [one.name for one in listed.items] == ["night-0", "night-1"]
    assert listed.total == 3
    assert len([one for one in statements if one.startswith("SELECT")]) == 1


def test_a_viewer_of_another_project_sees_no_object_and_no_count(database: Database) -> None:
    WaitingObjects(database).record(waiting())

    def seen_by(project: str, asked: str | None = None) -> WaitingList:
        return WaitingObjects(database, Scope(Principal(subject="user:x", roles={project: "viewer"}), asked)).list()

    assert seen_by("team").items == (waiting(),)
    assert seen_by("*").total == 1
    assert seen_by("*", "other") == seen_by("other") == WaitingList(items=(), total=0)


def test_the_api_lists_what_waits(server: Running) -> None:
    assert server.client.waiting() == WaitingList(items=(), total=0)
    server.control.waiting.record(waiting())
    server.control.waiting.record(waiting("other", minutes=1))
    assert server.client.waiting(limit=1) == WaitingList(items=(waiting(),), total=2)


def test_home_names_object_project_time_reason_and_hint(server: Running) -> None:
    server.control.waiting.record(waiting())
    page = httpx.get(server.url).text
    text = " ".join(unescape(re.sub(r"<[^>]+>", " ", page)).split())
    assert ("DrafterJob team-a/night waits: QuotaReached since 2026-11-21 12:00:00 UTC , in project team: project "
            "'team' may have 8 GPUs and has 8 hint: wait until a job ends") in text
    assert f'since <time datetime="{NOW.isoformat()}">' in page, "which script shows in the viewer's time zone"


def test_home_shows_twenty_objects_and_says_how_many_more_wait(server: Running) -> None:
    for number in range(23):
        server.control.waiting.record(waiting(f"night-{number:02}", minutes=number))
    text = httpx.get(server.url).text
    assert text.count("waits: QuotaReached") == 20
    assert "night-19" in text
    assert "night-20" not in text
    assert "3 more DrafterJobs wait" in text


def test_one_more_is_said_in_the_singular_and_none_not_at_all() -> None:
    def titles(total: int) -> list[str]:
        return [one.title for one in alerts_of([], [], waiting=WaitingList(items=(waiting(),), total=total)).items]

    assert titles(2) == ["DrafterJob team-a/night waits: QuotaReached", "1 more DrafterJob waits"]
    assert titles(1) == ["DrafterJob team-a/night waits: QuotaReached"]
