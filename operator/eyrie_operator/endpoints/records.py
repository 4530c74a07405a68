"""Applies to the database those actions of a plan that record a decision, for both runtimes; drift and retraining.

Of the actions of `plan.plan_endpoint`, a runtime executes those that start, route and retire engines; the others are
recorded here. All are idempotent.

Drift of an endpoint's traffic is reported once, with the job that retrains its drafter, which is offered or started.
The job is the promoted one with other data: the latest chat requests of the endpoint, recorded by the gateway
(`serve.record_prompts`) or taken from the user's own log (`promotion.drift.traffic_file`). They are copied when drift
is reported, so that an offer and a retried job refer to the same data; a log at a URL is named as it is, and read whole
when the job runs. Of a sweep the job is the candidate that serves, and its training continues from the drafter that
serves where its family can and stages can read its files; the proof compares the result with that drafter.

Submission is idempotent by endpoint, revision and the window that showed the drift: a control plane killed between
submission and its record submits again and receives the first job's id.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eyrie_api.artifacts import digest_model
from eyrie_api.clock import Clock, utc_now
from eyrie_api.contract.data import DataSource
from eyrie_api.contract.families import FAMILIES
from eyrie_api.contract.promotion import PromotionPolicy
from eyrie_api.contract.resolved import ResolvedJob
from eyrie_api.contract.status import Endpoint, Job, Revision
from eyrie_api.contract.sweep import SweepSpec
from eyrie_api.data_files import is_remote
from eyrie_api.database.endpoint_history import Histories, RecentWindows
from eyrie_api.database.endpoints import Endpoints, Serving
from eyrie_api.database.engine import Database
from eyrie_api.database.idempotency import Idempotency, Once
from eyrie_api.database.jobs import Jobs
from eyrie_api.errors import EyrieError, InvalidInput, NotFound
from eyrie_api.file_rules import open_file, place_of
from eyrie_api.planning.resolve import derive
from eyrie_api.planning.spec_policy import require_rules
from eyrie_api.settings import Settings
from eyrie_operator.conditions import Conditions, observe
from eyrie_operator.endpoints import plan as act
from eyrie_operator.endpoints.plan import ServePolicy
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
    # Drafters that were trained elsewhere are not trained again: the default one is, on what is served.
    spec, changes = promoted.spec, dict[str, Any](drafters=())
    if winner is not None:
        spec, changes["sweep"] = winner.in_job(spec), SweepSpec()
        if head is not None and FAMILIES[spec.drafter.family].continues:
            changes["drafter"] = spec.drafter.model_copy(update={"init_from": str(head), "init_revision": None})
    sources = (DataSource(path=traffic, format="messages"),)
    changes |= {
        "data": spec.data.model_copy(update={"sources": sources, "mix": None}),
        "serve": spec.serve.model_copy(update={"endpoint": endpoint}),
        "labels": {**spec.labels, "retrained-from": job_id}}
    reads = promoted.reads
    if reads is not None:  # what the control plane adds is of the same project
        of_head = None if head is None else place_of(head, Path(reads.home))
        places = (*reads.places, f"endpoints/{endpoint}", *(() if of_head is None else (of_head,)))
        reads = reads.model_copy(update={"places": tuple(dict.fromkeys(places))})
    job = derive(spec.model_copy(update=changes), promoted.gpus, promoted.serving_gpus,
                 on_cluster=promoted.on_cluster, demand=promoted.demand)
    return job.model_copy(update={"reads": reads})


class EndpointRecords:
    """Database rows of endpoints, as the reconcilers of both runtimes read and write them."""

    def __init__(self, settings: Settings, database: Database, clock: Clock = utc_now,
                 stored: Path | None = None) -> None:
        """`stored`: where stages run without this machine's files, the directory whose files they get from a bucket."""
        self._clock, self._stored = clock, stored
        self.endpoints, self._histories = Endpoints(database, clock), Histories(database, clock)
        self._jobs = Jobs(database, clock, Idempotency(database, settings.idempotency_ttl_s, clock))

    def policy(self, endpoint: Endpoint, serving: Serving) -> ServePolicy:
        """The limits of the job whose drafter is the candidate, else the active one. Such a job cannot be deleted."""
        job = self.promoted_from(endpoint, endpoint.candidate_revision or endpoint.active_revision)
        promotion = job.spec.promotion if job is not None else PromotionPolicy()
        return ServePolicy(serving.serve.healthy_within_s, serving.serve.min_acceptance_ratio, canary=promotion.canary,
                           drift=promotion.drift, drain_s=serving.serve.drain_s,
                           counts_drafted=serving.serve.engine.kind == "embedded")

    def promoted_from(self, endpoint: Endpoint, number: int | None) -> Job | None:
        """The job of a revision; None when it was promoted without a job, or its job was deleted."""
        revision = endpoint.revision(number)
        try:
            return None if revision is None or revision.job_id is None else self._jobs.get(revision.job_id)
        except NotFound:
            return None

    def watched(self, endpoint: Endpoint) -> RecentWindows:
        active = endpoint.active_revision
        return RecentWindows() if active is None else self._histories.watched(endpoint.name, active)

    def record(self, action: act.EndpointAction, endpoint: Endpoint, conditions: Conditions, directory: Path,
               url_of: Callable[[int], str] | None = None) -> Conditions:
        """Record an action that changes rows; returns the updated conditions.

        directory   contains the endpoint's recorded traffic, and receives copies of it
        url_of      base URL of a revision alone, where each has one
        """
        name, now = endpoint.name, self._clock()
        if isinstance(action, act.Activate):
            self.endpoints.activate(name, action.revision, figures=_figures(action.ended),
                                    urls=_urls(url_of, action.revision))
            if action.revision < (endpoint.active_revision or 0):
                return conditions  # a rollback: the condition RolledBack keeps its reason
            return observe(conditions, "RolledBack", "False", "Activated", f"revision {action.revision} serves", now)
        if isinstance(action, act.Reject):
            self.endpoints.reject(name, action.revision, action.reason, action.message, _figures(action.ended))
            message = f"revision {action.revision}: {action.message}"
            return observe(conditions, "RolledBack", "True", action.reason, message, now)
        if isinstance(action, act.RollBack):
            # Each endpoint begins with a revision that is the target alone.
            bare = next(each.number for each in endpoint.revisions
                        if each.use.setting.method == "off") if action.without_drafter else None
            self.endpoints.roll_back(name, bare, actor="watch", reason=action.reason, message=action.message)
            message = f"revision {action.revision}: {action.message}"
            return observe(conditions, "RolledBack", "True", action.reason, message, now)
        if isinstance(action, act.AnnounceGap):
            self._histories.record(name, "gap", "ReplacingEngine", action.message, revision=action.revision,
                                   once=f"gap/{action.revision}/{now.isoformat()}")
        elif isinstance(action, act.ShareRoute):
            self.endpoints.canary(name, action.revision, action.share, _figures(action.ended),
                                  _urls(url_of, action.revision, action.serving))
        elif isinstance(action, act.CloseWindow):
            window = action.window
            self._histories.record_window(
                name, action.revision, action.tau, window.rounds, action.proven,
                accepted=() if action.tau is None else window.accepted, rollback_below=action.rollback_below,
                drift_below=action.drift_below, requests=window.requests, generated=window.generated,
                seconds=action.seconds)
        elif isinstance(action, act.ReportDrift):
            self._report_drift(action, endpoint, directory)
        elif isinstance(action, act.ProposeNoDrafter):
            self.endpoints.propose(name, job_id=None, checkpoint=None, tree=None, drafter_dir=None,
                                   reason="the target without a drafter, since no drafter became healthy")
        return conditions

    def reject_candidate(self, error: EyrieError, endpoint: Endpoint, conditions: Conditions) -> Conditions:
        """Reject the candidate: it cannot be served as configured, and a retry would fail the same way."""
        if endpoint.candidate_revision is None:
            return conditions
        self.endpoints.reject(endpoint.name, endpoint.candidate_revision, error.reason, str(error))
        return observe(conditions, "RolledBack", "True", error.reason, str(error), self._clock())

    def save_status(self, endpoint: Endpoint, conditions: Conditions, url: str | None) -> bool:
        """Store conditions and URL (None: unchanged) if they differ from the row that was read; returns whether they
        did."""
        if conditions == endpoint.conditions and url in (None, endpoint.url):
            return False
        self.endpoints.observe(endpoint.name, url=url, conditions=conditions)
        return True

    def _report_drift(self, action: act.ReportDrift, endpoint: Endpoint, directory: Path) -> None:
        """Record the drift with the job that would retrain the drafter; start the job if the policy says `retrain`."""
        name, promoted = endpoint.name, self.promoted_from(endpoint, action.revision)
        serving = next(each for each in endpoint.revisions if each.number == action.revision)
        window = self._histories.watched(name, action.revision).last_window
        once = f"{action.revision}/{window}"
        started, data, retraining, traffic = None, {}, None, None
        outcome = "no retraining is offered: the job it was promoted from is gone"
        try:
            if promoted is not None:
                resolved = self._jobs.resolved(promoted.id)
                require_rules(promoted.id, resolved)
                traffic = self._traffic(resolved, directory, f"{action.revision}-{window}")
                outcome = _NO_TRAFFIC if self._stored is None else _NO_REMOTE_TRAFFIC
                if traffic is not None:
                    retraining = retraining_job(promoted.id, resolved, name, traffic, serving.checkpoint or "",
                                                self._head(serving))
        except InvalidInput as refused:
            # The user's log may not be read (any more); or a rival serves, and the sweep is over mixes of data that is
            # replaced.
            outcome = f"no retraining is offered: {refused.message}"
        if promoted is not None and retraining is not None:
            data = {"job": retraining.spec.model_dump(mode="json"), "traffic_file": traffic}
            outcome = "a job that retrains on recent traffic is offered"
            if promoted.spec.promotion.drift.action == "retrain":
                key = Once(f"{name}/{once}", ROUTE, digest_model(retraining.spec))
                done = self._jobs.submit_once(retraining, key)
                started = done.id if isinstance(done, Job) else str(done["id"])
                outcome = f"{started} retrains on recent traffic"
        self._histories.record(
            name, "drift", "TrafficDrifted", f"{action.message}; {outcome}", revision=action.revision,
            job_id=None if promoted is None else promoted.id, data=data, once=f"drift/{once}",
            figures={"tau": action.taus[-1], "proven_tau": action.proven, "windows": float(len(action.taus))})
        if promoted is not None and started is not None:
            self._histories.record(name, "retraining", "RetrainingStarted",
                                   f"by promotion.drift.action of job {promoted.id}", job_id=started,
                                   revision=action.revision, once=f"retraining/{once}")
        log.warning("endpoint %s: %s; %s", name, action.message, outcome)

    def _traffic(self, promoted: ResolvedJob, directory: Path, name: str) -> str | None:
        """What the job reads: a log at an address, or a copy, written once, of the recent traffic or of the user's log.
        None when there is no traffic that stages could read. Raises InvalidInput for a log that may not be read."""
        own = promoted.spec.promotion.drift.traffic_file
        if own is not None and is_remote(own):
            return own
        if self._stored is not None:
            return None
        source = Path(own) if own is not None else directory / TRAFFIC_FILE
        to = directory / SNAPSHOTS / f"{name}.jsonl"
        if not to.exists():
            if not source.is_file() or source.stat().st_size == 0:
                return None
            rules = None if own is None else promoted.reads
            with open_file(source, rules, "promotion.drift.traffic_file") as file:
                to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_latest(file, to, KEPT_ROWS)
        return str(to)

    def _head(self, serving: Revision) -> Path | None:
        """The directory of the drafter that serves, if training can read it."""
        if serving.use.drafter_dir is None:
            return None
        head = Path(serving.use.drafter_dir)
        is_stored = self._stored is not None and head.is_relative_to(self._stored)
        return head if is_stored or head.is_dir() else None


def _urls(url_of: Callable[[int], str] | None, *revisions: int) -> dict[int, str]:
    return {} if url_of is None else {number: url_of(number) for number in revisions}


def _figures(ended: act.CanaryStep | None) -> dict[str, float | None]:
    return {} if ended is None else asdict(ended)
