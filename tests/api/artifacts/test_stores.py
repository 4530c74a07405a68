"""What every artifact store does, local or S3; each test runs on all of them."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from eyrie_api.artifacts import digest_bytes, digest_file
from eyrie_api.artifacts.store import MIN_PART_BYTES, AlreadyWritten, ArtifactStore, StoredObject, checked_key
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing, InvalidInput

MakeFile = Callable[..., Path]
LARGE = 2 * MIN_PART_BYTES + 12_345


def test_what_is_written_is_read_back_whole_and_in_ranges(store: ArtifactStore) -> None:
    data = bytes(range(256)) * 4
    for key in ("a", "jobs/x/manifest.json", "with space/and+plus/100%", "naive-\u00e4\u4e2d/x.y"):
        store.write(key, data)
        assert store.stat(key) == StoredObject(key, 1024, digest_bytes(data))
    assert store.read(key) == data
    assert store.read(key, start=10, length=7) == data[10:17]
    assert store.read(key, start=1000) == data[1000:]
    assert store.read(key, start=1000, length=9999) == data[1000:]
    assert store.read(key, start=1024) == store.read(key, start=5000, length=3) == store.read(key, length=0) == b""


def test_an_empty_object_is_an_object(store: ArtifactStore, tmp_path: Path, a_file: MakeFile) -> None:
    store.upload("empty", a_file(0))
    assert store.stat("empty") == StoredObject("empty", 0, digest_bytes(b""))
    assert store.read("empty") == b""
    store.download("empty", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b""


def test_what_is_not_there_is_missing_and_may_be_deleted(store: ArtifactStore, tmp_path: Path) -> None:
    store.write("a/b", b"x")
    for key in ("nothing", "a", "a/b/c"):
        assert store.stat(key) is None
        with pytest.raises(ArtifactMissing):
            store.read(key)
        with pytest.raises(ArtifactMissing):
            store.download(key, tmp_path / "target")
    store.delete("nothing")
    assert list(tmp_path.glob("*target*")) == []


@pytest.mark.parametrize("size", [0, 10, LARGE])
def test_bytes_that_are_in_no_file_are_written_in_pieces_and_carry_their_digest(store: ArtifactStore,
                                                                                size: int) -> None:
    data = (bytes(range(251)) * (size // 251 + 1))[:size]
    chunks = [data[start:start + 100_003] for start in range(0, size, 100_003)]
    wanted = StoredObject("rows", size, digest_bytes(data))
    store.write_stream("rows", chunks, size_bytes=size, sha256=wanted.sha256 or "")
    assert store.stat("rows") == wanted
    assert store.read("rows") == data


@pytest.mark.parametrize("size", [10, LARGE])
def test_a_stream_that_is_not_what_was_announced_leaves_the_object_as_it_was(store: ArtifactStore, size: int) -> None:
    store.write("rows", b"before")
    for chunks in ([b"x" * size, b"more"], [b"x" * (size - 1)], [b"y" * size]):
        with pytest.raises(ArtifactCorrupt, match="rows"):
            store.write_stream("rows", chunks, size_bytes=size, sha256=digest_bytes(b"x" * size))
    with pytest.raises(ZeroDivisionError):
        store.write_stream("rows", (b"x" * (size // left) for left in (2, 0)), size_bytes=size, sha256="")
    assert store.read("rows") == b"before"
    assert store.sweep_unfinished(older_than_s=0.0) == 0, "nothing invisible is left"


def test_a_later_write_takes_the_place_of_the_earlier(store: ArtifactStore) -> None:
    store.write("x", b"first")
    store.write("x", b"second, and longer")
    assert store.stat("x") == StoredObject("x", 18, digest_bytes(b"second, and longer"))
    assert store.read("x") == b"second, and longer"


def test_listing_is_ordered_and_keeps_to_its_directory(store: ArtifactStore) -> None:
    for key in ("b/2", "b/10", "a", "b/c/d", "bb/1"):
        store.write(key, key.encode())
    assert [found.key for found in store.list()] == ["a", "b/10", "b/2", "b/c/d", "bb/1"]
    assert [(found.key, found.size_bytes) for found in store.list("b")] == [("b/10", 4), ("b/2", 3), ("b/c/d", 5)]
    assert list(store.list("nowhere")) == []
    store.delete("b/2")
    store.delete_all("b")
    assert [found.key for found in store.list()] == ["a", "bb/1"]
    store.delete_all("b")


def test_a_listing_longer_than_a_page_is_whole(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyrie_api.artifacts.s3.PAGE", 3)
    names = [f"many/{number:02d}" for number in range(10)]
    for name in names:
        store.write(name, b"x")
    assert [found.key for found in store.list("many")] == names
    store.delete_all("many")
    assert list(store.list()) == []


def test_what_is_written_once_stays(store: ArtifactStore) -> None:
    assert store.write_once("manifest.json", b"one")
    assert not store.write_once("manifest.json", b"one"), "the same again is fine: the first answer may have been lost"
    with pytest.raises(AlreadyWritten):
        store.write_once("manifest.json", b"other")
    assert store.read("manifest.json") == b"one"


def test_of_writers_that_disagree_one_wins_where_the_store_can_promise_it(store: ArtifactStore) -> None:
    if not store.check():
        pytest.skip("this server ignores If-None-Match, and the store says so")
    outcomes: dict[int, bool] = {}
    ready = threading.Barrier(6)

    def write(number: int) -> None:
        ready.wait(60)
        try:
            outcomes[number] = store.write_once("manifest.json", str(number).encode())
        except AlreadyWritten:
            outcomes[number] = False

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [number for number, won in outcomes.items() if won]
    assert len(outcomes) == 6
    assert store.read("manifest.json") == str(winner).encode()


@pytest.mark.parametrize("size", [1, MIN_PART_BYTES, LARGE], ids=["small", "one-part", "three-parts"])
def test_a_file_goes_up_and_comes_back_with_its_digest(store: ArtifactStore, tmp_path: Path, a_file: MakeFile,
                                                      size: int) -> None:
    source = a_file(size)
    store.upload("models/a.bin", source)
    assert store.stat("models/a.bin") == StoredObject("models/a.bin", size, digest_file(source))
    target = tmp_path / "deep" / "down" / "a.bin"
    store.download("models/a.bin", target)
    assert digest_file(target) == digest_file(source)
    assert store.read("models/a.bin", start=size - 1) == source.read_bytes()[-1:]
    assert [path.name for path in (*source.parent.iterdir(), *target.parent.iterdir())] == ["a.bin", "a.bin"]


def test_bytes_that_are_not_what_they_should_be_are_refused_and_leave_the_target_alone(
        store: ArtifactStore, tmp_path: Path) -> None:
    store.write("x", b"what is there")
    (tmp_path / "x").write_bytes(b"what was here")
    with pytest.raises(ArtifactCorrupt):
        store.download("x", tmp_path / "x", sha256=digest_bytes(b"what should be there"))
    assert (tmp_path / "x").read_bytes() == b"what was here"
    store.download("x", tmp_path / "x", sha256=digest_bytes(b"what is there"))
    assert (tmp_path / "x").read_bytes() == b"what is there"


def test_what_is_no_key_is_refused(store: ArtifactStore) -> None:
    for key in ("", "/a", "a/", "a//b", "../a", "a/../b", ".hidden", "a/.part", "a\\b", "a\nb", "."):
        for use in (store.stat, store.read, store.delete, lambda key: store.write(key, b""), checked_key):
            with pytest.raises(InvalidInput):
                use(key)


def test_the_check_leaves_nothing(store: ArtifactStore) -> None:
    store.check()
    assert list(store.list()) == []
