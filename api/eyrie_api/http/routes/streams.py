"""A running job's events (SSE or JSON), logs, metric series and training curves.

A stream polls its source, because the writer may be another process: all event streams share one poller
(`event_fanout`), each log stream polls its file. A stream ends when the job has ended and everything was sent. Events
resume after `Last-Event-ID`: their ids are those of database rows, so nothing is lost or repeated across reconnects and
restarts. A client that reconnects after the end gets 204, at which an EventSource stops reconnecting.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from anyio import sleep, to_thread
from fastapi import APIRouter, Header, Query, Request, Response
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse

from eyrie_api.contract.figures import TrainingCurves
from eyrie_api.contract.model import Items, Name
from eyrie_api.contract.stages import StageName
from eyrie_api.contract.status import Event, MetricSeries
from eyrie_api.database.rendering import is_over
from eyrie_api.errors import InvalidInput, NotFound
from eyrie_api.figures.training_curves import curves_of
from eyrie_api.http.control import Control, RequestControl
from eyrie_api.http.event_fanout import EventFanout, message_of
from eyrie_api.http.routes.jobs import JOBS

router = APIRouter(tags=["progress"])
_CHUNK = 1 << 16
_BATCH = 500
_EVENT_STREAM = "text/event-stream"
_LAST_ID = 2**31 - 1
"""The largest PostgreSQL INTEGER; a larger value in a query is an error."""

_RETRY_MS = 1000


@router.get(JOBS + "/{job_id}/events", response_model=Items[Event],
            responses={200: {"content": {_EVENT_STREAM: {"schema": {"type": "string"}}}},
                       204: {"description": "the job has ended and all its events were sent"}})
async def events(
    job_id: str, control: RequestControl, request: Request,
    accept: Annotated[str, Header()] = "*/*",
    last_event_id: Annotated[str | None, Header(alias="Last-Event-ID")] = None,
    after: Annotated[int, Query(ge=0, le=2**53, description="like Last-Event-ID")] = 0,
    limit: Annotated[int, Query(ge=1, le=5000, description="for the JSON list")] = 500,
) -> Response:
    """Events as they happen (SSE, resumes by Last-Event-ID), or those so far with Accept: application/json."""
    if last_event_id is not None:
        if not (last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) < 16):
            raise InvalidInput(f"Last-Event-ID {last_event_id!r} is not an event id",
                               "send the id of the last event seen")
        after = max(after, int(last_event_id))
    after = min(after, _LAST_ID)
    job = await to_thread.run_sync(control.jobs.get, job_id)
    if "application/json" in accept and _EVENT_STREAM not in accept:
        listed = await to_thread.run_sync(lambda: control.jobs.events(job_id, after=after, limit=limit))
        return JSONResponse(Items[Event](items=listed).model_dump(mode="json"))
    if is_over(job.status.conditions) and not await _fetch(control, job_id, after):
        return Response(status_code=204)
    return StreamingResponse(_event_lines(control, job_id, after, request), media_type=_EVENT_STREAM,
                             headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})


async def _fetch(control: Control, job_id: str, after: int) -> tuple[Event, ...]:
    return await to_thread.run_sync(lambda: control.jobs.events(job_id, after=after, limit=_BATCH))


async def _event_lines(control: Control, job_id: str, after: int, request: Request) -> AsyncIterator[str]:
    fanout: EventFanout = request.app.state.event_fanout
    yield f"retry: {_RETRY_MS}\n\n"
    # Race: subscribe first, then read what exists. Events written in between are in the subscriber's queue; the ids
    # below drop those that both have returned.
    with fanout.subscribe(job_id) as subscriber:
        try:
            while batch := await _fetch(control, job_id, after):
                after = batch[-1].id
                yield "".join(map(message_of, batch))
        except NotFound:
            yield "event: deleted\ndata: {}\n\n"
            return
        await fanout.begin(subscriber, after)
        while True:
            try:
                received = await asyncio.wait_for(subscriber.batches.get(), control.settings.sse_heartbeat_s)
            except TimeoutError:
                yield ": heartbeat\n\n"
                continue
            new = [(number, text) for number, text in received.messages if number > after]
            if new:
                after = new[-1][0]
                yield "".join(text for _, text in new)
            if received.ended or received.deleted:
                yield f"event: {'end' if received.ended else 'deleted'}\ndata: {{}}\n\n"
                return


@router.get(JOBS + "/{job_id}/metrics")
def metrics(
    job_id: str, control: RequestControl,
    stage: StageName | None = None,
    key: Annotated[str | None, Query(max_length=63)] = None,
    name: Annotated[str | None, Query(max_length=127)] = None,
) -> Items[MetricSeries]:
    """Logged metric series: loss, acceptance per position, theoretical speed-up, ..."""
    return Items[MetricSeries](items=control.jobs.metrics(job_id, stage=stage, key=key, name=name))


@router.get(JOBS + "/{job_id}/curves")
def curves(job_id: str, control: RequestControl) -> TrainingCurves:
    """The curves of its training: every chart with titles, labels and values, as the console draws them and
    `eyrie plots` writes them."""
    return curves_of(control.jobs.metrics(job_id, stage="train"))


@router.get(JOBS + "/{job_id}/logs", response_class=PlainTextResponse)
async def logs(
    job_id: str, control: RequestControl, request: Request,
    stage: Annotated[StageName, Query()],
    key: Annotated[Name | None, Query(description="candidate or checkpoint")] = None,
    follow: Annotated[bool, Query(description="keep streaming until the stage ends")] = False,
) -> Response:
    """The output of a stage program."""
    job = await to_thread.run_sync(control.jobs.get, job_id)
    if not follow and await to_thread.run_sync(control.files.log, job_id, stage, key or "", 0, _CHUNK) is None:
        started = (f"{status.stage} {status.key}".strip() for status in job.status.stages if status.started_at)
        raise NotFound(f"stage {stage} {key or ''} of job {job_id} has no log".replace("  ", " "),
                       f"it has: {', '.join(started) or 'no stage has started yet'}")
    return StreamingResponse(_log_bytes(control, job_id, stage, key or "", request, follow=follow),
                             media_type="text/plain; charset=utf-8", headers={"X-Accel-Buffering": "no"})


async def _log_bytes(control: Control, job_id: str, stage: str, key: str, request: Request, *,
                     follow: bool) -> AsyncIterator[bytes]:
    offset = 0
    while not await request.is_disconnected():
        done = not follow or await to_thread.run_sync(_stage_ended, control, job_id, stage, key)
        while data := await to_thread.run_sync(control.files.log, job_id, stage, key, offset, _CHUNK):
            offset += len(data)
            yield data
        if done:
            return
        await sleep(control.settings.sse_poll_s)


def _stage_ended(control: Control, job_id: str, stage: str, key: str) -> bool:
    try:
        job = control.jobs.get(job_id)
    except NotFound:
        return True
    states = [status.state for status in job.status.stages if (status.stage, status.key) == (stage, key)]
    return is_over(job.status.conditions) or bool(states and states[0] not in ("Pending", "Running"))
