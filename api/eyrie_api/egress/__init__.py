"""Requests this server sends to addresses that users gave: checked, pinned, signed."""
