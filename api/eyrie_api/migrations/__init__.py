"""Migrations of the tables, inside the package so that a wheel can bring any database up to date.

`upgrade(database)` is what `Database.migrate` calls; `downgrade` goes back. Both run on one connection in one
transaction that holds a lock from its start (SQLite: the write lock; PostgreSQL: an advisory one), so that replicas
which start together take turns. Without it, four of them deadlocked on PostgreSQL in CREATE TABLE.
Revisions are in `versions/`, named in order; each must be undone by its `downgrade`, which a test walks.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, text

if TYPE_CHECKING:
    from eyrie_api.database import Database

# Any number will do, as long as no other program on the same database takes it.
_ADVISORY_LOCK = int.from_bytes(b"eyrie", "big")


def config() -> Config:
    """Alembic's configuration, without an ini file."""
    made = Config()
    made.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return made


def upgrade(database: "Database", revision: str = "head") -> None:
    """Bring the tables to `revision`."""
    made = config()
    with database.writing() as session:
        made.attributes["connection"] = _alone(session.connection())
        command.upgrade(made, revision)


def downgrade(database: "Database", revision: str = "base") -> None:
    """Take the tables back to `revision`."""
    made = config()
    with database.writing() as session:
        made.attributes["connection"] = _alone(session.connection())
        command.downgrade(made, revision)


def _alone(connection: Connection) -> Connection:
    """The connection, once no other process migrates; until its transaction ends."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
    return connection
