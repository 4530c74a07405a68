"""A task's Job: from the container of the pipeline, what kfp-kubernetes asked for, and the test cluster's patch. Pure.

One Job is one attempt and makes one pod: it never tries again by itself (`backoffLimit: 0`), because how often and how
late to try again is the pipeline's own to say. It is kept until its run is deleted.

The real backend puts a launcher before the component's command; it reads inputs, runs the command, and writes outputs
to a metadata store and an object store. This double's object store is what is mounted where a pod has its artifacts'
files: a directory of the node if the pod patch mounts one there, with files that later pods read; else an emptyDir,
whose files end with the pod, and later pods have metadata and URI alone. Its launcher is the few lines of shell in
`LAUNCHER`: they make the folders of output artifacts, run the command in a process group of its own (a pod's end
reaches the whole group, as with Argo's emissary), and then pack the files in which the component put its output
parameters into the container's termination message, from where `unpacked` takes them. That message holds 4096 bytes;
packed, JSON of usual repetitiveness is some 20 KB. What does not fit fails the task and says so: nothing is cut off.
The image needs sh, setsid, tar, gzip and base64.

The annotation `eyrie.dev/pod` (see eyrie_pipelines.placement) says in JSON what kfp-kubernetes cannot: directories of
the node, a priority class, a task's own service account. Real Kubeflow only passes it on; this double turns it into
the pod's fields, as an admission policy would.

A pod patch is for a test cluster whose image is empty: `{metadata, spec, container}`, laid under every pod. Lists are
put before the task's own, mappings are filled up, and what the task says itself wins.
"""

import base64
import hashlib
import io
import json
import re
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from tests.kubeflow.interpreter import (
    OUTPUT_FILE,
    OUTPUT_PARAMETERS,
    Node,
    Pipeline,
    Refused,
    executor_input,
    filled,
    local_path,
)
from tests.kubeflow.interpreter import look_up as found_in

MESSAGE_BYTES = 4096
"""What a kubelet keeps of a termination message."""

RUN_LABEL = "pipeline/runid"
"""As on the real backend's pods."""
TASK_ANNOTATION = "kubeflow-double/task"
POD_ANNOTATION = "eyrie.dev/pod"
CONTAINER = "main"
"""As Argo calls it."""

_LOST_AFTER = timedelta(seconds=60)
"""A pod that is to be gone and is not for so long is on a node that does not answer: nobody waits for it."""

ARTIFACT_FOLDERS = "KUBEFLOW_DOUBLE_FOLDERS"
"""Variable of a pod: the folders in which its artifacts' files will lie, a line each."""

PIPELINE_ROOT = "minio://mlpipeline/v2/artifacts"
"""Of runs that name none, as in the real backend."""

LAUNCHER = f"""
mkdir -p {OUTPUT_FILE.rpartition("/")[0]} {OUTPUT_PARAMETERS} || exit 70
printf '%s' "${{{ARTIFACT_FOLDERS}:-}}" | while IFS= read -r folder; do mkdir -p "$folder" || exit 70; done || exit 70
setsid "$@" &
child=$!
trap 'kill -s TERM -- "-$child"' TERM
wait "$child"
code=$?
while kill -0 "$child" 2>/dev/null; do
  wait "$child"
  code=$?
done
[ "$code" -eq 0 ] || exit "$code"
packed=$(tar -czf - -C / {OUTPUT_FILE.rpartition("/")[0][1:]} {OUTPUT_PARAMETERS[1:]} | base64 | tr -d '\\n')
if [ "${{#packed}}" -gt {MESSAGE_BYTES} ]; then
  echo "the outputs are ${{#packed}} bytes packed; this double of the backend carries {MESSAGE_BYTES}" \\
    | tee /dev/termination-log >&2
  exit 70
fi
printf %s "$packed" > /dev/termination-log
"""


@dataclass(frozen=True)
class Found:
    """What the cluster has of one Job: itself, if it is still there, and its pods, the oldest first."""

    job: Mapping[str, Any] | None
    pods: tuple[Mapping[str, Any], ...] = ()

    @property
    def condition(self) -> Mapping[str, Any]:
        """`Complete` or `Failed`, when it has ended; else empty."""
        conditions = (self.job or {}).get("status", {}).get("conditions") or ()
        return next((one for one in conditions if one["type"] in ("Complete", "Failed") and one["status"] == "True"),
                    {})

    @property
    def deleted(self) -> bool:
        """Whether it is gone, or will be when its pods are."""
        return self.job is None or "deletionTimestamp" in self.job["metadata"]

    def alive(self, now: datetime) -> bool:
        """Whether a pod of it may still do something."""
        return any(phase_of(pod) not in ("Succeeded", "Failed") and not _is_lost(pod, now) for pod in self.pods)


def phase_of(pod: Mapping[str, Any]) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))


def _is_lost(pod: Mapping[str, Any], now: datetime) -> bool:
    """Its deletion's time is the one at which its grace is over."""
    due = pod["metadata"].get("deletionTimestamp")
    return due is not None and now > datetime.fromisoformat(due) + _LOST_AFTER


def unpacked(message: str) -> dict[str, bytes]:
    """The files of a termination message, by their absolute paths."""
    packed = io.BytesIO(base64.b64decode(message, validate=True))
    try:
        with tarfile.open(fileobj=packed, mode="r:gz") as archive:
            files = {}
            for member in archive.getmembers():
                content = archive.extractfile(member)
                if content is not None:
                    files["/" + member.name.lstrip("/")] = content.read()
            return files
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise ValueError(f"the pod's termination message is no archive: {error}") from error


def job_name(run_id: str, path: str, attempt: int) -> str:
    """The same for the same attempt, however often it is asked; at most 63 letters."""
    digest = hashlib.sha256(f"{run_id}/{path}".encode()).hexdigest()[:8]
    words = re.sub(r"[^a-z0-9]+", "-", path.lower()).strip("-")[-34:].strip("-")
    return f"kfp-{run_id[:8]}-{words}-{digest}-{attempt}"


def artifacts_root(pipeline: Pipeline, run_id: str, pipeline_root: str) -> str:
    """Below which a run's artifacts lie."""
    return f"{(pipeline_root or PIPELINE_ROOT).rstrip('/')}/{pipeline.name}/{run_id}"


def job_of(pipeline: Pipeline, node: Node, *, run_id: str, attempt: int, namespace: str, service_account: str = "",
           pipeline_root: str = "", within_s: int | None = None, owner: Mapping[str, Any] | None = None,
           patch: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The Job of one attempt at a container. `within_s` goes before a deadline of the task's own, as with Argo."""
    declared = pipeline.container(node.component)
    asked = pipeline.kubernetes(node.component)
    handed = executor_input(pipeline, node, artifacts_root(pipeline, run_id, pipeline_root))
    constants = {"{{$.pipeline_job_name}}": pipeline.name, "{{$.pipeline_job_uuid}}": run_id,
                 "{{$.pipeline_job_resource_name}}": f"{pipeline.name}/{run_id}",
                 "{{$.pipeline_task_name}}": node.name, "{{$.pipeline_task_uuid}}": node.path}

    def text(one: str) -> str:
        return filled(one, handed["inputs"]["parameterValues"], outputs=handed["outputs"], constants=constants,
                      artifacts=handed["inputs"].get("artifacts"))

    command = [text(one) for one in (*declared.get("command", ()), *declared.get("args", ()))]
    if not command:
        raise Refused(f"task {node.path} has no command: the double does not know the image's own")
    container: dict[str, Any] = {
        "name": CONTAINER, "image": text(declared["image"]),
        "command": ["sh", "-c", LAUNCHER, "launcher"], "args": command,
        "env": [*({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in
                  (("KFP_POD_NAME", "metadata.name"), ("KFP_POD_UID", "metadata.uid"))),
                *({"name": one["name"], "value": text(str(one.get("value", "")))} for one in declared.get("env", ()))],
        "volumeMounts": [],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    resources = _resources(declared.get("resources", {}), text)
    if resources:
        container["resources"] = resources
    metadata: dict[str, Any] = {
        "labels": {RUN_LABEL: run_id, "pipelines.kubeflow.org/v2_component": "true"},
        "annotations": {TASK_ANNOTATION: node.path},
    }
    spec: dict[str, Any] = {"restartPolicy": "Never", "volumes": [], "containers": [container]}
    if service_account:
        spec["serviceAccountName"] = service_account
    laid = patch or {}
    _give_room(handed["outputs"], laid, spec, container)
    _place(asked, node, metadata, spec, container)
    _go_beyond(metadata["annotations"], spec, container)
    if within_s is not None:
        spec["activeDeadlineSeconds"] = within_s
    template = {"metadata": _laid_under(laid.get("metadata", {}), metadata),
                "spec": {**_laid_under(laid.get("spec", {}), spec),
                         "containers": [_laid_under(laid.get("container", {}), container)]}}
    of_job: dict[str, Any] = {
        "name": job_name(run_id, node.path, attempt), "namespace": namespace,
        "labels": template["metadata"]["labels"], "annotations": {TASK_ANNOTATION: node.path}}
    if owner is not None:
        of_job["ownerReferences"] = [dict(owner)]
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": of_job,
            "spec": {"parallelism": 1, "completions": 1, "backoffLimit": 0, "template": template}}


def _give_room(outputs: Mapping[str, Any], patch: Mapping[str, Any], spec: dict[str, Any],
               container: dict[str, Any]) -> None:
    """Room for the files of output artifacts. The real backend mounts an emptyDir for each scheme."""
    paths = [local_path(one["uri"]) for listed in outputs.get("artifacts", {}).values() for one in listed["artifacts"]]
    if None in paths:
        raise Refused("the pipeline root is not of gs://, s3:// or minio://")
    folders = sorted({str(path).rpartition("/")[0] for path in paths})
    if not folders:
        return
    container["env"].append({"name": ARTIFACT_FOLDERS, "value": "".join(f"{one}\n" for one in folders)})
    scheme = folders[0].split("/")[1]
    if not any(one["mountPath"] == f"/{scheme}" for one in patch.get("container", {}).get("volumeMounts", ())):
        spec["volumes"].append({"name": f"{scheme}-scratch", "emptyDir": {}})
        container["volumeMounts"].append({"name": f"{scheme}-scratch", "mountPath": f"/{scheme}"})


def _resources(asked: Mapping[str, Any], text: Any) -> dict[str, Any]:
    """Limits and requests. The compiler writes each twice, as a number and as the text the user gave."""
    limits = {"cpu": asked.get("resourceCpuLimit"), "memory": asked.get("resourceMemoryLimit")}
    requests = {"cpu": asked.get("resourceCpuRequest"), "memory": asked.get("resourceMemoryRequest")}
    accelerator = asked.get("accelerator", {})
    if accelerator.get("resourceType"):
        limits[text(accelerator["resourceType"])] = accelerator.get("resourceCount")
    named = {"limits": {name: text(str(one)) for name, one in limits.items() if one},
             "requests": {name: text(str(one)) for name, one in requests.items() if one}}
    return {kind: values for kind, values in named.items() if values}


_READ = {"secretAsVolume", "secretAsEnv", "pvcMount", "nodeSelector", "podMetadata", "imagePullSecret",
         "imagePullPolicy", "configMapAsVolume", "configMapAsEnv", "activeDeadlineSeconds", "fieldPathAsEnv",
         "tolerations", "genericEphemeralVolume", "nodeAffinity", "enabledSharedMemory", "emptyDirMounts",
         "securityContext"}


def refuse_settings_not_read(pipeline: Pipeline) -> None:
    """Raise `Refused` for a setting of kfp-kubernetes that `_place` does not know."""
    kubernetes = pipeline.platform.get("platforms", {}).get("kubernetes", {})
    others = sorted({*pipeline.platform.get("platforms", {})} - {"kubernetes"} | set(kubernetes) - {"deploymentSpec"})
    if others:
        raise Refused(f"platform_spec: {', '.join(others)} is not read by this double of the backend")
    for label, asked in kubernetes.get("deploymentSpec", {}).get("executors", {}).items():
        others = sorted(set(asked) - _READ)
        if others:
            raise Refused(f"platform settings of {label}: {', '.join(others)} is not read by this double")


def _place(asked: Mapping[str, Any], node: Node, metadata: dict[str, Any], spec: dict[str, Any],
           container: dict[str, Any]) -> None:
    """Lay kfp-kubernetes' settings on the pod. Values may be inputs of the DAG around the task."""

    def value(selector: Mapping[str, Any]) -> Any:
        given, found = found_in(selector, node.scope)
        if not given:
            raise Refused(f"task {node.path}: its platform settings name {dict(selector)!r}, which was not given")
        return json.loads(found) if isinstance(found, str) and found[:1] in ("{", "[") else found

    def named(one: Mapping[str, Any], kind: str) -> str:
        return str(value(one[f"{kind}NameParameter"]) if f"{kind}NameParameter" in one else one[f"{kind}Name"])

    def mount(volume: dict[str, Any], path: str, **more: Any) -> None:
        if volume not in spec["volumes"]:
            spec["volumes"].append(volume)
        container["volumeMounts"].append({"name": volume["name"], "mountPath": path, **more})

    for index, one in enumerate(asked.get("secretAsVolume", ())):
        source = {"secretName": named(one, "secret"), "optional": bool(one.get("optional", False))}
        mount({"name": f"secret-{index}", "secret": source}, one["mountPath"], readOnly=True)
    for index, one in enumerate(asked.get("configMapAsVolume", ())):
        source = {"name": named(one, "configMap"), "optional": bool(one.get("optional", False))}
        mount({"name": f"config-{index}", "configMap": source}, one["mountPath"], readOnly=True)
    for index, one in enumerate(asked.get("pvcMount", ())):
        claim = value(one["pvcNameParameter"]) if "pvcNameParameter" in one else (
            one["constant"] if "constant" in one else value(one))
        more = {"subPath": one["subPath"]} if one.get("subPath") else {}
        mount({"name": f"claim-{index}", "persistentVolumeClaim": {"claimName": claim}}, one["mountPath"], **more)
    for one in asked.get("emptyDirMounts", ()):
        source = {key: one[key] for key in ("medium", "sizeLimit") if one.get(key)}
        mount({"name": one["volumeName"], "emptyDir": source}, one["mountPath"])
    if (shared := asked.get("enabledSharedMemory")) is not None:
        source = {"medium": "Memory", **({"sizeLimit": shared["size"]} if shared.get("size") else {})}
        mount({"name": shared.get("volumeName") or "shm", "emptyDir": source}, "/dev/shm")
    for one in asked.get("genericEphemeralVolume", ()):
        claim_spec = {"accessModes": one["accessModes"], "resources": {"requests": {"storage": one["size"]}}}
        if one.get("storageClassName"):
            claim_spec["storageClassName"] = one["storageClassName"]
        template = {"metadata": one.get("metadata", {}), "spec": claim_spec}
        mount({"name": one["volumeName"], "ephemeral": {"volumeClaimTemplate": template}}, one["mountPath"])

    for kind, source_kind in (("secret", "secretKeyRef"), ("configMap", "configMapKeyRef")):
        for one in asked.get(f"{kind}AsEnv", ()):
            for pair in one["keyToEnv"]:
                source = {"name": named(one, kind), "key": pair[f"{kind}Key"],
                          "optional": bool(one.get("optional", False))}
                container["env"].append({"name": pair["envVar"], "valueFrom": {source_kind: source}})
    for one in asked.get("fieldPathAsEnv", ()):
        container["env"].append({"name": one["name"], "valueFrom": {"fieldRef": {"fieldPath": one["fieldPath"]}}})

    selector = asked.get("nodeSelector", {})
    labels = value(selector["nodeSelectorJson"]) if "nodeSelectorJson" in selector else selector.get("labels", {})
    if labels:
        spec["nodeSelector"] = dict(labels)
    for one in asked.get("tolerations", ()):
        given = value(one["tolerationJson"]) if "tolerationJson" in one else one
        spec.setdefault("tolerations", []).extend(_whole_numbers(each, "tolerationSeconds") for each in
                                                  (given if isinstance(given, list) else [given]))
    for one in asked.get("nodeAffinity", ()):
        _affine(value(one["nodeAffinityJson"]) if "nodeAffinityJson" in one else one, spec)
    for kind in ("labels", "annotations"):
        metadata[kind] |= asked.get("podMetadata", {}).get(kind, {})
    if secrets := asked.get("imagePullSecret"):
        spec["imagePullSecrets"] = [{"name": named(one, "secret")} for one in secrets]
    if asked.get("imagePullPolicy"):
        container["imagePullPolicy"] = asked["imagePullPolicy"]
    if asked.get("activeDeadlineSeconds"):
        spec["activeDeadlineSeconds"] = int(asked["activeDeadlineSeconds"])
    if asked.get("securityContext"):
        container["securityContext"] = _whole_numbers(asked["securityContext"], "runAsUser", "runAsGroup")


def _go_beyond(annotations: Mapping[str, str], spec: dict[str, Any], container: dict[str, Any]) -> None:
    """What `eyrie.dev/pod` says of the pod."""
    beyond = json.loads(annotations.get(POD_ANNOTATION, "{}"))
    others = sorted(set(beyond) - {"host_paths", "priority_class", "read_only", "service_account"})
    if others:
        raise Refused(f"annotation {POD_ANNOTATION}: {', '.join(others)} is not read by this double")
    for index, one in enumerate(beyond.get("host_paths", ())):
        spec["volumes"].append({"name": f"node-{index}", "hostPath": {"path": one["path"]}})
        container["volumeMounts"].append({"name": f"node-{index}", "mountPath": one["mount_path"],
                                          "readOnly": bool(one.get("read_only", False))})
    for mount in container["volumeMounts"]:
        if mount["mountPath"] in beyond.get("read_only", ()):
            mount["readOnly"] = True
    for key, field in (("priority_class", "priorityClassName"), ("service_account", "serviceAccountName")):
        if beyond.get(key):
            spec[field] = beyond[key]


def _affine(given: Mapping[str, Any], spec: dict[str, Any]) -> None:
    """A whole node affinity, or one term: preferred where it has a weight, else required."""
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    if any(key.endswith("DuringExecution") for key in given):
        affinity |= given
        return
    term = {key: given[key] for key in ("matchExpressions", "matchFields") if given.get(key)}
    if given.get("weight"):
        preferred = {"weight": int(given["weight"]), "preference": term}
        affinity.setdefault("preferredDuringSchedulingIgnoredDuringExecution", []).append(preferred)
    else:
        required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {"nodeSelectorTerms": []})
        required["nodeSelectorTerms"].append(term)


def _whole_numbers(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Protobuf's JSON writes 64-bit numbers as text."""
    return {key: int(one) if key in names else one for key, one in given.items()}


def _laid_under(patch: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(patch)
    for key, one in given.items():
        under = patch.get(key)
        if isinstance(one, Mapping) and isinstance(under, Mapping):
            merged[key] = _laid_under(under, one)
        elif isinstance(one, list) and isinstance(under, list):
            merged[key] = [*under, *one]
        else:
            merged[key] = one
    return merged
