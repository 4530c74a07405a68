"""What a placement asks for stands in the compiled pipeline, for the boxes it is meant for, and nothing else does."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from eyrie_api.contract.cluster import MODEL_CACHE_DIR, ClusterProfile, KubeflowSpec, ModelCacheSpec
from eyrie_api.contract.hardware import HardwareSpec, PlacedProfile
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.placement import (
    HostPath,
    JobPlacement,
    Placement,
    PlacementRequest,
    S3Work,
    SecretVariable,
    Toleration,
    VolumeWork,
    WorkArea,
)
from eyrie_api.contract.prove import ProveSpec
from eyrie_api.contract.resolved import ResolvedJob
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.errors import InvalidInput
from eyrie_api.planning.resolve import derive
from eyrie_pipelines.placement import POD_ANNOTATION, compile_for
from eyrie_pipelines.several_gpus import PROCESSES_VARIABLE
from eyrie_pipelines.work_area import CREDENTIALS_DIR, pod_variables
from tests.pipelines.conftest import spec_of

HUB = TargetSpec(model="org/model")
S3 = S3Work(url="s3://bucket/eyrie", endpoint_url="http://minio:9000", credentials_secret="s3-keys",
            scratch_size="50Gi")
EVERYTHING = Placement(
    image="registry/eyrie/workers@sha256:" + "0" * 64, image_pull_policy="Always", image_pull_secrets=("pull",),
    num_gpus=2, gpu_type="NVIDIA-H100-80GB-HBM3", requests={"cpu": "500m", "memory": "2Gi"},
    limits={"cpu": "4", "memory": "64Gi"}, node_selector={"pool": "spot"},
    tolerations=(Toleration(key="spot", effect="NoSchedule"), Toleration(key="team", operator="Equal", value="a")),
    priority_class="batch", queue="gpus", work=S3, shared_memory="8Gi", service_account="stages",
    secret_variables=(SecretVariable(variable="HF_TOKEN", secret="hub", key="token"),),
    host_paths=(HostPath(path="/models", mount_path="/models"),))


def compiled(stages: Placement = EVERYTHING, wanted: JobPlacement | None = None, *, together: bool = False,
             prefetched: bool = False, **profile: Any) -> dict[str, Any]:
    job = resolved(together=together, placement=wanted or JobPlacement(), **({"target": HUB} if prefetched else {}))
    return compile_for(ClusterProfile(kubeflow=KubeflowSpec(url="http://kfp:8888"), stages=stages, **profile), job)


def resolved(*, together: bool = False, **sections: object) -> ResolvedJob:
    return derive(spec_of(**sections)).model_copy(update={"trains_together": together})


def container(pipeline: dict[str, Any], box: str) -> dict[str, Any]:
    found: dict[str, Any] = pipeline["pipeline_spec"]["deploymentSpec"]["executors"][f"exec-{box}"]["container"]
    return found


def platform(pipeline: dict[str, Any], box: str) -> dict[str, Any]:
    executors = pipeline["platform_spec"]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    found: dict[str, Any] = executors[f"exec-{box}"]
    return found


def variables(pipeline: dict[str, Any], box: str) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container(pipeline, box)["env"]}


def test_a_stages_box_has_all_its_placement_asks_for() -> None:
    pipeline = compiled()
    box = container(pipeline, "train")
    assert box["image"] == EVERYTHING.image
    resources = box["resources"]
    assert (resources["resourceCpuRequest"], resources["resourceCpuLimit"]) == ("500m", "4")
    assert (resources["resourceMemoryRequest"], resources["resourceMemoryLimit"]) == ("2Gi", "64Gi")
    assert resources["accelerator"]["resourceType"] == "nvidia.com/gpu"
    assert resources["accelerator"]["resourceCount"] == "2"
    asked = platform(pipeline, "train")
    assert asked["imagePullPolicy"] == "Always"
    assert [one["secretName"] for one in asked["imagePullSecret"]] == ["pull"]
    assert asked["nodeSelector"]["labels"] == {"pool": "spot", "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert asked["tolerations"] == [{"key": "spot", "operator": "Exists", "effect": "NoSchedule"},
                                    {"key": "team", "operator": "Equal", "value": "a"}]
    assert asked["podMetadata"]["labels"] == {"app.kubernetes.io/part-of": "eyrie", "kueue.x-k8s.io/queue-name": "gpus",
                                              "eyrie.dev/stage": "train"}
    assert {"volumeName": "shared-memory", "mountPath": "/dev/shm", "medium": "Memory", "sizeLimit": "8Gi",
            } in asked["emptyDirMounts"]
    assert asked["secretAsEnv"][0]["secretName"] == "hub"
    assert asked["secretAsEnv"][0]["keyToEnv"] == [{"secretKey": "token", "envVar": "HF_TOKEN"}]
    beyond = json.loads(asked["podMetadata"]["annotations"][POD_ANNOTATION])
    assert beyond == {"host_paths": [{"path": "/models", "mount_path": "/models", "read_only": True}],
                      "priority_class": "batch", "service_account": "stages"}


def test_every_pod_names_the_stage_that_it_runs_or_that_waits_for_it() -> None:
    hardware = HardwareSpec(profiles=(
        PlacedProfile(name="h200-x2", price_per_hour=7.0, placement=PlacementRequest(gpu_type="NVIDIA-H200")),
        PlacedProfile(name="cpu", price_per_hour=0.5, placement=PlacementRequest(num_gpus=0))))
    for together in (False, True):
        pipeline = compile_for(
            ClusterProfile(kubeflow=KubeflowSpec(url="http://kfp:8888"), stages=EVERYTHING,
                           model_cache=ModelCacheSpec(claim="models")),
            resolved(together=together, target=HUB, prove=ProveSpec(hardware=hardware)))
        executors = pipeline["platform_spec"]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
        labels = {name.removeprefix("exec-"): one["podMetadata"]["labels"] for name, one in executors.items()}
        assert {box: one["eyrie.dev/stage"] for box, one in labels.items()} == {
            "prefetch": "regenerate", "regenerate": "regenerate", "capture": "capture", "list-candidates": "train",
            "train": "train", "list-checkpoints": "benchmark", "benchmark": "benchmark", "select": "tune",
            "tune": "tune", "prove": "prove", "hardware": "hardware", "hardware-2": "hardware",
            **({"sweep": "train"} if together else {})}
        assert {box: one["eyrie.dev/profile"] for box, one in labels.items() if "eyrie.dev/profile" in one} == {
            "hardware": "h200-x2", "hardware-2": "cpu"}


def test_a_job_that_trains_nothing_has_no_pod_of_training_and_waits_for_the_model_cache() -> None:
    profile = ClusterProfile(kubeflow=KubeflowSpec(url="http://kfp:8888"), stages=EVERYTHING,
                             model_cache=ModelCacheSpec(claim="models"))
    job = JobSpec.model_validate({"target": {"model": HUB.model}, "drafters": ["org/drafter"]})
    pipeline = compile_for(profile, derive(job))
    executors = pipeline["platform_spec"]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert {name.removeprefix("exec-"): one["podMetadata"]["labels"]["eyrie.dev/stage"]
            for name, one in executors.items()} == {
        "prefetch": "regenerate", "list-drafters": "benchmark", "benchmark": "benchmark", "select": "tune",
        "tune": "tune", "prove": "prove"}
    assert pipeline["pipeline_spec"]["root"]["dag"]["tasks"]["list-drafters"]["dependentTasks"] == ["prefetch"]


def test_credentials_of_trackers_reach_the_pods_that_train_alone() -> None:
    key = SecretVariable(variable="WANDB_API_KEY", secret="trackers", key="wandb")
    per_stage = {"train": EVERYTHING.model_copy(update={"secret_variables": (key,)})}
    for together in (False, True):
        pipeline = compiled(per_stage=per_stage, together=together)
        executors = pipeline["platform_spec"]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
        having = {name.removeprefix("exec-") for name, one in executors.items()
                  if {"secretKey": "wandb", "envVar": "WANDB_API_KEY"} in [
                      each for secret in one.get("secretAsEnv", ()) for each in secret["keyToEnv"]]}
        assert having == ({"sweep"} if together else {"train"})


def test_each_hardware_profile_is_a_task_on_nodes_of_its_own_and_the_others_wait_for_the_first() -> None:
    hardware = HardwareSpec(profiles=(
        PlacedProfile(name="h200-x2", price_per_hour=7.0, placement=PlacementRequest(gpu_type="NVIDIA-H200")),
        PlacedProfile(name="b200", price_per_hour=5.0, placement=PlacementRequest(
            num_gpus=1, gpu_type="NVIDIA-B200", node_selector={"pool": "blackwell"})),
        PlacedProfile(name="cpu", price_per_hour=0.5, placement=PlacementRequest(num_gpus=0))))
    profile = ClusterProfile(kubeflow=KubeflowSpec(url="http://kfp:8888"), stages=EVERYTHING)
    pipeline = compile_for(profile, resolved(prove=ProveSpec(hardware=hardware)))
    boxes = pipeline["pipeline_spec"]["root"]["dag"]["tasks"]
    assert [boxes[name]["taskInfo"]["name"] for name in ("hardware", "hardware-2", "hardware-3")] == [
        "hardware h200-x2", "hardware b200", "hardware cpu"]
    assert "prove" in boxes["hardware"]["dependentTasks"]
    assert all("hardware" in boxes[name]["dependentTasks"] for name in ("hardware-2", "hardware-3"))
    assert [container(pipeline, name)["resources"].get("accelerator", {}).get("resourceCount")
            for name in ("hardware", "hardware-2", "hardware-3")] == ["2", "1", None]
    assert platform(pipeline, "hardware")["nodeSelector"]["labels"] == {
        "pool": "spot", "nvidia.com/gpu.product": "NVIDIA-H200"}
    assert platform(pipeline, "hardware-2")["nodeSelector"]["labels"] == {
        "pool": "blackwell", "nvidia.com/gpu.product": "NVIDIA-B200"}
    assert not [name for name in compiled()["pipeline_spec"]["root"]["dag"]["tasks"] if "hardware" in name]


def test_a_store_as_work_area_is_reached_with_mounted_keys_from_a_home_of_the_pods_own() -> None:
    pipeline = compiled(sync_s=20.0)
    result = variables(pipeline, "capture")
    assert result["EYRIE_ARTIFACTS_URL"] == "s3://bucket/eyrie"
    assert result["EYRIE_ARTIFACTS_ENDPOINT_URL"] == "http://minio:9000"
    assert result["EYRIE_ARTIFACTS_CREDENTIALS_DIR"] == CREDENTIALS_DIR
    assert (result["EYRIE_HOME"], result["EYRIE_SYNC_S"]) == ("/var/lib/eyrie", "20")
    assert "EYRIE_STATES" not in result
    assert pod_variables(EVERYTHING.model_copy(update={"work": S3.model_copy(update={"states": "ranged"})}),
                         "/var/lib/eyrie", 20.0)["EYRIE_STATES"] == "ranged"
    asked = platform(pipeline, "capture")
    assert [(one["secretName"], one["mountPath"]) for one in asked["secretAsVolume"]] == [("s3-keys", CREDENTIALS_DIR)]
    assert {"volumeName": "work", "mountPath": "/var/lib/eyrie", "sizeLimit": "50Gi"} in asked["emptyDirMounts"]


def test_a_volume_as_work_area_is_mounted_where_paths_lead_and_nothing_is_copied() -> None:
    work = VolumeWork(claim="shared", sub_path="eyrie")
    pipeline = compiled(EVERYTHING.model_copy(update={"work": work, "shared_memory": None}))
    asked = platform(pipeline, "tune")
    assert [(one["constant"], one["mountPath"], one["subPath"]) for one in asked["pvcMount"]] == [
        ("shared", "/var/lib/eyrie", "eyrie")]
    assert "EYRIE_SYNC_S" not in variables(pipeline, "tune")
    assert "emptyDirMounts" not in asked


def test_the_boxes_between_stages_take_little_and_no_gpu() -> None:
    pipeline = compiled()
    for box in ("list-candidates", "list-checkpoints", "select"):
        resources = container(pipeline, box)["resources"]
        assert "accelerator" not in resources
        assert resources["resourceCpuRequest"] == "100m"
        assert "secretAsEnv" not in platform(pipeline, box)
        assert variables(pipeline, box)["EYRIE_ARTIFACTS_URL"] == "s3://bucket/eyrie"


@pytest.mark.parametrize("volume", [{"claim": "models"}, {"node_path": "/shared/models"}])
def test_a_model_cache_is_filled_by_a_small_task_before_the_first_stage_and_read_by_all_stages(
        volume: dict[str, str]) -> None:
    pipeline = compiled(model_cache=volume, prefetched=True)

    def mount(box: str) -> dict[str, Any] | None:
        """Source and mode of the cache in a box."""
        asked = platform(pipeline, box)
        beyond = json.loads(asked["podMetadata"]["annotations"][POD_ANNOTATION])
        for one in beyond.get("host_paths", ()):
            if one["mount_path"] == MODEL_CACHE_DIR:
                return {"node_path": one["path"], "read_only": one["read_only"]}
        for one in asked.get("pvcMount", ()):
            if one["mountPath"] == MODEL_CACHE_DIR:
                return {"claim": one["constant"], "read_only": MODEL_CACHE_DIR in beyond.get("read_only", ())}
        return None

    for box in ("regenerate", "capture", "train", "benchmark", "tune", "prove"):
        assert mount(box) == {**volume, "read_only": True}, box
        assert variables(pipeline, box)["EYRIE_MODEL_CACHE"] == MODEL_CACHE_DIR
        [own] = [one for one in json.loads(platform(pipeline, box)["podMetadata"]["annotations"][POD_ANNOTATION])[
            "host_paths"] if one["path"] == "/models"]  # of the placement
        assert own["mount_path"] == "/models"
    assert mount("prefetch") == {**volume, "read_only": False}
    assert mount("select") is None
    assert "accelerator" not in container(pipeline, "prefetch")["resources"]
    assert platform(pipeline, "prefetch")["secretAsEnv"][0]["keyToEnv"] == [
        {"secretKey": "token", "envVar": "HF_TOKEN"}]
    tasks = pipeline["pipeline_spec"]["root"]["dag"]["tasks"]
    assert tasks["regenerate"]["dependentTasks"] == ["prefetch"]
    without = compiled(model_cache=volume)
    assert "exec-prefetch" not in without["pipeline_spec"]["deploymentSpec"]["executors"]


def test_a_model_cache_is_one_volume_for_stages_and_engines() -> None:
    for volume in ({}, {"claim": "models", "node_path": "/models"}):
        with pytest.raises(ValidationError, match="give exactly one"):
            ModelCacheSpec.model_validate(volume)
    with pytest.raises(ValidationError, match=r"write model_cache: \{claim: models\}"):
        ClusterProfile.model_validate({
            "kubeflow": {"url": "http://kfp"}, "stages": EVERYTHING.model_dump(), "serving": {
                "namespace": "serving", "placement": {"image": "a"}, "model_cache_claim": "models"}})


def test_candidates_trained_together_take_one_pods_gpus_and_those_trained_apart_one_pods_each() -> None:
    apart, together = compiled(), compiled(together=True)
    assert "exec-sweep" not in apart["pipeline_spec"]["deploymentSpec"]["executors"]
    assert container(apart, "train")["resources"]["accelerator"]["resourceCount"] == "2"
    assert container(together, "sweep")["resources"]["accelerator"]["resourceCount"] == "2"
    assert "accelerator" not in container(together, "train")["resources"]
    tasks = together["pipeline_spec"]["root"]["dag"]["tasks"]
    loop = next(task for name, task in tasks.items() if "list-candidates" in task.get("dependentTasks", ()))
    assert "sweep" in loop["dependentTasks"]


def test_checkpoints_are_measured_in_parallel_where_each_pod_has_gpus_of_its_own() -> None:
    def limit(pipeline: dict[str, Any]) -> object:
        tasks = pipeline["pipeline_spec"]["root"]["dag"]["tasks"]
        loop = next(task for task in tasks.values() if "list-checkpoints" in task.get("dependentTasks", ()))
        return loop.get("iteratorPolicy", {}).get("parallelismLimit")

    assert limit(compiled()) is None
    assert limit(compiled(wanted=JobPlacement(stages={"benchmark": PlacementRequest(num_gpus=0)}))) == 1


def test_a_stage_of_its_own_kind_and_a_jobs_wishes_are_laid_over() -> None:
    wanted = JobPlacement(every=PlacementRequest(queue="team-b"), stages={"train": PlacementRequest(num_gpus=8)})
    pipeline = compiled(wanted=wanted, per_stage={"prove": Placement(image="sglang:1", num_gpus=1)})
    assert variables(pipeline, "train")[PROCESSES_VARIABLE] == "8"
    assert variables(pipeline, "capture")[PROCESSES_VARIABLE] == "2", "the cluster's own number"
    assert PROCESSES_VARIABLE not in variables(pipeline, "benchmark")
    assert container(pipeline, "prove")["image"] == "sglang:1"
    assert variables(pipeline, "prove")["EYRIE_ARTIFACTS_URL"] == "s3://bucket/eyrie"
    assert container(pipeline, "train")["resources"]["accelerator"]["resourceCount"] == "8"
    assert container(pipeline, "tune")["resources"]["accelerator"]["resourceCount"] == "2"
    assert platform(pipeline, "capture")["podMetadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-b"


def test_every_box_is_retried_when_its_pod_is_taken_away_and_starts_the_images_python() -> None:
    pipeline = compiled(python=("/opt/my venv/bin/python",))
    spec = pipeline["pipeline_spec"]
    tasks = dict(spec["root"]["dag"]["tasks"])
    for component in spec["components"].values():
        tasks |= component.get("dag", {}).get("tasks", {})
    boxes = {name: task for name, task in tasks.items() if not name.startswith("for-loop")}
    assert len(boxes) == 9
    assert all(task["retryPolicy"]["maxRetryCount"] == 5 for task in boxes.values())
    # From a box's first pod on, all its attempts together: a training takes days.
    assert all(int(task["retryPolicy"]["backoffMaxDuration"][:-1]) >= 14 * 86400 for task in boxes.values())
    for executor in spec["deploymentSpec"]["executors"].values():
        assert "exec env _KFP_RUNTIME=true '/opt/my venv/bin/python' -m kfp.dsl.executor_main" in (
            executor["container"]["command"][2])


@pytest.mark.parametrize(("changes", "words"), [
    ({"limits": {"ephemeral-storage": "10Gi"}}, "ephemeral-storage"), ({"requests": {"memory": "1.5Gi"}}, "memory")])
def test_amounts_kubeflow_cannot_express_are_refused_with_their_names(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        compiled(Placement(image="i", work=S3, **changes))


@pytest.mark.parametrize("work", [S3, VolumeWork(claim="shared")])
def test_no_secrets_value_known_here_gets_into_the_pipeline(
        work: WorkArea, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret_key").write_text("known-to-the-worker-alone")
    monkeypatch.setenv("EYRIE_ARTIFACTS_CREDENTIALS_DIR", str(tmp_path))
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "EYRIE_TOKEN", "EYRIE_DATABASE_URL", "EYRIE_BROKER_URL"):
        monkeypatch.setenv(name, "known-to-the-worker-alone")
    text = json.dumps(compiled(EVERYTHING.model_copy(update={"work": work})))
    assert "known-to-the-worker-alone" not in text
    assert str(tmp_path) not in text
