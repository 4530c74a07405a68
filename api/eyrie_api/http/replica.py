"""The API server of a cluster: any number of replicas share one PostgreSQL and one Redis.

`eyrie serve-api` calls `serve`. A replica serves HTTP and enqueues chores but runs none: `eyrie worker` and the
operator run them, in pods of their own. A replica may therefore be killed, added or replaced at any time; accepted
chores are in the outbox, and the next tick of any replica publishes them to Redis.

`eyrie migrate` creates the tables. The other programs of the control plane wait for that with `await_tables`, in an
init container.
"""

import logging
import signal
import time
from collections.abc import Callable

import uvicorn
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from eyrie_api.access.keys import SecretKeys
from eyrie_api.chores.tasks import chore_queue, make_celery, queue_length
from eyrie_api.chores.worker import Ticker
from eyrie_api.database.engine import Database
from eyrie_api.database.migrations import SchemaState, schema_state, upgrade
from eyrie_api.database.webhooks import encrypt_again
from eyrie_api.errors import InvalidInput, Transient
from eyrie_api.http.server import create_app
from eyrie_api.settings import Settings
from eyrie_api.web_server import TimedProtocol, prefer_short_waits, raise_descriptor_limit

log = logging.getLogger(__name__)

# Seconds that open event streams get at shutdown; clients resume at another replica by Last-Event-ID. Shorter than the
# default terminationGracePeriodSeconds of Kubernetes, 30 s.
_GRACEFUL_S = 10
_POLL_S = 2.0

_KEEP_ALIVE_S = 75
"""Longer than clients and proxies keep idle connections (commonly 60 s). Race: if the server closed an idle connection
first, a request sent at that moment would be reset."""


class TablesMissing(Transient):
    """The database cannot be reached, or its tables are older than this program."""

    exit_code = 69  # EX_UNAVAILABLE


def serve(settings: Settings) -> None:
    """Run one API server until SIGTERM or SIGINT. Raises InvalidInput for the in-memory broker."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "alembic", "celery", "kombu"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    if settings.broker_url.startswith("memory:"):
        raise InvalidInput("the broker memory:// lives inside one process, and no worker could take this one's chores",
                           "set EYRIE_BROKER_URL to a Redis, or run `eyrie up`, which does its own chores")
    raise_descriptor_limit()
    database = Database(settings.resolved_database_url)
    encrypt_again(database, SecretKeys(settings.required_secret_keys()))
    celery = make_celery(settings, _taken_elsewhere, reconcile_endpoint=_taken_elsewhere, database=database)
    ticker = Ticker(settings, celery)
    app = create_app(settings, database=database, wake=ticker.wake, checks={"the ticker": lambda: ticker.is_running},
                     queues={"chores": lambda: queue_length(celery, chore_queue(settings))})
    server = uvicorn.Server(uvicorn.Config(app, host=settings.host, port=settings.port, log_level="warning",
                                           access_log=False, timeout_keep_alive=_KEEP_ALIVE_S, http=TimedProtocol,
                                           timeout_graceful_shutdown=_GRACEFUL_S))
    for number in (signal.SIGTERM, signal.SIGINT):
        # After its shutdown uvicorn raises the caught signals again, for the handlers that were installed before it.
        # The default handler would kill the process; this one has no further effect, so that the cleanup below runs.
        signal.signal(number, lambda _number, _frame: setattr(server, "should_exit", True))
    prefer_short_waits()
    ticker.start()
    try:
        log.info("answering on %s:%d", settings.host, settings.port)
        server.run()
    finally:
        ticker.stop()
        database.close()


def _taken_elsewhere(name: str) -> None:
    raise AssertionError(f"an API server gives chores and takes none; it was given {name}")


def migrate_when_there(database: Database, timeout_s: float, *,
                       pause: Callable[[float], None] = time.sleep) -> SchemaState:
    """Wait for the database, then upgrade the tables. Raises TablesMissing when it does not respond in time."""
    await_tables(database, timeout_s, ("behind", "current", "ahead"), pause=pause)
    upgrade(database)
    return schema_state(database)


def await_tables(database: Database, timeout_s: float, enough: tuple[SchemaState, ...] = ("current", "ahead"), *,
                 pause: Callable[[float], None] = time.sleep) -> SchemaState:
    """Wait until the tables are in one of these states, by default as new as this program or newer; return it. Raises
    TablesMissing."""
    until, logged = time.monotonic() + timeout_s, ""
    while True:
        try:
            state: SchemaState | None = schema_state(database)
            reason, hint = "its tables are older than this program, or not there", "run `eyrie migrate` on it"
        except SQLAlchemyError as error:
            words = " ".join(str(error.orig if isinstance(error, DBAPIError) else error).split())[:500]
            password = database.engine.url.password
            words = words.replace(str(password), "***") if password else words
            state, reason = None, f"it does not answer: {words}"
            hint = "check EYRIE_DATABASE_URL (host, user, password, database), and that the server runs"
        if state in enough:
            return state
        if time.monotonic() >= until:
            raise TablesMissing(f"after {timeout_s:g} s the database is not ready: {reason}", hint)
        if reason != logged:  # at the first attempt: whoever waits for a pod reads its log
            log.warning("the database is not ready, waiting for up to %g s: %s; hint: %s", timeout_s, reason, hint)
            logged = reason
        pause(min(_POLL_S, max(0.0, until - time.monotonic())))
