"""The command line client: `commands` calls the REST API, the other modules render contract values."""
