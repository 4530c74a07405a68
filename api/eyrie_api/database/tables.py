"""Where rows live: the tables, the engine, and two kinds of session.

Portable SQLAlchemy 2 only: SQLite here, PostgreSQL by URL, no code change. What SQLite needs is met in this file alone:

- WAL, a busy timeout and foreign keys, set on every connection;
- `writing()` opens with BEGIN IMMEDIATE. A transaction that reads first and writes later would otherwise fail with
  "database is locked" the moment another one has written in between, whatever the timeout (SQLite cannot upgrade a
  stale snapshot). `reading()` takes no lock, so live streams never hold up a writer;
- times are stored as naive UTC and come back aware, because SQLite forgets time zones.

PostgreSQL needs one thing said: `reading()` asks for REPEATABLE READ, READ ONLY, since its default would give every
statement a snapshot of its own. Writers take turns by the rows they hold (`SELECT ... FOR UPDATE`), not by one lock.

Upserts are UPDATE, then INSERT in a savepoint, then UPDATE again: three portable statements instead of one dialect's.
Only `jobs`, `endpoints`, `history`, `results`, `ingest`, `outbox`, `idempotency`, `webhooks` and `access` open
sessions. The tables are made by `eyrie_api.database.migrations`.

A job belongs to a project, and what hangs on a job (labels, stages, events, metrics, results) is reached through it and
carries no project of its own; so it is with an endpoint, its revisions and its history, through the name.
"""

import json
import select as sockets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from sqlalchemy import (
    JSON,
    URL,
    BigInteger,
    ColumnElement,
    DateTime,
    Dialect,
    Engine,
    Executable,
    ForeignKey,
    Index,
    MetaData,
    String,
    Text,
    UniqueConstraint,
    bindparam,
    create_engine,
    event,
    func,
    insert,
    literal,
    make_url,
    select,
    text,
    true,
    update,
)
from sqlalchemy.engine import Connection
from sqlalchemy.exc import ArgumentError, DisconnectionError, IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.types import TypeDecorator

from eyrie_api.errors import InvalidInput

BUSY_TIMEOUT_MS = 10_000
_WRITES = {"eyrie_writes": True}
_POSTGRESQL_READS = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime, stored as naive UTC."""

    impl = DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise TypeError("a time without a zone reached the database: pass datetime.now(UTC)")
        return value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.replace(tzinfo=UTC)


class Base(DeclarativeBase):
    """Every table. Constraint names are spelled out, so that batch migrations can find them on SQLite."""

    metadata = MetaData(naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s", "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    })
    type_annotation_map = {datetime: UtcDateTime(), dict[str, Any]: JSON(), list[Any]: JSON()}


def _job_reference() -> Any:
    return mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)


class JobRow(Base):
    """One job. `status` is the projection the API shows; the columns beside it are for filters and the reconciler."""

    __tablename__ = "jobs"
    id: Mapped[str] = mapped_column(String(63), primary_key=True)
    name: Mapped[str | None] = mapped_column(String(63), index=True)
    target: Mapped[str] = mapped_column(String(4096))
    spec: Mapped[dict[str, Any]]
    status: Mapped[dict[str, Any]]
    phase: Mapped[str] = mapped_column(String(16), index=True)
    ended: Mapped[bool] = mapped_column(index=True)
    generation: Mapped[int]
    attempt: Mapped[int]
    cancel_requested: Mapped[bool]
    delete_requested: Mapped[bool]
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime] = mapped_column(index=True)
    lease_owner: Mapped[str | None] = mapped_column(String(255))
    lease_until: Mapped[datetime | None]
    project: Mapped[str] = mapped_column(String(63), server_default="default")
    __table_args__ = (Index("ix_jobs_created_at_id", "created_at", "id"),
                      Index("ix_jobs_project_created_at_id", "project", "created_at", "id"))


class LabelRow(Base):
    """One label of a job, as a row of its own: filtering inside JSON is spelled differently in every database."""

    __tablename__ = "labels"
    job_id: Mapped[str] = _job_reference()
    key: Mapped[str] = mapped_column(String(63), primary_key=True)
    value: Mapped[str] = mapped_column(String(4096))
    __table_args__ = (Index("ix_labels_key_job_id", "key", "job_id"),)


class StageRow(Base):
    """One box of a job's pipeline."""

    __tablename__ = "stages"
    job_id: Mapped[str] = _job_reference()
    stage: Mapped[str] = mapped_column(String(16), primary_key=True)
    key: Mapped[str] = mapped_column(String(63), primary_key=True)
    state: Mapped[str] = mapped_column(String(16))
    attempt: Mapped[int]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    progress: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    reason: Mapped[str | None] = mapped_column(String(63))
    message: Mapped[str | None] = mapped_column(Text)
    hint: Mapped[str | None] = mapped_column(Text)


class EventRow(Base):
    """One thing that happened; its id is the SSE event id."""

    __tablename__ = "events"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    time: Mapped[datetime]
    type: Mapped[str] = mapped_column(String(8))
    reason: Mapped[str] = mapped_column(String(63))
    message: Mapped[str] = mapped_column(Text)
    stage: Mapped[str | None] = mapped_column(String(16))
    key: Mapped[str] = mapped_column(String(63))
    data: Mapped[dict[str, Any]]
    # Without AUTOINCREMENT SQLite hands the id of a deleted last row out again, and Last-Event-ID would skip an event.
    __table_args__ = (Index("ix_events_job_id_id", "job_id", "id"), {"sqlite_autoincrement": True})


class MetricRow(Base):
    """One point of a series. The key makes recording it again harmless."""

    __tablename__ = "metrics"
    job_id: Mapped[str] = _job_reference()
    stage: Mapped[str] = mapped_column(String(16), primary_key=True)
    key: Mapped[str] = mapped_column(String(63), primary_key=True)
    name: Mapped[str] = mapped_column(String(127), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    time: Mapped[datetime]
    value: Mapped[float]


class IngestRow(Base):
    """How far a stage's `events.jsonl` has been read."""

    __tablename__ = "ingest"
    job_id: Mapped[str] = _job_reference()
    stage: Mapped[str] = mapped_column(String(16), primary_key=True)
    key: Mapped[str] = mapped_column(String(63), primary_key=True)
    offset_bytes: Mapped[int] = mapped_column(BigInteger)


_REMOVING = text("task = 'remove_files'")


class OutboxRow(Base):
    """A chore promised in the same transaction as the change that needs it."""

    __tablename__ = "outbox"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    task: Mapped[str] = mapped_column(String(63))
    argument: Mapped[str] = mapped_column(String(255))
    created_at: Mapped[datetime]
    dispatched_at: Mapped[datetime | None] = mapped_column(index=True)
    __table_args__ = (
        Index("ix_outbox_removing", "dispatched_at", postgresql_where=_REMOVING, sqlite_where=_REMOVING),
        {"sqlite_autoincrement": True})


class IdempotencyRow(Base):
    """A request that must not be done twice. `status` and `response` are empty while the first one is in flight."""

    __tablename__ = "idempotency"
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    route: Mapped[str] = mapped_column(String(255), primary_key=True)
    body_digest: Mapped[str] = mapped_column(String(80))
    status: Mapped[int | None]
    response: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime] = mapped_column(index=True)


class ResultRow(Base):
    """One measured checkpoint: what the leaderboard ranks."""

    __tablename__ = "results"
    job_id: Mapped[str] = _job_reference()
    checkpoint: Mapped[str] = mapped_column(String(63), primary_key=True)
    tuned: Mapped[bool] = mapped_column(primary_key=True)
    family: Mapped[str] = mapped_column(String(32))
    target: Mapped[str] = mapped_column(String(4096))
    drafter_dir: Mapped[str] = mapped_column(String(4096))
    speedup: Mapped[float]
    lossless: Mapped[bool]
    report: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]


class EndpointRow(Base):
    """A stable URL. `target` and `serve` are the contract's TargetSpec and ServeSpec."""

    __tablename__ = "endpoints"
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    target: Mapped[dict[str, Any]]
    serve: Mapped[dict[str, Any]]
    model: Mapped[str] = mapped_column(String(255))
    url: Mapped[str | None] = mapped_column(String(1024))
    desired: Mapped[str] = mapped_column(String(8))
    active_revision: Mapped[int | None]
    candidate_revision: Mapped[int | None]
    conditions: Mapped[list[Any]]
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]


class RevisionRow(Base):
    """One thing an endpoint has served or may serve. Outlives its job: history is not deleted with it."""

    __tablename__ = "revisions"
    endpoint: Mapped[str] = mapped_column(ForeignKey("endpoints.name", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    job_id: Mapped[str | None] = mapped_column(String(63), index=True)
    checkpoint: Mapped[str | None] = mapped_column(String(63))
    tree: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    drafter_dir: Mapped[str | None] = mapped_column(String(4096))
    speedup: Mapped[float | None]
    tau: Mapped[float | None]
    reason: Mapped[str] = mapped_column(Text)
    use: Mapped[dict[str, Any]]
    state: Mapped[str] = mapped_column(String(16))
    rejected_reason: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[datetime]


class HistoryRow(Base):
    """One thing that happened to an endpoint's name. Decisions are told of names that serve nothing yet, so there is no
    foreign key. `once` makes telling the same thing again harmless."""

    __tablename__ = "history"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    endpoint: Mapped[str] = mapped_column(String(63))
    time: Mapped[datetime]
    kind: Mapped[str] = mapped_column(String(16))
    revision: Mapped[int | None]
    job_id: Mapped[str | None] = mapped_column(String(63))
    reason: Mapped[str] = mapped_column(String(63))
    message: Mapped[str] = mapped_column(Text)
    actor: Mapped[str] = mapped_column(String(16))
    figures: Mapped[dict[str, Any]]
    data: Mapped[dict[str, Any]]
    once: Mapped[str | None] = mapped_column(String(255))
    __table_args__ = (Index("ix_history_endpoint_id", "endpoint", "id"),
                      UniqueConstraint("endpoint", "once"), {"sqlite_autoincrement": True})


class EndpointNameRow(Base):
    """Whose an endpoint's name is: taken by the first job or promotion that speaks of it, for good. A name without a
    row belongs to the project `default`."""

    __tablename__ = "endpoint_names"
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    project: Mapped[str] = mapped_column(String(63), index=True)
    claimed_at: Mapped[datetime]


class ProjectRow(Base):
    """A project and what it may use; an empty limit is none."""

    __tablename__ = "projects"
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    description: Mapped[str] = mapped_column(String(255))
    max_jobs: Mapped[int | None]
    max_endpoints: Mapped[int | None]
    requests_per_minute: Mapped[int | None]
    created_at: Mapped[datetime]


class ApiKeyRow(Base):
    """What is kept of an API key. Without a project it is for all of them."""

    __tablename__ = "api_keys"
    id: Mapped[str] = mapped_column(String(12), primary_key=True)
    name: Mapped[str] = mapped_column(String(63))
    secret_sha256: Mapped[str] = mapped_column(String(64))
    project: Mapped[str | None] = mapped_column(ForeignKey("projects.name"), index=True)
    role: Mapped[str] = mapped_column(String(16))
    scopes: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))
    created_by: Mapped[str] = mapped_column(String(512))
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]


class MembershipRow(Base):
    """The role that a subject or a group of an OIDC issuer has in a project."""

    __tablename__ = "memberships"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    project: Mapped[str] = mapped_column(ForeignKey("projects.name"))
    issuer: Mapped[str] = mapped_column(String(255))
    kind: Mapped[str] = mapped_column(String(8))
    value: Mapped[str] = mapped_column(String(255))
    role: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[datetime]
    __table_args__ = (UniqueConstraint("project", "issuer", "kind", "value"),
                      Index("ix_memberships_issuer_kind_value", "issuer", "kind", "value"),
                      {"sqlite_autoincrement": True})


class AuditRow(Base):
    """One thing somebody did or was refused. A trigger keeps rows from being changed or deleted."""

    __tablename__ = "audit"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    time: Mapped[datetime]
    actor: Mapped[str] = mapped_column(String(512))
    verb: Mapped[str] = mapped_column(String(63))
    object: Mapped[str] = mapped_column(String(512))
    project: Mapped[str | None] = mapped_column(String(63))
    outcome: Mapped[str] = mapped_column(String(63))
    request_id: Mapped[str] = mapped_column(String(64))
    __table_args__ = (Index("ix_audit_project_id", "project", "id"), {"sqlite_autoincrement": True})


class WebhookRow(Base):
    """Where a project's events are posted. The secret is kept as it is: signing needs it. Whoever reads the database
    can forge a delivery with it, and do nothing to Eyrie."""

    __tablename__ = "webhooks"
    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    project: Mapped[str] = mapped_column(ForeignKey("projects.name"), index=True)
    url: Mapped[str] = mapped_column(String(2048))
    events: Mapped[list[Any]]
    secret: Mapped[str] = mapped_column(String(63))
    failures: Mapped[int]
    disabled_reason: Mapped[str | None] = mapped_column(String(255))
    created_by: Mapped[str] = mapped_column(String(512))
    created_at: Mapped[datetime]


class DeliveryRow(Base):
    """One event on its way to one webhook."""

    __tablename__ = "deliveries"
    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    webhook_id: Mapped[str] = mapped_column(ForeignKey("webhooks.id", ondelete="CASCADE"))
    event: Mapped[str] = mapped_column(String(32))
    body: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(String(16))
    attempts: Mapped[int]
    next_at: Mapped[datetime | None]
    status: Mapped[int | None]
    error: Mapped[str | None] = mapped_column(String(255))
    created_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    __table_args__ = (Index("ix_deliveries_webhook_id_created_at", "webhook_id", "created_at"),
                      Index("ix_deliveries_state_next_at", "state", "next_at"))


Rows = Sequence[tuple[type[Base], Mapping[str, Any]]]
"""Rows to insert, of several tables, in this order; the values by column."""

_Shape = tuple[tuple[type[Base], tuple[str, ...]], ...]


class Database:
    """An engine and its two kinds of session. Cheap to share between threads; one per process and URL."""

    def __init__(self, url: str) -> None:
        try:
            parsed = make_url(url)
        except ArgumentError:
            raise InvalidInput(f"database_url {url!r} is not an SQLAlchemy URL",
                               "write sqlite:///path/eyrie.db or postgresql+psycopg://user@host/name") from None
        if parsed.drivername in ("postgres", "postgresql"):  # as other programs write it
            parsed = parsed.set(drivername="postgresql+psycopg")
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        if self.is_sqlite:
            if parsed.database in (None, "", ":memory:"):
                raise InvalidInput("database_url names an in-memory SQLite database, which every thread would see "
                                   "differently", "name a file")
            Path(str(parsed.database)).absolute().parent.mkdir(parents=True, exist_ok=True)
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
            session.commit()  # flushes; the transaction is the connection's, and ends after this

    def insert_at_once(self, condition: ColumnElement[bool], given: Mapping[str, Any], rows: Rows) -> bool:
        """On PostgreSQL: insert rows of several tables if `condition` holds, as one statement that is its own
        transaction; whether it held. False on SQLite, which has no such statement: take the long way, of a session.
        """
        if self.is_sqlite:
            return False
        shape = tuple((row, tuple(values)) for row, values in rows)
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            return bool(connection.execute(_statement_if(condition, shape), {**given, **_numbered(rows)}).scalar_one())

    def migrate(self) -> None:
        """Bring the tables to the newest revision; several processes may try at once."""
        from eyrie_api.database.migrations import upgrade  # here, so that alembic is loaded only by those who migrate

        upgrade(self)

    def is_reachable(self) -> bool:
        """Whether a statement can be run. Raises what the driver raises when it cannot."""
        with self.reading() as session:
            return bool(session.execute(text("SELECT 1")).scalar_one())

    def close(self) -> None:
        """Give all connections back."""
        self.engine.dispose()


def upsert(session: Session, row: type[Base], key: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Set `values` on the row with this primary key, making it when it is not there."""
    session.flush()
    for attempt in range(2):
        if values and _update(session, row, key, values):
            return
        try:
            with session.begin_nested():
                session.execute(insert(row).values({**key, **values}))
            return
        except IntegrityError:  # another transaction made the row between the two statements
            if attempt or not values:
                raise


def _update(session: Session, row: type[Base], key: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    statement = update(row).values(dict(values)).execution_options(synchronize_session=False)
    for column, value in key.items():
        statement = statement.where(getattr(row, column) == value)
    return rowcount(session, statement) > 0


def rowcount(session: Session, statement: Any) -> int:
    """Execute an UPDATE or DELETE and say how many rows it touched."""
    return int(session.execute(statement).rowcount)  # type: ignore[attr-defined]


class JsonText(str):
    """JSON that is text already: stored as it is, where a JSON column would have it made from a value."""

    __slots__ = ()


def _to_json(value: Any) -> str:
    return value if isinstance(value, JsonText) else json.dumps(value)


def insert_all(session: Session, rows: Rows) -> None:
    """Insert rows of several tables, in this order. PostgreSQL gets them as one statement, whose foreign keys are
    looked at in its end: a round trip and a plan for each costs more than the rows do."""
    session.flush()
    connection = session.connection()
    shape = tuple((row, tuple(values)) for row, values in rows)
    if connection.dialect.name == "postgresql":
        connection.execute(_one_statement(shape), _numbered(rows))
        return
    for number, (_, values) in enumerate(rows):
        connection.execute(_an_insert(*shape[number]), dict(values))


@lru_cache(maxsize=64)
def _an_insert(row: type[Base], columns: tuple[str, ...]) -> Executable:
    return insert(row.__table__).values({column: bindparam(column) for column in columns}).inline()  # type: ignore[arg-type]


def _numbered(rows: Rows) -> dict[str, Any]:
    return {f"r{number}_{column}": value for number, (_, values) in enumerate(rows) for column, value in values.items()}


@lru_cache(maxsize=64)
def _one_statement(shape: _Shape) -> Executable:
    return _statement_if(true(), shape)


@lru_cache(maxsize=64)
def _statement_if(condition: ColumnElement[bool], shape: _Shape) -> Executable:
    held = select(literal(1).label("held")).where(condition).cte("held")
    parts = []
    for number, (row, columns) in enumerate(shape):
        table = row.__table__
        values = select(*(bindparam(f"r{number}_{column}", type_=table.c[column].type) for column in columns))
        into = insert(table).from_select(list(columns), values.select_from(held))  # type: ignore[arg-type]
        parts.append(into.inline().cte(f"part{number}"))
    return select(func.count()).select_from(held).add_cte(*parts)


_CONNECTIONS = 16
"""Kept open at most, by a process that uses so many at once: more than the threads that handle requests. With fewer,
each burst would open connections and close them again, which costs PostgreSQL a process every time."""

_TRUSTED_S = 30.0
"""A connection that was given back so recently is taken again without asking the server whether it is still there,
which would cost as much as a statement. Nothing may have come in on it: a server that ends a connection says so."""


def _open_engine(url: URL, *, is_sqlite: bool) -> Engine:
    if not is_sqlite:
        engine = create_engine(url, pool_size=_CONNECTIONS, pool_use_lifo=True, json_serializer=_to_json)
        _ask_the_idle(engine)
        return engine
    engine = create_engine(url, json_serializer=_to_json)

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver must not open transactions of its own; `_begin` does
        cursor = connection.cursor()
        # WAL with synchronous=NORMAL loses nothing to kill -9; a power cut may lose the last commits, never the file.
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", f"busy_timeout={BUSY_TIMEOUT_MS}", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("eyrie_writes")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _ask_the_idle(engine: Engine) -> None:
    """What `pool_pre_ping` does, for connections that have not been used for a while."""

    @event.listens_for(engine, "checkin")
    def _given_back(_connection: Any, entry: ConnectionPoolEntry) -> None:
        entry.info["given_back"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def _taken(connection: Any, entry: ConnectionPoolEntry, _proxy: Any) -> None:
        poll = sockets.poll()
        poll.register(connection.fileno(), sockets.POLLIN)
        try:
            if poll.poll(0):
                raise DisconnectionError("the server has ended the connection")
            if time.monotonic() - entry.info.get("given_back", time.monotonic()) > _TRUSTED_S:
                engine.dialect.do_ping(connection)
        except (OSError, engine.dialect.loaded_dbapi.Error) as error:
            raise DisconnectionError(str(error)) from error
