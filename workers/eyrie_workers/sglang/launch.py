"""The command line of a SGLang server, rendered from a launch plan. Pure: values in, strings out.

Command lines written by hand make four mistakes that this module excludes:

*Unequal variants.* With speculation SGLang lowers max-running-requests to 48 unless it is set, captures CUDA graphs for
more batch sizes (so the variant without speculation is padded), and may choose another attention backend for each
top_k. Every command line rendered here sets all of them, the memory fraction and the seed; variants that are given the
same `SharedServerArgs` have the same values, with a backend that supports every compared setting.

*A drafter served differently than trained.* Its window (`drafter.sliding_window`) is applied by few backends and in no
tree; the others draft with different keys, without a warning. A drafter of blocks drafts longer blocks than it
was trained for if the flag says so. Both are rejected (`check_launchable`).

*Less speculation than configured.* Adaptive speculation falls back to a static setting with a warning in the log for
drafters of other algorithms than EAGLE; a drafter next to a quantised target is quantised too. Such combinations are
rejected, or rendered with the flag that prevents it.

*A failure after ten minutes of loading weights.* What the model runner would reject (a drafter with a shorter context
than is served, a target without hidden-state capture) is rejected before the server starts.

Flags and rules are those of SGLang 0.5.23; tests/sglang resolves a matrix of command lines with that version's own
parser. The process is in `process`. Secrets are not rendered: SGLang reads its API key from a flag or a `--config` file
and from no environment variable, and a flag is visible in process lists and manifests, so the plan names the file.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from eyrie_api.contract.engine import AttentionBackend, DraftBackend, DraftServing, EngineSpec, Verification
from eyrie_api.contract.families import BLOCK_ALGORITHMS, VERIFICATIONS, SGLangAlgorithm, sglang_families
from eyrie_api.contract.targets import Dtype
from eyrie_api.contract.tuning import OFF, OperatingMap, Setting
from eyrie_api.planning import sglang_attention
from eyrie_api.planning.sglang_attention import SglangHardware
from eyrie_api.planning.sglang_support import PLUGIN_ARCHITECTURES, Unlaunchable, require_block_capture, require_capture
from eyrie_workers.sglang import profiles
from eyrie_workers.sglang.checkpoints import DrafterCheckpoint, TargetCheckpoint
from eyrie_workers.sglang.plugin_files import PACKAGE

GUARDED_MODULE = "eyrie_workers.sglang.plugin.guarded"
"""Takes the arguments of `sglang.launch_server`; the server that it starts answers inference alone."""

DEFAULT_RUNNING_REQUESTS = 48
"""SGLang's own default of --max-running-requests with speculation; without, it is far higher."""

ADAPTIVE_ALGORITHMS: tuple[SGLangAlgorithm, ...] = ("EAGLE", "EAGLE3")
"""The algorithms that support adaptive speculation."""

_DSPARK_BACKENDS: dict[AttentionBackend, DraftBackend] = {"trtllm_mha": "flashinfer", "aiter": "triton"}
"""Of a DSpark drafter under a backend of the target that computes no block of it: SGLang would keep the target's. For
DFlash it chooses one itself, on Blackwell fa4."""

_VERIFICATION_FLAGS: dict[Verification, str] = {
    "rejection": "--speculative-use-rejection-sampling", "block": "--speculative-use-block-verification"}


@dataclass(frozen=True)
class CapturedStates:
    """Hidden states that a server writes to files while it prefills, without a drafter (`sglang.capture_states`)."""

    layer_ids: tuple[int, ...]
    """SGLang's."""

    directory: str


@dataclass(frozen=True)
class LaunchPlan:
    target: TargetCheckpoint
    machine: SglangHardware
    served_model_name: str
    drafter: DrafterCheckpoint | None = None
    setting: Setting = OFF
    map: OperatingMap | None = None
    """With an adaptive form, the server changes its setting with the batch size; otherwise `setting` always applies."""

    adaptive_path: str | None = None
    """The file to which the caller writes `adaptive_config(plan)` before the server starts, if there is one."""

    host: str = "127.0.0.1"
    port: int = 30000
    dtype: Dtype = "bfloat16"
    context_length: int | None = None
    """Default: the smaller context length of target and drafter."""

    max_running_requests: int = DEFAULT_RUNNING_REQUESTS
    """Always given, because SGLang's default differs with speculation."""

    engine: EngineSpec = field(default_factory=EngineSpec)
    """With its tp_size, the attention backend and further arguments of the job."""

    key_file: str | None = None
    """A YAML file with the line `api-key: ...`, mounted from a Secret."""

    captured: CapturedStates | None = None
    plugin_root: str | None = None
    """Directory with the package that SGLang imports (`plugin_files`)."""


@dataclass(frozen=True)
class SharedServerArgs:
    """Arguments that must be equal in all variants of a comparison."""

    attention_backend: AttentionBackend
    mem_fraction: float
    max_running_requests: int
    context_length: int


def shared_args(plan: LaunchPlan, other_settings: Sequence[Setting] = ()) -> SharedServerArgs:
    """The shared arguments of a plan. Raises Unlaunchable.

    other_settings   settings of plans with other drafters that are to have the same arguments
    """
    widths = {tree_width(setting) for setting in (plan.setting, *other_settings)}
    if adaptive_slots(plan) is not None:
        widths.add(1)
    context_length = plan.context_length
    if context_length is None:
        context_length = min(plan.target.context_length,
                             plan.drafter.context_length if plan.drafter is not None else plan.target.context_length)
    return SharedServerArgs(
        attention_backend=sglang_attention.choose_attention(
            plan.machine, attention_needs(plan), widths, plan.engine.attention_backend),
        mem_fraction=plan.machine.mem_fraction, max_running_requests=plan.max_running_requests,
        context_length=context_length)


def attention_needs(plan: LaunchPlan) -> sglang_attention.AttentionNeeds:
    """What target and drafter together require of the backend under the plan's setting and map."""
    if plan.drafter is None or plan.drafter.sliding_window is None:
        return plan.target.attention
    width = tree_width(plan.setting) if plan.setting.method == "drafter" else 0
    if adaptive_slots(plan) is not None:
        width = max(width, 1)  # adaptive speculation drafts chains
    return replace(plan.target.attention, windowed_draft=width)


def tree_width(setting: Setting) -> int:
    """`top_k` of the setting; 0 without speculation."""
    return setting.tree.top_k if setting.tree is not None else 0


def adaptive_slots(plan: LaunchPlan) -> dict[str, Any] | None:
    """The map's adaptive form; None without one, or when it never drafts. Raises Unlaunchable when it is malformed."""
    if plan.map is None or plan.map.adaptive is None:
        return None
    slots = dict(plan.map.adaptive)
    steps = candidate_steps(slots)
    if not steps:
        raise Unlaunchable("the operating map's adaptive form has no batch-size slot",
                           "tune again, or serve one setting")
    return slots if max(steps) > 0 else None


def candidate_steps(slots: Mapping[str, Any]) -> list[int]:
    """All step counts of the batch-size slots. Raises Unlaunchable."""
    all_steps: list[int] = []
    for key, entry in slots.items():
        if not key.isdigit():
            continue
        steps = entry.get("candidate_steps") if isinstance(entry, Mapping) else None
        if not isinstance(steps, list) or not steps or not all(isinstance(s, int) and s >= 0 for s in steps):
            raise Unlaunchable(f"the operating map's adaptive form, slot {key}: candidate_steps is {steps!r}",
                               "give a list of step counts, 0 for no drafting")
        all_steps += steps
    return all_steps


def adaptive_config(plan: LaunchPlan) -> str | None:
    """The content of the file `adaptive_path`: adaptive speculation's slots, or DSpark's table of steps. None when the
    plan has neither."""
    slots = adaptive_slots(plan)
    if slots is None and (rates := _draft_serving(plan).step_rates):
        slots = {"sample_batch_tokens": [rate.batch_tokens for rate in rates],
                 "sample_steps_per_sec": [rate.steps_per_s for rate in rates],
                 "max_batch_tokens": rates[-1].batch_tokens}
        if temperatures := _temperatures(plan):  # SGLang reads each of the two from a file, and leaves what is not its
            slots["temperatures"] = list(temperatures)
    return None if slots is None else json.dumps(slots, indent=1) + "\n"


def _temperatures(plan: LaunchPlan) -> tuple[float, ...]:
    """Of the confidences of each step of the plan's chain, as SGLang requires; none where the drafter has fewer."""
    known, tree = plan.drafter.confidence_temperatures if plan.drafter else (), plan.setting.tree
    return () if tree is None or len(known) < tree.num_steps else known[:tree.num_steps]


def _draft_serving(plan: LaunchPlan) -> DraftServing:
    tree = plan.setting.tree
    return DraftServing() if adaptive_slots(plan) is not None or tree is None else tree.draft


def launch_environment(plan: LaunchPlan) -> dict[str, str]:
    """Environment variables that the command line needs in addition to the caller's."""
    variables: dict[str, str] = {}
    if plan.machine.platform == "rocm":
        # Otherwise aiter reduces an explicit memory fraction by 15 % if the context exceeds 8192 (attention_hook.py).
        variables["SGLANG_AITER_HONOR_EXPLICIT_MEM_FRACTION"] = "1"
    if plan.machine.platform == "cpu":
        variables["SGLANG_USE_CPU_ENGINE"] = "1"
    if _draft_serving(plan).step_rates is not None:
        variables["SGLANG_RAGGED_VERIFY_MODE"] = "compact"
    slots = adaptive_slots(plan)
    if slots is not None and 0 in candidate_steps(slots):
        # A round without drafting would otherwise still run the drafter over the accepted tokens.
        variables["SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"] = "1"
    if plan.captured is not None:
        variables["EYRIE_CAPTURE_DIR"] = plan.captured.directory
    # With and without a drafter: all variants run one model class.
    if plan.target.architecture in PLUGIN_ARCHITECTURES or plan.captured is not None:
        variables["SGLANG_EXTERNAL_MODEL_PACKAGE"] = PACKAGE
    if plan.plugin_root is not None:
        variables["PYTHONPATH"] = plan.plugin_root
    return variables


def launch_arguments(plan: LaunchPlan, shared: SharedServerArgs | None = None) -> tuple[str, ...]:
    """The arguments of `python -m sglang.launch_server`. Raises Unlaunchable."""
    shared = shared or shared_args(plan)
    check_launchable(plan, shared)
    line = [
        "--model-path", plan.target.model, "--served-model-name", plan.served_model_name,
        "--host", plan.host, "--port", str(plan.port), "--dtype", plan.dtype,
        "--context-length", str(shared.context_length),
        "--max-running-requests", str(shared.max_running_requests),
        "--mem-fraction-static", f"{shared.mem_fraction:g}",
        "--attention-backend", shared.attention_backend,
        "--page-size", str(sglang_attention.PAGE_SIZES[shared.attention_backend]),
        "--tp-size", str(plan.engine.tp_size), "--random-seed", "0", "--enable-metrics",
    ]
    if plan.target.revision is not None:
        line += ["--revision", plan.target.revision]
    if plan.machine.platform == "cpu":
        # Main memory is shared with other programs, and SGLang takes its fraction of the machine's, not of the pod's.
        line += ["--max-total-tokens", str(shared.max_running_requests * shared.context_length)]
        # Speculation disables the overlap scheduler on CPU, so the variant without speculation must disable it too. An
        # idle scheduler busy-waits: without --sleep-on-idle it takes a core from the variant that is being measured.
        line += ["--device", "cpu", "--disable-overlap-schedule", "--sleep-on-idle"]
    elif plan.captured is not None:
        # A graph of a prefill would replay the model without the code that writes its states.
        line += ["--disable-prefill-cuda-graph", "--disable-decode-cuda-graph"]
    else:
        line += ["--cuda-graph-bs-decode", *map(str, profiles.captured_batches(shared.max_running_requests))]
    for name, value in plan.engine.sglang_arguments.model_dump(
            exclude_defaults=True, exclude={"mem_fraction_static"}).items():  # its value is in `shared`
        if (flag := f"--{name.replace('_', '-')}") not in line:
            line += [flag] if value is True else [flag, str(value)]
    if plan.key_file is not None:
        line += ["--config", plan.key_file]
    return (*line, *_speculation(plan, shared))


def _speculation(plan: LaunchPlan, shared: SharedServerArgs) -> list[str]:
    slots = adaptive_slots(plan)
    tree = plan.setting.tree
    if plan.captured is not None:
        # EAGLE3 names the convention of the layer ids; no drafter is loaded. A cached prefix would have no states.
        return ["--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3",
                "--return-aux-hidden-state-layer-ids", *map(str, plan.captured.layer_ids), "--disable-radix-cache"]
    if slots is None and tree is None:
        return []
    if slots is None and plan.setting.method == "ngram":
        assert tree is not None
        line = ["--speculative-algorithm", "NGRAM", "--speculative-num-steps", str(tree.num_steps),
                "--speculative-ngram-max-bfs-breadth", str(tree.top_k),
                "--speculative-num-draft-tokens", str(tree.num_draft_tokens)]
        if plan.machine.platform == "cpu":  # SGLang's default of 10 million nodes takes 2 GB of main memory
            line += ["--speculative-ngram-capacity", "1000000"]
        return line
    drafter = plan.drafter
    assert drafter is not None  # guaranteed by check_launchable
    line = ["--speculative-algorithm", str(drafter.algorithm), "--speculative-draft-model-path", drafter.directory]
    if slots is not None:
        # SGLang sizes its buffers from these values at start, so they are the largest of all slots.
        deepest = max(candidate_steps(slots))
        line += ["--speculative-num-steps", str(deepest), "--speculative-eagle-topk", "1",
                 "--speculative-num-draft-tokens", str(deepest + 1),
                 "--speculative-adaptive", "--speculative-adaptive-config", str(plan.adaptive_path)]
    elif tree is not None and drafter.algorithm in BLOCK_ALGORITHMS:
        # DFlash's block has the settled token, DSpark's the proposals alone.
        line += (["--speculative-dflash-block-size", str(tree.num_draft_tokens)] if drafter.algorithm == "DFLASH" else
                 ["--speculative-dspark-block-size", str(tree.num_steps)])
    elif tree is not None:
        line += ["--speculative-num-steps", str(tree.num_steps), "--speculative-eagle-topk", str(tree.top_k),
                 "--speculative-num-draft-tokens", str(tree.num_draft_tokens)]
    if slots is None and tree is not None and tree.verification in _VERIFICATION_FLAGS:
        line += [_VERIFICATION_FLAGS[tree.verification]]
    draft = _draft_serving(plan)
    own = _DSPARK_BACKENDS.get(shared.attention_backend) if drafter.algorithm == "DSPARK" else None
    if (backend := draft.attention_backend or own) is not None:
        line += ["--speculative-draft-attention-backend", backend]
    if draft.kv_dtype is not None:
        line += ["--speculative-draft-kv-cache-dtype", draft.kv_dtype]
    if draft.step_rates:
        # A graph computes a round number of tokens: those above the chosen ones are verified too, not padded.
        line += ["--speculative-dspark-sps-table-path", str(plan.adaptive_path),
                 "--speculative-dspark-align-verify-tokens-to-graph-tier"]
        if _temperatures(plan):
            line += ["--speculative-dspark-confidence-sts-path", str(plan.adaptive_path)]
    if draft.quantization is not None or (plan.target.quantised and drafter.quantised is None):
        # The default is the target's quantisation.
        line += ["--speculative-draft-model-quantization", draft.quantization or "unquant"]
    if drafter.sliding_window is not None:
        # SGLang's window does not count the current position, ours does.
        line += ["--speculative-draft-window-size", str(drafter.sliding_window - 1)]
    return line


def check_launchable(plan: LaunchPlan, shared: SharedServerArgs) -> None:
    """Raises Unlaunchable for what SGLang rejects, ignores with a warning, or detects only after loading weights."""
    adaptive = adaptive_slots(plan) is not None
    widest = max(tree_width(plan.setting), 1 if adaptive else 0)
    problem = sglang_attention.attention_problem(plan.machine, attention_needs(plan), shared.attention_backend, widest)
    if problem is not None:
        raise Unlaunchable(*problem)
    if shared.context_length > plan.target.context_length:
        raise Unlaunchable(f"context_length {shared.context_length} is more than the target's "
                           f"{plan.target.context_length}", f"serve at most {plan.target.context_length}")
    if not 0.0 < shared.mem_fraction < 1.0:
        raise Unlaunchable(f"{plan.machine.name} has {plan.machine.memory_gib:g} GiB of memory, less than SGLang's "
                           "buffers take", "serve on a GPU with more memory")
    if plan.dtype == "float32" and plan.machine.platform != "cpu" and shared.attention_backend != "triton":
        raise Unlaunchable(f"dtype float32 has no kernel in attention backend {shared.attention_backend!r}",
                           "serve in bfloat16")
    if plan.setting.tree is not None and plan.setting.tree.static and not adaptive:
        raise Unlaunchable(f"the tree {plan.setting.label()} is static, and SGLang selects nodes by confidence only",
                           "leave static out, or serve it with the embedded engine")
    if adaptive or plan.setting.method == "drafter":
        _check_drafter(plan, shared, adaptive=adaptive)


def _check_drafter(plan: LaunchPlan, shared: SharedServerArgs, *, adaptive: bool) -> None:
    drafter = plan.drafter
    if drafter is None:
        raise Unlaunchable("the setting needs a drafter, and there is none", "give a drafter directory, or off")
    algorithm = drafter.algorithm
    if algorithm is None:
        raise Unlaunchable(f"the drafter in {drafter.directory} is of a family that SGLang cannot serve",
                           f"serve it with the embedded engine, or train {', '.join(sglang_families())}")
    if algorithm == "EAGLE3":
        require_capture(plan.target.architecture)
    if adaptive and algorithm not in ADAPTIVE_ALGORITHMS:
        raise Unlaunchable(f"adaptive speculation does not run with {algorithm}: SGLang would serve one setting and "
                           "only log it", "serve one setting (leave the map out)")
    if drafter.sliding_window is not None and algorithm != "EAGLE3":
        raise Unlaunchable(f"the drafter has a sliding window, which SGLang does not apply as trained with {algorithm}",
                           "train it without drafter.sliding_window")
    tree = None if adaptive else plan.setting.tree
    if tree is not None:
        problem = sglang_attention.draft_problem(
            plan.machine, plan.target.attention, tree.draft, algorithm, tree.top_k > 1, shared.attention_backend)
        if problem is not None:
            raise Unlaunchable(*problem)
        if tree.draft.step_rates is not None and not drafter.confident:
            raise Unlaunchable(f"draft.step_rates is set, and the drafter in {drafter.directory} has no confidence "
                               "head", "omit it, or train a dspark drafter")
        if tree.draft.quantization is not None and drafter.quantised is not None:
            raise Unlaunchable(f"draft.quantization is {tree.draft.quantization!r}, and the drafter in "
                               f"{drafter.directory} is stored quantised ({drafter.quantised})", "omit it")
    if tree is not None and tree.verification != "target":
        if tree.verification not in VERIFICATIONS[algorithm]:
            raise Unlaunchable(f"SGLang does not verify drafts of {algorithm} by {tree.verification!r}",
                               f"set verification to {' or '.join(VERIFICATIONS[algorithm])}")
        if plan.machine.platform == "cpu":
            raise Unlaunchable(f"verification {tree.verification!r} does not run on cpu, where SGLang verifies "
                               "greedily", "serve on a GPU, or leave verification out")
        if not drafter.whole_vocabulary:
            raise Unlaunchable(f"verification {tree.verification!r} needs the drafter's distribution over the target's "
                               f"vocabulary, and the drafter in {drafter.directory} has a smaller one",
                               "train with drafter.draft_vocab_size of the target's vocabulary")
    if algorithm in BLOCK_ALGORITHMS:
        if plan.machine.platform == "cpu":
            raise Unlaunchable(f"{algorithm} does not run on cpu", "serve it on a GPU, or with the embedded engine")
        require_block_capture(plan.target.architecture)
        if drafter.bfloat16_only and plan.dtype != "bfloat16":
            raise Unlaunchable(f"SGLang computes a Domino head in bfloat16 alone, and dtype is {plan.dtype}",
                               "set target.dtype to bfloat16")
        if tree is not None and tree.top_k > 1:
            raise Unlaunchable(f"SGLang verifies a block as a chain, and top_k is {tree.top_k}",
                               "use top_k 1, or serve the tree with the embedded engine")
        if tree is not None and drafter.block_size is not None and tree.num_draft_tokens > drafter.block_size:
            raise Unlaunchable(f"num_draft_tokens {tree.num_draft_tokens} is more than the drafter's block, "
                               f"{drafter.block_size}: SGLang would draft positions that were not trained and only log "
                               f"it", f"use num_steps up to {drafter.block_size - 1}")
    if drafter.context_length < shared.context_length:
        raise Unlaunchable(
            f"the drafter has {drafter.context_length} positions (max_position_embeddings), fewer than the "
            f"context_length {shared.context_length} to serve",
            f"serve context_length {drafter.context_length}, or train with drafter.max_position_embeddings "
            f"{shared.context_length}")
