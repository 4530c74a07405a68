"""The route of what needs a person, from the newest jobs, all endpoints, quotas, waiting objects and the disk."""

from collections.abc import Sequence

from fastapi import APIRouter

from eyrie_api.contract.alerts import AlertItem
from eyrie_api.contract.endpoints import EndpointTraffic
from eyrie_api.contract.model import Items
from eyrie_api.contract.status import Endpoint, Job
from eyrie_api.decisions.alerts import alerts_of
from eyrie_api.full_disk import disk_full, is_short
from eyrie_api.http.control import Control, RequestControl

router = APIRouter(tags=["alerts"])
NEWEST_JOBS = 50
_WAITING = 20


@router.get("/v1alpha1/alerts")
def read_alerts(control: RequestControl) -> Items[AlertItem]:
    """What needs a person, each with what was seen and what to do: failed jobs and stages without a node, decisions,
    endpoints, drift, quotas, DrafterJobs that wait, a full disk; in the order of the console's home. Covers the newest
    50 jobs; of the DrafterJobs that wait, the 20 that have waited longest are items of their own."""
    endpoints = control.endpoints.list().items
    return alerts_now(control, control.jobs.list(limit=NEWEST_JOBS).items, endpoints, control.traffic(endpoints))


def alerts_now(control: Control, newest: Sequence[Job], endpoints: Sequence[Endpoint],
               traffic: Sequence[EndpointTraffic]) -> Items[AlertItem]:
    """`read_alerts`, from values that the caller has read. The free space is measured now: on a full disk neither an
    event nor a condition could be stored."""
    home = control.settings.home
    return alerts_of(newest, endpoints, traffic, control.projects.used_up(), control.waiting.list(limit=_WAITING),
                     disk_full(home) if is_short(home) else None)
