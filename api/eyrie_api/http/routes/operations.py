"""Operational routes: liveness, readiness, Prometheus metrics, version, and what the files of jobs occupy."""

import importlib.metadata
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Query, Request
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from sqlalchemy.exc import SQLAlchemyError
from starlette.responses import Response

from eyrie_api.artifacts import code_version
from eyrie_api.contract.status import Version
from eyrie_api.contract.storage import StoragePage
from eyrie_api.errors import Transient
from eyrie_api.http.control import Control, RequestControl
from eyrie_api.http.job_storage import MAX_PAGE

router = APIRouter(tags=["operations"])
PHASES = ("Pending", "Running", "Succeeded", "Failed", "Cancelling", "Cancelled")
# Seconds. Most requests take milliseconds of SQL; live streams stay open for minutes.
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 600.0)


class ControlMetrics:
    """Metrics of one server. Row counts are queried at each scrape, so that restarts do not reset them."""

    def __init__(self, control: Control) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Rows(control))
        labels = ["method", "route"]
        self._latency = Histogram("eyrie_http_request_duration_seconds", "Time to answer.", labels,
                                  registry=self.registry, buckets=_BUCKETS)
        self._requests = Counter("eyrie_http_requests", "Requests answered.", [*labels, "status"],
                                 registry=self.registry)

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Record one request."""
        self._latency.labels(method, route).observe(seconds)
        self._requests.labels(method, route, str(status)).inc()


class _Rows(Collector):
    def __init__(self, control: Control) -> None:
        self._control = control

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Empty, so that registering the collector runs no query."""
        return iter(())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Query the counts at the scrape."""
        jobs = GaugeMetricFamily("eyrie_jobs", "Jobs by phase.", labels=["phase"])
        counted = self._control.jobs.count_by_phase()
        for phase in PHASES:
            jobs.add_metric([phase], counted.get(phase, 0))
        yield jobs
        yield GaugeMetricFamily("eyrie_events", "Events recorded since the beginning, about.",
                                value=self._control.jobs.count_events())
        yield GaugeMetricFamily("eyrie_outbox_depth", "Chores promised and not dispatched.",
                                value=self._control.outbox.depth())
        lengths = GaugeMetricFamily("eyrie_queue_length", "Messages that wait at the broker.", labels=["queue"])
        for name, length in self._control.queues.items():
            with suppress(Transient):  # without the broker this metric is omitted, the others are reported
                lengths.add_metric([name], length())
        yield lengths


@router.get("/healthz")
def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/readyz")
def readyz(control: RequestControl) -> dict[str, str]:
    """The database answers and the chores run. 503 with what does not."""
    try:
        control.database.is_reachable()
    except SQLAlchemyError as error:
        raise Transient(f"the database does not answer: {type(error).__name__}", "check EYRIE_DATABASE_URL") from error
    for name, check in control.checks.items():
        if not check():
            raise Transient(f"{name} is not running", "restart the control plane; jobs go on where they were")
    return {"status": "ready"}


@router.get("/metrics", response_class=Response)
def metrics(request: Request, control: RequestControl) -> Response:
    """Prometheus exposition: of the whole installation, so for those who may read in all projects."""
    control.scope.check_installation("jobs:read")
    telemetry: ControlMetrics = request.app.state.telemetry
    return Response(generate_latest(telemetry.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/version")
def version() -> Version:
    """Which Eyrie answers."""
    return Version(version=importlib.metadata.version("eyrie"), code_version=code_version())


@router.get("/v1alpha1/storage")
def read_storage(
    control: RequestControl,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 50,
    cursor: Annotated[str | None, Query(max_length=512, description="next_cursor of the page before")] = None,
) -> StoragePage:
    """What the files of jobs occupy, by project and by job, the largest first, and which may be removed."""
    return control.storage.page(control.scope, limit=limit, cursor=cursor)
