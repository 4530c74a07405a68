"""What is sent to trackers: each point once, in order; what a tracker lacks is said before training, and one that fails
or hangs is left out within a limited time."""

import socket
import time
from importlib import import_module
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from eyrie_api.errors import InvalidInput
from eyrie_workers.stage_program import Stage
from eyrie_workers.training import trackers
from eyrie_workers.training.trackers import Trackers, recorded_metrics, require_trackers, shown
from tests.servers.mlflow_server import mlflow_server
from tests.waiting import wait_for
from tests.workers.events import stage_records


def record(stage: Stage, *steps: int, names: tuple[str, ...] = ("loss", "accuracy")) -> None:
    for step in steps:
        stage.progress(step, None, "tokens")
        for name in names:
            stage.metric(name, step, float(step))


def points(directory: Path, resumed_from: int) -> list[tuple[int, str]]:
    return [(point.step, point.name) for point in recorded_metrics(directory / "events.jsonl", resumed_from)]


def test_a_training_that_begins_has_no_earlier_points(tmp_path: Path) -> None:
    assert points(tmp_path, 0) == []
    record(Stage(tmp_path, quiet=True), 1, 2)
    assert points(tmp_path, 0) == []


def test_steps_that_a_resumed_training_repeats_are_no_earlier_points_and_half_a_line_is_none(tmp_path: Path) -> None:
    stage = Stage(tmp_path, quiet=True)
    record(stage, 1, 2, 3)
    record(stage, 4, names=("loss",))  # killed in the middle of a step; the last save was after step 2
    whole = (tmp_path / "events.jsonl").read_bytes()
    (tmp_path / "events.jsonl").write_bytes(whole[:-10])
    assert points(tmp_path, 2) == [(1, "loss"), (1, "accuracy"), (2, "loss"), (2, "accuracy")]


def test_a_record_of_several_interrupted_runs_is_one_series(tmp_path: Path) -> None:
    stage = Stage(tmp_path, quiet=True)
    record(stage, 1, 2, 3, 4, names=("loss",))
    record(stage, 3, 4, 5, 6, names=("loss",))
    assert points(tmp_path, 5) == [(step, "loss") for step in (1, 2, 3, 4, 5)]


@pytest.mark.parametrize(("name", "environment", "said", "hint"), [
    ("mlflow", {}, "MLFLOW_TRACKING_URI is not set", "set it where the training runs"),
    ("mlflow", {"MLFLOW_TRACKING_URI": "https://someone:secret@tracking.example/path"}, "contains a user or a password",
     "MLFLOW_TRACKING_PASSWORD"),
    ("wandb", {"HOME": "/nonexistent"}, "WANDB_API_KEY is not set", "WANDB_MODE=offline"),
])
def test_a_server_or_key_that_is_missing_is_refused_without_showing_a_secret(
        name: str, environment: dict[str, str], said: str, hint: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        require_trackers((name,), environment)
    assert said in refused.value.message
    assert hint in (refused.value.hint or "")
    assert "secret" not in refused.value.message.replace("secret_variables", "")


def test_trackers_with_server_and_key_are_accepted() -> None:
    require_trackers(("mlflow", "wandb", "tensorboard"),
                     {"MLFLOW_TRACKING_URI": "https://tracking.example/a@b", "WANDB_API_KEY": "k"})


def test_an_error_is_shown_in_one_line_without_the_credentials_in_it() -> None:
    error = RuntimeError("401 for key\n  abcdef" + "x" * 1000)
    assert shown(error, {"WANDB_API_KEY": "abcdef"}).startswith("RuntimeError: 401 for key (WANDB_API_KEY)xxx")
    assert len(shown(error, {})) == 300


def begin(name: str, stage: Stage, *, resumed_from: int = 0) -> Trackers:
    return Trackers((name,), stage, key="k", job_id="job", candidate="c0", settings={"ttt_length": 3},
                    resumed_from=resumed_from)


def failures(directory: Path) -> list[str]:
    return [entry.message for entry in stage_records(directory / "events.jsonl") if entry.kind == "event"]


def test_tensorboard_shows_a_resumed_training_as_one_run(tmp_path: Path) -> None:
    stage = Stage(tmp_path, quiet=True)
    for resumed_from in (0, 2):
        sending = begin("tensorboard", stage, resumed_from=resumed_from)
        record(stage, resumed_from + 1, resumed_from + 2)
        sending.close(finished=resumed_from == 2)
    read = EventAccumulator(str(tmp_path / "trackers/tensorboard")).Reload()
    assert [event.step for event in read.Scalars("loss")] == [1, 2, 3, 4]
    assert failures(tmp_path) == []


def test_a_tracker_that_accepts_connections_and_never_answers_delays_the_start_by_its_limit_and_is_left_out(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_module("mlflow")  # takes longer than the limit: the server is what is waited for
    monkeypatch.setattr(trackers, "START_S", 0.5)
    stage = Stage(tmp_path, quiet=True)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{listening.getsockname()[1]}")
        began = time.monotonic()
        sending = begin("mlflow", stage)
        record(stage, 1)
        sending.close(finished=True)
        assert time.monotonic() - began < 10
    [failure] = failures(tmp_path)
    assert failure.startswith("mlflow: TimeoutError: no answer within 0.5 s")


@pytest.mark.slow
def test_a_tracker_that_goes_away_delays_no_step_and_is_reported_once_at_the_end(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient  # here, since every pytest worker would spend a second on it

    server = mlflow_server(tmp_path)
    server.start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    stage = Stage(tmp_path, quiet=True)
    try:
        sending = begin("mlflow", stage)
        record(stage, 1, 2)
        client = MlflowClient(f"http://127.0.0.1:{server.port}")
        [run] = client.search_runs([client.get_experiment_by_name("eyrie").experiment_id])  # type: ignore[union-attr]
        wait_for(lambda: [point.step for point in client.get_metric_history(run.info.run_id, "accuracy")] == [1, 2],
                 "both points are sent")
    finally:
        server.kill()
    began = time.monotonic()
    record(stage, *range(3, 50))
    assert time.monotonic() - began < 5
    sending.close(finished=True)
    [failure] = failures(tmp_path)
    assert failure.startswith("mlflow: MlflowException")
