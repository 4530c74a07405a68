"""Checks of `prove.hardware` before a job is accepted: is each profile one that can be there, and does the target fit?

On one machine a profile is a part of it: its GPUs, or threads of its CPU. On a cluster a profile names a type of GPU by
the label of its nodes. Which nodes there are changes with the autoscaler, so a type without nodes is waited for; one
that neither the table of GPUs nor the administrator's prices name is taken for a typing error, for which a job would
wait without end.
"""

import os

from eyrie_api.decisions.engine_support import check_heads
from eyrie_api.decisions.hardware import GPUS, known_gpu
from eyrie_api.decisions.plan_facts import TargetFacts
from eyrie_api.decisions.training_cost import usable_bytes
from eyrie_api.decisions.training_defaults import gpu_bytes
from eyrie_api.errors import InvalidInput
from eyrie_api.settings import Settings
from eyrie_api.submission.devices import gpus_of
from eyrie_api.v1alpha1.hardware import PlacedProfile
from eyrie_api.v1alpha1.job import JobSpec
from eyrie_api.v1alpha1.requests import PlacementRequest
from eyrie_api.v1alpha1.targets import ELEMENT_BYTES


def check_hardware(spec: JobSpec, settings: Settings, facts: TargetFacts | None) -> None:
    """Raises InvalidInput naming the profile's field, its value and the rule."""
    profiles = spec.prove.hardware.profiles if spec.prove.hardware is not None else ()
    for number, one in enumerate(profiles):
        field = f"prove.hardware.profiles.{number}"
        if settings.cluster_profile is None:
            _check_here(one, field)
        else:
            _check_type(one, field, settings)
        if facts is not None:
            _check_target(spec, one, field, facts)


def _check_here(one: PlacedProfile, field: str) -> None:
    named = [name for name, default in PlacementRequest() if name != "num_gpus"
             and getattr(one.placement, name) != default]
    if named:
        raise InvalidInput(f"{field}.placement.{named[0]} is set and this server runs jobs on one machine, which has "
                           "no nodes to choose from", "name num_gpus or threads, or submit the job to a cluster")
    gpus, processors = gpus_of(os.environ), len(os.sched_getaffinity(0))
    if (one.placement.num_gpus or 0) > len(gpus):
        raise InvalidInput(f"{field}.placement.num_gpus is {one.placement.num_gpus} and this machine has {len(gpus)} "
                           "GPUs", "lower it, or submit the job to a cluster")
    if (one.threads or 0) > processors:
        raise InvalidInput(f"{field}.threads is {one.threads} and this machine has {processors} processors", "lower it")


def _check_type(one: PlacedProfile, field: str, settings: Settings) -> None:
    label = one.placement.gpu_type
    if label is not None and known_gpu(label) is None and label not in settings.prices:
        known = ", ".join(sorted({*settings.prices, *(gpu.name for gpu in GPUS)}))
        raise InvalidInput(f"{field}.placement.gpu_type {label!r} is not a known type of GPU",
                           f"known are labels that name one of {known}; an administrator adds others to "
                           "EYRIE_GPU_HOUR_PRICES")


def _check_target(spec: JobSpec, one: PlacedProfile, field: str, facts: TargetFacts) -> None:
    num_gpus, device = one.placement.num_gpus or 0, gpu_bytes(one.placement.gpu_type)
    if num_gpus and spec.engine.kind == "sglang":
        check_heads(num_gpus, facts, f"{field}.placement.num_gpus")
    weights = facts.parameters * ELEMENT_BYTES[spec.resolved_target.dtype]
    if num_gpus and device is not None and weights > num_gpus * usable_bytes(device):
        raise InvalidInput(f"{field}: the target's weights are {weights / 1e9:.0f} GB, and {num_gpus} x "
                           f"{one.placement.gpu_type} hold {num_gpus * usable_bytes(device) / 1e9:.0f} GB",
                           "raise placement.num_gpus of the profile, or name a larger GPU")
