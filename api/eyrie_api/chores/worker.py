"""The processes and threads that run the chores, and the thread that enqueues them.

`ChoreLoop` runs them in threads of this process; any number of prefork workers (`eyrie worker`, which calls
`run_worker`) may share its Redis and database. `Ticker` enqueues them, one in every control plane; two tickers enqueue
more, and no task has an effect twice.
"""


import logging
import os
import re
import threading
import time
from typing import Any

from celery import Celery
from celery.exceptions import WorkerShutdown
from celery.signals import worker_process_init
from celery.worker import WorkController
from kombu.exceptions import OperationalError

from eyrie_api.chores.broker import BrokerUnavailable
from eyrie_api.database.engine import Database
from eyrie_api.errors import InvalidInput
from eyrie_api.settings import Settings

log = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 15.0
_MAX_TICKS_QUEUED = 30
"""A tick expires after so many intervals: by then a newer one waits behind it."""

_GATHER_S = 0.05
"""Outbox entries written within this time are dispatched together: one message instead of one for each job."""


class Ticker:
    """A thread that enqueues chores: the dispatch of the outbox when woken and at every tick, the others at their
    intervals. While the broker is unavailable the outbox keeps its entries."""

    def __init__(self, settings: Settings, app: Celery) -> None:
        self._settings, self._app = settings, app
        self._stopping, self._woken = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._tick, name="eyrie-ticker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Dispatch the outbox now rather than at the next tick."""
        self._woken.set()

    def stop(self) -> None:
        self._stopping.set()
        self._woken.set()
        self._thread.join(_STOP_TIMEOUT_S)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def _tick(self) -> None:
        interval_s = self._settings.reconcile_interval_s
        every = {"eyrie.reconcile_tick": interval_s, "eyrie.retention": self._settings.retention_interval_s}
        due = dict.fromkeys(every, 0.0)
        while not self._stopping.is_set():
            now = time.monotonic()
            try:
                for name in ("eyrie.dispatch_outbox", *(name for name in due if due[name] <= now)):
                    self._app.send_task(name, expires=max(60.0, _MAX_TICKS_QUEUED * every.get(name, interval_s)))
                    if name in due:
                        due[name] = now + every[name]
            except OperationalError as error:
                log.warning("the broker is unavailable (%s); the outbox keeps its entries", type(error).__name__)
            self._woken.wait(interval_s)
            self._stopping.wait(_GATHER_S)
            self._woken.clear()


class ChoreLoop:
    """A Celery worker thread and a ticker thread in this process.

    `start` returns once the worker consumes messages; `wake` dispatches the outbox now rather than at the next tick;
    `stop` waits for running chores. Other processes may run workers on the same broker.
    One loop per process at a time: Celery's pool threads find their tasks through the process's default app.
    """

    def __init__(self, settings: Settings, app: Celery) -> None:
        self._settings, self._app = settings, app
        self._ticker = Ticker(settings, app)
        self.wake = self._ticker.wake
        self._worker = _Worker(
            app=app, pool="threads", concurrency=settings.chore_threads, hostname=f"eyrie-{id(self):x}@local",
            without_heartbeat=True, without_mingle=True, without_gossip=True, loglevel="WARNING")
        self._thread = threading.Thread(target=self._worker.start, name="eyrie-chores", daemon=True)

    def start(self, timeout_s: float = 30.0) -> None:
        """Start both threads. Raises BrokerUnavailable when the broker does not respond in time."""
        self._app.set_default()
        self._thread.start()
        self._ticker.start()
        if not self._worker.ready.wait(timeout_s):
            url = re.sub(r"//[^/@]*@", "//", self._settings.broker_url)  # without its credentials
            raise BrokerUnavailable(f"broker {url} did not respond within {timeout_s:g} s",
                                    "start it, correct EYRIE_BROKER_URL, or unset it to run the chores in this process")

    def stop(self) -> None:
        self._ticker.stop()
        # Raised in the worker's own thread, as its signal handlers would; celery's `state.should_stop` is process-wide.
        self._worker.consumer.call_soon(_raise_shutdown)
        self._thread.join(_STOP_TIMEOUT_S)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive() and self._ticker.is_running


def run_worker(app: Celery, settings: Settings, *, concurrency: int, database: Database | None = None) -> None:
    """Run chores in `concurrency` child processes until SIGTERM or SIGINT, which let running ones finish. Raises
    InvalidInput for a broker that lives in another process's memory."""
    if settings.broker_url.startswith("memory:"):
        raise InvalidInput("the broker memory:// is private to one process, so no worker can share it",
                           "set EYRIE_BROKER_URL to the Redis of the control plane, for example redis://host:6379/0")

    def forget_connections(**_signal: object) -> None:
        """A forked child must not use its parent's connections."""
        if database is not None:
            database.engine.dispose(close=False)

    worker_process_init.connect(forget_connections, weak=False)
    app.worker_main([
        "worker", "--pool", "prefork", "--concurrency", str(concurrency), "--loglevel", "WARNING",
        "--hostname", f"eyrie-{os.getpid()}@%h", "--without-heartbeat", "--without-mingle", "--without-gossip",
        # A chore that takes this long hangs, and Redis has delivered it to another worker.
        "--time-limit", str(int(max(1.0, settings.visibility_timeout_s)))])


def _raise_shutdown() -> None:
    raise WorkerShutdown(0)


class _Worker(WorkController):  # type: ignore[misc]
    def __init__(self, **options: Any) -> None:
        self.ready = threading.Event()
        super().__init__(**options)

    def on_consumer_ready(self, _consumer: Any) -> None:
        self.ready.set()
