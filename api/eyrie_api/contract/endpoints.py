"""The history of an endpoint: every promotion decision, every change of what serves, every window watched; and what its
traffic shows now, the latest entries as far as they are still true.

Entries remain when the job that they name is deleted; only windows, which are recorded as long as there is traffic, are
reduced to the latest few hundred.
"""

from datetime import datetime
from typing import Literal

from pydantic import Field, JsonValue

from eyrie_api.contract.model import Frozen

HistoryKind = Literal["created", "decided", "proposed", "canary", "activated", "rejected", "rolled-back", "window",
                      "drift", "retraining", "gap", "on", "off"]
Actor = Literal["policy", "person", "watch"]


class HistoryEntry(Frozen):
    """One thing that happened to an endpoint."""

    id: int
    endpoint: str
    time: datetime
    kind: HistoryKind
    """created: the name was taken. decided: a job's candidate was judged. proposed: a revision became the candidate.
    canary: it was given a share of the requests. activated: it serves all. rejected: it was given up before that.
    rolled-back: what served was given up for an earlier one. window: live acceptance length over one window,
    or of a revision without a proven one the requests alone.
    drift: it stayed low; `data.job` is the job that would retrain the drafter. retraining: that job was started.
    gap: the serving engine is stopped before its successor starts, since both do not fit."""

    revision: int | None = None
    job_id: str | None = None
    reason: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9]*$")
    message: str = ""
    actor: Actor = "policy"
    """policy: the promotion policy or the job's serving section. person: a request. watch: live metrics."""

    figures: dict[str, float] = Field(default_factory=dict)
    """Numbers the entry rests on, by name: tau, share, speedup, ... Of a window also the acceptance lengths at which
    the watch acts (`drift_below`, `rollback_below`), the `requests` that ended in its `seconds`, and, where the engine
    says, the draft tokens accepted at each position in its `rounds` (`accepted/1`, `accepted/2`, ...). Of a canary's
    step, and of the activation or the rejection that ends a canary, also what the step before counted: `answered`,
    `errors`, and over all rounds of the canary so far `tau` with the interval by which the watch judges (`tau_low`,
    `tau_high`)."""

    data: dict[str, JsonValue] = Field(default_factory=dict)
    """decided: `decision`, a PromotionDecision. drift: `job`, a JobSpec ready to be posted, and `traffic_file`."""

    @property
    def accepted_tokens(self) -> tuple[float, ...]:
        """Of a window: draft tokens accepted at each position; empty where the engine does not say."""
        counts: list[float] = []
        while (count := self.figures.get(f"accepted/{len(counts) + 1}")) is not None:
            counts.append(count)
        return tuple(counts)


class History(Frozen):
    """Entries of one endpoint, oldest first."""

    items: tuple[HistoryEntry, ...]
    next_before: int | None = None
    """`before` of the request for older entries; null when there are none."""


class LiveWindow(Frozen):
    """The latest closed window of the revision that serves."""

    tau: float | None = None
    """Mean tokens per target pass, the bonus token included; null of a revision without a proven acceptance length,
    such as the target without a drafter: of those requests alone are counted."""

    proven_tau: float | None = None
    requests_per_s: float | None = None
    """Requests that ended; null where they were not counted."""

    accepted_per_round: tuple[float, ...] = ()
    """Draft tokens accepted at each position, the first one first; empty where the engine does not count positions."""

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
