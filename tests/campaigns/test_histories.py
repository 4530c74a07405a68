"""The history checker of the chaos campaign: each rule reports a violation that is made on purpose, and only that."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from benchmarks.campaigns.histories import History, StageKey, broken_lists, broken_rules, outcome
from eyrie_api.contract.records import EventRecord, ProgressRecord
from eyrie_api.contract.stages import JOB_STAGES

NOW = datetime(2026, 1, 1, tzinfo=UTC)
DECISION = {"kind": "decided", "reason": "Faster", "figures": {"speedup": 2.5}, "job_id": "job-1"}


def event(number: int, reason: str, stage: str | None = None, message: str = "") -> dict[str, Any]:
    return {"id": number, "reason": reason, "stage": stage, "key": "", "message": message}


def whole() -> History:
    events = [event(0, "JobAccepted")]
    for stage in JOB_STAGES:
        events += [event(len(events) + number, reason, stage, stage)
                   for number, reason in enumerate(("StageStarted", "Rehearsed", "StageFinished"))]
    events += [event(len(events), "Promoted"), event(len(events) + 1, "Succeeded")]
    lines: dict[StageKey, list[str]] = {(stage, ""): [ProgressRecord(time=NOW, done=0, total=1).model_dump_json(),
                           EventRecord(time=NOW, reason="Rehearsed", message=stage).model_dump_json()]
             for stage in JOB_STAGES}
    status = {"phase": "Succeeded", "stages": [{"stage": one, "key": "", "state": "Succeeded"} for one in JOB_STAGES],
              "conditions": [{"type": "Succeeded", "status": "True", "reason": "Done"}]}
    return History({"status": status}, events, [DECISION], lines)


def without(history: History, reason: str, stage: str | None = None) -> History:
    return replace(history, events=[one for one in history.events if (one["reason"], one["stage"]) != (reason, stage)])


def having(history: History, *more: dict[str, Any]) -> History:
    added = [{**one, "id": len(history.events) + number} for number, one in enumerate(more)]
    return replace(history, events=[*history.events, *added])


def with_status(history: History, **changed: Any) -> History:
    return replace(history, job={"status": history.job["status"] | changed})


def rules(history: History) -> set[str]:
    return {rule for rule, _facts in broken_rules(history, outcome(whole()))}


def test_a_whole_history_breaks_no_rule() -> None:
    assert not rules(whole())


_AS_IF = "a job ends as if nothing had happened"
_ENDS = "a job has one end and one promotion"
_REPORTED = "each finished stage is reported once"
_LISTED = "each event of a stage is listed once"


@pytest.mark.parametrize(("rule", "change"), [
    (_AS_IF, lambda one: with_status(one, phase="Failed")),
    (_AS_IF, lambda one: with_status(one, conditions=[{"type": "Succeeded", "status": "True", "reason": "Other"}])),
    (_AS_IF, lambda one: replace(one, decisions=[DECISION | {"figures": {"speedup": 1.1}}])),
    (_ENDS, lambda one: having(one, event(0, "Succeeded"))),
    (_ENDS, lambda one: without(one, "Succeeded")),
    (_ENDS, lambda one: having(one, event(0, "Promoted"))),
    (_ENDS, lambda one: without(one, "Promoted")),
    (_ENDS, lambda one: having(one, event(0, "Failed"))),
    ("a job is decided once", lambda one: replace(one, decisions=[])),
    ("a job is decided once", lambda one: replace(one, decisions=[DECISION, DECISION])),
    (_REPORTED, lambda one: having(one, event(0, "StageFinished", "train", "train"))),
    (_REPORTED, lambda one: without(one, "StageFinished", "train")),
    (_REPORTED, lambda one: without(one, "StageStarted", "train")),
    (_LISTED, lambda one: without(one, "Rehearsed", "train")),
    (_LISTED, lambda one: having(one, event(0, "Rehearsed", "train", "train"))),
    ("each line that a stage writes is a record", lambda one: having(one, event(0, "UnreadableRecord", "train", "x"))),
    ("no event of a stage is lost", lambda one: replace(one, written=one.written | {("train", ""): []})),
    ("events are in order, each listed once", lambda one: replace(one, events=list(reversed(one.events)))),
    ("events are in order, each listed once", lambda one: replace(one, events=[*one.events[:1], *one.events])),
    ("all digests are right", lambda one: replace(one, damage=["train: a file differs from its digest"])),
    ("no process is left", lambda one: replace(one, left=["4711"]))])
def test_each_rule_reports_a_violation_made_on_purpose(rule: str, change: Callable[[History], History]) -> None:
    found = rules(change(whole()))
    assert rule in found
    assert found <= {rule, _AS_IF}


def test_a_stage_that_is_missing_from_the_status_is_reported() -> None:
    stages = [one for one in whole().job["status"]["stages"] if one["stage"] != "train"]
    assert "each stage is there" in rules(with_status(whole(), stages=stages))


@pytest.mark.parametrize("listed", [["a"], ["a", "b", "b"], ["a", "b", "c"]])
def test_a_job_that_is_lost_repeated_or_not_accepted_is_reported(listed: list[str]) -> None:
    assert [rule for rule, _facts in broken_lists(["a", "b"], listed)] == [
        "each accepted job is there once, and no other"]


def test_jobs_that_are_all_there_break_no_rule() -> None:
    assert not list(broken_lists(["a", "b"], ["b", "a"]))
