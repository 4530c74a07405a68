"""Redis: up in milliseconds, so every test that wants one has one of its own to kill."""

import os
import shutil
from pathlib import Path

from tests.servers.processes import Server, Unavailable


class Redis:
    """A redis-server whose port stays the same when it is started again; it keeps nothing over a kill."""

    def __init__(self, directory: Path) -> None:
        program = os.environ.get("EYRIE_TEST_REDIS_SERVER") or shutil.which("redis-server")
        if program is None:
            raise Unavailable("no redis-server on this machine: apt-get install redis-server")
        self.server = Server(
            lambda port: [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
                          "--dir", str(directory)], directory / "redis.log")
        self.url = f"redis://127.0.0.1:{self.server.port}/0"

    def start(self) -> None:
        """Start, or start again."""
        self.server.start()

    def kill(self) -> None:
        """kill -9: what was queued is gone."""
        self.server.kill()
