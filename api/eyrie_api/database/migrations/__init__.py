"""Migrations of the tables, inside the package so that a wheel can bring any database up to date.

`upgrade(database)` is what `Database.migrate` calls; `downgrade` goes back. Both run on one connection in one
transaction that holds a lock from its start (SQLite: the write lock; PostgreSQL: an advisory one), so that replicas
which start together take turns. Without it, four of them deadlocked on PostgreSQL in CREATE TABLE.
Revisions are in `versions/`, named in order; each must be undone by its `downgrade`, which a test walks.

Tables that are newer than this program are left alone: programs of two versions run side by side while a release is
rolled out, and after a rollback the older one is meant to stay. Hence a revision only ever adds what an older program
can overlook.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

if TYPE_CHECKING:
    from eyrie_api.database.tables import Database

log = logging.getLogger(__name__)

Standing = Literal["behind", "current", "ahead"]

# Any number will do, as long as no other program on the same database takes it.
_ADVISORY_LOCK = int.from_bytes(b"eyrie", "big")


def config() -> Config:
    """Alembic's configuration, without an ini file."""
    made = Config()
    made.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return made


def upgrade(database: "Database", revision: str = "head") -> None:
    """Bring the tables to `revision`; those of a newer program stay as they are."""
    made = config()
    with database.writing() as session:
        connection = made.attributes["connection"] = _alone(session.connection())
        if revision == "head" and _standing(connection) == "ahead":
            log.warning("the tables are newer than this program, and left as they are")
            return
        command.upgrade(made, revision)


def downgrade(database: "Database", revision: str = "base") -> None:
    """Take the tables back to `revision`."""
    made = config()
    with database.writing() as session:
        made.attributes["connection"] = _alone(session.connection())
        command.downgrade(made, revision)


def standing(database: "Database") -> Standing:
    """Where the tables stand, seen from this program. A database without any is behind."""
    with database.reading() as session:
        return _standing(session.connection())


def _standing(connection: Connection) -> Standing:
    known = ScriptDirectory.from_config(config())
    found = MigrationContext.configure(connection).get_current_revision()
    if found == known.get_current_head():
        return "current"
    names = {script.revision for script in known.walk_revisions()}
    return "behind" if found is None or found in names else "ahead"


def _alone(connection: Connection) -> Connection:
    """The connection, once no other process migrates; until its transaction ends."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
    return connection
