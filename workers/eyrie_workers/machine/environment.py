"""The environment of a measurement: hardware, threads, versions, date. Figures compare within one environment only.

Torch is imported by `environment` alone: the load generator's processes do not load it.
"""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

from eyrie_api.artifacts import code_version
from eyrie_api.v1alpha1.reports import Environment

# Vector extensions that determine the speed of small matrix products on a CPU, as /proc/cpuinfo spells them.
_TELLING_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def cpu_count() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment(dtype: str) -> Environment:
    """The current environment, with torch's current thread count."""
    import torch

    return _described(torch.get_num_threads(), torch.__version__, dtype)


def client_environment() -> Environment:
    """The environment of a process that only sends requests: one thread, no torch, no dtype."""
    return _described(1, "not loaded", "not known to the client")


def _described(threads: int, torch_version: str, dtype: str) -> Environment:
    return Environment(
        hardware=_hardware(), cpu_count=cpu_count(), threads=threads, torch=torch_version,
        python=platform.python_version(), dtype=dtype, code_version=code_version(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _hardware() -> str:
    try:
        return describe_cpuinfo(Path("/proc/cpuinfo").read_text())
    except OSError:
        return platform.processor() or platform.machine()


def describe_cpuinfo(text: str) -> str:
    """Processor name and relevant vector extensions, from the text of /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    processor = fields.get("model name") or platform.machine()
    telling = " ".join(flag for flag in _TELLING_FLAGS if flag in flags)
    return f"{processor} ({telling})" if telling else processor
