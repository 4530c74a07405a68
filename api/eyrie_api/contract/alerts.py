"""What needs a person: the answer to `GET /v1alpha1/alerts`, and the first part of the console's home."""

from datetime import datetime
from typing import Literal

from eyrie_api.contract.model import Frozen

AlertKind = Literal[
    "disk-full", "endpoint-not-serving", "revision-given-up", "drift", "job-failed", "waiting-for-nodes",
    "waiting-for-containers", "awaits-approval", "not-promoted", "queued", "quota-used-up", "waiting-for-quota"]


class AlertItem(Frozen):
    """One thing that a person should look at. It concerns what `job_id`, `endpoint`, `project` or `drafter_job` names;
    without any, the server, or several jobs or objects together."""

    kind: AlertKind
    job_id: str | None = None
    endpoint: str | None = None
    project: str | None = None
    """Whose quota is used up, or in which a DrafterJob waits."""

    drafter_job: str | None = None
    """NAMESPACE/NAME of a DrafterJob that has no job yet."""

    title: str
    message: str
    """What was seen."""

    hint: str
    """What to do; empty where the message says all that is known."""

    since: datetime | None = None
    """null where that is not recorded, as of a quota."""

    link: str
    """Path at this server of the page that shows it, or of the route where there is no page."""
