"""A queue of keys to reconcile: each key at most once, and never processed by two workers at a time. And its metrics.

The level-triggered queue of controllers, as in client-go: an event says *that* an object changed, not what, so ten
events for one key cause one reconciliation. A key added while it is being processed is processed again afterwards.
Failures are retried after a delay that doubles; `forget` resets it. Delays use the clock that is passed in.
"""

import heapq
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

Key = TypeVar("Key", bound=Hashable)

FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 120.0


class Workqueue(Generic[Key]):
    """Safe between threads."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._ready: OrderedDict[Key, None] = OrderedDict()
        self._working: set[Key] = set()
        self._again: set[Key] = set()
        self._later: list[tuple[float, int, Key]] = []
        self._due: dict[Key, float] = {}
        self._failures: dict[Key, int] = {}
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._closed = False

    def add(self, key: Key) -> None:
        with self._changed:
            self._add(key)

    def add_after(self, key: Key, delay_s: float) -> None:
        """Enqueue the key after a delay, or earlier if it is already due earlier."""
        with self._changed:
            due = self._monotonic() + delay_s
            if due < self._due.get(key, float("inf")):
                self._due[key] = due
                heapq.heappush(self._later, (due, next(self._order), key))
                self._changed.notify()

    def failed(self, key: Key) -> float:
        """Enqueue the key after its backoff delay, which is returned in seconds."""
        with self._changed:
            times = self._failures[key] = self._failures.get(key, 0) + 1
        delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** (times - 1))
        self.add_after(key, delay_s)
        return delay_s

    def forget(self, key: Key) -> None:
        with self._changed:
            self._failures.pop(key, None)

    def take(self) -> Key | None:
        """Wait for the next key; call `done` afterwards. None when the queue is closed."""
        with self._changed:
            while not self._closed:
                now = self._monotonic()
                while self._later and self._later[0][0] <= now:
                    due, _, key = heapq.heappop(self._later)
                    if self._due.get(key) == due:
                        del self._due[key]
                        self._add(key)
                if self._ready:
                    key, _ = self._ready.popitem(last=False)
                    self._working.add(key)
                    return key
                self._changed.wait(self._later[0][0] - now if self._later else None)
            return None

    def done(self, key: Key) -> None:
        """Processing of the key has ended; enqueue it again if it was added meanwhile."""
        with self._changed:
            self._working.discard(key)
            if key in self._again:
                self._again.discard(key)
                self._add(key)

    def close(self) -> None:
        """Make every `take` return None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._ready) + len(self._working)

    def _add(self, key: Key) -> None:
        # Race: another worker is processing the key. Its read may predate this change, so it runs again in `done`.
        if key in self._working:
            self._again.add(key)
        elif key not in self._ready:
            self._ready[key] = None
            self._changed.notify()


class Telemetry:
    """Metrics of one operator in their own registry."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.reconciled = Counter("eyrie_operator_reconcile", "Reconciliations.", ("kind",), registry=registry)
        self.errors = Counter("eyrie_operator_reconcile_errors", "Reconciliations that failed and are retried.",
                              ("kind", "reason"), registry=registry)
        self.seconds = Histogram("eyrie_operator_reconcile_seconds", "Duration of a reconciliation with its writes.",
                                 ("kind",), registry=registry)
        self.writes = Counter("eyrie_operator_writes", "Write requests to the cluster.",
                              ("verb", "kind"), registry=registry)
        self.waiting = Gauge("eyrie_operator_queue_length", "Objects waiting for reconciliation.", registry=registry)
        self.leads = Gauge("eyrie_operator_leader", "1 while this operator holds the lease.", registry=registry)

    def count_write(self, verb: str, kind: str) -> None:
        self.writes.labels(verb, kind).inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)
