"""Sharded AdamW against torch's own: time and memory of a step, and resuming on another number of processes.

    python -m tests.benchmarks.optimiser --out .eyrie/bench/optimiser.json [--processes 2,3] [--hidden 768]

The same drafter-shaped model (fusion, attention and MLP projections, output matrix) takes the same steps on CPU
processes joined by gloo, with

    ours     `training.optimiser.ShardedAdamW`: reduce-scatter, AdamW on a slice, all-gather
    zero     all-reduce of the gradients, then torch's ZeroRedundancyOptimizer around AdamW
    fsdp2    torch's `fully_shard` over the layers and AdamW on the sharded parameters

Variants run in turn, repeat by repeat, each in fresh processes. `seconds` is the median step of a repeat, forward and
backward included; `peak_mb` the growth of the largest process's resident memory over the model's own construction.
`resumed`: the state saved by all processes, loaded by one more process, gives the next loss of an uninterrupted run.

    P processes, H hidden, T tokens, D draft vocabulary
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from eyrie_api.artifacts import write_atomically
from eyrie_workers.training.optimiser import ShardedAdamW

VARIANTS = ("ours", "zero", "fsdp2")
SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
MAX_NORM = 0.5
TOKENS = 64


class Layer(nn.Module):
    """One decoder layer's projections without its attention: what an optimiser sees of it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(2 * hidden, 3 * hidden, bias=False), nn.Linear(3 * hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x_TH: Tensor) -> Tensor:
        """[T, H] to [T, H]."""
        x_TH = x_TH + self.out(self.qkv(torch.cat([x_TH, x_TH], -1)))
        return x_TH + self.down(torch.nn.functional.silu(self.up(x_TH)))


class Model(nn.Module):
    """Fusion of three states, one layer, the output matrix over a draft vocabulary of 8 H."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fuse, self.layer = nn.Linear(3 * hidden, hidden, bias=False), Layer(hidden)
        self.head = nn.Linear(hidden, 8 * hidden, bias=False)

    def forward(self, x_TA: Tensor) -> Tensor:
        """Mean of log-sum-exp over the vocabulary: a loss with a gradient in every parameter."""
        return torch.logsumexp(self.head(self.layer(self.fuse(x_TA))), -1).mean()


def batch(step: int, rank: int, hidden: int) -> Tensor:
    """[T, 3 H]; three shares a step whatever the number of processes, so that runs are comparable."""
    return torch.randn(TOKENS, 3 * hidden, generator=torch.Generator().manual_seed(100 * step + rank))


class Run:
    """One variant in one process."""

    def __init__(self, variant: str, hidden: int, rank: int, size: int) -> None:
        self.variant, self.hidden, self.rank, self.size = variant, hidden, rank, size
        self.model = Model(hidden)
        parameters = list(self.model.parameters())
        self.optimizer: Any
        if variant == "ours":
            self.optimizer = ShardedAdamW(parameters, rank, size, **SETTINGS)
        elif variant == "zero":
            self.optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, fused=True, **SETTINGS)
        else:
            mesh = init_device_mesh("cpu", (size,))
            for part in (self.model.fuse, self.model.layer, self.model.head, self.model):
                fully_shard(part, mesh=mesh)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), **SETTINGS)

    def step(self, number: int) -> float:
        """One step on this process's share; the loss of the shares, summed over all processes."""
        self.optimizer.zero_grad()
        shares = [share for share in range(6) if share % self.size == self.rank]
        loss = torch.stack([self.model(batch(number, share, self.hidden)) for share in shares]).sum() / 6
        # FSDP2 averages over processes (gloo has no premultiplied sum), the other variants sum.
        (loss * self.size if self.variant == "fsdp2" else loss).backward()
        if self.variant == "ours":
            self.optimizer.reduce()
            self.optimizer.clip(MAX_NORM)
        else:
            if self.variant == "zero":
                for parameter in self.model.parameters():
                    dist.all_reduce(parameter.grad)
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total)

    def save(self, path: Path) -> None:
        """The whole state in one file, by rank 0."""
        if self.variant == "ours":
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.moments()}
        elif self.variant == "zero":
            self.optimizer.consolidate_state_dict(to=0)
            state = {"model": self.model.state_dict(),
                     "optimizer": self.optimizer.state_dict() if self.rank == 0 else None}
        else:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state = {"model": get_model_state_dict(self.model, options=options),
                     "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=options)}
        if self.rank == 0:
            torch.save(state, path)
        dist.barrier()

    def load(self, path: Path) -> None:
        """Load that state, on any number of processes."""
        state = torch.load(path, weights_only=False)
        if self.variant == "fsdp2":
            options = StateDictOptions(full_state_dict=True)
            set_model_state_dict(self.model, state["model"], options=options)
            set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=options)
            return
        self.model.load_state_dict(state["model"])
        if self.variant == "ours":
            self.optimizer.restore(state["optimizer"])
        else:
            self.optimizer.load_state_dict(state["optimizer"])


def peak_mb() -> float:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_process(options: argparse.Namespace) -> None:
    """One process of a run: steps, then the saved state, and what was measured by rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{options.meet}", rank=options.rank, world_size=options.size)
    Model(options.hidden)
    before = peak_mb()
    run = Run(options.variant, options.hidden, options.rank, options.size)
    if options.load:
        run.load(options.load)
    losses, seconds = [], []
    for number in range(options.first, options.first + options.steps):
        dist.barrier()
        started = time.perf_counter()
        losses.append(run.step(number))
        seconds.append(time.perf_counter() - started)
    peak = torch.tensor(peak_mb() - before)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if options.save:
        run.save(options.save)
    if options.rank == 0:
        options.report.write_text(json.dumps(
            {"seconds": statistics.median(seconds[1:] or seconds), "peak_mb": float(peak), "losses": losses}))
    dist.destroy_process_group()


def run_processes(variant: str, size: int, hidden: int, scratch: Path, first: int, steps: int, *,
                  save: Path | None = None, load: Path | None = None) -> dict[str, Any]:
    """A run of `size` processes; what rank 0 measured."""
    name = f"{variant}-{size}-{first}-{time.monotonic_ns()}"
    report = scratch / f"{name}.json"
    argv = [sys.executable, "-m", "tests.benchmarks.optimiser", "--variant", variant, "--size", str(size), "--hidden",
            str(hidden), "--meet", str(scratch / name), "--first", str(first), "--steps", str(steps), "--report",
            str(report), *(("--save", str(save)) if save else ()), *(("--load", str(load)) if load else ())]
    processes = [subprocess.Popen([*argv, "--rank", str(rank)]) for rank in range(size)]
    codes = [process.wait(600) for process in processes]
    if any(codes):
        raise SystemExit(f"{name}: exit codes {codes}")
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def measure(sizes: list[int], hidden: int, repeats: int, log: Callable[[str], None]) -> dict[str, Any]:
    """Every variant at every number of processes, in turn."""
    report: dict[str, Any] = {"hidden": hidden, "parameters": sum(p.numel() for p in Model(hidden).parameters()),
                              "torch": torch.__version__, "runs": {}}
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        for size in sizes:
            runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
            for repeat in range(repeats):
                for variant in VARIANTS[repeat % 3:] + VARIANTS[:repeat % 3]:
                    runs[variant].append(run_processes(variant, size, hidden, scratch, 0, 8))
            for variant in VARIANTS:
                state = scratch / f"{variant}.pt"
                run_processes(variant, size, hidden, scratch, 0, 3, save=state)
                resumed = run_processes(variant, size + 1, hidden, scratch, 3, 3, load=state)["losses"]
                through = run_processes(variant, size, hidden, scratch, 0, 6)["losses"][3:]
                seconds = [run["seconds"] for run in runs[variant]]
                entry = {"seconds": [round(min(seconds), 4), round(statistics.median(seconds), 4),
                                     round(max(seconds), 4)],
                         "peak_mb": round(statistics.median(run["peak_mb"] for run in runs[variant])),
                         "resumed": max(abs(a - b) for a, b in zip(resumed, through, strict=True)) < 1e-4}
                report["runs"].setdefault(str(size), {})[variant] = entry
                log(f"{size} processes, {variant}: {json.dumps(entry)}")
    return report


def main() -> int:
    """The program; with --variant one process of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.optimiser",
                                     description="Sharded AdamW against ZeroRedundancyOptimizer and fully_shard.")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--processes", default="2,3")
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=5)
    for name in ("variant", "meet"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    for name in ("rank", "size", "first", "steps"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    for name in ("report", "save", "load"):
        parser.add_argument(f"--{name}", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        run_process(options)
        return 0
    if options.out is None:
        parser.error("--out FILE is required")
    report = measure([int(size) for size in options.processes.split(",")], options.hidden, options.repeats, print)
    write_atomically(options.out, json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
