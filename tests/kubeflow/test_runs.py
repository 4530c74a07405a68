"""A run follows the state of its Jobs: retried within its policy, failed with a message, ended on request."""

# mypy: disable-error-code="untyped-decorator"

import base64
import io
import json
import tarfile
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from kfp import dsl

from tests.kubeflow import samples
from tests.kubeflow.double import rendered
from tests.kubeflow.interpreter import OUTPUT_FILE, Node, Pipeline, arguments_of
from tests.kubeflow.jobs import Found
from tests.kubeflow.runs import Run, Runtime, advanced, begun, retried

START = datetime(2026, 1, 1, tzinfo=UTC)


class Driven:
    """A run, its Jobs and their pods as values, and a clock. A Job's first pod is named as the Job, and `-x` more."""

    def __init__(self, pipeline: Any) -> None:
        given = samples.compiled(pipeline)
        self.pipeline = Pipeline.of(given)
        self.run = Run(run_id="r", display_name="one", experiment_id="e", pipeline_spec=given, created_at=START,
                       arguments=arguments_of(self.pipeline, {}))
        self.jobs: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, list[dict[str, Any]]] = {}
        self.now = START
        self.deleted: list[str] = []
        self.within_s: list[int | None] = []

    def step(self, later_s: float = 1.0) -> list[str]:
        """Look once; the Jobs that started."""
        self.now += timedelta(seconds=later_s)
        found = {name: Found(self.jobs.get(name), tuple(self.pods.get(name, ())))
                 for name in {*self.jobs, *self.pods}}
        self.run, starting, self.deleted = advanced(self.run, self.pipeline, found, self.now)
        self.within_s = [one.within_s for one in starting]
        return [self._start(one.node) for one in starting]

    def _start(self, node: Node) -> str:
        begun(self.run, self.pipeline, node, self.now)
        name = self.run.tasks[node.path].attempts[-1].job
        self.jobs[name] = {"metadata": {"name": name}, "status": {}}
        self.gets_a_pod(name)
        return name

    def gets_a_pod(self, job: str) -> None:
        pods = self.pods.setdefault(job, [])
        pods.append({"metadata": {"name": f"{job}{'-x' * (len(pods) + 1)}"}, "status": {"phase": "Pending"}})

    def loses_its_pod(self, job: str, grace_s: float | None = None) -> None:
        """At once, or it is being deleted and has so long."""
        if grace_s is None:
            self.pods[job].pop(0)
        else:
            self.pods[job][0]["metadata"]["deletionTimestamp"] = (self.now + timedelta(seconds=grace_s)).isoformat()

    def goes(self, job: str) -> None:
        self.pods.pop(job, None)
        del self.jobs[job]

    def ends(self, job: str, metadata: Mapping[str, Mapping[str, Any]] | None = None, **outputs: Any) -> None:
        """`metadata` of output artifacts by their names."""
        artifacts = {name: {"artifacts": [{"metadata": one}]} for name, one in (metadata or {}).items()}
        content = json.dumps({"parameterValues": outputs, "artifacts": artifacts}).encode()
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            member = tarfile.TarInfo(OUTPUT_FILE[1:])
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        message = base64.b64encode(packed.getvalue()).decode()
        self.shows(job, "Succeeded", terminated={"exitCode": 0, "message": message,
                                                 "startedAt": "2026-01-01T00:00:00Z",
                                                 "finishedAt": "2026-01-01T00:00:01Z"})

    def shows(self, job: str, phase: str, **state: Any) -> None:
        """The newest pod, and then the Job."""
        self.pods[job][-1]["status"] = {"phase": phase, "containerStatuses": [{"state": state}]}
        kind = {"Succeeded": "Complete", "Failed": "Failed"}.get(phase)
        if kind is not None:
            self.jobs[job]["status"] = {"conditions": [{"type": kind, "status": "True"}]}


@dsl.pipeline(name="patient")
def patient() -> None:
    samples.step().set_retry(2, backoff_duration="10s", backoff_factor=3.0)


def states(run: Run, path: str = "step") -> list[str]:
    return [one.state for one in run.tasks[path].history]


def test_a_run_goes_from_pending_over_running_to_its_outputs() -> None:
    driven = Driven(samples.doubled)
    (counted,) = driven.step()
    assert driven.run.state is Runtime.RUNNING
    driven.shows(counted, "Running", running={"startedAt": "2026-01-01T00:00:00Z"})
    assert driven.step() == []
    driven.ends(counted, Output=[1, 2])
    for pod, number in zip(driven.step(), (2, 4), strict=True):
        driven.ends(pod, Output=number)
    (totalled,) = driven.step()
    driven.ends(totalled, Output=6)
    driven.step()
    assert (driven.run.state, driven.run.outputs) == (Runtime.SUCCEEDED, {"Output": 6})
    assert driven.run.finished_at == driven.now
    assert states(driven.run, "count") == ["PENDING", "RUNNING", "SUCCEEDED"]


def test_looking_twice_starts_nothing_twice_and_a_run_read_back_is_the_same() -> None:
    driven = Driven(samples.doubled)
    driven.step()
    driven.step()
    driven.run = Run.model_validate_json(driven.run.model_dump_json())
    before = driven.run
    assert driven.step() == []
    assert driven.run == before


def test_a_failed_task_fails_the_run_with_its_last_words() -> None:
    driven = Driven(samples.doubled)
    (pod,) = driven.step()
    driven.shows(pod, "Failed", terminated={"exitCode": 3, "reason": "Error", "message": "ValueError: no"})
    driven.step()
    assert driven.run.state is Runtime.FAILED
    assert driven.run.error == f"task count failed: pod {pod}-x ended with exit code 3 (Error): ValueError: no"


def test_a_pod_that_has_failed_is_no_end_before_its_job_says_so() -> None:
    driven = Driven(samples.doubled)
    (job,) = driven.step()
    driven.pods[job][0]["status"] = {"phase": "Failed", "containerStatuses": [{"state": {}}]}
    driven.step()
    assert driven.run.state is Runtime.RUNNING
    driven.jobs[job]["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    driven.step()
    assert driven.run.state is Runtime.FAILED


def test_a_pod_that_is_gone_is_made_again_as_often_and_as_late_as_the_policy_says() -> None:
    driven = Driven(patient)
    pods = driven.step()
    for wait_s in (10.0, 30.0):
        driven.goes(pods[-1])
        assert driven.step() == []
        assert driven.step(wait_s - 0.5) == []
        pods += driven.step(0.5)
        assert len(driven.jobs) == 1
    assert len(set(pods)) == 3
    driven.goes(pods[-1])
    driven.step()
    assert driven.run.state is Runtime.FAILED
    assert "was deleted" in driven.run.error


def test_the_longest_backoff_counts_from_the_first_pod_and_ends_later_ones() -> None:
    driven = Driven(patient)
    (pod,) = driven.step()
    assert driven.within_s == [None]
    driven.goes(pod)
    driven.step(3000.0)
    (pod,) = driven.step(10.0)
    assert driven.within_s == [3600 - 3010]
    driven.goes(pod)
    driven.step(600.0)
    assert driven.run.state is Runtime.FAILED
    assert driven.run.error.endswith("(max duration limit exceeded)")


def test_without_a_policy_one_lost_pod_is_the_end() -> None:
    driven = Driven(samples.doubled)
    (pod,) = driven.step()
    driven.goes(pod)
    driven.step()
    assert driven.run.state is Runtime.FAILED


def test_a_job_that_makes_a_second_pod_is_deleted_and_tried_again_when_both_are_gone() -> None:
    driven = Driven(patient)
    (job,) = driven.step()
    driven.shows(job, "Running", running={"startedAt": "2026-01-01T00:00:00Z"})
    driven.step()
    driven.loses_its_pod(job, grace_s=30.0)
    driven.gets_a_pod(job)
    assert driven.step() == []
    assert driven.deleted == [job]
    driven.jobs[job]["metadata"]["deletionTimestamp"] = driven.now.isoformat()
    assert driven.step(30.0) == []
    assert driven.deleted == []
    driven.pods[job].pop()
    assert driven.step() == [], "its first pod is still there"
    driven.goes(job)
    driven.step()
    (again,) = driven.step(10.0)
    assert again != job
    driven.ends(again, Output="done")
    driven.step()
    assert driven.run.state is Runtime.SUCCEEDED
    assert [one.problem for one in driven.run.tasks["step"].attempts] == [f"pod {job}-x was deleted", ""]


def test_a_pod_that_vanished_is_missed_before_its_job_makes_another() -> None:
    driven = Driven(patient)
    (job,) = driven.step()
    driven.step()
    driven.loses_its_pod(job)
    assert driven.step() == []
    assert driven.deleted == [job]


def test_a_pod_on_a_lost_node_is_not_waited_for_for_ever() -> None:
    driven = Driven(patient)
    (job,) = driven.step()
    driven.loses_its_pod(job, grace_s=30.0)
    driven.step()
    driven.jobs[job]["metadata"]["deletionTimestamp"] = driven.now.isoformat()
    assert driven.step(80.0) == []
    assert driven.step(20.0) == []
    assert len(driven.step(10.0)) == 1


def test_what_a_second_pod_has_finished_meanwhile_is_taken() -> None:
    driven = Driven(patient)
    (job,) = driven.step()
    driven.step()
    driven.gets_a_pod(job)
    driven.loses_its_pod(job)
    driven.ends(job, Output="done")
    driven.step()
    assert driven.run.state is Runtime.SUCCEEDED
    assert driven.run.tasks["step"].attempts[-1].pod == f"{job}-x-x"


def test_outputs_that_cannot_be_read_fail_the_task() -> None:
    driven = Driven(samples.doubled)
    (pod,) = driven.step()
    driven.ends(pod)
    driven.step()
    assert "put out no parameter 'Output'" in driven.run.error


def test_a_terminated_run_waits_for_its_pods_and_has_failed() -> None:
    driven = Driven(patient)
    (pod,) = driven.step()
    driven.shows(pod, "Running", running={"startedAt": "2026-01-01T00:00:00Z"})
    driven.run.becomes(Runtime.CANCELING, driven.now)
    driven.step()
    assert (driven.run.state, driven.deleted) == (Runtime.CANCELING, [pod])
    driven.jobs[pod]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:02Z"
    driven.step()
    assert (driven.run.state, driven.deleted) == (Runtime.CANCELING, [])
    driven.goes(pod)
    assert driven.step() == []
    assert [one.state for one in driven.run.history] == ["RUNNING", "CANCELING", "FAILED"]
    assert states(driven.run)[-1] == "FAILED"


def test_a_retried_run_starts_again_what_had_not_ended_well_and_nothing_else() -> None:
    driven = Driven(samples.doubled)
    (counted,) = driven.step()
    driven.ends(counted, Output=[1, 2])
    first, second = driven.step()
    driven.ends(first, Output=2)
    driven.shows(second, "Failed", terminated={"exitCode": 1})
    driven.step()
    assert driven.run.state is Runtime.FAILED
    driven.run = retried(driven.run, driven.now)
    (again,) = driven.step()
    assert again not in (first, second)
    driven.ends(again, Output=4)
    assert len(driven.step()) == 1


def test_the_api_names_the_artifacts_of_tasks_and_the_next_task_gets_what_was_put_out() -> None:
    driven = Driven(samples.fitted)
    (gathered,) = driven.step()
    driven.ends(gathered, {"rows": {"rows": 3}}, Output="gathered")
    for number, job in enumerate(driven.step(), 1):
        driven.ends(job, {"model": {"number": number}}, Output=number)
    (judged,) = driven.step()
    driven.ends(judged, {"figures": {"tau": 2.5}}, Output=2)
    driven.step()
    driven.run = Run.model_validate_json(driven.run.model_dump_json())
    assert driven.run.state is Runtime.SUCCEEDED
    (figures,) = driven.run.tasks["judge"].artifacts["figures"]
    assert figures == {"name": "figures", "type": {"schemaTitle": "system.Metrics", "schemaVersion": "0.0.1"},
                       "uri": "minio://mlpipeline/v2/artifacts/fitted/r/judge/figures", "metadata": {"tau": 2.5}}
    tasks = {one["display_name"]: one for one in rendered(driven.run)["run_details"]["task_details"]}
    (rows,) = tasks["gather"]["outputs"]["rows"]["artifact_ids"]
    models = [tasks[f"for-loop-2/{number}/fit"]["outputs"]["model"]["artifact_ids"][0] for number in (0, 1)]
    assert tasks["for-loop-2/1/fit"]["inputs"] == {"rows": {"artifact_ids": [rows]}}
    assert tasks["judge"]["inputs"] == {"models": {"artifact_ids": models}}
    assert "inputs" not in tasks["gather"]
