"""What is sent to trackers: each row once, complete, in order; and what a tracker lacks is said before training."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from eyrie_api.errors import InvalidInput
from eyrie_workers.comparison.progress import stage_records
from eyrie_workers.stage_program import Stage
from eyrie_workers.training.tracker_process import Following, RecordedRows, TrackerProcess, start_trackers
from eyrie_workers.training.trackers import TrackedRun, require_trackers, shown
from tests.servers.mlflow_server import mlflow_server
from tests.servers.processes import Server
from tests.waiting import wait_for


def record(directory: Path, *steps: int, names: tuple[str, ...] = ("loss", "accuracy")) -> None:
    stage = Stage(directory, quiet=True)
    for step in steps:
        stage.progress(step, None, "tokens")
        for name in names:
            stage.metric(name, step, float(step))


def reader(directory: Path, *, resumed_from: int = 0) -> RecordedRows:
    path = directory / "events.jsonl"
    run = TrackedRun(key="k", job_id="job", candidate="c0", settings={}, directory=str(directory))
    return RecordedRows(Following(run=run, stage_dir=str(directory), resumed_from=resumed_from,
                                  recorded_bytes=path.stat().st_size if path.exists() else 0))


def steps(rows: RecordedRows, *, ended: bool = False) -> list[int]:
    return [row.step for row in rows.complete(ended=ended)]


def test_a_row_is_sent_when_the_next_step_begins_and_the_last_one_at_the_end(tmp_path: Path) -> None:
    rows = reader(tmp_path)
    assert steps(rows) == []
    record(tmp_path, 1, names=("loss",))
    assert steps(rows) == []
    record(tmp_path, 1, names=("accuracy",))
    record(tmp_path, 2)
    [row] = rows.complete(ended=False)
    assert (row.step, row.values) == (1, {"loss": 1.0, "accuracy": 1.0})
    assert steps(rows) == []
    assert steps(rows, ended=True) == [2]


def test_half_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    rows = reader(tmp_path)
    record(tmp_path, 1, 2)
    whole = (tmp_path / "events.jsonl").read_bytes()
    (tmp_path / "events.jsonl").write_bytes(whole[:-10])
    assert steps(rows) == [1]
    (tmp_path / "events.jsonl").write_bytes(whole)
    [row] = rows.complete(ended=True)
    assert row.values == {"loss": 2.0, "accuracy": 2.0}


def test_steps_that_a_resumed_training_repeats_are_sent_once_and_complete(tmp_path: Path) -> None:
    record(tmp_path, 1, 2, 3)
    record(tmp_path, 4, names=("loss",))  # killed in the middle of a step; the last save was after step 2
    rows = reader(tmp_path, resumed_from=2)
    assert steps(rows) == [1]
    record(tmp_path, 3, 4, 5)
    assert [(row.step, len(row.values)) for row in rows.complete(ended=True)] == [(2, 2), (3, 2), (4, 2), (5, 2)]


def test_a_record_of_several_interrupted_runs_is_one_series(tmp_path: Path) -> None:
    record(tmp_path, 1, 2, 3, 4)
    record(tmp_path, 3, 4, 5, 6)
    rows = reader(tmp_path, resumed_from=5)
    record(tmp_path, 6, 7)
    assert steps(rows, ended=True) == [1, 2, 3, 4, 5, 6, 7]


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


def begin(name: str, directory: Path, *, resumed_from: int = 0) -> TrackerProcess:
    [process] = start_trackers((name,), Stage(directory, quiet=True), key="k", job_id="job", candidate="c0",
                               settings={"ttt_length": 3}, resumed_from=resumed_from)
    return process


def test_tensorboard_shows_a_resumed_training_as_one_run(tmp_path: Path) -> None:
    for resumed_from in (0, 2):
        process = begin("tensorboard", tmp_path, resumed_from=resumed_from)
        record(tmp_path, resumed_from + 1, resumed_from + 2)
        process.end(finished=resumed_from == 2)
        process.wait(finished=True)
    read = EventAccumulator(str(tmp_path / "trackers/tensorboard")).Reload()
    assert [event.step for event in read.Scalars("loss")] == [1, 2, 3, 4]
    assert reasons(tmp_path) == []


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """An MLflow server that has not been started, which is the address of the trackers here."""
    server = mlflow_server(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.port}")
    yield server
    server.kill()


def reasons(directory: Path) -> list[str]:
    return [record.reason for record in stage_records(directory / "events.jsonl") if record.kind == "event"]


@pytest.mark.slow
def test_a_tracker_that_answers_again_during_training_gets_what_it_missed(tmp_path: Path, away: Server) -> None:
    out = tmp_path / "out"
    out.mkdir()
    process = begin("mlflow", out)
    record(out, 1, 2)
    wait_for(lambda: "TrackerFailed" in reasons(out), "the tracker fails")
    away.start()
    wait_for(lambda: "TrackerRecovered" in reasons(out), "the tracker answers again")
    record(out, 3)
    process.end(finished=True)
    process.wait(finished=True)
    assert reasons(out) == ["TrackerFailed", "TrackerRecovered"]
    client = MlflowClient(f"http://127.0.0.1:{away.port}")
    experiment = client.get_experiment_by_name("eyrie")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    assert [one.step for one in client.get_metric_history(run.info.run_id, "loss")] == [1, 2, 3]


@pytest.mark.slow
def test_a_tracker_that_accepts_connections_and_never_answers_ends_with_the_training(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{listening.getsockname()[1]}")
        process = begin("mlflow", tmp_path)
        record(tmp_path, 1)
        process.end(finished=True)
        process.wait(finished=True)
    assert reasons(tmp_path) == ["TrackerFailed"]
