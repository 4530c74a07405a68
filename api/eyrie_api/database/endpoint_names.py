"""Whose an endpoint's name is.

An endpoint is a URL and, on a cluster, a Kubernetes object: its name exists once in an installation, not once in a
project. The first job or promotion that speaks of a name takes it for its project, at submission, so that nobody trains
for hours towards a name that is somebody else's. A name stays with its project; names that no row speaks of belong to
`default`, as everything did before there were projects.
"""

from typing import Any

from sqlalchemy import ColumnElement, and_, literal, or_, select, true
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from eyrie_api.access.scope import DEFAULT_PROJECT, Scope
from eyrie_api.clock import Clock
from eyrie_api.database.tables import EndpointNameRow, EndpointRow
from eyrie_api.errors import Conflict
from eyrie_api.v1alpha1.access import Action
from eyrie_api.v1alpha1.job import JobSpec


def owner(session: Session, name: str) -> str | None:
    """The project a name belongs to; None when nobody has taken it."""
    row = session.get(EndpointNameRow, name)
    if row is not None:
        return row.project
    return None if session.get(EndpointRow, name) is None else DEFAULT_PROJECT


def claim(session: Session, name: str, project: str, clock: Clock) -> None:
    """Take the name for the project, or find it taken for it. Raises Conflict when another project has it."""
    held = owner(session, name)
    if held is None:
        try:
            with session.begin_nested():
                session.add(EndpointNameRow(name=name, project=project, claimed_at=clock()))
            return
        except IntegrityError:  # another request took it at the same moment
            held = owner(session, name)
    if held != project:
        raise Conflict(f"the endpoint name {name!r} is taken by another project",
                       "give serve.endpoint another name: names are unique in an installation")


def seen(name: Any, scope: Scope, action: Action) -> ColumnElement[bool]:
    """The condition on a column of endpoint names under which a row is there."""
    if scope.is_system:
        return true()
    taken = select(EndpointNameRow.name)
    mine = name.in_(taken.where(scope.sees(EndpointNameRow.project, action)))
    return or_(mine, and_(scope.sees(literal(DEFAULT_PROJECT), action), name.not_in(taken)))


def belongs(name: Any, project: str) -> ColumnElement[bool]:
    """The condition on a column of endpoint names under which a row is the project's."""
    taken = select(EndpointNameRow.name)
    mine: ColumnElement[bool] = name.in_(taken.where(EndpointNameRow.project == project))
    return mine if project != DEFAULT_PROJECT else or_(mine, name.not_in(taken))


def suited(spec: JobSpec, project: str) -> JobSpec:
    """The job as it is meant in a project: one that leaves its endpoint at `default` serves under the project's name,
    for `default` is one name for all."""
    if project == DEFAULT_PROJECT or spec.serve.endpoint != DEFAULT_PROJECT:
        return spec
    return spec.model_copy(update={"serve": spec.serve.model_copy(update={"endpoint": project})})
