"""Compares drafter families: trains each at an equal budget for one target, and measures all of them together."""
