"""The operator's workers over a database and a double of the API server: an outage of either ends nothing."""

import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.event import listen, remove
from sqlalchemy.exc import OperationalError

from eyrie_api.contract.access import CreateProject, Quotas
from eyrie_api.contract.model import API_VERSION
from eyrie_api.contract.read_rules import EndpointRules, ReadRules
from eyrie_api.contract.resources import FINALIZER, NAME_LABEL
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.projects import Projects
from eyrie_api.database.quotas import WaitingObjects
from eyrie_api.planning.resolve import derive
from eyrie_operator.cluster.client import Cluster, ClusterUnavailable
from eyrie_operator.cluster.controller import Controller
from eyrie_operator.cluster.resources import MIRRORED, ORIGIN_LABEL
from eyrie_operator.cluster.workqueue import Telemetry
from tests.api.samples import ended, job_body, job_spec
from tests.operator.cluster.apiserver import CORE, ApiServer, serving
from tests.operator.cluster.test_endpoints import Harness
from tests.operator.test_unscheduled import pod as unscheduled_pod


class Clock:
    """Waits are over when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    server = ApiServer((*CORE, API_VERSION))
    with serving(server, tmp_path, monkeypatch):
        made = Harness(tmp_path, server)
        yield made
        made.database.close()


def controller(harness: Harness, clock: Clock, mirror: str | None = None,
               projects: Mapping[str, str] | None = None, **more: Any) -> Controller:
    telemetry = Telemetry()
    return Controller(harness.settings, harness.database, Cluster(counted=telemetry.count_write), telemetry,
                      mirror_namespace=mirror, projects=projects, monotonic=clock, **more)


def work_off(one: Controller, clock: Clock) -> None:
    """What the ticker and the workers do in some minutes."""
    for _ in range(4):
        one.poll()
        one.sweep()
        one.resync()
        while len(one.queue):
            assert one.process_next()
        clock.now += 60.0


def test_a_row_is_tended_by_the_workers_and_shown_when_its_engine_answers(harness: Harness) -> None:
    clock = Clock()
    one = controller(harness, clock)
    harness.create()
    one.resync()
    work_off(one, clock)
    harness.server.run("eyrie-chat-r1")
    work_off(one, clock)
    assert harness.chat.active_revision == 1


def test_while_the_api_server_is_away_nothing_ends_and_afterwards_it_goes_on(harness: Harness) -> None:
    clock = Clock()
    one = controller(harness, clock)
    harness.create()
    one.resync()
    harness.server.away = True
    with pytest.raises(ClusterUnavailable):
        one.sweep()
    one.poll()
    assert one.process_next()
    assert harness.server.objects == {}
    harness.server.away = False
    work_off(one, clock)
    assert set(harness.server.of("Deployment")) == {"eyrie-chat-r1"}


def test_while_the_database_is_away_nothing_ends_and_afterwards_it_goes_on(harness: Harness) -> None:
    clock = Clock()
    one = controller(harness, clock)
    harness.create()
    one.resync()
    with harness.database.engine.begin() as connection:
        connection.execute(text("ALTER TABLE endpoints RENAME TO elsewhere"))
    with pytest.raises(OperationalError):
        one.poll()
    assert one.process_next()
    assert harness.server.objects == {}
    with harness.database.engine.begin() as connection:
        connection.execute(text("ALTER TABLE elsewhere RENAME TO endpoints"))
    work_off(one, clock)
    assert set(harness.server.of("Deployment")) == {"eyrie-chat-r1"}


def draft_endpoint(namespace: str, *, deleting: bool = False, **spec: Any) -> dict[str, Any]:
    """Of the name `chat`, created before every other."""
    gone = {"deletionTimestamp": "2020-01-02T00:00:00Z"} if deleting else {}
    return {"apiVersion": API_VERSION, "kind": "DraftEndpoint",
            "metadata": {"name": "chat", "namespace": namespace, "uid": f"uid-{namespace}", "generation": 1,
                         "resourceVersion": "1", "creationTimestamp": "2020-01-01T00:00:00Z",
                         "finalizers": [FINALIZER], "labels": {ORIGIN_LABEL: MIRRORED}, **gone},
            "spec": {"target": {"model": "quickstart"}, **spec}}


def test_an_object_in_a_namespace_of_another_project_changes_no_endpoint(harness: Harness) -> None:
    clock = Clock()
    one = controller(harness, clock, mirror="eyrie", projects={"search": "search", "intruders": "intruders"})
    served = EndpointServeSpec(endpoint="chat")
    harness.endpoints.create("chat", TargetSpec(model="quickstart"), served, "q", "search")
    for raw in (draft_endpoint("intruders", desired="off", serve={"replicas": 77}), draft_endpoint("unmapped",
                desired="off"), draft_endpoint("intruders", deleting=True)):
        one.handle_event("DraftEndpoint", "ADDED", raw)
        while len(one.queue):
            assert one.process_next()
    assert harness.chat.desired == "on"
    assert harness.endpoints.serving("chat").serve == served
    one.handle_event("DraftEndpoint", "ADDED", draft_endpoint("search", desired="off", serve={"replicas": 2}))
    while len(one.queue):
        assert one.process_next()
    assert harness.chat.desired == "off", "the project's own object, though a stranger's is older"


def test_an_endpoint_of_an_object_gets_the_rules_for_the_files_of_its_project(harness: Harness) -> None:
    one = controller(harness, Clock(), mirror="eyrie", projects={"search": "search"})
    made = draft_endpoint("search")
    made["metadata"]["labels"] = {}
    harness.server.objects[f"/apis/{API_VERSION}/namespaces/search/draftendpoints/chat"] = made
    one.handle_event("DraftEndpoint", "ADDED", made)
    while len(one.queue):
        assert one.process_next()
    assert harness.endpoints.serving("chat").reads == EndpointRules(rules=ReadRules(home=str(harness.settings.home)))


def test_a_job_of_any_namespace_may_name_no_file_of_the_system_and_no_host_with_metadata(harness: Harness) -> None:
    clock = Clock()
    one = controller(harness, clock, mirror="eyrie", projects={"search": "search"})
    asking = {"regenerate": {"engine": "openai", "base_url": "http://0xa9fea9fe/v1", "served_model": "m"}}
    for namespace in ("search", "unmapped", "eyrie"):
        for changes in ({"data": {"sources": [{"path": "/proc/self/environ"}]}}, asking):
            raw = {"apiVersion": API_VERSION, "kind": "DrafterJob", "spec": {"job": job_body(**changes)},
                   "metadata": {"name": f"in-{namespace}", "namespace": namespace, "uid": secrets.token_hex(4),
                                "generation": 1, "resourceVersion": "1", "creationTimestamp": "2020-01-01T00:00:00Z",
                                "finalizers": [FINALIZER]}}
            path = f"/apis/{API_VERSION}/namespaces/{namespace}/drafterjobs/in-{namespace}"
            harness.server.put(path, raw)
            one.handle_event("DrafterJob", "ADDED", harness.server.objects[path])
            while len(one.queue):
                assert one.process_next()
            conditions = harness.server.objects[path]["status"]["conditions"]
            assert ("Accepted", "False", "InvalidInput") in {(each["type"], each["status"], each["reason"])
                                                             for each in conditions}, (namespace, conditions)
    assert Jobs(harness.database).unfinished() == ()


def applied(one: Controller, harness: Harness, raw: dict[str, Any]) -> dict[str, Any]:
    """The condition `Accepted` of a DraftEndpoint of namespace search, once everything is reconciled."""
    raw["metadata"]["labels"] = {}
    path = f"/apis/{API_VERSION}/namespaces/search/draftendpoints/chat"
    harness.server.put(path, raw)
    one.handle_event("DraftEndpoint", "MODIFIED", harness.server.objects[path])
    while len(one.queue):
        assert one.process_next()
    (accepted,) = (each for each in harness.server.objects[path]["status"]["conditions"] if each["type"] == "Accepted")
    return dict(accepted)


def test_an_object_that_exceeds_its_projects_quota_is_not_applied_and_says_so(harness: Harness) -> None:
    clock = Clock()
    Projects(harness.database).create(CreateProject(name="search", quotas=Quotas(
        max_replicas=3, priority_classes=("batch",))))
    one = controller(harness, clock, mirror="eyrie", projects={"search": "search"})

    def apply(**serve: Any) -> str:
        raw = draft_endpoint("search", serve=serve)
        accepted = applied(one, harness, raw)
        return f"{accepted['reason']}: {accepted['message']}"

    assert apply(replicas=4).startswith("QuotaReached: serve.replicas of endpoint 'chat' is 4")
    assert harness.endpoints.list().items == ()
    assert apply(replicas=2).startswith("EndpointAccepted")
    assert apply(replicas=4).startswith("QuotaReached")
    assert harness.endpoints.serving("chat").serve.replicas == 2
    assert apply(replicas=3, placement={"priority_class": "urgent"}).startswith("PriorityClassRefused")
    assert apply(replicas=3, placement={"priority_class": "batch"}).startswith("EndpointAccepted")
    assert harness.endpoints.serving("chat").serve.replicas == 3


def test_a_draft_endpoint_does_not_serve_files_that_its_namespaces_project_may_not_read(
        harness: Harness, tmp_path: Path) -> None:
    one = controller(harness, Clock(), mirror="eyrie", projects={"search": "search"})
    link = tmp_path / "link"
    link.symlink_to(one._settings.home / "jobs" / "theirs" / "stages")
    for target, says in (({"model": "/etc"}, "file of the system"), ({"model": str(link)}, "not of your project"),
                         ({"model": "org/name", "revision": "/etc"}, "no branch, tag or commit")):
        raw = draft_endpoint("search")
        raw["spec"]["target"] = target
        accepted = applied(one, harness, raw)
        assert (accepted["status"], accepted["reason"]) == ("False", "InvalidInput")
        assert says in accepted["message"]
        assert harness.endpoints.list().items == ()


def pending(run_id: str, namespace: str = "kubeflow") -> tuple[str, dict[str, Any]]:
    """Path and object of a pod of a training that no node fits."""
    pod = unscheduled_pod(labels={"pipeline/runid": run_id})
    return f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}", pod


def running_job(harness: Harness) -> str:
    """A job whose run is `run-1`."""
    job = harness.jobs.submit(derive(job_spec()))
    harness.jobs.save_status(job.id, job.status.model_copy(update={"phase": "Running", "run_id": "run-1"}))
    return job.id


def test_a_runs_pods_without_a_node_are_recorded_for_its_job_and_only_while_they_have_none(harness: Harness) -> None:
    one = controller(harness, Clock(), runs_namespace="kubeflow")
    mine, other = running_job(harness), harness.jobs.submit(derive(job_spec())).id
    path, pod = pending("run-1")
    harness.server.put(path, pod)
    harness.server.put(path + "-done", {**pod, "status": {**pod["status"], "phase": "Succeeded"}})
    before = harness.jobs.get(mine).updated_at
    one.observe_pods()
    [wait] = harness.jobs.waiting_pods(mine)
    assert (wait.run_id, wait.stage, wait.reason) == ("run-1", "train", "WaitingForNodes")
    assert harness.jobs.waiting_pods(other) == ()
    assert harness.jobs.get(mine).updated_at == before, "the job's driver writes the status"
    del harness.server.objects[path]
    one.observe_pods()
    assert harness.jobs.waiting_pods(mine) == ()


def test_without_the_right_to_list_pods_nothing_is_recorded_and_the_namespace_is_not_asked_again(
        harness: Harness) -> None:
    one = controller(harness, Clock(), runs_namespace="kubeflow")
    mine = running_job(harness)
    harness.server.put(*pending("run-1"))
    harness.server.unlisted = {"/api/v1/namespaces/kubeflow/pods"}
    one.observe_pods()
    asked = harness.server.requests["GET"]
    one.observe_pods()
    assert (harness.jobs.waiting_pods(mine), harness.server.requests["GET"]) == ((), asked)


def test_pods_are_listed_where_runs_are_else_where_objects_are_watched(harness: Harness) -> None:
    mine = running_job(harness)
    harness.server.put(*pending("run-1", "team-a"))
    controller(harness, Clock(), namespaces=("team-a", "team-b"), runs_namespace="kubeflow").observe_pods()
    assert harness.jobs.waiting_pods(mine) == ()
    controller(harness, Clock(), namespaces=("team-a", "team-b")).observe_pods()
    assert len(harness.jobs.waiting_pods(mine)) == 1


def test_an_unavailable_api_server_leaves_what_was_recorded(harness: Harness) -> None:
    one = controller(harness, Clock(), runs_namespace="kubeflow")
    mine = running_job(harness)
    harness.server.put(*pending("run-1"))
    one.observe_pods()
    harness.server.away = True
    with pytest.raises(ClusterUnavailable):
        one.observe_pods()
    assert len(harness.jobs.waiting_pods(mine)) == 1


class WaitingJob:
    """A DrafterJob of project search, which has no room for another job, and the controller that reconciles it."""

    path = f"/apis/{API_VERSION}/namespaces/search/drafterjobs/night"

    def __init__(self, harness: Harness) -> None:
        self.harness, self.clock = harness, Clock()
        self.projects = Projects(harness.database)
        self.projects.create(CreateProject(name="search", quotas=Quotas(max_jobs=0)))
        self.rows = WaitingObjects(harness.database)
        self.restart()
        self.put()

    def restart(self) -> None:
        """Another operator, without state, which has seen no event."""
        self.controller = controller(self.harness, self.clock, projects={"search": "search"})

    def put(self, **spec: Any) -> None:
        metadata = {"name": "night", "namespace": "search", "finalizers": [FINALIZER]}
        self.harness.server.put(self.path, {"apiVersion": API_VERSION, "kind": "DrafterJob", "metadata": metadata,
                                            "spec": {"job": job_body(), **spec}})
        self.look()

    def look(self) -> None:
        """What an event leads to."""
        self.controller.handle_event("DrafterJob", "MODIFIED", self.harness.server.objects[self.path])
        self.passes = self.work_off()

    def work_off(self) -> int:
        """All passes until nothing is to be done before some time has gone by; their number."""
        for passes in range(10):
            if not len(self.controller.queue):
                return passes
            assert self.controller.process_next()
        raise AssertionError("the object is reconciled again and again without a pause")

    def make_room(self, max_jobs: int | None = None) -> None:
        self.projects.set_quotas("search", Quotas(max_jobs=max_jobs))

    @property
    def reason(self) -> str:
        (accepted,) = (one for one in self.harness.server.objects[self.path]["status"]["conditions"]
                       if one["type"] == "Accepted")
        return str(accepted["reason"])


@pytest.fixture
def waits(harness: Harness) -> WaitingJob:
    return WaitingJob(harness)


def num_writes(waits: WaitingJob, do: Callable[[], None]) -> int:
    """Statements on the table of waiting objects that are no reads."""
    statements: list[str] = []

    def note(*given: Any) -> None:
        statements.append(given[2])

    listen(waits.harness.database.engine, "before_cursor_execute", note)
    do()
    remove(waits.harness.database.engine, "before_cursor_execute", note)
    return len([one for one in statements if "waiting" in one and not one.startswith("SELECT")])


def test_a_job_without_room_is_recorded_once_and_its_row_removed_when_it_is_accepted(waits: WaitingJob) -> None:
    (row,) = waits.rows.all()
    assert (row.namespace, row.name, row.project, row.reason) == ("search", "night", "search", "QuotaReached")
    assert (row.message, row.hint) == ("project 'search' has 0 jobs that have not ended, and may have no more",
                                       "wait until one ends, cancel one, or ask an administrator for more")
    assert waits.reason == "QuotaReached"
    assert num_writes(waits, waits.look) == 0
    waits.restart()
    assert num_writes(waits, waits.look) == 0
    assert waits.rows.all() == (row,)
    waits.make_room()
    waits.look()
    assert waits.reason == "JobAccepted"
    assert waits.rows.all() == ()
    assert num_writes(waits, waits.look) == 0


def test_a_job_without_room_is_tried_again_after_fifteen_seconds_and_not_at_once(waits: WaitingJob) -> None:
    waits.look()
    assert waits.passes == 1
    waits.make_room()
    waits.clock.now += 15.0
    assert waits.controller.process_next()
    waits.work_off()
    assert waits.rows.all() == ()
    (job_id,) = (jobs := Jobs(waits.harness.database)).unfinished()
    assert jobs.submitted(job_id) == job_body(), "as the object has it, without the labels that name the object"
    assert jobs.get(job_id).spec.labels[NAME_LABEL] == "night"
    assert jobs.resolved(job_id).plan is not None


def test_a_row_left_by_an_operator_killed_after_the_submission_is_removed_by_the_next(waits: WaitingJob) -> None:
    (row,) = waits.rows.all()
    waits.make_room()
    waits.look()
    waits.rows.record(row)
    waits.restart()
    waits.look()
    assert waits.rows.all() == ()


def test_a_lost_row_is_written_by_the_next_attempt(waits: WaitingJob) -> None:
    (row,) = waits.rows.all()
    waits.rows.remove(row)
    waits.look()
    (again,) = waits.rows.all()
    assert again == row.model_copy(update={"since": again.since})


def test_an_object_is_deleted_once_and_the_event_of_its_deletion_awaited(waits: WaitingJob) -> None:
    waits.make_room()
    waits.look()
    jobs, server = Jobs(waits.harness.database), waits.harness.server
    (job,) = jobs.list().items
    jobs.save_status(job.id, ended("Failed"))
    waits.look()
    jobs.delete(job.id)
    waits.look()  # fails where it is reconciled again and again
    assert server.requests["DELETE"] == 1


def test_a_job_that_is_to_be_deleted_and_has_not_stopped_is_looked_at_again_after_a_pause(
        waits: WaitingJob) -> None:
    waits.make_room()
    waits.look()
    server, path = waits.harness.server, waits.path
    server.put(path, {**server.objects[path], "metadata": {**server.objects[path]["metadata"],
                                                           "deletionTimestamp": "2026-11-27T00:00:00Z"}})
    for _ in range(3):
        waits.look()  # fails where it is reconciled again and again
    (job,) = Jobs(waits.harness.database).list().items
    assert job.status.phase == "Cancelling"


def test_a_suspended_a_refused_and_a_deleted_object_does_not_wait(waits: WaitingJob) -> None:
    (row,) = waits.rows.all()
    waits.put(suspend=True)
    assert (waits.reason, waits.rows.all()) == ("Suspended", ())
    waits.put()
    assert len(waits.rows.all()) == 1
    waits.make_room()
    waits.put(job=job_body(data={"sources": [{"path": "/proc/self/environ"}]}))
    waits.look()
    assert (waits.reason, waits.rows.all()) == ("InvalidInput", ())
    waits.rows.record(row)
    raw = waits.harness.server.objects.pop(waits.path)
    waits.controller.handle_event("DrafterJob", "DELETED", raw)
    waits.work_off()
    assert waits.rows.all() == ()


def test_rows_of_objects_deleted_while_no_operator_watched_are_removed_and_others_kept(waits: WaitingJob) -> None:
    (row,) = waits.rows.all()
    waits.restart()
    waits.controller.resync()  # before the first event
    assert waits.rows.all() == (row,)
    waits.rows.record(row.model_copy(update={"name": "gone", "uid": "uid-gone"}))
    waits.controller.resync()
    assert waits.rows.all() == (row,)
    del waits.harness.server.objects[waits.path]
    waits.restart()
    waits.controller.resync()
    assert waits.rows.all() == ()


def test_while_the_api_server_is_away_no_row_is_taken_for_orphaned(waits: WaitingJob) -> None:
    waits.restart()
    waits.harness.server.away = True
    with pytest.raises(ClusterUnavailable):
        waits.controller.resync()
    assert len(waits.rows.all()) == 1


def test_a_job_that_cannot_be_resumed_for_want_of_room_waits_with_its_project_until_it_is(waits: WaitingJob) -> None:
    jobs = Jobs(waits.harness.database)
    waits.make_room(1)
    waits.look()
    (job_id,) = jobs.unfinished()
    waits.put(suspend=True)
    jobs.save_status(job_id, ended("Cancelled"))
    waits.look()
    other = jobs.submit(derive(job_spec()), project="search").id
    waits.put()
    (row,) = waits.rows.all()
    assert (row.name, row.project, row.reason) == ("night", "search", "QuotaReached")
    assert num_writes(waits, waits.look) == 0
    jobs.save_status(other, ended("Succeeded"))
    waits.look()
    assert jobs.unfinished() == (job_id,)
    assert waits.rows.all() == ()
