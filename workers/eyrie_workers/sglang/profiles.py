"""Hardware profiles for SGLang: attention backend and memory. Pure; `available_bytes` alone reads the machine.

*Attention.* SGLang chooses its attention backend depending on speculation and top_k: on a Hopper GPU a chain runs on
fa3 and a tree on flashinfer; on Blackwell a chain runs on trtllm_mha, and a server without an explicit top_k on
flashinfer. A comparison of two settings would then compare kernels. So Eyrie chooses one backend that supports every
compared setting and sets it explicitly. The table contains the capabilities of each backend as SGLang 0.5.23 checks
them (`arg_groups/speculative_hook.py`, `overrides.py`, `attention_hook.py`, `layers/attention/*`). Some of SGLang's
checks run only while it loads weights; here they run before the start. tests/sglang resolves a matrix of command lines
with the real parser.

*Memory.* How many servers fit is computed before the first one starts. The estimate of one server: the weights of
target and drafter in the served dtype, the KV pool that the requests can fill, and the processes themselves. On a CPU
the memory is that which is available now; on a GPU the share that SGLang may use.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eyrie_api.contract.engine import EngineKind
from eyrie_api.contract.targets import ELEMENT_BYTES, Dtype
from eyrie_api.errors import InvalidInput
from eyrie_api.planning.hardware import static_fraction
from eyrie_api.planning.sglang_support import Unlaunchable

Platform = Literal["cuda", "rocm", "cpu"]

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


@dataclass(frozen=True)
class SglangHardware:
    name: str
    platform: Platform
    compute: int
    """CUDA compute capability without its dot (90: Hopper); 0 elsewhere."""

    memory_gib: float

    @property
    def mem_fraction(self) -> float:
        """Share of the memory for weights and the KV pool of target and drafter; see `static_fraction`."""
        return static_fraction(self.memory_gib) if self.platform != "cpu" else 0.3


PROFILES: dict[str, SglangHardware] = {machine.name: machine for machine in (
    SglangHardware("a10", "cuda", 86, 24), SglangHardware("a100-40gb", "cuda", 80, 40),
    SglangHardware("a100-80gb", "cuda", 80, 80), SglangHardware("l40s", "cuda", 89, 48),
    SglangHardware("rtx-4090", "cuda", 89, 24), SglangHardware("h100", "cuda", 90, 80),
    SglangHardware("h200", "cuda", 90, 141), SglangHardware("b200", "cuda", 100, 180),
    SglangHardware("gb200", "cuda", 100, 186), SglangHardware("rtx-pro-6000-blackwell", "cuda", 120, 96),
    SglangHardware("mi300x", "rocm", 0, 192), SglangHardware("cpu", "cpu", 0, 16),
)}


def profile(name: str) -> SglangHardware:
    if name not in PROFILES:
        raise Unlaunchable(f"hardware profile {name!r} is not known", f"known are {', '.join(PROFILES)}")
    return PROFILES[name]


def captured_batches(max_running_requests: int) -> tuple[int, ...]:
    """Batch sizes whose decoding is captured as a CUDA graph: those SGLang captures when it speculates.

    Without speculation it captures fewer (1, 2, 4, 8, 12, 16, then every 8th), and a batch in between is padded to the
    next: at 5 requests the variant without speculation would compute 8, and lose by more than speculation gains.
    """
    spaced = (*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8),
              *range(272, max_running_requests + 1, 16))
    return (*(size for size in spaced if size < max_running_requests), max_running_requests)


@dataclass(frozen=True)
class AttentionNeeds:
    """What a target and its drafter require of an attention backend."""

    mla: bool = False
    """Multi-head latent attention (DeepSeek, Kimi)."""

    sliding: bool = False
    """Some layers have a sliding window."""

    sinks: bool = False
    """Attention sinks (GPT-OSS)."""

    linear: bool = False
    """Hybrid: some layers use linear attention."""

    windowed_draft: int = 0
    """`top_k` of a drafter with a sliding window; 0 without one."""


@dataclass(frozen=True)
class _Backend:
    """What an attention backend computes for drafts, of those in `preferred`."""

    trees: bool = True
    mla_trees: bool = True
    """Whether it verifies trees for MLA targets, where it is chosen for them."""

    window: str = "whose sliding windows have not been examined"
    """How it computes the chain of a drafter with a sliding window (`--speculative-draft-window-size`) differently from
    training; empty: equally."""


BACKENDS: dict[str, _Backend] = {
    "fa3": _Backend(window=""),
    "flashinfer": _Backend(mla_trees=False, window="that forgets it after the first step"),
    "triton": _Backend(window="that gives it one key too few from the second step on"),
    "trtllm_mha": _Backend(trees=False),
    "aiter": _Backend(trees=False),
    "intel_amx": _Backend(window=""),
}

PAGE_SIZES = dict.fromkeys(BACKENDS, 1) | {"trtllm_mha": 64}
"""`--page-size`. intel_amx and, over sliding-window layers, fa3 verify trees with page size 1 only."""


def preferred(machine: SglangHardware, needs: AttentionNeeds) -> tuple[str, ...]:
    """Backends for a target on a machine, the preferred one first. Each of them runs there and serves the target."""
    if machine.platform == "cpu":
        return ("intel_amx",)
    if machine.platform == "rocm":
        return ("aiter", "triton")
    hopper_or_older, blackwell = machine.compute <= 90, machine.compute in (100, 103)
    if needs.mla:
        # fa3 serves MLA on Hopper only.
        return ("fa3", "triton") if machine.compute == 90 else ("flashinfer", "triton") if blackwell else ("triton",)
    if needs.sinks or needs.sliding or needs.windowed_draft:
        # SGLang's own choice for GPT-OSS, Olmo and Llama 4: flashinfer does windows worst, and has no sinks.
        fits = machine.compute == 90 if needs.sinks else hopper_or_older
        return ("fa3", "triton") if fits else ("trtllm_mha", "triton") if blackwell else ("triton",)
    if machine.compute == 90:
        return ("fa3", "flashinfer", "triton")
    if blackwell and not needs.linear:  # SGLang refuses trtllm_mha where recurrent state is kept without a buffer
        return ("trtllm_mha", "flashinfer", "triton")
    return ("flashinfer", "triton")


def attention_problem(machine: SglangHardware, needs: AttentionNeeds, backend: str,
                      widest: int) -> tuple[str, str] | None:
    """Why a backend does not support drafts with `top_k` up to `widest` (0: no speculation), and the hint; None when it
    does.

    A drafter with a sliding window is served as it was trained, or rejected. From the source of 0.5.23: draft steps get
    their keys from lists built for all layers at once. flashinfer builds them without a window
    (`resolve_draft_decode_window` leaves it to the layer, whose own applies to the first step only); triton lists as
    many as the flag states, the step's own included, where the first step has one more; fa3 and intel_amx cut in the
    kernel, from the step's own position. In a tree fa3 cuts the accepted text for all nodes at once: a node at depth d
    sees d - 1 keys too many.
    """
    if widest == 0:
        return None
    known, others = BACKENDS[backend], ", ".join(name for name in preferred(machine, needs) if name != backend)
    if needs.windowed_draft and (known.window or needs.windowed_draft > 1):
        where = "fa3" if machine.platform == "cuda" and 80 <= machine.compute <= 90 else (
            "intel_amx" if machine.platform == "cpu" else "fa3 (a GPU up to Hopper)")
        hint = f"serve this drafter as a chain (top_k 1) on {where}, or train it without drafter.sliding_window"
        if known.window:
            return f"the drafter has a sliding window, and attention backend {backend!r} is one {known.window}", hint
        return (f"the drafter has a sliding window, which nodes of a tree (top_k {needs.windowed_draft}) exceed in "
                f"attention backend {backend!r}", hint)
    if widest > 1 and (not known.trees or (needs.mla and not known.mla_trees)):
        return (f"attention backend {backend!r} verifies chains only{' for MLA targets' if needs.mla else ''}, and "
                f"top_k is {widest}", f"use {others or 'another machine'}, or top_k 1")
    return None


def choose_attention(machine: SglangHardware, needs: AttentionNeeds, widths: Collection[int]) -> str:
    """The best backend that serves all of these top_k (0: no speculation). Raises Unlaunchable."""
    widest = max(widths, default=0)
    problems: list[tuple[str, str]] = []
    for backend in preferred(machine, needs):
        problem = attention_problem(machine, needs, backend, widest)
        if problem is None:
            return backend
        problems.append(problem)
    raise Unlaunchable(f"no attention backend of {machine.name} serves top_k {widest} for this target: "
                       + "; ".join(text for text, _ in problems),
                       problems[0][1] if needs.windowed_draft else "use top_k 1")


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
