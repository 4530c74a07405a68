"""Storage backends of a hidden-state store: a local directory, or an artifact store read by ranges.

Both return bytes as a uint8 tensor: a directory from its memory mapping, without a copy; an artifact store from the
network. Neither verifies them: the reader does, who has the digests.
"""

import mmap
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from eyrie_api.artifacts.open_store import open_store
from eyrie_api.artifacts.store import ArtifactStore
from eyrie_api.errors import ArtifactMissing, Permanent
from eyrie_workers.catalog import STORE_ADDRESS_FILE
from eyrie_workers.features.shard_format import SHARD_PATTERN
from eyrie_workers.features.writer import note_name

_MAX_OPEN = 4096
"""Open mappings, at most; Linux allows a process 65530."""


class StorageBackend(Protocol):
    """The files of one store."""

    @property
    def name(self) -> str:
        """Name of the store in messages."""

    @property
    def parallel(self) -> int:
        """Useful number of concurrent reads; 1 where latency does not dominate."""

    def file(self, name: str) -> bytes | None:
        """The bytes of a small file, None when it does not exist."""

    def shards(self) -> list[str]:
        """Names of the existing shards, in order."""

    def size(self, shard: str) -> int | None:
        """Bytes of a shard, None when it does not exist."""

    def read(self, shard: str, start: int, length: int) -> Tensor:
        """[B] uint8: bytes [start, start + length), fewer at the end of the shard. Raises ArtifactMissing."""

    def note_damage(self, shard: str, why: str) -> None:
        """Write a damage note for capture to find, if the store is writable."""


def open_backend(where: str | Path) -> StorageBackend:
    """The backend of a directory or of `s3://bucket/prefix`; a directory may hold a file with such an address."""
    if "://" not in str(where):
        address = Path(where) / STORE_ADDRESS_FILE
        return open_backend(address.read_text().strip()) if address.is_file() else LocalBackend(Path(where))
    root, _, prefix = str(where).rstrip("/").rpartition("/")
    return ObjectStoreBackend(open_store(root), prefix)


class LocalBackend:
    """A store in a directory, memory-mapped: the page cache, not this process, decides what stays in memory."""

    parallel = 1

    def __init__(self, directory: Path) -> None:
        self._directory = Path(directory)
        self._open: OrderedDict[str, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """See `StorageBackend`."""
        return str(self._directory)

    def file(self, name: str) -> bytes | None:
        """See `StorageBackend`."""
        path = self._directory / name
        return path.read_bytes() if path.is_file() else None

    def shards(self) -> list[str]:
        """See `StorageBackend`."""
        return sorted(path.name for path in self._directory.glob(SHARD_PATTERN))

    def size(self, shard: str) -> int | None:
        """See `StorageBackend`."""
        path = self._directory / shard
        return path.stat().st_size if path.is_file() else None

    def read(self, shard: str, start: int, length: int) -> Tensor:
        """See `StorageBackend`. A view of a private mapping: writing to it does not change the file."""
        return self._mapped(shard)[start:start + length]

    def note_damage(self, shard: str, why: str) -> None:
        """See `StorageBackend`."""
        with suppress(OSError):  # read-only mount: the error that the reader raises still names the shard
            (self._directory / note_name(shard)).write_text(why + "\n")

    def __getstate__(self) -> dict[str, object]:
        """Mappings are not pickled; another process opens them again."""
        return {"_directory": self._directory}

    def __setstate__(self, state: dict[str, Path]) -> None:
        """See `__getstate__`."""
        self.__init__(state["_directory"])  # type: ignore[misc]

    def _mapped(self, shard: str) -> Tensor:
        with self._lock:
            if shard not in self._open:
                self._open[shard] = self._map(shard)
            self._open.move_to_end(shard)
            if len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)
            return self._open[shard]

    def _map(self, shard: str) -> Tensor:
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
    """A store below a prefix of an artifact store, read in ranges."""

    def __init__(self, store: ArtifactStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix.rstrip("/")
        self._sizes: dict[str, int] | None = None

    @property
    def name(self) -> str:
        """See `StorageBackend`."""
        return f"{self._store.url}/{self._prefix}"

    @property
    def parallel(self) -> int:
        """See `StorageBackend`."""
        return self._store.parallel

    def file(self, name: str) -> bytes | None:
        """See `StorageBackend`."""
        try:
            return self._store.read(f"{self._prefix}/{name}")
        except ArtifactMissing:
            return None

    def shards(self) -> list[str]:
        """See `StorageBackend`."""
        return sorted(name for name in self._listed() if Path(name).match(SHARD_PATTERN))

    def size(self, shard: str) -> int | None:
        """See `StorageBackend`. From one listing, made at the first call."""
        return self._listed().get(shard)

    def read(self, shard: str, start: int, length: int) -> Tensor:
        """See `StorageBackend`."""
        data = self._store.read(f"{self._prefix}/{shard}", start=start, length=length)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)

    def note_damage(self, shard: str, why: str) -> None:
        """See `StorageBackend`."""
        with suppress(Permanent):  # read permission only: the error that the reader raises still names the shard
            self._store.write(f"{self._prefix}/{note_name(shard)}", (why + "\n").encode())

    def _listed(self) -> dict[str, int]:
        if self._sizes is None:
            self._sizes = {found.key.removeprefix(f"{self._prefix}/"): found.size_bytes
                           for found in self._store.list(self._prefix)}
        return self._sizes
