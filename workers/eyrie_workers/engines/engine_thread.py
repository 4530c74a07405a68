"""The one thread that owns the engine: requests go in by a queue, tokens come out by callback.

Torch and the engine's caches belong to this thread alone; the HTTP side never touches them. The thread loads the
target, then repeats: take in what was asked (blocking only when idle), step the engine once, hand out what each
request got. A request beyond the engine's slots waits here in a bounded line, so that a crowd is told so at once
(429) rather than after a minute. If stepping raises, nothing is guessed: every listener hears of it, the loop is dead,
/health says so and the process ends, for its supervisor to start a fresh one.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from eyrie_api.errors import EyrieError
from eyrie_workers.engines.metrics import EngineMetrics
from eyrie_workers.engines.openai_api import NotReady, Overloaded
from eyrie_workers.speculation.engine import Engine, Request, StepOutput
from eyrie_workers.targets.templates import ChatTokenizer

State = Literal["loading", "ready", "failed", "stopped"]


@dataclass(frozen=True)
class LoadedEngine:
    """What the thread needs to serve, and what the HTTP side needs to know."""

    engine: Engine
    """Its shape (`tree`, `max_length`, `max_concurrency`) may be read from any thread; it does not change."""

    tokenizer: ChatTokenizer


Listener = Callable[[StepOutput | EyrieError], None]
"""Called in the loop's thread: must not block."""


class EngineCrashed(EyrieError):
    """The engine raised in the middle of its work."""

    http_status = 500
    exit_code = 70
    reason = "EngineCrashed"


@dataclass
class _Client:
    request: Request
    listener: Listener
    since: float
    """When the request was accepted, or when its last tokens came."""

    heard: bool = False


class EngineThread:
    """Runs an engine in a thread of its own."""

    def __init__(self, load: Callable[[], LoadedEngine], meters: EngineMetrics, *, max_waiting: int = 256) -> None:
        self._load = load
        self._meters = meters
        self._max_waiting = max_waiting
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._clients: dict[str, _Client] = {}
        self._waiting: deque[str] = deque()
        self._running: set[str] = set()
        self._accepted = 0  # requests submitted and not ended; guarded by _lock, read by the HTTP side
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.state: State = "loading"
        self.failure: EyrieError | None = None
        self.loaded: LoadedEngine | None = None
        self.on_change: Callable[[], None] = lambda: None
        """Called in the thread when the state changes."""

    def start(self) -> None:
        """Begin loading."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """LoadedEngine, and the thread still turning."""
        return self.state == "ready" and self._thread.is_alive()

    def submit(self, request: Request, listener: Listener) -> None:
        """Ask for an answer. Raises NotReady or Overloaded; later failures go to the listener."""
        client = _Client(request, listener, time.monotonic())
        with self._lock:  # so that no request slips in between the last look at the queue and the end of the thread
            if not self.alive or self.loaded is None:
                raise NotReady(f"the engine is {self.state}", "try again in a moment; GET /health says when")
            if self._accepted >= self.loaded.engine.max_concurrency + self._max_waiting:
                raise Overloaded(f"{self._accepted} requests are in work or waiting",
                                 "try again later, or start the engine with a larger --max-waiting")
            self._accepted += 1
            self._commands.put(lambda: self._admit(client))
        self._meters.accepted_request(len(request.prompt_ids))

    def cancel(self, request_id: str) -> None:
        """Forget a request and free its slot. Unknown or ended ids are fine: a client may leave at any moment."""
        self._commands.put(lambda: self._forget(request_id))

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread after its current step."""
        self._commands.put(self._halt)
        self._thread.join(timeout_s)

    # Below: only the engine's thread.

    def _run(self) -> None:
        try:
            self.loaded = self._load()
        except EyrieError as error:
            self._die(error)
            return
        except Exception as error:
            self._die(EngineCrashed(f"loading failed: {type(error).__name__}: {error}", "see the traceback in the log"))
            raise
        self._become("ready")
        try:
            while self.state == "ready":
                self._turn(self.loaded)
        except Exception as error:
            self._die(EngineCrashed(f"{type(error).__name__}: {error}", "the engine will be restarted; send it again"))
            raise

    def _turn(self, loaded: LoadedEngine) -> None:
        self._take_commands(block=not self._clients)
        while self._waiting and len(self._running) < loaded.engine.max_concurrency:
            client = self._clients[self._waiting.popleft()]
            try:
                loaded.engine.submit(client.request)
            except EyrieError as error:  # this request's fault, and its alone
                self._drop(client.request.id)
                client.listener(error)
                continue
            self._running.add(client.request.id)
        self._meters.load(len(self._running), len(self._waiting))
        if self._running:
            for progress in loaded.engine.step():
                self._deliver(progress)

    def _take_commands(self, *, block: bool) -> None:
        if block:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _admit(self, client: _Client) -> None:
        self._clients[client.request.id] = client
        self._waiting.append(client.request.id)

    def _forget(self, request_id: str) -> None:
        if request_id not in self._clients:
            return
        if request_id in self._running:
            assert self.loaded is not None
            self.loaded.engine.cancel(request_id)
        self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        del self._clients[request_id]
        self._running.discard(request_id)
        if request_id in self._waiting:
            self._waiting.remove(request_id)
        with self._lock:
            self._accepted -= 1

    def _deliver(self, progress: StepOutput) -> None:
        client = self._clients[progress.id]
        now = time.monotonic()
        if progress.token_ids:
            self._meters.tokens(len(progress.token_ids), now - client.since, first=not client.heard)
            client.since, client.heard = now, True
        self._meters.rounds(progress.accepted, progress.drafted)
        if progress.finish_reason is not None:
            self._drop(progress.id)
        client.listener(progress)

    def _halt(self) -> None:
        self._end("stopped", NotReady("the engine was stopped", "send it again to its successor"))

    def _become(self, state: State) -> None:
        self.state = state
        self.on_change()

    def _die(self, error: EyrieError) -> None:
        self.failure = error
        self._end("failed", error)

    def _end(self, state: State, error: EyrieError) -> None:
        with self._lock:
            self.state = state
        self._take_commands(block=False)
        for client in self._clients.values():
            client.listener(error)
        self._clients.clear()
        self.on_change()
