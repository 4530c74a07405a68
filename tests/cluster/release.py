"""One installation of the chart on a real cluster, with everything it needs around it, and the hands to break it.

A namespace of the test's own holds the release (with its bundled stores), the double of Kubeflow's backend
(tests/kubeflow) and a visitor: a pod from which the test asks as a user's program would, by the names of Services. So
nothing here needs a route from the test into the cluster.

A process is killed as the kernel does it: where the node is this machine, by SIGKILL to what is in the container's
cgroup; elsewhere by deleting the pod without a grace period. A store is cut off by taking its pod away for a while; its
volume stays.
"""

import base64
import contextlib
import json
import os
import secrets
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python as helm
from kubernetes import client, config, stream
from kubernetes.client.exceptions import ApiException

from tests.cluster.patience import PATIENCE, eventually
from tests.cluster.programs import ROOT, Programs
from tests.cluster.seed_job import laid_over

NAME = "rel"
CHART = ROOT / "helm" / "eyrie"
API = "eyrie.dev/v1alpha1"
DOUBLE = "ml-pipeline-double"
BUNDLED = ("postgresql", "redis", "s3")
DEFINITIONS = ("drafterjobs.eyrie.dev", "draftendpoints.eyrie.dev")

_ASK = """
import json, sys, time, urllib.error, urllib.request
asked = json.loads(sys.argv[1])
data = None if asked["body"] is None else json.dumps(asked["body"]).encode()
request = urllib.request.Request(asked["url"], data, {"content-type": "application/json", **asked["headers"]},
                                 method=asked["method"])
began = time.monotonic()
try:
    with urllib.request.urlopen(request, timeout=asked["timeout_s"]) as answer:
        status, text = answer.status, answer.read().decode()
except urllib.error.HTTPError as error:
    status, text = error.code, error.read().decode()
except OSError as error:
    status, text = 0, json.dumps({"error": str(error)})
print(json.dumps({"status": status, "text": text, "seconds": time.monotonic() - began}))
"""


@dataclass(frozen=True)
class Answer:
    """Of a request made inside the cluster. Status 0: nobody answered."""

    status: int
    text: str
    seconds: float

    @property
    def body(self) -> Any:
        return json.loads(self.text)


class Release:
    """A namespace, the chart in it, and what stands around it."""

    def __init__(self, programs: Programs, directory: Path, chart: Path) -> None:
        config.load_kube_config()
        self.programs, self._directory = programs, directory
        self.namespace = f"eyrie-test-{secrets.token_hex(3)}"
        self.core, self.apps, self.batch = client.CoreV1Api(), client.AppsV1Api(), client.BatchV1Api()
        self.rights, self.leases = client.RbacAuthorizationV1Api(), client.CoordinationV1Api()
        self.extensions, self.custom = client.ApiextensionsV1Api(), client.CustomObjectsApi()
        self.core.create_namespace({"metadata": {"name": self.namespace}})
        self._volumes: list[str] = []
        self._brings_definitions = True
        self._helm: Any = helm.Config(namespace=self.namespace)
        self._chart: Any = helm.Chart.load(chart)

    # Around the release.

    def offer_volumes(self) -> None:
        """Volumes for the bundled stores, where no class of the cluster makes them: directories of this machine."""
        if not os.environ.get("EYRIE_CLUSTER_STATE"):
            return
        for store in BUNDLED:
            path = self._directory / store
            path.mkdir()
            path.chmod(0o777)  # a directory of the node belongs to root; the stores do not run as root
            name = f"{self.namespace}-{store}"
            self.core.create_persistent_volume({
                "metadata": {"name": name}, "spec": {
                    "capacity": {"storage": "64Gi"}, "accessModes": ["ReadWriteOnce"], "hostPath": {"path": str(path)},
                    "persistentVolumeReclaimPolicy": "Retain",
                    "claimRef": {"namespace": self.namespace, "name": f"data-{NAME}-eyrie-{store}-0"}}})
            self._volumes.append(name)

    def start_double(self) -> None:
        """The test double of Kubeflow Pipelines' backend, in a pod of its own. Its source is its ConfigMap."""
        files = {path.name: path.read_text() for path in sorted((ROOT / "tests" / "kubeflow").glob("*.py"))
                 if not path.name.startswith(("test_", "conftest"))}
        self.core.create_namespaced_config_map(self.namespace, {"metadata": {"name": DOUBLE}, "data": files})
        self.core.create_namespaced_service_account(self.namespace, {"metadata": {"name": DOUBLE}})
        every = ["get", "list", "watch", "create", "update", "patch", "delete"]
        self.rights.create_namespaced_role(self.namespace, {"metadata": {"name": DOUBLE}, "rules": [
            {"apiGroups": [""], "resources": ["pods", "configmaps"], "verbs": every},
            {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": every}]})
        self.rights.create_namespaced_role_binding(self.namespace, {
            "metadata": {"name": DOUBLE}, "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role",
                                                      "name": DOUBLE},
            "subjects": [{"kind": "ServiceAccount", "name": DOUBLE, "namespace": self.namespace}]})
        source = {"name": "source", "configMap": {"name": DOUBLE, "items": [
            {"key": name, "path": f"tests/kubeflow/{name}"} for name in files]}}
        self._stand(DOUBLE, ["-m", "tests.kubeflow.double", "--namespace", self.namespace, "--host", "0.0.0.0",
                             "--port", "8888"],
                    volumes=[source], mounts=[{"name": "source", "mountPath": "/double"}], account=DOUBLE,
                    probe={"httpGet": {"path": "/apis/v2beta1/healthz", "port": 8888}, "periodSeconds": 2,
                           "timeoutSeconds": 5})
        self.core.create_namespaced_service(self.namespace, {"metadata": {"name": DOUBLE}, "spec": {
            "selector": {"app": DOUBLE}, "ports": [{"port": 8888}]}})

    def start_visitor(self) -> None:
        """The pod from which the test asks."""
        self._stand("visitor", ["-c", "import signal; signal.pause()"], volumes=[], mounts=[], account="default")

    def _stand(self, name: str, args: list[str], *, volumes: list[Any], mounts: list[Any], account: str,
               probe: Mapping[str, Any] | None = None) -> None:
        container: dict[str, Any] = {
            "name": "it", "image": self.programs.image_of("operator"), "command": [*self.programs.python, *args],
            "workingDir": "/double" if mounts else "/tmp",
            "env": [{"name": "PYTHONPATH", "value": "/double"}, {"name": "PYTHONUNBUFFERED", "value": "1"}],
            "volumeMounts": [*self.programs.mounts(), *mounts]}
        if probe is not None:
            container["readinessProbe"] = dict(probe)
        self.apps.create_namespaced_deployment(self.namespace, {"metadata": {"name": name}, "spec": {
            "replicas": 1, "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": {
                "serviceAccountName": account, "enableServiceLinks": False, "terminationGracePeriodSeconds": 1,
                "containers": [container], "volumes": [*self.programs.volumes(), *volumes]}}}})

    # The release.

    def _surroundings(self) -> dict[str, Any]:
        """Values that every release here needs."""
        # A share of the processors, so that others of the node do not starve them; and all of them fit on two.
        placement: dict[str, Any] = {"requests": {"cpu": "200m", "memory": "256Mi"}}
        if self.programs.on_host:
            placement["host_paths"] = self.programs.host_paths()
        return {
            # Where a cluster has our definitions already, they are another's to keep or delete.
            "crds": {"install": self._brings_definitions},
            "operator": {"namespaced": True, "mirrorNamespace": self.namespace},
            "rbac": {"userRoles": False},
            "worker": {"concurrency": 2},
            "cluster": {
                "kubeflow": {"url": f"http://{DOUBLE}:8888"},
                "stages": placement, "serving": {"placement": placement, "leave_delay_s": 2, "drain_timeout_s": 30},
                "sync_s": 2}}

    def install(self, values: Mapping[str, Any]) -> None:
        """Sends it to the server; the pods come up by themselves."""
        self._brings_definitions = not self.definitions()
        merged = laid_over(self.programs.values(), laid_over(self._surroundings(), values))
        self._helm.install(self._chart, NAME, merged, timeout=int(120 * PATIENCE))

    def upgrade(self, programs: Programs, chart: Path, values: Mapping[str, Any]) -> None:
        """Replace the release by other programs and another chart; ends when the tables are migrated and the API server
        has the new objects. Its pods follow."""
        self._chart.close()
        self.programs, self._chart = programs, helm.Chart.load(chart)
        merged = laid_over(programs.values(), laid_over(self._surroundings(), values))
        self._helm.upgrade(self._chart, NAME, merged, timeout=int(240 * PATIENCE), reset_values=True)

    def uninstall(self) -> None:
        self._helm.uninstall(NAME, timeout=int(120 * PATIENCE))

    def await_pods(self, deadline_s: float = 300.0) -> None:
        """Until every Deployment and StatefulSet of the namespace is ready."""
        def unready() -> list[str]:
            sets = [*self.apps.list_namespaced_deployment(self.namespace).items,
                    *self.apps.list_namespaced_stateful_set(self.namespace).items]
            return [one.metadata.name for one in sets if (one.status.ready_replicas or 0) < one.spec.replicas]

        try:
            eventually(lambda: not unready(), "all pods are ready", deadline_s, every_s=1.0)
        except AssertionError as error:
            raise AssertionError(f"{error}: {unready()}\n{self.diagnosis()}") from None

    def clean(self) -> None:
        """Everything that was made goes, whatever state it is in."""
        self._helm.uninstall(NAME, ignore_not_found=True)
        for kind in ("drafterjobs", "draftendpoints"):
            with contextlib.suppress(ApiException):
                for one in self.objects(kind):
                    if one["metadata"].get("finalizers"):  # whoever would let it go is gone
                        self.custom.patch_namespaced_custom_object("eyrie.dev", "v1alpha1", self.namespace, kind,
                                                                   one["metadata"]["name"],
                                                                   {"metadata": {"finalizers": None}})
        self.core.delete_namespace(self.namespace)
        for name in self._volumes:
            self.core.delete_persistent_volume(name)
        self._chart.close()
        self._helm.close()

    # Custom resources.

    def apply(self, kind: str, name: str, spec: Mapping[str, Any]) -> None:
        plural = f"{kind.lower()}s"
        self.custom.create_namespaced_custom_object("eyrie.dev", "v1alpha1", self.namespace, plural, {
            "apiVersion": API, "kind": kind, "metadata": {"name": name}, "spec": dict(spec)})

    def objects(self, plural: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.custom.list_namespaced_custom_object(
            "eyrie.dev", "v1alpha1", self.namespace, plural)["items"]
        return found

    def object(self, plural: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.custom.get_namespaced_custom_object(
            "eyrie.dev", "v1alpha1", self.namespace, plural, name)
        return found

    def definitions(self) -> set[str]:
        return {one.metadata.name for one in self.extensions.list_custom_resource_definition().items
                if one.metadata.name in DEFINITIONS}

    # Asking.

    def ask(self, url: str, body: Any = None, *, method: str | None = None, headers: Mapping[str, str] | None = None,
            timeout_s: float = 60.0) -> Answer:
        """A request from inside the cluster."""
        asked = {"url": url, "body": body, "method": method or ("GET" if body is None else "POST"),
                 "headers": dict(headers or {}), "timeout_s": timeout_s}
        code, out = self.execute(self.pod("app=visitor"), [*self.programs.python, "-c", _ASK, json.dumps(asked)])
        assert code == 0, out
        return Answer(**json.loads(out))

    def rest(self, path: str, body: Any = None, *, method: str | None = None, base: str = "/v1alpha1") -> Answer:
        """A request to our API, as a client with its token."""
        token = self.secret(f"{NAME}-eyrie-api-token")["token"]
        return self.ask(f"http://{NAME}-eyrie-api{base}{path}", body, method=method,
                        headers={"authorization": f"Bearer {token}", "accept": "application/json"})

    def get_json(self, path: str) -> Any:
        """What the API answers, waited for: a pod of it may just have been killed."""
        def answered() -> Answer | None:
            answer = self.rest(path)
            return answer if answer.status == 200 else None

        return eventually(answered, f"GET {path} is answered", every_s=1.0).body

    def secret(self, name: str) -> dict[str, str]:
        data = self.core.read_namespaced_secret(name, self.namespace).data
        return {key: base64.b64decode(value).decode() for key, value in data.items()}

    def kubeflow(self, path: str) -> Any:
        """What Kubeflow's double answers."""
        answer = self.ask(f"http://{DOUBLE}:8888/apis/v2beta1{path}")
        assert answer.status == 200, answer.text
        return answer.body

    # Pods.

    def pods(self, selector: str) -> list[Any]:
        found: list[Any] = self.core.list_namespaced_pod(self.namespace, label_selector=selector).items
        return found

    def pod(self, selector: str) -> str:
        """The name of a running pod."""
        def running() -> str | None:
            return next((one.metadata.name for one in self.pods(selector)
                         if one.status.phase == "Running" and one.metadata.deletion_timestamp is None), None)

        return str(eventually(running, f"a pod of {selector} runs"))

    def part(self, component: str) -> str:
        return f"app.kubernetes.io/instance={NAME},app.kubernetes.io/component={component}"

    def execute(self, pod: str, command: list[str]) -> tuple[int, str]:
        """Run a command in a pod's first container: exit status, and what it said."""
        # A client of its own: while a stream is open, the library sends everything of that client through it.
        with client.ApiClient() as api:
            session = stream.stream(client.CoreV1Api(api).connect_get_namespaced_pod_exec, pod, self.namespace,
                                    command=command, stdout=True, stderr=True, stdin=False, tty=False,
                                    _preload_content=False)
            session.run_forever(timeout=600)
            out, err = session.read_stdout(timeout=1), session.read_stderr(timeout=1)
            code = session.returncode
            session.close()
        return (0 if code is None else int(code)), out if code == 0 else f"{out}\n{err}"

    def kill(self, pod: Any) -> None:
        """kill -9 of everything in the pod's containers."""
        killed = False
        for one in pod.status.container_statuses or ():
            for number in _processes((one.container_id or "").rpartition("/")[2]):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(number, signal.SIGKILL)
                    killed = True
        if not killed:
            self.core.delete_namespaced_pod(pod.metadata.name, self.namespace, grace_period_seconds=0)

    def restarted(self, before: Any) -> bool:
        """Whether the pod's containers, or another pod in its place, run again."""
        now = {one.metadata.uid: one for one in self.pods(",".join(
            f"{key}={value}" for key, value in before.metadata.labels.items()
            if key in ("app.kubernetes.io/instance", "app.kubernetes.io/component")))}
        same = now.get(before.metadata.uid)
        if same is None:
            return any(_ready(one) for one in now.values())
        counts = [one.restart_count for one in same.status.container_statuses or ()]
        counted = [one.restart_count for one in before.status.container_statuses or ()]
        return sum(counts) > sum(counted) and _ready(same)

    @contextlib.contextmanager
    def cut(self, store: str) -> Iterator[None]:
        """The bundled store is gone meanwhile, without a farewell; its volume stays."""
        name = f"{NAME}-eyrie-{store}"
        self._scale(name, 0)
        for pod in self.pods(self.part(store)):
            self.kill(pod)
        eventually(lambda: not self.pods(self.part(store)), f"{store} is gone", every_s=0.5)
        try:
            yield
        finally:
            self._scale(name, 1)
            eventually(lambda: any(_ready(one) for one in self.pods(self.part(store))), f"{store} is back", 180.0,
                       every_s=0.5)

    def _scale(self, name: str, replicas: int) -> None:
        self.apps.patch_namespaced_stateful_set_scale(name, self.namespace, {"spec": {"replicas": replicas}})

    def stored(self, prefix: str) -> list[str]:
        """Paths of the bucket's files under `prefix`, as the bundled S3 keeps them."""
        code, out = self.execute(self.pod(self.part("s3")), ["sh", "-c", f"find /data/eyrie/{prefix} -type f"])
        assert code == 0, out
        return [line.removeprefix("/data/eyrie/") for line in out.splitlines()]

    def diagnosis(self) -> str:
        """Why it does not work: states of pods and the last lines of each log, for the one who reads a failed test."""
        lines = []
        for pod in self.pods(""):
            lines.append(f"--- {pod.metadata.name}: {pod.status.phase}")
            for one in [*(pod.status.init_container_statuses or ()), *(pod.status.container_statuses or ())]:
                state = {key: value for key, value in one.state.to_dict().items() if value}
                lines.append(f"  {one.name}: ready {one.ready}, restarts {one.restart_count}, {state}")
                for previous in ([False, True] if one.restart_count else [False]):
                    with contextlib.suppress(ApiException):
                        lines.append(self.core.read_namespaced_pod_log(
                            pod.metadata.name, self.namespace, container=one.name, tail_lines=15, previous=previous))
        return "\n".join(lines)[-60_000:]


@contextlib.contextmanager
def installed(programs: Programs, directory: Path, values: Mapping[str, Any],
              around: Callable[[Release], None] = lambda _: None, chart: Path = CHART) -> Iterator[Release]:
    """The chart installed in a namespace of its own, with everything around it, and up; cleaned afterwards. What failed
    is printed.

    values   laid over those that every test needs
    around   called before the chart is installed
    """
    made = Release(programs, directory, chart)
    try:
        made.offer_volumes()
        made.start_double()
        made.start_visitor()
        around(made)
        made.install(values)
        made.await_pods()
        yield made
    except BaseException:
        print(made.diagnosis())
        raise
    finally:
        made.clean()


def _ready(pod: Any) -> bool:
    return any(one.type == "Ready" and one.status == "True" for one in pod.status.conditions or ())


def _processes(container: str) -> list[int]:
    """Processes of this machine that are in the container's cgroup; none where the node is another machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cgroup") if container else ():
        with contextlib.suppress(OSError):
            if container in path.read_text():
                found.append(int(path.parent.name))
    return found
