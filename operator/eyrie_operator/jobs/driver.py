"""The driver of jobs, on one machine and on a cluster: database rows and job directories; runs through `Runner`.

`advance` is one step of one job: take its lease, observe, call the pure `reconcile`, apply its actions, store the
status. The observation is made of the job's directory (manifests, failures), the runner's view of the run, and the
user's intent in the database; no state is kept in memory between two steps. The control plane may be killed at any
line: the run continues, and the next control plane observes it. If the machine went down, the run is started again and
its stages resume from their manifests, ledgers and checkpoints.

`eyrie_pipelines.local` runs child processes that work in the job's directory; `eyrie_pipelines.kubeflow` runs pods and
downloads their small files into it. The driver itself writes into that directory

    outcome.json                  the decision of the current attempt, and the endpoint revision it was promoted to
    <checkpoint>-results.json     next to a promoted checkpoint: its measurements, for its card

and the runner persists both. The runner limits how many runs are active at once; other jobs wait.
"""

import fcntl
import json
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eyrie_api.artifacts import read_report, write_atomically, write_model
from eyrie_api.clock import Clock, utc_now
from eyrie_api.contract.prove import ProveReport
from eyrie_api.contract.reports import BenchmarkReport, TuneReport
from eyrie_api.contract.resolved import ResolvedJob
from eyrie_api.contract.stages import STAGES
from eyrie_api.contract.status import Job, JobStatus, Revision
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.database.endpoint_history import Histories
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.ingest import Ingest
from eyrie_api.database.jobs import MAX_PAGE, JobFilter, Jobs, LeaseLost
from eyrie_api.database.results import ResultFilter, Results
from eyrie_api.decisions.job_report import results_for_card
from eyrie_api.decisions.leaderboard import WITHOUT_DRAFTER, MeasuredCheckpoint, no_drafter
from eyrie_api.decisions.promotion import (
    comparable_suites,
    decide_job,
    on_suites,
    proven_speedup,
    proven_tau,
    summarize_decision,
    tuned_finals,
    without_drafter,
)
from eyrie_api.errors import EyrieError, NotFound, Transient
from eyrie_api.planning.reuse import jobs_with_answers
from eyrie_api.planning.spec_policy import require_rules
from eyrie_api.settings import Settings
from eyrie_operator.conditions import is_over, observe
from eyrie_operator.jobs.observation import (
    OUTCOME_FILE,
    AttemptOutcome,
    changes,
    observe_serving,
    observe_stages,
    outcome_of,
    read_outcome,
)
from eyrie_operator.jobs.reconcile import (
    ActionPlan,
    Decide,
    ObservedJob,
    ObservedServing,
    StartRun,
    StopRun,
    plan_failure,
    reconcile,
)
from eyrie_pipelines.runner import JobFile, ObservedRun, Runner
from eyrie_pipelines.stage_specs import benchmarked, find_checkpoint, train_reports
from eyrie_workers.catalog import CATALOG, stage_dir

log = logging.getLogger(__name__)

_MAX_STEPS = 8
"""Steps in one call while each leads to the next: decide, promote, wait."""


class Driver:
    """Drives jobs. Any number of drivers may share a database: a job's lease admits one at a time."""

    def __init__(self, settings: Settings, database: Database, runner: Runner, clock: Clock = utc_now) -> None:
        self._settings, self._runner, self._clock = settings, runner, clock
        self._jobs, self._ingest = Jobs(database, clock), Ingest(database, clock)
        self._results, self._endpoints = Results(database, clock), Endpoints(database, clock)
        self._histories = Histories(database, clock)
        self._owner = f"driver-{os.getpid()}-{secrets.token_hex(4)}"

    def advance(self, job_id: str) -> None:
        """One short step of one job. Does nothing for a job that has ended, was deleted, or is leased by another
        driver."""
        owner = f"{self._owner}-{secrets.token_hex(4)}"  # race: two threads of one process must not share a lease
        if not self._jobs.take_lease(job_id, owner, self._settings.lease_ttl_s):
            return
        try:
            for _ in range(_MAX_STEPS):
                job = self._jobs.get(job_id)
                seen, plan = self._plan(job)
                # After the observation: the events a stage wrote before its end are then stored before the end itself.
                self._ingest_events(job_id)
                moved = self._execute(job, seen, plan, owner)
                # The lease may have expired during a long action; another driver may hold it now.
                if not moved or not self._jobs.renew_lease(job_id, owner, self._settings.lease_ttl_s):
                    return
        except (NotFound, LeaseLost) as reason:
            log.info("job %s: %s", job_id, reason)
        except Transient as reason:
            log.warning("job %s: %s", job_id, reason)
            job = self._jobs.get(job_id)
            self._record_transient(job, job.status, reason, owner)
        finally:
            self._jobs.release_lease(job_id, owner)

    def _execute(self, job: Job, seen: ObservedJob, plan: ActionPlan, owner: str) -> bool:
        """Apply a plan and store its status; returns whether another step should follow at once."""
        try:
            for action in plan.actions:  # each is idempotent: after a crash it is applied again
                if isinstance(action, StartRun):
                    self._start(action, job, seen)
                elif isinstance(action, StopRun):
                    self._runner.stop(job.id)
                elif isinstance(action, Decide):
                    self._decide(job, plan.status.attempt)
                else:
                    self._promote(job, plan.status, action.endpoint)
        except Transient as reason:
            self._record_transient(job, plan.status, reason, owner)
            return False
        except EyrieError as error:
            plan = plan_failure(seen, error, self._clock())
        self._jobs.save_status(job.id, plan.status, owner, changes(job.status, plan.status))
        return bool(plan.actions) and not is_over(plan.status.conditions)

    def _record_transient(self, job: Job, status: JobStatus, reason: Transient, owner: str) -> None:
        """Show a transient error in the conditions; its event is recorded once, however often it occurs."""
        conditions = observe(status.conditions, "Accepted", "True", reason.reason, str(reason), self._clock())
        after = status.model_copy(update={"conditions": conditions})
        self._jobs.save_status(job.id, after, owner, changes(job.status, after))

    # Observation.

    def _plan(self, job: Job) -> tuple[ObservedJob, ActionPlan]:
        run = ObservedRun()
        try:
            run = self._runner.observe(job.id)
            again = job.status.restarted_from
            if again is not None and run.attempt != job.status.attempt and not run.alive:
                with self._starting():  # remove what stages of an earlier attempt have left
                    # Race: a driver whose lease has expired may have started the run since.
                    if self._runner.observe(job.id).run_id == run.run_id:
                        self._runner.discard(job.id, STAGES[STAGES.index(again):])
            seen = self._observe(job, run)
        except (NotFound, Transient):
            raise
        except EyrieError as error:  # the job's files cannot be read: the user has to act
            unreadable = ObservedJob(attempt=job.status.attempt, previous=job.status, run=run)
            if run.alive:  # a job that has ended is not looked at again: nothing would stop its run
                return unreadable, ActionPlan((StopRun(),), job.status)
            return unreadable, plan_failure(unreadable, error, self._clock())
        return seen, reconcile(job.spec, seen, self._clock())

    def _observe(self, job: Job, run: ObservedRun) -> ObservedJob:
        job_dir, resolved = self._settings.job_dir(job.id), self._jobs.resolved(job.id)
        intent = self._jobs.intent(job.id)
        # Race: refreshed after `run` was observed, so that the files of a run observed as ended are complete.
        self._runner.refresh(job.id, resolved)
        outcome = read_outcome(job_dir, intent.attempt, job.status)
        tuned = self._results.leaderboard(ResultFilter(job_id=job.id, tuned=True)) if outcome else ()
        # A tuned rival that was to be beaten is not the job's own result; one that was selected is alone.
        best = sorted(tuned, key=lambda entry: entry.rival)
        serving = ObservedServing()
        if outcome is not None and outcome.endpoint is not None and outcome.revision is not None:
            serving = observe_serving(self._endpoints.get(outcome.endpoint), outcome.revision)
        return ObservedJob(
            attempt=intent.attempt, previous=job.status, cancel_requested=intent.cancel_requested,
            delete_requested=intent.delete_requested, has_capacity=self._has_capacity(job),
            run=run, stages=tuple(observe_stages(job, resolved, job_dir)),
            waiting_pods=tuple(pod for pod in self._jobs.waiting_pods(job.id) if pod.run_id == run.run_id),
            decision=outcome.decision if outcome else None, best=best[0] if best else None, serving=serving)

    def _has_capacity(self, job: Job) -> bool:
        """Whether a run of this job may start now."""
        running = self._jobs.count_by_phase().get("Running", 0) - (job.status.phase == "Running")
        return self._runner.has_capacity(job.id, self._jobs.unfinished(), running)

    # Actions.

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """Starts are serialised on one machine."""
        self._settings.home.mkdir(parents=True, exist_ok=True)
        with (self._settings.home / "starting.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _start(self, action: StartRun, job: Job, seen: ObservedJob) -> None:
        with self._starting():  # two drivers must not both take the last free slot
            # Race: while this driver waited, one whose lease has expired may have started the run.
            if self._runner.observe(job.id).run_id != seen.run.run_id or not self._has_capacity(job):
                return
            resolved, serve = self._jobs.resolved(job.id), job.spec.serve
            require_rules(job.id, resolved)
            # What the endpoint serves with, for comparison in prove; None when it does not draft.
            active = self._active(serve.endpoint, resolved.target) if serve.enabled else None
            incumbent = None if active is None or active.use.setting.method == "off" else active.use
            wanted = JobFilter(project=self._jobs.project_of(job.id), target=job.spec.target.model)
            others = [other for other in self._jobs.list(wanted, limit=MAX_PAGE).items if other.id != job.id]
            self._runner.start(JobFile(
                id=job.id, resolved=resolved, attempt=action.attempt, incumbent=incumbent,
                reuse=tuple(earlier.id for earlier in jobs_with_answers(job.spec, others))))

    def _decide(self, job: Job, attempt: int) -> None:
        job_dir, resolved = self._settings.job_dir(job.id), self._jobs.resolved(job.id)
        tuned = read_report(stage_dir(job_dir, "tune"), TuneReport)
        finished = (stage.manifest.report for stage in observe_stages(job, resolved, job_dir) if stage.manifest)
        benchmarks = [report for report in finished if isinstance(report, BenchmarkReport)]
        for report in benchmarks:
            if report.dropped is None:
                self._record(job.id, resolved, report, tuned=False)
        for named in job.spec.rivals:
            if named.method == "off":
                baseline = next(report for report in benchmarks if report.dropped is None)
                self._record(job.id, resolved, no_drafter(named.checkpoint, baseline), tuned=False)
        final, rival = tuned_finals(tuned, benchmarks)
        self._record(job.id, resolved, final, tuned=True)
        if rival is not None:
            self._record(job.id, resolved, rival, tuned=True)
        proof = read_report(stage_dir(job_dir, "prove"), ProveReport)
        decision = decide_job(job.spec, benchmarks, tuned, proof, self._incumbent(job))
        self._histories.record_decision(job.spec.serve.endpoint, decision, job_id=job.id, attempt=attempt)
        self._write_outcome(job.id, AttemptOutcome(attempt=attempt, decision=decision))

    def _write_outcome(self, job_id: str, outcome: AttemptOutcome) -> None:
        write_model(self._settings.job_dir(job_id) / OUTCOME_FILE, outcome)
        self._runner.persist(job_id, OUTCOME_FILE)

    def _record(self, job_id: str, job: ResolvedJob, report: BenchmarkReport, *, tuned: bool) -> None:
        families = {candidate.name: candidate.drafter.family for candidate in job.candidates}
        family = report.family or families[report.candidate]
        measured = MeasuredCheckpoint(job_id, family, job.target.model, tuned, report)
        directory = "" if family in WITHOUT_DRAFTER else self._drafter_dir(job_id, job, report.checkpoint)
        self._results.record(measured, directory)

    def _drafter_dir(self, job_id: str, job: ResolvedJob, checkpoint: str) -> str:
        job_dir = self._settings.job_dir(job_id)
        return str(job_dir / find_checkpoint(benchmarked(job, train_reports(job, job_dir)), checkpoint).path)

    def _incumbent(self, job: Job) -> BenchmarkReport | None:
        """The report of the drafter that the job's endpoint serves, on the prompts of this job; None when it serves
        without one, or not at all, or was measured on other prompts."""
        active = self._active(job.spec.serve.endpoint)
        if active is None or active.job_id is None or active.checkpoint is None or active.use.drafter_dir is None:
            return None
        try:
            report = self._results.find(active.job_id, active.checkpoint).measured.report
            return on_suites(report, comparable_suites(job.spec, self._jobs.get(active.job_id).spec))
        except NotFound:  # its job was deleted, and its results with it
            return None

    def _active(self, endpoint: str, target: TargetSpec | None = None) -> Revision | None:
        """The revision an endpoint serves; None when there is none, or when it serves another target than `target`."""
        try:
            serving = self._endpoints.get(endpoint)
        except NotFound:
            return None
        if target is not None and serving.target != target.model:
            return None
        return serving.revision(serving.active_revision)

    def _promote(self, job: Job, status: JobStatus, name: str) -> None:
        job_dir, resolved = self._settings.job_dir(job.id), self._jobs.resolved(job.id)
        outcome = outcome_of(status, status.attempt)
        assert outcome is not None, "promote follows decide"
        model = resolved.target.model
        # Clients send this name in each request: the last part of a path is shorter than the path.
        name_for_clients = Path(model).name if Path(model).is_absolute() else model
        created = self._endpoints.create(name, resolved.target, resolved.endpoint_serve, name_for_clients,
                                         num_replicas=resolved.demand.num_replicas, reads=resolved.endpoint_rules)
        revision = created.revisions[0].number
        if outcome.decision.promote:
            tuned = read_report(stage_dir(job_dir, "tune"), TuneReport)
            proof = read_report(stage_dir(job_dir, "prove"), ProveReport)
            drafter = Path(self._drafter_dir(job.id, resolved, tuned.checkpoint))
            # Next to the checkpoint, not inside: the manifest holds the digests of the checkpoint's files.
            results_file = drafter.with_name(f"{drafter.name}-results.json")
            results = results_for_card(tuned=tuned.final, operating_map=tuned.map, proof=proof)
            write_atomically(results_file, json.dumps(results, indent=2) + "\n")
            self._runner.persist(job.id, results_file.relative_to(job_dir).as_posix())
            # N-gram speculation reads no drafter: the engine must not load one.
            use = proof.use.model_copy(update={"drafter_dir": None if without_drafter(proof) else str(drafter)})
            revision = self._endpoints.propose(
                name, job_id=job.id, checkpoint=tuned.checkpoint, use=use, reason=summarize_decision(outcome.decision),
                speedup=proven_speedup(tuned.final, proof), tau=proven_tau(tuned.final, proof),
                once=f"proposed/{job.id}/{outcome.attempt}").number
        self._write_outcome(job.id, outcome.model_copy(update={"endpoint": name, "revision": revision}))

    def _ingest_events(self, job_id: str) -> None:
        """Store the events that running stages have written."""
        job_dir = self._settings.job_dir(job_id)
        for stage in STAGES:
            root = stage_dir(job_dir, stage)
            keys = sorted(path.parent.name for path in root.glob("*/events.jsonl")) if CATALOG[stage].keyed_by else [""]
            for key in keys:
                self._ingest.read(job_id, stage, key, stage_dir(job_dir, stage, key) / "events.jsonl")

    def stop_runs(self) -> None:
        """Stop every run; the next control plane resumes them. Their jobs keep their state."""
        for job_id in self._jobs.unfinished():
            self._runner.pause(job_id)
