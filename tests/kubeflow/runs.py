"""One run of the double: what is kept of it, and what happens next. Pure: Jobs and the time go in, decisions come out.

A run is one document (`Run`), kept in a ConfigMap: what was asked, and of each container its attempts and its outputs.
An attempt is a Job. It is written down after its Job was made, under a name that follows from the run, the task and the
attempt's number: a double killed between the two creates the same Job again and receives AlreadyExists.

How an attempt ended its Job's condition says, and its pod says why. A pod that fails or vanishes (deleted, evicted, its
node lost) is one attempt gone; the task's `retryPolicy` says how many more there are, and how long to wait. Without one
there are none: that is the real backend's default too. (Argo tries again after pods that failed, which a pod deleted
with grace usually has, and not after pods that vanished.)

An attempt has one pod. A Job whose pod is deleted fails on a newer Kubernetes; an older one (1.20) makes another pod
there and then, beside one that may still be saving its work. So a Job that has lost its pod is deleted, and the task is
tried again when all its pods are gone. Only what such a second pod has finished before anyone looked is taken.
`backoffMaxDuration` is Argo's `maxDuration`, no bound of one wait: that long after the task's first pod began there are
no more attempts, and a second or later pod is ended then, however well it does. kfp's own default is an hour.

A terminated run is CANCELING until its Jobs have ended, and then FAILED: so ends the real backend's, whose Workflow
has failed; the API's CANCELED exists and is not reached. The real backend leaves `error` empty; here it names the task.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, Field

from tests.kubeflow.interpreter import (
    Node,
    Pipeline,
    Refused,
    Seen,
    State,
    executor_input,
    merged_artifacts,
    outputs_of,
    startable,
    walk,
)
from tests.kubeflow.jobs import Found, artifacts_root, job_name, phase_of, unpacked


class Runtime(StrEnum):
    """States of runs and tasks, in the API's words."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELING = "CANCELING"

    @property
    def ended(self) -> bool:
        return self in (Runtime.SUCCEEDED, Runtime.FAILED)


class Change(BaseModel):
    """An entry of `state_history`."""

    update_time: datetime
    state: Runtime


class Attempt(BaseModel):
    """One Job of a task."""

    job: str
    pod: str = ""
    """Its pod, once there is one."""
    created: datetime
    started: datetime | None = None
    ended: datetime | None = None
    problem: str = ""


class Task(BaseModel):
    """One container of the pipeline, from its first Job on."""

    path: str
    component: str
    state: Runtime = Runtime.PENDING
    attempts: list[Attempt] = Field(default_factory=list)
    forgiven: int = 0
    """Attempts before the run was last retried: they count no more."""
    outputs: dict[str, Any] = Field(default_factory=dict)
    handed: dict[str, Any] = Field(default_factory=dict)
    """The executor input of its attempts: the artifacts that it was given, and those that it is to put out."""
    artifacts: dict[str, list[dict[str, Any]]] = Field(default_factory=dict)
    """Output artifacts, once it has ended well."""
    error: str = ""
    history: list[Change] = Field(default_factory=list)

    def becomes(self, state: Runtime, now: datetime) -> None:
        if state is not self.state or not self.history:
            self.state = state
            self.history.append(Change(update_time=now, state=state))


class Run(BaseModel):
    """All that is kept of a run."""

    run_id: str
    display_name: str
    experiment_id: str
    description: str = ""
    service_account: str = ""
    pipeline_root: str = ""
    pipeline_spec: dict[str, Any]
    """As it was given: the IR, or the IR and the platform's settings."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    arguments: dict[str, Any] = Field(default_factory=dict)
    """`parameters` with the pipeline's defaults."""
    created_at: datetime
    finished_at: datetime | None = None
    archived: bool = False
    state: Runtime = Runtime.PENDING
    history: list[Change] = Field(default_factory=list)
    error: str = ""
    tasks: dict[str, Task] = Field(default_factory=dict)
    outputs: dict[str, Any] = Field(default_factory=dict)

    def becomes(self, state: Runtime, now: datetime) -> None:
        if state is not self.state or not self.history:
            self.state = state
            self.history.append(Change(update_time=now, state=state))
            self.finished_at = now if state.ended else None


@dataclass(frozen=True)
class Start:
    """A Job to make."""

    node: Node
    attempt: int
    within_s: int | None = None
    """Its pod is ended after that."""


def advanced(run: Run, pipeline: Pipeline, found: Mapping[str, Found], now: datetime) \
        -> tuple[Run, list[Start], list[str]]:
    """(the run as it stands now, Jobs to make, Jobs to delete). `found`: the run's Jobs by their names."""
    run = run.model_copy(deep=True)
    deleting = []
    for task in run.tasks.values():
        if not task.state.ended and len(task.attempts) > task.forgiven:
            job = task.attempts[-1].job
            root = artifacts_root(pipeline, run.run_id, run.pipeline_root)
            if not _look(task, pipeline, root, found.get(job, Found(None)), now):
                deleting.append(job)
            _give_up(task, _policy(pipeline, task.path), now, may_retry=run.state is not Runtime.CANCELING)
    if run.state is Runtime.CANCELING:
        return _cancelled(run, found, now)
    tree = walk(pipeline, run.arguments, {path: _seen(task) for path, task in run.tasks.items()})
    if tree.state is State.SUCCEEDED:
        run.outputs = dict(tree.outputs)
        run.becomes(Runtime.SUCCEEDED, now)
        return run, [], []
    if tree.state is State.FAILED:
        failed = [task for task in run.tasks.values() if task.state is Runtime.FAILED]
        run.error = "; ".join(f"task {task.path} failed: {task.error}" for task in failed)
        run.becomes(Runtime.FAILED, now)
        return run, [], []
    run.becomes(Runtime.RUNNING, now)
    starting = [Start(node, len(run.tasks[node.path].attempts) if node.path in run.tasks else 0)
                for node in startable(tree)]
    for leaf in tree.leaves():
        tried = run.tasks.get(leaf.path)
        policy = leaf.task.get("retryPolicy", {})
        if tried is not None and _is_due(tried, policy, now):
            last = _no_more_after(tried, policy)
            within_s = None if last is None else max(1, int((last - now).total_seconds()))
            starting.append(Start(leaf, len(tried.attempts), within_s))
    return run, starting, deleting


def begun(run: Run, pipeline: Pipeline, node: Node, now: datetime) -> None:
    """Write down that a Job was made for `node`."""
    task = run.tasks.setdefault(node.path, Task(path=node.path, component=node.component))
    handed = executor_input(pipeline, node, artifacts_root(pipeline, run.run_id, run.pipeline_root))
    task.handed = {side: {"artifacts": handed[side].get("artifacts", {})} for side in ("inputs", "outputs")}
    task.attempts.append(Attempt(job=job_name(run.run_id, node.path, len(task.attempts)), created=now))
    task.becomes(Runtime.PENDING, now)


def refused(run: Run, node: Node, why: str, now: datetime) -> None:
    """Write down that no Job can be made for `node`."""
    task = run.tasks.setdefault(node.path, Task(path=node.path, component=node.component))
    task.error = why
    task.becomes(Runtime.FAILED, now)


def retried(run: Run, now: datetime) -> Run:
    """The run with a new chance for each task that did not end well."""
    run = run.model_copy(deep=True)
    for path, task in list(run.tasks.items()):
        if task.state is Runtime.SUCCEEDED:
            continue
        if not task.attempts:
            del run.tasks[path]
            continue
        task.forgiven = len(task.attempts)
        task.error = ""
        task.becomes(Runtime.PENDING, now)
    run.error = ""
    run.becomes(Runtime.RUNNING, now)
    return run


def _seen(task: Task) -> Seen:
    if task.state is Runtime.SUCCEEDED:
        return Seen(State.SUCCEEDED, task.outputs, task.artifacts)
    if task.state.ended:
        return Seen(State.FAILED)
    # A retried run's task waits for its turn again.
    return Seen(State.READY if task.forgiven == len(task.attempts) else State.RUNNING)


def _look(task: Task, pipeline: Pipeline, root: str, found: Found, now: datetime) -> bool:
    """See what has become of the task's latest Job. Whether that Job may stay."""
    attempt = task.attempts[-1]
    if attempt.ended is not None:
        return True
    condition = found.condition
    if condition.get("type") == "Complete":
        _succeed(task, pipeline, root, found, now)
    elif condition or found.deleted:
        if not found.alive(now):
            _fail(attempt, found, now)
    elif _has_lost_its_pod(attempt, found):
        attempt.problem = f"pod {attempt.pod or found.pods[0]['metadata']['name']} was deleted"
        return False
    elif found.pods:
        container = _note(attempt, found.pods[-1])
        if "running" in container:
            task.becomes(Runtime.RUNNING, now)
    return True


def _has_lost_its_pod(attempt: Attempt, found: Found) -> bool:
    """Whether its Job makes, or will make, another one."""
    names = [pod["metadata"]["name"] for pod in found.pods]
    deleted = any("deletionTimestamp" in pod["metadata"] for pod in found.pods)
    return deleted or len(names) > 1 or attempt.pod not in ("", *names)


def _note(attempt: Attempt, pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """Write down which pod it is and since when it runs; the state of its container."""
    containers = [one["state"] for one in pod.get("status", {}).get("containerStatuses", ())]
    container: Mapping[str, Any] = containers[0] if containers else {}
    started = (container.get("terminated") or container.get("running") or {}).get("startedAt")
    attempt.pod = pod["metadata"]["name"]
    attempt.started = datetime.fromisoformat(started) if started else attempt.started
    return container


def _succeed(task: Task, pipeline: Pipeline, root: str, found: Found, now: datetime) -> None:
    """Of a Job that is complete: the outputs its pod tells."""
    attempt = task.attempts[-1]
    pod = next((one for one in found.pods if phase_of(one) == "Succeeded"), None)
    ended = {} if pod is None else _note(attempt, pod).get("terminated", {})
    attempt.ended = _time(ended, now)
    try:
        files = unpacked(ended.get("message", ""))
        task.outputs = outputs_of(pipeline, task.component, files)
        task.artifacts = dict(merged_artifacts(task.handed, files, root))
        attempt.problem = ""
        task.becomes(Runtime.SUCCEEDED, now)
    except (Refused, ValueError, OSError) as error:
        attempt.problem = f"its outputs cannot be read: {error}"


def _fail(attempt: Attempt, found: Found, now: datetime) -> None:
    """Of a Job that failed or was deleted: why."""
    failed = [pod for pod in found.pods if phase_of(pod) == "Failed"]
    ended = _note(attempt, failed[-1]).get("terminated", {}) if failed else {}
    attempt.ended = _time(ended, now)
    if attempt.problem:
        return  # it had lost its pod
    if failed:
        attempt.problem = _problem(failed[-1], ended)
    elif found.condition:
        said = found.condition.get("message", "")
        attempt.problem = f"Job {attempt.job} failed ({found.condition.get('reason', 'Failed')}): {said}"
    else:
        attempt.problem = f"Job {attempt.job} was deleted"


def _give_up(task: Task, policy: Mapping[str, Any], now: datetime, *, may_retry: bool) -> None:
    """A task whose latest Job ended badly has failed, when it may not be tried again."""
    attempt = task.attempts[-1]
    if attempt.ended is None or task.state.ended:
        return
    last = _no_more_after(task, policy)
    retries = int(policy.get("maxRetryCount", 0)) if may_retry else 0
    if len(task.attempts) - task.forgiven > retries:
        task.error = attempt.problem
        task.becomes(Runtime.FAILED, now)
    elif last is not None and now > last:
        task.error = f"{attempt.problem} (max duration limit exceeded)"
        task.becomes(Runtime.FAILED, now)


def _time(ended: Mapping[str, Any], now: datetime) -> datetime:
    return datetime.fromisoformat(ended["finishedAt"]) if ended.get("finishedAt") else now


def _problem(pod: Mapping[str, Any], ended: Mapping[str, Any]) -> str:
    """Why a pod failed, with the last of what it said."""
    status = pod["status"]
    reason = status.get("reason") or ended.get("reason") or "Error"
    said = str(ended.get("message") or status.get("message") or "").strip()
    code = f" with exit code {ended['exitCode']}" if "exitCode" in ended else ""
    return f"pod {pod['metadata']['name']} ended{code} ({reason})" + (f": {said[-2000:]}" if said else "")


def _policy(pipeline: Pipeline, path: str) -> Mapping[str, Any]:
    """A container's retry policy. A loop's number in the path is no task."""
    dag: Mapping[str, Any] = pipeline.spec["root"]["dag"]
    task: Mapping[str, Any] = {}
    for name in path.split("/"):
        if name.isdigit() and "parameterIterator" in task:
            continue
        task = dag["tasks"][name]
        dag = pipeline.component(task["componentRef"]["name"]).get("dag", {})
    found: Mapping[str, Any] = task.get("retryPolicy", {})
    return found


def _no_more_after(task: Task, policy: Mapping[str, Any]) -> datetime | None:
    """When its attempts end for good."""
    if "backoffMaxDuration" not in policy:
        return None
    return task.attempts[task.forgiven].created + timedelta(seconds=_seconds(policy["backoffMaxDuration"]))


def _is_due(task: Task, policy: Mapping[str, Any], now: datetime) -> bool:
    """Whether a task whose Job ended badly is to be tried again now."""
    tries = len(task.attempts) - task.forgiven
    if task.state.ended or tries == 0:
        return False
    ended = task.attempts[-1].ended
    wait_s = _seconds(policy.get("backoffDuration", "0s")) * float(policy.get("backoffFactor", 2.0)) ** (tries - 1)
    return ended is not None and now >= ended + timedelta(seconds=wait_s)


def _seconds(duration: str) -> float:
    """Protobuf's JSON of a duration: `3s`, `0.5s`."""
    matched = re.fullmatch(r"([0-9.]+)s", duration)
    if matched is None:
        raise Refused(f"{duration!r} is not a duration")
    return float(matched.group(1))


def _cancelled(run: Run, found: Mapping[str, Found], now: datetime) -> tuple[Run, list[Start], list[str]]:
    """A run that is being cancelled: its Jobs go, their pods with their grace period; then it has failed."""
    ending = {name: one for name, one in found.items()
              if one.alive(now) or not (one.condition or one.deleted)}
    if ending:
        return run, [], [name for name, one in ending.items() if not one.deleted]
    for task in run.tasks.values():
        if not task.state.ended:
            task.error = "the run was terminated"
            task.becomes(Runtime.FAILED, now)
    run.error = "the run was terminated"
    run.becomes(Runtime.FAILED, now)
    return run, [], []
