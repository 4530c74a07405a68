"""The engine and its two kinds of session, for SQLite and PostgreSQL.

What SQLite needs:

- WAL, a busy timeout and foreign keys, set on every connection;
- `writing()` opens with BEGIN IMMEDIATE. A transaction that reads first and writes later would otherwise fail with
  "database is locked" as soon as another one has written in between, whatever the timeout: SQLite cannot upgrade a
  stale snapshot. `reading()` takes no lock, so live streams never delay a writer.

What PostgreSQL needs: `reading()` requests REPEATABLE READ, READ ONLY, since by default every statement would see a
snapshot of its own. Writers are serialised by the rows they lock (`SELECT ... FOR UPDATE`), not by one lock.

Only the repositories of this package open sessions.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, create_engine, event, make_url, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection
from sqlalchemy.exc import ArgumentError
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry

from eyrie_api.database.tables import Base
from eyrie_api.errors import InvalidInput

BUSY_TIMEOUT_MS = 10_000
_WRITES = {"eyrie_writes": True}
_POSTGRESQL_READS = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}

class Database:
    """An engine and its two kinds of session. Thread-safe; one per process and URL."""

    def __init__(self, url: str) -> None:
        try:
            parsed = make_url(url)
        except ArgumentError:
            raise InvalidInput(f"database_url {url!r} is not an SQLAlchemy URL",
                               "write sqlite:///path/eyrie.db or postgresql+psycopg://user@host/name") from None
        if parsed.drivername in ("postgres", "postgresql"):  # URLs of other programs name no driver
            parsed = parsed.set(drivername="postgresql+psycopg")
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        if self.is_sqlite:
            if parsed.database in (None, "", ":memory:"):
                raise InvalidInput("database_url names an in-memory SQLite database, which every thread would see "
                                   "differently", "name a file")
            path = Path(str(parsed.database)).absolute()
            path.parent.mkdir(parents=True, exist_ok=True)
            # It holds digests of keys. SQLite gives its -wal and -shm files the same mode. A path that cannot be
            # written is reported by the first connection.
            with suppress(OSError):
                path.touch(mode=0o600)
                path.chmod(0o600)
        self.engine = _open_engine(parsed, is_sqlite=self.is_sqlite)

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A session that only reads; sees one snapshot."""
        options = {} if self.is_sqlite else _POSTGRESQL_READS
        with (self.engine.connect().execution_options(**options) as connection,
              Session(connection, autoflush=False) as session):
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A transaction: committed at the end, rolled back on any exception. SQLite: write-locked from the start."""
        with (self.engine.connect().execution_options(**_WRITES) as connection, connection.begin(),
              Session(connection, join_transaction_mode="rollback_only") as session):
            yield session
            session.commit()  # only flushes: the transaction is the connection's and is committed at the end of `with`

    def is_reachable(self) -> bool:
        """Whether a statement can be run. Raises what the driver raises when it cannot."""
        with self.reading() as session:
            return bool(session.execute(text("SELECT 1")).scalar_one())

    def close(self) -> None:
        self.engine.dispose()


def upsert(session: Session, row: type[Base], key: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Set `values` on the row with this primary key; insert the row if it does not exist."""
    session.flush()
    dialect = sqlite if session.get_bind().dialect.name == "sqlite" else postgresql
    statement = dialect.insert(row).values({**key, **values})
    session.execute(statement.on_conflict_do_update(index_elements=list(key), set_=dict(values)))


def rowcount(session: Session, statement: Any) -> int:
    """Execute an UPDATE or DELETE; return the number of rows affected."""
    return int(session.execute(statement).rowcount)  # type: ignore[attr-defined]


_CONNECTIONS = 16
"""Size of the connection pool: more than the threads that handle requests. With a smaller pool each burst would open
and close connections, and PostgreSQL starts a process for each."""

def _open_engine(url: URL, *, is_sqlite: bool) -> Engine:
    if not is_sqlite:
        engine = create_engine(url, pool_size=_CONNECTIONS, pool_use_lifo=True, pool_pre_ping=True)

        @event.listens_for(engine, "connect", insert=True)  # before SQLAlchemy reads the server's version as text
        def _require_utf8(connection: Any, _entry: ConnectionPoolEntry) -> None:
            # In SQL_ASCII, the encoding of a cluster that was made without a locale, psycopg gives bytes for text.
            encoding = connection.info.parameter_status("server_encoding")
            if encoding not in (None, "UTF8"):  # None: of a proxy that does not pass it on
                raise InvalidInput(f"database {str(url.database)!r} has the encoding {encoding}, and UTF8 is required",
                                   "create it with CREATE DATABASE ... ENCODING 'UTF8' TEMPLATE template0")

        return engine
    engine = create_engine(url)

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # sqlite3 must not begin transactions implicitly; `_begin` does
        cursor = connection.cursor()
        # synchronous=FULL: what was confirmed survives a power cut too. NORMAL would lose the last commits.
        for pragma in ("journal_mode=WAL", "synchronous=FULL", f"busy_timeout={BUSY_TIMEOUT_MS}", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("eyrie_writes")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine
