"""Stage records into rows: exactly once, whatever is repeated, torn or killed."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import BaseModel

from eyrie_api.contract.records import EventRecord, MetricRecord, ProgressRecord
from eyrie_api.database.engine import Database
from eyrie_api.database.ingest import Ingest
from eyrie_api.database.jobs import Jobs
from eyrie_api.errors import NotFound
from eyrie_api.planning.resolve import derive
from tests.api.samples import NOW, job_spec

RECORDS: tuple[BaseModel, ...] = (
    EventRecord(time=NOW, reason="Started", message="reading"),
    ProgressRecord(time=NOW, done=5, total=10, unit="rows", rate=2.5, eta_s=2.0),
    MetricRecord(time=NOW, name="train/loss", step=1, value=2.5),
    EventRecord(time=NOW, type="Warning", reason="Quarantined", message="line 3", data={"line": 3}),
    MetricRecord(time=NOW, name="train/loss", step=2, value=1.5),
)
LINES = b"".join(record.model_dump_json().encode() + b"\n" for record in RECORDS)


def read(ingest: Ingest, job_id: str, path: Path) -> int:
    return ingest.read(job_id, "train", "base", path)


def test_records_become_events_metrics_and_progress(jobs: Jobs, database: Database, tmp_path: Path) -> None:
    job_id, ingest, path = jobs.submit(derive(job_spec())).id, Ingest(database), tmp_path / "events.jsonl"
    assert read(ingest, job_id, path) == 0
    path.write_bytes(LINES)
    assert read(ingest, job_id, path) == 5
    assert [(one.reason, one.key) for one in jobs.events(job_id)][1:] == [("Started", "base"), ("Quarantined", "base")]
    (series,) = jobs.metrics(job_id)
    assert [point.value for point in series.points] == [2.5, 1.5]
    (stage,) = jobs.get(job_id).status.stages
    assert stage.progress is not None
    assert (stage.progress.done, stage.progress.eta_s) == (5.0, 2.0)


@hypothesis_settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.integers(0, len(LINES)), max_size=6))
def test_however_the_file_grows_every_record_is_taken_exactly_once(
        jobs: Jobs, database: Database, tmp_path: Path, cuts: list[int]) -> None:
    job_id, path = jobs.submit(derive(job_spec())).id, tmp_path / "events.jsonl"
    taken = 0
    for cut in [*sorted(cuts), len(LINES), len(LINES)]:
        path.write_bytes(LINES[:cut])
        taken += read(Ingest(database), job_id, path)  # a new reader each time, as after a restart
    assert taken == len(RECORDS)
    assert [one.reason for one in jobs.events(job_id)] == ["Accepted", "Started", "Quarantined"]


def test_a_reader_that_dies_before_it_commits_has_taken_nothing(
        jobs: Jobs, database: Database, tmp_path: Path) -> None:
    job_id, path = jobs.submit(derive(job_spec())).id, tmp_path / "events.jsonl"
    path.write_bytes(LINES)

    class Dying(Ingest):
        def _store(self, *arguments: object) -> None:
            super()._store(*arguments)  # type: ignore[arg-type]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read(Dying(database), job_id, path)
    assert len(jobs.events(job_id)) == 1
    assert read(Ingest(database), job_id, path) == 5


def test_a_line_that_is_not_a_record_becomes_a_warning_and_does_not_stop_the_rest(
        jobs: Jobs, database: Database, tmp_path: Path) -> None:
    job_id, path = jobs.submit(derive(job_spec())).id, tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind": "metric", "name": "x", "step": 1, "value": NaN}\n\xff\xfe\n' + LINES)
    assert read(Ingest(database), job_id, path) == 7
    assert [one.reason for one in jobs.events(job_id)].count("UnreadableRecord") == 2
    assert len(jobs.metrics(job_id)) == 1


def test_a_stage_directory_made_again_is_read_from_its_beginning(
        jobs: Jobs, database: Database, tmp_path: Path) -> None:
    job_id, path = jobs.submit(derive(job_spec())).id, tmp_path / "events.jsonl"
    path.write_bytes(LINES)
    read(Ingest(database), job_id, path)
    os.unlink(path)
    path.write_bytes(EventRecord(time=NOW, reason="Again", message="x").model_dump_json().encode() + b"\n")
    assert read(Ingest(database), job_id, path) == 1
    assert jobs.events(job_id)[-1].reason == "Again"


def test_records_of_a_deleted_job_are_refused(database: Database, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(LINES)
    with pytest.raises(NotFound):
        read(Ingest(database), "gone", path)
