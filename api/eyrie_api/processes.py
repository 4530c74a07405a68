"""Helpers for programs that start server processes: a free port, a listening socket, the last lines of a log.

Used by the operator, the pipeline runner, the engines and the tests. Signals and process groups are in
`eyrie_pipelines.processes`.
"""

import errno
import re
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

from eyrie_api.errors import InvalidInput, PortInUse

# Below the ephemeral range (32768 and up on Linux): no outgoing connection takes the port between this probe and the
# server's own bind, or while the server restarts.
_PORTS = range(15_000, 30_000)
_TAIL_BYTES = 256 * 1024  # enough for a traceback and SGLang's longest lines; an engine's log may have gigabytes
# Colours and cursor movements (ECMA-48, section 5.4), and other control characters: a quoted line becomes part of a
# condition, which people read in a terminal that would obey them.
_CONTROLS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-_]"
                       r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LINE_CHARACTERS = 300  # of a quoted line: SGLang logs all its 500 settings in one


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` on which no process listens now; another process may still bind it first. Raises OSError when
    `host` is not an address of this machine."""
    while True:
        port = secrets.choice(_PORTS)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise
        return port


def bind(host: str, port: int, setting: str = "serve.port") -> socket.socket:
    """A listening socket on that port; `setting` names the option in the error's hint. Raises PortInUse, or
    InvalidInput for an address of another host and a port that this process may not use."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(256)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(f"port {port} on {host} is in use",
                            f"stop the process that listens there, or choose another {setting} than {port}") from None
        raise InvalidInput(f"cannot listen on {host}:{port}: {error.strerror}",
                           f"give another host, or another {setting}") from None
    return sock


def log_lines(log_file: Path) -> list[str]:
    """The non-blank lines at the end of a log, each cut to a length that can be quoted; none without a file."""
    try:
        with log_file.open("rb") as log:
            log.seek(max(0, log.seek(0, 2) - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    lines = (_CONTROLS.sub("", line).strip() for line in text.splitlines())
    return [line[:_LINE_CHARACTERS] for line in lines if line]


def last_lines(log_file: Path, num: int = 3, without: Sequence[str] = ()) -> str:
    """The last lines of a log joined by ` | `, for error messages; lines that contain one of `without` are left out."""
    lines = [line for line in log_lines(log_file) if not any(phrase in line for phrase in without)]
    return " | ".join(lines[-num:]) or "no output"
