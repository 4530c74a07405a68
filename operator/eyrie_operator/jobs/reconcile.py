"""The heart: what a job asks and what is seen of it, in; what to do and what to tell, out. Pure.

`reconcile` is called again and again, by a ticker, by an event, after a crash. It remembers nothing: everything it
knows is in `ObservedJob`, and every action it returns may be applied twice without harm, or not at all, in which case
the next look at the world asks for it again. So the control plane may die at any moment.

    nothing seen          -> StartRun, when a place is free
    a run that lives      -> wait; report its stages
    a run that vanished   -> StartRun again: stages go on from their manifests and checkpoints
    a run that failed     -> Failed, with the stage's own reason, message and hint
    a run that succeeded  -> Decide once -> Promote once -> wait until it serves -> Succeeded
    cancel or delete      -> StopRun until nothing lives, then Cancelled (retention removes rows and files after that)

Which world the actions touch (rows and processes, or a cluster's resources) is none of this module's business.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from eyrie_api.decisions.promotion import in_short
from eyrie_api.errors import EyrieError
from eyrie_api.v1alpha1.job import JobSpec
from eyrie_api.v1alpha1.records import Failure, ProgressRecord
from eyrie_api.v1alpha1.reports import LeaderboardEntry, PromotionDecision
from eyrie_api.v1alpha1.stages import STAGES, Manifest, StageName
from eyrie_api.v1alpha1.status import ConditionType, JobStatus, Progress, StageState, StageStatus
from eyrie_operator.conditions import Conditions, forget, is_over, observe, phase_of
from eyrie_pipelines.runner import ObservedRun, RunFailed
from eyrie_workers.catalog import CATALOG

MAX_STARTS = 5
"""A leader that dies this often within one attempt will die again; a person should look."""


@dataclass(frozen=True)
class ObservedStage:
    """What a stage's directory shows."""

    stage: StageName
    key: str = ""
    started_at: datetime | None = None
    """None: the stage has not been started yet, but it is known that it will be."""

    manifest: Manifest | None = None
    failure: Failure | None = None
    progress: ProgressRecord | None = None


@dataclass(frozen=True)
class ObservedServing:
    """What has become of this job's drafter at its endpoint."""

    state: Literal["absent", "deploying", "serving", "rolled-back"] = "absent"
    reason: str = ""
    message: str = ""
    endpoint: str | None = None


@dataclass(frozen=True)
class ObservedJob:
    """Everything known of a job at one moment."""

    attempt: int
    previous: JobStatus
    cancel_requested: bool = False
    delete_requested: bool = False
    place_free: bool = True
    """Whether another run may start on this machine or cluster."""

    run: ObservedRun = field(default_factory=ObservedRun)
    stages: tuple[ObservedStage, ...] = ()
    decision: PromotionDecision | None = None
    """Recorded in this attempt."""

    best: LeaderboardEntry | None = None
    serving: ObservedServing = field(default_factory=ObservedServing)


@dataclass(frozen=True)
class StartRun:
    """Start the pipeline; finished stages are skipped by their manifests."""

    attempt: int


@dataclass(frozen=True)
class StopRun:
    """End the run with everything it started."""


@dataclass(frozen=True)
class Decide:
    """Compare the tuned candidate with the incumbent and record decision and leaderboard, once per attempt."""


@dataclass(frozen=True)
class Promote:
    """Make the decided drafter the endpoint's candidate revision, once per job and attempt."""

    endpoint: str


@dataclass(frozen=True)
class WriteReport:
    """Write the job's report beside its stages."""


Action = StartRun | StopRun | Decide | Promote | WriteReport


@dataclass(frozen=True)
class Plan:
    """What to do, in order, and what to tell."""

    actions: tuple[Action, ...]
    status: JobStatus


def reconcile(spec: JobSpec, seen: ObservedJob, now: datetime) -> Plan:
    """Decide what a job needs next. Pure; see the module's essay for the cases."""
    conditions = seen.previous.conditions
    if seen.previous.attempt != seen.attempt:
        conditions = forget(conditions, *_OF_ONE_ATTEMPT)
    conditions = observe(conditions, "Accepted", "True", "JobAccepted", "the spec is valid", now)
    if is_over(conditions):
        # A run of a job that is over is a leftover of a race (cancelled while it started): end it.
        return _plan(seen, conditions, now, *((StopRun(),) if seen.run.alive else ()))
    if seen.cancel_requested or seen.delete_requested:
        return _cancel(seen, conditions, now)
    conditions = _observe_stages(seen, conditions, now)
    return _drive(spec, seen, conditions, now)


_OF_ONE_ATTEMPT: tuple[ConditionType, ...] = ("Failed", "Succeeded", "Cancelled", "Promoted", "Serving")


def _cancel(seen: ObservedJob, conditions: Conditions, now: datetime) -> Plan:
    if seen.run.alive:
        return _plan(seen, conditions, now, StopRun())
    conditions = observe(conditions, "Succeeded", "False", "Cancelled", "cancelled on request", now)
    conditions = observe(conditions, "Cancelled", "True", "Requested", "cancelled; nothing of it runs any more", now)
    return _plan(seen, conditions, now)


def _drive(spec: JobSpec, seen: ObservedJob, conditions: Conditions, now: datetime) -> Plan:
    run = seen.run
    if run.state == "running" and run.attempt == seen.attempt:
        return _plan(seen, conditions, now)
    if run.alive:  # an earlier attempt's processes: end them before anything new begins
        return _plan(seen, conditions, now, StopRun())
    if run.attempt != seen.attempt or run.state in ("none", "gone"):
        return _start(seen, conditions, now)
    if run.state == "failed":
        failed = run.failure or RunFailed(None, "", "PipelineFailed", "the run failed without naming a stage",
                                          "read the pipeline's log, then retry the job")
        return _plan(seen, _failed(conditions, failed, now), now, WriteReport())
    return _settle(spec, seen, conditions, now)


def _start(seen: ObservedJob, conditions: Conditions, now: datetime) -> Plan:
    if seen.run.attempt == seen.attempt and seen.run.starts >= MAX_STARTS:
        failed = RunFailed(None, "", "RunKeepsDying", f"the run was started {seen.run.starts} times and died each time",
                           "look for the out-of-memory killer in the system log, then retry the job")
        return _plan(seen, _failed(conditions, failed, now), now)
    if not seen.place_free:
        waiting = observe(conditions, "Accepted", "True", "Queued", "waiting for a running job to end", now)
        return _plan(seen, waiting, now)
    return _plan(seen, conditions, now, StartRun(seen.attempt))


def _settle(spec: JobSpec, seen: ObservedJob, conditions: Conditions, now: datetime) -> Plan:
    """The pipeline is through: decide, promote, wait until it serves, end."""
    decision = seen.decision
    if decision is None:
        return _plan(seen, conditions, now, Decide())
    reason = {"promote": "Promoted", "keep-incumbent": "IncumbentKept", "no-drafter": "NotFaster",
              "awaits-approval": "AwaitsApproval"}[decision.verdict]
    conditions = observe(conditions, "Promoted", "True" if decision.promote else "False", reason,
                         in_short(decision), now)
    # Not fast enough and nothing serves yet: the target alone is served, so that the user's URL exists all the same.
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
            failed = RunFailed(None, "", why, serving.message, "the drafter is measured and kept: read the engine's "
                               "log, then promote it again with `eyrie endpoints`")
            return _plan(seen, _failed(conditions, failed, now), now, WriteReport())
        conditions = observe(conditions, "Serving", "True", "Healthy", serving.message, now)
    conditions = observe(conditions, "Succeeded", "True", "Completed", in_short(decision), now)
    return _plan(seen, conditions, now, WriteReport())


def plan_failure(seen: ObservedJob, error: EyrieError, now: datetime) -> Plan:
    """The plan for a job whose next action is impossible: it fails, with the error's reason, message and hint."""
    failed = RunFailed(None, "", error.reason, error.message, error.hint)
    return _plan(seen, _failed(seen.previous.conditions, failed, now), now, WriteReport())


def _failed(conditions: Conditions, failed: RunFailed, now: datetime) -> Conditions:
    message = f"{failed.message}; hint: {failed.hint}" if failed.hint else failed.message
    if failed.stage is not None:
        where = f"{failed.stage} {failed.key}".rstrip()
        message = f"{where}: {message}"
        conditions = observe(conditions, _condition_of(failed.stage), "False", failed.reason, message, now)
    conditions = observe(conditions, "Succeeded", "False", failed.reason, message, now)
    return observe(conditions, "Failed", "True", failed.reason, message, now)


def _condition_of(stage: StageName) -> ConditionType:
    kind = CATALOG[stage].condition
    assert kind in ("Regenerated", "Captured", "Trained", "Benchmarked", "Tuned", "Proved")
    return kind  # type: ignore[return-value]  # mypy does not narrow a str by membership


def _observe_stages(seen: ObservedJob, conditions: Conditions, now: datetime) -> Conditions:
    """One condition per stage: True when every member known of it has a manifest and no more can appear."""
    complete = True
    for stage in STAGES:
        members = [one for one in seen.stages if one.stage == stage]
        done = [one for one in members if one.manifest is not None]
        # A later stage's members are known only when the stage before is through, hence `complete` carries over.
        complete = complete and bool(members) and len(done) == len(members)
        kind = _condition_of(stage)
        if complete:
            conditions = observe(conditions, kind, "True", "Finished", f"{len(done)} of {len(members)} done", now)
        elif any(one.started_at is not None for one in members):
            conditions = observe(conditions, kind, "Unknown", "Running", f"{len(done)} of {len(members)} done", now)
    return conditions


def _plan(seen: ObservedJob, conditions: Conditions, now: datetime, *actions: Action) -> Plan:
    previous = seen.previous
    over = is_over(conditions)
    started = seen.run.state != "none"
    same = previous.attempt == seen.attempt
    status = JobStatus(
        phase=phase_of(conditions, started=started, cancel_requested=seen.cancel_requested or seen.delete_requested),
        observed_generation=previous.observed_generation, conditions=conditions,
        stages=tuple(_stage_status(one, seen, over) for one in seen.stages) or previous.stages,
        run_id=seen.run.run_id or previous.run_id, attempt=seen.attempt, best=seen.best or previous.best,
        decision=seen.decision, endpoint=seen.serving.endpoint or previous.endpoint,
        started_at=previous.started_at or (now if started else None),
        finished_at=(previous.finished_at if same and previous.finished_at else now) if over else None)
    return Plan(actions, status)


def _stage_status(one: ObservedStage, seen: ObservedJob, over: bool) -> StageStatus:
    before = next((told for told in seen.previous.stages if (told.stage, told.key) == (one.stage, one.key)), None)
    if before is not None and before.state == "Succeeded" and one.manifest is not None:
        return before  # it belongs to the attempt that finished it
    state: StageState
    if one.manifest is not None:
        state = "Succeeded"
    elif seen.run.state == "running" and one.started_at is not None:
        state = "Running"  # a failure lying there belongs to an attempt that is being repeated
    elif one.failure is not None:
        state = "Failed"
    elif seen.cancel_requested or seen.delete_requested:
        state = "Cancelled"
    else:
        state = "Skipped" if over else "Pending"
    failure = one.failure if state == "Failed" else None
    progress = one.progress
    return StageStatus(
        stage=one.stage, key=one.key, state=state, attempt=seen.run.attempt, started_at=one.started_at,
        finished_at=datetime.fromisoformat(one.manifest.finished_at) if one.manifest else None,
        progress=None if progress is None else Progress(
            done=progress.done, total=progress.total, unit=progress.unit, rate=progress.rate, eta_s=progress.eta_s,
            message=progress.message),
        reason=failure.reason if failure else None, message=failure.message if failure else None,
        hint=failure.hint if failure else None)
