"""Conversations from many formats, in one normal form; what cannot be read is named, never dropped in silence."""
