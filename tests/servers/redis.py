"""Redis: up in milliseconds, so every test that wants one has one of its own to kill."""

import os
import shutil
import subprocess
from pathlib import Path

from tests.servers.processes import Server, Unavailable


class Redis:
    """A redis-server whose port stays the same when it is started again; it keeps nothing over a kill.

    tls   it speaks TLS alone, with a certificate that it has signed itself: `certificate`
    """

    def __init__(self, directory: Path, *, tls: bool = False) -> None:
        program = os.environ.get("EYRIE_TEST_REDIS_SERVER") or shutil.which("redis-server")
        if program is None:
            raise Unavailable("no redis-server on this machine: apt-get install redis-server")
        self.certificate = directory / "redis.pem"
        if tls:
            self._sign(directory / "redis.key")
        secured = ["--tls-cert-file", str(self.certificate), "--tls-key-file", str(directory / "redis.key"),
                   "--tls-auth-clients", "no", "--port", "0"] if tls else []
        self.server = Server(
            lambda port: [program, "--tls-port" if tls else "--port", str(port), *secured, "--bind", "127.0.0.1",
                          "--save", "", "--appendonly", "no", "--dir", str(directory)], directory / "redis.log")
        self.url = f"redis{'s' if tls else ''}://127.0.0.1:{self.server.port}/0"

    def _sign(self, key: Path) -> None:
        openssl = shutil.which("openssl")
        if openssl is None:
            raise Unavailable("no openssl on this machine: apt-get install openssl")
        subprocess.run([openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                        "-keyout", str(key), "-out", str(self.certificate), "-days", "2", "-subj", "/CN=127.0.0.1",
                        "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)

    def start(self) -> None:
        """Start, or start again."""
        self.server.start()

    def kill(self) -> None:
        """kill -9: what was queued is gone."""
        self.server.kill()
