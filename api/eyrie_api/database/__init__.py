"""Rows of the control plane: tables, engine, migrations, and one writer module per kind of record."""
