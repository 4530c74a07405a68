"""S3's own troubles, on two real servers: broken connections, kills in the middle, wrong secrets, servers away."""

import logging
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from eyrie_api.artifacts import digest_bytes, digest_file
from eyrie_api.artifacts.open_store import open_store
from eyrie_api.artifacts.s3 import DIGEST
from eyrie_api.artifacts.store import MIN_PART_BYTES, StoreAccessDenied, StoreOptions, StoreUnavailable
from eyrie_api.errors import ArtifactCorrupt, EyrieError, InvalidInput
from tests.api.artifacts.conftest import Bucket, make_bucket
from tests.servers.cutting import Relay, relaying
from tests.servers.s3 import S3Server

MakeFile = Callable[..., Path]
LARGE = 3 * MIN_PART_BYTES + 12_345
LONG_S = 60.0


def port_of(server: S3Server) -> int:
    return int(server.endpoint_url.rpartition(":")[2])


def through(relay: Relay, bucket: Bucket, **changes: object) -> StoreOptions:
    return bucket.options(endpoint_url=f"http://127.0.0.1:{relay.port}", **changes)


def test_the_check_tells_whether_conditional_writes_are_honoured(bucket: Bucket,
                                                                caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        seen = bucket.store().check()
    assert seen is bucket.server.honours_conditions
    assert ("ignores If-None-Match" in caplog.text) is not bucket.server.honours_conditions


def test_a_download_goes_on_where_its_connections_broke(bucket: Bucket, tmp_path: Path, a_file: MakeFile) -> None:
    source = a_file(LARGE)
    bucket.store().upload("a.bin", source)
    with relaying(port_of(bucket.server)) as relay:
        store = open_store(f"s3://{bucket.name}/eyrie/tests", through(relay, bucket))
        assert store.stat("a.bin") is not None
        relay.cut_after = [1_000_000, 300_000, 2_000_000]
        store.download("a.bin", tmp_path / "a.bin")
        assert relay.cut_after == []
        assert relay.answered < 1.5 * LARGE, "what had arrived was not fetched again"
    assert digest_file(tmp_path / "a.bin") == digest_file(source)


def test_an_upload_survives_broken_connections(bucket: Bucket, a_file: MakeFile) -> None:
    source = a_file(LARGE)
    with relaying(port_of(bucket.server)) as relay:
        store = open_store(f"s3://{bucket.name}/eyrie/tests", through(relay, bucket))
        relay.cut_after = [0, 10, 0]
        store.upload("a.bin", source)
        assert relay.cut_after == []
    assert digest_bytes(bucket.store().read("a.bin")) == digest_file(source)


@pytest.mark.parametrize("attempts", [1, 3])
@pytest.mark.parametrize("how", ["file", "stream"])
def test_an_upload_in_parts_that_completed_while_its_answer_was_lost_is_done(
        bucket: Bucket, a_file: MakeFile, how: str, attempts: int) -> None:
    source = a_file(LARGE)
    with relaying(port_of(bucket.server)) as relay:
        store = open_store(f"s3://{bucket.name}/eyrie/tests", through(relay, bucket, max_attempts=attempts))
        # The list of parts is the last request of a completion: its body follows the head in one piece or two.
        relay.answer_at, relay.cut_answers = b"<CompleteMultipartUpload", 1
        if how == "file":
            store.upload("a.bin", source)
        else:
            store.write_stream("a.bin", [source.read_bytes()], size_bytes=LARGE, sha256=digest_file(source))
        assert relay.cut_answers == 0
    there = bucket.store().stat("a.bin")
    assert there is not None
    assert (there.size_bytes, there.sha256) == (LARGE, digest_file(source))
    assert unfinished(bucket) == []
    assert list(source.parent.iterdir()) == [source]


def test_an_upload_whose_completion_is_lost_is_not_done_by_an_older_object_in_its_place(
        bucket: Bucket, a_file: MakeFile) -> None:
    older, source = a_file(LARGE, "older.bin"), a_file(LARGE)
    source.write_bytes(source.read_bytes()[::-1])
    bucket.store().upload("a.bin", older)
    with relaying(port_of(bucket.server)) as relay:
        store = open_store(f"s3://{bucket.name}/eyrie/tests", through(relay, bucket, max_attempts=1))
        relay.cut_at = b"<CompleteMultipartUpload"
        with pytest.raises(StoreUnavailable):
            store.upload("a.bin", source)
        relay.cut_at = None
        store.upload("a.bin", source)
    assert digest_bytes(bucket.store().read("a.bin")) == digest_file(source)


def test_a_small_object_whose_answer_was_lost_is_written_once_and_is_ours(bucket: Bucket) -> None:
    with relaying(port_of(bucket.server)) as relay:
        store = open_store(f"s3://{bucket.name}/eyrie/tests", through(relay, bucket))
        store.check()
        relay.answer_at, relay.cut_answers = b"our bytes", 1
        store.write_once("a.json", b"our bytes")
        relay.cut_answers = 1
        store.write("b.json", b"our bytes")
        assert relay.cut_answers == 0
    assert bucket.store().read("a.json") == bucket.store().read("b.json") == b"our bytes"


UPLOADING = """
import sys
from pathlib import Path
from eyrie_api.artifacts.store import StoreOptions
from eyrie_api.artifacts.open_store import open_store
open_store(sys.argv[1], StoreOptions.model_validate_json(sys.argv[2])).upload("a.bin", Path(sys.argv[3]))
"""


def killed_half_way(bucket: Bucket, source: Path) -> None:
    """Upload in a process of its own and kill -9 it when two parts of four are there.

    Between parts: rclone answers SlowDown to a part that it has half of, for as long as it lives.
    """
    with relaying(port_of(bucket.server)) as relay:
        relay.hold_at = b"partNumber=3"
        options = through(relay, bucket, parallel=1)
        process = subprocess.Popen([sys.executable, "-c", UPLOADING, f"s3://{bucket.name}/eyrie/tests",
                                    options.model_dump_json(), str(source)])
        assert relay.held.wait(LONG_S)
        process.kill()
        process.wait(LONG_S)


def test_an_upload_that_was_killed_is_taken_up_and_no_part_is_sent_twice(bucket: Bucket, a_file: MakeFile) -> None:
    source = a_file(LARGE)
    killed_half_way(bucket, source)
    assert bucket.store().stat("a.bin") is None, "half an upload is not to be seen"
    with relaying(port_of(bucket.server)) as relay:
        open_store(f"s3://{bucket.name}/eyrie/tests", through(relay, bucket)).upload("a.bin", source)
        assert relay.sent < 1.5 * MIN_PART_BYTES
    there = bucket.store().stat("a.bin")
    assert there is not None
    assert there.sha256 == digest_file(source) == digest_bytes(bucket.store().read("a.bin"))
    assert list(source.parent.iterdir()) == [source]


def test_an_upload_whose_file_has_changed_since_it_was_killed_begins_again(bucket: Bucket, a_file: MakeFile) -> None:
    source = a_file(LARGE)
    killed_half_way(bucket, source)
    source.write_bytes(source.read_bytes()[::-1])
    bucket.store().upload("a.bin", source)
    assert digest_bytes(bucket.store().read("a.bin")) == digest_file(source)
    assert unfinished(bucket) == [], "the old parts are given up"


def test_what_killed_machines_leave_is_swept(bucket: Bucket, a_file: MakeFile) -> None:
    source = a_file(LARGE)
    killed_half_way(bucket, source)
    store = bucket.store()
    assert store.sweep_unfinished("elsewhere", older_than_s=0.0) == 0
    assert store.sweep_unfinished(older_than_s=0.0) == 1
    assert store.sweep_unfinished(older_than_s=0.0) == 0
    store.upload("a.bin", source)
    assert digest_bytes(store.read("a.bin")) == digest_file(source), "its memory of the swept upload does no harm"


def test_in_a_bucket_where_no_upload_has_ever_begun_nothing_is_swept(bucket: Bucket) -> None:
    assert bucket.store().sweep_unfinished("jobs", older_than_s=0.0) == 0


def unfinished(bucket: Bucket) -> list[object]:
    return list(bucket.client.list_multipart_uploads(Bucket=bucket.name).get("Uploads", []))


def test_an_upload_that_cannot_be_remembered_and_fails_is_given_up(bucket: Bucket, a_file: MakeFile) -> None:
    source = a_file(LARGE)
    (source.parent / ".a.bin.upload.json").mkdir()  # as good as a directory that may only be read
    with relaying(port_of(bucket.server)) as relay:
        store = open_store(f"s3://{bucket.name}/eyrie/tests", through(relay, bucket, max_attempts=1, parallel=1))
        relay.cut_at = b"partNumber=2"
        with pytest.raises(StoreUnavailable):
            store.upload("a.bin", source)
    assert unfinished(bucket) == []


def test_an_upload_that_was_cut_off_is_taken_up_while_it_advances_and_else_given_up(
        bucket: Bucket, a_file: MakeFile) -> None:
    source = a_file(LARGE)
    with relaying(port_of(bucket.server)) as relay:
        store = open_store(f"s3://{bucket.name}/eyrie/tests", through(relay, bucket, max_attempts=1, parallel=1))
        for last, left in (("partNumber=2", 1), ("partNumber=3", 1), ("partNumber=3", 0)):
            relay.cut_at = last.encode()
            with pytest.raises(StoreUnavailable):
                store.upload("a.bin", source)
            assert len(unfinished(bucket)) == left
        relay.cut_at = None
        store.upload("a.bin", source)
    assert digest_bytes(bucket.store().read("a.bin")) == digest_file(source)
    assert list(source.parent.iterdir()) == [source]


def test_bytes_changed_behind_our_back_are_noticed_on_reading(bucket: Bucket, tmp_path: Path) -> None:
    store = bucket.store()
    bucket.client.put_object(Bucket=bucket.name, Key="eyrie/tests/x", Body=b"rotten",
                             Metadata={DIGEST: digest_bytes(b"sound")})
    with pytest.raises(ArtifactCorrupt):
        store.read("x")
    with pytest.raises(ArtifactCorrupt):
        store.download("x", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_an_object_of_others_without_a_digest_can_be_read(bucket: Bucket, tmp_path: Path) -> None:
    bucket.client.put_object(Bucket=bucket.name, Key="eyrie/tests/x", Body=b"from elsewhere")
    store = bucket.store()
    assert store.read("x") == b"from elsewhere"
    assert store.stat("x").sha256 is None  # type: ignore[union-attr]
    store.download("x", tmp_path / "x")
    with pytest.raises(ArtifactCorrupt):
        store.download("x", tmp_path / "x", sha256=digest_bytes(b"something else"))


def test_a_wrong_secret_is_refused_and_never_logged(rclone_s3: S3Server, tmp_path: Path,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    bucket = make_bucket(rclone_s3, tmp_path)
    (bucket.secret / "secret_key").write_text("sesame-that-does-not-open")
    with caplog.at_level(logging.INFO), pytest.raises(StoreAccessDenied, match="SignatureDoesNotMatch") as caught:
        bucket.store().write("x", b"")
    for text in (str(caught.value), caplog.text, repr(bucket.options())):
        assert "sesame" not in text
        assert rclone_s3.access_key not in text


def test_a_secret_without_a_key_and_no_credentials_at_all_raise_different_errors(
        moto_s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = make_bucket(moto_s3, tmp_path)
    (bucket.secret / "secret_key").unlink()
    with pytest.raises(InvalidInput, match="lacks secret_key"):
        bucket.store()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(StoreAccessDenied, match="no credentials"):
        bucket.store(credentials_dir=None).write("x", b"")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", moto_s3.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", moto_s3.secret_key)
    bucket.store(credentials_dir=None).write("x", b"")


def test_a_bucket_that_is_not_there_is_the_users_to_hint(bucket: Bucket) -> None:
    store = open_store("s3://no-such-bucket/x", bucket.options())
    with pytest.raises(EyrieError, match="no-such-bucket"):
        store.check()


def test_a_server_that_is_away_is_worth_another_try(bucket: Bucket, tmp_path: Path) -> None:
    store = open_store("s3://bucket", bucket.options(endpoint_url="http://127.0.0.1:9", max_attempts=2))
    started = time.monotonic()
    for use in (lambda: store.stat("x"), lambda: store.read("x"), lambda: store.write("x", b""),
                lambda: list(store.list()), lambda: store.download("x", tmp_path / "x")):
        with pytest.raises(StoreUnavailable):
            use()
    assert time.monotonic() - started < LONG_S


def test_versions_of_a_bucket_keep_what_a_manifest_was(moto_s3: S3Server, tmp_path: Path) -> None:
    bucket = make_bucket(moto_s3, tmp_path)
    bucket.client.put_bucket_versioning(Bucket=bucket.name, VersioningConfiguration={"Status": "Enabled"})
    store = bucket.store()
    store.write("x", b"old")
    store.write("x", b"new")
    assert store.read("x") == b"new"
    store.delete_all("")
    assert store.stat("x") is None
    versions = bucket.client.list_object_versions(Bucket=bucket.name)
    assert len(versions["Versions"]) == 2
