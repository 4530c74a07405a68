"""Throughput of the hidden-state store's reader: `make bench-store`.

    python -m benchmarks.feature_store --out .eyrie/bench/store.json

A store of random states with chat-like lengths (lognormal) is written once per codec and read as training reads it:
rows in random order, packed into batches. First from the directory, then through S3 by ranged reads: the server in
EYRIE_ARTIFACTS_ENDPOINT_URL with `--s3 s3://bucket/prefix`, or rclone's, started here, where that program is installed.

Two measurements:

    first, again   tokens and bytes per second without computation: from a directory the first pass verifies every
                   block, the second does not; from S3 every read is verified
    fed            a trainer that computes for as long as `--trainer-tokens-per-s` implies and keeps the processor busy
                   meanwhile: tokens per second with `--ahead` batches read ahead, and with none

Passes of the directory and of S3 alternate; figures are medians of `--passes`. Random states read like real ones: the
cost depends on bytes and shapes alone.
"""

import argparse
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median

import numpy as np
import torch

from eyrie_api.artifacts import write_model
from eyrie_api.artifacts.open_store import open_store
from eyrie_api.artifacts.store import ArtifactStore, StoreOptions
from eyrie_api.contract.capture import BEST_FIRST
from eyrie_api.contract.model import Frozen
from eyrie_api.errors import EyrieError, InvalidInput
from eyrie_api.processes import free_port
from eyrie_workers.hidden_states.shard_format import StoreFormat, plan_shards
from eyrie_workers.hidden_states.storage_backend import ObjectStoreBackend
from eyrie_workers.hidden_states.store import FeatureStore
from eyrie_workers.hidden_states.writer import FeatureWriter
from eyrie_workers.machine import environment
from eyrie_workers.training.batches import cut_evenly
from tests.feature_rows import FeatureRow, write_shard

_SHARD_BYTES = 32 * 2**20
_BUCKET = "eyrie-bench"
_START_S = 60.0


class ReadRate(Frozen):
    """One way of reading one store, medians over passes."""

    codec: str
    place: str
    way: str
    """`first`, `again`, `fed`, `fed, nothing ahead`."""

    tokens_per_s: float
    spread: float
    """Largest less smallest pass, relative to the median."""

    stored_bytes_per_s: float
    cpu_s_per_million_tokens: float


class StoreBench(Frozen):
    """The report of all codecs, places and ways."""

    hidden_size: int
    aux_layers: int
    tokens: int
    rows: int
    trainer_tokens_per_s: float
    paces: tuple[ReadRate, ...]
    environment: dict[str, str]


def chat_lengths(num_tokens: int, seed: int = 0) -> list[int]:
    """Row lengths of about that many tokens: lognormal around 400, at most 4096."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < num_tokens:
        lengths.append(int(np.clip(rng.lognormal(6.0, 0.8), 8, 4096)))
    return lengths


def write_store(directory: Path, fmt: StoreFormat, lengths: Sequence[int]) -> None:
    """Random states; the second half of each row is the answer."""
    writer, generator = FeatureWriter(directory, fmt), torch.Generator().manual_seed(0)
    for number, shard in enumerate(plan_shards(lengths, fmt, _SHARD_BYTES)):
        if number in writer.shards:
            continue
        rows = []
        for i in shard:
            length = lengths[i]
            rows.append(FeatureRow(
                f"row-{i}", torch.randint(0, 2048, (length,), generator=generator),
                torch.arange(length) >= length // 2,
                torch.randn(length, len(fmt.aux_layers), fmt.hidden_size, generator=generator),
                torch.randn(length, fmt.hidden_size, generator=generator)))
        write_shard(writer, rows, number)
    writer.finish()


def random_batches(lengths: Sequence[int], batch_tokens: int, seed: int) -> list[list[int]]:
    """Batches of one epoch: every row once, in random order."""
    order = np.random.default_rng(seed).permutation(len(lengths)).tolist()
    return [order[cut.start:cut.stop] for cut in cut_evenly([lengths[i] for i in order], batch_tokens)]


def busy(seconds: float) -> None:
    """Compute for that long, as a training step would."""
    until, x = time.perf_counter() + seconds, torch.randn(256, 256)
    while time.perf_counter() < until:
        x = torch.tanh(x @ x)


class Reading:
    """One store in one place, read in several ways; the seconds of each pass."""

    def __init__(self, codec: str, name: str, make: Callable[[], FeatureStore], options: argparse.Namespace) -> None:
        self.codec, self.name, self.make, self.options = codec, name, make, options
        self.taken: dict[str, list[tuple[float, float]]] = {}

    def one_pass(self, number: int) -> None:
        """Read in every way once, beginning with an unverified store."""
        store, options = self.make(), self.options
        for way in ("first", "again"):
            groups = random_batches(store.lengths, options.batch_tokens, number)
            self._time(way, lambda groups=groups: _drain(store.batches(groups, ahead=1, reuse=True)))  # type: ignore[misc]
        groups = random_batches(store.lengths, options.batch_tokens, number + 100)[:options.fed_batches]
        tokens = [sum(store.lengths[i] for i in group) for group in groups]
        for way, ahead in (("fed", options.ahead), ("fed, nothing ahead", 0)):
            self._time(way, lambda ahead=ahead: self._feed(store, groups, tokens, ahead))  # type: ignore[misc]
        self.size = (store.num_tokens, store.size_bytes, sum(tokens))

    def _feed(self, store: FeatureStore, groups: list[list[int]], tokens: list[int], ahead: int) -> None:
        for packed, count in zip(store.batches(groups, ahead=ahead, reuse=True), tokens, strict=True):
            assert packed.aux.shape[0] == count
            busy(count / self.options.trainer_tokens_per_s)

    def _time(self, way: str, work: Callable[[], object]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        self.taken.setdefault(way, []).append((time.perf_counter() - wall, time.process_time() - cpu))

    def paces(self) -> Iterator[ReadRate]:
        """The medians."""
        whole, size, fed = self.size
        for way, taken in self.taken.items():
            tokens = fed if way.startswith("fed") else whole
            seconds = [wall for wall, _ in taken]
            yield ReadRate(codec=self.codec, place=self.name, way=way, tokens_per_s=tokens / median(seconds),
                       spread=(max(seconds) - min(seconds)) / median(seconds),
                       stored_bytes_per_s=tokens / median(seconds) * size / whole,
                       cpu_s_per_million_tokens=median(cpu for _, cpu in taken) / tokens * 1e6)


def _drain(batches: Iterable[object]) -> None:
    for _ in batches:
        pass


def run(options: argparse.Namespace, home: Path) -> StoreBench:
    """Write the stores, then read each in every way."""
    lengths = chat_lengths(options.tokens)
    paces: list[ReadRate] = []
    with s3_store(options, home) as remote:
        for codec in options.codecs:
            layout = StoreFormat(aux_layers=(1, 2, 3), hidden_size=options.hidden_size, codec=codec,
                                 target_digest="sha256:" + "0" * 64)
            directory = home / codec
            write_store(directory, layout, lengths)
            readings = [Reading(codec, "directory", lambda at=directory: FeatureStore(at), options)]  # type: ignore[misc]
            if remote is not None:
                for path in sorted(directory.iterdir()):
                    remote.upload(f"bench/{codec}/{path.name}", path)
                readings.append(Reading(codec, "S3", lambda at=f"bench/{codec}": FeatureStore(  # type: ignore[misc]
                    ObjectStoreBackend(remote, at)), options))
            for number in range(options.passes):
                for reading in readings if number % 2 == 0 else reversed(readings):
                    reading.one_pass(number)
            paces += [pace for reading in readings for pace in reading.paces()]
            if remote is not None:
                remote.delete_all(f"bench/{codec}")
    return StoreBench(
        hidden_size=options.hidden_size, aux_layers=3, tokens=sum(lengths), rows=len(lengths),
        trainer_tokens_per_s=options.trainer_tokens_per_s, paces=tuple(paces),
        environment={name: str(value) for name, value in environment("float32").model_dump().items()})


@contextmanager
def s3_store(options: argparse.Namespace, home: Path) -> Iterator[ArtifactStore | None]:
    """The S3 store to read through, or None without a server."""
    if options.s3:
        yield open_store(options.s3)
        return
    installed = Path(sys.executable).with_name("rclone")
    program = str(installed) if installed.exists() else shutil.which("rclone")
    with rclone(program, home / "rclone") if program else nullcontext() as store:
        yield store


@contextmanager
def rclone(program: str, directory: Path) -> Iterator[ArtifactStore]:
    """Run `rclone serve s3` on a directory while the context is open."""
    (directory / _BUCKET).mkdir(parents=True, exist_ok=True)
    port = free_port()
    keys = directory / "keys"
    keys.mkdir(exist_ok=True)
    secret = {"access_key": "EYRIEBENCH" + secrets.token_hex(4), "secret_key": secrets.token_hex(16)}
    for name, value in secret.items():
        (keys / name).write_text(value)
    process = subprocess.Popen(
        [program, "serve", "s3", "--config", os.devnull, "--auth-key", ",".join(secret.values()), "--addr",
         f"127.0.0.1:{port}", str(directory)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + _START_S
        while process.poll() is None and time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        else:
            raise InvalidInput("rclone serve s3 did not start", "name a server with --s3, or uninstall rclone")
        # For what opens it by its address alone.
        os.environ |= {"EYRIE_ARTIFACTS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
                       "EYRIE_ARTIFACTS_CREDENTIALS_DIR": str(keys), "EYRIE_ARTIFACTS_PARALLEL": "8"}
        yield open_store(f"s3://{_BUCKET}/store", StoreOptions.from_env())
    finally:
        process.terminate()
        process.wait()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure the throughput of the hidden-state store's reader.")
    parser.add_argument("--out", type=Path, default=Path(".eyrie/bench/store.json"))
    parser.add_argument("--codecs", nargs="+", choices=BEST_FIRST, default=["bfloat16", "int8", "fp8", "int4"])
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=60_000)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--fed-batches", type=int, default=10)
    parser.add_argument("--trainer-tokens-per-s", type=float, default=15_000.0,
                        help="rate of the simulated trainer; quickstart training on 2 cores is slower")
    parser.add_argument("--ahead", type=int, default=2, help="batches read ahead")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--s3", help="s3://bucket/prefix to write to and read from; default: a local rclone")
    parser.add_argument("--threads", type=int)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; returns the exit code."""
    options = parse(argv)
    torch.set_num_threads(options.threads or torch.get_num_threads())
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))  # ends rclone through the context manager
    try:
        with tempfile.TemporaryDirectory(prefix="eyrie-store-bench-") as home:
            report = run(options, Path(home))
    except EyrieError as error:
        print(f"error: {error.reason}: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_model(options.out, report)
    print(f"{report.rows} rows, {report.tokens} tokens, 3 aux states of {report.hidden_size}")
    for pace in report.paces:
        print(f"{pace.codec:9} {pace.place:9} {pace.way:19} {pace.tokens_per_s:11,.0f} tokens/s "
              f"{pace.stored_bytes_per_s / 1e6:8.0f} MB/s  +-{pace.spread / 2:4.0%} "
              f"{pace.cpu_s_per_million_tokens:7.2f} CPU-s per million tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
