"""`eyrie operator` on a real API server: objects become jobs, rows become statuses, and nothing is held too long."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from eyrie_api.clock import utc_now
from eyrie_api.contract.access import CreateProject, Quotas
from eyrie_api.contract.resources import FINALIZER
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.status import Job
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import JobFilter, Jobs
from eyrie_api.database.migrations import upgrade
from eyrie_api.database.projects import Projects
from eyrie_api.errors import NotFound
from eyrie_api.http.server import create_app
from eyrie_api.planning.resolve import derive
from eyrie_api.settings import Settings
from eyrie_operator.cluster.client import FIELD_MANAGER, Cluster, ClusterConflict, ClusterRejected
from eyrie_operator.cluster.resources import read_job
from tests.api.samples import ended, job_body, job_spec
from tests.cluster.operators import OperatorProcess, operating
from tests.cluster.patience import eventually

API = "eyrie.dev/v1alpha1"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path)


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    made = Database(settings.resolved_database_url)
    upgrade(made)
    yield made
    made.close()


@pytest.fixture
def jobs(database: Database) -> Jobs:
    return Jobs(database)


@pytest.fixture
def operator(database: Database, namespace: str, tmp_path: Path) -> Iterator[OperatorProcess]:
    with operating(tmp_path, namespace, "--mirror-namespace", namespace) as one:
        yield one


def manifest(namespace: str, name: str = "mine", **spec: Any) -> dict[str, Any]:
    return {"apiVersion": API, "kind": "DrafterJob", "metadata": {"name": name, "namespace": namespace},
            "spec": {"job": job_body(), **spec}}


def read(cluster: Cluster, namespace: str, name: str = "mine") -> dict[str, Any] | None:
    try:
        return cluster.get(API, "DrafterJob", namespace, name)
    except NotFound:
        return None


def condition(raw: dict[str, Any] | None, kind: str) -> tuple[str, str] | None:
    result = (raw or {}).get("status", {}).get("conditions", ())
    return next(((one["status"], one["reason"]) for one in result if one["type"] == kind), None)


def submitted(cluster: Cluster, namespace: str, jobs: Jobs, name: str = "mine") -> Job:
    """The job an object has become, as its status says."""
    def job_id() -> str | None:
        found = (read(cluster, namespace, name) or {}).get("status", {}).get("job_id")
        return str(found) if found else None

    return jobs.get(eventually(job_id, f"{name} has a job"))


def patch(cluster: Cluster, namespace: str, name: str = "mine", **spec: Any) -> dict[str, Any]:
    return cluster.merge(API, "DrafterJob", namespace, name, {"spec": spec})


def test_an_applied_object_is_a_job_and_shows_how_it_ends(cluster: Cluster, namespace: str, jobs: Jobs,
                                                          operator: OperatorProcess) -> None:
    cluster.create(manifest(namespace))
    job = submitted(cluster, namespace, jobs)
    raw = read(cluster, namespace)
    assert raw is not None
    assert job.spec.labels["kubernetes-uid"] == raw["metadata"]["uid"]
    assert FINALIZER in raw["metadata"]["finalizers"]
    assert condition(raw, "Accepted") == ("True", "JobAccepted")
    assert raw["status"]["observedGeneration"] == raw["metadata"]["generation"] == 1

    jobs.save_status(job.id, ended("Succeeded", utc_now()))
    done = eventually(lambda: condition(read(cluster, namespace), "Succeeded"), "the end is shown")
    assert done == ("True", "Test")
    events = [one for one in cluster.list_all("v1", "Event", namespace)
              if one["involvedObject"]["uid"] == raw["metadata"]["uid"]]
    assert sorted(one["reason"] for one in events) == ["JobAccepted", "Test"]
    assert len(jobs.list().items) == 1


@pytest.mark.skipif(shutil.which(os.environ.get("KUBECTL", "kubectl")) is None, reason="no kubectl: set KUBECTL")
def test_kubectl_can_wait_for_the_end_and_prints_the_columns(cluster: Cluster, namespace: str, jobs: Jobs,
                                                             operator: OperatorProcess, tmp_path: Path) -> None:
    # What it knows of an API server it keeps for hours, and would not look for resources that have come since.
    kubectl = [os.environ.get("KUBECTL", "kubectl"), "--namespace", namespace, "--cache-dir", str(tmp_path)]
    cluster.create(manifest(namespace))
    job = submitted(cluster, namespace, jobs)
    waiting = subprocess.Popen([*kubectl, "wait", "--for=condition=Succeeded", "dj/mine", "--timeout=90s"],
                               stdout=subprocess.PIPE, text=True)
    jobs.save_status(job.id, ended("Succeeded", utc_now()))
    assert waiting.wait(120) == 0
    shown = subprocess.run([*kubectl, "get", "drafterjobs", "-o", "wide"], capture_output=True, text=True, check=True)
    head, row = shown.stdout.splitlines()
    assert head.split()[:4] == ["NAME", "PHASE", "REASON", "TARGET"]
    assert row.split()[:4] == ["mine", "Succeeded", "Test", "quickstart"]
    assert job.id in row


def test_a_job_posted_by_rest_is_the_same_job_as_its_object(cluster: Cluster, namespace: str, jobs: Jobs,
                                                            settings: Settings, database: Database,
                                                            operator: OperatorProcess) -> None:
    with TestClient(create_app(settings, database=database), base_url="http://127.0.0.1") as rest:
        posted = rest.post("/v1alpha1/jobs", json=job_body(name="by-rest"))
        assert posted.status_code == 202
        job_id = posted.json()["id"]
        mirror = eventually(lambda: read(cluster, namespace, job_id), "the posted job has an object")
        assert mirror["spec"]["job"]["name"] == "by-rest"
        eventually(lambda: condition(read(cluster, namespace, job_id), "Accepted"), "its status is shown")
        assert len(jobs.list().items) == 1, "its own object is not submitted again"
        # Deleting the object deletes the job, as deleting the job deletes the object.
        cluster.delete(API, "DrafterJob", namespace, job_id)
        eventually(lambda: jobs.intent(job_id).delete_requested, "the job is to be deleted")


def test_a_job_deleted_by_rest_takes_its_object_along(cluster: Cluster, namespace: str, jobs: Jobs,
                                                      operator: OperatorProcess) -> None:
    cluster.create(manifest(namespace))
    job = submitted(cluster, namespace, jobs)
    jobs.save_status(job.id, ended("Succeeded", utc_now()))
    assert jobs.delete(job.id)
    patch(cluster, namespace, ttl_seconds_after_finished=10_000)  # a change, so that it is looked at before the resync
    eventually(lambda: read(cluster, namespace) is None, "the object is gone")
    assert jobs.list().items == ()


def test_users_write_the_spec_and_only_the_operator_the_status(cluster: Cluster, namespace: str,
                                                               operator: OperatorProcess) -> None:
    made = cluster.create({**manifest(namespace), "status": {"phase": "Succeeded"}})
    assert "status" not in made
    eventually(lambda: condition(read(cluster, namespace), "Accepted"), "the status is written")
    before = read(cluster, namespace)
    after = cluster.merge(API, "DrafterJob", namespace, "mine", {"status": {"phase": "Failed"}})
    assert before is not None
    assert (after["status"]["phase"], after["metadata"]["generation"]) == ("Pending", 1)


def test_the_server_refuses_fields_out_of_bounds_and_fills_in_defaults(cluster: Cluster, namespace: str) -> None:
    body = manifest(namespace)
    body["spec"]["job"] = job_body(train={"ttt_length": 99})
    with pytest.raises(ClusterRejected, match="ttt_length"):
        cluster.create(body)
    body["spec"]["job"] = job_body(regenerate={"sampling": {"top_p": 0.5}})
    made = cluster.create(body)
    assert made["spec"]["job"]["regenerate"]["sampling"] == {"temperature": 1, "top_p": 0.5, "top_k": 0}
    assert made["spec"]["job"]["train"]["ttt_length"] == 7
    assert read_job(made, None).spec is not None


def test_a_spec_the_schema_lets_through_and_the_contract_refuses_ends_with_words(cluster: Cluster, namespace: str,
                                                                                jobs: Jobs,
                                                                                operator: OperatorProcess) -> None:
    body = manifest(namespace)
    body["spec"]["job"] = job_body(tune={"num_steps": [1, 16]}, train={"ttt_length": 2})
    cluster.create(body)
    eventually(lambda: condition(read(cluster, namespace), "Failed"), "it is refused")
    assert condition(read(cluster, namespace), "Succeeded") == ("False", "InvalidSpec")
    body = manifest(namespace, "no-target")
    body["spec"]["job"] = job_body(target={"model": "/no/such/target"})
    cluster.create(body)
    eventually(lambda: condition(read(cluster, namespace, "no-target"), "Failed"), "preflight refuses it")
    assert jobs.list().items == ()


def test_a_deleted_object_is_held_until_its_job_has_stopped_and_is_forgotten(cluster: Cluster, namespace: str,
                                                                            jobs: Jobs,
                                                                            operator: OperatorProcess) -> None:
    cluster.create(manifest(namespace))
    job = submitted(cluster, namespace, jobs)
    cluster.delete(API, "DrafterJob", namespace, "mine")
    eventually(lambda: jobs.intent(job.id).delete_requested, "the job has the intent")
    held = read(cluster, namespace)
    assert held is not None
    assert held["metadata"]["deletionTimestamp"]
    jobs.save_status(job.id, ended("Cancelled", utc_now()))
    eventually(lambda: read(cluster, namespace) is None, "the object is let go")
    with pytest.raises(NotFound):
        jobs.get(job.id)


def test_suspending_stops_a_job_and_resuming_goes_on_with_it(cluster: Cluster, namespace: str, jobs: Jobs,
                                                             operator: OperatorProcess) -> None:
    cluster.create(manifest(namespace))
    job = submitted(cluster, namespace, jobs)
    patch(cluster, namespace, suspend=True)
    eventually(lambda: jobs.intent(job.id).cancel_requested, "the job has the intent")
    jobs.save_status(job.id, ended("Cancelled", utc_now()))
    eventually(lambda: condition(read(cluster, namespace), "Suspended") == ("True", "Suspended"), "it is suspended")
    patch(cluster, namespace, suspend=False)
    eventually(lambda: jobs.get(job.id).status.attempt == 2, "it goes on")
    eventually(lambda: condition(read(cluster, namespace), "Suspended") == ("False", "Resumed"), "and says so")
    assert len(jobs.list().items) == 1


def test_an_ended_object_goes_after_its_time_and_its_job_stays(cluster: Cluster, namespace: str, jobs: Jobs,
                                                               operator: OperatorProcess) -> None:
    cluster.create(manifest(namespace, ttl_seconds_after_finished=0))
    job = submitted(cluster, namespace, jobs)
    jobs.save_status(job.id, ended("Succeeded", utc_now()))
    eventually(lambda: read(cluster, namespace) is None, "the object is gone")
    assert jobs.get(job.id).status.phase == "Succeeded"


def test_fields_of_others_are_not_taken_over_and_stale_statuses_are_refused(cluster: Cluster,
                                                                            namespace: str) -> None:
    mine = manifest(namespace)
    made = cluster.apply(mine)
    assert any(one["manager"] == FIELD_MANAGER for one in made["metadata"]["managedFields"])
    cluster.merge(API, "DrafterJob", namespace, "mine", {"spec": {"suspend": True}}, field_manager="somebody-else")
    with pytest.raises(ClusterConflict, match="conflict"):
        cluster.apply(manifest(namespace, suspend=False))
    assert cluster.apply(manifest(namespace, suspend=False), force=True)["spec"]["suspend"] is False
    stale = read_job(made, None).identity
    with pytest.raises(ClusterConflict):
        cluster.write_status(stale, {"phase": "Failed", "attempt": 1})
    assert "phase" not in (read(cluster, namespace) or {}).get("status", {})


def test_an_applied_endpoint_is_made_shown_and_switched_off_when_deleted(cluster: Cluster, namespace: str,
                                                                         database: Database,
                                                                         operator: OperatorProcess) -> None:
    endpoints = Endpoints(database)

    def shown() -> dict[str, Any]:
        raw = cluster.get(API, "DraftEndpoint", namespace, "support")
        status: dict[str, Any] = raw.get("status", {})
        return status

    cluster.create({"apiVersion": API, "kind": "DraftEndpoint", "metadata": {"name": "support", "namespace": namespace},
                    "spec": {"target": {"model": "quickstart"}}})
    eventually(lambda: shown().get("candidate_revision") == 1, "the bare target is its candidate")
    endpoints.activate("support", 1, url="http://engine/v1")
    eventually(lambda: shown().get("url") == "http://engine/v1", "its URL is shown")
    cluster.delete(API, "DraftEndpoint", namespace, "support")

    def gone() -> bool:
        try:
            cluster.get(API, "DraftEndpoint", namespace, "support")
        except NotFound:
            return True
        return False

    eventually(gone, "the object is let go")
    assert endpoints.get("support").desired == "off"


def test_a_promoted_endpoint_gets_an_object_that_shows_it_and_switches_it(cluster: Cluster, namespace: str,
                                                                         database: Database,
                                                                         operator: OperatorProcess) -> None:
    endpoints = Endpoints(database)
    endpoints.create("promoted", TargetSpec(model="quickstart"), EndpointServeSpec(endpoint="promoted"), "quickstart")

    def shown() -> dict[str, Any]:
        try:
            return cluster.get(API, "DraftEndpoint", namespace, "promoted")
        except NotFound:
            return {}

    eventually(lambda: shown().get("status", {}).get("candidate_revision") == 1, "it is shown")
    endpoints.set_desired("promoted", "off")
    eventually(lambda: shown()["spec"]["desired"] == "off", "the row is shown, not undone")
    cluster.merge(API, "DraftEndpoint", namespace, "promoted", {"spec": {"desired": "on"}})
    eventually(lambda: endpoints.get("promoted").desired == "on", "what somebody writes to the object counts")
    cluster.delete(API, "DraftEndpoint", namespace, "promoted")
    eventually(lambda: shown() == {}, "the object is let go")
    assert endpoints.get("promoted").desired == "off"


def test_probes_answer_and_ending_in_order_gives_the_lease_back(cluster: Cluster, namespace: str,
                                                                operator: OperatorProcess) -> None:
    assert operator.page("/healthz")[0] == 200
    assert operator.page("/readyz")[0] == 200
    assert operator.page("/nothing")[0] == 404
    for _ in range(2):  # whoever is impatient sends it twice
        operator.process.send_signal(signal.SIGTERM)
    assert operator.process.wait(60) == 0
    assert "Traceback" not in operator.log.read_text()
    lease = cluster.get("coordination.k8s.io/v1", "Lease", namespace, "eyrie-operator")
    assert lease["spec"]["holderIdentity"] == ""


def test_when_the_leader_is_killed_the_other_goes_on_and_nothing_is_submitted_twice(
        cluster: Cluster, namespace: str, jobs: Jobs, operator: OperatorProcess, tmp_path: Path) -> None:
    with operating(tmp_path, namespace, "--mirror-namespace", namespace, lead=False) as second:
        eventually(lambda: second.page("/readyz")[0] == 200, "the second stands by")
        for number in range(20):
            cluster.create(manifest(namespace, f"job-{number}"))
        eventually(lambda: len(jobs.list(limit=200).items) >= 3, "the first has begun")
        assert not second.leads
        operator.kill()
        eventually(lambda: second.leads, "the second leads")
        # A submission that was begun when the first died is free to be made again after a minute.
        eventually(lambda: all(condition(one, "Accepted") for one in cluster.list_all(API, "DrafterJob", namespace)),
                   "every object is accepted", deadline_s=240)
        listed = jobs.list(limit=200).items
        assert len(listed) == 20
        assert len({one.spec.labels["kubernetes-uid"] for one in listed}) == 20
        lease = cluster.get("coordination.k8s.io/v1", "Lease", namespace, "eyrie-operator")
        assert lease["spec"]["leaseTransitions"] == 1


def test_hundreds_of_objects_reconverge_after_a_restart_without_a_storm(
        cluster: Cluster, namespace: str, jobs: Jobs, database: Database, tmp_path: Path) -> None:
    """Half of the jobs move while no operator runs: those are written, the others are not."""
    number = int(os.environ.get("EYRIE_TEST_OBJECTS", "400"))  # a whole number of pages
    for one in range(number):
        cluster.create(manifest(namespace, f"job-{one}"))
    with operating(tmp_path, namespace) as first:
        eventually(lambda: first.figure("eyrie_operator_queue_length") == 0 and accepted(cluster, namespace) == number,
                   "all are accepted", deadline_s=600, every_s=5.0)
        submitting = first.figure("eyrie_operator_writes_total")
        first.kill()
    listed = [job for part in range(number // 200) for job in page(jobs, part)]
    assert len(listed) == number
    for job in listed[::2]:
        jobs.save_status(job.id, ended("Succeeded", utc_now()))
    with operating(tmp_path, namespace) as second:  # returns when it leads
        began = utc_now()
        eventually(lambda: finished(cluster, namespace) == number // 2, "what moved is shown", deadline_s=300,
                   every_s=2.0)
        took_s = (utc_now() - began).total_seconds()
        eventually(lambda: second.figure("eyrie_operator_queue_length") == 0, "nothing is left to look at")
        writes = second.figure("eyrie_operator_writes_total")
        looks = second.figure("eyrie_operator_reconcile_total")
        errors = second.figure("eyrie_operator_reconcile_errors_total")
    print(f"\n{number} DrafterJobs: {submitting:.0f} writes to take them on; after kill -9 and a restart {looks:.0f} "
          f"looks, {writes:.0f} writes for the {number // 2} that moved (a status and an event each), {errors:.0f} "
          f"errors, {took_s:.1f} s after it led")
    # A status and an event for each that moved, and nothing for the others.
    assert writes == number
    assert submitting <= 3.1 * number  # the finalizer, the status, an event; conflicts are thought out anew


def page(jobs: Jobs, number: int) -> tuple[Job, ...]:
    """Page `number` of all jobs."""
    cursor = None
    for _ in range(number):
        cursor = jobs.list(JobFilter(), limit=200, cursor=cursor).next_cursor
    return jobs.list(JobFilter(), limit=200, cursor=cursor).items


def accepted(cluster: Cluster, namespace: str) -> int:
    return sum(condition(one, "Accepted") is not None for one in cluster.list_all(API, "DrafterJob", namespace))


def finished(cluster: Cluster, namespace: str) -> int:
    return sum(condition(one, "Succeeded") is not None for one in cluster.list_all(API, "DrafterJob", namespace))


def test_a_namespace_says_whose_its_objects_are_and_a_full_project_waits(cluster: Cluster, namespace: str,
                                                                        database: Database, jobs: Jobs,
                                                                        tmp_path: Path) -> None:
    projects = Projects(database)
    projects.create(CreateProject(name="search", quotas=Quotas(max_jobs=1)))
    with operating(tmp_path, namespace, "--project", f"{namespace}=search"):
        cluster.create(manifest(namespace, "first"))
        first = submitted(cluster, namespace, jobs, "first")
        assert jobs.project_of(first.id) == "search"
        cluster.create(manifest(namespace, "second"))
        eventually(lambda: condition(read(cluster, namespace, "second"), "Accepted") == ("False", "QuotaReached"),
                   "the second job reports that the quota is full")
        jobs.save_status(first.id, ended("Succeeded", utc_now()))
        second = submitted(cluster, namespace, jobs, "second")
        assert jobs.project_of(second.id) == "search"
        # What the REST API would not let a caller of the project name, kubectl does not either.
        other = jobs.submit(derive(job_spec()), project="default")
        body = manifest(namespace, "thief")
        body["spec"]["job"] = job_body(data={"sources": [{"path": str(tmp_path / "jobs" / other.id / "rows.jsonl")}]})
        cluster.create(body)
        result = eventually(lambda: condition(read(cluster, namespace, "thief"), "Failed"), "the thief is refused")
        assert result == ("True", "InvalidInput")
