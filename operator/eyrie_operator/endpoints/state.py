"""The values that the plan of an endpoint reads and returns: what was observed, the limits, the actions.

The runtimes execute the actions: `cluster` as changes of Kubernetes objects, `embedded` as processes and files.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from eyrie_api.v1alpha1.promotion import CanarySpec, DriftSpec


@dataclass(frozen=True)
class ObservedEngine:
    """One engine process of an endpoint."""

    revision: int
    state: Literal["starting", "healthy", "dead"]
    """starting: alive, but its probe has not passed yet."""

    started_at: datetime
    starts: int = 1
    """Starts in a row that gave no lasting engine, this one included; 0 once it has been healthy for a while."""

    retiring_since: datetime | None = None
    message: str = ""
    """A dead engine's last words."""

    window_rounds: float = 0.0
    """Verify rounds since the window began, and the tokens they gave."""

    window_tokens: float = 0.0
    window_since: datetime | None = None


@dataclass(frozen=True)
class ObservedCanary:
    """A revision that gets a share of the requests, and what came of them since it has this share."""

    revision: int
    share: float
    since: datetime
    answered: int = 0
    errors: int = 0


@dataclass(frozen=True)
class ObservedEndpoint:
    """Everything seen of an endpoint's processes at one moment."""

    gateway_alive: bool = False
    routed: int | None = None
    """The revision the route leads to."""

    engines: tuple[ObservedEngine, ...] = ()
    canary: ObservedCanary | None = None
    windows: tuple[float, ...] = ()
    """tau of the active revision's windows since it was activated, or since drift was last told; oldest first."""

    drift_reported: bool = False
    """Drift has been told of the active revision since it was activated."""

    def engine(self, revision: int | None) -> ObservedEngine | None:
        """The engine of a revision, dead or alive."""
        return next((one for one in self.engines if one.revision == revision), None)


@dataclass(frozen=True)
class ServePolicy:
    """The limits a promotion was made under (`ServeSpec`, and the job's `PromotionPolicy`)."""

    health_timeout_s: float = 60.0
    min_acceptance_ratio: float = 0.5
    canary: CanarySpec = field(default_factory=CanarySpec)
    drift: DriftSpec = field(default_factory=DriftSpec)
    counts_drafted: bool = False
    """The engine counts rounds that drafted apart from plain ones. Ours does, SGLang does not."""


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


@dataclass(frozen=True)
class Route:
    """Lead the stable URL to this revision's engine, all of it."""

    revision: int


@dataclass(frozen=True)
class ShareRoute:
    """Give the candidate's engine a share of the requests; the serving one keeps the rest."""

    revision: int
    serving: int
    share: float


@dataclass(frozen=True)
class RetireEngine:
    """Ask an engine to finish and end."""

    revision: int


@dataclass(frozen=True)
class KillEngine:
    """End an engine that did not go by itself."""

    revision: int


@dataclass(frozen=True)
class DeleteEngine:
    """Remove what a dead, unwanted engine left."""

    revision: int


@dataclass(frozen=True)
class CloseWindow:
    """The acceptance window is full: keep what it showed and begin a new one."""

    revision: int
    tau: float
    rounds: float
    proven: float | None
    """None for a revision whose tau nobody proved, such as the bare target: nothing is kept of it."""


@dataclass(frozen=True)
class Activate:
    """Record that the candidate serves, and what its trial showed."""

    revision: int
    answered: int | None = None
    tau: float | None = None


@dataclass(frozen=True)
class Reject:
    """Record that the candidate was given up; the active revision goes on."""

    revision: int
    reason: str
    message: str


@dataclass(frozen=True)
class RollBack:
    """Record that the active revision was given up: the one before it becomes the candidate."""

    revision: int
    reason: str
    message: str


@dataclass(frozen=True)
class ReportDrift:
    """Record that live acceptance stayed low, and offer or start a job that hints it."""

    revision: int
    taus: tuple[float, ...]
    proven: float
    message: str


@dataclass(frozen=True)
class ProposeNoDrafter:
    """Propose the target without a drafter: the only drafter ever promoted here did not come up."""


EndpointAction = (StartGateway | StopGateway | StartEngine | Route | ShareRoute | RetireEngine | KillEngine
                  | DeleteEngine | CloseWindow | Activate | Reject | RollBack | ReportDrift | ProposeNoDrafter)


@dataclass(frozen=True)
class EndpointPlan:
    """What to do, in order, and whether the endpoint serves."""

    actions: tuple[EndpointAction, ...]
    serving: Literal["True", "False", "Unknown"]
    reason: str
    message: str
