"""A ledger of answers larger than the disk: parts go to a real S3 server, and nothing is lost or answered twice."""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest

from eyrie_api.artifacts import digest_file
from eyrie_api.artifacts.directories import download_dir
from eyrie_api.artifacts.store import ArtifactStore
from eyrie_api.contract.stages import FileEntry
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing
from eyrie_pipelines.directory_sync import DirectorySync, join_parts
from eyrie_workers.catalog import LEDGER_PARTS, ROWS_FILE, STORE_ADDRESS_FILE, ledger_part
from eyrie_workers.data.rows import (
    AnsweredRow,
    LedgerParts,
    RowLedger,
    RowSampling,
    StoredRowLedger,
    open_row_ledger,
    read_rows,
)
from eyrie_workers.stored_files import BLOCK_BYTES, RangeReader, open_binary, open_object, put_in_place
from tests.api.artifacts.conftest import make_bucket
from tests.api.samples import benchmark_report, finish_stage
from tests.servers.s3 import S3Server

STAGE = "jobs/1/stages/regenerate"
NEVER_S = 3600.0


def row(number: int) -> AnsweredRow:
    return AnsweredRow(id=f"{number:032x}", source="a.jsonl", line=number + 1, category="", prompt_ids=(1, 2),
                       answer_ids=(3,) * (number % 7 + 1), finish_reason="stop", text=f"answer {number} \u2028 \u00e9",
                       sampling=RowSampling(temperature=0.7, top_p=1.0, top_k=0, max_new_tokens=8),
                       seed=number, ids_exact=True)


@pytest.fixture
def store(rclone_s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArtifactStore:
    """A bucket, also for programs that find it by the environment."""
    bucket = make_bucket(rclone_s3, tmp_path)
    monkeypatch.setenv("EYRIE_ARTIFACTS_ENDPOINT_URL", rclone_s3.endpoint_url)
    monkeypatch.setenv("EYRIE_ARTIFACTS_CREDENTIALS_DIR", str(bucket.secret))
    return bucket.store("eyrie")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


def a_pod(directory: Path, store: ArtifactStore) -> Path:
    """The directory of regenerate in a new pod."""
    directory.mkdir()
    (directory / STORE_ADDRESS_FILE).write_text(f"{store.url}/{STAGE}\n")
    return directory / ROWS_FILE


def in_parts(path: Path, store: ArtifactStore, pool: ThreadPoolExecutor, part_bytes: int) -> StoredRowLedger:
    return StoredRowLedger(path, LedgerParts(path.parent, store, STAGE, pool, every_s=NEVER_S, part_bytes=part_bytes))


def sizes(store: ArtifactStore) -> list[int]:
    return [one.size_bytes for one in store.list(f"{STAGE}/{LEDGER_PARTS}")]


def size_of(path: Path) -> int:
    with suppress(FileNotFoundError):  # handed over since it was listed
        return path.stat().st_size
    return 0


def here(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f".{ROWS_FILE}.*"))


def test_parts_of_the_answers_leave_this_machine_as_they_are_finished_and_another_pod_finds_them(
        store: ArtifactStore, tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    path, order = a_pod(tmp_path / "pod", store), [*range(0, 61, 2), *range(1, 61, 2)]
    ledger, most = in_parts(path, store, pool, 2000), 0
    for number in order:
        ledger.append(row(number))
        most = max(most, sum(map(size_of, here(path))))
    longest = max(len(row(number).model_dump_json()) for number in order) + 30
    assert most < 2 * (2000 + longest)
    assert ledger.row(row(0).id) == row(0), "a part in the store"
    assert ledger.row(row(59).id) == row(59), "the end, on this machine"
    assert len(sizes(store)) >= 5
    assert all(2000 <= size < 2000 + longest for size in sizes(store))

    again = in_parts(a_pod(tmp_path / "other", store), store, pool, 2000)
    assert 0 < len(again) < 61, "what had not been handed over is answered again"
    for number in order[len(again):]:
        again.append(row(number))
    kept = list(again.put_in_order((row(number).id for number in range(70)), lambda one: one.line % 10 != 0))
    assert kept == [row(number) for number in range(61)]
    assert not here(tmp_path / "other" / ROWS_FILE)

    plain = RowLedger(tmp_path / ROWS_FILE)
    for number in order:
        plain.append(row(number))
    list(plain.put_in_order((row(number).id for number in range(61)), lambda one: one.line % 10 != 0))
    (entry,) = again.in_store
    assert store.read(f"{STAGE}/{ROWS_FILE}") == (tmp_path / ROWS_FILE).read_bytes()
    assert entry == FileEntry(path=ROWS_FILE, size_bytes=(tmp_path / ROWS_FILE).stat().st_size,
                              sha256=digest_file(tmp_path / ROWS_FILE))


def test_a_program_killed_with_lines_on_its_disk_goes_on_with_all_that_are_whole(
        store: ArtifactStore, tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    path = a_pod(tmp_path / "pod", store)
    ledger = in_parts(path, store, pool, 2000)
    for number in range(20):
        ledger.append(row(number))
    pool.submit(lambda: None).result()  # the part on its way has arrived
    (tail,) = here(path)
    tail.write_bytes(tail.read_bytes() + b'{"id": "torn')
    # Killed after an upload and before the file was deleted.
    (tmp_path / "pod" / f".{ROWS_FILE}.{0:015d}").write_bytes(store.read(f"{STAGE}/{ledger_part(0)}"))
    again = in_parts(path, store, pool, 2000)
    assert again.entries == [row(number) for number in range(20)]
    assert not here(path)
    again.append(row(20))
    assert [entry.line for entry in in_parts(path, store, pool, 2000).entries] == list(range(1, 22))


@pytest.mark.slow
def test_a_program_killed_while_it_puts_the_answers_in_order_leaves_them_all_to_the_next(
        store: ArtifactStore, tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    rows = {number: row(number).model_copy(update={"text": f"{number} " * 400}) for number in range(4000)}
    ledger = in_parts(a_pod(tmp_path / "first", store), store, pool, 2**20)
    plain = RowLedger(tmp_path / ROWS_FILE)
    for number in sorted(rows, key=lambda one: (one % 7, one)):
        ledger.append(rows[number])
        plain.append(rows[number])
    list(plain.put_in_order(one.id for one in rows.values()))
    pool.submit(lambda: None).result()
    command = [sys.executable, "-m", "tests.workers.data.put_in_order"]
    # While lines are read for the digest, when all are, and while the object is sent.
    for number, (num_read, later_s) in enumerate(((1, 0.0), (2000, 0.0), (4000, 0.0), (4000, 0.1), (4000, 0.3))):
        path = a_pod(tmp_path / f"pod-{number}", store) if number else tmp_path / "first" / ROWS_FILE
        with subprocess.Popen([*command, str(path)], stdout=subprocess.PIPE, text=True) as program:
            assert program.stdout is not None
            assert list(islice(program.stdout, num_read)) == ["read\n"] * num_read
            time.sleep(later_s)
            program.kill()
        left = {one.key for one in store.list(STAGE)}
        assert f"{STAGE}/{ledger_part(0)}" in left, "parts stay until the stage has its manifest"
        if f"{STAGE}/{ROWS_FILE}" in left:
            assert store.read(f"{STAGE}/{ROWS_FILE}") == (tmp_path / ROWS_FILE).read_bytes(), "whole or not there"
    last = a_pod(tmp_path / "last", store)
    subprocess.run([*command, str(last)], check=True, stdout=subprocess.DEVNULL, timeout=120)
    assert store.read(f"{STAGE}/{ROWS_FILE}") == (tmp_path / ROWS_FILE).read_bytes()


def test_rows_after_a_part_that_is_lost_are_answered_again(
        store: ArtifactStore, tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    ledger = in_parts(a_pod(tmp_path / "first", store), store, pool, 1000)
    for number in range(12):
        ledger.append(row(number))
    pool.submit(lambda: None).result()
    first, second, *rest = [one.key for one in store.list(f"{STAGE}/{LEDGER_PARTS}")]
    assert rest
    store.delete(second)
    kept = in_parts(a_pod(tmp_path / "second", store), store, pool, 1000)
    assert [entry.line for entry in kept.entries] == list(range(1, store.read(first).count(b"\n") + 1))
    assert [one.key for one in store.list(f"{STAGE}/{LEDGER_PARTS}")] == [first]


def test_the_ledger_is_handed_over_when_its_interval_has_passed_and_when_the_stage_ends_however_it_ends(
        store: ArtifactStore, tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    path = a_pod(tmp_path / "pod", store)
    parts = LedgerParts(path.parent, store, STAGE, pool, every_s=15.0, part_bytes=2**20, clock=lambda: now)
    ledger = StoredRowLedger(path, parts)
    ledger.append(row(0))
    assert sizes(store) == []
    now = 15.0
    ledger.append(row(1))
    pool.submit(lambda: None).result()
    assert len(sizes(store)) == 1
    monkeypatch.setenv("EYRIE_SYNC_S", str(NEVER_S))
    with suppress(KeyboardInterrupt), open_row_ledger(path) as opened:
        opened.append(row(2))
        raise KeyboardInterrupt
    assert len(sizes(store)) == 2
    with open_row_ledger(a_pod(tmp_path / "other", store)) as opened:
        assert opened.entries == [row(0), row(1), row(2)]


def test_a_job_goes_on_in_a_pod_that_keeps_its_ledger_as_a_file_and_in_one_that_does_not(
        store: ArtifactStore, tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    ledger = in_parts(a_pod(tmp_path / "ranged", store), store, pool, 1000)
    for number in range(10):
        ledger.append(row(number))
    pool.submit(lambda: None).result()
    with open_row_ledger(tmp_path / "ranged" / ROWS_FILE):
        pass
    copied = tmp_path / "copied"
    download_dir(store, STAGE, copied, unfinished=True)
    join_parts(copied)
    sync = DirectorySync(store, copied, STAGE)
    sync.begin()
    plain = RowLedger(copied / ROWS_FILE)
    assert len(plain) == 10
    for number in range(10, 20):
        plain.append(row(number))
    sync.sync()
    back = in_parts(a_pod(tmp_path / "back", store), store, pool, 1000)
    assert back.entries == [row(number) for number in range(20)]


def test_without_a_place_in_a_store_the_ledger_is_a_file(tmp_path: Path) -> None:
    with open_row_ledger(tmp_path / ROWS_FILE) as ledger:
        ledger.append(row(0))
    assert list(read_rows(tmp_path / ROWS_FILE)) == [row(0)]
    put_in_place(tmp_path / ROWS_FILE, tmp_path / ROWS_FILE)
    assert (tmp_path / ROWS_FILE).is_file()


def test_answers_in_the_store_are_read_as_those_of_a_file_and_compared_with_their_manifest(
        store: ArtifactStore, tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    ledger = RowLedger(made / ROWS_FILE)
    for number in range(30):
        ledger.append(row(number))
    data = (made / ROWS_FILE).read_bytes()
    path = a_pod(tmp_path / "pod", store)
    with pytest.raises(ArtifactMissing, match=ROWS_FILE):
        list(read_rows(path))
    finish_stage(path.parent, "benchmark", benchmark_report("c", {"chat": (2.0,)}), {ROWS_FILE: data}, "1")
    put_in_place(path, path)
    assert not path.exists()
    assert list(read_rows(path)) == [row(number) for number in range(30)]
    whole_lines_less = data[:data.rfind(b"\n", 0, -1) + 1]
    store.write(f"{STAGE}/{ROWS_FILE}", whole_lines_less)
    with pytest.raises(ArtifactCorrupt, match="differs from the digest"):
        list(read_rows(path))


def test_an_object_is_read_as_a_file_at_any_place(store: ArtifactStore, tmp_path: Path) -> None:
    data = b"".join(b"%d\n" % number for number in range(1_400_000))
    assert len(data) > BLOCK_BYTES
    path = a_pod(tmp_path / "pod", store)
    path.write_bytes(data)
    put_in_place(path, path)
    with open_binary(path) as file:
        assert b"".join(file) == data
        for place in (0, BLOCK_BYTES - 5, len(data) - 3, len(data) + 5, 17):
            file.seek(place)
            assert file.read(11) == data[place:place + 11]
    with pytest.raises(ArtifactCorrupt, match="ends before"), open_object(
            RangeReader(store), f"{STAGE}/{ROWS_FILE}", len(data) + 1) as file:
        file.read()
