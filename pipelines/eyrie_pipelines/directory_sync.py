"""Upload one stage's unfinished directory to the artifact store while the stage works.

Each upload is a consistent snapshot. A stage writes data first and its reference after (a shard, then the index; a
checkpoint, then the training state). If files were read one after the other while the stage works, the index could list
a shard that was not uploaded. So `_take_snapshot` first links the directory's files (hard links, and copies of files
that grow), and repeats if any file was renamed meanwhile. Files are then uploaded in the order the stage wrote them, so
that an upload cut off at any file leaves in the store a state that a killed stage could have left on disk.

Large state takes time to upload: syncing takes at most a fifth of the stage's time. The ledger of answers alone grows
to gigabytes, so of it only what was appended since the last sync is uploaded, in whole lines:

    rows.jsonl.parts/000000000000000    bytes from that offset on

`join_parts` makes the file of them in the next pod; the finished file is uploaded whole, and the parts are deleted. A
stage that leaves its answers in the store writes and reads them itself (`eyrie_workers.data.rows`).
"""

import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from eyrie_api.artifacts import MANIFEST
from eyrie_api.artifacts.store import ArtifactStore
from eyrie_api.errors import EyrieError, Transient
from eyrie_workers.catalog import LEDGER_PARTS, ROWS_FILE, TRACKERS_DIR, ledger_part

SYNC_SHARE = 4
"""Pauses between two syncs are at least this multiple of the last sync's duration."""

_GROWING = (".jsonl", ".txt")
"""Files a stage appends to, and those of trackers: a snapshot copies them, since a hard link would keep growing."""

_PART_BYTES = 64 * 2**20

_SNAPSHOT_DIR = ".sync"
_SNAPSHOT_ATTEMPTS = 20

FileStamp = tuple[int, int, int]
"""Inode, size in bytes, modification time in ns."""


class DirectorySync:
    """Uploads the changed files of one directory under `prefix`, periodically."""

    def __init__(self, store: ArtifactStore, directory: Path, prefix: str, share: int = SYNC_SHARE, *,
                 not_ours: Sequence[str] = ()) -> None:
        """`share`: pauses are at least this multiple of the last sync's duration.
        `not_ours`: patterns of names that others put into the store and remove there. With the ledger's name among
        them its parts are the stage's."""
        self._store, self._directory, self._prefix, self._share = store, directory, prefix, share
        self._not_ours = (f"{LEDGER_PARTS}/*", *not_ours)
        self._uploaded: dict[str, FileStamp] = {}
        self._ledger_inode: int | None = None
        self._ledger_sent = 0
        self._stopping = threading.Event()

    def begin(self) -> None:
        """Record files that are both in the store and in this directory as uploaded. Call right after a download."""
        sizes = {item.key.removeprefix(f"{self._prefix}/"): item.size_bytes
                 for item in self._store.list(self._prefix)}
        ledger = self._directory / ROWS_FILE
        parts = sum(size for name, size in sizes.items() if name.startswith(f"{LEDGER_PARTS}/"))
        if parts and ROWS_FILE not in self._not_ours:
            if ledger.is_file() and ledger.stat().st_size == parts:
                self._ledger_inode, self._ledger_sent = ledger.stat().st_ino, parts
            else:  # not what `join_parts` has made of them
                self._store.delete_all(f"{self._prefix}/{LEDGER_PARTS}")
        self._uploaded = {name: stamp for name, stamp in _stamps(self._directory).items() if name in sizes}

    @contextmanager
    def every(self, sync_s: float) -> Iterator[None]:
        """Sync in a thread, and once more when the stage ends without a manifest (interrupted, or failed)."""
        def repeat() -> None:
            pause_s = sync_s
            while not self._stopping.wait(pause_s):
                began = time.monotonic()
                self._try()
                pause_s = max(sync_s, self._share * (time.monotonic() - began))

        thread = threading.Thread(target=repeat, name="eyrie-sync", daemon=True)
        thread.start()
        try:
            yield
        finally:
            # The thread is joined before the last sync: two syncs would write into the same snapshot directory.
            self._stopping.set()
            thread.join()
            if not (self._directory / MANIFEST).exists():
                self._try()
            shutil.rmtree(self._directory / _SNAPSHOT_DIR, ignore_errors=True)

    def _try(self) -> None:
        try:
            self.sync()
        except (EyrieError, OSError) as error:  # the stage continues; the next sync uploads what is missing
            print(f"sync: {type(error).__name__}: {error}", flush=True)

    def sync(self) -> None:
        """Upload one consistent snapshot of the directory, and delete from the store what the directory lost."""
        self._send_ledger()
        stamps = _take_snapshot(self._directory)
        snapshot = self._directory / _SNAPSHOT_DIR
        # In the order the stage wrote them, data before its reference: if this process is killed between two uploads,
        # the store holds a state that a killed stage could have left on disk. File system clocks tick some hundred
        # times a second; within one tick, deeper files come first and text files last, since indexes are text and
        # training states lie above checkpoints.
        for name in sorted(stamps, key=lambda name: (
                stamps[name][2], -name.count("/"), name.endswith((".json", *_GROWING)))):
            if self._uploaded.get(name) != stamps[name]:
                self._store.upload(f"{self._prefix}/{name}", snapshot / name)
                self._uploaded[name] = stamps[name]
        for item in list(self._store.list(self._prefix)):
            name = item.key.removeprefix(f"{self._prefix}/")
            if name not in stamps and not any(fnmatch(name, pattern) for pattern in self._not_ours):
                self._store.delete(item.key)
                self._uploaded.pop(name, None)

    def _send_ledger(self) -> None:
        """Upload the whole lines that were appended to the ledger. Nothing of one that the stage has replaced by a
        finished file: the parts are those of the file before, from which the stage resumes."""
        try:
            file = (self._directory / ROWS_FILE).open("rb")
        except FileNotFoundError:
            return
        with file:
            stat = os.fstat(file.fileno())
            self._ledger_inode = self._ledger_inode or stat.st_ino
            if stat.st_ino != self._ledger_inode or stat.st_size < self._ledger_sent:
                return
            file.seek(self._ledger_sent)
            while data := file.read(_PART_BYTES):
                whole = data[:data.rfind(b"\n") + 1]
                if not whole:
                    return
                self._store.write(f"{self._prefix}/{ledger_part(self._ledger_sent)}", whole)
                self._ledger_sent += len(whole)
                file.seek(self._ledger_sent)


def join_parts(directory: Path) -> None:
    """Make the ledger of its parts, as far as they follow each other, and remove them."""
    parts = sorted((directory / LEDGER_PARTS).glob("*"))
    if not parts:
        return
    joined = directory / f".{ROWS_FILE}.joined"
    with joined.open("wb") as file:
        for part in parts:
            if int(part.name) != file.tell():
                break
            with part.open("rb") as data:
                shutil.copyfileobj(data, file)
            part.unlink()  # the disk need not hold the ledger twice
    joined.replace(directory / ROWS_FILE)
    shutil.rmtree(directory / LEDGER_PARTS)


def _take_snapshot(directory: Path) -> dict[str, FileStamp]:
    """Take a consistent snapshot of a directory under `.sync`; returns the stamps of its files."""
    for _ in range(_SNAPSHOT_ATTEMPTS):
        shutil.rmtree(directory / _SNAPSHOT_DIR, ignore_errors=True)
        before = _stamps(directory)
        try:
            for name in before:
                path = directory / _SNAPSHOT_DIR / name
                path.parent.mkdir(parents=True, exist_ok=True)
                if _grows(name):
                    shutil.copyfile(directory / name, path)
                else:
                    os.link(directory / name, path)
        except FileNotFoundError:
            continue  # race: the stage renamed or removed the file after it was listed
        if _replaced_inodes(before) == _replaced_inodes(_stamps(directory)):
            return before
        time.sleep(0.05)
    raise Transient(f"{directory} changes faster than a snapshot can be taken", "the next sync retries")


def _stamps(directory: Path) -> dict[str, FileStamp]:
    """Stamps of the visible files, without the manifest and the ledger: `upload_dir` uploads a finished directory."""
    stamps = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        hidden = any(part.startswith(".") for part in name.parts)
        if name.as_posix() not in (MANIFEST, ROWS_FILE) and not hidden and path.is_file():
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            stamps[name.as_posix()] = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return stamps


def _grows(name: str) -> bool:
    return name.endswith(_GROWING) or name.startswith(f"{TRACKERS_DIR}/")


def _replaced_inodes(stamps: dict[str, FileStamp]) -> dict[str, int]:
    """Inodes of the files that a stage replaces by rename. Files it appends to are left out: valid at any length."""
    return {name: stamp[0] for name, stamp in stamps.items() if not _grows(name)}
