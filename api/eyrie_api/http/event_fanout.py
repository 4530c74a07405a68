"""New events of many jobs for many readers, by one look at the database: what live streams hang on.

A stream that asks for its own rows costs statements at every poll; five hundred of them keep a database and an API
server busy with finding nothing. Here one task per process looks, and tells those who read.

    glance   which jobs have events above the last id seen: a few index entries, whoever reads
    look     at those of them that somebody reads: the events behind what was told before, and whether the job has
             ended; now and then at all that somebody reads, for what a glance cannot see

Ids are not committed in their order, but those of one job are: its writers take turns by its row (`Jobs`). So a job's
events are fetched from where its last fetch ended, and none is skipped. That one was committed late means only that a
glance may miss it; therefore it looks `_OVERLAP` ids back, and the look at all finds what was later still. Readers
compare ids: being told twice does no harm.

A reader joins before it reads what there is already, and then says how far it came (`begin`): what is written in
between is in its queue. While the database is away nothing is told and nothing is lost.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from anyio import CapacityLimiter, to_thread
from sqlalchemy import and_, func, or_, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from eyrie_api.database.engine import Database
from eyrie_api.database.rendering import render_event
from eyrie_api.database.tables import EventRow, JobRow
from eyrie_api.v1alpha1.status import Event

log = logging.getLogger(__name__)

_OVERLAP = 200
"""Ids that a glance looks back: at 500 events a second, what transactions of less than 0.4 s have written."""

_LOOK_AT_ALL_EVERY = 20
"""Polls."""

_AT_ONCE = 500
"""Jobs in one statement, and events of one job in one fetch."""

_AWAY_S = 1.0
"""Pause after the database did not answer."""


@dataclass(frozen=True)
class EventBatch:
    """What a reader is told. `over` and `gone` are told after every event that was there then."""

    messages: tuple[tuple[int, str], ...] = ()
    """(id, the event as one message of an event stream)."""

    over: bool = False
    gone: bool = False


@dataclass(eq=False)
class _Followed:
    """A job that somebody reads."""

    seats: set["Subscriber"] = field(default_factory=set)
    told: int | None = None
    """Everything up to this id; None until the first reader has begun."""


@dataclass(eq=False)
class Subscriber:
    """One reader of one job's events."""

    job_id: str
    job: _Followed
    news: asyncio.Queue[EventBatch] = field(default_factory=asyncio.Queue)


def message_of(event: Event) -> str:
    """An event as a message of an event stream."""
    return f"id: {event.id}\nevent: {event.reason}\ndata: {event.model_dump_json()}\n\n"


class Following:
    """The readers of one process, and the task that looks for them. Belongs to one event loop."""

    def __init__(self, database: Database, poll_s: float) -> None:
        self._database, self._poll_s = database, poll_s
        self._jobs: dict[str, _Followed] = {}
        self._task: asyncio.Task[None] | None = None
        self._turn = CapacityLimiter(1)  # of its own: a burst of requests must not hold streams up

    @contextmanager
    def joined(self, job_id: str) -> Iterator[Subscriber]:
        """A seat for as long as the context lasts."""
        job = self._jobs.setdefault(job_id, _Followed())
        seat = Subscriber(job_id, job)
        job.seats.add(seat)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._follow())
        try:
            yield seat
        finally:
            job.seats.discard(seat)
            if not job.seats and self._jobs.get(job_id) is job:
                del self._jobs[job_id]

    async def begin(self, seat: Subscriber, after: int) -> None:
        """The reader has everything up to this id. It may be one that a client made up, beyond all there are."""
        newest = await to_thread.run_sync(self._newest, seat.job_id, limiter=self._turn)
        if seat.job.told is None:
            seat.job.told = min(after, newest)

    async def _follow(self) -> None:
        """Look for as long as anybody reads."""
        polls, top = 0, 0
        while self._jobs:
            try:
                newest = await to_thread.run_sync(self._glance, top, limiter=self._turn)
                top = max(newest.values(), default=top)
                followed = {job_id: job.told for job_id, job in self._jobs.items() if job.told is not None}
                if polls % _LOOK_AT_ALL_EVERY:
                    followed = {job_id: told for job_id, told in followed.items() if newest.get(job_id, 0) > told}
                waiting = list(followed)
                for part in (waiting[at:at + _AT_ONCE] for at in range(0, len(waiting), _AT_ONCE)):
                    asked = {job_id: followed[job_id] for job_id in part}
                    self._tell(await to_thread.run_sync(self._look, asked, limiter=self._turn))
            except SQLAlchemyError as error:
                log.warning("the database does not answer (%s): event streams wait", type(error).__name__)
                await asyncio.sleep(_AWAY_S)
            polls += 1
            await asyncio.sleep(self._poll_s)

    def _tell(self, found: Mapping[str, EventBatch]) -> None:
        for job_id, news in found.items():
            job = self._jobs.get(job_id)
            if job is None or job.told is None:
                continue
            # Who began anew in the meantime may have begun further back: fetched again, then, from where that was.
            if news.messages and news.messages[0][0] > job.told:
                job.told = news.messages[-1][0]
            for seat in job.seats:
                seat.news.put_nowait(news)

    # In a thread.

    def _newest(self, job_id: str) -> int:
        with self._database.reading() as session:
            return session.execute(select(func.max(EventRow.id)).where(EventRow.job_id == job_id)).scalar() or 0

    def _glance(self, top: int) -> dict[str, int]:
        """Job -> id of its newest event, of the jobs with events that are new or nearly so."""
        with self._database.reading() as session:
            if not top:
                top = session.execute(select(func.max(EventRow.id))).scalar() or 0
            newest = select(EventRow.job_id, func.max(EventRow.id)).where(EventRow.id > top - _OVERLAP)
            return {row[0]: row[1] for row in session.execute(newest.group_by(EventRow.job_id))}

    def _look(self, asked: Mapping[str, int]) -> dict[str, EventBatch]:
        """EventBatch of these jobs, each behind the id it was told up to. A job without any is left out."""
        last = select(func.max(EventRow.id)).where(EventRow.job_id == JobRow.id).scalar_subquery()
        found: dict[str, EventBatch] = {}
        with self._database.reading() as session:
            standing = {job_id: (ended, newest or 0) for job_id, ended, newest in session.execute(
                select(JobRow.id, JobRow.ended, last).where(JobRow.id.in_(list(asked))))}
            behind = {job_id: told for job_id, told in asked.items()
                      if job_id in standing and standing[job_id][1] > told}
            rows = _rows_behind(session, behind)
        for job_id in asked:
            if job_id not in standing:
                found[job_id] = EventBatch(gone=True)
                continue
            mine = rows.get(job_id, ())
            over = standing[job_id][0] and len(mine) < _AT_ONCE
            if mine or over:
                found[job_id] = EventBatch(tuple((row.id, message_of(render_event(row))) for row in mine), over)
        return found


def _rows_behind(session: Session, told: Mapping[str, int]) -> dict[str, list[EventRow]]:
    """Events of several jobs in one question, each behind an id of its own, and at most `_AT_ONCE` of each."""
    if not told:
        return {}
    if len(told) == 1:  # most looks; and a job that is read from its beginning may have very many
        (job_id, last), = told.items()
        wanted = select(EventRow).where(EventRow.job_id == job_id, EventRow.id > last)
        return {job_id: list(session.scalars(wanted.order_by(EventRow.id).limit(_AT_ONCE)))}
    place = func.row_number().over(partition_by=EventRow.job_id, order_by=EventRow.id).label("place")
    numbered = select(EventRow.id, place).where(
        or_(*(and_(EventRow.job_id == job_id, EventRow.id > last) for job_id, last in told.items()))).subquery()
    wanted = select(EventRow).join(numbered, numbered.c.id == EventRow.id).where(numbered.c.place <= _AT_ONCE)
    found: dict[str, list[EventRow]] = {}
    for row in session.scalars(wanted.order_by(EventRow.id)):
        found.setdefault(row.job_id, []).append(row)
    return found
