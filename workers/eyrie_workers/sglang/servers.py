"""The servers of a comparison: one per variant, equal in everything but drafting.

A variant is served by the serving engine with a drafter, with n-gram lookup, or without speculation (`DrafterUse`). An
idle server uses memory and no CPU time, so the servers of all variants run on one machine at the same time, as far as
its memory allows (`profiles`), and receive requests one after the other. A server that is needed and not resident
replaces the one whose last use is longest ago. A server that ends is started again, at most `MOST_RESTARTS` times, and
counted over all runs of the stage (`ServerHistory`); its last lines are in the event. Starting servers report their
phase from their logs.

Prove also measures the embedded engine, as processes of its server: `start_server` alone distinguishes the engines.

A stage may be killed at any line. A server that survived it would disturb the next measurement and keep its memory, so
every server is killed when the stage ends (`engines.parent_death_signal`), except those that a stage which ended well
passes on (`engines.server_keeper`): the next one continues with servers of equal keys (`server_key`).
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path

from eyrie_api.contract.engine import EngineKind, EngineSpec
from eyrie_api.contract.model import Digest, Frozen
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.tuning import DrafterUse
from eyrie_api.errors import EyrieError, Transient
from eyrie_api.planning.sglang_attention import SglangHardware
from eyrie_api.processes import free_port
from eyrie_workers.engines.process import (
    EngineCommand,
    EngineFailed,
    EngineProcess,
    ServerProcess,
    batch_size_schedule,
    start_engine,
)
from eyrie_workers.engines.server_keeper import keeper
from eyrie_workers.jsonl_ledger import JsonlLedger
from eyrie_workers.sglang import profiles
from eyrie_workers.sglang.checkpoints import checkpoint_algorithm, read_drafter, read_target
from eyrie_workers.sglang.launch import (
    ADAPTIVE_ALGORITHMS,
    CapturedStates,
    LaunchPlan,
    SharedServerArgs,
    adaptive_config,
    launch_arguments,
    launch_environment,
    shared_args,
)
from eyrie_workers.sglang.local_hardware import GpuGroup, detect_hardware
from eyrie_workers.sglang.process import as_server, launcher_command, merged_environment, plugin_root, start_sglang
from eyrie_workers.stage_program import Stage
from eyrie_workers.targets.config import read_json
from eyrie_workers.targets.loading import resolve

READY_S = {"embedded": 180.0, "sglang": 1800.0}
"""Timeout of the start. Loading a large target and capturing its CUDA graphs takes SGLang many minutes."""

DRAIN_S = {"embedded": 10.0, "sglang": 0.0}
"""Between SIGTERM and SIGKILL. No request is running any more, and SGLang polls for the signal only every 5 s."""

MOST_RESTARTS = 3
"""Of one variant in one run of a stage: a server that ends more often does not finish a measurement."""

HISTORY = "servers.jsonl"
_POLL_S = 0.2
_REAPED_S = 1.0
"""A connection is lost before the process can be reaped: its threads end one after the other."""
_PORT_TAKEN = "ddress already in use"

DrafterUses = dict[str, DrafterUse]
"""The drafter and setting of each variant, by the variant's name."""


@dataclass(frozen=True)
class ServerPlan:
    """What the servers of all variants share."""

    kind: EngineKind
    target: TargetSpec
    max_concurrency: int
    threads: int | None = None
    """CPU threads of the embedded engine."""

    machine: SglangHardware | None = None
    """The hardware SGLang runs on; default: this machine's."""

    engine: EngineSpec = field(default_factory=EngineSpec)
    """GPUs of one server, attention backend and further arguments of SGLang's servers."""

    gpu_groups: tuple[GpuGroup, ...] = ()
    """The GPUs of each server, in the order of the variants; empty: all servers share what the stage sees."""

    captured: CapturedStates | None = None

    @property
    def model(self) -> str:
        return Path(self.target.model).name

    @property
    def hardware(self) -> SglangHardware:
        return replace(self.machine or detect_hardware(),
                       given_fraction=self.engine.sglang_arguments.mem_fraction_static)

    def is_adaptive(self, use: DrafterUse) -> bool:
        """Whether the engine changes its setting with the load according to the map of `use`."""
        if use.map is None:
            return False
        if self.kind == "embedded":
            return batch_size_schedule(use.map) is not None
        # On a CPU, SGLang 0.5.23 ends with NotImplementedError while it builds graphs for the depths of the map.
        if use.map.adaptive is None or use.drafter_dir is None or self.hardware.platform == "cpu":
            return False
        return checkpoint_algorithm(read_json(Path(use.drafter_dir) / "config.json")) in ADAPTIVE_ALGORITHMS


def start_server(plan: ServerPlan, name: str, uses: DrafterUses, directory: Path,
                 share: tuple[int, int] = (0, 1), gpus: GpuGroup = ()) -> ServerProcess:
    """Start the server of one variant; does not wait until it is ready. Its log goes to `directory`.

    uses    all variants of the comparison: their servers have the same arguments but for drafting
    share   how many equal shares of its GPUs' memory are taken already, and how many there are
    gpus    those it computes on; empty: those the stage sees

    Raises InvalidInput (Unlaunchable) for a setting the engine does not support.
    """
    start = partial(keeper().start, server_key(plan, name, uses, share[1], gpus))
    if plan.kind == "embedded":
        return start_engine(_engine_command(plan, uses[name]), directory, start)
    launch_plan, shared = _sglang_plan(plan, name, uses, directory, free_port(), share)
    launch_plan = replace(launch_plan, plugin_root=plugin_root(directory))
    config = adaptive_config(launch_plan)
    if config is not None:
        directory.mkdir(parents=True, exist_ok=True)
        Path(str(launch_plan.adaptive_path)).write_text(config)
    return start_sglang(launch_arguments(launch_plan, shared), directory,
                        environment=_environment(launch_plan, gpus), start=start)


def _environment(launch_plan: LaunchPlan, gpus: GpuGroup) -> dict[str, str]:
    return launch_environment(launch_plan) | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})


def server_key(plan: ServerPlan, name: str, uses: DrafterUses, num_shares: int, gpus: GpuGroup) -> Digest:
    """The digest of all that a variant's server is started with: command line, environment, files of the models. Equal
    servers have equal keys, whatever their ports, their logs, and the shares of the memory that were taken before.

    Raises as `start_server`.
    """
    use, config, environment = uses[name], None, dict[str, str]()
    if plan.kind == "embedded":
        words = tuple(_engine_command(plan, use).argv())
    else:
        launch_plan, shared = _sglang_plan(plan, name, uses, Path(), 0, (0, num_shares))
        words = (*launcher_command(), *launch_arguments(launch_plan, shared))
        config, environment = adaptive_config(launch_plan), _environment(launch_plan, gpus)
    models = [resolve(plan.target), *([Path(use.drafter_dir)] if use.drafter_dir is not None else [])]
    files = sorted((str(file), file.stat().st_size, file.stat().st_mtime_ns)
                   for model in models for file in model.rglob("*") if file.is_file())
    content = json.dumps([words, sorted(merged_environment(environment).items()), config, files])
    return hashlib.sha256(content.encode()).hexdigest()


def command_line(plan: ServerPlan, name: str, uses: DrafterUses, directory: Path) -> tuple[str, ...]:
    """The command line of a variant's server, for the report, with port 0."""
    if plan.kind == "embedded":
        return tuple(_engine_command(plan, uses[name]).argv())
    # Servers that share GPUs take equal shares, one after the other; one more is left for the reference engine.
    share = (0, 1) if len(plan.gpu_groups) >= len(uses) else (list(uses).index(name), len(uses) + 1)
    return (*launcher_command(), *launch_arguments(*_sglang_plan(plan, name, uses, directory, 0, share)))


def shared_context_length(plan: ServerPlan, uses: DrafterUses) -> int:
    """The context length of the servers of all variants: the smallest of the target's and the drafters'."""
    _, shared = _sglang_plan(plan, next(iter(uses)), uses, Path(), 0, (0, 1))
    return shared.context_length


def _engine_command(plan: ServerPlan, use: DrafterUse) -> EngineCommand:
    return EngineCommand(
        target=resolve(plan.target), model=plan.model, use=use, max_concurrency=plan.max_concurrency,
        dtype=plan.target.dtype, threads=plan.threads)


def _sglang_plan(plan: ServerPlan, name: str, uses: DrafterUses, directory: Path, port: int,
                 share: tuple[int, int]) -> tuple[LaunchPlan, SharedServerArgs]:
    """One variant's launch plan, and the arguments it shares with the other variants."""
    target_dir, machine = resolve(plan.target), plan.hardware
    common = LaunchPlan(
        target=read_target(str(target_dir), read_json(target_dir / "config.json")), machine=machine,
        served_model_name=plan.model, port=port, dtype=plan.target.dtype, max_running_requests=plan.max_concurrency,
        engine=plan.engine, adaptive_path=str(directory / "adaptive.json"), captured=plan.captured)
    plans: dict[str, LaunchPlan] = {}
    for variant, use in uses.items():
        drafter = None
        if use.drafter_dir is not None:
            drafter = read_drafter(use.drafter_dir, read_json(Path(use.drafter_dir) / "config.json"))
        plans[variant] = replace(common, drafter=drafter, setting=use.setting, map=use.map,
                                 context_length=use.context_length)
    # One attention backend for all variants: chosen for the drafter that restricts it most (none, full attention, a
    # sliding window), under every setting.
    most_demanding = max(plans.values(), key=lambda variant: 0 if variant.drafter is None else
                         1 if variant.drafter.sliding_window is None else 2)
    shared = shared_args(most_demanding, other_settings=[use.setting for use in uses.values()])
    mem_fraction = shared.mem_fraction
    if machine.platform != "cpu":
        # SGLang applies the fraction to the memory that is free when it starts. Equal shares of the whole therefore
        # are increasing fractions of what the servers before have left.
        taken, num_shares = share
        of_whole = mem_fraction / num_shares
        mem_fraction = round(of_whole / (1.0 - taken * of_whole), 3)
    return plans[name], replace(shared, mem_fraction=mem_fraction, context_length=min(
        shared_args(variant).context_length for variant in plans.values()))


class ServerRecord(Frozen):
    """One line of a `ServerHistory`."""

    variant: str
    version: str = ""
    """That its server reported; empty where the line is of an end."""

    started: bool = False
    ended: str = ""
    """Why the server ended while it was used, before another replaced it."""


class ServerHistory:
    """What became of a stage's servers over all its runs: how often one was replaced, and which version answered.

    A stage that is killed and run again reports the restarts of its earlier runs too, and the version of the servers it
    measured even where everything is in its ledgers and no server starts again. The history is in the directory of the
    stage; that of another spec is set aside.
    """

    def __init__(self, out_dir: Path, spec_digest: Digest) -> None:
        self._ledger = JsonlLedger(out_dir / HISTORY, ServerRecord, spec_digest)

    @property
    def starts(self) -> int:
        """Servers that were started, those that replaced others among them."""
        return sum(record.started for record in self._ledger.entries)

    @property
    def restarts(self) -> int:
        """Servers that were replaced after they had ended."""
        return sum(bool(record.ended) for record in self._ledger.entries)

    @property
    def version(self) -> str:
        """Of the servers; several, where it changed between runs; empty before one was asked."""
        return ", ".join(dict.fromkeys(record.version for record in self._ledger.entries if record.version))

    def note_start(self, variant: str) -> None:
        self._ledger.append(ServerRecord(variant=variant, started=True))

    def note_end(self, variant: str, message: str) -> None:
        self._ledger.append(ServerRecord(variant=variant, ended=message or "without a message"))

    def note_version(self, variant: str, version: str) -> None:
        if version not in self.version.split(", "):
            self._ledger.append(ServerRecord(variant=variant, version=version))


@dataclass
class ServerPool:
    """Servers of some of the variants in `uses`. Logs and files are below `directory`, by variant."""

    plan: ServerPlan
    uses: DrafterUses
    """Every variant that may be started. Servers have the same arguments but for drafting."""

    directory: Path
    stage: Stage
    history: ServerHistory | None = None
    capacity: int = 0
    """Servers that may be resident; default: those that fit the memory."""

    beside_reference: bool = True
    """Whether the reference engine computes in this process: one share of a GPU is left for it."""

    _servers: dict[str, ServerProcess] = field(default_factory=dict)
    """Resident ones; the last one used is last."""

    _restarted: dict[str, int] = field(default_factory=dict)
    _group_of: dict[str, int] = field(default_factory=dict)
    """Index in `plan.gpu_groups` of each resident server."""

    def __post_init__(self) -> None:
        """Compute `capacity`, and take over what is kept. Raises InvalidInput when not one server fits."""
        self._groups = self.plan.gpu_groups or ((),)
        on_cpu = self.plan.hardware.platform == "cpu"
        # SGLang measures a GPU's free memory at start, so there servers start one after the other.
        self._one_by_one = self.plan.kind == "sglang" and not on_cpu
        # Of a GPU's memory the share is known before, and part of the keys of servers; of main memory it is measured.
        if not self.capacity and not on_cpu:
            self.capacity = self._num_that_fit()
        self._take_over()
        self.capacity = self.capacity or self._num_that_fit()

    def _num_that_fit(self) -> int:
        machine, target = self.plan.hardware, resolve(self.plan.target)
        drafters = {use.drafter_dir for use in self.uses.values() if use.drafter_dir is not None}
        weights = profiles.weights_on_disk(target) + max(
            (profiles.weights_on_disk(Path(drafter)) for drafter in drafters), default=0)
        config = read_json(target / "config.json")
        context = int((config.get("text_config") or config)["max_position_embeddings"])
        tokens = self.plan.max_concurrency * (context if machine.platform == "cpu" else min(context, 4096))
        kv_bytes = tokens * profiles.kv_bytes_per_token(config, self.plan.target.dtype)
        available = profiles.available_bytes(machine, self.plan.engine.tp_size)
        if machine.platform == "cpu":
            # Without the reference implementation, which replays or explains answers.
            available += sum(server.memory_bytes() for server in self._servers.values()) - weights
        ngram = any(use.setting.method == "ngram" for use in self.uses.values())
        one_server = profiles.server_bytes(self.plan.kind, machine.platform, weights, kv_bytes, ngram)
        return profiles.num_that_fit(available, one_server) * len(self._groups)

    @property
    def _num_shares(self) -> int:
        """Of the memory of one group of GPUs."""
        return -(-self.capacity // len(self._groups)) + self.beside_reference

    def _take_over(self) -> None:
        """Continue with kept servers that equal those of variants, flushed; stop the others."""
        kept, wanted = keeper().taken, dict[Digest, tuple[str, int]]()
        for name, (group, gpus) in product(self.uses, enumerate(self._groups)) if kept else ():
            with suppress(EyrieError):  # reported when it is started
                wanted.setdefault(server_key(self.plan, name, self.uses, self._num_shares, gpus), (name, group))
        while kept:
            process = kept.pop()
            command, log_file = process.command, process.log_file
            server: ServerProcess = as_server(process, log_file, command) if self.plan.kind == "sglang" else \
                EngineProcess(process, log_file, command)
            name, group = wanted.pop(process.key, ("", 0))
            with suppress(EngineFailed):
                if name and server.ready():
                    server.flush()
                    self._servers[name], self._group_of[name] = server, group
                    continue
            server.stop(DRAIN_S[self.plan.kind])
        if self._servers:
            self.stage.event("ServersTaken", f"servers of the stage before continue: {', '.join(self._servers)}")

    @property
    def resident(self) -> tuple[str, ...]:
        return tuple(self._servers)

    def amend(self, uses: Mapping[str, DrafterUse]) -> None:
        """Change the settings of variants, by what was measured since they were named; a server with the old one stops.
        """
        for name, use in uses.items():
            if self.uses[name] != use:
                self.uses[name] = use
                if name in self._servers:
                    self.discard(name)

    def make_ready(self, names: Sequence[str]) -> dict[str, EyrieError]:
        """Start servers of these variants, as many as fit, and wait for them; returns the errors of those that ended.

        Servers of variants that are not named are stopped. Raises Transient when a server is not ready in time.
        """
        unneeded = [name for name in self._servers if name not in names]
        for name in [name for name in names if name not in self._servers]:
            # A server of the same use under another name continues under this one.
            twin = next((other for other in unneeded if self.uses[other] == self.uses[name]), None)
            if twin is not None:
                unneeded.remove(twin)
                self._servers[name] = self._servers.pop(twin)
                self._group_of[name] = self._group_of[twin]
        for name in unneeded:
            self.discard(name)
        missing = [name for name in names if name not in self._servers]
        missing = missing[: max(0, self.capacity - len(self._servers))]
        failed: dict[str, EyrieError] = {}
        for group in ([[name] for name in missing] if self._one_by_one else [missing]):
            for name in group:
                try:
                    self._servers[name] = self._start(name)
                except EyrieError as error:
                    failed[name] = error
            failed |= self._wait([name for name in group if name not in failed])
        return failed

    def server(self, name: str) -> ServerProcess:
        """The ready server of a variant; it may replace another. Raises EngineFailed when it cannot start."""
        if name not in self._servers:
            while len(self._servers) >= self.capacity:
                self.discard(next(iter(self._servers)))
            self._servers[name] = self._start(name)
            failed = self._wait([name])
            if failed:
                raise failed[name]
        self._servers[name] = self._servers.pop(name)  # now the last one used
        return self._servers[name]

    def flushed(self, name: str) -> str:
        """The URL of a variant's ready server, up to and including /v1, which has forgotten all requests so far.

        A server that has ended is replaced. Raises EngineFailed.
        """
        while True:
            server = self.server(name)
            try:
                server.check()
                server.flush()
                return f"{server.url}/v1"
            except EngineFailed as error:
                self.recover(name, error)

    def has_ended(self, name: str, within_s: float = _REAPED_S) -> bool:
        """Whether the server of a variant has ended; it is discarded, and another starts when it is next used. Raises
        EngineFailed when it has ended too often."""
        server = self._servers.get(name)
        if server is None:
            return False
        deadline = time.monotonic() + within_s
        self.stage.pause_point()  # a server that ends with the run is not replaced
        try:
            while time.monotonic() < deadline:
                server.check()
                time.sleep(_POLL_S)
            server.check()
        except EngineFailed as ended:
            self._restarted[name] = self._restarted.get(name, 0) + 1
            self.discard(name)
            if self._restarted[name] > MOST_RESTARTS:
                raise EngineFailed(f"variant {name} ended {self._restarted[name]} times; last: {ended.message}",
                                   ended.hint) from ended
            self.note_end(name, ended.message)
            return True
        return False

    def recover(self, name: str, error: EyrieError) -> None:
        """Replace the server of a variant after `error` if its process has ended. Raises `error` when the process runs,
        EngineFailed when it has ended too often."""
        if not self.has_ended(name):
            raise error

    def note_end(self, name: str, message: str) -> None:
        """Record, and report, that the server of a variant ended and is replaced."""
        if self.history is not None:
            self.history.note_end(name, message)
        self.stage.event("ServerRestarted", f"variant {name}: {message}", warning=True)

    def discard(self, name: str) -> None:
        self._servers.pop(name).stop(DRAIN_S[self.plan.kind])

    def stop(self) -> None:
        for name in list(self._servers):
            self.discard(name)

    def _start(self, name: str) -> ServerProcess:
        taken = Counter(self._group_of[other] for other in self._servers)
        group = min(range(len(self._groups)), key=lambda number: taken[number])
        self._group_of[name] = group
        share = (taken[group], self._num_shares)
        directory = self.directory / name.replace("/", "-").replace(" ", "-")
        server = start_server(self.plan, name, self.uses, directory, share, self._groups[group])
        if self.history is not None:
            self.history.note_start(name)
        return server

    def _wait(self, names: Sequence[str]) -> dict[str, EyrieError]:
        """Poll starting servers until each is ready or has ended; returns the errors of those that ended."""
        failed: dict[str, EyrieError] = {}
        ports_taken: Counter[str] = Counter()
        deadline = time.monotonic() + READY_S[self.plan.kind]
        ready: set[str] = set()
        phases: dict[str, str] = {}
        try:
            while left := [name for name in names if name not in failed and name not in ready]:
                self.stage.pause_point()
                for name in left:
                    server = self._servers[name]
                    try:
                        server.check()
                    except EyrieError as error:
                        self._servers.pop(name).stop(0.0)
                        # Race: `free_port` closes the port it found, and another process may take it before the server.
                        if _PORT_TAKEN in error.message and ports_taken[name] < MOST_RESTARTS:
                            ports_taken[name] += 1
                            self._servers[name] = self._start(name)
                        else:
                            failed[name] = type(error)(f"variant {name}: {error.message}", error.hint)
                    else:
                        if server.ready():
                            ready.add(name)
                        elif (phase := server.phase()) != phases.get(name):
                            phases[name] = phase
                            self.stage.progress(len(ready), len(names), "servers ready", f"{name}: {phase}")
                if time.monotonic() > deadline:
                    raise Transient(f"the server of variant {left[0]} is not ready after {READY_S[self.plan.kind]:g} s",
                                    "read its log in the stage's directory, or retry on a less busy machine")
                time.sleep(_POLL_S)
        except BaseException:
            self.stop()  # a stage that is interrupted here leaves no server that is still loading
            raise
        if names:
            self.stage.progress(len(ready), len(names), "servers ready")
        return failed
