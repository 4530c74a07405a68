"""Whether the GPUs of a job hold its target, by the files of the target and the types of the GPUs.

On a cluster a GPU's memory is that of its label. On one machine a job runs on the GPUs that are there, whose names
NVIDIA's driver has in /proc, and a label is for plans alone.
"""

import os
from pathlib import Path

from eyrie_api.decisions.plan_facts import TargetFacts
from eyrie_api.decisions.target_memory import memory_of, too_small_gpus
from eyrie_api.errors import GpuTooSmall
from eyrie_api.submission.devices import gpus_of
from eyrie_api.submission.target_facts import read_config, target_dir
from eyrie_api.submission.weight_files import served_bytes
from eyrie_api.v1alpha1.cluster import ClusterProfile
from eyrie_api.v1alpha1.job import JobSpec


def gpus_without_room(placed: JobSpec, facts: TargetFacts, profile: ClusterProfile | None, *,
                      for_other_machines: bool) -> list[GpuTooSmall]:
    """One error for each kind of GPUs that the target does not fit; none where a size is not known.

    placed               the job as it is placed (`placement.as_placed`)
    for_other_machines   where jobs run on one machine: take a GPU of the job's label, as a plan does
    """
    directory = target_dir(placed.target)
    if directory is None:
        return []
    weights = served_bytes(directory, read_config(directory), facts, placed.resolved_target.dtype)
    if weights is None:
        return []
    if profile is not None:
        return too_small_gpus(placed, facts, weights, serves=profile.serving is not None)
    here = gpu_memory_here()
    return too_small_gpus(placed, facts, weights, serves=True, memory=lambda label: (
        memory_of(label) if for_other_machines and label is not None else here))


def gpu_memory_here(driver: Path = Path("/proc/driver/nvidia/gpus")) -> int | None:
    """The most memory of a GPU of this machine; None where that of any is not known, or this machine uses none."""
    if not gpus_of(os.environ):
        return None
    names = [line.removeprefix("Model:").strip() for file in driver.glob("*/information")
             for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if line.startswith("Model:")]
    sizes = [memory_of(name) for name in names]
    known = [one for one in sizes if one is not None]
    return max(known) if known and len(known) == len(sizes) else None
