"""The processes that campaigns send requests to: an API server, a gateway, an embedded engine on a tiny target."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.campaigns.report import ROOT
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.migrations import upgrade
from eyrie_api.processes import free_port
from eyrie_api.settings import Settings
from eyrie_operator.embedded.endpoints import EmbeddedEndpoints
from eyrie_operator.embedded.gateway import GATEWAY_FILE, GatewayRecord
from eyrie_operator.embedded.processes import endpoint_dir, list_engines, stop_endpoints
from eyrie_operator.embedded.routing import ROUTE_FILE, RouteRecord
from eyrie_pipelines import local
from eyrie_pipelines.processes import identify, wait_until
from eyrie_pipelines.run_records import read_record
from tests.cluster.patience import PATIENCE

START_S = 120.0 * PATIENCE
REHEARSAL = ROOT / "tests/pipelines/rehearsal"
PACKAGES = ("api", "kernels", "operator", "pipelines", "workers")
"""Folders of a checkout that hold packages."""

_API = """
import sys
import uvicorn
from eyrie_api.database.engine import Database
from eyrie_api.http.server import create_app
from eyrie_api.settings import Settings
from eyrie_api.web_server import prefer_short_waits
settings = Settings.from_env()
app = create_app(settings, database=Database(settings.resolved_database_url))
prefer_short_waits()
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)
"""
"""`eyrie serve-api` without a broker: chores stay in the outbox, since nothing here is to train."""

_PLANE = """
import json
import sys
from eyrie_api.errors import EyrieError
from eyrie_api.settings import Settings
from eyrie_operator.control_plane import run
try:
    run(Settings(**json.loads(sys.argv[1])))
except EyrieError as error:  # as `eyrie up` shows it
    sys.exit(f"error: {error.reason}: {error}")
"""
_HEAP = """
import ctypes, gc, os, threading, time

class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks",
                                                     "fsmblks", "uordblks", "fordblks", "keepcost")]

def sample(path):
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo2
    while True:
        gc.collect()
        found = libc.mallinfo2()
        with open(path + ".new", "w") as file:
            file.write(f"{found.uordblks + found.hblkhd} {found.fordblks}")
        os.rename(path + ".new", path)
        time.sleep(2)

threading.Thread(target=sample, args=(os.environ.pop("EYRIE_CAMPAIGN_HEAP"),), daemon=True).start()
"""
"""Before `_PLANE`: writes how many bytes of the C library's heap, of all its arenas, are in use and free."""

_WITH_ENDPOINT = """
import json
import sys
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.migrations import upgrade
from eyrie_api.settings import Settings
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.targets import TargetSpec
database = Database(Settings(**json.loads(sys.argv[1])).resolved_database_url)
upgrade(database)
Endpoints(database).create(sys.argv[2], TargetSpec(model=sys.argv[3]), EndpointServeSpec(**json.loads(sys.argv[4])),
                           sys.argv[2])
database.close()
"""


class Plane:
    """The embedded control plane as a process: it can be killed and started again on the same home.

    settings   further ones
    """

    def __init__(self, home: Path, **settings: float | str) -> None:
        self.home, self.port = home, free_port()
        self.tree: Path | None = None
        """A checkout whose code runs at the next start; None: this one's."""

        self.heap: Path | None = None
        """Where its process writes the bytes of its heap, in use and free. Python's own allocator is off then, so that
        every value counts."""

        self.variables: dict[str, str] = {}
        """Environment variables of the process besides this one's."""

        self._settings = {"home": str(home), "port": self.port, "reconcile_interval_s": 0.2, "lease_ttl_s": 2.0,
                          **settings}
        self.log = home.parent / "plane.log"
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120.0, trust_env=False)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return not self._ended()

    def start(self) -> int | None:
        """Start it, and wait until it is ready. Returns None, or the exit code of one that ended (-1: not ready)."""
        heap = {} if self.heap is None else {"PYTHONMALLOC": "malloc", "EYRIE_CAMPAIGN_HEAP": str(self.heap)}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", (_HEAP if heap else "") + _PLANE, json.dumps(self._settings)], stdout=log,
                stderr=log, env={**environment(self.tree), **self.variables, **heap})
        wait_until(lambda: self._is_ready() or self._ended(), START_S)
        if self._is_ready():
            return None
        code = self._process.poll()
        return -1 if code is None else code

    def _ended(self) -> bool:
        return self._process is None or has_ended(self._process)

    def _is_ready(self) -> bool:
        try:
            return not self._ended() and self.http.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def add_endpoint(self, name: str, target: str, **serve: float) -> None:
        """Store an endpoint that serves the target alone, before the start."""
        subprocess.run([sys.executable, "-c", _WITH_ENDPOINT, json.dumps(self._settings), name, target,
                        json.dumps(serve)], check=True, env=environment(self.tree), stdout=subprocess.DEVNULL)

    def terminate(self) -> int:
        """SIGTERM, and wait for the end; returns the exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(60)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Stop it, and what its jobs left running."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()
        self.http.close()
        for directory in self.home.glob("jobs/*"):
            local.stop(directory, grace_s=0.5)
        stop_endpoints(self.home)


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has ended. Race: of a killed process the first thread may have ended before the others; it cannot be
    waited for then, and `poll` takes it for running."""
    if identify(process.pid) is None:
        process.wait()
    return process.poll() is not None


def add_endpoint(settings: Settings, name: str, target: str, **serve: float) -> None:
    """Migrate the database of `settings` and store an endpoint that serves the target alone."""
    subprocess.run([sys.executable, "-c", _WITH_ENDPOINT, settings.model_dump_json(exclude_unset=True), name, target,
                    json.dumps(serve)], check=True, stdout=subprocess.DEVNULL)


def environment(tree: Path | None) -> dict[str, str]:
    """Environment of a process that runs the code of a checkout: `tree`, or this one for None."""
    given = [Path(one) for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    if tree is not None:
        own = [tree / "tests/pipelines" / one.name for one in given if one == REHEARSAL]
        given = [*own, *(tree / name for name in PACKAGES), *(one for one in given if one != REHEARSAL)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, given))}


@dataclass(frozen=True)
class Part:
    """A listening process."""

    name: str
    port: int
    pid: int

    def resident_mib(self) -> float:
        """Resident memory of the process."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE") / 2**20

    def descriptors(self) -> int:
        """Open file descriptors."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))


@contextmanager
def api_server(home: Path, database_url: str | None = None, **variables: str) -> Iterator[Part]:
    """The API as a process, without a token: every caller is an administrator. No worker runs its jobs.

    database_url   None: SQLite in `home`
    variables      further settings, as environment variables
    """
    settings = Settings(home=home, database_url=database_url)
    database = Database(settings.resolved_database_url)
    upgrade(database)
    database.close()
    port = free_port()
    env = {name: value for name, value in os.environ.items() if not name.startswith("EYRIE_")}
    env |= {"EYRIE_HOME": str(home), "EYRIE_DATABASE_URL": settings.resolved_database_url, **variables}
    with (home / "api.log").open("ab") as log:
        process = subprocess.Popen([sys.executable, "-c", _API, str(port)], env=env, stdout=log, stderr=log, cwd=home)
    try:
        def ready() -> bool:
            assert process.poll() is None, (home / "api.log").read_text()[-3000:]
            try:
                return httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False).status_code == 200
            except httpx.TransportError:
                return False

        assert wait_until(ready, START_S), (home / "api.log").read_text()[-3000:]
        yield Part("api", port, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def endpoint(home: Path, target: Path) -> Iterator[tuple[Part, Part]]:
    """A gateway and its engine, as the embedded runtime starts them."""
    settings = Settings(home=home)
    database = Database(settings.resolved_database_url)
    upgrade(database)
    Endpoints(database).create("default", TargetSpec(model=str(target)),
                               EndpointServeSpec(port=0, max_concurrency=2, record_prompts=100), "tiny")
    keeper, directory = EmbeddedEndpoints(settings, database), endpoint_dir(home, "default")

    def serves() -> bool:
        keeper.reconcile("default")
        return read_record(directory / ROUTE_FILE, RouteRecord) is not None

    try:
        assert wait_until(serves, START_S), Endpoints(database).get("default").conditions
        gateway, engine = read_record(directory / GATEWAY_FILE, GatewayRecord), next(list_engines(directory))[1]
        assert gateway is not None
        assert engine.url is not None
        yield (Part("gateway", gateway.port, gateway.process.pid),
               Part("engine", int(engine.url.rpartition(":")[2]), engine.process.pid))
    finally:
        stop_endpoints(home)
        database.close()


@contextmanager
def scratch(name: str) -> Iterator[Path]:
    """A directory for the campaign's homes, deleted at its end."""
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"eyrie-{name}-{os.getpid()}-{time.monotonic_ns()}"
    path.mkdir(mode=0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
