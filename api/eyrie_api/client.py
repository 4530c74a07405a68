"""The Python client: one method per route, with models of `eyrie_api.contract` as arguments and results.

    with Client("http://127.0.0.1:8642") as eyrie:
        job = eyrie.create_job(JobSpec(target=JobTarget(model="quickstart"), data=...))
        for event in eyrie.events(job.id):
            print(event.message)
        print(eyrie.wait(job.id).status.phase)

An error response raises the EyrieError class named by its problem document (`TargetNotFound`, `Conflict`, ...) with the
server's message and hint; a server that does not respond raises `Unreachable`, which is Transient. `create_job` sends
an Idempotency-Key and retries after a broken connection, so that one call creates one job. `events` reconnects and
resumes after the last event received.
"""

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from eyrie_api import errors
from eyrie_api.artifacts import digest_bytes
from eyrie_api.contract import access, status
from eyrie_api.contract.alerts import AlertItem
from eyrie_api.contract.endpoints import EndpointTraffic, History, HistoryKind
from eyrie_api.contract.engine import EngineKind
from eyrie_api.contract.figures import Figure, FigureList, TrainingCurves
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.model import Items
from eyrie_api.contract.plan import Plan, PlannedAndActual, PlannedStages
from eyrie_api.contract.reports import LeaderboardEntry
from eyrie_api.contract.resources import WaitingList
from eyrie_api.contract.rules import first_problem
from eyrie_api.contract.stages import StageName
from eyrie_api.contract.storage import StoragePage
from eyrie_api.errors import ArtifactCorrupt, EyrieError, Transient

DEFAULT_SERVER = "http://127.0.0.1:8642"
_TYPE_PREFIX = "urn:eyrie:problem:"
_API = "/v1alpha1"
ModelT = TypeVar("ModelT", bound=BaseModel)


class Unreachable(Transient):
    """The server does not respond."""

    exit_code = 69  # EX_UNAVAILABLE


class Refused(EyrieError):
    """An error response whose class this client does not know; its reason is the problem's."""

    reason = "InternalError"

    def __init__(self, problem: status.Problem) -> None:
        super().__init__(problem.detail, problem.hint)
        self.http_status = problem.status  # type: ignore[misc]
        self.reason = problem.type.removeprefix(_TYPE_PREFIX)  # type: ignore[misc]


class Client:
    """HTTP client of one control plane. Thread-safe; close it or use it as a context manager."""

    def __init__(self, base_url: str = DEFAULT_SERVER, token: str | None = None, timeout_s: float = 30.0,
                 project: str | None = None) -> None:
        """`token` (an API key, an OIDC token or the server's EYRIE_TOKEN) defaults to the variable EYRIE_TOKEN;
        `project`, which restricts all requests to one project, to EYRIE_PROJECT. Without one, reads cover every
        project of the caller, and the server chooses the project of new jobs."""
        self.base_url = base_url.rstrip("/")
        token = token or os.environ.get("EYRIE_TOKEN") or None
        project = project or os.environ.get("EYRIE_PROJECT") or None
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        headers |= {"Eyrie-Project": project} if project else {}
        self._timeout_s = timeout_s
        # trust_env=False: a proxy from the environment (HTTP_PROXY) must not be used for a loopback address.
        with self._translated():
            self._http = httpx.Client(base_url=self.base_url, headers=headers, timeout=timeout_s, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None,
                 _trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # Jobs.

    def create_job(self, spec: JobSpec, idempotency_key: str | None = None, attempts: int = 3) -> status.Job:
        """Submit a job. Retried with the same Idempotency-Key when the connection breaks."""
        key = idempotency_key or str(uuid.uuid4())
        body = spec.model_dump(mode="json", exclude_unset=True)
        for attempt in range(1, attempts + 1):
            try:
                return self._post(f"{_API}/jobs", status.Job, body, headers={"Idempotency-Key": key})
            except Unreachable:
                if attempt == attempts:
                    raise
                time.sleep(0.2 * attempt)
        raise AssertionError("attempts must be at least 1")

    def job(self, job_id: str) -> status.Job:
        return self._get(f"{_API}/jobs/{quote(job_id, safe='')}", status.Job)

    def submitted(self, job_id: str) -> dict[str, Any]:
        """The document that a job was submitted with, without defaults. Raises NotFound for a job without one."""
        return dict(self._request("GET", f"{_API}/jobs/{quote(job_id, safe='')}/submitted").json())

    def planned(self, job_id: str) -> PlannedStages:
        """What a job was planned to take when it was accepted. Raises NotFound for a job without a plan."""
        return self._get(f"{_API}/jobs/{quote(job_id, safe='')}/plan", PlannedStages)

    def planned_and_actual(self, job_id: str) -> PlannedAndActual:
        """Planned and actual time and bytes of every stage so far, and the time left of a running job. Raises NotFound
        for a job without a plan."""
        return self._get(f"{_API}/jobs/{quote(job_id, safe='')}/plan/actual", PlannedAndActual)

    def jobs(self, *, phase: str | None = None, name: str | None = None, target: str | None = None,
             labels: dict[str, str] | None = None, limit: int = 50, cursor: str | None = None) -> status.JobList:
        """One page of jobs, newest first."""
        return self._get(f"{_API}/jobs", status.JobList, phase=phase, name=name, target=target, limit=limit,
                         cursor=cursor, label=[f"{key}={value}" for key, value in (labels or {}).items()])

    def storage(self, *, limit: int = 50, cursor: str | None = None) -> StoragePage:
        """One page of the jobs that hold files, the largest first."""
        return self._get(f"{_API}/storage", StoragePage, limit=limit, cursor=cursor)

    def cancel(self, job_id: str) -> status.Job:
        return self._post(f"{_API}/jobs/{quote(job_id, safe='')}/cancel", status.Job)

    def retry(self, job_id: str, from_stage: StageName | None = None) -> status.Job:
        """Resume a failed or cancelled job from the stage that did not finish, or run an ended one again from a given
        stage."""
        return self._post(f"{_API}/jobs/{quote(job_id, safe='')}/retry", status.Job, {"from_stage": from_stage})

    def delete(self, job_id: str) -> bool:
        """Delete a job. False when it has not ended: it is cancelled, and deleted once it has stopped."""
        return self._request("DELETE", f"{_API}/jobs/{quote(job_id, safe='')}").status_code == 204

    def plan(self, spec: JobSpec) -> Plan:
        """What a job would cost."""
        return self._post(f"{_API}/plans", Plan, spec.model_dump(mode="json", exclude_unset=True))

    def wait(self, job_id: str, timeout_s: float | None = None, poll_s: float = 0.5,
             on_change: Callable[[status.Job], None] | None = None) -> status.Job:
        """Poll until the job has ended, and return it. Raises TimeoutError.

        With `timeout_s` an unreachable server is polled until then, so that it may restart; without, Unreachable is
        raised.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        seen = None
        while True:
            try:
                job = self.job(job_id)
            except Unreachable:
                if deadline is None:
                    raise
            else:
                if on_change is not None and job != seen:
                    seen = job
                    on_change(job)
                if any(condition.type in ("Succeeded", "Failed", "Cancelled") and condition.status == "True"
                       for condition in job.status.conditions):
                    return job
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"job {job_id} has not ended within {timeout_s} s")
            time.sleep(poll_s)

    # Events, logs, metrics, curves and files of a job.

    def events(self, job_id: str, last_id: int = 0, *, follow: bool = True) -> Iterator[status.Event]:
        """Events after `last_id` in order: those so far, or with `follow` until the job has ended.

        A broken stream is resumed after the last event. Raises Unreachable after more than five failed connections in
        a row.
        """
        path = f"{_API}/jobs/{quote(job_id, safe='')}/events"
        if not follow:
            headers = {"Accept": "application/json"}
            while batch := self._request("GET", path, params={"after": last_id}, headers=headers).json()["items"]:
                for item in batch:
                    event = status.Event.model_validate(item)
                    last_id = event.id
                    yield event
            return
        failures = 0
        while True:
            try:
                for kind, data in self._sse(path, last_id):
                    failures = 0
                    if kind in ("end", "deleted"):
                        return
                    event = status.Event.model_validate_json(data)
                    last_id = event.id
                    yield event
            except Unreachable:
                failures += 1
                if failures > 5:
                    raise
            time.sleep(0.2 * failures)

    def _sse(self, path: str, last_id: int) -> Iterator[tuple[str, str]]:
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(last_id)}
        with self._stream(path, headers=headers) as response:
            if response.status_code == 204:
                yield "end", "{}"
                return
            kind, data = "message", []
            for line in response.iter_lines():
                name, _, value = line.partition(":")
                if name == "event":
                    kind = value.removeprefix(" ")
                elif name == "data":
                    data.append(value.removeprefix(" "))
                elif not line and data:
                    yield kind, "\n".join(data)
                    kind, data = "message", []

    def logs(self, job_id: str, stage: StageName, key: str = "", *, follow: bool = False) -> Iterator[str]:
        """Lines of a stage's log; with `follow`, until the stage has ended."""
        params = {"stage": stage, "follow": "true" if follow else "false"} | ({"key": key} if key else {})
        with self._stream(f"{_API}/jobs/{quote(job_id, safe='')}/logs", params=params) as response:
            yield from response.iter_lines()

    def metrics(self, job_id: str, *, stage: str | None = None, key: str | None = None,
                name: str | None = None) -> tuple[status.MetricSeries, ...]:
        """Logged metric series."""
        path = f"{_API}/jobs/{quote(job_id, safe='')}/metrics"
        return self._get(path, Items[status.MetricSeries], stage=stage, key=key, name=name).items

    def curves(self, job_id: str) -> TrainingCurves:
        """The curves of a job's training, with at most 1000 points of each series."""
        return self._get(f"{_API}/jobs/{quote(job_id, safe='')}/curves", TrainingCurves)

    def artifacts(self, job_id: str, stage: str | None = None) -> tuple[status.StageFile, ...]:
        """Files of the finished stages."""
        return self._get(f"{_API}/jobs/{quote(job_id, safe='')}/artifacts", Items[status.StageFile], stage=stage).items

    def download(self, file: status.StageFile, to: Path) -> Path:
        """Download one file into directory `to` and compare its digest. Raises ArtifactCorrupt."""
        data = self._request("GET", file.url).content
        if digest_bytes(data) != file.sha256:
            raise ArtifactCorrupt(f"{file.path} arrived with another digest", "download it again")
        path = to / Path(file.path).name
        to.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def report(self, job_id: str) -> status.JobReport:
        return self._get(f"{_API}/jobs/{quote(job_id, safe='')}/report", status.JobReport)

    def figures(self, job_id: str) -> tuple[Figure, ...]:
        """Every figure that a job has data for, as Vega-Lite specifications with their values."""
        return self._figures(f"{_API}/jobs/{quote(job_id, safe='')}/figures")

    def endpoint_figures(self, name: str) -> tuple[Figure, ...]:
        """Every figure that an endpoint has data for."""
        return self._figures(f"{_API}/endpoints/{quote(name, safe='')}/figures")

    def _figures(self, path: str) -> tuple[Figure, ...]:
        return tuple(self._get(f"{path}/{summary.name}", Figure) for summary in self._get(path, FigureList).items)

    def leaderboard(self, *, target: str | None = None, job_id: str | None = None, family: str | None = None,
                    suite: str | None = None, temperature: float | None = None, engine: EngineKind | None = None,
                    tuned: bool | None = None, lossless: bool | None = None,
                    limit: int = 100) -> tuple[LeaderboardEntry, ...]:
        """Measured checkpoints, best first; by the measurements of a suite, a temperature or an engine alone."""
        return self._get(f"{_API}/leaderboard", status.Leaderboard, target=target, job_id=job_id, family=family,
                         suite=suite, temperature=temperature, engine=engine, tuned=tuned, lossless=lossless,
                         limit=limit).items

    def alerts(self) -> Items[AlertItem]:
        return self._get(f"{_API}/alerts", Items[AlertItem])

    def waiting(self, *, limit: int = 100) -> WaitingList:
        """DrafterJobs that wait for a quota of their project, those that have waited longest first."""
        return self._get(f"{_API}/waiting", WaitingList, limit=limit)

    def endpoints(self) -> Items[status.Endpoint]:
        return self._get(f"{_API}/endpoints", Items[status.Endpoint])

    def traffic(self) -> Items[EndpointTraffic]:
        """What the traffic of every endpoint shows now."""
        return self._get(f"{_API}/traffic", Items[EndpointTraffic])

    def endpoint(self, name: str) -> status.Endpoint:
        return self._get(f"{_API}/endpoints/{quote(name, safe='')}", status.Endpoint)

    def history(self, name: str, *, limit: int | None = None, before: int | None = None,
                kind: HistoryKind | None = None) -> History:
        """Promotion decisions, changes and metric windows of an endpoint: the latest, or the latest before an id;
        oldest first."""
        return self._get(f"{_API}/endpoints/{quote(name, safe='')}/history", History, limit=limit, before=before,
                         kind=kind)

    def promote(self, name: str, *, job_id: str, checkpoint: str | None = None) -> status.Endpoint:
        """Serve a job's drafter, by default its best."""
        return self._endpoint_verb(name, "promote", {"job_id": job_id, "checkpoint": checkpoint})

    def rollback(self, name: str, *, revision: int | None = None) -> status.Endpoint:
        return self._endpoint_verb(name, "rollback", {"revision": revision})

    def off(self, name: str) -> status.Endpoint:
        """Stop the endpoint's engine."""
        return self._endpoint_verb(name, "off")

    def on(self, name: str) -> status.Endpoint:
        """Start the endpoint's engine again."""
        return self._endpoint_verb(name, "on")

    def _endpoint_verb(self, name: str, verb: str, body: dict[str, Any] | None = None) -> status.Endpoint:
        return self._post(f"{_API}/endpoints/{quote(name, safe='')}/{verb}", status.Endpoint, body)

    # Access.

    def whoami(self) -> access.WhoAmI:
        """The authenticated caller, with roles and scopes."""
        return self._get(f"{_API}/whoami", access.WhoAmI)

    def create_key(self, wanted: access.CreateKey) -> access.CreatedKey:
        """Create an API key. Its secret is returned only here."""
        return self._post(f"{_API}/keys", access.CreatedKey, wanted.model_dump(mode="json", exclude_unset=True))

    def keys(self) -> Items[access.ApiKey]:
        """API keys, newest first."""
        return self._get(f"{_API}/keys", Items[access.ApiKey])

    def revoke_key(self, key_id: str) -> access.ApiKey:
        return self._post(f"{_API}/keys/{quote(key_id, safe='')}/revoke", access.ApiKey)

    def rotate_key(self, key_id: str, overlap_s: float = 0.0) -> access.CreatedKey:
        """Replace a key by a new one with the same rights; the old one is valid for `overlap_s` more seconds."""
        return self._post(f"{_API}/keys/{quote(key_id, safe='')}/rotate", access.CreatedKey, {"overlap_s": overlap_s})

    def create_project(self, wanted: access.CreateProject) -> access.Project:
        return self._post(f"{_API}/projects", access.Project, wanted.model_dump(mode="json"))

    def projects(self) -> Items[access.Project]:
        """Projects in which the caller has a role."""
        return self._get(f"{_API}/projects", Items[access.Project])

    def project(self, name: str) -> access.Project:
        return self._get(f"{_API}/projects/{quote(name, safe='')}", access.Project)

    def set_quotas(self, name: str, quotas: access.Quotas) -> access.Project:
        path = f"{_API}/projects/{quote(name, safe='')}/quotas"
        return self._parse(self._request("PUT", path, json=quotas.model_dump(mode="json")), access.Project)

    def members(self, name: str) -> Items[access.Member]:
        return self._get(f"{_API}/projects/{quote(name, safe='')}/members", Items[access.Member])

    def add_member(self, name: str, wanted: access.CreateMember) -> access.Member:
        path = f"{_API}/projects/{quote(name, safe='')}/members"
        return self._post(path, access.Member, wanted.model_dump(mode="json"))

    def remove_member(self, name: str, member_id: int) -> None:
        self._request("DELETE", f"{_API}/projects/{quote(name, safe='')}/members/{member_id}")

    def audit(self, *, actor: str | None = None, verb: str | None = None, thing: str | None = None,
              before: int | None = None, limit: int = 100) -> access.AuditPage:
        """Audit log entries, newest first."""
        return self._get(f"{_API}/audit", access.AuditPage, actor=actor, verb=verb, object=thing, before=before,
                         limit=limit)

    # Webhooks.

    def create_webhook(self, wanted: access.CreateWebhook) -> access.CreatedWebhook:
        """Create a webhook. Its secret is returned only here."""
        return self._post(f"{_API}/webhooks", access.CreatedWebhook, wanted.model_dump(mode="json"))

    def rotate_webhook(self, webhook_id: str) -> access.CreatedWebhook:
        """Replace a webhook's secret. The new one is returned only here."""
        return self._post(f"{_API}/webhooks/{quote(webhook_id, safe='')}/rotate", access.CreatedWebhook)

    def webhooks(self) -> Items[access.Webhook]:
        return self._get(f"{_API}/webhooks", Items[access.Webhook])

    def delete_webhook(self, webhook_id: str) -> None:
        self._request("DELETE", f"{_API}/webhooks/{quote(webhook_id, safe='')}")

    def deliveries(self, webhook_id: str) -> Items[access.Delivery]:
        """The latest deliveries of a webhook, newest first."""
        return self._get(f"{_API}/webhooks/{quote(webhook_id, safe='')}/deliveries", Items[access.Delivery])

    def ping_webhook(self, webhook_id: str) -> access.Delivery:
        return self._post(f"{_API}/webhooks/{quote(webhook_id, safe='')}/ping", access.Delivery)

    # The server.

    def version(self) -> status.Version:
        return self._get("/version", status.Version)

    def is_ready(self) -> bool:
        """Whether the control plane responds and reports ready."""
        try:
            self._request("GET", "/readyz")
        except EyrieError:
            return False
        return True

    # HTTP.

    def _get(self, path: str, model: type[ModelT], **params: Any) -> ModelT:
        query = {name: value for name, value in params.items() if value is not None and value != []}
        return self._parse(self._request("GET", path, params=query), model)

    def _post(self, path: str, model: type[ModelT], body: dict[str, Any] | None = None,
              headers: dict[str, str] | None = None) -> ModelT:
        return self._parse(self._request("POST", path, json=body, headers=headers), model)

    def _parse(self, response: httpx.Response, model: type[ModelT]) -> ModelT:
        try:
            return model.model_validate_json(response.content)
        except ValidationError as error:
            raise Transient(f"{self.base_url} did not answer as Eyrie does: {first_problem(error)}",
                            "check the URL, and that client and server are of one version") from error

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        with self._translated():
            response = self._http.request(method, path, **options)
            self._check(response)
            return response

    @contextmanager
    def _stream(self, path: str, **options: Any) -> Iterator[httpx.Response]:
        # No read timeout: a live stream may be silent for long. Connect and write timeouts remain.
        timeout = httpx.Timeout(self._timeout_s, read=None)
        with self._translated(), self._http.stream("GET", path, timeout=timeout, **options) as response:
            if response.is_error:
                response.read()
                self._check(response)
            yield response

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            raise Unreachable(f"no answer from {self.base_url}: {error or type(error).__name__}",
                              "start the control plane with `eyrie up`, or give its URL by --server or EYRIE_SERVER",
                              1.0) from error
        except httpx.InvalidURL as error:
            raise errors.InvalidInput(f"{self.base_url!r} is not a URL: {error}", "write http://host:port") from error

    def _check(self, response: httpx.Response) -> None:
        if not response.is_error:
            return
        try:
            problem = status.Problem.model_validate_json(response.content)
        except ValidationError:
            shown = response.text[:200] or response.reason_phrase
            problem = status.Problem(title="Unknown", status=response.status_code,
                              detail=f"{self.base_url} answered {response.status_code}: {shown}",
                              hint="check that this URL is Eyrie's")
        reason = problem.type.removeprefix(_TYPE_PREFIX)
        for kind in vars(errors).values():
            if isinstance(kind, type) and issubclass(kind, EyrieError) and kind.reason == reason:
                raise kind(problem.detail, problem.hint)
        raise Refused(problem)
