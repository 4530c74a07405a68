"""Creating and awaiting a TrainJob on a real API server. Kubeflow Trainer is not installed there: the tests install a
stand-in definition without a schema, and play the controller."""

import copy
import os
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from kubernetes import config

from eyrie_api.contract.placement import Placement, VolumeWork
from eyrie_api.errors import NotFound
from eyrie_operator.cluster.client import Cluster
from eyrie_pipelines.trainjob import (
    API_VERSION,
    TrainJobClient,
    TrainJobRejected,
    TrainJobRequest,
    TrainJobResult,
    TrainJobUnavailable,
    render,
)
from tests.cluster.definitions import define
from tests.cluster.patience import eventually

STAND_IN: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
    "metadata": {"name": "trainjobs.trainer.kubeflow.org",
                 # The group is protected: this says that the definition is not the project's own.
                 "annotations": {"api-approved.kubernetes.io": "unapproved, a stand-in for tests"}},
    "spec": {"group": "trainer.kubeflow.org", "scope": "Namespaced",
             "names": {"kind": "TrainJob", "listKind": "TrainJobList", "plural": "trainjobs", "singular": "trainjob"},
             "versions": [{"name": "v1alpha1", "served": True, "storage": True, "subresources": {"status": {}},
                           "schema": {"openAPIV3Schema": {
                               "type": "object", "x-kubernetes-preserve-unknown-fields": True}}}]}}
REQUEST = TrainJobRequest(nodes=2, placement=Placement(image="i", work=VolumeWork(claim="work")), home="/var/lib/eyrie",
                          sync_s=15.0, python=("python3",))


def client() -> httpx.Client:
    """The kubeconfig's user, as a pod's service account otherwise."""
    reached = config.new_client_from_config().configuration
    context = ssl.create_default_context(cafile=reached.ssl_ca_cert)
    if reached.cert_file:
        context.load_cert_chain(reached.cert_file, reached.key_file)
    headers = {"Authorization": token} if (token := reached.get_api_key_with_prefix("authorization")) else {}
    return httpx.Client(base_url=reached.host, verify=context, headers=headers, timeout=60.0)


@pytest.fixture(scope="module")
def definition(cluster: Cluster) -> Iterator[None]:
    """The stand-in, while these tests run. Where Kubeflow Trainer is installed, its own definition stays."""
    name = STAND_IN["metadata"]["name"]
    try:
        found = cluster.get(STAND_IN["apiVersion"], STAND_IN["kind"], "", name)
        if found["metadata"].get("annotations", {}) != STAND_IN["metadata"]["annotations"]:
            pytest.skip("Kubeflow Trainer is installed here: its definition is not replaced")
    except NotFound:
        pass
    define(cluster, copy.deepcopy(STAND_IN))
    yield
    cluster.delete(STAND_IN["apiVersion"], STAND_IN["kind"], "", name)


@pytest.fixture
def trainer(definition: None, namespace: str) -> Iterator[TrainJobClient]:
    with client() as reached:
        yield TrainJobClient(reached, namespace)


def set_condition(trainer: TrainJobClient, cluster: Cluster, name: str, kind: str) -> None:
    """As Trainer's controller would."""
    found = trainer.read(name)
    assert found is not None
    found["status"] = {"conditions": [{"type": kind, "status": "True", "reason": "Set", "message": "by the test",
                                       "lastTransitionTime": "2026-01-01T00:00:00Z"}]}
    with client() as reached:
        reached.put(f"/apis/{API_VERSION}/namespaces/{trainer.namespace}/trainjobs/{name}/status", json=found
                    ).raise_for_status()


def manifest(trainer: TrainJobClient, name: str) -> dict[str, Any]:
    return render(REQUEST, name, trainer.namespace, ["--candidate", "base"], "run-1")


@pytest.mark.parametrize(("kind", "state"), [("Complete", "complete"), ("Failed", "failed")])
def test_a_trainjob_is_created_awaited_and_deleted(
        cluster: Cluster, trainer: TrainJobClient, kind: str, state: str) -> None:
    name = f"eyrie-{state}"

    def end_it() -> None:
        eventually(lambda: trainer.read(name), "the TrainJob is there")
        set_condition(trainer, cluster, name, kind)

    controller = threading.Thread(target=end_it)
    controller.start()
    assert trainer.run(manifest(trainer, name), poll_s=0.1) == TrainJobResult(state=state, message="Set: by the test")  # type: ignore[arg-type]
    controller.join()
    eventually(lambda: trainer.read(name) is None, "it is deleted")


def test_a_restarted_task_ignores_the_result_of_an_earlier_trainjob(
        cluster: Cluster, trainer: TrainJobClient) -> None:
    cluster.create(manifest(trainer, "eyrie-old"))
    set_condition(trainer, cluster, "eyrie-old", "Failed")
    before = trainer.read("eyrie-old")
    assert before is not None

    def end_the_new_one() -> None:
        def is_new() -> bool:
            found = trainer.read("eyrie-old")
            return found is not None and found["metadata"]["uid"] != before["metadata"]["uid"]

        eventually(is_new, "another TrainJob is there")
        set_condition(trainer, cluster, "eyrie-old", "Complete")

    controller = threading.Thread(target=end_the_new_one)
    controller.start()
    assert trainer.run(manifest(trainer, "eyrie-old"), poll_s=0.1).state == "complete"
    controller.join()


def test_a_trainjob_deleted_while_it_runs_raises_a_transient_error(trainer: TrainJobClient) -> None:
    def delete_it() -> None:
        eventually(lambda: trainer.read("eyrie-gone"), "the TrainJob is there")
        trainer.delete("eyrie-gone")

    other = threading.Thread(target=delete_it)
    other.start()
    with pytest.raises(TrainJobUnavailable, match="deleted while it ran"):
        trainer.run(manifest(trainer, "eyrie-gone"), poll_s=0.1)
    other.join()


def test_sigterm_deletes_the_trainjob(trainer: TrainJobClient) -> None:
    code = ("from tests.cluster.test_trainjob import REQUEST, TrainJobClient, client, render; import sys\n"
            "trainer = TrainJobClient(client(), sys.argv[1])\n"
            "trainer.run(render(REQUEST, 'eyrie-term', sys.argv[1], [], 'run-1'), poll_s=0.1)\n")
    task = subprocess.Popen([sys.executable, "-c", code, trainer.namespace], env=dict(os.environ))
    eventually(lambda: trainer.read("eyrie-term"), "the TrainJob is there")
    task.send_signal(signal.SIGTERM)
    assert task.wait(120) == 143
    eventually(lambda: trainer.read("eyrie-term") is None, "the TrainJob is deleted")


def test_a_namespace_that_is_not_there_is_refused_with_the_hint(trainer: TrainJobClient) -> None:
    with client() as reached, pytest.raises(TrainJobRejected, match="install Kubeflow Trainer"):
        TrainJobClient(reached, "eyrie-test-nowhere").run(manifest(trainer, "eyrie-x"), poll_s=0.1)
