"""Drafters on disk: files shared by all families, the card, checkpoints of head-based drafters."""
