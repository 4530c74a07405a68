"""Endpoints on a real cluster: rows become Deployments and Services, and what is worse never takes over.

The engines are Eyrie's own on the quickstart target, in pods made of this machine's programs (`programs`): the work
volume is a directory of this machine, so the nodes must be this machine. Requests go through the API server to the
stable Service, as a client's would in the cluster.
"""

import contextlib
import json
import secrets
import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config

from eyrie_api.artifacts import list_files, write_model
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.reports import TrainReport, VocabularyReport
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.stages import Manifest
from eyrie_api.contract.status import Endpoint
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.migrations import upgrade
from eyrie_api.errors import NotFound
from eyrie_api.settings import Settings
from eyrie_operator.cluster.client import Cluster
from eyrie_operator.cluster.endpoints import WINDOW
from eyrie_operator.conditions import find
from eyrie_operator.manifests.deployment import ENDPOINT_LABEL
from tests.cluster.operators import OperatorProcess, operating
from tests.cluster.patience import eventually
from tests.cluster.programs import missing, programs

HOME = "/var/lib/eyrie"
JOB = "j1"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
CHAIN = DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4)
SERVE_S = 240.0
"""An engine loads in seconds, and its pod waits for two cores that everything else wants too."""

API = "eyrie.dev/v1alpha1"


class Harness:
    """A serving namespace, a work volume, a database; and what a client in the cluster sees."""

    def __init__(self, cluster: Cluster, namespace: str, home: Path) -> None:
        self.cluster, self.namespace, self.home = cluster, namespace, home
        self.work = home / "work"
        self.work.mkdir()
        self.database = Database(Settings(home=home).resolved_database_url)
        upgrade(self.database)
        self.endpoints = Endpoints(self.database)
        self._client = config.new_client_from_config()

    def profile(self) -> dict[str, Any]:
        """What an administrator of this machine would write."""
        run = programs()
        if not run.on_host:
            missing("the nodes are not this machine, and the test's work volume is a directory of it")
        placement = {"image": run.image_of("workers"), "host_paths": run.host_paths(),
                     "requests": {"cpu": "100m", "memory": "256Mi"}}
        return {
            "kubeflow": {"url": "http://nowhere"}, "home": HOME, "python": list(run.python),
            "stages": {**placement, "work": {"kind": "volume", "claim": "work", "mount_path": HOME}},
            "serving": {"namespace": self.namespace, "placement": placement, "python": list(run.python),
                        "startup_timeout_s": 300, "drain_timeout_s": 20, "leave_delay_s": 2}}

    def create(self, name: str = "chat", **serve: Any) -> Endpoint:
        served = EndpointServeSpec(endpoint=name, **serve)
        return self.endpoints.create(name, TargetSpec(model="quickstart"), served, "q")

    def propose(self, drafter: str, name: str = "chat") -> int:
        return self.endpoints.propose(name, job_id=JOB, checkpoint=drafter, tree=CHAIN, reason="better",
                                      drafter_dir=f"{HOME}/jobs/{JOB}/stages/train/a/checkpoints/{drafter}").number

    def checkpoint(self, name: str, files: Mapping[str, bytes]) -> None:
        """A drafter on the work volume, readable to the pods' user, in the manifest of the training that made it."""
        stage = self.work / f"jobs/{JOB}/stages/train/a"
        path = stage / "checkpoints" / name
        path.mkdir(parents=True)
        for file, data in files.items():
            (path / file).write_bytes(data)
        made = tuple(file for file in stage.glob("checkpoints/*/*") if file.is_file())
        write_model(stage / "manifest.json", Manifest(
            stage="train", job_id=JOB, candidate="a", spec_digest=f"sha256:{0:064}", code_version="0",
            started_at=NOW.isoformat(), finished_at=NOW.isoformat(), files=list_files(stage, made), report=TrainReport(
                candidate="a", steps=1, tokens=1, supervised_tokens=1, seconds=1.0, tokens_per_s=1.0, padding_share=0.0,
                data_wait_share=0.0, checkpoints=(), vocabulary=VocabularyReport(
                    draft_vocab_size=4, vocab_size=8, coverage=0.9, coverage_curve={4: 0.9}))))

    def served_by(self, revision: int, name: str = "chat") -> Endpoint:
        def serving() -> bool:
            seen = self.endpoints.get(name)
            assert seen.revisions[-1].state != "rejected", seen.revisions[-1].rejected_reason
            result = find(seen.conditions, "Serving")
            return seen.active_revision == revision and result is not None and result.status == "True"

        eventually(serving, f"revision {revision} serves", deadline_s=SERVE_S, every_s=0.5)
        return self.endpoints.get(name)

    def ask(self, name: str = "chat") -> str:
        """A chat completion by the stable Service."""
        path = f"/api/v1/namespaces/{self.namespace}/services/eyrie-{name}:http/proxy/v1/chat/completions"
        body = {"model": "q", "messages": [{"role": "user", "content": "What is 12 plus 7?"}], "max_tokens": 24,
                "temperature": 0}
        answer = self._client.call_api(
            path, "POST", header_params={"Content-Type": "application/json"}, body=body, auth_settings=["BearerToken"],
            response_type="object", _return_http_data_only=True, _request_timeout=60)
        return str(answer["choices"][0]["message"]["content"])

    def objects(self, name: str = "chat") -> set[tuple[str, str]]:
        kinds = (("apps/v1", "Deployment"), ("v1", "Service"), ("v1", "ConfigMap"),
                 ("policy/v1beta1", "PodDisruptionBudget"))
        return {(kind, one["metadata"]["name"]) for api, kind in kinds
                for one in self.cluster.list_all(api, kind, self.namespace, labelled=f"{ENDPOINT_LABEL}={name}")}


@pytest.fixture
def harness(cluster: Cluster, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    made = Harness(cluster, namespace, tmp_path)
    path = tmp_path / "profile.yaml"
    path.write_text(yaml.safe_dump(made.profile()))
    monkeypatch.setenv("EYRIE_CLUSTER_PROFILE", str(path))
    with volume(cluster, namespace, made.work):
        yield made
    made.database.close()


@contextlib.contextmanager
def volume(cluster: Cluster, namespace: str, directory: Path) -> Iterator[None]:
    """A claim over a directory of this machine."""
    name = f"eyrie-test-{secrets.token_hex(3)}"
    size = {"storage": "1Gi"}
    cluster.create({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": {
        "capacity": size, "accessModes": ["ReadWriteMany"], "hostPath": {"path": str(directory)},
        "storageClassName": name, "persistentVolumeReclaimPolicy": "Retain"}})
    cluster.create({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
                    "metadata": {"name": "work", "namespace": namespace}, "spec": {
                        "accessModes": ["ReadWriteMany"], "storageClassName": name, "resources": {"requests": size}}})
    try:
        yield
    finally:
        cluster.delete("v1", "PersistentVolume", "", name)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of a drafter of random weights for the quickstart target: poor guesses, and the text is the target's."""
    import torch

    from eyrie_api.planning.facts import quickstart_dir
    from eyrie_workers.drafters.eagle3.drafter import Eagle3Config, Eagle3Drafter
    from eyrie_workers.drafters.eagle3.family import save_drafter
    from eyrie_workers.targets.config import read_config
    from eyrie_workers.targets.draft_vocabulary import DraftVocabulary

    target = quickstart_dir()
    assert target is not None
    known = read_config(target)
    torch.manual_seed(0)
    made = Eagle3Drafter(Eagle3Config(
        hidden_size=known.hidden_size, intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=16,
        vocab_size=known.vocab_size, draft_vocab_size=known.vocab_size, aux_layers=(1, 2, 3), rms_eps=known.rms_eps,
        rope=known.rope, max_position_embeddings=known.max_position_embeddings, eos_token_ids=known.eos_token_ids),
        DraftVocabulary(torch.arange(known.vocab_size), known.vocab_size))
    path = tmp_path_factory.mktemp("drafter") / "random"
    save_drafter(path, made)
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


@pytest.fixture
def operator(harness: Harness) -> Iterator[OperatorProcess]:
    with operating(harness.home, harness.namespace) as one:
        yield one


def test_a_better_revision_takes_over_a_broken_one_does_not_and_nobody_is_kept_waiting(
        harness: Harness, drafter: dict[str, bytes], operator: OperatorProcess) -> None:
    harness.create()
    bare = harness.served_by(1)
    assert bare.url == f"http://eyrie-chat.{harness.namespace}.svc/v1"
    first = harness.ask()

    harness.checkpoint("c1", drafter)
    harness.checkpoint("broken", {"config.json": json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}).encode()})
    answers: list[str] = []
    failures: list[Exception] = []
    done = threading.Event()

    def keep_asking() -> None:
        while not done.wait(0.2):
            try:
                answers.append(harness.ask())
            except client.ApiException as error:
                failures.append(error)

    asking = threading.Thread(target=keep_asking)
    asking.start()
    try:
        drafted = harness.served_by(harness.propose("c1"))
        assert drafted.url == bare.url
        eventually(lambda: ("Deployment", "eyrie-chat-r1") not in harness.objects(), "the old engine goes")
        broken = harness.propose("broken")
        eventually(lambda: harness.endpoints.get("chat").revisions[-1].state == "rejected", "revision rejected",
                   deadline_s=SERVE_S, every_s=0.5)
        eventually(lambda: ("Deployment", f"eyrie-chat-r{broken}") not in harness.objects(), "and cleared away")
    finally:
        done.set()
        asking.join(90)
    assert failures == []
    assert set(answers) == {first}
    after = harness.endpoints.get("chat")
    assert after.active_revision == drafted.active_revision
    result = find(after.conditions, "RolledBack")
    assert result is not None
    assert result.status == "True"
    assert result.reason == "EngineDied"

    window = harness.cluster.get("apps/v1", "Deployment", harness.namespace, f"eyrie-chat-r{after.active_revision}")
    assert json.loads(window["metadata"]["annotations"][WINDOW])["counts"]  # its pod has been asked

    def steady_state() -> bool:
        """Looked at again and again, nothing is written."""
        writes, looks = (operator.figure(f"eyrie_operator_{what}_total") for what in ("writes", "reconcile"))
        eventually(lambda: operator.figure("eyrie_operator_reconcile_total") >= looks + 3, "it is looked at")
        return operator.figure("eyrie_operator_writes_total") == writes

    eventually(steady_state, "it rests")

    harness.endpoints.set_desired("chat", "off")
    eventually(lambda: harness.objects() == set(), "everything is gone")
    eventually(lambda: find(harness.endpoints.get("chat").conditions, "Serving").reason == "Off", "it is off")


def test_an_applied_endpoint_is_finished_by_another_operator_when_the_first_is_killed_half_way(
        harness: Harness, drafter: dict[str, bytes]) -> None:
    harness.checkpoint("c1", drafter)
    with operating(harness.home, harness.namespace) as first:
        harness.cluster.create({
            "apiVersion": API, "kind": "DraftEndpoint", "metadata": {"name": "chat", "namespace": harness.namespace},
            "spec": {"target": {"model": "quickstart"}, "serve": {"max_concurrency": 2}}})
        eventually(lambda: ("Deployment", "eyrie-chat-r1") in harness.objects(), "an engine is started")
        first.kill()
    with operating(harness.home, harness.namespace) as second:
        harness.served_by(1)
        bare = harness.endpoints.serving("chat")
        assert bare.serve.max_concurrency == 2
        number = harness.propose("c1")
        eventually(lambda: ("Deployment", f"eyrie-chat-r{number}") in harness.objects(), "the next is started")
        second.kill()
    with operating(harness.home, harness.namespace):
        harness.served_by(number)
        shown = harness.cluster.get(API, "DraftEndpoint", harness.namespace, "chat")
        owners = [owner["uid"] for one in harness.cluster.list_all("apps/v1", "Deployment", harness.namespace)
                  for owner in one["metadata"].get("ownerReferences", ())]
        assert owners == [shown["metadata"]["uid"]] * len(owners)
        assert owners
        eventually(lambda: harness.cluster.get(API, "DraftEndpoint", harness.namespace, "chat")["status"].get(
            "active_revision") == number, "the object shows it")
        harness.cluster.delete(API, "DraftEndpoint", harness.namespace, "chat")

        def gone() -> bool:
            try:
                harness.cluster.get(API, "DraftEndpoint", harness.namespace, "chat")
            except NotFound:
                return True
            return False

        eventually(gone, "the object is let go")
        assert harness.objects() == set()
        assert harness.endpoints.get("chat").desired == "off"
