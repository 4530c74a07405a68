"""The load generator's capacity: `python -m tests.benchmarks.load_generator`, or `make bench-load`.

Two questions, answered against a responder process on this machine, whose own sending times are logged:

- Paced: 256 streams at a set time per token. Are the latencies the generator reports those that the responder made?
  Printed: what was sent, what was seen, the delay between handing a piece to the socket there and seeing it here, and
  the share of a core the generator used.
- Ceiling: a responder as fast as it can. What does a piece, a stream cost the generator in processor time? One core
  divided by that is what it can take, whatever the other process manages.

A bench, not a test: nothing here decides anything. On two cores generator and responder get one each, if nobody else
works on the machine.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from eyrie_api.v1alpha1.load import LoadSpec
from eyrie_workers.load.client import RequestResult
from eyrie_workers.load.completion_stream import FloatArray
from eyrie_workers.load.endpoint_url import parse_url
from eyrie_workers.load.endpoints import LoadEndpoint, LoadPrompt
from eyrie_workers.load.http_client import ConnectionPool
from eyrie_workers.load.report_statistics import LevelResults
from eyrie_workers.load.run import measure
from eyrie_workers.machine.environment import client_environment

_START_TIMEOUT_S = 30.0


@contextmanager
def responder(directory: Path, *options: str) -> Iterator[str]:
    """A responder as a process of its own; yields its URL."""
    ready = directory / "ready.json"
    ready.unlink(missing_ok=True)
    process = subprocess.Popen([sys.executable, "-m", "tests.servers.stub_openai_server", "--ready-file", str(ready),
                                *options], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the responder did not start (exit code {process.poll()})")
            time.sleep(0.02)
        yield json.loads(ready.read_text())["url"]
    finally:
        process.terminate()
        process.wait()


def ask(url: str, streams: int, requests: int, tokens: int) -> LevelResults:
    """One closed loop."""
    prompts = [LoadPrompt(f"p{i}", "bench", ({"role": "user", "content": f"question {i}"},)) for i in range(64)]
    spec = LoadSpec(concurrencies=(streams,), requests=requests, max_new_tokens=tokens, warmup_requests=streams)
    return measure([LoadEndpoint("responder", url, "responder")], prompts, spec).seen[0]


def paced(streams: int, ttft_s: float, token_s: float, bundle: int, tokens: int) -> None:
    """Compare what was seen with what was sent, stream by stream."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "sends.jsonl"
        with responder(Path(folder), "--ttft", str(ttft_s), "--token", str(token_s), "--bundle", str(bundle),
                       "--log", str(log)) as url:
            seen = ask(url, streams, 2 * streams, tokens)
        sent = {line["id"]: line for line in map(json.loads, log.read_text().splitlines())}
    good = [sample for sample in seen.samples if sample.failure is None]
    print(f"\npaced: {streams} streams, {token_s * 1e3:g} ms/token in bundles of {bundle}, first token after "
          f"{ttft_s * 1e3:g} ms, {tokens} tokens; {len(good)} of {len(seen.samples)} answers whole, "
          f"{sum(sample.tokens for sample in good)} tokens")
    logs = [sent[sample.answer_id] for sample in good]
    began = [(sample.first_at or 0.0) - (sample.ttft_s or 0.0) for sample in good]
    _row("first token, sent", np.array([one["sent_at"][0] - at for one, at in zip(logs, began, strict=True)]))
    _row("first token, seen", np.array([sample.ttft_s for sample in good]))
    _row("between tokens, sent", np.concatenate([np.diff(one["sent_at"][:-1]) / bundle for one in logs]))
    _row("between tokens, seen", np.concatenate([np.diff(arrivals(sample, bundle)) / bundle for sample in good]))
    _row("delay, sent to seen", np.concatenate([
        arrivals(sample, bundle) - np.array(one["sent_at"][:-1]) for sample, one in zip(good, logs, strict=True)]))
    _cost(seen, bundle)


def arrivals(sample: RequestResult, bundle: int) -> FloatArray:
    """When each bundle of an answer was seen, on the clock of perf_counter."""
    assert sample.first_at is not None
    at = sample.first_at + np.concatenate([np.zeros(1), np.cumsum(sample.gaps_s)])
    return at[np.minimum(np.arange(bundle - 1, sample.tokens + bundle - 1, bundle), sample.tokens - 1)]


def ceiling(streams: int, bundle: int, tokens: int, requests: int) -> None:
    """As fast as the responder can."""
    with tempfile.TemporaryDirectory() as folder, responder(Path(folder), "--bundle", str(bundle)) as url:
        seen = ask(url, streams, requests, tokens)
        idle = asyncio.run(_connections_cost(url, streams))
    print(f"\nceiling: {streams} streams of {tokens} tokens in bundles of {bundle}, no pace")
    _cost(seen, bundle)
    print(f"  opening a connection costs {idle * 1e6:.0f} us")


async def _connections_cost(url: str, num: int) -> float:
    """Processor seconds per connection opened."""
    pool = ConnectionPool(parse_url(url), {})
    before = time.process_time()
    await pool.prepare(num)
    cost = (time.process_time() - before) / num
    pool.close()
    return cost


def _cost(seen: LevelResults, bundle: int) -> None:
    good = [sample for sample in seen.samples if sample.failure is None]
    tokens = sum(sample.tokens for sample in good)
    pieces = sum(-(-sample.tokens // bundle) + 1 for sample in good)
    print(f"  generator: {seen.cpu_s / seen.seconds:.0%} of a core for {pieces / seen.seconds:,.0f} events/s and "
          f"{tokens / seen.seconds:,.0f} tokens/s in {seen.seconds:.1f} s")
    print(f"  per event {seen.cpu_s / pieces * 1e6:.1f} us, per stream {seen.cpu_s / len(good) * 1e3:.2f} ms: one core "
          f"takes {pieces / seen.cpu_s:,.0f} events/s or {len(good) / seen.cpu_s:,.0f} such streams/s")


def _row(name: str, seconds: FloatArray) -> None:
    p50, p90, p99 = np.quantile(seconds, (0.5, 0.9, 0.99)) * 1e3
    print(f"  {name:22} mean {seconds.mean() * 1e3:8.2f}  p50 {p50:8.2f}  p90 {p90:8.2f}  p99 {p99:8.2f}  "
          f"max {seconds.max() * 1e3:8.2f} ms")


def main(argv: list[str] | None = None) -> int:
    """The program; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.load_generator",
                                     description="What the load generator can take on this machine.")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--token-ms", type=float, default=20.0, help="time per token of the paced part")
    given = parser.parse_args(argv)
    place = client_environment()
    print(f"{place.hardware}, {place.cpu_count} processors, Python {place.python}")
    for bundle in (3, 1):
        paced(given.streams, 0.2, given.token_ms / 1e3, bundle, given.tokens)
    for bundle in (3, 1):
        ceiling(given.streams, bundle, given.tokens, 8 * given.streams)
    return 0


if __name__ == "__main__":
    sys.exit(main())
