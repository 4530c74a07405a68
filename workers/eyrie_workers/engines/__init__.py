"""Engines as processes: an OpenAI-compatible server over the reference engine, and how to start, ask and stop one."""
