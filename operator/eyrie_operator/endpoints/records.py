"""Applies to the database those actions of a plan that record a decision, for both runtimes.

Of the actions of `plan.plan_endpoint`, a runtime executes those that start, route and retire engines; the others are
recorded here. All are idempotent.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from eyrie_api.clock import Clock, utc_now
from eyrie_api.database.endpoint_history import Histories, RecentWindows
from eyrie_api.database.endpoints import Endpoints, Serving
from eyrie_api.database.engine import Database
from eyrie_api.database.idempotency import Idempotency
from eyrie_api.database.jobs import Jobs
from eyrie_api.errors import EyrieError, NotFound
from eyrie_api.settings import Settings
from eyrie_api.v1alpha1.promotion import PromotionPolicy
from eyrie_api.v1alpha1.status import Endpoint, Job
from eyrie_operator.conditions import Conditions, observe
from eyrie_operator.endpoints.drift import Drift
from eyrie_operator.endpoints.state import (
    Activate,
    AnnounceGap,
    CanaryStep,
    CloseWindow,
    EndpointAction,
    ProposeNoDrafter,
    Reject,
    ReportDrift,
    RollBack,
    ServePolicy,
    ShareRoute,
)

log = logging.getLogger(__name__)


class EndpointRecords:
    """Database rows of endpoints, as the reconcilers of both runtimes read and write them."""

    def __init__(self, settings: Settings, database: Database, clock: Clock = utc_now,
                 stored: Path | None = None) -> None:
        """
        stored   where stages run without this machine's files: the directory whose files they get from a bucket
        """
        self._clock = clock
        idempotency = Idempotency(database, settings.idempotency_ttl_s, clock)
        self.endpoints, self._histories = Endpoints(database, clock), Histories(database, clock)
        self._jobs = Jobs(database, clock, idempotency)
        self._drift = Drift(self._histories, self._jobs, stored)

    def policy(self, endpoint: Endpoint, serving: Serving) -> ServePolicy:
        """The limits of the job whose drafter is the candidate, else the active one. Such a job cannot be deleted."""
        job = self.promoted_from(endpoint, endpoint.candidate_revision or endpoint.active_revision)
        promotion = job.spec.promotion if job is not None else PromotionPolicy()
        return ServePolicy(serving.serve.healthy_within_s, serving.serve.min_acceptance_ratio, canary=promotion.canary,
                           drift=promotion.drift, drain_s=serving.serve.drain_s,
                           counts_drafted=serving.serve.engine.kind == "embedded")

    def promoted_from(self, endpoint: Endpoint, number: int | None) -> Job | None:
        """The job of a revision; None when it was promoted without a job, or its job was deleted."""
        job_id = next((each.job_id for each in endpoint.revisions if each.number == number), None)
        try:
            return None if job_id is None else self._jobs.get(job_id)
        except NotFound:
            return None

    def watched(self, endpoint: Endpoint) -> RecentWindows:
        """Recent acceptance windows of the active revision."""
        active = endpoint.active_revision
        return RecentWindows() if active is None else self._histories.watched(endpoint.name, active)

    def record(self, action: EndpointAction, endpoint: Endpoint, conditions: Conditions, directory: Path,
               url_of: Callable[[int], str] | None = None) -> Conditions:
        """Record an action that changes rows; returns the updated conditions.

        directory   contains the endpoint's recorded traffic, and receives copies of it
        url_of      base URL of a revision alone, where each has one
        """
        name, now = endpoint.name, self._clock()
        if isinstance(action, Activate):
            self.endpoints.activate(name, action.revision, figures=_figures(action.ended),
                                    urls=_urls(url_of, action.revision))
            if action.revision < (endpoint.active_revision or 0):
                return conditions  # a rollback: the condition RolledBack keeps its reason
            return observe(conditions, "RolledBack", "False", "Activated", f"revision {action.revision} serves", now)
        if isinstance(action, Reject):
            self.endpoints.reject(name, action.revision, action.reason, action.message, _figures(action.ended))
            message = f"revision {action.revision}: {action.message}"
            return observe(conditions, "RolledBack", "True", action.reason, message, now)
        if isinstance(action, RollBack):
            self.endpoints.roll_back(name, actor="watch", reason=action.reason, message=action.message)
            message = f"revision {action.revision}: {action.message}"
            return observe(conditions, "RolledBack", "True", action.reason, message, now)
        if isinstance(action, AnnounceGap):
            self._histories.record(name, "gap", "ReplacingEngine", action.message, revision=action.revision,
                                   once=f"gap/{action.revision}/{now.isoformat()}")
        elif isinstance(action, ShareRoute):
            self.endpoints.canary(name, action.revision, action.share, _figures(action.ended),
                                  _urls(url_of, action.revision, action.serving))
        elif isinstance(action, CloseWindow):
            self._histories.record_window(
                name, action.revision, action.tau, action.rounds, action.proven, accepted=action.accepted,
                rollback_below=action.rollback_below, drift_below=action.drift_below, requests=action.requests,
                seconds=action.seconds)
        elif isinstance(action, ReportDrift):
            serving = next((one for one in endpoint.revisions if one.number == action.revision), None)
            self._drift.report(action, name, directory, self.promoted_from(endpoint, action.revision), serving)
        elif isinstance(action, ProposeNoDrafter):
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


def _urls(url_of: Callable[[int], str] | None, *revisions: int) -> dict[int, str]:
    return {} if url_of is None else {number: url_of(number) for number in revisions}


def _figures(ended: CanaryStep | None) -> dict[str, float | None]:
    return {} if ended is None else asdict(ended)
