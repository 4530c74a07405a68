"""Checkpoints measured at once on a machine with several GPUs, each on GPUs of its own.

A fan-out of kfp.local runs two tasks at most, so the first benchmark task of a run measures all checkpoints, each in a
child process (`one_benchmark`) whose CUDA_VISIBLE_DEVICES is its share; the other tasks then find their manifests. The
measuring lock is one of each GPU for such a child (`eyrie_workers.machine`).

On a cluster each benchmark task is a pod with GPUs of its own, and nothing is shared.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from eyrie_api.v1alpha1.engine import EngineSpec

SHARES = "EYRIE_GPU_SHARES"
"""Set by the runner of one machine with several GPUs: groups of GPU ids, `0,1;2,3`."""

Share = tuple[str, ...]


def gpu_shares(gpus: Sequence[str], engine: EngineSpec) -> tuple[Share, ...]:
    """The GPUs of each measurement that runs at the same time; fewer than two shares: measure one after the other."""
    size = engine.num_gpus or engine.tp_size
    return tuple(tuple(gpus[first:first + size]) for first in range(0, len(gpus) - size + 1, size))


def written(shares: Sequence[Share]) -> str:
    """The value of EYRIE_GPU_SHARES."""
    return ";".join(",".join(share) for share in shares)


def shares_here() -> tuple[Share, ...]:
    """The shares that the runner of this machine found; empty on a cluster, and in a child that has one of them."""
    text = os.environ.get(SHARES, "")
    return tuple(tuple(share.split(",")) for share in text.split(";") if share)


def measure_on_shares(job_dir: str, spec_digest: str, checkpoints: Sequence[str], shares: Sequence[Share]) -> None:
    """Benchmark these checkpoints, as many at once as there are shares.

    A failed one is in the run's failure record; one that was killed has no manifest, and its own task runs it again.
    """
    free: SimpleQueue[Share] = SimpleQueue()
    for share in shares:
        free.put(share)

    def measure(checkpoint: str) -> None:
        share = free.get()
        environment = {name: value for name, value in os.environ.items() if name != SHARES}
        try:
            subprocess.run(
                [sys.executable, "-m", "eyrie_pipelines.one_benchmark", "--job-dir", job_dir, "--spec-digest",
                 spec_digest, "--checkpoint", checkpoint],
                env=environment | {"CUDA_VISIBLE_DEVICES": ",".join(share)}, check=False)
        finally:
            free.put(share)

    with ThreadPoolExecutor(len(shares)) as workers:
        list(workers.map(measure, checkpoints))
