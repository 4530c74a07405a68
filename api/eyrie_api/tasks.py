"""Celery: the short chores that move jobs along. The one door to celery in this package.

    dispatch_outbox   publish what transactions promised
    advance_job       one short step of one job; what a step is, the operator injects
    tend_endpoint     the same for an endpoint
    reconcile_tick    advance every unfinished job that nobody drives
    retention         delete what was marked, sweep what expired
    remove_files      the directory of a deleted job
    deliver           one attempt to post an event to a webhook

No chore is long and every chore may run twice or not at all: state is in SQL, a lease keeps two drivers apart, and the
periodic tick finds whatever a broker or a killed process has dropped. That is why `memory://` with a worker thread in
this process is enough on one machine, and why Redis (one URL) changes nothing but where the messages wait (see
`broker`). File and SQL brokers lose tasks of a killed worker and are not offered.

Who takes chores: a `ChoreLoop` (threads of this process), and any number of prefork workers (`eyrie worker`, which ends
in `run_worker`) on the same Redis and database. Who gives them: a `Ticker`, one in every control plane; two of them
give more, and nothing twice that matters. A chore is acknowledged when it is done: kill -9 the worker, and Redis hands
it out again after `visibility_timeout_s`, or the next tick sends another, whichever comes first.

Kombu's memory queues belong to the process, not to the app, so the queue's name carries the database's: a control plane
opened after another one in the same process (tests) does not take that one's chores.
"""

import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import Celery
from celery.exceptions import WorkerShutdown
from celery.signals import worker_process_init
from celery.worker import WorkController
from kombu.exceptions import OperationalError

from eyrie_api.broker import SHARD_QUEUE, BrokerAway, messages_waiting, transport_settings, without_password
from eyrie_api.clock import Clock, utc_now
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.idempotency import Idempotency
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.outbox import Outbox
from eyrie_api.database.tables import Database
from eyrie_api.database.webhooks import Webhooks
from eyrie_api.errors import Conflict, InvalidInput, NotFound
from eyrie_api.settings import Settings

log = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 15.0
# A tick that nobody took for so many intervals is not worth taking: a newer one waits behind it.
_TICKS_WORTH_TAKING = 30
_ENOUGH_WAITS = 1000
"""With so many messages waiting a tick adds none."""

_GATHER_S = 0.05
"""What is promised within so long is dispatched together: one message instead of one for each job."""

Step = Callable[[str], None]


def make_celery(settings: Settings, advance: Step, *, tend: Step | None = None, forget: Step | None = None,
                sweep: Callable[[], None] | None = None, database: Database | None = None,
                clock: Clock = utc_now) -> Celery:
    """The Celery app with its chores.

    `advance(job_id)` takes the job's lease, does one short step, and returns; it may be called at any time, twice, and
    for jobs that have ended or gone. `tend(endpoint)` likewise. `forget(job_id)` removes what a deleted job has left
    beyond its directory here, `sweep()` what nobody will ever ask for. Without `database` one is opened from the
    settings.
    """
    database = database or Database(settings.resolved_database_url)
    app = Celery("eyrie", broker=settings.broker_url, set_as_current=False)
    app.conf.update(_configuration(settings))
    _add_chores(app, settings, database, clock, advance, tend, forget, sweep)
    return app


def _configuration(settings: Settings) -> dict[str, Any]:
    return {
        "task_default_queue": chore_queue(settings),
        **transport_settings(settings.broker_url, settings.visibility_timeout_s),
        "task_serializer": "json", "accept_content": ["json"],
        "task_acks_late": True, "task_reject_on_worker_lost": True,
        "task_ignore_result": True, "task_store_errors_even_if_ignored": False,
        "worker_prefetch_multiplier": 1,
        # A broker that is away must not hold the dispatcher: the outbox keeps the chore.
        "task_publish_retry": False,
        "worker_hijack_root_logger": False, "worker_enable_remote_control": False,
        # A chore cut off by a lost connection is delivered again, and may be done twice: cancelling gains nothing.
        "worker_cancel_long_running_tasks_on_connection_loss": False,
    }


def chore_queue(settings: Settings) -> str:
    """The queue of this database's chores. Named by whoever deploys, where something outside must know it (KEDA)."""
    return settings.chore_queue or "eyrie-" + hashlib.sha256(settings.resolved_database_url.encode()).hexdigest()[:12]


def queue_length(app: Celery, queue: str) -> int:
    """Messages that wait in a queue of the app's broker. Raises BrokerAway."""
    return messages_waiting(app.connection_for_read(connect_timeout=2), queue)


def queue_lengths(app: Celery, settings: Settings) -> dict[str, Callable[[], int]]:
    """What waits, by name, for metrics and scalers: `chores`, and `shards` of regeneration where there is Redis."""
    queues = {"chores": chore_queue(settings)}
    if not settings.broker_url.startswith("memory:"):
        queues["shards"] = SHARD_QUEUE
    return {name: partial(queue_length, app, queue) for name, queue in queues.items()}


def _add_chores(app: Celery, settings: Settings, database: Database, clock: Clock, advance: Step,
                tend: Step | None, forget: Step | None, sweep: Callable[[], None] | None) -> None:
    jobs, outbox = Jobs(database, clock), Outbox(database, clock)
    endpoints, idempotency = Endpoints(database, clock), Idempotency(database, settings.idempotency_ttl_s, clock)
    webhooks = Webhooks(database, clock, allow_private=settings.webhooks_allow_private)

    @app.task(name="eyrie.advance_job", shared=False)  # type: ignore[untyped-decorator]
    def advance_job(job_id: str) -> None:
        advance(job_id)

    @app.task(name="eyrie.tend_endpoint", shared=False)  # type: ignore[untyped-decorator]
    def tend_endpoint(name: str) -> None:
        if tend is not None:
            tend(name)

    @app.task(name="eyrie.remove_files", shared=False)  # type: ignore[untyped-decorator]
    def remove_files(job_id: str) -> None:
        try:
            jobs.get(job_id)
        except NotFound:
            if forget is not None:
                forget(job_id)
            shutil.rmtree(settings.job_dir(job_id), ignore_errors=True)

    @app.task(name="eyrie.deliver", shared=False)  # type: ignore[untyped-decorator]
    def deliver(delivery_id: str) -> None:
        webhooks.deliver(delivery_id)

    @app.task(name="eyrie.dispatch_outbox", shared=False)  # type: ignore[untyped-decorator]
    def dispatch_outbox() -> None:
        while chores := outbox.pending():
            for chore in chores:
                app.send_task(f"eyrie.{chore.task}", args=[chore.argument])
            # Marked only now: killed in between, the chores are published again, which is harmless.
            outbox.mark_dispatched(chore.id for chore in chores)

    @app.task(name="eyrie.reconcile_tick", shared=False)  # type: ignore[untyped-decorator]
    def reconcile_tick() -> None:
        # Every job in every tick, whatever the workers manage, would be a pile that only grows: 1,000 jobs are 500
        # messages a second.
        if queue_length(app, chore_queue(settings)) >= _ENOUGH_WAITS:
            return
        for job_id in jobs.unfinished():
            app.send_task("eyrie.advance_job", args=[job_id])
        if tend is not None:
            for endpoint in endpoints.list().items:
                app.send_task("eyrie.tend_endpoint", args=[endpoint.name])
        for delivery_id in webhooks.due():
            app.send_task("eyrie.deliver", args=[delivery_id])

    @app.task(name="eyrie.retention", shared=False)  # type: ignore[untyped-decorator]
    def retention() -> None:
        for job_id in jobs.to_be_deleted():
            try:
                jobs.delete(job_id)
            except Conflict as reason:
                log.warning("job %s is marked for deletion but kept: %s", job_id, reason.message)
        for argument in outbox.recent("remove_files"):
            remove_files(argument)  # again, for a worker that was killed half-way
        outbox.sweep(settings.outbox_ttl_s)
        idempotency.sweep()
        webhooks.sweep()
        if sweep is not None:
            sweep()


class Ticker:
    """A thread that gives chores: the outbox whenever woken and at every tick, the others at their intervals.

    The broker may be away for as long as it likes: the outbox keeps what was promised.
    """

    def __init__(self, settings: Settings, app: Celery) -> None:
        self._settings, self._app = settings, app
        self._stopping, self._woken = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._tick, name="eyrie-ticker", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Something was promised: have it dispatched now."""
        self._woken.set()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._woken.set()
        self._thread.join(_STOP_TIMEOUT_S)

    @property
    def is_running(self) -> bool:
        """Whether the thread lives."""
        return self._thread.is_alive()

    def _tick(self) -> None:
        interval_s = self._settings.reconcile_interval_s
        every = {"eyrie.reconcile_tick": interval_s, "eyrie.retention": self._settings.retention_interval_s}
        due = dict.fromkeys(every, 0.0)
        while not self._stopping.is_set():
            now = time.monotonic()
            try:
                for name in ("eyrie.dispatch_outbox", *(name for name in due if due[name] <= now)):
                    self._app.send_task(name, expires=max(60.0, _TICKS_WORTH_TAKING * every.get(name, interval_s)))
                    if name in due:
                        due[name] = now + every[name]
            except OperationalError as error:
                log.warning("the broker is away (%s); the outbox keeps the chores", type(error).__name__)
            self._woken.wait(interval_s)
            self._stopping.wait(_GATHER_S)
            self._woken.clear()


class ChoreLoop:
    """A Celery worker thread and a ticker thread in this process.

    `start` returns once the worker takes chores; `wake` asks for the outbox to be dispatched now rather than at the
    next tick; `stop` lets running chores finish. Other processes may run workers on the same broker beside it.
    One loop per process at a time: celery's pool threads find their tasks through the process's default app.
    """

    def __init__(self, settings: Settings, app: Celery) -> None:
        self._settings, self._app = settings, app
        self._ticker = Ticker(settings, app)
        self._worker = _Worker(
            app=app, pool="threads", concurrency=settings.chore_threads, hostname=f"eyrie-{id(self):x}@local",
            without_heartbeat=True, without_mingle=True, without_gossip=True, loglevel="WARNING")
        self._thread = threading.Thread(target=self._worker.start, name="eyrie-chores", daemon=True)

    def start(self, timeout_s: float = 30.0) -> None:
        """Start both threads. Raises BrokerAway when the broker cannot be reached in time."""
        self._app.set_default()
        self._thread.start()
        self._ticker.start()
        if not self._worker.ready.wait(timeout_s):
            raise BrokerAway(f"broker {without_password(self._settings.broker_url)} was not reached in {timeout_s:g} s",
                             "start it, correct EYRIE_BROKER_URL, or unset it to keep the chores in this process")

    def wake(self) -> None:
        """Something was promised: dispatch it now."""
        self._ticker.wake()

    def stop(self) -> None:
        """Finish what runs, then end both threads."""
        self._ticker.stop()
        # Raised in the worker's own thread, as its signal handlers would; celery's `state.should_stop` is process-wide.
        self._worker.consumer.call_soon(_raise_shutdown)
        self._thread.join(_STOP_TIMEOUT_S)

    @property
    def is_running(self) -> bool:
        """Whether both threads live."""
        return self._thread.is_alive() and self._ticker.is_running


def run_worker(app: Celery, settings: Settings, *, concurrency: int, database: Database | None = None) -> None:
    """Take chores in `concurrency` child processes until SIGTERM or SIGINT, which let running ones finish.

    Raises InvalidInput for a broker that lives in another process's memory.
    """
    if settings.broker_url.startswith("memory:"):
        raise InvalidInput("the broker memory:// lives inside one process, and no worker can share it",
                           "set EYRIE_BROKER_URL to the Redis of the control plane, for example redis://host:6379/0")

    def forget_connections(**_signal: object) -> None:
        """A forked child must not talk over its parent's connections."""
        if database is not None:
            database.engine.dispose(close=False)

    worker_process_init.connect(forget_connections, weak=False)
    app.worker_main([
        "worker", "--pool", "prefork", "--concurrency", str(concurrency), "--loglevel", "WARNING",
        "--hostname", f"eyrie-{os.getpid()}@%h", "--without-heartbeat", "--without-mingle", "--without-gossip",
        # A chore that takes so long hangs: Redis has given it to another worker by now.
        "--time-limit", str(int(max(1.0, settings.visibility_timeout_s)))])


def _raise_shutdown() -> None:
    raise WorkerShutdown(0)


class _Worker(WorkController):  # type: ignore[misc]
    """A worker that says when it has begun to consume."""

    def __init__(self, **options: Any) -> None:
        self.ready = threading.Event()
        super().__init__(**options)

    def on_consumer_ready(self, _consumer: Any) -> None:
        self.ready.set()
