"""Command lines of the variants of one comparison, as `sglang.servers` renders them one by one."""

from collections.abc import Sequence
from dataclasses import replace

from eyrie_api.contract.tuning import OFF, Setting
from eyrie_workers.sglang.launch import LaunchPlan, adaptive_slots, launch_arguments, shared_args


def without_speculation(plan: LaunchPlan) -> LaunchPlan:
    """The same server without speculation."""
    return replace(plan, setting=OFF, map=None)


def comparison_commands(plan: LaunchPlan, settings: Sequence[Setting] = ()) -> dict[str, tuple[str, ...]]:
    """Arguments of the variants of a comparison, by label: `off`, the plan's setting, and each of `settings`.

    Attention backend, page size, memory fraction, max-running-requests and context length are equal in all of them.
    """
    shared = shared_args(plan, settings)
    lines = {OFF.label(): launch_arguments(without_speculation(plan), shared)}
    if adaptive_slots(plan) is not None:
        lines["adaptive"] = launch_arguments(plan, shared)
    for setting in (plan.setting, *settings):
        lines[setting.label()] = launch_arguments(replace(plan, setting=setting, map=None), shared)
    return lines
