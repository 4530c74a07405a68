"""When traffic has drifted: the job that would hint it, offered or started once.

The job is the promoted one again with other data: the latest chat requests of the endpoint, as the gateway recorded
them (`serve.record_prompts`) or as the user's own log says (`promotion.drift.traffic_file`). They are copied when drift
is told, so that the offer means the same data tomorrow, and a retried job finds what it began with.

Starting is idempotent by endpoint, revision and the window that showed the drift: a control plane killed between
submitting and writing it down submits the same job again and is given the first one's.
"""

import logging
from pathlib import Path
from typing import Any

from eyrie_api.artifacts import digest_model
from eyrie_api.database.endpoint_history import Histories
from eyrie_api.database.idempotency import Idempotency, Replay, RequestInFlight
from eyrie_api.database.jobs import Jobs
from eyrie_api.errors import EyrieError
from eyrie_api.v1alpha1.data import DataSource
from eyrie_api.v1alpha1.job import JobSpec
from eyrie_api.v1alpha1.status import Job
from eyrie_operator.endpoints.state import ReportDrift
from eyrie_operator.endpoints.traffic_recording import TRAFFIC_FILE, write_latest

log = logging.getLogger(__name__)

ROUTE = "retraining"
"""What the idempotency keys of these submissions belong to."""

KEPT_ROWS = 1_000_000
"""As many as the gateway would keep at most: a traffic file of the user's own may be longer."""


class Drift:
    """Tells drift and hints it, for the endpoints of one database."""

    def __init__(self, histories: Histories, jobs: Jobs, idempotency: Idempotency) -> None:
        self._histories, self._jobs, self._idempotency = histories, jobs, idempotency

    def tell(self, action: ReportDrift, endpoint: str, directory: Path, promoted: Job | None) -> None:
        """Record the drift with the job that would hint it, and start it where the policy says so."""
        window = self._histories.watched(endpoint, action.revision).last_window
        once = f"{action.revision}/{window}"
        traffic = None if promoted is None else _snapshot(promoted.spec, directory, f"{action.revision}-{window}")
        started, data = None, {}
        if promoted is None or traffic is None:
            words = ("no retraining is offered: the job it was promoted from is gone" if promoted is None else
                     "no retraining is offered, since no recent traffic was kept: set serve.record_prompts, or "
                     "promotion.drift.traffic_file to a log of your own")
        else:
            spec = retraining_job(promoted, endpoint, traffic)
            data = {"job": spec.model_dump(mode="json"), "traffic_file": str(traffic)}
            words = "a job that retrains on recent traffic is offered"
            if promoted.spec.promotion.drift.action == "retrain":
                try:
                    started = self._start(spec, f"{endpoint}/{once}")
                except RequestInFlight:
                    return  # a control plane died in the middle of it; the key is free again in a minute
                words = f"{started} retrains on recent traffic"
        self._histories.record(
            endpoint, "drift", "TrafficDrifted", f"{action.message}; {words}", revision=action.revision,
            job_id=None if promoted is None else promoted.id, data=data, once=f"drift/{once}",
            figures={"tau": action.taus[-1], "proven_tau": action.proven, "windows": float(len(action.taus))})
        if started is not None:
            self._histories.record(endpoint, "retraining", "RetrainingStarted", f"by promotion.drift.action of job "
                                   f"{promoted.id if promoted is not None else '-'}", job_id=started,
                                   revision=action.revision, once=f"retraining/{once}")
        log.warning("endpoint %s: %s; %s", endpoint, action.message, words)

    def _start(self, spec: JobSpec, key: str) -> str:
        claim = self._idempotency.claim(key, ROUTE, digest_model(spec))
        if isinstance(claim, Replay):
            return str(claim.response["id"])
        try:
            return self._jobs.submit(spec, claim).id
        except EyrieError:
            self._idempotency.release(claim)
            raise


def retraining_job(promoted: Job, endpoint: str, traffic: Path) -> JobSpec:
    """The promoted job again, on recent traffic, for the same endpoint. Pure."""
    spec = promoted.spec
    sources = (DataSource(path=str(traffic), format="messages"),)
    changes: dict[str, Any] = {
        "data": spec.data.model_copy(update={"sources": sources}),
        "serve": spec.serve.model_copy(update={"endpoint": endpoint}),
        "labels": {**spec.labels, "retrained-from": promoted.id}}
    return spec.model_copy(update=changes)


def _snapshot(spec: JobSpec, directory: Path, name: str) -> Path | None:
    """A copy of the recent traffic, made once; None when there is none."""
    own = spec.promotion.drift.traffic_file
    source = Path(own) if own is not None else directory / TRAFFIC_FILE
    to = directory / "traffic" / f"{name}.jsonl"
    if to.exists():
        return to
    if not source.is_file() or source.stat().st_size == 0:
        return None
    to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_latest(source, to, KEPT_ROWS)
    return to
