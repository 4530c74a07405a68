"""Trainings that are shown in trackers: with their real packages, a local MLflow server and W&B's offline mode.

Functions import MLflow and W&B: while every pytest worker collects these tests, it would spend 1.3 s on them.
"""

import json
import os
import signal
import struct
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from eyrie_workers.stage_program import INTERRUPTED_EXIT_CODE
from tests.workers.events import stage_records
from tests.workers.stages.test_train import report_of, wait_for_saved_state, wait_for_steps, write_spec

pytestmark = pytest.mark.slow
Series = dict[str, list[tuple[int, float]]]
_PASSWORD = "not-for-any-log"
_OF_THE_CLOCK = ("tokens_per_s", "mfu", "data_wait_share")


def start(out: Path, **variables: str) -> subprocess.Popen[bytes]:
    """The train program, with its output in a file."""
    with (out / "log.txt").open("ab") as log:
        return subprocess.Popen([sys.executable, "-m", "eyrie_workers.stages.train", "--spec", str(out / "spec.json"),
                                 "--out", str(out / "manifest.json")], stdout=log, stderr=subprocess.STDOUT,
                                env=os.environ | {"OMP_NUM_THREADS": "1", "HOME": str(out)} | variables)


def warnings(out: Path) -> list[str]:
    return [record.message for record in stage_records(out / "events.jsonl")
            if record.kind == "event" and record.reason.startswith("Tracker")]


def test_each_tracker_has_every_step_of_a_killed_and_resumed_training_once_in_one_run(
        tmp_path: Path, target_dir: Path, store_dir: Path, mlflow_address: str) -> None:
    out = tmp_path
    write_spec(out, target_dir, store_dir, trackers=("mlflow", "wandb", "tensorboard"), save_every_steps=4)
    variables = {"MLFLOW_TRACKING_URI": mlflow_address, "WANDB_MODE": "offline"}
    process = start(out, **variables)
    wait_for_steps(out, process, 7)
    wait_for_saved_state(out, process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert start(out, **variables).wait() == 0, (out / "log.txt").read_text()
    assert report_of(out).resumed_from_step >= 4
    recorded = Counter((record.name, record.step) for record in stage_records(out / "events.jsonl")
                       if record.kind == "metric")
    assert max(recorded.values()) == 2, "the training has repeated no step"
    assert warnings(out) == []
    _is_in_tensorboard(out)
    _is_in_an_offline_run_of_wandb(out)
    _is_in_mlflow(out, mlflow_address)


def series_of(out: Path) -> Series:
    """(step, value) by name; a step that was logged twice has its last value."""
    points: dict[str, dict[int, float]] = defaultdict(dict)
    for record in stage_records(out / "events.jsonl"):
        if record.kind == "metric":
            points[record.name][record.step] = record.value
    return {name: sorted(by_step.items()) for name, by_step in points.items()}


def same(shown: Series, out: Path) -> None:
    """The tracker has each recorded step once, with its value."""
    recorded = series_of(out)
    assert shown.keys() == recorded.keys()
    for name, points in recorded.items():
        assert [step for step, _ in shown[name]] == [step for step, _ in points], name
        if name not in _OF_THE_CLOCK:  # a repeated step takes another time; the tracker may have either
            # TensorBoard keeps float32.
            assert [value for _, value in shown[name]] == pytest.approx([value for _, value in points], rel=1e-6), name


def _is_in_tensorboard(out: Path) -> None:
    directory = out / "trackers/tensorboard"
    read = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    scalars = read.Tags()["scalars"]
    same({name: [(event.step, event.value) for event in read.Scalars(name)] for name in scalars}, out)
    [file] = directory.glob("events.out.tfevents.*")
    written = Counter((value.tag, event.step) for event in EventFileLoader(str(file)).Load()
                      for value in event.summary.value)
    assert set(written.values()) == {1}
    [settings] = read.Tensors("settings/text_summary")
    text = settings.tensor_proto.string_val[0].decode()
    assert "job/c0" in text
    assert "| ttt_length | 3 |" in text


def offline_records(out: Path) -> list[Any]:
    """The records of the one offline run in a directory: frames of LevelDB's log format behind 7 bytes of W&B's."""
    from wandb.proto.wandb_internal_pb2 import Record

    [file] = out.glob("trackers/wandb/wandb/offline-run-*/*.wandb")
    data, position, part, found = file.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position:position + 7])
        part += data[position + 7:position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the end of one
            found.append(Record.FromString(part))
            part = b""
    return found


def _is_in_an_offline_run_of_wandb(out: Path) -> None:
    records = offline_records(out)
    shown: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for record in records:
        if record.WhichOneof("record_type") == "history":
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            for name, value in row.items():
                if not name.startswith("_"):
                    shown[name].append((row["_step"], value))
    same(dict(shown), out)
    run = next(record.run for record in records if record.WhichOneof("record_type") == "run")
    config = {update.key: json.loads(update.value_json) for update in run.config.update}
    assert (run.display_name, run.run_group, run.project) == ("job/c0", "job", "eyrie")
    assert (config["job_id"], config["candidate"], config["ttt_length"]) == ("job", "c0", 3)


def of_mlflow(address: str, key_of: str) -> tuple[Any, Series]:
    """The one run of a job, and its metrics."""
    from mlflow import MlflowClient

    client = MlflowClient(address)
    experiment = client.get_experiment_by_name("eyrie")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id], f"tags.eyrie_job = '{key_of}'")
    return run, {name: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]
                 for name in run.data.metrics}


def _is_in_mlflow(out: Path, address: str) -> None:
    run, shown = of_mlflow(address, "job")
    same(shown, out)
    assert (run.info.run_name, run.info.status) == ("job/c0", "FINISHED")
    assert (run.data.tags["eyrie_job"], run.data.tags["eyrie_candidate"]) == ("job", "c0")
    assert (run.data.params["ttt_length"], run.data.params["family"]) == ("3", "eagle3")


def test_a_tracker_that_is_away_is_said_once_and_gets_everything_when_the_training_resumes(
        tmp_path: Path, target_dir: Path, store_dir: Path, mlflow_address: str) -> None:
    spec = write_spec(tmp_path, target_dir, store_dir, trackers=("mlflow",), save_every_steps=1000)
    (tmp_path / "spec.json").write_text(spec.model_copy(update={"job_id": "away"}).model_dump_json())
    credentials = {"MLFLOW_TRACKING_USERNAME": "someone", "MLFLOW_TRACKING_PASSWORD": _PASSWORD}
    process = start(tmp_path, MLFLOW_TRACKING_URI="http://127.0.0.1:1", **credentials)
    wait_for_steps(tmp_path, process, 5)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == INTERRUPTED_EXIT_CODE
    [warning] = warnings(tmp_path)
    assert warning.startswith("mlflow: ")
    assert "training continues" in warning
    assert start(tmp_path, MLFLOW_TRACKING_URI=mlflow_address, **credentials).wait() == 0
    assert report_of(tmp_path).resumed_from_step >= 5
    run, shown = of_mlflow(mlflow_address, "away")
    assert run.info.status == "FINISHED"
    same(shown, tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and _PASSWORD.encode() in path.read_bytes()]

