"""Gateway and engine processes of an endpoint, and the files by which they are known.

They run in sessions of their own and are found again by process names on disk, so they serve on when the control plane
is gone, and the next one adopts them:

    <home>/endpoints/<name>/port                      the stable port, chosen once
    <home>/endpoints/<name>/gateway.json, .log        who listens on it (`gateway`)
    <home>/endpoints/<name>/route.json                which engine it leads to, and who gets a share (`routing`)
    <home>/endpoints/<name>/traffic.jsonl, traffic/   recent chat requests, where they are kept (`traffic`, `drift`)
    <home>/endpoints/<name>/engines/<n>/engine.json   revision n's process and what is known of it
    <home>/endpoints/<name>/engines/<n>/ready.json, engine.log

Nothing is decided here: `serving` decides, `embedded_endpoints` asks it and calls this room.
"""

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import httpx
from pydantic import BaseModel

from eyrie_api.artifacts import write_atomically
from eyrie_api.database.endpoints import Serving
from eyrie_api.errors import TargetNotFound, Transient
from eyrie_api.processes import last_lines
from eyrie_api.submission.target_facts import target_dir
from eyrie_api.v1alpha1.model import Frozen
from eyrie_api.v1alpha1.targets import TargetSpec
from eyrie_api.v1alpha1.tuning import DrafterUse
from eyrie_operator.embedded.gateway import GATEWAY_FILE, GatewayRecord, bind
from eyrie_operator.embedded.routing import COUNTERS_PATH, ROUTE_FILE, Counters
from eyrie_operator.endpoints.engine_metrics import read_metrics
from eyrie_pipelines.processes import ProcessId, identify, is_alive, stop_group
from eyrie_workers.engines.process import EngineCommand

HOST = "127.0.0.1"
"""Engines have no notion of users: only this machine may reach them, whatever the API is bound to."""

ENGINE_FILE = "engine.json"
_GATEWAY_START_S = 30.0
_STOP_S = 5.0
_FETCH_S = 3600.0
_PROBE = {"prompt": "Hello", "max_tokens": 4, "temperature": 0}


ModelT = TypeVar("ModelT", bound=Frozen)


class EngineRecord(Frozen):
    """`engine.json`."""

    revision: int
    process: ProcessId
    started_at: datetime
    starts: int
    url: str | None = None
    """Known, and the engine healthy, once its probe has passed."""

    retiring_since: datetime | None = None
    window_rounds: float = 0.0
    """The engine's counters when the present acceptance window began."""

    window_tokens: float = 0.0
    window_since: datetime | None = None


def start_gateway(directory: Path, wanted_port: int) -> GatewayRecord:
    """Start the endpoint's gateway on its stable port and return once it listens. Raises PortInUse or Transient."""
    port = read_port(directory)
    with contextlib.closing(bind(HOST, port if port is not None else wanted_port)) as probe_socket:
        port = int(probe_socket.getsockname()[1])  # 0 became a free one; from now on it is this one
    write_atomically(directory / "port", f"{port}\n")
    (directory / GATEWAY_FILE).unlink(missing_ok=True)
    process = spawn([sys.executable, "-m", "eyrie_operator.embedded.gateway", "--directory", str(directory),
                     "--host", HOST, "--port", str(port)], directory, directory / "gateway.log")
    deadline = time.monotonic() + _GATEWAY_START_S
    while time.monotonic() < deadline and is_alive(process):
        record = read_record(directory / GATEWAY_FILE, GatewayRecord)
        if record is not None:
            return record
        time.sleep(0.02)
    stop_group(process, 0.0)
    raise Transient(f"the gateway on port {port} did not come up: {last_lines(directory / 'gateway.log')}")


def stop_gateway(directory: Path) -> None:
    """Close the stable port; the port number is kept for the next time."""
    record = read_record(directory / GATEWAY_FILE, GatewayRecord)
    if record is not None:
        stop_group(record.process, _STOP_S)
    (directory / GATEWAY_FILE).unlink(missing_ok=True)


def stop_endpoints(home: Path) -> None:
    """End every gateway and engine under a home, whoever started them. Rows are untouched: `up` starts them again."""
    for directory in sorted((home / "endpoints").glob("*/")):
        stop_gateway(directory)
        for folder, record in list_engines(directory):
            stop_group(record.process, _STOP_S)
            shutil.rmtree(folder, ignore_errors=True)
        (directory / ROUTE_FILE).unlink(missing_ok=True)


def spawn(argv: list[str], cwd: Path, log_file: Path) -> ProcessId:
    """Start a process that outlives us, leader of a session; its output is appended to `log_file`."""
    with log_file.open("ab") as out:
        child = subprocess.Popen(argv, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                 start_new_session=True)
    _children.append(child)
    _children[:] = [one for one in _children if one.poll() is None]  # collects the status of those that ended
    # A child that is gone already gets a name that nobody has: it counts as dead, and its log says why.
    return identify(child.pid) or ProcessId(pid=child.pid, started_ticks=0, boot="ended-at-once")


_children: list[subprocess.Popen[bytes]] = []


def resolve_target(spec: TargetSpec) -> Path:
    """Directory of the target's files. Raises TargetNotFound.

    A Hub id that is not in the cache is fetched by the workers, in a process of their own: fetching shares a module
    with loading, and what steers never loads torch.
    """
    found = target_dir(spec)
    if found is not None:
        return found
    code = ("import sys; from eyrie_api.v1alpha1.targets import TargetSpec; from eyrie_workers.targets.loading import "
            "resolve; print(resolve(TargetSpec.model_validate_json(sys.argv[1])))")
    done = subprocess.run([sys.executable, "-c", code, spec.model_dump_json()], capture_output=True, text=True,
                          timeout=_FETCH_S, check=False)
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise TargetNotFound(f"target {spec.model!r} cannot be found: {said}",
                             "check target.model, or fetch it by hand and give its directory")
    return Path(done.stdout.strip().splitlines()[-1])


def engine_argv(serving: Serving, use: DrafterUse, model: str, ready_file: Path) -> list[str]:
    """The command line of an engine that serves `model` as `use` says. Raises TargetNotFound."""
    target, serve = resolve_target(serving.target), serving.serve
    if serve.engine == "embedded":
        return EngineCommand(
            target=target, model=model, drafter=Path(use.drafter_dir) if use.drafter_dir else None,
            setting=use.setting, map=use.map, host=HOST, max_concurrency=serve.max_concurrency,
            dtype=serving.target.dtype).argv(ready_file)
    return [sys.executable, "-m", "eyrie_workers.engines.sglang.serve", "--target", str(target), "--model", model,
            "--use", use.model_dump_json(), "--host", HOST, "--dtype", serving.target.dtype, "--max-concurrency",
            str(serve.max_concurrency), "--ready-file", str(ready_file)]


def probe(folder: Path, model: str) -> str | None:
    """The engine's URL if it is ready, healthy and able to generate; None otherwise."""
    try:
        url = Ready.model_validate_json((folder / "ready.json").read_text()).url
        with httpx.Client(base_url=url, trust_env=False, timeout=5.0) as client:
            if client.get("/health").status_code != 200:
                return None
            answer = client.post("/v1/completions", json={"model": model, **_PROBE}, timeout=30.0)
            return url if answer.status_code == 200 else None
    except (FileNotFoundError, ValueError, httpx.HTTPError):
        return None


class Ready(BaseModel):
    """What we need of an engine's ready file."""

    url: str


def read_counters(url: str) -> tuple[float, float] | None:
    """(drafted rounds, tokens they gave) so far, from the engine's /metrics; None when it does not answer."""
    try:
        found = read_metrics(httpx.get(f"{url}/metrics", timeout=2.0, trust_env=False).text)
    except httpx.HTTPError:
        return None
    return found.rounds, found.tokens


def read_shares(port: int) -> Counters | None:
    """What the gateway counted under the present route; None when it does not answer."""
    try:
        answer = httpx.get(f"http://{HOST}:{port}{COUNTERS_PATH}", timeout=2.0, trust_env=False)
        return Counters.model_validate_json(answer.text)
    except (httpx.HTTPError, ValueError):
        return None


def endpoint_dir(home: Path, name: str) -> Path:
    """Where everything of one endpoint lies."""
    return home.absolute() / "endpoints" / name


def engine_dir(directory: Path, revision: int) -> Path:
    """Where one revision's engine lies."""
    return directory / "engines" / str(revision)


def read_port(directory: Path) -> int | None:
    """The stable port, once chosen."""
    try:
        return int((directory / "port").read_text())
    except FileNotFoundError:
        return None


def list_engines(directory: Path) -> Iterator[tuple[Path, EngineRecord]]:
    """Engines of an endpoint, dead or alive, with their directories."""
    for folder in sorted((directory / "engines").glob("*/")):
        record = read_record(folder / ENGINE_FILE, EngineRecord)
        if record is not None:
            yield folder, record


def read_record(path: Path, kind: type[ModelT]) -> ModelT | None:
    """A record, or None when it is not there."""
    try:
        return kind.model_validate_json(path.read_text())
    except FileNotFoundError:
        return None
