"""Events of a job: one for each stage and each condition that changed between two statuses. Pure.

The driver stores them in the transaction of the new status: a kill loses no event and repeats none.
"""

from collections.abc import Iterator

from eyrie_api.database.jobs import NewEvent
from eyrie_api.v1alpha1.stages import StageName
from eyrie_api.v1alpha1.status import Condition, JobStatus, StageState, StageStatus
from eyrie_operator.conditions import find
from eyrie_workers.catalog import CATALOG


def changes(before: JobStatus, after: JobStatus) -> Iterator[NewEvent]:
    """An event for each stage, and for each condition that is not a stage's, that differs between the statuses."""
    for stage in after.stages:
        known = next((each for each in before.stages if (each.stage, each.key) == (stage.stage, stage.key)), None)
        if known is None or known.state != stage.state:
            yield from _of_stage(stage, None if known is None else known.state)
        if stage.state in ("Pending", "Running") and stage.reason and (known is None or known.reason != stage.reason):
            yield NewEvent(stage.reason, f"{_name(stage)}: {stage.message}; hint: {stage.hint}", stage=stage.stage,
                           type="Normal" if stage.reason == "WaitingForQueue" else "Warning", key=stage.key)
    for condition in after.conditions:
        previous = find(before.conditions, condition.type)
        same = previous is not None and (previous.status, previous.reason) == (condition.status, condition.reason)
        repeats = condition.type == "Succeeded" and condition.status == "False"  # Failed or Cancelled says the same
        if not same and not repeats and _stage_of(condition.type) is None:
            reason, warning = _event_of(condition)
            yield NewEvent(reason, condition.message, type="Warning" if warning else "Normal")


def _of_stage(stage: StageStatus, before: StageState | None) -> Iterator[NewEvent]:
    name = _name(stage)
    if stage.state == "Failed":
        yield NewEvent(stage.reason or "StageFailed", f"{name}: {stage.message}; {stage.hint}", type="Warning",
                       stage=stage.stage, key=stage.key)
    elif stage.state in ("Running", "Succeeded"):
        if before != "Running":  # it may have started and finished between two observations
            yield NewEvent("StageStarted", f"{name} started", stage=stage.stage, key=stage.key)
        if stage.state == "Succeeded":
            yield NewEvent("StageFinished", f"{name} finished", stage=stage.stage, key=stage.key)


def _name(stage: StageStatus) -> str:
    return f"{stage.stage} {stage.key}".rstrip()


def _event_of(condition: Condition) -> tuple[str, bool]:
    """Reason of the event for a changed condition, and whether it is a warning."""
    if condition.type == "Accepted" and condition.reason not in ("JobAccepted", "Queued"):
        return condition.reason, True
    if condition.status == "True":
        return (condition.reason, True) if condition.type == "Failed" else (condition.type, False)
    return condition.reason, condition.status == "False" and condition.reason not in (
        "Cancelled", "NotFaster", "PromotionOff")


def _stage_of(kind: str) -> StageName | None:
    return next((stage.name for stage in CATALOG.values() if stage.condition == kind), None)
