"""The double of the Kubeflow Pipelines backend on a cluster: real clients, real Jobs, real deaths.

The double itself runs beside the test here; that it also runs in a pod is the walk's concern.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kfp
import kfp_server_api
import pytest
import yaml

from eyrie_api.processes import free_port
from eyrie_operator.cluster.client import Cluster
from tests.cluster.patience import eventually
from tests.cluster.programs import Programs, programs
from tests.kubeflow import samples

DEADLINE_S = 180.0
"""For a run of a few pods on a crowded machine."""


@dataclass
class Double:
    """The double as a process, and the real client before it."""

    namespace: str
    port: int
    log: Path
    image: str
    start: Callable[[], "subprocess.Popen[bytes]"]
    process: "subprocess.Popen[bytes]"

    def __post_init__(self) -> None:
        configuration = kfp_server_api.Configuration(host=f"http://127.0.0.1:{self.port}")
        configuration.retries = False
        client = kfp_server_api.ApiClient(configuration)
        self.runs = kfp_server_api.RunServiceApi(client)
        self.experiments = kfp_server_api.ExperimentServiceApi(client)
        self.health = kfp_server_api.HealthzServiceApi(client)

    def answers(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"the double ended:\n{self.log.read_text()}")
        with socket.socket() as probe:
            probe.settimeout(5)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def restart(self) -> None:
        """Kill it as the kernel does, and start it again."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)
        self.process = self.start()
        eventually(self.answers, "the double answers again")

    def run(self, pipeline: Any, name: str = "a-run", **arguments: Any) -> str:
        """The id of a new run."""
        wanted = kfp_server_api.V2beta1Run(
            display_name=name, pipeline_spec=samples.compiled(pipeline, self.image),
            runtime_config=kfp_server_api.V2beta1RuntimeConfig(parameters=arguments))
        return str(self.runs.run_service_create_run(wanted).run_id)

    def ended(self, run_id: str) -> Any:
        """The run, once it has ended."""
        def over() -> Any:
            run = self.runs.run_service_get_run(run_id)
            return run if run.state in ("SUCCEEDED", "FAILED", "CANCELED") else None

        return eventually(over, f"run {run_id} ends\n{self.log.read_text()}", DEADLINE_S, every_s=0.5)

    def runs_now(self, run_id: str, task: str) -> str:
        """The name of the pod in which a task runs."""
        def running() -> str | None:
            found = self.task(run_id, task)
            return found.pod_name if found is not None and found.state == "RUNNING" else None

        return str(eventually(running, f"task {task} runs", DEADLINE_S))

    def task(self, run_id: str, name: str) -> Any:
        details = self.runs.run_service_get_run(run_id).run_details.task_details
        return next((one for one in details if one.display_name == name), None)


@contextmanager
def doubling(namespace: str, home: Path, own: Programs, env: Mapping[str, str] | None = None) -> Iterator[Double]:
    """A double for one namespace, whose pods find this machine's programs and have `env` besides. Files of artifacts
    lie in `home/objects` of the node."""
    port = free_port()
    result = dict(env or {})
    if own.on_host:
        result["PATH"] = f"{Path(own.python[0]).parent}:/usr/bin:/bin"
    patch = home / "pod-patch.yaml"
    patch.write_text(yaml.safe_dump({
        "spec": {"volumes": [*own.volumes(), {"name": "objects", "hostPath": {
            "path": str(home / "objects"), "type": "DirectoryOrCreate"}}]},
        "container": {"env": [{"name": name, "value": value} for name, value in result.items()],
                      "volumeMounts": [*own.mounts(), {"name": "objects", "mountPath": "/minio"}]}}))
    log = home / "double.log"

    def start() -> "subprocess.Popen[bytes]":
        argv = [sys.executable, "-m", "tests.kubeflow.double", "--namespace", namespace, "--port", str(port),
                "--pod-patch", str(patch), "--every", "0.2"]
        with log.open("ab") as out:
            return subprocess.Popen(argv, stdout=out, stderr=out, cwd=Path(__file__).parents[2], env=dict(os.environ))

    one = Double(namespace, port, log, own.image_of("operator"), start, start())
    try:
        eventually(one.answers, "the double answers")
        yield one
    finally:
        one.process.kill()
        one.process.wait(30)


@pytest.fixture
def double(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[Double]:
    with doubling(namespace, tmp_path, programs()) as one:
        yield one


def pods_of(cluster: Cluster, namespace: str) -> list[str]:
    return [one["metadata"]["name"] for one in cluster.list_all("v1", "Pod", namespace)]


def jobs_of(cluster: Cluster, namespace: str) -> list[str]:
    return [one["metadata"]["name"] for one in cluster.list_all("batch/v1", "Job", namespace)]


def test_a_pipeline_with_a_loop_runs_through_in_jobs_by_kfps_own_client(double: Double, tmp_path: Path) -> None:
    package = tmp_path / "doubled.yaml"
    both = samples.compiled(samples.doubled, double.image)
    package.write_text(yaml.safe_dump(both["pipeline_spec"]))
    client = kfp.Client(host=f"http://127.0.0.1:{double.port}")
    made = client.create_run_from_pipeline_package(str(package), {"num": 2}, run_name="one", experiment_name="tried")
    run = client.wait_for_run_completion(made.run_id, timeout=DEADLINE_S, sleep_duration=1)
    assert run.state == "SUCCEEDED", run
    tasks = {one.display_name: one for one in run.run_details.task_details}
    assert set(tasks) == {"root", "count", "for-loop-1/0/double", "for-loop-1/1/double", "total"}
    assert {one.state for one in tasks.values()} == {"SUCCEEDED"}
    assert all(one.start_time <= one.end_time for one in tasks.values())
    pods = Cluster().list_all("v1", "Pod", double.namespace)
    assert {one["metadata"]["ownerReferences"][0]["kind"] for one in pods} == {"Job"}
    assert len(pods) == len(jobs_of(Cluster(), double.namespace)) == 4, "one Job per task, one pod per Job"
    kept = yaml.safe_load(Cluster().get("v1", "ConfigMap", double.namespace, f"kfp-run-{made.run_id}")["data"]["run"])
    assert kept["outputs"] == {"Output": 2}
    assert [one.state for one in run.state_history] == ["PENDING", "RUNNING", "SUCCEEDED"]
    assert client.get_experiment(experiment_name="tried").experiment_id == run.experiment_id


def test_a_failed_task_fails_the_run_in_its_own_words_and_lets_what_runs_finish(double: Double) -> None:
    run_id = double.run(samples.doomed)
    run = double.ended(run_id)
    assert run.state == "FAILED"
    assert "task fail failed" in run.error.message
    assert "exit code 3 (Error): out of luck" in run.error.message
    assert "this double of the backend carries 4096" in run.error.message
    states = {one.display_name: one.state for one in run.run_details.task_details}
    assert states == {"root": "FAILED", "fail": "FAILED", "say": "FAILED", "nap": "SUCCEEDED"}


def test_a_terminated_run_takes_its_pods_with_it(cluster: Cluster, double: Double) -> None:
    run_id = double.run(samples.rested, seconds=600)
    pod = double.runs_now(run_id, "nap")
    double.runs.run_service_terminate_run(run_id)
    assert double.runs.run_service_get_run(run_id).state in ("CANCELING", "FAILED")
    run = double.ended(run_id)
    assert [one.state for one in run.state_history] == ["PENDING", "RUNNING", "CANCELING", "FAILED"]
    eventually(lambda: pod not in pods_of(cluster, double.namespace), "the pod is gone", DEADLINE_S)
    eventually(lambda: len(jobs_of(cluster, double.namespace)) == 1, "of its Jobs only the finished one is left")
    assert double.task(run_id, "step-2") is None
    with pytest.raises(kfp_server_api.ApiException) as refused:
        double.runs.run_service_terminate_run(run_id)
    assert refused.value.status == 400


def test_a_double_killed_half_way_goes_on_where_it_was(cluster: Cluster, double: Double) -> None:
    run_id = double.run(samples.rested, seconds=10)
    pod = double.runs_now(run_id, "nap")
    before = double.runs.run_service_get_run(run_id)
    double.restart()
    run = double.ended(run_id)
    assert run.state == "SUCCEEDED", run
    assert (run.display_name, run.created_at) == (before.display_name, before.created_at)
    assert double.task(run_id, "nap").pod_name == pod
    assert len(pods_of(cluster, double.namespace)) == len(jobs_of(cluster, double.namespace)) == 3


def test_a_pod_deleted_half_way_is_tried_again(cluster: Cluster, double: Double) -> None:
    run_id = double.run(samples.rested, seconds=10)
    pod = double.runs_now(run_id, "nap")
    cluster.delete("v1", "Pod", double.namespace, pod)
    run = double.ended(run_id)
    assert run.state == "SUCCEEDED", run
    nap = double.task(run_id, "nap")
    assert nap.pod_name != pod
    lost, last = (one.pod_name for one in nap.child_tasks)
    assert (lost, last) == (pod, nap.pod_name), "one lost pod is one attempt gone"
    assert len(nap.executor_detail.failed_main_jobs) == 1
    assert pod.startswith(nap.executor_detail.failed_main_jobs[0])
    eventually(lambda: len(jobs_of(cluster, double.namespace)) == 3, "the Job that lost its pod went with it")


def test_a_failed_run_can_be_retried_and_a_deleted_one_takes_its_pods(cluster: Cluster, double: Double) -> None:
    run_id = double.run(samples.doomed)
    double.ended(run_id)
    double.runs.run_service_retry_run(run_id)
    run = double.ended(run_id)
    assert [one.state for one in run.state_history].count("FAILED") == 2
    double.runs.run_service_delete_run(run_id)
    eventually(lambda: not jobs_of(cluster, double.namespace) + pods_of(cluster, double.namespace),
               "the run's Jobs and their pods are gone", DEADLINE_S)
    with pytest.raises(kfp_server_api.ApiException) as gone:
        double.runs.run_service_get_run(run_id)
    assert gone.value.status == 404


def test_runs_and_experiments_are_found_by_name_and_paged(double: Double) -> None:
    health = double.health.healthz_service_get_healthz()
    assert health.multi_user is False
    made = double.experiments.experiment_service_create_experiment(
        kfp_server_api.V2beta1Experiment(display_name="tried"))
    with pytest.raises(kfp_server_api.ApiException) as twice:
        double.experiments.experiment_service_create_experiment(kfp_server_api.V2beta1Experiment(display_name="tried"))
    assert (twice.value.status, json.loads(twice.value.body)["code"]) == (409, 6)
    names = ["job-1", "job-2", "other"]
    ids = [double.run(samples.greeted(), name, who="x", secret="not-there") for name in names]

    def listed(key: str, operation: str | int, value: str, **more: Any) -> Any:
        wanted = json.dumps({"predicates": [{"key": key, "operation": operation, "string_value": value}]})
        return double.runs.run_service_list_runs(filter=wanted, **more)

    assert [one.run_id for one in listed("display_name", "EQUALS", "job-2").runs] == [ids[1]]
    assert [one.run_id for one in listed("display_name", 9, "job-", sort_by="display_name desc").runs] == ids[1::-1]
    first = listed("display_name", 9, "job-", page_size=1, sort_by="display_name asc")
    second = listed("display_name", 9, "job-", page_size=1, sort_by="display_name asc",
                    page_token=first.next_page_token)
    assert (first.total_size, first.runs[0].run_id, second.runs[0].run_id) == (2, ids[0], ids[1])
    assert second.next_page_token is None
    assert double.runs.run_service_list_runs(experiment_id=made.experiment_id).runs == []
    with pytest.raises(kfp_server_api.ApiException) as refused:
        double.run(samples.greeted(), "incomplete")
    assert refused.value.status == 400
    assert "['secret', 'who'] are required" in str(refused.value.body)
