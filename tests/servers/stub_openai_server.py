"""An OpenAI-compatible server that computes nothing: it answers at a set pace and writes down when it sent what.

    python -m tests.servers.stub_openai_server --ttft 0.1 --token 0.02 --bundle 3 --log sends.jsonl

It exists to measure the load generator against a server whose times are known, and to be the server that goes wrong:
a last message of the form `trouble: <kind>` gets that trouble (`FAULTS`). Its dialects refuse and offer what SGLang,
vLLM, Eyrie and plainer servers do, so that finding a server's dialect can be tried without any of them.

The answer is a function of the question alone: token i of it is word (crc32(question) + i) mod 1000, so two responders
say the same. Tokens leave in bundles, as accepted drafts do: `--token` is the mean time per token, so a bundle of three
leaves every three times that long, on a fixed timetable. A bundle is a round that accepted `bundle - 1` draft tokens.

The log has one line per answer: its id, and the clock reading just before each piece was handed to the socket. On Linux
that clock (CLOCK_MONOTONIC) is the same in all processes, so a generator on this machine can subtract it from its own.
"""

import argparse
import asyncio
import functools
import json
import os
import signal
import socket
import struct
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from eyrie_api.artifacts import write_atomically

FAULTS = {
    "reset": "the connection is reset before an answer",
    "reset-midway": "the connection is reset in the middle of the answer",
    "cut": "the connection is closed in the middle of the answer",
    "no-end": "the stream ends properly, without a finish reason",
    "malformed": "an event that is not JSON",
    "not-a-chunk": "an event that is JSON but no chunk",
    "bad-frame": "a chunk whose size is no number",
    "error": "an error event in the stream",
    "abort": "finish reason `abort`",
    "stall": "the stream stops and stays open",
    "silence": "no answer at all",
    "not-a-stream": "a whole completion instead of a stream",
    "429": "status 429", "500": "status 500", "503": "status 503",
}
# What a dialect refuses with status 400, and whether it says which field it was.
DIALECTS: dict[str, tuple[frozenset[str], bool]] = {
    "sglang": (frozenset({"return_token_ids"}), True),
    "vllm": (frozenset(), True),
    "eyrie": (frozenset({"return_output_ids_in_sglext", "continuous_usage_stats"}), True),
    "openai": (frozenset({"return_token_ids", "return_output_ids_in_sglext", "return_spec_tokens_details",
                          "continuous_usage_stats", "max_tokens"}), True),
    "mute": (frozenset({"return_token_ids", "return_output_ids_in_sglext", "return_spec_tokens_details",
                        "continuous_usage_stats"}), False),
    "bare": (frozenset({"return_token_ids", "return_output_ids_in_sglext", "return_spec_tokens_details",
                        "continuous_usage_stats", "stream_options"}), False),
}
_WORDS = 1000
_ID = "the-id-of-this-answer"


@dataclass(frozen=True)
class Timing:
    """How answers leave. All zero: as fast as it can."""

    ttft_s: float = 0.0
    token_s: float = 0.0
    bundle: int = 1
    tokens: int | None = None
    """Length of every answer; by default what the request allows."""

    dialect: str = "sglang"


@dataclass
class Responder:
    """The server's state: its pace, its log, what it has served."""

    pace: Timing
    log: TextIO | None = None
    served: int = 0
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, request after request."""
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                first, *lines = head.decode("latin-1").split("\r\n")
                sizes = [line.partition(":")[2] for line in lines if line.lower().startswith("content-length:")]
                body = json.loads(await reader.readexactly(int(sizes[0]))) if sizes else {}
                if not await self._answer(first.split(" ")[1], body, writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client has left, or we end
        finally:
            self.tasks.discard(task)
            writer.close()

    async def _answer(self, path: str, body: Mapping[str, Any], writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False when the connection is of no more use."""
        if path.endswith("/models"):
            _whole(writer, 200, {"object": "list", "data": [{"id": "responder", "object": "model"}]})
            return True
        refusal = _refusal(self.pace.dialect, body)
        if refusal is not None:
            _whole(writer, 400, {"error": {"message": refusal, "type": "invalid_request_error"}})
            return True
        question = str(body["messages"][-1]["content"])
        trouble = question.partition("trouble: ")[2].strip()
        if trouble == "silence":
            await asyncio.sleep(3600.0)
        if trouble == "reset":
            _reset(writer)
            return False
        if trouble == "not-a-stream":
            _whole(writer, 200, {"object": "chat.completion", "choices": []})
            return True
        if trouble.isdigit():
            _whole(writer, int(trouble), {"error": {"message": f"status {trouble}, as asked", "type": "server_error"}})
            return True
        if not body.get("stream"):
            await self._complete(question, body, writer)
            return True
        return await self._stream(question, trouble, body, writer)

    async def _complete(self, question: str, body: Mapping[str, Any], writer: asyncio.StreamWriter) -> None:
        """The whole answer at the time at which a stream of it would end."""
        asked_at = time.perf_counter()
        self.served += 1
        limit = int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
        num_tokens = min(limit, self.pace.tokens or limit)
        bundles = -(-num_tokens // self.pace.bundle)
        await asyncio.sleep(self.pace.ttft_s + max(0, bundles - 1) * self.pace.bundle * self.pace.token_s)
        answer = whole(question, num_tokens, RequestedFields.of(body, self.pace.dialect))
        sent_at = time.perf_counter()
        _whole(writer, 200, answer)
        await writer.drain()
        if self.log is not None:
            self.log.write(json.dumps({"id": answer["id"], "asked_at": asked_at, "sent_at": [sent_at]}) + "\n")

    async def _stream(self, question: str, trouble: str, body: Mapping[str, Any],
                      writer: asyncio.StreamWriter) -> bool:
        asked_at = time.perf_counter()
        self.served += 1
        answer_id = f"chatcmpl-{os.getpid()}-{self.served}"
        limit = int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
        pieces = render(question, min(limit, self.pace.tokens or limit), self.pace.bundle,
                        RequestedFields.of(body, self.pace.dialect))
        sent_at = []
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number, piece in enumerate(pieces):
            due = asked_at + self.pace.ttft_s + number * self.pace.bundle * self.pace.token_s
            if number < len(pieces) - 1 and (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            if number == len(pieces) // 2 and trouble and not await self._trouble(trouble, writer):
                return False
            if number == len(pieces) - 1 and trouble in ("no-end", "abort"):
                piece = _event(_chunk({}, "abort")) if trouble == "abort" else b""
                piece += b"data: [DONE]\n\n"
            framed = _frame(piece.replace(_ID.encode(), answer_id.encode()))
            sent_at.append(time.perf_counter())
            writer.write(framed)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        if self.log is not None:
            self.log.write(json.dumps({"id": answer_id, "asked_at": asked_at, "sent_at": sent_at}) + "\n")
        return True

    async def _trouble(self, trouble: str, writer: asyncio.StreamWriter) -> bool:
        """Go wrong in the middle; False when the connection is of no more use."""
        if trouble == "reset-midway":
            await writer.drain()
            _reset(writer)
            return False
        if trouble == "cut":
            await writer.drain()
            return False
        if trouble == "stall":
            await asyncio.sleep(3600.0)
        wrong = {"malformed": b"data: {not json\n\n", "not-a-chunk": b'data: {"choices": 3}\n\n',
                 "error": b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'}.get(trouble)
        if wrong is not None:
            writer.write(_frame(wrong))
        if trouble == "bad-frame":
            writer.write(b"zz\r\n")
        return True


@dataclass(frozen=True)
class RequestedFields:
    """What a request asked to be told."""

    running_usage: bool
    usage: bool
    ids: bool
    all_ids: bool
    details: bool

    @classmethod
    def of(cls, body: Mapping[str, Any], dialect: str) -> "RequestedFields":
        """As far as the dialect knows it."""
        options = body.get("stream_options") or {}
        return cls(
            running_usage=bool(options.get("continuous_usage_stats")), usage=bool(options.get("include_usage")),
            ids=bool(body.get("return_token_ids")) and dialect in ("vllm", "eyrie"),
            all_ids=bool(body.get("return_output_ids_in_sglext")) and dialect == "sglang",
            details=bool(body.get("return_spec_tokens_details")) and dialect in ("sglang", "eyrie"))


@functools.lru_cache(maxsize=4096)
def render(question: str, num_tokens: int, bundle: int, wish: RequestedFields) -> tuple[bytes, ...]:
    """The events of an answer, bundle by bundle, the id still to be filled in; the last piece ends it.

    Kept, because rendering costs more than sending and would be seen in the pace.
    """
    ids = [(zlib.crc32(question.encode()) + i) % _WORDS for i in range(num_tokens)]
    pieces = []
    histogram = [0] * bundle
    for start in range(0, num_tokens, bundle):
        together = ids[start:start + bundle]
        histogram[len(together) - 1] += 1
        chunk = _chunk({"content": "".join(f" w{token}" for token in together)})
        if wish.running_usage:
            chunk["usage"] = _usage(start + len(together))
        if wish.ids:
            chunk["choices"][0]["token_ids"] = together
        pieces.append(_event(chunk))
    last = _event(_chunk({}, "stop"))
    extension: dict[str, Any] = {}
    if wish.details and bundle > 1:
        extension["spec_tokens_details"] = {"spec_correct_drafts_histogram": histogram,
                                            "spec_verify_ct": sum(histogram)}
    if wish.all_ids:
        extension["output_ids"] = [ids]
    if extension:
        last += _event({"id": _ID, "choices": [], "sglext": extension})
    if wish.usage:
        last += _event({"id": _ID, "choices": [], "usage": _usage(num_tokens)})
    return (*pieces, last + b"data: [DONE]\n\n")


def whole(question: str, num_tokens: int, wish: RequestedFields) -> dict[str, Any]:
    """The completion that says what `render` streams."""
    ids = [(zlib.crc32(question.encode()) + i) % _WORDS for i in range(num_tokens)]
    message = {"role": "assistant", "content": "".join(f" w{token}" for token in ids)}
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop"}
    answer = {"id": _ID, "object": "chat.completion", "created": 0, "model": "responder", "choices": [choice],
              "usage": _usage(num_tokens)}
    if wish.ids:
        choice["token_ids"] = ids
    return answer | ({"sglext": {"output_ids": [ids]}} if wish.all_ids else {})


def _refusal(dialect: str, body: Mapping[str, Any]) -> str | None:
    refused, names_it = DIALECTS[dialect]
    asked = [*body, *(name for name in (body.get("stream_options") or {}) if name != "include_usage")]
    for name in asked:
        if name in refused:
            hint = "; use max_completion_tokens" if name == "max_tokens" else ""
            return f"{name} is not supported{hint}" if names_it else "bad request"
    return None


def _chunk(delta: Mapping[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"id": _ID, "object": "chat.completion.chunk", "created": 0, "model": "responder",
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def _usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 1, "completion_tokens": num_tokens, "total_tokens": 1 + num_tokens}


def _event(value: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def _frame(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _whole(writer: asyncio.StreamWriter, status: int, value: Mapping[str, Any]) -> None:
    body = json.dumps(value).encode()
    writer.write(f"HTTP/1.1 {status} Said\r\nContent-Type: application/json\r\n"
                 f"Content-Length: {len(body)}\r\n\r\n".encode() + body)


async def serve(pace: Timing, port: int, ready_file: Path | None, log_file: Path | None) -> None:
    """Answer until cancelled."""
    log = log_file.open("w") if log_file is not None else None
    responder = Responder(pace, log)
    server = await asyncio.start_server(responder.connected, "127.0.0.1", port, backlog=4096)
    try:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        print(f"ready: {url}", flush=True)
        if ready_file is not None:
            write_atomically(ready_file, json.dumps({"url": url, "pid": os.getpid()}) + "\n")
        await asyncio.Event().wait()
    finally:
        server.close()
        for task in responder.tasks:
            task.cancel()
        await asyncio.gather(*responder.tasks, return_exceptions=True)
        if log is not None:
            log.close()


def main(argv: list[str] | None = None) -> int:
    """The program; ends with SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m tests.servers.stub_openai_server",
                                     description="An OpenAI-compatible server of a set pace, for measuring clients.")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--ttft", type=float, default=0.0, help="seconds to the first token")
    parser.add_argument("--token", type=float, default=0.0, help="mean seconds per token after the first bundle")
    parser.add_argument("--bundle", type=int, default=1, help="tokens that leave together")
    parser.add_argument("--tokens", type=int, help="length of every answer; default: what the request allows")
    parser.add_argument("--dialect", choices=tuple(DIALECTS), default="sglang")
    parser.add_argument("--log", type=Path, help="JSON lines: when each piece of each answer was sent")
    parser.add_argument("--ready-file", type=Path, help="written (JSON: url, pid) once it answers")
    given = parser.parse_args(argv)
    pace = Timing(given.ttft, given.token, max(1, given.bundle), given.tokens, given.dialect)

    async def until_told() -> None:
        task = asyncio.ensure_future(serve(pace, given.port, given.ready_file, given.log))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()

    asyncio.run(until_told())
    return 0


if __name__ == "__main__":
    sys.exit(main())
