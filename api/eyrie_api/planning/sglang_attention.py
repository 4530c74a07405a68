"""The attention backend of SGLang on a machine, and the machines that are known to it. Pure.

SGLang chooses its attention backend depending on speculation and top_k: on a Hopper GPU a chain runs on fa3 and a tree
on flashinfer; on Blackwell a chain runs on trtllm_mha, and a server without an explicit top_k on flashinfer. A
comparison of two settings would then compare kernels. So Eyrie chooses one backend that supports every compared
setting and sets it explicitly; a job may name it (`engine.attention_backend`), which these rules then refuse or keep.
The table contains the capabilities of each backend as SGLang 0.5.23 checks them (`arg_groups/speculative_hook.py`,
`overrides.py`, `attention_hook.py`, `layers/attention/*`). Some of SGLang's checks run only while it loads weights;
here they run before the start. tests/sglang resolves a matrix of command lines with the real parser.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from eyrie_api.contract.engine import CHAIN_BACKENDS, AttentionBackend, DraftServing
from eyrie_api.contract.families import BLOCK_ALGORITHMS, SGLangAlgorithm
from eyrie_api.planning.hardware import known_gpu, static_fraction
from eyrie_api.planning.sglang_support import Unlaunchable
from eyrie_api.planning.target_config import SLIDING

Platform = Literal["cuda", "rocm", "cpu"]

_LINEAR = "linear_attention"
_SINK_ARCHITECTURES = ("GptOssForCausalLM",)


@dataclass(frozen=True)
class SglangHardware:
    name: str
    platform: Platform
    compute: int
    """CUDA compute capability without its dot (90: Hopper); 0 elsewhere."""

    memory_gib: float
    given_fraction: float | None = None
    """`engine.sglang_arguments.mem_fraction_static`."""

    @property
    def mem_fraction(self) -> float:
        """Share of the memory for weights and the KV pool of target and drafter; see `static_fraction`."""
        return self.given_fraction or (static_fraction(self.memory_gib) if self.platform != "cpu" else 0.3)


PROFILES: dict[str, SglangHardware] = {machine.name: machine for machine in (
    SglangHardware("a10", "cuda", 86, 24), SglangHardware("a100-40gb", "cuda", 80, 40),
    SglangHardware("a100-80gb", "cuda", 80, 80), SglangHardware("l40s", "cuda", 89, 48),
    SglangHardware("rtx-4090", "cuda", 89, 24), SglangHardware("h100", "cuda", 90, 80),
    SglangHardware("h200", "cuda", 90, 141), SglangHardware("b200", "cuda", 100, 180),
    SglangHardware("gb200", "cuda", 100, 186), SglangHardware("rtx-pro-6000-blackwell", "cuda", 120, 96),
    SglangHardware("mi300x", "rocm", 0, 192), SglangHardware("cpu", "cpu", 0, 16),
)}


def labelled(label: str | None) -> SglangHardware | None:
    """The machine with GPUs of this node label; None where the type is not known. It has no memory."""
    gpu = known_gpu(label)
    return None if gpu is None else SglangHardware(gpu.name, "cuda", gpu.compute, 0)


def profile(name: str) -> SglangHardware:
    if name not in PROFILES:
        raise Unlaunchable(f"hardware profile {name!r} is not known", f"known are {', '.join(PROFILES)}")
    return PROFILES[name]


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


def needs_of(config: Mapping[str, Any]) -> AttentionNeeds:
    """Those of a target by its config.json."""
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    architectures, kinds = config.get("architectures") or [""], text.get("layer_types")
    kinds = kinds if isinstance(kinds, list) else []
    windowed = bool(text.get("sliding_window")) and bool(text.get("use_sliding_window", True))
    return AttentionNeeds(
        mla=bool(text.get("kv_lora_rank")), sliding=SLIDING in kinds or (not kinds and windowed),
        sinks=str(architectures[0]) in _SINK_ARCHITECTURES,
        linear=_LINEAR in kinds or bool(text.get("linear_num_key_heads")))


@dataclass(frozen=True)
class _Backend:
    """What an attention backend computes for drafts, of those in `preferred`."""

    trees: bool = True
    mla_trees: bool = True
    """Whether it verifies trees for MLA targets, where it is chosen for them."""

    window: str = "whose sliding windows have not been examined"
    """How it computes the chain of a drafter with a sliding window (`--speculative-draft-window-size`) differently from
    training; empty: equally."""


BACKENDS: dict[AttentionBackend, _Backend] = {
    "fa3": _Backend(window=""),
    "flashinfer": _Backend(mla_trees=False, window="that forgets it after the first step"),
    "triton": _Backend(window="that gives it one key too few from the second step on"),
    "trtllm_mha": _Backend(trees=False),
    "aiter": _Backend(trees=False),
    "intel_amx": _Backend(window=""),
}

PAGE_SIZES: dict[AttentionBackend, int] = {**dict.fromkeys(BACKENDS, 1), "trtllm_mha": 64}
"""`--page-size`. intel_amx and, over sliding-window layers, fa3 verify trees with page size 1 only."""


def preferred(machine: SglangHardware, needs: AttentionNeeds) -> tuple[AttentionBackend, ...]:
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


def attention_problem(machine: SglangHardware, needs: AttentionNeeds, backend: AttentionBackend,
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


def draft_problem(machine: SglangHardware, needs: AttentionNeeds, draft: DraftServing, algorithm: SGLangAlgorithm,
                  tree: bool, target_backend: AttentionBackend | None) -> tuple[str, str] | None:
    """Why SGLang does not compute a drafter of this algorithm so on a machine, and the hint; None when it does.

    tree             whether it is to draft trees
    target_backend   of the target's attention; None: the preferred one

    From 0.5.23: block drafters keep trtllm_mha only if their layers are causal or windowed, which Eyrie's are not, and
    fa4 reads no FP8 cache (`_resolve_dflash_draft_attention_backend`, `configure_kv_cache_dtype`). Few backends verify
    different numbers of tokens of the requests of one batch (`supports_ragged_verify_graph`; trtllm_mha only where it
    is preferred, flashinfer only for MLA), with linear attention none.
    """
    backend, blocks, gpu = draft.attention_backend, algorithm in BLOCK_ALGORITHMS, machine.platform == "cuda"
    served = ({"fa3": machine.compute <= 90, "fa4": machine.compute in (100, 103), "flashinfer": True, "triton": True,
               "trtllm_mha": machine.compute in (100, 103) and not blocks} if gpu else
              {"triton": machine.platform == "rocm"})
    fits = " or ".join(name for name, serves in served.items() if serves) or "a GPU"
    if draft.step_rates is not None and algorithm != "DSPARK":
        return f"draft.step_rates is of DSpark's confidences, and the drafter is of {algorithm}", "omit it"
    if draft != DraftServing() and machine.platform == "cpu":
        return f"draft {draft.label()[1:]!r} is for GPUs, and this is a CPU", "omit draft"
    ragged = () if needs.linear else ("fa3", "trtllm_mha", *(("flashinfer",) if needs.mla else ()))
    target = target_backend or preferred(machine, needs)[0]
    if draft.step_rates is not None and target not in ragged:
        others = " or ".join(name for name in preferred(machine, needs) if name in ragged)
        return (f"draft.step_rates verifies parts of blocks, and attention backend {target!r} of the target does not",
                f"omit it, or use {others or 'a GPU with another: fa3 on Hopper, trtllm_mha on B200'}")
    if backend is not None and not served.get(backend, False):
        return (f"draft.attention_backend is {backend!r}, which does not draft {algorithm} on {machine.name}",
                f"use {fits}, or omit it")
    if backend in CHAIN_BACKENDS and tree:
        return f"draft.attention_backend {backend!r} drafts chains only", "set top_k to 1, or use another"
    chosen = "fa4" if algorithm == "DFLASH" and target == "trtllm_mha" else None  # by SGLang
    if (backend or chosen) == "fa4" and draft.kv_dtype == "fp8_e4m3":
        return ("draft.kv_dtype is 'fp8_e4m3', and the drafter's attention backend 'fa4' reads no FP8 cache",
                "omit it, or set draft.attention_backend to 'flashinfer' or 'triton'")
    if gpu and machine.compute < 89 and "fp8" in draft.label():
        return f"{machine.name} has no FP8, and draft is {draft.label()[1:]!r}", "omit kv_dtype and quantization"
    return None


def choose_attention(machine: SglangHardware, needs: AttentionNeeds, widths: Collection[int],
                     given: AttentionBackend | None = None) -> AttentionBackend:
    """The best backend that serves all of these top_k (0: no speculation), or the given one if it does. Raises
    Unlaunchable."""
    widest, backends = max(widths, default=0), preferred(machine, needs)
    if given is not None:
        if given not in backends:
            raise Unlaunchable(f"engine.attention_backend is {given!r}, which does not serve this target on "
                               f"{machine.name}", f"use {' or '.join(backends)}, or omit it")
        if (wrong := attention_problem(machine, needs, given, widest)) is not None:
            raise Unlaunchable(f"engine.attention_backend: {wrong[0]}", f"{wrong[1]}; or omit engine.attention_backend")
        return given
    problems: list[tuple[str, str]] = []
    for backend in backends:
        problem = attention_problem(machine, needs, backend, widest)
        if problem is None:
            return backend
        problems.append(problem)
    raise Unlaunchable(f"no attention backend of {machine.name} serves top_k {widest} for this target: "
                       + "; ".join(text for text, _ in problems),
                       problems[0][1] if needs.windowed_draft else "use top_k 1")
