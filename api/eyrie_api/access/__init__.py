"""Who may do what: API keys, roles in projects, and the one question `roles.refusal`. Not yet asked by the server."""
