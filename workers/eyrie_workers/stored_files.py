"""Files of a stage that are in the artifact store and not on this machine: states, and answers, larger than its disk.

`catalog.STORE_ADDRESS_FILE` in a directory names the place in the store. A stage hands over what is finished, part by
part: uploaded, verified, deleted here. A later stage reads ranges of it.
"""

import io
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

from eyrie_api.artifacts.open_store import open_store
from eyrie_api.artifacts.store import ArtifactStore, while_unavailable
from eyrie_api.data_files import RangedFile
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing
from eyrie_workers.catalog import STORE_ADDRESS_FILE

BLOCK_BYTES = 8 * 2**20  # of one read: large, so that the transfer and not the request takes its time
_NUM_BLOCKS = 8
_COMPARED_BYTES = 64 * 1024
_BUFFER_BYTES = 64 * 1024


def place_of(directory: Path) -> tuple[ArtifactStore, str] | None:
    """Store and prefix of a directory whose files are in a store; None where they are on this machine."""
    address = directory / STORE_ADDRESS_FILE
    return open_place(address.read_text().strip()) if address.is_file() else None


def open_place(address: str) -> tuple[ArtifactStore, str]:
    """Store and prefix of an address, such as `s3://bucket/prefix`."""
    root, _, prefix = address.rstrip("/").rpartition("/")
    return open_store(root), prefix


def hand_over(store: ArtifactStore, key: str, part: Path, is_whole: Callable[[], bool] | None = None) -> None:
    """Upload a file, verify it in the store, and delete it here. The upload carries checksums; reading the end back
    finds what they do not, such as a server that cuts an object.

    is_whole   whether the end in the store is that of a whole file; default: its last 64 KiB are those of `part`

    Raises ArtifactCorrupt when the store does not return what was uploaded, StoreUnavailable after waiting for it.
    """
    while_unavailable(lambda: store.upload(key, part))
    size = part.stat().st_size
    with part.open("rb") as file:
        file.seek(max(0, size - _COMPARED_BYTES))
        end = file.read()
    verify_stored(store, key, size, is_whole or (
        lambda: store.read(key, start=size - len(end), length=len(end)) == end))
    part.unlink()


def put_in_place(part: Path, path: Path) -> None:
    """Rename a finished file to `path`, or hand it over where the directory's files are in a store. `open_binary` reads
    it in both places. Raises as `hand_over`."""
    place = place_of(path.parent)
    if place is None:
        os.replace(part, path)
    else:
        store, prefix = place
        hand_over(store, f"{prefix}/{path.name}", part)


def verify_stored(store: ArtifactStore, key: str, size_bytes: int, is_whole: Callable[[], bool]) -> None:
    """Raises ArtifactCorrupt where an object that was just written has another size, or is not whole."""
    stored = while_unavailable(lambda: store.stat(key))
    if stored is None or stored.size_bytes != size_bytes or not while_unavailable(is_whole):
        raise ArtifactCorrupt(f"{key} in {store.url} is not what was uploaded", "check the artifact store")


class RangeReader:
    """Ranges of the objects of a store, through blocks that are kept in memory (64 MiB)."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def read(self, key: str, start: int, length: int) -> bytes:
        """Bytes [start, start + length), fewer at the end. Raises ArtifactMissing, StoreUnavailable."""
        first, last = start // BLOCK_BYTES, (start + max(1, length) - 1) // BLOCK_BYTES
        data = b"".join(self._block(key, number) for number in range(first, last + 1))
        begin = start - first * BLOCK_BYTES
        return data[begin:begin + length]

    def _block(self, key: str, number: int) -> bytes:
        place = (key, number)
        if place not in self._blocks:
            self._blocks[place] = while_unavailable(
                lambda: self._store.read(key, start=number * BLOCK_BYTES, length=BLOCK_BYTES))
            if len(self._blocks) > _NUM_BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(place)
        return self._blocks[place]


def open_object(reader: RangeReader, key: str, size_bytes: int) -> BinaryIO:
    def read(start: int, length: int) -> bytes:
        data = reader.read(key, start, length)
        if len(data) != length:
            raise ArtifactCorrupt(f"{key} ends before its {size_bytes} bytes", "check the artifact store")
        return data

    return cast("BinaryIO", io.BufferedReader(RangedFile(read, size_bytes), _BUFFER_BYTES))


def open_binary(path: Path) -> BinaryIO:
    """A file to read, here or where its directory's address says. Raises OSError, or ArtifactMissing in a store."""
    place = None if path.is_file() else place_of(path.parent)
    if place is None:
        return path.open("rb")
    store, prefix = place
    key = f"{prefix}/{path.name}"
    stored = while_unavailable(lambda: store.stat(key))
    if stored is None:
        raise ArtifactMissing(f"no {key} in {store.url}", "run the stage that writes it, or retry the job")
    return open_object(RangeReader(store), key, stored.size_bytes)
