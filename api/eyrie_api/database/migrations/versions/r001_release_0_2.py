"""The tables of 0.2.0, which are created from the metadata (see `eyrie_api.database.migrations`)."""

revision = "r001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Nothing: tables that have no revision are created with the newest one."""
