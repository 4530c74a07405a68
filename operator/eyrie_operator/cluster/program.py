"""`eyrie operator`: election, watching, workers, and a port for probes and metrics, in one process.

It starts the election first and writes nothing until it leads; then a thread per kind and namespace watches, and a few
threads reconcile. When the lease is lost the process exits with 1 and is restarted by Kubernetes, which discards all
cached state. On SIGTERM it shuts down and releases the lease, so that another operator takes over at once.

    /healthz   200 while the election loop runs: a frozen or dead loop is restarted
    /readyz    200 when the API server and the database respond. Not "leads": a standby that never became ready would
               block every rollout with two replicas
    /metrics   Prometheus
"""

import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from eyrie_api import web_server
from eyrie_api.clock import utc_now
from eyrie_api.contract.model import API_VERSION
from eyrie_api.database.engine import Database
from eyrie_api.errors import EyrieError, InvalidInput
from eyrie_api.settings import Settings
from eyrie_operator.cluster.client import Cluster, KubernetesLease
from eyrie_operator.cluster.controller import KINDS, Controller, Kind
from eyrie_operator.cluster.leases import Elector, Fence, LeaseTimings, run_election
from eyrie_operator.cluster.workqueue import Telemetry

log = logging.getLogger(__name__)

_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_WORKERS = 4
_STOP_S = 10.0
_POLL_S, _RESYNC_S, _PODS_S = 2.0, 60.0, 15.0
"""Between two polls, two resyncs, and two lists of the pods of runs that wait for a node."""


@dataclass(frozen=True)
class Options:
    lease_namespace: str
    lease_name: str
    namespaces: tuple[str, ...]
    """Namespaces to watch; all when empty."""

    mirror_namespace: str | None
    runs_namespace: str | None
    """Namespace of the runs' pods. None: that of the cluster profile, else the watched ones."""

    projects: Mapping[str, str]
    """Namespace -> project of its objects; others belong to `default`."""

    host: str
    """Probes come from the node. No response contains a secret."""

    port: int
    timings: LeaseTimings


def run(settings: Settings, options: Options) -> int:
    """Run an operator until SIGTERM or SIGINT (0), or until the lease is lost (1)."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "kubernetes"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    database = Database(settings.resolved_database_url)
    try:
        return Operator(settings, database, options).run()
    finally:
        database.close()


class Operator:
    def __init__(self, settings: Settings, database: Database, options: Options) -> None:
        self._options, self._database = options, database
        self.telemetry = Telemetry()
        self._fence = Fence(time.monotonic)
        self._cluster = Cluster(self._fence.check, self.telemetry.count_write)
        self._controller = Controller(settings, database, self._cluster, self.telemetry,
                                      mirror_namespace=options.mirror_namespace, namespaces=options.namespaces,
                                      runs_namespace=options.runs_namespace, projects=options.projects)
        me = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        lease = KubernetesLease(self._cluster, options.lease_namespace, options.lease_name)
        self._elector = Elector(me, lease, options.timings, self._fence, monotonic=time.monotonic, clock=utc_now)
        self._stopping, self._leading, self._lost = threading.Event(), threading.Event(), threading.Event()
        self._election = threading.Thread(
            target=run_election, name="eyrie-election", daemon=True, args=(
                self._elector, self._fence, options.timings, self._stopping, self._leading.set, self._lost.set))

    def run(self) -> int:
        """Run until SIGTERM, SIGINT or the loss of the lease."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_caught: self._stopping.set())
        probes = serve_probes(self._options.host, self._options.port, self._endpoints())
        log.info("waiting for the lease; probes and metrics on port %d", probes.server_address[1])
        self._election.start()
        try:
            while not self._leading.wait(0.2):
                if self._stopping.is_set():
                    return 0
            self._lead()
            if self._lost.is_set():
                log.error("the lease or the watch was lost: exiting")
            return 1 if self._lost.is_set() else 0
        finally:
            self._stopping.set()
            self._election.join(_STOP_S)
            probes.shutdown()

    def _lead(self) -> None:
        log.info("leading")
        self.telemetry.leads.set(1)
        parts = [threading.Thread(target=self._work, name=f"eyrie-worker-{number}", daemon=True)
                 for number in range(_WORKERS)]
        parts.append(threading.Thread(target=self._tick, name="eyrie-ticker", daemon=True))
        # Not joined: a watch may wait for its next event, and may be cut off anywhere.
        watches = [threading.Thread(target=self._watch, args=(kind, namespace), name=f"eyrie-watch-{kind}", daemon=True)
                   for kind in KINDS for namespace in self._options.namespaces or (None,)]
        for part in (*parts, *watches):
            part.start()
        try:
            while not self._stopping.wait(0.1) and not self._lost.is_set():
                pass
        finally:
            self.telemetry.leads.set(0)
            self._controller.queue.close()
            self._stopping.set()
            for part in parts:
                part.join(_STOP_S)

    def _watch(self, kind: Kind, namespace: str | None) -> None:
        try:
            self._cluster.watch(API_VERSION, kind, namespace, self._stopping,
                                lambda event, raw: self._controller.handle_event(kind, event, raw))
        except Exception:  # without its events nothing is reconciled: the next process starts from a list
            log.exception("the watch of %s failed", kind)
            self._lost.set()

    def _work(self) -> None:
        while self._controller.process_next():
            self.telemetry.waiting.set(len(self._controller.queue))

    def _tick(self) -> None:
        resync_at, pods_at = time.monotonic() + _RESYNC_S, 0.0
        self._guarded(self._controller.resync)  # once at the start: mirrors of jobs posted while no operator led
        while not self._stopping.wait(_POLL_S) and not self._lost.is_set():
            self._guarded(self._controller.poll)
            self._guarded(self._controller.sweep)
            if time.monotonic() >= pods_at:
                pods_at = time.monotonic() + _PODS_S
                self._guarded(self._controller.observe_pods)
            if time.monotonic() >= resync_at:
                resync_at = time.monotonic() + _RESYNC_S
                self._guarded(self._controller.resync)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Run one step; an unavailable database or API server is logged, and the next tick retries."""
        try:
            step()
        except Exception as error:  # the ticker must survive any error; the next tick retries
            self.telemetry.errors.labels("poll", type(error).__name__).inc()
            known = isinstance(error, EyrieError | SQLAlchemyError)
            log.warning("%s: %s", step.__name__, error, exc_info=None if known else error)

    def _endpoints(self) -> dict[str, Callable[[], tuple[int, bytes]]]:
        def health() -> tuple[int, bytes]:
            return (200, b"ok\n") if self._election.is_alive() else (500, b"the election has ended\n")

        def ready() -> tuple[int, bytes]:
            try:
                reachable = self._database.is_reachable()
            except SQLAlchemyError:
                reachable = False
            if not reachable:
                return 503, b"the database does not respond\n"
            return (200, b"ok\n") if self._cluster.is_reachable() else (503, b"the API server does not respond\n")

        return {"/healthz": health, "/readyz": ready, "/metrics": lambda: (200, self.telemetry.render())}


def serve_probes(host: str, port: int, answers: dict[str, Callable[[], tuple[int, bytes]]]) -> ThreadingHTTPServer:
    """Serve these pages in threads of their own. A connection that sends nothing for as long as a header may take is
    closed."""
    class HealthServer(BaseHTTPRequestHandler):
        timeout = web_server.HEADER_S

        def do_GET(self) -> None:
            answer = answers.get(self.path.partition("?")[0])
            status, body = answer() if answer else (404, b"no such page\n")
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_line: object) -> None:
            """No log lines: probes arrive every few seconds."""

    server = ThreadingHTTPServer((host, port), HealthServer)
    threading.Thread(target=server.serve_forever, name="eyrie-probes", daemon=True).start()
    return server


def own_namespace() -> str:
    """Namespace of this pod; `default` outside of a pod."""
    try:
        return _OWN_NAMESPACE.read_text(encoding="ascii").strip() or "default"
    except OSError:
        return "default"


def parse_namespaces(namespaces: Sequence[str]) -> tuple[str, ...]:
    """Split `a,b c` into names: the chart passes one variable."""
    return tuple(name for given in namespaces for name in given.replace(",", " ").split())


def parse_projects(given: Sequence[str]) -> dict[str, str]:
    """Parse `namespace=project,...`. Raises InvalidInput."""
    projects: dict[str, str] = {}
    for entry in parse_namespaces(given):
        namespace, equals, project = entry.partition("=")
        if not (namespace and equals and project):
            raise InvalidInput(f"--project {entry!r} is not NAMESPACE=PROJECT", "write team-a=search, for example")
        projects[namespace] = project
    return projects
