"""Alembic's environment script: runs the revisions on the connection passed by `eyrie_api.database.migrations`.

`render_as_batch` rewrites ALTER TABLE as copy-and-rename where SQLite cannot alter; on PostgreSQL it changes nothing.
"""

from alembic import context

from eyrie_api.database.tables import Base

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True,
                  compare_type=True, transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
