"""Kills (-9) at random moments, and what the histories of jobs say afterwards: `make campaign-chaos`.

The control plane is a process with its database, chores and HTTP; runs, kfp.local and the frame of stages are the
product's; only the stages do no work (`tests.pipelines.rehearsal`), so that jobs are short. Again and again a random
one of the plane and the processes of all runs is killed. At most MAX_KILLS_OF_RUN kills hit one job's run, since a run
whose leader dies `MAX_STARTS` times is given up on purpose. When a job has ended, its history is checked:

- it succeeded, whatever was killed;
- one decision, one promotion decision event, one end; each stage finished once, each stage's own event is there once;
- every manifest is there, and all files have their digests; no process of it is left.

Counts are added up over runs in the state file: `--state FILE` (delete it to start from zero).

    python -m tests.campaigns.chaos [--seed 1] [--seconds 240] [--state FILE] [--out FILE]
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

from eyrie_api.artifacts import read_manifest, verify_files
from eyrie_api.errors import EyrieError
from eyrie_api.v1alpha1.serving import ServeSpec
from eyrie_pipelines import local
from eyrie_pipelines.processes import wait_until
from eyrie_workers.catalog import stage_dir
from tests.campaigns.live_servers import Plane, scratch
from tests.campaigns.report import ROOT, Campaign, options
from tests.pipelines.conftest import REHEARSAL, Rehearsal, spec_of

MAX_KILLS_OF_RUN = 2
JOBS_AT_ONCE = 2
END_S = 180.0
"""For a job to end once nothing is killed any more."""

_BODY = spec_of(serve=ServeSpec(enabled=False)).model_dump(mode="json")


class Chaos:
    """One home, its control plane, and the jobs that have not been checked."""

    def __init__(self, campaign: Campaign, home: Path) -> None:
        self.campaign, self.home, self.plane = campaign, home, Plane(home)
        self.rng, self.http = random.Random(campaign.seed), self.plane.http
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

    def submit(self) -> None:
        """Keep a few jobs in progress."""
        while len(self.open) < JOBS_AT_ONCE:
            answer = self.http.post("/v1alpha1/jobs", json=_BODY)
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
        kind, job_id, pid = self.rng.choice(victims)
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
            if self.http.get(f"/v1alpha1/jobs/{job_id}").json()["status"]["finished_at"] is not None:
                self.open.remove(job_id)
                self._check(job_id)
                self.checked += 1

    def _check(self, job_id: str) -> None:
        job, directory = self.http.get(f"/v1alpha1/jobs/{job_id}").json(), self.home / "jobs" / job_id
        status = job["status"]
        facts = {"job": job_id, "kills": self.kills_of[job_id]}
        if status["phase"] != "Succeeded":
            wrong = [one for one in status["conditions"] if one["status"] != "True"]
            self.campaign.add_finding("a job ends as if nothing had happened", **facts, phase=status["phase"],
                                      conditions=wrong)
            return
        events = self.http.get(f"/v1alpha1/jobs/{job_id}/events", params={"limit": 500},
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
        decided = self.http.get("/v1alpha1/endpoints/default/history", params={"kind": "decided", "limit": 500}).json()
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

        if not wait_until(ended, END_S):
            self.campaign.add_finding("each accepted job ends", jobs=self.open, phases=[
                self.http.get(f"/v1alpha1/jobs/{job_id}").json()["status"]["phase"] for job_id in self.open])


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
    wanted = parser.parse_args()
    campaign = Campaign("chaos", wanted.seed, wanted.seconds, wanted.out)
    with scratch("chaos") as path, rehearsed(path):
        (path / "home").mkdir()
        chaos = Chaos(campaign, path / "home")
        try:
            while not campaign.is_over:
                chaos.submit()
                chaos.kill_one()
                chaos.check_ended()
            chaos.finish()
        finally:
            chaos.plane.close()
    before = json.loads(wanted.state.read_text()) if wanted.state.exists() else {"kills": {}, "jobs": 0, "found": 0}
    total = {"kills": dict(Counter(before["kills"]) + chaos.kills), "jobs": before["jobs"] + chaos.checked,
             "found": before["found"] + campaign.found}
    wanted.state.parent.mkdir(parents=True, exist_ok=True)
    wanted.state.write_text(json.dumps(total) + "\n")
    return campaign.finish({"kills": dict(chaos.kills), "jobs": chaos.checked, "over all runs": total})


if __name__ == "__main__":
    sys.exit(main())
