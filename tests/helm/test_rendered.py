"""What the chart makes of several sets of values, held against the published schemas and our own promises."""

import json
import re
from pathlib import Path

import pytest
import yaml
from kubernetes_validate import SchemaNotFoundError, validate

from eyrie_api.contract.cluster import MODEL_CACHE_DIR, ClusterProfile, ModelCacheSpec
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.placement import S3Work, VolumeWork
from eyrie_api.contract.stages import JOB_STAGES
from eyrie_api.planning.placement import read_profile, resolve_stage_placement
from eyrie_api.settings import Settings
from eyrie_operator.manifests.deployment import SERVER, labels
from tests.helm.rendering import (
    CHART,
    EVERYTHING,
    EXTERNAL,
    SECRET_WORDS,
    SETS,
    Object,
    Rendered,
    Values,
    from_file,
    render,
    sdk,
)
from tests.house.sources import ROOT

OTHERS_KINDS = {"HTTPRoute", "PodMonitor", "PrometheusRule", "ScaledObject", "TriggerAuthentication"}
"""Custom resources of other projects: Kubernetes' schemas do not have them."""


def test_helm_finds_nothing_to_complain_of() -> None:
    report = sdk().lint(str(CHART), strict=True)
    assert [one for one in report["messages"] if one["severity"] >= 2] == []
    assert not report["errors"]


@pytest.mark.parametrize("kube", ["1.27.0", pytest.param("1.32.0", marks=pytest.mark.slow), "1.37.0"])
def test_every_object_passes_the_strict_schema_of_its_kind(kube: str) -> None:
    # The sets have much in common, and holding one object against a schema takes a tenth of a second: each but once.
    objects = {json.dumps({**one, "stringData": None}): one for values, apis in SETS.values()
               for one in render(values, kube=kube, apis=apis)}
    unknown = set()
    for one in objects.values():
        if one["kind"] == "CustomResourceDefinition":
            continue  # their schemas are the contract's: tests of crd.py hold them against Kubernetes'
        try:
            validate(one, kube, strict=True)
        except SchemaNotFoundError:
            unknown.add(one["kind"])
    assert unknown == OTHERS_KINDS
    assert len(objects) > 60


def test_names_and_labels_stay_within_what_kubernetes_allows_for_the_longest_release() -> None:
    for one in render(name="a" * 53, values={"nameOverride": "b" * 40}):
        assert len(one["metadata"]["name"]) <= 63, one["metadata"]["name"]
        for value in one["metadata"].get("labels", {}).values():
            assert len(value) <= 63, value


def test_selectors_find_their_pods_and_only_those(rendered: Rendered) -> None:
    templates = dict(rendered.pods())
    owners = [one for one in rendered if one["kind"] in ("Deployment", "StatefulSet")]
    for owner in owners:
        wanted = owner["spec"]["selector"]["matchLabels"].items()
        found = [name for name, template in templates.items() if wanted <= template["metadata"]["labels"].items()]
        assert found == [f"{owner['kind']}/{owner['metadata']['name']}"]
    ours = [one for one in rendered.of("NetworkPolicy") if not one["metadata"]["name"].endswith("-engines")]
    for one in [*rendered.of("Service"), *ours, *rendered.of("PodDisruptionBudget")]:
        selector = one["spec"].get("selector") or one["spec"]["podSelector"]
        wanted = selector.get("matchLabels", selector).items()
        assert any(wanted <= template["metadata"]["labels"].items() for template in templates.values())


def test_users_of_the_cluster_may_write_our_objects_only_where_an_administrator_says_so() -> None:
    def writers(values: dict[str, object]) -> list[str]:
        return [name for one in render(values).of("ClusterRole") if (name := one["metadata"]["name"])
                and any(label.endswith(("aggregate-to-edit", "aggregate-to-admin"))
                        for label in one["metadata"].get("labels", {}))]

    assert writers({}) == []
    assert len(writers({"rbac": {"editorRole": True}})) == 1


def test_engines_are_reached_at_their_http_port_alone_wherever_the_operator_serves(rendered: Rendered) -> None:
    serves = any("serving:" in str(one.get("data", {})) for one in rendered.of("ConfigMap"))
    found = [one for one in rendered.of("NetworkPolicy") if one["metadata"]["name"].endswith("-engines")]
    assert len(found) == (1 if serves and rendered.of("NetworkPolicy") else 0)
    for one in found:
        selected = one["spec"]["podSelector"]["matchLabels"].items()
        assert selected <= labels("assistant", 3, SERVER).items()
        outside, inside = one["spec"]["ingress"]
        assert outside["ports"] == [{"port": "http", "protocol": "TCP"}]
        assert inside == {"from": [{"podSelector": one["spec"]["podSelector"]}]}, "pods of one server"


def test_every_container_is_restricted(rendered: Rendered) -> None:
    for name, template in rendered.pods():
        spec, pod = template["spec"], template["spec"]["securityContext"]
        assert pod["runAsNonRoot"] is True, name
        assert pod["runAsUser"] > 0, name
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), name
        assert not [volume for volume in spec["volumes"] if "hostPath" in volume], name
    for name, container in rendered.containers():
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False, name
        assert context["readOnlyRootFilesystem"] is True, name
        assert context["capabilities"] == {"drop": ["ALL"]}, name
        assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}, name
        assert container["resources"]["requests"], name
        assert container["resources"]["limits"]["memory"], name


def test_only_the_operator_has_a_token_of_the_kubernetes_api(rendered: Rendered) -> None:
    with_token = [name for name, template in rendered.pods() if template["spec"]["automountServiceAccountToken"]]
    assert with_token == ["Deployment/rel-eyrie-operator"]
    accounts = {template["spec"]["serviceAccountName"] for name, template in rendered.pods() if "bundled" not in name}
    assert {"rel-eyrie-api", "rel-eyrie-worker", "rel-eyrie-operator", "rel-eyrie-migrations"} <= accounts


def test_rights_are_named_one_by_one_and_reach_no_secret(rendered: Rendered) -> None:
    rules = [rule for kind in ("Role", "ClusterRole") for one in rendered.of(kind) for rule in one["rules"]]
    assert rules
    for rule in rules:
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]], rule
        assert not {"secrets", "pods/exec", "roles", "rolebindings", "clusterroles"} & set(rule["resources"]), rule
        assert not {"escalate", "bind", "impersonate", "deletecollection"} & set(rule["verbs"]), rule


def test_namespaced_the_operator_has_roles_where_it_watches_and_nothing_in_the_cluster() -> None:
    values, _ = SETS["namespaced"]
    rendered = render(values)
    assert rendered.of("ClusterRole") == rendered.of("ClusterRoleBinding") == []
    where = {one["metadata"].get("namespace") for one in rendered.of("Role", "rel-eyrie-operator")}
    assert where == {"a", "b"}
    (operator,) = rendered.the("Deployment", "rel-eyrie-operator")["spec"]["template"]["spec"]["containers"]
    variables = {one["name"]: one.get("value") for one in operator["env"]}
    assert variables["EYRIE_OPERATOR_NAMESPACES"] == "a,b"
    assert variables["EYRIE_OPERATOR_LEASE"] == "team/rel-eyrie-operator"


def test_by_default_the_operator_acts_in_its_own_namespace_and_in_those_of_projects() -> None:
    rendered = render({"operator": {"projects": {"chat-team": "chat", "search-team": "search"}}})
    assert rendered.of("ClusterRoleBinding") == []
    (view,) = rendered.of("ClusterRole")
    assert {verb for rule in view["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    where = {one["metadata"].get("namespace") for one in rendered.of("Role", "rel-eyrie-operator")}
    assert where == {"team", "chat-team", "search-team"}
    (operator,) = rendered.the("Deployment", "rel-eyrie-operator")["spec"]["template"]["spec"]["containers"]
    variables = {one["name"]: one.get("value") for one in operator["env"]}
    assert variables["EYRIE_OPERATOR_NAMESPACES"] == "team,chat-team,search-team"


def test_cluster_wide_the_operator_has_one_role_and_watches_all_namespaces() -> None:
    rendered = render(SETS["cluster-wide"][0])
    assert rendered.of("Role", "rel-eyrie-operator") == []
    assert len(rendered.of("ClusterRoleBinding")) == 1
    (operator,) = rendered.the("Deployment", "rel-eyrie-operator")["spec"]["template"]["spec"]["containers"]
    assert "EYRIE_OPERATOR_NAMESPACES" not in {one["name"] for one in operator["env"]}


def test_namespaced_the_operator_has_a_role_where_engines_stand_too() -> None:
    values, _ = SETS["namespaced"]
    cluster = {"kubeflow": {"url": "http://kfp:8888"}, "serving": {"namespace": "serving"}}
    rendered = render({**values, "cluster": cluster})
    assert {one["metadata"]["namespace"] for one in rendered.of("Role", "rel-eyrie-operator")} == {"a", "b", "serving"}


@pytest.mark.parametrize("values", [
    {"cluster": {"kubeflow": {"url": "http://kfp:8888", "namespace": "runs"}}},
    {"cluster": {"kubeflow": {"url": "http://kfp:8888"}}, "operator": {"runsNamespace": "runs"}}])
def test_where_runs_are_the_operator_may_list_pods_and_nothing_else(values: Values) -> None:
    rendered = render(values)
    (role,) = [one for one in rendered.of("Role") if one["metadata"].get("namespace") == "runs"]
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    (binding,) = [one for one in rendered.of("RoleBinding") if one["metadata"].get("namespace") == "runs"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [one["name"] for one in binding["subjects"]] == ["rel-eyrie-operator"]
    (operator,) = rendered.the("Deployment", "rel-eyrie-operator")["spec"]["template"]["spec"]["containers"]
    assert {"name": "EYRIE_OPERATOR_RUNS_NAMESPACE", "value": "runs"} in operator["env"]


@pytest.mark.parametrize("values", [
    {"operator": {"runsNamespace": "runs"}},
    {"cluster": {"kubeflow": {"url": "http://kfp:8888"}}},
    {"cluster": {"kubeflow": {"url": "http://kfp:8888", "namespace": "team"}}},
    {"cluster": {"kubeflow": {"url": "http://kfp:8888", "namespace": "a"}}, "operator": {"watchNamespaces": ["a"]}},
    {"cluster": {"kubeflow": {"url": "http://kfp:8888", "namespace": "runs"}}, "operator": {"namespaced": False}}])
def test_no_role_for_pods_without_runs_in_a_known_namespace_or_where_the_operator_may_list_them_already(
        values: Values) -> None:
    assert [one["metadata"]["name"] for one in render(values).of("Role") if "pods" in one["metadata"]["name"]] == []


def test_secret_values_are_in_secrets_only() -> None:
    seen = set()
    for one in render(EXTERNAL):
        text = json.dumps(one)
        found = {word for word in SECRET_WORDS if word in text}
        if one["kind"] == "Secret":
            seen |= found
        else:
            assert not found, f"{one['kind']}/{one['metadata']['name']}"
    assert seen == set(SECRET_WORDS)


def test_generated_secret_values_are_in_their_secret_alone() -> None:
    rendered = render()
    values = [value for one in rendered.of("Secret") for value in one["stringData"].values()]
    words = [value for value in values if "://" not in value]
    assert len(words) == 6  # token, two passwords, two S3 keys, a Fernet key
    others = json.dumps([one for one in rendered if one["kind"] != "Secret"])
    assert [word for word in words if word in others] == []


def test_existing_secrets_are_used_everywhere_and_none_is_made_next_to_them() -> None:
    values = from_file("values-ha.yaml") | {"api": {"token": {"existingSecret": {"name": "mine", "key": "bearer"}}}}
    rendered = render(values)
    assert rendered.of("Secret") == rendered.of("StatefulSet") == []
    named = {(variable["valueFrom"]["secretKeyRef"]["name"], variable["valueFrom"]["secretKeyRef"]["key"])
             for _, container in rendered.containers() for variable in container["env"] if "valueFrom" in variable}
    assert named == {("eyrie-database", "url"), ("eyrie-broker", "url"), ("mine", "bearer"),
                     ("eyrie-secret-key", "secret-key")}
    mounted = {volume["secret"]["secretName"] for _, template in rendered.pods()
               for volume in template["spec"]["volumes"] if "secret" in volume}
    assert mounted == {"eyrie-artifacts"}


RUNS: Values = {"kubeflow": {"url": "http://kfp:8888", "namespace": "runs"}}
SINGLE_USER: Values = {"kubeflow": {"url": "http://kfp:8888"}}


@pytest.mark.parametrize(("values", "namespaces"), [
    ({}, ["team"]),
    ({"cluster": SINGLE_USER}, ["team"]),
    ({"cluster": RUNS}, ["team", "runs"]),
    ({"cluster": SINGLE_USER, "operator": {"runsNamespace": "runs"}}, ["team", "runs"]),
    ({"cluster": RUNS | {"serving": {"namespace": "served"}}}, ["team", "runs", "served"]),
    ({"cluster": RUNS | {"serving": {"namespace": "runs"}}}, ["team", "runs"]),
    ({"cluster": RUNS | {"serving": {"namespace": "served"}, "serve": False}}, ["team", "runs"]),
    ({"cluster": {"kubeflow": {"url": "http://kfp:8888", "namespace": "team"}, "serving": {"namespace": "team"}}},
     ["team"]),
    ({"cluster": {"kubeflow": {"url": ""}, "serving": {"namespace": "served"}}, "operator": {"runsNamespace": "runs"}},
     ["team"]),
    ({"cluster": RUNS | {"stages": {"work": {"kind": "volume", "claim": "work"}}}}, ["team"])])
@pytest.mark.parametrize("stores", [{}, EXTERNAL], ids=["bundled", "given as values"])
def test_the_secret_of_the_bucket_is_where_its_pods_are_with_the_same_keys_and_once_in_each_namespace(
        values: Values, namespaces: list[str], stores: Values) -> None:
    secrets = render(stores | values).of("Secret", "rel-eyrie-artifacts")
    assert [one["metadata"]["namespace"] for one in secrets] == namespaces
    assert len({json.dumps(one["stringData"], sort_keys=True) for one in secrets}) == 1
    assert {"helm.sh/resource-policy" in one["metadata"].get("annotations", {}) for one in secrets} == {not stores}


def test_no_other_secret_leaves_the_namespace_of_the_release() -> None:
    values = EXTERNAL | {"cluster": RUNS | {"serving": {"namespace": "served"}}}
    assert {one["metadata"]["name"] for one in render(values).of("Secret")
            if one["metadata"].get("namespace", "team") != "team"} == {"rel-eyrie-artifacts"}


def test_an_existing_secret_of_the_bucket_is_created_in_no_namespace() -> None:
    existing = EXTERNAL | {"artifacts": {"url": "s3://b", "credentials": {"existingSecret": "mine"}}}
    assert render(existing | {"cluster": RUNS}).of("Secret", "rel-eyrie-artifacts") == []
    assert render(existing | {"cluster": RUNS}).of("Secret", "mine") == []


def test_api_and_worker_share_the_key_that_encrypts_webhook_secrets_and_others_have_none(rendered: Rendered) -> None:
    named = {name: variable["valueFrom"]["secretKeyRef"] for name, container in rendered.containers()
             for variable in container.get("env", []) if variable["name"] == "EYRIE_SECRET_KEY"}
    assert set(named) == {"Deployment/rel-eyrie-api/api", "Deployment/rel-eyrie-worker/worker"}
    (secret,) = {reference["name"] for reference in named.values()}
    for one in rendered.of("Secret", secret):
        assert Settings(secret_key=one["stringData"]["secret-key"]).required_secret_keys()


def test_no_variable_that_can_hold_a_secret_is_written_out(rendered: Rendered) -> None:
    for name, container in rendered.containers():
        for variable in container.get("env", []):
            if "value" in variable:
                assert not any(word in variable["name"] for word in ("URL", "TOKEN", "PASSWORD", "KEY")), name


def test_every_variable_the_chart_sets_is_one_the_programs_read(rendered: Rendered) -> None:
    from eyrie_api.artifacts.store import StoreOptions

    known = {f"EYRIE_{name.upper()}" for name in Settings.model_fields}
    known |= {f"EYRIE_ARTIFACTS_{name.upper()}" for name in StoreOptions.model_fields}
    assert "EYRIE_CLUSTER_PROFILE" in known
    known |= {"EYRIE_OPERATOR_LEASE", "EYRIE_OPERATOR_NAMESPACES", "EYRIE_OPERATOR_MIRROR_NAMESPACE",
              "EYRIE_OPERATOR_RUNS_NAMESPACE", "EYRIE_OPERATOR_PROJECTS"}
    settings = rendered.the("ConfigMap", "rel-eyrie-settings")["data"]
    named = set(settings) | {variable["name"] for _, container in rendered.containers()
                             for variable in container.get("env", []) if variable["name"].startswith("EYRIE_")}
    assert named <= known
    secrets = {"EYRIE_TOKEN": "a-token-of-a-test-0123", "EYRIE_DATABASE_URL": "postgresql://u@h/d",
               "EYRIE_BROKER_URL": "redis://h:6379/0"}
    assert Settings.from_env(settings | secrets).artifacts.url == settings.get("EYRIE_ARTIFACTS_URL")


def test_what_containers_start_is_a_verb_of_the_command(rendered: Rendered) -> None:
    from typer.main import get_command

    from eyrie_operator.command import app

    command = get_command(app)
    ours = [(name, one["args"]) for name, one in rendered.containers() if one.get("command") == ["eyrie"]]
    assert len(ours) == 7  # three parts, their init containers, the migrations
    for _name, (verb, *arguments) in ours:
        command.commands[verb].make_context(verb, list(arguments), resilient_parsing=False)  # type: ignore[attr-defined]


def test_shard_workers_know_redis_and_bucket_and_no_database() -> None:
    from eyrie_api.chores.broker import SHARD_QUEUE

    values, apis = SETS["everything on"]
    rendered = render(values, apis=apis)
    (shards,) = rendered.the("Deployment", "rel-eyrie-shards")["spec"]["template"]["spec"]["containers"]
    assert {one["name"] for one in shards["env"]} == {"EYRIE_BROKER_URL", "HOME", "USER", "MODEL_KEY"}
    assert [*shards["command"], *shards["args"]] == ["python", "-m", "eyrie_workers.shards", "--concurrency", "4"]
    (trigger,) = rendered.the("ScaledObject", "rel-eyrie-shards")["spec"]["triggers"]
    assert trigger["metadata"]["listName"] == SHARD_QUEUE
    (trigger,) = rendered.the("ScaledObject", "rel-eyrie-worker")["spec"]["triggers"]
    settings = rendered.the("ConfigMap", "rel-eyrie-settings")["data"]
    assert trigger["metadata"]["listName"] == settings["EYRIE_CHORE_QUEUE"]
    assert render().of("Deployment", "rel-eyrie-shards") == []


def profile_of(rendered: Rendered, directory: Path) -> ClusterProfile:
    """The profile as a pod would read it."""
    path = directory / "profile.yaml"
    path.write_text(rendered.the("ConfigMap", "rel-eyrie-cluster")["data"]["profile.yaml"])
    return read_profile(path)


KUBEFLOW = {"url": "http://ml-pipeline.kubeflow:8888"}


def test_the_cluster_profile_is_one_the_programs_read_and_mounted_where_they_read_it(tmp_path: Path) -> None:
    rendered = render({"cluster": {"kubeflow": KUBEFLOW}, "images": {"registry": "r.example/x"}, "shards": {
        "enabled": True}})
    profile = profile_of(rendered, tmp_path)
    assert profile.kubeflow.url == KUBEFLOW["url"]
    assert profile.stages.image.startswith("r.example/x/eyrie/workers:")
    assert profile.python == ("python",)
    assert isinstance(profile.stages.work, S3Work)
    # Stages may run in another namespace than the bundled store.
    assert profile.stages.work.endpoint_url == "http://rel-eyrie-s3.team.svc:9000"
    assert profile.stages.work.credentials_secret == "rel-eyrie-artifacts"
    assert profile.serving is not None
    assert profile.serving.namespace == "team"
    settings = rendered.the("ConfigMap", "rel-eyrie-settings")["data"]
    assert settings["EYRIE_HOME"] == profile.home
    for part, result in (("api", True), ("worker", True), ("operator", True), ("shards", False)):
        pod = rendered.the("Deployment", f"rel-eyrie-{part}")["spec"]["template"]["spec"]
        variables = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
        mounts = {one["mountPath"]: one["name"] for one in pod["containers"][0]["volumeMounts"]}
        assert (variables.get("EYRIE_CLUSTER_PROFILE") == "/etc/eyrie/cluster/profile.yaml") is result, part
        assert ("/etc/eyrie/cluster" in mounts) is result, part
        volumes = {one["name"]: one for one in pod["volumes"]}
        assert not result or volumes[mounts["/etc/eyrie/cluster"]]["configMap"]["name"] == "rel-eyrie-cluster"


def test_without_kubeflow_there_is_no_profile() -> None:
    rendered = render()
    assert rendered.of("ConfigMap", "rel-eyrie-cluster") == []
    assert "EYRIE_CLUSTER_PROFILE" not in json.dumps(rendered)


def test_the_model_cache_is_in_the_profile_and_read_by_the_control_plane_where_endpoints_stand_beside_it(
        tmp_path: Path) -> None:
    cache = {"claim": "models"}
    for serving, beside in (({}, True), ({"namespace": "elsewhere"}, False)):
        rendered = render({"cluster": {"kubeflow": KUBEFLOW, "model_cache": cache, "serving": serving}})
        assert profile_of(rendered, tmp_path).model_cache == ModelCacheSpec(claim="models")
        for part in ("api", "worker", "operator"):
            pod = rendered.the("Deployment", f"rel-eyrie-{part}")["spec"]["template"]["spec"]
            [main] = pod["containers"]
            mounts = {one["mountPath"]: one for one in main["volumeMounts"]}
            assert (MODEL_CACHE_DIR in mounts) is beside, part
            assert ({"name": "HF_HUB_CACHE", "value": MODEL_CACHE_DIR} in main["env"]) is beside, part
            if beside:
                assert mounts[MODEL_CACHE_DIR]["readOnly"] is True
                assert {"name": "model-cache", "persistentVolumeClaim": {"claimName": "models", "readOnly": True},
                        } in pod["volumes"]
    node = render({"cluster": {"kubeflow": KUBEFLOW, "model_cache": {"node_path": "/shared/models"}}})
    assert profile_of(node, tmp_path).model_cache == ModelCacheSpec(node_path="/shared/models")
    assert MODEL_CACHE_DIR not in json.dumps(node.the("Deployment", "rel-eyrie-api"))


def test_what_the_values_say_of_the_cluster_lies_over_what_the_chart_knows(tmp_path: Path) -> None:
    cluster = {
        "kubeflow": {**KUBEFLOW, "namespace": "team-a", "service_account": "runner"},
        "stages": {"num_gpus": 1, "requests": {"memory": "64Gi"}, "tolerations": [{"key": "nvidia.com/gpu"}]},
        "per_stage": {"train": {"num_gpus": 8, "shared_memory": "16Gi"}, "regenerate": {"image": "r.example/light:1"}},
        "serving": {"placement": {"image": "r.example/sglang:1", "num_gpus": 2}, "hardware_profile": "h100",
                    "gateway": {"name": "public"}},
        "node_gpus": 16, "max_runs": 3, "sync_s": 60}
    profile = profile_of(render(from_file("values-ha.yaml") | {"cluster": cluster}), tmp_path)
    assert (profile.kubeflow.namespace, profile.kubeflow.service_account) == ("team-a", "runner")
    train = profile.per_stage["train"]
    assert (train.num_gpus, train.shared_memory, train.requests) == (8, "16Gi", {"memory": "64Gi"})
    assert train.image == profile.stages.image
    assert profile.per_stage["regenerate"].image == "r.example/light:1"
    assert isinstance(profile.stages.work, S3Work)
    assert (profile.stages.work.url, profile.stages.work.credentials_secret) == ("s3://eyrie/artifacts",
                                                                                 "eyrie-artifacts")
    assert profile.serving is not None
    assert (profile.serving.placement.image, profile.serving.placement.num_gpus) == ("r.example/sglang:1", 2)
    assert profile.serving.gateway is not None
    assert (profile.node_gpus, profile.max_runs, profile.sync_s) == (16, 3, 60.0)
    unserved = render({"cluster": {"kubeflow": KUBEFLOW, "serve": False}})
    assert profile_of(unserved, tmp_path).serving is None


def test_a_volume_in_place_of_the_store_is_the_home_of_the_control_plane_too(tmp_path: Path) -> None:
    work = {"kind": "volume", "claim": "shared", "sub_path": "eyrie"}
    rendered = render({"cluster": {"kubeflow": KUBEFLOW, "stages": {"work": work}}})
    assert isinstance(profile_of(rendered, tmp_path).stages.work, VolumeWork)
    pod = rendered.the("Deployment", "rel-eyrie-worker")["spec"]["template"]["spec"]
    (volume,) = [one for one in pod["volumes"] if one["name"] == "home"]
    assert volume == {"name": "home", "persistentVolumeClaim": {"claimName": "shared"}}
    (mount,) = [one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "home"]
    assert mount == {"name": "home", "mountPath": "/var/lib/eyrie", "subPath": "eyrie"}


def test_the_values_of_gpus_place_what_computes_on_them_and_nothing_else(tmp_path: Path) -> None:
    profile = profile_of(render(from_file("values-ha.yaml", "values-gpu.yaml")), tmp_path)
    assert {stage: one.num_gpus for stage, one in profile.per_stage.items()} == dict.fromkeys(JOB_STAGES, 1)
    assert (profile.stages.num_gpus, profile.stages.gpu_type) == (0, None)
    engines = {stage for stage, one in profile.per_stage.items() if "sglang" in one.image}
    assert engines == {"regenerate", "capture", "benchmark", "tune", "prove"}
    assert profile.serving is not None
    for placed in (*profile.per_stage.values(), profile.serving.placement):
        assert (placed.num_gpus, placed.gpu_type) == (1, "NVIDIA-H100-80GB-HBM3")
        assert [one.variable for one in placed.secret_variables] == ["HF_TOKEN"]


def test_the_values_of_a_company_queue_its_jobs_leave_a_gpu_to_the_endpoint_and_accept_their_example(
        tmp_path: Path) -> None:
    rendered = render(from_file("values-ha.yaml", "values-gpu.yaml", "values-company.yaml"))
    profile = profile_of(rendered, tmp_path)
    assert (profile.kubeflow.namespace, profile.stages.queue, profile.max_runs) == ("team", "gpus", 4)
    assert {one.queue for one in profile.per_stage.values()} == {"gpus"}
    assert profile.serving is not None
    assert (profile.serving.surge, profile.serving.placement.num_gpus, profile.serving.placement.queue) == (
        False, 1, None)
    assert max(one.num_gpus for one in profile.per_stage.values()) + profile.serving.placement.num_gpus == 8
    settings = rendered.the("ConfigMap", "rel-eyrie-settings")["data"]
    assert settings["EYRIE_OIDC_ISSUER"].startswith("https://")
    api = rendered.the("Deployment", "rel-eyrie-api")["spec"]["template"]["spec"]["containers"][0]
    assert [one["name"] for one in api["env"] if one["name"].startswith("EYRIE_OIDC")] == ["EYRIE_OIDC_CLIENT_SECRET"]
    example = yaml.safe_load((ROOT / "docs/examples/company_job.yaml").read_text())
    assert example["metadata"]["namespace"] == profile.kubeflow.namespace
    job = JobSpec.model_validate(example["spec"]["job"])
    placed = {stage: resolve_stage_placement(profile, job.placement, stage).num_gpus for stage in JOB_STAGES}
    assert placed == {"regenerate": 7, "capture": 7, "train": 4, "benchmark": 7, "tune": 1, "prove": 1}


def test_a_shared_file_system_needs_no_store_and_no_key_of_one(tmp_path: Path) -> None:
    rendered = render(from_file("values-ha.yaml", "values-gpu.yaml", "values-volume.yaml"))
    profile = profile_of(rendered, tmp_path)
    works = [one.work for one in (profile.stages, *profile.per_stage.values())]
    assert works == [VolumeWork(claim="eyrie")] * 7
    assert "s3://" not in json.dumps(rendered.of("ConfigMap"))
    assert "eyrie-artifacts" not in json.dumps(rendered)
    with pytest.raises(Exception, match="no artifact store"):
        render(from_file("values-ha.yaml") | {"artifacts": {"url": ""}})


def test_an_air_gapped_installation_pulls_from_one_registry_and_needs_no_key_of_the_hub(tmp_path: Path) -> None:
    rendered = render(from_file("values-ha.yaml", "values-gpu.yaml", "values-air-gapped.yaml"))
    profile = profile_of(rendered, tmp_path)
    assert profile.serving is not None
    placements = [profile.stages, *profile.per_stage.values(), profile.serving.placement]
    images = [container["image"] for _, container in rendered.containers()] + [one.image for one in placements]
    assert {image.split("/")[0] for image in images} == {"registry.example.com"}
    assert {one.image_pull_secrets for one in placements} == {("pull",)}
    assert {one["name"] for _, pod in rendered.pods() for one in pod["spec"]["imagePullSecrets"]} == {"pull"}
    assert "HF_TOKEN" not in json.dumps(rendered)


def test_a_token_for_kubeflow_is_the_workers_alone_and_no_token_of_the_kubernetes_api(tmp_path: Path) -> None:
    access = {"tokenAudience": "pipelines.kubeflow.org", "caConfigMap": "their-ca"}
    rendered = render({"cluster": {"kubeflow": {"url": "https://kubeflow.example"}, "access": access}})
    kubeflow = profile_of(rendered, tmp_path).kubeflow
    pod = rendered.the("Deployment", "rel-eyrie-worker")["spec"]["template"]["spec"]
    mounts = {one["mountPath"]: one["name"] for one in pod["containers"][0]["volumeMounts"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert kubeflow.token_file is not None
    assert kubeflow.ca_file is not None
    token = volumes[mounts[str(Path(kubeflow.token_file).parent)]]["projected"]["sources"][0]["serviceAccountToken"]
    assert (token["audience"], token["path"]) == ("pipelines.kubeflow.org", Path(kubeflow.token_file).name)
    assert volumes[mounts[str(Path(kubeflow.ca_file).parent)]]["configMap"]["name"] == "their-ca"
    assert pod["automountServiceAccountToken"] is False
    others = [one for one in rendered.of("Deployment") if not one["metadata"]["name"].endswith("worker")]
    assert "serviceAccountToken" not in json.dumps(others)


def test_no_image_floats(rendered: Rendered) -> None:
    for name, container in rendered.containers():
        _, _, last = container["image"].rpartition("/")
        assert "@sha256:" in last or (":" in last and not last.endswith(":latest")), name


def test_every_image_ours_and_the_bundled_stores_can_be_named_by_digest() -> None:
    digest = "sha256:" + "0" * 64
    pinned = render({"images": {"registry": "r.example/x"} | {part: {"digest": digest} for part in (
                         "api", "operator", "workers")},
                     "bundled": {store: {"image": {"digest": digest}} for store in ("postgresql", "redis", "s3")},
                     "shards": {"enabled": True}})
    images = {container["image"] for _, container in pinned.containers()}
    assert images == {f"{name}@{digest}" for name in (
        "r.example/x/eyrie/api", "r.example/x/eyrie/operator", "r.example/x/eyrie/workers",
        "docker.io/library/postgres", "docker.io/library/redis", "docker.io/rclone/rclone")}


def test_tables_are_made_by_a_hook_that_needs_nothing_of_the_release() -> None:
    rendered = render(EXTERNAL)
    hooks = [one for one in rendered if "helm.sh/hook" in one["metadata"].get("annotations", {})]
    assert {one["kind"] for one in hooks} == {"Secret", "ServiceAccount", "Job"}
    weights = {one["kind"]: int(one["metadata"]["annotations"]["helm.sh/hook-weight"]) for one in hooks}
    assert weights["Job"] > max(weights["Secret"], weights["ServiceAccount"])
    (job,) = [one for one in hooks if one["kind"] == "Job"]
    pod = job["spec"]["template"]["spec"]
    names = {one["metadata"]["name"] for one in hooks if one["kind"] != "Job"}
    assert names == {pod["serviceAccountName"]} == {
        variable["valueFrom"]["secretKeyRef"]["name"] for variable in pod["containers"][0]["env"]
        if "valueFrom" in variable}


def test_with_the_bundled_database_tables_are_made_next_to_the_release() -> None:
    (job,) = render().of("Job")
    assert "annotations" not in job["metadata"]
    assert job["metadata"]["name"] == "rel-eyrie-migrations-1"  # a Job cannot be changed: one for each revision


def test_an_external_store_takes_the_bundled_ones_place() -> None:
    assert {one["metadata"]["name"] for one in render().of("StatefulSet")} == {
        "rel-eyrie-postgresql", "rel-eyrie-redis", "rel-eyrie-s3"}
    assert render(EXTERNAL).of("StatefulSet") == []
    values = {"database": EXTERNAL["database"]}
    assert len(render(values).of("StatefulSet")) == 2


def test_an_ingress_sends_its_host_with_tls_to_the_http_port_of_the_api() -> None:
    assert render().of("Ingress") == []
    rendered = render(SETS["everything on"][0])
    (ingress,) = rendered.of("Ingress")
    spec = ingress["spec"]
    assert ingress["metadata"]["annotations"] == {"a": "b"}
    assert spec["ingressClassName"] == "nginx"
    assert spec["tls"] == [{"hosts": ["eyrie.example"], "secretName": "tls"}]
    (rule,) = spec["rules"]
    assert rule["host"] == "eyrie.example"
    (path,) = rule["http"]["paths"]
    assert (path["path"], path["pathType"]) == ("/", "Prefix")
    backend = path["backend"]["service"]
    (port,) = rendered.the("Service", backend["name"])["spec"]["ports"]
    assert backend["port"] == {"name": port["name"]}
    (container,) = rendered.the("Deployment", backend["name"])["spec"]["template"]["spec"]["containers"]
    assert port["targetPort"] in {one["name"] for one in container["ports"]}


def test_an_ingress_without_a_secret_of_tls_serves_plain_http() -> None:
    (ingress,) = render({"api": {"ingress": {"enabled": True, "host": "eyrie.example"}}}).of("Ingress")
    assert "tls" not in ingress["spec"]
    assert "ingressClassName" not in ingress["spec"]
    assert [rule["host"] for rule in ingress["spec"]["rules"]] == ["eyrie.example"]


def test_a_part_with_several_replicas_has_a_budget_in_the_servers_own_version() -> None:
    assert render().of("PodDisruptionBudget") == []
    budgets = render(from_file("values-ha.yaml")).of("PodDisruptionBudget")
    assert len(budgets) == 3
    assert {one["apiVersion"] for one in budgets} == {"policy/v1"}


def test_what_the_server_lacks_is_left_out() -> None:
    values, _ = SETS["everything on"]
    assert {one["kind"] for one in render(values)} & OTHERS_KINDS == set()
    assert {one["kind"] for one in render(values, apis=EVERYTHING)} >= OTHERS_KINDS
    assumed = values | {"capabilities": {"apiVersions": list(EVERYTHING)}}  # for renderers that ask no server
    assert {one["kind"] for one in render(assumed)} >= OTHERS_KINDS
    assert "replicas" in render(values).the("Deployment", "rel-eyrie-worker")["spec"]
    assert "replicas" not in render(values, apis=EVERYTHING).the("Deployment", "rel-eyrie-worker")["spec"]


def test_the_custom_resources_are_those_of_the_contract_and_kept_when_asked() -> None:
    from eyrie_operator.manifests.crd import custom_resource_definitions

    wanted = {one["metadata"]["name"]: one["spec"] for one in custom_resource_definitions().values()}
    kept = render().of("CustomResourceDefinition")
    assert {one["metadata"]["name"]: one["spec"] for one in kept} == wanted
    assert {one["metadata"]["annotations"]["helm.sh/resource-policy"] for one in kept} == {"keep"}
    loose = render({"crds": {"keep": False}}).of("CustomResourceDefinition")
    assert [one for one in loose if "helm.sh/resource-policy" in one["metadata"].get("annotations", {})] == []
    assert render({"crds": {"install": False}}).of("CustomResourceDefinition") == []


def test_rules_an_old_server_does_not_know_are_taken_out_of_the_definitions() -> None:
    assert "x-kubernetes-validations" in json.dumps(render(kube="1.25.0"))
    old = render(kube="1.20.2").of("CustomResourceDefinition")
    assert "x-kubernetes-validations" not in json.dumps(old)
    assert len(old) == 2


def test_what_is_kept_says_so() -> None:
    def kept(values: dict[str, object]) -> set[str]:
        return {one["metadata"]["name"] for one in render(values).of("Secret")
                if "helm.sh/resource-policy" in one["metadata"].get("annotations", {})}

    # Volumes outlive the release too, and a kept database is worth nothing to webhooks without its key.
    assert kept({}) == {"rel-eyrie-database", "rel-eyrie-artifacts", "rel-eyrie-secret-key"}
    assert kept({"bundled": {"keep": False}}) == set()
    assert kept(EXTERNAL) == {"rel-eyrie-secret-key"}
    policy = "persistentVolumeClaimRetentionPolicy"
    loose = render({"bundled": {"keep": False}}).the("StatefulSet", "rel-eyrie-postgresql")["spec"]
    assert loose[policy]["whenDeleted"] == "Delete"
    old = render({"bundled": {"keep": False}}, kube="1.26.0").the("StatefulSet", "rel-eyrie-postgresql")["spec"]
    assert policy not in old


def test_a_changed_setting_restarts_the_pods_and_nothing_else_does() -> None:
    def checksum(values: dict[str, object]) -> str:
        template = render(values).the("Deployment", "rel-eyrie-api")["spec"]["template"]
        return json.dumps(template["metadata"]["annotations"], sort_keys=True)

    assert checksum({}) == checksum({"worker": {"replicas": 3}})
    assert checksum({}) != checksum({"settings": {"lease_ttl_s": 60}})
    assert checksum({}) != checksum({"broker": EXTERNAL["broker"]})


def test_alerts_and_dashboard_ask_for_metrics_that_the_reference_lists() -> None:
    page = (CHART.parents[1] / "docs/reference/metrics.md").read_text()
    listed = set(re.findall(r"^\| `(eyrie_\w+)` \|", page, re.MULTILINE))
    values, apis = SETS["everything on"]
    rendered = render(values, apis=apis)
    rules = rendered.the("PrometheusRule", "rel-eyrie")["spec"]["groups"][0]["rules"]
    dashboard = rendered.the("ConfigMap", "rel-eyrie-dashboard")
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    panels = json.loads(dashboard["data"]["eyrie.json"])["panels"]
    asked = [one["expr"] for one in rules] + [target["expr"] for panel in panels for target in panel["targets"]]
    names = {name.removesuffix("_bucket") for expression in asked for name in re.findall(r"\beyrie_\w+", expression)}
    assert len(names) >= 12
    assert names <= listed
    assert all("namespace=" in expression for expression in asked)


def test_prometheus_sends_the_administrators_token_unless_a_key_is_named_for_it() -> None:
    def credentials(pod_monitor: Values) -> Object:
        rendered = render({"monitoring": {"podMonitor": {"enabled": True, **pod_monitor}}}, apis=EVERYTHING)
        api, operator = (rendered.the("PodMonitor", f"rel-eyrie-{one}")["spec"]["podMetricsEndpoints"][0]
                         for one in ("api", "operator"))
        assert "authorization" not in operator
        found: Object = api["authorization"]["credentials"]
        return found

    assert credentials({}) == {"name": "rel-eyrie-api-token", "key": "token"}
    own = {"existingSecret": {"name": "eyrie-prometheus", "key": "api-key"}}
    assert credentials(own) == {"name": "eyrie-prometheus", "key": "api-key"}


@pytest.mark.parametrize("file", sorted(path.name for path in CHART.glob("values-*.yaml")))
def test_what_a_values_file_sets_are_values_of_the_chart(file: str) -> None:
    defaults = from_file("values.yaml")

    def check(given: object, known: object, path: str) -> None:
        if path.startswith(".cluster."):  # its fields are the contract's: the schema has them, by which Helm judges
            return
        if isinstance(given, dict) and isinstance(known, dict) and known:
            for name, value in given.items():
                assert name in known, f"{path}.{name}"
                check(value, known[name], f"{path}.{name}")

    check(from_file(file), defaults, "")
    assert yaml.safe_load((CHART / "Chart.yaml").read_text()).get("kubeVersion") is None
