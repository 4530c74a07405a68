"""How Eyrie looks in a terminal: tables, progress, chat. Pure renderings of contract values; `eyrie_api.cli` acts."""
