"""The GPUs and programs of this machine, found without torch: by device files, environment variables and the driver.

GPUs of AMD, and GPUs under WSL, have one device file for all, which gives no number.
"""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from eyrie_api.decisions.target_memory import memory_of
from eyrie_api.settings import Settings
from eyrie_api.v1alpha1.engine import SGLANG_PROGRAM

DEVICES = Path("/dev")
WITHOUT_A_NUMBER = ("kfd", "dxg")
"""Device files of AMD GPUs, and of the GPUs of a Windows host."""

Device = Literal["cpu", "gpu"]
"""What an engine computes on."""


def has_sglang(settings: Settings) -> bool:
    """Whether stages find an SGLang: on a cluster the administrator gives it to those with GPUs; here it is named by a
    variable, or installed."""
    return (settings.cluster_profile is not None or bool(os.environ.get(SGLANG_PROGRAM))
            or importlib.util.find_spec("sglang") is not None)


def local_device(devices: Path = DEVICES) -> Device:
    """Whether this process may use a GPU: an NVIDIA device that CUDA_VISIBLE_DEVICES does not hide, or an AMD one."""
    nvidia = any(devices.glob("nvidia[0-9]*")) and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
    amd = (devices / "kfd").exists() and os.environ.get("HIP_VISIBLE_DEVICES") not in ("", "-1")
    return "gpu" if nvidia or amd else "cpu"


def gpus_of(environment: Mapping[str, str], devices: Path = DEVICES) -> tuple[str, ...]:
    """Ids of this machine's NVIDIA GPUs for CUDA_VISIBLE_DEVICES, without loading torch; none with EYRIE_DEVICE=cpu."""
    if environment.get("EYRIE_DEVICE") == "cpu":
        return ()
    given = environment.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return tuple(part for part in given.split(",") if part not in ("", "-1"))
    return tuple(str(number) for number in range(len(list(devices.glob("nvidia[0-9]*")))))


def gpu_memory_here(driver: Path = Path("/proc/driver/nvidia/gpus")) -> int | None:
    """The most memory of a GPU of this machine by the names that NVIDIA's driver gives them; None where that of any is
    not known, or this machine uses none."""
    if not gpus_of(os.environ):
        return None
    names = [line.removeprefix("Model:").strip() for file in driver.glob("*/information")
             for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if line.startswith("Model:")]
    sizes = [memory_of(name) for name in names]
    known = [size for size in sizes if size is not None]
    return max(known) if known and len(known) == len(sizes) else None
