"""A causal language model of `transformers`, loaded onto the device that computes it.

With `device_map` (accelerate) each tensor goes from the file to its GPU; without, the host would hold the whole
checkpoint first, which for 70 billion parameters is 140 GB. A target that one GPU does not hold is spread, layer after
layer, over the GPUs of the machine where this process is the only one that computes.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eyrie_workers.targets.device import free_bytes
from eyrie_workers.targets.loading import DTYPES, require_memory, weight_bytes


def load_causal_model(path: Path, dtype: str, device: torch.device) -> Any:
    """The model in directory `path` in evaluation mode. Raises MemoryTooSmall before any weight is read, and what
    transformers raises where it cannot load it."""
    import transformers  # here: importing it takes longer than a small capture

    needed, placed = weight_bytes(path, dtype), {}
    if device.type == "cuda":
        alone = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == 1
        free = [free_bytes(torch.device("cuda", index)) or 0 for index in range(torch.cuda.device_count())]
        if alone and is_spread(needed, free_bytes(device), free):
            return transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=DTYPES[dtype], local_files_only=True, trust_remote_code=False, device_map="auto").eval()
        placed = {"device_map": {"": device}}
    require_memory(str(device), needed, free_bytes(device), dtype)
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=DTYPES[dtype], local_files_only=True, trust_remote_code=False, **placed).eval()


def is_spread(needed: int, own: int | None, free: Sequence[int]) -> bool:
    """Whether weights that one GPU's free bytes do not hold fit those of all GPUs together. Pure."""
    return own is not None and own < needed <= sum(free)
