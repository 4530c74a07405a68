"""What stands for an endpoint: a workload per revision, probes that fit SGLang, files where the line looks for them."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie_api.artifacts import verify
from eyrie_api.contract.cluster import MODEL_CACHE_DIR, ModelCacheSpec
from eyrie_api.contract.engine import EngineSpec
from eyrie_api.contract.placement import HostPath, Placement, S3Work, SecretVariable, Toleration, VolumeWork
from eyrie_api.contract.read_rules import ReadRules
from eyrie_api.contract.targets import JobTarget
from eyrie_api.contract.tuning import DrafterUse
from eyrie_api.errors import InvalidInput
from eyrie_api.planning.sglang_attention import profile
from eyrie_api.planning.sglang_support import Unlaunchable
from eyrie_operator.manifests.deployment import (
    CachedTarget,
    EndpointDeployment,
    StoredDrafter,
    Undeployable,
    object_name,
)
from eyrie_workers.sglang.launch import LaunchPlan
from eyrie_workers.sglang.plugin_files import PACKAGE
from tests.operator.manifests.samples import (
    ADAPTIVE,
    CHAIN,
    EVERYTHING,
    PLACEMENT,
    PLAN,
    S3,
    autoscale,
    deployment,
    embedded,
    endpoint,
    one,
    pods,
    render,
    rich,
)

LABEL_KEY = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
SERVICE_NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
EVERY_WAY = pytest.mark.parametrize("how", [deployment, rich, embedded])


def engine(pod: dict[str, Any]) -> dict[str, Any]:
    return one_container(pod["spec"]["containers"])


def one_container(containers: list[dict[str, Any]]) -> dict[str, Any]:
    [container] = containers
    return container


def first(pod: dict[str, Any], name: str) -> dict[str, Any]:
    return one_container([one for one in pod["spec"].get("initContainers", ()) if one["name"] == name])


def flag(container: dict[str, Any], name: str) -> str | None:
    line = container["command"]
    return str(line[line.index(name) + 1]) if name in line else None


def test_active_and_candidate_stand_side_by_side_and_no_other_revision() -> None:
    rendered = render(endpoint(active=1, candidate=3), deployment())
    assert [each["metadata"]["name"] for each in rendered if each["kind"] == "Deployment"] == [
        "eyrie-chat-r1", "eyrie-chat-r3"]


def test_an_endpoint_switched_off_leaves_nothing() -> None:
    assert render(endpoint(desired="off"), rich()) == ()


@EVERY_WAY
def test_what_selects_pods_finds_those_of_its_revision_and_no_others(how: Any) -> None:
    rendered = render(endpoint(active=2, candidate=3), how())

    def found(selector: dict[str, str]) -> list[str]:
        return sorted({pod["metadata"]["labels"]["eyrie.dev/revision"] for pod in pods(rendered)
                       if selector.items() <= pod["metadata"]["labels"].items()})

    services = [each for each in rendered if each["kind"] == "Service"]
    budgets = [each for each in rendered if each["kind"] == "PodDisruptionBudget"]
    assert [found(each["spec"]["selector"]) for each in services] == [["2"], ["3"], ["2"]]
    assert [found(each["spec"]["selector"]["matchLabels"]) for each in budgets] == [["2"], ["3"]]
    for each in rendered:
        if each["kind"] == "Deployment":
            spec = each["spec"]
            assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()


def test_a_revision_serves_with_its_own_setting_and_drafter() -> None:
    rendered = render(endpoint(active=1, candidate=2), deployment())
    bare, drafted = (engine(pod) for pod in pods(rendered))
    assert flag(bare, "--speculative-algorithm") is None
    assert flag(drafted, "--speculative-algorithm") == "EAGLE3"
    assert flag(drafted, "--speculative-num-steps") == "5"
    assert flag(drafted, "--speculative-draft-model-path") == "/var/lib/eyrie/jobs/j2/c"
    assert {flag(each, "--host") for each in (bare, drafted)} == {"0.0.0.0"}
    assert {flag(each, "--port") for each in (bare, drafted)} == {str(bare["ports"][0]["containerPort"])}


@EVERY_WAY
def test_probes_wait_for_a_slow_start_and_give_up_later_than_sglang_itself(how: Any) -> None:
    result = how(startup_timeout_s=1200.0)
    for pod in pods(render(endpoint(), result)):
        container = engine(pod)
        startup, live, ready = (container[f"{name}Probe"] for name in ("startup", "liveness", "readiness"))
        assert startup["periodSeconds"] * startup["failureThreshold"] == 1200
        assert (live["httpGet"]["path"], live["failureThreshold"]) == ("/health", 3)
        assert 25 <= live["timeoutSeconds"] <= live["periodSeconds"]
        sglang = isinstance(result.engine, LaunchPlan)
        assert ready["httpGet"]["path"] == ("/ready" if sglang else "/health")
        assert {each["httpGet"]["port"] for each in (startup, live, ready)} == {container["ports"][0]["name"]}


@EVERY_WAY
def test_a_leaving_pod_waits_for_the_proxies_and_then_drains_within_its_grace_period(how: Any) -> None:
    for pod in pods(render(endpoint(), how(drain_timeout_s=90.0, leave_delay_s=5.0))):
        assert pod["spec"]["terminationGracePeriodSeconds"] == 90
        assert engine(pod)["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]


@EVERY_WAY
def test_pods_pass_the_restricted_profile(how: Any) -> None:
    for pod in pods(render(endpoint(active=1, candidate=2), how())):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] > 0
        assert not spec["automountServiceAccountToken"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        kinds = {"emptyDir", "persistentVolumeClaim", "secret", "configMap"}
        assert all(volume.keys() - {"name"} <= kinds for volume in spec["volumes"])
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            confined = container["securityContext"]
            assert not confined["allowPrivilegeEscalation"]
            assert confined["capabilities"] == {"drop": ["ALL"]}
            assert confined["seccompProfile"] == {"type": "RuntimeDefault"}


def test_only_an_administrator_who_says_so_has_pods_run_as_root() -> None:
    [pod] = pods(render(endpoint(active=1), deployment(run_as=0)))
    contexts = [pod["spec"]["securityContext"], *(one["securityContext"] for one in pod["spec"]["containers"])]
    assert [one["runAsNonRoot"] for one in contexts] == [False, False]
    assert pod["spec"]["securityContext"]["runAsUser"] == 0
    assert contexts[1]["capabilities"] == {"drop": ["ALL"]}


def test_each_image_starts_its_own_python() -> None:
    how = deployment(placement=PLACEMENT.model_copy(update={"work": S3}), python=("/opt/sglang/python",),
                     fetch_image="eyrie:1", fetch_python=("/opt/eyrie/python", "-s"))
    [pod] = pods(render(endpoint(active=2), how))
    assert engine(pod)["command"][:2] == ["/opt/sglang/python", "-m"]
    assert engine(pod)["image"] == PLACEMENT.image
    for name in ("fetch-drafter", "bring-plugin"):
        assert first(pod, name)["command"][:3] == ["/opt/eyrie/python", "-s", "-m"]
        assert first(pod, name)["image"] == "eyrie:1"


def test_an_adaptive_map_is_mounted_where_the_line_reads_it_and_a_change_rolls_the_pods() -> None:
    use = DrafterUse(drafter_dir="/d", setting=CHAIN, map=ADAPTIVE)
    slots = dict(ADAPTIVE.adaptive or {})
    changed = ADAPTIVE.model_copy(update={"adaptive": {**slots, "16": {"candidate_steps": [0, 1]}}})
    rendered = render(endpoint(active=3, use=use), deployment())
    other = render(endpoint(active=3, use=use.model_copy(update={"map": changed})), deployment())
    [pod], [other_pod] = pods(rendered), pods(other)
    config = one(rendered, "ConfigMap")
    [text] = config["data"].values()
    assert json.loads(text) == ADAPTIVE.adaptive
    [volume] = [each for each in pod["spec"]["volumes"] if "configMap" in each]
    [mount] = [each for each in engine(pod)["volumeMounts"] if each["name"] == volume["name"]]
    assert volume["configMap"]["name"] == config["metadata"]["name"]
    assert flag(engine(pod), "--speculative-adaptive-config") == f"{mount['mountPath']}/{next(iter(config['data']))}"
    assert pod["metadata"]["annotations"] != other_pod["metadata"]["annotations"]


def test_the_api_key_is_a_mounted_file_that_the_line_only_names() -> None:
    [pod] = pods(render(endpoint(), deployment(key_secret="chat-key")))
    [volume] = [each for each in pod["spec"]["volumes"] if "secret" in each]
    [mount] = [each for each in engine(pod)["volumeMounts"] if each["name"] == volume["name"]]
    assert volume["secret"]["secretName"] == "chat-key"
    assert flag(engine(pod), "--config") == f"{mount['mountPath']}/{volume['secret']['items'][0]['path']}"
    assert "--api-key" not in engine(pod)["command"]


@EVERY_WAY
def test_no_secret_is_quoted_only_named(how: Any) -> None:
    placement = how().placement.model_copy(update={
        "secret_variables": (SecretVariable(variable="HF_TOKEN", secret="hub", key="token"),), "work": S3})
    rendered = render(endpoint(active=1, candidate=2), how(placement=placement))
    assert not [each for each in rendered if each["kind"] == "Secret"]
    for pod in pods(rendered):
        [token] = [each for each in engine(pod)["env"] if each["name"] == "HF_TOKEN"]
        assert token == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}



@pytest.mark.parametrize("volume", [ModelCacheSpec(claim="models"), ModelCacheSpec(node_path="/shared/models")])
def test_an_init_container_fills_the_model_cache_and_the_engine_only_reads_it(volume: ModelCacheSpec) -> None:
    cached = CachedTarget(volume, JobTarget(model="org/model", revision="v1"))
    for pod in pods(render(endpoint(active=2), rich(cached_target=cached))):
        spec = pod["spec"]
        prefetcher = spec["initContainers"][0]
        assert prefetcher["command"][-6:] == ["--cache", MODEL_CACHE_DIR, "--model", "org/model", "--revision", "v1"]
        assert {"name": "model-cache", "mountPath": MODEL_CACHE_DIR} in prefetcher["volumeMounts"]
        assert "HF_TOKEN" in [one["name"] for one in prefetcher["env"]]
        assert "HF_HUB_OFFLINE" not in [one["name"] for one in prefetcher["env"]]
        [mount] = [one for one in engine(pod)["volumeMounts"] if one["name"] == "model-cache"]
        assert mount == {"name": "model-cache", "mountPath": MODEL_CACHE_DIR, "readOnly": True}
        assert {"name": "HF_HUB_OFFLINE", "value": "1"} in engine(pod)["env"]
        [found] = [one for one in spec["volumes"] if one["name"] == "model-cache"]
        assert found == {"name": "model-cache", **(
            {"persistentVolumeClaim": {"claimName": "models"}} if volume.claim else
            {"hostPath": {"path": "/shared/models", "type": "Directory"}})}
    for pod in pods(render(endpoint(active=2), rich(cached_target=None))):
        assert "model-cache" not in [one["name"] for one in pod["spec"]["volumes"]]


def test_pods_start_sglang_behind_the_filter_of_paths_which_an_init_container_brings_to_its_own_image() -> None:
    [pod] = pods(render(endpoint(active=1), deployment()))
    bringer = one_container(pod["spec"]["initContainers"])
    directory = flag(bringer, "--directory")
    assert engine(pod)["command"][:3] == ["python3", "-m", f"{PACKAGE}.guarded"]
    assert bringer["image"] == "eyrie:1"
    assert {"name": "PYTHONPATH", "value": directory} in engine(pod)["env"]
    for container in (bringer, engine(pod)):
        assert "plugin" in [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == directory]


def test_an_architecture_that_needs_our_model_classes_is_given_our_package() -> None:
    needing = replace(PLAN, target=replace(PLAN.target, architecture="Olmo3ForCausalLM"))
    named = {"name": "SGLANG_EXTERNAL_MODEL_PACKAGE", "value": PACKAGE}
    [pod] = pods(render(endpoint(active=1), deployment(engine=needing)))
    assert named in engine(pod)["env"]
    [plain] = pods(render(endpoint(active=1), deployment()))
    assert named not in engine(plain)["env"]


def test_a_drafter_in_a_store_is_fetched_to_where_the_line_looks_for_it() -> None:
    result = deployment(placement=PLACEMENT.model_copy(update={"work": S3}))
    bare, drafted = pods(render(endpoint(active=1, candidate=2), result))
    assert [one["name"] for one in bare["spec"]["initContainers"]] == ["bring-plugin"]
    fetcher = first(drafted, "fetch-drafter")
    directory = flag(engine(drafted), "--speculative-draft-model-path")
    assert fetcher["image"] == "eyrie:1"
    assert (flag(fetcher, "--prefix"), flag(fetcher, "--part")) == ("jobs/j2/stages/train/a", "checkpoints/c")
    assert flag(fetcher, "--directory") == directory
    for container in (fetcher, engine(drafted)):
        assert "drafter" in [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == directory]
    variables = {each["name"]: each.get("value") for each in fetcher["env"]}
    assert variables["EYRIE_ARTIFACTS_URL"] == "s3://bucket/eyrie"
    assert variables["EYRIE_ARTIFACTS_CREDENTIALS_DIR"] in [each["mountPath"] for each in fetcher["volumeMounts"]]
    assert drafted["metadata"]["annotations"]["eyrie.dev/drafter-digest"] == "sha256:2"


def test_a_drafter_on_a_volume_is_compared_with_its_manifest_before_the_engine_loads_it() -> None:
    bare, drafted = pods(render(endpoint(active=1, candidate=2), deployment()))
    assert [one["name"] for one in bare["spec"]["initContainers"]] == ["bring-plugin"]
    verifier = first(drafted, "verify-drafter")
    assert verifier["image"] == "eyrie:1"
    assert verifier["command"][-3:] == ["eyrie_api.artifacts.verify", "--path", "/var/lib/eyrie/jobs/j2/c"]
    assert flag(engine(drafted), "--speculative-draft-model-path") == flag(verifier, "--path")
    [mount] = verifier["volumeMounts"]
    assert (mount["name"], mount["readOnly"]) == ("work", True)
    assert flag(verifier, "--path").startswith(mount["mountPath"])  # type: ignore[union-attr]


def test_files_that_an_engine_opens_are_judged_in_its_pod_by_the_rules_of_its_endpoint() -> None:
    rules = ReadRules(home="/var/lib/eyrie", places=("jobs/data",))
    given = deployment(reads=rules, target_path="/models/$(chat)")
    bare, drafted = pods(render(endpoint(active=1, candidate=2), given))
    for pod, job, opened in ((bare, None, []), (drafted, "j2", ["/var/lib/eyrie/jobs/j2/c"])):
        judge = first(pod, "judge-files")
        assert ReadRules.model_validate_json(str(flag(judge, "--rules"))) == rules.with_job(job)
        after = judge["command"].index("--opened") + 1
        assert judge["command"][after:] == ["/models/$$(chat)", *opened]
        assert [mount["mountPath"] for mount in judge["volumeMounts"]] == ["/var/lib/eyrie"]
    for pod in pods(render(endpoint(active=1, candidate=2), deployment(
            reads=None, target_path="/models/chat"))):
        assert "judge-files" not in [one["name"] for one in pod["spec"]["initContainers"]]
    [hub] = pods(render(endpoint(active=1), deployment(reads=rules)))
    assert [one["name"] for one in hub["spec"]["initContainers"]] == ["bring-plugin"]


def test_the_program_that_judges_refuses_what_links_lead_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "home/jobs/theirs").mkdir(parents=True)
    (tmp_path / "home/jobs/theirs/config.json").write_text("{}")
    (tmp_path / "model").mkdir()
    line = ["--rules", ReadRules(home=str(tmp_path / "home")).model_dump_json(), "--opened", str(tmp_path / "model")]
    assert verify.main(line) == 0
    (tmp_path / "model/config.json").symlink_to(tmp_path / "home/jobs/theirs/config.json")
    assert verify.main(line) == InvalidInput.exit_code
    assert "not of your project" in capsys.readouterr().err


def test_the_work_volume_is_mounted_read_only_at_the_path_the_stages_wrote() -> None:
    [pod] = pods(render(endpoint(active=2), deployment()))
    [mount] = [each for each in engine(pod)["volumeMounts"] if each["name"] == "work"]
    assert mount["readOnly"]
    assert str(flag(engine(pod), "--speculative-draft-model-path")).startswith(f"{mount['mountPath']}/")


def test_gpus_shared_memory_and_the_node_are_those_of_the_placement() -> None:
    [pod] = pods(render(endpoint(), deployment()))
    resources = engine(pod)["resources"]
    assert resources == {"requests": {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "1"},
                         "limits": {"nvidia.com/gpu": "1"}}
    assert pod["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    [memory] = [each for each in pod["spec"]["volumes"] if each["name"] == "shm"]
    assert memory["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    assert {"name": "shm", "mountPath": "/dev/shm"} in engine(pod)["volumeMounts"]


def test_every_object_is_owned_by_the_endpoints_resource() -> None:
    for each in render(endpoint(active=1, candidate=3), rich()):
        [owner] = each["metadata"]["ownerReferences"]
        assert owner == {"apiVersion": "eyrie.dev/v1alpha1", "kind": "DraftEndpoint", "name": "chat", "uid": "u-1",
                         "controller": True, "blockOwnerDeletion": True}


def test_an_update_needs_a_spare_gpu_only_when_asked_to() -> None:
    for surge, step in ((True, {"maxSurge": 1, "maxUnavailable": 0}), (False, {"maxSurge": 0, "maxUnavailable": 1})):
        spec = one(render(endpoint(), deployment(surge=surge)), "Deployment")["spec"]
        assert spec["strategy"]["rollingUpdate"] == step


def test_long_endpoint_names_keep_apart() -> None:
    names = {object_name("x" * 60 + tail, 12, "adaptive") for tail in ("a", "b")}
    assert len(names) == 2
    assert all(len(name) <= 52 for name in names)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gpus", {"engine": replace(PLAN, engine=EngineSpec(kind="sglang", tp_size=2))},
     "tp_size 2 .*num_gpus 1"),
    ("cpu with gpus", {"engine": replace(PLAN, machine=profile("cpu"))}, "profile 'cpu'"),
    ("too few replicas", {"autoscale": autoscale(1), "replicas": 2}, "max_replicas 1 is below replicas 2"),
    ("no drain", {"drain_timeout_s": 5.0}, "leaves nothing"),
]


@pytest.mark.parametrize(("changes", "said"), [each[1:] for each in REFUSED], ids=[each[0] for each in REFUSED])
def test_a_deployment_that_cannot_stand_is_refused_with_the_numbers(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(Undeployable, match=said):
        deployment(**changes)


def test_an_embedded_engine_is_not_given_a_key_it_would_ignore() -> None:
    with pytest.raises(Undeployable, match="supports no keys"):
        embedded(key_secret="chat-key")


def test_a_drafter_of_which_nothing_is_known_is_refused_by_its_revision() -> None:
    with pytest.raises(Undeployable, match="revision 2"):
        render(endpoint(active=2), deployment(drafters={}))


def test_what_sglang_would_refuse_is_refused_before_anything_is_applied() -> None:
    short = endpoint(active=3, use=DrafterUse(drafter_dir="/d", setting=CHAIN, context_length=32_768))
    with pytest.raises(Unlaunchable, match="32768"):
        render(short, deployment())


NAMES = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True)
SMALL = st.from_regex(r"[a-z]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True)
QUANTITIES = st.sampled_from(["1", "500m", "64Gi", "1.5"])
PLACEMENTS = st.builds(
    Placement, image=st.just("sglang:v1"), num_gpus=st.just(1), service_account=st.none() | SMALL,
    image_pull_secrets=st.lists(SMALL, max_size=2).map(tuple), gpu_type=st.none() | SMALL,
    requests=st.dictionaries(st.sampled_from(["cpu", "memory"]), QUANTITIES),
    limits=st.dictionaries(st.sampled_from(["cpu", "memory"]), QUANTITIES),
    node_selector=st.dictionaries(SMALL.map(lambda name: f"example.com/{name}"), SMALL, max_size=2),
    tolerations=st.lists(st.builds(Toleration, key=SMALL, effect=st.none() | st.just("NoSchedule")),
                         max_size=2).map(tuple),
    priority_class=st.none() | SMALL, queue=st.none() | NAMES, shared_memory=st.none() | QUANTITIES,
    work=st.none() | st.builds(VolumeWork, claim=SMALL) | st.builds(S3Work, url=st.just("s3://bucket")),
    host_paths=st.lists(st.builds(HostPath, path=st.just("/models"), mount_path=st.just("/models")),
                        max_size=1).map(tuple))


def objects_of(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for each in value.values():
            yield from objects_of(each)
    elif isinstance(value, list):
        for each in value:
            yield from objects_of(each)


@settings(max_examples=40)
@given(name=NAMES, placement=PLACEMENTS, how=st.sampled_from([deployment, rich]), active=st.sampled_from([1, 2, None]))
def test_whatever_the_placement_names_labels_and_volumes_are_valid(name: str, placement: Placement, how: Any,
                                                                   active: int | None) -> None:
    result: EndpointDeployment = how(placement=placement)
    rendered = render(endpoint(active=active, candidate=3, name=name), result)
    assert len({(each["kind"], each["metadata"]["name"]) for each in rendered}) == len(rendered)
    for each in rendered:
        assert each["apiVersion"]
        assert SERVICE_NAME.fullmatch(each["metadata"]["name"])
        assert each["metadata"]["namespace"] == "serving"
        for found in objects_of(each):
            for field in ("labels", "matchLabels", "nodeSelector"):
                for key, value in found.get(field, {}).items() if isinstance(found.get(field), dict) else ():
                    assert LABEL_KEY.fullmatch(key)
                    assert LABEL_VALUE.fullmatch(value)
    for pod in pods(rendered):
        spec = pod["spec"]
        volumes = [volume["name"] for volume in spec["volumes"]]
        assert len(set(volumes)) == len(volumes)
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            mounts = container["volumeMounts"]
            assert {mount["name"] for mount in mounts} <= set(volumes)
            assert len({mount["mountPath"] for mount in mounts}) == len(mounts)
            variables = container.get("env", [])
            assert len({each["name"] for each in variables}) == len(variables)
    assert {each["apiVersion"] for each in rendered} <= EVERYTHING


def test_the_kubelet_expands_nothing_in_a_command_that_a_user_wrote() -> None:
    named, written = "$(SECRET)/$$(SECRET)", "$$(SECRET)/$$$$(SECRET)"
    plan = replace(PLAN, target=replace(PLAN.target, model=named))
    [pod] = pods(render(endpoint(active=1), deployment(engine=plan)))
    assert flag(engine(pod), "--model-path") == written

    def ours(use: DrafterUse, port: int) -> list[str]:
        return ["python3", "--target", named]

    [pod] = pods(render(endpoint(active=1), embedded(engine=ours)))
    assert flag(engine(pod), "--target") == written


def test_the_kubelet_expands_nothing_in_the_arguments_of_init_containers() -> None:
    named, written = "$(SECRET)/$$(SECRET)", "$$(SECRET)/$$$$(SECRET)"
    cached = CachedTarget(ModelCacheSpec(claim="models"), JobTarget.model_construct(model=named, revision=named))
    known = {number: replace(files, facts=replace(files.facts, directory=named), stored=StoredDrafter(named, named))
             for number, files in deployment().drafters.items()}
    for work, name, flags in ((S3, "fetch-drafter", ("--prefix", "--part")),
                              (PLACEMENT.work, "verify-drafter", ("--path",))):
        [pod] = pods(render(endpoint(active=2), deployment(
            placement=PLACEMENT.model_copy(update={"work": work}), drafters=known, cached_target=cached,
            fetch_image="eyrie:1")))
        assert {flag(first(pod, name), one) for one in flags} == {written}
        assert {flag(first(pod, "prefetch-target"), one) for one in ("--model", "--revision")} == {written}
        for container in pod["spec"]["initContainers"]:
            assert not [one for one in container["command"] if "$(" in one.replace("$$", "")]


def test_the_embedded_engine_is_started_by_its_own_line() -> None:
    [pod] = pods(render(endpoint(active=2), embedded()))
    line = engine(pod)["command"]
    assert line[:3] == ["python3", "-m", "eyrie_workers.engines.server"]
    assert flag(engine(pod), "--host") == "0.0.0.0"
    use = DrafterUse.model_validate_json(str(flag(engine(pod), "--use")))
    assert use.setting.tree is not None
    assert use.setting.tree.num_steps == 5
