"""What a job's engine will compute on, found without torch: device files of this machine, or what the job requests."""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from eyrie_api.decisions.engine_support import Device
from eyrie_api.settings import Settings
from eyrie_api.v1alpha1.engine import SGLANG_PROGRAM
from eyrie_api.v1alpha1.job import JobSpec


def planned_device(spec: JobSpec, settings: Settings) -> Device:
    """The device of the engine of a job as it is placed (`placement.as_placed`)."""
    if settings.cluster_profile is None:
        return local_device()
    requests = (spec.placement.stages.get("prove"), spec.serve.placement)
    return "gpu" if any(request is not None and request.num_gpus for request in requests) else "cpu"


def computes_on_gpus(spec: JobSpec, settings: Settings) -> bool:
    """Whether a target of a job as it is placed is on GPUs in any stage; `target.dtype: auto` depends on it."""
    requests = (spec.placement.every, spec.serve.placement, *spec.placement.stages.values())
    if any(request is not None and request.num_gpus for request in requests):
        return True
    return planned_device(spec, settings) == "gpu" and os.environ.get("EYRIE_DEVICE") != "cpu"


def has_sglang(settings: Settings) -> bool:
    """Whether stages find an SGLang: on a cluster the administrator gives it to those with GPUs; here it is named by a
    variable, or installed."""
    return (settings.cluster_profile is not None or bool(os.environ.get(SGLANG_PROGRAM))
            or importlib.util.find_spec("sglang") is not None)


def local_device(devices: Path = Path("/dev")) -> Device:
    """Whether this process may use a GPU: an NVIDIA device that CUDA_VISIBLE_DEVICES does not hide, or an AMD one."""
    nvidia = any(devices.glob("nvidia[0-9]*")) and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
    amd = (devices / "kfd").exists() and os.environ.get("HIP_VISIBLE_DEVICES") not in ("", "-1")
    return "gpu" if nvidia or amd else "cpu"


def gpus_of(environment: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[str, ...]:
    """Ids of this machine's NVIDIA GPUs for CUDA_VISIBLE_DEVICES, without loading torch; none with EYRIE_DEVICE=cpu."""
    if environment.get("EYRIE_DEVICE") == "cpu":
        return ()
    given = environment.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return tuple(part for part in given.split(",") if part not in ("", "-1"))
    return tuple(str(number) for number in range(len(list(devices.glob("nvidia[0-9]*")))))
