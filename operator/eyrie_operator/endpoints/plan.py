"""The plan of an endpoint: which engines run, where its URL routes to, when to roll back. Pure.

An endpoint is a gateway with a stable URL and one engine per revision behind it. A promotion makes a revision the
candidate: its engine is started next to the serving one (blue/green) and probed; it then gets a growing share of the
requests (canary) and, when it has passed, all of them; the old engine finishes its requests and is stopped. Where both
do not fit the memory, the old engine is stopped first, and requests are held meanwhile. A candidate that dies, is not
healthy in time, fails requests or has too low an acceptance is rejected, while the old engine serves on. A revision
that has served before skips the canary: after a failure requests wait, and the engine is known to work.

A drafter can also become slow after it was promoted, when traffic differs from its training data; output stays the
same. When the acceptance length over enough recent rounds falls below a share of the proven one, the endpoint rolls
back to the revision before; the first revision is always the target without a drafter. When it falls less, but in
several windows in a row, the traffic has drifted: this is reported once, with a job that retrains the drafter. An
active revision that must be started, and whose drafter is damaged, is replaced by the target without a drafter.

Like `jobs.reconcile`, `plan_endpoint` is called repeatedly and keeps no state. First the values that it reads and
returns: what was observed, the limits, the actions. The runtimes execute the actions: `cluster` as changes of
Kubernetes objects, `embedded` as processes and files.
"""

import math
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import takewhile
from typing import Literal

from eyrie_api.contract.promotion import CanarySpec, DriftSpec
from eyrie_api.contract.records import Wait
from eyrie_api.contract.status import Endpoint, Revision
from eyrie_operator.endpoints.engine_metrics import Counts, EngineCounters
from eyrie_operator.unscheduled import is_due


@dataclass(frozen=True)
class ObservedEngine:
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

    window: EngineCounters = field(default_factory=EngineCounters)
    """What it has counted since the window began."""

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

    drafter_damage: str = ""
    """Why an engine of the active revision cannot load its drafter, with a hint; empty: it can, or its engine runs."""

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
class EndEngine:
    """Make an engine finish its requests and exit; kill one that did not exit in time; delete the record of a dead one
    that is not needed."""

    how: Literal["retire", "kill", "delete"]
    revision: int


@dataclass(frozen=True)
class CloseWindow:
    """The window is full: record its figures and begin a new one."""

    revision: int
    tau: float | None
    proven: float | None
    """None for a revision without a proven tau, such as the target without a drafter: requests and tokens alone."""

    window: EngineCounters
    rollback_below: float | None = None
    """The acceptance lengths at which the watch rolls back, and at which it counts towards drift."""

    drift_below: float | None = None
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
    without_drafter: bool = False
    """The target without a drafter becomes the candidate, not the one before: its drafter may be damaged as well."""


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


EndpointAction = (StartGateway | StopGateway | StartEngine | AnnounceGap | Route | ShareRoute | EndEngine | CloseWindow
                  | Activate | Reject | RollBack | ReportDrift | ProposeNoDrafter)


@dataclass(frozen=True)
class EndpointPlan:
    """Actions in order, and the condition Serving."""

    actions: tuple[EndpointAction, ...]
    serving: Literal["True", "False", "Unknown"]
    reason: str
    message: str


MIN_ROUNDS = 200
"""Verify rounds of a window before its tau is used: at tau 3 its standard error is then about 0.15."""

CANARY_ROUNDS = 50
"""The same for a canary, which is checked for a collapse only: at tau 3 the standard error is then 0.3, and half of the
proven tau is five standard errors away."""

CANARY_ERRORS = 2
"""Failed requests that reject a canary. A single one is no evidence against a revision: any engine loses a request to a
lack of memory or a broken connection."""

KILL_MARGIN_S = 10.0
"""After `ServePolicy.drain_s` an engine ends its last answers with an error and exits; one that still runs this long
after is killed."""

_STANDARD_ERRORS = 3.0
"""Of an acceptance length that rolls an endpoint back. Two would be few: rounds of one answer resemble each other."""

_MACHINE_RESTARTS = 2
"""Further starts of a candidate that ended with its machine: an engine that takes the machine down is rejected then."""

_MOST_ROUNDS = 20 * MIN_ROUNDS
"""A window whose acceptance length may or may not be a collapse is continued up to this many rounds."""

_BACKOFF_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Pause before the n-th restart of an engine that died; then every 30 s, since the cause may be removed meanwhile."""


def window_tau(engine: ObservedEngine, rounds: int = MIN_ROUNDS) -> float | None:
    """Acceptance length over the window: tokens per verify round; None before enough rounds, and for a window with
    answers that were generated past their end."""
    judged = engine.window.rounds >= rounds and not engine.window_unended
    return engine.window.tokens / engine.window.rounds if judged else None


def plan_endpoint(endpoint: Endpoint, policy: ServePolicy, seen: ObservedEndpoint, now: datetime) -> EndpointPlan:
    """Decide what an endpoint needs next. Pure."""
    if endpoint.desired == "off":
        stop: tuple[EndpointAction, ...] = (StopGateway(),) if seen.gateway_alive else ()
        return EndpointPlan((*stop, *_retire_unused(set(), policy, seen, now)), "False", "Off",
                            "switched off on request")
    actions: list[EndpointAction] = [] if seen.gateway_alive else [StartGateway()]
    active, candidate = endpoint.active_revision, endpoint.candidate_revision
    if candidate is not None and candidate != active:
        actions += _deploy(endpoint, candidate, policy, seen, now)
        if any(isinstance(action, Reject) for action in actions):
            candidate = None
    if not any(isinstance(action, Activate | ShareRoute) for action in actions):  # those set the route themselves
        actions += _keep_alive(active, candidate, seen, now)
    if active is not None and candidate is None and seen.drafter_damage:
        actions.append(RollBack(active, "DrafterDamaged", seen.drafter_damage, without_drafter=True))
    elif active is not None and candidate is None:
        actions += _watch_acceptance(endpoint, active, policy, seen, now)
    if active is None and endpoint.candidate_revision is None and endpoint.revisions[-1].use.setting.method != "off":
        actions.append(ProposeNoDrafter())
    routed = next((action.revision for action in actions if isinstance(action, Route)), seen.routed)
    actions += _retire_unused({active, candidate, routed}, policy, seen, now)
    return EndpointPlan(tuple(actions), *_serving(endpoint, seen, now))


def _deploy(endpoint: Endpoint, candidate: int, policy: ServePolicy, seen: ObservedEndpoint,
            now: datetime) -> list[EndpointAction]:
    """Start the candidate next to the serving engine, then run its canary; or reject it."""
    engine = seen.engine(candidate)
    if engine is not None and engine.retiring_since is not None:
        # It served before and was replaced a moment ago: it takes no new requests, so it is started again once it has
        # ended.
        if engine.state != "dead":
            return [EndEngine("kill", candidate)] if _overdue(engine, policy, now) else []
        engine = None
    if engine is None:
        # Race: killed between Route and Activate, and another candidate was proposed since: the routed engine serves.
        serving = seen.engine(endpoint.active_revision) or seen.engine(seen.routed)
        return _start_candidate(candidate, policy, seen, serving, now)
    if engine.state == "healthy":
        return _run_canary(endpoint, policy, seen, engine, now)
    if engine.state == "dead":
        # Gateway and engines have all ended: with their machine or container, not by an engine's own fault.
        machine_was_down = not seen.gateway_alive and all(each.state == "dead" for each in seen.engines)
        if machine_was_down and engine.starts <= _MACHINE_RESTARTS:
            return [StartEngine(candidate, engine.starts + 1, alone=engine.alone)]
        return [Reject(candidate, "EngineDied", f"the new engine ended: {engine.message}")]
    # It is waited for since its start, or, once it has served a share, since a pod of it was lost.
    had_a_share = seen.canary is not None and seen.canary.revision == candidate
    since = engine.unready_since or engine.started_at if had_a_share else engine.started_at
    if now - since <= timedelta(seconds=policy.health_timeout_s):
        return []
    return [Reject(candidate, "HealthTimeout", f"the new engine was not healthy after {policy.health_timeout_s:g} s "
                   f"(serve.health_timeout_s){_because(engine)}")]


def _start_candidate(candidate: int, policy: ServePolicy, seen: ObservedEndpoint, serving: ObservedEngine | None,
                     now: datetime) -> list[EndpointAction]:
    """Start the candidate next to the serving engine; where both do not fit, stop that one first."""
    others = [engine for engine in seen.engines if engine.state != "dead" and engine is not serving]
    if seen.no_room and others:  # a replaced candidate's engine, which is being retired, has the memory
        return []
    if serving is None or (serving.state == "dead" and serving.retiring_since is None):
        return [StartEngine(candidate, 1)]
    if serving.state == "dead":
        return [StartEngine(candidate, 1, alone=True)]
    if serving.retiring_since is not None:  # being stopped for the candidate
        return [EndEngine("kill", serving.revision)] if _overdue(serving, policy, now) else []
    if not seen.no_room:
        return [StartEngine(candidate, 1)]
    message = (f"revision {serving.revision} is stopped before revision {candidate} starts, and requests wait in "
               f"between: {seen.no_room}")
    return [AnnounceGap(candidate, message), EndEngine("retire", serving.revision)]


def _in_gap(active: int | None, candidate: int | None, seen: ObservedEndpoint) -> bool:
    """Whether the serving engine must stay stopped, because a candidate has, or is about to take, its memory."""
    serving = seen.engine(active)
    stopping = candidate is not None and serving is not None and serving.retiring_since is not None
    return stopping or any(engine.alone and engine.state != "dead" and engine.revision != active
                           for engine in seen.engines)


def _run_canary(endpoint: Endpoint, policy: ServePolicy, seen: ObservedEndpoint, engine: ObservedEngine,
                now: datetime) -> list[EndpointAction]:
    """Give the candidate each share of the requests in turn, then all of them; or reject it."""
    revision, shares = endpoint.revision(engine.revision), policy.canary.shares
    serving = seen.engine(endpoint.active_revision)
    canary = seen.canary if seen.canary is not None and seen.canary.revision == engine.revision else None
    if canary is not None and canary.errors >= CANARY_ERRORS:
        message = (f"{canary.errors} of its {canary.errors + canary.answered} requests failed while it had "
                   f"{canary.share:.0%} of them")
        return [Reject(engine.revision, "CanaryFailed", message, _step(revision, engine, canary))]
    proven_before = revision is not None and revision.state not in ("proposed", "canary")
    if not shares or proven_before or serving is None or serving.state != "healthy" or seen.routed == engine.revision:
        # No canary: none is configured, the revision has served before, or no healthy engine serves. Or this process
        # was killed between Route and Activate: the route leads there already, and both actions are repeated.
        return [Route(engine.revision), Activate(engine.revision)]
    if canary is None:
        return [ShareRoute(engine.revision, serving.revision, shares[0])]
    ended = _step(revision, engine, canary)
    collapse = _collapse(revision, ended.tau, engine.window.rounds, policy)
    if collapse is not None:
        return [Reject(engine.revision, "AcceptanceCollapsed", collapse, ended)]
    over = now - canary.since >= timedelta(seconds=policy.canary.max_step_s)
    if canary.answered < policy.canary.min_requests and not over:
        return []
    further = next((share for share in shares if share > canary.share), None)
    if further is not None:
        return [ShareRoute(engine.revision, serving.revision, further, ended)]
    return [Route(engine.revision), Activate(engine.revision, ended)]


def _step(revision: Revision | None, engine: ObservedEngine, canary: ObservedCanary) -> CanaryStep:
    tau, rounds = window_tau(engine, CANARY_ROUNDS), engine.window.rounds
    if revision is None or tau is None:
        return CanaryStep(canary.answered, canary.errors)
    high = highest_tau(revision, tau, rounds)
    return CanaryStep(canary.answered, canary.errors, tau, rounds, max(1.0, 2.0 * tau - high), high)


def _keep_alive(active: int | None, candidate: int | None, seen: ObservedEndpoint,
                now: datetime) -> list[EndpointAction]:
    """Start the serving engine, restart it with growing pauses, and route all requests to it when there is no
    canary."""
    if active is None or seen.drafter_damage or _in_gap(active, candidate, seen):
        return []
    engine = seen.engine(active)
    if engine is None:
        return [StartEngine(active, 1)]
    if engine.state == "dead":
        pause = _BACKOFF_S[min(engine.starts, len(_BACKOFF_S) - 1)]
        waited = now - engine.started_at
        # Started later than now: the clock was set back, and the endpoint must not wait until it has caught up.
        due = waited >= timedelta(seconds=pause) or waited < timedelta(0)
        return [StartEngine(active, engine.starts + 1)] if due else []
    stale_canary = seen.canary is not None and seen.canary.revision != candidate
    return [Route(active)] if engine.state == "healthy" and (seen.routed != active or stale_canary) else []


def _watch_acceptance(endpoint: Endpoint, active: int, policy: ServePolicy, seen: ObservedEndpoint,
                      now: datetime) -> list[EndpointAction]:
    revision, engine = endpoint.revision(active), seen.engine(active)
    if revision is None or engine is None or engine.state != "healthy":
        return []
    proven, tau = proven_tau(revision, policy.counts_drafted), window_tau(engine)
    # None when the beginning is not known, or the clock was set back.
    lasted_s = 0.0 if engine.window_since is None else (now - engine.window_since).total_seconds()
    seconds = lasted_s if lasted_s > 0.0 else None
    if proven is None or engine.window_unended:
        # Acceptance is not judged: the window is closed when it is long enough and a request has ended.
        requested = engine.window.requests or engine.window_unended
        if not requested or seconds is None or seconds < policy.drift.window_s:
            return []
        return [CloseWindow(active, None, None, engine.window, seconds=seconds)]
    if tau is None:
        return _drift(revision, policy, seen)
    limit = policy.min_acceptance_ratio * proven
    close = CloseWindow(active, tau, proven, engine.window, limit,
                        None if policy.drift.action == "ignore" else policy.drift.ratio * proven, seconds)
    collapse = _collapse(revision, tau, engine.window.rounds, policy)
    if collapse is not None:
        # The window is closed as well: if the rollback fails, it is planned again only after as many rounds.
        return [close, RollBack(active, "AcceptanceCollapsed", collapse)]
    if tau < limit and engine.window.rounds < _MOST_ROUNDS:
        return _drift(revision, policy, seen)
    short = engine.window_since is not None and now - engine.window_since < timedelta(seconds=policy.drift.window_s)
    return _drift(revision, policy, seen) if short else [close]


def _collapse(revision: Revision | None, tau: float | None, rounds: float, policy: ServePolicy) -> str | None:
    """A message when the upper end of acceptance's interval is below `min_acceptance_ratio` of the proven one, else
    None."""
    proven = None if revision is None else proven_tau(revision, policy.counts_drafted)
    if revision is None or tau is None or proven is None:
        return None
    limit, highest = policy.min_acceptance_ratio * proven, highest_tau(revision, tau, rounds)
    if highest >= limit:
        return None
    return (f"acceptance length fell to {tau:.2f} (at most {highest:.2f}) over {rounds:.0f} rounds, below "
            f"{limit:.2f} = {policy.min_acceptance_ratio:g} x the proven {proven:.2f}")


def damaged_drafter(found: str) -> str:
    """The message for `ObservedEndpoint.drafter_damage`. Pure."""
    return (f"its drafter cannot be loaded: {found}; hint: run the stage that made it again "
            "(eyrie retry JOB --from train), or restore its files, then promote it again")


def highest_tau(revision: Revision, tau: float, rounds: float) -> float:
    """The upper end of the interval of a mean acceptance length over `rounds`.

    Engines count rounds and tokens, not squares. The variance of values between 1 and n with mean tau is at most
    (tau - 1)(n - tau) (Bhatia and Davis, 2000), where a round yields at most n = num_steps + 1 tokens.
    """
    settings = [revision.use.setting] if revision.use.map is None else [
        point.setting for point in revision.use.map.points]
    deepest = max((setting.tree.num_steps for setting in settings if setting.tree is not None), default=1)
    variance = max(0.0, (tau - 1.0) * (deepest + 1.0 - tau))
    return tau + _STANDARD_ERRORS * math.sqrt(variance / rounds)


def _drift(revision: Revision, policy: ServePolicy, seen: ObservedEndpoint) -> list[EndpointAction]:
    """ReportDrift, once; again only after acceptance has recovered in between."""
    drift, proven = policy.drift, proven_tau(revision, policy.counts_drafted)
    if drift.action == "ignore" or proven is None:
        return []
    least, windows = drift.ratio * proven, seen.windows
    if seen.drift_reported:
        windows = windows[sum(1 for _ in takewhile(lambda tau: tau < least, windows)):]
    latest = windows[-drift.windows:]
    if len(latest) < drift.windows or max(latest) >= least:
        return []
    message = (f"acceptance length stayed below {least:.2f} = {drift.ratio:g} x the proven {proven:.2f} for "
               f"{drift.windows} windows in a row: {', '.join(f'{tau:.2f}' for tau in latest)}")
    return [ReportDrift(revision.number, latest, proven, message)]


def _overdue(engine: ObservedEngine, policy: ServePolicy, now: datetime) -> bool:
    """Whether a retired engine should have ended by itself."""
    limit = timedelta(seconds=policy.drain_s + KILL_MARGIN_S)
    return engine.retiring_since is not None and now - engine.retiring_since > limit


def _retire_unused(wanted: set[int | None], policy: ServePolicy, seen: ObservedEndpoint,
                   now: datetime) -> list[EndpointAction]:
    """Engines outside `wanted`: retired first, killed when overdue, deleted once dead."""
    actions: list[EndpointAction] = []
    for engine in seen.engines:
        if engine.revision in wanted:
            continue
        if engine.state == "dead":
            actions.append(EndEngine("delete", engine.revision))
        elif engine.retiring_since is None:
            actions.append(EndEngine("retire", engine.revision))
        elif _overdue(engine, policy, now):
            actions.append(EndEngine("kill", engine.revision))
    return actions


def _serving(endpoint: Endpoint, seen: ObservedEndpoint,
             now: datetime) -> tuple[Literal["True", "False", "Unknown"], str, str]:
    routed, candidate = seen.engine(seen.routed), seen.engine(endpoint.candidate_revision)
    if seen.gateway_alive and routed is not None and routed.state == "healthy":
        revision = endpoint.revision(routed.revision)
        what = revision.checkpoint if revision is not None and revision.checkpoint else "no drafter"
        canary = ""
        if seen.canary is not None:
            canary = f"; revision {seen.canary.revision} is the canary with {seen.canary.share:.0%} of the requests"
        elif candidate is not None and is_due(candidate.wait, now):
            canary = f"; revision {candidate.revision} has not started yet{_because(candidate)}"
        return "True", "Healthy", f"revision {routed.revision} serves with {what}{canary}"
    if endpoint.candidate_revision is not None:
        if _in_gap(endpoint.active_revision, endpoint.candidate_revision, seen):
            return "False", "ReplacingEngine", (
                f"revision {endpoint.candidate_revision} is starting; requests wait until it is ready, "
                f"because two engines do not fit the memory{_because(candidate)}")
        return ("Unknown", _reason(candidate, "Deploying", now),
                f"revision {endpoint.candidate_revision} is starting{_because(candidate)}")
    if endpoint.active_revision is None:
        return "False", "NothingToServe", "no revision has been promoted"
    engine = seen.engine(endpoint.active_revision)
    if engine is not None and engine.state == "dead":
        return "False", "EngineDied", f"the engine ended and is being restarted: {engine.message}"
    return ("Unknown", _reason(engine, "Starting", now),
            f"revision {endpoint.active_revision} is starting{_because(engine)}")


def _reason(engine: ObservedEngine | None, otherwise: str, now: datetime) -> str:
    """The reason of an engine that waits for a node, once it is due."""
    wait = None if engine is None else engine.wait
    return wait.reason if wait is not None and is_due(wait, now) else otherwise


def _because(engine: ObservedEngine | None) -> str:
    """Why an engine does not respond, where that is known."""
    if engine is None or not engine.message:
        return ""
    return f": {engine.message}" + (f"; hint: {engine.wait.hint}" if engine.wait is not None else "")


def proven_tau(revision: Revision, counts_drafted: bool = False) -> float | None:
    """The acceptance length that live traffic is compared with; None where the comparison would be wrong.

    With a map, an engine switches drafting off under load and then produces one token per round. Unless it counts
    drafted rounds separately (`counts_drafted`), that cannot be distinguished from a drafter that is never accepted.
    """
    operating_map = revision.use.map
    switches_off = operating_map is not None and any(
        point.setting.method == "off" for point in operating_map.points)
    drafts = revision.use.setting.method != "off"
    return revision.tau if drafts and (counts_drafted or not switches_off) else None
