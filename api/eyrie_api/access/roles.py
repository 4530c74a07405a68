"""Role-based access control: whether a principal may perform an action in a project. Pure.

A principal is the authenticated caller of a request (by an API key, an OIDC token or the installation's token). It has
a role in some projects, or in all of them (`*`). An action is allowed if the role allows it and, for a key with scopes,
the scopes contain it.

    viewer     reads
    operator   also submits, cancels and deletes jobs, pushes and deletes reports, promotes and rolls back
    admin      also keys, members, webhooks and audit of the project; in all projects also projects and quotas

A principal without a role in a project gets NotFound instead of Forbidden, so that it cannot find out which ids exist
in other projects.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import get_args

from eyrie_api.contract.access import Action, Role
from eyrie_api.contract.model import Frozen

ACTIONS: tuple[Action, ...] = get_args(Action)
ROLES: tuple[Role, ...] = get_args(Role)
ALL_PROJECTS = "*"

READS: frozenset[Action] = frozenset({"jobs:read", "endpoints:read"})
WORKS: frozenset[Action] = READS | frozenset[Action]({"jobs:write", "endpoints:write"})
ALLOWED: Mapping[Role, frozenset[Action]] = {
    "viewer": READS,
    "operator": WORKS,
    "admin": frozenset(ACTIONS),
}


class Principal(Frozen):
    """The authenticated caller of a request."""

    subject: str
    """Its name in the audit log: `key:<id>`, `user:<issuer>#<sub>`, `token`."""

    roles: Mapping[str, Role]
    """Project -> role; `*` is every project."""

    scopes: frozenset[Action] | None = None
    """Actions to which a key is restricted; None: no restriction beyond its roles."""

    expires_at: datetime | None = None
    """When its key ends, if it has one that ends."""

    def allows(self, action: Action, project: str) -> bool:
        if self.scopes is not None and action not in self.scopes:
            return False
        held = (self.roles.get(project), self.roles.get(ALL_PROJECTS))
        return any(role is not None and action in ALLOWED[role] for role in held)

    def readable(self, action: Action = "jobs:read") -> frozenset[str] | None:
        """The projects in which the action is allowed; None for all of them. Queries of lists filter by this."""
        if self.allows(action, ALL_PROJECTS):
            return None
        return frozenset(project for project in self.roles if self.allows(action, project))
