"""Experiment trackers that a training is shown in: MLflow, Weights & Biases, TensorBoard.

None is enabled by default; a tracker's package is imported by the process that sends to it (`training.tracker_process`)
when a spec names it. Server and credentials come from the tracker's own environment variables (MLFLOW_TRACKING_URI,
WANDB_API_KEY, ...), never from a spec, and appear in no message.

A training is one run of a tracker, however often it was interrupted. The run is found again by `TrackedRun.key`. Rows
arrive in order of step, each resumed training sends them from the first one on, and a tracker writes those that it does
not have: a server is asked what it has, files are written again.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from pydantic import JsonValue

from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.model import Frozen

_SECRETS = ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
_MAX_ERROR = 300
"""Characters of an error that are shown."""

_MLFLOW_DEFAULTS = {
    # The sending process repeats a request by itself, from what the server has then.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class TrackedRun(Frozen):
    """What a tracker shows of one training."""

    key: str
    """The same for a training and whatever resumes it; letters and digits."""

    job_id: str
    candidate: str
    settings: dict[str, JsonValue]
    directory: str
    """For trackers that write files."""

    @property
    def name(self) -> str:
        """The run's name in the tracker."""
        return f"{self.job_id}/{self.candidate}"


class Row(Frozen):
    """All metrics of one step."""

    step: int
    time: datetime
    values: dict[str, float]


class Tracker(Protocol):
    """One destination of curves. Any method may raise anything: what a tracker's package raises."""

    def write(self, row: Row) -> None:
        """Write a row, unless the tracker has it. Rows come in order of step."""

    def close(self, *, finished: bool) -> None:
        """Flush, and end the run: finished, or interrupted and perhaps resumed later."""


class _Mlflow:
    def __init__(self, run: TrackedRun) -> None:
        for name, value in _MLFLOW_DEFAULTS.items():
            os.environ.setdefault(name, value)
        self._entities = import_module("mlflow.entities")
        self._client = import_module("mlflow").MlflowClient()
        experiment = os.environ.get("MLFLOW_EXPERIMENT_ID") or self._experiment(
            os.environ.get("MLFLOW_EXPERIMENT_NAME", "eyrie"))
        found = self._client.search_runs([experiment], f"tags.eyrie_training = '{run.key}'", max_results=1)
        self._last: dict[str, int] = {}
        """The last step of each metric that the server has."""

        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            for name in found[0].data.metrics:
                self._last[name] = max(one.step for one in self._client.get_metric_history(self._id, name))
        else:
            self._id = self._client.create_run(experiment, run_name=run.name, tags={
                "eyrie_training": run.key, "eyrie_job": run.job_id, "eyrie_candidate": run.candidate}).info.run_id
        if not found or not found[0].data.params:  # killed in between
            self._client.log_batch(self._id, params=[
                self._entities.Param(name, str(value)) for name, value in run.settings.items()])

    def _experiment(self, name: str) -> str:
        if (found := self._client.get_experiment_by_name(name)) is not None:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except import_module("mlflow.exceptions").MlflowException:
            # race: another candidate of the sweep has created it
            if (found := self._client.get_experiment_by_name(name)) is None:
                raise
            return str(found.experiment_id)

    def write(self, row: Row) -> None:
        new = {name: value for name, value in row.values.items() if self._last.get(name, -1) < row.step}
        if not new:
            return
        self._client.log_batch(self._id, metrics=[
            self._entities.Metric(name, value, round(row.time.timestamp() * 1000), row.step)
            for name, value in new.items()])
        self._last |= dict.fromkeys(new, row.step)

    def close(self, *, finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


class _Wandb:
    def __init__(self, run: TrackedRun) -> None:
        directory = Path(run.directory)
        # An offline run cannot be resumed; all its rows are in the new one, under the same id.
        for before in directory.glob(f"wandb/offline-run-*-{run.key}"):
            shutil.rmtree(before)
        wandb = import_module("wandb")
        offline = os.environ.get("WANDB_MODE") in ("offline", "dryrun")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "eyrie"), id=run.key, name=run.name, group=run.job_id,
            config={"job_id": run.job_id, "candidate": run.candidate, **run.settings}, dir=str(directory),
            resume=None if offline else "allow",
            # This process's output and load are not the training's.
            settings=wandb.Settings(console="off", x_disable_stats=True, disable_git=True, disable_code=True))

    def write(self, row: Row) -> None:
        if row.step >= self._run.step:  # of a resumed run: the step after the last one that the server has
            self._run.log(dict(row.values), step=row.step)

    def close(self, *, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class _Tensorboard:
    """Writes the event file itself: torch's SummaryWriter would load torch once more."""

    def __init__(self, run: TrackedRun) -> None:
        for before in Path(run.directory).glob("events.out.tfevents.*"):
            before.unlink()
        self._proto = import_module("tensorboard.compat.proto.event_pb2")
        self._summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._writer = import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter(run.directory)
        now = datetime.now(UTC).timestamp()
        # A TensorBoard that is running has read the deleted file: this removes what it has of it.
        self._writer.add_event(self._proto.Event(wall_time=now, step=0, session_log=self._proto.SessionLog(
            status=self._proto.SessionLog.START)))
        table = "\n".join(f"| {name} | {value} |" for name, value in {
            "job_id": run.job_id, "candidate": run.candidate, **run.settings}.items())
        self._writer.add_event(self._proto.Event(wall_time=now, step=0, summary=self._text(
            "settings", f"| | {run.name} |\n|---|---|\n{table}")))

    def _text(self, tag: str, text: str) -> Any:
        tensor = import_module("tensorboard.compat.proto.tensor_pb2").TensorProto
        types = import_module("tensorboard.compat.proto.types_pb2")
        metadata = import_module("tensorboard.plugins.text.metadata").create_summary_metadata(tag, "")
        return self._summary(value=[self._summary.Value(tag=tag, metadata=metadata, tensor=tensor(
            dtype=types.DT_STRING, string_val=[text.encode()]))])

    def write(self, row: Row) -> None:
        self._writer.add_event(self._proto.Event(wall_time=row.time.timestamp(), step=row.step, summary=self._summary(
            value=[self._summary.Value(tag=name, simple_value=value) for name, value in row.values.items()])))
        self._writer.flush()

    def close(self, *, finished: bool) -> None:
        self._writer.close()


_TRACKERS: dict[str, tuple[str, Callable[[TrackedRun], Tracker]]] = {
    "mlflow": ("mlflow-skinny", _Mlflow),
    "wandb": ("wandb", _Wandb),
    "tensorboard": ("tensorboard", _Tensorboard),
}
"""Name in a spec, which is that of the module -> distribution, constructor."""

_WHERE = "where the training runs (on a cluster: cluster.per_stage.train.secret_variables)"
_WANDB_CREDENTIALS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE")


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
            raise InvalidInput("train.trackers names mlflow, and MLFLOW_TRACKING_URI is not set",
                               f"set it {_WHERE}")
        if "@" in address.partition("://")[2].partition("/")[0]:  # MLflow prints its address
            raise InvalidInput("MLFLOW_TRACKING_URI contains a user or a password",
                               "give them as MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD")
    if "wandb" in names and not any(environment.get(one) for one in _WANDB_CREDENTIALS) and not Path(
            environment.get("NETRC") or Path(environment.get("HOME", "/")) / ".netrc").is_file():
        raise InvalidInput("train.trackers names wandb, and WANDB_API_KEY is not set",
                           f"set it {_WHERE}, or WANDB_MODE=offline to write files that `wandb sync` uploads")


def open_tracker(name: str, run: TrackedRun) -> Tracker:
    """The tracker of a training, its run begun or found again. Raises whatever the tracker's package raises."""
    _, make = _TRACKERS[name]
    return make(run)


def shown(error: Exception, environment: Mapping[str, str]) -> str:
    """A tracker's error in one line, without the credentials that its package may have put into it."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    for name in _SECRETS:
        if value := environment.get(name):
            text = text.replace(value, f"({name})")
    return text[:_MAX_ERROR]
