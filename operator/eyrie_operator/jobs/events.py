"""Events of a job: one for each stage and each condition that changed between two statuses."""

from eyrie_api.database.jobs import Jobs
from eyrie_api.v1alpha1.stages import StageName
from eyrie_api.v1alpha1.status import Condition, Job, JobStatus, StageState, StageStatus
from eyrie_operator.conditions import find
from eyrie_workers.catalog import CATALOG


def record_changes(jobs: Jobs, job: Job, after: JobStatus) -> None:
    """Record an event for each stage, and for each condition that is not a stage's, that `after` changes in `job`."""
    for stage in after.stages:
        before = next((each for each in job.status.stages if (each.stage, each.key) == (stage.stage, stage.key)), None)
        if before is None or before.state != stage.state:
            _record_stage(jobs, job.id, stage, None if before is None else before.state)
    for condition in after.conditions:
        previous = find(job.status.conditions, condition.type)
        same = previous is not None and (previous.status, previous.reason) == (condition.status, condition.reason)
        if not same and _stage_of(condition.type) is None:
            reason, warning = _event_of(condition)
            jobs.record_event(job.id, reason, condition.message, type="Warning" if warning else "Normal")


def _record_stage(jobs: Jobs, job_id: str, stage: StageStatus, before: StageState | None) -> None:
    name = f"{stage.stage} {stage.key}".rstrip()
    if stage.state == "Failed":
        jobs.record_event(job_id, stage.reason or "StageFailed", f"{name}: {stage.message}; {stage.hint}",
                          type="Warning", stage=stage.stage, key=stage.key)
    elif stage.state in ("Running", "Succeeded"):
        if before != "Running" and stage.state == "Succeeded":  # it started and finished between two observations
            jobs.record_event(job_id, "StageStarted", f"{name} started", stage=stage.stage, key=stage.key)
        reason = "StageStarted" if stage.state == "Running" else "StageFinished"
        verb = "started" if stage.state == "Running" else "finished"
        jobs.record_event(job_id, reason, f"{name} {verb}", stage=stage.stage, key=stage.key)


def _event_of(condition: Condition) -> tuple[str, bool]:
    """Reason of the event for a changed condition, and whether it is a warning."""
    if condition.type == "Accepted" and condition.reason not in ("JobAccepted", "Queued"):
        return condition.reason, True
    if condition.status == "True":
        return (condition.reason, True) if condition.type == "Failed" else (condition.type, False)
    return condition.reason, condition.status == "False" and condition.reason not in ("Cancelled", "NotFaster")


def _stage_of(kind: str) -> StageName | None:
    return next((stage.name for stage in CATALOG.values() if stage.condition == kind), None)
