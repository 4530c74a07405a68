"""What is rendered fits the published schemas of Kubernetes, from the oldest supported version to the newest known."""

from typing import Any

import pytest

from eyrie_api.contract.placement import HostPath, Toleration
from eyrie_operator.endpoints.plan import ObservedCanary
from eyrie_operator.manifests.objects import render_endpoint
from eyrie_operator.manifests.rollout import RolloutState
from tests.operator.manifests.samples import NOW, PLACEMENT, S3, deployment, embedded, endpoint, render, rich

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="kubernetes-validate, which holds the schemas, is not installed (extra dev)")

BUILT_IN = ("v1", "apps/v1", "policy/v1")
FULL = PLACEMENT.model_copy(update={
    "work": S3, "queue": "gpus", "priority_class": "serving", "service_account": "engines",
    "image_pull_secrets": ("registry",), "host_paths": (HostPath(path="/models", mount_path="/models"),),
    "tolerations": (Toleration(key="nvidia.com/gpu", effect="NoSchedule"),)})


@pytest.mark.parametrize("version", ["1.27", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("how", [deployment, rich, embedded])
def test_every_built_in_object_fits_the_strict_schema(how: Any, version: str) -> None:
    result = how(placement=FULL.model_copy(update={"num_gpus": how().placement.num_gpus}))
    wanted = RolloutState(True, (1, 2), 1, ObservedCanary(2, 0.2, NOW))
    checked = 0
    for each in render_endpoint(endpoint(active=1, candidate=2), result, wanted):
        if each["apiVersion"] in BUILT_IN:
            kubernetes_validate.validate(each, version, strict=True)
            checked += 1
    assert checked >= 7


def test_the_schema_check_would_notice_a_misspelt_field() -> None:
    [first, *_] = render(endpoint(), deployment())
    first["spec"]["template"]["spec"]["terminationGracePeriod"] = 5
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(first, "1.27", strict=True)
