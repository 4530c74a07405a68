"""One file per revision of the tables, in order; see `eyrie_api.database.migrations`."""
