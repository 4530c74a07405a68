"""The interface of a runner, and what it starts. A run is a process group of this machine, or a Kubeflow run.

A job has at most one run at a time. Its driver (`eyrie_operator.jobs.driver`) uses runs through this interface only: it
starts, observes and stops them, and reads the files of their stages in the job's directory `<home>/jobs/<id>`. Where
stages run elsewhere, `refresh` downloads the small files of that directory first, and `persist` uploads the driver's
own. Every method is idempotent, and consecutive calls may come from different processes.

`UnavailableRunner` is that of a worker without a runtime: no cluster profile, and an image without the stage programs.
A chart installed before Kubeflow is in this state: the API responds and accepts jobs, and each job fails at once with
the reason RuntimeUnavailable and the setting that is missing.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol

from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.resolved import ResolvedJob
from eyrie_api.contract.stages import StageName
from eyrie_api.contract.tuning import DrafterUse
from eyrie_api.errors import Permanent

STAGE_LABEL, PROFILE_LABEL = "eyrie.dev/stage", "eyrie.dev/profile"
"""On the pods of a cluster's runs: the stage that the pod runs, or that waits for the pod; and the hardware profile
that it measures. The operator recognises pods without a node by them."""

RUN_LABEL = "pipeline/runid"
"""Set by Kubeflow Pipelines on all pods of a run: the run's id."""

JOB_FILE = "job.json"
_NAMED_CANDIDATES = 16
"""In a run's parameters."""

RunState = Literal["none", "running", "succeeded", "failed", "gone"]
"""none: never started. gone: ended without a result (killed, its machine went down, deleted); it may be resumed."""


class JobFile(Frozen):
    """`job.json` in the job directory: the input of every task of the pipeline."""

    id: str
    resolved: ResolvedJob
    attempt: int = 1
    incumbent: DrafterUse | None = None
    """The drafter that serves at the job's endpoint, if any: read once, when the attempt first started."""

    reuse: tuple[str, ...] = ()
    """Earlier jobs whose answers and states may be reused (`planning.reuse`): chosen once, when the job first
    started."""

    @property
    def spec(self) -> JobSpec:
        """The document with every default filled in."""
        return self.resolved.spec

    def after(self, before: "JobFile | None") -> "JobFile":
        """What `job.json` contains after this start. Within one attempt it does not change. `reuse` does not change in
        later attempts either: it is part of the spec of regenerate, which may have finished."""
        if before is None or before.id != self.id:
            return self
        if (before.resolved, before.attempt) == (self.resolved, self.attempt):
            return before
        return self.model_copy(update={"reuse": before.reuse})

    def run_parameters(self) -> dict[str, str]:
        """What the parameters of a run in Kubeflow say of its job, for people: nothing reads them."""
        target, data = self.spec.target, self.spec.data
        sources = (f"{name}: {source.path}" for name, source in zip(data.source_names, data.sources, strict=True))
        names = [candidate.name for candidate in self.resolved.candidates] or [
            drafter.checkpoint for drafter in self.spec.drafters]
        more = f" and {len(names) - _NAMED_CANDIDATES} more" if len(names) > _NAMED_CANDIDATES else ""
        return {
            "target": f"{target.model}@{target.revision}" if target.revision else target.model,
            "data": f"{', '.join(sources)}; at most {data.max_conversations} conversations" if self.spec.trains
                    else "none: drafters that were trained elsewhere",
            "sweep": f"{len(names)} {'candidate' if len(names) == 1 else 'candidates'}: "
                     f"{', '.join(names[:_NAMED_CANDIDATES])}{more}"}


@dataclass(frozen=True)
class RunFailed:
    stage: StageName | None
    key: str
    reason: str
    message: str
    hint: str = ""


@dataclass(frozen=True)
class ObservedRun:
    """The latest run of a job."""

    state: RunState = "none"
    attempt: int = 0
    starts: int = 0
    """How often this attempt was started without progress since: more than once when a run was gone."""

    run_id: str | None = None
    failure: RunFailed | None = None
    leftovers: bool = False
    """It has a result, but processes of its group, or tasks other than the failed one, are still running."""

    since: datetime | None = None
    """The first of these starts; None where the runner does not know."""

    started_at: datetime | None = None
    """The last of them."""

    last_words: str = ""
    """Of a run that is gone: the end of its log, where there is one on this machine."""

    @property
    def alive(self) -> bool:
        return self.state == "running" or self.leftovers


class Runner(Protocol):
    """Starts, observes and stops the runs of jobs. Raises Transient for errors that may be temporary. What returns None
    does nothing by default."""

    def refresh(self, job_id: str, job: ResolvedJob) -> None:
        """Download the events, logs and manifests of the job's stages into its directory."""
        return

    def observe(self, job_id: str) -> ObservedRun:
        """The state of the job's latest run."""

    def start(self, job: JobFile) -> None:
        """Start a run of the job's attempt, unless one of this attempt is running. `incumbent` is fixed at the first
        start of an attempt, `reuse` at the first start of the job."""

    def discard(self, job_id: str, stages: Collection[StageName]) -> None:
        """Remove the output of stages of a job of which nothing runs."""
        return

    def stop(self, job_id: str) -> None:
        """Begin to stop the latest run with everything it started; `observe` reports when it has ended."""
        return

    def pause(self, job_id: str) -> None:
        """The control plane shuts down: stop a run that depends on it, so that the next control plane resumes it."""
        return

    def persist(self, job_id: str, name: str) -> None:
        """Upload the file `name` of the job's directory, so that it survives the loss of this machine's disk."""
        return

    def delete(self, job_id: str) -> None:
        """The job was deleted: stop its run, and delete its files outside the job's directory."""
        return

    def has_capacity(self, job_id: str, live: tuple[str, ...], num_running: int) -> bool:
        """Whether the job may start a run now.

        live          jobs that have not ended, oldest first
        num_running   jobs whose database row says that their run is in progress
        """


class RuntimeUnavailable(Permanent):
    """Neither a cluster nor this machine can run a stage."""


class UnavailableRunner(Runner):
    """Starts nothing; see `Runner`."""

    def observe(self, job_id: str) -> ObservedRun:
        return ObservedRun()

    def start(self, job: JobFile) -> None:
        """Raises RuntimeUnavailable."""
        raise RuntimeUnavailable(
            "this installation has no cluster to run jobs on, and its control plane has no stage programs",
            "configure Kubeflow Pipelines (EYRIE_CLUSTER_PROFILE; in the chart: cluster.kubeflow.url), "
            "then retry the job")

    def has_capacity(self, job_id: str, live: tuple[str, ...], num_running: int) -> bool:
        """See `Runner`. Always true: the job then fails at once, with the reason, instead of waiting."""
        return True
