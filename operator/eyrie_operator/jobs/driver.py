"""The driver of jobs, on one machine and on a cluster: rows and job directories here, runs behind `Runner`.

`advance` is one step of one job: take its lease, look at the world, ask the pure `reconcile` what to do, do it, store
what was seen. The world is what the job's directory holds (manifests, failures), what the runner sees of the run, and
what the rows say the user wants; nothing is kept in memory between two steps. So the control plane may be killed at any
line: the run goes on without it, and the next control plane adopts it by looking. If the machine went down, the run is
started again and its stages go on from their manifests, ledgers and checkpoints.

Which runner it is makes the world: `eyrie_pipelines.local` runs child processes that work in the job's directory;
`eyrie_pipelines.kubeflow` runs pods, and brings what they say into it. Beside that, a job's directory holds

    outcome.json    the decision of the present attempt, and the endpoint revision it was promoted to
    report.json     the whole job on one page (`eyrie_operator.jobs.report`)

and the runner is asked to keep both. How many runs there may be at once is the runner's to say; the others wait.
"""

import contextlib
import fcntl
import json
import logging
import os
import secrets
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from eyrie_api.artifacts import MANIFEST, read_manifest, write_atomically, write_model
from eyrie_api.clock import Clock, utc_now
from eyrie_api.database.endpoint_history import Histories
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.ingest import Ingest
from eyrie_api.database.jobs import Jobs, LeaseLost
from eyrie_api.database.results import ResultFilter, Results
from eyrie_api.decisions.leaderboard import Measured
from eyrie_api.decisions.promotion import decide, in_short, proven_speedup, proven_tau, without_drafter
from eyrie_api.decisions.sweep import expand
from eyrie_api.errors import ArtifactMissing, EyrieError, NotFound, Transient
from eyrie_api.settings import Settings
from eyrie_api.v1alpha1.job import JobSpec
from eyrie_api.v1alpha1.model import Frozen
from eyrie_api.v1alpha1.prove import ProveReport
from eyrie_api.v1alpha1.records import Failure
from eyrie_api.v1alpha1.reports import BenchmarkReport, PromotionDecision, TrainReport, TuneReport
from eyrie_api.v1alpha1.stages import STAGES, Manifest, StageName
from eyrie_api.v1alpha1.status import Condition, Endpoint, Job, JobStatus, Revision, StageState, StageStatus
from eyrie_api.v1alpha1.targets import TargetSpec
from eyrie_api.v1alpha1.tuning import DrafterUse
from eyrie_operator.conditions import find, is_over, observe
from eyrie_operator.jobs import report as reports
from eyrie_operator.jobs.reconcile import (
    Action,
    Decide,
    ObservedJob,
    ObservedServing,
    ObservedStage,
    Plan,
    Promote,
    StartRun,
    StopRun,
    plan_failure,
    reconcile,
)
from eyrie_pipelines.run_failure import FAILURE_FILE
from eyrie_pipelines.runner import Runner
from eyrie_pipelines.steps import find_checkpoint, list_checkpoints
from eyrie_workers.catalog import CATALOG, stage_dir

log = logging.getLogger(__name__)

OUTCOME_FILE = "outcome.json"
REPORT_FILE = "report.json"
_MAX_STEPS = 8
"""Steps taken in one call while each leads to the next: decide, promote, tell."""


class AttemptOutcome(Frozen):
    """`outcome.json`."""

    attempt: int
    decision: PromotionDecision
    endpoint: str | None = None
    revision: int | None = None


class Driver:
    """Drives jobs. Cheap to make; any number may share a database, the lease keeps them apart."""

    def __init__(self, settings: Settings, database: Database, runner: Runner, clock: Clock = utc_now) -> None:
        self._settings, self._runner, self._clock = settings, runner, clock
        self._jobs, self._ingest = Jobs(database, clock), Ingest(database, clock)
        self._results, self._endpoints = Results(database, clock), Endpoints(database, clock)
        self._histories = Histories(database, clock)
        self._owner = f"driver-{os.getpid()}-{secrets.token_hex(4)}"

    def advance(self, job_id: str) -> None:
        """One short step of one job; harmless for jobs that have ended, are gone, or are driven by another."""
        owner = f"{self._owner}-{secrets.token_hex(4)}"  # two chores of one process are two drivers
        if not self._jobs.take_lease(job_id, owner, self._settings.lease_ttl_s):
            return
        try:
            self._advance(job_id, owner)
        except (NotFound, LeaseLost) as reason:
            log.info("job %s: %s", job_id, reason)
        except Transient as reason:
            log.warning("job %s: %s", job_id, reason)
            job = self._jobs.get(job_id)
            self._wait_out(job, job.status, reason, owner)
        finally:
            self._jobs.release_lease(job_id, owner)

    def _advance(self, job_id: str, owner: str) -> None:
        for _ in range(_MAX_STEPS):
            job = self._jobs.get(job_id)
            seen, plan = self._look(job)
            self._tail(job_id)  # after the look: what a stage said before its end is told before its end is
            moved = self._carry_out(job, seen, plan, owner)
            if not moved or not self._jobs.renew_lease(job_id, owner, self._settings.lease_ttl_s):
                return

    def _carry_out(self, job: Job, seen: ObservedJob, plan: Plan, owner: str) -> bool:
        """Apply a plan and store its status; whether something was done that makes another look worth while."""
        try:
            for action in plan.actions:
                self._apply(action, job, plan.status)
        except Transient as reason:
            self._wait_out(job, plan.status, reason, owner)
            return False
        except EyrieError as error:
            plan = plan_failure(seen, error, self._clock())
            self._write_report(job, plan.status)
        self._jobs.save_status(job.id, plan.status, owner)
        self._tell(job, plan.status)
        return bool(plan.actions) and not is_over(plan.status.conditions)

    def _wait_out(self, job: Job, status: JobStatus, reason: Transient, owner: str) -> None:
        """Trouble that may pass is told once, however often it is met."""
        conditions = observe(status.conditions, "Accepted", "True", reason.reason, str(reason), self._clock())
        after = status.model_copy(update={"conditions": conditions})
        self._jobs.save_status(job.id, after, owner)
        self._tell(job, after)

    # Looking.

    def _look(self, job: Job) -> tuple[ObservedJob, Plan]:
        try:
            seen = self._observe(job)
        except (NotFound, Transient):
            raise
        except EyrieError as error:  # what lies on disk cannot be read: a person has to look
            blind = ObservedJob(attempt=job.status.attempt, previous=job.status)
            return blind, replace(plan_failure(blind, error, self._clock()), actions=())
        return seen, reconcile(job.spec, seen, self._clock())

    def _observe(self, job: Job) -> ObservedJob:
        job_dir = self._settings.job_dir(job.id)
        intent = self._jobs.intent(job.id)
        run = self._runner.observe(job.id)
        self._runner.refresh(job.id, job.spec)  # after: of a run that has ended, everything is there
        settled = _read_outcome(job_dir, intent.attempt)
        best = self._results.leaderboard(ResultFilter(job_id=job.id, tuned=True), limit=1) if settled else ()
        return ObservedJob(
            attempt=intent.attempt, previous=job.status, cancel_requested=intent.cancel_requested,
            delete_requested=intent.delete_requested, place_free=self._place_free(job),
            run=run, stages=tuple(_observe_stages(job, job_dir)),
            decision=settled.decision if settled else None, best=best[0] if best else None,
            serving=self._observe_serving(settled))

    def _place_free(self, job: Job) -> bool:
        """Whether a run may start now."""
        running = self._jobs.count_by_phase().get("Running", 0) - (job.status.phase == "Running")
        return self._runner.has_capacity(job.id, self._jobs.live(), running)

    def _observe_serving(self, settled: AttemptOutcome | None) -> ObservedServing:
        if settled is None or settled.endpoint is None or settled.revision is None:
            return ObservedServing()
        endpoint = self._endpoints.get(settled.endpoint)
        return serving_of(endpoint, settled.revision)

    # Doing. Every action may be applied twice.

    def _apply(self, action: Action, job: Job, status: JobStatus) -> None:
        if isinstance(action, StartRun):
            with self._starting_alone():
                if self._place_free(job):
                    self._runner.start(job.id, job.spec, action.attempt, self._incumbent_use(job.spec))
        elif isinstance(action, StopRun):
            self._runner.stop(job.id)
        elif isinstance(action, Decide):
            self._decide(job, status.attempt)
        elif isinstance(action, Promote):
            self._promote(job, status.attempt, action.endpoint)
        else:
            self._write_report(job, status)

    @contextlib.contextmanager
    def _starting_alone(self) -> Iterator[None]:
        """Two drivers of one machine must not both see the last free place."""
        self._settings.home.mkdir(parents=True, exist_ok=True)
        with (self._settings.home / "starting.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _decide(self, job: Job, attempt: int) -> None:
        job_dir = self._settings.job_dir(job.id)
        tuned = read_manifest(stage_dir(job_dir, "tune")).report
        assert isinstance(tuned, TuneReport)
        for manifest in read_manifests(job, job_dir):
            if isinstance(manifest.report, BenchmarkReport):
                self._record(job, manifest.report, tuned=False)
        self._record(job, tuned.final, tuned=True)
        proof = read_manifest(stage_dir(job_dir, "prove")).report
        assert isinstance(proof, ProveReport)
        required = [suite.name for suite in job.spec.benchmark.suites if suite.required]
        decision = decide(job.spec.promotion, tuned.final, self._incumbent(job.spec.serve.endpoint), required, proof)
        self._histories.record_decision(job.spec.serve.endpoint, decision, job_id=job.id, attempt=attempt)
        self._settle(job.id, AttemptOutcome(attempt=attempt, decision=decision))

    def _settle(self, job_id: str, settled: AttemptOutcome) -> None:
        write_model(self._settings.job_dir(job_id) / OUTCOME_FILE, settled)
        self._runner.persist(job_id, OUTCOME_FILE)

    def _record(self, job: Job, report: BenchmarkReport, *, tuned: bool) -> None:
        trained = _train_reports(_candidate_names(job), self._settings.job_dir(job.id))
        family = next(one.family for one in trained if one.candidate == report.candidate)
        measured = Measured(job.id, family, job.spec.target.model, tuned, report)
        self._results.record(measured, self._drafter_dir(job, report.checkpoint))

    def _drafter_dir(self, job: Job, checkpoint: str) -> str:
        job_dir = self._settings.job_dir(job.id)
        return str(job_dir / find_checkpoint(_train_reports(_candidate_names(job), job_dir), checkpoint).path)

    def _incumbent(self, endpoint: str) -> BenchmarkReport | None:
        """The report of the drafter the endpoint serves now; None when it serves without one, or nothing."""
        active = self._active(endpoint)
        if active is None or active.job_id is None or active.checkpoint is None or active.use.drafter_dir is None:
            return None
        try:
            return self._results.find(active.job_id, active.checkpoint).measured.report
        except NotFound:  # its job was deleted, and its results with it
            return None

    def _incumbent_use(self, spec: JobSpec) -> DrafterUse | None:
        """What the endpoint decodes with now, for the proof to compare with; None when it drafts nothing."""
        active = self._active(spec.serve.endpoint, spec.target) if spec.serve.enabled else None
        return None if active is None or active.use.setting.method == "off" else active.use

    def _active(self, endpoint: str, target: TargetSpec | None = None) -> Revision | None:
        """The revision an endpoint serves; None when there is none, or not for `target`."""
        try:
            serving = self._endpoints.get(endpoint)
        except NotFound:
            return None
        if target is not None and serving.target != target.model:
            return None
        return next((one for one in serving.revisions if one.number == serving.active_revision), None)

    def _promote(self, job: Job, attempt: int, name: str) -> None:
        job_dir = self._settings.job_dir(job.id)
        settled = _read_outcome(job_dir, attempt)
        assert settled is not None, "promoted before it was decided"
        model = job.spec.target.model
        # Clients name the model they want: a path's last part or a Hub id reads better than a path.
        shown = Path(model).name if Path(model).is_absolute() else model
        made = self._endpoints.create(name, job.spec.target, job.spec.serve, shown)
        revision = made.revisions[0].number
        if settled.decision.promote:
            tuned = read_manifest(stage_dir(job_dir, "tune")).report
            proof = read_manifest(stage_dir(job_dir, "prove")).report
            assert isinstance(tuned, TuneReport)
            assert isinstance(proof, ProveReport)
            drafter = Path(self._drafter_dir(job, tuned.checkpoint))
            # Beside the checkpoint and not in it: its bytes are named by digest and served as they are.
            beside = drafter.with_name(f"{drafter.name}-results.json")
            write_atomically(beside, json.dumps(reports.results(tuned.final, proof), indent=2) + "\n")
            self._runner.persist(job.id, beside.relative_to(job_dir).as_posix())
            # N-gram look-up reads no drafter, and an engine should not load one for it.
            use = proof.use.model_copy(update={"drafter_dir": None if without_drafter(proof) else str(drafter)})
            revision = self._endpoints.propose(
                name, job_id=job.id, checkpoint=tuned.checkpoint, use=use, reason=in_short(settled.decision),
                speedup=proven_speedup(tuned.final, proof), tau=proven_tau(tuned.final, proof)).number
        self._settle(job.id, settled.model_copy(update={"endpoint": name, "revision": revision}))

    def _write_report(self, job: Job, status: JobStatus) -> None:
        job_dir = self._settings.job_dir(job.id)
        settled = _read_outcome(job_dir, status.attempt)
        endpoint = self._endpoints.get(settled.endpoint) if settled and settled.endpoint else None
        total_s = (self._clock() - job.created_at).total_seconds()
        content = reports.build(job.id, read_manifests(job, job_dir), status.conditions, total_s,
                                settled.decision if settled else None, endpoint)
        write_atomically(job_dir / REPORT_FILE, json.dumps(content, indent=2) + "\n")
        self._runner.persist(job.id, REPORT_FILE)

    # Telling.

    def _tail(self, job_id: str) -> None:
        """Take in what running stages have said."""
        job_dir = self._settings.job_dir(job_id)
        for stage in STAGES:
            root = stage_dir(job_dir, stage)
            keys = sorted(path.parent.name for path in root.glob("*/events.jsonl")) if CATALOG[stage].keyed_by else [""]
            for key in keys:
                self._ingest.read(job_id, stage, key, stage_dir(job_dir, stage, key) / "events.jsonl")

    def _tell(self, job: Job, after: JobStatus) -> None:
        """An event for every stage and every other condition that changed."""
        for stage in after.stages:
            told = next((one for one in job.status.stages if (one.stage, one.key) == (stage.stage, stage.key)), None)
            if told is None or told.state != stage.state:
                self._tell_stage(job.id, stage, None if told is None else told.state)
        for condition in after.conditions:
            before = find(job.status.conditions, condition.type)
            known = before is not None and (before.status, before.reason) == (condition.status, condition.reason)
            if not known and _stage_of(condition.type) is None:
                reason, warning = _event_of(condition)
                self._jobs.record_event(job.id, reason, condition.message, type="Warning" if warning else "Normal")

    def _tell_stage(self, job_id: str, stage: StageStatus, before: StageState | None) -> None:
        name = f"{stage.stage} {stage.key}".rstrip()
        if stage.state == "Failed":
            self._jobs.record_event(job_id, stage.reason or "StageFailed", f"{name}: {stage.message}; {stage.hint}",
                                    type="Warning", stage=stage.stage, key=stage.key)
        elif stage.state in ("Running", "Succeeded"):
            if before != "Running" and stage.state == "Succeeded":  # it began and ended between two looks
                self._jobs.record_event(job_id, "StageStarted", f"{name} started", stage=stage.stage, key=stage.key)
            reason = "StageStarted" if stage.state == "Running" else "StageFinished"
            verb = "started" if stage.state == "Running" else "finished"
            self._jobs.record_event(job_id, reason, f"{name} {verb}", stage=stage.stage, key=stage.key)

    def stop_runs(self) -> None:
        """End every run in order; a control plane started later goes on with them. Their jobs keep their state."""
        for job_id in self._jobs.live():
            self._runner.pause(job_id)


def serving_of(endpoint: Endpoint, revision: int) -> ObservedServing:
    """What has become of a promoted revision."""
    if endpoint.candidate_revision == revision:
        return ObservedServing("deploying", "Deploying", f"revision {revision} is coming up", endpoint.name)
    if endpoint.active_revision == revision:
        return ObservedServing("serving", "Healthy", f"revision {revision} serves at {endpoint.url}", endpoint.name)
    told = next((one for one in endpoint.revisions if one.number == revision), None)
    newest = max((one for one in (endpoint.active_revision, endpoint.candidate_revision) if one is not None), default=0)
    if newest > revision and (told is None or told.state not in ("rejected", "rolled-back")):
        return ObservedServing("serving", "Superseded", f"revision {revision} gave way to {newest}", endpoint.name)
    reason, _, message = ((told.rejected_reason if told is not None else None) or "").partition(": ")
    return ObservedServing("rolled-back", reason or "RolledBack", message or f"revision {revision} was given up",
                           endpoint.name)


def read_manifests(job: Job, job_dir: Path) -> list[Manifest]:
    """Manifests of every stage that has finished, in the pipeline's order."""
    return [one.manifest for one in _observe_stages(job, job_dir) if one.manifest is not None]


def _read_outcome(job_dir: Path, attempt: int) -> AttemptOutcome | None:
    try:
        settled = AttemptOutcome.model_validate_json((job_dir / OUTCOME_FILE).read_text())
    except FileNotFoundError:
        return None
    return settled if settled.attempt == attempt else None


def _observe_stages(job: Job, job_dir: Path) -> Iterator[ObservedStage]:
    candidates = _candidate_names(job)
    for stage in STAGES:
        for key in _keys(candidates, job_dir, stage):
            yield _observe_stage(job, job_dir, stage, key)


def _candidate_names(job: Job) -> list[str]:
    return [candidate.name for candidate in expand(job.spec)]


def _keys(candidates: list[str], job_dir: Path, stage: StageName) -> list[str]:
    """Members of a stage known so far: the sweep's candidates, and checkpoints once all of these are trained."""
    if stage == "train":
        return candidates
    if stage == "benchmark":
        try:
            return [one.name for one in list_checkpoints(_train_reports(candidates, job_dir))]
        except ArtifactMissing:
            return []
    return [""]


def _train_reports(candidates: list[str], job_dir: Path) -> list[TrainReport]:
    found = []
    for candidate in candidates:
        report = read_manifest(stage_dir(job_dir, "train", candidate)).report
        assert isinstance(report, TrainReport)
        found.append(report)
    return found


def _observe_stage(job: Job, job_dir: Path, stage: StageName, key: str) -> ObservedStage:
    directory = stage_dir(job_dir, stage, key)
    told = next((one for one in job.status.stages if (one.stage, one.key) == (stage, key)), None)
    started = told.started_at if told is not None else None
    if started is None:
        with contextlib.suppress(FileNotFoundError):
            started = datetime.fromtimestamp((directory / "spec.json").stat().st_mtime, UTC)
    manifest = read_manifest(directory) if (directory / MANIFEST).exists() else None
    failure = None
    if manifest is None:
        with contextlib.suppress(FileNotFoundError):
            failure = Failure.model_validate_json((directory / FAILURE_FILE).read_text())
    return ObservedStage(stage, key, started, manifest, failure)


def _event_of(condition: Condition) -> tuple[str, bool]:
    """Reason and whether it is a warning, for the event of a changed condition."""
    if condition.type == "Accepted" and condition.reason not in ("JobAccepted", "Queued"):
        return condition.reason, True
    if condition.status == "True":
        return (condition.reason, True) if condition.type == "Failed" else (condition.type, False)
    return condition.reason, condition.status == "False" and condition.reason not in ("Cancelled", "NotFaster")


def _stage_of(kind: str) -> StageName | None:
    return next((stage.name for stage in CATALOG.values() if stage.condition == kind), None)
