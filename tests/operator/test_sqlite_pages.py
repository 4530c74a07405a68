"""Which databases have lost pages, with SQLite's own files: copied while it writes, checkpoints and shrinks them."""

import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from eyrie_api.database.engine import Database
from eyrie_operator.doctor import DatabaseDamaged, check_database, check_whole
from eyrie_operator.sqlite_pages import ignored_commits, lost_pages
from tests.operator.conftest import Eyrie


def copied(path: Path, to: Path) -> Path:
    """Database and log as they are on the disk at this moment."""
    to.mkdir()
    for name in (path.name, f"{path.name}-wal"):
        if path.with_name(name).exists():
            shutil.copy(path.with_name(name), to / name)
    return to / path.name


def opened(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.executescript("PRAGMA journal_mode=WAL; PRAGMA wal_autocheckpoint=20; "
                             "CREATE TABLE t (id INTEGER, text TEXT)")
    return connection


@pytest.mark.parametrize("seed", range(4))
def test_no_page_of_a_whole_database_counts_as_lost_whatever_was_written_moved_and_deleted(
        tmp_path: Path, seed: int) -> None:
    rng, path = random.Random(seed), tmp_path / "a.db"
    connection = opened(path)
    reader = sqlite3.connect(path, isolation_level=None)
    for number in range(60):
        doing = rng.choice(("insert", "insert", "insert", "delete", "undo", "checkpoint", "vacuum", "read", "done"))
        if doing == "insert":
            connection.executemany("INSERT INTO t VALUES (?, ?)", [
                (number, "x" * rng.randrange(30_000)) for _ in range(rng.randrange(1, 6))])
        elif doing == "delete":
            connection.execute("DELETE FROM t WHERE id % 3 = ?", (rng.randrange(3),))
        elif doing == "undo":
            connection.execute("BEGIN")
            connection.execute("INSERT INTO t VALUES (?, ?)", (number, "y" * 200_000))
            within = copied(path, tmp_path / f"within-{number}")
            assert (lost_pages(within), ignored_commits(within)) == (0, 0)
            connection.execute("ROLLBACK")
        elif doing == "checkpoint":
            connection.execute(f"PRAGMA wal_checkpoint({rng.choice(('PASSIVE', 'TRUNCATE'))})")
        elif doing == "vacuum" and not reader.in_transaction:
            connection.execute("VACUUM")
        elif doing == "read" and not reader.in_transaction:  # keeps checkpoints from coming to an end
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM t").fetchone()
        elif doing == "done" and reader.in_transaction:
            reader.execute("COMMIT")
        now = copied(path, tmp_path / str(number))
        assert (lost_pages(now), ignored_commits(now)) == (0, 0), doing
    reader.close()
    connection.close()
    assert lost_pages(path) == 0


def test_a_file_that_is_cut_off_next_to_its_log_is_damaged_though_sqlite_finds_nothing_and_is_left_as_it_is(
        tmp_path: Path, eyrie: Eyrie) -> None:
    connection = opened(tmp_path / "a.db")
    connection.execute("INSERT INTO t VALUES (1, ?)", ("z" * 100_000,))
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.execute("INSERT INTO t VALUES (2, 'small')")
    path = copied(tmp_path / "a.db", tmp_path / "copy")
    connection.close()
    check_whole(Database(f"sqlite:///{path}"))
    cut = path.read_bytes()[:-3000]
    path.write_bytes(cut)
    database = Database(f"sqlite:///{path}")
    with pytest.raises(DatabaseDamaged, match="cut off: 1 of its pages") as raised:
        check_whole(database)
    assert "restore" in raised.value.hint
    migrated = eyrie("migrate", env={"EYRIE_DATABASE_URL": f"sqlite:///{path}"})
    assert migrated.returncode != 0
    assert "cut off" in migrated.stderr
    assert path.read_bytes() == cut
    check_database(database)  # reads zeros in the place of the text
    database.close()


def test_what_is_no_database_is_left_to_sqlite(tmp_path: Path) -> None:
    for name, data in (("empty", b""), ("short", b"SQLite format 3\0"), ("other", b"x" * 4096)):
        (tmp_path / name).write_bytes(data)
        assert lost_pages(tmp_path / name) == 0


@pytest.mark.parametrize("seed", range(12))
def test_each_flipped_bit_of_a_log_that_loses_a_committed_row_is_counted_and_no_other(
        tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    connection = opened(tmp_path / "a.db")
    connection.execute("PRAGMA wal_autocheckpoint=0")
    for number in range(8):
        connection.execute("INSERT INTO t VALUES (?, ?)", (number, "x" * rng.randrange(9_000)))
    path = copied(tmp_path / "a.db", tmp_path / "copy")
    connection.close()
    wal = path.with_name("a.db-wal")
    data = bytearray(wal.read_bytes())
    position = rng.choice((rng.randrange(32), 32 + 8 + rng.randrange(8), rng.randrange(len(data)), len(data) - 1))
    data[position] ^= 1 << rng.randrange(8)
    wal.write_bytes(data)
    ignored = ignored_commits(path)
    reader = sqlite3.connect(path)
    try:
        rows = int(reader.execute("SELECT count(*) FROM t").fetchone()[0])
    except sqlite3.OperationalError:  # the table itself was in the log
        rows = -1
    reader.close()
    assert ignored == (9 if rows == -1 else 8 - rows), position
    assert ignored > 0
