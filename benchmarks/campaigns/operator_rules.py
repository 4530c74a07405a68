"""What must hold of custom resources and rows once operators that were killed have settled. Pure; `cluster_operator`
collects the values.

An object that was deleted is gone, and its job with it. Each other object has one job and shows its row, or was
suspended before it had one; no uid has two jobs; a job that has not ended has an object. An endpoint that is on has a
DraftEndpoint, and objects that serve it; one that is off has none; none belongs to nobody.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.campaigns.histories import Broken
from eyrie_api.contract.status import Endpoint, Job
from eyrie_operator.cluster.client import Object
from eyrie_operator.cluster.resources import applied_uid
from eyrie_operator.conditions import is_over


def broken_jobs(objects: Sequence[Object], jobs: Sequence[Job]) -> Iterator[Broken]:
    """The rules that DrafterJobs and rows of jobs break."""
    yield from _deleted(objects)
    rows, shown = {job.id: job for job in jobs}, set()
    by_uid = Counter(uid for job in jobs if (uid := applied_uid(job)) is not None)
    if several := [uid for uid, num in by_uid.items() if num > 1]:
        yield "no uid has two jobs", {"uids": several}
    for one in objects:
        name, status = one["metadata"]["name"], one.get("status") or {}
        job_id = status.get("job_id")
        if job_id is None and status.get("phase") == "Suspended" and not by_uid[one["metadata"]["uid"]]:
            continue
        if job_id not in rows:
            yield "an object has its job", {"object": name, "status": status}
            continue
        shown.add(job_id)
        row = rows[job_id].status
        missing = ({(each.type, each.status, each.reason) for each in row.conditions}
                   - {(each["type"], each["status"], each["reason"]) for each in status.get("conditions", ())})
        if status.get("phase") not in (row.phase, "Suspended") or missing:
            yield "an object shows its row", {"object": name, "phases": [status.get("phase"), row.phase],
                                              "missing": sorted(missing)}
    without = [job.id for job in jobs if job.id not in shown and not is_over(job.status.conditions)]
    if without:
        yield "a job that has not ended has an object", {"jobs": without}


def broken_endpoints(objects: Sequence[Object], endpoints: Sequence[Endpoint],
                     owned: Mapping[str, int]) -> Iterator[Broken]:
    """The rules that DraftEndpoints, rows of endpoints and what serves them break.

    owned   number of Deployments and Services by endpoint
    """
    yield from _deleted(objects)
    shown = {one["metadata"]["name"]: one.get("status") or {} for one in objects}
    for row in endpoints:
        number = owned.get(row.name, 0)
        if row.desired == "off" and number:
            yield "an endpoint that is off has no Deployment or Service", {"endpoint": row.name, "number": number}
        if row.desired == "on" and not number:
            yield "an endpoint that is on has its Deployment and Service", {"endpoint": row.name}
        if row.desired == "on" and row.name not in shown:
            yield "an endpoint that is on has a DraftEndpoint", {"endpoint": row.name}
        found = shown.get(row.name, {}).get("candidate_revision")
        if row.name in shown and found != row.candidate_revision:
            yield "a DraftEndpoint shows its row", {"endpoint": row.name, "candidates": [found, row.candidate_revision]}
    names = {row.name for row in endpoints}
    if orphans := sorted(set(owned) - names):
        yield "no Deployment or Service belongs to nobody", {"endpoints": orphans}
    if without := sorted(set(shown) - names):
        yield "a DraftEndpoint has its row", {"objects": without}


def _deleted(objects: Sequence[Object]) -> Iterator[Broken]:
    if held := [one["metadata"]["name"] for one in objects if one["metadata"].get("deletionTimestamp")]:
        yield "an object that was deleted is gone", {"objects": held}
