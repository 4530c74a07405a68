"""The runner of a worker without a runtime: no cluster profile, and an image without the stage programs.

A chart installed before Kubeflow is in this state: the API responds and accepts jobs, and each job fails at once with
the reason RuntimeUnavailable and the setting that is missing.
"""

import importlib.util

from eyrie_api.errors import Permanent
from eyrie_api.v1alpha1.job import JobSpec
from eyrie_api.v1alpha1.tuning import DrafterUse
from eyrie_pipelines.runner import ObservedRun


class RuntimeUnavailable(Permanent):
    """Neither a cluster nor this machine can run a stage."""

    reason = "RuntimeUnavailable"


def has_stage_programs() -> bool:
    """Whether the packages that every stage program needs are installed."""
    return importlib.util.find_spec("torch") is not None


class UnavailableRunner:
    """Starts nothing; see `Runner`."""

    def refresh(self, job_id: str, spec: JobSpec) -> None:
        """See `Runner`."""

    def observe(self, job_id: str) -> ObservedRun:
        """See `Runner`."""
        return ObservedRun()

    def start(self, job_id: str, spec: JobSpec, attempt: int, incumbent: DrafterUse | None,
              reuse: tuple[str, ...] = ()) -> None:
        """Raises RuntimeUnavailable."""
        raise RuntimeUnavailable(
            "this installation has no cluster to run jobs on, and its control plane has no stage programs",
            "configure Kubeflow Pipelines (EYRIE_CLUSTER_PROFILE; in the chart: cluster.kubeflow.url), "
            "then retry the job",
        )

    def stop(self, job_id: str) -> None:
        """See `Runner`."""

    def pause(self, job_id: str) -> None:
        """See `Runner`."""

    def persist(self, job_id: str, name: str) -> None:
        """See `Runner`."""

    def delete(self, job_id: str) -> None:
        """See `Runner`."""

    def has_capacity(self, job_id: str, live: tuple[str, ...], num_running: int) -> bool:
        """See `Runner`. Always true: the job then fails at once, with the reason, instead of waiting."""
        return True
