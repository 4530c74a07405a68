"""Quotas of projects, checked inside the transaction that would use more, and the DrafterJobs that wait for one.

Usage is counted from the rows. GPUs and replicas depend on the cluster profile, which is not in the database:
`eyrie_api.planning.resolve` computes them when a request is accepted, and the rows keep them.

Race: two concurrent requests could both pass as the last one allowed; so where a limit is set, the project's row is
locked until the transaction ends. Without a limit the check costs one read.

GPU hours have no quota: the devices of a stage are not recorded, and an estimate from resource requests and wall time
would charge for waiting.
"""

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from eyrie_api.access.scope import SYSTEM, Scope
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.placement import PlacementRequest
from eyrie_api.contract.resolved import Demand
from eyrie_api.contract.resources import WaitingList, WaitingObject
from eyrie_api.database.engine import Database, upsert
from eyrie_api.database.rendering import render
from eyrie_api.database.tables import EndpointNameRow, EndpointRow, JobRow, ProjectRow, WaitingRow
from eyrie_api.errors import EyrieError, Forbidden


class QuotaReached(EyrieError):
    """The project has reached a quota."""

    http_status = 429
    exit_code = 75  # EX_TEMPFAIL


class PriorityClassRefused(Forbidden):
    """A job or endpoint names a PriorityClass that its project may not use."""


def live_jobs(session: Session, project: str) -> tuple[int, int]:
    """Jobs of a project that have not ended, and the GPUs that they request at one time."""
    jobs, gpus = session.execute(select(func.count(), func.sum(JobRow.num_gpus)).where(
        JobRow.project == project, JobRow.ended.is_(False))).one()
    return jobs, int(gpus or 0)


def live_endpoints(session: Session, project: str) -> tuple[int, int]:
    """Endpoints of a project that are on, and their replicas."""
    names = select(EndpointNameRow.name).where(EndpointNameRow.project == project)
    endpoints, replicas = session.execute(select(func.count(), func.sum(EndpointRow.num_replicas)).where(
        EndpointRow.name.in_(names), EndpointRow.desired == "on")).one()
    return endpoints, int(replicas or 0)


def check_job(session: Session, project: str, spec: JobSpec, demand: Demand) -> None:
    """Raises QuotaReached when the project may not have this job too, or its endpoint; PriorityClassRefused."""
    requests = {"placement.every": spec.placement.every}
    requests |= {f"placement.stages.{stage}": request for stage, request in spec.placement.stages.items()}
    check_priority_classes(session, project, requests)
    most = _held(session, project, "max_jobs")
    if most is not None and live_jobs(session, project)[0] >= most:
        raise QuotaReached(f"project {project!r} has {most} jobs that have not ended, and may have no more",
                           "wait until one ends, cancel one, or ask an administrator for more")
    most = _held(session, project, "max_gpus") if demand.num_gpus else None
    if most is not None and (used := live_jobs(session, project)[1]) + demand.num_gpus > most:
        raise QuotaReached(f"placement requests {demand.num_gpus} GPUs at one time; project {project!r} may have "
                           f"{most} in jobs that have not ended, and has {used}",
                           "lower placement.*.num_gpus or the number of candidates, wait until a job ends, or ask an "
                           f"administrator of the installation: eyrie projects quotas {project} --gpus N")
    if spec.serve.enabled:
        check_endpoint(session, project, spec.serve.endpoint, demand.num_replicas, spec.serve.placement)


def check_endpoint(session: Session, project: str, name: str, num_replicas: int, request: PlacementRequest) -> None:
    """Raises QuotaReached when the endpoint may not be on with so many replicas, of which one that is on keeps those
    it has; PriorityClassRefused."""
    check_priority_classes(session, project, {"serve.placement": request})
    most_on, most_replicas = _held(session, project, "max_endpoints"), _held(session, project, "max_replicas")
    row = session.get(EndpointRow, name)  # after the project's row is locked
    is_on = row is not None and row.desired == "on"
    if most_on is not None and not is_on and live_endpoints(session, project)[0] >= most_on:
        raise QuotaReached(f"project {project!r} has {most_on} endpoints that are on, and may have no more",
                           "switch one off, promote to one of them, or ask an administrator for more")
    own = row.num_replicas if row is not None and is_on else 0
    if most_replicas is not None and num_replicas > own \
            and (others := live_endpoints(session, project)[1] - own) + num_replicas > most_replicas:
        raise QuotaReached(f"serve.replicas of endpoint {name!r} is {num_replicas}; project {project!r} may have "
                           f"{most_replicas} replicas of endpoints that are on, and its others have {others}",
                           "lower serve.replicas, switch an endpoint off, or ask an administrator of the installation: "
                           f"eyrie projects quotas {project} --replicas N")


def check_priority_classes(session: Session, project: str, requests: dict[str, PlacementRequest]) -> None:
    """Raises PriorityClassRefused for a class that is not among the project's. `requests` is by field."""
    row = session.get(ProjectRow, project)
    if row is None or row.priority_classes is None:
        return
    for field, request in requests.items():
        if request.priority_class not in (None, *row.priority_classes):
            raise PriorityClassRefused(
                f"{field}.priority_class is {request.priority_class!r}; project {project!r} may use "
                f"{', '.join(row.priority_classes) or 'none'}",
                "leave it out or name one of those, or ask an administrator of the installation: "
                f"eyrie projects quotas {project} --priority-class NAME")


def _held(session: Session, project: str, limit: str) -> int | None:
    row = session.get(ProjectRow, project)
    if row is None or getattr(row, limit) is None:
        return None
    session.refresh(row, with_for_update=True)
    most: int | None = getattr(row, limit)
    return most


class WaitingObjects:
    """DrafterJobs that wait for a quota of their project, as `scope` sees them.

    Such an object has no job yet, or one that is to be resumed. Its row is a copy of the operator's latest decision,
    for REST and console: nothing else reads it. The operator compares before it writes
    (`eyrie_operator.cluster.reconcile`) and deletes rows of objects that do not wait any more.
    """

    def __init__(self, database: Database, scope: Scope = SYSTEM) -> None:
        self._database, self._scope = database, scope

    def list(self, *, limit: int = 100) -> WaitingList:
        """Those that have waited longest, and the number of all, in one statement."""
        query = (select(WaitingRow, func.count().over()).where(self._scope.sees(WaitingRow.project, "jobs:read"))
                 .order_by(WaitingRow.since, WaitingRow.namespace, WaitingRow.name).limit(limit))
        with self._database.reading() as session:
            rows = session.execute(query).all()
            return WaitingList(items=tuple(render(WaitingObject, row) for row, _total in rows),
                               total=rows[0][1] if rows else 0)

    # For the operator.

    def all(self) -> tuple[WaitingObject, ...]:
        with self._database.reading() as session:
            return tuple(render(WaitingObject, row) for row in session.scalars(select(WaitingRow)))

    def find(self, namespace: str, name: str) -> WaitingObject | None:
        """The row of an object; None when it does not wait."""
        with self._database.reading() as session:
            row = session.get(WaitingRow, (namespace, name))
            return None if row is None else render(WaitingObject, row)

    def record(self, waiting: WaitingObject) -> None:
        values = waiting.model_dump(include=set(WaitingObject.model_fields) - {"namespace", "name"})
        with self._database.writing() as session:
            upsert(session, WaitingRow, {"namespace": waiting.namespace, "name": waiting.name}, values)

    def remove(self, waiting: WaitingObject) -> None:
        """Delete the row of an object, if it is still that of this uid: another one may have been applied under the
        name meanwhile."""
        with self._database.writing() as session:
            session.execute(delete(WaitingRow).where(
                WaitingRow.namespace == waiting.namespace, WaitingRow.name == waiting.name,
                WaitingRow.uid == waiting.uid))
