"""The servers of a comparison: one engine per variant, alike in everything but how it drafts, gone when the stage is.

An *variant* is a server of the serving engine told to use a drafter, n-gram lookup, or nothing (`DrafterUse`). All
variants of a comparison stand side by side on one machine and are asked one at a time: an idle server costs memory and
no processor. `start_server` is the one place that knows which engine is meant.

A stage may be killed at any line, and a server that survived it would disturb the next measurement and keep its memory
for ever. So every variant is on a leash (`engines.parent_death_signal`): whoever ends the stage, and however, ends its
servers.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from eyrie_api.errors import EyrieError, InvalidInput, Transient
from eyrie_api.processes import free_port
from eyrie_api.v1alpha1.serving import EngineKind
from eyrie_api.v1alpha1.targets import TargetSpec
from eyrie_api.v1alpha1.tuning import DrafterUse
from eyrie_workers.engines.process import EngineCommand, batch_size_schedule, start_engine
from eyrie_workers.engines.sglang import launch
from eyrie_workers.engines.sglang.checkpoints import read_drafter, read_target
from eyrie_workers.engines.sglang.process import plugin_root, program, start_sglang
from eyrie_workers.engines.sglang.profiles import HardwareProfile, profile
from eyrie_workers.targets.loading import resolve

_POLL_S = 0.1
_READY_S = {"embedded": 180.0, "sglang": 1800.0}
"""Until a server must answer. Loading a large target and capturing its graphs takes SGLang many minutes."""

_DRAIN_S = {"embedded": 10.0, "sglang": 0.0}
"""Between SIGTERM and SIGKILL. Nobody waits for an answer any more, and SGLang looks for the signal every 5 s only."""

DrafterUses = dict[str, DrafterUse]
"""What each variant decodes with, by the variant's name."""


class Server(Protocol):
    """What `EngineProcess` and `SglangServer` have in common."""

    url: str

    def check(self) -> None:
        """Raises EngineFailed when it has ended."""
        ...

    def ready(self) -> bool:
        """Whether it answers now."""
        ...

    def stop(self, timeout_s: float) -> int:
        """End it; the exit code."""
        ...


@dataclass(frozen=True)
class ServerPlan:
    """What all variants of a comparison share."""

    kind: EngineKind
    target: TargetSpec
    max_concurrency: int
    threads: int | None = None
    """Of the embedded engine."""

    machine: HardwareProfile | None = None
    """What SGLang runs on; default: what is found here."""

    @property
    def model(self) -> str:
        """The name clients ask for."""
        return Path(self.target.model).name

    def follows(self, use: DrafterUse) -> bool:
        """Whether the engine can change its setting with the load, by the map of `use`."""
        if use.map is None:
            return False
        return use.map.adaptive is not None if self.kind == "sglang" else batch_size_schedule(use.map) is not None


@dataclass(frozen=True)
class ManagedServer:
    """The server of one variant."""

    name: str
    use: DrafterUse
    model: str
    server: Server

    @property
    def url(self) -> str:
        """Up to and including /v1."""
        return f"{self.server.url}/v1"


@contextlib.contextmanager
def managed_servers(plan: ServerPlan, uses: DrafterUses, directory: Path,
                 pause_point: Callable[[], None]) -> Iterator[dict[str, ManagedServer]]:
    """All variants started and answering; ended however the block is left. `pause_point` is asked while they come up.

    Raises EngineFailed when one of them ends, Transient when one does not come up in time, InvalidInput (Unlaunchable)
    for a setting the engine cannot serve.
    """
    variants: dict[str, ManagedServer] = {}
    try:
        for name in uses:
            variants[name] = start_server(plan, name, uses, directory / name)
            if plan.kind == "sglang" and (plan.machine or machine_profile()).platform != "cpu":
                # One after the other: each takes its share of the memory that those before it have left.
                wait_ready([variants[name]], _READY_S[plan.kind], pause_point)
        wait_ready(list(variants.values()), _READY_S[plan.kind], pause_point)
        yield variants
    finally:
        for variant in variants.values():
            variant.server.stop(_DRAIN_S[plan.kind])


def wait_ready(variants: Sequence[ManagedServer], timeout_s: float, pause_point: Callable[[], None]) -> None:
    """Wait until all of them answer."""
    deadline = time.monotonic() + timeout_s
    while waiting := [variant for variant in variants if not _answers(variant)]:
        pause_point()
        if time.monotonic() > deadline:
            raise Transient(f"the server of variant {waiting[0].name} does not answer after {timeout_s:g} s",
                            "read its log beside the stage's, or retry on a machine with less to do")
        time.sleep(_POLL_S)


def _answers(variant: ManagedServer) -> bool:
    try:
        variant.server.check()
    except EyrieError as error:
        raise type(error)(f"variant {variant.name}: {error.message}", error.hint) from None
    return variant.server.ready()


def start_server(plan: ServerPlan, name: str, uses: DrafterUses, directory: Path) -> ManagedServer:
    """Start the server of one variant of `uses` on a leash; does not wait. Its log goes to `directory`."""
    use = uses[name]
    server: Server
    if plan.kind == "embedded":
        server = start_engine(_embedded(plan, use), directory, leash=True)
    else:
        told, pins = _sglang(plan, name, uses, directory, free_port())
        told = replace(told, plugin_root=plugin_root(directory))
        document = launch.adaptive_document(told)
        if document is not None:
            directory.mkdir(parents=True, exist_ok=True)
            _adaptive_file(directory).write_text(document)
        server = start_sglang(launch.launch_arguments(told, pins), directory,
                              environment=launch.launch_environment(told))
    return ManagedServer(name, use, plan.model, server)


def command_line(plan: ServerPlan, name: str, uses: DrafterUses, directory: Path) -> tuple[str, ...]:
    """How the server of a variant is started, for the report; its port is left open (0)."""
    if plan.kind == "embedded":
        return tuple(_embedded(plan, uses[name]).argv())
    return (*program(), *launch.launch_arguments(*_sglang(plan, name, uses, directory, 0)))


def _embedded(plan: ServerPlan, use: DrafterUse) -> EngineCommand:
    return EngineCommand(
        target=resolve(plan.target), model=plan.model, drafter=Path(use.drafter_dir) if use.drafter_dir else None,
        setting=use.setting, map=use.map, max_concurrency=plan.max_concurrency, dtype=plan.target.dtype,
        threads=plan.threads)


def _sglang(plan: ServerPlan, name: str, uses: DrafterUses, directory: Path,
            port: int) -> tuple[launch.LaunchPlan, launch.SharedServerArgs]:
    """One variant's plan, and the pins that make it comparable with the others."""
    target_dir = resolve(plan.target)
    machine = plan.machine or machine_profile()
    shared = launch.LaunchPlan(
        target=read_target(str(target_dir), config_of(target_dir), None), machine=machine, served_model_name=plan.model,
        port=port, dtype=plan.target.dtype, max_running_requests=plan.max_concurrency)

    def told(use: DrafterUse) -> launch.LaunchPlan:
        drafter = None if use.drafter_dir is None else read_drafter(use.drafter_dir, config_of(Path(use.drafter_dir)))
        return replace(shared, drafter=drafter, setting=use.setting, map=use.map, context_length=use.context_length,
                       adaptive_path=str(_adaptive_file(directory)))

    plans = {variant: told(use) for variant, use in uses.items()}
    context = min(launch.shared_args(one).context_length for one in plans.values())
    own = plans[name]
    if machine.platform == "cpu":  # its memory is not all SGLang's: no more of it than its requests can fill
        own = replace(own, max_total_tokens=plan.max_concurrency * context)
    # One backend for all: asked of the drafter that is hardest to serve, under every setting compared.
    hardest = max(plans.values(), key=_demands)
    pins = launch.shared_args(hardest, beside=[use.setting for use in uses.values()])
    fraction = _fraction(machine, list(uses).index(name), len(uses))
    return own, replace(pins, context_length=context, mem_fraction=fraction)


def _demands(plan: launch.LaunchPlan) -> int:
    """A windowed drafter narrows the choice of attention backends, and no drafter asks nothing."""
    if plan.drafter is None:
        return 0
    return 1 if plan.drafter.sliding_window is None else 2


def _fraction(machine: HardwareProfile, place: int, num_variants: int) -> float:
    """What the server started as number `place` may take, so that all of them and the reference engine fit.

    SGLang takes its fraction of the memory that is free when it starts, hence more of the less that is left.
    """
    if machine.platform == "cpu":
        return machine.mem_fraction
    share = machine.mem_fraction / (num_variants + 1)
    return round(share / (1.0 - place * share), 3)


def _adaptive_file(directory: Path) -> Path:
    return directory / "adaptive.json"


def machine_profile() -> HardwareProfile:
    """What SGLang would run on here: the first GPU, or the processor."""
    import torch

    if not torch.cuda.is_available():
        return profile("cpu")
    seen = torch.cuda.get_device_properties(0)
    memory_gib = seen.total_memory / 2**30
    if torch.version.hip:
        return HardwareProfile(seen.name, "rocm", 0, memory_gib)
    return HardwareProfile(seen.name, "cuda", 10 * seen.major + seen.minor, memory_gib)


def config_of(directory: Path) -> dict[str, Any]:
    """`config.json` of a target or drafter. Raises InvalidInput."""
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{directory / 'config.json'} cannot be read: {error}", "check the directory") from None
    if not isinstance(config, dict):
        raise InvalidInput(f"{directory / 'config.json'} is not a JSON object", "check the directory")
    return config
