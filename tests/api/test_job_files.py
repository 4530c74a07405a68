"""What the API shows of a job's files where the work area is an S3 store and the API's own home is empty."""

import uuid
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from starlette.testclient import TestClient

from eyrie_api.artifacts import digest_bytes
from eyrie_api.artifacts.directories import StageManifest, upload_dir
from eyrie_api.artifacts.open_store import open_store
from eyrie_api.artifacts.store import StoreOptions
from eyrie_api.contract.stages import FileEntry
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.migrations import upgrade
from eyrie_api.errors import ArtifactCorrupt, InvalidInput
from eyrie_api.http.job_files import PIECE_BYTES, JobFiles
from eyrie_api.http.server import create_app
from eyrie_api.planning.resolve import derive
from eyrie_api.settings import Settings
from tests.api.samples import benchmark_report, finish_stage, job_spec
from tests.servers.s3 import S3Server

LARGE = bytes(range(256)) * (PIECE_BYTES // 256) + b"the end"


def profile(path: Path, work: dict[str, Any]) -> Path:
    """The administrator's file."""
    path.write_text(yaml.safe_dump({"kubeflow": {"url": "http://nowhere"}, "stages": {"image": "a", "work": work}}))
    return path


def found(settings: Settings, job_id: str, path: str) -> tuple[StageManifest, FileEntry]:
    """A file of the job's first finished stage, as its manifest lists it."""
    one = JobFiles.of(settings).manifests(job_id)[0]
    return one, next(entry for entry in one.manifest.files if entry.path == path)


@pytest.mark.parametrize("changed", [b"[1]", b"[1, 2]", b""])
def test_a_changed_file_in_the_home_is_refused_and_not_served(
        settings: Settings, database: Database, changed: bytes) -> None:
    job = Jobs(database).submit(derive(job_spec()))
    directory = settings.stage_dir(job.id, "benchmark", "base-step-9")
    finish_stage(directory, "benchmark", benchmark_report("base-step-9", {"chat": (2.0,)}), {"cells.json": b"[0]"},
                 job.id)
    url = f"/v1alpha1/jobs/{job.id}/artifacts/benchmark/cells.json?key=base-step-9"
    with TestClient(create_app(settings, database=database), base_url="http://127.0.0.1") as client:
        assert client.get(url).content == b"[0]"
        (directory / "cells.json").write_bytes(changed)
        answer = client.get(url)
        assert answer.status_code == ArtifactCorrupt.http_status
        assert "'cells.json' differs from the digest in its manifest" in answer.json()["detail"]


def test_an_api_server_without_the_files_shows_them_from_the_store(tmp_path: Path, moto_s3: S3Server) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "access_key").write_text(moto_s3.access_key)
    (secret / "secret_key").write_text(moto_s3.secret_key)
    bucket = f"files-{uuid.uuid4().hex[:12]}"
    boto3.client("s3", endpoint_url=moto_s3.endpoint_url, region_name="us-east-1",
                 aws_access_key_id=moto_s3.access_key, aws_secret_access_key=moto_s3.secret_key,
                 ).create_bucket(Bucket=bucket)
    options = StoreOptions(endpoint_url=moto_s3.endpoint_url, credentials_dir=secret)
    work = {"kind": "s3", "url": f"s3://{bucket}/eyrie", "endpoint_url": moto_s3.endpoint_url}
    settings = Settings(home=tmp_path / "home", artifacts=options,
                        cluster_profile=profile(tmp_path / "profile.yaml", work))
    database = Database(settings.resolved_database_url)
    upgrade(database)
    job = Jobs(database).submit(derive(job_spec()))
    # A pod's directory, as it comes into the store.
    pod = tmp_path / "pod"
    finish_stage(pod, "benchmark", benchmark_report("base-step-9", {"chat": (2.0,)}),
                 {"cells.json": b"[]", "large.bin": LARGE}, job.id)
    (pod / "log.txt").write_text("measured\n")
    store = open_store(work["url"], options)
    upload_dir(store, pod, f"jobs/{job.id}/stages/benchmark/base-step-9")
    store.write(f"jobs/{job.id}/stages/tune/log.txt", b"at work")

    jobs = f"/v1alpha1/jobs/{job.id}"
    with TestClient(create_app(settings, database=database), base_url="http://127.0.0.1") as client:
        assert not settings.job_dir(job.id).exists()
        listed = {one["path"]: one for one in client.get(f"{jobs}/artifacts").json()["items"]}
        assert set(listed) == {"cells.json", "large.bin"}
        answer = client.get(listed["large.bin"]["url"])
        assert (answer.status_code, answer.headers["content-length"]) == (200, str(len(LARGE)))
        assert digest_bytes(answer.content) == listed["large.bin"]["sha256"]
        assert client.get(f"{jobs}/report").json()["benchmark"][0]["checkpoint"] == "base-step-9"
        assert client.get(f"{jobs}/logs?stage=benchmark&key=base-step-9").text == "measured\n"
        assert client.get(f"{jobs}/logs?stage=tune").text == "at work"
        assert client.get(f"{jobs}/logs?stage=prove").status_code == 404
        storage = client.get("/v1alpha1/storage").json()
        objects = {one.key: one.size_bytes for one in store.list("jobs")}
        assert f"jobs/{job.id}/stages/benchmark/base-step-9/large.bin" in objects
        assert [(one["job_id"], one["size_bytes"]) for one in storage["items"]] == [(job.id, sum(objects.values()))]
        assert (storage["place"], storage["disk_total_bytes"]) == ("store", None)
        # One byte differs: of a large file all but the last piece is sent, then the answer breaks off.
        store.write(f"jobs/{job.id}/stages/benchmark/base-step-9/large.bin", b"\xff" + LARGE[1:])
        sent: list[bytes] = []
        with pytest.raises(ArtifactCorrupt, match=r"large\.bin differs from the digest in its manifest"):
            sent.extend(JobFiles.of(settings).pieces(*found(settings, job.id, "large.bin")))
        assert sum(map(len, sent)) == PIECE_BYTES
        client_of_a_server = TestClient(client.app, base_url="http://127.0.0.1", raise_server_exceptions=False)
        cut = client_of_a_server.get(listed["large.bin"]["url"])
        assert (cut.headers["content-length"], len(cut.content)) == (str(len(LARGE)), PIECE_BYTES)
        store.delete(f"jobs/{job.id}/stages/benchmark/base-step-9/cells.json")
        assert client.get(listed["cells.json"]["url"]).json()["type"].endswith("ArtifactMissing")
    database.close()


def test_a_profile_that_cannot_be_read_keeps_the_api_from_starting(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, cluster_profile=tmp_path / "none.yaml")
    database = Database(settings.resolved_database_url)
    with pytest.raises(InvalidInput, match=r"none\.yaml"):
        create_app(settings, database=database)
    database.close()
