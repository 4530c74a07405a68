"""Operational routes: liveness, readiness, Prometheus metrics, version, and what the files of jobs occupy."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Query, Request
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from sqlalchemy.exc import SQLAlchemyError
from starlette.responses import Response

from eyrie_api.artifacts import code_version, installed_version
from eyrie_api.contract.endpoints import EndpointTraffic
from eyrie_api.contract.status import Endpoint, Version
from eyrie_api.contract.storage import StoragePage
from eyrie_api.errors import Transient
from eyrie_api.http.control import Control, RequestControl
from eyrie_api.http.job_storage import MAX_PAGE

router = APIRouter(tags=["operations"])
PHASES = ("Pending", "Running", "Succeeded", "Failed", "Cancelling", "Cancelled")
ENDPOINT_STATES = ("Serving", "NotServing", "Off")
# Seconds. Most requests take milliseconds of SQL; live streams stay open for minutes.
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 600.0)


class ControlMetrics:
    """Metrics of one server. Rows are queried at each scrape, so that restarts do not reset their counts; engines get
    no request: the values of endpoints are those that their watch recorded."""

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
        """The gauges without values, so that registering the collector runs no query."""
        return iter(_gauges().values())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Query the values at the scrape."""
        control, gauges = self._control, _gauges()
        counted = control.jobs.count_by_phase()
        for phase in PHASES:
            gauges["eyrie_jobs"].add_metric([phase], counted.get(phase, 0))
        gauges["eyrie_events"].add_metric([], control.jobs.count_events())
        gauges["eyrie_outbox_depth"].add_metric([], control.outbox.depth())
        for name, length in control.queues.items():
            with suppress(Transient):  # without the broker this metric is omitted, the others are reported
                gauges["eyrie_queue_length"].add_metric([name], length())
        endpoints = control.endpoints.list().items
        for endpoint, live in zip(endpoints, control.traffic(endpoints), strict=True):
            _add_endpoint(gauges, endpoint, live)
        yield from gauges.values()


def _gauges() -> dict[str, GaugeMetricFamily]:
    """The gauges of `_Rows` by name. The label of an endpoint is `name`: the Prometheus operator gives every series a
    label `endpoint` of its own, the name of the scraped port."""
    of_endpoint = ["name"]
    gauges = (
        GaugeMetricFamily("eyrie_jobs", "Jobs by phase.", labels=["phase"]),
        GaugeMetricFamily("eyrie_events", "Events recorded since the beginning, about."),
        GaugeMetricFamily("eyrie_outbox_depth", "Chores promised and not dispatched."),
        GaugeMetricFamily("eyrie_queue_length", "Messages that wait at the broker.", labels=["queue"]),
        GaugeMetricFamily("eyrie_endpoint_state", f"1 for the state of an endpoint ({', '.join(ENDPOINT_STATES)}), 0 "
                          "for the others. NotServing: it is on and does not serve, or not yet.",
                          labels=[*of_endpoint, "state"]),
        GaugeMetricFamily("eyrie_endpoint_revision", "Number of the active revision.", labels=of_endpoint),
        GaugeMetricFamily("eyrie_endpoint_drafted", "1 if the active revision drafts, with a drafter or n-gram "
                          "look-up; 0 if it is the target alone.", labels=of_endpoint),
        GaugeMetricFamily("eyrie_endpoint_proven_tau", "Proven acceptance length of the active revision.",
                          labels=of_endpoint),
        GaugeMetricFamily("eyrie_endpoint_tau", "Acceptance length in the latest closed window of the active revision: "
                          "mean tokens per target pass, bonus token included.", labels=of_endpoint),
        GaugeMetricFamily("eyrie_endpoint_accepted_tokens", "Draft tokens accepted at this position, per round of that "
                          "window; absent for SGLang, which does not count positions.",
                          labels=[*of_endpoint, "position"]),
        GaugeMetricFamily("eyrie_endpoint_requests_per_second", "Requests that ended in that window, per second.",
                          labels=of_endpoint),
        GaugeMetricFamily("eyrie_endpoint_tokens_per_second", "Tokens generated in that window, per second, by all "
                          "requests together: throughput, which is low while there are few requests.",
                          labels=of_endpoint),
        GaugeMetricFamily("eyrie_endpoint_window_end_timestamp_seconds", "When that window was closed. A window needs "
                          "enough traffic to be closed, so that of an idle endpoint is old.", labels=of_endpoint),
        GaugeMetricFamily("eyrie_endpoint_drifted", "1 while drift is reported, and neither recovered from nor "
                          "followed by retraining; else 0.", labels=of_endpoint),
    )
    return {gauge.name: gauge for gauge in gauges}


def _add_endpoint(gauges: Mapping[str, GaugeMetricFamily], endpoint: Endpoint, live: EndpointTraffic) -> None:
    """Add the values of one endpoint; what is not known is omitted."""
    serves = any(condition.type == "Serving" and condition.status == "True" for condition in endpoint.conditions)
    state = "Off" if endpoint.desired == "off" else "Serving" if serves else "NotServing"
    for each in ENDPOINT_STATES:
        gauges["eyrie_endpoint_state"].add_metric([endpoint.name, each], each == state)
    active = endpoint.revision(endpoint.active_revision)
    values: dict[str, float | None] = {"drifted": live.drift is not None}
    if active is not None:
        values |= {"revision": active.number, "drafted": active.use.setting.method != "off", "proven_tau": active.tau}
    if live.window is not None:
        values |= {"tau": live.window.tau, "requests_per_second": live.window.requests_per_s,
                   "tokens_per_second": live.window.tokens_per_s,
                   "window_end_timestamp_seconds": live.window.until.timestamp()}
        for position, accepted in enumerate(live.window.accepted_per_round, start=1):
            gauges["eyrie_endpoint_accepted_tokens"].add_metric([endpoint.name, str(position)], accepted)
    for name, value in values.items():
        if value is not None:
            gauges[f"eyrie_endpoint_{name}"].add_metric([endpoint.name], value)


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
    control.scope.check_installation("endpoints:read")
    telemetry: ControlMetrics = request.app.state.telemetry
    return Response(generate_latest(telemetry.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/version")
def version() -> Version:
    """Which Eyrie answers."""
    return Version(version=installed_version(), code_version=code_version())


@router.get("/v1alpha1/storage")
def read_storage(
    control: RequestControl,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 50,
    cursor: Annotated[str | None, Query(max_length=512, description="next_cursor of the page before")] = None,
) -> StoragePage:
    """What the files of jobs occupy, by project and by job, the largest first, and which may be removed."""
    return control.storage.page(control.scope, limit=limit, cursor=cursor)
