"""What the driver reads of a job's directory and of its endpoint before it decides, and the events for what changed.

Events are a function of two statuses. The driver stores them in the transaction of the new status: a kill loses no
event and repeats none.
"""

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from eyrie_api.artifacts import MANIFEST, read_manifest
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.reports import PromotionDecision
from eyrie_api.contract.resolved import ResolvedJob
from eyrie_api.contract.stages import STAGES
from eyrie_api.contract.status import Condition, Endpoint, Job, JobStatus
from eyrie_api.database.jobs import NewEvent
from eyrie_operator.conditions import find
from eyrie_operator.jobs.reconcile import ObservedServing, ObservedStage
from eyrie_operator.unscheduled import WAITS
from eyrie_pipelines.run_records import read_record, read_stage_failure
from eyrie_pipelines.stage_specs import stage_keys
from eyrie_workers.catalog import CATALOG, stage_dir

OUTCOME_FILE = "outcome.json"


class AttemptOutcome(Frozen):
    """`outcome.json`: what was decided in one attempt, and the revision it was promoted to."""

    attempt: int
    decision: PromotionDecision
    endpoint: str | None = None
    revision: int | None = None


def observe_serving(endpoint: Endpoint, revision: int) -> ObservedServing:
    if endpoint.candidate_revision == revision and endpoint.desired == "off":
        return ObservedServing("off", "Off", f"the endpoint is switched off: revision {revision} starts when it is "
                               "switched on", endpoint.name)
    if endpoint.candidate_revision == revision:
        serving = find(endpoint.conditions, "Serving")
        if serving is not None and serving.reason in WAITS:
            return ObservedServing("deploying", serving.reason, serving.message, endpoint.name)
        return ObservedServing("deploying", "Deploying", f"revision {revision} is starting", endpoint.name)
    if endpoint.active_revision == revision:
        return ObservedServing("serving", "Healthy", f"revision {revision} serves at {endpoint.url}", endpoint.name)
    row = endpoint.revision(revision)
    newest = max(endpoint.active_revision or 0, endpoint.candidate_revision or 0)
    if newest > revision and (row is None or row.state not in ("rejected", "rolled-back")):
        return ObservedServing("serving", "Superseded", f"revision {revision} was replaced by {newest}", endpoint.name)
    reason, _, message = ((row.rejected_reason if row is not None else None) or "").partition(": ")
    return ObservedServing("rolled-back", reason or "RolledBack", message or f"revision {revision} was rolled back",
                           endpoint.name)


def read_outcome(job_dir: Path, attempt: int, status: JobStatus) -> AttemptOutcome | None:
    """The outcome of this attempt; None before it was decided. Damaged, it is what the job's row knows of it: deciding
    again could find the job's own drafter as the incumbent."""
    path = job_dir / OUTCOME_FILE
    outcome = read_record(path, AttemptOutcome)
    if outcome is None and path.exists():
        return outcome_of(status, attempt)
    return outcome if outcome is not None and outcome.attempt == attempt else None


def outcome_of(status: JobStatus, attempt: int) -> AttemptOutcome | None:
    """The outcome as a status has it. Its revision is found when it is promoted again, which proposes nothing new."""
    if status.attempt != attempt or status.decision is None:
        return None
    return AttemptOutcome(attempt=attempt, decision=status.decision)


def observe_stages(job: Job, resolved: ResolvedJob, job_dir: Path) -> Iterator[ObservedStage]:
    """Every stage of a job and each of its members known so far, in the pipeline's order: candidates as in the sweep,
    checkpoints by step."""
    started = {(stage.stage, stage.key): stage.started_at for stage in job.status.stages}
    for stage in STAGES:
        for key in stage_keys(resolved, job_dir, stage):
            directory, started_at = stage_dir(job_dir, stage, key), started.get((stage, key))
            if started_at is None:
                with contextlib.suppress(FileNotFoundError):
                    started_at = datetime.fromtimestamp((directory / "spec.json").stat().st_mtime, UTC)
            manifest = read_manifest(directory) if (directory / MANIFEST).exists() else None
            failure = read_stage_failure(directory) if manifest is None else None
            yield ObservedStage(stage, key, started_at, manifest, failure)


# Events.


def changes(before: JobStatus, after: JobStatus) -> Iterator[NewEvent]:
    """An event for each stage, and for each condition that is not a stage's, that differs between the statuses."""
    for stage in after.stages:
        known = next((each for each in before.stages if (each.stage, each.key) == (stage.stage, stage.key)), None)
        name, changed = f"{stage.stage} {stage.key}".rstrip(), known is None or known.state != stage.state
        if changed and stage.state == "Failed":
            yield NewEvent(stage.reason or "StageFailed", f"{name}: {stage.message}; {stage.hint}", type="Warning",
                           stage=stage.stage, key=stage.key)
        # It may have started and finished between two observations.
        if changed and stage.state in ("Running", "Succeeded") and (known is None or known.state != "Running"):
            yield NewEvent("StageStarted", f"{name} started", stage=stage.stage, key=stage.key)
        if changed and stage.state == "Succeeded":
            yield NewEvent("StageFinished", f"{name} finished", stage=stage.stage, key=stage.key)
        if stage.state in ("Pending", "Running") and stage.reason and (known is None or known.reason != stage.reason):
            yield NewEvent(stage.reason, f"{name}: {stage.message}; hint: {stage.hint}", stage=stage.stage,
                           type="Normal" if stage.reason == "WaitingForQueue" else "Warning", key=stage.key)
    for condition in after.conditions:
        previous = find(before.conditions, condition.type)
        same = previous is not None and (previous.status, previous.reason) == (condition.status, condition.reason)
        repeats = condition.type == "Succeeded" and condition.status == "False"  # Failed or Cancelled says the same
        of_stage = any(stage.condition == condition.type for stage in CATALOG.values())
        if not same and not repeats and not of_stage:
            reason, warning = _event_of(condition)
            yield NewEvent(reason, condition.message, type="Warning" if warning else "Normal")


def _event_of(condition: Condition) -> tuple[str, bool]:
    """Reason of the event for a changed condition, and whether it is a warning."""
    if condition.type == "Accepted" and condition.reason not in ("JobAccepted", "Queued"):
        return condition.reason, True
    if condition.status == "True":
        return (condition.reason, True) if condition.type == "Failed" else (condition.type, False)
    return condition.reason, condition.status == "False" and condition.reason not in (
        "Cancelled", "NotFaster", "PromotionOff")
