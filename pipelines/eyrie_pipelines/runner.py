"""What drives a job asks of a runner, whatever a run is: a process group of this machine, or a Kubeflow run.

A job has at most one run at a time. Its driver (`eyrie_operator.driver`) knows runs only by what is here: it starts
them, looks at them, ends them, and reads what their stages left in the job's directory `<home>/jobs/<id>`. Where stages
work elsewhere, `refresh` brings the small files of that directory here first, and `keep` takes the driver's own there.
All of it may be called twice, and by another process than the time before.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from eyrie_api.v1alpha1.job import JobSpec
from eyrie_api.v1alpha1.stages import StageName
from eyrie_api.v1alpha1.tuning import DrafterUse

RunState = Literal["none", "running", "succeeded", "failed", "gone"]
"""none: never started. gone: it ended without a result (killed, its machine went down, deleted), and may go on."""


@dataclass(frozen=True)
class RunFailed:
    """The stage a run ended with, and why."""

    stage: StageName | None
    key: str
    reason: str
    message: str
    hint: str = ""


@dataclass(frozen=True)
class RunSeen:
    """The job's latest run."""

    state: RunState = "none"
    attempt: int = 0
    starts: int = 0
    """How often this attempt was started: more than once when a run was gone."""

    run_id: str | None = None
    failure: RunFailed | None = None
    leftovers: bool = False
    """Its result is known, but something of it still lives: processes of its group, boxes beside one that failed."""

    @property
    def alive(self) -> bool:
        return self.state == "running" or self.leftovers


class Runner(Protocol):
    """Starts, sees and ends the runs of jobs. Raises Transient for trouble that may pass."""

    def refresh(self, job_id: str, spec: JobSpec) -> None:
        """Bring what the job's stages have said and finished into its directory."""

    def observe(self, job_id: str) -> RunSeen:
        """The job's latest run."""

    def start(self, job_id: str, spec: JobSpec, attempt: int, incumbent: DrafterUse | None) -> None:
        """Start a run, unless one of this attempt lives.

        incumbent   what serves at the job's endpoint; the first start of an attempt decides it, a later one keeps it.
        """

    def stop(self, job_id: str) -> None:
        """End the latest run with everything it started; `observe` says when that is done."""

    def pause(self, job_id: str) -> None:
        """The control plane ends in order: end what cannot go on without it, so that it goes on with the next one."""

    def keep(self, job_id: str, name: str) -> None:
        """The file `name` of the job's directory was written here: it shall outlive this process's disk."""

    def forget(self, job_id: str) -> None:
        """The job was deleted: end its run, and remove what was kept of it outside its directory."""

    def has_place(self, job_id: str, live: tuple[str, ...], num_running: int) -> bool:
        """Whether the job may start a run now.

        live          jobs that have not ended, oldest first. num_running: how many rows say that their run goes on.
        """
