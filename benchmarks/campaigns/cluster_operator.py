"""Kills (-9) of the operator on a real API server, and what objects and rows say afterwards: `make campaign-operator`.

Two operators, of which one leads, work on a namespace and a database of the campaign's own. Meanwhile DrafterJobs and
DraftEndpoints are applied, suspended, switched and deleted, and jobs and endpoints are made and changed in the database
as by the REST API. Pods need not run: the campaign plays the drivers of the jobs (it ends them), and no engine becomes
ready. Faults, at random moments:

- kill -9 of an operator, the leader or the one that stands by;
- an operator that is stopped (SIGSTOP) for longer than its lease, and goes on when the other leads;
- an API server that does not answer for seconds (SIGSTOP), on a cluster of this machine (EYRIE_CLUSTER_STATE) alone.

After each period all is left alone until it has settled, or SETTLE_S have passed: the rules of `operator_rules` hold
then. Both operators are killed, and a new leader whose writes are refused has nothing to write: objects, statuses,
Deployments and Services are as the pure functions say.

Without KUBECONFIG it exits with 75. The cluster has to be one on which definitions and namespaces may be made.

    python -m benchmarks.campaigns.cluster_operator [--seed 1] [--seconds 300] [--out FILE]
"""

import contextlib
import os
import random
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from benchmarks.campaigns.histories import Broken
from benchmarks.campaigns.live_servers import scratch
from benchmarks.campaigns.operator_rules import broken_endpoints, broken_jobs
from benchmarks.campaigns.report import Campaign, options
from eyrie_api.clock import utc_now
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.status import Job
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.migrations import upgrade
from eyrie_api.errors import Conflict, EyrieError, NotFound
from eyrie_api.planning.resolve import derive
from eyrie_api.settings import Settings
from eyrie_operator.cluster.client import FIELD_MANAGER, Cluster, Object
from eyrie_operator.cluster.controller import Controller, Kind
from eyrie_operator.cluster.leases import NotLeader
from eyrie_operator.cluster.workqueue import Telemetry
from eyrie_operator.conditions import is_over
from eyrie_operator.manifests.deployment import ENDPOINT_LABEL
from tests.api.samples import ended, job_body, job_spec
from tests.cluster.definitions import define_ours, delete_namespace
from tests.cluster.operators import LEASE_S, OperatorProcess, start_operator

API = "eyrie.dev/v1alpha1"
KINDS: tuple[Kind, ...] = ("DrafterJob", "DraftEndpoint")
OWNED = (("apps/v1", "Deployment"), ("v1", "Service"))
PERIOD_S = 45.0
SETTLE_S = 240.0
"""A submission that was begun by a killed operator is made again after a minute."""

MAX_OBJECTS = 30
POLL_S = 2.0
"""Between two looks of an operator at the rows."""

_STARTUP_S = 3600
"""Longer than the campaign: a candidate whose pods never run is not given up."""


class ReadOnlyCluster(Cluster):
    """Notes the writes that it is asked for, and refuses them."""

    def __init__(self, check: Callable[[], None], places: list[str]) -> None:
        super().__init__(check)
        self._places = places

    def _write(self, verb: str, kind: str, path: str, body: Mapping[str, Any], content_type: str,
               field_manager: str = FIELD_MANAGER, *, force: bool = False) -> Object:
        self._places.append(f"{verb} {path}: {dict(body)}"[:1500])
        raise NotLeader("the campaign's controller may not write")


class Campaigner:
    """A namespace, a database, two operators, and what was asked of them."""

    def __init__(self, campaign: Campaign, cluster: Cluster, namespace: str, home: Path) -> None:
        self.campaign, self.cluster, self.namespace, self.home = campaign, cluster, namespace, home
        self.rng = random.Random(campaign.seed)
        self.settings = Settings(home=home, cluster_profile=_write_profile(home, namespace))
        os.environ["EYRIE_CLUSTER_PROFILE"] = str(self.settings.cluster_profile)  # of the operators
        self.database = Database(self.settings.resolved_database_url)
        upgrade(self.database)
        self.jobs, self.endpoints = Jobs(self.database), Endpoints(self.database)
        self.counts: Counter[str] = Counter()
        self._num_made = 0
        self._operators: list[OperatorProcess] = []
        self._server = _server_of_this_machine()

    # Operators.

    def revive(self) -> None:
        """Two operators run."""
        self._operators = [one for one in self._operators if one.process.poll() is None]
        while len(self._operators) < 2:
            self._operators.append(start_operator(self.home, self.namespace, "--mirror-namespace", self.namespace))

    def kill_all(self) -> None:
        """No operator runs."""
        for one in self._operators:
            if one.process.poll() is None:
                one.kill()

    def disturb(self) -> None:
        """One fault."""
        self.revive()
        one = self.rng.choice(self._operators)
        kind = self.rng.choice(("kill", "kill", "kill", "stop", *(("server",) if self._server else ())))
        role = "leader" if one.leads else "operator"
        if kind == "kill":
            one.kill()
            self.counts[f"{role} killed"] += 1
        elif kind == "stop":
            with _stopped(one.process.pid):
                time.sleep(LEASE_S * self.rng.uniform(0.3, 2.5))
            self.counts[f"{role} stopped"] += 1
        elif self._server is not None:
            with _stopped(self._server):
                time.sleep(self.rng.uniform(1.0, 2.0 * LEASE_S))
            self.counts["API server stopped"] += 1

    # What users and drivers do.

    def act(self) -> None:
        """One request of a user, or one step of a driver. The API server may be away, and rows may refuse."""
        act = self.rng.choice((self._apply_job, self._apply_job, self._change_job, self._delete_job, self._end_job,
                               self._submit_job, self._cancel_job, self._apply_endpoint, self._change_endpoint,
                               self._delete_endpoint, self._change_row, self._propose))
        with contextlib.suppress(NotFound, Conflict, EyrieError):
            act()
            self.counts[act.__name__.strip("_").replace("_", " ")] += 1
        self.drive()

    def drive(self) -> None:
        """Jobs that are to stop have stopped."""
        for job_id in self.jobs.unfinished():
            with contextlib.suppress(NotFound):
                intent = self.jobs.intent(job_id)
                if intent.cancel_requested or intent.delete_requested:
                    self._end(self.jobs.get(job_id), "Cancelled")

    def _end(self, job: Job, phase: Any) -> None:
        if not is_over(job.status.conditions):
            status = ended(phase, utc_now()).model_copy(update={"attempt": job.status.attempt})
            self.jobs.save_status(job.id, status)

    def _name(self) -> str:
        self._num_made += 1
        return f"one-{self._num_made}"

    def _objects(self, kind: Kind) -> list[Object]:
        return self.cluster.list_all(API, kind, self.namespace)

    def _one(self, kind: Kind) -> Object:
        found = self._objects(kind)
        if not found:
            raise NotFound(f"no {kind}")
        return self.rng.choice(found)

    def _apply_job(self) -> None:
        if len(self._objects("DrafterJob")) >= MAX_OBJECTS:
            return
        expiring = {"ttl_seconds_after_finished": 0} if self.rng.random() < 0.2 else {}
        self.cluster.create({"apiVersion": API, "kind": "DrafterJob",
                             "metadata": {"name": self._name(), "namespace": self.namespace},
                             "spec": {"job": job_body(), **expiring}})

    def _change_job(self) -> None:
        one = self._one("DrafterJob")
        self.cluster.merge(API, "DrafterJob", self.namespace, one["metadata"]["name"],
                           {"spec": {"suspend": not one["spec"].get("suspend", False)}})

    def _delete_job(self) -> None:
        self.cluster.delete(API, "DrafterJob", self.namespace, self._one("DrafterJob")["metadata"]["name"])

    def _end_job(self) -> None:
        live = self.jobs.unfinished()
        if live:
            self._end(self.jobs.get(self.rng.choice(live)), self.rng.choice(("Succeeded", "Failed")))

    def _submit_job(self) -> None:
        if len(self.jobs.unfinished()) < MAX_OBJECTS:
            self.jobs.submit(derive(job_spec()))

    def _cancel_job(self) -> None:
        live = self.jobs.unfinished()
        if live:
            self.jobs.cancel(self.rng.choice(live))

    def _apply_endpoint(self) -> None:
        self.cluster.create({"apiVersion": API, "kind": "DraftEndpoint",
                             "metadata": {"name": f"chat-{self.rng.randrange(6)}", "namespace": self.namespace},
                             "spec": {"target": {"model": "quickstart"}}})

    def _change_endpoint(self) -> None:
        one = self._one("DraftEndpoint")
        self.cluster.merge(API, "DraftEndpoint", self.namespace, one["metadata"]["name"],
                           {"spec": {"desired": self.rng.choice(("on", "off"))}})

    def _delete_endpoint(self) -> None:
        self.cluster.delete(API, "DraftEndpoint", self.namespace, self._one("DraftEndpoint")["metadata"]["name"])

    def _change_row(self) -> None:
        name = f"row-{self.rng.randrange(4)}"
        if self.endpoints.project_of(name) is None:
            self.endpoints.create(name, TargetSpec(model="quickstart"), EndpointServeSpec(endpoint=name), "quickstart")
        else:
            self.endpoints.set_desired(name, self.rng.choice(("on", "off")))

    def _propose(self) -> None:
        """A revision with a drafter that is not there: it is rejected."""
        name = self.rng.choice([one.name for one in self.endpoints.list().items] or ["none"])
        self.endpoints.propose(name, job_id=None, checkpoint="base-step-1", reason="campaign",
                               drafter_dir=f"/var/lib/eyrie/jobs/none/stages/train/base/checkpoints/{self._name()}")

    # What must hold.

    def broken(self) -> list[Broken]:
        """The rules that objects and rows break now."""
        objects = {kind: self._objects(kind) for kind in KINDS}
        owned = Counter(one["metadata"]["labels"][ENDPOINT_LABEL] for api, kind in OWNED
                        for one in self.cluster.list_all(api, kind, self.namespace, labelled=ENDPOINT_LABEL))
        return [*broken_jobs(objects["DrafterJob"], self._all_jobs()),
                *broken_endpoints(objects["DraftEndpoint"], self.endpoints.list().items, owned)]

    def _all_jobs(self) -> list[Job]:
        found, cursor = list[Job](), None
        while True:
            page = self.jobs.list(limit=200, cursor=cursor)
            found += page.items
            if (cursor := page.next_cursor) is None:
                return found

    def refused_writes(self) -> list[str]:
        """Where a new leader, which may not write, would have written."""
        places: list[str] = []

        def refuse() -> None:
            """The fence of writes to other systems, the rows."""
            places.append("a row")
            raise NotLeader("the campaign's controller may not write")

        controller = Controller(self.settings, self.database, ReadOnlyCluster(refuse, places), Telemetry(),
                                mirror_namespace=self.namespace, namespaces=(self.namespace,))
        before = self._row_times()
        for kind in KINDS:
            for one in self._objects(kind):
                controller.handle_event(kind, "ADDED", one)
        for step in (controller.resync, controller.poll, controller.sweep):
            with contextlib.suppress(NotLeader):
                step()
        while len(controller.queue):
            controller.process_next()
        controller.queue.close()
        return [*places, *(f"row {name}" for name, at in self._row_times().items() if before.get(name) != at)]

    def _row_times(self) -> dict[str, datetime]:
        return {**{job.id: job.updated_at for job in self._all_jobs()},
                **{one.name: one.updated_at for one in self.endpoints.list().items}}

    def _is_quiet(self) -> bool:
        """Whether an operator leads, and has looked at all rows without a write."""
        leader = next((one for one in self._operators if one.leads), None)
        if leader is None:
            return False
        before = leader.figure("eyrie_operator_writes_total")
        time.sleep(3 * POLL_S)
        return (leader.leads and leader.figure("eyrie_operator_queue_length") == 0
                and leader.figure("eyrie_operator_writes_total") == before)

    def check(self) -> None:
        """Leave everything alone until it has settled; then judge."""
        self.revive()
        deadline, broken = time.monotonic() + SETTLE_S, list[Broken]()
        while time.monotonic() < deadline:
            self.drive()
            with contextlib.suppress(EyrieError):  # the API server recovers from its stop
                broken = self.broken()
                if not broken and self._is_quiet():
                    break
            self.revive()  # an operator that lost its lease has ended
            time.sleep(1.0)
        for rule, facts in broken:
            self.campaign.add_finding(rule, **facts)
        self.kill_all()
        if not broken and (writes := self.refused_writes()):
            self.campaign.add_finding("a new leader has nothing to write", writes=writes[:20], number=len(writes),
                                      objects=[one.get("status") for kind in KINDS for one in self._objects(kind)])
        self.counts["checks"] += 1


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[None]:
    """Within the block a process does not run."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _server_of_this_machine() -> int | None:
    """The API server's process, where the cluster is part of this machine and belongs to the campaign's caller."""
    state = os.environ.get("EYRIE_CLUSTER_STATE")
    for entry in Path("/proc").glob("[0-9]*") if state else ():
        with contextlib.suppress(OSError):
            is_server = (entry / "comm").read_text().strip() == "kube-apiserver"
            if is_server and (entry / "cwd").readlink() == Path(str(state)):
                return int(entry.name)
    return None


def _write_profile(home: Path, namespace: str) -> Path:
    """What an administrator would write, with an image that no node has to pull."""
    placement = {"image": "localhost/nothing:v1"}
    path = home / "profile.yaml"
    path.write_text(yaml.safe_dump({
        "kubeflow": {"url": "http://nowhere"}, "home": "/var/lib/eyrie",
        "stages": {**placement, "work": {"kind": "volume", "claim": "work", "mount_path": "/var/lib/eyrie"}},
        "serving": {"namespace": namespace, "placement": placement, "startup_timeout_s": _STARTUP_S}}))
    return path


def run(campaign: Campaign, cluster: Cluster, home: Path) -> dict[str, Any]:
    """Periods of requests and faults, each with a check, until the time is over; returns figures."""
    define_ours(cluster)
    namespace = f"eyrie-test-{secrets.token_hex(3)}"
    cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    one = Campaigner(campaign, cluster, namespace, home)
    try:
        while not campaign.is_over:
            until = time.monotonic() + PERIOD_S
            while time.monotonic() < until:
                for _ in range(one.rng.randrange(1, 6)):
                    one.act()
                time.sleep(one.rng.uniform(0.0, 2.0))
                one.disturb()
                one.revive()
            one.check()
            campaign.print_progress(one.counts.total(), "requests and faults")
    finally:
        one.kill_all()
        delete_namespace(cluster, namespace)
        one.database.close()
    return {"requests and faults": dict(sorted(one.counts.items())),
            "left out": [] if one._server else ["an API server that does not answer: EYRIE_CLUSTER_STATE is not set"]}


def main() -> int:
    """Run the campaign."""
    wanted = options("cluster_operator", "Kills of the operator on a real API server.", 300.0).parse_args()
    if not os.environ.get("KUBECONFIG"):
        print("skipped: KUBECONFIG is not set\nhint: name a cluster on which definitions and namespaces may be made",
              file=sys.stderr)
        return os.EX_TEMPFAIL
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))  # so that all is stopped
    campaign = Campaign("operator", wanted.seed, wanted.seconds, wanted.out)
    with scratch("operator") as home:
        return campaign.finish(run(campaign, Cluster(), home))


if __name__ == "__main__":
    sys.exit(main())
