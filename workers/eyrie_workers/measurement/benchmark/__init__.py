"""Checkpoints against the same engine without a drafter: interleaving, ledger, samples, reports."""
