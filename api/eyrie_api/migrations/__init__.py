"""Migrations of the tables, inside the package so that a wheel can bring any database up to date.

`upgrade(database)` is what `Database.migrate` calls; `downgrade` goes back. Both run on one connection in one
transaction that holds the write lock from its start, so two processes that start together do not trip over each other.
Revisions are in `versions/`, named in order; each must be undone by its `downgrade`, which a test walks.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from alembic import command
from alembic.config import Config

if TYPE_CHECKING:
    from eyrie_api.database import Database


def config() -> Config:
    """Alembic's configuration, without an ini file."""
    made = Config()
    made.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return made


def upgrade(database: "Database", revision: str = "head") -> None:
    """Bring the tables to `revision`."""
    made = config()
    with database.writing() as session:
        made.attributes["connection"] = session.connection()
        command.upgrade(made, revision)


def downgrade(database: "Database", revision: str = "base") -> None:
    """Take the tables back to `revision`."""
    made = config()
    with database.writing() as session:
        made.attributes["connection"] = session.connection()
        command.downgrade(made, revision)
