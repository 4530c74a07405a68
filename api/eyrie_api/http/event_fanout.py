"""Fan-out of job events to live streams: one poller per process queries the database for all subscribers.

A stream that queried its own rows would cost statements at every poll; five hundred of them keep a database and an API
server busy without finding anything. Here one task per process polls and puts new events into the subscribers' queues.

Each poll asks for the newest event id of every job with subscribers (one index entry each), and fetches the events of
those that have more than was delivered, and whether the job has ended.

Event ids are not committed in their order, but those of one job are, because its writers are serialised by its row
(`Jobs`). So a job's events are fetched from where its last fetch ended, and none is skipped. Subscribers compare ids,
so that receiving an event twice has no effect.

Race: a reader subscribes before it reads the events that exist, and then reports the last id it has (`begin`), so that
events written in between are in its queue. While the database is unavailable nothing is delivered and nothing is lost.
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

from eyrie_api.contract.status import Event
from eyrie_api.database.engine import Database
from eyrie_api.database.rendering import render
from eyrie_api.database.tables import EventRow, JobRow

log = logging.getLogger(__name__)

_MAX_BATCH = 500
"""Jobs in one statement, and events of one job in one fetch."""

_RETRY_S = 1.0
"""Pause after a database error."""


@dataclass(frozen=True)
class EventBatch:
    """What a subscriber receives. `ended` and `deleted` come after every event that existed then."""

    messages: tuple[tuple[int, str], ...] = ()
    """(id, the event as one message of an event stream)."""

    ended: bool = False
    deleted: bool = False


@dataclass(eq=False)
class _SubscribedJob:
    subscribers: set["Subscriber"] = field(default_factory=set)
    delivered_id: int | None = None
    """Events up to this id have been delivered; None until the first subscriber has begun."""


@dataclass(eq=False)
class Subscriber:
    job_id: str
    job: _SubscribedJob
    batches: asyncio.Queue[EventBatch] = field(default_factory=asyncio.Queue)


def message_of(event: Event) -> str:
    return f"id: {event.id}\nevent: {event.reason}\ndata: {event.model_dump_json()}\n\n"


class EventFanout:
    """The subscribers of one process and the task that polls for them. Belongs to one event loop."""

    def __init__(self, database: Database, poll_s: float) -> None:
        self._database, self._poll_s = database, poll_s
        self._jobs: dict[str, _SubscribedJob] = {}
        self._task: asyncio.Task[None] | None = None
        self._limiter = CapacityLimiter(1)  # a thread of its own: a burst of requests must not delay streams

    @contextmanager
    def subscribe(self, job_id: str) -> Iterator[Subscriber]:
        job = self._jobs.setdefault(job_id, _SubscribedJob())
        subscriber = Subscriber(job_id, job)
        job.subscribers.add(subscriber)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll())
        try:
            yield subscriber
        finally:
            job.subscribers.discard(subscriber)
            if not job.subscribers and self._jobs.get(job_id) is job:
                del self._jobs[job_id]

    async def begin(self, subscriber: Subscriber, after: int) -> None:
        """Start delivery to a subscriber that has every event up to `after`."""
        # A client may send any Last-Event-ID, also one above every id there is: never start beyond the newest event.
        def newest_id() -> int:
            query = select(func.max(EventRow.id)).where(EventRow.job_id == subscriber.job_id)
            with self._database.reading() as session:
                return session.execute(query).scalar() or 0

        newest = await to_thread.run_sync(newest_id, limiter=self._limiter)
        if subscriber.job.delivered_id is None:
            subscriber.job.delivered_id = min(after, newest)

    async def _poll(self) -> None:
        while self._jobs:
            try:
                delivered = {job_id: job.delivered_id for job_id, job in self._jobs.items()
                             if job.delivered_id is not None}
                pending = list(delivered)
                for part in (pending[at:at + _MAX_BATCH] for at in range(0, len(pending), _MAX_BATCH)):
                    wanted = {job_id: delivered[job_id] for job_id in part}
                    self._deliver(await to_thread.run_sync(self._fetch, wanted, limiter=self._limiter))
            except SQLAlchemyError as error:
                log.warning("the database is unavailable (%s): event streams wait", type(error).__name__)
                await asyncio.sleep(_RETRY_S)
            await asyncio.sleep(self._poll_s)

    def _deliver(self, batches: Mapping[str, EventBatch]) -> None:
        for job_id, batch in batches.items():
            job = self._jobs.get(job_id)
            if job is None or job.delivered_id is None:
                continue
            # Race: all subscribers may have left and a new one begun further back while this batch was fetched. Its
            # events are then fetched again, from where the new one began.
            if batch.messages and batch.messages[0][0] > job.delivered_id:
                job.delivered_id = batch.messages[-1][0]
            for subscriber in job.subscribers:
                subscriber.batches.put_nowait(batch)

    def _fetch(self, delivered: Mapping[str, int]) -> dict[str, EventBatch]:
        """The batch of each job after the id delivered last; runs in a thread. A job with nothing to report is left
        out."""
        last = select(func.max(EventRow.id)).where(EventRow.job_id == JobRow.id).scalar_subquery()
        batches: dict[str, EventBatch] = {}
        with self._database.reading() as session:
            current = {job_id: (ended, newest or 0) for job_id, ended, newest in session.execute(
                select(JobRow.id, JobRow.ended, last).where(JobRow.id.in_(list(delivered))))}
            behind = {job_id: last_id for job_id, last_id in delivered.items()
                      if job_id in current and current[job_id][1] > last_id}
            rows = _rows_after(session, behind)
        for job_id in delivered:
            if job_id not in current:
                batches[job_id] = EventBatch(deleted=True)
                continue
            events = rows.get(job_id, ())
            ended = current[job_id][0] and len(events) < _MAX_BATCH  # a full batch: more events may follow
            if events or ended:
                batches[job_id] = EventBatch(tuple((row.id, message_of(render(Event, row))) for row in events), ended)
        return batches


def _rows_after(session: Session, last_ids: Mapping[str, int]) -> dict[str, list[EventRow]]:
    """Events of several jobs in one query, each after an id of its own, and at most `_MAX_BATCH` of each."""
    if not last_ids:
        return {}
    if len(last_ids) == 1:  # the usual case; and a job that is read from its beginning may have very many events
        (job_id, last), = last_ids.items()
        query = select(EventRow).where(EventRow.job_id == job_id, EventRow.id > last)
        return {job_id: list(session.scalars(query.order_by(EventRow.id).limit(_MAX_BATCH)))}
    rank = func.row_number().over(partition_by=EventRow.job_id, order_by=EventRow.id).label("rank")
    ranked = select(EventRow.id, rank).where(
        or_(*(and_(EventRow.job_id == job_id, EventRow.id > last) for job_id, last in last_ids.items()))).subquery()
    query = select(EventRow).join(ranked, ranked.c.id == EventRow.id).where(ranked.c.rank <= _MAX_BATCH)
    rows: dict[str, list[EventRow]] = {}
    for row in session.scalars(query.order_by(EventRow.id)):
        rows.setdefault(row.job_id, []).append(row)
    return rows
