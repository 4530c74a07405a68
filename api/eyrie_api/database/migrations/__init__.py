"""Creation and migration of the tables, inside the package so that a wheel can bring any database up to date.

`upgrade(database)` creates the tables of an empty database from the metadata and marks them with the newest revision,
as Alembic's recipe for databases from scratch does; tables of a release since 0.2 go through the revisions in
`versions/`, named in order. It runs on one connection in one transaction that holds a lock from its start
(SQLite: the write lock; PostgreSQL: an advisory one), so that replicas which start together are serialised. Without
the lock, four of them deadlocked on PostgreSQL in CREATE TABLE.

Tables that are newer than this program are left unchanged: programs of two versions run side by side during a rollout,
and after a rollback the older program keeps running. Hence a revision only adds what an older program can ignore.
Tables of a version before 0.2 are refused.
"""

import logging
import re
from pathlib import Path
from typing import Literal

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, insert, text

from eyrie_api.clock import utc_now
from eyrie_api.database.engine import Database
from eyrie_api.database.tables import Base, ProjectRow
from eyrie_api.errors import TablesTooOld

log = logging.getLogger(__name__)

SchemaState = Literal["behind", "current", "ahead"]

# An arbitrary number that no other program on the same database uses.
_ADVISORY_LOCK = int.from_bytes(b"eyrie", "big")

_BEFORE_0_2 = re.compile(r"v00\d\d")
"""Revisions of versions that were never released: v0001 to v0011."""


def upgrade(database: Database) -> None:
    """Create the tables, or upgrade them; those of a newer program stay as they are. Raises TablesTooOld."""
    settings = _config()
    with database.writing() as session:
        connection = settings.attributes["connection"] = session.connection()
        if not database.is_sqlite:  # the end of the transaction releases it
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
        if _revision(connection) is None:
            Base.metadata.create_all(connection, checkfirst=False)  # tables of another program are an error
            connection.execute(insert(ProjectRow).values(
                name="default", description="where everything is that names no project", created_at=utc_now()))
            command.stamp(settings, "head")
        elif _schema_state(connection) == "ahead":
            log.warning("the tables are newer than this program: left unchanged")
        else:
            command.upgrade(settings, "head")


def schema_state(database: Database) -> SchemaState:
    """The revision of the tables, relative to this program's. A database without tables is behind. Raises
    TablesTooOld."""
    with database.reading() as session:
        return _schema_state(session.connection())


def _schema_state(connection: Connection) -> SchemaState:
    scripts = ScriptDirectory.from_config(_config())
    revision = _revision(connection)
    if revision == scripts.get_current_head():
        return "current"
    names = {script.revision for script in scripts.walk_revisions()}
    return "behind" if revision is None or revision in names else "ahead"


def _revision(connection: Connection) -> str | None:
    revision = MigrationContext.configure(connection).get_current_revision()
    if revision is not None and _BEFORE_0_2.fullmatch(revision):
        raise TablesTooOld("the database was made by a version before 0.2; upgrades are supported from 0.2 on",
                           "start with a new database, or another EYRIE_HOME; the old one is left as it is")
    return revision


def _config() -> Config:
    """Alembic's configuration, without an ini file."""
    settings = Config()
    settings.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return settings
