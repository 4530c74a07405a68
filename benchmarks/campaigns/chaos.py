"""Kills (-9) and other faults at random moments, and what the histories of jobs say afterwards: `make campaign-chaos`.

Database, chores, HTTP, runs, kfp.local and the frame of stages are the product's; only the stages do no work
(`tests.pipelines.rehearsal`), so that jobs are short. An endpoint serves a tiny target through its gateway, and callers
ask it all the time (`live_traffic`). One process holds the control plane, or with `--servers` API, workers, PostgreSQL,
Redis and S3 are processes of their own (`deployments`). Again and again one to MAX_AT_ONCE of these are killed:

- the processes of the deployment, forked children of workers among them;
- a process of a run: leader, task of the pipeline, stage program. At most MAX_KILLS_OF_RUN kills hit one job's run
  while it gets no further, since a stage program that is killed `MAX_ATTEMPTS` times, or a run whose leader dies
  `MAX_STARTS` times, is given up on purpose then;
- the gateway, an engine.

Faults besides: the disk of the home, a small one of its own, is full for seconds (needs root, else left out); the wall
clock of one process of the deployment jumps (needs a C compiler, else left out). When a job has ended, its history is
compared with the rules of `histories`. At the end the endpoint answers again, and after the deployment's end no process
of it is left. The API answers with no 5xx but 503 with Retry-After, which is tried again.

Counts are added up over runs in the state file, also of runs that are interrupted: `--state FILE` (delete it to start
from zero).

    python -m benchmarks.campaigns.chaos [--seed 1] [--seconds 240] [--servers] [--state FILE] [--out FILE]
"""

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.campaigns.deployments import Deployment, OnePlane, Separate
from benchmarks.campaigns.histories import History, broken_lists, broken_rules, outcome
from benchmarks.campaigns.live_servers import scratch
from benchmarks.campaigns.live_traffic import Callers
from benchmarks.campaigns.report import ROOT, Campaign, options
from eyrie_api.artifacts import read_manifest, verify_files
from eyrie_api.artifacts.directories import download_dir
from eyrie_api.contract.serving import ServeSpec
from eyrie_api.errors import EyrieError
from eyrie_api.processes import last_lines
from eyrie_operator.embedded.gateway import GATEWAY_FILE, GatewayRecord
from eyrie_operator.embedded.processes import endpoint_dir, list_engines
from eyrie_pipelines import local
from eyrie_pipelines.processes import identify, wait_until
from eyrie_pipelines.run_records import read_record, work_done
from eyrie_workers.catalog import stage_dir
from tests.cluster.patience import PATIENCE
from tests.pipelines.conftest import REHEARSAL, Rehearsal, spec_of
from tests.small_disk import small_disk
from tests.tiny import tiny_target

LIVE = "live"
"""The endpoint that callers ask. Jobs decide on `default`, which serves nothing."""

MAX_KILLS_OF_RUN = 2
MAX_AT_ONCE = 3
JOBS_AT_ONCE = 2
DISK_MIB = 512
FULL_S = (1.0, 6.0)
"""How long a disk is full."""

SHIFTS_S = (-86_400, -3_600, -300, -10, 0, 0, 10, 300, 3_600, 86_400)
_FAULT_SHARE = 0.08
"""Of the steps, for each kind of fault that is no kill."""

_SAY_EVERY_S = 10.0
END_S = 180.0 * PATIENCE
"""For a job to end once nothing is killed any more."""

_BODY = spec_of(serve=ServeSpec(enabled=False)).model_dump(mode="json")


class Chaos:
    """One deployment, and the jobs that have not been checked."""

    def __init__(self, campaign: Campaign, deployment: Deployment, disk: Path | None) -> None:
        self.campaign, self.deployment, self.home, self._disk = campaign, deployment, deployment.home, disk
        self.live = endpoint_dir(self.home, LIVE)
        self.callers = Callers(campaign, self.live, LIVE)
        self.rng = random.Random(campaign.seed)
        self.counts: Counter[str] = Counter()
        """Kills by kind of process, and other faults by kind."""

        self.kills_of: Counter[str] = Counter()
        self._stuck: dict[str, tuple[tuple[int, float], int]] = {}
        """The furthest work at a kill of each job's run, and the kills since it got there."""

        self.accepted: list[str] = []
        self.open: list[str] = []
        self.checked = 0
        self._expected: dict[str, Any] | None = None
        self.revive()

    def revive(self) -> None:
        """Start again what has died."""
        problem = self.deployment.revive()
        if problem is not None:
            self.campaign.add_finding("a deployment starts after kills", problem=problem)

    def ask(self, method: str, path: str, **given: Any) -> httpx.Response:
        """The API's answer, after as many refused connections and 503 with Retry-After as it takes while a server comes
        back. Raises httpx.TransportError when it does not."""
        deadline = time.monotonic() + END_S
        while True:
            try:
                answer = self.deployment.http.request(method, path, **given)
            except httpx.TransportError:  # `revive` has reported that it did not start in time
                if time.monotonic() > deadline:
                    raise
            else:
                self._judge(answer)
                if answer.status_code < 500 or time.monotonic() > deadline:
                    return answer
            time.sleep(0.5)

    def _judge(self, answer: httpx.Response) -> None:
        if answer.status_code >= 500 and not (answer.status_code == 503 and "retry-after" in answer.headers):
            self.campaign.add_finding("the API has no error but 503 with Retry-After", path=answer.url.path,
                                      status=answer.status_code, body=answer.text[:500])

    def listed(self, path: str, **wanted: Any) -> list[dict[str, Any]]:
        """All pages of a list; empty where there is none (an endpoint that nothing was decided for)."""
        found: list[dict[str, Any]] = []
        cursor: dict[str, Any] = {}
        while True:
            answer = self.ask("GET", path, params={**wanted, **cursor}, headers={"Accept": "application/json"})
            if answer.status_code == 404:
                return found
            page = answer.raise_for_status().json()
            found += page["items"]
            if not page.get("next_cursor"):
                return found
            cursor = {"cursor": page["next_cursor"]}

    def serves(self) -> bool:
        """Whether the live endpoint answers."""
        gateway = read_record(self.live / GATEWAY_FILE, GatewayRecord)
        try:
            return gateway is not None and httpx.get(
                f"http://127.0.0.1:{gateway.port}/health", trust_env=False, timeout=30.0).status_code == 200
        except httpx.HTTPError:
            return False

    def submit(self) -> None:
        """Keep a few jobs in progress. Some clients send their request twice, with its key."""
        while len(self.open) < JOBS_AT_ONCE:
            key = self._next_key()
            answer = self.ask("POST", "/v1alpha1/jobs", json=_BODY, headers=key)
            if not self._note_accepted(answer):
                self.campaign.add_finding("a job is accepted", status=answer.status_code, body=answer.text[:500])
                return
            if self.rng.random() < 0.3:
                again = self.ask("POST", "/v1alpha1/jobs", json=_BODY, headers=key)
                if again.status_code != 202 or again.json()["id"] != answer.json()["id"]:
                    self.campaign.add_finding("a request sent again with its key is answered the same",
                                              status=again.status_code, body=again.text[:500])

    def _next_key(self) -> dict[str, str]:
        """Header of the next request for a job: one that was refused is sent again under the same key."""
        return {"Idempotency-Key": f"chaos-{len(self.accepted)}"}

    def _note_accepted(self, answer: httpx.Response) -> bool:
        if answer.status_code == 202:
            self.open.append(answer.json()["id"])
            self.accepted.append(answer.json()["id"])
        return answer.status_code == 202

    def disturb(self) -> None:
        """One to MAX_AT_ONCE kills, or another fault, at a random moment."""
        time.sleep(self.rng.uniform(0.0, 1.5))
        drawn = self.rng.random()
        if drawn < _FAULT_SHARE:
            self._shift_clock()
        elif drawn < 2 * _FAULT_SHARE:
            self._fill_disk()
        else:
            for _ in range(self.rng.choice((1,) * 3 + tuple(range(1, MAX_AT_ONCE + 1)))):
                self._kill_one()
            time.sleep(self.rng.choice((0.0, 0.0, 0.5, 3.0)))
            self.revive()

    def _kill_one(self) -> None:
        victims = [(kind, "", pid) for kind, pid in self.deployment.victims()]
        for job_id in self.open:
            work, kills = self._stuck.get(job_id, ((0, 0.0), 0))
            if kills < MAX_KILLS_OF_RUN or work_done(self._node_dir(job_id)) > work:
                victims += [("run", job_id, pid) for pid in local.live_processes(self._node_dir(job_id))]
        if (gateway := read_record(self.live / GATEWAY_FILE, GatewayRecord)) is not None:
            victims.append(("gateway", "", gateway.process.pid))
        victims += [("engine", "", engine.process.pid) for _, engine in list_engines(self.live)][-1:]
        # A kind first: else the many forked children of workers would be drawn most of the time.
        wanted = self.rng.choice(sorted({kind for kind, _job_id, _pid in victims}))
        kind, job_id, pid = self.rng.choice([one for one in victims if one[0] == wanted])
        if pid == 0:
            self.deployment.kill(kind)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            wait_until(lambda: identify(pid) is None, END_S)  # on a busy machine it takes seconds
        self.counts[kind] += 1
        if kind == "run":
            self.kills_of[job_id] += 1
            # Read after the process has ended: what it did between the choice and the kill is no progress since.
            work, (furthest, kills) = work_done(self._node_dir(job_id)), self._stuck.get(job_id, ((0, 0.0), 0))
            self._stuck[job_id] = (max(work, furthest), 1 if work > furthest else kills + 1)

    def _shift_clock(self) -> None:
        if self.deployment.clocks:
            clock = self.deployment.clocks[self.rng.choice(sorted(self.deployment.clocks))]
            clock.shift(self.rng.choice(SHIFTS_S))
            self.counts["clock jump"] += 1

    def _fill_disk(self) -> None:
        if self._disk is None:
            return
        filler = self._disk / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:  # until no byte is free; others write and delete meanwhile
                file.write(bytes(1 << 16))
        self.counts["full disk"] += 1
        try:
            time.sleep(self.rng.uniform(*FULL_S))
            answer = self.deployment.http.post("/v1alpha1/jobs", json=_BODY, headers=self._next_key())
            if answer.status_code != 507:  # the disk is too small for the job: a refusal with its hint
                self._judge(answer)
            self._note_accepted(answer)
        finally:
            filler.unlink()

    def check_ended(self) -> None:
        """Check the histories of the jobs that have ended."""
        for job_id in list(self.open):
            if self.ask("GET", f"/v1alpha1/jobs/{job_id}").json()["status"]["finished_at"] is not None:
                self.open.remove(job_id)
                self._check(job_id)
                self.checked += 1

    def _check(self, job_id: str) -> None:
        history = self._history(job_id)
        for rule, facts in broken_rules(history, self._expected):
            self.campaign.add_finding(rule, job=job_id, kills=self.kills_of[job_id], **facts,
                                      log=last_lines(self._node_dir(job_id) / "run" / "pipeline.log", 12))
        if self._expected is None and history.job["status"]["phase"] == "Succeeded":
            self._expected = outcome(history)

    def _history(self, job_id: str) -> History:
        job = self.ask("GET", f"/v1alpha1/jobs/{job_id}").json()
        decided = self.listed("/v1alpha1/endpoints/default/history", kind="decided", limit=500)
        written, damage = {}, []
        for stage, key in ((one["stage"], one["key"]) for one in job["status"]["stages"]):
            with scratch("stored") as copy:
                try:
                    root = stage_dir(self._node_dir(job_id), stage, key)
                    if (store := self.deployment.store()) is not None:  # a node keeps only what its last run has read
                        name = stage_dir(Path("jobs") / job_id, stage, key).as_posix()
                        download_dir(store, name, copy)
                        (copy / "events.jsonl").write_bytes(store.read(f"{name}/events.jsonl"))
                        root = copy
                    with contextlib.suppress(FileNotFoundError):
                        written[stage, key] = (root / "events.jsonl").read_text().splitlines()
                    verify_files(read_manifest(root), root)
                except EyrieError as error:
                    damage.append(f"{stage} {key}: {error}")

        def left() -> list[int]:
            return local.live_processes(self._node_dir(job_id))

        ended = wait_until(lambda: not left(), 10.0)
        return History(job, self.listed(f"/v1alpha1/jobs/{job_id}/events", limit=500),
                       [one for one in decided if one["job_id"] == job_id], written, damage,
                       [] if ended else [str(pid) for pid in left()])

    def _node_dir(self, job_id: str) -> Path:
        return self.deployment.node() / "jobs" / job_id

    def finish(self) -> None:
        """Kill nothing more and set all clocks: what is open has to end."""
        for clock in self.deployment.clocks.values():
            clock.shift(0)

        def ended() -> bool:
            self.check_ended()
            return not self.open

        if not wait_until(self.serves, END_S):
            row = self.ask("GET", f"/v1alpha1/endpoints/{LIVE}").json()
            self.campaign.add_finding("an endpoint whose processes were killed serves again",
                                      conditions=row["conditions"], files={
                one.relative_to(self.live).as_posix(): one.read_text(errors="replace")[-1500:]
                for pattern in ("*.json", "engines/*/*.json", "*.log", "engines/*/*.log")
                for one in sorted(self.live.glob(pattern))})
        if not wait_until(ended, END_S):
            self.campaign.add_finding("each accepted job ends", jobs=[
                self.ask("GET", f"/v1alpha1/jobs/{job_id}").json()["status"] for job_id in self.open])
        listed = [one["id"] for one in self.listed("/v1alpha1/jobs", limit=100)]
        for rule, facts in broken_lists(self.accepted, listed):
            self.campaign.add_finding(rule, **facts)


def check_nothing_is_left(campaign: Campaign, path: Path) -> None:
    """After the end of the deployment no process mentions its directory."""
    def left() -> list[str]:
        found = []
        for line in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = line.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if str(path) in words and int(line.parent.name) != os.getpid():
                    found.append(words[:300])
        return found

    if not wait_until(lambda: not left(), 20.0):
        campaign.add_finding("no process is left after the deployment's end", processes=left())


@contextlib.contextmanager
def rehearsed(path: Path) -> Iterator[Rehearsal]:
    """Within the block, stages of every child process are rehearsed ones."""
    home = path / "rehearsal"
    home.mkdir(exist_ok=True)
    before = dict(os.environ)
    os.environ |= {"EYRIE_REHEARSAL": str(home), "EYRIE_RETRY_BACKOFF_S": "0.01",
                   "PYTHONPATH": f"{REHEARSAL}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    try:
        yield Rehearsal(home)
    finally:
        os.environ.clear()
        os.environ |= before


@contextlib.contextmanager
def _disk_of_its_own(path: Path) -> Iterator[Path | None]:
    """`path` as a file system of DISK_MIB; None, and a plain directory, where none may be mounted."""
    with contextlib.ExitStack() as mounted:
        disk = None
        try:
            disk = mounted.enter_context(small_disk(path, DISK_MIB << 20))
        except PermissionError:
            path.mkdir(exist_ok=True)
        yield disk


def run(campaign: Campaign, path: Path, state: Path, *, servers: bool) -> dict[str, Any]:
    """Disturb a deployment below `path` until the time is over; returns figures."""
    before: dict[str, Any] = {"counts": {}, "jobs": 0, "found": 0}
    if state.exists():
        before = json.loads(state.read_text())
    total = before
    with _disk_of_its_own(path / "disk") as disk:
        home = path / "disk" / "home"
        home.mkdir()
        tiny_target(path / "target")
        form = Separate if servers else OnePlane
        deployment = form(home, path, path / "target", LIVE, port=0, max_concurrency=2)
        try:
            chaos = Chaos(campaign, deployment, disk)

            def save() -> dict[str, Any]:
                added = {"counts": dict(sorted((Counter(before["counts"]) + chaos.counts).items())),
                         "jobs": before["jobs"] + chaos.checked, "found": before["found"] + campaign.found}
                state.parent.mkdir(parents=True, exist_ok=True)
                state.write_text(json.dumps(added) + "\n")
                return added

            assert wait_until(chaos.serves, END_S), "the endpoint does not serve"
            chaos.callers.start()
            campaign.began = time.monotonic()
            try:
                said_s = 0.0
                while not campaign.is_over:
                    chaos.submit()
                    chaos.disturb()
                    chaos.check_ended()
                    if campaign.elapsed_s >= said_s + _SAY_EVERY_S:
                        said_s = campaign.elapsed_s
                        total = save()
                        campaign.print_progress(chaos.counts.total(), f"faults, {chaos.checked} jobs checked")
                chaos.finish()
            finally:
                chaos.callers.stop()
                total = save()
        finally:
            deployment.close()
        check_nothing_is_left(campaign, path)
    left_out = [*(() if disk else ("full disks: none can be mounted",)),
                *(() if deployment.clocks else ("clock jumps: no C compiler",))]
    return {"kills and faults": dict(sorted(chaos.counts.items())), "left out": left_out, "jobs": chaos.checked,
            "callers": dict(chaos.callers.seen),
            "longest time without an answer, s": round(chaos.callers.longest_outage_s, 1), "over all runs": total}


def main() -> int:
    """Run the campaign."""
    parser = options("chaos", "Kills and other faults at random moments over many short jobs.", 240.0)
    parser.add_argument("--state", type=Path, default=ROOT / ".eyrie/campaigns/chaos-state.json",
                        help="counts over all runs of the campaign")
    parser.add_argument("--servers", action="store_true",
                        help="API, workers, PostgreSQL, Redis and S3 as processes of their own")
    wanted = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))  # so that all is stopped
    campaign = Campaign("chaos", wanted.seed, wanted.seconds, wanted.out)
    with scratch("chaos") as path, rehearsed(path):
        return campaign.finish(run(campaign, path, wanted.state, servers=wanted.servers))


if __name__ == "__main__":
    sys.exit(main())
