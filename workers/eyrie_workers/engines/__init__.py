"""Serving engines as processes: the embedded OpenAI-compatible server, and SGLang; start, readiness, stop."""
