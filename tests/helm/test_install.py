"""The chart on a real API server, by Helm's SDK: installed, upgraded, rolled back, uninstalled.

Needs KUBECONFIG, somebody's word that this cluster is for tests (EYRIE_TEST_CLUSTER, which make sets), and the right to
make namespaces and definitions. Nothing has to run there, so an API server with controllers is enough. Whether the pods
then work is for tests/cluster.
"""

import base64
import contextlib
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from tests.cluster.seed_job import laid_over
from tests.helm.rendering import CHART, Object, Values, from_file, sdk
from tests.waiting import wait_for

# A cluster busy with other things takes its time.
LONG_S = 120.0
CRDS = ("drafterjobs.eyrie.dev", "draftendpoints.eyrie.dev")


def eventually(holds: Callable[[], bool]) -> None:
    wait_for(holds, "what the chart brings about", LONG_S, every_s=0.2)


class Server:
    """A namespace of the test's own on the server of KUBECONFIG, and Helm for it."""

    def __init__(self) -> None:
        if not os.environ.get("KUBECONFIG") or not os.environ.get("EYRIE_TEST_CLUSTER"):
            pytest.skip("no API server to install on: set KUBECONFIG, and run make test-helm")
        helm = sdk()
        config.load_kube_config()
        self.namespace = f"eyrie-test-{secrets.token_hex(3)}"
        self.core, self.apps = client.CoreV1Api(), client.AppsV1Api()
        self.batch, self.extensions = client.BatchV1Api(), client.ApiextensionsV1Api()
        self.rights, self.custom = client.RbacAuthorizationV1Api(), client.CustomObjectsApi()
        self.namespaces: list[str] = []
        self.add_namespace(self.namespace)
        self.helm: Any = helm.Config(namespace=self.namespace)
        self.chart = helm.Chart.load(CHART)

    def add_namespace(self, name: str) -> str:
        self.core.create_namespace({"metadata": {"name": name}})
        self.namespaces.append(name)
        return name

    def install(self, values: Values) -> None:
        # Where a cluster has our definitions already, they are another's to keep or delete.
        self.helm.install(self.chart, "rel", values, timeout=int(LONG_S))

    def install_without_database(self, values: Values) -> None:
        """The same with a database outside, which does not exist: the Job that makes its tables, a hook that Helm waits
        for, is marked as finished in place of running."""
        done = {"status": {"succeeded": 1, "completionTime": "2026-01-01T00:00:00Z",
                           "conditions": [{"type": "Complete", "status": "True"}]}}

        def finish() -> None:
            eventually(lambda: bool(self.names(self.batch.list_namespaced_job)))
            for name in self.names(self.batch.list_namespaced_job):
                self.batch.patch_namespaced_job_status(name, self.namespace, done)

        finishing = threading.Thread(target=finish)
        finishing.start()
        self.install(values)
        finishing.join()

    def replicas(self, name: str) -> int:
        found: int = self.apps.read_namespaced_deployment(name, self.namespace).spec.replicas
        return found

    def secret(self, name: str) -> dict[str, str]:
        data = self.core.read_namespaced_secret(name, self.namespace).data
        return {key: base64.b64decode(value).decode() for key, value in data.items()}

    def names(self, of: Callable[..., Any]) -> set[str]:
        return {one.metadata.name for one in of(self.namespace).items}

    def definitions(self) -> set[str]:
        return {one.metadata.name for one in self.extensions.list_custom_resource_definition().items
                if one.metadata.name in CRDS}

    def clean(self) -> None:
        self.helm.uninstall("rel", ignore_not_found=True)
        for name in CRDS:
            with contextlib.suppress(ApiException):
                self.extensions.delete_custom_resource_definition(name)
        for name in self.namespaces:
            self.core.delete_namespace(name)
        eventually(lambda: not self.definitions())
        self.chart.close()
        self.helm.close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    if made.definitions():
        made.core.delete_namespace(made.namespace)
        pytest.skip("this cluster has Eyrie's custom resources already: the test would delete them")
    try:
        yield made
    finally:
        made.clean()


TRIAL: Values = {"worker": {"replicas": 2}}


@pytest.mark.xdist_group("cluster")
def test_a_trial_is_installed_upgraded_rolled_back_and_leaves_what_the_switches_say(server: Server) -> None:
    server.install(TRIAL)
    assert server.names(server.apps.list_namespaced_deployment) == {
        "rel-eyrie-api", "rel-eyrie-worker", "rel-eyrie-operator"}
    assert server.definitions() == set(CRDS)
    token, database = server.secret("rel-eyrie-api-token"), server.secret("rel-eyrie-database")
    assert database["password"] in database["url"]
    key = server.secret("rel-eyrie-secret-key")
    eventually(lambda: server.names(server.batch.list_namespaced_job) == {"rel-eyrie-migrations-1"})

    server.helm.upgrade(server.chart, "rel", {"worker": {"replicas": 3}}, timeout=int(LONG_S))
    assert server.replicas("rel-eyrie-worker") == 3
    assert (server.secret("rel-eyrie-api-token"), server.secret("rel-eyrie-database")) == (token, database)
    assert server.secret("rel-eyrie-secret-key") == key
    eventually(lambda: server.names(server.batch.list_namespaced_job) == {"rel-eyrie-migrations-2"})

    server.helm.rollback("rel", version=1, timeout=int(LONG_S))
    assert server.replicas("rel-eyrie-worker") == 2
    assert server.secret("rel-eyrie-database") == database

    server.helm.uninstall("rel", timeout=int(LONG_S))
    assert server.definitions() == set(CRDS)
    assert "rel-eyrie-database" in server.names(server.core.list_namespaced_secret)
    assert "rel-eyrie-api-token" not in server.names(server.core.list_namespaced_secret)
    eventually(lambda: not server.names(server.apps.list_namespaced_deployment))

    server.install(TRIAL)  # takes up what was kept: the volume knows the old password alone
    assert (server.secret("rel-eyrie-database"), server.secret("rel-eyrie-secret-key")) == (database, key)


@pytest.mark.xdist_group("cluster")
def test_nothing_is_left_where_nothing_is_to_be_kept(server: Server) -> None:
    server.install({"crds": {"keep": False}, "bundled": {"keep": False}})
    assert server.definitions() == set(CRDS)
    server.helm.uninstall("rel", timeout=int(LONG_S))
    eventually(lambda: not server.definitions())
    left = {name for name in server.names(server.core.list_namespaced_secret) if name.startswith("rel-")}
    assert left == set()
    eventually(lambda: not server.names(server.apps.list_namespaced_stateful_set))


def holds(stored: object, sent: object) -> bool:
    """Whether all that was sent is stored: a server drops fields that a definition does not have."""
    if isinstance(sent, dict):
        return isinstance(stored, dict) and all(holds(stored.get(name), value) for name, value in sent.items())
    if isinstance(sent, list):
        return isinstance(stored, list) and len(stored) == len(sent) and all(map(holds, stored, sent))
    return stored == sent


@pytest.mark.xdist_group("cluster")
def test_the_values_of_a_company_are_installed_with_its_job(server: Server) -> None:
    """With another namespace in place of `team`. The tests' cluster has no monitoring.coreos.com, without which the
    chart leaves PodMonitors and rules out, and neither Kueue, which reads a label of the stages' pods, nor Kubeflow."""
    team = server.add_namespace(f"{server.namespace}-team")
    values = laid_over(from_file("values-ha.yaml", "values-gpu.yaml", "values-company.yaml"),
                       {"cluster": {"kubeflow": {"namespace": team}}, "operator": {"runsNamespace": team}})
    values["operator"]["projects"] = {team: "default"}
    server.install_without_database(values)
    assert {name: server.replicas(name) for name in server.names(server.apps.list_namespaced_deployment)} == {
        "rel-eyrie-api": 3, "rel-eyrie-worker": 3, "rel-eyrie-operator": 2}
    assert "rel-eyrie-operator" in {one.role_ref.name for one in
                                    server.rights.list_namespaced_role_binding(team).items}
    (ingress,) = client.NetworkingV1Api().list_namespaced_ingress(server.namespace).items
    assert (ingress.spec.rules[0].host, ingress.spec.tls[0].secret_name) == ("eyrie.example.com", "eyrie-tls")
    assert "rel-eyrie-dashboard" in server.names(server.core.list_namespaced_config_map)
    assert not {name for name in server.names(server.core.list_namespaced_secret) if name.endswith("-database")}

    resource = ("eyrie.dev", "v1alpha1", team, "drafterjobs")

    def is_served() -> bool:
        with contextlib.suppress(ApiException):
            server.custom.list_namespaced_custom_object(*resource)
            return True
        return False

    eventually(is_served)
    job: Object = yaml.safe_load((CHART.parents[1] / "docs/examples/company_job.yaml").read_text())
    job["metadata"]["namespace"] = team
    stored = server.custom.create_namespaced_custom_object(*resource, job)
    assert holds(stored["spec"], job["spec"])
    wrong = laid_over(job, {"metadata": {"name": "wrong"}, "spec": {"job": {"engine": {"kind": "vllm"}}}})
    with pytest.raises(ApiException, match=r"spec\.job\.engine\.kind"):
        server.custom.create_namespaced_custom_object(*resource, wrong)


@pytest.mark.xdist_group("cluster")
def test_the_operator_may_do_what_its_work_needs_and_no_more(server: Server) -> None:
    server.install({"rbac": {"userRoles": False}})
    account = f"system:serviceaccount:{server.namespace}:rel-eyrie-operator"
    reviews = client.AuthorizationV1Api()

    def may(verb: str, group: str, resource: str, namespace: str | None = None, subresource: str = "") -> bool:
        asked = {"user": account, "resourceAttributes": {
            "verb": verb, "group": group, "resource": resource, "subresource": subresource,
            "namespace": namespace or server.namespace}}
        allowed: bool = reviews.create_subject_access_review({"spec": asked}).status.allowed
        return allowed

    # The server learns of each role and each binding by itself.
    eventually(lambda: may("watch", "eyrie.dev", "drafterjobs"))
    eventually(lambda: may("patch", "eyrie.dev", "drafterjobs", subresource="status"))
    eventually(lambda: may("patch", "apps", "deployments"))
    eventually(lambda: may("update", "coordination.k8s.io", "leases"))
    assert not may("get", "", "secrets")
    assert not may("create", "", "pods", subresource="exec")
    assert not may("watch", "eyrie.dev", "drafterjobs", namespace="kube-system")
    assert not may("create", "rbac.authorization.k8s.io", "roles")


def kubeconfig_of(server: Server, account: str, directory: Path) -> Path:
    """How a pod of that ServiceAccount would speak to the server."""
    token = server.core.create_namespaced_service_account_token(account, server.namespace, {"spec": {}}).status.token
    found = client.Configuration.get_default_copy()
    cluster = {"server": found.host}
    if found.ssl_ca_cert:
        cluster["certificate-authority"] = found.ssl_ca_cert
    path = directory / "kubeconfig"
    path.write_text(yaml.safe_dump({
        "apiVersion": "v1", "kind": "Config", "current-context": "it",
        "clusters": [{"name": "it", "cluster": cluster}], "users": [{"name": "it", "user": {"token": token}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it", "namespace": server.namespace}}]}))
    path.chmod(0o600)
    return path


@pytest.mark.xdist_group("cluster")
def test_the_operator_leads_and_takes_up_a_job_with_the_rights_it_is_given(server: Server, tmp_path: Path) -> None:
    server.install({"rbac": {"userRoles": False}})
    deployment = server.apps.read_namespaced_deployment("rel-eyrie-operator", server.namespace)
    container = deployment.spec.template.spec.containers[0]
    env = {one.name: one.value for one in container.env if one.value and one.name != "HOME"}
    env |= {name: value for name, value in os.environ.items() if not name.startswith("EYRIE_")}
    env |= {"EYRIE_HOME": str(tmp_path), "EYRIE_OPERATOR_PORT": "0",
            "KUBECONFIG": str(kubeconfig_of(server, "rel-eyrie-operator", tmp_path))}
    command = [sys.executable, "-m", "eyrie_operator.command"]
    subprocess.run([*command, "migrate"], env=env, check=True, timeout=LONG_S, capture_output=True)
    resource = ("eyrie.dev", "v1alpha1", server.namespace, "drafterjobs")
    body = {"apiVersion": "eyrie.dev/v1alpha1", "kind": "DrafterJob", "metadata": {"name": "one"},
            "spec": {"job": {"target": {"model": "quickstart"}, "data": {"sources": [{"path": "quickstart"}]}}}}
    log = tmp_path / "operator.log"
    with log.open("wb") as out:
        operator = subprocess.Popen([*command, *container.args], env=env, stdout=out, stderr=out)
    try:
        server.custom.create_namespaced_custom_object(*resource, body)

        def taken_up() -> bool:
            assert operator.poll() is None, log.read_text()
            found: dict[str, Any] = server.custom.get_namespaced_custom_object(*resource, "one")
            return bool(found.get("status", {}).get("job_id")) and bool(found["metadata"].get("finalizers"))

        eventually(taken_up)
        eventually(lambda: any(one.involved_object.name == "one" for one in
                               server.core.list_namespaced_event(server.namespace).items))
        assert "forbidden" not in log.read_text().lower()
    finally:
        operator.kill()
        operator.wait()
        # Nobody is left to finish what the finalizer waits for.
        with contextlib.suppress(ApiException):
            server.custom.patch_namespaced_custom_object(*resource, "one", {"metadata": {"finalizers": None}})
