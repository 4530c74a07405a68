"""Authentication and authorization: API keys, OIDC tokens, roles in projects, rate limits, and the scope of queries."""
