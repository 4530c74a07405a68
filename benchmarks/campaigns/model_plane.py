"""A simulated control plane: jobs and one endpoint, driven by the real reconcilers of `jobs` and `endpoints`.

The world holds what rows, files and processes hold. Between two steps it changes by itself: runs progress, fail and
vanish, engines become healthy, die and lose requests, users cancel, retry, roll back and switch off. A step may be
killed before any of its actions and before its status is stored, as `jobs.driver` and `embedded.endpoints` may be. Each
rule that must hold in every state is an `expect`; `settle` then lets the world do its part and expects everything to
end.
"""

import random
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from benchmarks.campaigns.model_endpoint_row import TAU, EndpointRow
from eyrie_api.contract.data import DataSource, DataSpec
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.promotion import CanarySpec
from eyrie_api.contract.reports import CaptureReport, LayerChoice, PromotionDecision
from eyrie_api.contract.serving import ServeSpec
from eyrie_api.contract.stages import JOB_STAGES, Manifest
from eyrie_api.contract.status import Endpoint, JobStatus
from eyrie_api.contract.targets import TargetSpec
from eyrie_operator.conditions import is_over, is_true
from eyrie_operator.endpoints import plan as act
from eyrie_operator.endpoints.engine_metrics import EngineCounters
from eyrie_operator.endpoints.plan import plan_endpoint
from eyrie_operator.jobs.observation import changes, observe_serving
from eyrie_operator.jobs.reconcile import (
    Decide,
    ObservedJob,
    ObservedServing,
    ObservedStage,
    Promote,
    StartRun,
    StopRun,
    reconcile,
)
from eyrie_pipelines.runner import ObservedRun, RunFailed

START = datetime(2026, 1, 2, tzinfo=UTC)
SPEC = JobSpec(target=TargetSpec(model="quickstart"), data=DataSpec(sources=(DataSource(path="quickstart"),)))
UNSERVED = SPEC.model_copy(update={"serve": ServeSpec(enabled=False)})
POLICY = act.ServePolicy(health_timeout_s=60.0, canary=CanarySpec(shares=(0.1, 0.5), min_requests=5, max_step_s=60.0))
VERDICTS = {verdict: PromotionDecision.model_validate({"promote": verdict == "promote", "verdict": verdict,
                                                       "reasons": ["r"]})
            for verdict in ("promote", "keep-incumbent", "no-drafter", "awaits-approval")}
_REPORT = CaptureReport(source="reference", rows=1, tokens=1, supervised_tokens=1, bytes=1, bytes_per_token=1.0,
                        shards=1, layers=LayerChoice(aux_layers=(1,), reason="r"), hidden_size=1, codec="float32",
                        seconds=1.0, tokens_per_s=1.0)
MANIFESTS = {stage: Manifest.model_validate({
    "stage": stage, "job_id": "j", "spec_digest": "sha256:" + "0" * 64, "code_version": "0",
    "started_at": START.isoformat(), "finished_at": START.isoformat(), "files": (), "report": _REPORT})
    for stage in JOB_STAGES}
_ENDS = ("Succeeded", "Cancelled", "LossDiverged", "RunKeepsDying")
MAX_LOOKS = 6
"""Plans of one step of an endpoint while each leads to the next, as in `embedded.endpoints`."""


class Killed(Exception):
    """The control plane was killed here."""


class RuleBroken(Exception):
    """A rule that must hold does not."""


def expect(held: bool, rule: str, **facts: Any) -> None:
    """Raise RuleBroken unless it holds."""
    if not held:
        raise RuleBroken(f"{rule}: {facts}")


@dataclass
class SimulatedJob:
    """Row, files and run of one job."""

    name: str
    spec: JobSpec
    verdict: PromotionDecision
    status: JobStatus = field(default_factory=JobStatus)
    attempt: int = 1
    cancel: bool = False
    run: ObservedRun = field(default_factory=ObservedRun)
    done: int = 0
    """Stages with a manifest; the next one is running while the run is."""

    decision: PromotionDecision | None = None
    revision: int | None = None
    """Of the outcome file: where this attempt was promoted to."""

    events: list[tuple[int, str, str | None]] = field(default_factory=list)
    """Attempt, reason, stage."""

    def stages(self) -> tuple[ObservedStage, ...]:
        """As the job's directory shows them."""
        begun = self.done + (self.run.state in ("running", "failed", "gone"))
        return tuple(ObservedStage(stage, started_at=START if number < begun else None,
                                   manifest=MANIFESTS[stage] if number < self.done else None)
                     for number, stage in enumerate(JOB_STAGES))


@dataclass
class SimulatedEngine:
    """Record and process of one engine."""

    identity: int
    state: str
    started_at: datetime
    starts: int
    alone: bool
    retiring_since: datetime | None = None
    has_url: bool = False
    rounds: float = 0.0
    tokens: float = 0.0
    window_since: datetime | None = None


@dataclass
class SimulatedRoute:
    """The route file: engines by identity, as a URL names one start of an engine."""

    revision: int
    engine: int
    since: datetime
    on_hold: bool = False
    canary: int | None = None
    share: float = 0.0
    answered: int = 0
    errors: int = 0


class PlaneWorld(EndpointRow):
    """Three jobs that promote to one endpoint on a machine with room for one run."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(START)
        self.rng = rng
        self.jobs = [SimulatedJob(f"job-{number}", UNSERVED if rng.random() < 0.2 else SPEC,
                                  VERDICTS[rng.choices(list(VERDICTS), (6, 1, 2, 1))[0]]) for number in range(3)]
        self.engines: dict[int, SimulatedEngine] = {}
        self.route: SimulatedRoute | None = None
        self.gateway = False
        self.room = True
        self.kill_chance = 0.05
        self.steps = self.kills = self.engines_started = 0

    # Steps of the control plane.

    def look(self) -> None:
        """One step of one job or of the endpoint, perhaps killed."""
        self.steps += 1
        try:
            if self.endpoint is not None and self.rng.random() < 0.5:
                self.look_at_endpoint()
            else:
                self.look_at_job(self.rng.choice(self.jobs))
        except Killed:
            self.kills += 1

    def _maybe_kill(self) -> None:
        if self.rng.random() < self.kill_chance:
            raise Killed

    def look_at_job(self, job: SimulatedJob) -> None:
        """As `jobs.driver` does it; an ended job is never leased."""
        if is_over(job.status.conditions) and job.status.attempt == job.attempt:
            return
        serving = ObservedServing()
        if job.revision is not None:
            assert self.endpoint is not None
            serving = observe_serving(self.endpoint, job.revision)
        plan = reconcile(job.spec, ObservedJob(
            attempt=job.attempt, previous=job.status, cancel_requested=job.cancel, run=job.run, stages=job.stages(),
            has_capacity=not any(other.run.alive for other in self.jobs if other is not job),
            decision=job.decision, serving=serving), self.now)
        for action in plan.actions:
            self._maybe_kill()
            self._act_on_job(job, action)
        self._maybe_kill()
        job.events += [(job.attempt, event.reason, event.stage) for event in changes(job.status, plan.status)]
        job.status = plan.status

    def _act_on_job(self, job: SimulatedJob, action: object) -> None:
        if isinstance(action, StartRun):
            expect(not job.run.alive, "a job has one run at a time", job=job.name)
            starts = job.run.starts + 1 if job.run.attempt == action.attempt else 1
            job.run = ObservedRun("running", action.attempt, starts, f"{job.name}/{action.attempt}/{starts}")
        elif isinstance(action, StopRun):
            job.run = replace(job.run, state="gone" if job.run.state == "running" else job.run.state, leftovers=False)
        elif isinstance(action, Decide):
            expect(job.decision is None, "an attempt is decided once", job=job.name)
            expect(job.done == len(JOB_STAGES), "a decision follows the last stage", job=job.name)
            job.decision = job.verdict
        elif isinstance(action, Promote):
            expect(job.revision is None, "an attempt is promoted once", job=job.name)
            self.create_endpoint()
            revision = 1
            if job.decision is not None and job.decision.promote:
                revision = self.propose(job.name, f"proposed/{job.name}/{job.attempt}")
            self._maybe_kill()
            job.revision = revision

    def look_at_endpoint(self) -> None:
        """As `embedded.endpoints` does it."""
        for _ in range(MAX_LOOKS):
            assert self.endpoint is not None
            plan = plan_endpoint(self.endpoint, POLICY, self.observe(), self.now)
            for action in plan.actions:
                self._maybe_kill()
                self._act_on_endpoint(action)
            if not plan.actions:
                break
        self._check_serving()

    def observe(self) -> act.ObservedEndpoint:
        """What the endpoint's files and processes show."""
        assert self.endpoint is not None
        engines = tuple(act.ObservedEngine(
            revision, engine.state, engine.started_at, engine.starts, engine.retiring_since,  # type: ignore[arg-type]
            window=EngineCounters(engine.rounds, engine.tokens), window_since=engine.window_since, alone=engine.alone)
            for revision, engine in self.engines.items())
        route = self.route
        routed = None
        if route is not None and not route.on_hold and self._routed_engine() is not None:
            routed = route.revision
        canary = None
        if route is not None and route.canary is not None:
            canary = act.ObservedCanary(route.canary, route.share, route.since, route.answered, route.errors)
        candidate = self.endpoint.candidate_revision
        starting = any(one.state != "dead" for one in self.engines.values()) and candidate not in self.engines
        return act.ObservedEndpoint(self.gateway, routed, engines, canary,
                                    no_room="no memory" if not self.room and candidate is not None and starting else "")

    def _routed_engine(self) -> SimulatedEngine | None:
        if self.route is None:
            return None
        engine = self.engines.get(self.route.revision)
        return engine if engine is not None and engine.identity == self.route.engine else None

    def _act_on_endpoint(self, action: act.EndpointAction) -> None:
        if isinstance(action, act.StartGateway | act.StopGateway):
            self.gateway = isinstance(action, act.StartGateway)
        elif isinstance(action, act.StartEngine):
            self._start(action)
        elif isinstance(action, act.AnnounceGap):
            if self.route is not None:
                self.route = replace(self.route, on_hold=True, canary=None)
        elif isinstance(action, act.Route | act.ShareRoute):
            self._lead(action)
        elif isinstance(action, act.EndEngine) and action.how == "retire":
            if action.revision in self.engines:
                self._check_unused(action.revision, "retired")
                self.engines[action.revision].retiring_since = self.now
        elif isinstance(action, act.EndEngine) and action.how == "kill":
            self._check_unused(action.revision, "killed")
            self.engines[action.revision].state = "dead"
        elif isinstance(action, act.EndEngine) and action.how == "delete":
            expect(self.engines[action.revision].state == "dead", "only a dead engine's record is deleted")
            del self.engines[action.revision]
        elif isinstance(action, act.CloseWindow):
            engine = self.engines[action.revision]
            engine.rounds, engine.tokens, engine.window_since = 0.0, 0.0, self.now
        else:
            self._record(action)

    def _start(self, action: act.StartEngine) -> None:
        known = self.engines.get(action.revision)
        if known is not None and known.state != "dead":
            return
        living = [one for one in self.engines.values() if one.state != "dead"]
        expect(self.room or not living, "without room an engine starts alone", revision=action.revision,
               living=len(living))
        self.engines_started += 1
        self.engines[action.revision] = SimulatedEngine(self.engines_started, "starting", self.now, action.starts,
                                                        action.alone)

    def _lead(self, action: act.Route | act.ShareRoute) -> None:
        main = action.revision if isinstance(action, act.Route) else action.serving
        for revision in {main, action.revision}:
            expect(revision in self.engines and self.engines[revision].has_url,
                   "the route leads to engines that have answered", revision=revision)
        share = action.share if isinstance(action, act.ShareRoute) else 0.0
        self.route = SimulatedRoute(main, self.engines[main].identity, self.now,
                                    canary=action.revision if share else None, share=share)
        if share:
            self._change(action.revision, state="canary")

    def _check_unused(self, revision: int, verb: str) -> None:
        """An engine is stopped only when no request is led to it, save when the endpoint is off."""
        assert self.endpoint is not None
        led = self.route is not None and not self.route.on_hold and revision in (self.route.revision, self.route.canary)
        current = self.engines[revision].identity == (self.route.engine if self.route is not None else None)
        expect(not (led and current) or self.endpoint.desired == "off", f"no engine is {verb} while requests reach it",
               revision=revision)

    def _record(self, action: act.EndpointAction) -> None:
        if isinstance(action, act.Activate):
            routed = self.route is not None and self.route.revision == action.revision
            expect(routed, "a revision is activated when the route leads to it", revision=action.revision)
        self.record(action)

    # What the world does.

    def change(self) -> None:
        """One thing happens that the control plane did not cause."""
        rng = self.rng
        self.now += timedelta(seconds=rng.choice((0.5, 1.0, 5.0, 40.0)))
        kind = rng.randrange(10)
        if kind < 5:
            self._change_run(rng.choice(self.jobs))
        elif kind < 6:
            self._change_request(rng.choice(self.jobs))
        elif self.endpoint is not None:
            self._change_serving()

    def _change_run(self, job: SimulatedJob) -> None:
        if job.run.state != "running":
            return
        end = self.rng.random()
        if end < 0.04:
            job.run = replace(job.run, state="gone", leftovers=self.rng.random() < 0.5)
        elif end < 0.06:
            failure = RunFailed(JOB_STAGES[min(job.done, len(JOB_STAGES) - 1)], "", "LossDiverged", "nan", "lower it")
            job.run = replace(job.run, state="failed", failure=failure, leftovers=self.rng.random() < 0.3)
        elif job.done < len(JOB_STAGES):
            job.done += 1
        else:
            job.run = replace(job.run, state="succeeded")

    def _change_request(self, job: SimulatedJob) -> None:
        over = is_over(job.status.conditions)
        if not over:
            job.cancel = job.cancel or self.rng.random() < 0.1
        elif not is_true(job.status.conditions, "Succeeded") and self.rng.random() < 0.5:  # as `Jobs.retry` does it
            kept = tuple(one for one in job.status.conditions if one.type not in ("Succeeded", "Failed", "Cancelled"))
            job.attempt += 1
            job.status = job.status.model_copy(update={"attempt": job.attempt, "conditions": kept, "finished_at": None,
                                                       "run_id": None})
            job.cancel, job.decision, job.revision = False, None, None

    def _change_serving(self) -> None:
        assert self.endpoint is not None
        kind = self.rng.randrange(12)
        engine = self.rng.choice(list(self.engines.values())) if self.engines else None
        if kind < 6 and engine is not None:
            self._progress(engine, fails=self.rng.random() < 0.12)
        elif kind < 8 and self.route is not None and self.route.canary is not None:
            self.route.answered += self.rng.randrange(8)
            self.route.errors += self.rng.random() < 0.1
        elif kind == 8:
            self.gateway = False
        elif kind == 9:
            self.room = self.rng.random() < 0.7 or sum(one.state != "dead" for one in self.engines.values()) > 1
        elif kind == 10 and self.rng.random() < 0.3:
            self.roll_back("RolledBack")
        elif kind == 11 and self.rng.random() < 0.3:
            self.endpoint = self.endpoint.model_copy(update={"desired": self.rng.choice(("on", "off"))})

    def _progress(self, engine: SimulatedEngine, *, fails: bool) -> None:
        if engine.state == "dead":
            return
        if fails or (engine.retiring_since is not None and self.rng.random() < 0.7):
            engine.state = "dead"
        elif engine.state == "starting":
            engine.state, engine.has_url, engine.window_since = "healthy", True, self.now
        else:
            rounds = float(self.rng.randrange(300))
            engine.rounds += rounds
            engine.tokens += rounds * TAU * self.rng.choices((1.0, 0.2), (8, 1))[0]

    # Rules.

    def _check_serving(self) -> None:
        """After a complete step of the endpoint: what can serve is routed to."""
        assert self.endpoint is not None
        if self.endpoint.desired == "off":
            expect(not self.gateway, "off is off")
            return
        active = self.endpoint.active_revision
        serving = None if active is None else self.engines.get(active)
        if serving is not None and serving.state == "healthy" and serving.retiring_since is None:
            routed = self._routed_engine()
            expect(self.gateway and routed is not None and self.route is not None and not self.route.on_hold,
                   "requests reach a healthy engine", active=active, engines=self.engines, route=self.route)

    def check(self) -> None:
        """The rules of every state."""
        for job in self.jobs:
            ends = [kind for kind in ("Succeeded", "Failed", "Cancelled") if is_true(job.status.conditions, kind)]
            expect(len(ends) <= 1, "a job has one end", job=job.name, ends=ends)
            expect(ends != ["Cancelled"] or (job.cancel and not job.run.alive), "cancelled: asked for, nothing runs",
                   job=job.name)
        expect(sum(job.run.state == "running" for job in self.jobs) <= 1, "one run where there is room for one")
        if self.endpoint is not None:
            states = [one.number for one in self.endpoint.revisions if one.state == "active"]
            expect(states in ([], [self.endpoint.active_revision]), "one revision is active", states=states)

    def settle(self) -> None:
        """The world does its part: everything comes to an end, once, and leaves nothing behind."""
        self.kill_chance, self.room = 0.0, True
        for _ in range(60):
            self.now += timedelta(seconds=70)
            for job in self.jobs:
                if job.run.state == "running":
                    job.done = len(JOB_STAGES)
                    job.run = replace(job.run, state="succeeded")
                self.look_at_job(job)
            for engine in self.engines.values():
                if engine.retiring_since is not None:
                    engine.state = "dead"
                elif engine.state == "starting":
                    engine.state, engine.has_url, engine.window_since = "healthy", True, self.now
            if self.endpoint is not None:
                self.look_at_endpoint()
            self.check()
        self._check_jobs_settled()
        if self.endpoint is not None:
            self._check_endpoint_settled(self.endpoint)

    def _check_jobs_settled(self) -> None:
        for job in self.jobs:
            expect(is_over(job.status.conditions), "each accepted job ends", job=job.name, status=job.status)
            expect(not job.run.alive, "no run outlives its job", job=job.name, run=job.run)
            for attempt in range(1, job.attempt + 1):
                reported = [reason for at, reason, stage in job.events if at == attempt and stage is None]
                ends = [reason for reason in reported if reason in _ENDS]
                expect(len(ends) <= 1, "an attempt's end is reported once", job=job.name, events=reported)
            finished = [stage for _, reason, stage in job.events if reason == "StageFinished"]
            expect(sorted(finished) == sorted(JOB_STAGES[:job.done]), "each finished stage is reported once",  # type: ignore[type-var]
                   job=job.name, finished=finished, done=job.done)
            revisions = self.endpoint.revisions if self.endpoint is not None else ()
            served = [one.number for one in revisions if one.job_id == job.name]
            expect(len(served) <= job.attempt, "an attempt is promoted at most once", job=job.name,
                   attempts=job.attempt, revisions=served)

    def _check_endpoint_settled(self, endpoint: Endpoint) -> None:
        living = [revision for revision, engine in self.engines.items() if engine.state != "dead"]
        if endpoint.desired == "off":
            expect(not living and not self.gateway, "an endpoint that is off leaves no process", living=living)
            return
        expect(endpoint.candidate_revision is None, "each candidate is activated or rejected", endpoint=endpoint)
        if endpoint.active_revision is None:
            expect(endpoint.revisions[-1].checkpoint is None and not living,
                   "without a drafter that becomes healthy the target alone is tried", endpoint=endpoint)
            return
        expect(living == [endpoint.active_revision], "no engine is left but the active one", living=living,
               active=endpoint.active_revision)
        expect(self.gateway and self._routed_engine() is not None, "the route leads to the active engine")
