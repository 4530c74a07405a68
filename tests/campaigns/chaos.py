"""Kills (-9) at random moments, and what the histories of jobs say afterwards: `make campaign-chaos`.

The control plane is a process with its database, chores and HTTP; runs, kfp.local and the frame of stages are the
product's; only the stages do no work (`tests.pipelines.rehearsal`), so that jobs are short. An endpoint serves a tiny
target through its gateway, and callers ask it all the time (`live_traffic`). With `--servers` rows are in a PostgreSQL
and chores in a Redis, elsewhere in SQLite and in memory. Again and again one of these is killed: the plane, a process
of a run, the gateway, an engine, PostgreSQL, Redis. At most MAX_KILLS_OF_RUN kills hit one job's run, since a run whose
leader dies `MAX_STARTS` times is given up on purpose. When a job has ended, its history is checked:

- it succeeded, whatever was killed;
- one decision, one promotion decision event, one end; each stage finished once, each stage's own event is there once;
- every manifest is there, and all files have their digests; no process of it is left.

At the end the endpoint answers again, and after the plane's end no process of the home is left. The API answers with no
5xx but 503 with Retry-After, which is tried again.

Counts are added up over runs in the state file: `--state FILE` (delete it to start from zero).

    python -m tests.campaigns.chaos [--seed 1] [--seconds 240] [--servers] [--state FILE] [--out FILE]
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

from eyrie_api.artifacts import read_manifest, verify_files
from eyrie_api.errors import EyrieError
from eyrie_api.v1alpha1.serving import ServeSpec
from eyrie_operator.embedded.gateway import GATEWAY_FILE, GatewayRecord
from eyrie_operator.embedded.processes import endpoint_dir, list_engines, read_record
from eyrie_pipelines import local
from eyrie_pipelines.processes import wait_until
from eyrie_workers.catalog import stage_dir
from tests.campaigns.live_servers import Plane, scratch
from tests.campaigns.live_traffic import Callers
from tests.campaigns.report import ROOT, Campaign, options
from tests.pipelines.conftest import REHEARSAL, Rehearsal, spec_of
from tests.servers import postgres
from tests.servers.processes import Server, Session, private_dir
from tests.servers.redis import Redis
from tests.tiny import tiny_target

LIVE = "live"
"""The endpoint that callers ask. Jobs decide on `default`, which serves nothing."""

MAX_KILLS_OF_RUN = 2
JOBS_AT_ONCE = 2
_SAY_EVERY_S = 10.0
END_S = 180.0
"""For a job to end once nothing is killed any more."""

_BODY = spec_of(serve=ServeSpec(enabled=False)).model_dump(mode="json")


class Servers:
    """PostgreSQL and Redis of the campaign's own; none without a stack to end them."""

    def __init__(self, stack: contextlib.ExitStack | None) -> None:
        self._servers: dict[str, Server] = {}
        self._settings: dict[str, str] = {}
        if stack is None:
            return
        session = Session()
        stack.callback(session.end)
        database, broker = postgres.start(private_dir()), Redis(private_dir())
        broker.start()
        assert database.server is not None
        self._servers = {"PostgreSQL": database.server, "Redis": broker.server}
        self._settings = {"database_url": database.url(database.create()), "broker_url": broker.url}

    @property
    def names(self) -> list[str]:
        """Those that can be killed."""
        return list(self._servers)

    def settings(self) -> dict[str, str]:
        """Of a control plane that uses them."""
        return self._settings

    def kill(self, name: str) -> None:
        """kill -9."""
        self._servers[name].kill()

    def start(self, name: str) -> None:
        """Start it again, on the same port."""
        self._servers[name].start()


class Chaos:
    """One home, its control plane, and the jobs that have not been checked."""

    def __init__(self, campaign: Campaign, home: Path, target: Path, servers: Servers) -> None:
        self.campaign, self.home, self.servers = campaign, home, servers
        self.plane = Plane(home, **servers.settings())
        self.live = endpoint_dir(home, LIVE)
        self.plane.add_endpoint(LIVE, str(target), port=0, max_concurrency=2)
        self.callers = Callers(campaign, self.live, LIVE)
        self.rng = random.Random(campaign.seed)
        self.kills: Counter[str] = Counter()
        self.kills_of: Counter[str] = Counter()
        self.open: list[str] = []
        self.checked = 0
        self.start()

    def start(self) -> None:
        """Start the control plane and wait until it is ready."""
        code = self.plane.start()
        if code is not None:
            self.campaign.add_finding("the control plane starts after a kill", code=code,
                                      log=self.plane.log.read_text()[-2000:])

    def ask(self, method: str, path: str, **given: Any) -> httpx.Response:
        """The API's answer, after as many 503 with Retry-After as it takes while a server comes back."""
        deadline = time.monotonic() + END_S
        while True:
            answer = self.plane.http.request(method, path, **given)
            is_retryable = answer.status_code == 503 and "retry-after" in answer.headers
            if answer.status_code >= 500 and not is_retryable:
                self.campaign.add_finding("the API has no error but 503 with Retry-After", path=path,
                                          status=answer.status_code, body=answer.text[:500])
            if answer.status_code < 500 or time.monotonic() > deadline:
                return answer
            time.sleep(0.5)

    def serves(self) -> bool:
        """Whether the live endpoint answers."""
        gateway = read_record(self.live / GATEWAY_FILE, GatewayRecord)
        try:
            return gateway is not None and httpx.get(
                f"http://127.0.0.1:{gateway.port}/health", trust_env=False, timeout=30.0).status_code == 200
        except httpx.HTTPError:
            return False

    def submit(self) -> None:
        """Keep a few jobs in progress."""
        while len(self.open) < JOBS_AT_ONCE:
            answer = self.ask("POST", "/v1alpha1/jobs", json=_BODY)
            if answer.status_code != 202:
                self.campaign.add_finding("a job is accepted", status=answer.status_code, body=answer.text[:500])
                return
            self.open.append(answer.json()["id"])

    def kill_one(self) -> None:
        """Kill a random process at a random moment."""
        time.sleep(self.rng.uniform(0.0, 1.5))
        victims: list[tuple[str, str, int]] = [("plane", "", self.plane.pid)]
        for job_id in self.open:
            if self.kills_of[job_id] < MAX_KILLS_OF_RUN:
                victims += [("run", job_id, pid) for pid in local.live_processes(self.home / "jobs" / job_id)]
        if (gateway := read_record(self.live / GATEWAY_FILE, GatewayRecord)) is not None:
            victims.append(("gateway", "", gateway.process.pid))
        victims += [("engine", "", engine.process.pid) for _, engine in list_engines(self.live)][-1:]
        victims += [(name, "", 0) for name in self.servers.names]
        kind, job_id, pid = self.rng.choice(victims)
        if kind in self.servers.names:
            self.kills[kind] += 1
            self.servers.kill(kind)
            time.sleep(self.rng.choice((0.0, 0.5, 3.0)))
            self.servers.start(kind)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.kills[kind] += 1
            self.kills_of[job_id] += kind == "run"
        if kind == "plane":
            self.plane.kill()
            time.sleep(self.rng.choice((0.0, 0.0, 1.0)))
            self.start()

    def check_ended(self) -> None:
        """Check the histories of the jobs that have ended."""
        for job_id in list(self.open):
            if self.ask("GET", f"/v1alpha1/jobs/{job_id}").json()["status"]["finished_at"] is not None:
                self.open.remove(job_id)
                self._check(job_id)
                self.checked += 1

    def _check(self, job_id: str) -> None:
        job, directory = self.ask("GET", f"/v1alpha1/jobs/{job_id}").json(), self.home / "jobs" / job_id
        status = job["status"]
        facts = {"job": job_id, "kills": self.kills_of[job_id]}
        if status["phase"] != "Succeeded":
            wrong = [one for one in status["conditions"] if one["status"] != "True"]
            self.campaign.add_finding("a job ends as if nothing had happened", **facts, phase=status["phase"],
                                      conditions=wrong)
            return
        events = self.ask("GET", f"/v1alpha1/jobs/{job_id}/events", params={"limit": 500},
                               headers={"Accept": "application/json"}).json()["items"]
        reasons = Counter(one["reason"] for one in events)
        stages = [(one["stage"], one["key"]) for one in status["stages"]]
        finished = Counter((one["stage"], one["key"]) for one in events if one["reason"] == "StageFinished")
        rehearsed = Counter((one["stage"], one["key"]) for one in events if one["reason"] == "Rehearsed")
        if reasons["Succeeded"] != 1 or reasons["Promoted"] != 1 or reasons["Failed"] or reasons["Cancelled"]:
            self.campaign.add_finding("a job has one end and one decision", **facts, reasons=dict(reasons))
        if any(finished[one] != 1 for one in stages):
            self.campaign.add_finding("each finished stage is reported once", **facts, finished=str(finished))
        if any(rehearsed[one] < 1 for one in stages):
            self.campaign.add_finding("no event of a stage is lost", **facts, events=str(rehearsed))
        ids = [one["id"] for one in events]
        if ids != sorted(set(ids)):
            self.campaign.add_finding("events are in order", **facts)
        wanted = {"kind": "decided", "limit": 500}
        decided = self.ask("GET", "/v1alpha1/endpoints/default/history", params=wanted).json()
        if sum(one["job_id"] == job_id for one in decided["items"]) != 1:
            self.campaign.add_finding("a job is decided once", **facts)
        for stage, key in stages:
            try:
                root = stage_dir(directory, stage, key)
                verify_files(read_manifest(root), root)
            except EyrieError as error:
                self.campaign.add_finding("all digests are right", **facts, stage=stage, key=key, error=str(error))
        if not wait_until(lambda: not local.live_processes(directory), 10.0):
            self.campaign.add_finding("no process is left", **facts, pids=local.live_processes(directory))

    def finish(self) -> None:
        """Kill nothing more: what is open has to end."""
        def ended() -> bool:
            self.check_ended()
            return not self.open

        if not wait_until(self.serves, END_S):
            self.campaign.add_finding("an endpoint whose processes were killed serves again")
        if not wait_until(ended, END_S):
            self.campaign.add_finding("each accepted job ends", jobs=self.open, phases=[
                self.ask("GET", f"/v1alpha1/jobs/{job_id}").json()["status"]["phase"] for job_id in self.open])


def check_nothing_is_left(campaign: Campaign, home: Path) -> None:
    """After the end of the plane no process mentions its home."""
    def left() -> list[str]:
        found = []
        for line in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = line.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if str(home) in words and int(line.parent.name) != os.getpid():
                    found.append(words[:300])
        return found

    if not wait_until(lambda: not left(), 20.0):
        campaign.add_finding("no process is left after the control plane's end", processes=left())


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


def main() -> int:
    """Run the campaign."""
    parser = options("chaos", "Kills at random moments over many short jobs.", 240.0)
    parser.add_argument("--state", type=Path, default=ROOT / ".eyrie/campaigns/chaos-state.json",
                        help="counts over all runs of the campaign")
    parser.add_argument("--servers", action="store_true", help="with PostgreSQL and Redis, which are killed too")
    wanted = parser.parse_args()
    campaign = Campaign("chaos", wanted.seed, wanted.seconds, wanted.out)
    with scratch("chaos") as path, rehearsed(path), contextlib.ExitStack() as stack:
        home = path / "home"
        home.mkdir()
        tiny_target(path / "target")
        servers = Servers(stack) if wanted.servers else Servers(None)
        chaos = Chaos(campaign, home, path / "target", servers)
        try:
            assert wait_until(chaos.serves, END_S), "the endpoint does not serve"
            chaos.callers.start()
            said_s = 0.0
            while not campaign.is_over:
                chaos.submit()
                chaos.kill_one()
                chaos.check_ended()
                if campaign.elapsed_s >= said_s + _SAY_EVERY_S:
                    said_s = campaign.elapsed_s
                    campaign.print_progress(chaos.kills.total(), f"kills, {chaos.checked} jobs checked")
            chaos.finish()
        finally:
            chaos.callers.stop()
            chaos.plane.close()
        check_nothing_is_left(campaign, home)
    before = json.loads(wanted.state.read_text()) if wanted.state.exists() else {"kills": {}, "jobs": 0, "found": 0}
    total = {"kills": dict(Counter(before["kills"]) + chaos.kills), "jobs": before["jobs"] + chaos.checked,
             "found": before["found"] + campaign.found}
    wanted.state.parent.mkdir(parents=True, exist_ok=True)
    wanted.state.write_text(json.dumps(total) + "\n")
    return campaign.finish({
        "kills": dict(chaos.kills), "jobs": chaos.checked, "callers": dict(chaos.callers.seen),
        "longest time without an answer, s": round(chaos.callers.longest_outage_s, 1), "over all runs": total})


if __name__ == "__main__":
    sys.exit(main())
