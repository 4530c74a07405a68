"""The runner of a worker that has nowhere to run a job: no cluster profile, and an image without the stage programs.

So it is where a chart was installed before Kubeflow was: the API answers, jobs are accepted, and each ends at once with
the reason and what to set.
"""

import importlib.util

from eyrie_api.errors import Permanent
from eyrie_api.v1alpha1.job import JobSpec
from eyrie_api.v1alpha1.tuning import DrafterUse
from eyrie_pipelines.runner import RunSeen


class NoRuntimeConfigured(Permanent):
    """Neither a cluster nor this machine can run a stage."""

    reason = "NoRuntimeConfigured"


def stages_run_here() -> bool:
    """Whether this machine has what every stage program needs."""
    return importlib.util.find_spec("torch") is not None


class UnavailableRunner:
    """Starts nothing; see `Runner`."""

    def refresh(self, job_id: str, spec: JobSpec) -> None:
        """See `Runner`."""

    def observe(self, job_id: str) -> RunSeen:
        """See `Runner`."""
        return RunSeen()

    def start(self, job_id: str, spec: JobSpec, attempt: int, incumbent: DrafterUse | None) -> None:
        """Raises NoRuntimeConfigured."""
        raise NoRuntimeConfigured(
            "this installation has no cluster to run jobs on, and its workers' image no stage programs",
            "give it Kubeflow Pipelines (EYRIE_CLUSTER_PROFILE; in the chart: cluster.kubeflow.url), "
            "then retry the job",
        )

    def stop(self, job_id: str) -> None:
        """See `Runner`."""

    def pause(self, job_id: str) -> None:
        """See `Runner`."""

    def keep(self, job_id: str, name: str) -> None:
        """See `Runner`."""

    def forget(self, job_id: str) -> None:
        """See `Runner`."""

    def has_place(self, job_id: str, live: tuple[str, ...], num_running: int) -> bool:
        """See `Runner`: so that the job is told at once."""
        return True
