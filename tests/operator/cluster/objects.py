"""Objects of the cluster and their jobs, as values."""

from datetime import UTC, datetime, timedelta
from typing import Any

from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.resources import FINALIZER, UID_LABEL
from eyrie_api.contract.status import Condition, Job, JobStatus, Phase
from eyrie_operator.cluster.reconcile import Actions, UpdateStatus
from tests.api.samples import job_body

NOW = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)
UID = "8822f048-7d4e-4f49-9a08-109a8dd11065"


def drafter_job(*, held: bool = True, deleting: bool = False, annotations: dict[str, str] | None = None,
                labels: dict[str, str] | None = None, status: dict[str, Any] | None = None, name: str = "mine",
                generation: int = 1, **spec: Any) -> dict[str, Any]:
    """A DrafterJob as the API server gives it."""
    metadata: dict[str, Any] = {"name": name, "namespace": "team", "uid": UID, "generation": generation,
                                "resourceVersion": "7", "annotations": annotations or {}, "labels": labels or {}}
    if held:
        metadata["finalizers"] = [FINALIZER]
    if deleting:
        metadata["deletionTimestamp"] = "2026-11-21T11:59:00Z"
    return {"apiVersion": "eyrie.dev/v1alpha1", "kind": "DrafterJob", "metadata": metadata,
            "spec": {"job": job_body(), **spec}, **({"status": status} if status is not None else {})}


def job(phase: Phase = "Running", *conditions: tuple[str, str, str], attempt: int = 1,
        ended_s_ago: float | None = None, labels: dict[str, str] | None = None) -> Job:
    """A job with those conditions (type, status, reason), all an hour old."""
    since = NOW - timedelta(hours=1)
    result = tuple(Condition.model_validate({"type": kind, "status": status, "reason": reason,
                                           "last_transition_time": since})
                 for kind, status, reason in (("Accepted", "True", "JobAccepted"), *conditions))
    status = JobStatus(phase=phase, conditions=result, attempt=attempt, started_at=since,
                       finished_at=None if ended_s_ago is None else NOW - timedelta(seconds=ended_s_ago))
    spec = JobSpec.model_validate(job_body(labels={UID_LABEL: UID} if labels is None else labels))
    return Job(id="job-abc", created_at=since, updated_at=since, spec=spec, status=status)


def succeeded(ended_s_ago: float = 60.0) -> Job:
    return job("Succeeded", ("Succeeded", "True", "Completed"), ended_s_ago=ended_s_ago)


def cancelled(attempt: int = 1) -> Job:
    return job("Cancelled", ("Succeeded", "False", "Cancelled"), ("Cancelled", "True", "Requested"), attempt=attempt,
               ended_s_ago=5.0)


def projected(actions: Actions) -> dict[str, Any]:
    """The status that is to be written."""
    return next(one.status for one in actions if isinstance(one, UpdateStatus))


def conditions(actions: Actions) -> dict[str, tuple[str, str]]:
    """By type: status and reason that are to be written."""
    return {one["type"]: (one["status"], one["reason"]) for one in projected(actions)["conditions"]}
