"""The values that the plan of an endpoint reads and returns: what was observed, the limits, the actions.

The runtimes execute the actions: `cluster` as changes of Kubernetes objects, `embedded` as processes and files.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from eyrie_api.v1alpha1.promotion import CanarySpec, DriftSpec
from eyrie_api.v1alpha1.records import Wait
from eyrie_operator.endpoints.engine_metrics import Counts


@dataclass(frozen=True)
class ObservedEngine:
    """One engine process of an endpoint."""

    revision: int
    state: Literal["starting", "healthy", "dead"]
    """starting: running, but its probe has not passed yet."""

    started_at: datetime
    starts: int = 1
    """Consecutive starts without a lasting engine, this one included; 0 once it has been healthy for a while."""

    retiring_since: datetime | None = None
    message: str = ""
    """The end of a dead engine's log, or why the engine does not start."""

    wait: Wait | None = None
    """Why a pod of it has no node, on a cluster, if that is what it waits for."""

    unready_since: datetime | None = None
    """Since when one of its pods is not ready, on a cluster; None where that is not known."""

    window_rounds: float = 0.0
    """Verify rounds since the window began, and the tokens they produced."""

    window_tokens: float = 0.0
    window_accepted: tuple[float, ...] = ()
    """Draft tokens that they accepted at each position; empty where the engine does not say."""

    window_requests: float | None = None
    """Requests that it answered or failed since the window began; None where that is not known."""

    window_since: datetime | None = None
    window_unended: bool = False
    """The window may have answers that were generated past their end, which the engine does not count separately."""

    alone: bool = False
    """It was started after the serving engine had been stopped, because both do not fit the memory."""

    counted: Counts = field(default_factory=dict, compare=False)
    """The counters of each of its processes that responded: what a window that follows this one begins from. Read again
    later they would leave out the rounds between, and a process that does not respond then would be judged twice."""


@dataclass(frozen=True)
class ObservedCanary:
    """A revision with a share of the requests, and their outcomes since it has this share."""

    revision: int
    share: float
    since: datetime
    answered: int = 0
    errors: int = 0


@dataclass(frozen=True)
class ObservedEndpoint:
    """The observation of an endpoint that `plan_endpoint` decides from."""

    gateway_alive: bool = False
    routed: int | None = None
    """The revision that the route leads to."""

    engines: tuple[ObservedEngine, ...] = ()
    canary: ObservedCanary | None = None
    windows: tuple[float, ...] = ()
    """tau of the active revision's windows since its activation, or since the last drift report; oldest first."""

    no_room: str = ""
    """Why an engine for the candidate does not fit next to the serving one; empty: it does."""

    drift_reported: bool = False
    """Drift of the active revision has been reported since its activation."""

    def engine(self, revision: int | None) -> ObservedEngine | None:
        """The engine of a revision, dead or alive."""
        return next((engine for engine in self.engines if engine.revision == revision), None)


@dataclass(frozen=True)
class ServePolicy:
    """The limits that apply to a promotion (`EndpointServeSpec`, and the job's `PromotionPolicy`)."""

    health_timeout_s: float = 60.0
    min_acceptance_ratio: float = 0.5
    drain_s: float = 600.0
    canary: CanarySpec = field(default_factory=CanarySpec)
    drift: DriftSpec = field(default_factory=DriftSpec)
    counts_drafted: bool = False
    """The engine counts drafted rounds separately. Ours does, SGLang does not."""


@dataclass(frozen=True)
class StartGateway:
    """Listen on the stable port."""


@dataclass(frozen=True)
class StopGateway:
    """Close the stable port."""


@dataclass(frozen=True)
class StartEngine:
    """Start a revision's engine, on any free port."""

    revision: int
    starts: int
    alone: bool = False
    """The serving engine was stopped for it."""


@dataclass(frozen=True)
class AnnounceGap:
    """Record that requests wait until the candidate is ready, and hold them: both engines do not fit."""

    revision: int
    message: str


@dataclass(frozen=True)
class Route:
    """Route all requests of the stable URL to this revision's engine."""

    revision: int


@dataclass(frozen=True)
class CanaryStep:
    """What was counted of a canary until one of its steps ended."""

    answered: int
    """Requests since it had this share, and those that failed."""

    errors: int
    tau: float | None = None
    """Over all its rounds so far; None before enough of them."""

    rounds: float | None = None
    tau_low: float | None = None
    """The interval of tau by which the watch judges (`plan.highest_tau`)."""

    tau_high: float | None = None


@dataclass(frozen=True)
class ShareRoute:
    """Route a share of the requests to the candidate's engine, and the rest to the serving one."""

    revision: int
    serving: int
    share: float
    ended: CanaryStep | None = None
    """The step before."""


@dataclass(frozen=True)
class RetireEngine:
    """Make an engine finish its requests and exit."""

    revision: int


@dataclass(frozen=True)
class KillEngine:
    """Kill an engine that did not exit in time."""

    revision: int


@dataclass(frozen=True)
class DeleteEngine:
    """Delete the record of a dead engine that is not needed."""

    revision: int


@dataclass(frozen=True)
class CloseWindow:
    """The window is full: record its figures and begin a new one."""

    revision: int
    tau: float | None
    rounds: float
    proven: float | None
    """None for a revision without a proven tau, such as the target without a drafter: requests alone are recorded."""

    rollback_below: float | None = None
    """The acceptance lengths at which the watch rolls back, and at which it counts towards drift."""

    drift_below: float | None = None
    accepted: tuple[float, ...] = ()
    """As `ObservedEngine.window_accepted`."""

    requests: float | None = None
    """As `ObservedEngine.window_requests`."""

    seconds: float | None = None
    """How long the window lasted."""


@dataclass(frozen=True)
class Activate:
    """Record that the candidate serves, and the last step of its canary."""

    revision: int
    ended: CanaryStep | None = None


@dataclass(frozen=True)
class Reject:
    """Record that the candidate was rejected; the active revision continues to serve."""

    revision: int
    reason: str
    message: str
    ended: CanaryStep | None = None
    """The step of its canary in which it was."""


@dataclass(frozen=True)
class RollBack:
    """Record that the active revision was rolled back: the one before it becomes the candidate."""

    revision: int
    reason: str
    message: str


@dataclass(frozen=True)
class ReportDrift:
    """Record that live acceptance stayed low, and offer or start a job that retrains the drafter."""

    revision: int
    taus: tuple[float, ...]
    proven: float
    message: str


@dataclass(frozen=True)
class ProposeNoDrafter:
    """Propose the target without a drafter: the only revision ever proposed did not become healthy."""


EndpointAction = (StartGateway | StopGateway | StartEngine | AnnounceGap | Route | ShareRoute | RetireEngine
                  | KillEngine | DeleteEngine | CloseWindow | Activate | Reject | RollBack | ReportDrift
                  | ProposeNoDrafter)


@dataclass(frozen=True)
class EndpointPlan:
    """Actions in order, and the condition Serving."""

    actions: tuple[EndpointAction, ...]
    serving: Literal["True", "False", "Unknown"]
    reason: str
    message: str
