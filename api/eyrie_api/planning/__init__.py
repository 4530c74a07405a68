"""Checks of a job before it is accepted: target and data facts, preflight, placement, spec policy."""
