"""Quotas of projects, checked inside the transaction that would use more.

Usage is counted from the rows. GPUs and replicas depend on the cluster profile, which is not in the database:
`eyrie_api.submission.resolve` computes them when a request is accepted, and the rows keep them.

Race: two concurrent requests could both pass as the last one allowed; so where a limit is set, the project's row is
locked until the transaction ends. Without a limit the check costs one read.

GPU hours have no quota: the devices of a stage are not recorded, and an estimate from resource requests and wall time
would charge for waiting.
"""

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from eyrie_api.database import endpoint_names
from eyrie_api.database.tables import EndpointRow, JobRow, ProjectRow
from eyrie_api.errors import EyrieError, Forbidden
from eyrie_api.v1alpha1.job import JobSpec
from eyrie_api.v1alpha1.placement import PlacementRequest
from eyrie_api.v1alpha1.resolved import Demand


class QuotaReached(EyrieError):
    """The project has reached a quota."""

    http_status = 429
    exit_code = 75  # EX_TEMPFAIL
    reason = "QuotaReached"


class PriorityClassRefused(Forbidden):
    """A job or endpoint names a PriorityClass that its project may not use."""

    reason = "PriorityClassRefused"


def live_jobs(session: Session, project: str) -> int:
    """Jobs of a project that have not ended."""
    query = select(func.count()).select_from(JobRow).where(JobRow.project == project, JobRow.ended.is_(False))
    return session.execute(query).scalar_one()


def live_endpoints(session: Session, project: str) -> int:
    """Endpoints of a project that are on."""
    query = select(func.count()).select_from(EndpointRow).where(
        endpoint_names.in_project(EndpointRow.name, project), EndpointRow.desired == "on")
    return session.execute(query).scalar_one()


def live_gpus(session: Session, project: str) -> int:
    """GPUs that the jobs of a project that have not ended request at one time."""
    query = select(func.coalesce(func.sum(JobRow.num_gpus), 0)).where(
        JobRow.project == project, JobRow.ended.is_(False))
    return int(session.execute(query).scalar_one())


def live_replicas(session: Session, project: str) -> int:
    """Replicas of the endpoints of a project that are on."""
    query = select(func.coalesce(func.sum(EndpointRow.num_replicas), 0)).where(
        endpoint_names.in_project(EndpointRow.name, project), EndpointRow.desired == "on")
    return int(session.execute(query).scalar_one())


def check_job(session: Session, project: str, spec: JobSpec, demand: Demand) -> None:
    """Raises QuotaReached when the project may not have this job too, or its endpoint; PriorityClassRefused."""
    requests = {"placement.every": spec.placement.every}
    requests |= {f"placement.stages.{stage}": request for stage, request in spec.placement.stages.items()}
    check_priority_classes(session, project, requests)
    check_jobs(session, project)
    check_gpus(session, project, demand.num_gpus)
    if spec.serve.enabled:
        check_endpoint(session, project, spec.serve.endpoint, demand.num_replicas, spec.serve.placement)


def check_endpoint(session: Session, project: str, name: str, num_replicas: int, request: PlacementRequest) -> None:
    """Raises QuotaReached when the endpoint may not be on with so many replicas; PriorityClassRefused."""
    check_priority_classes(session, project, {"serve.placement": request})
    check_endpoints(session, project, name)
    check_replicas(session, project, name, num_replicas)


def check_jobs(session: Session, project: str) -> None:
    """Raises QuotaReached when the project may not have another job."""
    most = _held(session, project, "max_jobs")
    if most is not None and live_jobs(session, project) >= most:
        raise QuotaReached(f"project {project!r} has {most} jobs that have not ended, and may have no more",
                           "wait until one ends, cancel one, or ask an administrator for more")


def check_endpoints(session: Session, project: str, name: str) -> None:
    """Raises QuotaReached when the endpoint may not be switched on."""
    most = _held(session, project, "max_endpoints")
    if most is None:
        return
    row = session.get(EndpointRow, name)
    if (row is None or row.desired != "on") and live_endpoints(session, project) >= most:
        raise QuotaReached(f"project {project!r} has {most} endpoints that are on, and may have no more",
                           "switch one off, promote to one of them, or ask an administrator for more")


def check_gpus(session: Session, project: str, num_gpus: int) -> None:
    """Raises QuotaReached when the project's jobs may not request so many more GPUs."""
    most = _held(session, project, "max_gpus")
    if most is None or num_gpus == 0:
        return
    used = live_gpus(session, project)
    if used + num_gpus > most:
        raise QuotaReached(f"placement requests {num_gpus} GPUs at one time; project {project!r} may have {most} in "
                           f"jobs that have not ended, and has {used}",
                           "lower placement.*.num_gpus or the number of candidates, wait until a job ends, or ask an "
                           f"administrator of the installation: eyrie projects quotas {project} --gpus N")


def check_replicas(session: Session, project: str, name: str, num_replicas: int) -> None:
    """Raises QuotaReached when the endpoint may not have so many replicas. One that is on keeps those it has."""
    most = _held(session, project, "max_replicas")
    if most is None:
        return
    row = session.get(EndpointRow, name)
    own = row.num_replicas if row is not None and row.desired == "on" else 0
    used = live_replicas(session, project)
    if num_replicas > own and used - own + num_replicas > most:
        raise QuotaReached(f"serve.replicas of endpoint {name!r} is {num_replicas}; project {project!r} may have "
                           f"{most} replicas of endpoints that are on, and its others have {used - own}",
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
