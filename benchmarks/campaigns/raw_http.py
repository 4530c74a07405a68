"""Requests as bytes: what HTTP clients refuse to send, and answers read with a limit on time and size."""

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_READ = 1 << 20
STREAM_READ_S = 0.3
"""An event stream is read this long: it does not end by itself."""


@dataclass(frozen=True)
class Answer:
    """One response; `status` 0: the server closed the connection without one."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float

    def json(self) -> Any:
        """The body, strictly: NaN and Infinity are not JSON. Raises ValueError."""
        def refuse(name: str) -> Any:
            raise ValueError(f"{name} is not JSON")

        return json.loads(self.body.decode("utf-8"), parse_constant=refuse)


def send(port: int, method: str, target: bytes, headers: Mapping[str, bytes], body: bytes,
         timeout_s: float) -> Answer:
    """Send one request on its own connection. Raises TimeoutError when there is no complete answer in time.

    `Host`, `Content-Length` and `Connection` are added unless they are given.
    """
    lines = {"Host": f"127.0.0.1:{port}".encode(), "Connection": b"close", "Content-Length": str(len(body)).encode(),
             **headers}
    head = method.encode() + b" " + target + b" HTTP/1.1\r\n"
    head += b"".join(name.encode() + b": " + value + b"\r\n" for name, value in lines.items()) + b"\r\n"
    began = time.monotonic()
    data = b""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
        try:
            connection.sendall(head + body)
            while len(data) < MAX_READ:
                connection.settimeout(max(0.01, (STREAM_READ_S if _is_stream(data) else timeout_s)
                                          - (time.monotonic() - began)))
                part = connection.recv(65_536)
                if not part:
                    break
                data += part
        except TimeoutError:
            if not _is_stream(data):
                raise
        except (ConnectionResetError, BrokenPipeError):
            pass  # answered before the body was read, or refused
    return _parse(data, time.monotonic() - began)


def _is_stream(data: bytes) -> bool:
    return b"text/event-stream" in _final(data).partition(b"\r\n\r\n")[0]


def _final(data: bytes) -> bytes:
    """The response without interim ones before it (100 Continue)."""
    while data.startswith(b"HTTP/1.1 1"):
        data = data.partition(b"\r\n\r\n")[2]
    return data


def _parse(data: bytes, seconds: float) -> Answer:
    head, _, body = _final(data).partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    parts = lines[0].split(" ", 2)
    if len(parts) < 2 or not parts[1].isdigit():
        return Answer(0, {}, data, seconds)
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    if headers.get("transfer-encoding") == "chunked":
        body = _dechunked(body)
    return Answer(int(parts[1]), headers, body, seconds)


def _dechunked(body: bytes) -> bytes:
    found = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        try:
            length = int(size, 16)
        except ValueError:
            return found
        found, body = found + body[:length], body[length + 2:]
    return found
