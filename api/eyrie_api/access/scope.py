"""The scope of a repository: the principal and project by which its queries are filtered and its changes authorized.

A repository (`Jobs`, `Endpoints`, `Histories`, `Results`, ...) is created with a scope. `SYSTEM`, the default, is the
control plane itself: drivers, chores and the operator access all rows and are not audited, since events and history
record what they do. For the scope of a request:

- rows of projects that its principal may not read are treated as missing: `sees` in every query, `check` on every row;
- `check` also authorizes a change.

A request may name one project (`Eyrie-Project`); its scope is then restricted to that project. Otherwise it reads all
projects that its principal may read, and creates new rows in `home`.
"""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, false, true

from eyrie_api.access.roles import ALL_PROJECTS, Principal
from eyrie_api.contract.access import Action
from eyrie_api.errors import Forbidden, InvalidInput, NotFound

DEFAULT_PROJECT = "default"
"""The project of everything that names no project."""


@dataclass(frozen=True)
class Scope:
    """The principal of a request and the project it is restricted to."""

    principal: Principal | None = None
    """None: the control plane itself."""

    project: str | None = None
    """The project named by the request; None: all that the principal may read."""

    request_id: str = ""

    @property
    def is_system(self) -> bool:
        return self.principal is None

    def sees(self, project: Any, action: Action) -> ColumnElement[bool]:
        """The SQL condition on a project column for rows in which the action is allowed. Rows without a project are
        seen by those who may do it in all projects, unless the request names one."""
        if self.principal is None:
            return true()
        if self.project is not None:
            return project == self.project if self.principal.allows(action, self.project) else false()
        readable = self.principal.readable(action)
        return true() if readable is None else project.in_(sorted(readable))

    def permits(self, action: Action, project: str | None) -> bool:
        """`sees`, for one project; what belongs to none requires a role in all projects, and no project named."""
        if self.principal is None:
            return True
        if self.project is not None and project != self.project:
            return False
        return self.principal.allows(action, project or ALL_PROJECTS)

    def check(self, action: Action, project: str | None, absent: NotFound) -> None:
        """Authorize an action on a row of `project`; a row without a project requires a role in all projects. Raises
        `absent`, the error for a missing row, when the caller has no role in the project or the scope is restricted to
        another one, and Forbidden when the caller's role does not allow the action."""
        if self.principal is None:
            return
        if self.project is not None and project != self.project:
            raise absent
        where = project or ALL_PROJECTS
        if self.principal.allows(action, where):
            return
        if not {where, ALL_PROJECTS} & self.principal.roles.keys():
            raise absent
        raise Forbidden(f"{self.principal.subject} may not {action} in project {where!r}",
                        "ask an admin of the project for the role or a key with the scope")

    def check_installation(self, action: Action) -> None:
        """Raises Forbidden unless the action is allowed in all projects."""
        if self.principal is not None and not self.principal.allows(action, ALL_PROJECTS):
            raise Forbidden(f"{self.principal.subject} may not {action} in all projects",
                            "ask an administrator of the installation")

    def home(self, action: Action) -> str:
        """The project in which new rows are created. Raises InvalidInput when it is ambiguous; NotFound or Forbidden
        when the action is not allowed there."""
        if self.principal is None:
            return DEFAULT_PROJECT
        project, roles = self.project, self.principal.roles
        if project is None:
            if len(roles) == 1 and ALL_PROJECTS not in roles:
                project = next(iter(roles))
            elif ALL_PROJECTS in roles or DEFAULT_PROJECT in roles:
                project = DEFAULT_PROJECT
            else:
                raise InvalidInput(f"{self.principal.subject} is in {len(roles)} projects and the request names none",
                                   "send the header Eyrie-Project with the one that is meant")
        self.check(action, project, NotFound(f"no project {project!r}", "list the projects you are in"))
        return project


SYSTEM = Scope()
