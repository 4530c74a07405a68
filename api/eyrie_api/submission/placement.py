"""A pod's placement: the job's request merged into the administrator's cluster profile. Pure, except `read_profile`."""

import json
from pathlib import Path
from typing import get_args

import yaml
from pydantic import ValidationError

from eyrie_api import yaml_text
from eyrie_api.errors import InvalidInput
from eyrie_api.quantities import size
from eyrie_api.v1alpha1.cluster import ClusterProfile
from eyrie_api.v1alpha1.hardware import PlacedProfile
from eyrie_api.v1alpha1.job import JobSpec
from eyrie_api.v1alpha1.placement import Placement, S3Work
from eyrie_api.v1alpha1.requests import JobPlacement, PlacementRequest, StageKey
from eyrie_api.v1alpha1.rules import first_problem, rule_of

_UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
          "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}


def read_profile(path: Path) -> ClusterProfile:
    """The cluster profile in a YAML or JSON file. Raises InvalidInput naming file, field and rule."""
    try:
        document = yaml_text.load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"cluster profile {path} cannot be read: {error.strerror}",
                           "correct EYRIE_CLUSTER_PROFILE, or unset it to work on one machine") from None
    except yaml.YAMLError as error:
        raise InvalidInput(f"cluster profile {path} is not YAML: {' '.join(str(error).split())}",
                           "correct the file") from None
    try:
        return ClusterProfile.model_validate_json(json.dumps(document))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        raise InvalidInput(f"cluster profile {path}: {where}: {rule_of(first)}",
                           "correct the file") from error


def resolve_stage_placement(profile: ClusterProfile, wanted: JobPlacement, stage: StageKey) -> Placement:
    """The placement of one stage of a job. Raises InvalidInput when the merged placement is invalid."""
    given = profile.per_stage.get(stage, profile.stages).model_copy(update={"work": profile.stages.work})
    return merge_placement(merge_placement(given, wanted.every), wanted.stages.get(stage, PlacementRequest()))


def as_placed(spec: JobSpec, profile: ClusterProfile) -> JobSpec:
    """The job that requests the GPUs which its stages and its endpoint get: those of the profile, where it names none.
    For decisions and plans; the job that is stored requests what it says. Raises InvalidInput."""
    placed = {stage: resolve_stage_placement(profile, spec.placement, stage) for stage in get_args(StageKey)}
    stages = {stage: PlacementRequest(num_gpus=one.num_gpus, gpu_type=one.gpu_type) for stage, one in placed.items()}
    serve = spec.serve
    if profile.serving is not None:
        engines = merge_placement(profile.serving.placement, serve.placement)
        serve = serve.model_copy(update={"placement": serve.placement.model_copy(
            update={"num_gpus": engines.num_gpus, "gpu_type": engines.gpu_type})})
    return spec.model_copy(update={"serve": serve, "placement": spec.placement.model_copy(
        update={"every": PlacementRequest(), "stages": stages})})


def resolve_hardware_placement(profile: ClusterProfile, wanted: JobPlacement, pool: PlacedProfile) -> Placement:
    """The placement of the measurement on one profile of `prove.hardware`: that of the prove stage with the profile's.
    Raises InvalidInput."""
    return merge_placement(resolve_stage_placement(profile, wanted, "prove"), pool.placement)


def check_scratch(spec: JobSpec, profile: ClusterProfile) -> None:
    """Raises InvalidInput where two shards of each process of capture exceed the pod's work area: Kubernetes evicts a
    pod that does. Of `ranged` states alone; `copied` ones need room for all of them."""
    work, shard = profile.stages.work, spec.capture.shard_size_bytes
    if (not isinstance(work, S3Work) or work.states != "ranged" or work.scratch_size is None
            or spec.capture.feed == "stream"):
        return
    number = work.scratch_size.rstrip("mkMGTPi")
    scratch = int(float(number) * _UNITS[work.scratch_size.removeprefix(number)])
    processes = max(1, resolve_stage_placement(profile, spec.placement, "capture").num_gpus)
    if 2 * processes * shard > scratch:
        raise InvalidInput(
            f"capture.shard_size_bytes = {shard}: two shards of each of {processes} processes are "
            f"{size(2 * processes * shard)}, and the work area of a pod has {work.scratch_size}",
            f"give at most {scratch // (2 * processes)}, or fewer GPUs to capture; an administrator changes "
            "cluster.stages.work.scratch_size")


def merge_placement(given: Placement, wanted: PlacementRequest) -> Placement:
    """Merge `wanted` into `given`, by the rules of `PlacementRequest`. Raises InvalidInput."""
    changed: dict[str, object] = {}
    for name in ("num_gpus", "gpu_type", "shared_memory", "queue", "priority_class"):
        value = getattr(wanted, name)
        if value is not None:
            changed[name] = value
    for name in ("requests", "limits", "node_selector"):
        changed[name] = {**getattr(given, name), **getattr(wanted, name)}
    changed["tolerations"] = tuple(dict.fromkeys((*given.tolerations, *wanted.tolerations)))
    try:
        return Placement.model_validate({**dict(given), **changed})
    except ValidationError as error:
        raise InvalidInput(f"placement: {first_problem(error)}",
                           "change the job's placement or the cluster profile") from error
