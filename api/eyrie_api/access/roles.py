"""PURE: may this principal do this in that project?

A principal is whoever a request comes from, however it was proved (an API key, an OIDC token, the one token of a small
set-up). It holds a role in each of some projects, or in all of them (`*`). What it may do is what the role allows and,
if it is a key that was narrowed, what its scopes allow as well: a key can never do more than its owner.

    viewer     reads
    operator   also submits, cancels and deletes jobs, promotes and rolls back
    admin      also keys, members, webhooks and audit of the project; in all projects also projects and quotas

Whoever has no role in a project is told that the thing is not there, not that it is forbidden: ids must not tell what
other projects do.
"""

from collections.abc import Mapping
from typing import get_args

from eyrie_api.errors import EyrieError, Forbidden, NotFound
from eyrie_api.v1alpha1.access import Action, Role
from eyrie_api.v1alpha1.model import Frozen

ACTIONS: tuple[Action, ...] = get_args(Action)
ROLES: tuple[Role, ...] = get_args(Role)
ALL_PROJECTS = "*"

_READS: frozenset[Action] = frozenset({"jobs:read", "endpoints:read"})
_WORK: frozenset[Action] = frozenset({"jobs:write", "endpoints:write"})
ALLOWED: Mapping[Role, frozenset[Action]] = {
    "viewer": _READS,
    "operator": _READS | _WORK,
    "admin": frozenset(ACTIONS),
}


class Principal(Frozen):
    """Whoever a request comes from."""

    subject: str
    """As the audit names it: `key:<id>`, `user:<issuer>#<sub>`, `token`."""

    roles: Mapping[str, Role]
    """Project -> role; `*` is every project."""

    scopes: frozenset[Action] | None = None
    """What a narrowed key may do at most; None: whatever its roles allow."""

    def allows(self, action: Action, project: str) -> bool:
        """Whether it may."""
        if self.scopes is not None and action not in self.scopes:
            return False
        held = (self.roles.get(project), self.roles.get(ALL_PROJECTS))
        return any(role is not None and action in ALLOWED[role] for role in held)

    def readable(self, action: Action = "jobs:read") -> frozenset[str] | None:
        """The projects in which it may; None for all of them. Every list is filtered by this."""
        if self.allows(action, ALL_PROJECTS):
            return None
        return frozenset(project for project in self.roles if self.allows(action, project))


def refusal(principal: Principal, action: Action, project: str, what: str) -> EyrieError | None:
    """Why it may not, as an error to raise; None when it may.

    what   the thing asked for, as its user named it: `job 'job-1'`
    """
    if principal.allows(action, project):
        return None
    if not {project, ALL_PROJECTS} & principal.roles.keys():
        return NotFound(f"no {what}", "list what there is; it may belong to a project you are not in")
    return Forbidden(f"{principal.subject} may not {action} in project {project!r}",
                     "ask an admin of the project for the role or a key with the scope")
