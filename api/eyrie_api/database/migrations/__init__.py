"""Migrations of the tables, inside the package so that a wheel can bring any database up to date.

`upgrade(database)` goes forward, `downgrade` back. Both run on one connection in one transaction that holds a lock from
its start (SQLite: the write lock; PostgreSQL: an advisory one), so that replicas which start together are serialised.
Without the lock, four of them deadlocked on PostgreSQL in CREATE TABLE.
Revisions are in `versions/`, named in order; each must be undone by its `downgrade`, which a test runs.

Tables that are newer than this program are left unchanged: programs of two versions run side by side during a rollout,
and after a rollback the older program keeps running. Hence a revision only adds what an older program can ignore.
"""

import logging
from pathlib import Path
from typing import Literal

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from eyrie_api.database.engine import Database

log = logging.getLogger(__name__)

SchemaState = Literal["behind", "current", "ahead"]

# An arbitrary number that no other program on the same database uses.
_ADVISORY_LOCK = int.from_bytes(b"eyrie", "big")


def config() -> Config:
    """Alembic's configuration, without an ini file."""
    settings = Config()
    settings.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return settings


def upgrade(database: Database, revision: str = "head") -> None:
    """Upgrade the tables to `revision`; those of a newer program stay as they are."""
    settings = config()
    with database.writing() as session:
        connection = settings.attributes["connection"] = _locked(session.connection())
        if revision == "head" and _schema_state(connection) == "ahead":
            log.warning("the tables are newer than this program: left unchanged")
            return
        command.upgrade(settings, revision)


def downgrade(database: Database, revision: str = "base") -> None:
    """Downgrade the tables to `revision`."""
    settings = config()
    with database.writing() as session:
        settings.attributes["connection"] = _locked(session.connection())
        command.downgrade(settings, revision)


def schema_state(database: Database) -> SchemaState:
    """The revision of the tables, relative to this program's. A database without tables is behind."""
    with database.reading() as session:
        return _schema_state(session.connection())


def _schema_state(connection: Connection) -> SchemaState:
    scripts = ScriptDirectory.from_config(config())
    revision = MigrationContext.configure(connection).get_current_revision()
    if revision == scripts.get_current_head():
        return "current"
    names = {script.revision for script in scripts.walk_revisions()}
    return "behind" if revision is None or revision in names else "ahead"


def _locked(connection: Connection) -> Connection:
    """The connection, after it holds the migration lock; its transaction's end releases it."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
    return connection
