"""What the traffic of an endpoint shows now: the latest entries of its history, as far as they are still true."""

from datetime import datetime

from eyrie_api.v1alpha1.model import Frozen


class LiveWindow(Frozen):
    """The latest closed window of the revision that serves."""

    tau: float | None = None
    """Mean tokens per target pass, the bonus token included; null of a revision without a proven acceptance length,
    such as the target without a drafter: of those requests alone are counted."""

    proven_tau: float | None = None
    requests_per_s: float | None = None
    """Requests that ended; null of windows that an earlier version recorded."""

    since: datetime | None = None
    """When it began; null as `requests_per_s`."""

    until: datetime
    """When it was closed. One is closed only once it has enough rounds, or without `tau` a request, so on an idle
    endpoint this may be long ago."""


class LiveCanary(Frozen):
    """A revision that gets a share of the requests."""

    revision: int
    share: float
    since: datetime
    """Since when it has this share."""


class LiveDrift(Frozen):
    """Drift of the revision that serves: reported, not recovered from, and no retraining was started."""

    since: datetime
    message: str
    has_job: bool
    """The entry of the history offers a job that retrains the drafter (`data.job`)."""


class EndpointTraffic(Frozen):
    """The traffic of one endpoint."""

    endpoint: str
    revision: int | None
    """What serves."""

    window: LiveWindow | None = None
    """null before the first one since that revision was activated, and while the endpoint is off."""

    canary: LiveCanary | None = None
    drift: LiveDrift | None = None


class TrafficList(Frozen):
    """The traffic of all endpoints, by name."""

    items: tuple[EndpointTraffic, ...]
