"""Routes of jobs (create, get, list, cancel, retry, delete), of DrafterJobs that wait for a quota, and of plans, which
estimate a job without running it."""

import json
from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, Query, Response
from pydantic import JsonValue
from starlette.responses import JSONResponse

from eyrie_api.artifacts import digest_model
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.plan import Plan, PlannedStages
from eyrie_api.contract.resources import WaitingList
from eyrie_api.contract.status import Job, JobList, Phase, RetryRequest
from eyrie_api.database import endpoint_names
from eyrie_api.database.idempotency import Once
from eyrie_api.database.jobs import MAX_PAGE, JobFilter
from eyrie_api.errors import EyrieError, InvalidInput, NotFound
from eyrie_api.http.control import Control, EndsWithClient, RequestControl
from eyrie_api.planning import preflight
from eyrie_api.planning.facts import with_absolute_paths

router = APIRouter(tags=["jobs"])
JOBS, WAITING = "/v1alpha1/jobs", "/v1alpha1/waiting"

EXAMPLES = {
    "quickstart": {
        "summary": "The model and conversations shipped with Eyrie",
        "value": {"target": {"model": "quickstart"}, "data": {"sources": [{"path": "quickstart"}]}},
    },
    "own model": {
        "summary": "A local Hugging Face directory, own chats, two learning rates",
        "value": {
            "name": "support-bot",
            "target": {"model": "/models/qwen3-0.6b", "dtype": "float32"},
            "data": {"sources": [{"path": "/data/chats.jsonl"}], "max_conversations": 5000},
            "sweep": {"axes": [{"field": "train.learning_rate", "values": [0.001, 0.0003]}]},
            "serve": {"endpoint": "support"},
        },
    },
}
Spec = Annotated[JobSpec, Body(openapi_examples=EXAMPLES)]
KEY_HEADER = "Idempotency-Key"
IdempotencyKey = Annotated[str | None, Header(alias=KEY_HEADER, description="Sent twice, done once.")]


@router.post(JOBS, status_code=202, response_model=Job, name="job.create", dependencies=[EndsWithClient])
def create_job(spec: Spec, control: RequestControl, key: IdempotencyKey = None) -> Response:
    """Accept a job. 202 with its Location; it runs on its own from here."""
    project = control.scope.home("jobs:write")
    submitted, spec = spec, endpoint_names.with_project_endpoint(spec, project)
    once = None if key is None else Once.of(key, project, JOBS, digest_model(spec))
    try:
        checked, rules = control.checked(spec)
        resolved = preflight.check(checked, control.settings, rules)
    except EyrieError:
        replay = None if once is None else control.idempotency.find(once)
        if replay is None:
            raise
        done: Job | dict[str, Any] = replay  # accepted earlier: replayed even if the job would be refused now
    else:
        done = control.jobs.submit_once(resolved, once, project, submitted)
    if isinstance(done, Job):
        control.wake()
        text, headers = done.model_dump_json(), {"Location": f"{JOBS}/{done.id}"}
    else:
        text, headers = json.dumps(done), {"Location": f"{JOBS}/{done['id']}", "Idempotency-Replayed": "true"}
    return Response(text, status_code=202, headers=headers, media_type="application/json")


@router.get(JOBS)
def list_jobs(
    control: RequestControl,
    phase: Phase | None = None,
    name: Annotated[str | None, Query(max_length=63)] = None,
    target: Annotated[str | None, Query(max_length=4096)] = None,
    label: Annotated[list[str] | None, Query(max_length=16, description="key=value; may be repeated")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 50,
    cursor: Annotated[str | None, Query(max_length=512, description="next_cursor of the page before")] = None,
) -> JobList:
    """List jobs, newest first."""
    labels = {}
    for text in label or ():
        key, equals, labels[key] = text.partition("=")
        if not equals or not key:
            raise InvalidInput(f"label {text!r} is not key=value", "write label=team=search for the label team: search")
    return control.jobs.list(JobFilter(phase=phase, name=name, target=target, labels=labels), limit=limit,
                             cursor=cursor)


@router.get(WAITING)
def list_waiting(control: RequestControl, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> WaitingList:
    """DrafterJobs of a cluster that wait for a quota of their project, those that have waited longest first."""
    return control.waiting.list(limit=limit)


@router.get(JOBS + "/{job_id}")
def get_job(job_id: str, control: RequestControl) -> Job:
    """One job with its stages and conditions."""
    return control.jobs.get(job_id)


@router.get(JOBS + "/{job_id}/submitted")
def get_submitted(job_id: str, control: RequestControl) -> dict[str, JsonValue]:
    """The document that the job was submitted with, before defaults were filled in and paths and types resolved; `spec`
    of the job has those."""
    return control.jobs.submitted(job_id)


@router.get(JOBS + "/{job_id}/plan")
def get_plan(job_id: str, control: RequestControl) -> PlannedStages:
    """What each stage was planned to take when the job was accepted. 404 where the target's sizes were unknown then;
    `POST /v1alpha1/plans` plans a document now."""
    return PlannedStages(stages=kept_plan(job_id, control).stages)


def kept_plan(job_id: str, control: Control) -> Plan:
    """The plan that a job was accepted with. Raises NotFound."""
    planned = control.jobs.resolved(job_id).plan
    if planned is None:
        raise NotFound(f"no plan of job {job_id} was kept", "POST its spec to /v1alpha1/plans to plan it now")
    return planned


@router.post(JOBS + "/{job_id}/cancel", status_code=202, name="job.cancel")
def cancel_job(job_id: str, control: RequestControl) -> Job:
    """Stop a job. What has finished stays; `retry` goes on from there."""
    job = control.jobs.cancel(job_id)
    control.wake()
    return job


@router.post(JOBS + "/{job_id}/retry", status_code=202, name="job.retry")
def retry_job(job_id: str, control: RequestControl,
              request: Annotated[RetryRequest | None, Body()] = None) -> Job:
    """Go on from the failed or cancelled stage, or run again from a given one."""
    job = control.jobs.retry(job_id, None if request is None else request.from_stage)
    control.wake()
    return job


@router.delete(JOBS + "/{job_id}", status_code=204, response_model=None, name="job.delete",
               responses={202: {"model": Job, "description": "cancelled first; deleted once it has stopped"}})
def delete_job(job_id: str, control: RequestControl) -> Response:
    """Delete an ended job and its files (204), or cancel it first and delete it then (202)."""
    is_deleted = control.jobs.delete(job_id)
    control.wake()
    if is_deleted:
        return Response(status_code=204)
    return JSONResponse(control.jobs.get(job_id).model_dump(mode="json"), status_code=202)


@router.post("/v1alpha1/plans", tags=["plans"], name="plan.make", dependencies=[EndsWithClient])
def make_plan(spec: Spec, control: RequestControl) -> Plan:
    """What a job would cost in tokens, bytes and hours, with the assumptions named. Nothing runs."""
    checked, rules = control.checked(spec)
    same_target = JobFilter(project=control.scope.home("jobs:read"), target=with_absolute_paths(spec).target.model)
    earlier = control.jobs.list(same_target, limit=MAX_PAGE).items if spec.reuse == "auto" else ()
    resolved = control.jobs.all_resolved([job.id for job in earlier])
    return preflight.plan(checked, control.settings,
                          [(job, resolved[job.id]) for job in earlier if job.id in resolved], rules)
