"""Webhook secrets are encrypted: a column for the ciphertext, and the plain one may be NULL.

`eyrie_api.database.webhook_secrets` encrypts existing rows when a control plane with a key starts; this revision has no
key. An older program on these tables signs with plain secrets as before and fails on NULL before it sends anything.
"""

import sqlalchemy as sa
from alembic import op

revision = "v0005"
down_revision = "v0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column of ciphertexts."""
    op.add_column("webhooks", sa.Column("secret_encrypted", sa.Text(), nullable=True))
    _make_secret(nullable=True)


def _make_secret(*, nullable: bool) -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.alter_column("webhooks", "secret", existing_type=sa.String(length=63), nullable=nullable)
        return
    # Not in batch mode, which would drop the old table and, by cascade, all deliveries. SQLite accepts a new NOT NULL
    # column only with a default.
    op.add_column("webhooks", sa.Column("new_secret", sa.String(length=63), nullable=nullable,
                                        server_default=None if nullable else ""))
    op.execute("UPDATE webhooks SET new_secret = secret")
    op.drop_column("webhooks", "secret")
    op.execute("ALTER TABLE webhooks RENAME COLUMN new_secret TO secret")


def downgrade() -> None:
    """Delete webhooks whose secret is encrypted, which older tables cannot hold, and drop the column."""
    op.execute("DELETE FROM webhooks WHERE secret IS NULL")
    _make_secret(nullable=False)
    op.drop_column("webhooks", "secret_encrypted")
