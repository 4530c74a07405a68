"""A run goes on from what its pods have become: retried within its policy, failed with words, ended when told to."""

# mypy: disable-error-code="untyped-decorator"

import base64
import io
import json
import tarfile
from datetime import UTC, datetime, timedelta
from typing import Any

from kfp import dsl

from tests.kubeflow import samples
from tests.kubeflow.interpreter import OUTPUT_FILE, Node, Pipeline, arguments_of
from tests.kubeflow.runs import Run, Runtime, advanced, begun, retried

START = datetime(2026, 1, 1, tzinfo=UTC)


class Driven:
    """A run, its pods as values, and a clock."""

    def __init__(self, pipeline: Any) -> None:
        given = samples.compiled(pipeline)
        self.pipeline = Pipeline.of(given)
        self.run = Run(run_id="r", display_name="one", experiment_id="e", pipeline_spec=given, created_at=START,
                       arguments=arguments_of(self.pipeline, {}))
        self.pods: dict[str, dict[str, Any]] = {}
        self.now = START
        self.deleted: list[str] = []
        self.within_s: list[int | None] = []

    def step(self, later_s: float = 1.0) -> list[str]:
        """Look once; (path, attempt) of the pods that started."""
        self.now += timedelta(seconds=later_s)
        self.run, starting, self.deleted = advanced(self.run, self.pipeline, self.pods, self.now)
        self.within_s = [one.within_s for one in starting]
        return [self._start(one.node) for one in starting]

    def _start(self, node: Node) -> str:
        begun(self.run, node, self.now)
        name = self.run.tasks[node.path].attempts[-1].pod
        self.pods[name] = {"metadata": {"name": name}, "status": {"phase": "Pending"}}
        return name

    def ends(self, pod: str, **outputs: Any) -> None:
        content = json.dumps({"parameterValues": outputs}).encode()
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            member = tarfile.TarInfo(OUTPUT_FILE[1:])
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        message = base64.b64encode(packed.getvalue()).decode()
        self.shows(pod, "Succeeded", terminated={"exitCode": 0, "message": message,
                                                 "startedAt": "2026-01-01T00:00:00Z",
                                                 "finishedAt": "2026-01-01T00:00:01Z"})

    def shows(self, pod: str, phase: str, **state: Any) -> None:
        self.pods[pod]["status"] = {"phase": phase, "containerStatuses": [{"state": state}]}


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
    assert driven.run.error == f"task count failed: pod {pod} ended with exit code 3 (Error): ValueError: no"


def test_a_pod_that_is_gone_is_made_again_as_often_and_as_late_as_the_policy_says() -> None:
    driven = Driven(patient)
    pods = driven.step()
    for wait_s in (10.0, 30.0):
        del driven.pods[pods[-1]]
        assert driven.step() == []
        assert driven.step(wait_s - 0.5) == []
        pods += driven.step(0.5)
        assert len(driven.pods) == 1
    assert len(set(pods)) == 3
    del driven.pods[pods[-1]]
    driven.step()
    assert driven.run.state is Runtime.FAILED
    assert "was deleted" in driven.run.error


def test_the_longest_backoff_counts_from_the_first_pod_and_ends_later_ones() -> None:
    driven = Driven(patient)
    (pod,) = driven.step()
    assert driven.within_s == [None]
    del driven.pods[pod]
    driven.step(3000.0)
    (pod,) = driven.step(10.0)
    assert driven.within_s == [3600 - 3010]
    del driven.pods[pod]
    driven.step(600.0)
    assert driven.run.state is Runtime.FAILED
    assert driven.run.error.endswith("(max duration limit exceeded)")


def test_without_a_policy_one_lost_pod_is_the_end() -> None:
    driven = Driven(samples.doubled)
    (pod,) = driven.step()
    del driven.pods[pod]
    driven.step()
    assert driven.run.state is Runtime.FAILED


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
    driven.pods[pod]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:02Z"
    driven.step()
    assert (driven.run.state, driven.deleted) == (Runtime.CANCELING, [])
    del driven.pods[pod]
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
