"""The load generator's capacity: `python -m benchmarks.load_generator`, or `make bench-load`.

Two measurements against a stub server process on this machine, which logs its own sending times:

- Paced: 256 streams with a fixed time per token. Printed: the latencies that were sent and those that were measured,
  the delay between writing a chunk to the socket and receiving it, and the share of a core the generator used.
- Ceiling: a stub server that sends as fast as it can. Printed: the generator's CPU time per event and per stream. One
  core divided by that is its capacity, whatever the server process achieves.

A benchmark without a verdict. On two otherwise idle cores generator and server have one each.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from eyrie_api.contract.load import LoadSpec
from eyrie_workers.data.suites import Prompt
from eyrie_workers.machine import client_environment
from eyrie_workers.measure.load.client import LoadEndpoint, RequestResult
from eyrie_workers.measure.load.completion_stream import FloatArray
from eyrie_workers.measure.load.report_statistics import LevelResults
from eyrie_workers.measure.load.run import measure

_START_TIMEOUT_S = 30.0


@contextmanager
def stub_server(directory: Path, *options: str) -> Iterator[str]:
    """A stub server in its own process; yields its URL."""
    ready = directory / "ready.json"
    ready.unlink(missing_ok=True)
    process = subprocess.Popen([sys.executable, "-m", "tests.servers.stub_openai_server", "--ready-file", str(ready),
                                *options], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the stub server did not start (exit code {process.poll()})")
            time.sleep(0.02)
        yield json.loads(ready.read_text())["url"]
    finally:
        process.terminate()
        process.wait()


def run_closed_loop(url: str, streams: int, requests: int, tokens: int) -> LevelResults:
    """One closed loop."""
    prompts = [Prompt(f"p{i}", "bench", ({"role": "user", "content": f"question {i}"},)) for i in range(64)]
    spec = LoadSpec(concurrencies=(streams,), requests=requests, max_new_tokens=tokens, warmup_requests=streams)
    return measure([LoadEndpoint("responder", url, "responder")], prompts, spec).levels[0]


def paced(streams: int, ttft_s: float, token_s: float, bundle: int, tokens: int) -> None:
    """Compare measured with sent times, stream by stream."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "sends.jsonl"
        with stub_server(Path(folder), "--ttft", str(ttft_s), "--token", str(token_s), "--bundle", str(bundle),
                       "--log", str(log)) as url:
            level = run_closed_loop(url, streams, 2 * streams, tokens)
        sent = {line["id"]: line for line in map(json.loads, log.read_text().splitlines())}
    completed = [result for result in level.results if result.failure is None]
    print(f"\npaced: {streams} streams, {token_s * 1e3:g} ms/token in bundles of {bundle}, first token after "
          f"{ttft_s * 1e3:g} ms, {tokens} tokens; {len(completed)} of {len(level.results)} responses complete, "
          f"{sum(result.tokens for result in completed)} tokens")
    logs = [sent[result.completion_id] for result in completed]
    began = [(result.first_at or 0.0) - (result.ttft_s or 0.0) for result in completed]
    _row("first token, sent", np.array([one["sent_at"][0] - at for one, at in zip(logs, began, strict=True)]))
    _row("first token, measured", np.array([result.ttft_s for result in completed]))
    _row("between tokens, sent", np.concatenate([np.diff(one["sent_at"][:-1]) / bundle for one in logs]))
    _row("between tokens, measured", np.concatenate([
        np.diff(arrivals(result, bundle)) / bundle for result in completed]))
    _row("delay, sent to received", np.concatenate([
        arrivals(result, bundle) - np.array(one["sent_at"][:-1]) for result, one in zip(completed, logs, strict=True)]))
    _cost(level, bundle)


def arrivals(result: RequestResult, bundle: int) -> FloatArray:
    """When each bundle of a response arrived, on the clock of perf_counter."""
    assert result.first_at is not None
    at = result.first_at + np.concatenate([np.zeros(1), np.cumsum(result.gaps_s)])
    return at[np.minimum(np.arange(bundle - 1, result.tokens + bundle - 1, bundle), result.tokens - 1)]


def ceiling(streams: int, bundle: int, tokens: int, requests: int) -> None:
    """Without pacing."""
    with tempfile.TemporaryDirectory() as folder, stub_server(Path(folder), "--bundle", str(bundle)) as url:
        level = run_closed_loop(url, streams, requests, tokens)
    print(f"\nceiling: {streams} streams of {tokens} tokens in bundles of {bundle}, no pacing")
    _cost(level, bundle)


def _cost(level: LevelResults, bundle: int) -> None:
    completed = [result for result in level.results if result.failure is None]
    tokens = sum(result.tokens for result in completed)
    events = sum(-(-result.tokens // bundle) + 1 for result in completed)
    print(f"  generator: {level.cpu_s / level.seconds:.0%} of a core for {events / level.seconds:,.0f} events/s and "
          f"{tokens / level.seconds:,.0f} tokens/s in {level.seconds:.1f} s")
    print(f"  per event {level.cpu_s / events * 1e6:.1f} us, per stream {level.cpu_s / len(completed) * 1e3:.2f} ms: "
          f"one core takes {events / level.cpu_s:,.0f} events/s or {len(completed) / level.cpu_s:,.0f} such streams/s")


def _row(name: str, seconds: FloatArray) -> None:
    p50, p90, p99 = np.quantile(seconds, (0.5, 0.9, 0.99)) * 1e3
    print(f"  {name:24} mean {seconds.mean() * 1e3:8.2f}  p50 {p50:8.2f}  p90 {p90:8.2f}  p99 {p99:8.2f}  "
          f"max {seconds.max() * 1e3:8.2f} ms")


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load_generator",
                                     description="The load generator's capacity on this machine.")
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
