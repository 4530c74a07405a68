"""One shard while it is written: under a hidden name, row after row, each block with its digest.

The states arrive encoded (`blocks.encode_states`) and are written as they lie in memory, without another copy. Digest
and write release Python's lock, so a shard written in a thread leaves the interpreter to the next forward pass.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from eyrie_workers.features.blocks import block_of
from eyrie_workers.features.shard_format import (
    ShardEnd,
    ShardRecord,
    StoreFormat,
    TokenRow,
    block_sections,
    end_of_shard,
    section_views,
    short_digest,
    supervised_positions,
    tokens_bytes,
)


class ShardFile:
    """A shard under its hidden name, to which rows are appended in order. As a context manager, deleted on an error."""

    def __init__(self, path: Path, fmt: StoreFormat, rows: Sequence[TokenRow]) -> None:
        """Write the tokens of all rows of the shard."""
        self.name, self.part = path.name, path.with_name(f".{path.name}.part")
        self._format, self._rows = fmt, rows
        self._file = self.part.open("wb")
        self._digests: list[str] = []
        self._supervised: list[int] = []
        self._num_written = 0
        ids = torch.cat([row.token_ids.to(torch.int32) for row in rows])
        masks = torch.cat([row.loss_mask.to(torch.uint8) for row in rows])
        self._write([(ids.numpy().tobytes() + masks.numpy().tobytes()).ljust(tokens_bytes(ids.numel()), b"\0")])

    def __enter__(self) -> "ShardFile":
        """This shard."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Delete the file after an error."""
        if kind is not None:
            with suppress(OSError):  # of a full disk again: the first error is the one to report
                self._file.close()
            self.part.unlink(missing_ok=True)

    def append(self, states: Mapping[str, Tensor], num_rows: int) -> None:
        """Write the blocks of the next rows. states: `blocks.encode_states` of these rows end to end, on the CPU."""
        token = taught = 0
        for row in self._rows[self._num_written:self._num_written + num_rows]:
            supervised = supervised_positions(row.loss_mask.to(torch.bool))
            for block in self._format.block_ranges(supervised.numel()):
                num = int(supervised[block.start:block.stop].sum())
                tensors = block_of(states, range(token + block.start, token + block.stop), range(taught, taught + num))
                self._write([*section_views(block_sections(self._format, len(block), num), tensors)])
                self._supervised.append(num)
                taught += num
            token += supervised.numel()
        self._num_written += num_rows

    def finish(self) -> ShardRecord:
        """Write record and trailer and flush everything to disk."""
        assert self._num_written == len(self._rows), "rows of the shard are missing"
        record = ShardRecord(
            name=self.name, row_ids=tuple(row.row_id for row in self._rows),
            lengths=tuple(row.token_ids.shape[0] for row in self._rows), taught=tuple(self._supervised),
            digests=tuple(self._digests))
        with self._file as file:
            file.write(end_of_shard(ShardEnd(layout=self._format, record=record)))
            file.flush()
            os.fsync(file.fileno())
        return record

    def _write(self, parts: Sequence[bytes | memoryview]) -> None:
        self._digests.append(short_digest(*parts))
        for part in parts:
            self._file.write(part)
