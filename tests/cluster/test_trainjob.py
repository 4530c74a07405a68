"""Waiting for a TrainJob on a real API server. Kubeflow Trainer is not there: a definition of the tests' own takes its
objects, with no more of the schema than waiting needs, and the test plays the controller."""

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

from eyrie_api.errors import NotFound
from eyrie_api.v1alpha1.placement import Placement, VolumeWork
from eyrie_operator.cluster.apply import Cluster
from eyrie_pipelines.trainjob import API_VERSION, Ended, Order, Trainer, TrainJobAway, TrainJobRefused, render
from tests.cluster.conftest import define
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
ORDER = Order(nodes=2, placement=Placement(image="i", work=VolumeWork(claim="work")), home="/var/lib/eyrie",
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
    """The stand-in, while these tests run. Where Kubeflow Trainer is, its own definition is left alone."""
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
def trainer(definition: None, namespace: str) -> Iterator[Trainer]:
    with client() as reached:
        yield Trainer(reached, namespace)


def told(trainer: Trainer, cluster: Cluster, name: str, kind: str) -> None:
    """As Trainer's controller would."""
    found = trainer.read(name)
    assert found is not None
    found["status"] = {"conditions": [{"type": kind, "status": "True", "reason": "Told", "message": "by the test",
                                       "lastTransitionTime": "2026-01-01T00:00:00Z"}]}
    with client() as reached:
        reached.put(f"/apis/{API_VERSION}/namespaces/{trainer.namespace}/trainjobs/{name}/status", json=found
                    ).raise_for_status()


def order(trainer: Trainer, name: str) -> dict[str, Any]:
    return render(ORDER, name, trainer.namespace, ["--candidate", "base"])


@pytest.mark.parametrize(("kind", "state"), [("Complete", "complete"), ("Failed", "failed")])
def test_an_ordered_trainjob_is_made_waited_for_and_cleared_away(
        cluster: Cluster, trainer: Trainer, kind: str, state: str) -> None:
    name = f"eyrie-{state}"

    def end_it() -> None:
        eventually(lambda: trainer.read(name), "the TrainJob is there")
        told(trainer, cluster, name, kind)

    controller = threading.Thread(target=end_it)
    controller.start()
    assert trainer.carry_out(order(trainer, name), poll_s=0.1) == Ended(state=state, message="Told: by the test")  # type: ignore[arg-type]
    controller.join()
    eventually(lambda: trainer.read(name) is None, "it is cleared away")


def test_a_box_started_again_takes_up_what_runs_and_does_not_take_an_old_end_for_its_own(
        cluster: Cluster, trainer: Trainer) -> None:
    cluster.create(order(trainer, "eyrie-old"))
    told(trainer, cluster, "eyrie-old", "Failed")
    before = trainer.read("eyrie-old")
    assert before is not None

    def end_the_new_one() -> None:
        def anew() -> bool:
            found = trainer.read("eyrie-old")
            return found is not None and found["metadata"]["uid"] != before["metadata"]["uid"]

        eventually(anew, "another TrainJob is there")
        told(trainer, cluster, "eyrie-old", "Complete")

    controller = threading.Thread(target=end_the_new_one)
    controller.start()
    assert trainer.carry_out(order(trainer, "eyrie-old"), poll_s=0.1).state == "complete"
    controller.join()


def test_a_trainjob_deleted_under_the_box_is_trouble_that_may_pass(trainer: Trainer) -> None:
    def delete_it() -> None:
        eventually(lambda: trainer.read("eyrie-gone"), "the TrainJob is there")
        trainer.delete("eyrie-gone")

    other = threading.Thread(target=delete_it)
    other.start()
    with pytest.raises(TrainJobAway, match="deleted while it ran"):
        trainer.carry_out(order(trainer, "eyrie-gone"), poll_s=0.1)
    other.join()


def test_a_box_told_to_end_takes_its_trainjob_with_it(trainer: Trainer) -> None:
    code = ("from tests.cluster.test_trainjob import ORDER, Trainer, client, render; import sys\n"
            "trainer = Trainer(client(), sys.argv[1])\n"
            "trainer.carry_out(render(ORDER, 'eyrie-told', sys.argv[1], []), poll_s=0.1)\n")
    box = subprocess.Popen([sys.executable, "-c", code, trainer.namespace], env=dict(os.environ))
    eventually(lambda: trainer.read("eyrie-told"), "the TrainJob is there")
    box.send_signal(signal.SIGTERM)
    assert box.wait(120) == 143
    eventually(lambda: trainer.read("eyrie-told") is None, "it went with the box")


def test_a_namespace_that_is_not_there_is_refused_with_the_hint(trainer: Trainer) -> None:
    with client() as reached, pytest.raises(TrainJobRefused, match="install Kubeflow Trainer"):
        Trainer(reached, "eyrie-test-nowhere").carry_out(order(trainer, "eyrie-x"), poll_s=0.1)
