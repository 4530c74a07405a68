"""How far capture's forward passes run while shards are written: part of `make bench-store`.

    python -m benchmarks.capture_overlap --out .eyrie/bench/capture-overlap.json

A random target captures random rows three times: the passes alone, the writing of their states alone, and both as
capture does it (`hidden_states.writer`). The disk is made slow by a delay for each byte, so that the two sides
take about as long as each other on any machine. Written one after the other they would take the sum; with threads the
larger of the two and what begins and ends alone.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from eyrie_workers.hidden_states.shard_format import StoreFormat, TokenRow, shard_name
from eyrie_workers.hidden_states.streaming import compute_pass
from eyrie_workers.hidden_states.writer import BackgroundWriter, FeatureWriter, ShardFile
from eyrie_workers.machine import environment
from eyrie_workers.targets.loading import load_target
from eyrie_workers.targets.model import TargetModel
from tests.tiny import tiny_target

_AUX_LAYERS = (1, 2, 3)
_DISK = threading.Lock()


@dataclass(frozen=True)
class Overlap:
    """Seconds of the passes alone, of the writing alone, and of both together."""

    forward_s: float
    writing_s: float
    together_s: float
    num_bytes: int
    device: str

    @property
    def overlap(self) -> float:
        """Share of the shorter side that ran at the same time as the other: 0 one after the other, 1 at best."""
        return (self.forward_s + self.writing_s - self.together_s) / min(self.forward_s, self.writing_s)


class SlowWriter(FeatureWriter):
    """A FeatureWriter on a disk that takes `seconds_per_byte`."""

    seconds_per_byte = 0.0

    def open_shard(self, rows: Sequence[TokenRow], number: int) -> ShardFile:
        """See `FeatureWriter`."""
        delay = self.seconds_per_byte

        class Slow(ShardFile):
            """Waits for each part's bytes."""

            def _write(self, parts: Sequence[bytes | memoryview]) -> None:
                super()._write(parts)
                with _DISK:  # one disk: two threads do not make it faster
                    time.sleep(delay * sum(len(part) for part in parts))

        return Slow(self._directory / shard_name(number), self.format, rows)


def measure(target: TargetModel, options: argparse.Namespace, directory: Path) -> Overlap:
    """The three measurements, after one pass that is not counted."""
    fmt = StoreFormat(aux_layers=_AUX_LAYERS, hidden_size=target.config.hidden_size, codec=options.codec,
                      target_digest="sha256:" + "0" * 64)
    draw = torch.Generator().manual_seed(0)
    rows = [TokenRow(f"row-{i}", torch.randint(target.config.vocab_size, (options.tokens,), generator=draw),
                     torch.arange(options.tokens) >= options.tokens // 2) for i in range(options.passes)]

    def forward(row: TokenRow) -> dict[str, Tensor]:
        return compute_pass(target, [row], fmt).encode(fmt)

    def write(states: Callable[[TokenRow], dict[str, Tensor]], name: str) -> None:
        writer = SlowWriter(directory / name, fmt)
        with BackgroundWriter(writer) as background:
            for number in range(0, len(rows), options.passes_per_shard):
                shard = rows[number:number + options.passes_per_shard]
                background.begin(number // options.passes_per_shard, shard)
                for row in shard:
                    background.put(states(row), 1)
                background.end()
            background.finish()

    def seconds(work: Callable[[], object]) -> float:
        started = time.perf_counter()
        work()
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        return time.perf_counter() - started

    ready = forward(rows[0])
    size = sum(x.numel() * x.element_size() for x in ready.values()) * len(rows)
    forward_s = seconds(lambda: [forward(row) for row in rows])
    SlowWriter.seconds_per_byte = forward_s / size
    return Overlap(forward_s, seconds(lambda: write(lambda _: ready, "alone")),
                   seconds(lambda: write(forward, "together")), size, str(target.device))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description="Measure how far capture computes while it writes.")
    parser.add_argument("--out", type=Path, default=Path(".eyrie/bench/capture-overlap.json"))
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--tokens", type=int, default=1024, help="of one pass")
    parser.add_argument("--passes", type=int, default=24)
    parser.add_argument("--passes-per-shard", type=int, default=4)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="eyrie-overlap-") as home:
        path = tiny_target(Path(home) / "target", hidden_size=options.hidden_size,
                           intermediate_size=2 * options.hidden_size)
        found = measure(load_target(path), options, Path(home))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    document = asdict(found) | {"overlap": found.overlap, "environment": environment("float32").model_dump()}
    options.out.write_text(json.dumps(document, indent=2) + "\n")
    print(f"{found.num_bytes} bytes on {found.device}: forward {found.forward_s:.2f} s, "
          f"writing {found.writing_s:.2f} s, together {found.together_s:.2f} s; "
          f"{found.overlap:.0%} of the shorter side overlaps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
