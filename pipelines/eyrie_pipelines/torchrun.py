"""Capture and train under torchrun: on several GPUs of one machine or one pod, and training on the nodes of a TrainJob.

Trainer's torch runtime describes the nodes of a TrainJob in PET_* variables, which torchrun reads; elsewhere torchrun
works on this machine alone (`--standalone`). This module is the only place that builds torchrun's arguments.

Several processes are several GPUs, one each: EYRIE_DEVICE=cuda makes the program refuse a machine that has fewer. Set
to `cpu`, the same number of processes computes on the CPU.
"""

import os
from collections.abc import Sequence

from eyrie_api.v1alpha1.stages import StageName

TRAINJOB_VARIABLE = "EYRIE_TRAINJOB"
"""A TrainJobRequest as JSON (`trainjob`): set on the train task that creates a TrainJob, not on its nodes."""

PROCESSES_VARIABLE = "EYRIE_PROCESSES"
"""Processes of this pod's stage: one for each of its GPUs, at least one. Not set on one machine."""

DIVIDED_STAGES: tuple[StageName, ...] = ("capture", "train")
"""The stages whose programs divide their work among processes."""


def is_node() -> bool:
    """Whether this process runs on a node of a TrainJob."""
    return "PET_NNODES" in os.environ


def is_first_node() -> bool:
    """Whether this pod uploads a stage's output: always without a TrainJob, else on the node of rank 0."""
    return os.environ.get("PET_NODE_RANK", "0") == "0"


def num_processes(num_gpus: int) -> int:
    """Processes of a stage to start here.

    num_gpus   what the job requests for the stage. In a pod the cluster's placement has been merged with that, and
               EYRIE_PROCESSES has the result.
    """
    return int(os.environ.get(PROCESSES_VARIABLE, max(1, num_gpus)))


def under_torchrun(command: Sequence[str], processes: int) -> list[str]:
    """The command line `python -m module ...` as that of several processes."""
    python, *program = command
    alone = [] if is_node() else ["--standalone"]
    return [python, "-m", "torch.distributed.run", *alone, "--nproc-per-node", str(processes), *program]
