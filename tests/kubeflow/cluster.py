"""The double's door to Kubernetes: pods of tasks, and ConfigMaps in which runs are kept.

Rights it needs in its namespace: pods get, list, create, delete; configmaps get, list, create, update, delete. Real
Kubeflow keeps runs in MySQL and has Argo make pods from a Workflow; here one ConfigMap is one run (at most 1 MiB: the
compiled pipeline, arguments, outputs), and it owns the run's pods.
"""

import json
from collections.abc import Callable
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from tests.kubeflow.pods import RUN_LABEL
from tests.kubeflow.runs import Run

KIND_LABEL = "kubeflow-double/kind"
TIMEOUT_S = (5, 30)
"""To connect, to answer: a lost connection must not stand still."""


class Namespace:
    """What the double keeps and runs in its one namespace."""

    def __init__(self, name: str) -> None:
        self.name = name
        try:
            config.load_incluster_config()
        except config.ConfigException:
            config.load_kube_config()
        self._core = client.CoreV1Api()

    def pods(self) -> dict[str, dict[str, Any]]:
        """Every run's pods, by name."""
        listed = self._read(self._core.list_namespaced_pod, self.name, label_selector=RUN_LABEL)
        return {pod["metadata"]["name"]: pod for pod in listed["items"]}

    def make_pod(self, pod: dict[str, Any]) -> None:
        """Make it, unless it is there: then it was made before the double was killed."""
        try:
            self._core.create_namespaced_pod(self.name, pod, _request_timeout=TIMEOUT_S)
        except ApiException as error:
            if not _exists(error):
                raise

    def delete_pod(self, name: str) -> None:
        """End it, with its own grace period."""
        _unless_gone(lambda: self._core.delete_namespaced_pod(name, self.name, _request_timeout=TIMEOUT_S))

    def runs(self) -> dict[str, Run]:
        """Every run that is kept, by its id."""
        listed = self._read(self._core.list_namespaced_config_map, self.name, label_selector=f"{KIND_LABEL}=run")
        runs = (Run.model_validate_json(one["data"]["run"]) for one in listed["items"])
        return {run.run_id: run for run in runs}

    def keep_run(self, run: Run) -> None:
        """Write it down, new or again."""
        self._keep(_of_run(run.run_id), "run", {"run": run.model_dump_json()}, {RUN_LABEL: run.run_id})

    def owner(self, run_id: str) -> dict[str, Any]:
        """The run as an owner of its pods."""
        kept = self._read(self._core.read_namespaced_config_map, _of_run(run_id), self.name)
        return {"apiVersion": "v1", "kind": "ConfigMap", "name": _of_run(run_id), "uid": kept["metadata"]["uid"]}

    def forget_run(self, run_id: str) -> None:
        """Delete the run; its pods go with it."""
        _unless_gone(lambda: self._core.delete_namespaced_config_map(
            _of_run(run_id), self.name, _request_timeout=TIMEOUT_S))

    def experiments(self) -> dict[str, dict[str, Any]]:
        """Every experiment, by its id, in the API's words."""
        listed = self._read(self._core.list_namespaced_config_map, self.name, label_selector=f"{KIND_LABEL}=experiment")
        kept = [json.loads(one["data"]["experiment"]) for one in listed["items"]]
        return {one["experiment_id"]: one for one in kept}

    def keep_experiment(self, experiment: dict[str, Any]) -> None:
        """Write it down, new or again."""
        name = f"kfp-experiment-{experiment['experiment_id']}"
        self._keep(name, "experiment", {"experiment": json.dumps(experiment)}, {})

    def forget_experiment(self, experiment_id: str) -> None:
        """Delete it."""
        _unless_gone(lambda: self._core.delete_namespaced_config_map(
            f"kfp-experiment-{experiment_id}", self.name, _request_timeout=TIMEOUT_S))

    def _keep(self, name: str, kind: str, data: dict[str, str], labels: dict[str, str]) -> None:
        body = {"metadata": {"name": name, "labels": {KIND_LABEL: kind, **labels}}, "data": data}
        try:
            self._core.replace_namespaced_config_map(name, self.name, body, _request_timeout=TIMEOUT_S)
        except ApiException as error:
            if error.status != 404:
                raise
            self._core.create_namespaced_config_map(self.name, body, _request_timeout=TIMEOUT_S)

    def _read(self, call: Callable[..., Any], *args: Any, **more: Any) -> dict[str, Any]:
        """The server's own JSON: the client's models rename fields and cost time."""
        answer = call(*args, _preload_content=False, _request_timeout=TIMEOUT_S, **more)
        read: dict[str, Any] = json.loads(answer.data)
        return read


def _of_run(run_id: str) -> str:
    return f"kfp-run-{run_id}"


def _exists(error: ApiException) -> bool:
    return bool(error.status == 409 and json.loads(error.body or "{}").get("reason") == "AlreadyExists")


def _unless_gone(call: Callable[[], Any]) -> None:
    try:
        call()
    except ApiException as error:
        if error.status != 404:
            raise
