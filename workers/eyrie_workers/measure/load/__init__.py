"""The load generator: concurrent users or a request rate against OpenAI-compatible servers, and their comparison."""
