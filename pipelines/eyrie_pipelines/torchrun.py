"""The train stage under torchrun, on the nodes of a TrainJob.

Trainer's torch runtime describes the nodes in PET_* variables, which torchrun reads. This module is the only place
that builds torchrun's arguments.
"""

import os
from pathlib import Path

from eyrie_workers.catalog import command

PROCESSES_VARIABLE = "EYRIE_TRAIN_PROCESSES"
"""Training processes per node."""


def is_node() -> bool:
    """Whether this process runs on a node of a TrainJob."""
    return "PET_NNODES" in os.environ


def is_first_node() -> bool:
    """Whether this pod uploads a stage's output: always without a TrainJob, else on the node of rank 0."""
    return os.environ.get("PET_NODE_RANK", "0") == "0"


def torchrun_command(directory: Path) -> list[str]:
    """The train stage's program under torchrun; torchrun reads the addresses of its peers from PET_*."""
    python, *program = command("train", directory)
    processes = os.environ.get(PROCESSES_VARIABLE, "1")
    return [python, "-m", "torch.distributed.run", "--nproc-per-node", processes, *program]
