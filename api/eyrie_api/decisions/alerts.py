"""What a person should look at, for `GET /v1alpha1/alerts` and the console's home. Pure.

What a person has followed up is left out, since nothing else would take it from the list:

    endpoint that does not serve     until it does
    revision rejected or rolled back until another is tried, or a newer job was submitted for the endpoint
    drift                            as `decisions.endpoint_traffic` has it, with the same two ends
    refused promotion                of the newest job of its endpoint only, until one of its drafters is served by
                                     hand; not where `promotion.mode` is never
    decision that waits              until one of the job's drafters is served
    failed job                       until it is retried or deleted
    pod that has no node, or lacks   until it starts
    a Secret, a claim or its image
    used-up quota, full queue        until there is room
    full disk                        until it has room
    DrafterJob that waits            until its job is accepted, or it is suspended or deleted
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from eyrie_api.contract.alerts import AlertItem, AlertKind
from eyrie_api.contract.endpoints import EndpointTraffic, LiveDrift
from eyrie_api.contract.model import Items
from eyrie_api.contract.resources import WaitingList
from eyrie_api.contract.status import Condition, Endpoint, Job
from eyrie_api.decisions.promotion import summarize_decision
from eyrie_api.errors import EyrieError

_PODS: Mapping[str, tuple[AlertKind, str]] = {
    "WaitingForNodes": ("waiting-for-nodes", "waits for a node"),
    "WaitingForContainers": ("waiting-for-containers", "has a pod that cannot start")}
"""Reasons of a stage, or of an endpoint's condition Serving: the scheduler finds no node for a pod, or the pod lacks
what it needs there."""

_WAITING = "/v1alpha1/waiting"
NOTHING_WAITS = WaitingList(items=(), total=0)


@dataclass(frozen=True)
class ExhaustedQuota:
    """A quota of jobs that leaves no room for another one."""

    project: str
    what: Literal["jobs", "GPUs"]
    used: int
    most: int


def alerts_of(jobs: Sequence[Job], endpoints: Sequence[Endpoint], traffic: Iterable[EndpointTraffic] = (),
              used_up: Iterable[ExhaustedQuota] = (), waiting: WaitingList = NOTHING_WAITS,
              full_disk: EyrieError | None = None) -> Items[AlertItem]:
    """Everything a person should look at. `jobs` are the newest ones, `traffic` is of these endpoints, `waiting` has
    the first ones and the number of all."""
    items = [] if full_disk is None else [AlertItem(
        kind="disk-full", title="The disk is full", message=full_disk.message, hint=full_disk.hint, link="/")]
    drift = {current.endpoint: current.drift for current in traffic}
    for endpoint in endpoints:
        items += _of_endpoint(endpoint, drift.get(endpoint.name), jobs)
    for job in jobs:
        items += _of_job(job, jobs, endpoints)
    quotas = (AlertItem(
        kind="quota-used-up", project=quota.project, link="/console/admin",
        title=f"Project {quota.project} has used up its quota: {quota.used} of {quota.most} {quota.what}",
        message="further jobs are refused, and DrafterJobs of its namespaces wait",
        hint="wait until a job ends, cancel one, or ask an administrator: "
             f"eyrie projects quotas {quota.project} --{quota.what.lower()} N") for quota in used_up)
    return Items[AlertItem](items=(*items, *_queued(jobs), *quotas, *_waiting(waiting)))


def _of_endpoint(endpoint: Endpoint, drift: LiveDrift | None, jobs: Sequence[Job]) -> Iterable[AlertItem]:
    name, link = endpoint.name, f"/console/endpoints/{endpoint.name}"
    serving, given_up = (_condition(endpoint.conditions, kind) for kind in ("Serving", "RolledBack"))
    if endpoint.desired == "off":
        return
    if serving is not None and (serving.status == "False" or serving.reason in _PODS):
        message, hint = _apart(serving.message)
        yield AlertItem(kind=_PODS[serving.reason][0] if serving.reason in _PODS else "endpoint-not-serving",
                            endpoint=name, title=f"Endpoint {name}: {serving.reason}", message=message, hint=hint,
                            since=serving.last_transition_time, link=link)
    if endpoint.candidate_revision is not None:
        return
    if (given_up is not None and given_up.status == "True"
            and not _has_newer(jobs, name, given_up.last_transition_time)):
        yield AlertItem(
            kind="revision-given-up", endpoint=name, title=f"Endpoint {name} gave up a revision: {given_up.reason}",
            message=given_up.message, since=given_up.last_transition_time, link=link,
            hint="its history and the engine's log say more. Remove the cause and promote again "
                 f"(eyrie endpoints promote {name} --job JOB), or train another drafter")
    if drift is not None and not _has_newer(jobs, name, drift.since):
        yield AlertItem(kind="drift", endpoint=name, title=f"Endpoint {name}: the traffic has drifted",
                            message=drift.message, hint=drift_hint(drift), since=drift.since, link=link)


def drift_hint(drift: LiveDrift) -> str:
    if drift.has_job:
        return ("start the job that the history offers (eyrie endpoints history has the line), or train on recent "
                "traffic")
    return "train a drafter on recent traffic"


def _of_job(job: Job, jobs: Sequence[Job], endpoints: Iterable[Endpoint]) -> Iterable[AlertItem]:
    name, link, decision = job.spec.name or job.id, f"/console/jobs/{job.id}", job.status.decision
    if job.status.phase == "Failed":
        stage = next((status for status in job.status.stages if status.state == "Failed"), None)
        condition = _condition(job.status.conditions, "Failed")
        message, hint = _apart(condition.message if condition else "") if stage is None else (
            stage.message or "", stage.hint or "")
        yield AlertItem(
            kind="job-failed", job_id=job.id, title=f"Job {name} failed{f' in {stage.stage}' if stage else ''}",
            message=message, hint=hint, since=job.status.finished_at, link=link)
    waiting = next((stage for stage in job.status.stages if stage.reason in _PODS), None)
    if job.status.phase == "Running" and waiting is not None:
        kind, what = _PODS[waiting.reason or ""]
        yield AlertItem(kind=kind, job_id=job.id, link=link, message=waiting.message or "",
                            title=f"Job {name} {what} in {waiting.stage}", hint=waiting.hint or "")
    if decision is None or any(revision.job_id == job.id for endpoint in endpoints for revision in endpoint.revisions):
        return
    served = job.spec.serve.endpoint
    promote = f"eyrie endpoints promote {served} --job {job.id}"
    if decision.verdict == "awaits-approval":
        yield AlertItem(
            kind="awaits-approval", job_id=job.id, title=f"Job {name} waits for a decision", hint=promote,
            message="promotion.mode is manual and the winner passed every check", since=job.status.finished_at,
            link=link)
    elif (not decision.promote and job.spec.serve.enabled and job.spec.promotion.mode != "never"
          and not _has_newer(jobs, served, job.created_at)):
        yield AlertItem(
            kind="not-promoted", job_id=job.id, title=f"Job {name} was not promoted: {decision.verdict}",
            message=summarize_decision(decision), since=job.status.finished_at, link=link,
            hint=f"run it again with changes, or serve it in spite of that ({promote})")


def _queued(jobs: Iterable[Job]) -> list[AlertItem]:
    """One item for all: a queue is worked off by itself."""
    waiting = [(job, accepted) for job in jobs if job.status.phase == "Pending" and (
        accepted := _condition(job.status.conditions, "Accepted")) is not None and accepted.reason == "Queued"]
    if not waiting:
        return []
    first, accepted = waiting[-1]
    what = f"{len(waiting)} jobs wait" if len(waiting) > 1 else f"Job {first.spec.name or first.id} waits"
    return [AlertItem(
        kind="queued", job_id=first.id if len(waiting) == 1 else None, title=f"{what} for a running job to end",
        message="as many run as may run at once: one on a machine, cluster.max_runs on a cluster",
        hint="wait, or cancel one", since=accepted.last_transition_time, link=f"/console/jobs/{first.id}")]


def _waiting(waiting: WaitingList) -> Iterable[AlertItem]:
    for item in waiting.items:
        yield AlertItem(
            kind="waiting-for-quota", project=item.project, drafter_job=f"{item.namespace}/{item.name}",
            title=f"DrafterJob {item.namespace}/{item.name} waits: {item.reason}",
            message=f"in project {item.project}: {item.message}", hint=item.hint, since=item.since, link=_WAITING)
    more = waiting.total - len(waiting.items)
    if more > 0:
        yield AlertItem(
            kind="waiting-for-quota", title=f"{more} more DrafterJob{'s wait' if more > 1 else ' waits'}",
            message="those above have waited longest", hint=f"all of them: GET {_WAITING}", link=_WAITING)


def _apart(text: str) -> tuple[str, str]:
    """Message and hint of a condition, which has one text for both."""
    message, _, hint = text.partition("; hint: ")
    return message, hint


def _has_newer(jobs: Iterable[Job], endpoint: str, since: datetime) -> bool:
    return any(job.spec.serve.enabled and job.spec.serve.endpoint == endpoint and job.created_at > since
               for job in jobs)


def _condition(conditions: Iterable[Condition], kind: str) -> Condition | None:
    return next((condition for condition in conditions if condition.type == kind), None)
