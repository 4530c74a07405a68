"""SGLang servers for tests, on CPU: engines.sglang.process with SGLang's interpreter and the stand-in kernels.

float32, so that two implementations agree to the token; one attention backend, the one that speculates on
CPU; no compilation (`TORCHDYNAMO_DISABLE`: inductor would cost the first request a minute); one thread per process, no
polling while idle, because several servers run on few cores. The pool of 8192 tokens is what these tests need;
without the flag SGLang takes a share of the machine's memory.
"""

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from eyrie_api.contract.engine import SGLANG_PROGRAM, DraftTreeShape
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.processes import free_port
from eyrie_workers.drafters.checkpoint import read_config
from eyrie_workers.sglang.checkpoints import checkpoint_algorithm
from eyrie_workers.sglang.process import SglangServer, start_sglang
from eyrie_workers.targets.loading import QUICKSTART, resolve

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = Path(__file__).parent / "environment" / "stand_in"
TARGET = resolve(TargetSpec(model=QUICKSTART))
MODEL = "quickstart"
READY_S = 600.0
"""Start-up takes 30 s on two idle cores, all of it imports; a busy machine may need many times that."""

CPU = ("--device", "cpu", "--attention-backend", "intel_amx", "--page-size", "1", "--disable-overlap-schedule",
       "--dtype", "float32", "--max-total-tokens", "8192", "--max-running-requests", "8", "--context-length", "1024",
       "--skip-server-warmup", "--sleep-on-idle")


def sglang_python() -> Path:
    """SGLang's interpreter (`environment/setup` makes it)."""
    venv = os.environ.get("EYRIE_SGLANG_VENV", str(ROOT / ".eyrie" / "sglang-venv"))
    return Path(os.environ.get("EYRIE_SGLANG_PYTHON", f"{venv}/bin/python"))


def program() -> tuple[str, ...]:
    """What stands in for `python -m sglang.launch_server`."""
    return (str(sglang_python()), str(STAND_IN / "serve_on_cpu.py"))


def let_stages_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variables by which stage programs find this SGLang."""
    monkeypatch.setenv(SGLANG_PROGRAM, shlex.join(program()))
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


def environment() -> dict[str, str]:
    """Variables of the servers' processes."""
    return {"PYTHONPATH": str(STAND_IN), "CUDA_VISIBLE_DEVICES": "", "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}


def flags(*more: str, radix_cache: bool = False) -> tuple[str, ...]:
    """The line of a server of the quickstart target on a port of its own."""
    line = ("--model-path", str(TARGET), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port",
            str(free_port()), *CPU, *more)
    return line if radix_cache else (*line, "--disable-radix-cache")


def drafting(drafter: Path, tree: DraftTreeShape) -> tuple[str, ...]:
    """The flags that make it draft."""
    return ("--speculative-algorithm", str(checkpoint_algorithm(read_config(drafter))),
            "--speculative-draft-model-path", str(drafter),
            "--speculative-num-steps", str(tree.num_steps), "--speculative-eagle-topk", str(tree.top_k),
            "--speculative-num-draft-tokens", str(tree.num_draft_tokens))


def descendants(pid: int) -> set[int]:
    """Process ids of the living descendants of a process. SGLang changes its processes' titles, so no name is read."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # ended meanwhile
            state, parent = stat.read_text().rsplit(")", 1)[1].split()[:2]
            if state != "Z":
                parents[int(stat.parent.name)] = int(parent)
    found, level = set[int](), {pid}
    while level:
        level = {child for child, parent in parents.items() if parent in level}
        found |= level
    return found


def alive(pids: set[int]) -> set[int]:
    """Those of these processes that live; a zombie does not."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                found.add(pid)
    return found


@contextmanager
def serving(arguments: Sequence[str], directory: Path, **variables: str) -> Iterator[SglangServer]:
    """A server with these arguments and variables, ready; ended at once when the test is done with it."""
    server = start_sglang(arguments, directory, environment=environment() | variables, prefix=program())
    try:
        server.wait_ready(READY_S)
        yield server
    finally:
        server.stop(timeout_s=0.0)
