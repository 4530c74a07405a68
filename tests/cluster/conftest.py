"""Tests on a real API server: `make test-cluster`, which needs KUBECONFIG and nothing else. No other run collects them.

They make namespaces of their own, named eyrie-test-*, and delete them. The two CustomResourceDefinitions belong to the
whole cluster and stay: give a cluster that is yours.
"""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.patience import eventually

collect_ignore_glob = [] if os.environ.get("EYRIE_TEST_CLUSTER") == "1" else ["*.py"]

if os.environ.get("EYRIE_TEST_CLUSTER") == "1":
    from eyrie_api.errors import NotFound
    from eyrie_operator.cluster.apply import Cluster, ClusterConflict

CRDS = Path(__file__).parents[2] / "helm" / "eyrie" / "files" / "crds"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The walk first: there the chart brings the definitions, where the other tests would have made them by hand."""
    items.sort(key=lambda one: "test_walk" not in one.nodeid)


@pytest.fixture(scope="session")
def cluster() -> "Cluster":
    """An administrator's client, with our resources defined."""
    if not os.environ.get("KUBECONFIG"):
        pytest.fail("set KUBECONFIG to a cluster that is yours to fill")
    admin = Cluster()
    for path in sorted(CRDS.glob("*.yaml")):
        definition = yaml.safe_load(path.read_text(encoding="utf-8"))
        define(admin, definition)
    return admin


def define(admin: "Cluster", definition: dict[str, Any]) -> None:
    """Make or replace a definition, and wait until the server serves it. Not by server-side apply: a server from before
    CEL rules drops them silently when posted, and refuses them when applied."""
    kind, api_version, name = definition["kind"], definition["apiVersion"], definition["metadata"]["name"]

    def read() -> dict[str, Any]:
        return admin.get(api_version, kind, "", name)

    try:
        admin.create(definition)
    except ClusterConflict:
        definition["metadata"]["resourceVersion"] = read()["metadata"]["resourceVersion"]
        admin.replace(definition)

    def established() -> bool:
        conditions = read().get("status", {}).get("conditions") or []  # null where it has just been made
        return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)

    eventually(established, f"{name} is served")


@pytest.fixture
def namespace(cluster: "Cluster") -> Iterator[str]:
    """A namespace of the test's own."""
    name = f"eyrie-test-{secrets.token_hex(3)}"
    cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    yield name
    # What holds objects may be gone with the operator of the test: nothing may hold up the namespace.
    for kind in ("DrafterJob", "DraftEndpoint"):
        for one in cluster.list_all("eyrie.dev/v1alpha1", kind, name):
            if one["metadata"].get("finalizers"):
                try:
                    cluster.merge("eyrie.dev/v1alpha1", kind, name, one["metadata"]["name"],
                                  {"metadata": {"finalizers": []}})
                except NotFound:
                    continue
    cluster.delete("v1", "Namespace", "", name)
