"""The driver of jobs over Kubeflow: what it makes of a server that is away, of a run that fails, of a cancellation."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from eyrie_api.artifacts.local import LocalStore
from eyrie_api.contract.cluster import ClusterProfile, KubeflowSpec
from eyrie_api.contract.placement import Placement, S3Work
from eyrie_api.contract.records import Failure
from eyrie_api.contract.serving import ServeSpec
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.migrations import upgrade
from eyrie_api.errors import InvalidInput
from eyrie_api.planning.resolve import derive
from eyrie_api.settings import Settings
from eyrie_operator.conditions import find
from eyrie_operator.control_plane import runtime_of
from eyrie_operator.jobs.driver import Driver
from eyrie_operator.unscheduled import waiting_pods
from eyrie_pipelines.kubeflow import KubeflowRunner
from eyrie_pipelines.local import LocalRunner
from eyrie_pipelines.run_records import RunFailure
from tests.operator.test_unscheduled import pod as unscheduled_pod
from tests.pipelines.conftest import spec_of
from tests.pipelines.kfp_server import KfpServer

SPEC = spec_of(serve=ServeSpec(enabled=False))


class Harness:
    """Rows, a runner, a store, and a stand-in for Kubeflow's API."""

    def __init__(self, directory: Path, max_runs: int = 16) -> None:
        self.kubeflow = KfpServer()
        home = directory / "home"
        self.profile = ClusterProfile(
            kubeflow=KubeflowSpec(url=self.kubeflow.url), max_runs=max_runs, home=str(home),
            stages=Placement(image="eyrie/workers:1", work=S3Work(url="s3://bucket/eyrie")))
        self.settings = Settings(home=home, lease_ttl_s=600.0)  # one step keeps its lease, however slow
        self.database = Database(self.settings.resolved_database_url)
        upgrade(self.database)
        self.jobs, self.store = Jobs(self.database), LocalStore(directory / "store")
        self.driver = Driver(self.settings, self.database, KubeflowRunner(self.profile, home, self.store))

    def submit(self) -> str:
        return self.jobs.submit(derive(SPEC)).id

    def fail(self, job_id: str) -> None:
        """Its run ends with the failure of a stage."""
        self.store.write(f"jobs/{job_id}/run/failure.json", RunFailure(stage="regenerate", failure=Failure(
            reason="TargetNotFound", message="no model there", hint="correct target.model", exit_code=66,
            time=datetime.now(UTC))).model_dump_json().encode())
        self.kubeflow.runs[0]["state"] = "FAILED"

    def reason(self, job_id: str) -> str:
        accepted = find(self.jobs.get(job_id).status.conditions, "Accepted")
        assert accepted is not None
        return accepted.reason

    def phase(self, job_id: str) -> str:
        return self.jobs.get(job_id).status.phase


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path)
    yield harness
    harness.kubeflow.close()
    harness.database.close()


def test_a_job_waits_for_kubeflow_to_come_back_and_says_so_once(harness: Harness) -> None:
    job_id = harness.submit()
    for _ in range(3):
        harness.kubeflow.refusals = [(503, False)]
        harness.driver.advance(job_id)
    assert (harness.reason(job_id), harness.phase(job_id)) == ("KubeflowUnavailable", "Pending")
    result = [event for event in harness.jobs.events(job_id, limit=100) if event.reason == "KubeflowUnavailable"]
    assert len(result) == 1
    assert result[0].type == "Warning"
    harness.driver.advance(job_id)
    assert (harness.reason(job_id), harness.phase(job_id)) == ("JobAccepted", "Running")
    assert len(harness.kubeflow.runs) == 1


def test_a_failed_stage_fails_the_job_with_its_own_words(harness: Harness) -> None:
    job_id = harness.submit()
    harness.driver.advance(job_id)
    harness.fail(job_id)
    harness.driver.advance(job_id)
    failed = find(harness.jobs.get(job_id).status.conditions, "Failed")
    assert failed is not None
    assert (failed.reason, harness.phase(job_id)) == ("TargetNotFound", "Failed")
    assert "correct target.model" in failed.message


def test_a_cancelled_job_is_cancelled_when_kubeflow_has_ended_its_run(harness: Harness) -> None:
    job_id = harness.submit()
    harness.driver.advance(job_id)
    harness.jobs.cancel(job_id)
    harness.driver.advance(job_id)
    assert harness.kubeflow.runs[0]["state"] == "CANCELING"
    assert harness.phase(job_id) == "Cancelling"
    harness.kubeflow.runs[0]["state"] = "CANCELED"
    harness.driver.advance(job_id)
    assert harness.phase(job_id) == "Cancelled"


def test_no_more_runs_than_the_administrator_allows(tmp_path: Path) -> None:
    harness = Harness(tmp_path, max_runs=1)
    first, second = harness.submit(), harness.submit()
    harness.driver.advance(first)
    harness.driver.advance(second)
    assert (harness.phase(first), harness.phase(second), harness.reason(second)) == ("Running", "Pending", "Queued")
    harness.kubeflow.runs[0]["state"] = "SKIPPED"  # its own place counts as its own when it is started again
    harness.driver.advance(first)
    assert [run["display_name"] for run in harness.kubeflow.runs] == [f"{first}-1.1", f"{first}-1.2"]
    harness.kubeflow.close()
    harness.database.close()


def test_a_worker_follows_the_profile_or_works_on_this_machine(tmp_path: Path, harness: Harness) -> None:
    assert isinstance(runtime_of(Settings(home=tmp_path), harness.database).runner, LocalRunner)
    path = tmp_path / "profile.yaml"
    path.write_text(yaml.safe_dump(harness.profile.model_dump(mode="json")))
    chosen = runtime_of(Settings(home=tmp_path / "home", cluster_profile=path), harness.database)
    assert isinstance(chosen.runner, KubeflowRunner)
    assert chosen.reconcile_endpoint is None
    assert chosen.store is not None
    assert chosen.store.url == "s3://bucket/eyrie"
    with pytest.raises(InvalidInput, match="EYRIE_HOME"):
        runtime_of(Settings(home=tmp_path / "elsewhere", cluster_profile=path), harness.database)


def test_a_job_whose_pod_has_no_node_waits_with_reason_and_hint_and_says_so_once(harness: Harness) -> None:
    job_id = harness.submit()
    harness.driver.advance(job_id)
    run_id = harness.jobs.get(job_id).status.run_id
    unscheduled = unscheduled_pod(labels={"pipeline/runid": str(run_id), "eyrie.dev/stage": "regenerate"})
    harness.jobs.record_waiting_pods(waiting_pods([unscheduled]))
    for _ in range(3):
        harness.driver.advance(job_id)
    job = harness.jobs.get(job_id)
    [stage] = [one for one in job.status.stages if one.stage == "regenerate"]
    assert (job.status.phase, stage.state, stage.reason) == ("Running", "Pending", "WaitingForNodes")
    assert "node(s) didn't match" in (stage.message or "")
    assert "scale the pool up" in (stage.hint or "")
    events = [one for one in harness.jobs.events(job_id, limit=100) if one.reason == "WaitingForNodes"]
    assert [(one.type, one.stage) for one in events] == [("Warning", "regenerate")]
    harness.jobs.record_waiting_pods(())
    harness.driver.advance(job_id)
    job = harness.jobs.get(job_id)
    assert [one.reason for one in job.status.stages] == [None] * len(job.status.stages)
    assert find(job.status.conditions, "Regenerated") is None


def test_pods_of_an_earlier_run_are_not_taken_for_those_of_the_current_one(harness: Harness) -> None:
    job_id = harness.submit()
    harness.driver.advance(job_id)
    unscheduled = unscheduled_pod(labels={"pipeline/runid": str(harness.jobs.get(job_id).status.run_id),
                                          "eyrie.dev/stage": "regenerate"})
    harness.jobs.record_waiting_pods(waiting_pods([unscheduled]))
    harness.kubeflow.runs[0]["state"] = "FAILED"
    harness.driver.advance(job_id)
    assert len(harness.kubeflow.runs) == 2
    harness.driver.advance(job_id)
    assert harness.jobs.get(job_id).status.stages[0].reason is None
