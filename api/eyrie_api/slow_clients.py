"""Closes connections whose request does not arrive.

A client that sends its headers or its body too slowly, or nothing at all, holds a connection, and with it a file
descriptor and memory, for as long as it likes; some thousands of them leave none for health checks. uvicorn limits idle
connections alone. `TimedProtocol` is its HTTP protocol with two further limits:

- the headers of a request are complete `HEADER_S` after the connection, or after the first of their bytes;
- a body makes progress: at least `PACE_BYTES` in every `BODY_S`, or it is complete by then.

Answers are not limited: a stream may take as long as it takes.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADER_S, BODY_S, PACE_BYTES = 20.0, 60.0, 64 * 1024
_CHECKS = 4
"""Per HEADER_S: what is too slow is closed at most a quarter later."""

_Base: Any = AutoHTTPProtocol  # either of two classes, chosen at import


class TimedProtocol(_Base):  # type: ignore[misc]
    """uvicorn's protocol of one connection; pass it as `uvicorn.Config(http=...)`."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the clock of the headers."""
        super().connection_made(transport)
        self._received = self._counted = 0
        self._begun = True  # of headers that are not complete
        self._waited_s = 0.0
        self._timer = self.loop.call_later(HEADER_S / _CHECKS, self._check)

    def data_received(self, data: bytes) -> None:
        """Count, and notice headers that begin."""
        self._received += len(data)
        super().data_received(data)
        self._begun = self._has_no_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._timer.cancel()
        super().connection_lost(exc)

    def _has_no_request(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _check(self) -> None:
        if self.transport.is_closing():
            return
        if self._has_no_request():
            limit, waits = HEADER_S, self._begun  # else it is idle, which uvicorn limits
        else:
            limit, waits = BODY_S, self.cycle.more_body and self._received - self._counted < PACE_BYTES
        if not waits:
            self._waited_s, self._counted = 0.0, self._received
        elif (waited := self._waited_s + HEADER_S / _CHECKS) >= limit:
            self.transport.close()
            return
        else:
            self._waited_s = waited
        self._timer = self.loop.call_later(HEADER_S / _CHECKS, self._check)
