"""Gateway and engine processes of an endpoint, and the files that identify them.

They run in their own sessions and are found by process ids on disk: they continue without the control plane, and the
next one finds them. A control plane that is killed between a start and its record, or a damaged record, leaves a
process that no file names. Command lines do not identify it: the launcher of SGLang replaces its own. Each process
therefore inherits a variable, EYRIE_ENDPOINT_PROCESS, with the folder it belongs to and what its record needs, which
/proc/<pid>/environ shows, and the record is written again. Its children inherit the mark, so that they are found when
their parent has ended. A damaged route is written again too.

    <home>/endpoints/<name>/port                      the stable port, chosen once
    <home>/endpoints/<name>/gateway.json, .log        the gateway process (`gateway`)
    <home>/endpoints/<name>/route.json                the serving engine, and the canary's share (`routing`)
    <home>/endpoints/<name>/traffic.jsonl, traffic/   recorded chat requests (`endpoints.traffic_recording`, `drift`)
    <home>/endpoints/<name>/engines/<n>/engine.json   process and state of revision n
    <home>/endpoints/<name>/engines/<n>/ready.json, engine.log

This module decides nothing: `endpoints` executes the actions of the plan with it.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import httpx

from eyrie_api.artifacts import verify_part, write_atomically, write_sealed
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.serving import EMBEDDED_CONCURRENCY
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.tuning import DrafterUse
from eyrie_api.database.endpoints import Serving
from eyrie_api.errors import TargetNotFound, Transient
from eyrie_api.planning.facts import target_dir
from eyrie_api.processes import bind, free_port, last_lines
from eyrie_operator.embedded.gateway import GATEWAY_FILE, GatewayRecord
from eyrie_operator.embedded.routing import ROUTE_FILE
from eyrie_operator.endpoints.engine_metrics import EngineCounters, Window, read_metrics
from eyrie_pipelines.processes import ProcessId, boot_id, identify, is_alive, stop_group
from eyrie_pipelines.run_records import read_record
from eyrie_workers.engines.process import EngineCommand

HOST = "127.0.0.1"
"""Engines do not authenticate: only this machine may connect, whatever address the API is bound to."""

ENGINE_FILE, PORT_FILE = "engine.json", "port"
_GATEWAY_START_S = 60.0
_STOP_S = 5.0
_FETCH_S = 3600.0
_PROBE = {"prompt": "Hello", "max_tokens": 4, "temperature": 0}
_PROC = Path("/proc")
_VARIABLE = "EYRIE_ENDPOINT_PROCESS"

ModelT = TypeVar("ModelT", bound=Frozen)


class EngineRecord(Frozen):
    """`engine.json`."""

    revision: int
    process: ProcessId
    started_at: datetime
    starts: int
    url: str | None = None
    """Set once the probe has passed: the engine is healthy."""

    retiring_since: datetime | None = None
    alone: bool = False
    """The serving engine was stopped for it, because both do not fit the memory."""

    window: Window | None = None
    """Of its acceptance; None before it is healthy."""


class Mark(Frozen):
    """The value of EYRIE_ENDPOINT_PROCESS, in JSON."""

    folder: str
    """Absolute: the endpoint's for a gateway, the revision's for an engine."""

    port: int | None = None
    """A gateway's."""

    alone: bool = False
    """An engine for which the serving one was stopped."""

    def variables(self) -> dict[str, str]:
        """The environment of a marked process. SGLang names its processes with setproctitle, which writes over their
        environment unless SPT_NOENV is set."""
        return {_VARIABLE: self.model_dump_json(), "SPT_NOENV": "1"}


@dataclass(frozen=True)
class Marked:
    """A session whose processes have one mark."""

    mark: Mark
    leader: ProcessId
    """It may have ended while others of its session run."""


def find_gateway(directory: Path) -> GatewayRecord | None:
    """The running gateway. Its record and its port number are written again where they are missing or damaged."""
    record = read_record(directory / GATEWAY_FILE, GatewayRecord)
    if record is None or not is_alive(record.process):
        record = next((GatewayRecord(process=marked.leader, host=HOST, port=marked.mark.port)
                       for marked in running_leaders(directory) if marked.mark.port is not None), None)
        if record is None:
            return None
        write_sealed(directory / GATEWAY_FILE, record)
    if stored_port(directory) != record.port:
        write_atomically(directory / PORT_FILE, f"{record.port}\n")
    return record


def start_gateway(directory: Path, wanted_port: int, url: str | None = None) -> GatewayRecord:
    """Start the endpoint's gateway on its stable port and return once it listens. Raises PortInUse or Transient.

    url   the endpoint's, as stored in its row
    """
    running = find_gateway(directory)
    if running is not None:
        return running
    port = read_port(directory, url) or wanted_port or free_port(HOST)  # which the endpoint keeps
    bind(HOST, port).close()
    write_atomically(directory / PORT_FILE, f"{port}\n")
    (directory / GATEWAY_FILE).unlink(missing_ok=True)
    process = spawn([sys.executable, "-m", "eyrie_operator.embedded.gateway", "--directory", str(directory),
                     "--host", HOST, "--port", str(port)], Mark(folder=str(directory.absolute()), port=port),
                    directory / "gateway.log")
    deadline = time.monotonic() + _GATEWAY_START_S
    while time.monotonic() < deadline and is_alive(process):
        record = read_record(directory / GATEWAY_FILE, GatewayRecord)
        if record is not None:
            return record
        time.sleep(0.02)
    stop_group(process, 0.0)
    raise Transient(f"the gateway on port {port} did not start: {last_lines(directory / 'gateway.log')}")


def stop_gateway(directory: Path) -> None:
    """Stop the gateway; its port number is kept."""
    record = find_gateway(directory)
    if record is not None:
        stop_group(record.process, _STOP_S)
    (directory / GATEWAY_FILE).unlink(missing_ok=True)


def stop_endpoints(home: Path) -> None:
    """Stop every gateway and engine of a home, whichever process started them. Rows stay: the next `up` starts them."""
    root = home.absolute() / "endpoints"
    for directory in sorted(root.glob("*/")):
        stop_gateway(directory)
        for _, record in list_engines(directory):
            stop_group(record.process, _STOP_S)
    stop_marked(root, _STOP_S)  # without a record, or of an endpoint whose directory is gone
    for directory in sorted(root.glob("*/")):
        shutil.rmtree(directory / "engines", ignore_errors=True)
        (directory / ROUTE_FILE).unlink(missing_ok=True)


def spawn(argv: list[str], mark: Mark, log_file: Path, variables: Mapping[str, str] | None = None) -> ProcessId:
    """Start a process in its own session and its mark's folder, so that it outlives this one; its output is appended to
    `log_file`.

    variables   added to this process's environment
    """
    with log_file.open("ab") as out:
        child = subprocess.Popen(argv, cwd=mark.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                 start_new_session=True,
                                 env={**os.environ, **(variables or {}), **mark.variables()})
    _children.append(child)
    _children[:] = [other for other in _children if other.poll() is None]  # reaps those that ended
    # Race: a child that has ended already gets an identity that matches no process: it counts as dead.
    return identify(child.pid) or ProcessId(pid=child.pid, started_ticks=0, boot="ended-at-once")


_children: list[subprocess.Popen[bytes]] = []


def resolve_target(spec: TargetSpec) -> Path:
    """Directory of the target's files. Raises TargetNotFound.

    A Hub id that is not in the cache is downloaded by the workers in a child process: the download shares a module
    with loading, and the control plane must not import torch.
    """
    directory = target_dir(spec)
    if directory is not None:
        return directory
    code = ("import sys; from eyrie_api.contract.targets import TargetSpec; from eyrie_workers.targets.loading import "
            "resolve; print(resolve(TargetSpec.model_validate_json(sys.argv[1])))")
    completed = subprocess.run([sys.executable, "-c", code, spec.model_dump_json()], capture_output=True, text=True,
                               timeout=_FETCH_S, check=False)
    if completed.returncode != 0:
        last = (completed.stderr.strip().splitlines() or ["no output"])[-1]
        raise TargetNotFound(f"target {spec.model!r} cannot be found: {last}",
                             "check target.model, or download it and give its directory")
    return Path(completed.stdout.strip().splitlines()[-1])


def engine_argv(serving: Serving, use: DrafterUse, model: str, ready_file: Path) -> list[str]:
    """The command line of an engine that serves `model` with this drafter and setting. Raises TargetNotFound, and
    ArtifactMissing or ArtifactCorrupt for a drafter that differs from its manifest."""
    if use.drafter_dir is not None:
        verify_part(Path(use.drafter_dir))
    target, serve = resolve_target(serving.target), serving.serve
    if serve.engine.kind == "embedded":
        return EngineCommand(
            target=target, model=model, use=use, host=HOST, dtype=serving.target.dtype, drain_s=serve.drain_s,
            max_concurrency=serve.max_concurrency or EMBEDDED_CONCURRENCY).argv(ready_file)
    argv = [sys.executable, "-m", "eyrie_workers.sglang.serve", "--target", str(target), "--model", model,
            "--use", use.model_dump_json(), "--host", HOST, "--dtype", serving.target.dtype,
            "--engine", serve.engine.model_dump_json(), "--ready-file", str(ready_file)]
    if serve.max_concurrency is not None:
        argv += ["--max-concurrency", str(serve.max_concurrency)]
    return argv


def probe(folder: Path, model: str) -> str | None:
    """The engine's URL if it is ready, healthy and able to generate; None otherwise."""
    try:
        url = str(json.loads((folder / "ready.json").read_bytes())["url"])
        with httpx.Client(base_url=url, trust_env=False, timeout=5.0) as client:
            if client.get("/health").status_code != 200:
                return None
            answer = client.post("/v1/completions", json={"model": model, **_PROBE}, timeout=30.0)
            return url if answer.status_code == 200 else None
    except (FileNotFoundError, ValueError, KeyError, TypeError, httpx.HTTPError, httpx.InvalidURL):
        return None


def read_counters(url: str) -> EngineCounters | None:
    """From the engine's /metrics; None when it does not respond."""
    try:
        return read_metrics(httpx.get(f"{url}/metrics", timeout=2.0, trust_env=False).text)
    except (httpx.HTTPError, ValueError):
        return None


def ask_gateway(record: GatewayRecord, path: str, kind: type[ModelT]) -> ModelT | None:
    """What the gateway itself has counted; None when it does not respond."""
    try:
        answer = httpx.get(f"http://{HOST}:{record.port}{path}", timeout=2.0, trust_env=False)
        return kind.model_validate_json(answer.text)
    except (httpx.HTTPError, ValueError):
        return None


def endpoint_dir(home: Path, name: str) -> Path:
    return home.absolute() / "endpoints" / name


def engine_dir(directory: Path, revision: int) -> Path:
    return directory / "engines" / str(revision)


def read_port(directory: Path, url: str | None = None) -> int | None:
    """The stable port, once chosen: that of the URL in the endpoint's row, since another number in the file would be a
    damaged one; else the file's, or where it is missing or damaged, the one in the gateway's record."""
    known = urlsplit(url or "")
    if known.hostname == HOST and known.port is not None:  # not a URL of a cluster
        return known.port
    stored = stored_port(directory)
    if stored is not None:
        return stored
    record = read_record(directory / GATEWAY_FILE, GatewayRecord)
    return None if record is None else record.port


def stored_port(directory: Path) -> int | None:
    """The number in an endpoint's file `port`; None where it is missing or damaged."""
    try:
        digits = (directory / PORT_FILE).read_bytes().strip()
    except FileNotFoundError:
        return None
    return int(digits) if digits.isdigit() and len(digits) <= 5 and 0 < int(digits) < 65_536 else None


def adopt_engines(directory: Path, now: datetime) -> None:
    """Write the record of each running engine whose own is missing, damaged, or that of its predecessor."""
    for marked in running_leaders(directory / "engines"):
        folder = Path(marked.mark.folder)
        record = read_record(folder / ENGINE_FILE, EngineRecord)
        if record is None or not is_alive(record.process):
            folder.mkdir(parents=True, exist_ok=True)
            write_sealed(folder / ENGINE_FILE, EngineRecord(
                revision=int(folder.name), process=marked.leader, started_at=now, alone=marked.mark.alone,
                starts=1 if record is None else record.starts + 1))


def list_engines(directory: Path) -> Iterator[tuple[Path, EngineRecord]]:
    """Engines of an endpoint, dead or alive, with their directories."""
    for folder in sorted((directory / "engines").glob("*/")):
        record = read_record(folder / ENGINE_FILE, EngineRecord)
        if record is not None:
            yield folder, record


def marked_sessions(below: Path) -> list[Marked]:
    """Sessions of this user with running processes of `below` or of a folder in it."""
    below, sessions = below.absolute(), dict[int, Marked]()
    prefix = f"{_VARIABLE}=".encode()
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if entry.stat().st_uid != os.geteuid():
                continue
            variables = (entry / "environ").read_bytes().split(b"\0")
            value = next((variable for variable in variables if variable.startswith(prefix)), None)
            if value is None:
                continue
            mark = Mark.model_validate_json(value.removeprefix(prefix))
            if below == Path(mark.folder) or below in Path(mark.folder).parents:
                pid = os.getsid(int(entry.name))
                sessions[pid] = Marked(mark, identify(pid) or ProcessId(pid=pid, started_ticks=0, boot=boot_id()))
        except (OSError, ValueError):  # it ended, may not be read, or the variable is someone else's
            continue
    return list(sessions.values())


def running_leaders(below: Path) -> list[Marked]:
    """Those of `marked_sessions` whose leader runs: engines and gateways."""
    return [marked for marked in marked_sessions(below) if is_alive(marked.leader)]


def stop_marked(below: Path, grace_s: float) -> None:
    """Stop every process of `below` and the folders in it."""
    for marked in marked_sessions(below):
        stop_group(marked.leader, grace_s)
