"""The servers of a comparison: one per variant, equal in everything but drafting, stopped with the stage.

A variant is served by the serving engine with a drafter, with n-gram lookup, or without speculation (`DrafterUse`). The
servers of all variants run on one machine at the same time and receive requests one after the other: an idle server
uses memory and no CPU time. `start_server` is the only place that distinguishes the engines.

A stage may be killed at any line. A server that survived it would disturb the next measurement and keep its memory, so
every server is killed when the stage ends (`engines.parent_death_signal`).
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from eyrie_api.errors import EyrieError, Transient
from eyrie_api.processes import free_port
from eyrie_api.v1alpha1.engine import EngineKind
from eyrie_api.v1alpha1.targets import TargetSpec
from eyrie_api.v1alpha1.tuning import DrafterUse
from eyrie_workers.engines.process import EngineCommand, batch_size_schedule, start_engine
from eyrie_workers.engines.sglang.checkpoints import read_drafter, read_json_config, read_target
from eyrie_workers.engines.sglang.gpu_groups import GpuGroup
from eyrie_workers.engines.sglang.launch import adaptive_config, launch_arguments, launch_environment
from eyrie_workers.engines.sglang.launch_plan import LaunchPlan, SharedServerArgs, shared_args
from eyrie_workers.engines.sglang.local_hardware import detect_hardware
from eyrie_workers.engines.sglang.process import launcher_command, plugin_root, start_sglang
from eyrie_workers.engines.sglang.profiles import HardwareProfile
from eyrie_workers.targets.loading import resolve

_POLL_S = 0.1
READY_S = {"embedded": 180.0, "sglang": 1800.0}
"""Timeout of the start. Loading a large target and capturing its CUDA graphs takes SGLang many minutes."""

DRAIN_S = {"embedded": 10.0, "sglang": 0.0}
"""Between SIGTERM and SIGKILL. No request is running any more, and SGLang polls for the signal only every 5 s."""

DrafterUses = dict[str, DrafterUse]
"""The drafter and setting of each variant, by the variant's name."""


class EngineServer(Protocol):
    """The interface of `EngineProcess` and `SglangServer`."""

    url: str

    def check(self) -> None:
        """Raises EngineFailed when the process has ended."""
        ...

    def ready(self) -> bool:
        """Whether it accepts requests."""
        ...

    def phase(self) -> str:
        """How far it has come while it starts."""
        ...

    def stop(self, timeout_s: float) -> int:
        """Stop it; returns the exit code."""
        ...


@dataclass(frozen=True)
class CapturedStates:
    """Hidden states that SGLang's servers write while they prefill (`engines.sglang.capture_states`)."""

    layer_ids: tuple[int, ...]
    """SGLang's."""

    directory: str


@dataclass(frozen=True)
class ServerPlan:
    """What the servers of all variants share."""

    kind: EngineKind
    target: TargetSpec
    max_concurrency: int
    threads: int | None = None
    """CPU threads of the embedded engine."""

    machine: HardwareProfile | None = None
    """The hardware SGLang runs on; default: this machine's."""

    tp_size: int = 1
    gpu_groups: tuple[GpuGroup, ...] = ()
    """The GPUs of each server, in the order of the variants; empty: all servers share what the stage sees."""

    captured: CapturedStates | None = None

    @property
    def model(self) -> str:
        """The model name in requests."""
        return Path(self.target.model).name

    def is_adaptive(self, use: DrafterUse) -> bool:
        """Whether the engine changes its setting with the load according to the map of `use`."""
        if use.map is None:
            return False
        if self.kind == "embedded":
            return batch_size_schedule(use.map) is not None
        # SGLang 0.5.23 has no adaptive speculation on CPUs: the server ends with NotImplementedError while it starts.
        return use.map.adaptive is not None and (self.machine or detect_hardware()).platform != "cpu"


@dataclass(frozen=True)
class ManagedServer:
    """The server of one variant."""

    name: str
    use: DrafterUse
    model: str
    server: EngineServer

    @property
    def url(self) -> str:
        """Up to and including /v1."""
        return f"{self.server.url}/v1"


@contextlib.contextmanager
def managed_servers(plan: ServerPlan, uses: DrafterUses, directory: Path,
                    pause_point: Callable[[], None]) -> Iterator[dict[str, ManagedServer]]:
    """Start the servers of all variants and wait until they are ready; stop them when the block is left.

    pause_point   called while the servers start; whatever it raises stops them

    Raises EngineFailed when a server ends, Transient when one is not ready in time, InvalidInput (Unlaunchable) for a
    setting the engine does not support.
    """
    servers: dict[str, ManagedServer] = {}
    try:
        for index, name in enumerate(uses):
            servers[name] = start_server(plan, name, uses, directory / name, _share(plan, uses, index),
                                         plan.gpu_groups[index] if plan.gpu_groups else ())
            if plan.kind == "sglang" and (plan.machine or detect_hardware()).platform != "cpu":
                # One after the other: SGLang measures the free memory at start, see `_memory_fraction`.
                wait_ready([servers[name]], READY_S[plan.kind], pause_point)
        wait_ready(list(servers.values()), READY_S[plan.kind], pause_point)
        yield servers
    finally:
        for server in servers.values():
            server.server.stop(DRAIN_S[plan.kind])


def wait_ready(servers: Sequence[ManagedServer], timeout_s: float, pause_point: Callable[[], None]) -> None:
    """Wait until all servers are ready."""
    deadline = time.monotonic() + timeout_s
    while waiting := [server for server in servers if not _is_ready(server)]:
        pause_point()
        if time.monotonic() > deadline:
            raise Transient(f"the server of variant {waiting[0].name} is not ready after {timeout_s:g} s",
                            "read its log in the stage's directory, or retry on a less busy machine")
        time.sleep(_POLL_S)


def _is_ready(managed: ManagedServer) -> bool:
    try:
        managed.server.check()
    except EyrieError as error:
        raise type(error)(f"variant {managed.name}: {error.message}", error.hint) from None
    return managed.server.ready()


def start_server(plan: ServerPlan, name: str, uses: DrafterUses, directory: Path,
                 share: tuple[int, int] = (0, 1), gpus: GpuGroup = ()) -> ManagedServer:
    """Start the server of one variant; does not wait until it is ready. Its log goes to `directory`.

    uses    all variants of the comparison: their servers have the same arguments but for drafting
    share   how many equal shares of its GPUs' memory are taken already, and how many there are
    gpus    those it computes on; empty: those the stage sees
    """
    use = uses[name]
    server: EngineServer
    if plan.kind == "embedded":
        server = start_engine(_engine_command(plan, use), directory, die_with_parent=True)
    else:
        launch_plan, shared = _sglang_plan(plan, name, uses, directory, free_port(), share)
        launch_plan = replace(launch_plan, plugin_root=plugin_root(directory))
        config = adaptive_config(launch_plan)
        if config is not None:
            directory.mkdir(parents=True, exist_ok=True)
            _adaptive_file(directory).write_text(config)
        environment = launch_environment(launch_plan)
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        server = start_sglang(launch_arguments(launch_plan, shared), directory, environment=environment)
    return ManagedServer(name, use, plan.model, server)


def command_line(plan: ServerPlan, name: str, uses: DrafterUses, directory: Path) -> tuple[str, ...]:
    """The command line of a variant's server, for the report, with port 0."""
    if plan.kind == "embedded":
        return tuple(_engine_command(plan, uses[name]).argv())
    share = _share(plan, uses, list(uses).index(name))
    return (*launcher_command(), *launch_arguments(*_sglang_plan(plan, name, uses, directory, 0, share)))


def _engine_command(plan: ServerPlan, use: DrafterUse) -> EngineCommand:
    return EngineCommand(
        target=resolve(plan.target), model=plan.model, drafter=Path(use.drafter_dir) if use.drafter_dir else None,
        setting=use.setting, map=use.map, max_concurrency=plan.max_concurrency, dtype=plan.target.dtype,
        threads=plan.threads)


def shared_context_length(plan: ServerPlan, uses: DrafterUses) -> int:
    """The context length of the servers of all variants: the smallest of the target's and the drafters'."""
    _, shared = _sglang_plan(plan, next(iter(uses)), uses, Path(), 0, (0, 1))
    return shared.context_length


def _sglang_plan(plan: ServerPlan, name: str, uses: DrafterUses, directory: Path, port: int,
                 share: tuple[int, int]) -> tuple[LaunchPlan, SharedServerArgs]:
    """One variant's launch plan, and the arguments it shares with the other variants."""
    target_dir = resolve(plan.target)
    machine = plan.machine or detect_hardware()
    common = LaunchPlan(
        target=read_target(str(target_dir), read_json_config(target_dir), None), machine=machine,
        served_model_name=plan.model, port=port, dtype=plan.target.dtype, max_running_requests=plan.max_concurrency,
        tp_size=plan.tp_size)
    if plan.captured is not None:
        common = replace(common, captured_layers=plan.captured.layer_ids, capture_dir=plan.captured.directory)

    def with_drafting(use: DrafterUse) -> LaunchPlan:
        drafter = None
        if use.drafter_dir is not None:
            drafter = read_drafter(use.drafter_dir, read_json_config(Path(use.drafter_dir)))
        return replace(common, drafter=drafter, setting=use.setting, map=use.map, context_length=use.context_length,
                       adaptive_path=str(_adaptive_file(directory)))

    plans = {variant: with_drafting(use) for variant, use in uses.items()}
    context_length = min(shared_args(variant).context_length for variant in plans.values())
    own = plans[name]
    # One attention backend for all variants: chosen for the drafter with the most requirements, under every setting.
    most_demanding = max(plans.values(), key=_backend_requirements)
    shared = shared_args(most_demanding, other_settings=[use.setting for use in uses.values()])
    return own, replace(shared, context_length=context_length, mem_fraction=_memory_fraction(machine, *share))


def _share(plan: ServerPlan, uses: DrafterUses, index: int) -> tuple[int, int]:
    """The share of a GPU's memory of the server started as number `index`: all where every server has its own GPUs.

    Otherwise all servers and the reference engine share them.
    """
    return (0, 1) if len(plan.gpu_groups) >= len(uses) else (index, len(uses) + 1)


def _backend_requirements(plan: LaunchPlan) -> int:
    """Orders plans by how much their drafter restricts the attention backend: none, full attention, sliding window."""
    if plan.drafter is None:
        return 0
    return 1 if plan.drafter.sliding_window is None else 2


def _memory_fraction(machine: HardwareProfile, taken: int, num_shares: int) -> float:
    """`--mem-fraction-static` of a server that takes one of `num_shares` equal shares, `taken` of them being used.

    SGLang applies the fraction to the memory that is free when it starts. Equal shares of the whole therefore are
    increasing fractions of what the servers before have left.
    """
    if machine.platform == "cpu":
        return machine.mem_fraction
    share = machine.mem_fraction / num_shares
    return round(share / (1.0 - taken * share), 3)


def _adaptive_file(directory: Path) -> Path:
    return directory / "adaptive.json"
