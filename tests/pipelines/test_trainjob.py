"""A TrainJob in the format of Kubeflow Trainer 2.2, and the program of its nodes, without a cluster."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from eyrie_api.artifacts import digest_model, write_model
from eyrie_api.contract.cluster import MODEL_CACHE_DIR, ModelCacheSpec
from eyrie_api.contract.placement import JobPlacement, Placement, VolumeWork
from eyrie_api.planning.resolve import derive
from eyrie_operator.unscheduled import waiting_pods
from eyrie_pipelines import work_area
from eyrie_pipelines.run_records import read_failure
from eyrie_pipelines.runner import JOB_FILE, JobFile
from eyrie_pipelines.several_gpus import PROCESSES_VARIABLE, TRAINJOB_VARIABLE, num_processes, under_torchrun
from eyrie_pipelines.trainjob import (
    TrainJobClient,
    TrainJobRequest,
    TrainJobResult,
    name_of,
    render,
    result_of,
)
from eyrie_workers.catalog import SYNC_VARIABLE, command
from tests.pipelines.conftest import Rehearsal, spec_of
from tests.pipelines.test_placement import EVERYTHING, compiled, container, platform, variables

ARGUMENTS = ["--job-dir", "/var/lib/eyrie/jobs/j", "--spec-digest", "sha256:0", "--key", "base"]


def request(placement: Placement = EVERYTHING, nodes: int = 4) -> TrainJobRequest:
    return TrainJobRequest(nodes=nodes, placement=placement, home="/var/lib/eyrie", sync_s=15.0, python=("python3",))


def test_a_trainjob_sets_number_of_nodes_command_resources_and_environment() -> None:
    job = render(request(), "eyrie-j", "team", ARGUMENTS, "run-7")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["metadata"] == {"name": "eyrie-j", "namespace": "team", "labels": {"kueue.x-k8s.io/queue-name": "gpus"}}
    spec = job["spec"]
    assert spec["runtimeRef"] == {"name": "torch-distributed", "apiGroup": "trainer.kubeflow.org",
                                  "kind": "ClusterTrainingRuntime"}
    trainer = spec["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (4, 2)
    assert trainer["command"] + trainer["args"] == ["python3", "-m", "eyrie_pipelines.task_program", *ARGUMENTS]
    assert trainer["resourcesPerNode"] == {"requests": {"cpu": "500m", "memory": "2Gi"},
                                           "limits": {"cpu": "4", "memory": "64Gi", "nvidia.com/gpu": "2"}}
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}} in trainer["env"]
    assert {"name": "EYRIE_SYNC_S", "value": "15"} in trainer["env"]


def test_pods_are_changed_by_one_runtime_patch_with_the_fields_that_patches_may_set() -> None:
    patches = render(request(), "eyrie-j", "team", ARGUMENTS, "run-7")["spec"]["runtimePatches"]
    assert [one["manager"] for one in patches] == ["eyrie.dev/pipelines"]
    replicated = patches[0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert [one["name"] for one in replicated] == ["node"]
    pod = replicated[0]["template"]["spec"]["template"]["spec"]
    assert set(pod) <= {"serviceAccountName", "volumes", "initContainers", "containers", "imagePullSecrets",
                        "securityContext", "nodeSelector", "affinity", "tolerations", "schedulingGates"}
    assert [set(one) for one in pod["containers"]] == [{"name", "volumeMounts"}]  # variables are the trainer's
    assert pod["nodeSelector"] == {"pool": "spot", "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    mounts = {one["mountPath"]: one["name"] for one in pod["containers"][0]["volumeMounts"]}
    assert set(mounts) == {"/var/lib/eyrie", work_area.CREDENTIALS_DIR, "/dev/shm", "/models"}
    assert set(mounts.values()) == {one["name"] for one in pod["volumes"]}


def test_a_shared_volume_is_mounted_and_nothing_is_copied() -> None:
    placed = Placement(image="i", work=VolumeWork(claim="shared", sub_path="eyrie"))
    spec = render(request(placed), "eyrie-j", "team", ARGUMENTS, "run-7")["spec"]
    pod = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"][
        "template"]["spec"]
    assert pod["volumes"] == [{"name": "work", "persistentVolumeClaim": {"claimName": "shared"}}]
    assert pod["containers"][0]["volumeMounts"] == [
        {"name": "work", "mountPath": "/var/lib/eyrie", "subPath": "eyrie"}]
    assert "EYRIE_SYNC_S" not in {one["name"] for one in spec["trainer"]["env"]}
    assert spec["trainer"]["resourcesPerNode"] == {}


def test_the_task_that_creates_a_trainjob_is_small_and_gets_the_request_in_its_environment() -> None:
    pipeline = compiled(wanted=JobPlacement(train_nodes=4, train_launcher="trainjob"))
    assert "accelerator" not in container(pipeline, "train")["resources"]
    passed = TrainJobRequest.model_validate_json(variables(pipeline, "train")[TRAINJOB_VARIABLE])
    assert (passed.nodes, passed.placement.num_gpus, passed.placement.image) == (4, 2, EVERYTHING.image)
    assert "service_account" in platform(pipeline, "train")["podMetadata"]["annotations"]["eyrie.dev/pod"]
    assert container(pipeline, "benchmark")["resources"]["accelerator"]["resourceCount"] == "2"
    assert TRAINJOB_VARIABLE not in variables(compiled(), "train")


def test_the_pods_of_a_trainjob_have_the_labels_by_which_the_operator_finds_pods_without_a_node() -> None:
    pipeline = compiled(wanted=JobPlacement(train_nodes=4, train_launcher="trainjob"))
    assert platform(pipeline, "train")["fieldPathAsEnv"] == [
        {"name": "EYRIE_RUN", "fieldPath": "metadata.labels['pipeline/runid']"}]
    made = render(request(), "eyrie-j", "team", ARGUMENTS, "run-7")
    (node,) = made["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    labels = node["template"]["spec"]["template"]["metadata"]["labels"]
    condition = {"type": "PodScheduled", "status": "False", "message": "no",
                 "lastTransitionTime": "2026-01-01T00:00:00Z"}
    pod = {"metadata": {"name": "p", "labels": labels}, "status": {"phase": "Pending", "conditions": [condition]}}
    (wait,) = waiting_pods([pod])
    assert (wait.run_id, wait.stage, wait.key) == ("run-7", "train", "")


def test_the_name_is_a_dns_label_and_differs_by_job_candidate_and_spec() -> None:
    names = {name_of(job, candidate, digest) for job in ("dj-1", "Job_" + "x" * 300)
             for candidate in ("base", "c1") for digest in ("sha256:0", "sha256:1")}
    assert len(names) == 8
    for name in names:
        assert len(name) <= 40
        assert name.replace("-", "").isalnum()
        assert name == name.lower()
        assert name[0].isalpha()
        assert name[-1] != "-"


def test_only_complete_and_failed_conditions_end_a_trainjob() -> None:
    def seen(*conditions: tuple[str, str]) -> dict[str, object]:
        return {"status": {"conditions": [{"type": kind, "status": status, "reason": "R", "message": "m"}
                                          for kind, status in conditions]}}

    assert result_of({}) is None
    assert result_of(seen(("Suspended", "True"))) is None
    assert result_of(seen(("Suspended", "False"), ("Complete", "False"))) is None
    complete = TrainJobResult(state="complete", message="R: m")
    assert result_of(seen(("Suspended", "False"), ("Complete", "True"))) == complete
    assert result_of(seen(("Failed", "True"))) == TrainJobResult(state="failed", message="R: m")


@pytest.mark.parametrize(("gpus", "processes"), [(0, "1"), (2, "2")])
def test_torchrun_has_a_process_for_each_gpu_and_finds_its_peers_in_the_environment(
        gpus: int, processes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Path("/var/lib/eyrie/jobs/j/stages/train/base")
    placed = EVERYTHING.model_copy(update={"num_gpus": gpus, "gpu_type": None})
    trainer = render(request(placed), "eyrie-j", "team", ARGUMENTS, "run-7")["spec"]["trainer"]
    assert trainer["numProcPerNode"] == int(processes)
    values = {each["name"]: each.get("value") for each in trainer["env"]}
    monkeypatch.setenv(PROCESSES_VARIABLE, str(values[PROCESSES_VARIABLE]))
    monkeypatch.setenv("PET_NNODES", "4")
    assert under_torchrun(command("train", directory), num_processes(1)) == [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", processes,
        "-m", "eyrie_workers.stages.train", "--spec", f"{directory}/spec.json", "--out", f"{directory}/manifest.json"]


def test_only_the_first_of_several_nodes_uploads_to_the_store(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job_dir = tmp_path / "home" / "jobs" / "j"
    monkeypatch.setenv("EYRIE_ARTIFACTS_URL", str(tmp_path / "store"))
    monkeypatch.setenv(SYNC_VARIABLE, "1")
    for rank in ("1", "0"):
        monkeypatch.setenv("PET_NODE_RANK", rank)
        (job_dir / "run").mkdir(parents=True, exist_ok=True)
        (job_dir / "run" / "failure.json").write_text(rank)
        work_area.WorkArea.of(job_dir).upload(job_dir / "run" / "failure.json")
        found = tmp_path / "store" / "jobs" / "j" / "run" / "failure.json"
        assert found.exists() is (rank == "0")


def test_secrets_appear_by_name_and_not_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "known-to-the-box-alone")
    assert "known-to-the-box-alone" not in str(render(request(), "eyrie-j", "team", ARGUMENTS, "run-7"))


@pytest.mark.parametrize(("word", "final"), [("die", False), ("permanent", True)])
def test_a_node_whose_training_was_killed_does_not_fail_the_run_and_a_permanent_failure_does(
        rehearsal: Rehearsal, job_dir: Path, monkeypatch: pytest.MonkeyPatch, word: str, final: bool) -> None:
    monkeypatch.setenv("PET_NNODES", "1")
    rehearsal.plan(train__base=[word])
    job = JobFile(id="job-1", resolved=derive(spec_of()), attempt=1)
    write_model(job_dir / JOB_FILE, job)
    node = subprocess.run([sys.executable, "-m", "eyrie_pipelines.task_program", "train", "--job-dir", str(job_dir),
                           "--spec-digest", digest_model(job), "--key", "base"],
                          capture_output=True, text=True, timeout=300)
    assert node.returncode != 0
    assert (read_failure(job_dir) is not None) == final, node.stderr
    assert rehearsal.starts() == ["train/base"]


def test_reads_are_retried_while_the_api_server_is_unavailable() -> None:
    """The transport stands in for an API server that answers 503, or not at all, between two reads."""
    complete = {"status": {"conditions": [{"type": "Complete", "status": "True", "reason": "R", "message": "done"}]}}
    responses = iter([httpx.Response(404), httpx.Response(503), None, httpx.Response(200, json=complete)])

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method != "GET":
            return httpx.Response(200, json={})
        response = next(responses)
        if response is None:
            raise httpx.ConnectError("refused", request=request)
        return response

    with httpx.Client(transport=httpx.MockTransport(answer), base_url="http://kubernetes") as client:
        result = TrainJobClient(client, "team").run({"metadata": {"name": "eyrie-j"}}, poll_s=0.01)
    assert (result.state, result.message) == ("complete", "R: done")
    assert next(responses, "none left") == "none left"


def test_the_nodes_of_a_trainjob_read_the_model_cache() -> None:
    for volume, source in ((ModelCacheSpec(claim="models"), {"persistentVolumeClaim": {
            "claimName": "models", "readOnly": True}}), (ModelCacheSpec(node_path="/shared"), {
                "hostPath": {"path": "/shared"}})):
        cached = request().model_copy(update={"model_cache": volume})
        spec = render(cached, "eyrie-j", "team", ARGUMENTS, "run-7")["spec"]
        assert {"name": "EYRIE_MODEL_CACHE", "value": MODEL_CACHE_DIR} in spec["trainer"]["env"]
        replicated = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        pod = replicated[0]["template"]["spec"]["template"]["spec"]
        assert {"name": "models", **source} in pod["volumes"]
        mount = {"name": "models", "mountPath": MODEL_CACHE_DIR, "readOnly": True}
        assert mount in pod["containers"][0]["volumeMounts"]
