"""Everything a request handler uses, in one value: repositories, settings, and how to wake the dispatcher of chores.

A handler receives it with the request's scope (`RequestControl`): every repository in it filters by that scope, so that
a route cannot read or change rows outside of it by forgetting a check.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from fastapi import Depends, Request

from eyrie_api import client_left
from eyrie_api.access.keys import SecretKeys
from eyrie_api.access.roles import ALL_PROJECTS
from eyrie_api.access.scope import SYSTEM, Scope
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.read_rules import ReadRules
from eyrie_api.database.audit import Audit
from eyrie_api.database.endpoint_history import Histories
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.idempotency import Idempotency
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.outbox import Outbox
from eyrie_api.database.projects import ApiKeys, Projects
from eyrie_api.database.quotas import WaitingObjects
from eyrie_api.database.results import Results
from eyrie_api.database.webhooks import Webhooks
from eyrie_api.errors import Forbidden, NotFound
from eyrie_api.http.job_files import JobFiles
from eyrie_api.http.job_storage import JobStorageMeter
from eyrie_api.planning import spec_policy
from eyrie_api.planning.published_drafters import with_drafters_of_jobs
from eyrie_api.settings import Settings


def _nothing() -> None:
    """No chores run in this process; the tick of another process finds what was enqueued."""


@dataclass(frozen=True)
class Control:
    settings: Settings
    database: Database
    files: JobFiles
    storage: JobStorageMeter
    jobs: Jobs
    endpoints: Endpoints
    histories: Histories
    results: Results
    outbox: Outbox
    idempotency: Idempotency
    keys: ApiKeys
    projects: Projects
    audit: Audit
    webhooks: Webhooks
    waiting: WaitingObjects
    secret_keys: SecretKeys
    scope: Scope = SYSTEM
    wake: Callable[[], None] = _nothing
    checks: Mapping[str, Callable[[], bool]] = field(default_factory=dict)
    """Named readiness checks beyond the database."""

    queues: Mapping[str, Callable[[], int]] = field(default_factory=dict)
    """Messages waiting in each queue of the broker, for metrics; raises Transient while the broker is unavailable."""

    @classmethod
    def over(cls, settings: Settings, database: Database, wake: Callable[[], None] | None = None,
             checks: Mapping[str, Callable[[], bool]] | None = None,
             queues: Mapping[str, Callable[[], int]] | None = None) -> "Control":
        idempotency = Idempotency(database, settings.idempotency_ttl_s)
        keys = SecretKeys(settings.required_secret_keys())
        files = JobFiles.of(settings)
        return cls(settings, database, files, JobStorageMeter(settings, files, database),
                   Jobs(database, idempotency=idempotency), Endpoints(database), Histories(database),
                   Results(database), Outbox(database), idempotency, ApiKeys(database), Projects(database),
                   Audit(database), Webhooks(database, keys=keys), WaitingObjects(database),
                   keys, SYSTEM, wake or _nothing, checks or {}, queues or {})

    def within(self, scope: Scope) -> "Control":
        """The same, restricted to `scope`."""
        database = self.database
        return replace(
            self, scope=scope, jobs=Jobs(database, idempotency=self.idempotency, scope=scope),
            endpoints=Endpoints(database, scope=scope), histories=Histories(database, scope=scope),
            results=Results(database, scope=scope), keys=ApiKeys(database, scope=scope),
            projects=Projects(database, scope=scope), audit=Audit(database, scope=scope),
            waiting=WaitingObjects(database, scope),
            webhooks=Webhooks(database, scope=scope, keys=self.secret_keys,
                              allow_private=self.settings.webhooks_allow_private))

    def checked(self, spec: JobSpec) -> tuple[JobSpec, ReadRules | None]:
        """The job with the drafters of the jobs that it names (`planning.published_drafters`), and the rules for the
        files and addresses that it reads; None: its submitter is not restricted. Raises InvalidInput."""
        spec, principal = with_drafters_of_jobs(spec, self.jobs.get, self.settings.home), self.scope.principal
        if principal is None or ALL_PROJECTS in principal.roles:
            return spec, None
        return spec, spec_policy.check(spec, self.settings, self._is_mine)

    def _is_mine(self, kind: str, name: str) -> bool:
        try:
            if kind == "jobs":
                self.jobs.get(name)
            else:
                self.endpoints.get(name)
        except (NotFound, Forbidden):
            return False
        return True


async def _scoped(request: Request) -> Control:
    control: Control = request.app.state.control
    return control.within(request.state.access)


RequestControl = Annotated[Control, Depends(_scoped)]
"""Parameter type of a handler that needs the control plane, restricted to the scope of the request."""


async def _ends_with_client(request: Request) -> AsyncIterator[None]:
    async with client_left.watch(request.receive):
        yield


EndsWithClient = Depends(_ends_with_client)
"""Dependency of a route that reads users' files: reading them ends when the client leaves."""
