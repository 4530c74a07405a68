"""The Celery tasks that advance jobs and endpoints: short, repeatable, and safe to lose.

    dispatch_outbox    publish the tasks that transactions have put into the outbox
    advance_job        one short step of one job; the operator injects the step
    reconcile_endpoint the same for an endpoint
    reconcile_tick     advance every unfinished job that no process drives
    retention          delete what is marked for deletion, sweep what has expired
    remove_files       the directory of a deleted job
    deliver            one attempt to post an event to a webhook

Every task may run twice or not at all: state is in SQL, a lease keeps two drivers apart, and the periodic tick finds
whatever a broker or a killed process has dropped. That is why `memory://` with a worker thread in this process is
enough on one machine, and why Redis (one URL) changes nothing but where messages wait (see `broker`). File and SQL
brokers lose the tasks of a killed worker and are not supported.

`worker` holds the processes and threads that run these tasks and the one that enqueues them. A task is acknowledged
when it is done: after kill -9 of a worker, Redis delivers its message again after `visibility_timeout_s`, or the next
tick sends another, whichever comes first.

kombu's memory queues belong to the process, not to the app, so the queue's name carries the database's: a control plane
opened after another one in the same process (tests) does not receive that one's tasks.
"""


import hashlib
import logging
import shutil
from collections.abc import Callable
from functools import partial

from celery import Celery

from eyrie_api.access.keys import SecretKeys
from eyrie_api.chores.broker import SHARD_QUEUE, messages_waiting, transport_settings
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.idempotency import Idempotency
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.outbox import Outbox
from eyrie_api.database.webhooks import Webhooks
from eyrie_api.errors import Conflict, NotFound
from eyrie_api.settings import Settings

log = logging.getLogger(__name__)

_MAX_QUEUED = 1000
"""With this many messages waiting a tick adds none."""

Step = Callable[[str], None]


def make_celery(settings: Settings, advance: Step, *, reconcile_endpoint: Step | None = None,
                forget: Step | None = None, sweep: Callable[[], None] | None = None,
                database: Database | None = None) -> Celery:
    """The Celery app with its chores.

    `advance(job_id)` takes the job's lease, does one short step, and returns; it may be called at any time, twice, and
    for jobs that have ended or are deleted. `reconcile_endpoint(name)` likewise. `forget(job_id)` removes what a
    deleted job has left outside its directory here, `sweep()` what no job refers to any more. Without `database` one is
    opened from the settings.
    """
    database = database or Database(settings.resolved_database_url)
    app = Celery("eyrie", broker=settings.broker_url, set_as_current=False)
    app.conf.update(
        task_default_queue=chore_queue(settings),
        **transport_settings(settings.broker_url, settings.visibility_timeout_s),
        task_serializer="json", accept_content=["json"], task_acks_late=True, task_reject_on_worker_lost=True,
        task_ignore_result=True, task_store_errors_even_if_ignored=False, worker_prefetch_multiplier=1,
        # The dispatcher must not block while the broker is unavailable: the outbox keeps the chore.
        task_publish_retry=False,
        worker_hijack_root_logger=False, worker_enable_remote_control=False,
        # A chore whose connection is lost is delivered again, and may run twice: cancelling it gains nothing.
        worker_cancel_long_running_tasks_on_connection_loss=False)
    _add_chores(app, settings, database, advance, reconcile_endpoint, forget, sweep)
    return app


def chore_queue(settings: Settings) -> str:
    """The queue of this database's chores; `chore_queue` sets its name where a scaler (KEDA) must know it."""
    return settings.chore_queue or "eyrie-" + hashlib.sha256(settings.resolved_database_url.encode()).hexdigest()[:12]


def queue_length(app: Celery, queue: str) -> int:
    """Messages waiting in a queue of the app's broker. Raises BrokerUnavailable."""
    return messages_waiting(app.connection_for_read(connect_timeout=2), queue)


def queue_lengths(app: Celery, settings: Settings) -> dict[str, Callable[[], int]]:
    """Queue lengths by name, for metrics and scalers: `chores`, and with Redis `shards` of regeneration."""
    queues = {"chores": chore_queue(settings)}
    if not settings.broker_url.startswith("memory:"):
        queues["shards"] = SHARD_QUEUE
    return {name: partial(queue_length, app, queue) for name, queue in queues.items()}


def _add_chores(app: Celery, settings: Settings, database: Database, advance: Step, reconcile_endpoint: Step | None,
                forget: Step | None, sweep: Callable[[], None] | None) -> None:
    jobs, outbox = Jobs(database), Outbox(database)
    endpoints, idempotency = Endpoints(database), Idempotency(database, settings.idempotency_ttl_s)
    webhooks = Webhooks(database, allow_private=settings.webhooks_allow_private,
                        keys=SecretKeys(settings.required_secret_keys()))

    @app.task(name="eyrie.advance_job", shared=False)  # type: ignore[untyped-decorator]
    def advance_job(job_id: str) -> None:
        advance(job_id)

    @app.task(name="eyrie.reconcile_endpoint", shared=False)  # type: ignore[untyped-decorator]
    def reconcile_endpoint_task(name: str) -> None:
        if reconcile_endpoint is not None:
            reconcile_endpoint(name)

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
            # Race: marked only after publishing. A process killed in between publishes them again, which is harmless;
            # in the other order they would be lost.
            outbox.mark_dispatched(chore.id for chore in chores)

    @app.task(name="eyrie.reconcile_tick", shared=False)  # type: ignore[untyped-decorator]
    def reconcile_tick() -> None:
        # Enqueueing every job in every tick, faster than the workers run them, would let the queue grow without bound:
        # 1,000 jobs are 500 messages a second.
        if queue_length(app, chore_queue(settings)) >= _MAX_QUEUED:
            return
        for job_id in jobs.unfinished(settings.lease_ttl_s):
            app.send_task("eyrie.advance_job", args=[job_id])
        if reconcile_endpoint is not None:
            for endpoint in endpoints.list().items:
                app.send_task("eyrie.reconcile_endpoint", args=[endpoint.name])
        for delivery_id in webhooks.due():
            app.send_task("eyrie.deliver", args=[delivery_id])

    @app.task(name="eyrie.retention", shared=False)  # type: ignore[untyped-decorator]
    def retention() -> None:
        for job_id in jobs.to_be_deleted():
            try:
                jobs.delete(job_id)
            except Conflict as reason:
                log.warning("job %s is marked for deletion but cannot be deleted yet: %s", job_id, reason.message)
        for argument in outbox.recent("remove_files"):
            remove_files(argument)  # again, in case a worker was killed before it finished
        outbox.sweep(settings.outbox_ttl_s)
        idempotency.sweep()
        webhooks.sweep()
        if sweep is not None:
            sweep()
