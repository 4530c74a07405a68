"""Watching one job to its end: progress bars on a terminal, lines in a pipe, JSON lines with --json.

Events arrive as server-sent events with ids, so that the stream resumes after the last one after a restart of the
server. The state of the stages comes from the job, polled about once a second. While the server is unavailable the
watch waits for it; the job is not affected. Ctrl-C ends the watch, not the job.
"""

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from eyrie_api.cli.chat import curl_line
from eyrie_api.cli.tables import (
    STATE_STYLE,
    count,
    decision_line,
    entry_line,
    event_text,
    in_order,
    progress_text,
    stage_seconds,
)
from eyrie_api.cli.verbs import Screen
from eyrie_api.client import Client
from eyrie_api.clock import utc_now
from eyrie_api.contract.status import Endpoint, Event, Job, StageStatus
from eyrie_api.errors import EyrieError, Permanent
from eyrie_api.quantities import duration

FINAL = frozenset({"Succeeded", "Failed", "Cancelled"})
_POLL_S, _LINES_POLL_S = 0.7, 2.0
"""Between two requests for the job: on a screen, and in a pipe, whose events arrive by themselves."""

_RETRY_S = 1.0
_LAST_EVENTS_S = 30.0
"""How long the last events are waited for: the stream ends behind them, but a busy server may send them long after the
final status was read."""

_SHOWN_EVENTS = 6
_BAR_WIDTH = 14
# In a pipe, at most one progress line per stage in this time.
_LINE_EVERY_S = 15.0


class JobFailed(Permanent):
    """The watched job ended in failure."""


class JobCancelled(EyrieError):
    """The watched job was cancelled."""

    http_status = 409
    exit_code = 130


@dataclass
class _EventReader:
    """Reads events in a thread; resumes after the last id when the stream breaks."""

    source: Client
    job_id: str
    inbox: "queue.SimpleQueue[Event]" = field(default_factory=queue.SimpleQueue)
    last_id: int = 0
    closed: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    """The job has ended, and every event is in the inbox."""

    def start(self) -> None:
        threading.Thread(target=self._read, name="events", daemon=True).start()

    def _read(self) -> None:
        while not self.closed.is_set():
            self.ended.clear()  # a stream that a server ended as it stopped is followed by another
            try:
                for event in self.source.events(self.job_id, self.last_id):
                    if event.id > self.last_id:
                        self.last_id = event.id
                        self.inbox.put(event)
                    if self.closed.is_set():
                        return
                self.ended.set()
            except EyrieError:
                pass  # the main thread reports it; here the stream is opened again
            except RuntimeError:
                # Race: the watch has ended and closed the client, while the stream was being opened again.
                if not self.closed.is_set():
                    raise
            self.closed.wait(_RETRY_S)

    def take(self) -> list[Event]:
        """Events received since the last call."""
        taken = []
        while not self.inbox.empty():
            taken.append(self.inbox.get())
        return taken


def watch(source: Client, job_id: str, screen: Screen) -> Job:
    """Watch a job until it ends, and return it. Raises NotFound for an unknown id."""
    job = source.job(job_id)
    feed = _EventReader(source, job_id)
    feed.start()
    try:
        if screen.live:
            return _watch_live(source, job, feed, screen)
        return _watch_lines(source, job, feed, screen)
    finally:
        feed.closed.set()


def verdict(job: Job) -> None:
    """Raise JobFailed or JobCancelled when the job did not succeed."""
    if job.status.phase == "Cancelled":
        raise JobCancelled(f"job {job.id} was cancelled", f"eyrie retry {job.id} resumes after its last finished stage")
    if job.status.phase != "Failed":
        return
    failed = next((stage for stage in job.status.stages if stage.state == "Failed"), None)
    again = f"if the job need not change, then eyrie retry {job.id}, which continues after the finished stages"
    if failed is not None:
        raise JobFailed(f"job {job.id} failed in {failed.stage}: {failed.reason}: {failed.message}",
                        f"{failed.hint or f'eyrie logs {job.id} --stage {failed.stage}'}; {again}")
    message = next((c.message for c in job.status.conditions if c.type == "Failed" and c.status == "True"), "no reason")
    raise JobFailed(f"job {job.id} failed: {message}", f"eyrie events {job.id}; {again}")


def closing_words(job: Job, endpoint: Endpoint | None = None) -> str:
    """Summary of a finished job, in a few lines.

    endpoint   the one that the job names; None: it is gone
    """
    took = ""
    if job.status.started_at and job.status.finished_at:
        took = f" in {duration((job.status.finished_at - job.status.started_at).total_seconds())}"
    lines = [f"Job {job.id} {job.status.phase.lower()}{took}."]
    if job.status.best is not None:
        lines.append(f"Best: {entry_line(job.status.best)}")
    if job.status.decision is not None:
        lines.append(f"Decision: {decision_line(job.status.decision)}")
    if job.status.endpoint is not None:
        lines.append(f"Endpoint: {job.status.endpoint}. Try it: eyrie chat --endpoint {job.status.endpoint}")
    if job.status.endpoint is not None and endpoint is not None:
        active = endpoint.revision(endpoint.active_revision)
        if endpoint.url is None or active is None or endpoint.desired == "off":
            lines.append(f"It does not serve yet: eyrie endpoints show {endpoint.name}")
        else:
            what = "without a drafter" if active.checkpoint is None else f"with the drafter {active.checkpoint}"
            lines += [f"It serves model {endpoint.model} {what} at {endpoint.url}",
                      curl_line(endpoint.url, endpoint.model)]
    return "\n".join(lines)


def _fresh(source: Client, job: Job) -> tuple[Job, str | None]:
    """The current job, or the last one received and the error."""
    try:
        return source.job(job.id), None
    except EyrieError as error:
        if error.http_status == 404:
            raise
        return job, error.message


def _watch_live(source: Client, job: Job, feed: _EventReader, screen: Screen) -> Job:
    recent: list[Event] = []
    away: str | None = None
    with Live(console=screen.out, auto_refresh=False, transient=False) as live:
        while True:
            recent = (recent + feed.take())[-_SHOWN_EVENTS:]
            live.update(watch_view(job, recent, utc_now(), away=away), refresh=True)
            if job.status.phase in FINAL:
                return job
            time.sleep(_POLL_S)
            job, away = _fresh(source, job)


def _watch_lines(source: Client, job: Job, feed: _EventReader, screen: Screen) -> Job:
    printed: dict[tuple[str, str], str] = {}
    printed_at, was_away = time.monotonic(), False
    while True:
        for event in feed.take():
            screen.line(event, event_text(event))
        if job.status.phase in FINAL:
            # Race: the last events may arrive after the final status.
            feed.ended.wait(_LAST_EVENTS_S)
            for event in feed.take():
                screen.line(event, event_text(event))
            return job
        if not screen.as_json and time.monotonic() - printed_at >= _LINE_EVERY_S:
            printed_at = time.monotonic()
            for stage in job.status.stages:
                words = progress_text(stage.progress, stage.state) if stage.state == "Running" else ""
                if words and printed.get((stage.stage, stage.key)) != words:
                    printed[stage.stage, stage.key] = words
                    screen.out.print(f"{stage.stage}{'/' + stage.key if stage.key else ''}: {words}", soft_wrap=True)
        time.sleep(_LINES_POLL_S)
        job, away = _fresh(source, job)
        if away is not None and not was_away:
            screen.note(f"the server is unavailable ({away}); waiting for it")
        was_away = away is not None


def watch_view(job: Job, recent: Sequence[Event], now: datetime, *, away: str | None = None) -> RenderableType:
    """The view of a running job: a bar per stage, then the latest events."""
    name = f" ({job.spec.name})" if job.spec.name else ""
    began = job.status.started_at or job.created_at
    spent = ((job.status.finished_at or now) - began).total_seconds()
    head = Text.assemble(("job ", "bold"), f"{job.id}{name}  ", (job.status.phase, STATE_STYLE[job.status.phase]),
                         f"  {duration(spent)}", overflow="ellipsis", no_wrap=True)
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(width=_BAR_WIDTH)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()  # rich narrows this column first; its texts end in an ellipsis
    for stage in in_order(job.status.stages):
        label = f"{stage.stage} {stage.key}".rstrip()
        if stage.state == "Succeeded":
            words = f"{count(stage.progress.done)} {stage.progress.unit}" if stage.progress else "done"
        elif stage.state == "Failed" or stage.reason:  # a reason without a failure: its pod has no node
            words = f"{stage.reason}: {stage.message}"
        else:
            words = progress_text(stage.progress, stage.state) or stage.state.lower()
        table.add_row(Text(label, STATE_STYLE[stage.state]), _bar(stage), duration(stage_seconds(stage, now)),
                      Text(words, overflow="ellipsis", no_wrap=True))
    parts: list[RenderableType] = [head, table]
    lines = [event_text(event) for event in recent]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    parts += lines
    if away is not None:
        parts.append(Text(f"the server is unavailable ({away}); waiting for it", "yellow"))
    return Group(*parts)


def _bar(stage: StageStatus) -> ProgressBar:
    progress = stage.progress
    total = progress.total if progress else None
    done = progress.done if progress else 0.0
    if stage.state == "Succeeded":
        total = done = 1.0
    return ProgressBar(total=total or 1.0, completed=done if total else 0.0, width=_BAR_WIDTH, complete_style="cyan",
                       finished_style="green", pulse_style="cyan", pulse=stage.state == "Running" and not total)
