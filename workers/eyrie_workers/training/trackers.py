"""Experiment trackers that a training run is shown in: MLflow, Weights & Biases, TensorBoard.

None is enabled by default; a tracker's package is imported when a spec names it. Server and credentials come from the
tracker's own environment variables (MLFLOW_TRACKING_URI, WANDB_API_KEY, ...), never from a spec, and appear in no
message.

No step waits for a tracker: each sends in its own background (MLflow's asynchronous logging, W&B's service, the thread
of TensorBoard's writer). What does wait, the start and the end of a run, has a limited time. A tracker that fails or
hangs is reported once (`TrackerFailed`) and left out.

A training run is one run of a tracker, however often it was interrupted: it is looked up by its key. A resumed run
first sends the recorded metrics of the steps that it does not repeat, and a tracker takes what it lacks: a server is
asked what it has, files are written again. A tracker that was unavailable then gets everything.
"""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from eyrie_api.contract.records import MetricRecord
from eyrie_api.errors import InvalidInput
from eyrie_workers.catalog import TRACKERS_DIR
from eyrie_workers.stage_program import Stage

START_S = 30.0
END_S = 60.0
_INTERRUPTED_END_S = 5.0
"""The end where the run was interrupted: a pod that is stopped has 30 s, and uploads its state in them."""

_SECRETS = ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
_WANDB_CREDENTIALS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE")
_WHERE = "where the training runs (on a cluster: cluster.per_stage.train.secret_variables)"
_MLFLOW_DEFAULTS = {
    # Requests under way hold up the program's exit, so they end soon: three tries within about 40 s.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_ASYNC_LOGGING_BUFFERING_SECONDS": "1",  # one request for the metrics of a second
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class TrackedRun(NamedTuple):
    """What a tracker shows of one training run. `settings` has the job's id and the candidate too."""

    key: str
    job_id: str
    candidate: str
    settings: Mapping[str, object]
    directory: Path


class Tracker(NamedTuple):
    """One destination of curves. Either call may raise anything: what the tracker's package raises."""

    log: Callable[[MetricRecord], object]
    """Send a point unless the tracker has it; does not wait. Points come in order of step."""

    close: Callable[[bool], object]
    """Wait until everything is sent, and end the run: finished (True), or interrupted and perhaps resumed later."""


def _mlflow(run: TrackedRun) -> Tracker:
    for variable, value in _MLFLOW_DEFAULTS.items():
        os.environ.setdefault(variable, value)
    mlflow = import_module("mlflow")
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)  # it would log each batch that fails
    client, batches = mlflow.MlflowClient(), list[Any]()
    experiment = os.environ.get("MLFLOW_EXPERIMENT_ID") or mlflow.set_experiment(
        os.environ.get("MLFLOW_EXPERIMENT_NAME", "eyrie")).experiment_id
    runs = client.search_runs([experiment], f"tags.eyrie_training = '{run.key}'", max_results=1)
    shown_run = runs[0] if runs else client.create_run(experiment, run_name=f"{run.job_id}/{run.candidate}", tags={
        "eyrie_training": run.key, "eyrie_job": run.job_id, "eyrie_candidate": run.candidate})
    run_id = shown_run.info.run_id
    client.update_run(run_id, status="RUNNING")
    last = {name: max(point.step for point in client.get_metric_history(run_id, name))
            for name in shown_run.data.metrics}  # the last step of each metric that the server has
    batches += [client.log_param(run_id, name, value, synchronous=False) for name, value in run.settings.items()]

    def log(point: MetricRecord) -> None:
        if point.step > last.get(point.name, -1):
            batches.append(client.log_metric(run_id, point.name, point.value, round(point.time.timestamp() * 1000),
                                             point.step, synchronous=False))

    def close(finished: bool) -> None:
        for batch in batches:
            batch.wait()  # raises what sending it raised
        client.set_terminated(run_id, "FINISHED" if finished else "KILLED")

    return Tracker(log, close)


def _wandb(run: TrackedRun) -> Tracker:
    # An offline run cannot be resumed; all its points are in the new one, under the same id.
    for before in run.directory.glob(f"wandb/offline-run-*-{run.key}"):
        shutil.rmtree(before)
    wandb = import_module("wandb")
    shown_run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "eyrie"), id=run.key, name=f"{run.job_id}/{run.candidate}",
        group=run.job_id, config=dict(run.settings), dir=str(run.directory),
        resume=None if os.environ.get("WANDB_MODE") in ("offline", "dryrun") else "allow",
        reinit="create_new",  # a sweep has several runs in one process
        settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True,
                                init_timeout=START_S, finish_timeout=END_S, finish_timeout_raises=True))
    first = shown_run.step  # of a resumed run: the step after the last one that the server has
    return Tracker(lambda point: point.step >= first and shown_run.log({point.name: point.value}, step=point.step),
                   lambda finished: shown_run.finish(exit_code=0 if finished else 1))


def _tensorboard(run: TrackedRun) -> Tracker:
    for before in run.directory.glob("events.out.tfevents.*"):
        before.unlink()
    # `purge_step`: a TensorBoard that is running has read the deleted file, and removes what it has of it.
    writer = import_module("torch.utils.tensorboard").SummaryWriter(run.directory, purge_step=0)
    writer.add_text("settings", f"| | {run.job_id}/{run.candidate} |\n|---|---|\n" + "\n".join(
        f"| {name} | {value} |" for name, value in run.settings.items()))
    return Tracker(lambda point: writer.add_scalar(point.name, point.value, point.step, point.time.timestamp()),
                   lambda finished: writer.close())


_TRACKERS = {"mlflow": ("mlflow-skinny", _mlflow), "wandb": ("wandb", _wandb),
             "tensorboard": ("tensorboard", _tensorboard)}
"""Name in a spec, which is that of the module -> distribution, and what opens it."""


def require_trackers(names: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raise InvalidInput where a tracker that a spec names is not installed, or lacks its server or credentials."""
    for name in names:
        distribution, _ = _TRACKERS[name]
        if find_spec(name) is None:
            raise InvalidInput(f"train.trackers names {name}, whose package {distribution} is not installed here",
                               f"pip install {distribution} (the extra `trackers` has all three), or leave {name} out")
    if "mlflow" in names:
        address = environment.get("MLFLOW_TRACKING_URI", "")
        if not address:
            raise InvalidInput("train.trackers names mlflow, and MLFLOW_TRACKING_URI is not set", f"set it {_WHERE}")
        if "@" in address.partition("://")[2].partition("/")[0]:  # MLflow prints its address
            raise InvalidInput("MLFLOW_TRACKING_URI contains a user or a password",
                               "give them as MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD")
    if "wandb" in names and not any(environment.get(variable) for variable in _WANDB_CREDENTIALS) and not Path(
            environment.get("NETRC") or Path(environment.get("HOME", "/")) / ".netrc").is_file():
        raise InvalidInput("train.trackers names wandb, and WANDB_API_KEY is not set",
                           f"set it {_WHERE}, or WANDB_MODE=offline to write files that `wandb sync` uploads")


def shown(error: Exception, environment: Mapping[str, str]) -> str:
    """A tracker's error in one line of at most 300 characters, without credentials that its package put into it."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    for name in _SECRETS:
        if value := environment.get(name):
            text = text.replace(value, f"({name})")
    return text[:300]


def _within(timeout_s: float, calls: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """What some calls return or raise, made side by side. A call that hangs is left behind, in a thread that ends with
    the process, and counts as a TimeoutError."""
    outcomes: dict[str, Any] = {}

    def attempt(name: str, call: Callable[[], Any]) -> None:
        try:
            outcomes[name] = call()
        except Exception as error:  # noqa: BLE001 - whatever a tracker's package raises ends no training run
            outcomes[name] = error

    threads = [threading.Thread(target=attempt, args=item, daemon=True) for item in calls.items()]
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return {name: outcomes.get(name, TimeoutError(f"no answer within {timeout_s:g} s")) for name in calls}


class Trackers:
    """The trackers of one training run, without those that have failed."""

    def __init__(self, names: Sequence[str], stage: Stage, *, key: str, job_id: str, candidate: str,
                 settings: Mapping[str, object], resumed_from: int) -> None:
        """Begin or find again the run of each tracker, and send what the stage has recorded and records from now on.

        key            the same for a training run and whatever resumes it; letters and digits
        resumed_from   steps done before this start
        """
        self._stage, self._trackers, opening = stage, dict[str, Tracker](), {}
        for name in names:
            directory = stage.out_dir / TRACKERS_DIR / name
            directory.mkdir(parents=True, exist_ok=True)
            opening[name] = partial(_TRACKERS[name][1], TrackedRun(
                key, job_id, candidate, {"job_id": job_id, "candidate": candidate, **settings}, directory))
        for name, outcome in _within(START_S, opening).items():
            if isinstance(outcome, Exception):
                self._report(name, outcome)
            else:
                self._trackers[name] = outcome
        for point in recorded_metrics(stage.out_dir / "events.jsonl", resumed_from):
            self._log(point)
        stage.on_metric = self._log

    def close(self, *, finished: bool) -> None:
        """The run records no more metrics: wait a limited time until everything is sent."""
        self._stage.on_metric = None
        closing = {name: partial(tracker.close, finished) for name, tracker in self._trackers.items()}
        for name, outcome in _within(END_S if finished else _INTERRUPTED_END_S, closing).items():
            if isinstance(outcome, Exception):
                self._report(name, outcome)

    def _log(self, point: MetricRecord) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(point)
            except Exception as error:  # noqa: BLE001 - as above
                del self._trackers[name]
                self._report(name, error)

    def _report(self, name: str, error: Exception) -> None:
        self._stage.event("TrackerFailed", f"{name}: {shown(error, os.environ)}; training continues without it, and "
                                           "the job's own record is complete", warning=True)


def recorded_metrics(record: Path, resumed_from: int) -> list[MetricRecord]:
    """The metrics recorded up to the step that a training run resumes from, in order of step.

    A killed run repeats the steps since its last save, with the same values: each point is returned once.
    """
    points: dict[tuple[int, str], MetricRecord] = {}
    for line in record.read_bytes().splitlines() if record.is_file() and resumed_from else ():
        try:
            point = MetricRecord.model_validate_json(line)
        except ValidationError:
            continue  # another kind of record
        if point.step <= resumed_from:
            points[point.step, point.name] = point
    return sorted(points.values(), key=lambda point: point.step)
