"""Whether the hardware that profiles name is there, before anything is measured.

A comparison takes hours, and its last profile may be the one that is missing. A GPU that is not there would be worse:
the engine would compute on the CPU, and the report would have its figures under the profile's name.
"""

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import Sequence

from eyrie_api.errors import EyrieError, InvalidInput
from eyrie_api.v1alpha1.engine import EngineKind
from eyrie_api.v1alpha1.hardware import HardwareProfile
from eyrie_workers.engines.sglang.local_hardware import visible_gpus
from eyrie_workers.load.client import served_models

_LIST = ["nvidia-smi", "-L"]
_LIST_TIMEOUT_S = 30.0
_PROBE_TIMEOUT_S = 15.0
_IDS = re.compile(r"^GPU (\d+):|UUID: ([A-Za-z0-9-]+)", re.MULTILINE)


def check_present(profiles: Sequence[HardwareProfile], engine: EngineKind) -> None:
    """Raises InvalidInput for the first profile that names a GPU which is not here or a server that does not answer."""
    here = gpus_here(engine) if any(one.gpus for one in profiles) else ()
    for number, one in enumerate(profiles):
        missing = [gpu for gpu in one.gpus if not _is_among(gpu, here)]
        if missing:
            raise InvalidInput(f"profile {one.name!r}: profiles.{number}.gpus names {', '.join(missing)}, and this "
                               f"machine has {', '.join(here) or 'no GPUs'} for engine {engine!r}",
                               "name GPUs that torch and `nvidia-smi -L` show, or give off_url and drafted_url of "
                               "servers on the other machine")
    for number, one in enumerate(profiles):
        for field, url in (("off_url", one.off_url), ("drafted_url", one.drafted_url)):
            if url is not None:
                _probe(url, f"profile {one.name!r}: profiles.{number}.{field}")


def gpus_here(engine: EngineKind) -> tuple[str, ...]:
    """Ids of the GPUs on which an engine can be started: those that torch sees, and those that `nvidia-smi` lists."""
    seen = visible_gpus()
    # The embedded engine computes in this torch: what it does not see is not used, whatever the driver lists.
    if os.environ.get("EYRIE_DEVICE") == "cpu" or (engine == "embedded" and not seen):
        return ()
    return tuple(dict.fromkeys((*seen, *_listed())))


def _listed() -> list[str]:
    """Indices and UUIDs of the driver's list, with those of MIG instances; empty where there is no such program."""
    if shutil.which(_LIST[0]) is None:
        return []
    try:
        shown = subprocess.run(_LIST, capture_output=True, text=True, timeout=_LIST_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [index or uuid for index, uuid in _IDS.findall(shown)]


def _is_among(gpu: str, here: Sequence[str]) -> bool:
    """CUDA accepts the beginning of a UUID too."""
    return gpu in here or (not gpu.isdigit() and any(one.startswith(gpu) for one in here))


def _probe(url: str, field: str) -> None:
    try:
        asyncio.run(served_models(url, None, _PROBE_TIMEOUT_S))
    except EyrieError as error:
        raise InvalidInput(f"{field}: {error.message}", "start the server, and give its URL up to and including /v1") \
            from None
