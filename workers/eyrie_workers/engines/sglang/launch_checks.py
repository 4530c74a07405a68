"""Combinations that SGLang 0.5.23 does not serve as written, rejected before anything starts. Pure.

SGLang rejects some of these itself after minutes of loading weights, and serves others differently with only a warning
in its log: adaptive speculation with LoRA, a tree or attention data parallelism falls back to a static setting; a
drafter of blocks drafts blocks of another length than it was trained for; a drafter's sliding window is applied by few
attention backends and in no tree. tests/sglang resolves such command lines with SGLang's own parser.
"""

from eyrie_api.decisions.sglang_support import require_block_capture, require_capture
from eyrie_api.v1alpha1.families import SGLangAlgorithm
from eyrie_api.v1alpha1.tuning import OFF
from eyrie_workers.engines.sglang.checkpoints import DrafterCheckpoint
from eyrie_workers.engines.sglang.launch_plan import (
    LaunchPlan,
    SharedServerArgs,
    adaptive_slots,
    attention_needs,
    tree_width,
)
from eyrie_workers.engines.sglang.profiles import attention_problem
from eyrie_workers.targets.sglang_limits import Unlaunchable

_ADAPTIVE_ALGORITHMS: tuple[SGLangAlgorithm, ...] = ("EAGLE", "EAGLE3")
"""The algorithms that support adaptive speculation."""


def check_launchable(plan: LaunchPlan, shared: SharedServerArgs) -> None:
    """Raises Unlaunchable for what SGLang rejects, ignores with a warning, or detects only after loading weights."""
    adaptive = adaptive_slots(plan) is not None
    uses_drafter = adaptive or plan.setting.method == "drafter"
    widest = max(tree_width(plan.setting), 1 if adaptive else 0)
    needs = attention_needs(plan, (plan.setting,))
    problem = attention_problem(plan.machine, needs, shared.attention_backend, widest, shared.page_size)
    if problem is not None:
        raise Unlaunchable(*problem)
    if shared.context_length > plan.target.context_length:
        raise Unlaunchable(f"context_length {shared.context_length} is more than the target's "
                           f"{plan.target.context_length}", f"serve at most {plan.target.context_length}")
    if not 0.0 < shared.mem_fraction < 1.0:
        raise Unlaunchable(f"mem_fraction {shared.mem_fraction} is not between 0 and 1", "leave it out")
    if plan.dtype == "float32" and plan.machine.platform != "cpu" and shared.attention_backend != "triton":
        raise Unlaunchable(f"dtype float32 has no kernel in attention backend {shared.attention_backend!r}",
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
    paged_ngram_tree = plan.setting.method == "ngram" and widest > 1 and shared.page_size > 1
    if paged_ngram_tree and shared.attention_backend != "flashinfer":
        raise Unlaunchable(f"n-gram trees (top_k {widest}) with page size {shared.page_size} run on flashinfer only, "
                           f"not on {shared.attention_backend}", "leave page_size out, or use top_k 1")
    if plan.setting.tree is not None and plan.setting.tree.static and not adaptive:
        raise Unlaunchable(f"the tree {plan.setting.label()} is static, and SGLang selects nodes by confidence only",
                           "leave static out, or serve it with the embedded engine")
    if adaptive:
        _check_adaptive(plan)
    if uses_drafter:
        _check_drafter(plan, shared)


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


def _check_family(plan: LaunchPlan, drafter: DrafterCheckpoint, algorithm: SGLangAlgorithm) -> None:
    """Limits of the drafter's speculative algorithm."""
    adaptive = adaptive_slots(plan) is not None
    if algorithm == "EAGLE3":
        require_capture(plan.target.architecture)
    if adaptive and algorithm not in _ADAPTIVE_ALGORITHMS:
        raise Unlaunchable(f"adaptive speculation does not run with {algorithm}: SGLang would serve one setting and "
                           "only log it", "serve one setting (leave the map out)")
    if drafter.sliding_window is not None and algorithm != "EAGLE3":
        raise Unlaunchable(f"the drafter has a sliding window, which SGLang does not apply as trained with {algorithm}",
                           "train it without drafter.sliding_window")
    if algorithm in ("STANDALONE", "DFLASH") and plan.attn_dp_size > 1:
        raise Unlaunchable(f"{algorithm} does not run with attention data parallelism", "use attn_dp_size 1")
    if algorithm == "STANDALONE" and plan.lora_paths:
        raise Unlaunchable("STANDALONE does not run with LoRA adapters", "serve without adapters, or another drafter")
    if algorithm == "DFLASH":
        _check_blocks(plan, drafter)


def _check_blocks(plan: LaunchPlan, drafter: DrafterCheckpoint) -> None:
    if plan.machine.platform == "cpu":
        raise Unlaunchable("DFLASH does not run on cpu", "serve it on a GPU, or with the embedded engine")
    require_block_capture(plan.target.architecture)
    tree = plan.setting.tree
    if tree is None:
        return
    if tree.top_k > 1:
        raise Unlaunchable(f"SGLang verifies a block as a chain, and top_k is {tree.top_k}",
                           "use top_k 1, or serve the tree with the embedded engine")
    if drafter.block_size is not None and drafter.block_size != tree.num_draft_tokens:
        raise Unlaunchable(f"num_draft_tokens {tree.num_draft_tokens} is not the drafter's block size, "
                           f"{drafter.block_size}: SGLang would draft blocks of another length and only log it",
                           f"use num_steps {drafter.block_size - 1} and num_draft_tokens {drafter.block_size}")


def _check_drafter(plan: LaunchPlan, shared: SharedServerArgs) -> None:
    if plan.drafter is None:
        raise Unlaunchable("the setting needs a drafter, and there is none", "give a drafter directory, or off")
    if plan.drafter.algorithm is None:
        raise Unlaunchable(f"the drafter in {plan.drafter.directory} is of a family that SGLang cannot serve",
                           "serve it with the embedded engine, or train eagle3, eagle1, standalone or dflash")
    _check_family(plan, plan.drafter, plan.drafter.algorithm)
    if plan.drafter.context_length < shared.context_length:
        raise Unlaunchable(
            f"the drafter has {plan.drafter.context_length} positions (max_position_embeddings), fewer than the "
            f"context_length {shared.context_length} to serve",
            f"serve context_length {plan.drafter.context_length}, or train with drafter.max_position_embeddings "
            f"{shared.context_length}")
