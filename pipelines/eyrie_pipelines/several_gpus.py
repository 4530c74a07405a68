"""Several GPUs at work: on one stage's program by torchrun, or on several measurements side by side.

**torchrun.** Capture and train run as several processes, one for each GPU: on several GPUs of one machine or one pod,
and training on the nodes of a TrainJob. Trainer's torch runtime describes the nodes of a TrainJob in PET_* variables,
which torchrun reads; elsewhere torchrun works on this machine alone (`--standalone`). EYRIE_DEVICE=cuda makes the
program refuse a machine that has fewer GPUs than processes. Set to `cpu`, the same number of processes computes on the
CPU.

**Shares.** A fan-out of kfp.local runs two tasks at most, so on one machine the first benchmark task of a run measures
all checkpoints, each in a child process (`task_program`) whose CUDA_VISIBLE_DEVICES is its share; the other tasks then
find their manifests. The measuring lock is one of each GPU for such a child (`eyrie_workers.machine.machine_lock`). On
a cluster each benchmark task is a pod with GPUs of its own, and nothing is shared.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from eyrie_api.contract.engine import EngineSpec
from eyrie_api.contract.stages import StageName
from eyrie_workers.catalog import KEEPER_VARIABLE

TRAINJOB_VARIABLE = "EYRIE_TRAINJOB"
"""A TrainJobRequest as JSON (`trainjob`): set on the train task that creates a TrainJob, not on its nodes."""

PROCESSES_VARIABLE = "EYRIE_PROCESSES"
"""Processes of this pod's stage: one for each of its GPUs, at least one. Not set on one machine."""

DIVIDED_STAGES: tuple[StageName, ...] = ("capture", "train")
"""The stages whose programs divide their work among processes."""

SHARES = "EYRIE_GPU_SHARES"
"""Set by the runner of one machine with several GPUs: groups of GPU ids, `0,1;2,3`."""

Share = tuple[str, ...]


def is_node() -> bool:
    return "PET_NNODES" in os.environ


def is_first_node() -> bool:
    """Whether this pod uploads a stage's output: always without a TrainJob, else on the node of rank 0."""
    return os.environ.get("PET_NODE_RANK", "0") == "0"


def num_processes(num_gpus: int) -> int:
    """Processes of a stage to start here.

    num_gpus   what the job was accepted with for the stage. A pod's own number is in EYRIE_PROCESSES.
    """
    return int(os.environ.get(PROCESSES_VARIABLE, max(1, num_gpus)))


def under_torchrun(command: Sequence[str], processes: int) -> list[str]:
    """The command line `python -m module ...` as that of several processes."""
    python, *program = command
    alone = [] if is_node() else ["--standalone"]
    return [python, "-m", "torch.distributed.run", *alone, "--nproc-per-node", str(processes), *program]


def gpu_shares(gpus: Sequence[str], engine: EngineSpec) -> tuple[Share, ...]:
    """The GPUs of each measurement that runs at the same time; fewer than two shares: measure one after the other."""
    size = engine.num_gpus or engine.tp_size
    return tuple(tuple(gpus[first:first + size]) for first in range(0, len(gpus) - size + 1, size))


def measure_on_shares(job_dir: str, spec_digest: str, checkpoints: Sequence[str], shares: Sequence[Share]) -> None:
    """Benchmark these checkpoints, as many at once as there are shares.

    A failed one is in the run's failure record; one that was killed has no manifest, and its own task runs it again.
    """
    free: SimpleQueue[Share] = SimpleQueue()
    for share in shares:
        free.put(share)

    def measure(checkpoint: str) -> None:
        share = free.get()
        # The keeper of servers answers one process at a time.
        environment = {name: value for name, value in os.environ.items() if name not in (SHARES, KEEPER_VARIABLE)}
        try:
            subprocess.run(
                [sys.executable, "-m", "eyrie_pipelines.task_program", "benchmark", "--job-dir", job_dir,
                 "--spec-digest", spec_digest, "--key", checkpoint],
                env=environment | {"CUDA_VISIBLE_DEVICES": ",".join(share)}, check=False)
        finally:
            free.put(share)

    with ThreadPoolExecutor(len(shares)) as workers:
        list(workers.map(measure, checkpoints))
