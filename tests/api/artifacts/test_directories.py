"""Whole stage directories: what is there is not moved, what differs is refused, the manifest comes last."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from eyrie_api.artifacts import MANIFEST, read_manifest, read_report, verify, verify_part
from eyrie_api.artifacts.directories import download_dir, upload_dir
from eyrie_api.artifacts.store import AlreadyWritten, ArtifactStore
from eyrie_api.contract.reports import TuneReport
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing, InvalidInput
from tests.api.samples import benchmark_report, finish_stage

FILES = {"index.json": b"{}", "shards/0.bin": b"0" * 1000, "shards/1.bin": b"1" * 2000}
PREFIX = "jobs/j/benchmark/c"


def a_stage(directory: Path, job_id: str = "j") -> Path:
    """A finished stage's directory, with what lies around in one."""
    finish_stage(directory, "benchmark", benchmark_report("c", {"chat": (2.0,)}), FILES, job_id)
    for name, data in {"events.jsonl": b"event\n", ".lock": b"", ".index.json.x1": b"half"}.items():
        (directory / name).write_bytes(data)
    return directory


def moved(store: ArtifactStore, verb: Literal["upload", "download"], move: Callable[[], None]) -> set[str]:
    """The keys below PREFIX that the store is asked to move while `move` runs."""
    keys, action = set[str](), getattr(store, verb)

    def counted(key: str, *values: Any, **options: Any) -> Any:
        keys.add(key.removeprefix(f"{PREFIX}/"))
        return action(key, *values, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, verb, counted)
        move()
    return keys


def names(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def test_a_finished_directory_goes_up_and_comes_down_whole(store: ArtifactStore, tmp_path: Path) -> None:
    made = a_stage(tmp_path / "made")
    upload_dir(store, made, PREFIX)
    assert [found.key for found in store.list(PREFIX)] == [
        f"{PREFIX}/{name}" for name in ("events.jsonl", "index.json", MANIFEST, "shards/0.bin", "shards/1.bin")]
    download_dir(store, PREFIX, tmp_path / "back")
    assert names(tmp_path / "back") == {*FILES, MANIFEST}
    assert read_manifest(tmp_path / "back") == read_manifest(made)
    for name, data in FILES.items():
        assert (tmp_path / "back" / name).read_bytes() == data


def test_what_is_there_already_is_not_moved_again(store: ArtifactStore, tmp_path: Path) -> None:
    made = a_stage(tmp_path / "made")
    for name in ("events.jsonl", "shards/0.bin"):
        store.upload(f"{PREFIX}/{name}", made / name)
    store.write(f"{PREFIX}/index.json", b"torn")
    assert moved(store, "upload", lambda: upload_dir(store, made, PREFIX)) == {"index.json", "shards/1.bin"}
    assert moved(store, "upload", lambda: upload_dir(store, made, PREFIX)) == set()
    back = tmp_path / "back"
    download_dir(store, PREFIX, back)
    (back / "shards/0.bin").write_bytes(b"1" * 1000)
    (back / MANIFEST).unlink()
    assert moved(store, "download", lambda: download_dir(store, PREFIX, back)) == {"shards/0.bin"}
    assert (back / "shards/0.bin").read_bytes() == FILES["shards/0.bin"]


def test_a_file_that_differs_from_its_manifest_does_not_leave(store: ArtifactStore, tmp_path: Path) -> None:
    made = a_stage(tmp_path / "made")
    (made / "shards/0.bin").write_bytes(b"x" * 1000)
    with pytest.raises(ArtifactCorrupt):
        upload_dir(store, made, PREFIX)
    (made / "shards/0.bin").unlink()
    with pytest.raises(ArtifactMissing):
        upload_dir(store, made, PREFIX)
    assert store.stat(f"{PREFIX}/{MANIFEST}") is None


def test_a_directory_whose_files_are_gone_or_rotten_in_the_store_is_not_taken_for_whole(
        store: ArtifactStore, tmp_path: Path) -> None:
    upload_dir(store, a_stage(tmp_path / "made"), PREFIX)
    store.write(f"{PREFIX}/shards/1.bin", b"2" * 2000)
    with pytest.raises(ArtifactCorrupt):
        download_dir(store, PREFIX, tmp_path / "back")
    store.delete(f"{PREFIX}/shards/1.bin")
    with pytest.raises(ArtifactMissing):
        download_dir(store, PREFIX, tmp_path / "back")
    assert not (tmp_path / "back" / MANIFEST).exists(), "the manifest comes last"


def test_the_second_of_two_makers_of_one_artifact_is_refused(store: ArtifactStore, tmp_path: Path) -> None:
    upload_dir(store, a_stage(tmp_path / "one"), PREFIX)
    with pytest.raises(AlreadyWritten):
        upload_dir(store, a_stage(tmp_path / "other", job_id="another"), PREFIX)
    download_dir(store, PREFIX, tmp_path / "back")
    assert read_manifest(tmp_path / "back").job_id == "j"


def test_a_file_that_the_stage_itself_has_put_into_the_store_need_not_be_here(store: ArtifactStore,
                                                                              tmp_path: Path) -> None:
    made = a_stage(tmp_path / "made")
    store.upload(f"{PREFIX}/shards/1.bin", made / "shards/1.bin")
    (made / "shards/1.bin").unlink()
    upload_dir(store, made, PREFIX)
    download_dir(store, PREFIX, tmp_path / "back", leave_out=("shards/0*",))
    assert names(tmp_path / "back") == {"index.json", "shards/1.bin", MANIFEST}
    store.write(f"{PREFIX}/shards/1.bin", b"x" * 2000)
    with pytest.raises(ArtifactMissing, match=r"1\.bin is listed"):
        upload_dir(store, made, PREFIX)


def test_an_unfinished_directory_is_downloaded_only_on_request(store: ArtifactStore, tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "checkpoints").mkdir(parents=True)
    (work / "checkpoints" / "state.pt").write_bytes(b"step 1")
    with pytest.raises(ArtifactMissing):
        upload_dir(store, work, PREFIX)
    store.upload(f"{PREFIX}/checkpoints/state.pt", work / "checkpoints" / "state.pt")
    with pytest.raises(ArtifactMissing):
        download_dir(store, PREFIX, tmp_path / "next")
    for expected in ({"checkpoints/state.pt"}, set[str]()):
        assert moved(store, "download",
                     lambda: download_dir(store, PREFIX, tmp_path / "next", unfinished=True)) == expected
    assert (tmp_path / "next/checkpoints/state.pt").read_bytes() == b"step 1"
    download_dir(store, "jobs/nobody", tmp_path / "none", unfinished=True)
    assert names(tmp_path / "none") == set()


def test_a_manifest_that_names_a_path_outside_is_refused(store: ArtifactStore, tmp_path: Path) -> None:
    upload_dir(store, a_stage(tmp_path / "made"), PREFIX)
    store.write(f"{PREFIX}/{MANIFEST}", store.read(f"{PREFIX}/{MANIFEST}").replace(b"shards/0.bin", b"../../0.bin"))
    with pytest.raises(InvalidInput):
        download_dir(store, PREFIX, tmp_path / "deep" / "back")
    assert not (tmp_path / "0.bin").exists()


def test_a_part_of_a_stage_is_compared_with_the_stages_manifest(tmp_path: Path) -> None:
    made = a_stage(tmp_path / "stages" / "train" / "c")
    (made / "shards/1.bin").write_bytes(b"1" * 1999 + b"0")
    verify_part(made / "index.json")
    for part in (made, made / "shards", made / "shards" / "1.bin"):
        with pytest.raises(ArtifactCorrupt, match=r"1\.bin"):
            verify_part(part)
    (made / "shards/1.bin").unlink()
    with pytest.raises(ArtifactMissing):
        verify_part(made)
    verify_part(tmp_path / "published")  # no stage made it


def test_a_trained_drafter_without_a_manifest_is_refused_and_one_of_the_user_is_not(tmp_path: Path) -> None:
    made = a_stage(tmp_path / "jobs" / "j" / "stages" / "train" / "c")
    verify_part(made / "shards")
    for others in ("jobs/j/stages/benchmark/c/drafter", "jobs/mine/train/c", "stages/train/c", "jobs/j/stages/train"):
        verify_part(tmp_path / others)
    (made / MANIFEST).unlink()
    for path in (made, made / "shards"):
        with pytest.raises(ArtifactMissing, match=r"has no manifest\.json.*--from STAGE"):
            verify_part(path)


def test_a_manifest_in_the_place_of_another_stages_is_refused(tmp_path: Path) -> None:
    made = a_stage(tmp_path / "stages" / "train" / "c")
    (made / "held-out.jsonl").write_bytes(b"its manifest does not list it")
    with pytest.raises(ArtifactCorrupt, match=r"that of stage '\w+' and lists no held-out\.jsonl"):
        verify_part(made / "held-out.jsonl")
    with pytest.raises(ArtifactCorrupt, match="and has no TuneReport"):
        read_report(made, TuneReport)


def test_the_program_before_an_engine_ends_with_the_error_of_a_rotten_drafter(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = a_stage(tmp_path / "stages" / "train" / "c")
    assert verify.main(["--path", str(made / "shards")]) == 0
    (made / "shards/1.bin").write_bytes(b"1" * 1999 + b"0")
    assert verify.main(["--path", str(made / "shards")]) == ArtifactCorrupt.exit_code
    assert "ArtifactCorrupt" in capsys.readouterr().err
