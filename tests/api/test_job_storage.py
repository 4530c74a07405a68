"""Storage by REST: what the files of jobs occupy, by project and by job, and which callers see it."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from eyrie_api.access.scope import SYSTEM, Scope
from eyrie_api.artifacts.local import LocalStore
from eyrie_api.artifacts.storage_usage import files_in_home
from eyrie_api.artifacts.store import StoredObject
from eyrie_api.contract.access import Action, CreateProject, Role
from eyrie_api.contract.status import StageStatus
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.projects import ApiKeys, Projects
from eyrie_api.http.authentication import LOCAL
from eyrie_api.http.job_files import JobFiles
from eyrie_api.http.job_storage import JobStorageMeter, StorageNotMeasured
from eyrie_api.http.server import create_app
from eyrie_api.planning.resolve import derive
from eyrie_api.settings import Settings
from eyrie_pipelines.processes import wait_until
from tests.api.samples import ended, job_spec, set_stage
from tests.api.test_console_admin import text_of

TOKEN = "installation-token-of-this-test"
STORAGE = "/v1alpha1/storage"
SHARD, CHECKPOINT = "stages/capture/shard-00000.states", "stages/train/c0/checkpoints/c0-step-5/model.safetensors"


def client_of(settings: Settings, database: Database, **limits: Any) -> TestClient:
    """A server that measures at every request, however long it takes."""
    app = create_app(settings.model_copy(update={"token": TOKEN}), database=database)
    control = app.state.control
    control.storage = JobStorageMeter(settings, control.files, database, max_age_s=0.0, wait_s=60.0, **limits)
    return TestClient(app, base_url="https://eyrie.example")


def key_of(database: Database, project: str, role: Role, scopes: frozenset[Action] | None = None) -> dict[str, str]:
    keys = ApiKeys(database, scope=Scope(LOCAL, project))
    return {"authorization": f"Bearer {keys.create(name='mine', role=role, scopes=scopes)[1]}"}


ROOT = {"authorization": f"Bearer {TOKEN}"}


def job_with(settings: Settings, database: Database, project: str, name: str, **sizes: int) -> str:
    """A job of the project that holds a shard, a checkpoint and a record of these sizes."""
    spec = job_spec(name=name, serve={"endpoint": f"{project}-{name}"})
    job_id = Jobs(database).submit(derive(spec), project=project).id
    places = {"shard": SHARD, "checkpoint": CHECKPOINT, "record": "job.json"}
    for kind, size in sizes.items():
        path = settings.job_dir(job_id) / places[kind]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    return job_id


@pytest.fixture
def teams(database: Database) -> None:
    for name in ("team", "other"):
        Projects(database).create(CreateProject(name=name))


@pytest.mark.usefixtures("teams")
def test_the_largest_job_comes_first_with_what_reads_its_files(settings: Settings, database: Database) -> None:
    small = job_with(settings, database, "team", "small", shard=10, record=1)
    large = job_with(settings, database, "other", "large", shard=300, checkpoint=100, record=2)
    Jobs(database).save_status(large, ended("Succeeded"))
    endpoint = "other-large"
    spec = job_spec()
    endpoints = Endpoints(database)
    endpoints.create(endpoint, derive(spec).target, derive(spec).endpoint_serve, "quickstart")
    endpoints.propose(endpoint, job_id=large, checkpoint="c0-step-5", reason="better", drafter_dir="/d")
    found = client_of(settings, database).get(STORAGE, headers=ROOT).json()
    assert [(job["job_id"], job["name"], job["project"], job["phase"], job["size_bytes"], job["removable_bytes"])
            for job in found["items"]] == [(large, "large", "other", "Succeeded", 402, 300),
                                           (small, "small", "team", "Pending", 11, 0)]
    assert [(one["kind"], one["name"], one["size_bytes"], one["removable"], one["reason"])
            for one in found["items"][0]["files"]] == [
        ("captured-states", "", 300, True, "the job has ended, its drafters are trained"),
        ("checkpoint", "c0-step-5", 100, False, "an endpoint serves it, or may roll back to it"),
        ("record", "", 2, False, "records are small and are kept")]
    assert found["projects"] == [
        {"project": "other", "num_jobs": 1, "size_bytes": 402, "removable_bytes": 300},
        {"project": "team", "num_jobs": 1, "size_bytes": 11, "removable_bytes": 0}]
    assert (found["size_bytes"], found["removable_bytes"], found["incomplete"]) == (413, 300, None)
    assert found["place"] == "disk"
    assert found["disk_total_bytes"] >= found["disk_free_bytes"] > 0


@pytest.mark.usefixtures("teams")
def test_pages_hold_every_job_once_and_the_sums_of_all(settings: Settings, database: Database) -> None:
    made = {job_with(settings, database, "team", f"j{number}", shard=size)
            for number, size in enumerate((5, 7, 7, 7, 9))}
    client, seen, cursor = client_of(settings, database), [], ""
    while True:
        page = client.get(STORAGE, headers=ROOT, params={"limit": 2} | ({"cursor": cursor} if cursor else {})).json()
        assert page["size_bytes"] == 35
        seen += [(job["size_bytes"], job["job_id"]) for job in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert [size for size, _ in seen] == [9, 7, 7, 7, 5]
    assert {job_id for _, job_id in seen} == made
    assert len(seen) == 5


@pytest.mark.parametrize(
    "cursor", ["x", "!", "bnVsbA", "WzEsIDJd", "WyIyMDI2LTExLTIxIiwgImpvYi0xIl0", "W05hTiwgIngiXQ"])
def test_a_cursor_of_another_list_is_refused(settings: Settings, database: Database, cursor: str) -> None:
    answer = client_of(settings, database).get(STORAGE, headers=ROOT, params={"cursor": cursor})
    assert answer.status_code == 422
    assert "next_cursor" in answer.json()["hint"]


@pytest.mark.usefixtures("teams")
@pytest.mark.parametrize("role", ["viewer", "operator", "admin"])
def test_a_project_sees_its_own_jobs_and_neither_anothers_nor_the_disk(
        settings: Settings, database: Database, role: Role) -> None:
    own = job_with(settings, database, "team", "ours", shard=10)
    foreign = job_with(settings, database, "other", "theirs", shard=700)
    orphan = settings.job_dir("job-orphan") / SHARD
    orphan.parent.mkdir(parents=True)
    orphan.write_bytes(b"x" * 60)
    client, key = client_of(settings, database), key_of(database, "team", role)
    answer = client.get(STORAGE, headers=key)
    assert [job["job_id"] for job in answer.json()["items"]] == [own]
    assert answer.json()["projects"] == [{"project": "team", "num_jobs": 1, "size_bytes": 10, "removable_bytes": 0}]
    assert (answer.json()["size_bytes"], answer.json()["disk_free_bytes"]) == (10, None)
    for hidden in (foreign, "theirs", "job-orphan", "other"):
        assert hidden not in answer.text
    assert client.get(STORAGE, headers=key | {"eyrie-project": "other"}).status_code == 404
    everything = client.get(STORAGE, headers=ROOT).json()["items"]
    assert [(job["job_id"], job["project"], job["phase"]) for job in everything] == [
        (foreign, "other", "Pending"), ("job-orphan", None, None), (own, "team", "Pending")]
    assert [job["job_id"] for job in client.get(STORAGE, headers=ROOT | {"eyrie-project": "team"}).json()["items"]] == [
        own]


@pytest.mark.usefixtures("teams")
def test_a_key_that_may_not_read_jobs_sees_none(settings: Settings, database: Database) -> None:
    job_with(settings, database, "team", "ours", shard=10)
    key = key_of(database, "team", "admin", frozenset({"audit:read"}))
    found = client_of(settings, database).get(STORAGE, headers=key).json()
    assert (found["items"], found["projects"], found["size_bytes"]) == ([], [], 0)


@pytest.mark.usefixtures("teams")
def test_files_removed_since_are_gone_and_lost_files_are_no_zeros(settings: Settings, database: Database) -> None:
    client = client_of(settings, database)
    assert client.get(STORAGE, headers=ROOT).json()["size_bytes"] == 0, "no job has run, so no directory is needed"
    job = job_with(settings, database, "team", "ours", shard=10)
    set_stage(Jobs(database), job, StageStatus(stage="capture", state="Running"))
    assert client.get(STORAGE, headers=ROOT).json()["size_bytes"] == 10
    shutil.rmtree(settings.job_dir(job))
    assert client.get(STORAGE, headers=ROOT).json()["items"] == []
    (settings.home / "jobs").rmdir()
    answer = client.get(STORAGE, headers=ROOT)
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:eyrie:problem:JobFilesUnavailable")
    assert str(settings.home) not in answer.text


@pytest.mark.usefixtures("teams")
def test_a_job_deleted_before_its_files_is_nobodys(settings: Settings, database: Database) -> None:
    job = job_with(settings, database, "team", "ours", shard=10)
    Jobs(database).save_status(job, ended("Cancelled"))
    assert Jobs(database).delete(job)
    (found,) = client_of(settings, database).get(STORAGE, headers=ROOT).json()["items"]
    assert (found["job_id"], found["project"], found["removable_bytes"]) == (job, None, 0)
    assert found["files"][0]["reason"] == "this server has no such job"


def test_what_is_deleted_while_it_is_listed_is_left_out(tmp_path: Path) -> None:
    for place in ("j1/a", "j1/b", "j2/c/d", "j3/e"):
        path = tmp_path / "jobs" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    listing = files_in_home(tmp_path)
    assert next(listing) == ("jobs/j1/a", 1)
    (tmp_path / "jobs/j1/b").unlink()
    shutil.rmtree(tmp_path / "jobs/j2")
    assert list(listing) == [("jobs/j3/e", 1)]


@pytest.mark.usefixtures("teams")
def test_a_measurement_that_ends_early_says_so(settings: Settings, database: Database) -> None:
    for name in ("a", "b"):
        job_with(settings, database, "team", name, shard=10, record=1)
    found = client_of(settings, database, max_files=3).get(STORAGE, headers=ROOT).json()
    assert found["incomplete"] == "stopped after 3 files"
    assert found["size_bytes"] == 12, "the first job whole, of the second the first file"
    assert client_of(settings, database, max_files=4).get(STORAGE, headers=ROOT).json()["incomplete"] is None
    late = client_of(settings, database, max_s=-1.0).get(STORAGE, headers=ROOT).json()
    assert "stopped after -1 s and 0 files" in late["incomplete"]


class GatedStore(LocalStore):
    """A store that lists once for each permit."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.permits = threading.Semaphore(0)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        self.permits.acquire(timeout=60.0)
        return super().list(prefix)


def test_a_slow_store_holds_up_no_request(settings: Settings, database: Database) -> None:
    store = GatedStore(settings.home / "store")
    store.write("jobs/j1/job.json", b"x" * 10)
    meter = JobStorageMeter(settings, JobFiles(settings, store), database, max_age_s=0.0, wait_s=0.0)

    def is_measured() -> bool:
        try:
            meter.latest()
        except StorageNotMeasured:
            return False
        return True

    assert not is_measured()
    store.permits.release()
    assert wait_until(is_measured, 60.0)
    store.write("jobs/j1/more.json", b"x" * 10)
    page = meter.page(SYSTEM, limit=10)
    assert (page.size_bytes, page.place, page.disk_total_bytes) == (10, "store", None)
    store.permits.release(1000)
    assert wait_until(lambda: meter.page(SYSTEM, limit=10).size_bytes == 20, 60.0)


@pytest.mark.usefixtures("teams")
def test_the_page_of_administration_shows_the_same(settings: Settings, database: Database) -> None:
    job = job_with(settings, database, "team", "ours", shard=3 << 20, checkpoint=2048)
    job_with(settings, database, "other", "theirs", shard=10)
    client = client_of(settings, database)
    client.post("/console/sign-in", headers=key_of(database, "team", "viewer")).raise_for_status()
    shown = text_of(client, "/console/admin")
    assert "3.0 MiB in the server's home, 0 B of it removable. Measured" in shown
    assert "team 1 3.0 MiB 0 B" in shown
    assert "ours team Pending 3.0 MiB 0 B captured states, 3.0 MiB: kept, the job is Pending" in shown
    assert "checkpoint c0-step-5, 2.0 KiB: kept" in shown
    assert "curl https://eyrie.example/v1alpha1/storage" in shown
    assert "theirs" not in shown
    assert "are free" not in shown
    assert f'href="/console/jobs/{job}"' in client.get("/console/admin").text
    shutil.rmtree(settings.home / "jobs")
    assert "No job that you may see holds files." in text_of(client, "/console/admin")
    set_stage(Jobs(database), job, StageStatus(stage="capture", state="Running"))
    assert "Unknown: jobs have run, and the server has no directory" in text_of(client, "/console/admin")
    client.cookies.clear()
    narrow = key_of(database, "team", "admin", frozenset({"audit:read"}))
    client.post("/console/sign-in", headers=narrow).raise_for_status()
    assert "does not show storage" in text_of(client, "/console/admin")
