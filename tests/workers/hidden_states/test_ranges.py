"""A store is read through real S3 by ranges: the same tensors, verified as they arrive."""

from pathlib import Path

import pytest
import torch

from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing
from eyrie_workers.catalog import STORE_ADDRESS_FILE
from eyrie_workers.hidden_states.row_sources import read_row_sources, write_row_sources
from eyrie_workers.hidden_states.shard_format import INDEX, TokenRow, shard_name
from eyrie_workers.hidden_states.storage_backend import ObjectStoreBackend, open_backend
from eyrie_workers.hidden_states.store import FeatureStore, StoreDamaged
from eyrie_workers.hidden_states.store import main as verify
from eyrie_workers.hidden_states.writer import FeatureWriter, is_whole
from tests.api.artifacts.conftest import make_bucket
from tests.feature_rows import write_shard
from tests.servers.s3 import S3Server
from tests.workers.hidden_states.test_store import flip_a_bit, layout, store_of, upload_files


@pytest.mark.parametrize("with_index", [True, False])
def test_rows_read_through_s3_are_those_of_the_directory(rclone_s3: S3Server, tmp_path: Path, *,
                                                         with_index: bool) -> None:
    here = tmp_path / "here"
    store_of(here, layout("int8", hidden=64, block_tokens=32), [40, 90, 7, 120, 64, 33], rows_per_shard=2)
    if not with_index:
        (here / INDEX).unlink()
    remote = make_bucket(rclone_s3, tmp_path).store()
    upload_files(remote, here, "capture")
    near, far = FeatureStore(here), FeatureStore(ObjectStoreBackend(remote, "capture"))
    assert far.lengths == near.lengths
    groups = [[4, 1], [0, 5, 2], [3]]
    for packed, group in zip(far.batches(groups, ahead=2), groups, strict=True):
        wanted = near.read(group)
        for name in ("token_ids", "loss_mask", "aux", "last"):
            assert torch.equal(getattr(packed, name), getattr(wanted, name)), name


def test_the_sources_of_rows_are_read_through_s3(rclone_s3: S3Server, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    remote = make_bucket(rclone_s3, tmp_path).store()
    assert read_row_sources(ObjectStoreBackend(remote, "capture")) is None
    write_row_sources(here, ["chats", "tools", "chats"])
    upload_files(remote, here, "capture")
    assert read_row_sources(ObjectStoreBackend(remote, "capture"), 3) == ["chats", "tools", "chats"]


def test_a_directory_that_names_another_place_is_read_there(
        rclone_s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    store_of(here, layout("int8", hidden=64), [40, 90], rows_per_shard=2)
    bucket = make_bucket(rclone_s3, tmp_path)
    upload_files(bucket.store("eyrie"), here, "jobs/1/capture")
    monkeypatch.setenv("EYRIE_ARTIFACTS_ENDPOINT_URL", rclone_s3.endpoint_url)
    monkeypatch.setenv("EYRIE_ARTIFACTS_CREDENTIALS_DIR", str(bucket.secret))
    (tmp_path / STORE_ADDRESS_FILE).write_text(f"s3://{bucket.name}/eyrie/jobs/1/capture\n")
    far = FeatureStore(open_backend(tmp_path))
    assert torch.equal(far.read([1, 0]).aux, FeatureStore(here).read([1, 0]).aux)


def test_damage_behind_s3_is_found_when_the_row_is_read_and_noted_there(rclone_s3: S3Server, tmp_path: Path) -> None:
    here = tmp_path / "here"
    store_of(here, layout("int8", hidden=64), [40, 90, 7, 120], rows_per_shard=2)
    flip_a_bit(here / shard_name(1), 2000)
    remote = make_bucket(rclone_s3, tmp_path).store()
    upload_files(remote, here, "capture")
    store = FeatureStore(ObjectStoreBackend(remote, "capture"))
    store.read([0, 1])
    with pytest.raises(StoreDamaged, match="shard-00001"):
        store.read([1, 2, 3])
    assert remote.stat("capture/shard-00001.damaged") is not None


def test_a_shard_that_vanishes_behind_s3_is_named_by_whoever_reads_it_and_made_again_by_capture(
        rclone_s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, near, of = tmp_path / "here", tmp_path / "near", layout("int8", hidden=64)
    rows = store_of(near, of, [40, 90, 7, 120], rows_per_shard=2)
    bucket = make_bucket(rclone_s3, tmp_path)
    remote, key = bucket.store("eyrie"), f"capture/{shard_name(1)}"
    upload_files(remote, near, "capture")
    monkeypatch.setenv("EYRIE_ARTIFACTS_ENDPOINT_URL", rclone_s3.endpoint_url)
    monkeypatch.setenv("EYRIE_ARTIFACTS_CREDENTIALS_DIR", str(bucket.secret))
    here.mkdir()
    (here / STORE_ADDRESS_FILE).write_text(f"s3://{bucket.name}/eyrie/capture\n")
    (here / INDEX).write_bytes((near / INDEX).read_bytes())
    assert is_whole(here)

    reader = FeatureStore(open_backend(here))
    bucket.client.delete_object(Bucket=bucket.name, Key=f"eyrie/{key}")
    with pytest.raises(ArtifactMissing, match=f"no {key}"):
        reader.read([1, 2, 3])
    assert torch.equal(reader.read([0, 1]).aux, FeatureStore(near).read([0, 1]).aux)
    with pytest.raises(StoreDamaged, match="shard-00001"):
        FeatureStore(open_backend(here))
    assert not is_whole(here)

    writer = FeatureWriter(here, of)
    assert sorted(writer.shards) == [0]
    write_shard(writer, rows[2:4], 1)
    writer.finish()
    assert is_whole(here)
    assert remote.read(key) == (near / shard_name(1)).read_bytes()


def test_the_verify_program_names_every_damaged_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_of(tmp_path, layout("int8"), [10, 20, 30])
    assert verify([str(tmp_path)]) == 0
    for number in (0, 2):
        flip_a_bit(tmp_path / shard_name(number), 100)
    assert verify([str(tmp_path)]) == ArtifactCorrupt.exit_code
    result = capsys.readouterr().out
    assert "shard-00000" in result
    assert "shard-00002" in result
    assert "2 damaged shards" in result
    assert verify([str(tmp_path / "nowhere")]) != 0


def test_shards_are_uploaded_one_by_one_and_none_stays_on_this_machine(
        rclone_s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of, near, here = layout("int8", hidden=64), tmp_path / "near", tmp_path / "here"
    rows = store_of(near, of, [40, 90, 7, 120, 64, 33], rows_per_shard=2)
    bucket = make_bucket(rclone_s3, tmp_path)
    monkeypatch.setenv("EYRIE_ARTIFACTS_ENDPOINT_URL", rclone_s3.endpoint_url)
    monkeypatch.setenv("EYRIE_ARTIFACTS_CREDENTIALS_DIR", str(bucket.secret))
    here.mkdir()
    (here / STORE_ADDRESS_FILE).write_text(f"s3://{bucket.name}/eyrie/capture\n")
    remote = bucket.store("eyrie")

    writer = FeatureWriter(here, of)
    write_shard(writer, rows[0:2], 0)
    with pytest.raises(ZeroDivisionError), writer.open_shard(
            [TokenRow(rows[2].row_id, rows[2].token_ids, rows[2].loss_mask)], 1):
        raise ZeroDivisionError
    writer = FeatureWriter(here, of)  # another pod
    assert sorted(writer.shards) == [0]
    for number in (1, 2):
        write_shard(writer, rows[2 * number:2 * number + 2], number)
    assert writer.finish() == [here / INDEX]
    assert writer.size_bytes == sum(path.stat().st_size for path in near.glob("shard-*"))
    assert {path.name for path in here.iterdir()} == {STORE_ADDRESS_FILE, INDEX}
    assert is_whole(here)
    assert (here / INDEX).read_bytes() == (near / INDEX).read_bytes()
    for path in near.glob("shard-*"):
        assert remote.read(f"capture/{path.name}") == path.read_bytes()

    remote.write("capture/shard-00001.damaged", b"a digest differs")
    assert not is_whole(here)
    assert FeatureWriter(here, of).damaged == {"shard-00001.states": "a digest differs"}
    remote.write("capture/shard-00001.states", (near / "shard-00001.states").read_bytes()[:-1])
    writer = FeatureWriter(here, of)
    write_shard(writer, rows[2:4], 1)
    assert remote.stat("capture/shard-00001.damaged") is None
    assert remote.read("capture/shard-00001.states") == (near / "shard-00001.states").read_bytes()
    assert is_whole(here)
