"""Hours of mixed traffic and jobs on one control plane, and what grew meanwhile: `make campaign-soak`.

A control plane (`eyrie up`) is a process with an endpoint that serves the quickstart target through its gateway.
Clients, all at once: chats (whole, streamed, cut off in the middle, invalid), REST and console pages, event streams
that are opened and left, and jobs whose stages do no work (`tests.pipelines.rehearsal`), some cancelled. All but the
latest KEPT jobs are deleted, and rows with a time to live live TTL_S, so that the database can be flat.

Every few seconds the processes are sampled (`process_tree`), the database and the home. At the end `flatness` judges
each series by THRESHOLDS, and the 99th percentiles of REST reads and first tokens. The database counts by pages in
use: SQLite keeps the pages of deleted rows for new ones, its file never shrinks without VACUUM. Tables that keep what
happened for ever by design (NEVER_DELETED) are left out and their rows reported.

A run that ended is a zombie until the plane starts its next process, so zombies are judged as a series too.

Further rules: no status of 500 or more and no broken connection; a job that nobody cancelled succeeds, and one ends;
nothing but the plane, its gateway and its engine is left when the last job has ended, and what these then hold
(AT_REST) is no more than at their busiest in the warm-up, with the threshold; nothing is left when the plane has
stopped. A run of less than JUDGED_S, such as CI's of a minute, has these alone: it shows what every request leaves
behind, some hundred times, not what leaks slowly.

With `--heap` the plane runs on the C library's allocator alone, and the bytes that are in use there are a series too:
what is kept grows there, what is free but not given back does not.

    python -m benchmarks.campaigns.soak [--seed 1] [--seconds 7200] [--heap] [--out FILE]
"""

import contextlib
import os
import random
import sqlite3
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from benchmarks.campaigns.chaos import rehearsed
from benchmarks.campaigns.flatness import (
    MIN_WINDOWS,
    WARM_UP,
    WORSE_BY,
    WORSE_BY_S,
    is_above,
    judge_growth,
    judge_latency,
)
from benchmarks.campaigns.live_servers import Plane, scratch
from benchmarks.campaigns.process_tree import sample_tree
from benchmarks.campaigns.report import Campaign, options
from eyrie_api.contract.serving import ServeSpec
from eyrie_operator.embedded.processes import endpoint_dir, list_engines, read_port
from eyrie_operator.embedded.routing import ROUTE_FILE
from eyrie_pipelines.processes import identify, wait_until
from tests.pipelines.conftest import spec_of

ENDPOINT = "steady"
KEPT = 6
"""Ended jobs that are not deleted."""

TTL_S = 20.0
END_S = 300.0
"""Within it a job ends, and what it leaves; with other work at a higher priority 120 s were not enough."""

REST_S = 60.0
"""Within it what requests took is given back; idle threads of a pool end after ten seconds."""

JUDGED_S = 600.0
"""Growth and percentiles are judged from here on: of less, most is a warm-up, and a third is a few seconds."""

NEVER_DELETED = ("audit", "history")
THRESHOLDS: dict[str, tuple[float, float]] = {
    "memory MiB": (0.10, 16.0), "heap in use MiB": (0.02, 1.0), "heap free MiB": (0.5, 32.0),
    "descriptors": (0.10, 8.0), "threads": (0.10, 4.0), "processes": (0.0, 2.0),
    "zombies": (0.0, 2.0), "database pages in use": (0.10, 64.0), "write-ahead log KiB": (0.10, 4096.0),
    "home KiB": (0.10, 8192.0)}
"""Growth over the judged time that counts as such: a share of the first value, and at least so much."""

AT_REST = ("descriptors", "threads", "processes", "zombies")
"""Series that a short run judges too. In a minute memory and the database are still filling."""

_BODY = spec_of(serve=ServeSpec(enabled=False)).model_dump(mode="json")
_BAD_BODIES: tuple[dict[str, Any], ...] = (
    {}, {"messages": "none"}, {"messages": []}, {"messages": [{"role": "user", "content": "x"}], "max_tokens": -1},
    {"messages": [{"role": "user", "content": "x"}], "temperature": "hot"})


class Soak:
    """One plane, its clients, and what was sampled."""

    def __init__(self, campaign: Campaign, home: Path) -> None:
        self.campaign, self.home = campaign, home
        self.plane = Plane(home, retention_interval_s=2.0, outbox_ttl_s=TTL_S, idempotency_ttl_s=TTL_S)
        self.began = 0.0
        self.answers: Counter[str] = Counter()
        self.series: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.latencies: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.open: str | None = None
        self.cancelled: set[str] = set()
        self.ended: list[str] = []
        self.jobs: Counter[str] = Counter()
        self.tables: list[str] = []
        self.rows: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self._over = threading.Event()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the plane, and wait until the endpoint serves."""
        # No promotion of a job reaches this endpoint: jobs name none.
        self.plane.add_endpoint(ENDPOINT, "quickstart", port=0, max_concurrency=2, record_prompts=100)
        if (code := self.plane.start()) is not None:
            raise SystemExit(f"the control plane did not start ({code}): {self.plane.log.read_text()[-2000:]}")
        directory = endpoint_dir(self.home, ENDPOINT)
        if not wait_until((directory / ROUTE_FILE).exists, END_S):
            raise SystemExit(f"the endpoint does not serve: {self.plane.log.read_text()[-2000:]}")
        self.gateway = f"http://127.0.0.1:{read_port(directory)}"
        self.began = time.monotonic()

    def run(self, every_s: float) -> None:
        """Send requests and take samples until the campaign's time is over; then the last job ends."""
        parts: tuple[Callable[[httpx.Client, random.Random], None], ...] = (
            self._chat, self._chat, self._read, self._listen, self._run_jobs)
        threads = [threading.Thread(target=self._repeat, args=(part, number)) for number, part in enumerate(parts)]
        for thread in threads:
            thread.start()
        said = 0.0
        while not self.campaign.is_over:
            self._sample()
            if time.monotonic() - said >= 15.0:
                said = time.monotonic()
                self.campaign.print_progress(self.answers.total(), f"requests, {self.jobs.total()} jobs ended")
            time.sleep(every_s)
        self._over.set()
        for thread in threads:
            thread.join(END_S + 60.0)

    def _repeat(self, part: Callable[[httpx.Client, random.Random], None], number: int) -> None:
        """One client: again and again with a connection of its own, until the time is over."""
        rng = random.Random(self.campaign.seed * 100 + number)
        with httpx.Client(timeout=60.0, trust_env=False) as http:
            while not self._over.is_set():
                try:
                    part(http, rng)
                except httpx.HTTPError as error:
                    self._find("no connection breaks", part=part.__name__, error=repr(error))
                self._over.wait(rng.uniform(0.02, 0.3))

    def _find(self, rule: str, **facts: object) -> None:
        with self._lock:
            self.campaign.add_finding(rule, **facts)

    def _count(self, kind: str, answer: httpx.Response, wanted: Sequence[int] = (200,)) -> None:
        with self._lock:
            self.answers[f"{kind}: {answer.status_code}"] += 1
        if answer.status_code not in wanted:
            self._find("each request has its status", kind=kind, url=str(answer.request.url),
                       status=answer.status_code, wanted=wanted)

    def _chat(self, http: httpx.Client, rng: random.Random) -> None:
        kind = rng.choice(("whole", "streamed", "streamed", "cut off", "invalid"))
        url = f"{self.gateway}/v1/chat/completions"
        if kind == "invalid":
            self._count("chat, invalid", http.post(url, json={"model": ENDPOINT, **rng.choice(_BAD_BODIES)}),
                        (400, 422))
            return
        text = f"Question {rng.randrange(10**6)}: what is {rng.randrange(99)} and {rng.randrange(99)}?"
        body = {"model": ENDPOINT, "messages": [{"role": "user", "content": text}],
                "max_tokens": rng.randrange(4, 33), "stream": kind != "whole"}
        if kind == "whole":
            self._count("chat, whole", http.post(url, json=body))
            return
        if kind == "cut off":
            body |= {"max_tokens": 200}
        began, last = time.monotonic(), ""
        with http.stream("POST", url, json=body) as answer:
            self._count(f"chat, {kind}", answer)
            for line in answer.iter_lines():
                if line.startswith("data:") and not last:
                    self._note("first token", began)
                last = line or last
                if kind == "cut off" and rng.random() < 0.3:
                    return
        if kind == "streamed" and last != "data: [DONE]":
            self._find("a stream is complete", last=last[:300])

    def _read(self, http: httpx.Client, rng: random.Random) -> None:
        paths = ["/v1alpha1/jobs", "/v1alpha1/endpoints", f"/v1alpha1/endpoints/{ENDPOINT}",
                 f"/v1alpha1/endpoints/{ENDPOINT}/history", "/v1alpha1/leaderboard", "/v1alpha1/audit",
                 "/v1alpha1/storage", "/", "/metrics", "/readyz", f"/console/endpoints/{ENDPOINT}", "/console/new"]
        job_id = rng.choice(self.ended[-KEPT:] or [self.open])
        if job_id is not None:
            paths += [f"/v1alpha1/jobs/{job_id}{part}" for part in ("", "/metrics", "/artifacts")]
            paths += [f"/console/jobs/{job_id}"]
        path = rng.choice(paths)
        began = time.monotonic()
        answer = http.get(self._url(path), headers={"Accept": "text/html" if "console" in path else "*/*"})
        self._note("REST read", began)
        # Race: the job may have been deleted since it was chosen.
        self._count("console" if "console" in path or path == "/" else "REST", answer,
                    (200, 404) if job_id is not None and job_id in path else (200,))

    def _listen(self, http: httpx.Client, rng: random.Random) -> None:
        job_id, until = self.open, time.monotonic() + rng.uniform(0.0, 2.0)
        if job_id is None:
            return
        with contextlib.suppress(httpx.ReadTimeout), \
                http.stream("GET", self._url(f"/v1alpha1/jobs/{job_id}/events"), timeout=httpx.Timeout(60.0, read=2.0),
                            headers={"Accept": "text/event-stream"}) as answer:
            self._count("event stream", answer, (200, 404))
            for _line in answer.iter_lines():
                if time.monotonic() > until or self._over.is_set():
                    return

    def _run_jobs(self, http: httpx.Client, rng: random.Random) -> None:
        answer = http.post(self._url("/v1alpha1/jobs"), json=_BODY)
        self._count("job, submitted", answer, (202,))
        if answer.status_code != 202:
            return
        self.open = job_id = str(answer.json()["id"])
        if rng.random() < 0.4:
            self._over.wait(rng.uniform(0.0, 3.0))
            answer = http.post(self._url(f"/v1alpha1/jobs/{job_id}/cancel"))
            self._count("job, cancelled", answer, (202, 409))
            if answer.status_code == 202:
                self.cancelled.add(job_id)

        def status() -> dict[str, Any]:
            return dict(http.get(self._url(f"/v1alpha1/jobs/{job_id}")).json()["status"])

        wait_until(lambda: status()["finished_at"] is not None, END_S)
        seen = status()
        self.jobs[seen["phase"]] += 1
        if seen["phase"] not in (("Succeeded", "Cancelled") if job_id in self.cancelled else ("Succeeded",)):
            log = self.home / "jobs" / job_id / "run/pipeline.log"
            self._find("a job that nobody cancelled succeeds", job=job_id, phase=seen["phase"],
                       conditions=[one for one in seen["conditions"] if one["status"] != "True"],
                       log=log.read_text()[-1500:] if log.exists() else "none")
        self.ended.append(job_id)
        while len(self.ended) > KEPT:
            self._count("job, deleted", http.delete(self._url(f"/v1alpha1/jobs/{self.ended.pop(0)}")), (204,))

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.plane.port}{path}"

    def _note(self, what: str, began: float) -> None:
        with self._lock:
            now = time.monotonic()
            self.latencies[what].append((now - self.began, now - began))

    def _sample(self) -> None:
        now = time.monotonic() - self.began
        for name, value in (self._held() | self._database_size() | {"home KiB": _size(self.home) / 1024}).items():
            self.series[name].append((now, value))

    def _held(self) -> dict[str, float]:
        """What the three programs hold, and how many processes there are."""
        values: dict[str, float] = {}
        processes = sample_tree(self.plane.pid)
        for process in processes:
            if process.role in ("plane", "gateway", "engine"):
                values |= {f"{process.role}: memory MiB": process.memory_mib,
                           f"{process.role}: descriptors": process.descriptors,
                           f"{process.role}: threads": process.threads}
        if self.plane.heap is not None and self.plane.heap.exists():
            used, free = (int(part) / 2**20 for part in self.plane.heap.read_text().split())
            values |= {"plane: heap in use MiB": used, "plane: heap free MiB": free}
        zombies = sum(process.role == "zombie" for process in processes)
        return values | {"processes": len(processes) - zombies, "zombies": zombies}

    def _database_size(self) -> dict[str, float]:
        path = self.home / "eyrie.db"
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30.0)) as database:
            def number(statement: str, *values: str) -> int:
                return int(database.execute(statement, values).fetchone()[0] or 0)

            self.tables = self.tables or [name for name, in database.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")]
            rows = {name: number(f'SELECT count(*) FROM "{name}"') for name in self.tables}
            self.rows = (self.rows[0] or rows, rows)
            used = number("PRAGMA page_count") - number("PRAGMA freelist_count")
            kept = sum(number("SELECT count(*) FROM dbstat WHERE name IN "
                              "(SELECT name FROM sqlite_master WHERE tbl_name = ?)", name) for name in NEVER_DELETED)
        log = path.with_name("eyrie.db-wal")
        return {"database pages in use": used - kept,
                "write-ahead log KiB": log.stat().st_size / 1024 if log.exists() else 0.0}

    def check_rest(self) -> None:
        """Once no job runs: the plane, its gateway and its engine are all there is, and hold no more than before."""
        def others() -> list[str]:
            return [f"{one.role} {one.pid}" for one in sample_tree(self.plane.pid)
                    if one.role not in ("plane", "gateway", "engine", "zombie")]

        if not wait_until(lambda: not others(), END_S):
            self._find("nothing is left of jobs that have ended", processes=others())
        early_s = WARM_UP * self.campaign.seconds
        early = {name: [value for at, value in points if at <= early_s] for name, points in self.series.items()
                 if _kind(name) in AT_REST}

        def kept() -> dict[str, tuple[float, float]]:
            held = self._held()
            return {name: (max(values), held[name]) for name, values in early.items()
                    if is_above(values, held[name], *THRESHOLDS[_kind(name)])}

        if not wait_until(lambda: not kept(), REST_S):
            self._find("what requests took is given back", at_most_before_and_now=kept())
        if not self.jobs:  # the rules about jobs would not have been applied
            self._find("a job ends", submitted=self.answers["job, submitted: 202"])

    def stop(self) -> None:
        """Stop the plane: with it everything ends."""
        pids = [one.pid for one in sample_tree(self.plane.pid)]
        code = self.plane.terminate()
        left = [pid for pid in pids if identify(pid) is not None]
        if code not in (0, -15) or left or any(list_engines(endpoint_dir(self.home, ENDPOINT))):
            self._find("the plane stops with all of its processes", code=code, left=left)

    def judge(self, window_s: float) -> dict[str, Any]:
        """Figures of all series; findings for those that grew. None of a short run."""
        judged: dict[str, Any] = {}
        if self.campaign.seconds < JUDGED_S:
            return judged
        for name, points in sorted(self.series.items()):
            share, least = THRESHOLDS[_kind(name)]
            times, values = zip(*points, strict=True)
            growth = judge_growth(times, values, share=share, least=least)
            judged[name] = "too few samples" if growth is None else _rounded(asdict(growth))
            if growth is not None and growth.is_finding:
                self.campaign.add_finding("flat after the warm-up", series=name, **judged[name])
        for name, points in sorted(self.latencies.items()):
            times, took = zip(*points, strict=True)
            worse = judge_latency(times, took, window_s, self.campaign.seed)
            judged[name] = "too few requests" if worse is None else _rounded(asdict(worse)) | {"requests": len(times)}
            if worse is not None and worse.is_finding:
                self.campaign.add_finding("the 99th percentile is steady", series=name, **judged[name])
        return judged


def _kind(name: str) -> str:
    return name.rpartition(": ")[2]


def _rounded(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in facts.items()}


def _size(directory: Path) -> int:
    """Bytes of all files; those that are deleted meanwhile are left out."""
    total = 0
    for folder, _folders, files in os.walk(directory):
        for name in files:
            with contextlib.suppress(OSError):
                total += (Path(folder) / name).lstat().st_size
    return total


def main() -> int:
    """Run the campaign."""
    parser = options("soak", "Mixed traffic and jobs for hours: what grows, what becomes slow.", 7200.0)
    parser.add_argument("--heap", action="store_true", help="sample the plane's heap, on the C library's allocator")
    wanted = parser.parse_args()
    every_s, window_s = min(10.0, max(1.0, wanted.seconds / 120)), min(60.0, max(3.0, wanted.seconds / 60))
    with scratch("soak") as path, rehearsed(path):
        (path / "home").mkdir()
        campaign = Campaign("soak", wanted.seed, wanted.seconds, wanted.out)
        soak = Soak(campaign, path / "home")
        if wanted.heap:
            soak.plane.heap = path / "heap"
        try:
            soak.start()
            campaign.began = soak.began
            soak.run(every_s)
            soak.check_rest()
            soak.stop()
        finally:
            soak.plane.close()
        judged = soak.judge(window_s)
    before, after = soak.rows
    return campaign.finish({
        "requests": dict(sorted(soak.answers.items())), "jobs": dict(soak.jobs),
        "judged": judged or f"at rest alone: shorter than {JUDGED_S:.0f} s",
        "rows, first and last": {name: [before.get(name, 0), after[name]] for name in sorted(after)},
        "rules": {"warm-up": WARM_UP, "growth (share, at least)": THRESHOLDS, "never deleted": NEVER_DELETED,
                  "at rest": AT_REST, "p99 worse by (factor, seconds)": [WORSE_BY, WORSE_BY_S],
                  "sampled every s": every_s, "latency windows s": window_s,
                  "windows in a third, at least": MIN_WINDOWS}})


if __name__ == "__main__":
    sys.exit(main())
