"""SGLang as a `DecodingEngine`: one managed server per variant, one of them under load at a time.

An idle server uses memory and no processor time, so resident servers do not disturb the one that is measured. Before
each run the server's prefix cache and the texts of its n-gram lookup are flushed: a repeated prompt would otherwise be
free, and n-gram lookup would find its own earlier answer. A server that has just started answers the beginning of the
first requests before they are measured. One that ends during a run is started again and the run is repeated
(`servers.ServerPool`).

Requests go to SGLang's native `/generate`, several at a time, as a closed loop. It takes and returns token ids, and its
`meta_info` has the histogram of accepted lengths of the request. It is read as a stream, whose chunks are cumulative:
the first one gives the time to the first token, the last one the answer, also of a request that was cut off. A request
is aborted by closing its connection. SGLang counts all draft tokens accepted in the round that ends a request, also
those behind its end.

SGLang draws its own noise at temperature > 0, so sampled answers of two variants differ although their distributions
are equal; greedy answers are compared token by token. On a CPU, and on AMD GPUs without rejection sampling, SGLang
0.5.23 verifies drafts greedily whatever the temperature (`_verify_uses_greedy`), so sampled requests with a drafter are
refused there.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from eyrie_api.contract.reports import EngineUsed
from eyrie_api.contract.tuning import DrafterUse, Setting
from eyrie_api.errors import EyrieError
from eyrie_api.planning.sglang_attention import Platform
from eyrie_workers.engines.decoding_engine import WARMUP_TOKENS, Answer, EngineRun
from eyrie_workers.engines.process import EngineFailed
from eyrie_workers.sglang.local_hardware import detect_hardware
from eyrie_workers.sglang.process import SglangServer
from eyrie_workers.sglang.servers import DrafterUses, ServerHistory, ServerPlan, ServerPool, shared_context_length
from eyrie_workers.speculation.requests import Request
from eyrie_workers.stage_program import Stage

GREEDY_ONLY = "SGLang's CPU backend verifies drafts greedily whatever the temperature"
_GREEDY_ON_ROCM = ("SGLang verifies drafts greedily on AMD GPUs, whatever the temperature, unless all are chains of a "
                   "drafter with verification 'rejection' (benchmark.tree, tune.verifications; tune.top_k [1] and "
                   "tune.ngram false)")
_CONNECT_TIMEOUT_S = 30.0
_SILENCE_TIMEOUT_S = 600.0
"""Between two chunks of a stream: the prefill of a long prompt behind others takes long on a CPU."""

_LINE_BYTES = 8 * 2**20
"""Longest line of a stream: cumulative token ids of a long answer."""


def verified_greedily(platform: Platform, setting: Setting) -> str | None:
    """Why SGLang's answers with this setting are greedy whatever the temperature; None where they are not."""
    if setting.tree is None:
        return None
    if platform == "rocm" and setting.tree.verification == "target":
        return _GREEDY_ON_ROCM
    return GREEDY_ONLY if platform == "cpu" else None


def request_body(request: Request, context_length: int) -> dict[str, Any]:
    """The body of a request. The answer is limited to the rest of the context, which SGLang would refuse to exceed."""
    sampling = request.sampling
    return {
        "input_ids": list(request.prompt_ids), "stream": True,
        "sampling_params": {
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or -1,
            "max_new_tokens": max(1, min(request.max_new_tokens, context_length - len(request.prompt_ids))),
            "stop_token_ids": list(request.stop_ids)}}


@dataclass
class _Stream:
    request: Request
    sent_at: float = 0.0
    first_at: float = 0.0
    last_at: float = 0.0
    last_line: bytes = b""
    whole: bool = False

    def answer(self, ended: float) -> Answer:
        """The answer so far. Raises EngineFailed for a chunk that is not one of `/generate`."""
        if not self.last_line:
            return Answer(self.request.id, (), (), ended - self.sent_at, ended - self.sent_at, whole=False)
        try:
            chunk = json.loads(self.last_line)
            tokens = tuple(int(token) for token in chunk["output_ids"])
            info: Mapping[str, Any] = chunk["meta_info"]
        except (ValueError, KeyError, TypeError) as error:
            raise EngineFailed(f"request {self.request.id!r}: SGLang sent {self.last_line[:200]!r}",
                               "read the server's log") from error
        # Without speculation there is no histogram: one token per pass, of which the prefill yields the first.
        histogram = tuple(info.get("spec_correct_drafts_histogram") or (max(0, len(tokens) - 1),))
        return Answer(self.request.id, tokens, histogram, (self.last_at if self.whole else ended) - self.sent_at,
                      self.first_at - self.sent_at, self.whole)


def generate(url: str, requests: Sequence[Request], concurrency: int, context_length: int, *,
             truncate: bool) -> tuple[tuple[Answer, ...], float]:
    """Answers in the order of the requests, and the wall seconds of all. Semantics: `DecodingEngine.generate`.

    url   of the server, without /v1

    Raises EngineFailed for an error status, an error in a stream, or a lost connection.
    """
    return asyncio.run(_closed_loop(url, requests, concurrency, context_length, truncate))


async def _closed_loop(url: str, requests: Sequence[Request], concurrency: int, context_length: int,
                       truncate: bool) -> tuple[tuple[Answer, ...], float]:
    streams = [_Stream(request) for request in requests]
    waiting, running = list(reversed(streams)), set[asyncio.Task[None]]()
    slots = min(concurrency, len(requests))
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=_SILENCE_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout,
                                     read_bufsize=_LINE_BYTES) as session:
        bodies = {id(stream): json.dumps(request_body(stream.request, context_length)).encode() for stream in streams}
        began = time.perf_counter()
        try:
            while waiting or running:
                while waiting and len(running) < slots:
                    stream = waiting.pop()
                    running.add(asyncio.create_task(_answer(session, url, stream, bodies[id(stream)])))
                if truncate and len(running) < slots:
                    break
                finished, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in finished:
                    task.result()  # raises what the request raised
            ended = time.perf_counter()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    return tuple(stream.answer(ended) for stream in streams), ended - began


async def _answer(session: aiohttp.ClientSession, url: str, stream: _Stream, body: bytes) -> None:
    stream.sent_at = time.perf_counter()
    name = stream.request.id
    try:
        async with session.post(f"{url}/generate", data=body, headers={"Content-Type": "application/json"}) as response:
            if response.status != 200:
                text = (await response.content.read(500)).decode(errors="replace")
                raise EngineFailed(f"request {name!r}: {url} answered {response.status}: {text}",
                                   "read the server's log")
            async for line in response.content:
                if line.startswith(b'data: {"error"'):
                    raise EngineFailed(f"request {name!r}: SGLang reported {line[6:506].decode(errors='replace')}",
                                       "read the server's log")
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    # The chunk of a prefill without a token does not occur: the first chunk has the first token.
                    stream.first_at = stream.first_at or now
                    stream.last_at, stream.last_line = now, line[6:]
                elif line.startswith(b"data: [DONE]"):
                    stream.whole = True
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise EngineFailed(f"request {name!r}: {url} did not complete the answer: {type(error).__name__} {error}",
                           "read the server's log") from error
    if not stream.whole:
        raise EngineFailed(f"request {name!r}: {url} ended the stream before the answer", "read the server's log")


class SglangEngine:
    same_samples = False

    def __init__(self, plan: ServerPlan, possible: DrafterUses, directory: Path, stage: Stage,
                 history: ServerHistory) -> None:
        """An engine without servers; `start` starts them.

        possible    every variant that `start` may be given: all servers have the same arguments but for drafting
        directory   of the servers' logs
        history     of this stage's servers

        Raises InvalidInput when not one server fits the memory, or SGLang does not support a variant (Unlaunchable).
        """
        self._plan, self._stage, self._history = plan, stage, history
        self._asked = False
        self._warm: dict[str, SglangServer] = {}
        self._platform = (plan.machine or detect_hardware()).platform
        self._context_length = shared_context_length(plan, possible)
        self._pool = ServerPool(plan, possible, directory, stage, history)

    def describe(self) -> EngineUsed:
        limits = (f"{GREEDY_ONLY}: that drafting keeps the distribution of sampled answers was not shown in this "
                  "engine on this machine",) if self._platform == "cpu" else (
                  "SGLang's noise is not keyed by position: sampled answers of two variants were not compared",)
        machine = self._plan.machine or detect_hardware()
        return EngineUsed(kind="sglang", version=self._history.version or "unknown", dtype=self._plan.target.dtype,
                          device=machine.name, limits=limits, restarts=self.restarts, starts=self._history.starts)

    def refusal(self, setting: Setting, temperature: float) -> str | None:
        return None if temperature == 0.0 else verified_greedily(self._platform, setting)

    @property
    def num_resident(self) -> int:
        return self._pool.capacity

    @property
    def restarts(self) -> int:
        return self._history.restarts

    def start(self, uses: Mapping[str, DrafterUse]) -> dict[str, EyrieError]:
        unknown = [name for name in uses if name not in self._pool.uses]
        assert not unknown, f"variants {unknown} are not among the possible ones"
        self._pool.amend(uses)
        before = self._history.starts
        failed = self._pool.make_ready(list(uses))
        if new := self._history.starts - before:
            self._stage.event("ServersReady", f"{new} SGLang servers started; {len(self._pool.resident)} of at most "
                              f"{self._pool.capacity} are resident: {', '.join(self._pool.resident)}")
        return failed

    def generate(self, variant: str, requests: Sequence[Request], concurrency: int, *,
                 truncate: bool = False) -> EngineRun:
        while True:
            server = self._pool.server(variant)
            assert isinstance(server, SglangServer)
            try:
                if not self._asked:
                    self._history.note_version(variant, server.version())
                    self._asked = True
                if self._warm.get(variant) is not server:
                    short = [replace(request, max_new_tokens=min(WARMUP_TOKENS, request.max_new_tokens))
                             for request in requests[:concurrency]]
                    generate(server.url, short, concurrency, self._context_length, truncate=False)
                    self._warm[variant] = server
                server.flush()
                cpu = server.cpu_seconds()
                answers, seconds = generate(server.url, requests, concurrency, self._context_length, truncate=truncate)
                return EngineRun(answers, seconds, server.cpu_seconds() - cpu)
            except EngineFailed as error:
                self._pool.recover(variant, error)

    def stop(self) -> None:
        self._pool.stop()
