"""Reports drift of an endpoint's traffic once, and offers or starts the job that retrains its drafter.

The job is the promoted one with other data: the latest chat requests of the endpoint, recorded by the gateway
(`serve.record_prompts`) or taken from the user's own log (`promotion.drift.traffic_file`). They are copied when drift
is reported, so that an offer and a retried job refer to the same data; a log at a URL is named as it is, and read whole
when the job runs. Of a sweep the job is the candidate that serves, and its training continues from the drafter that
serves where its family can and stages can read its files; the proof compares the result with that drafter.

Submission is idempotent by endpoint, revision and the window that showed the drift: a control plane killed between
submission and its record submits again and receives the first job's id.
"""

import logging
from pathlib import Path
from typing import Any

from eyrie_api.artifacts import digest_model
from eyrie_api.data_files import is_remote
from eyrie_api.database.endpoint_history import Histories
from eyrie_api.database.idempotency import Once, Replay
from eyrie_api.database.jobs import Jobs
from eyrie_api.errors import InvalidInput
from eyrie_api.submission.resolve import derive
from eyrie_api.v1alpha1.data import DataSource
from eyrie_api.v1alpha1.families import FAMILIES
from eyrie_api.v1alpha1.job import JobSpec
from eyrie_api.v1alpha1.resolved import ResolvedJob
from eyrie_api.v1alpha1.status import Job, Revision
from eyrie_api.v1alpha1.sweep import SweepSpec
from eyrie_operator.endpoints.state import ReportDrift
from eyrie_operator.endpoints.traffic_recording import SNAPSHOTS, TRAFFIC_FILE, write_latest

log = logging.getLogger(__name__)

ROUTE = "retraining"
"""Namespace of the idempotency keys of these submissions."""

KEPT_ROWS = 1_000_000
"""The most that the gateway records; a user's own traffic file may be longer."""

_NO_TRAFFIC = ("no retraining is offered, since no recent traffic was recorded: set serve.record_prompts, or "
               "promotion.drift.traffic_file to a log of your own")
_NO_REMOTE_TRAFFIC = ("no retraining is offered, since stages run without this machine's files: set "
                      "promotion.drift.traffic_file to the s3:// or https:// address of a log of your own")


class Drift:
    """Reports drift and starts retraining, for the endpoints of one database."""

    def __init__(self, histories: Histories, jobs: Jobs, stored: Path | None = None) -> None:
        """
        jobs     with idempotency
        stored   where stages run without this machine's files: the directory whose files they get from a bucket
        """
        self._histories, self._jobs, self._stored = histories, jobs, stored

    def report(self, action: ReportDrift, endpoint: str, directory: Path, promoted: Job | None,
               serving: Revision | None) -> None:
        """Record the drift with the job that would retrain the drafter; start the job if the policy says `retrain`."""
        window = self._histories.watched(endpoint, action.revision).last_window
        once = f"{action.revision}/{window}"
        traffic = None if promoted is None else self._traffic(promoted.spec, directory, f"{action.revision}-{window}")
        started, data, retraining = None, {}, None
        if promoted is None or traffic is None:
            outcome = ("no retraining is offered: the job it was promoted from is gone" if promoted is None else
                       _NO_TRAFFIC if self._stored is None else _NO_REMOTE_TRAFFIC)
        else:
            try:
                retraining = retraining_job(promoted.id, self._jobs.resolved(promoted.id), endpoint, traffic,
                                            "" if serving is None else serving.checkpoint or "",
                                            None if serving is None else self._head(serving))
            except InvalidInput as refused:  # a rival serves, and the sweep is over mixes of data that is replaced
                outcome = f"no retraining is offered: {refused.message}"
        if promoted is not None and retraining is not None:
            data = {"job": retraining.spec.model_dump(mode="json"), "traffic_file": traffic}
            outcome = "a job that retrains on recent traffic is offered"
            if promoted.spec.promotion.drift.action == "retrain":
                key = Once(f"{endpoint}/{once}", ROUTE, digest_model(retraining.spec))
                done = self._jobs.submit_once(retraining, key)
                started = str(done.response["id"]) if isinstance(done, Replay) else done.id
                outcome = f"{started} retrains on recent traffic"
        self._histories.record(
            endpoint, "drift", "TrafficDrifted", f"{action.message}; {outcome}", revision=action.revision,
            job_id=None if promoted is None else promoted.id, data=data, once=f"drift/{once}",
            figures={"tau": action.taus[-1], "proven_tau": action.proven, "windows": float(len(action.taus))})
        if started is not None:
            self._histories.record(endpoint, "retraining", "RetrainingStarted", f"by promotion.drift.action of job "
                                   f"{promoted.id if promoted is not None else '-'}", job_id=started,
                                   revision=action.revision, once=f"retraining/{once}")
        log.warning("endpoint %s: %s; %s", endpoint, action.message, outcome)

    def _traffic(self, spec: JobSpec, directory: Path, name: str) -> str | None:
        """What the job reads; None when there is no traffic that stages could read."""
        own = spec.promotion.drift.traffic_file
        if own is not None and is_remote(own):
            return own
        copy = _snapshot(spec, directory, name) if self._stored is None else None
        return None if copy is None else str(copy)

    def _head(self, serving: Revision) -> Path | None:
        """The directory of the drafter that serves, if training can read it."""
        if serving.use.drafter_dir is None:
            return None
        head = Path(serving.use.drafter_dir)
        is_stored = self._stored is not None and head.is_relative_to(self._stored)
        return head if is_stored or head.is_dir() else None


def retraining_job(job_id: str, promoted: ResolvedJob, endpoint: str, traffic: str, checkpoint: str = "",
                   head: Path | None = None) -> ResolvedJob:
    """The promoted job, of this id, on recent traffic, for the same endpoint. Pure. Placed and counted as that job was:
    it has no defaults to fill in, and no plan.

    traffic      absolute path or URL of the requests
    checkpoint   what serves; of a sweep its candidate alone is trained again
    head         its directory, if training can read it
    """
    winner = next((candidate for candidate in promoted.candidates
                   if checkpoint.startswith(f"{candidate.name}-step-")), None)
    spec, changes = promoted.spec, dict[str, Any]()
    if winner is not None:
        spec, changes["sweep"] = winner.in_job(spec), SweepSpec()
        if head is not None and FAMILIES[spec.drafter.family].continues:
            changes["drafter"] = spec.drafter.model_copy(update={"init_from": str(head), "init_revision": None})
    sources = (DataSource(path=traffic, format="messages"),)
    changes |= {
        "data": spec.data.model_copy(update={"sources": sources, "mix": None}),
        "serve": spec.serve.model_copy(update={"endpoint": endpoint}),
        "labels": {**spec.labels, "retrained-from": job_id}}
    return derive(spec.model_copy(update=changes), promoted.gpus, promoted.serving_gpus,
                  on_cluster=promoted.on_cluster, demand=promoted.demand)


def _snapshot(spec: JobSpec, directory: Path, name: str) -> Path | None:
    """A copy of the recent traffic, written once; None when there is no traffic."""
    own = spec.promotion.drift.traffic_file
    source = Path(own) if own is not None else directory / TRAFFIC_FILE
    to = directory / SNAPSHOTS / f"{name}.jsonl"
    if to.exists():
        return to
    if not source.is_file() or source.stat().st_size == 0:
        return None
    to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_latest(source, to, KEPT_ROWS)
    return to
