"""What `chaos` kills: a control plane in one process, or API, workers and servers as processes of their own.

`OnePlane` is `eyrie up` with SQLite. `Separate` is `eyrie serve-api`, two chore workers whose runs are pods (`pods`),
PostgreSQL, Redis and an S3 server. Both name their processes as victims, and start again whichever have died.

`clocks` shift the wall clock of one process while it runs (`wall_clock.c`), never the machine's; the monotonic clock
goes on, as it does when a machine's clock is set.
"""

import contextlib
import os
import shutil
import struct
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import boto3
import httpx

from benchmarks.campaigns.live_servers import START_S, Plane, add_endpoint, has_ended
from benchmarks.campaigns.process_tree import sample_tree
from eyrie_api.artifacts.open_store import open_store
from eyrie_api.artifacts.store import ArtifactStore, StoreOptions
from eyrie_api.processes import free_port
from eyrie_api.settings import Settings
from eyrie_operator.embedded.processes import stop_endpoints
from eyrie_pipelines import local
from eyrie_pipelines.processes import wait_until
from tests.servers import postgres
from tests.servers.processes import Server, Session, private_dir
from tests.servers.redis import Redis
from tests.servers.s3 import start_rclone

LEASE_S = 2.0
_NUM_WORKERS = 2
_BUCKET = "work"


class Clock:
    """The wall clock of one process: `environment` before its start, `shift` while it runs."""

    def __init__(self, library: Path, file: Path) -> None:
        self._file = file
        self._file.write_bytes(struct.pack("@l", 0))
        self.environment = {"LD_PRELOAD": str(library), "EYRIE_CLOCK_FILE": str(file)}

    def shift(self, seconds: int) -> None:
        """Set it so far from the machine's."""
        with self._file.open("r+b", buffering=0) as file:  # in place: the process has mapped it
            file.write(struct.pack("@l", seconds))


def build_clock_library(directory: Path) -> Path | None:
    """`wall_clock.c` compiled into `directory`; None without a C compiler."""
    compiler, made = shutil.which("cc"), directory / "wall_clock.so"
    if compiler is None:
        return None
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(made),
                    str(Path(__file__).with_name("wall_clock.c"))], check=True)
    return made


class Deployment(ABC):
    """One installation with a home, an API and processes that may be killed.

    beside   a directory for what is no part of the installation
    """

    def __init__(self, home: Path, beside: Path, http: httpx.Client) -> None:
        self.home, self.http, self._beside = home, http, beside
        self._clock_library = build_clock_library(beside)
        self.clocks: dict[str, Clock] = {}
        """By process, for those whose clock can be shifted."""

    def _clock(self, name: str) -> dict[str, str]:
        """Environment of a process with a clock of its own; empty where the library cannot be built."""
        if self._clock_library is None:
            return {}
        if name not in self.clocks:
            self.clocks[name] = Clock(self._clock_library, self._beside / f"clock of {name}")
        return self.clocks[name].environment

    @abstractmethod
    def victims(self) -> list[tuple[str, int]]:
        """Kind and process id of the processes that may be killed; 0 for a server, which `kill` kills."""

    def kill(self, kind: str) -> None:
        """kill -9 of a server."""
        raise KeyError(kind)

    @abstractmethod
    def revive(self) -> str | None:
        """Start again what has died, and wait until the API is ready; returns None, or what did not start."""

    @abstractmethod
    def node(self) -> Path:
        """The home in which runs work."""

    def store(self) -> ArtifactStore | None:
        """The store that keeps finished stages; None: they stay in the home."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Stop everything."""


class OnePlane(Deployment):
    """`eyrie up` with SQLite and chores in memory."""

    def __init__(self, home: Path, beside: Path, target: Path, endpoint: str, **serve: float) -> None:
        self._plane = Plane(home)
        super().__init__(home, beside, self._plane.http)
        self._plane.variables = self._clock("plane")
        self._plane.add_endpoint(endpoint, str(target), **serve)

    def victims(self) -> list[tuple[str, int]]:
        return [("plane", self._plane.pid)]

    def revive(self) -> str | None:
        if self._plane.is_running:
            return None
        code = self._plane.start()
        return None if code is None else f"the control plane ended with {code}: {self._plane.log.read_text()[-2000:]}"

    def node(self) -> Path:
        return self.home

    def close(self) -> None:
        self._plane.close()


class Separate(Deployment):
    """API, workers, PostgreSQL, Redis and S3, each a process. Raises Unavailable where a server is missing."""

    def __init__(self, home: Path, beside: Path, target: Path, endpoint: str, **serve: float) -> None:
        self._session, self._port = Session(), free_port()
        super().__init__(home, beside, httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=30.0,
                                                    trust_env=False))
        self._log = home.parent / "deployment.log"
        database, broker = postgres.start(private_dir()), Redis(private_dir())
        broker.start()
        s3, s3_server = start_rclone(private_dir())
        assert database.server is not None
        self._servers: dict[str, Server] = {"PostgreSQL": database.server, "Redis": broker.server, "S3": s3_server}
        boto3.client("s3", endpoint_url=s3.endpoint_url, region_name="us-east-1", aws_access_key_id=s3.access_key,
                     aws_secret_access_key=s3.secret_key).create_bucket(Bucket=_BUCKET)
        secret = beside / "secret"
        secret.mkdir()
        (secret / "access_key").write_text(s3.access_key)
        (secret / "secret_key").write_text(s3.secret_key)
        options = StoreOptions(url=f"s3://{_BUCKET}/eyrie", endpoint_url=s3.endpoint_url, credentials_dir=secret)
        self._store = open_store(options=options)
        settings = Settings(home=home, database_url=database.url(database.create()), broker_url=broker.url)
        add_endpoint(settings, endpoint, str(target), **serve)
        self._environment = {
            "EYRIE_HOME": str(home), "EYRIE_PORT": str(self._port), "EYRIE_LEASE_TTL_S": str(LEASE_S),
            "EYRIE_RECONCILE_INTERVAL_S": "0.2", "EYRIE_DATABASE_URL": settings.resolved_database_url,
            "EYRIE_BROKER_URL": broker.url, "EYRIE_ARTIFACTS_URL": str(options.url),
            "EYRIE_ARTIFACTS_ENDPOINT_URL": s3.endpoint_url, "EYRIE_ARTIFACTS_CREDENTIALS_DIR": str(secret)}
        worker = [sys.executable, "-m", "benchmarks.campaigns.pods", str(self.node())]
        self._programs = {"API": [sys.executable, "-m", "eyrie_operator.command", "serve-api"],
                          **{f"worker {number}": worker for number in range(_NUM_WORKERS)}}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def node(self) -> Path:
        return self.home.with_name("node")

    def store(self) -> ArtifactStore | None:
        return self._store

    def victims(self) -> list[tuple[str, int]]:
        found = [(name, 0) for name in self._servers]
        for name, process in self._running.items():
            kind = name.partition(" ")[0]
            # The pool's processes are children with the same command line; runs and engines are other victims.
            found += [(kind, one) for one in _forked(process.pid)] if kind == "worker" else [(kind, process.pid)]
        return found

    def kill(self, kind: str) -> None:
        self._servers[kind].kill()

    def revive(self) -> str | None:
        for server in self._servers.values():
            if not server.is_running:
                server.start()
        for name, program in self._programs.items():
            process = self._running.get(name)
            if process is None or has_ended(process):
                with self._log.open("ab") as log:
                    self._running[name] = subprocess.Popen(
                        program, stdout=log, stderr=log, env={**os.environ, **self._environment, **self._clock(name)})
        return None if wait_until(self._is_ready, START_S) else f"not ready: {self._log.read_text()[-2000:]}"

    def _is_ready(self) -> bool:
        try:
            return self.http.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def close(self) -> None:
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.http.close()
        for directory in self.node().glob("jobs/*"):
            local.stop(directory, grace_s=0.5)
        stop_endpoints(self.home)
        self._session.end()


def _forked(root: int) -> Iterator[int]:
    """`root` and its descendants that run the same program."""
    def words(pid: int) -> bytes | None:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/cmdline").read_bytes()
        return None

    wanted = words(root)
    return (one.pid for one in sample_tree(root) if wanted and words(one.pid) == wanted)
