"""What a job or an endpoint counts for its project's quotas of GPUs and replicas. Pure.

Stages of a job run one after the other, so a job requests the GPUs of the stage with the most. Within a stage a cluster
runs side by side: all trainings, unless one program trains all candidates, all benchmarks that have GPUs, and the
profiles of `prove.hardware` but the first (`eyrie_pipelines.placement`). One machine runs one program at a time, and of
a placement uses `num_gpus` of the training alone; a job that names none counts none there, also where the machine has
one.
"""

from typing import get_args

from eyrie_api.database.quotas import Demand
from eyrie_api.decisions.sweep import expand, trains_together
from eyrie_api.submission.placement import resolve_hardware_placement, resolve_stage_placement
from eyrie_api.v1alpha1.cluster import ClusterProfile
from eyrie_api.v1alpha1.job import JobSpec
from eyrie_api.v1alpha1.requests import PlacementRequest, StageKey
from eyrie_api.v1alpha1.serving import ServeSpec


def demand_of(spec: JobSpec, profile: ClusterProfile | None) -> Demand:
    """What a job uses; `profile` is None on one machine. Raises InvalidInput for a placement that cannot be merged."""
    return Demand(gpus_of(spec, profile), replicas_of(spec.serve, profile))


def gpus_of(spec: JobSpec, profile: ClusterProfile | None) -> int:
    """The most GPUs that the stages of a job request at one time. Raises InvalidInput."""
    if profile is None:
        train = spec.placement.stages.get("train", PlacementRequest()).num_gpus
        return (spec.placement.every.num_gpus or 0) if train is None else train
    stages: tuple[StageKey, ...] = get_args(StageKey)
    gpus = {stage: resolve_stage_placement(profile, spec.placement, stage).num_gpus for stage in stages}
    measured = () if spec.prove.hardware is None else spec.prove.hardware.profiles
    first, *others = [resolve_hardware_placement(profile, spec.placement, one).num_gpus for one in measured] or [0]
    compared = max(first, sum(others))  # the first profile alone, then the others side by side
    if not any(gpus.values()):
        return compared
    candidates = expand(spec)
    together = trains_together(spec, len(candidates), gpus["train"], on_cluster=True)
    gpus["train"] *= spec.placement.train_nodes * (1 if together else len(candidates))
    gpus["benchmark"] *= sum(one.train.num_checkpoints for one in candidates) + len(spec.benchmarked_rivals)
    return max(compared, *gpus.values())


def replicas_of(serve: ServeSpec, profile: ClusterProfile | None) -> int:
    """Replicas of an endpoint; with autoscaling, the most it may have. One on one machine."""
    if profile is None or profile.serving is None:
        return 1
    replicas, scale = serve.replicas or profile.serving.replicas, profile.serving.autoscale
    return replicas if scale is None else max(replicas, scale.max_replicas)
