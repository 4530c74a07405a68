"""A pod's placement: the job's request merged into the administrator's cluster profile. Pure, except `read_profile`."""

import json
from pathlib import Path

import yaml
from pydantic import ValidationError

from eyrie_api import yaml_text
from eyrie_api.contract.cluster import ClusterProfile
from eyrie_api.contract.hardware import PlacedProfile
from eyrie_api.contract.placement import JobPlacement, Placement, PlacementRequest, StageKey
from eyrie_api.contract.resolved import PlacedGpus
from eyrie_api.contract.rules import first_problem, rule_of
from eyrie_api.contract.serving import ServeSpec
from eyrie_api.errors import InvalidInput


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


def serving_gpus(profile: ClusterProfile | None, serve: ServeSpec) -> PlacedGpus:
    """The GPUs of the engines of an endpoint; None: on one machine. Raises InvalidInput."""
    placed: PlacementRequest = serve.placement
    if profile is not None and profile.serving is not None:
        placed = merge_placement(profile.serving.placement, serve.placement)
    return PlacedGpus(num_gpus=placed.num_gpus, gpu_type=placed.gpu_type)


def resolve_hardware_placement(profile: ClusterProfile, wanted: JobPlacement, pool: PlacedProfile) -> Placement:
    """The placement of the measurement on one profile of `prove.hardware`: that of the prove stage with the profile's.
    Raises InvalidInput."""
    return merge_placement(resolve_stage_placement(profile, wanted, "prove"), pool.placement)


def merge_placement(given: Placement, wanted: PlacementRequest) -> Placement:
    """Merge `wanted` into `given`, by the rules of `PlacementRequest`. Raises InvalidInput."""
    changed: dict[str, object] = {
        name: value for name in ("num_gpus", "gpu_type", "shared_memory", "queue", "priority_class")
        if (value := getattr(wanted, name)) is not None}
    for name in ("requests", "limits", "node_selector"):
        changed[name] = {**getattr(given, name), **getattr(wanted, name)}
    changed["tolerations"] = tuple(dict.fromkeys((*given.tolerations, *wanted.tolerations)))
    try:
        return Placement.model_validate({**dict(given), **changed})
    except ValidationError as error:
        raise InvalidInput(f"placement: {first_problem(error)}",
                           "change the job's placement or the cluster profile") from error
