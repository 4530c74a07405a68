"""The double's door to Kubernetes: Jobs of tasks and their pods, and ConfigMaps in which runs are kept.

Rights it needs in its namespace: jobs list, create, delete; pods list; configmaps get, list, create, update, delete.
Real Kubeflow keeps runs in MySQL and has Argo make pods from a Workflow; here one ConfigMap is one run (at most 1 MiB:
the compiled pipeline, arguments, outputs), and it owns the run's Jobs.
"""

import json
from collections.abc import Callable
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from tests.kubeflow.jobs import RUN_LABEL, Found
from tests.kubeflow.runs import Run

JOB_LABEL = "job-name"
"""On a Job's pods, by the Job controller of every version."""
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
        self._core, self._batch = client.CoreV1Api(), client.BatchV1Api()

    def jobs(self) -> dict[str, dict[str, Found]]:
        """The Jobs by their names, by their run's id. A Job that is gone is among them while it has pods."""
        # Jobs first: a pod that is listed then is there although its Job was listed before it existed.
        jobs = self._read(self._batch.list_namespaced_job, self.name, label_selector=RUN_LABEL)["items"]
        pods = self._read(self._core.list_namespaced_pod, self.name, label_selector=f"{RUN_LABEL},{JOB_LABEL}")["items"]
        found: dict[str, dict[str, Found]] = {}
        for job in jobs:
            found.setdefault(job["metadata"]["labels"][RUN_LABEL], {})[job["metadata"]["name"]] = Found(job)
        for pod in sorted(pods, key=lambda one: str(one["metadata"]["creationTimestamp"])):
            labels = pod["metadata"]["labels"]
            of_run = found.setdefault(labels[RUN_LABEL], {})
            known = of_run.get(labels[JOB_LABEL], Found(None))
            of_run[labels[JOB_LABEL]] = Found(known.job, (*known.pods, pod))
        return found

    def make_job(self, job: dict[str, Any]) -> None:
        """Make it, unless it is there: then it was made before the double was killed."""
        try:
            self._batch.create_namespaced_job(self.name, job, _request_timeout=TIMEOUT_S)
        except ApiException as error:
            if not _exists(error):
                raise

    def delete_job(self, name: str) -> None:
        """End its pods, with their own grace period; it goes after them."""
        _unless_gone(lambda: self._batch.delete_namespaced_job(
            name, self.name, propagation_policy="Foreground", _request_timeout=TIMEOUT_S))

    def runs(self) -> dict[str, Run]:
        """Every run that is kept, by its id."""
        listed = self._read(self._core.list_namespaced_config_map, self.name, label_selector=f"{KIND_LABEL}=run")
        runs = (Run.model_validate_json(one["data"]["run"]) for one in listed["items"])
        return {run.run_id: run for run in runs}

    def keep_run(self, run: Run) -> None:
        """Write it down, new or again."""
        self._keep(_of_run(run.run_id), "run", {"run": run.model_dump_json()}, {RUN_LABEL: run.run_id})

    def owner(self, run_id: str) -> dict[str, Any]:
        """The run as an owner of its Jobs."""
        kept = self._read(self._core.read_namespaced_config_map, _of_run(run_id), self.name)
        return {"apiVersion": "v1", "kind": "ConfigMap", "name": _of_run(run_id), "uid": kept["metadata"]["uid"]}

    def forget_run(self, run_id: str) -> None:
        """Delete the run; its Jobs go with it, and their pods with them."""
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
