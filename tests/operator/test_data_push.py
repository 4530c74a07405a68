"""`eyrie data push`: files go into a bucket once, are checked first, and are then read by a job's path."""

import json
from pathlib import Path

import pytest

from eyrie_api.artifacts.store import StoreOptions
from eyrie_api.cli.verbs import Screen
from eyrie_api.contract.data import DataSource
from eyrie_api.errors import InvalidInput, NoUsableData
from eyrie_operator.cli.files import destination, push
from eyrie_workers.data.readers import read_conversations
from tests.api.artifacts.conftest import Bucket, make_bucket
from tests.operator.conftest import Eyrie
from tests.servers.s3 import S3Server

ROW = '{"messages": [{"role": "user", "content": "%s"}]}\n'


@pytest.fixture
def bucket(rclone_s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    made = make_bucket(rclone_s3, tmp_path)
    monkeypatch.setenv("EYRIE_ARTIFACTS_ENDPOINT_URL", made.server.endpoint_url)
    monkeypatch.setenv("EYRIE_ARTIFACTS_CREDENTIALS_DIR", str(made.secret))
    return made


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    directory = tmp_path / "chats"
    directory.mkdir()
    for name in ("a", "b", "c"):
        (directory / f"{name}.jsonl").write_text(ROW % name)
    (directory / "notes.txt").write_text("not data")
    return directory


def test_a_directory_is_sent_once_and_read_by_the_path_that_the_command_prints(bucket: Bucket, chats: Path) -> None:
    to, screen = f"s3://{bucket.name}/team/chats/", Screen(as_json=True)
    first = push(chats, to, screen)
    assert (first.path, first.files, first.sent) == (f"s3://{bucket.name}/team/chats", 3, 3)
    assert len(list(read_conversations(DataSource(path=first.path)))) == 3
    (chats / "b.jsonl").write_text(ROW % "changed")
    assert push(chats, to, screen).sent == 1
    assert push(chats / "a.jsonl", to, screen).path == f"s3://{bucket.name}/team/chats/a.jsonl"


def test_a_large_file_is_sent_in_parts_and_is_whole_there(
        bucket: Bucket, chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYRIE_ARTIFACTS_PART_SIZE_BYTES", str(5 << 20))
    (chats / "a.jsonl").write_text((ROW % ("x" * 1000)) * 12_000)  # three parts
    done = push(chats, f"s3://{bucket.name}/c", Screen(as_json=True))
    assert done.bytes == sum(file.stat().st_size for file in chats.glob("*.jsonl"))
    found = bucket.client.head_object(Bucket=bucket.name, Key="c/a.jsonl")
    assert found["ContentLength"] == (chats / "a.jsonl").stat().st_size


def test_what_no_job_would_read_is_refused_before_any_byte_is_sent(bucket: Bucket, chats: Path) -> None:
    (chats / "b.jsonl").write_text("no json at all\n")
    with pytest.raises(NoUsableData, match=r"b\.jsonl"):
        push(chats, f"s3://{bucket.name}/c", Screen(as_json=True))
    assert not bucket.client.list_objects_v2(Bucket=bucket.name).get("Contents")


def test_without_a_place_it_is_below_the_artifact_store_and_elsewhere_than_a_bucket_is_refused() -> None:
    options = StoreOptions(url="s3://bucket/eyrie/")
    assert destination(Path("/x/chats"), None, options) == "s3://bucket/eyrie/data/chats"
    for to, given in ((None, StoreOptions()), ("/mnt/data", options), (None, StoreOptions(url="/mnt/store"))):
        with pytest.raises(InvalidInput, match="--to"):
            destination(Path("/x/chats"), to, given)


def test_the_command_prints_one_json_document(bucket: Bucket, chats: Path, eyrie: Eyrie) -> None:
    done = eyrie("data", "push", chats, "--to", f"s3://{bucket.name}/c", "--json")
    assert json.loads(done.stdout) == {"path": f"s3://{bucket.name}/c", "files": 3, "sent": 3, "bytes": 147}
