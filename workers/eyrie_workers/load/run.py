"""A load test from its first question to its report.

One thread, one event loop: what a user waits for is a socket, and 256 of them fit (`bench` shows it). Answers are read
in small slices while others arrive, so that many that end together do not delay the next. Every variant is
probed once, then the blocks of the schedule are asked one after the other; connections are opened before a block, so
that its first requests do not pay for them. A user whose request failed waits a moment before the next, lest a server
that refuses at once be asked a thousand times a second.

In an open loop a request's clock starts when it is due, not when it could be sent: a generator that fell behind would
otherwise hide the very delays it is there to see (Gil Tene's "coordinated omission"). The generator's own processor
share stands in the report for the same reason.
"""

import asyncio
import contextlib
import os
import resource
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.load import LoadReport, LoadSpec
from eyrie_workers.load.client import LoadClient, LoadRequest, RawResponse, RequestResult
from eyrie_workers.load.endpoint_url import RequestFailed
from eyrie_workers.load.endpoints import LoadEndpoint, LoadPrompt
from eyrie_workers.load.report_statistics import LevelResults, comparison, crossover, level_report
from eyrie_workers.load.schedule import Block, Level, blocks, levels, num_requests, total_requests
from eyrie_workers.machine.environment import client_environment, cpu_count

__all__ = ["LoadEndpoint", "LoadPrompt", "run_load"]

OnProgress = Callable[[int, int, str], None]
PausePoint = Callable[[], None]
ResultT = TypeVar("ResultT")

_AFTER_FAILURE_S = 0.1
_POLL_S = 0.1
_SATURATED = 0.8  # of a core: above it the event loop's own queue begins to show in the latencies
_CROWDED = 2.0  # two engines with a thread per processor, one of them at work, make a load average of about one
_SPARE_FILES = 64
_MOST_UNREAD = 1024  # answers: beyond it users wait for the reader, and the report says that the generator was busy


def run_load(variants: Sequence[LoadEndpoint], prompts: Sequence[LoadPrompt], spec: LoadSpec, baseline: str = "off",
             on_progress: OnProgress | None = None, pause_point: PausePoint | None = None) -> LoadReport:
    """Ask every variant at every level of `spec` and report.

    baseline      name of the variant the others are compared with; of no meaning when there is one variant only.
    on_progress   called with (requests done, requests in all, what is being asked), warm-up included.
    pause_point   called several times a second; whatever it raises ends the test and is raised here.

    Raises InvalidInput for variants, prompts or a baseline that cannot be; EndpointUnusable when a server does not
    answer the first question. Single failed requests are counted in the report, not raised.
    """
    if len(variants) > 1 and baseline not in [variant.name for variant in variants]:
        raise InvalidInput(
            f"there is no variant {baseline!r} to compare with (variants: {', '.join(a.name for a in variants)})",
            "name the baseline among the variants",
        )
    started = time.perf_counter()
    run = measure(variants, prompts, spec, on_progress, pause_point)
    by_place = {(seen.variant, seen.level): seen for seen in run.seen}
    comparisons = [
        compared for level in levels(spec) for variant in variants if variant.name != baseline and len(variants) > 1
        if (compared := comparison(by_place[variant.name, level], by_place[baseline, level], spec)) is not None]
    return LoadReport(
        model=" / ".join(dict.fromkeys(variant.model for variant in variants)),
        spec=spec,
        variants=run.variants,
        levels=tuple(
            level_report(by_place[variant.name, level], spec) for level in levels(spec) for variant in variants
        ),
        comparisons=tuple(comparisons),
        crossover=crossover(comparisons),
        notes=tuple(run.notes),
        environment=client_environment(),
        seconds=time.perf_counter() - started,
    )


@dataclass
class Run:
    """What a load test saw, before it became figures."""

    variants: dict[str, str]
    seen: list[LevelResults] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def measure(variants: Sequence[LoadEndpoint], prompts: Sequence[LoadPrompt], spec: LoadSpec,
            on_progress: OnProgress | None = None, pause_point: PausePoint | None = None) -> Run:
    """Ask everything. Raises as `run_load`."""
    names = [variant.name for variant in variants]
    if not variants or len(set(names)) < len(names):
        raise InvalidInput(f"a load test needs variants of different names, not [{', '.join(names)}]",
                           "give each server a name of its own")
    if not prompts:
        raise InvalidInput("a load test needs at least one prompt", "give a file with prompts, or quickstart")
    _allow_sockets(max(num_requests(spec, level) if level.mode == "open" else level.users for level in levels(spec)))
    return asyncio.run(_Test(variants, prompts, spec, on_progress, pause_point).run())


class _Test:
    """One load test under way."""

    def __init__(self, variants: Sequence[LoadEndpoint], prompts: Sequence[LoadPrompt], spec: LoadSpec,
                 on_progress: OnProgress | None, pause_point: PausePoint | None) -> None:
        self._askers = {variant.name: LoadClient(variant, spec) for variant in variants}
        self._prompts = prompts
        self._spec = spec
        self._on_progress = on_progress
        self._pause_point = pause_point
        self._done = 0
        self._total = total_requests(prompts, list(self._askers), spec)
        self._words = ""
        self._unread: asyncio.Queue[RawResponse | None] = asyncio.Queue(_MOST_UNREAD)

    async def run(self) -> Run:
        """All of it. Connections are closed however it ends."""
        try:
            for asker in self._askers.values():
                self._say(f"first question to {asker.variant.name}", 0)
                await self._watched(asker.probe(LoadRequest(self._prompts[0], 0, -1)))
            return await self._blocks()
        finally:
            for asker in self._askers.values():
                asker.pool.close()

    async def _blocks(self) -> Run:
        seen: dict[tuple[str, Level], LevelResults] = {}
        for block in blocks(self._prompts, list(self._askers), self._spec):
            new = await self._watched(self._block(block))
            old = seen.get((block.variant, block.level))
            if old is not None:
                new = LevelResults(new.variant, new.level, old.samples + new.samples, old.seconds + new.seconds,
                           old.cpu_s + new.cpu_s)
            seen[block.variant, block.level] = new
        run = Run({name: _described(asker) for name, asker in self._askers.items()}, list(seen.values()))
        run.notes = [note for asker in self._askers.values() for note in asker.notes]
        run.notes += [note for one in run.seen for note in _failures(one)]
        run.notes += [note for one in run.seen for note in _saturation(one)]
        run.notes += _crowd()
        return run

    async def _block(self, block: Block) -> LevelResults:
        asker = self._askers[block.variant]
        self._words = f"{block.variant}, {block.level.words()}"
        users = block.level.users if block.level.mode == "closed" else 1
        await asker.pool.prepare(users)
        await self._read_along(asker, self._closed_loop(asker, block.warmup, min(users, len(block.warmup))))
        began, cpu = time.perf_counter(), time.thread_time()
        if block.level.mode == "closed":
            asking = self._closed_loop(asker, block.questions, users)
        else:
            asking = self._open_loop(asker, block.questions)
        samples, ended = await self._read_along(asker, asking)
        return LevelResults(block.variant, block.level, samples, ended - began, time.thread_time() - cpu)

    async def _closed_loop(self, asker: LoadClient, questions: Sequence[LoadRequest], users: int) -> None:
        """So many users share the questions; whoever has its answer takes the next."""
        left = iter(questions)

        async def user() -> None:
            for question in left:
                raw = await asker.send(question)
                await self._unread.put(raw)
                if isinstance(raw.came, RequestFailed):
                    await asyncio.sleep(_AFTER_FAILURE_S)

        async with asyncio.TaskGroup() as group:
            for _ in range(users):
                group.create_task(user())

    async def _open_loop(self, asker: LoadClient, questions: Sequence[LoadRequest]) -> None:
        """Every question at its time, whatever became of the others."""
        began = time.perf_counter()

        async def one(question: LoadRequest, due_at: float) -> None:
            await self._unread.put(await asker.send(question, due_at))

        async with asyncio.TaskGroup() as group:
            for question in questions:
                due_at = began + (question.due_s or 0.0)
                await asyncio.sleep(max(0.0, due_at - time.perf_counter()))
                group.create_task(one(question, due_at))

    async def _read_along(self, asker: LoadClient, asking: Coroutine[None, None, None]) \
            -> tuple[tuple[RequestResult, ...], float]:
        """Read answers while others are asked for, a slice between two looks at the sockets.

        Returns the samples, and when the last answer ended.
        """
        samples: list[RequestResult] = []
        ended = time.perf_counter()

        async def read_on() -> None:
            nonlocal ended
            while (raw := await self._unread.get()) is not None:
                ended = max(ended, raw.ended_at)
                steps = asker.read(raw)
                try:
                    while True:
                        next(steps)
                        await asyncio.sleep(0)
                except StopIteration as end:
                    samples.append(end.value)
                self._say(self._words)
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            reader = group.create_task(read_on())
            await asking
            await self._unread.put(None)
            await reader
        return tuple(samples), ended

    async def _watched(self, work: Coroutine[None, None, ResultT]) -> ResultT:
        """Do it, asking several times a second whether to go on."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                if self._pause_point is not None:
                    self._pause_point()
                await asyncio.wait({task}, timeout=_POLL_S)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    def _say(self, words: str, more: int = 1) -> None:
        self._done += more
        if self._on_progress is not None:
            self._on_progress(self._done, self._total, words)


def _described(asker: LoadClient) -> str:
    url = asker.origin.url
    return f"{asker.variant.what} ({url})" if asker.variant.what else url


def _failures(seen: LevelResults) -> list[str]:
    """One line per reason, with the first request's words."""
    failed: dict[str, list[RequestResult]] = {}
    for sample in seen.samples:
        if sample.failure is not None:
            failed.setdefault(sample.failure, []).append(sample)
    return [
        f"{seen.variant}, {seen.level.words()}: {len(samples)} of {len(seen.samples)} requests failed ({reason}), the "
        f"first because {samples[0].detail}"
        for reason, samples in sorted(failed.items())
    ]


def _saturation(seen: LevelResults) -> list[str]:
    share = seen.cpu_s / seen.seconds if seen.seconds > 0 else 0.0
    if share <= _SATURATED:
        return []
    return [
        f"{seen.variant}, {seen.level.words()}: the load generator itself used {share:.0%} of a processor core: its "
        "latencies are upper bounds, and the server may be faster than it looks"
    ]


def _crowd() -> list[str]:
    """A warning when this machine, where the servers may run too, had much else to do."""
    load, processors = os.getloadavg()[0], cpu_count()
    if load <= _CROWDED * processors:
        return []
    return [f"the machine of the load generator was crowded (load average {load:.1f} on {processors} processors): if "
            "the servers run on it too, speeds are too low and ratios noisier than their intervals say"]


def _allow_sockets(wanted: int) -> None:
    """Let this process hold so many connections. Raises InvalidInput when the system does not allow it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = wanted + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < need:
        if hard != resource.RLIM_INFINITY and hard < need:
            raise InvalidInput(f"{wanted} connections at once need {need} open files, and this machine allows {hard}",
                               f"raise the limit (ulimit -n {need}), or ask for lower levels")
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
