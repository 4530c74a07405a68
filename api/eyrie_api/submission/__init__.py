"""Checks of a job before anything runs: target and data facts, preflight, placement, spec policy."""
