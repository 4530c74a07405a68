"""The reconciler of jobs: from a spec and an observation to actions and a status. Pure.

`reconcile` is called by a ticker, by events and after a crash. It keeps no state: its input is `ObservedJob`, and every
action it returns is idempotent. An action that was not applied is returned again by the next call, so the control plane
may be killed at any moment.

    no run                -> StartRun, when there is capacity
    a run is alive        -> wait; report its stages, and those whose pods have no node
    a run is gone         -> StartRun again, after a growing pause: stages resume from manifests and checkpoints
    a run failed          -> Failed, with the stage's own reason, message and hint
    a run succeeded       -> Decide once -> Promote once -> wait until it serves -> Succeeded
    cancel or delete      -> StopRun until nothing is alive, then Cancelled (retention removes rows and files later)

The actions are independent of the runtime (local processes, or a cluster's resources).
"""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.records import Failure, WaitingPod
from eyrie_api.contract.reports import LeaderboardEntry, PromotionDecision
from eyrie_api.contract.stages import Manifest, StageName
from eyrie_api.contract.status import JobStatus, StageState, StageStatus
from eyrie_api.decisions.promotion import decision_reason, summarize_decision
from eyrie_api.errors import EyrieError
from eyrie_operator.conditions import Conditions, find, is_over, observe, phase_of, remove
from eyrie_operator.unscheduled import WAITS, wait_of
from eyrie_pipelines.runner import ObservedRun, RunFailed
from eyrie_workers.catalog import CATALOG

MAX_STARTS = 5
"""A run whose leader died this often in one attempt without getting further fails once the deaths last for STUCK: it
would most likely die again. What kills from outside, such as a machine that is drained or a store that is down, kills
several starts within a minute or two, and a start takes up to 20 s on a busy machine before it can get further."""

STUCK = timedelta(minutes=5)

MOST_STARTS = 20
"""It fails then whatever the clock says, which may have been set back."""

_PAUSES = (0, 0, 5, 10, 20, 40, 60)
"""Seconds between the n-th start without progress and the next; the last for all further ones. STUCK holds about ten
starts."""


@dataclass(frozen=True)
class ObservedStage:
    """One stage, or one member of it, as its directory shows it."""

    stage: StageName
    key: str = ""
    started_at: datetime | None = None
    """None: not started yet."""

    manifest: Manifest | None = None
    failure: Failure | None = None


@dataclass(frozen=True)
class ObservedServing:
    """The state of this job's drafter at its endpoint."""

    state: Literal["absent", "deploying", "serving", "rolled-back", "off"] = "absent"
    """off: promoted, and a user switched the endpoint off before it served. The job does not wait for the user."""

    reason: str = ""
    message: str = ""
    endpoint: str | None = None


@dataclass(frozen=True)
class ObservedJob:
    attempt: int
    previous: JobStatus
    cancel_requested: bool = False
    delete_requested: bool = False
    has_capacity: bool = True
    """Whether another run may start on this machine or cluster."""

    run: ObservedRun = field(default_factory=ObservedRun)
    stages: tuple[ObservedStage, ...] = ()
    waiting_pods: tuple[WaitingPod, ...] = ()
    """Pods of the run without a node, on a cluster."""

    decision: PromotionDecision | None = None
    """The decision recorded in this attempt, if any."""

    best: LeaderboardEntry | None = None
    serving: ObservedServing = field(default_factory=ObservedServing)


@dataclass(frozen=True)
class StartRun:
    """Start the pipeline; finished stages are skipped by their manifests."""

    attempt: int


@dataclass(frozen=True)
class StopRun:
    """Stop the run with everything it started."""


@dataclass(frozen=True)
class Decide:
    """Compare the tuned candidate with the incumbent and record decision and leaderboard, once per attempt."""


@dataclass(frozen=True)
class Promote:
    """Make the decided drafter the endpoint's candidate revision, once per job and attempt."""

    endpoint: str


Action = StartRun | StopRun | Decide | Promote


@dataclass(frozen=True)
class ActionPlan:
    """Actions in order, and the status to store."""

    actions: tuple[Action, ...]
    status: JobStatus


def reconcile(spec: JobSpec, seen: ObservedJob, now: datetime) -> ActionPlan:
    """The next actions and the status of a job; the module docstring lists the cases."""
    conditions = seen.previous.conditions
    if seen.previous.attempt != seen.attempt:
        conditions = remove(conditions, "Failed", "Succeeded", "Cancelled", "Promoted", "Serving")
    conditions = observe(conditions, "Accepted", "True", "JobAccepted", "the spec is valid", now)
    if is_over(conditions):
        # Race: the job was cancelled while its run started, so the run outlived the cancellation. Stop it.
        return _plan(seen, conditions, now, *((StopRun(),) if seen.run.alive else ()))
    if seen.cancel_requested or seen.delete_requested:
        if seen.run.alive:
            return _plan(seen, conditions, now, StopRun())
        conditions = observe(conditions, "Succeeded", "False", "Cancelled", "cancelled on request", now)
        return _plan(seen, observe(conditions, "Cancelled", "True", "Requested",
                                   "cancelled; no process of it is running", now), now)
    return _drive(spec, seen, _observe_stages(spec, seen, conditions, now), now)


def _drive(spec: JobSpec, seen: ObservedJob, conditions: Conditions, now: datetime) -> ActionPlan:
    run = seen.run
    if run.state == "running" and run.attempt == seen.attempt:
        return _plan(seen, conditions, now)
    if run.alive:  # processes of an earlier attempt: stop them before a new run starts
        return _plan(seen, conditions, now, StopRun())
    if run.attempt != seen.attempt or run.state in ("none", "gone"):
        restart = restart_of(run, now) if run.attempt == seen.attempt else "now"
        words = f"; its log ends with: {run.last_words}" if run.last_words else ""
        if restart == "never":
            failed = RunFailed(None, "", "RunKeepsDying",
                               f"the run was started {run.starts} times and its process died each time, "
                               f"without getting further{words}",
                               "where the log names no error, check the system log for the out-of-memory killer; then "
                               "retry the job")
            return _plan(seen, _failed(conditions, failed, now), now)
        if restart == "later":
            return _plan(seen, observe(
                conditions, "Accepted", "True", "RunDied",
                f"the run's process died {run.starts} times without getting further; it is started again "
                f"{_pause_s(run.starts)} s after its last start{words}", now), now)
        if seen.has_capacity:
            return _plan(seen, conditions, now, StartRun(seen.attempt))
        return _plan(seen, observe(conditions, "Accepted", "True", "Queued", "waiting for a running job to end", now),
                     now)
    if run.state == "failed":
        failed = run.failure or RunFailed(None, "", "PipelineFailed", "the run failed, and no stage reported a failure",
                                          "read the pipeline's log, then retry the job")
        return _plan(seen, _failed(conditions, failed, now), now)
    return _finish(spec, seen, conditions, now)


def restart_of(run: ObservedRun, now: datetime) -> Literal["now", "later", "never"]:
    """Whether a run that is gone is started again. Without the times of its starts, their number decides."""
    stuck = run.since is None or now - run.since >= STUCK
    if run.starts >= MOST_STARTS or (run.starts >= MAX_STARTS and stuck):
        return "never"
    # A last start in the future was written before the clock was set back: nobody knows how long ago it was.
    pause = timedelta(seconds=_pause_s(run.starts))
    waits = run.started_at is not None and timedelta(0) <= now - run.started_at < pause
    return "later" if waits else "now"


def _pause_s(starts: int) -> int:
    return _PAUSES[min(starts, len(_PAUSES) - 1)]


def _finish(spec: JobSpec, seen: ObservedJob, conditions: Conditions, now: datetime) -> ActionPlan:
    """The pipeline has succeeded: decide, promote, wait until the endpoint serves, finish."""
    decision = seen.decision
    if decision is None:
        return _plan(seen, conditions, now, Decide())
    conditions = observe(conditions, "Promoted", "True" if decision.promote else "False", decision_reason(decision),
                         summarize_decision(decision), now)
    # No drafter passes: serve the target without one, so that the endpoint's URL exists.
    bare = decision.verdict == "no-drafter" and spec.promotion.mode == "auto"
    if spec.serve.enabled and (decision.promote or bare):
        serving = seen.serving
        if serving.state == "absent":
            return _plan(seen, conditions, now, Promote(spec.serve.endpoint))
        if serving.state == "deploying":
            conditions = observe(conditions, "Serving", "Unknown", serving.reason or "Deploying", serving.message, now)
            return _plan(seen, conditions, now)
        if serving.state == "rolled-back":
            why = serving.reason or "RolledBack"
            conditions = observe(conditions, "Serving", "False", why, serving.message, now)
            failed = RunFailed(None, "", why, serving.message, "the drafter and its measurements are kept: read the "
                               "engine's log, then promote it again with `eyrie endpoints`")
            return _plan(seen, _failed(conditions, failed, now), now)
        if serving.state == "off":
            conditions = observe(conditions, "Serving", "False", "Off", serving.message, now)
        else:
            conditions = observe(conditions, "Serving", "True", "Healthy", serving.message, now)
    conditions = observe(conditions, "Succeeded", "True", "Completed", summarize_decision(decision), now)
    return _plan(seen, conditions, now)


def plan_failure(seen: ObservedJob, error: EyrieError, now: datetime) -> ActionPlan:
    """The plan for a job whose next action raised: it fails with the error's reason, message and hint."""
    failed = RunFailed(None, "", error.reason, error.message, error.hint)
    return _plan(seen, _failed(seen.previous.conditions, failed, now), now)


def _failed(conditions: Conditions, failed: RunFailed, now: datetime) -> Conditions:
    message = f"{failed.message}; hint: {failed.hint}" if failed.hint else failed.message
    if failed.stage is not None:
        where = f"{failed.stage} {failed.key}".rstrip()
        message = f"{where}: {message}"
        conditions = observe(conditions, CATALOG[failed.stage].condition, "False", failed.reason, message, now)
    conditions = observe(conditions, "Succeeded", "False", failed.reason, message, now)
    return observe(conditions, "Failed", "True", failed.reason, message, now)


def _observe_stages(spec: JobSpec, seen: ObservedJob, conditions: Conditions, now: datetime) -> Conditions:
    """One condition per stage: True when every member has a manifest and no further member can appear."""
    complete = True
    for stage in spec.stages:
        members = [member for member in seen.stages if member.stage == stage]
        done = [member for member in members if member.manifest is not None]
        # The members of a stage are known only when the stage before it is complete, hence `complete` carries over.
        complete = complete and bool(members) and len(done) == len(members)
        kind = CATALOG[stage].condition
        if complete:
            conditions = observe(conditions, kind, "True", "Finished", f"{len(done)} of {len(members)} done", now)
        elif (wait := next(filter(None, (_wait_of(member, seen, now) for member in members)), None)) is not None:
            conditions = observe(conditions, kind, "Unknown", wait.reason, f"{wait.message}; hint: {wait.hint}", now)
        elif any(member.started_at is not None for member in members):
            conditions = observe(conditions, kind, "Unknown", "Running", f"{len(done)} of {len(members)} done", now)
        elif (before := find(conditions, kind)) is not None and before.reason in WAITS:
            conditions = remove(conditions, kind)  # it has a node now, and begins
    return conditions


def _wait_of(member: ObservedStage, seen: ObservedJob, now: datetime) -> WaitingPod | None:
    """Why a member of a stage does not begin or go on, where its pod has no node."""
    if member.manifest is not None or seen.run.state != "running":
        return None
    return wait_of(member.stage, member.key, member.started_at, seen.waiting_pods, now)


def _plan(seen: ObservedJob, conditions: Conditions, now: datetime, *actions: Action) -> ActionPlan:
    previous = seen.previous
    over = is_over(conditions)
    started = seen.run.state != "none"
    same = previous.attempt == seen.attempt
    status = JobStatus(
        phase=phase_of(conditions, started=started, cancel_requested=seen.cancel_requested or seen.delete_requested),
        observed_generation=previous.observed_generation, conditions=conditions,
        stages=tuple(_stage_status(member, seen, over, now) for member in seen.stages) or previous.stages,
        run_id=seen.run.run_id or previous.run_id, attempt=seen.attempt,
        restarted_from=previous.restarted_from, best=seen.best or previous.best,
        decision=seen.decision, endpoint=seen.serving.endpoint or previous.endpoint,
        started_at=previous.started_at or (now if started else None),
        finished_at=(previous.finished_at if same and previous.finished_at else now) if over else None)
    return ActionPlan(actions, status)


def _stage_status(member: ObservedStage, seen: ObservedJob, over: bool, now: datetime) -> StageStatus:
    before = next((each for each in seen.previous.stages if (each.stage, each.key) == (member.stage, member.key)), None)
    if before is not None and before.state == "Succeeded" and member.manifest is not None:
        return before  # keeps the number of the attempt that finished it
    state: StageState
    if member.manifest is not None:
        state = "Succeeded"
    elif seen.run.state == "running" and member.started_at is not None:
        state = "Running"  # a failure record in its directory is of an earlier start
    elif member.failure is not None:
        state = "Failed"
    elif seen.cancel_requested or seen.delete_requested:
        state = "Cancelled"
    else:
        state = "Skipped" if over else "Pending"
    failure = member.failure if state == "Failed" else None
    why = failure or (_wait_of(member, seen, now) if state in ("Pending", "Running") else None)
    ended = failure.time if failure else None
    if member.manifest is not None:
        ended = datetime.fromisoformat(member.manifest.finished_at)
    return StageStatus(
        stage=member.stage, key=member.key, state=state, attempt=seen.run.attempt, started_at=member.started_at,
        finished_at=ended, reason=why.reason if why else None, message=why.message if why else None,
        hint=why.hint if why else None)
