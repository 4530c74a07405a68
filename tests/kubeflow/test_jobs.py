"""A task's Job says what kfp and kfp-kubernetes asked for, hands over the launcher's part, and carries outputs back."""

# mypy: disable-error-code="untyped-decorator"

import base64
import io
import tarfile
from typing import Any

import pytest
from kfp import dsl, kubernetes

from tests.kubeflow import samples
from tests.kubeflow.interpreter import Pipeline, Refused, arguments_of, startable, walk
from tests.kubeflow.jobs import job_name, job_of, refuse_settings_not_read, unpacked


def first_job(pipeline: Pipeline, patch: dict[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
    """Of the first container that may start."""
    refuse_settings_not_read(pipeline)
    node = next(startable(walk(pipeline, arguments_of(pipeline, arguments), {})))
    return job_of(pipeline, node, run_id="0123456789", attempt=1, namespace="ns", patch=patch,
                  owner={"kind": "ConfigMap", "name": "kfp-run-0123456789"})


def first_pod(pipeline: Pipeline, patch: dict[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
    """Of that Job."""
    pod: dict[str, Any] = first_job(pipeline, patch, **arguments)["spec"]["template"]
    return pod


def test_a_job_makes_one_pod_and_belongs_to_its_run() -> None:
    job = first_job(samples.read(samples.greeted()), who="you", secret="hub")
    assert job["kind"] == "Job"
    assert {key: job["spec"][key] for key in ("parallelism", "completions", "backoffLimit")} == {
        "parallelism": 1, "completions": 1, "backoffLimit": 0}
    assert [one["name"] for one in job["metadata"]["ownerReferences"]] == ["kfp-run-0123456789"]
    pod = job["spec"]["template"]
    assert pod["metadata"]["labels"]["pipeline/runid"] == job["metadata"]["labels"]["pipeline/runid"] == "0123456789"
    assert "ttlSecondsAfterFinished" not in job["spec"]


def test_everything_asked_of_a_container_is_in_its_pod() -> None:
    pod = first_pod(samples.read(samples.greeted()), who="you", secret="hub")
    spec, container = pod["spec"], pod["spec"]["containers"][0]
    assert container["args"] == ["sh", "-c", 'printf %s "$0" > "$1"', "hello dear you", "/tmp/kfp/outputs/greeting"]
    assert container["resources"] == {"limits": {"memory": "1Gi", "nvidia.com/gpu": "2"}, "requests": {"cpu": "500m"}}
    assert container["imagePullPolicy"] == "Never"
    assert container["securityContext"] == {"runAsUser": 7}
    env = {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}
    assert env["MOOD"] == "good"
    assert env["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "token", "optional": False}}
    assert env["LEVEL"] == {"configMapKeyRef": {"name": "settings", "key": "level", "optional": False}}
    assert env["NODE"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    mounted = {one["mountPath"]: (one["name"], one.get("subPath")) for one in container["volumeMounts"]}
    volumes = {one["name"]: one for one in spec["volumes"]}
    assert volumes[mounted["/keys"][0]]["secret"] == {"secretName": "keys", "optional": True}
    assert volumes[mounted["/var/lib/eyrie"][0]]["persistentVolumeClaim"] == {"claimName": "work"}
    assert mounted["/var/lib/eyrie"][1] == "a"
    assert volumes["scratch"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
    assert spec["nodeSelector"] == {"pool": "gpu"}
    assert spec["tolerations"] == [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule",
                                    "tolerationSeconds": 5}]
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert (spec["activeDeadlineSeconds"], spec["restartPolicy"]) == (30, "Never")
    assert pod["metadata"]["labels"]["queue"] == "q"
    assert pod["metadata"]["annotations"]["note"] == "n"


def test_the_pod_annotation_becomes_the_pods_fields() -> None:
    @dsl.pipeline(name="beyond")
    def beyond() -> None:
        kubernetes.add_pod_annotation(samples.step(), "eyrie.dev/pod", (
            '{"host_paths": [{"path": "/usr", "mount_path": "/host/usr", "read_only": true}],'
            ' "priority_class": "batch", "service_account": "train"}'))

    spec = first_pod(samples.read(beyond))["spec"]
    assert spec["volumes"] == [{"name": "node-0", "hostPath": {"path": "/usr"}}]
    assert spec["containers"][0]["volumeMounts"] == [{"name": "node-0", "mountPath": "/host/usr", "readOnly": True}]
    assert (spec["priorityClassName"], spec["serviceAccountName"]) == ("batch", "train")


def test_a_patch_lies_under_what_the_task_says() -> None:
    patch = {"metadata": {"labels": {"queue": "other", "of": "patch"}},
             "spec": {"volumes": [{"name": "usr", "hostPath": {"path": "/usr"}}], "hostNetwork": True},
             "container": {"env": [{"name": "MOOD", "value": "bad"}], "imagePullPolicy": "Always"}}
    pod = first_pod(samples.read(samples.greeted()), patch, who="you", secret="hub")
    assert pod["metadata"]["labels"]["queue"] == "q"
    assert pod["metadata"]["labels"]["of"] == "patch"
    assert pod["spec"]["hostNetwork"] is True
    assert pod["spec"]["volumes"][0]["name"] == "usr"
    container = pod["spec"]["containers"][0]
    assert container["imagePullPolicy"] == "Never"
    # Kubernetes takes the last of several.
    assert [one["value"] for one in container["env"] if one["name"] == "MOOD"] == ["bad", "good"]


def test_a_platform_setting_that_is_not_read_is_refused() -> None:
    given = samples.compiled(samples.greeted())
    given["platform_spec"]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]["exec-greet"]["newIdea"] = {}
    with pytest.raises(Refused, match="newIdea"):
        refuse_settings_not_read(Pipeline.of(given))


def test_a_jobs_name_follows_from_run_task_and_attempt_and_fits() -> None:
    path = "for-loop-1/0/" + "a-very-long-name-of-a-task/" * 8 + "end"
    names = {job_name("0123456789", one, attempt) for one in (path, path + "x", "short") for attempt in (0, 1)}
    assert len(names) == 6
    assert all(len(name) <= 63 and "--" not in name for name in names)
    assert job_name("0123456789", path, 0) in names


def test_files_come_out_of_a_termination_message_as_they_went_in() -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in (("tmp/kfp/outputs/a", b"[1]"), ("tmp/kfp_outputs/b", b"")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    message = base64.b64encode(packed.getvalue()).decode()
    assert unpacked(message) == {"/tmp/kfp/outputs/a": b"[1]", "/tmp/kfp_outputs/b": b""}
    for other in ("Traceback: no archive", "", base64.b64encode(packed.getvalue()[:40]).decode()):
        with pytest.raises(ValueError, match=r"base64|padding|no archive"):
            unpacked(other)


def test_files_of_artifacts_have_room_in_the_pod_unless_the_patch_has_a_place_for_them() -> None:
    pipeline = samples.read(samples.fitted)
    container = (pod := first_pod(pipeline))["spec"]["containers"][0]
    env = {one["name"]: one.get("value") for one in container["env"]}
    assert env["KUBEFLOW_DOUBLE_FOLDERS"] == "/minio/mlpipeline/v2/artifacts/fitted/0123456789/gather\n"
    assert {"name": "minio-scratch", "mountPath": "/minio"} in container["volumeMounts"]
    assert {"name": "minio-scratch", "emptyDir": {}} in pod["spec"]["volumes"]
    place = {"name": "objects", "mountPath": "/minio"}
    patch = {"spec": {"volumes": [{"name": "objects", "hostPath": {"path": "/objects"}}]},
             "container": {"volumeMounts": [place]}}
    patched = first_pod(pipeline, patch)["spec"]
    assert [one["name"] for one in patched["volumes"]] == ["objects"]
    assert patched["containers"][0]["volumeMounts"] == [place]
    assert not first_pod(samples.read(samples.doubled))["spec"]["volumes"], "no artifacts, no room"
