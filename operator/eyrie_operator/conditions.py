"""Status as observations: how conditions are set, read, and summed up in one word for people.

A condition is an observation (`Trained=False, reason=LossDiverged`), never a command. Its transition time moves only
when its status changes, so that "since when" can be read off it. `phase_of` derives the one word a list of jobs shows;
no decision is ever made from that word.
"""

from collections.abc import Iterable
from datetime import datetime

from eyrie_api.v1alpha1.status import Condition, ConditionStatus, ConditionType, Phase

Conditions = tuple[Condition, ...]


def find(conditions: Iterable[Condition], kind: str) -> Condition | None:
    """The condition of that type, if it has been observed."""
    return next((one for one in conditions if one.type == kind), None)


def is_true(conditions: Iterable[Condition], kind: ConditionType) -> bool:
    """Whether the condition has been observed to hold."""
    found = find(conditions, kind)
    return found is not None and found.status == "True"


def observe(conditions: Conditions, kind: str, status: ConditionStatus, reason: str, message: str,
            now: datetime) -> Conditions:
    """`conditions` with this observation; an unchanged status keeps its transition time."""
    before = find(conditions, kind)
    since = before.last_transition_time if before is not None and before.status == status else now
    new = Condition(type=kind, status=status, reason=reason, message=message, last_transition_time=since)
    if before is None:
        return (*conditions, new)
    return tuple(new if one.type == kind else one for one in conditions)


def forget(conditions: Conditions, *kinds: ConditionType) -> Conditions:
    """`conditions` without those types: a retried job is no longer observed to have failed."""
    return tuple(one for one in conditions if one.type not in kinds)


def is_over(conditions: Conditions) -> bool:
    """Whether the job has reached an end."""
    return any(is_true(conditions, kind) for kind in ("Succeeded", "Failed", "Cancelled"))


def phase_of(conditions: Conditions, *, started: bool, cancel_requested: bool) -> Phase:
    """One word for people."""
    if is_true(conditions, "Succeeded"):
        return "Succeeded"
    if is_true(conditions, "Failed"):
        return "Failed"
    if is_true(conditions, "Cancelled"):
        return "Cancelled"
    if cancel_requested:
        return "Cancelling"
    return "Running" if started else "Pending"
