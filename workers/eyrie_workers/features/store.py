"""Reads a hidden-state store in any order, without loading it.

Shards are memory-mapped: `row(i)` touches the pages of row i alone, and the page cache, not this process, decides what
stays in memory. A store of terabytes therefore opens in the time it takes to read its index and row offsets. Tensors of
a row are views of the mapping in the stored dtype: whoever computes with them casts, whoever changes them copies first.
"""

from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyrie_api.artifacts import digest_file
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing
from eyrie_workers.features.layout import INDEX, FeatureRow, ShardEntry, StoreLayout
from eyrie_workers.features.writer import read_index

_MAX_OPEN_SHARDS = 256
"""Mappings kept at once; Linux allows a process 65530 and torch maps once per tensor."""

_TENSORS = ("token_ids", "loss_mask", "aux", "last")


class FeatureStore:
    """Random access to the rows of a store, in the order they were written."""

    def __init__(self, directory: Path) -> None:
        """Open the store in `directory`. Raises ArtifactMissing without an index or a listed shard, ArtifactCorrupt
        when a shard cannot be read."""
        self._directory = Path(directory)
        index = read_index(self._directory)
        if index is None:
            raise ArtifactMissing(f"no {INDEX} in {directory}: it is not a hidden-state store", "run capture first")
        self.layout: StoreLayout = index.layout
        self._shards = index.shards
        self._row_starts = [0, *accumulate(shard.rows for shard in self._shards)]
        self._offsets = [self._read_offsets(shard) for shard in self._shards]
        self._open: OrderedDict[int, dict[str, Tensor]] = OrderedDict()

    @property
    def num_rows(self) -> int:
        """Rows in the store."""
        return self._row_starts[-1]

    @property
    def num_tokens(self) -> int:
        """Tokens over all rows."""
        return sum(shard.tokens for shard in self._shards)

    @property
    def row_ids(self) -> list[str]:
        """Ids in order."""
        return [row_id for shard in self._shards for row_id in shard.row_ids]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [length for offsets in self._offsets for length in offsets.diff().tolist()]

    def row(self, index: int) -> FeatureRow:
        """Row `index`, 0 <= index < num_rows. Raises IndexError outside."""
        if not 0 <= index < self.num_rows:
            raise IndexError(f"row {index} of a store of {self.num_rows} rows")
        number = bisect_right(self._row_starts, index) - 1
        within = index - self._row_starts[number]
        start, end = self._offsets[number][within: within + 2].tolist()
        tensors = self._tensors(number)
        return FeatureRow(
            row_id=self._shards[number].row_ids[within], token_ids=tensors["token_ids"][start:end].to(torch.int64),
            loss_mask=tensors["loss_mask"][start:end], aux=tensors["aux"][start:end], last=tensors["last"][start:end])

    def verify(self) -> None:
        """Compare every shard with its digest. Raises ArtifactCorrupt naming the first shard that differs."""
        for shard in self._shards:
            path = self._directory / shard.name
            if path.stat().st_size != shard.size_bytes or digest_file(path) != shard.sha256:
                raise ArtifactCorrupt(f"{path} differs from the digest in {INDEX}",
                                      "delete the directory and capture again")

    def __getstate__(self) -> dict[str, object]:
        """Mappings stay behind when a store is sent to another process; they are opened again there."""
        return {**self.__dict__, "_open": OrderedDict()}

    def _tensors(self, number: int) -> dict[str, Tensor]:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        with safe_open(self._directory / self._shards[number].name, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in _TENSORS}
        self._open[number] = tensors
        if len(self._open) > _MAX_OPEN_SHARDS:
            self._open.popitem(last=False)
        return tensors

    def _read_offsets(self, shard: ShardEntry) -> Tensor:
        path = self._directory / shard.name
        try:
            with safe_open(path, framework="pt") as file:
                offsets: Tensor = file.get_tensor("offsets").clone()
        except FileNotFoundError:
            raise ArtifactMissing(f"{path} is listed in {INDEX} but is gone", "run capture again") from None
        except SafetensorError as error:
            raise ArtifactCorrupt(f"{path} is not a readable shard: {error}",
                                  "delete the directory and capture again") from error
        if offsets.shape[0] != shard.rows + 1 or int(offsets[-1]) != shard.tokens:
            raise ArtifactCorrupt(f"{path} holds other rows than {INDEX} says",
                                  "delete the directory and capture again")
        return offsets
