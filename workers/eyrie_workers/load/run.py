"""A load test from its first warm-up to its report."""

from collections.abc import Callable, Sequence

from eyrie_api.v1alpha1.load import LoadReport, LoadSpec
from eyrie_workers.load.arms import LoadArm, LoadPrompt

__all__ = ["LoadArm", "LoadPrompt", "run_load"]


def run_load(arms: Sequence[LoadArm], prompts: Sequence[LoadPrompt], spec: LoadSpec, baseline: str = "off",
             on_progress: Callable[[int, int, str], None] | None = None,
             pause_point: Callable[[], None] | None = None) -> LoadReport:
    """Ask every arm at every level of `spec` and report.

    on_progress   called with (requests done, requests in all, what is being asked), warm-up included.
    pause_point   called several times a second; whatever it raises ends the test and is raised here.

    Raises InvalidInput for arms, prompts or a baseline that cannot be; ArmUnusable when a server does not answer the
    first question. Single failed requests are counted in the report, not raised.
    """
    raise NotImplementedError("in flight: the next commit")
