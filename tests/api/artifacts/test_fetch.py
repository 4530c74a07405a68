"""A drafter is fetched out of its stage: that directory alone, compared with the manifest, and only what is missing."""

from pathlib import Path

import pytest

from eyrie_api.artifacts.directories import upload_dir
from eyrie_api.artifacts.fetch import fetch_part, main
from eyrie_api.artifacts.local import LocalStore
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing
from tests.api.samples import benchmark_report, finish_stage

FILES = {"checkpoints/c/config.json": b"{}", "checkpoints/c/model.bin": b"1" * 2000, "checkpoints/cd/model.bin": b"2",
         "state.bin": b"3" * 1000}
PREFIX = "jobs/j/train/a"


@pytest.fixture
def filled(tmp_path: Path) -> LocalStore:
    made, store = tmp_path / "made", LocalStore(tmp_path / "store")
    finish_stage(made, "benchmark", benchmark_report("c", {"chat": (2.0,)}), FILES, "j")
    upload_dir(store, made, PREFIX)
    return store


def test_one_part_of_a_stage_is_fetched_and_nothing_else(filled: LocalStore, tmp_path: Path) -> None:
    assert fetch_part(filled, PREFIX, "checkpoints/c", tmp_path / "drafter") == 2
    found = {path.name: path.read_bytes() for path in (tmp_path / "drafter").iterdir()}
    assert found == {"config.json": b"{}", "model.bin": b"1" * 2000}


def test_fetching_again_repairs_what_is_torn_and_leaves_the_rest(filled: LocalStore, tmp_path: Path) -> None:
    fetch_part(filled, PREFIX, "checkpoints/c", tmp_path / "drafter")
    kept = (tmp_path / "drafter" / "config.json").stat().st_mtime_ns
    (tmp_path / "drafter" / "model.bin").write_bytes(b"torn")
    fetch_part(filled, PREFIX, "checkpoints/c", tmp_path / "drafter")
    assert (tmp_path / "drafter" / "model.bin").read_bytes() == b"1" * 2000
    assert (tmp_path / "drafter" / "config.json").stat().st_mtime_ns == kept


def test_bytes_that_differ_from_the_manifest_are_refused(filled: LocalStore, tmp_path: Path) -> None:
    filled.write(f"{PREFIX}/checkpoints/c/model.bin", b"other")
    with pytest.raises(ArtifactCorrupt, match=r"model\.bin"):
        fetch_part(filled, PREFIX, "checkpoints/c", tmp_path / "drafter")


def test_a_part_that_is_not_listed_is_missing(filled: LocalStore, tmp_path: Path) -> None:
    with pytest.raises(ArtifactMissing, match="checkpoints/x"):
        fetch_part(filled, PREFIX, "checkpoints/x", tmp_path / "drafter")


def test_as_a_program_it_reads_the_store_from_the_environment_and_tells_the_hint(
        filled: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("EYRIE_ARTIFACTS_URL", filled.url)
    line = ["--part", "checkpoints/c", "--directory", str(tmp_path / "drafter")]
    assert main(["--prefix", PREFIX, *line]) == 0
    assert "2 files" in capsys.readouterr().out
    assert main(["--prefix", "jobs/j/train/b", *line]) != 0
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ArtifactMissing: ")
    assert hint.removeprefix("hint: ")
