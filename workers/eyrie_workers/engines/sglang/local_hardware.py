"""The hardware profile of this machine, detected with torch.

Separate from `profiles`, which the control plane imports and which therefore must not reach torch.
"""

import torch

from eyrie_workers.engines.sglang.profiles import HardwareProfile, profile


def detect_hardware() -> HardwareProfile:
    """The profile of the first GPU, or of the CPU without one."""
    if not torch.cuda.is_available():
        return profile("cpu")
    properties = torch.cuda.get_device_properties(0)
    memory_gib = properties.total_memory / 2**30
    if torch.version.hip:
        return HardwareProfile(properties.name, "rocm", 0, memory_gib)
    return HardwareProfile(properties.name, "cuda", 10 * properties.major + properties.minor, memory_gib)
