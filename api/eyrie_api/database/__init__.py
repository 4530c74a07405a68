"""The database of the control plane: tables, engine, migrations, and one repository module per kind of record."""
