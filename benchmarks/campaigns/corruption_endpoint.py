"""The records of a served endpoint, damaged while the control plane is down: part of `benchmarks.campaigns.corruption`.

An endpoint serves a tiny target; the control plane was killed, gateway and engine run on. One record is damaged and
the control plane started. Rules: the endpoint answers at the URL it had, with the same greedy text; each record
describes the process that runs; there is one gateway and one engine. `port` is damaged once more while nothing runs:
it is the one file that a stopped endpoint keeps. The older records are those of a gateway and an engine that were
killed and replaced.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from benchmarks.campaigns.corruption_damage import Damage, Verdict, damage_bytes
from benchmarks.campaigns.live_servers import Plane
from eyrie_operator.embedded.gateway import GATEWAY_FILE, GatewayRecord
from eyrie_operator.embedded.processes import (
    ENGINE_FILE,
    PORT_FILE,
    EngineRecord,
    marked_sessions,
    stop_endpoints,
)
from eyrie_operator.embedded.routing import ROUTE_FILE, RouteRecord
from eyrie_pipelines.processes import is_alive, wait_until
from eyrie_pipelines.run_records import read_record
from tests.cluster.patience import PATIENCE
from tests.tiny import tiny_target

LIMIT_S = 180.0 * PATIENCE
NAME = "live"
_ENGINE = f"engines/1/{ENGINE_FILE}"
_STOPPED = f"{PORT_FILE}, nothing running"
_STEADY_S = 1.0
"""For which the rules have to hold: some steps of the control plane."""


class EndpointRecords:
    """An endpoint whose control plane is down."""

    def __init__(self, path: Path) -> None:
        self.path, self.home, self.older = path, path / "home", path / "older"
        self.directory = self.home / "endpoints" / NAME
        self._kept: dict[str, bytes] = {}
        self._url, self._text = "", ""

    def build(self) -> None:
        """Serve, replace gateway and engine once, and kill the control plane."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.home.mkdir(parents=True)
        self.older.mkdir()
        target = tiny_target(self.path / "target")
        plane = Plane(self.home)
        plane.add_endpoint(NAME, str(target), port=0)
        with self._started(plane):
            assert wait_until(lambda: self._ask(plane)[1] != "", LIMIT_S), plane.log.read_text()[-2000:]
            for name in (GATEWAY_FILE, ROUTE_FILE, _ENGINE):
                path = self.older / name
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.directory / name, path)
            self._url, self._text = self._ask(plane)
            for one in marked_sessions(self.directory):
                os.killpg(one.leader.pid, signal.SIGKILL)
            assert wait_until(lambda: self._serves(plane) and not self._broken(), LIMIT_S), self._broken()

    def files(self) -> list[str]:
        """The records, below the endpoint's directory."""
        return [PORT_FILE, GATEWAY_FILE, ROUTE_FILE, _ENGINE, "engines/1/ready.json", _STOPPED]

    def damaged(self, file: str, damage: Damage, rng: random.Random) -> bytes | None:
        """A file's bytes after the damage."""
        name = PORT_FILE if file == _STOPPED else file
        return damage_bytes((self.directory / name).read_bytes(), damage, rng, self.older / name)

    def try_case(self, file: str, data: bytes) -> Verdict:
        """Damage a record, start the control plane, judge, kill it."""
        if file == _STOPPED:
            stop_endpoints(self.home)
        path = self.directory / (PORT_FILE if file == _STOPPED else file)
        whole = path.read_bytes()
        path.write_bytes(data)
        try:
            return self._judge(data)
        finally:
            if path.exists() and path.read_bytes() == data:  # what nothing had to read: one file at a time is damaged
                path.write_bytes(whole)

    def _judge(self, data: bytes) -> Verdict:
        plane = Plane(self.home)
        with self._started(plane):
            if not wait_until(lambda: not self._broken(), LIMIT_S):
                return "a record describes what runs", {"damaged": repr(data[:600]), "broken": self._broken()}
            if not wait_until(lambda: self._serves(plane), LIMIT_S):
                return "the endpoint answers as before", {"damaged": repr(data[:600]), "before": self._url,
                                                          "now": self._ask(plane)}
            time.sleep(_STEADY_S)
            if self._broken() or not self._serves(plane):
                return "what was repaired stays", {"broken": self._broken(), "now": self._ask(plane)}
            return "made again", {}

    @contextlib.contextmanager
    def _started(self, plane: Plane) -> Iterator[None]:
        """A control plane that runs within the block, and is killed then."""
        assert plane.start() is None, plane.log.read_text()[-2000:]
        try:
            yield
        finally:
            plane.kill()
            plane.http.close()

    def _serves(self, plane: Plane) -> bool:
        return self._ask(plane) == (self._url, self._text)

    def _ask(self, plane: Plane) -> tuple[str, str]:
        """Where the API says that the endpoint is, and what it answers there; empty where it does not."""
        url = ""
        try:
            url = plane.http.get(f"/v1alpha1/endpoints/{NAME}").json().get("url") or ""
            answer = httpx.post(f"{url}/completions", trust_env=False, timeout=60.0, json={
                "model": NAME, "prompt": "Question 1", "max_tokens": 8, "temperature": 0})
            return url, answer.json()["choices"][0]["text"] if answer.status_code == 200 else ""
        except (httpx.HTTPError, httpx.InvalidURL, json.JSONDecodeError):
            return url, ""

    def _broken(self) -> str:
        """The first rule about records and processes that does not hold; empty when all do."""
        running = {Path(one.mark.folder).name: one for one in marked_sessions(self.directory)}
        if sorted(running) != ["1", NAME] or len(marked_sessions(self.directory)) != 2:
            return f"running: {sorted(running)}"
        gateway, engine = (read_record(self.directory / name, kind) for name, kind in (
            (GATEWAY_FILE, GatewayRecord), (_ENGINE, EngineRecord)))
        route = read_record(self.directory / ROUTE_FILE, RouteRecord)
        if not isinstance(gateway, GatewayRecord) or not isinstance(engine, EngineRecord) or route is None:
            return "a record is missing"
        if not is_alive(gateway.process) or gateway.process != running[NAME].leader:
            return f"{GATEWAY_FILE}: {gateway}"
        port = gateway.port
        if port != running[NAME].mark.port or (self.directory / PORT_FILE).read_text() != f"{port}\n":
            return f"{PORT_FILE}: {gateway}"
        if engine.process != running["1"].leader or engine.url is None or engine.retiring_since or engine.alone:
            return f"{_ENGINE}: {engine}"
        return "" if (route.revision, route.url) == (1, engine.url) else f"{ROUTE_FILE}: {route}"

    def close(self) -> None:
        """Stop gateway and engine."""
        stop_endpoints(self.home)
