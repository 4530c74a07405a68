"""How an endpoint stands on a cluster: the profile, what the endpoint asks for, what is read of its drafter."""

import json
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from eyrie_api.artifacts.directories import upload_dir
from eyrie_api.artifacts.store import StoreOptions
from eyrie_api.contract.cluster import ClusterProfile, ModelCacheSpec
from eyrie_api.contract.engine import EngineSpec
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.placement import S3Work, VolumeWork
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.status import Endpoint
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.tuning import DrafterUse
from eyrie_api.database.endpoints import Serving
from eyrie_api.errors import ArtifactMissing
from eyrie_api.settings import Settings
from eyrie_operator.cluster.deployments import Deployments, Drafters, stored_at
from eyrie_operator.manifests.deployment import (
    CachedTarget,
    EndpointDeployment,
    StoredDrafter,
    Undeployable,
)
from eyrie_workers.sglang.launch import LaunchPlan, launch_arguments
from tests.api.artifacts.conftest import make_bucket
from tests.api.samples import benchmark_report, finish_stage, job_body
from tests.operator.manifests.samples import CHAIN, CORE, endpoint, revision
from tests.servers.s3 import S3Server

HOME = PurePosixPath("/var/lib/eyrie")
PLACEMENT: dict[str, Any] = {"image": "sglang:test", "num_gpus": 1, "requests": {"cpu": "8"}}


def profile(**serving: Any) -> ClusterProfile:
    work = {"kind": "volume", "claim": "work"}
    return ClusterProfile.model_validate({
        "kubeflow": {"url": "http://kfp"}, "stages": {"image": "eyrie:test", "work": work},
        "serving": {"namespace": "serving", "placement": PLACEMENT, "hardware_profile": "h100", **serving}})


def deployed(home: Path, serve: EndpointServeSpec, row: Endpoint | None = None, target: str = "quickstart",
             cache: ModelCacheSpec | None = None, revision: str | None = None, **serving: Any) -> EndpointDeployment:
    result = profile(**serving).model_copy(update={"model_cache": cache})
    assert result.serving is not None
    row = row or endpoint(active=1, num=1)
    return Deployments(Settings(home=home), result, result.serving).of(
        row, Serving(TargetSpec(model=target, revision=revision), serve), served=CORE, owner=None)


def drafter_at(directory: Path, architecture: str = "LlamaForCausalLM") -> Path:
    """What the operator reads of a drafter."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": 2048, "sliding_window": 64}))
    (directory / "eyrie-card.json").write_text(json.dumps({
        "target": {"architecture": architecture, "num_layers": 32}}))
    return directory


def test_what_the_endpoint_asks_for_is_laid_over_what_the_administrator_gives(tmp_path: Path) -> None:
    serve = EndpointServeSpec.model_validate({
        "engine": "sglang", "replicas": 3, "hardware_profile": "a100-80gb",
        "placement": {"num_gpus": 2, "requests": {"memory": "64Gi"}, "queue": "team"}})
    made = deployed(tmp_path, serve, run_as=0, gateway={"name": "front", "hostnames": ["{endpoint}.example.org"]})
    assert made.replicas == 3
    assert made.placement.requests == {"cpu": "8", "memory": "64Gi"}
    assert (made.placement.image, made.placement.queue) == ("sglang:test", "team")
    assert made.placement.work == VolumeWork(claim="work")
    assert isinstance(made.engine, LaunchPlan)
    assert (made.engine.engine.tp_size, made.engine.machine.name) == (2, "a100-80gb")
    assert made.cluster.gateway is not None
    assert made.cluster.gateway.hostnames == ("chat.example.org",)
    assert made.cluster.run_as == 0
    assert (made.fetch_image, made.fetch_python) == ("eyrie:test", ("python3",))  # SGLang's image has no Eyrie in it


def test_the_jobs_arguments_are_in_the_command_of_sglangs_pods(tmp_path: Path) -> None:
    serve = EndpointServeSpec.model_validate({"engine": {"kind": "sglang", "attention_backend": "triton",
        "sglang_arguments": {"disable_decode_cuda_graph": True, "mem_fraction_static": 0.5}}})
    made = deployed(tmp_path, serve)
    assert isinstance(made.engine, LaunchPlan)
    line = launch_arguments(made.engine)
    assert line[line.index("--attention-backend") + 1] == "triton"
    assert line[line.index("--mem-fraction-static") + 1] == "0.5"
    assert "--disable-decode-cuda-graph" in line


def test_our_engine_is_started_by_the_image_s_python_and_listens_to_the_cluster(tmp_path: Path) -> None:
    made = deployed(tmp_path, EndpointServeSpec(max_concurrency=5), python=["/opt/python", "-X", "dev"])
    assert not isinstance(made.engine, LaunchPlan)
    use = DrafterUse(drafter_dir="/d", setting=CHAIN)
    line = list(made.engine(use, 30000))
    assert DrafterUse.model_validate_json(line[line.index("--use") + 1]) == use
    assert line[:5] == ["/opt/python", "-X", "dev", "-m", "eyrie_workers.engines.server"]
    for pair in (["--host", "0.0.0.0"], ["--port", "30000"], ["--max-concurrency", "5"],
                 ["--target", "quickstart"], ["--model", "model"]):
        at = line.index(pair[0])
        assert line[at:at + 2] == pair


def test_our_engine_ends_its_answers_before_its_pod_is_killed(tmp_path: Path) -> None:
    for timeout_s, leave_s, drain in ((600.0, 10.0, "580"), (20.0, 2.0, "9")):
        made = deployed(tmp_path, EndpointServeSpec(drain_s=1.0), drain_timeout_s=timeout_s, leave_delay_s=leave_s)
        assert not isinstance(made.engine, LaunchPlan)
        line = list(made.engine(DrafterUse(), 30000))
        assert line[line.index("--drain-s") + 1] == drain


def test_a_target_out_of_reach_is_known_by_its_drafter_s_card_where_its_attention_is_plain(tmp_path: Path) -> None:
    drafter = drafter_at(tmp_path / "plain")
    row = endpoint(active=1, num=2, use=DrafterUse(drafter_dir=str(drafter), setting=CHAIN))
    made = deployed(tmp_path, EndpointServeSpec(engine=EngineSpec(kind="sglang")), row, target="org/big")
    assert isinstance(made.engine, LaunchPlan)
    target = made.engine.target
    assert (target.architecture, target.num_layers, target.context_length) == ("LlamaForCausalLM", 32, 2048)
    windowed = drafter_at(tmp_path / "windowed", "GptOssForCausalLM")
    row = endpoint(active=1, num=2, use=DrafterUse(drafter_dir=str(windowed), setting=CHAIN))
    with pytest.raises(Undeployable, match="HF_HOME"):
        deployed(tmp_path, EndpointServeSpec(engine=EngineSpec(kind="sglang")), row, target="org/big")


def test_engines_read_a_target_of_the_hub_in_the_model_cache_and_others_where_they_are(tmp_path: Path) -> None:
    cache = ModelCacheSpec(claim="models")
    drafter = drafter_at(tmp_path / "plain")
    row = endpoint(active=1, num=2, use=DrafterUse(drafter_dir=str(drafter), setting=CHAIN))
    made = deployed(tmp_path, EndpointServeSpec(engine=EngineSpec(kind="sglang")), row, "org/big", cache, "refs/pr/1")
    assert isinstance(made.engine, LaunchPlan)
    target = made.engine.target
    assert target.model == "/var/cache/eyrie/models/models--org--big/eyrie/@refs%2Fpr%2F1"
    assert target.revision is None
    assert made.cached_target == CachedTarget(cache, TargetSpec(model="org/big", revision="refs/pr/1"))
    made = deployed(tmp_path, EndpointServeSpec(), target="org/big", cache=cache)
    assert not isinstance(made.engine, LaunchPlan)
    line = list(made.engine(DrafterUse(), 30000))
    assert line[line.index("--target") + 1] == "/var/cache/eyrie/models/models--org--big/eyrie/@main"
    for name in ("quickstart", "/models/big"):
        made = deployed(tmp_path, EndpointServeSpec(), target=name, cache=cache)
        assert made.cached_target is None
        assert not isinstance(made.engine, LaunchPlan)
        assert name in made.engine(DrafterUse(), 30000)


def test_a_drafter_s_facts_come_from_its_own_config_else_from_what_its_job_asked_for(tmp_path: Path) -> None:
    drafters = Drafters(HOME, VolumeWork(claim="work"), StoreOptions())
    read = drafters.files(str(drafter_at(tmp_path / "d")), None, facts_needed=True)
    assert (read.facts.context_length, read.facts.sliding_window) == (2048, 64)
    job = JobSpec.model_validate(job_body(drafter={"max_position_embeddings": 1024}))
    result = drafters.files("/not/here", job, facts_needed=True)
    assert result.facts.context_length == 1024
    assert result.facts.algorithm == "EAGLE3"
    for family, algorithm in (("eagle1", "EAGLE"), ("medusa", None)):
        job = JobSpec.model_validate(job_body(drafter={"max_position_embeddings": 1024, "family": family}))
        assert drafters.files("/not/here", job, facts_needed=True).facts.algorithm == algorithm
    several = JobSpec.model_validate(job_body(drafter={"max_position_embeddings": 1024},
                                              sweep={"families": ["eagle1", "eagle3"]}))
    with pytest.raises(Undeployable, match="several families"):
        drafters.files("/not/here", several, facts_needed=True)
    assert drafters.files("/not/here", None, facts_needed=False).facts.directory == "/not/here"
    with pytest.raises(Undeployable, match="max_position_embeddings"):
        drafters.files("/not/here", None, facts_needed=True)


def test_in_an_artifact_store_config_card_and_digest_are_read_once(moto_s3: S3Server, tmp_path: Path) -> None:
    bucket, made, prefix = make_bucket(moto_s3, tmp_path), tmp_path / "made", "jobs/j/stages/train/a"
    card = json.dumps({"target": {"architecture": "LlamaForCausalLM", "num_layers": 2}}).encode()
    finish_stage(made, "benchmark", benchmark_report("c", {"chat": (2.0,)}), {
        "checkpoints/c/config.json": b'{"max_position_embeddings": 512}', "checkpoints/c/eyrie-card.json": card}, "j")
    store = bucket.store()
    upload_dir(store, made, prefix)
    work = S3Work(url=store.url, endpoint_url=moto_s3.endpoint_url, credentials_secret="s3")
    drafters = Drafters(HOME, work, bucket.options())
    files = drafters.files(f"{HOME}/{prefix}/checkpoints/c", None, facts_needed=True)
    assert files.facts.context_length == 512
    assert files.stored == StoredDrafter(prefix, "checkpoints/c")
    assert files.digest is not None
    with pytest.raises(ArtifactMissing, match="checkpoints/x"):
        drafters.files(f"{HOME}/{prefix}/checkpoints/x", None, facts_needed=True)
    store.delete_all("jobs/j")
    again = drafters.find(f"{HOME}/{prefix}/checkpoints/c")
    assert (again.card or {})["target"]["num_layers"] == 2


@pytest.mark.parametrize(("directory", "stored"), [
    ("/var/lib/eyrie/jobs/j1/stages/train/a/checkpoints/c3",
     StoredDrafter("jobs/j1/stages/train/a", "checkpoints/c3")),
    ("/var/lib/eyrie/jobs/j1/stages/train/a", None),
    ("/var/lib/eyrie/jobs/j1/elsewhere/train/a/checkpoints/c3", None),
    ("/home/me/drafter", None),
])
def test_where_the_store_has_a_drafter_follows_from_its_path(directory: str, stored: StoredDrafter | None) -> None:
    assert stored_at(directory, HOME) == stored


def test_revisions_without_a_drafter_need_no_files(tmp_path: Path) -> None:
    result = profile()
    assert result.serving is not None
    made = deployed(tmp_path, EndpointServeSpec())
    deployments = Deployments(Settings(home=tmp_path), result, result.serving)
    assert deployments.with_drafter(made, revision(1), None).drafters == {}
