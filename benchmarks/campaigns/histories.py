"""What must hold of the history of a job whose processes were killed. Pure; `chaos` collects the histories.

A job ends as one that nobody disturbed: the same phase, conditions, stages and decision; one end, one decision, each
stage finished once. Each event that a stage wrote is among the job's events once. All files have their digests, no
process is left. Each accepted job is listed once.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyrie_api.contract.records import STAGE_RECORD, EventRecord
from eyrie_api.contract.stages import JOB_STAGES

Broken = tuple[str, dict[str, Any]]
"""A rule, and the facts that show how it was broken."""

StageKey = tuple[str, str]
"""A stage, and its key or ''."""

_DECISION_FACTS = ("kind", "reason", "figures")


@dataclass(frozen=True)
class History:
    """One job that has ended."""

    job: dict[str, Any]
    """As the API shows it."""

    events: Sequence[dict[str, Any]]
    """All of its events, as the API lists them."""

    decisions: Sequence[dict[str, Any]]
    """Entries of the endpoint's history with this job's decision."""

    written: Mapping[StageKey, Sequence[str]]
    """The lines of each stage's events.jsonl."""

    damage: Sequence[str] = ()
    """Errors of manifests and files that were read and compared with their digests."""

    left: Sequence[str] = ()
    """Processes that are left of it."""


def outcome(history: History) -> dict[str, Any]:
    """What is the same for every job of one spec, whatever happened while it ran."""
    status = history.job["status"]
    return {"phase": status["phase"],
            "conditions": sorted((one["type"], one["status"], one["reason"]) for one in status["conditions"]),
            "stages": sorted((one["stage"], one["key"], one["state"]) for one in status["stages"]),
            "decisions": [{name: one[name] for name in _DECISION_FACTS} for one in history.decisions]}


def broken_rules(history: History, expected: dict[str, Any] | None = None) -> Iterator[Broken]:
    """The rules that a job's history breaks.

    expected   the outcome of a job of the same spec; None: this is the first.
    """
    status = history.job["status"]
    if status["phase"] != "Succeeded":
        wrong = [one for one in status["conditions"] if one["status"] != "True"]
        yield "a job ends as if nothing had happened", {"phase": status["phase"], "conditions": wrong}
        return
    found = outcome(history)
    if expected is not None and found != expected:
        differing = {name: [found[name], expected[name]] for name in found if found[name] != expected[name]}
        yield "a job ends as if nothing had happened", {"found and expected": differing}
    reasons = Counter(one["reason"] for one in history.events)
    if reasons["Succeeded"] != 1 or reasons["Promoted"] != 1 or reasons["Failed"] or reasons["Cancelled"]:
        yield "a job has one end and one promotion", {"reasons": dict(reasons)}
    if len(history.decisions) != 1:
        yield "a job is decided once", {"decisions": list(history.decisions)}
    yield from _broken_by_stages(history)
    ids = [one["id"] for one in history.events]
    if ids != sorted(set(ids)):
        yield "events are in order, each listed once", {"ids": ids}
    if history.damage:
        yield "all digests are right", {"damage": list(history.damage)}
    if history.left:
        yield "no process is left", {"processes": list(history.left)}


def _broken_by_stages(history: History) -> Iterator[Broken]:
    stages = [(one["stage"], one["key"]) for one in history.job["status"]["stages"]]
    if missing := set(JOB_STAGES) - {stage for stage, _key in stages}:
        yield "each stage is there", {"missing": sorted(missing)}
    for reason in ("StageStarted", "StageFinished"):
        seen = Counter((one["stage"], one["key"]) for one in history.events if one["reason"] == reason)
        wrong = {stage for stage in stages if (reason == "StageFinished" and seen[stage] != 1) or seen[stage] < 1}
        if wrong or seen.keys() - set(stages):
            yield "each finished stage is reported once", {"reason": reason, "seen": str(seen)}
    listed = Counter((one["stage"], one["key"], one["reason"], one["message"]) for one in history.events)
    for (stage, key), lines in history.written.items():
        records = [STAGE_RECORD.validate_json(line) for line in lines]
        for (reason, message), times in Counter(
                (one.reason, one.message) for one in records if isinstance(one, EventRecord)).items():
            if (num := listed[stage, key, reason, message]) != times:
                yield "each event of a stage is listed once", {"stage": stage, "key": key, "reason": reason,
                                                                "written": times, "listed": num}
    unread = [one["message"] for one in history.events if one["reason"] == "UnreadableRecord"]
    if unread:
        yield "each line that a stage writes is a record", {"lines": unread}
    silent = [stage for stage in stages if not history.written.get(stage)]
    if silent:
        yield "no event of a stage is lost", {"stages without a line": silent}


def broken_lists(accepted: Sequence[str], listed: Sequence[str]) -> Iterator[Broken]:
    """Rules about all jobs: `accepted` are the ids that clients were given, `listed` those that the API lists."""
    difference = Counter(listed)
    difference.subtract(accepted)
    if wrong := {job: num for job, num in difference.items() if num}:
        yield "each accepted job is there once, and no other", {"too often": wrong}
