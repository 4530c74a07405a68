"""Status conditions: set them, read them, and derive the phase of a job.

A condition is an observation (`Trained=False, reason=LossDiverged`), never a command. Its transition time changes only
with its status. `phase_of` derives the word that a list of jobs shows; no decision depends on it.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Literal

from eyrie_api.contract.promotion import DriftSpec
from eyrie_api.contract.status import Condition, ConditionStatus, ConditionType, Phase

Conditions = tuple[Condition, ...]
_ENDS: tuple[Literal["Succeeded", "Failed", "Cancelled"], ...] = ("Succeeded", "Failed", "Cancelled")


def find(conditions: Iterable[Condition], kind: str) -> Condition | None:
    """The condition of that type; None when it has not been observed."""
    return next((condition for condition in conditions if condition.type == kind), None)


def is_true(conditions: Iterable[Condition], kind: ConditionType) -> bool:
    condition = find(conditions, kind)
    return condition is not None and condition.status == "True"


def observe(conditions: Conditions, kind: str, status: ConditionStatus, reason: str, message: str,
            now: datetime) -> Conditions:
    """`conditions` with this observation; an unchanged status keeps its transition time."""
    before = find(conditions, kind)
    since = before.last_transition_time if before is not None and before.status == status else now
    new = Condition(type=kind, status=status, reason=reason, message=message, last_transition_time=since)
    if before is None:
        return (*conditions, new)
    return tuple(new if condition.type == kind else condition for condition in conditions)


def observe_recording(conditions: Conditions, drift: DriftSpec, recorded_prompts: int, now: datetime) -> Conditions:
    """The condition Recording: whether an endpoint's requests are kept to retrain on. It is observed from the first
    day, because requests that were answered before drift is reported cannot be recorded afterwards. Absent where drift
    is ignored."""
    if drift.action == "ignore":
        return conditions
    if recorded_prompts or drift.traffic_file is not None:
        return observe(conditions, "Recording", "True", "Recorded", "", now)
    message = ("no request is kept, so there will be nothing to retrain on when the traffic drifts: submit a job for "
               "this endpoint with serve.record_prompts, or with promotion.drift.traffic_file, a log of your own")
    return observe(conditions, "Recording", "False", "NothingRecorded", message, now)


def remove(conditions: Conditions, *kinds: ConditionType) -> Conditions:
    """`conditions` without those types, for the next attempt of a job."""
    return tuple(condition for condition in conditions if condition.type not in kinds)


def is_over(conditions: Conditions) -> bool:
    return any(is_true(conditions, kind) for kind in _ENDS)


def phase_of(conditions: Conditions, *, started: bool, cancel_requested: bool) -> Phase:
    """The phase, for display."""
    for end in _ENDS:
        if is_true(conditions, end):
            return end
    if cancel_requested:
        return "Cancelling"
    return "Running" if started else "Pending"
