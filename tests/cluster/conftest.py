"""Tests on a real API server: `make test-cluster`, which needs KUBECONFIG and nothing else. No other run collects them.

They make namespaces of their own, named eyrie-test-*, and delete them. The two CustomResourceDefinitions belong to the
whole cluster and stay: give a cluster that is yours.
"""

import os
import secrets
from collections.abc import Iterator

import pytest

collect_ignore_glob = [] if os.environ.get("EYRIE_TEST_CLUSTER") == "1" else ["*.py"]

if os.environ.get("EYRIE_TEST_CLUSTER") == "1":
    from eyrie_operator.cluster.client import Cluster
    from tests.cluster.definitions import define_ours, delete_namespace


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The walk first: there the chart brings the definitions, where the other tests would have made them by hand."""
    items.sort(key=lambda one: "test_walk" not in one.nodeid)


@pytest.fixture(scope="session")
def cluster() -> "Cluster":
    """An administrator's client, with our resources defined."""
    if not os.environ.get("KUBECONFIG"):
        pytest.fail("set KUBECONFIG to a cluster that is yours to fill")
    admin = Cluster()
    define_ours(admin)
    return admin


@pytest.fixture
def namespace(cluster: "Cluster") -> Iterator[str]:
    """A namespace of the test's own."""
    name = f"eyrie-test-{secrets.token_hex(3)}"
    cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    yield name
    delete_namespace(cluster, name)
