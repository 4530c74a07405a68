"""The digests of large files that are kept: used while a file is what it was, and never after."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from eyrie_api.artifacts import digest_bytes, digest_file
from eyrie_workers.targets import loading
from eyrie_workers.targets.loading import known_digest

Hashed = list[Path]


@pytest.fixture
def hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hashed:
    """The files that were read for their digest, of a user with a home; every file is large and settled."""
    found: Hashed = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(loading, "_LARGE", 1)
    monkeypatch.setattr(loading, "_SETTLED_S", -1e9)
    monkeypatch.setattr(loading, "digest_file", lambda path: (found.append(path), digest_file(path))[1])
    return found


def made(directory: Path, data: bytes = b"weights") -> Path:
    path = directory / "model.safetensors"
    path.write_bytes(data)
    return path


def test_a_file_is_read_once_by_whatever_path_it_is_reached(tmp_path: Path, hashed: Hashed) -> None:
    path, link = made(tmp_path), tmp_path / "link"
    link.symlink_to(path)
    assert {known_digest(one) for one in (path, link, path)} == {digest_bytes(b"weights")}
    assert hashed == [path]


def rewrite(path: Path) -> None:
    path.write_bytes(b"WEIGHTS")


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"WEIGHTS")
    other.replace(path)


@pytest.mark.parametrize("change", [rewrite, replace])
def test_a_file_that_changed_is_read_again_although_its_size_and_time_are_the_same(
        tmp_path: Path, hashed: Hashed, change: Callable[[Path], None]) -> None:
    path = made(tmp_path)
    known_digest(path)
    times = path.stat()
    while path.stat().st_ctime_ns == times.st_ctime_ns:  # the clock of a file system ticks in milliseconds
        change(path)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert known_digest(path) == digest_bytes(b"WEIGHTS")
    assert hashed == [path, path]


def test_what_was_just_written_is_small_or_has_a_damaged_record_is_read(
        tmp_path: Path, hashed: Hashed, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path)
    monkeypatch.setattr(loading, "_SETTLED_S", 1e9)
    known_digest(path)
    assert not (tmp_path / "caches").exists()
    monkeypatch.setattr(loading, "_SETTLED_S", -1e9)
    known_digest(path)
    (record,) = (tmp_path / "caches/eyrie/digests").iterdir()
    record.write_text(record.read_text().replace(digest_bytes(b"weights")[-4:], "0000"))
    assert known_digest(path) == digest_bytes(b"weights")
    monkeypatch.setattr(loading, "_LARGE", 1000)
    known_digest(path)
    assert hashed == [path] * 4


def test_without_a_home_or_where_it_cannot_be_written_files_are_read(
        tmp_path: Path, hashed: Hashed, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path)
    (tmp_path / "file").write_text("")
    for caches in ("", str(tmp_path / "file")):
        monkeypatch.setenv("XDG_CACHE_HOME", caches)
        monkeypatch.delenv("HOME", raising=False)
        assert known_digest(path) == digest_bytes(b"weights")
    assert hashed == [path, path]
