"""`eyrie doctor`: each kind of damage is found and named, and repaired where that is possible."""

import json
import shutil
import sqlite3
import subprocess
from pathlib import Path

import pytest

from eyrie_api.artifacts import write_model, write_sealed
from eyrie_api.artifacts.directories import upload_dir
from eyrie_api.artifacts.store import ArtifactStore
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.status import JobStatus, StageStatus
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.migrations import upgrade
from eyrie_api.planning.resolve import derive
from eyrie_api.settings import Settings
from eyrie_operator.control_plane import Plane
from eyrie_operator.doctor import SET_ASIDE, DatabaseDamaged, Defect, Home, check_start, examine, repair
from eyrie_operator.embedded.gateway import GATEWAY_FILE, GatewayRecord
from eyrie_pipelines.processes import ProcessId
from tests.api.artifacts.conftest import make_bucket
from tests.api.samples import benchmark_report, ended, finish_stage, job_spec
from tests.api.test_job_files import profile
from tests.operator.conftest import Eyrie
from tests.operator.test_reconcile import manifest
from tests.servers.postgres import Postgres
from tests.servers.s3 import S3Server


class Made:
    """A home with one job that has finished its first stage and runs the second."""

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir()
        self.database = Database(f"sqlite:///{home / 'eyrie.db'}")
        upgrade(self.database)
        jobs = Jobs(self.database)
        self.job = jobs.submit(derive(job_spec())).id
        done = StageStatus(stage="capture", state="Succeeded")
        running = StageStatus(stage="train", key="base", state="Running")
        jobs.save_status(self.job, JobStatus(phase="Running", stages=(done, running)))
        self.stage = home / "jobs" / self.job / "stages" / "capture"
        self.stage.mkdir(parents=True)
        write_model(self.stage / "manifest.json", manifest())

    def found(self, *, digests: bool = False) -> list[Defect]:
        return list(examine(Home(self.home, self.database, digests)))


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path / "home")


def test_an_intact_home_has_no_finding(made: Made) -> None:
    assert made.found(digests=True) == []


def test_a_database_older_than_its_files_shows_as_directories_that_no_row_knows_and_they_are_kept(made: Made) -> None:
    (made.home / "jobs" / "job-of-yesterday").mkdir()
    [one] = made.found()
    assert (one.reason, one.where) == ("UnknownDirectory", "jobs/job-of-yesterday")
    assert repair(made.home, one).repaired
    assert (made.home / SET_ASIDE / "jobs" / "job-of-yesterday").is_dir()
    assert made.found() == []


def test_a_running_job_without_its_files_is_named_with_what_to_do(made: Made) -> None:
    shutil.rmtree(made.home / "jobs" / made.job)
    [one] = made.found()
    assert (one.reason, one.repair) == ("JobWithoutFiles", "none")
    assert f"eyrie cancel {made.job}" in one.hint


def test_a_damaged_manifest_is_found_and_its_stage_runs_again(made: Made) -> None:
    (made.stage / "manifest.json").write_bytes(b"{\xff")
    [one] = made.found()
    assert (one.reason, one.where) == ("StageDamaged", f"jobs/{made.job}/stages/capture")
    assert repair(made.home, one).repaired
    assert [finding.reason for finding in made.found()] == ["StageMissing"], "until the retried job has run it"


@pytest.mark.parametrize("name", ["job.json", "run/run.json", "run/result.json", "run/failure.json"])
@pytest.mark.parametrize("text", [b"", b'{"id": "job-1", "resol'])
def test_an_emptied_or_cut_record_of_a_run_is_named_and_removed(made: Made, name: str, text: bytes) -> None:
    path = made.home / "jobs" / made.job / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text)
    [one] = made.found()
    assert (one.reason, one.where) == ("RecordDamaged", f"jobs/{made.job}/{name}")
    assert "starts its run again" in one.hint
    assert repair(made.home, one).repaired
    assert made.found() == []


def test_a_flipped_bit_in_the_log_is_named_by_the_doctor_and_by_the_start_which_keeps_the_log_and_goes_on(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = Made(tmp_path / "live")
    for _ in range(3):
        Jobs(made.database).submit(derive(job_spec()))
    home = tmp_path / "killed"
    shutil.copytree(made.home, home)  # as after kill -9: nothing has closed the database
    made.database.close()
    wal = home / "eyrie.db-wal"
    damaged = bytearray(wal.read_bytes())
    damaged[-1] ^= 1  # of the last frame, which commits the last job
    wal.write_bytes(damaged)
    doubted = tmp_path / "doubted"
    shutil.copytree(home, doubted)
    database = Database(f"sqlite:///{doubted / 'eyrie.db'}")
    named = [(one.reason, one.where) for one in examine(Home(doubted, database, digests=False))]
    database.close()
    assert named == [("LogDamaged", "eyrie.db-wal")]
    for number in range(2):
        caplog.clear()
        plane = Plane(Settings(home=home))
        assert len(Jobs(plane._database).list().items) == 3, "of four"
        plane._database.close()
        words = [record.getMessage() for record in caplog.records if "eyrie.db-wal" in record.getMessage()]
        assert len(words) == (1 if number == 0 else 0)
    assert (home / SET_ASIDE / "eyrie.db-wal").read_bytes() == damaged


@pytest.mark.parametrize("text", [b"", b"\xff", b"70000\n"])
def test_a_damaged_port_number_of_an_endpoint_is_found_and_removed(made: Made, text: bytes) -> None:
    Endpoints(made.database).create("default", TargetSpec(model="quickstart"), EndpointServeSpec(), "tiny")
    port = made.home / "endpoints" / "default" / "port"
    port.parent.mkdir(parents=True)
    port.write_bytes(b"8100\n")
    assert made.found() == []
    port.write_bytes(text)
    [one] = made.found()
    assert (one.reason, one.where) == ("RecordDamaged", "endpoints/default/port")
    assert repair(made.home, one).repaired
    assert made.found() == []


def test_a_flipped_digit_in_the_record_of_a_gateway_is_found_and_the_record_removed(made: Made) -> None:
    Endpoints(made.database).create("default", TargetSpec(model="quickstart"), EndpointServeSpec(), "tiny")
    record = made.home / "endpoints" / "default" / GATEWAY_FILE
    record.parent.mkdir(parents=True)
    write_sealed(record, GatewayRecord(process=ProcessId(pid=7, started_ticks=1, boot="b"), host="h", port=8100))
    assert made.found() == []
    record.write_text(record.read_text().replace("8100", "8101"))
    [one] = made.found()
    assert (one.reason, one.where) == ("RecordDamaged", f"endpoints/default/{GATEWAY_FILE}")
    assert "digest" in one.message
    assert repair(made.home, one).repaired
    assert made.found() == []


def test_a_damaged_page_of_the_database_is_found(made: Made) -> None:
    made.database.close()
    with sqlite3.connect(made.home / "eyrie.db") as raw:
        raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    file = made.home / "eyrie.db"
    data = bytearray(file.read_bytes())
    data[4096:len(data)] = bytes(len(data) - 4096)
    file.write_bytes(data)
    assert {one.reason for one in made.found()} == {"DatabaseDamaged"}
    before = file.read_bytes()
    with pytest.raises(DatabaseDamaged, match=r"eyrie\.db is damaged: .*restore the latest backup"):
        Plane(Settings(home=made.home))
    assert file.read_bytes() == before, "a control plane writes nothing into it"


def test_a_copied_home_is_whole_where_it_is_restored_and_a_database_older_than_its_files_loses_no_file(
        made: Made, tmp_path: Path) -> None:
    made.database.close()
    shutil.copytree(made.home, tmp_path / "backup")
    later = Jobs(made.database).submit(derive(job_spec())).id
    (made.home / "jobs" / later).mkdir()
    made.database.close()
    for file in made.home.glob("eyrie.db*"):
        file.unlink()
    shutil.copy2(tmp_path / "backup" / "eyrie.db", made.home)
    assert [one.where for one in made.found(digests=True)] == [f"jobs/{later}"]
    made.database.close()
    shutil.rmtree(made.home)
    shutil.copytree(tmp_path / "backup", made.home)
    assert made.found(digests=True) == []
    assert Jobs(made.database).get(made.job).status.phase == "Running"


def test_a_database_that_has_lost_rows_starts_and_the_log_names_the_files_that_it_does_not_know(
        made: Made, caplog: pytest.LogCaptureFixture) -> None:
    for lost in ("jobs/job-of-yesterday", "endpoints/of-yesterday"):
        (made.home / lost).mkdir(parents=True)
    deleted = Jobs(made.database).submit(derive(job_spec())).id
    Jobs(made.database).save_status(deleted, ended("Failed"))
    assert Jobs(made.database).delete(deleted)
    (made.home / "jobs" / deleted).mkdir()  # a worker removes it soon
    check_start(Home(made.home, made.database, digests=False))
    named = {record.getMessage().split(":")[0] for record in caplog.records}
    assert named == {"jobs/job-of-yesterday", "endpoints/of-yesterday"}


def on_postgres_and_s3(postgres: Postgres, s3: S3Server, path: Path) -> tuple[Database, ArtifactStore, dict[str, str]]:
    """A cluster's database and work area, and the variables of its pods."""
    bucket, database = make_bucket(s3, path), Database(postgres.url(postgres.create()))
    upgrade(database)
    work = {"kind": "s3", "url": f"s3://{bucket.name}/eyrie", "endpoint_url": s3.endpoint_url}
    return database, bucket.store("eyrie"), {
        "EYRIE_DATABASE_URL": database.engine.url.render_as_string(hide_password=False),
        "EYRIE_CLUSTER_PROFILE": str(profile(path / "profile.yaml", work)), "EYRIE_HOME": str(path / "home"),
        "EYRIE_ARTIFACTS_CREDENTIALS_DIR": str(bucket.secret)}


def test_on_postgresql_and_s3_rows_without_objects_and_objects_without_rows_are_found(
        postgres_server: Postgres, rclone_s3: S3Server, tmp_path: Path, eyrie: Eyrie) -> None:
    database, store, variables = on_postgres_and_s3(postgres_server, rclone_s3, tmp_path)
    jobs = Jobs(database)
    whole, bare, changed, shorter, lost = (jobs.submit(derive(job_spec())).id for _ in range(5))
    stages = (StageStatus(stage="benchmark", key="base-step-9", state="Succeeded"),
              StageStatus(stage="tune", state="Running"))
    for job in (whole, bare, changed, shorter, lost):
        jobs.save_status(job, JobStatus(phase="Running", stages=stages))
    for job in (whole, changed, shorter, lost, "job-of-another-database"):
        finish_stage(tmp_path / job, "benchmark", benchmark_report("base-step-9", {"chat": (2.0,)}),
                     {"cells.json": b"[]", "rows.jsonl": b"1\n2\n"}, job)
        upload_dir(store, tmp_path / job, f"jobs/{job}/stages/benchmark/base-step-9")
    Endpoints(database).create("default", TargetSpec(model="quickstart"), EndpointServeSpec(), "tiny")
    drafter = tmp_path / "home" / "jobs" / whole / "stages/train/base/checkpoints/c1"
    Endpoints(database).propose("default", job_id=whole, checkpoint="c1", tree=DraftTreeShape(),
                                drafter_dir=str(drafter), reason="better")

    def found(*options: str) -> set[tuple[str, str]]:
        done = eyrie("doctor", "--json", *options, env=variables)
        assert done.returncode == 74, done.stderr
        return {(one["reason"], one["where"]) for one in json.loads(done.stdout)}

    expected = {("UnknownDirectory", f"{store.url}/jobs/job-of-another-database"), ("JobWithoutFiles", bare),
                ("DrafterMissing", "endpoint default, revision 2")}
    assert found() == expected
    stages_of = {job: f"jobs/{job}/stages/benchmark/base-step-9" for job in (changed, shorter, lost)}
    store.write(f"{stages_of[changed]}/rows.jsonl", b"1\n3\n")
    store.write(f"{stages_of[shorter]}/rows.jsonl", b"1\n")
    store.delete(f"{stages_of[lost]}/manifest.json")
    expected |= {("StageDamaged", stages_of[shorter]), ("StageMissing", stages_of[lost])}
    assert found() == expected
    assert found("--digests") == expected | {("StageDamaged", stages_of[changed])}
    database.close()


def test_a_database_without_tables_is_named_and_nothing_in_it_is_read(
        postgres_server: Postgres, tmp_path: Path) -> None:
    database = Database(postgres_server.url(postgres_server.create()))
    assert [one.reason for one in examine(Home(tmp_path, database, digests=False))] == ["TablesBehind"]
    database.close()


def test_the_command_prints_findings_and_ends_with_74_until_they_are_repaired(
        made: Made, eyrie: Eyrie) -> None:
    def doctor(*more: str) -> subprocess.CompletedProcess[str]:
        return eyrie("doctor", "--home", made.home, *more)

    (made.home / "endpoints" / "gone").mkdir(parents=True)
    first, repaired, last = doctor("--json"), doctor("--repair"), doctor()
    assert (first.returncode, repaired.returncode, last.returncode) == (74, 0, 0), first.stderr + repaired.stderr
    assert [one["where"] for one in json.loads(first.stdout)] == ["endpoints/gone"]
    assert "nothing is damaged" in last.stdout
    shutil.rmtree(made.home)
    missing = doctor()
    assert missing.returncode == 66
    assert not made.home.exists()
