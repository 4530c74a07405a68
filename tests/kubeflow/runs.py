"""One run of the double: what is kept of it, and what happens next. Pure: pods and the time go in, decisions come out.

A run is one document (`Run`), kept in a ConfigMap: what was asked, and of each container its attempts and its outputs.
An attempt is a pod. It is written down after its pod was made, under a name that follows from the run, the task and the
attempt's number: a double killed between the two makes the same pod again and is told that it exists.

A pod that fails or vanishes (deleted, evicted, its node lost) is one attempt gone; the task's `retryPolicy` says how
many more there are, and how long to wait. Without one there are none: that is the real backend's default too. (Argo
tries again after pods that failed, which a pod deleted with grace usually has, and not after pods that vanished.)
`backoffMaxDuration` is Argo's `maxDuration`, no bound of one wait: that long after the task's first pod began there are
no more attempts, and a second or later pod is ended then, however well it does. kfp's own default is an hour.

A terminated run is CANCELING while its pods end, and then FAILED: so ends the real backend's, whose Workflow has
failed; the API's CANCELED exists and is not reached. The real backend leaves `error` empty; here it names the task.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, Field

from tests.kubeflow.interpreter import Node, Pipeline, Refused, Seen, State, outputs_of, startable, walk
from tests.kubeflow.pods import pod_name, unpacked


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
    """One pod of a task."""

    pod: str
    created: datetime
    started: datetime | None = None
    ended: datetime | None = None
    problem: str = ""


class Task(BaseModel):
    """One container of the pipeline, from its first pod on."""

    path: str
    component: str
    state: Runtime = Runtime.PENDING
    attempts: list[Attempt] = Field(default_factory=list)
    forgiven: int = 0
    """Attempts before the run was last retried: they count no more."""
    outputs: dict[str, Any] = Field(default_factory=dict)
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
    """A pod to make."""

    node: Node
    attempt: int
    within_s: int | None = None
    """It is ended after that."""


def advanced(run: Run, pipeline: Pipeline, pods: Mapping[str, Mapping[str, Any]], now: datetime) \
        -> tuple[Run, list[Start], list[str]]:
    """(the run as it stands now, pods to make, pods to delete)."""
    run = run.model_copy(deep=True)
    for task in run.tasks.values():
        if not task.state.ended and len(task.attempts) > task.forgiven:
            _look(task, pipeline, pods, now)
            _give_up(task, _policy(pipeline, task.path), now, may_retry=run.state is not Runtime.CANCELING)
    if run.state is Runtime.CANCELING:
        return _cancelled(run, pods, now)
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
    return run, starting, []


def begun(run: Run, node: Node, now: datetime) -> None:
    """Write down that a pod was made for `node`."""
    task = run.tasks.setdefault(node.path, Task(path=node.path, component=node.component))
    task.attempts.append(Attempt(pod=pod_name(run.run_id, node.path, len(task.attempts)), created=now))
    task.becomes(Runtime.PENDING, now)


def refused(run: Run, node: Node, why: str, now: datetime) -> None:
    """Write down that no pod can be made for `node`."""
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
        return Seen(State.SUCCEEDED, task.outputs)
    if task.state.ended:
        return Seen(State.FAILED)
    # A retried run's task waits for its turn again.
    return Seen(State.READY if task.forgiven == len(task.attempts) else State.RUNNING)


def _look(task: Task, pipeline: Pipeline, pods: Mapping[str, Mapping[str, Any]], now: datetime) -> None:
    """What has become of the task's latest pod."""
    attempt = task.attempts[-1]
    if attempt.ended is not None:
        return
    pod = pods.get(attempt.pod)
    if pod is None:
        attempt.ended, attempt.problem = now, f"pod {attempt.pod} was deleted"
    else:
        containers = [one["state"] for one in pod.get("status", {}).get("containerStatuses", ())]
        container = containers[0] if containers else {}
        ended = container.get("terminated", {})
        started = ended.get("startedAt") or container.get("running", {}).get("startedAt")
        attempt.started = datetime.fromisoformat(started) if started else attempt.started
        phase = pod.get("status", {}).get("phase")
        if phase == "Succeeded":
            attempt.ended = _time(ended, now)
            try:
                task.outputs = outputs_of(pipeline, task.component, unpacked(ended.get("message", "")))
                task.becomes(Runtime.SUCCEEDED, now)
                return
            except (Refused, ValueError, OSError) as error:
                attempt.problem = f"its outputs cannot be read: {error}"
        elif phase == "Failed":
            attempt.ended = _time(ended, now)
            attempt.problem = _problem(pod, ended)
        elif "running" in container:
            task.becomes(Runtime.RUNNING, now)


def _give_up(task: Task, policy: Mapping[str, Any], now: datetime, *, may_retry: bool) -> None:
    """A task whose latest pod ended badly has failed, when it may not be tried again."""
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
    """Whether a task whose pod ended badly is to be tried again now."""
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


def _cancelled(run: Run, pods: Mapping[str, Mapping[str, Any]], now: datetime) \
        -> tuple[Run, list[Start], list[str]]:
    """A run that is being cancelled: its pods go, with their grace period; then it has failed."""
    alive = [name for name in _pods_of(run.tasks.values()) if name in pods
             and pods[name].get("status", {}).get("phase") not in ("Succeeded", "Failed")]
    if alive:
        return run, [], [name for name in alive if "deletionTimestamp" not in pods[name]["metadata"]]
    for task in run.tasks.values():
        if not task.state.ended:
            task.error = "the run was terminated"
            task.becomes(Runtime.FAILED, now)
    run.error = "the run was terminated"
    run.becomes(Runtime.FAILED, now)
    return run, [], []


def _pods_of(tasks: Iterable[Task]) -> list[str]:
    return [attempt.pod for task in tasks for attempt in task.attempts]
