"""The command line of a SGLang server, from a target, a drafter, a setting and a machine. Pure: values in, strings out.

Four things go wrong when such lines are written by hand, and are made impossible here.

*A comparison that compares something else.* With speculation SGLang lowers max-running-requests to 48 when nobody sets
it, captures CUDA graphs for more batch sizes (so the other variant is padded), and may take another attention backend
for every top_k. Every line rendered here carries all of them, the memory fraction and the seed, and `comparison` gives
all variants the same ones, the backend being one that serves every setting compared.

*A drafter served otherwise than it was trained.* Its window (`drafter.sliding_window`) is kept by few backends and in
no tree; elsewhere it drafts from other keys, and nobody is told. Refused.

*A server that speculates less than it was told.* Adaptive speculation with LoRA, a tree or attention data parallelism
falls back to static settings with a warning in the log; a drafter beside a target quantised by flag is quantised too; a
drafter of blocks drafts blocks of another length than it was trained for. Such combinations are refused, or rendered
with the flag that prevents it. So is what SGLang has no form of: families it does not know, and static trees.

*A failure after ten minutes of loading weights.* What the model runner would refuse (a drafter with less context than
is served, a target whose hidden states cannot be captured) is refused before anything starts.

The line belongs to SGLang 0.5.23; tests/sglang resolves a matrix of them through that version's own parser. What is not
here: the process (`process`), and secrets. SGLang reads its API key from a flag or a `--config` file and from no
environment variable; a flag would show in every process list and manifest, so the plan names the file.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eyrie_api.decisions.capture_support import PLUGIN_ARCHITECTURES, require_block_capture, require_capture
from eyrie_api.v1alpha1.targets import Dtype
from eyrie_api.v1alpha1.tuning import OFF, OperatingMap, Setting
from eyrie_workers.engines.sglang.checkpoints import Algorithm, DrafterCheckpoint, TargetCheckpoint
from eyrie_workers.engines.sglang.profiles import (
    AttentionNeeds,
    HardwareProfile,
    attention_problem,
    captured_batches,
    choose_attention,
    default_page_size,
)
from eyrie_workers.targets.sglang_limits import Unlaunchable

PLUGIN_PACKAGE = "eyrie_workers.engines.sglang.plugin"
MODULE = "sglang.launch_server"
_FOLLOWS_LOAD: tuple[Algorithm, ...] = ("EAGLE", "EAGLE3")
"""Adaptive speculation knows these."""

_DRAFTS_BLOCKS = ("flashinfer", "fa3", "fa4", "triton")
"""Attention backends that compute a drafter of blocks; beside any other SGLang takes one of them for it, and logs."""


@dataclass(frozen=True)
class LaunchPlan:
    """Everything a server is told."""

    target: TargetCheckpoint
    machine: HardwareProfile
    served_model_name: str
    drafter: DrafterCheckpoint | None = None
    setting: Setting = OFF
    map: OperatingMap | None = None
    """When its adaptive form is there, the server follows the load by it; else `setting` holds at every load."""

    adaptive_path: str | None = None
    """Where the caller puts `adaptive_document(plan)` before the server starts."""

    host: str = "127.0.0.1"
    port: int = 30000
    dtype: Dtype = "bfloat16"
    context_length: int | None = None
    """Longest text served. Default: what target and drafter both reach."""

    max_running_requests: int = 48
    """SGLang's own limit with speculation, and far below the one without: so it is always given."""

    mem_fraction: float | None = None
    """Default: the machine profile's."""

    max_total_tokens: int | None = None
    """Bound of the KV pool in tokens, for machines whose memory is not all SGLang's."""

    attention_backend: str | None = None
    page_size: int | None = None
    tp_size: int = 1
    pp_size: int = 1
    attn_dp_size: int = 1
    """Attention data parallelism: groups that each attend to their own requests."""

    quantization: str | None = None
    """`--quantization`, for a target quantised while it is loaded."""

    lora_paths: tuple[str, ...] = ()
    """`name=path` of adapters on the target. The drafter stays unadapted."""

    metrics: bool = True
    key_file: str | None = None
    """A YAML file with the line `api-key: ...`, mounted from a Secret."""

    plugin_root: str | None = None
    """Directory that holds the package `eyrie_workers`, where SGLang's interpreter does not have it installed."""


@dataclass(frozen=True)
class SharedServerArgs:
    """What every variant of a comparison must share."""

    attention_backend: str
    page_size: int
    mem_fraction: float
    max_running_requests: int
    context_length: int


def launch_arguments(plan: LaunchPlan, pins: SharedServerArgs | None = None) -> tuple[str, ...]:
    """The arguments behind `python -m sglang.launch_server`. Raises Unlaunchable with the hint."""
    pins = pins or shared_args(plan)
    _check(plan, pins)
    line = [
        "--model-path", plan.target.model, "--served-model-name", plan.served_model_name,
        "--host", plan.host, "--port", str(plan.port), "--dtype", plan.dtype,
        "--context-length", str(pins.context_length),
        "--max-running-requests", str(pins.max_running_requests),
        "--mem-fraction-static", f"{pins.mem_fraction:g}",
        "--attention-backend", pins.attention_backend, "--page-size", str(pins.page_size),
        "--tp-size", str(plan.tp_size), "--random-seed", "0",
    ]
    if plan.machine.platform != "cpu":
        line += ["--cuda-graph-bs-decode", *map(str, captured_batches(pins.max_running_requests))]
    if plan.target.revision is not None:
        line += ["--revision", plan.target.revision]
    if plan.pp_size > 1:
        line += ["--pp-size", str(plan.pp_size)]
    if plan.attn_dp_size > 1:
        line += ["--attn-dp-size", str(plan.attn_dp_size)]
    if plan.max_total_tokens is not None:
        line += ["--max-total-tokens", str(plan.max_total_tokens)]
    if plan.quantization is not None:
        line += ["--quantization", plan.quantization]
    if plan.machine.platform == "cpu":
        # Speculation switches the overlap scheduler off on CPU; both variants of a comparison must be without it. An
        # idle scheduler polls without pause: it would take a core from the variant that is being measured.
        line += ["--device", "cpu", "--disable-overlap-schedule", "--sleep-on-idle"]
    if plan.metrics:
        line.append("--enable-metrics")
    if plan.lora_paths:
        line += ["--lora-paths", *plan.lora_paths]
    if plan.key_file is not None:
        line += ["--config", plan.key_file]
    return (*line, *_speculation(plan, pins))


def launch_environment(plan: LaunchPlan) -> dict[str, str]:
    """Environment variables the line needs, on top of the caller's."""
    variables: dict[str, str] = {}
    if plan.machine.platform == "rocm":
        # Without it aiter takes 15 % off a given memory fraction when the context is above 8192 (attention_hook.py).
        variables["SGLANG_AITER_HONOR_EXPLICIT_MEM_FRACTION"] = "1"
    if plan.machine.platform == "cpu":
        variables["SGLANG_USE_CPU_ENGINE"] = "1"
    if plan.target.architecture in PLUGIN_ARCHITECTURES:  # in both variants: they must run the same model class
        variables["SGLANG_EXTERNAL_MODEL_PACKAGE"] = PLUGIN_PACKAGE
        if plan.plugin_root is not None:
            variables["PYTHONPATH"] = plan.plugin_root
    return variables


def adaptive_document(plan: LaunchPlan) -> str | None:
    """The text of the file that `adaptive_path` names; None when the plan is not adaptive."""
    slots = _adaptive_slots(plan)
    return None if slots is None else json.dumps(slots, indent=1) + "\n"


def shared_args(plan: LaunchPlan, also: Sequence[Setting] = (), beside: Sequence[Setting] = ()) -> SharedServerArgs:
    """What to pin for this plan, and for the same plan under these settings too. Raises Unlaunchable.

    beside   settings of other drafters' plans that are to have the same pins
    """
    widths = {_width(setting) for setting in (plan.setting, *also, *beside)}
    if _adaptive_slots(plan) is not None:
        widths.add(1)
    needs = _needs(plan, (plan.setting, *also))
    if plan.attention_backend is None:
        backend, page_size = choose_attention(plan.machine, needs, widths, plan.page_size)
    else:
        backend, widest = plan.attention_backend, max(widths)
        page_size = plan.page_size if plan.page_size is not None else default_page_size(backend, widest)
        problem = attention_problem(plan.machine, needs, backend, widest, page_size)
        if problem is not None:
            raise Unlaunchable(*problem)
    return SharedServerArgs(
        attention_backend=backend, page_size=page_size,
        mem_fraction=plan.mem_fraction if plan.mem_fraction is not None else plan.machine.mem_fraction,
        max_running_requests=plan.max_running_requests, context_length=_context(plan))


def without_speculation(plan: LaunchPlan) -> LaunchPlan:
    """The same server, decoding plainly."""
    return replace(plan, setting=OFF, map=None)


def comparison(plan: LaunchPlan, settings: Sequence[Setting] = ()) -> dict[str, tuple[str, ...]]:
    """Lines to be measured against each other, by label: `off`, the plan's own, and the plan under each of `settings`.

    Attention backend, page size, memory fraction, max-running-requests and context are the same in all of them.
    """
    pins = shared_args(plan, settings)
    lines = {OFF.label(): launch_arguments(without_speculation(plan), pins)}
    if _adaptive_slots(plan) is not None:
        lines["adaptive"] = launch_arguments(plan, pins)
    for setting in (plan.setting, *settings):
        lines[setting.label()] = launch_arguments(replace(plan, setting=setting, map=None), pins)
    return lines


# Speculation


def _speculation(plan: LaunchPlan, pins: SharedServerArgs) -> list[str]:
    slots = _adaptive_slots(plan)
    tree = plan.setting.tree
    if slots is None and tree is None:
        return []
    if slots is None and plan.setting.method == "ngram":
        assert tree is not None
        line = ["--speculative-algorithm", "NGRAM", "--speculative-num-steps", str(tree.num_steps),
                "--speculative-ngram-max-bfs-breadth", str(tree.top_k),
                "--speculative-num-draft-tokens", str(tree.num_draft_tokens)]
        if plan.machine.platform == "cpu":  # SGLang's 10 million nodes are 2 GB of the memory the model is in
            line += ["--speculative-ngram-capacity", "1000000"]
        return line
    drafter = plan.drafter
    assert drafter is not None  # _check has seen to it
    line = ["--speculative-algorithm", str(drafter.algorithm), "--speculative-draft-model-path", drafter.directory]
    if slots is not None:
        # The deepest of its steps: whatever is sized from the values at start is then large enough.
        deepest = max(_steps(slots))
        line += ["--speculative-num-steps", str(deepest), "--speculative-eagle-topk", "1",
                 "--speculative-num-draft-tokens", str(deepest + 1),
                 "--speculative-adaptive", "--speculative-adaptive-config", str(plan.adaptive_path)]
    elif tree is not None and drafter.algorithm == "DFLASH":
        line += ["--speculative-dflash-block-size", str(tree.num_draft_tokens)]
        if pins.attention_backend not in _DRAFTS_BLOCKS:
            line += ["--speculative-draft-attention-backend",
                     "triton" if plan.machine.platform == "rocm" else "flashinfer"]
    elif tree is not None:
        line += ["--speculative-num-steps", str(tree.num_steps), "--speculative-eagle-topk", str(tree.top_k),
                 "--speculative-num-draft-tokens", str(tree.num_draft_tokens)]
    if (plan.quantization or plan.target.quantised) and drafter.quantised is None:
        line += ["--speculative-draft-model-quantization", "unquant"]  # or it inherits the target's
    if drafter.sliding_window is not None:
        # SGLang counts the positions behind the present one, our window counts that one too.
        line += ["--speculative-draft-window-size", str(drafter.sliding_window - 1)]
    return line


def _needs(plan: LaunchPlan, settings: Sequence[Setting]) -> AttentionNeeds:
    """What target and drafter together ask of the backend under any of these settings, and under the plan's map."""
    if plan.drafter is None or plan.drafter.sliding_window is None:
        return plan.target.attention
    drafted = [_width(setting) for setting in settings if setting.method == "drafter"]
    if _adaptive_slots(plan) is not None:
        drafted.append(1)
    return replace(plan.target.attention, windowed_draft=max(drafted, default=0))


def _width(setting: Setting) -> int:
    return setting.tree.top_k if setting.tree is not None else 0


def _adaptive_slots(plan: LaunchPlan) -> dict[str, Any] | None:
    """The map's adaptive form; None without one, or when it never drafts. Raises Unlaunchable when it is malformed."""
    if plan.map is None or plan.map.adaptive is None:
        return None
    slots = dict(plan.map.adaptive)
    steps = _steps(slots)
    if not steps:
        raise Unlaunchable("the operating map's adaptive form has no batch-size slot",
                           "tune again, or serve one setting")
    return slots if max(steps) > 0 else None


def _steps(slots: Mapping[str, Any]) -> list[int]:
    found: list[int] = []
    for key, entry in slots.items():
        if not key.isdigit():
            continue
        steps = entry.get("candidate_steps") if isinstance(entry, Mapping) else None
        if not isinstance(steps, list) or not steps or not all(isinstance(s, int) and s >= 0 for s in steps):
            raise Unlaunchable(f"the operating map's adaptive form, slot {key}: candidate_steps is {steps!r}",
                               "give a list of step counts, 0 for no drafting")
        found += steps
    return found


# Refusals


def _context(plan: LaunchPlan) -> int:
    reach = plan.target.context_length
    if plan.drafter is not None:
        reach = min(reach, plan.drafter.context_length)
    return plan.context_length if plan.context_length is not None else reach


def _check(plan: LaunchPlan, pins: SharedServerArgs) -> None:
    """Refuse what SGLang refuses, drops with a warning, or finds out only with the weights loaded."""
    adaptive = _adaptive_slots(plan) is not None
    drafting = adaptive or plan.setting.method == "drafter"
    widest = max(_width(plan.setting), 1 if adaptive else 0)
    needs = _needs(plan, (plan.setting,))
    problem = attention_problem(plan.machine, needs, pins.attention_backend, widest, pins.page_size)
    if problem is not None:
        raise Unlaunchable(*problem)
    if pins.context_length > plan.target.context_length:
        raise Unlaunchable(f"context_length {pins.context_length} is more than the target's "
                           f"{plan.target.context_length}", f"serve at most {plan.target.context_length}")
    if not 0.0 < pins.mem_fraction < 1.0:
        raise Unlaunchable(f"mem_fraction {pins.mem_fraction} is not between 0 and 1", "leave it out")
    if plan.dtype == "float32" and plan.machine.platform != "cpu" and pins.attention_backend != "triton":
        raise Unlaunchable(f"dtype float32 has no kernel in attention backend {pins.attention_backend!r}",
                           "serve in bfloat16")
    if plan.pp_size > 1 and plan.setting != OFF:
        raise Unlaunchable(f"pp_size {plan.pp_size} with speculation: hidden states are captured on the last pipeline "
                           "rank alone", "use tp_size instead, or the setting off")
    if plan.attn_dp_size > 1:
        if plan.tp_size % plan.attn_dp_size:
            raise Unlaunchable(f"tp_size {plan.tp_size} is not a multiple of attn_dp_size {plan.attn_dp_size}",
                               "make it one")
        if plan.setting.method == "ngram" and not adaptive:
            raise Unlaunchable("n-gram speculation does not run with attention data parallelism",
                               "use attn_dp_size 1, or the drafter")
    if plan.setting.method == "ngram" and widest > 1 and pins.page_size > 1 and pins.attention_backend != "flashinfer":
        raise Unlaunchable(f"n-gram trees (top_k {widest}) with page size {pins.page_size} run on flashinfer only, not "
                           f"on {pins.attention_backend}", "leave page_size out, or use top_k 1")
    if plan.setting.tree is not None and plan.setting.tree.static and not adaptive:
        raise Unlaunchable(f"the tree {plan.setting.label()} is static, and SGLang grows every tree by confidence",
                           "leave static out, or serve it in Eyrie's own engine")
    if adaptive:
        _check_adaptive(plan)
    if drafting:
        _check_drafter(plan, pins)


def _check_adaptive(plan: LaunchPlan) -> None:
    if plan.adaptive_path is None:
        raise Unlaunchable("the operating map is adaptive, but there is no adaptive_path for its file",
                           "give the path the server will read it from")
    if plan.lora_paths:
        raise Unlaunchable("adaptive speculation does not run with LoRA adapters",
                           "serve one setting (leave the map out), or no adapters")
    if plan.attn_dp_size > 1:
        raise Unlaunchable("adaptive speculation does not run with attention data parallelism: SGLang would serve one "
                           "setting and only log it", "serve one setting (leave the map out), or attn_dp_size 1")


def _check_family(plan: LaunchPlan, drafter: DrafterCheckpoint, algorithm: Algorithm) -> None:
    """What one way of drafting cannot do and another can."""
    adaptive = _adaptive_slots(plan) is not None
    if algorithm == "EAGLE3":
        require_capture(plan.target.architecture)
    if adaptive and algorithm not in _FOLLOWS_LOAD:
        raise Unlaunchable(f"adaptive speculation does not run with {algorithm}: SGLang would serve one setting and "
                           "only log it", "serve one setting (leave the map out)")
    if drafter.sliding_window is not None and algorithm != "EAGLE3":
        raise Unlaunchable(f"the drafter sees a window, which SGLang does not keep as trained with {algorithm}",
                           "train it without drafter.sliding_window")
    if algorithm in ("STANDALONE", "DFLASH") and plan.attn_dp_size > 1:
        raise Unlaunchable(f"{algorithm} does not run with attention data parallelism", "use attn_dp_size 1")
    if algorithm == "STANDALONE" and plan.lora_paths:
        raise Unlaunchable("STANDALONE does not run with LoRA adapters", "serve without adapters, or another drafter")
    if algorithm == "DFLASH":
        _check_blocks(plan, drafter)


def _check_blocks(plan: LaunchPlan, drafter: DrafterCheckpoint) -> None:
    if plan.machine.platform == "cpu":
        raise Unlaunchable("DFLASH does not run on cpu", "serve it on a GPU, or in Eyrie's own engine")
    require_block_capture(plan.target.architecture)
    tree = plan.setting.tree
    if tree is None:
        return
    if tree.top_k > 1:
        raise Unlaunchable(f"SGLang verifies a block as a chain, and top_k is {tree.top_k}",
                           "use top_k 1, or serve the tree in Eyrie's own engine")
    if drafter.block_size is not None and drafter.block_size != tree.num_draft_tokens:
        raise Unlaunchable(f"num_draft_tokens {tree.num_draft_tokens} is not the block of {drafter.block_size} the "
                           "drafter was trained to write: SGLang would let it write others and only log it",
                           f"use num_steps {drafter.block_size - 1} and num_draft_tokens {drafter.block_size}")


def _check_drafter(plan: LaunchPlan, pins: SharedServerArgs) -> None:
    if plan.drafter is None:
        raise Unlaunchable("the setting drafts with a drafter, and there is none", "give a drafter directory, or off")
    if plan.drafter.algorithm is None:
        raise Unlaunchable(f"the drafter in {plan.drafter.directory} is of a family that SGLang cannot serve",
                           "serve it in Eyrie's own engine, or train eagle3, eagle1, standalone or dflash")
    _check_family(plan, plan.drafter, plan.drafter.algorithm)
    if plan.drafter.context_length < pins.context_length:
        raise Unlaunchable(
            f"the drafter reaches {plan.drafter.context_length} positions (max_position_embeddings), less than the "
            f"context_length served, {pins.context_length}",
            f"serve context_length {plan.drafter.context_length}, or train with drafter.max_position_embeddings "
            f"{pins.context_length}")
