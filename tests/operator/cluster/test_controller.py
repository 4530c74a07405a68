"""The operator's workers over a database and a double of the API server: an outage of either ends nothing."""

import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from eyrie_api.database.jobs import Jobs
from eyrie_api.database.projects import Projects
from eyrie_api.v1alpha1.access import CreateProject, Quotas
from eyrie_api.v1alpha1.model import API_VERSION
from eyrie_api.v1alpha1.resources import FINALIZER
from eyrie_api.v1alpha1.serving import EndpointServeSpec
from eyrie_api.v1alpha1.targets import TargetSpec
from eyrie_operator.cluster.apply import Cluster, ClusterUnavailable
from eyrie_operator.cluster.controller import Controller
from eyrie_operator.cluster.resources import MIRRORED, ORIGIN_LABEL
from eyrie_operator.cluster.telemetry import Telemetry
from tests.api.samples import job_body, job_spec
from tests.operator.cluster.apiserver import ApiServer, serving
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
    server = ApiServer()
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
    assert Jobs(harness.database).live() == ()


def test_an_object_that_exceeds_its_projects_quota_is_not_applied_and_says_so(harness: Harness) -> None:
    clock = Clock()
    Projects(harness.database).create(CreateProject(name="search", quotas=Quotas(
        max_replicas=3, priority_classes=("batch",))))
    one = controller(harness, clock, mirror="eyrie", projects={"search": "search"})

    def apply(**serve: Any) -> str:
        raw = draft_endpoint("search", serve=serve)
        raw["metadata"]["labels"] = {}
        path = f"/apis/{API_VERSION}/namespaces/search/draftendpoints/chat"
        harness.server.put(path, raw)
        one.handle_event("DraftEndpoint", "MODIFIED", harness.server.objects[path])
        while len(one.queue):
            assert one.process_next()
        (accepted,) = (each for each in harness.server.objects[path]["status"]["conditions"]
                       if each["type"] == "Accepted")
        return f"{accepted['reason']}: {accepted['message']}"

    assert apply(replicas=4).startswith("QuotaReached: serve.replicas of endpoint 'chat' is 4")
    assert harness.endpoints.list().items == ()
    assert apply(replicas=2).startswith("EndpointAccepted")
    assert apply(replicas=4).startswith("QuotaReached")
    assert harness.endpoints.serving("chat").serve.replicas == 2
    assert apply(replicas=3, placement={"priority_class": "urgent"}).startswith("PriorityClassRefused")
    assert apply(replicas=3, placement={"priority_class": "batch"}).startswith("EndpointAccepted")
    assert harness.endpoints.serving("chat").serve.replicas == 3


def pending(run_id: str, namespace: str = "kubeflow") -> tuple[str, dict[str, Any]]:
    """Path and object of a pod of a training that no node fits."""
    pod = unscheduled_pod(labels={"pipeline/runid": run_id})
    return f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}", pod


def running_job(harness: Harness) -> str:
    """A job whose run is `run-1`."""
    job = harness.jobs.submit(job_spec())
    harness.jobs.save_status(job.id, job.status.model_copy(update={"phase": "Running", "run_id": "run-1"}))
    return job.id


def test_a_runs_pods_without_a_node_are_recorded_for_its_job_and_only_while_they_have_none(harness: Harness) -> None:
    one = controller(harness, Clock(), runs_namespace="kubeflow")
    mine, other = running_job(harness), harness.jobs.submit(job_spec()).id
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
