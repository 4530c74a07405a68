"""What a person should look at, for the first page. Pure.

What a person has followed up is left out, since nothing else would take it from the page:

    endpoint that does not serve     until it does
    revision rejected or rolled back until another is tried, or a newer job was submitted for the endpoint
    drift                            as `decisions.endpoint_traffic` has it, with the same two ends
    refused promotion                of the newest job of its endpoint only, until one of its drafters is served by
                                     hand; not where `promotion.mode` is never
    decision that waits              until one of the job's drafters is served
    failed job                       until it is retried or deleted
    no node for a job or endpoint    until its pod has one
    used-up quota, full queue        until there is room
    DrafterJob that waits            until its job is accepted, or it is suspended or deleted
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from eyrie_api.database.projects import UsedUp
from eyrie_api.decisions.promotion import summarize_decision
from eyrie_api.http.routes.jobs import WAITING
from eyrie_api.v1alpha1.resources import WaitingList, WaitingObject
from eyrie_api.v1alpha1.status import Condition, Endpoint, Job
from eyrie_api.v1alpha1.traffic import EndpointTraffic, LiveDrift

_NO_NODE = "WaitingForNodes"
"""Of a stage, or of an endpoint's condition Serving: the scheduler finds no node for a pod."""

NOTHING_WAITS = WaitingList(items=(), total=0)


class Item(NamedTuple):
    """One thing to look at: what it is, the page to go to, what was seen and what to do, and since when."""

    title: str
    link: str
    words: str
    since: datetime | None = None


def attention(jobs: Sequence[Job], endpoints: Sequence[Endpoint], traffic: Iterable[EndpointTraffic] = (),
              used_up: Iterable[UsedUp] = (), waiting: WaitingList = NOTHING_WAITS) -> list[Item]:
    """Everything a person should look at. `jobs` are the newest ones, `traffic` is of these endpoints, `waiting` has
    the first ones and the number of all."""
    found: list[Item] = []
    drift = {one.endpoint: one.drift for one in traffic}
    for endpoint in endpoints:
        found += _of_endpoint(endpoint, drift.get(endpoint.name), jobs)
    for job in jobs:
        found += _of_job(job, jobs, endpoints)
    return [*found, *_queued(jobs), *map(_quota, used_up), *_waiting(waiting)]


def _of_endpoint(endpoint: Endpoint, drift: LiveDrift | None, jobs: Sequence[Job]) -> Iterable[Item]:
    name, link = endpoint.name, f"/console/endpoints/{endpoint.name}"
    serving, given_up = (condition(endpoint.conditions, kind) for kind in ("Serving", "RolledBack"))
    if endpoint.desired == "off":
        return
    if serving is not None and (serving.status == "False" or serving.reason == _NO_NODE):
        yield Item(f"Endpoint {name}: {serving.reason}", link, serving.message)
    if endpoint.candidate_revision is not None:
        return
    if (given_up is not None and given_up.status == "True"
            and not _has_newer(jobs, name, given_up.last_transition_time)):
        yield Item(f"Endpoint {name} gave up a revision: {given_up.reason}", link,
                   f"{given_up.message}; hint: its history and the engine's log say more. Remove the cause and promote "
                   f"again (eyrie endpoints promote {name} --job JOB), or train another drafter")
    if drift is not None and not _has_newer(jobs, name, drift.since):
        yield Item(f"Endpoint {name}: the traffic has drifted", link, f"{drift.message}; hint: {drift_hint(drift)}")


def drift_hint(drift: LiveDrift) -> str:
    """What to do about it."""
    if drift.has_job:
        return ("start the job that the history offers (eyrie endpoints history has the line), or train on recent "
                "traffic")
    return "train a drafter on recent traffic"


def _of_job(job: Job, jobs: Sequence[Job], endpoints: Iterable[Endpoint]) -> Iterable[Item]:
    name, link, decision = job.spec.name or job.id, f"/console/jobs/{job.id}", job.status.decision
    if job.status.phase == "Failed":
        failed = next((stage for stage in job.status.stages if stage.state == "Failed"), None)
        reason = condition(job.status.conditions, "Failed")
        words = reason.message if reason else ""
        if failed is not None:
            words = "; hint: ".join(filter(None, (failed.message, failed.hint)))
        yield Item(f"Job {name} failed{f' in {failed.stage}' if failed is not None else ''}", link, words)
    waiting = next((stage for stage in job.status.stages if stage.reason == _NO_NODE), None)
    if job.status.phase == "Running" and waiting is not None:
        yield Item(f"Job {name} waits for a node in {waiting.stage}", link,
                   "; hint: ".join(filter(None, (waiting.message, waiting.hint))))
    if decision is None or any(one.job_id == job.id for endpoint in endpoints for one in endpoint.revisions):
        return
    served = job.spec.serve.endpoint
    if decision.verdict == "awaits-approval":
        yield Item(f"Job {name} waits for a decision", link, "promotion.mode is manual and the winner passed every "
                   f"check; hint: eyrie endpoints promote {served} --job {job.id}")
    elif (not decision.promote and job.spec.serve.enabled and job.spec.promotion.mode != "never"
          and not _has_newer(jobs, served, job.created_at)):
        yield Item(f"Job {name} was not promoted: {decision.verdict}", link, f"{summarize_decision(decision)}; hint: "
                   "run it again with changes, or serve it in spite of that (eyrie endpoints promote "
                   f"{served} --job {job.id})")


def _queued(jobs: Iterable[Job]) -> list[Item]:
    """One item for all: a queue is worked off by itself."""
    waiting = [job for job in jobs if job.status.phase == "Pending" and (
        accepted := condition(job.status.conditions, "Accepted")) is not None and accepted.reason == "Queued"]
    if not waiting:
        return []
    what = f"{len(waiting)} jobs wait" if len(waiting) > 1 else f"Job {waiting[0].spec.name or waiting[0].id} waits"
    return [Item(f"{what} for a running job to end", f"/console/jobs/{waiting[-1].id}",
                 "as many run as may run at once: one on a machine, cluster.max_runs on a cluster; hint: wait, or "
                 "cancel one")]


def _quota(one: UsedUp) -> Item:
    return Item(f"Project {one.project} has used up its quota: {one.used} of {one.most} {one.what}", "/console/admin",
                "further jobs are refused, and DrafterJobs of its namespaces wait; hint: wait until a job ends, cancel "
                f"one, or ask an administrator: eyrie projects quotas {one.project} {one.option} N")


def _waiting(waiting: WaitingList) -> Iterable[Item]:
    yield from map(_waiting_object, waiting.items)
    more = waiting.total - len(waiting.items)
    if more > 0:
        yield Item(f"{more} more DrafterJob{'s wait' if more > 1 else ' waits'}", WAITING,
                   f"those above have waited longest; all of them: GET {WAITING}")


def _waiting_object(one: WaitingObject) -> Item:
    return Item(f"DrafterJob {one.namespace}/{one.name} waits: {one.reason}", WAITING,
                f"in project {one.project}: {one.message}; hint: {one.hint}", one.since)


def _has_newer(jobs: Iterable[Job], endpoint: str, since: datetime) -> bool:
    """Whether a job was submitted for the endpoint after that."""
    return any(job.spec.serve.enabled and job.spec.serve.endpoint == endpoint and job.created_at > since
               for job in jobs)


def condition(conditions: Iterable[Condition], kind: str) -> Condition | None:
    """The condition of that type."""
    return next((one for one in conditions if one.type == kind), None)
