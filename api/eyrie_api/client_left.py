"""The end of a request whose client has closed the connection.

`unless_left` cancels what computes the response. The rest is for what a request reads of a user's files.

A handler runs in a thread, which nothing can stop from outside: the loops of reading call `check`, which raises
ClientLeft once the client has left. It is called where files are read, listed and digested, and where the process of a
chat template is waited for, never between writes: a request ends so before it has changed anything, or not at all.

Routes that read users' files are watched, by `watch` (`http.control.EndsWithClient`): the others are short. Outside of
such a request, in stages and commands, `check` does nothing.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from eyrie_api.errors import EyrieError

T = TypeVar("T")
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
"""As in ASGI, of a request whose body has been read."""

_left: ContextVar[threading.Event | None] = ContextVar("client_left", default=None)
"""Of the request of this context. The thread of a handler has a copy of the context, with the same event."""


class ClientLeft(EyrieError):
    """The client closed the connection before its request was done."""

    http_status = 499  # as nginx logs it; nobody receives it


def check() -> None:
    """Raises ClientLeft where the client of this request has left."""
    left = _left.get()
    if left is not None and left.is_set():
        raise ClientLeft("the client closed the connection while its request read files", "nothing was changed")


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def watch(receive: Receive) -> AsyncIterator[None]:
    """Watch the connection of this context's request."""
    left = threading.Event()
    _left.set(left)

    async def wait() -> None:
        await _disconnect(receive)
        left.set()

    waiting = asyncio.create_task(wait())
    try:
        yield
    finally:
        waiting.cancel()


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves first. Raises ClientLeft."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft("the client closed the connection before the response", "nothing is sent")
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
