"""Storage backends of a hidden-state store: a local directory, or an artifact store read by ranges.

Both return bytes as a uint8 tensor: a directory from its memory mapping, without a copy; an artifact store from the
network. Neither verifies them: the reader does, who has the digests.

A shard is written on this machine under a hidden name, and `add` makes it visible: a directory renames it; an artifact
store uploads it, reads its end back, and deletes the file. So capture needs space for the shards being written, not for
the store.
"""

import hashlib
import mmap
import os
import threading
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from eyrie_api.artifacts.store import ArtifactStore, while_unavailable
from eyrie_api.errors import ArtifactMissing, Permanent
from eyrie_workers.catalog import DAMAGED_SUFFIX, SHARD_PATTERN
from eyrie_workers.hidden_states.shard_format import MAGIC, TRAILER_BYTES, ShardEnd, ShardMap
from eyrie_workers.stored_files import hand_over, open_place, place_of

_SHARD_SUFFIX = Path(SHARD_PATTERN).suffix
_MAX_OPEN = 4096  # open mappings, at most; Linux allows a process 65530
_END_BYTES = 256 * 1024  # the record of a shard of 256 MiB is smaller, so that one request reads it


def note_name(shard: str) -> str:
    return Path(shard).stem + DAMAGED_SUFFIX


def read_shard_end(backend: "StorageBackend", shard: str) -> ShardEnd | None:
    """A shard's format and record, read from its end; None for a file that is not a complete shard."""
    size = backend.size(shard) or 0
    tail = backend.read(shard, max(0, size - _END_BYTES), _END_BYTES).numpy().tobytes() if size else b""
    trailer = tail[-TRAILER_BYTES:]
    length = int.from_bytes(trailer[32:40], "little")
    if len(trailer) != TRAILER_BYTES or not trailer.endswith(MAGIC) or length > size - TRAILER_BYTES:
        return None
    if length > len(tail) - TRAILER_BYTES:
        tail = backend.read(shard, size - TRAILER_BYTES - length, length + TRAILER_BYTES).numpy().tobytes()
    record = tail[-TRAILER_BYTES - length:-TRAILER_BYTES]
    try:
        end = ShardEnd.model_validate_json(record) if hashlib.sha256(record).digest() == trailer[:32] else None
    except ValidationError:
        return None
    whole = end is not None and end.record.name == shard \
        and ShardMap(end.record, end.layout).states_end + length + TRAILER_BYTES == size
    return end if whole else None


def open_backend(where: str | Path) -> "StorageBackend":
    """The backend of a directory or of `s3://bucket/prefix`; a directory may hold a file with such an address."""
    place = open_place(str(where)) if "://" in str(where) else place_of(Path(where))
    return LocalBackend(Path(where)) if place is None else ObjectStoreBackend(*place)


class LocalBackend:
    """A store in a directory, memory-mapped: the page cache, not this process, decides what stays in memory."""

    parallel = 1
    """Useful number of concurrent reads; 1 where latency does not dominate."""

    def __init__(self, directory: Path) -> None:
        self._directory, self.name = Path(directory), str(directory)
        self._map = lru_cache(_MAX_OPEN)(self._mapped)

    def file(self, name: str) -> bytes | None:
        """The bytes of a small file, None when it does not exist."""
        path = self._directory / name
        return path.read_bytes() if path.is_file() else None

    def shards(self) -> list[str]:
        """Names of the existing shards, in order."""
        return sorted(path.name for path in self._directory.glob(SHARD_PATTERN))

    def size(self, shard: str) -> int | None:
        """Bytes of a shard, None when it does not exist."""
        path = self._directory / shard
        return path.stat().st_size if path.is_file() else None

    def read(self, shard: str, start: int, length: int) -> Tensor:
        """[B] uint8: bytes [start, start + length), fewer at the end of the shard; a view of a private mapping, so that
        writing to it does not change the file. Raises ArtifactMissing."""
        return self._map(shard)[start:start + length]

    def note_damage(self, shard: str, why: str) -> None:
        """Write a damage note for capture to find, if the store is writable."""
        with suppress(OSError):  # read-only mount: the error that the reader raises still names the shard
            (self._directory / note_name(shard)).write_text(why + "\n")

    def notes(self) -> dict[str, str]:
        """The damage notes: why, by shard."""
        return {path.with_suffix(_SHARD_SUFFIX).name: path.read_text().strip()
                for path in self._directory.glob(f"shard-*{DAMAGED_SUFFIX}")}

    def add(self, shard: str, part: Path) -> None:
        """Make a shard visible that is complete in the file `part`, flushed to disk, and remove the shard's damage
        note. The file is gone afterwards. Several threads may add different shards."""
        os.replace(part, self._directory / shard)
        self._map.cache_clear()  # of the file that was replaced
        (self._directory / note_name(shard)).unlink(missing_ok=True)

    def path(self, shard: str) -> Path | None:
        """The shard's file on this machine; None where there is none."""
        return self._directory / shard

    def _mapped(self, shard: str) -> Tensor:
        try:
            with (self._directory / shard).open("rb") as file:
                # ACCESS_COPY, because torch.frombuffer warns about read-only buffers; no code writes to it.
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise ArtifactMissing(f"{self._directory / shard} does not exist", "run capture again") from None
        except ValueError:  # an empty file cannot be mapped
            return torch.zeros(0, dtype=torch.uint8)
        return torch.frombuffer(mapping, dtype=torch.uint8)


class ObjectStoreBackend:
    """A store below a prefix of an artifact store, read in ranges; the members of `LocalBackend`."""

    def __init__(self, store: ArtifactStore, prefix: str) -> None:
        self._store, self.parallel, self._prefix = store, store.parallel, prefix.rstrip("/")
        self.name = f"{store.url}/{self._prefix}"
        self._sizes: dict[str, int] | None = None
        self._lock = threading.Lock()

    def file(self, name: str) -> bytes | None:
        try:
            return self._store.read(f"{self._prefix}/{name}")
        except ArtifactMissing:
            return None

    def shards(self) -> list[str]:
        return sorted(name for name in self._listed() if Path(name).match(SHARD_PATTERN))

    def size(self, shard: str) -> int | None:
        """From one listing, made at the first call."""
        return self._listed().get(shard)

    def read(self, shard: str, start: int, length: int) -> Tensor:
        data = self._store.read(f"{self._prefix}/{shard}", start=start, length=length)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)

    def note_damage(self, shard: str, why: str) -> None:
        with suppress(Permanent):  # read permission only: the error that the reader raises still names the shard
            self._store.write(f"{self._prefix}/{note_name(shard)}", (why + "\n").encode())

    def notes(self) -> dict[str, str]:
        return {Path(name).stem + _SHARD_SUFFIX: (self.file(name) or b"").decode().strip()
                for name in self._listed() if Path(name).match(f"shard-*{DAMAGED_SUFFIX}")}

    def add(self, shard: str, part: Path) -> None:
        """Raises ArtifactCorrupt when the store does not return what was uploaded, StoreUnavailable after waiting."""
        size_bytes = part.stat().st_size

        def has_an_end() -> bool:
            self._listed()[shard] = size_bytes
            return read_shard_end(self, shard) is not None

        hand_over(self._store, f"{self._prefix}/{shard}", part, has_an_end)
        while_unavailable(lambda: self._store.delete(f"{self._prefix}/{note_name(shard)}"))

    def path(self, shard: str) -> Path | None:
        return None

    def _listed(self) -> dict[str, int]:
        with self._lock:  # threads add shards
            if self._sizes is None:
                self._sizes = {stored.key.removeprefix(f"{self._prefix}/"): stored.size_bytes
                               for stored in self._store.list(self._prefix)}
            return self._sizes


StorageBackend = LocalBackend | ObjectStoreBackend
