"""Quotas of projects, checked inside the transaction that would use more.

Usage is counted from the rows. Race: two concurrent requests could both pass as the last one allowed; so where a limit
is set, the project's row is locked until the transaction ends. Without a limit the check costs one read.

GPU hours have no quota: the devices of a stage are not recorded, and an estimate from resource requests and wall time
would charge for waiting.
"""

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from eyrie_api.database import endpoint_names
from eyrie_api.database.tables import EndpointRow, JobRow, ProjectRow
from eyrie_api.errors import EyrieError


class QuotaReached(EyrieError):
    """The project has reached a quota."""

    http_status = 429
    exit_code = 75  # EX_TEMPFAIL
    reason = "QuotaReached"


def live_jobs(session: Session, project: str) -> int:
    """Jobs of a project that have not ended."""
    query = select(func.count()).select_from(JobRow).where(JobRow.project == project, JobRow.ended.is_(False))
    return session.execute(query).scalar_one()


def live_endpoints(session: Session, project: str) -> int:
    """Endpoints of a project that are on."""
    query = select(func.count()).select_from(EndpointRow).where(
        endpoint_names.in_project(EndpointRow.name, project), EndpointRow.desired == "on")
    return session.execute(query).scalar_one()


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


def _held(session: Session, project: str, limit: str) -> int | None:
    row = session.get(ProjectRow, project)
    if row is None or getattr(row, limit) is None:
        return None
    session.refresh(row, with_for_update=True)
    most: int | None = getattr(row, limit)
    return most
