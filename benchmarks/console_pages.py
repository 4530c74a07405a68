"""The console's pages at the server, with many jobs in the database: `make bench-console`.

    python -m benchmarks.console_pages [--jobs 10000] [--endpoints 50] [--open 200] --out FILE

The control plane's API as a process, SQLite in a directory of its own; jobs and endpoints are rows that nothing runs.
An endpoint has as many windows as are kept; every fifth serves without a drafter.

    pages     one request at a time of home and of a job's page
    paint     first contentful paint of both in headless Chromium, where `make test-browser` has brought one
    curves    100 runs of 400 points of one series in one job, as many as training records: the server's answer, and in
              Chromium redrawing them all with another smoothing: until the canvas's lines are given out
              (`draw`), and until the frame after it
    streams   one request of the REST API every 20 ms, at its scheduled time, in rounds without and with so many open
              pages, in turn: half of them home, half the page of a job that gets five events a second. The pages are
              read by another process at the lowest priority: browsers are on other machines

A benchmark, not a test.
"""

import argparse
import importlib.util
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from multiprocessing import Process
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
from sqlalchemy import insert

from benchmarks.campaigns.live_servers import api_server
from benchmarks.control_plane import write_events
from eyrie_api.clock import utc_now
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.database.endpoint_history import KEPT_WINDOWS
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.migrations import upgrade
from eyrie_api.database.tables import HistoryRow, MetricRow
from eyrie_api.planning.resolve import derive
from eyrie_api.settings import Settings
from tests.api.samples import job_spec

_REQUESTS = 50
_ROUNDS, _ROUND_S, _EVERY_S = 12, 30.0, 0.02
_RESAMPLED = 2000

FloatArray = npt.NDArray[np.float64]

_CURVES, _CURVE_POINTS = 100, 400
_REDRAWS = {"redraw": "0", "redraw_smoothed": "0.9"}
_REDRAW = """
async (weight) => {
  const taken = { draw: [], frame: [] };
  smoothing.value = weight;
  for (let number = 0; number < 11; number++) {
    const began = performance.now();
    draw();
    taken.draw.push(performance.now() - began);
    await new Promise((painted) => requestAnimationFrame(() => setTimeout(painted)));
    taken.frame.push(performance.now() - began);
  }
  return taken;
}
"""

_READER = """
import asyncio, sys
import httpx

async def read(client, url):
    async with client.stream("GET", url) as answer:
        answer.raise_for_status()
        async for _ in answer.aiter_bytes():
            pass

async def main(urls):
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(trust_env=False, timeout=None, limits=limits) as client:
        opened = [asyncio.create_task(read(client, url)) for url in urls]
        await asyncio.sleep(2.0)
        print("open", flush=True)
        await asyncio.gather(*opened)

asyncio.run(main(sys.argv[1:]))
"""


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless Chromium, or None where `make test-browser` has brought none."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None or importlib.util.find_spec("playwright") is None:
        yield None
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


def painted(urls: Mapping[str, str]) -> dict[str, float] | None:
    """Median milliseconds from navigation to first contentful paint, each time in a browser context of its own; None
    without a browser."""
    taken: dict[str, list[float]] = {name: [] for name in urls}
    with chromium() as browser:
        if browser is None:
            return None
        for _ in range(7):
            for name, url in urls.items():
                context = browser.new_context()
                page = context.new_page()
                page.goto(url)
                paint = "performance.getEntriesByName('first-contentful-paint')"
                while not (at_ms := page.evaluate(f"{paint}.map((one) => one.startTime)")):
                    page.wait_for_timeout(20)
                taken[name].append(at_ms[0])
                context.close()
    return {name: round(median(found), 1) for name, found in taken.items()}


def add_endpoints(database: Database, count: int) -> None:
    """Endpoints that serve, each with the windows of the last hours."""
    endpoints, now = Endpoints(database), utc_now()
    for number in range(count):
        name, revision = f"endpoint-{number:03d}", 1
        endpoints.create(name, TargetSpec(model="quickstart"), EndpointServeSpec(endpoint=name), "quickstart")
        if number % 5:
            revision = endpoints.propose(name, job_id=None, checkpoint="base-step-9", tree=DraftTreeShape(),
                                         drafter_dir=f"/d/{number}", reason="faster", tau=3.0).number
        endpoints.activate(name, revision, f"http://127.0.0.1:{9000 + number}/v1")
        noise = random.Random(number)
        counted = [{"requests": float(noise.randint(1, 600)), "seconds": 60.0} for _ in range(KEPT_WINDOWS)]
        if revision > 1:
            counted = [one | {"tau": noise.gauss(2.9, 0.1), "rounds": 900.0, "proven_tau": 3.0, "drift_below": 2.55,
                              "rollback_below": 1.5} for one in counted]
        rows = [{"endpoint": name, "time": now - timedelta(minutes=KEPT_WINDOWS - place), "kind": "window",
                 "revision": revision, "reason": "Watched", "message": "", "actor": "watch", "figures": figures,
                 "data": {}} for place, figures in enumerate(counted)]
        with database.writing() as session:
            session.execute(insert(HistoryRow), rows)


def with_curves(jobs: Jobs) -> str:
    """The id of a job with the metrics of `curves`."""
    job_id = jobs.submit(derive(job_spec(name="curves"))).id
    now, steps = utc_now(), range(10, 10 * _CURVE_POINTS + 1, 10)
    for run in range(_CURVES):
        noise = random.Random(run)
        points = [{"job_id": job_id, "stage": "train", "key": f"run-{run:03d}", "name": "loss", "step": step,
                   "time": now, "value": run / 200 + 4.0 / (1 + step / 5000) + noise.gauss(1.0, 0.1)}
                  for step in steps]
        with jobs.database.writing() as session:
            session.execute(insert(MetricRow), points)
    return job_id


def redrawn(address: str, job_id: str) -> dict[str, object]:
    """Seconds of the answer with the points and its size, and milliseconds of redrawing all runs, where there is a
    browser."""
    began = time.perf_counter()
    answer = httpx.get(f"{address}/v1alpha1/jobs/{job_id}/curves", trust_env=False, timeout=120.0)
    answer.raise_for_status()
    found: dict[str, object] = {"answer_s": round(time.perf_counter() - began, 2), "bytes": len(answer.content),
                                "points": sum(len(one["steps"]) for chart in answer.json()["charts"]
                                            for one in chart["curves"])}
    with chromium() as browser:
        if browser is None:
            return found
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(f"{address}/console/jobs/{job_id}")
        page.locator("#curves-charts canvas").wait_for(timeout=120_000)
        for name, setting in _REDRAWS.items():
            taken = page.evaluate(_REDRAW, setting)
            found[name] = {part: {"median_ms": round(median(values), 1), "most_ms": round(max(values), 1)}
                           for part, values in taken.items()}
    return found


@contextmanager
def open_pages(urls: Sequence[str]) -> Iterator[None]:
    """Follow these streams in another process."""
    process = subprocess.Popen(["nice", "-n", "19", sys.executable, "-c", _READER, *urls], stdout=subprocess.PIPE,
                               text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n", "the pages' streams were refused"
        yield
        assert process.poll() is None, "a stream ended"
    finally:
        process.kill()
        process.wait()


def requested(address: str, job_id: str, seconds: float) -> list[float]:
    """Milliseconds of a job's document and of the list of jobs in turn, from each request's scheduled time."""
    paths = (f"{address}/v1alpha1/jobs/{job_id}", f"{address}/v1alpha1/jobs?limit=20")
    taken = []
    with httpx.Client(trust_env=False, timeout=60.0) as client:
        began = time.perf_counter()
        for number in range(int(seconds / _EVERY_S)):
            due = began + number * _EVERY_S
            time.sleep(max(0.0, due - time.perf_counter()))
            client.get(paths[number % 2]).raise_for_status()
            taken.append(1e3 * (time.perf_counter() - due))
    return taken


def with_open_pages(address: str, url: str, job_id: str, count: int) -> dict[str, object]:
    """Rounds without and with open pages, in turn: the p99 of each, and the ratio of the p99 of all requests with them
    to that of all without, with its interval from resampled pairs of rounds (percentile bootstrap, 95 %)."""
    urls = [f"{address}/console/live", f"{address}/console/jobs/{job_id}/live"]
    taken: dict[bool, list[list[float]]] = {False: [], True: []}
    for number in range(_ROUNDS):
        for opened in (False, True) if number % 2 == 0 else (True, False):
            writer = Process(target=write_events, args=(url, [job_id], 5.0, _ROUND_S + 10.0))
            writer.start()
            with open_pages([urls[i % 2] for i in range(count)]) if opened else nullcontext():
                requested(address, job_id, 2.0)
                taken[opened].append(requested(address, job_id, _ROUND_S))
            writer.kill()
            writer.join()
    without, with_pages = np.array(taken[False]), np.array(taken[True])
    rng = np.random.default_rng(0)
    drawn = [rng.integers(_ROUNDS, size=_ROUNDS) for _ in range(_RESAMPLED)]
    least, most = np.percentile([_p99(with_pages[rows]) / _p99(without[rows]) for rows in drawn], (2.5, 97.5))
    return {"open": count, "requests": without.size,
            "p99_ms_without": [round(_p99(one), 2) for one in without],
            "p99_ms_with": [round(_p99(one), 2) for one in with_pages],
            "median_ms": [round(float(np.median(one)), 2) for one in (without, with_pages)],
            "p99_ms": [round(_p99(one), 2) for one in (without, with_pages)],
            "ratio": round(_p99(with_pages) / _p99(without), 3),
            "ratio_95": [round(float(least), 3), round(float(most), 3)]}


def _p99(values: FloatArray) -> float:
    return float(np.percentile(values, 99))


def timed(url: str) -> dict[str, float]:
    """Milliseconds of requests of one page after a few to warm up."""
    with httpx.Client(trust_env=False, timeout=60.0, headers={"Accept": "text/html"}) as client:
        seconds = []
        for number in range(_REQUESTS + 5):
            began = time.perf_counter()
            answer = client.get(url)
            answer.raise_for_status()
            if number >= 5:
                seconds.append(time.perf_counter() - began)
    seconds.sort()
    return {"median_ms": round(1e3 * median(seconds), 1), "p98_ms": round(1e3 * seconds[-1 - _REQUESTS // 50], 1),
            "most_ms": round(1e3 * seconds[-1], 1), "bytes": len(answer.content)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description="The console's pages with many jobs.")
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--endpoints", type=int, default=50)
    parser.add_argument("--open", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        database = Database(Settings(home=home).resolved_database_url)
        upgrade(database)
        jobs = Jobs(database)
        last = [jobs.submit(derive(job_spec(name=f"job-{number}"))) for number in range(options.jobs)][-1]
        add_endpoints(database, options.endpoints)
        drawn_id = with_curves(jobs)
        database.close()
        with api_server(home) as server:
            address = f"http://127.0.0.1:{server.port}"
            found = {"home": timed(address + "/"), "job": timed(f"{address}/console/jobs/{last.id}")}
            paint = painted({"home": address + "/", "job": f"{address}/console/jobs/{last.id}"})
            curves = redrawn(address, drawn_id)
            streams = with_open_pages(address, Settings(home=home).resolved_database_url, last.id, options.open)
    report = {"jobs": options.jobs, "endpoints": options.endpoints, "requests": _REQUESTS, "pages": found,
              "paint_ms": paint, "curves": curves, "streams": streams, "cores": os.cpu_count(),
              "python": platform.python_version()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
