"""The settings of a SGLang server, and what is derived from them: shared arguments, adaptive slots, attention needs.

Pure. `launch` renders a plan as a command line, `launch_checks` rejects plans that SGLang does not serve as written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eyrie_api.v1alpha1.targets import Dtype
from eyrie_api.v1alpha1.tuning import OFF, OperatingMap, Setting
from eyrie_workers.engines.sglang.checkpoints import DrafterCheckpoint, TargetCheckpoint
from eyrie_workers.engines.sglang.profiles import (
    AttentionNeeds,
    HardwareProfile,
    attention_problem,
    choose_attention,
    default_page_size,
)
from eyrie_workers.targets.sglang_limits import Unlaunchable

DEFAULT_RUNNING_REQUESTS = 48
"""SGLang's own default of --max-running-requests with speculation; without, it is far higher."""


@dataclass(frozen=True)
class LaunchPlan:
    """All settings of one SGLang server."""

    target: TargetCheckpoint
    machine: HardwareProfile
    served_model_name: str
    drafter: DrafterCheckpoint | None = None
    setting: Setting = OFF
    map: OperatingMap | None = None
    """With an adaptive form, the server changes its setting with the batch size; otherwise `setting` always applies."""

    adaptive_path: str | None = None
    """The file to which the caller writes `adaptive_config(plan)` before the server starts."""

    host: str = "127.0.0.1"
    port: int = 30000
    dtype: Dtype = "bfloat16"
    context_length: int | None = None
    """Default: the smaller context length of target and drafter."""

    max_running_requests: int = DEFAULT_RUNNING_REQUESTS
    """Always given, because SGLang's default differs with speculation."""

    mem_fraction: float | None = None
    """Default: the machine profile's."""

    max_total_tokens: int | None = None
    """Size limit of the KV pool in tokens. Default: on a CPU as many as the requests can fill, on a GPU none."""

    attention_backend: str | None = None
    page_size: int | None = None
    tp_size: int = 1
    pp_size: int = 1
    attn_dp_size: int = 1
    """Attention data parallelism: the number of groups that each compute attention for their own requests."""

    quantization: str | None = None
    """`--quantization`, for a target that is quantised while it is loaded."""

    lora_paths: tuple[str, ...] = ()
    """`name=path` of LoRA adapters of the target. They are not applied to the drafter."""

    metrics: bool = True
    key_file: str | None = None
    """A YAML file with the line `api-key: ...`, mounted from a Secret."""

    captured_layers: tuple[int, ...] = ()
    """Layers, by SGLang's ids, whose states the server writes to `capture_dir` while it prefills, without a drafter."""

    capture_dir: str | None = None
    plugin_root: str | None = None
    """Directory with the package `eyrie_workers`, if SGLang's interpreter does not have it installed."""


@dataclass(frozen=True)
class SharedServerArgs:
    """Arguments that must be equal in all variants of a comparison."""

    attention_backend: str
    page_size: int
    mem_fraction: float
    max_running_requests: int
    context_length: int


def shared_args(plan: LaunchPlan, also: Sequence[Setting] = (), other_settings: Sequence[Setting] = ()) \
        -> SharedServerArgs:
    """The shared arguments of a plan. Raises Unlaunchable.

    also             settings under which the same plan, with the same drafter, has to run too
    other_settings   settings of plans with other drafters that are to have the same arguments
    """
    widths = {tree_width(setting) for setting in (plan.setting, *also, *other_settings)}
    if adaptive_slots(plan) is not None:
        widths.add(1)
    needs = attention_needs(plan, (plan.setting, *also))
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
        max_running_requests=plan.max_running_requests, context_length=_context_length(plan))


def attention_needs(plan: LaunchPlan, settings: Sequence[Setting]) -> AttentionNeeds:
    """What target and drafter together require of the backend under any of these settings, and under the plan's map."""
    if plan.drafter is None or plan.drafter.sliding_window is None:
        return plan.target.attention
    widths = [tree_width(setting) for setting in settings if setting.method == "drafter"]
    if adaptive_slots(plan) is not None:
        widths.append(1)  # adaptive speculation drafts chains
    return replace(plan.target.attention, windowed_draft=max(widths, default=0))


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


def _context_length(plan: LaunchPlan) -> int:
    if plan.context_length is not None:
        return plan.context_length
    if plan.drafter is None:
        return plan.target.context_length
    return min(plan.target.context_length, plan.drafter.context_length)
