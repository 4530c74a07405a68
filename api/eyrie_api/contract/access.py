"""Access, as the REST API shows it: keys, projects, members, the audit, webhooks."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from eyrie_api.contract.model import Frozen, Name
from eyrie_api.contract.placement import ObjectName

Role = Literal["viewer", "operator", "admin"]
Action = Literal[
    "jobs:read", "jobs:write", "endpoints:read", "endpoints:write", "audit:read", "keys:write", "members:write",
    "quotas:write", "webhooks:write",
]
WebhookEvent = Literal["job.succeeded", "job.failed", "job.cancelled", "endpoint.promoted", "endpoint.rolled_back",
                       "endpoint.drift", "ping"]
Label = Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=r"^[^\x00-\x1f\x7f]+$")]


class WhoAmI(Frozen):
    """The authenticated identity and its permissions."""

    subject: str
    """`key:<id>`, `user:<issuer>#<sub>`, `token` (EYRIE_TOKEN), or `local` (a loopback request to a server without a
    token)."""

    roles: dict[str, Role]
    """Project -> role; `*` is every project."""

    scopes: tuple[Action, ...] | None = None
    """What a narrowed key may do at most."""

    project: str | None = None
    """Where new jobs go without the header Eyrie-Project; null when it must be named."""


class ApiKey(Frozen):
    """An API key, without its secret."""

    id: str
    name: str
    project: str | None
    """null: every project."""

    role: Role
    scopes: tuple[Action, ...] | None = None
    created_by: str
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None
    """To the minute."""


class CreateKey(Frozen):
    """A key to create, in the project that the request names."""

    name: Label
    role: Role = "operator"
    scopes: tuple[Action, ...] | None = None
    """Narrows what the role allows; default: all of it."""

    expires_in_days: float | None = Field(90.0, gt=0.0, le=3650.0)
    """null: never. A key made with a key ends no later than that one; the default is shortened to it."""

    everywhere: bool = False
    """In every project, future ones included. Requires a role in all of them."""


class RotateKey(Frozen):
    """Seconds for which the old key remains valid."""

    overlap_s: float = Field(0.0, ge=0.0, le=7 * 86400.0)


class CreatedKey(Frozen):
    """A new key with its secret, which no later response contains."""

    key: ApiKey
    secret: str = Field(repr=False)
    """Send it as `Authorization: Bearer <secret>`. It is shown only here and is not stored."""


class Quotas(Frozen):
    """What a project may use; null is without limit."""

    max_jobs: int | None = Field(None, strict=True, ge=0, le=1_000_000)
    """Jobs that have not ended, at any one time."""

    max_endpoints: int | None = Field(None, strict=True, ge=0, le=1_000_000)
    """Endpoints that are on."""

    max_gpus: int | None = Field(None, strict=True, ge=0, le=1_000_000)
    """GPUs that jobs which have not ended request at one time: of each job, those of the stage with the most, for all
    pods that it may run side by side. GPUs of endpoints are not counted."""

    max_replicas: int | None = Field(None, strict=True, ge=0, le=1_000_000)
    """Replicas of the endpoints that are on, together; of one that is autoscaled, the most that it may have."""

    priority_classes: tuple[ObjectName, ...] | None = Field(None, max_length=64)
    """Kubernetes PriorityClasses that jobs and endpoints may name. Those of the administrator's placements need not be
    among them."""

    requests_per_minute: int | None = Field(None, strict=True, ge=1, le=10_000_000)
    """Of the whole project; every key has the server's limit besides (EYRIE_RATE_LIMIT_PER_MINUTE)."""


class Project(Frozen):
    """A project."""

    name: str
    description: str
    quotas: Quotas
    live_jobs: int
    live_endpoints: int
    live_gpus: int
    """What `quotas.max_gpus` limits."""

    live_replicas: int
    """What `quotas.max_replicas` limits."""

    created_at: datetime


class CreateProject(Frozen):
    """A project to create. Its name cannot be changed, and it is never deleted, since the audit log names it."""

    name: Name
    description: str = Field("", max_length=255)
    quotas: Quotas = Quotas()


class CreateMember(Frozen):
    """Give a subject or a group of an OIDC issuer a role in a project; given again, the role is replaced."""

    kind: Literal["subject", "group"]
    value: str = Field(min_length=1, max_length=255)
    """`sub` of the token, or a member of its groups claim."""

    role: Role
    issuer: str | None = Field(None, max_length=255)
    """Default: the issuer this server trusts (EYRIE_OIDC_ISSUER)."""


class Member(Frozen):
    """A role given to a subject or a group."""

    id: int
    project: str
    issuer: str
    kind: Literal["subject", "group"]
    value: str
    role: Role
    created_at: datetime


class AuditEntry(Frozen):
    """One change that was made or refused."""

    id: int
    time: datetime
    actor: str
    verb: str
    object: str
    project: str | None
    """null: the installation."""

    outcome: str
    """`done`, or `refused: <HTTP status>`."""

    request_id: str
    """X-Request-Id of the response."""


class AuditPage(Frozen):
    """Entries, newest first."""

    items: tuple[AuditEntry, ...]
    next_before: int | None = None
    """`before` of the request for older entries; null when there are none."""


class CreateWebhook(Frozen):
    """Where to post a project's events."""

    url: str = Field(min_length=8, max_length=2048)
    """http or https, to an address that is public (see EYRIE_WEBHOOKS_ALLOW_PRIVATE)."""

    events: tuple[WebhookEvent, ...] = ("job.succeeded", "job.failed", "job.cancelled", "endpoint.promoted",
                                        "endpoint.rolled_back", "endpoint.drift")


class Webhook(Frozen):
    """Where a project's events are posted."""

    id: str
    project: str
    url: str
    events: tuple[WebhookEvent, ...]
    failures: int
    """Deliveries given up in a row."""

    disabled_reason: str | None = None
    created_by: str
    created_at: datetime


class CreatedWebhook(Frozen):
    """A webhook with the secret its deliveries are signed with, shown this once."""

    webhook: Webhook
    secret: str = Field(repr=False)


class Delivery(Frozen):
    """One event on its way to one webhook."""

    id: str
    event: WebhookEvent
    state: Literal["pending", "delivered", "failed"]
    attempts: int
    next_at: datetime | None = None
    status: int | None = None
    """What the receiver answered last."""

    error: str | None = None
    created_at: datetime
    ended_at: datetime | None = None
