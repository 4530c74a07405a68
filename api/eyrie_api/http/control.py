"""Everything a request handler uses, in one value: repositories, settings, and how to wake the dispatcher of chores.

A handler receives it with the request's scope (`RequestControl`): every repository in it filters by that scope, so that
a route cannot read or change rows outside of it by forgetting a check.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from copy import copy
from typing import Annotated

from fastapi import Depends, Request

from eyrie_api import client_left
from eyrie_api.access.keys import SecretKeys
from eyrie_api.access.roles import ALL_PROJECTS
from eyrie_api.access.scope import SYSTEM, Scope
from eyrie_api.contract.endpoints import EndpointTraffic
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.read_rules import ReadRules
from eyrie_api.contract.status import Endpoint
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
from eyrie_api.decisions.endpoint_traffic import KINDS, traffic_of
from eyrie_api.errors import Forbidden, NotFound
from eyrie_api.http.job_files import JobFiles
from eyrie_api.http.job_storage import JobStorageMeter
from eyrie_api.planning import spec_policy
from eyrie_api.planning.published_drafters import with_drafters_of_jobs
from eyrie_api.settings import Settings


class Control:
    def __init__(self, settings: Settings, database: Database, wake: Callable[[], None] | None = None,
                 checks: Mapping[str, Callable[[], bool]] | None = None,
                 queues: Mapping[str, Callable[[], int]] | None = None) -> None:
        """
        wake     dispatches enqueued chores; None: the tick of another process finds them
        checks   named readiness checks beyond the database
        queues   messages waiting in each queue of the broker; raises Transient while the broker is unavailable
        """
        self.settings, self.database = settings, database
        self.wake, self.checks, self.queues = wake or (lambda: None), checks or {}, queues or {}
        self.files = JobFiles.of(settings)
        self.storage = JobStorageMeter(settings, self.files, database)
        self.outbox, self.idempotency = Outbox(database), Idempotency(database, settings.idempotency_ttl_s)
        self._secret_keys = SecretKeys(settings.required_secret_keys())
        self._restrict(SYSTEM)

    def within(self, scope: Scope) -> "Control":
        """The same, restricted to `scope`."""
        restricted = copy(self)
        restricted._restrict(scope)
        return restricted

    def _restrict(self, scope: Scope) -> None:
        database, self.scope = self.database, scope
        self.jobs = Jobs(database, idempotency=self.idempotency, scope=scope)
        self.endpoints, self.histories = Endpoints(database, scope=scope), Histories(database, scope=scope)
        self.results, self.waiting = Results(database, scope=scope), WaitingObjects(database, scope)
        self.keys, self.projects = ApiKeys(database, scope=scope), Projects(database, scope=scope)
        self.audit = Audit(database, scope=scope)
        self.webhooks = Webhooks(database, scope=scope, keys=self._secret_keys,
                                 allow_private=self.settings.webhooks_allow_private)

    def traffic(self, endpoints: Sequence[Endpoint]) -> tuple[EndpointTraffic, ...]:
        """What the traffic of each endpoint shows now."""
        names = [endpoint.name for endpoint in endpoints]
        return traffic_of(endpoints, self.histories.latest(names, KINDS))

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
