"""How long the console's pages take at the server, with many jobs in the database.

    python -m tests.benchmarks.console_pages [--jobs 10000] --out .eyrie/bench/console.json

The control plane's API as a process, SQLite in a directory of its own, one request at a time over HTTP; jobs are rows
that nothing runs. A benchmark, not a test.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import httpx

from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.migrations import upgrade
from eyrie_api.settings import Settings
from tests.api.samples import job_spec
from tests.campaigns.live_servers import api_server

_REQUESTS = 50


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
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        database = Database(Settings(home=home).resolved_database_url)
        upgrade(database)
        jobs = Jobs(database)
        last = [jobs.submit(job_spec(name=f"job-{number}")) for number in range(options.jobs)][-1]
        database.close()
        with api_server(home) as server:
            address = f"http://127.0.0.1:{server.port}"
            found = {"home": timed(address + "/"), "job": timed(f"{address}/console/jobs/{last.id}")}
    report = {"jobs": options.jobs, "requests": _REQUESTS, "pages": found, "cores": os.cpu_count(),
              "python": platform.python_version()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
