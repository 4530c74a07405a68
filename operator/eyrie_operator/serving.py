"""What an endpoint needs next: which engines run, which one the stable URL leads to, when to go back. Pure.

An endpoint is a gateway on a port that never changes, and engines behind it, one per revision. A promotion makes a
revision the candidate: its engine is started beside the serving one (blue/green), probed, and only then does the route
move; the old engine answers what it has begun and ends. A candidate that dies or is not healthy in time costs nothing:
the route never left the old engine.

A drafter can also fail after it went live, when traffic leaves the world it was trained on: it is still lossless, but
slow. When the acceptance length of enough recent rounds falls below a share of the benchmarked one, the endpoint goes
back to the revision before it; the first revision is always the target without a drafter.

Like `reconcile`, this is asked again and again and remembers nothing.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from eyrie_api.v1alpha1.status import Endpoint, Revision

MIN_ROUNDS = 200
"""Verify rounds before a window's tau is believed: at tau 3 its standard error is then about 0.15."""

DRAIN_S = 30.0
"""What a retired engine gets to finish answers under way before it is killed."""

_BACKOFF_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Pause before the n-th restart of an engine that died; then every 30 s, for a person may be mending its cause."""


@dataclass(frozen=True)
class EngineSeen:
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


@dataclass(frozen=True)
class EndpointSeen:
    """Everything seen of an endpoint's processes at one moment."""

    gateway_alive: bool = False
    routed: int | None = None
    """The revision the route leads to."""

    engines: tuple[EngineSeen, ...] = ()

    def engine(self, revision: int | None) -> EngineSeen | None:
        """The engine of a revision, dead or alive."""
        return next((one for one in self.engines if one.revision == revision), None)


@dataclass(frozen=True)
class ServePolicy:
    """The limits a promotion was made under (`ServeSpec`)."""

    health_timeout_s: float = 60.0
    min_acceptance_ratio: float = 0.5


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
    """Lead the stable URL to this revision's engine."""

    revision: int


@dataclass(frozen=True)
class RetireEngine:
    """Ask an engine to finish and end."""

    revision: int


@dataclass(frozen=True)
class KillEngine:
    """End an engine that did not go by itself."""

    revision: int


@dataclass(frozen=True)
class ForgetEngine:
    """Remove what a dead, unwanted engine left."""

    revision: int


@dataclass(frozen=True)
class RestartWindow:
    """The acceptance window is full and fine: begin a new one."""

    revision: int


@dataclass(frozen=True)
class Activate:
    """Record that the candidate serves."""

    revision: int


@dataclass(frozen=True)
class Reject:
    """Record that the candidate was given up; the active revision goes on."""

    revision: int
    reason: str
    message: str


@dataclass(frozen=True)
class GoBack:
    """Record that the active revision was given up: the one before it becomes the candidate."""

    revision: int
    reason: str
    message: str


@dataclass(frozen=True)
class ServeBare:
    """Propose the target without a drafter: the only drafter ever promoted here did not come up."""


EndpointAction = (StartGateway | StopGateway | StartEngine | Route | RetireEngine | KillEngine | ForgetEngine
                  | RestartWindow | Activate | Reject | GoBack | ServeBare)


@dataclass(frozen=True)
class EndpointPlan:
    """What to do, in order, and whether the endpoint serves."""

    actions: tuple[EndpointAction, ...]
    serving: Literal["True", "False", "Unknown"]
    reason: str
    message: str


def window_tau(engine: EngineSeen) -> float | None:
    """Acceptance length over the window: tokens per verify round; None before enough rounds."""
    return engine.window_tokens / engine.window_rounds if engine.window_rounds >= MIN_ROUNDS else None


def plan_endpoint(endpoint: Endpoint, policy: ServePolicy, seen: EndpointSeen, now: datetime) -> EndpointPlan:
    """Decide what an endpoint needs next. Pure."""
    if endpoint.desired == "off":
        return _off(seen, now)
    actions: list[EndpointAction] = [] if seen.gateway_alive else [StartGateway()]
    active, candidate = endpoint.active_revision, endpoint.candidate_revision
    if candidate is not None and candidate != active:
        rolled_back = _deploy(endpoint, policy, seen, now, actions)
        if rolled_back:
            candidate = None
    if not any(isinstance(one, Activate) for one in actions):  # else the route has just moved on from `active`
        actions += _keep_alive(active, seen, now)
    if active is not None and candidate is None:
        actions += _watch_acceptance(endpoint, active, policy, seen)
    if active is None and endpoint.candidate_revision is None and endpoint.revisions[-1].drafter_dir is not None:
        actions.append(ServeBare())
    routed = next((one.revision for one in actions if isinstance(one, Route)), seen.routed)
    actions += _clear_away({active, candidate, routed}, seen, now)
    return EndpointPlan(tuple(actions), *_serving(endpoint, seen))


def _off(seen: EndpointSeen, now: datetime) -> EndpointPlan:
    stop: tuple[EndpointAction, ...] = (StopGateway(),) if seen.gateway_alive else ()
    return EndpointPlan((*stop, *_clear_away(set(), seen, now)), "False", "Off", "switched off on request")


def _deploy(endpoint: Endpoint, policy: ServePolicy, seen: EndpointSeen, now: datetime,
            actions: list[EndpointAction]) -> bool:
    """Bring the candidate up beside the serving engine; True when it was given up."""
    candidate = endpoint.candidate_revision
    assert candidate is not None
    engine = seen.engine(candidate)
    if engine is None:
        actions.append(StartEngine(candidate, 1))
    elif engine.state == "healthy":
        actions += [Route(candidate), Activate(candidate)]
    elif engine.state == "dead":
        actions.append(Reject(candidate, "EngineDied", f"the new engine ended: {engine.message}"))
        return True
    elif now - engine.started_at > timedelta(seconds=policy.health_timeout_s):
        message = f"the new engine was not healthy after {policy.health_timeout_s:g} s (serve.health_timeout_s)"
        actions.append(Reject(candidate, "HealthTimeout", message))
        return True
    return False


def _keep_alive(active: int | None, seen: EndpointSeen, now: datetime) -> list[EndpointAction]:
    """The serving engine is started, restarted with growing pauses, and routed to."""
    if active is None:
        return []
    engine = seen.engine(active)
    if engine is None:
        return [StartEngine(active, 1)]
    if engine.state == "dead":
        pause = _BACKOFF_S[min(engine.starts, len(_BACKOFF_S) - 1)]
        due = now - engine.started_at >= timedelta(seconds=pause)
        return [StartEngine(active, engine.starts + 1)] if due else []
    return [Route(active)] if engine.state == "healthy" and seen.routed != active else []


def _watch_acceptance(endpoint: Endpoint, active: int, policy: ServePolicy, seen: EndpointSeen) -> list[EndpointAction]:
    revision, engine = _revision(endpoint, active), seen.engine(active)
    if revision is None or engine is None or engine.state != "healthy":
        return []
    tau = window_tau(engine)
    if tau is None:
        return []
    if revision.drafter_dir is not None and revision.tau is not None:
        least = policy.min_acceptance_ratio * revision.tau
        if tau < least:
            message = (f"acceptance length fell to {tau:.2f} over {engine.window_rounds:.0f} rounds, below "
                       f"{least:.2f} = {policy.min_acceptance_ratio:g} x the benchmarked {revision.tau:.2f}")
            # A new window, so that a fallback that fails is tried again only after as many rounds.
            return [RestartWindow(active), GoBack(active, "AcceptanceCollapsed", message)]
    return [RestartWindow(active)]


def _clear_away(wanted: set[int | None], seen: EndpointSeen, now: datetime) -> list[EndpointAction]:
    """Engines nobody needs: asked to go, then made to, then forgotten."""
    actions: list[EndpointAction] = []
    for engine in seen.engines:
        if engine.revision in wanted:
            continue
        if engine.state == "dead":
            actions.append(ForgetEngine(engine.revision))
        elif engine.retiring_since is None:
            actions.append(RetireEngine(engine.revision))
        elif now - engine.retiring_since > timedelta(seconds=DRAIN_S):
            actions.append(KillEngine(engine.revision))
    return actions


def _serving(endpoint: Endpoint, seen: EndpointSeen) -> tuple[Literal["True", "False", "Unknown"], str, str]:
    routed = seen.engine(seen.routed)
    if seen.gateway_alive and routed is not None and routed.state == "healthy":
        revision = _revision(endpoint, routed.revision)
        what = revision.checkpoint if revision is not None and revision.checkpoint else "no drafter"
        return "True", "Healthy", f"revision {routed.revision} serves with {what}"
    if endpoint.candidate_revision is not None:
        return "Unknown", "Deploying", f"revision {endpoint.candidate_revision} is coming up"
    if endpoint.active_revision is None:
        return "False", "NothingToServe", "no revision has been promoted"
    engine = seen.engine(endpoint.active_revision)
    if engine is not None and engine.state == "dead":
        return "False", "EngineDied", f"the engine ended and is being restarted: {engine.message}"
    return "Unknown", "Starting", f"revision {endpoint.active_revision} is coming up"


def _revision(endpoint: Endpoint, number: int) -> Revision | None:
    return next((one for one in endpoint.revisions if one.number == number), None)
