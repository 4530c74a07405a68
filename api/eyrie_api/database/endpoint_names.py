"""Ownership of endpoint names by projects.

An endpoint is a URL and, on a cluster, a Kubernetes object: its name is unique in an installation, not in a project.
The first job or promotion that names it claims it for its project, at submission, so that no job trains for hours
towards a name of another project. A name stays with its project.
"""

from typing import Any, cast

from sqlalchemy import ColumnElement, select, true
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from eyrie_api.access.scope import DEFAULT_PROJECT, Scope
from eyrie_api.clock import Clock
from eyrie_api.contract.access import Action
from eyrie_api.contract.job import JobSpec
from eyrie_api.database.tables import EndpointNameRow
from eyrie_api.errors import Conflict


def project_of(session: Session, name: str) -> str | None:
    """The project that owns a name; None when it is free."""
    row = session.get(EndpointNameRow, name)
    return None if row is None else row.project


def claim(session: Session, name: str, project: str, clock: Clock) -> None:
    """Claim the name for the project; no effect when the project owns it. Raises Conflict when another does."""
    held = project_of(session, name)
    if held is None:
        try:
            with session.begin_nested():
                session.add(EndpointNameRow(name=name, project=project, claimed_at=clock()))
            return
        except IntegrityError:  # race: another request claimed it between the query and the INSERT
            held = project_of(session, name)
    if held != project:
        raise Conflict(f"the endpoint name {name!r} belongs to another project",
                       "give serve.endpoint another name: names are unique in an installation")


def visible_to(name: Any, scope: Scope, action: Action) -> ColumnElement[bool]:
    """The condition on a column of endpoint names for rows that the scope may see."""
    if scope.is_system:
        return true()
    return cast("ColumnElement[bool]", name.in_(
        select(EndpointNameRow.name).where(scope.sees(EndpointNameRow.project, action))))


def with_project_endpoint(spec: JobSpec, project: str) -> JobSpec:
    """The job with its project's default endpoint: `default` means the endpoint named like the project, since the name
    `default` itself exists once in an installation."""
    if project == DEFAULT_PROJECT or spec.serve.endpoint != DEFAULT_PROJECT:
        return spec
    return spec.model_copy(update={"serve": spec.serve.model_copy(update={"endpoint": project})})
