"""The embedded runtime: endpoints on one machine, as a gateway process and engine processes.

`reconcile` is one step of one endpoint: observe its row and its processes, call the pure `plan_endpoint`, execute the
actions, store the status. Gateway and engines outlive the control plane, and the next one finds them (`processes`).

An engine is healthy once its ready file exists, /health answers 200, and it has generated a few tokens: an engine that
loads but cannot decode must never get requests.

Before a candidate's engine is started next to the serving one, free memory is read from `nvidia-smi` and /proc/meminfo:
the control plane does not load torch. A machine whose GPUs cannot be read this way (AMD) counts as large enough.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from eyrie_api.artifacts import verify_part, write_model, write_sealed
from eyrie_api.clock import Clock, utc_now
from eyrie_api.contract.engine import EngineSpec
from eyrie_api.contract.status import Endpoint
from eyrie_api.contract.tuning import DrafterUse
from eyrie_api.database.endpoints import Serving
from eyrie_api.database.engine import Database
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing, EyrieError, NotFound, Transient
from eyrie_api.file_rules import check_path
from eyrie_api.processes import last_lines
from eyrie_api.settings import Settings
from eyrie_operator.conditions import observe, observe_recording
from eyrie_operator.embedded.gateway import GatewayRecord
from eyrie_operator.embedded.processes import (
    ENGINE_FILE,
    HOST,
    EngineRecord,
    Mark,
    adopt_engines,
    ask_gateway,
    endpoint_dir,
    engine_argv,
    engine_dir,
    find_gateway,
    list_engines,
    probe,
    read_counters,
    read_port,
    resolve_target,
    spawn,
    start_gateway,
    stop_gateway,
    stop_marked,
)
from eyrie_operator.embedded.routing import (
    COUNTERS_PATH,
    ROUTE_FILE,
    UNENDED_PATH,
    RequestCounters,
    RequestCounts,
    RouteRecord,
    Share,
    UnendedAnswers,
)
from eyrie_operator.endpoints import plan as act
from eyrie_operator.endpoints.engine_metrics import EngineCounters, Window, increase
from eyrie_operator.endpoints.plan import (
    EndpointPlan,
    ObservedCanary,
    ObservedEndpoint,
    ObservedEngine,
    damaged_drafter,
    plan_endpoint,
)
from eyrie_operator.endpoints.records import EndpointRecords
from eyrie_operator.endpoints.traffic_recording import Recording, delete_older
from eyrie_pipelines.processes import is_alive, stop_group
from eyrie_pipelines.run_records import read_record
from eyrie_workers.sglang.profiles import PROCESSES_BYTES, weights_on_disk

log = logging.getLogger(__name__)

_MAX_STEPS = 6
_LASTING_S = 60.0
"""An engine that runs this long has its count of failed starts reset."""


_GIB = 2**30
_WORKSPACE_BYTES = 4 * _GIB
"""Of each GPU: CUDA context, graphs, and a KV pool to serve at least a few requests."""

_QUERY = ["nvidia-smi", "--query-gpu=index,memory.free", "--format=csv,noheader,nounits"]
_QUERY_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class FreeMemory:
    main_bytes: int
    gpus: dict[str, int] | None = None
    """Free bytes by GPU index; None without a GPU, or where they cannot be read."""


@dataclass(frozen=True)
class Room:
    """Where an engine may start."""

    gpus: tuple[str, ...] = ()
    """For CUDA_VISIBLE_DEVICES; empty: not restricted."""

    missing: str = ""
    """Why it does not fit, with the numbers; empty: it does."""


def find_room(engine: EngineSpec, weights: int, free: FreeMemory) -> Room:
    """Choose the GPUs with the most free memory, or find that there is no room. Pure.

    weights   bytes of target and drafter together, as stored
    """
    if free.gpus is None:
        needed = weights + PROCESSES_BYTES[engine.kind]
        if needed > free.main_bytes:
            return Room(missing=f"another engine needs about {needed / _GIB:.1f} GiB of main memory and "
                                f"{free.main_bytes / _GIB:.1f} GiB are free")
        return Room()
    needed = weights // engine.tp_size + _WORKSPACE_BYTES
    by_size = sorted(free.gpus.items(), key=lambda row: -row[1])
    fitting = [gpu for gpu, size in by_size if size >= needed]
    if len(fitting) < engine.tp_size:
        return Room(missing=f"another engine needs {engine.tp_size} GPUs with about {needed / _GIB:.1f} GiB free, and "
                            f"{len(fitting)} of {len(free.gpus)} have that")
    return Room(gpus=tuple(sorted(fitting[: engine.tp_size])))


def free_memory() -> FreeMemory:
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    main = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 2**63)
    if shutil.which(_QUERY[0]) is None:
        return FreeMemory(main)
    try:
        shown = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True).stdout
        rows = [line.split(",") for line in shown.splitlines() if line.strip()]
        return FreeMemory(main, {index.strip(): int(mib) * 2**20 for index, mib in rows} or None)
    except (OSError, ValueError, subprocess.SubprocessError):
        return FreeMemory(main)


def weight_bytes(target: Path, use: DrafterUse) -> int:
    """Bytes of the safetensors files of target and drafter."""
    drafter = [Path(use.drafter_dir)] if use.drafter_dir is not None and use.setting.method == "drafter" else []
    return sum(map(weights_on_disk, (target, *drafter)))


class EmbeddedEndpoints:
    def __init__(self, settings: Settings, database: Database, clock: Clock = utc_now,
                 free: Callable[[], FreeMemory] = free_memory) -> None:
        self._settings, self._clock, self._free_memory = settings, clock, free
        self._records = EndpointRecords(settings, database, clock)
        self._endpoints = self._records.endpoints

    def reconcile(self, name: str) -> None:
        """One step of one endpoint. Does nothing for one that was deleted, or that another process reconciles."""
        directory = endpoint_dir(self._settings.home, name)
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "lock").open("w") as lock:
            try:  # the kernel releases the lock of a process that is killed
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            try:
                for _ in range(_MAX_STEPS):
                    if not self._step(name, directory):
                        return
            except NotFound as reason:
                log.info("endpoint %s: %s", name, reason)

    def _step(self, name: str, directory: Path) -> bool:
        """Observe, plan, act, store; returns whether another step should follow at once."""
        endpoint, serving = self._endpoints.get(name), self._endpoints.serving(name)
        policy, now = self._records.policy(endpoint, serving), self._clock()
        seen = self._observe(endpoint, serving, directory)
        plan = plan_endpoint(endpoint, policy, seen, now)
        conditions = endpoint.conditions
        action: act.EndpointAction | None = None
        try:
            for action in plan.actions:
                if isinstance(action, act.CloseWindow):
                    # `now` is before the counters were read: a request that went on past its end since then is noted.
                    folder, engine = engine_dir(directory, action.revision), seen.engine(action.revision)
                    record = read_record(folder / ENGINE_FILE, EngineRecord)
                    if record is not None and engine is not None and engine.counted:
                        window = Window(since=now, counts=dict(engine.counted))
                        write_sealed(folder / ENGINE_FILE, record.model_copy(update={"window": window}))
                self._act(action, endpoint, serving, directory)
                conditions = self._records.record(action, endpoint, conditions, directory)
        except Transient as reason:
            plan = EndpointPlan((), "Unknown", reason.reason, str(reason))
        except EyrieError as error:  # permanent: its port is in use, its target does not exist
            plan = EndpointPlan((), "False", error.reason, str(error))
            # An active revision that cannot be started says nothing of the candidate, which may be the way out of it.
            if not isinstance(action, act.StartEngine) or action.revision != endpoint.active_revision:
                conditions = self._records.reject_candidate(error, endpoint, conditions)
        conditions = observe(conditions, "Serving", plan.serving, plan.reason, plan.message, now)
        conditions = observe_recording(conditions, policy.drift, serving.serve.record_prompts, now)
        delete_older(directory, serving.serve.record_days, now)
        gateway = find_gateway(directory)
        port = gateway.port if gateway is not None else read_port(directory, endpoint.url)
        self._records.save_status(endpoint, conditions, f"http://{HOST}:{port}/v1" if port is not None else None)
        return bool(plan.actions)

    # Observation.

    def _observe(self, endpoint: Endpoint, serving: Serving, directory: Path) -> ObservedEndpoint:
        gateway = find_gateway(directory)
        adopt_engines(directory, self._clock())
        route = read_record(directory / ROUTE_FILE, RouteRecord)
        engines = tuple(self._observe_engine(record, folder, endpoint, serving, gateway)
                        for folder, record in list_engines(directory))
        # A restarted engine has a new port: a route to the old one counts as no route.
        urls = {record.revision: record.url for _, record in list_engines(directory)}
        routed = None
        if route is not None and not route.on_hold and urls.get(route.revision) == route.url:
            routed = route.revision
        # Why the candidate's engine does not fit next to the serving one; empty where none is to be started.
        number, no_room = endpoint.candidate_revision, ""
        if number is not None and any(engine.state != "dead" for engine in engines) and all(
                engine.revision != number for engine in engines):
            no_room = self._room(endpoint, serving, number).missing
        watched = self._records.watched(endpoint)
        canary = None
        if route is not None and route.others:
            counters = None if gateway is None else ask_gateway(gateway, COUNTERS_PATH, RequestCounters)
            # Race: the gateway may not have read this route yet. Its counters then belong to the previous route.
            is_counted = counters is not None and counters.since == route.since
            outcomes = counters.revisions if counters is not None and is_counted else {}
            shared, outcome = route.others[0], outcomes.get(route.others[0].revision, RequestCounts())
            canary = ObservedCanary(shared.revision, shared.share, route.since, outcome.answered, outcome.errors)
        active = endpoint.revision(endpoint.active_revision)
        running = any(engine.revision == endpoint.active_revision and engine.state != "dead" for engine in engines)
        damage = ""  # the drafter's files differ from the manifest of the stage that made them
        if active is not None and active.use.drafter_dir is not None and not running:
            try:
                verify_part(Path(active.use.drafter_dir))
            except (ArtifactMissing, ArtifactCorrupt) as error:
                damage = damaged_drafter(error.message)
        return ObservedEndpoint(gateway_alive=gateway is not None, routed=routed, engines=engines,
                                windows=watched.windows, drift_reported=watched.drift_reported, canary=canary,
                                no_room=no_room, drafter_damage=damage)

    def _room(self, endpoint: Endpoint, serving: Serving, number: int) -> Room:
        use = next(each for each in endpoint.revisions if each.number == number).use
        weights = weight_bytes(resolve_target(serving.target), use)
        return find_room(serving.serve.engine, weights, self._free_memory())

    def _observe_engine(self, record: EngineRecord, folder: Path, endpoint: Endpoint, serving: Serving,
                        gateway: GatewayRecord | None) -> ObservedEngine:
        if not is_alive(record.process):
            return ObservedEngine(record.revision, "dead", record.started_at, record.starts, record.retiring_since,
                                  message=last_lines(folder / "engine.log"), alone=record.alone)
        known = record
        if record.url is None:
            url = probe(folder, endpoint.model)
            if url is None:
                # A serving engine whose address is not known has said for long where it is, and is not there: its
                # record was lost, and its ready file is damaged. It is started again, as one that died. (A candidate is
                # rejected by the plan.)
                limit = timedelta(seconds=serving.serve.healthy_within_s)
                lost = (record.revision == endpoint.active_revision and (folder / "ready.json").exists()
                        and self._clock() - record.started_at > limit)
                if lost:
                    log.warning("the engine of %s is not where its ready file says for %s: it is started again", folder,
                                limit)
                    stop_group(record.process, grace_s=0.0)
                return ObservedEngine(record.revision, "dead" if lost else "starting", record.started_at, record.starts,
                                      record.retiring_since, alone=record.alone)
            began = read_counters(url) or EngineCounters()  # baseline: the probe's own rounds do not count
            record = record.model_copy(update={
                "url": url, "window": Window(since=self._clock(), counts={"": began})})
        if record.starts and (self._clock() - record.started_at).total_seconds() > _LASTING_S:
            record = record.model_copy(update={"starts": 0})
        if record != known:
            write_sealed(folder / ENGINE_FILE, record)
        assert record.url is not None
        assert record.window is not None
        counters, ours = read_counters(record.url), serving.serve.engine.kind == "embedded"
        # Race: read after the counters, so that what they count has been noted. While the gateway does not respond,
        # nothing is judged. Our engine counts answers past their end separately.
        unended = None if ours or gateway is None else ask_gateway(gateway, UNENDED_PATH, UnendedAnswers)
        counts = {} if counters is None else {"": counters}
        seen = increase(counts, record.window.counts) if ours or unended is not None else EngineCounters()
        return ObservedEngine(record.revision, "healthy", record.started_at, record.starts, record.retiring_since,
                              window=seen, window_since=record.window.since, alone=record.alone,
                              window_unended=counters is not None and unended is not None
                              and unended.within(record.revision, record.window.since), counted=counts)

    # Actions. Each is idempotent: after a crash it is applied again.

    def _act(self, action: act.EndpointAction, endpoint: Endpoint, serving: Serving, directory: Path) -> None:
        now, serve = self._clock(), serving.serve
        recording = Recording(latest=serve.record_prompts, share=serve.record_share,
                              consented_only=serve.record_consented_only)
        if isinstance(action, act.StartGateway):
            start_gateway(directory, serve.port, endpoint.url)
        elif isinstance(action, act.StopGateway):
            stop_gateway(directory)
        elif isinstance(action, act.StartEngine):
            self._start_engine(action, endpoint, serving, directory)
        elif isinstance(action, act.ShareRoute | act.Route):
            main, others = action.revision, tuple[Share, ...]()
            if isinstance(action, act.ShareRoute):
                main, others = action.serving, (Share(
                    revision=action.revision, url=_engine_url(directory, action.revision), share=action.share),)
            write_model(directory / ROUTE_FILE, RouteRecord(
                revision=main, url=_engine_url(directory, main), since=now, others=others, recording=recording))
        elif isinstance(action, act.AnnounceGap):
            # Before the engine is stopped, so that no request meets a closed port.
            route = read_record(directory / ROUTE_FILE, RouteRecord)
            if route is not None:
                write_model(directory / ROUTE_FILE, route.model_copy(update={"on_hold": True, "others": ()}))
        elif isinstance(action, act.EndEngine):
            folder = engine_dir(directory, action.revision)
            record = read_record(folder / ENGINE_FILE, EngineRecord)
            if record is not None and action.how == "retire":
                if is_alive(record.process):
                    # To the leader only: SGLang's child processes would exit at once and drop their requests.
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(record.process.pid, signal.SIGTERM)
                write_sealed(folder / ENGINE_FILE, record.model_copy(update={"retiring_since": now}))
            elif record is not None and action.how == "kill":
                stop_group(record.process, grace_s=0.0)
            elif record is not None:
                stop_marked(folder, 0.0)  # children that outlived it
                for name in (ENGINE_FILE, "ready.json"):  # its log is kept for diagnosis
                    (folder / name).unlink(missing_ok=True)

    def _start_engine(self, action: act.StartEngine, endpoint: Endpoint, serving: Serving, directory: Path) -> None:
        revision = next(each for each in endpoint.revisions if each.number == action.revision)
        folder = engine_dir(directory, action.revision)
        previous = read_record(folder / ENGINE_FILE, EngineRecord)
        if previous is not None and is_alive(previous.process):
            return
        rules = serving.rules(self._settings.home.absolute(), revision.job_id)
        check_path("target.model", serving.target.model, rules)
        if revision.use.drafter_dir is not None:
            check_path("the drafter", revision.use.drafter_dir, rules)
        folder.mkdir(parents=True, exist_ok=True)
        argv = engine_argv(serving, revision.use, endpoint.model, folder / "ready.json")
        stop_marked(folder, 0.0)  # children of an engine that was killed: a running engine has been adopted
        (folder / "ready.json").unlink(missing_ok=True)
        gpus = self._room(endpoint, serving, action.revision).gpus if serving.serve.engine.kind == "sglang" else ()
        # Race: killed between spawn and record, the next control plane finds the engine by its mark.
        process = spawn(argv, Mark(folder=str(folder), alone=action.alone), folder / "engine.log",
                        {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else None)
        write_sealed(folder / ENGINE_FILE, EngineRecord(
            revision=action.revision, process=process, started_at=self._clock(), starts=action.starts,
            alone=action.alone))


def _engine_url(directory: Path, revision: int) -> str:
    record = read_record(engine_dir(directory, revision) / ENGINE_FILE, EngineRecord)
    assert record is not None
    assert record.url is not None
    return record.url
