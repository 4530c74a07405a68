"""Memory of SGLang's servers, and batch sizes of their CUDA graphs. Pure; `available_bytes` alone reads the machine.

How many servers fit is computed before the first one starts. The estimate of one server: the weights of target and
drafter in the served dtype, the KV pool that the requests can fill, and the processes themselves. On a CPU the memory
is that which is available now; on a GPU the share that SGLang may use. Machines and their attention backends are in
`eyrie_api.planning.sglang_attention`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyrie_api.contract.engine import EngineKind
from eyrie_api.contract.targets import ELEMENT_BYTES, Dtype
from eyrie_api.errors import InvalidInput
from eyrie_api.planning.sglang_attention import SglangHardware

_GIB = 2**30
PROCESSES_BYTES: dict[EngineKind, int] = {"embedded": 3 * _GIB // 4, "sglang": 5 * _GIB // 2}
"""Main memory of an engine's processes without weights: torch's libraries, and SGLang's three processes (2 GiB measured
with 0.5.23)."""

_NGRAM_BYTES = _GIB // 4
"""The trie of n-gram lookup with the capacity that `launch` sets on a CPU (a tenth of SGLang's default of 2 GB)."""

_GPU_WORKSPACE_BYTES = 2 * _GIB
"""CUDA context, graphs and workspace of one server."""

_REQUEST_TOKENS = 4096
"""Prompt and answer of a typical request. SGLang admits a request only when its tokens fit: the limit may be high."""

_MOST_REQUESTS = 256
"""More are a matter of more servers; each batch size up to the limit has a captured graph on a GPU."""

_KEPT_FREE_BYTES = _GIB
"""Main memory left for the stage and the system."""


def captured_batches(max_running_requests: int) -> tuple[int, ...]:
    """Batch sizes whose decoding is captured as a CUDA graph: those SGLang captures when it speculates.

    Without speculation it captures fewer (1, 2, 4, 8, 12, 16, then every 8th), and a batch in between is padded to the
    next: at 5 requests the variant without speculation would compute 8, and lose by more than speculation gains.
    """
    spaced = (*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8),
              *range(272, max_running_requests + 1, 16))
    return (*(size for size in spaced if size < max_running_requests), max_running_requests)


def kv_bytes_per_token(config: Mapping[str, Any], dtype: Dtype) -> int:
    """Bytes of one token's keys and values in all layers, from a target's config.json."""
    text = config.get("text_config") or config
    heads = int(text["num_attention_heads"])
    head_dim = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
    kv_heads = int(text.get("num_key_value_heads") or heads)
    return 2 * int(text["num_hidden_layers"]) * kv_heads * head_dim * ELEMENT_BYTES[dtype]


def server_bytes(kind: EngineKind, platform: str, weight_bytes: int, kv_bytes: int, ngram: bool) -> int:
    """Memory of one server, on its device."""
    if platform != "cpu":
        return weight_bytes + kv_bytes + _GPU_WORKSPACE_BYTES
    return weight_bytes + kv_bytes + PROCESSES_BYTES[kind] + (_NGRAM_BYTES if ngram else 0)


def requests_that_fit(pool_bytes: int, token_bytes: int, context_length: int) -> int:
    """Requests of `_REQUEST_TOKENS` tokens each, or of the context where that is shorter, whose keys and values fit.

    pool_bytes    memory for keys and values
    token_bytes   of one token (`kv_bytes_per_token`)
    returns       at least 1: longer queues are better than no server; at most `_MOST_REQUESTS`
    """
    fit = pool_bytes // (token_bytes * min(context_length, _REQUEST_TOKENS))
    return max(1, min(fit, _MOST_REQUESTS))


def num_that_fit(available_bytes: int, one_server_bytes: int) -> int:
    """Servers that fit. Raises InvalidInput when none does."""
    num = available_bytes // one_server_bytes
    if num < 1:
        raise InvalidInput(
            f"one server needs about {one_server_bytes / _GIB:.1f} GiB of memory and "
            f"{max(0, available_bytes) / _GIB:.1f} GiB are available",
            "free memory, lower the concurrency, raise engine.tp_size, or use a machine with more memory")
    return num


def weights_on_disk(directory: Path) -> int:
    """Bytes of the safetensors files of a checkpoint."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def available_bytes(machine: SglangHardware, num_gpus: int = 1) -> int:
    """Memory that servers may take now."""
    if machine.platform != "cpu":
        return int(machine.mem_fraction * machine.memory_gib * _GIB * num_gpus)
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 - _KEPT_FREE_BYTES
    return int(machine.memory_gib * _GIB)
