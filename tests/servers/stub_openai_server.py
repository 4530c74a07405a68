"""A stub OpenAI-compatible server: it computes nothing, sends tokens at known times and logs when it sent them.

    python -m tests.servers.stub_openai_server --ttft 0.1 --token 0.02 --bundle 3 --log sends.jsonl

Used to measure the load generator against a server whose timing is known, and to inject faults: a last message of the
form `fault: <kind>` causes that fault (`FAULTS`). Its dialects reject and offer what SGLang, vLLM, Eyrie and simpler
servers do, so that detecting a server's dialect can be tested without any of them.

The response is a function of the prompt: token i is word (crc32(prompt) + i) mod 1000, so two stub servers return equal
responses. Tokens are sent in bundles, like accepted draft tokens: `--token` is the mean time per token, so a bundle of
three is sent every three times that long, at fixed times. A bundle is a round that accepted `bundle - 1` draft tokens.

The log has one line per response: its id, and the clock reading just before each chunk was written to the socket. On
Linux that clock (CLOCK_MONOTONIC) is the same in all processes, so a client on this machine can subtract it from its
own.
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
    "reset": "the connection is reset before a response",
    "reset-midway": "the connection is reset in the middle of the response",
    "cut": "the connection is closed in the middle of the response",
    "no-end": "the stream ends properly, without a finish reason",
    "malformed": "an event that is not JSON",
    "not-a-chunk": "an event that is JSON but no chunk",
    "bad-frame": "a chunk whose size is not a number",
    "error": "an error event in the stream",
    "abort": "finish reason `abort`",
    "stall": "the stream stops and stays open",
    "silence": "no response",
    "not-a-stream": "a response without streaming",
    "429": "status 429", "500": "status 500", "503": "status 503",
}
# The fields that a dialect rejects with status 400, and whether its error message names the field.
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
_ID = "the-id-of-this-completion"


@dataclass(frozen=True)
class Timing:
    """When tokens are sent. All zero: as fast as possible."""

    ttft_s: float = 0.0
    token_s: float = 0.0
    bundle: int = 1
    tokens: int | None = None
    """Tokens of every completion; default: the request's limit."""

    dialect: str = "sglang"


@dataclass
class StubServer:
    """The server: its timing, its log, the number of requests."""

    timing: Timing
    log: TextIO | None = None
    num_requests: int = 0
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle the requests of one connection."""
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                first, *lines = head.decode("latin-1").split("\r\n")
                sizes = [line.partition(":")[2] for line in lines if line.lower().startswith("content-length:")]
                body = json.loads(await reader.readexactly(int(sizes[0]))) if sizes else {}
                if not await self._respond(first.split(" ")[1], body, writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client disconnected, or the server stops
        finally:
            self.tasks.discard(task)
            writer.close()

    async def _respond(self, path: str, body: Mapping[str, Any], writer: asyncio.StreamWriter) -> bool:
        """Respond to one request; False when the connection cannot be used again."""
        if path.endswith("/models"):
            _send_json(writer, 200, {"object": "list", "data": [{"id": "responder", "object": "model"}]})
            return True
        rejection = _rejection(self.timing.dialect, body)
        if rejection is not None:
            _send_json(writer, 400, {"error": {"message": rejection, "type": "invalid_request_error"}})
            return True
        prompt = str(body["messages"][-1]["content"])
        fault = prompt.partition("fault: ")[2].strip()
        if fault == "silence":
            await asyncio.sleep(3600.0)
        if fault == "reset":
            _reset(writer)
            return False
        if fault == "not-a-stream":
            _send_json(writer, 200, {"object": "chat.completion", "choices": []})
            return True
        if fault.isdigit():
            _send_json(writer, int(fault), {"error": {"message": f"status {fault}, as asked", "type": "server_error"}})
            return True
        if not body.get("stream"):
            await self._complete(prompt, body, writer)
            return True
        return await self._stream(prompt, fault, body, writer)

    async def _complete(self, prompt: str, body: Mapping[str, Any], writer: asyncio.StreamWriter) -> None:
        """Send a response without streaming, at the time at which its stream would end."""
        received_at = time.perf_counter()
        self.num_requests += 1
        limit = int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
        num_tokens = min(limit, self.timing.tokens or limit)
        bundles = -(-num_tokens // self.timing.bundle)
        await asyncio.sleep(self.timing.ttft_s + max(0, bundles - 1) * self.timing.bundle * self.timing.token_s)
        answer = completion(prompt, num_tokens, RequestedFields.of(body, self.timing.dialect))
        sent_at = time.perf_counter()
        _send_json(writer, 200, answer)
        await writer.drain()
        if self.log is not None:
            self.log.write(json.dumps({"id": answer["id"], "received_at": received_at, "sent_at": [sent_at]}) + "\n")

    async def _stream(self, prompt: str, fault: str, body: Mapping[str, Any],
                      writer: asyncio.StreamWriter) -> bool:
        received_at = time.perf_counter()
        self.num_requests += 1
        completion_id = f"chatcmpl-{os.getpid()}-{self.num_requests}"
        limit = int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
        chunks = render(prompt, min(limit, self.timing.tokens or limit), self.timing.bundle,
                        RequestedFields.of(body, self.timing.dialect))
        sent_at = []
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number, chunk in enumerate(chunks):
            due = received_at + self.timing.ttft_s + number * self.timing.bundle * self.timing.token_s
            if number < len(chunks) - 1 and (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            if number == len(chunks) // 2 and fault and not await self._fault(fault, writer):
                return False
            if number == len(chunks) - 1 and fault in ("no-end", "abort"):
                chunk = _event(_chunk({}, "abort")) if fault == "abort" else b""
                chunk += b"data: [DONE]\n\n"
            framed = _frame(chunk.replace(_ID.encode(), completion_id.encode()))
            sent_at.append(time.perf_counter())
            writer.write(framed)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        if self.log is not None:
            self.log.write(json.dumps({"id": completion_id, "received_at": received_at, "sent_at": sent_at}) + "\n")
        return True

    async def _fault(self, fault: str, writer: asyncio.StreamWriter) -> bool:
        """Inject the fault in the middle of a stream; False when the connection cannot be used again."""
        if fault == "reset-midway":
            await writer.drain()
            _reset(writer)
            return False
        if fault == "cut":
            await writer.drain()
            return False
        if fault == "stall":
            await asyncio.sleep(3600.0)
        wrong = {"malformed": b"data: {not json\n\n", "not-a-chunk": b'data: {"choices": 3}\n\n',
                 "error": b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'}.get(fault)
        if wrong is not None:
            writer.write(_frame(wrong))
        if fault == "bad-frame":
            writer.write(b"zz\r\n")
        return True


@dataclass(frozen=True)
class RequestedFields:
    """The optional response fields that a request asked for."""

    running_usage: bool
    usage: bool
    ids: bool
    all_ids: bool
    details: bool

    @classmethod
    def of(cls, body: Mapping[str, Any], dialect: str) -> "RequestedFields":
        """The requested fields that the dialect supports."""
        options = body.get("stream_options") or {}
        return cls(
            running_usage=bool(options.get("continuous_usage_stats")), usage=bool(options.get("include_usage")),
            ids=bool(body.get("return_token_ids")) and dialect in ("vllm", "eyrie"),
            all_ids=bool(body.get("return_output_ids_in_sglext")) and dialect == "sglang",
            details=bool(body.get("return_spec_tokens_details")) and dialect in ("sglang", "eyrie"))


@functools.lru_cache(maxsize=4096)
def render(prompt: str, num_tokens: int, bundle: int, fields: RequestedFields) -> tuple[bytes, ...]:
    """The events of a completion, one element per bundle, with a placeholder for the id; the last element ends it.

    Cached, because rendering takes longer than sending and would affect the timing.
    """
    ids = [(zlib.crc32(prompt.encode()) + i) % _WORDS for i in range(num_tokens)]
    chunks = []
    histogram = [0] * bundle
    for start in range(0, num_tokens, bundle):
        ids_of_chunk = ids[start:start + bundle]
        histogram[len(ids_of_chunk) - 1] += 1
        chunk = _chunk({"content": "".join(f" w{token}" for token in ids_of_chunk)})
        if fields.running_usage:
            chunk["usage"] = _usage(start + len(ids_of_chunk))
        if fields.ids:
            chunk["choices"][0]["token_ids"] = ids_of_chunk
        chunks.append(_event(chunk))
    last = _event(_chunk({}, "stop"))
    extension: dict[str, Any] = {}
    if fields.details and bundle > 1:
        extension["spec_tokens_details"] = {"spec_correct_drafts_histogram": histogram,
                                            "spec_verify_ct": sum(histogram)}
    if fields.all_ids:
        extension["output_ids"] = [ids]
    if extension:
        last += _event({"id": _ID, "choices": [], "sglext": extension})
    if fields.usage:
        last += _event({"id": _ID, "choices": [], "usage": _usage(num_tokens)})
    return (*chunks, last + b"data: [DONE]\n\n")


def completion(prompt: str, num_tokens: int, fields: RequestedFields) -> dict[str, Any]:
    """The response object with the content that `render` streams."""
    ids = [(zlib.crc32(prompt.encode()) + i) % _WORDS for i in range(num_tokens)]
    message = {"role": "assistant", "content": "".join(f" w{token}" for token in ids)}
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop"}
    answer = {"id": _ID, "object": "chat.completion", "created": 0, "model": "responder", "choices": [choice],
              "usage": _usage(num_tokens)}
    if fields.ids:
        choice["token_ids"] = ids
    return answer | ({"sglext": {"output_ids": [ids]}} if fields.all_ids else {})


def _rejection(dialect: str, body: Mapping[str, Any]) -> str | None:
    refused, names_field = DIALECTS[dialect]
    asked = [*body, *(name for name in (body.get("stream_options") or {}) if name != "include_usage")]
    for name in asked:
        if name in refused:
            hint = "; use max_completion_tokens" if name == "max_tokens" else ""
            return f"{name} is not supported{hint}" if names_field else "bad request"
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
    """Close the connection with RST instead of FIN."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _send_json(writer: asyncio.StreamWriter, status: int, value: Mapping[str, Any]) -> None:
    body = json.dumps(value).encode()
    writer.write(f"HTTP/1.1 {status} Stub\r\nContent-Type: application/json\r\n"
                 f"Content-Length: {len(body)}\r\n\r\n".encode() + body)


async def serve(timing: Timing, port: int, ready_file: Path | None, log_file: Path | None) -> None:
    """Serve until cancelled."""
    log = log_file.open("w") if log_file is not None else None
    stub = StubServer(timing, log)
    server = await asyncio.start_server(stub.connected, "127.0.0.1", port, backlog=4096)
    try:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        print(f"ready: {url}", flush=True)
        if ready_file is not None:
            write_atomically(ready_file, json.dumps({"url": url, "pid": os.getpid()}) + "\n")
        await asyncio.Event().wait()
    finally:
        server.close()
        for task in stub.tasks:
            task.cancel()
        await asyncio.gather(*stub.tasks, return_exceptions=True)
        if log is not None:
            log.close()


def main(argv: list[str] | None = None) -> int:
    """Run the program until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m tests.servers.stub_openai_server",
                                     description="A stub OpenAI-compatible server with known timing.")
    parser.add_argument("--port", type=int, default=0, help="0 selects a free port")
    parser.add_argument("--ttft", type=float, default=0.0, help="seconds to the first token")
    parser.add_argument("--token", type=float, default=0.0, help="mean seconds per token after the first bundle")
    parser.add_argument("--bundle", type=int, default=1, help="tokens sent together")
    parser.add_argument("--tokens", type=int,
                        help="tokens of every completion; default: the request's limit")
    parser.add_argument("--dialect", choices=tuple(DIALECTS), default="sglang")
    parser.add_argument("--log", type=Path, help="JSON lines: when each chunk of each response was sent")
    parser.add_argument("--ready-file", type=Path, help="written (JSON: url, pid) once it listens")
    arguments = parser.parse_args(argv)
    timing = Timing(arguments.ttft, arguments.token, max(1, arguments.bundle), arguments.tokens, arguments.dialect)

    async def run_until_signal() -> None:
        task = asyncio.ensure_future(serve(timing, arguments.port, arguments.ready_file, arguments.log))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()

    asyncio.run(run_until_signal())
    return 0


if __name__ == "__main__":
    sys.exit(main())
