"""The REST API: application, middleware, routes, event streams, RFC 9457 problems."""
