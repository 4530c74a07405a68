"""The command line of a SGLang server, rendered from a launch plan. Pure: values in, strings out.

Command lines written by hand make four mistakes that this module excludes:

*Unequal variants.* With speculation SGLang lowers max-running-requests to 48 unless it is set, captures CUDA graphs for
more batch sizes (so the variant without speculation is padded), and may choose another attention backend for each
top_k. Every command line rendered here sets all of them, the memory fraction and the seed; variants that are given the
same `SharedServerArgs` have the same values, with a backend that supports every compared setting.

*A drafter served differently than trained.* Its window (`drafter.sliding_window`) is applied by few backends and in no
tree; the others draft with different keys, without a warning. Rejected (`launch_checks`).

*Less speculation than configured.* Adaptive speculation with LoRA, a tree or attention data parallelism falls back to
static settings with a warning in the log; a drafter next to a target quantised by flag is quantised too. Such
combinations are rejected, or rendered with the flag that prevents it.

*A failure after ten minutes of loading weights.* What the model runner would reject (a drafter with a shorter context
than is served, a target without hidden-state capture) is rejected before the server starts.

Flags and rules are those of SGLang 0.5.23; tests/sglang resolves a matrix of command lines with that version's own
parser. The process is in `process`. Secrets are not rendered: SGLang reads its API key from a flag or a `--config` file
and from no environment variable, and a flag is visible in process lists and manifests, so the plan names the file.
"""

import json

from eyrie_api.decisions.sglang_support import PLUGIN_ARCHITECTURES
from eyrie_workers.engines.sglang.launch_checks import check_launchable
from eyrie_workers.engines.sglang.launch_plan import (
    LaunchPlan,
    SharedServerArgs,
    adaptive_slots,
    candidate_steps,
    shared_args,
)
from eyrie_workers.engines.sglang.plugin_files import PACKAGE
from eyrie_workers.engines.sglang.profiles import captured_batches

GUARDED_MODULE = "eyrie_workers.engines.sglang.plugin.guarded"
"""Takes the arguments of `sglang.launch_server`; the server that it starts answers inference alone."""
_BLOCK_DRAFT_BACKENDS = ("flashinfer", "fa3", "fa4", "triton")
"""Attention backends that support DFLASH drafters. With any other backend for the target SGLang selects one of these
for the drafter and only logs it."""


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
        "--attention-backend", shared.attention_backend, "--page-size", str(shared.page_size),
        "--tp-size", str(plan.tp_size), "--random-seed", "0",
    ]
    if plan.machine.platform != "cpu":
        # A graph of a prefill would replay the model without the code that writes its states.
        line += (["--disable-prefill-cuda-graph", "--disable-decode-cuda-graph"] if plan.capture_dir is not None else
                 ["--cuda-graph-bs-decode", *map(str, captured_batches(shared.max_running_requests))])
    if plan.target.revision is not None:
        line += ["--revision", plan.target.revision]
    if plan.pp_size > 1:
        line += ["--pp-size", str(plan.pp_size)]
    if plan.attn_dp_size > 1:
        line += ["--attn-dp-size", str(plan.attn_dp_size)]
    pool = plan.max_total_tokens
    if pool is None and plan.machine.platform == "cpu":
        # Main memory is shared with other programs, and SGLang takes its fraction of the machine's, not of the pod's.
        pool = shared.max_running_requests * shared.context_length
    if pool is not None:
        line += ["--max-total-tokens", str(pool)]
    if plan.quantization is not None:
        line += ["--quantization", plan.quantization]
    if plan.machine.platform == "cpu":
        # Speculation disables the overlap scheduler on CPU, so the variant without speculation must disable it too. An
        # idle scheduler busy-waits: without --sleep-on-idle it takes a core from the variant that is being measured.
        line += ["--device", "cpu", "--disable-overlap-schedule", "--sleep-on-idle"]
    if plan.metrics:
        line.append("--enable-metrics")
    if plan.lora_paths:
        line += ["--lora-paths", *plan.lora_paths]
    if plan.key_file is not None:
        line += ["--config", plan.key_file]
    return (*line, *_speculation(plan, shared))


def launch_environment(plan: LaunchPlan) -> dict[str, str]:
    """Environment variables that the command line needs in addition to the caller's."""
    variables: dict[str, str] = {}
    if plan.machine.platform == "rocm":
        # Otherwise aiter reduces an explicit memory fraction by 15 % if the context exceeds 8192 (attention_hook.py).
        variables["SGLANG_AITER_HONOR_EXPLICIT_MEM_FRACTION"] = "1"
    if plan.machine.platform == "cpu":
        variables["SGLANG_USE_CPU_ENGINE"] = "1"
    if plan.capture_dir is not None:
        variables["EYRIE_CAPTURE_DIR"] = plan.capture_dir
    # With and without a drafter: all variants run one model class.
    if plan.target.architecture in PLUGIN_ARCHITECTURES or plan.capture_dir is not None:
        variables["SGLANG_EXTERNAL_MODEL_PACKAGE"] = PACKAGE
        if plan.plugin_root is not None:
            variables["PYTHONPATH"] = plan.plugin_root
    return variables


def adaptive_config(plan: LaunchPlan) -> str | None:
    """The content of the file `adaptive_path`; None when the plan is not adaptive."""
    slots = adaptive_slots(plan)
    return None if slots is None else json.dumps(slots, indent=1) + "\n"


def _speculation(plan: LaunchPlan, shared: SharedServerArgs) -> list[str]:
    slots = adaptive_slots(plan)
    tree = plan.setting.tree
    if plan.capture_dir is not None:
        # EAGLE3 names the convention of the layer ids; no drafter is loaded. A cached prefix would have no states.
        return ["--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3",
                "--return-aux-hidden-state-layer-ids", *map(str, plan.captured_layers), "--disable-radix-cache"]
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
    elif tree is not None and drafter.algorithm == "DFLASH":
        line += ["--speculative-dflash-block-size", str(tree.num_draft_tokens)]
        if shared.attention_backend not in _BLOCK_DRAFT_BACKENDS:
            line += ["--speculative-draft-attention-backend",
                     "triton" if plan.machine.platform == "rocm" else "flashinfer"]
    elif tree is not None:
        line += ["--speculative-num-steps", str(tree.num_steps), "--speculative-eagle-topk", str(tree.top_k),
                 "--speculative-num-draft-tokens", str(tree.num_draft_tokens)]
    if (plan.quantization or plan.target.quantised) and drafter.quantised is None:
        line += ["--speculative-draft-model-quantization", "unquant"]  # the default is the target's quantisation
    if drafter.sliding_window is not None:
        # SGLang's window does not count the current position, ours does.
        line += ["--speculative-draft-window-size", str(drafter.sliding_window - 1)]
    return line
