"""SGLang as a `DecodingEngine`: one managed server per variant, one of them under load at a time.

An idle server uses memory and no processor time, so resident servers do not disturb the one that is measured. Before
each run the server's prefix cache and the texts of its n-gram lookup are flushed: a repeated prompt would otherwise be
free, and n-gram lookup would find its own earlier answer. A server that ends during a run is started again and the run
is repeated (`server_pool`).

SGLang draws its own noise at temperature > 0, so sampled answers of two variants differ although their distributions
are equal; greedy answers are compared token by token. On a CPU, SGLang 0.5.23 verifies drafts greedily whatever the
temperature (`_verify_uses_greedy`), so sampled requests with a drafter are refused there.
"""

from collections.abc import Sequence
from pathlib import Path

from eyrie_api.errors import EyrieError
from eyrie_api.v1alpha1.reports import EngineUsed
from eyrie_api.v1alpha1.tuning import Setting
from eyrie_workers.engines.decoding_engine import EngineRun, Variants
from eyrie_workers.engines.managed_servers import DrafterUses, ServerPlan, shared_context_length
from eyrie_workers.engines.process import EngineFailed
from eyrie_workers.engines.server_history import ServerHistory
from eyrie_workers.engines.server_pool import ServerPool
from eyrie_workers.engines.sglang.generate import generate
from eyrie_workers.engines.sglang.local_hardware import detect_hardware
from eyrie_workers.engines.sglang.process import SglangServer
from eyrie_workers.speculation.requests import Request
from eyrie_workers.stage_program import Stage

GREEDY_ONLY = "SGLang's CPU backend verifies drafts greedily whatever the temperature"


class SglangEngine:
    """Implements `DecodingEngine`."""

    same_samples = False

    def __init__(self, plan: ServerPlan, possible: DrafterUses, directory: Path, stage: Stage,
                 history: ServerHistory) -> None:
        """An engine without servers; `start` starts them.

        possible    every variant that `start` may be given: all servers have the same arguments but for drafting
        directory   of the servers' logs
        history     of this stage's servers

        Raises InvalidInput when not one server fits the memory, or SGLang does not support a variant (Unlaunchable).
        """
        self._plan, self._stage, self._history = plan, stage, history
        self._asked = False
        self._on_cpu = (plan.machine or detect_hardware()).platform == "cpu"
        self._context_length = shared_context_length(plan, possible)
        self._pool = ServerPool(plan, possible, directory, stage, history)

    def describe(self) -> EngineUsed:
        """As in `DecodingEngine`."""
        limits = (f"{GREEDY_ONLY}: that drafting keeps the distribution of sampled answers was not shown in this "
                  "engine on this machine",) if self._on_cpu else (
                  "SGLang's noise is not keyed by position: sampled answers of two variants were not compared",)
        machine = self._plan.machine or detect_hardware()
        return EngineUsed(kind="sglang", version=self._history.version or "unknown", dtype=self._plan.target.dtype,
                          device=machine.name, limits=limits, restarts=self._history.restarts)

    def refusal(self, setting: Setting, temperature: float) -> str | None:
        """As in `DecodingEngine`."""
        return GREEDY_ONLY if self._on_cpu and temperature > 0.0 and setting.tree is not None else None

    @property
    def num_resident(self) -> int:
        """As in `DecodingEngine`."""
        return self._pool.capacity

    def start(self, uses: Variants) -> dict[str, EyrieError]:
        """As in `DecodingEngine`."""
        unknown = [name for name, use in uses.items() if self._pool.uses.get(name) != use]
        assert not unknown, f"variants {unknown} are not among the possible ones"
        before = set(self._pool.resident)
        failed = self._pool.make_ready(list(uses))
        new = [name for name in self._pool.resident if name not in before]
        if new:
            self._stage.event("ServersReady", f"{len(new)} SGLang servers started: {', '.join(new)}; "
                              f"{len(self._pool.resident)} of at most {self._pool.capacity} are resident")
        return failed

    def generate(self, variant: str, requests: Sequence[Request], concurrency: int, *,
                 truncate: bool = False) -> EngineRun:
        """As in `DecodingEngine`."""
        while True:
            managed = self._pool.server(variant)
            server = managed.server
            assert isinstance(server, SglangServer)
            try:
                if not self._asked:
                    self._history.note_version(variant, server.version())
                    self._asked = True
                server.flush()
                cpu = server.cpu_seconds()
                answers, seconds = generate(server.url, requests, concurrency, self._context_length, truncate=truncate)
                return EngineRun(answers, seconds, server.cpu_seconds() - cpu)
            except EngineFailed as error:
                self._stage.pause_point()
                self._pool.recover(variant, error)

    def drain(self) -> None:
        """As in `DecodingEngine`."""
        for name in self._pool.resident:
            server = self._pool.server(name).server
            assert isinstance(server, SglangServer)
            server.flush()

    def stop(self) -> None:
        """As in `DecodingEngine`."""
        self._pool.stop()
