"""Conversations and prompts of many formats in one normal form; every unreadable row is reported, none dropped
silently."""
