"""What a job asks for and this machine does not have, where jobs run on one machine.

Such a job is refused. A plan of it is made and notes it: people plan here for another machine.

GPUs are counted by their device files, as `devices` finds them. Where those give no number (AMD, and GPUs under WSL,
which have one device file for all), nothing is refused: the stage that needs them counts them with torch.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from eyrie_api.decisions.capture_support import SGLANG_VERSION
from eyrie_api.errors import InvalidInput
from eyrie_api.settings import Settings
from eyrie_api.submission.devices import gpus_of, has_sglang
from eyrie_api.v1alpha1.engine import SGLANG_PROGRAM
from eyrie_api.v1alpha1.job import JobSpec
from eyrie_api.v1alpha1.requests import PlacementRequest

_WITHOUT_A_NUMBER = ("kfd", "dxg")
"""Device files of AMD GPUs, and of the GPUs of a Windows host."""


@dataclass(frozen=True)
class Missing:
    """What this machine does not have: the field that asks for it with its value, what was found, and what to do."""

    message: str
    hint: str


def check_this_machine(spec: JobSpec, settings: Settings) -> None:
    """Raises InvalidInput where jobs run on this machine and it cannot run this one."""
    missing = missing_here(spec, settings)
    if missing:
        raise InvalidInput(missing[0].message, missing[0].hint)


def notes_on_this_machine(spec: JobSpec, settings: Settings) -> list[str]:
    """For the reader of a plan: what `check_this_machine` refuses, and what of the job's placement is not used here."""
    if settings.cluster_profile is not None:
        return []
    refused = [f"a job of this plan is refused on this machine: {one.message}" for one in missing_here(spec, settings)]
    return refused + [f"{field}.gpu_type {one.gpu_type!r} is for the plan alone: on one machine a job runs on the GPUs "
                      "that are there" for field, one in _requests(spec) if one.gpu_type is not None]


def missing_here(spec: JobSpec, settings: Settings, devices: Path = Path("/dev")) -> list[Missing]:
    """What this job asks for and this machine does not have; on a cluster nothing."""
    if settings.cluster_profile is not None:
        return []
    missing = _gpus(spec, devices)
    if spec.engine.kind == "sglang" and not has_sglang(settings):
        missing.append(Missing(
            f"engine.kind is 'sglang', and this server finds no SGLang: {SGLANG_PROGRAM} is not set, and SGLang is not "
            "installed next to Eyrie",
            f"`pip install sglang=={SGLANG_VERSION}` in an environment of its own, and set {SGLANG_PROGRAM}="
            "'ENVIRONMENT/bin/python -m sglang.launch_server' before `eyrie up`; or set engine to 'embedded'"))
    return missing


def _gpus(spec: JobSpec, devices: Path) -> list[Missing]:
    on_cpu = os.environ.get("EYRIE_DEVICE") == "cpu"
    if not on_cpu and any((devices / name).exists() for name in _WITHOUT_A_NUMBER):
        return []
    found = len(gpus_of(os.environ, devices))
    has = f"this machine has {found} GPU{'' if found == 1 else 's'}"
    what = "EYRIE_DEVICE is cpu, with which this machine uses no GPUs" if on_cpu else has
    lower = f"lower it to at most {found}" if found else "omit it"
    return [Missing(f"{field}.num_gpus is {one.num_gpus} and {what}",
                    f"{lower}, or submit the job where there are as many")
            for field, one in _requests(spec) if (one.num_gpus or 0) > found]


def _requests(spec: JobSpec) -> list[tuple[str, PlacementRequest]]:
    """Every placement that a job requests, by the field that names it."""
    return [("placement.every", spec.placement.every),
            *((f"placement.stages.{stage}", one) for stage, one in spec.placement.stages.items()),
            ("serve.placement", spec.serve.placement)]
