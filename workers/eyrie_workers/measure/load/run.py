"""Runs a load test, from the first request to the report.

One thread with one event loop: users wait on sockets, and one core serves 256 of them. Responses are parsed in small
slices while others arrive, so that many responses that end together do not delay the next. Every endpoint is probed
once, then the blocks of the schedule run one after the other. Connections are opened before a block, so that its first
requests do not include the handshake. After a failed request a user waits before the next one, so that a server that
rejects at once does not receive a thousand requests per second.

Servers that the caller has started (`OwnServers`) forget what they remember, such as prefixes and the texts of n-gram
look-up, before each block: a repeated prompt would otherwise be free. One that has been started again answers the
warm-up first. A block in which a server ended is measured again in all variants, once per level: requests that are lost
with a server say nothing about the drafter. Of other servers nothing is asked but answers.

In an open loop the clock of a request starts when it is due, not when it was sent: otherwise a generator that has
fallen behind would hide the delays it is supposed to measure (Gil Tene's "coordinated omission"). The report contains
the generator's own CPU share for the same reason.
"""

import asyncio
import contextlib
import os
import resource
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from eyrie_api.contract.load import LoadReport, LoadSpec
from eyrie_api.errors import InvalidInput
from eyrie_workers.data.suites import Prompt
from eyrie_workers.machine import client_environment, cpu_count
from eyrie_workers.measure.load.client import LoadClient, LoadEndpoint, LoadRequest, RawResponse, RequestResult
from eyrie_workers.measure.load.http_client import RequestFailed
from eyrie_workers.measure.load.report_statistics import LevelResults, comparison, crossover, level_report
from eyrie_workers.measure.load.schedule import RequestBlock, RequestLevel, blocks, levels, num_requests, total_requests

OnProgress = Callable[[int, int, str], None]
PausePoint = Callable[[], None]
IsClear = Callable[[Sequence[LevelResults]], bool]
ResultT = TypeVar("ResultT")


class OwnServers(Protocol):
    """The servers of the variants, started by the caller, which may flush and restart them."""

    def flushed(self, name: str) -> str:
        """The URL of a variant's server, up to and including /v1, which has forgotten all requests so far. A server
        that has ended is started again. Raises EngineFailed when that is not possible."""
        ...

    def has_ended(self, name: str) -> bool:
        """Whether the server of a variant has ended since it was flushed. Raises EngineFailed when too often."""
        ...


_AFTER_FAILURE_S = 0.1
_POLL_S = 0.1
_SATURATED = 0.8  # of a core: above it the delay of the event loop becomes visible in the latencies
# Two engines with a thread per CPU, one of them busy, cause a load average of about one per CPU.
_BUSY_LOAD_PER_CPU = 2.0
_SPARE_FILES = 64
# Responses; beyond it users wait for the parser, and the report mentions the generator's CPU share.
_MAX_UNPARSED = 1024


def run_load(variants: Sequence[LoadEndpoint], prompts: Sequence[Prompt], spec: LoadSpec, baseline: str = "off",
             on_progress: OnProgress | None = None, pause_point: PausePoint | None = None,
             is_clear: IsClear | None = None, own: OwnServers | None = None) -> LoadReport:
    """Run the load test of `spec` on all variants and report.

    baseline      name of the variant that the others are compared with; unused with one variant.
    on_progress   called with completed requests, all requests, label of the block; warm-up included.
    pause_point   called several times per second; what it raises ends the test and is raised here.
    is_clear      called after each repeat of a level with its results so far: True ends the level, before its last
                  repeat.
    own           the servers, where the caller has started them.

    Raises InvalidInput for invalid variants, prompts or baseline; EndpointUnusable when a server fails the first
    request. Single failed requests are counted in the report, not raised.
    """
    if len(variants) > 1 and baseline not in [variant.name for variant in variants]:
        raise InvalidInput(
            f"there is no variant {baseline!r} to compare with (variants: {', '.join(a.name for a in variants)})",
            "choose the baseline from the variants",
        )
    started = time.perf_counter()
    run = measure(variants, prompts, spec, on_progress, pause_point, is_clear, own)
    models = " / ".join(dict.fromkeys(variant.model for variant in variants))
    return load_report(models, run, spec, baseline, time.perf_counter() - started)


def run_load_in_turn(names: Sequence[str], ready: Callable[[str], LoadEndpoint | None], prompts: Sequence[Prompt],
                     spec: LoadSpec, baseline: str = "off", on_progress: OnProgress | None = None,
                     pause_point: PausePoint | None = None, own: OwnServers | None = None) -> LoadReport:
    """As `run_load` for servers that cannot run at the same time (`measure_in_turn`)."""
    started = time.perf_counter()
    model, run = measure_in_turn(names, ready, prompts, spec, baseline, on_progress, pause_point, own)
    return load_report(model, run, spec, baseline, time.perf_counter() - started)


def measure_in_turn(names: Sequence[str], ready: Callable[[str], LoadEndpoint | None], prompts: Sequence[Prompt],
                    spec: LoadSpec, baseline: str, on_progress: OnProgress | None = None,
                    pause_point: PausePoint | None = None,
                    own: OwnServers | None = None) -> tuple[str, "LoadTestResults"]:
    """Send all requests, one variant after the other. Returns the name of the model too.

    The baseline is measured before and after the others, and both together are compared with them: a drift of the
    machine's speed then affects both sides.

    ready   starts the server of a variant, which may stop the one before, and returns its endpoint; None: the variant
            is left out
    """
    order = [baseline, *(name for name in names if name != baseline)]
    order += [baseline] if len(order) > 1 else []
    total = total_requests(len(order), spec)
    parts, model = [], ""
    for number, name in enumerate(order):
        endpoint = ready(name)
        if endpoint is None:
            continue
        model = endpoint.model
        done_before = number * (total // len(order))

        def progress(done: int, _total: int, label: str, before: int = done_before) -> None:
            if on_progress is not None:
                on_progress(before + done, total, label)

        parts.append(measure([endpoint], prompts, spec, progress, pause_point, own=own))
    # The load tests of single variants as one; parts of the same variant are added.
    by_level: dict[tuple[str, RequestLevel], LevelResults] = {}
    for new in (level for part in parts for level in part.levels):
        old = by_level.get((new.variant, new.level))
        by_level[new.variant, new.level] = replace(new if old is None else old + new, block_s={})
    return model, LoadTestResults(
        {name: what for part in parts for name, what in part.variants.items()}, list(by_level.values()),
        list(dict.fromkeys(note for part in parts for note in part.notes)))


def load_report(model: str, run: "LoadTestResults", spec: LoadSpec, baseline: str, seconds: float) -> LoadReport:
    """The report of measured requests. All variants have the levels of `spec`."""
    by_variant_and_level = {(results.variant, results.level): results for results in run.levels}
    names = list(dict.fromkeys(results.variant for results in run.levels))
    comparisons = [
        compared for level in levels(spec) for name in names if name != baseline and len(names) > 1
        if (compared := comparison(by_variant_and_level[name, level], by_variant_and_level[baseline, level],
                                   spec)) is not None]
    return LoadReport(
        model=model, spec=spec, variants=run.variants,
        levels=tuple(level_report(by_variant_and_level[name, level], spec) for level in levels(spec) for name in names),
        comparisons=tuple(comparisons), crossover=crossover(comparisons), notes=tuple(run.notes),
        environment=client_environment(), seconds=seconds)


@dataclass
class LoadTestResults:
    variants: dict[str, str]
    levels: list[LevelResults] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def measure(variants: Sequence[LoadEndpoint], prompts: Sequence[Prompt], spec: LoadSpec,
            on_progress: OnProgress | None = None, pause_point: PausePoint | None = None,
            is_clear: IsClear | None = None, own: OwnServers | None = None) -> LoadTestResults:
    """Send all requests. Raises like `run_load`."""
    names = [variant.name for variant in variants]
    if not variants or len(set(names)) < len(names):
        raise InvalidInput(f"a load test needs variants of different names, not [{', '.join(names)}]",
                           "give each server its own name")
    if not prompts:
        raise InvalidInput("a load test needs at least one prompt", "give a file with prompts, or quickstart")
    # Every connection is an open file: raise the limit where it is lower.
    wanted = max(num_requests(spec, level) if level.mode == "open" else level.users for level in levels(spec))
    need, (soft, hard) = wanted + _SPARE_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < need:
        if hard != resource.RLIM_INFINITY and hard < need:
            raise InvalidInput(f"{wanted} connections at once need {need} open files, and this machine allows {hard}",
                               f"raise the limit (ulimit -n {need}), or use lower levels")
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
    return asyncio.run(_LoadTest(variants, prompts, spec, on_progress, pause_point, is_clear, own).run())


class _LoadTest:
    def __init__(self, variants: Sequence[LoadEndpoint], prompts: Sequence[Prompt], spec: LoadSpec,
                 on_progress: OnProgress | None, pause_point: PausePoint | None, is_clear: IsClear | None,
                 own: OwnServers | None) -> None:
        self._clients = {variant.name: LoadClient(variant, spec) for variant in variants}
        self._prompts = prompts
        self._spec = spec
        self._on_progress = on_progress
        self._pause_point = pause_point
        self._is_clear = is_clear
        self._own = own
        self._warmup: Sequence[LoadRequest] = ()
        self._done = 0
        self._total = total_requests(len(self._clients), spec)
        self._label = ""
        self._unparsed: asyncio.Queue[RawResponse | None] = asyncio.Queue(_MAX_UNPARSED)

    async def run(self) -> LoadTestResults:
        """Run the test. Connections are closed in every case."""
        try:
            for client in self._clients.values():
                self._report_progress(f"probing {client.variant.name}", 0)
                await self._polling(client.probe(LoadRequest(self._prompts[0], 0, -1)))
            return await self._blocks()
        finally:
            for client in self._clients.values():
                await client.pool.close()

    async def _blocks(self) -> LoadTestResults:
        by_level: dict[tuple[str, RequestLevel], LevelResults] = {}
        over, repeated = set[RequestLevel](), set[RequestLevel]()
        for repeat in blocks(self._prompts, list(self._clients), self._spec):
            asked = repeat[0].level
            if asked in over:
                continue
            measured = [await self._measured(block) for block in repeat]
            ended = self._servers_ended(measured)
            if ended and asked not in repeated:
                repeated.add(asked)
                measured = [await self._measured(block) for block in repeat]
                ended = self._servers_ended(measured)
            for new in measured:
                old = by_level.get((new.variant, asked))
                by_level[new.variant, asked] = new if old is None else old + new
            # A server that ended again may end in every block: its failed requests are the result.
            if ended or (self._is_clear is not None and self._is_clear([by_level[name, asked]
                                                                        for name in self._clients])):
                over.add(asked)
        descriptions = {name: f"{client.variant.what} ({client.origin.url})" if client.variant.what
                        else client.origin.url for name, client in self._clients.items()}
        run = LoadTestResults(descriptions, list(by_level.values()))
        run.notes = [note for client in self._clients.values() for note in client.notes]
        for level in run.levels:
            failed: dict[str, list[RequestResult]] = {}
            for result in level.results:
                if result.failure is not None:
                    failed.setdefault(result.failure, []).append(result)
            run.notes += [f"{level.variant}, {level.level.label()}: {len(results)} of {len(level.results)} requests "
                          f"failed ({reason}), the first because {results[0].detail}"
                          for reason, results in sorted(failed.items())]
            share = level.cpu_s / level.seconds if level.seconds > 0 else 0.0
            if share > _SATURATED:
                run.notes.append(f"{level.variant}, {level.level.label()}: the load generator itself used {share:.0%} "
                                 "of a CPU core: its latencies are upper bounds, and the server may be faster than "
                                 "reported")
        load, processors = os.getloadavg()[0], cpu_count()
        if load > _BUSY_LOAD_PER_CPU * processors:  # the servers may run on this machine too
            run.notes.append(f"the machine of the load generator was busy (load average {load:.1f} on {processors} "
                             "CPUs): if the servers run on it too, speeds are too low and ratios noisier than their "
                             "intervals")
        return run

    def _servers_ended(self, measured: Sequence[LevelResults]) -> bool:
        """Whether servers of our own ended in blocks; those without a failed request lost none."""
        # A sum: all of them are asked, and started again.
        return self._own is not None and sum(
            self._own.has_ended(results.variant) for results in measured
            if any(result.failure is not None for result in results.results)) > 0

    async def _measured(self, block: RequestBlock) -> LevelResults:
        """Warm up and flush, where that is to be done, and measure a block."""
        client, warmup = self._clients[block.variant], block.warmup
        self._warmup = warmup or self._warmup
        self._label = f"{block.variant}, {block.level.label()}"
        while True:
            # Waits for a server that starts again; no request runs meanwhile.
            url = client.variant.url if self._own is None else self._own.flushed(block.variant)
            if url != client.variant.url:
                await client.move_to(url)
                warmup = tuple(self._warmup)
            if not warmup:
                return await self._polling(self._block(client, block))
            users = block.level.users if block.level.mode == "closed" else 1
            await self._polling(self._parse_while(client, self._closed_loop(client, warmup, min(users, len(warmup)))))
            warmup = ()

    async def _block(self, client: LoadClient, block: RequestBlock) -> LevelResults:
        users = block.level.users
        started, cpu_started = time.perf_counter(), time.thread_time()
        if block.level.mode == "closed":
            sending = self._closed_loop(client, block.requests, users)
        else:
            sending = self._open_loop(client, block.requests)
        results, ended = await self._parse_while(client, sending)
        seconds = ended - started
        return LevelResults(block.variant, block.level, results, seconds, time.thread_time() - cpu_started,
                            {block.repeat: seconds} if block.level.mode == "closed" else {})

    async def _closed_loop(self, client: LoadClient, requests: Sequence[LoadRequest], users: int) -> None:
        """`users` concurrent users; each takes the next request when its previous one is complete."""
        # Shared by all users without a lock: they run in one event loop, and `next` does not await.
        left = iter(requests)

        async def user() -> None:
            for request in left:
                raw = await client.send(request)
                await self._unparsed.put(raw)
                if isinstance(raw.outcome, RequestFailed):
                    await asyncio.sleep(_AFTER_FAILURE_S)

        async with asyncio.TaskGroup() as group:
            for _ in range(users):
                group.create_task(user())

    async def _open_loop(self, client: LoadClient, requests: Sequence[LoadRequest]) -> None:
        """Send every request at its due time, independently of the others."""
        started = time.perf_counter()

        async def send_at(request: LoadRequest, due_at: float) -> None:
            await self._unparsed.put(await client.send(request, due_at))

        async with asyncio.TaskGroup() as group:
            for request in requests:
                due_at = started + (request.due_s or 0.0)
                await asyncio.sleep(max(0.0, due_at - time.perf_counter()))
                group.create_task(send_at(request, due_at))

    async def _parse_while(self, client: LoadClient, sending: Coroutine[None, None, None]) \
            -> tuple[tuple[RequestResult, ...], float]:
        """Parse responses in slices while others arrive, so that parsing does not delay the clock readings of arrivals.

        Returns the results and the end time of the last response.
        """
        results: list[RequestResult] = []
        ended = time.perf_counter()

        async def parse_results() -> None:
            nonlocal ended
            while (raw := await self._unparsed.get()) is not None:
                ended = max(ended, raw.ended_at)
                steps = client.read(raw)
                try:
                    while True:
                        next(steps)
                        await asyncio.sleep(0)
                except StopIteration as end:
                    results.append(end.value)
                self._report_progress(self._label)
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            reader = group.create_task(parse_results())
            await sending
            await self._unparsed.put(None)
            await reader
        return tuple(results), ended

    async def _polling(self, work: Coroutine[None, None, ResultT]) -> ResultT:
        """Await `work`, calling the pause point several times per second."""
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

    def _report_progress(self, label: str, more: int = 1) -> None:
        self._done += more
        if self._on_progress is not None:
            self._on_progress(self._done, self._total, label)
