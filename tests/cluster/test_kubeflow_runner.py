"""The runner of a cluster drives whole jobs through the double: every box in a Job of its own, placed as it says.

Stages are rehearsed: everything about a run is real but the work. The work area is a volume, a directory of this
machine, which the job's pods and the test see at the same path.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import pytest

from eyrie_api.contract.cluster import ClusterProfile
from eyrie_api.contract.records import WaitingPod
from eyrie_api.planning.resolve import derive
from eyrie_operator.cluster.client import Cluster
from eyrie_operator.unscheduled import waiting_pods
from eyrie_pipelines.kubeflow import KubeflowRunner
from eyrie_pipelines.runner import RUN_LABEL, STAGE_LABEL
from tests.cluster.patience import eventually
from tests.cluster.programs import programs
from tests.cluster.test_kubeflow_double import Double, doubling
from tests.pipelines.conftest import REHEARSAL, Rehearsal, job_file, spec_of

DEADLINE_S = 400.0
"""For the nine pods of the smallest job on a crowded machine."""


@dataclass
class Stage:
    """A runner, what it drives, and where."""

    runner: KubeflowRunner
    profile: ClusterProfile
    double: Double
    rehearsal: Rehearsal
    home: Path
    objects: Path
    """Files of the run's artifacts."""


@pytest.fixture
def stage(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[Stage]:
    own = programs()
    if not own.on_host:
        pytest.skip("rehearsed stages lie in a directory of this machine")
    home = tmp_path / "home"
    (home / "rehearsal").mkdir(parents=True)
    volume = f"{namespace}-work"
    cluster.create({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": volume}, "spec": {
        "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteMany"], "hostPath": {"path": str(home)},
        "persistentVolumeReclaimPolicy": "Retain", "claimRef": {"namespace": namespace, "name": "work"}}})
    cluster.create({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
                    "metadata": {"name": "work", "namespace": namespace}, "spec": {
                        "accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}},
                        "storageClassName": "", "volumeName": volume}})
    rehearsed = {"PYTHONPATH": str(REHEARSAL), "EYRIE_REHEARSAL": str(home / "rehearsal")}
    try:
        with doubling(namespace, tmp_path, own, rehearsed) as double:
            profile = ClusterProfile.model_validate({
                "kubeflow": {"url": f"http://127.0.0.1:{double.port}"}, "home": str(home), "python": own.python,
                "stages": {"image": own.image_of("workers"),
                           "work": {"kind": "volume", "claim": "work", "mount_path": str(home)},
                           "host_paths": [{"path": str(REHEARSAL), "mount_path": str(REHEARSAL)}]}})
            yield Stage(KubeflowRunner(profile, home, None), profile, double, Rehearsal(home / "rehearsal"), home,
                        tmp_path / "objects")
    finally:
        cluster.delete("v1", "PersistentVolume", "", volume)


def test_a_job_runs_through_in_jobs_of_the_cluster_and_is_started_once(stage: Stage) -> None:
    spec = spec_of()
    stage.runner.start(job_file(spec, job_id="dj-1"))
    stage.runner.start(job_file(spec, job_id="dj-1"))

    def over() -> object:
        stage.runner.refresh("dj-1", derive(spec))
        seen = stage.runner.observe("dj-1")
        return seen if seen.state != "running" else None

    seen = eventually(over, "the run ends", DEADLINE_S, every_s=1.0)
    result = stage.double.log.read_text()
    assert (seen.state, seen.attempt, seen.starts, seen.failure) == ("succeeded", 1, 1, None), result
    assert stage.rehearsal.starts() == ["regenerate", "capture", "train/base", "benchmark/base-step-10",
                                        "benchmark/base-step-20", "tune", "prove"]
    assert (stage.home / "jobs" / "dj-1" / "stages" / "prove" / "manifest.json").exists()
    (run,) = stage.double.runs.run_service_list_runs().runs
    (prove,) = (one for one in run.run_details.task_details if one.display_name == "prove")
    assert set(prove.inputs) == {"winner", "tuning"}
    artifacts = {name: json.loads(urlopen(f"http://127.0.0.1:{stage.double.port}/artifacts/{listed.artifact_ids[0]}",
                                          timeout=30).read()) for name, listed in prove.outputs.items()}
    assert artifacts["proof"]["type"]["schemaTitle"] == "system.Metrics"
    assert artifacts["proof"]["metadata"]["data"] == str(stage.home / "jobs" / "dj-1" / "stages" / "prove")
    page = stage.objects / artifacts["report"]["uri"].removeprefix("minio://")
    assert "By the figures of this run" in page.read_text()


def test_a_pod_that_no_node_takes_is_seen_as_waiting_and_runs_when_a_node_does(cluster: Cluster, stage: Stage) -> None:
    pool = {"eyrie.dev/test-pool": stage.double.namespace}
    placed = stage.profile.stages.model_copy(update={"node_selector": pool})
    profile = stage.profile.model_copy(update={"stages": placed})
    runner = KubeflowRunner(profile, stage.home, None)
    stage.rehearsal.plan(regenerate=["hang"])
    runner.start(job_file(spec_of(), job_id="dj-1"))

    def waiting() -> WaitingPod | None:
        pods = cluster.list_all("v1", "Pod", stage.double.namespace, labelled=f"{RUN_LABEL},{STAGE_LABEL}",
                                fields="status.phase=Pending")
        return next((one for one in waiting_pods(pods) if one.stage == "regenerate"), None)

    wait = eventually(waiting, "the scheduler has refused the pod", DEADLINE_S)
    (run,) = stage.double.runs.run_service_list_runs().runs
    assert (wait.run_id, wait.reason) == (run.run_id, "WaitingForNodes")
    assert "nodes are available" in wait.message, wait
    assert f"eyrie.dev/test-pool={stage.double.namespace}" in wait.message, wait
    assert runner.observe("dj-1").state == "running", "nothing fails by it"
    node = cluster.list_all("v1", "Node")[0]["metadata"]["name"]
    try:
        cluster.merge("v1", "Node", "", node, {"metadata": {"labels": pool}})
        eventually(stage.rehearsal.starts, "the stage runs on the labelled node", DEADLINE_S)
        assert waiting() is None
    finally:
        cluster.merge("v1", "Node", "", node, {"metadata": {"labels": dict.fromkeys(pool)}})
        runner.stop("dj-1")
    eventually(lambda: runner.observe("dj-1").state != "running", "the run ends", DEADLINE_S)


def test_a_stages_failure_is_reported_while_the_run_lives_and_ends_it(stage: Stage) -> None:
    stage.rehearsal.plan(regenerate=["permanent"])
    stage.runner.start(job_file(spec_of(), job_id="dj-1"))
    seen = eventually(lambda: (one := stage.runner.observe("dj-1")).state == "failed" and one, "it has failed",
                      DEADLINE_S)
    assert seen.failure is not None
    assert (seen.failure.stage, seen.alive) == ("regenerate", True), "Kubeflow would still try again"
    stage.runner.stop("dj-1")
    ended = eventually(lambda: not (one := stage.runner.observe("dj-1")).alive and one, "the run ends", DEADLINE_S)
    assert (ended.state, ended.failure) == ("failed", seen.failure)
    assert stage.rehearsal.starts() == ["regenerate"], "not tried again"


def test_a_stopped_job_leaves_no_pod_and_its_stage_is_reported(cluster: Cluster, stage: Stage) -> None:
    stage.rehearsal.plan(regenerate=["hang"])
    stage.runner.start(job_file(spec_of(), job_id="dj-1"))
    eventually(stage.rehearsal.starts, "the first stage runs", DEADLINE_S)
    stage.runner.stop("dj-1")
    stage.runner.stop("dj-1")
    eventually(lambda: stage.runner.observe("dj-1").state != "running", "the run ends", DEADLINE_S)

    def alive() -> list[str]:
        return [one["metadata"]["name"] for one in cluster.list_all("v1", "Pod", stage.double.namespace)
                if one["status"].get("phase") in ("Pending", "Running")]

    eventually(lambda: not alive(), "no pod runs", DEADLINE_S)
    # Told to end and not killed: it has said so.
    events = (stage.home / "jobs" / "dj-1" / "stages" / "regenerate" / "events.jsonl").read_text()
    assert "nterrupted" in events, events
