"""Servers of variants: resident while memory allows, replaced by others when it does not, restarted when they end.

The number of servers that fit is computed before the first one starts (`server_memory`), by group of GPUs where there
are several. A server that is needed and not resident replaces the one whose last use is longest ago. A server that ends
is started again, at most `MOST_RESTARTS` times, and counted over all runs of the stage (`server_history`); its last
lines are in the event. Starting servers report their phase from their logs.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eyrie_api.errors import EyrieError, Transient
from eyrie_workers.engines.managed_servers import (
    DRAIN_S,
    READY_S,
    DrafterUses,
    ManagedServer,
    ServerPlan,
    start_server,
)
from eyrie_workers.engines.server_history import ServerHistory
from eyrie_workers.engines.server_memory import (
    available_bytes,
    kv_bytes_per_token,
    num_that_fit,
    server_bytes,
    weights_on_disk,
)
from eyrie_workers.engines.sglang.checkpoints import read_json_config
from eyrie_workers.engines.sglang.local_hardware import detect_hardware
from eyrie_workers.stage_program import Stage
from eyrie_workers.targets.loading import resolve

MOST_RESTARTS = 3
"""Of one variant in one run of a stage: a server that ends more often does not finish a measurement."""

_POLL_S = 0.2
_PORT_TAKEN = "ddress already in use"


@dataclass
class ServerPool:
    """Servers of some of the variants in `uses`. Logs and files are below `directory`, by variant."""

    plan: ServerPlan
    uses: DrafterUses
    """Every variant that may be started. Servers have the same arguments but for drafting (`managed_servers`)."""

    directory: Path
    stage: Stage
    history: ServerHistory
    capacity: int = 0
    """Servers that fit the memory."""

    _servers: dict[str, ManagedServer] = field(default_factory=dict)
    """Resident ones; the last one used is last."""

    _restarted: dict[str, int] = field(default_factory=dict)
    _group_of: dict[str, int] = field(default_factory=dict)
    """Index in `plan.gpu_groups` of each resident server."""

    def __post_init__(self) -> None:
        """Compute `capacity`. Raises InvalidInput when not one server fits."""
        self._groups = self.plan.gpu_groups or ((),)
        if not self.capacity:
            self.capacity = self._servers_per_group() * len(self._groups)

    def _servers_per_group(self) -> int:
        machine = self.plan.machine or detect_hardware()
        target = resolve(self.plan.target)
        drafters = {use.drafter_dir for use in self.uses.values() if use.drafter_dir is not None}
        weights = weights_on_disk(target) + max((weights_on_disk(Path(one)) for one in drafters), default=0)
        config = read_json_config(target)
        context = int((config.get("text_config") or config)["max_position_embeddings"])
        tokens = self.plan.max_concurrency * (context if machine.platform == "cpu" else min(context, 4096))
        ngram = any(use.setting.method == "ngram" for use in self.uses.values())
        kv_bytes = tokens * kv_bytes_per_token(config, self.plan.target.dtype)
        one = server_bytes(self.plan.kind, machine.platform, weights, kv_bytes, ngram)
        available = available_bytes(machine, self.plan.tp_size)
        if machine.platform == "cpu":
            available -= weights  # of the reference implementation, which replays or explains answers
        return num_that_fit(available, one)

    @property
    def resident(self) -> tuple[str, ...]:
        """Variants that have a server."""
        return tuple(self._servers)

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
        missing = [name for name in names if name not in self._servers][: self.capacity - len(self._servers)]
        one_by_one = self.plan.kind == "sglang" and (self.plan.machine or detect_hardware()).platform != "cpu"
        failed: dict[str, EyrieError] = {}
        # SGLang measures a GPU's free memory at start, so there servers start one after the other.
        for group in ([[name] for name in missing] if one_by_one else [missing]):
            for name in group:
                try:
                    self._servers[name] = self._start(name)
                except EyrieError as error:
                    failed[name] = error
            failed |= self._wait([name for name in group if name not in failed])
        return failed

    def server(self, name: str) -> ManagedServer:
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

    def recover(self, name: str, error: EyrieError) -> None:
        """Replace the server of a variant after `error` if its process has ended.

        Raises `error` when the process runs, or has ended too often.
        """
        server = self._servers.get(name)
        if server is None:
            raise error
        try:
            time.sleep(_POLL_S)  # a connection is lost shortly before the process can be reaped
            server.server.check()
        except EyrieError as ended:
            self._restarted[name] = self._restarted.get(name, 0) + 1
            self.discard(name)
            if self._restarted[name] > MOST_RESTARTS:
                raise type(ended)(f"variant {name} ended {self._restarted[name]} times; last: {ended.message}",
                                  ended.hint) from error
            self.history.note_end(name, ended.message)
            self.stage.event("ServerRestarted", f"variant {name}: {ended.message}", warning=True)
            return
        raise error

    def discard(self, name: str) -> None:
        """Stop the server of a variant."""
        self._servers.pop(name).server.stop(DRAIN_S[self.plan.kind])

    def stop(self) -> None:
        """Stop all servers."""
        for name in list(self._servers):
            self.discard(name)

    def _start(self, name: str) -> ManagedServer:
        taken = Counter(self._group_of[other] for other in self._servers)
        group = min(range(len(self._groups)), key=lambda number: taken[number])
        self._group_of[name] = group
        # One share of a GPU is left for the reference engine.
        share = (taken[group], self.capacity // len(self._groups) + 1)
        directory = self.directory / name.replace("/", "-").replace(" ", "-")
        return start_server(self.plan, name, self.uses, directory, share, self._groups[group])

    def _wait(self, names: Sequence[str]) -> dict[str, EyrieError]:
        failed: dict[str, EyrieError] = {}
        ports_taken: dict[str, int] = {}
        deadline = time.monotonic() + READY_S[self.plan.kind]
        ready: set[str] = set()
        phases: dict[str, str] = {}
        try:
            while left := [name for name in names if name not in failed and name not in ready]:
                self.stage.pause_point()
                for name in left:
                    server = self._servers[name].server
                    try:
                        server.check()
                    except EyrieError as error:
                        self._servers.pop(name).server.stop(0.0)
                        if _PORT_TAKEN in error.message and ports_taken.setdefault(name, 0) < MOST_RESTARTS:
                            ports_taken[name] += 1  # another process took the free port first
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
            self.stop()
            raise
        if names:
            self.stage.progress(len(ready), len(names), "servers ready")
        return failed

