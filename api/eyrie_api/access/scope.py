"""In whose name rows are read and written: the one value by which every query is filtered.

A repository (`Jobs`, `Endpoints`, `Histories`, `Results`, ...) is made with a scope. `SYSTEM`, the default, is the
control plane itself: drivers, chores and the operator see everything and are not audited, for what they do is told in
events and history. A request's scope names its principal; then

- rows of projects it may not read are as if they were not there: `sees` in every query, `check` on every row;
- a change is allowed or refused by `require`, and written down by `note` in the transaction that makes it.

A request may name one project (`Eyrie-Project`). Its scope then holds nothing else; without, it reads all that its
principal may read, and makes new things in `home`.
"""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, false, true

from eyrie_api.access.roles import ALL_PROJECTS, Principal, refusal
from eyrie_api.clock import Clock
from eyrie_api.errors import Forbidden, InvalidInput, NotFound
from eyrie_api.v1alpha1.access import Action

DEFAULT_PROJECT = "default"
"""Where everything is that names no project."""

DONE = "done"


@dataclass(frozen=True)
class Scope:
    """Who acts, and in which project."""

    principal: Principal | None = None
    """None: the control plane itself."""

    project: str | None = None
    """The one project the request named."""

    request_id: str = ""

    @property
    def is_system(self) -> bool:
        """Whether this is the control plane itself."""
        return self.principal is None

    def sees(self, project: Any, action: Action) -> ColumnElement[bool]:
        """The condition on a project column under which a row is there."""
        if self.principal is None:
            return true()
        if self.project is not None:
            return project == self.project if self.principal.allows(action, self.project) else false()
        readable = self.principal.readable(action)
        return true() if readable is None else project.in_(sorted(readable))

    def check(self, action: Action, project: str | None, absent: NotFound) -> None:
        """Let it pass, or raise what its caller may be told: `absent`, as for a thing that never was, when it is in a
        project they are not in, and Forbidden when it is in theirs. What has no project is for those with a role in
        all of them."""
        if self.principal is None:
            return
        if self.project is not None and project != self.project:
            raise absent
        error = refusal(self.principal, action, project or ALL_PROJECTS, absent.message)
        if error is not None:
            raise absent if isinstance(error, NotFound) else error

    def check_installation(self, action: Action) -> None:
        """Raises Forbidden unless the caller may do it in all projects."""
        if self.principal is not None and not self.principal.allows(action, ALL_PROJECTS):
            raise Forbidden(f"{self.principal.subject} may not {action} in all projects",
                            "ask an administrator of the installation")

    def home(self, action: Action) -> str:
        """The project in which something new is made. Raises InvalidInput when several would do, or Forbidden."""
        if self.principal is None:
            return DEFAULT_PROJECT
        project = self.project or self._own()
        self.check(action, project, NotFound(f"no project {project!r}", "list the projects you are in"))
        return project

    def _own(self) -> str:
        assert self.principal is not None
        roles = self.principal.roles
        if len(roles) == 1 and ALL_PROJECTS not in roles:
            return next(iter(roles))
        if ALL_PROJECTS in roles or DEFAULT_PROJECT in roles:
            return DEFAULT_PROJECT
        raise InvalidInput(f"{self.principal.subject} is in {len(roles)} projects and the request names none",
                           "send the header Eyrie-Project with the one that is meant")

    def audit_rows(self, clock: Clock, verb: str, thing: str, project: str | None) -> tuple[dict[str, Any], ...]:
        """The audit row of a change, by column; none when the control plane itself acts."""
        if self.principal is None:
            return ()
        return ({"time": clock(), "actor": self.principal.subject, "verb": verb, "object": thing, "project": project,
                 "outcome": DONE, "request_id": self.request_id},)


SYSTEM = Scope()
