"""The thread that owns the engine: requests arrive through a queue, tokens leave through callbacks; and its metrics.

Torch and the engine's caches are used by this thread only; the HTTP side never accesses them. The thread loads the
target and then repeats: take commands from the queue (blocking only when there are no requests), step the engine once,
pass each request its tokens. Requests beyond the engine's slots wait here in a bounded queue, so that an overloaded
server answers 429 at once instead of after a minute. If a step raises, the state of the engine is unknown: every
listener receives the error, the thread ends, /health reports it, and the process exits so that its supervisor starts a
new one.

Metrics. Tokens and verify rounds are counted when they happen, in the engine thread, so that a scrape during a long
response is correct. Acceptance length is a gauge over the last rounds instead of over the life of the process. For any
other window divide the `rate()` of two counters: `eyrie_generated_tokens_total` by `eyrie_verify_rounds_total` for all
rounds, `eyrie_drafted_round_tokens_total` by `eyrie_drafted_rounds_total` for the rounds that drafted. A controller
watches the latter to detect that the traffic has moved away from the drafter's training data. The former also falls
when an engine disables drafting under load, where every round yields one token.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.errors import EyrieError
from eyrie_workers.engines.openai_api import NotReady, Overloaded
from eyrie_workers.speculation.engine import Engine, Request, StepOutput
from eyrie_workers.targets.templates import ChatTokenizer

# Rounds in the gauge's window: at a few tens of rounds per second and request, tens of seconds of traffic.
WINDOW_ROUNDS = 512
_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_ITL_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)

State = Literal["loading", "ready", "failed", "stopped"]


class EngineMetrics:
    """The metrics of one server, in their own registry."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._window: deque[int] = deque(maxlen=WINDOW_ROUNDS)
        self._tokens = Counter("eyrie_generated_tokens", "Tokens generated, prompt not included.", registry=registry)
        self._prompt_tokens = Counter("eyrie_prompt_tokens", "Prompt tokens of accepted requests.", registry=registry)
        self._rounds = Counter("eyrie_verify_rounds", "Target passes over a draft tree; plain decode steps count too.",
                               registry=registry)
        self._drafted = Counter("eyrie_drafted_rounds", "Target passes with draft tokens.", registry=registry)
        self._drafted_tokens = Counter("eyrie_drafted_round_tokens", "Tokens of those passes, bonus token included.",
                                       registry=registry)
        self._accepted = Counter("eyrie_accepted_tokens", "Draft tokens accepted, by their position in the draft.",
                                 ["position"], registry=registry)
        self._acceptance = Gauge("eyrie_acceptance_length",
                                 f"Mean tokens per target pass over the last {WINDOW_ROUNDS} rounds, bonus token "
                                 "included; NaN before the first round.", registry=registry)
        self._acceptance.set(float("nan"))
        self._requests = Counter("eyrie_requests", "Finished requests, by finish reason.", ["finish_reason"],
                                 registry=registry)
        self._first = Histogram("eyrie_time_to_first_token_seconds", "From acceptance of a request to its first token.",
                                buckets=_TTFT_BUCKETS, registry=registry)
        self._between = Histogram("eyrie_inter_token_latency_seconds",
                                  "Time between tokens; a round's time is shared evenly by the tokens it yields.",
                                  buckets=_ITL_BUCKETS, registry=registry)
        self._running = Gauge("eyrie_running_requests", "Requests being decoded.", registry=registry)
        self._queued = Gauge("eyrie_queued_requests", "Requests waiting for a slot.", registry=registry)
        self._num_steps = Gauge("eyrie_num_steps", "Depth of the draft tree in the latest round; 0 without drafting. "
                                "With an operating map it follows the number of running requests.", registry=registry)
        self._num_draft_tokens = Gauge("eyrie_num_draft_tokens", "Tokens of each request that the latest round "
                                       "verified, root included; 1 without drafting.", registry=registry)

    def accepted_request(self, num_prompt_tokens: int) -> None:
        self._prompt_tokens.inc(num_prompt_tokens)

    def tokens(self, count: int, since_s: float, *, first: bool) -> None:
        """Count tokens that arrived `since_s` after the request was accepted (first) or after its previous tokens."""
        self._tokens.inc(count)
        if first:
            self._first.observe(since_s)
            return
        for _ in range(count):
            self._between.observe(since_s / count)

    def rounds(self, accepted: Sequence[int], drafted: Sequence[int]) -> None:
        """Count verify rounds, given the draft tokens accepted and proposed in each."""
        if not accepted:
            return
        self._rounds.inc(len(accepted))
        of_drafted = [count for count, proposed in zip(accepted, drafted, strict=True) if proposed]
        self._drafted.inc(len(of_drafted))
        self._drafted_tokens.inc(sum(of_drafted) + len(of_drafted))
        for count in accepted:
            for position in range(1, count + 1):
                self._accepted.labels(str(position)).inc()
        self._window.extend(accepted)
        self._acceptance.set(1.0 + sum(self._window) / len(self._window))

    def ended(self, finish_reason: str) -> None:
        """Count a finished request by its reason: stop, length, tool_calls, cancelled or error."""
        self._requests.labels(finish_reason).inc()

    def load(self, running: int, queued: int) -> None:
        self._running.set(running)
        self._queued.set(queued)

    def round_tree(self, tree: DraftTreeShape | None) -> None:
        """The draft tree of the latest round; None without drafting."""
        self._num_steps.set(tree.num_steps if tree is not None else 0)
        self._num_draft_tokens.set(tree.num_draft_tokens if tree is not None else 1)

    def render(self) -> bytes:
        return generate_latest(self._registry)


@dataclass(frozen=True)
class LoadedEngine:
    """What the thread needs to serve requests, and what the HTTP side needs to know."""

    engine: Engine
    """Its configuration (`tree`, `max_length`, `max_concurrency`) does not change and may be read from any thread."""

    tokenizer: ChatTokenizer


Listener = Callable[[StepOutput | EyrieError], None]
"""Called in the engine thread: must not block."""


class EngineCrashed(EyrieError):
    """The engine raised an unexpected exception."""

    exit_code = 70


@dataclass
class _QueuedRequest:
    request: Request
    listener: Listener
    since: float
    """When the request was accepted, or when its previous tokens arrived."""

    has_tokens: bool = False
    past_end: bool = False
    """It has passed an end token, which the request ignores: what follows is no text that a drafter was trained on."""


class EngineThread:
    def __init__(self, load: Callable[[], LoadedEngine], metrics: EngineMetrics, *, max_waiting: int = 256) -> None:
        self._load = load
        self._metrics = metrics
        self._max_waiting = max_waiting
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._requests: dict[str, _QueuedRequest] = {}
        self._waiting: deque[str] = deque()
        self._running: set[str] = set()
        self._accepted = 0  # requests submitted and not finished; guarded by _lock, read by the HTTP side
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.state: State = "loading"
        self.failure: EyrieError | None = None
        self.loaded: LoadedEngine | None = None
        self.on_state_change: Callable[[], None] = lambda: None
        """Called in the engine thread when the state changes."""

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self.state == "ready" and self._thread.is_alive()

    def submit(self, request: Request, listener: Listener) -> None:
        """Queue a request. Raises NotReady or Overloaded; later errors go to the listener."""
        queued = _QueuedRequest(request, listener, time.monotonic())
        # Race with `_end`: without the lock a request could be put between the last read of the queue and the end of
        # the thread, and its listener would never be called. `_end` changes the state under the same lock and reads
        # the queue afterwards, so a request is either rejected here or found there.
        with self._lock:
            if not self.alive or self.loaded is None:
                raise NotReady(f"the engine is {self.state}", "try again in a moment; GET /health reports the state")
            if self._accepted >= self.loaded.engine.max_concurrency + self._max_waiting:
                raise Overloaded(f"{self._accepted} requests are running or waiting",
                                 "try again later, or start the engine with a larger --max-waiting")
            self._accepted += 1
            self._commands.put(lambda: self._enqueue(queued))
        self._metrics.accepted_request(len(request.prompt_ids))

    def cancel(self, request_id: str) -> None:
        """Remove a request and free its slot. Unknown and finished ids are ignored: the request may end meanwhile."""
        self._commands.put(lambda: self._cancel(request_id))

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread after its current step."""
        self._commands.put(lambda: self._end("stopped", NotReady(
            "the engine was stopped", "send the request again when it has restarted")))
        self._thread.join(timeout_s)

    # Everything below runs in the engine thread only.

    def _run(self) -> None:
        try:
            self.loaded = self._load()
        except EyrieError as error:
            self._fail(error)
            return
        except Exception as error:
            self._fail(EngineCrashed(f"loading failed: {type(error).__name__}: {error}", "see the log's traceback"))
            raise
        self.state = "ready"
        try:
            self.on_state_change()
            while self.state == "ready":
                self._iterate(self.loaded)
        except Exception as error:
            self._fail(EngineCrashed(f"{type(error).__name__}: {error}", "send it again once the engine has restarted"))
            raise

    def _iterate(self, loaded: LoadedEngine) -> None:
        # 1. Commands of the HTTP side. An idle thread blocks here instead of polling.
        self._run_commands(block=not self._requests)
        if self.state != "ready":  # stopped: no listener is left
            return
        # 2. Waiting requests take free slots, first come, first served.
        while self._waiting and len(self._running) < loaded.engine.max_concurrency:
            queued = self._requests[self._waiting.popleft()]
            try:
                loaded.engine.submit(queued.request)
            except EyrieError as error:  # an error of this request, which does not affect the others
                self._remove(queued.request.id)
                queued.listener(error)
                continue
            self._running.add(queued.request.id)
        self._metrics.load(len(self._running), len(self._waiting))
        # 3. One round for all running requests.
        if self._running:
            outputs = loaded.engine.advance()
            self._metrics.round_tree(loaded.engine.round_tree)
            for progress in outputs:
                self._deliver(progress)

    def _run_commands(self, *, block: bool) -> None:
        if block:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _enqueue(self, queued: _QueuedRequest) -> None:
        self._requests[queued.request.id] = queued
        self._waiting.append(queued.request.id)

    def _cancel(self, request_id: str) -> None:
        # The request may have finished between the client's disconnect and this command.
        if request_id not in self._requests:
            return
        if request_id in self._running:  # else it waits here, and the engine does not know it
            assert self.loaded is not None
            self.loaded.engine.cancel(request_id)
        self._remove(request_id)

    def _remove(self, request_id: str) -> None:
        del self._requests[request_id]
        self._running.discard(request_id)
        if request_id in self._waiting:
            self._waiting.remove(request_id)
        with self._lock:
            self._accepted -= 1

    def _deliver(self, progress: StepOutput) -> None:
        queued = self._requests[progress.id]
        now = time.monotonic()
        # A round's tokens arrive together: their latency is one interval, shared by them (`EngineMetrics.tokens`).
        if progress.token_ids:
            self._metrics.tokens(len(progress.token_ids), now - queued.since, first=not queued.has_tokens)
            queued.since, queued.has_tokens = now, True
        if not queued.past_end:
            self._metrics.rounds(progress.accepted, progress.drafted)
            assert self.loaded is not None
            queued.past_end = not set(self.loaded.tokenizer.eos_ids).isdisjoint(progress.token_ids)
        # Removed before the listener is called: a client that has its whole answer finds its slot free.
        if progress.finish_reason is not None or progress.error is not None:
            self._remove(progress.id)
        queued.listener(progress if progress.error is None else progress.error)

    def _fail(self, error: EyrieError) -> None:
        self.failure = error
        self._end("failed", error)

    def _end(self, state: State, error: EyrieError) -> None:
        with self._lock:  # no request is accepted from here on, see `submit`
            self.state = state
        # Requests that were put into the queue before the state changed are in it now: their listeners are called too.
        self._run_commands(block=False)
        for queued in self._requests.values():
            queued.listener(error)
        self._requests.clear()
        self.on_state_change()
