"""Endpoints independent of the runtime: the plan, database records, drift, engine counters, recorded traffic."""
