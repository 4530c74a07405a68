"""Fan-out of console pages to their streams: each page is rendered once per process for all who may see the same.

If each browser requested its page every few seconds, the page would be rendered for each reader, changed or not. Here
one task per process renders, in one thread of its own, and every stream of a page sends the same text.

    version   of all jobs with open pages, by two statements per poll: status, last event, stages with progress
    render    the pages whose version has changed, and those that are `_REFRESH_S` old: what they show of time, of the
              disk and of files has no version. A page takes at most one part in `_SHARE` of the processor: what takes
              50 ms is rendered every 5 s; but no reader waits longer than `_LONGEST_S`
    deliver   only text that differs from the last one, to one reader after the other; a slow reader skips to the newest

Readers with equal rights share a page. A stream holds neither a thread nor a database connection; access that was
revoked ends it in the middleware, as every stream. While the database is unavailable nothing is rendered.

    heartbeat   an event, which script sees: the first message of a stream, then after each silent interval, and when
                a page ceases to be current or is so again. It has the interval, since when the page is not current,
                and why
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from anyio import CapacityLimiter, to_thread
from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError

from eyrie_api.clock import utc_now
from eyrie_api.database.engine import Database
from eyrie_api.database.tables import EventRow, JobRow, StageRow
from eyrie_api.errors import NotFound

log = logging.getLogger(__name__)

_POLL_S = 1.0
"""A person reads no faster, and progress is written more often."""

_REFRESH_S = {True: 30.0, False: 5.0}
"""Age at which a page is rendered again: with a version, without one."""

_SHARE = 100
"""A page is rendered again after so many times what the last rendering took. Requests wait for the interpreter's lock
while a page is rendered: with more than a hundredth of the time, their 99th percentile would show it."""

_LONGEST_S = 10.0
"""After so long a page is rendered again whatever it took: a rendering that a busy machine made long says little of the
next, and its readers wait."""

_APART_S, _LATEST_S = 0.008, 0.8
"""Between two readers of a page that has changed, and before which all have it: a hundred answers in one turn of the
event loop would delay every request by all of them."""

_MAX_BATCH = 500
"""Jobs in one statement."""

_RETRY_MS = 1000

_LATE = timedelta(seconds=30)
"""A page is polled every second. One that was not for so long waits for a database that does not answer, or for
the rendering of others."""

_NO_DATABASE, _NOT_RENDERED, _NOT_POLLED = (
    "the database is unavailable", "the server cannot render this page; its log says why", "the server is too slow")


@dataclass(frozen=True)
class PageKey:
    """What makes two pages the same text."""

    path: str
    """With what its address selects."""

    rights: str
    """Of the reader: roles, scopes and project."""

    server: str
    """As the reader's browser names it, for the `curl` lines."""

    job_id: str | None = None
    """The job whose version is that of the page; None for a page without one."""


@dataclass(frozen=True)
class Rendered:
    """The live part of a page. `ended`: it changes no more."""

    html: str
    ended: bool = False


Render = Callable[[], Rendered]
"""Runs in a thread. Raises NotFound once the page's object is deleted."""


@dataclass(eq=False)
class _OpenPage:
    render: Render
    readers: int = 0
    version: object = None
    rendered_at: float = float("-inf")
    took_s: float = 0.0
    message: bytes = b""
    """The newest one; empty before the first rendering. Encoded once for all readers."""

    is_last: bool = False
    is_broken: bool = False
    """The last rendering failed."""

    current_at: datetime = field(default_factory=utc_now)
    """When the newest message was last known to show what is so."""

    problem: str = ""
    """Why it is not known now."""

    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Replaced whenever it is set."""

    def stale(self) -> tuple[datetime, str] | None:
        """Since when the page is not current, and why."""
        problem = self.problem or (_NOT_POLLED if utc_now() - self.current_at > _LATE else "")
        return (self.current_at, problem) if problem else None

    def wake(self) -> None:
        """Let the streams look at the page."""
        self.changed.set()
        self.changed = asyncio.Event()

    def polled(self, problem: str = "") -> None:
        """The page is current, or is not for this reason."""
        if not problem:
            self.current_at = utc_now()
        if problem != self.problem:
            self.problem = problem
            self.wake()


class LivePages:
    """The open pages of one process and the task that renders them. Belongs to one event loop."""

    def __init__(self, database: Database, heartbeat_s: float) -> None:
        self._database, self._heartbeat_s = database, heartbeat_s
        self._pages: dict[PageKey, _OpenPage] = {}
        self._task: asyncio.Task[None] | None = None
        self._limiter = CapacityLimiter(1)  # requests are answered by other threads, and not delayed

    async def stream(self, key: PageKey, render: Render) -> AsyncIterator[bytes]:
        """Messages of an event stream: the page as it is, then whenever it has changed."""
        yield b"retry: %d\n\n" % _RETRY_MS
        page = self._pages.setdefault(key, _OpenPage(render))
        behind_s = page.readers * _APART_S % _LATEST_S
        page.readers += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll())
        try:
            stale = page.stale()
            yield self._heartbeat(stale)
            sent = b""
            while True:
                changed = page.changed
                if page.message != sent:
                    sent = page.message
                    yield sent
                    if page.is_last and sent == page.message:
                        return
                    continue  # the page may have changed while the message was sent
                if page.stale() != stale:
                    stale = page.stale()
                    yield self._heartbeat(stale)
                    continue
                try:
                    await asyncio.wait_for(changed.wait(), self._heartbeat_s)
                except TimeoutError:
                    stale = page.stale()
                    yield self._heartbeat(stale)
                else:
                    await asyncio.sleep(behind_s)
        finally:
            page.readers -= 1
            if not page.readers and self._pages.get(key) is page:
                del self._pages[key]

    def _heartbeat(self, stale: tuple[datetime, str] | None) -> bytes:
        reported = None if stale is None else {"since": stale[0].isoformat(), "reason": stale[1]}
        data = json.dumps({"interval_s": self._heartbeat_s, "stale": reported})
        return f"event: heartbeat\ndata: {data}\n\n".encode()

    async def _poll(self) -> None:
        while self._pages:
            unpolled = dict(self._pages)
            try:
                job_ids = {key.job_id for key in self._pages if key.job_id is not None}
                versions = await to_thread.run_sync(self._versions, job_ids, limiter=self._limiter)
                for key, page in list(self._pages.items()):
                    await self._refresh(key, page, versions.get(key.job_id) if key.job_id is not None else None)
                    unpolled.pop(key, None)
            except SQLAlchemyError as error:
                log.warning("the database is unavailable (%s): pages wait", type(error).__name__)
                for page in unpolled.values():
                    page.polled(_NO_DATABASE)
            await asyncio.sleep(_POLL_S)

    async def _refresh(self, key: PageKey, page: _OpenPage, version: object) -> None:
        age = time.monotonic() - page.rendered_at
        stale_s = _REFRESH_S[key.job_id is not None and not page.is_broken]
        if is_due(version != page.version, age, stale_s, page.took_s):
            took_s, message = await to_thread.run_sync(_message, page.render, limiter=self._limiter)
            if message[0] not in (b"", page.message):
                page.message, page.is_last = message
                if page.is_last and self._pages.get(key) is page:  # a job that is retried begins a new page
                    del self._pages[key]
                page.wake()
            is_first = page.rendered_at == float("-inf")  # it compiles templates: no measure of the next
            page.took_s = 0.0 if is_first else took_s
            page.version, page.rendered_at, page.is_broken = version, time.monotonic(), not message[0]
        page.polled(_NOT_RENDERED if page.is_broken else "")

    # The functions below run in a thread.

    def _versions(self, job_ids: Iterable[str]) -> Mapping[str, object]:
        """Job -> a value that differs once its page shows something else. A deleted job is left out."""
        versions: dict[str, list[object]] = {}
        ids = sorted(job_ids)
        last = select(func.max(EventRow.id)).where(EventRow.job_id == JobRow.id).scalar_subquery()
        for part in (ids[at:at + _MAX_BATCH] for at in range(0, len(ids), _MAX_BATCH)):
            with self._database.reading() as session:
                for row in session.execute(select(JobRow.id, JobRow.updated_at, JobRow.cancel_requested, last)
                                           .where(JobRow.id.in_(part))):
                    versions[row[0]] = [tuple(row)]
                stages = select(StageRow.job_id, StageRow.stage, StageRow.key, StageRow.state, StageRow.attempt,
                                StageRow.progress, StageRow.message).where(StageRow.job_id.in_(part))
                for row in session.execute(stages.order_by(StageRow.job_id, StageRow.stage, StageRow.key)):
                    versions[row[0]].append(tuple(row))
        return versions


def is_due(has_changed: bool, age_s: float, stale_s: float, took_s: float) -> bool:
    """Whether a page is rendered again: it has changed or is stale, and its share of the processor allows it. Pure."""
    return (has_changed or age_s >= stale_s) and age_s >= min(_SHARE * took_s, _LONGEST_S)


def _message(render: Render) -> tuple[float, tuple[bytes, bool]]:
    """Processor seconds of rendering a page; the page as a message of an event stream, and whether it is the last."""
    began_s = time.thread_time()
    try:
        rendered = render()
    except NotFound:
        return 0.0, (b"event: deleted\ndata: {}\n\n", True)
    except SQLAlchemyError:
        raise
    except Exception:  # whatever one page has, the others go on
        log.exception("a live page is not rendered")
        return time.thread_time() - began_s, (b"", False)
    end = "event: end\ndata: {}\n\n" if rendered.ended else ""
    message = f"event: live\ndata: {json.dumps(rendered.html)}\n\n{end}".encode()
    return time.thread_time() - began_s, (message, rendered.ended)
