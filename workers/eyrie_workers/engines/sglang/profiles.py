"""Hardware profiles for SGLang: attention backend, page size and memory fraction. Data and pure rules.

SGLang chooses its attention backend depending on speculation and top_k: on a Hopper GPU a chain runs on fa3 and a tree
on flashinfer; on Blackwell a chain runs on trtllm_mha, and a server without an explicit top_k on flashinfer. A
comparison of two settings would then compare kernels. So Eyrie chooses one backend that supports every compared setting
and sets it explicitly.

The table contains the capabilities of each backend as SGLang 0.5.23 checks them (`arg_groups/speculative_hook.py`,
`overrides.py`, `attention_hook.py`, `layers/attention/*`). Some of SGLang's checks run only while it loads weights;
here they run before the start. tests/sglang resolves a matrix of command lines with the real parser.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from eyrie_workers.targets.sglang_limits import Unlaunchable

Platform = Literal["cuda", "rocm", "cpu"]


@dataclass(frozen=True)
class HardwareProfile:
    """One kind of accelerator."""

    name: str
    platform: Platform
    compute: int
    """CUDA compute capability without its dot (90: Hopper); 0 elsewhere."""

    memory_gib: float

    @property
    def mem_fraction(self) -> float:
        """Share of the memory for weights and the KV pool of target and drafter; see `static_fraction`."""
        return static_fraction(self.memory_gib) if self.platform != "cpu" else 0.3


PROFILES: dict[str, HardwareProfile] = {machine.name: machine for machine in (
    HardwareProfile("a10", "cuda", 86, 24), HardwareProfile("a100-40gb", "cuda", 80, 40),
    HardwareProfile("a100-80gb", "cuda", 80, 80), HardwareProfile("l40s", "cuda", 89, 48),
    HardwareProfile("rtx-4090", "cuda", 89, 24), HardwareProfile("h100", "cuda", 90, 80),
    HardwareProfile("h200", "cuda", 90, 141), HardwareProfile("b200", "cuda", 100, 180),
    HardwareProfile("gb200", "cuda", 100, 186), HardwareProfile("rtx-pro-6000-blackwell", "cuda", 120, 96),
    HardwareProfile("mi300x", "rocm", 0, 192), HardwareProfile("cpu", "cpu", 0, 16),
)}


def profile(name: str) -> HardwareProfile:
    """A profile by name. Raises Unlaunchable with the list."""
    if name not in PROFILES:
        raise Unlaunchable(f"hardware profile {name!r} is not known", f"known are {', '.join(PROFILES)}")
    return PROFILES[name]


def static_fraction(memory_gib: float) -> float:
    """SGLang's own rule for `--mem-fraction-static`, less a margin for what speculation needs outside the KV pool.

    The rule (`memory_hook.py`): all memory but 0.5 GiB, 1.5 MiB per token of a prefill chunk, 2 MiB per captured decode
    batch size and about 0.6 GiB of prefill graphs; at least 10 GiB above 60 GiB. Drafter weights count inside the
    fraction since SGLang PR 28855. Outside of it are the drafter's graphs and the logits of verification (48 requests x
    8 draft tokens x 128k vocabulary in float32 are 0.2 GiB): 2 % covers both on the smallest GPU. The variant without
    speculation leaves them unused, so that all variants have the same fraction.
    """
    chunk, graphs = next((chunk, graphs) for below, chunk, graphs in (
        (35, 4096, 48), (60, 4096, 32), (160, 8192, 256), (math.inf, 16384, 512)) if memory_gib < below)
    reserved_mib = 512 + 1.5 * chunk + 2 * graphs + 600
    if memory_gib > 60:
        reserved_mib = max(reserved_mib, 10 * 1024)
    return math.floor(100 * (1 - reserved_mib / (1024 * memory_gib) - 0.02)) / 100


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
    platforms: tuple[Platform, ...]
    computes: tuple[int, int] = (75, 120)
    """Lowest and highest CUDA compute capability."""

    page_sizes: tuple[int, ...] | None = None
    """Allowed ones, the default first; None: any, 1 by default."""

    trees: bool = True
    paged_trees: bool = True
    mla: Literal["yes", "chains", "only", "no"] = "yes"
    """only: supports no other target, and no Llama drafter, which Eyrie's are."""

    sinks: bool = True
    speculates: bool = True
    window: str = "whose sliding windows have not been examined"
    """How it computes the chain of a drafter with a sliding window (`--speculative-draft-window-size`) differently from
    training; empty: equally."""


BACKENDS: dict[str, _Backend] = {
    "fa3": _Backend(("cuda",), (80, 90), window=""),
    "flashinfer": _Backend(("cuda",), mla="chains", sinks=False, window="that forgets it after the first step"),
    "triton": _Backend(("cuda", "rocm"), window="that gives it one key too few from the second step on"),
    # 90 and 120 pass SGLang's check too, but only SM100 has the kernels this backend is named for.
    "trtllm_mha": _Backend(("cuda",), (100, 103), page_sizes=(64, 16, 32, 128), trees=False, mla="no"),
    "fa4": _Backend(("cuda",), (100, 103), page_sizes=(128,), paged_trees=False, mla="no"),
    "flashmla": _Backend(("cuda",), (90, 103), page_sizes=(64,), trees=False, mla="only"),
    "trtllm_mla": _Backend(("cuda",), (100, 120), page_sizes=(64, 32), trees=False, mla="only"),
    "cutedsl_mla": _Backend(("cuda",), (100, 103), page_sizes=(64, 32), trees=False, mla="only"),
    "aiter": _Backend(("rocm",), trees=False),
    "intel_amx": _Backend(("cpu",), paged_trees=False, window=""),
    "torch_native": _Backend(("cpu",), mla="no", speculates=False),
}


def preferred(machine: HardwareProfile, needs: AttentionNeeds) -> tuple[str, ...]:
    """Backends for a target on a machine, the preferred one first."""
    if machine.platform == "cpu":
        return ("intel_amx",)
    if machine.platform == "rocm":
        return ("aiter", "triton")
    hopper_or_older, blackwell = machine.compute <= 90, machine.compute in (100, 103)
    if needs.mla:
        return ("fa3", "triton") if machine.compute == 90 else ("flashinfer", "triton") if blackwell else ("triton",)
    if needs.sinks or needs.sliding or needs.windowed_draft:
        # SGLang's own choice for GPT-OSS, Olmo and Llama 4: windows are what flashinfer does worst.
        fits = machine.compute == 90 if needs.sinks else hopper_or_older
        return ("fa3", "triton") if fits else ("trtllm_mha", "triton") if blackwell else ("triton",)
    if machine.compute == 90:
        return ("fa3", "flashinfer", "triton")
    if blackwell and not needs.linear:  # SGLang refuses trtllm_mha where recurrent state is kept without a buffer
        return ("trtllm_mha", "flashinfer", "triton")
    return ("flashinfer", "triton")


def default_page_size(backend: str, widest: int) -> int:
    """The page size of a backend unless another one is requested."""
    if backend == "fa4" and widest > 1:
        return 1
    sizes = BACKENDS[backend].page_sizes if backend in BACKENDS else None
    return sizes[0] if sizes else 1


def attention_problem(machine: HardwareProfile, needs: AttentionNeeds, backend: str, widest: int,
                      page_size: int) -> tuple[str, str] | None:
    """Why a backend does not support drafts with `top_k` up to `widest` (0: no speculation), and the hint.

    None when it does.
    """
    known = BACKENDS.get(backend)
    if known is None:
        return f"attention backend {backend!r} is not known to Eyrie", f"use one of {', '.join(BACKENDS)}"
    others = ", ".join(name for name in preferred(machine, needs) if name != backend) or "another machine"
    low, high = known.computes
    if machine.platform not in known.platforms or (machine.platform == "cuda" and not low <= machine.compute <= high):
        return f"attention backend {backend!r} does not run on {machine.name}", f"use {others}"
    if backend == "fa3" and needs.mla and machine.compute != 90:
        return f"fa3 serves MLA targets on Hopper only, not on {machine.name}", f"use {others}"
    if known.mla == "no" and needs.mla:
        return f"attention backend {backend!r} does not serve MLA targets", f"use {others}"
    if known.mla == "only" and not needs.mla:
        return f"attention backend {backend!r} serves MLA targets only", f"use {others}"
    if needs.sinks and not known.sinks:
        return f"attention backend {backend!r} has no attention sinks, which this target has", f"use {others}"
    if machine.platform == "cpu" and needs.linear and page_size > 1:
        return (f"recurrent layers keep their state with page size 1 only on CPU, not {page_size}",
                "leave page_size out, or set it to 1")
    if widest == 0:
        return _page_problem(known, backend, 0, page_size)
    if not known.speculates:
        return f"attention backend {backend!r} cannot draft", f"use {others}, or the setting off"
    if known.mla == "only":
        return (f"attention backend {backend!r} drafts only for MLA drafters; Eyrie's are Llama layers",
                f"use {others}")
    if needs.windowed_draft:
        problem = _window_problem(machine, known, backend, needs.windowed_draft)
        if problem is not None:
            return problem
    if widest > 1 and (not known.trees or (needs.mla and known.mla == "chains")):
        return (f"attention backend {backend!r} verifies chains only{' for MLA targets' if needs.mla else ''}, and "
                f"top_k is {widest}", f"use {others}, or top_k 1")
    if widest > 1 and page_size > 1:
        if not known.paged_trees:
            return (f"attention backend {backend!r} verifies trees (top_k {widest}) with page size 1 only, not "
                    f"{page_size}", "leave page_size out, or set it to 1")
        if backend == "fa3" and needs.sliding:
            return (f"fa3 verifies trees (top_k {widest}) over sliding-window layers with page size 1 only, not "
                    f"{page_size}", "leave page_size out, use triton, or top_k 1")
    return _page_problem(known, backend, widest, page_size)


def _window_problem(machine: HardwareProfile, known: _Backend, backend: str, top_k: int) -> tuple[str, str] | None:
    """A drafter with a sliding window is served as it was trained, or rejected.

    From the source of 0.5.23: draft steps get their keys from lists built for all layers at once. flashinfer builds
    them without a window (`resolve_draft_decode_window` leaves it to the layer, whose own applies to the first step
    only); triton lists as many as the flag states, the step's own included, where the first step has one more; fa3 and
    intel_amx cut in the kernel, from the step's own position. In a tree fa3 cuts the accepted text for all
    nodes at once: a node at depth d sees d - 1 keys too many.
    """
    where = "fa3" if machine.platform == "cuda" and 80 <= machine.compute <= 90 else (
        "intel_amx" if machine.platform == "cpu" else "fa3 (a GPU up to Hopper)")
    hint = f"serve this drafter as a chain (top_k 1) on {where}, or train it without drafter.sliding_window"
    if known.window:
        return f"the drafter has a sliding window, and attention backend {backend!r} is one {known.window}", hint
    if top_k > 1:
        return (f"the drafter has a sliding window, which nodes of a tree (top_k {top_k}) exceed in attention backend "
                f"{backend!r}", hint)
    return None


def _page_problem(known: _Backend, backend: str, widest: int, page_size: int) -> tuple[str, str] | None:
    if known.page_sizes is None or page_size in known.page_sizes or (backend == "fa4" and widest > 1):
        return None
    sizes = ", ".join(map(str, sorted(known.page_sizes)))
    return (f"page size {page_size} is not one of attention backend {backend!r} ({sizes}): SGLang would change it",
            f"use {sizes}, or leave page_size out")


def choose_attention(machine: HardwareProfile, needs: AttentionNeeds, widths: Collection[int],
                     page_size: int | None = None) -> tuple[str, int]:
    """The best backend that serves all of these top_k (0: no speculation), and its page size. Raises Unlaunchable."""
    widest = max(widths, default=0)
    problems: list[tuple[str, str]] = []
    for backend in preferred(machine, needs):
        size = page_size if page_size is not None else default_page_size(backend, widest)
        problem = attention_problem(machine, needs, backend, widest, size)
        if problem is None:
            return backend, size
        problems.append(problem)
    hint = problems[0][1] if needs.windowed_draft else "use top_k 1, or leave page_size out"
    raise Unlaunchable(f"no attention backend of {machine.name} serves top_k {widest} for this target: "
                       + "; ".join(text for text, _ in problems), hint)
