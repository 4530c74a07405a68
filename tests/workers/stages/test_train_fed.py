"""A drafter does not depend on how its trainer is fed: from a directory, from S3, or by the target as it goes."""

import json
import signal
from pathlib import Path

import pytest

from eyrie_api.artifacts import read_manifest, read_report, verify_files
from eyrie_api.artifacts.directories import upload_dir
from eyrie_api.contract.reports import CaptureReport
from tests.api.artifacts.conftest import make_bucket
from tests.servers.s3 import S3Server
from tests.tiny import tiny_target
from tests.workers.stages import test_capture as capturing
from tests.workers.stages.test_train import report_of, run, same, start, wait_for_saved_state, weights, write_spec


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One target's answers, captured as a store and planned as a stream, and a drafter trained from the store."""
    home = tmp_path_factory.mktemp("fed")
    target = tiny_target(home / "target")
    capturing.write_rows(home / "rows", target, 24)
    for feed in ("store", "stream"):
        capturing.write_spec(home / feed, target, home / "rows", mode=feed, stream_buffer_bytes=2**16)
        assert capturing.run(home / feed) == 0
    write_spec(home / "from-store", target, home / "store", epochs=12)
    assert run(home / "from-store") == 0
    return home


def test_with_a_stream_capture_leaves_tokens_and_no_states(home: Path) -> None:
    manifest = read_manifest(home / "stream")
    verify_files(manifest, home / "stream")
    assert {entry.path for entry in manifest.files} == {"sources.json", "stream.json", "tokens.bin"}
    report, stored = (read_report(home / feed, CaptureReport) for feed in ("stream", "store"))
    assert isinstance(report, CaptureReport)
    assert isinstance(stored, CaptureReport)
    assert (report.rows, report.tokens, report.supervised_tokens, report.shards) == (
        stored.rows, stored.tokens, stored.supervised_tokens, 0)
    assert report.bytes < stored.bytes / 10
    before = (home / "stream" / "manifest.json").read_bytes()
    assert capturing.run(home / "stream") == 0
    assert (home / "stream" / "manifest.json").read_bytes() == before


def test_a_lost_plan_is_made_again(home: Path, tmp_path: Path) -> None:
    capturing.write_spec(tmp_path, home / "target", home / "rows", mode="stream")
    assert capturing.run(tmp_path) == 0
    whole = (tmp_path / "tokens.bin").read_bytes()
    (tmp_path / "tokens.bin").write_bytes(whole[:-4])
    assert capturing.run(tmp_path) == 0
    assert (tmp_path / "tokens.bin").read_bytes() == whole


@pytest.mark.slow
def test_trained_from_a_stream_killed_and_resumed_it_is_the_drafter_trained_from_the_store(
        home: Path, tmp_path: Path) -> None:
    write_spec(tmp_path, home / "target", home / "stream", epochs=12)
    process = start(tmp_path)
    wait_for_saved_state(tmp_path, process)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert run(tmp_path) == 0
    assert report_of(tmp_path).resumed_from_step > 0
    assert same(weights(tmp_path), weights(home / "from-store"))


def test_trained_through_s3_it_is_the_drafter_trained_from_the_directory(
        home: Path, tmp_path: Path, rclone_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = make_bucket(rclone_s3, tmp_path)
    upload_dir(bucket.store("eyrie"), home / "store", "capture")
    monkeypatch.setenv("EYRIE_ARTIFACTS_ENDPOINT_URL", rclone_s3.endpoint_url)
    monkeypatch.setenv("EYRIE_ARTIFACTS_CREDENTIALS_DIR", str(bucket.secret))
    write_spec(tmp_path / "out", home / "target", Path("unused"), epochs=12)
    spec = json.loads((tmp_path / "out" / "spec.json").read_text())
    spec["store_dir"] = f"s3://{bucket.name}/eyrie/capture"
    (tmp_path / "out" / "spec.json").write_text(json.dumps(spec))
    assert run(tmp_path / "out") == 0
    assert same(weights(tmp_path / "out"), weights(home / "from-store"))
