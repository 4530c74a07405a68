"""CPU time per event of a stream: `load.http_client` and aiohttp. `python -m tests.benchmarks.http_clients`

Decides whether the hand-written client stays: it has to cost at most half of aiohttp per event. Both clients read the
same streams of a stub server process and keep every chunk with its arrival time; runs of the two alternate. CPU time
(user and system) of this process is compared, which other programs on the machine affect less than wall-clock time.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp

from eyrie_workers.load.completion_stream import read_stream
from eyrie_workers.load.endpoint_url import parse_url
from eyrie_workers.load.http_client import ConnectionPool
from tests.benchmarks.load_generator import stub_server

Stream = list[tuple[float, bytes]]
Client = Callable[[str, int, int], Coroutine[Any, Any, tuple[float, list[Stream]]]]
_TIMEOUT_S = 300.0


def request_body(number: int, num_tokens: int) -> bytes:
    """A streamed request, different for each number."""
    return json.dumps({
        "model": "stub", "messages": [{"role": "user", "content": f"question {number}"}], "stream": True,
        "max_tokens": num_tokens, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}).encode()


async def with_http_client(url: str, num_streams: int, num_tokens: int) -> tuple[float, list[Stream]]:
    """CPU time and streams, read with `load.http_client`."""
    pool = ConnectionPool(parse_url(url), {"Accept": "text/event-stream"})

    async def read(number: int, tokens: int) -> Stream:
        request = pool.build_request("POST", "/chat/completions", request_body(number, tokens))
        return (await pool.send(request, _TIMEOUT_S)).chunks

    try:
        await asyncio.gather(*(read(number, 1) for number in range(num_streams)))  # opens the connections
        before = time.process_time()
        streams = await asyncio.gather(*(read(number, num_tokens) for number in range(num_streams)))
        return time.process_time() - before, streams
    finally:
        pool.close()


async def with_aiohttp(url: str, num_streams: int, num_tokens: int) -> tuple[float, list[Stream]]:
    """CPU time and streams, read with aiohttp."""
    async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
            auto_decompress=False, headers={"Content-Type": "application/json"}) as session:

        async def read(number: int, tokens: int) -> Stream:
            async with session.post(f"{url}/chat/completions", data=request_body(number, tokens)) as response:
                chunks, next_chunk = [], response.content.readany
                while chunk := await next_chunk():
                    chunks.append((time.perf_counter(), chunk))
                return chunks

        await asyncio.gather(*(read(number, 1) for number in range(num_streams)))
        before = time.process_time()
        streams = await asyncio.gather(*(read(number, num_tokens) for number in range(num_streams)))
        return time.process_time() - before, streams


def main() -> None:
    """Print microseconds per event of every run, and their medians."""
    parser = argparse.ArgumentParser(description="CPU time per event of a stream: load.http_client and aiohttp.")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--events", type=int, default=200, help="per stream")
    parser.add_argument("--token-ms", type=float, default=30.0, help="time between events of a stream")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    clients: list[tuple[str, Client]] = [("http_client", with_http_client), ("aiohttp", with_aiohttp)]
    costs_us: dict[str, list[float]] = {name: [] for name, _ in clients}
    print(f"aiohttp {aiohttp.__version__}, {os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder, \
            stub_server(Path(folder), "--token", str(options.token_ms / 1e3)) as url:
        for repeat in range(options.repeats):
            for name, client in clients if repeat % 2 == 0 else clients[::-1]:
                cpu_s, streams = asyncio.run(client(url, options.streams, options.events))
                num_tokens = sum(read_stream(stream).tokens for stream in streams)
                if num_tokens != options.streams * options.events:
                    raise RuntimeError(f"{name}: {num_tokens} tokens, expected {options.streams * options.events}")
                costs_us[name].append(cpu_s / (num_tokens + options.streams) * 1e6)
                print(f"run {repeat} {name:12} {costs_us[name][-1]:6.1f} us per event", flush=True)
    for name, values in costs_us.items():
        print(f"{name:12} median {statistics.median(values):6.1f} ({min(values):.1f}..{max(values):.1f}) us per event")
    ratio = statistics.median(costs_us["aiohttp"]) / statistics.median(costs_us["http_client"])
    print(f"aiohttp / http_client: {ratio:.2f}")


if __name__ == "__main__":
    main()
