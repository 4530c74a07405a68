"""Pods without a node: what is said of them, from when on, and for which member of which stage."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from eyrie_api.contract.records import WaitingPod
from eyrie_operator.unscheduled import GRACE, is_due, wait_of, waiting_pods, why_waiting

SINCE = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
WORDS = "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector."


def pod(name: str = "p", since: datetime = SINCE, *, reason: str = "Unschedulable", message: str = WORDS,
        labels: dict[str, str] | None = None, spec: dict[str, Any] | None = None,
        **status: Any) -> dict[str, Any]:
    """A pod of a training on two GPUs of a type, which the scheduler finds no node for."""
    condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message,
                 "lastTransitionTime": since.isoformat().replace("+00:00", "Z")}
    return {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "kubeflow", "creationTimestamp": "2026-01-02T03:04:00Z",
                     "labels": {"pipeline/runid": "run-1", "eyrie.dev/stage": "train"} | (labels or {})},
        "spec": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H1000"}, "containers": [
            {"name": "main", "resources": {"limits": {"nvidia.com/gpu": "2", "memory": "64Gi"}}},
            {"name": "wait", "resources": {}}]} | (spec or {}),
        "status": {"phase": "Pending", "conditions": [condition]} | status}


def test_a_pod_that_fits_no_node_is_explained_by_the_scheduler_with_what_was_asked_and_what_to_do() -> None:
    wait = why_waiting(pod())
    assert wait is not None
    assert (wait.reason, wait.since) == ("WaitingForNodes", SINCE)
    assert wait.message == (f"no node fits: {WORDS} (asked for node labels nvidia.com/gpu.product=NVIDIA-H1000; "
                            "2 nvidia.com/gpu)")
    for part in ("scale the pool up", "kubectl -n kubeflow describe pod p", "placement.gpu_type",
                 "kubectl get nodes -L nvidia.com/gpu.product", "lower placement.num_gpus"):
        assert part in wait.hint


def test_a_pod_that_asks_for_no_labels_and_no_gpus_is_not_told_to_change_them() -> None:
    wait = why_waiting(pod(message="0/3 nodes: 3 Insufficient cpu", spec={"nodeSelector": None, "containers": []}))
    assert wait is not None
    assert wait.message == "no node fits: 0/3 nodes: 3 Insufficient cpu"
    assert wait.hint == ("scale the pool up, or see what the scheduler finds: kubectl -n kubeflow describe pod p")


def test_a_pod_that_kueue_has_not_admitted_waits_for_its_queue_since_it_was_created() -> None:
    gated = pod(reason="SchedulingGated", message="Scheduling is blocked due to non-empty scheduling gates",
                spec={"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]})
    del gated["status"]["conditions"][0]["lastTransitionTime"]  # the API server sets none for a gate
    wait = why_waiting(gated)
    assert wait is not None
    assert (wait.reason, wait.since) == ("WaitingForQueue", datetime(2026, 1, 2, 3, 4, tzinfo=UTC))
    assert "kueue.x-k8s.io/admission" in wait.message
    assert "kubectl -n kubeflow get workloads" in wait.hint


@pytest.mark.parametrize("changes", [
    {"spec": {"nodeName": "n1"}, "conditions": [{"type": "PodScheduled", "status": "True"}]},
    {"phase": "Failed"}, {"conditions": []},
    {"conditions": [{"type": "PodScheduled", "status": "True"}]},
    {"conditions": [{"type": "Ready", "status": "False", "reason": "Unschedulable"}]}])
def test_a_pod_with_a_node_or_that_has_ended_or_was_not_considered_yet_waits_for_nothing(changes: Any) -> None:
    assert why_waiting(pod(**changes)) is None


def test_a_pod_that_is_being_deleted_waits_for_nothing() -> None:
    leaving = pod()
    leaving["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:05Z"
    assert why_waiting(leaving) is None


def on_node(*, waits: dict[str, str] | None = None, volumes: Any = (), phase: str = "Pending",
            ready: str = "True") -> dict[str, Any]:
    """A pod on a node whose container waits, or whose volumes are not mounted."""
    conditions = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-02T03:04:05Z"},
                  {"type": "PodReadyToStartContainers", "status": ready}]
    return pod(spec={"nodeName": "n1", "volumes": list(volumes)}, conditions=conditions, phase=phase,
               containerStatuses=[{"name": "main", "state": {"waiting": waits or {"reason": "ContainerCreating"}}}])


def test_a_pod_without_the_secret_of_a_variable_says_which_and_what_to_do() -> None:
    wait = why_waiting(on_node(waits={"reason": "CreateContainerConfigError", "message": 'secret "hub" not found'}))
    assert wait is not None
    assert (wait.reason, wait.since) == ("WaitingForContainers", SINCE)
    assert wait.message == 'main is waiting: CreateContainerConfigError secret "hub" not found'
    for part in ("Secret", "kubectl -n kubeflow describe pod p"):
        assert part in wait.hint


def test_a_pod_without_its_image_is_not_sent_to_look_for_a_config_map() -> None:
    wait = why_waiting(on_node(waits={"reason": "ImagePullBackOff", "message": "not found"}))
    assert wait is not None
    assert "image" in wait.hint
    assert "ConfigMap" not in wait.hint


def test_a_pod_whose_volumes_are_not_mounted_names_the_secrets_and_claims_that_have_to_be_there() -> None:
    volumes = [{"name": "a", "secret": {"secretName": "eyrie-artifacts"}}, {"name": "b", "emptyDir": {}},
               {"name": "c", "secret": {"secretName": "maybe", "optional": True}},
               {"name": "d", "persistentVolumeClaim": {"claimName": "models"}}]
    wait = why_waiting(on_node(volumes=volumes, ready="False"))
    assert wait is not None
    assert (wait.reason, wait.since) == ("WaitingForContainers", SINCE)
    assert wait.message.endswith("(it mounts Secrets eyrie-artifacts; claims models)")
    assert waiting_pods([on_node(volumes=volumes, ready="False")])[0].message == wait.message


@pytest.mark.parametrize("one", [
    on_node(), on_node(waits={"reason": "PodInitializing"}), on_node(phase="Running", ready="False"),
    on_node(phase="Running", waits={"reason": "ImagePullBackOff"})])
def test_a_pod_whose_image_is_being_pulled_or_that_runs_waits_for_nothing(one: dict[str, Any]) -> None:
    assert why_waiting(one) is None


def test_an_autoscaler_has_a_minute_before_a_pod_is_shown_as_waiting() -> None:
    wait = why_waiting(pod())
    assert not is_due(wait, SINCE + GRACE - timedelta(seconds=1))
    assert is_due(wait, SINCE + GRACE)
    assert not is_due(None, SINCE + GRACE)


def test_of_the_pods_of_a_stage_the_one_that_waits_longest_is_kept_and_pods_of_others_are_ignored() -> None:
    earlier = SINCE - timedelta(seconds=9)
    found = waiting_pods([
        pod("a"), pod("b", earlier), pod("c", labels={"eyrie.dev/stage": "hardware", "eyrie.dev/profile": "h200"}),
        pod("d", labels={"eyrie.dev/stage": "hardware", "eyrie.dev/profile": "cpu"}),
        pod("e", labels={"pipeline/runid": "run-0"}), pod("f", labels={"eyrie.dev/stage": "unknown"})])
    assert [(one.run_id, one.stage, one.key, one.since) for one in found] == [
        ("run-0", "train", "", SINCE), ("run-1", "hardware", "cpu", SINCE), ("run-1", "hardware", "h200", SINCE),
        ("run-1", "train", "", earlier)]


def waiting(stage: str = "train", key: str = "", since: datetime = SINCE) -> WaitingPod:
    return WaitingPod.model_validate({"run_id": "run-1", "stage": stage, "key": key, "reason": "WaitingForNodes",
                                      "message": "no node fits", "hint": "scale up", "since": since})


def test_a_wait_holds_up_members_that_have_not_started_and_those_whose_pod_was_evicted_after_they_had() -> None:
    now, one = SINCE + GRACE, waiting()
    assert wait_of("train", "base", None, (one,), now) == one
    assert wait_of("train", "base", SINCE + timedelta(seconds=1), (one,), now) is None, "seen before the start"
    assert wait_of("train", "base", SINCE - timedelta(hours=1), (one,), now) == one, "evicted after the start"
    assert wait_of("capture", "", None, (one,), now) is None
    assert wait_of("hardware", "h200", None, (waiting("hardware", "cpu"),), now) is None


def test_a_wait_that_is_not_due_does_not_hide_one_that_is() -> None:
    late = waiting(key="base", since=SINCE + timedelta(seconds=30))
    assert wait_of("train", "base", None, (late, waiting()), SINCE + GRACE) == waiting()
