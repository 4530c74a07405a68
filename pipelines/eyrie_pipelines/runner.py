"""The interface of a runner. A run is a process group of this machine, or a Kubeflow run.

A job has at most one run at a time. Its driver (`eyrie_operator.jobs.driver`) uses runs through this interface only: it
starts, observes and stops them, and reads the files of their stages in the job's directory `<home>/jobs/<id>`. Where
stages run elsewhere, `refresh` downloads the small files of that directory first, and `persist` uploads the driver's
own. Every method is idempotent, and consecutive calls may come from different processes.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from eyrie_api.v1alpha1.job import JobSpec
from eyrie_api.v1alpha1.stages import StageName
from eyrie_api.v1alpha1.tuning import DrafterUse

STAGE_LABEL, PROFILE_LABEL = "eyrie.dev/stage", "eyrie.dev/profile"
"""On the pods of a cluster's runs: the stage that the pod runs, or that waits for the pod; and the hardware profile
that it measures. The operator recognises pods without a node by them."""

RUN_LABEL = "pipeline/runid"
"""Set by Kubeflow Pipelines on all pods of a run: the run's id."""

RunState = Literal["none", "running", "succeeded", "failed", "gone"]
"""none: never started. gone: ended without a result (killed, its machine went down, deleted); it may be resumed."""


@dataclass(frozen=True)
class RunFailed:
    """The stage that failed, and why."""

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
    """How often this attempt was started: more than once when a run was gone."""

    run_id: str | None = None
    failure: RunFailed | None = None
    leftovers: bool = False
    """It has a result, but processes of its group, or tasks other than the failed one, are still running."""

    last_words: str = ""
    """Of a run that is gone: the end of its log, where there is one on this machine."""

    @property
    def alive(self) -> bool:
        return self.state == "running" or self.leftovers


class Runner(Protocol):
    """Starts, observes and stops the runs of jobs. Raises Transient for errors that may be temporary."""

    def refresh(self, job_id: str, spec: JobSpec) -> None:
        """Download the events, logs and manifests of the job's stages into its directory."""

    def observe(self, job_id: str) -> ObservedRun:
        """The state of the job's latest run."""

    def start(self, job_id: str, spec: JobSpec, attempt: int, incumbent: DrafterUse | None,
              reuse: tuple[str, ...] = ()) -> None:
        """Start a run, unless one of this attempt is running.

        incumbent   what serves at the job's endpoint; fixed at the first start of an attempt.
        reuse       earlier jobs whose answers may be reused; fixed at the first start of the job.
        """

    def stop(self, job_id: str) -> None:
        """Begin to stop the latest run with everything it started; `observe` reports when it has ended."""

    def pause(self, job_id: str) -> None:
        """The control plane shuts down: stop a run that depends on it, so that the next control plane resumes it."""

    def persist(self, job_id: str, name: str) -> None:
        """Upload the file `name` of the job's directory, so that it survives the loss of this machine's disk."""

    def delete(self, job_id: str) -> None:
        """The job was deleted: stop its run, and delete its files outside the job's directory."""

    def has_capacity(self, job_id: str, live: tuple[str, ...], num_running: int) -> bool:
        """Whether the job may start a run now.

        live          jobs that have not ended, oldest first
        num_running   jobs whose database row says that their run is in progress
        """
