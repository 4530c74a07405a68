"""Load on the control plane: `make bench-control`. Jobs are posted at a fixed rate while event streams are open, on
PostgreSQL and Redis, all of it on this machine.

Each part is a real process: a durable PostgreSQL (fsync, synchronous commit), a Redis, one or two `eyrie serve-api`, a
writer of events, and the client. Requests are sent at their scheduled times whether or not earlier ones have been
answered, and are timed from the scheduled time: a server that stalls for a second is charged with every request that
was due in it (no "coordinated omission", as in closed loops). Each carries an Idempotency-Key, as `eyrie_api.client`
sends it. The writer stores events as `Ingest` does, one in a transaction, and puts its clock into the event before it
writes, so delivery includes the writing transaction.

No worker runs, since it would run the jobs. Processor time is read from /proc for every process of each part, with its
children.

    python -m benchmarks.control_plane [--jobs-per-s 200] [--streams 500] [--seconds 30] [--repeats 3] [--out
    FILE]
"""

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.wire import Pool, Stream
from eyrie_api.clock import utc_now
from eyrie_api.contract.job import JobSpec
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.migrations import upgrade
from eyrie_api.database.tables import EventRow, JobRow
from eyrie_api.planning.resolve import derive
from eyrie_api.processes import free_port
from tests.servers import postgres
from tests.servers.processes import START_S, Session, private_dir
from tests.servers.redis import Redis

JOBS = "/v1alpha1/jobs"
_BODY: dict[str, Any] = {
    "name": "support-bot", "target": {"model": "quickstart"}, "data": {"sources": [{"path": "quickstart"}]},
    "labels": {"team": "search", "env": "bench"},
    "sweep": {"axes": [{"field": "train.learning_rate", "values": [0.001, 0.0003]}]},
    "serve": {"endpoint": "support"},
}
_LIMIT_S = 20.0
"""Timeout for answers and events that are still outstanding."""


@dataclass(frozen=True)
class Load:
    """The offered load."""

    jobs_per_s: float
    streams: int
    events_per_s: float
    seconds: float


@dataclass(frozen=True)
class Spread:
    """Percentiles of a duration in milliseconds."""

    p50: float
    p90: float
    p99: float
    max: float
    count: int

    @classmethod
    def of(cls, seconds: list[float]) -> "Spread":
        """The percentiles of a list of seconds, by the nearest-rank method."""
        ordered = sorted(seconds) or [float("nan")]
        at = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3 for share in (0.5, 0.9, 0.99, 1.0))
        p50, p90, p99, most = (round(value, 2) for value in at)
        return cls(p50, p90, p99, most, len(seconds))


@dataclass(frozen=True)
class Round:
    """One measurement."""

    servers: int
    accepted_per_s: float
    refused: dict[str, int]
    post: Spread
    delivery: Spread
    undelivered: int
    streams_held: int
    connections: int
    cpu_s: dict[str, float] = field(default_factory=dict)
    """By part."""


# The parts.

@dataclass
class Parts:
    """The running processes by name; a part includes its descendants."""

    home: Path
    url: str
    redis_url: str
    pids: dict[str, list[int]]
    ports: list[int] = field(default_factory=list)


@contextmanager
def stores() -> Iterator[Parts]:
    """Start PostgreSQL and Redis, and create the tables."""
    session = Session()
    try:
        home = private_dir()
        cluster = postgres.start(private_dir(), {"shared_buffers": "128MB", "max_connections": "200"})
        redis = Redis(home)
        redis.start()
        assert cluster.server is not None
        url = cluster.url(cluster.create())
        database = Database(url)
        upgrade(database)
        database.close()
        yield Parts(home, url, redis.url, {"postgresql": [cluster.server.pid], "redis": [redis.server.pid]})
    finally:
        session.end()


@contextmanager
def serving(parts: Parts, count: int) -> Iterator[None]:
    """Run `count` API servers, ready to serve."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("EYRIE_")}
    env |= {"EYRIE_HOME": str(parts.home), "EYRIE_DATABASE_URL": parts.url, "EYRIE_BROKER_URL": parts.redis_url}
    started = []
    for number in range(count):
        port = free_port()
        with (parts.home / f"api-{number}.log").open("ab") as log:
            started.append((port, subprocess.Popen(
                [sys.executable, "-m", "eyrie_operator.command", "serve-api", "--port", str(port)], env=env, stderr=log,
                cwd=parts.home)))
    try:
        for port, process in started:
            _await_ready(port, process)
        parts.ports, parts.pids["api"] = [port for port, _ in started], [process.pid for _, process in started]
        yield
    finally:
        for _, process in started:
            process.terminate()
        for _, process in started:
            process.wait(60)


def _await_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_S
    while True:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200:
                return
        except httpx.TransportError:
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit("eyrie serve-api did not start") from None
        time.sleep(0.05)


def cpu_s(pids: list[int]) -> float:
    """Processor seconds of processes and their descendants, including those that have ended and were waited for."""
    parent, spent = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # the process has ended
                continue
            parent[int(entry.name)] = int(fields[1])
            spent[int(entry.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def is_ours(pid: int) -> bool:
        while pid not in pids:
            if pid not in parent:
                return False
            pid = parent[pid]
        return True

    return sum(seconds for pid, seconds in spent.items() if is_ours(pid))


# The writer of events, a process of its own.

def write_events(url: str, ids: list[str], per_s: float, seconds: float) -> None:
    """Record events of these jobs at that rate, each with the time before its transaction."""
    database, dice = Database(url), random.Random(0)
    print("ready", flush=True)
    begun = time.monotonic()
    for number in range(int(per_s * seconds)):
        time.sleep(max(0.0, begun + number / per_s - time.monotonic()))
        sent = time.monotonic()
        with database.writing() as session:  # as `Ingest` records what a stage has written
            job = session.get_one(JobRow, dice.choice(ids), with_for_update=True)
            session.add(EventRow(job_id=job.id, time=utc_now(), type="Normal", reason="StepDone",
                                 message=f"step {number}", stage=None, key="", data={"sent": sent}))
    database.close()


# The client.

class EventStreams:
    """The open streams, and the delay of every event seen on them."""

    def __init__(self) -> None:
        self.delays: list[float] = []
        self.streams: list[Stream] = []

    def saw(self, data: bytes, at: float) -> None:
        if b'"sent":' in data:
            self.delays.append(at - json.loads(data)["data"]["sent"])

    async def open(self, ports: list[int], ids: list[str]) -> None:
        """Open one stream per job, alternating between the servers."""
        loop = asyncio.get_running_loop()
        for port, job_id in zip(itertools.cycle(ports), ids, strict=False):
            _, stream = await loop.create_connection(
                lambda job_id=job_id: Stream(f"{JOBS}/{job_id}/events", self.saw),  # type: ignore[misc]
                "127.0.0.1", port)
            self.streams.append(stream)
            await stream.begun.wait()

    @property
    def held(self) -> int:
        return sum(stream.status == 200 and not stream.ended for stream in self.streams)


async def run_round(parts: Parts, load: Load, ids: list[str], servers: int) -> Round:
    """Open the streams, then post jobs while events are written."""
    loop = asyncio.get_running_loop()
    watching, pools = EventStreams(), [Pool(port) for port in parts.ports]
    await watching.open(parts.ports, ids)
    writer = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.control_plane", "--write-events", parts.url, "--events-per-s",
        str(load.events_per_s), "--seconds", str(load.seconds), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert writer.stdin is not None
    assert writer.stdout is not None
    writer.stdin.write(json.dumps(ids).encode())
    writer.stdin.write_eof()
    await writer.stdout.readline()
    body = json.dumps(_BODY).encode()
    latencies: list[float] = []
    refused: dict[str, int] = {}
    answered: list[float] = []

    async def post(number: int, due: float) -> None:
        try:
            status, _ = await pools[number % len(pools)].post(JOBS, body, f"Idempotency-Key: {uuid.uuid4()}\r\n")
            outcome = str(status)
        except OSError as error:
            outcome = type(error).__name__
        now = loop.time()
        if outcome == "202":
            latencies.append(now - due)
            answered.append(now)
        else:
            refused[outcome] = refused.get(outcome, 0) + 1

    before = {name: cpu_s(pids) for name, pids in parts.pids.items()} | {"client": time.process_time()}
    begun = loop.time()
    posts = []
    for number in range(int(load.jobs_per_s * load.seconds)):
        due = begun + number / load.jobs_per_s
        if (early := due - loop.time()) > 0:
            await asyncio.sleep(early)
        posts.append(asyncio.create_task(post(number, due)))
    if posts:
        await asyncio.wait(posts, timeout=_LIMIT_S)
        refused |= {"unanswered": left} if (left := sum(not one.done() for one in posts)) else {}
    await writer.wait()
    wanted, until = int(load.events_per_s * load.seconds), loop.time() + _LIMIT_S
    while len(watching.delays) < wanted and loop.time() < until:  # noqa: ASYNC110 - no event is known to be the last
        await asyncio.sleep(0.05)
    after = {name: cpu_s(pids) for name, pids in parts.pids.items()} | {"client": time.process_time()}
    seen = Round(
        servers=servers, accepted_per_s=round(len(answered) / max(load.seconds, max(answered, default=0.0) - begun), 1),
        refused=refused, post=Spread.of(latencies), delivery=Spread.of(watching.delays),
        undelivered=wanted - len(watching.delays), streams_held=watching.held,
        connections=sum(pool.opened for pool in pools),
        cpu_s={name: round(after[name] - before[name], 2) for name in before})
    for stream in watching.streams:
        stream.transport.close()
    return seen


def watched_jobs(url: str, count: int) -> list[str]:
    """Create jobs to open streams on."""
    database = Database(url)
    jobs, spec = Jobs(database), JobSpec.model_validate(_BODY)
    ids = [jobs.submit(derive(spec)).id for _ in range(count)]
    database.close()
    return ids


# The report.

def table(load: Load, rounds: list[Round]) -> str:
    """Markdown, as in docs/results/control_plane.md."""
    lines = ["| API processes | accepted/s | POST p50 / p90 / p99 / max ms | event seen p50 / p90 / p99 / max ms | "
             "streams | CPU ms per job: API, PostgreSQL, Redis, client | errors |", "|---|---|---|---|---|---|---|"]
    for one in rounds:
        jobs = max(1, one.post.count)
        costs = ", ".join(f"{one.cpu_s[name] / jobs * 1e3:.1f}" for name in ("api", "postgresql", "redis", "client"))
        wrong = {**one.refused, **({"undelivered": one.undelivered} if one.undelivered else {})}
        lines.append(f"| {one.servers} | {one.accepted_per_s:.0f} | {_words(one.post)} | {_words(one.delivery)} | "
                     f"{one.streams_held} | {costs} | {wrong or 'none'} |")
    return "\n".join(lines)


def _words(spread: Spread) -> str:
    return f"{spread.p50:.0f} / {spread.p90:.0f} / {spread.p99:.0f} / {spread.max:.0f}"


def measure(load: Load, servers: list[int], repeats: int, out: Path) -> None:
    """Run every round, print the table and write the file."""
    place = {"processors": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(),
             "load_average_before": os.getloadavg()[0], "date": time.strftime("%Y-%m-%d", time.gmtime())}
    rounds = []
    with stores() as parts:
        for count in servers:
            for number in range(repeats):
                ids = watched_jobs(parts.url, load.streams)  # new jobs: no stream replays an earlier round
                with serving(parts, count):
                    warm = watched_jobs(parts.url, 1)
                    asyncio.run(run_round(parts, Load(20.0, 1, 1.0, 1.0), warm, count))  # imports, connections
                    rounds.append(asyncio.run(run_round(parts, load, ids, count)))
                print(f"{count} API process(es), round {number + 1}: p99 of POST {rounds[-1].post.p99} ms, of events "
                      f"{rounds[-1].delivery.p99} ms", file=sys.stderr, flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    kept = {"place": place, "load": asdict(load), "rounds": [asdict(one) for one in rounds]}
    out.write_text(json.dumps(kept, indent=1))
    print(f"{load.jobs_per_s:g} jobs/s for {load.seconds:g} s, {load.streams} event streams, {load.events_per_s:g} "
          f"events/s to them; {place['processors']} processors, Python {place['python']}, load average before "
          f"{place['load_average_before']:.1f}, {place['date']}\n\n{table(load, rounds)}\n\n{out}")


def main() -> int:
    """Command line entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control_plane",
                                     description=__doc__.splitlines()[0])
    parser.add_argument("--jobs-per-s", type=float, default=200.0)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--events-per-s", type=float, default=100.0, help="rate of events written to these jobs")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--servers", type=int, nargs="+", default=[1], help="numbers of API processes to measure")
    parser.add_argument("--out", type=Path, default=Path(".eyrie/bench/control.json"))
    parser.add_argument("--write-events", metavar="URL", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write_events:
        write_events(given.write_events, json.load(sys.stdin), given.events_per_s, given.seconds)
        return 0
    load = Load(given.jobs_per_s, given.streams, given.events_per_s, given.seconds)
    measure(load, given.servers, given.repeats, given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
