"""The objects of `eyrie export` on a real API server: accepted, and a pod made of them. No engine starts, for want of
images and claims."""

from dataclasses import replace
from typing import Any

import pytest

from eyrie_api.planning.sglang_attention import profile
from eyrie_operator.cluster.client import Cluster
from eyrie_operator.manifests.export import ServedDecision, objects
from tests.cluster.patience import eventually
from tests.operator.manifests.samples import ADAPTIVE
from tests.operator.test_export import DRAFTER, TARGET, served_as


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("served", [
    served_as(map=ADAPTIVE),
    served_as(target=replace(TARGET, model="/models/own"), drafter=replace(DRAFTER, directory="/home/jobs/c"),
              machine=profile("cpu"), dtype="float32")], ids=["adaptive", "files on a cpu"])
def test_a_cluster_accepts_the_exported_objects_and_makes_a_pod_of_them(
        served: ServedDecision, engine: Any, cluster: Cluster, namespace: str) -> None:
    made = objects(served, engine).kubernetes
    assert {"Deployment", "Service"} <= {each["kind"] for each in made}
    for each in made:
        cluster.create({**each, "metadata": {**each["metadata"], "namespace": namespace}})
    [wanted] = next(each for each in made if each["kind"] == "Deployment")["spec"]["template"]["spec"]["containers"]
    [pod] = eventually(lambda: cluster.list_all("v1", "Pod", namespace), "a pod", 60)
    [container] = pod["spec"]["containers"]
    assert (container["image"], container["command"]) == (wanted["image"], wanted["command"])
