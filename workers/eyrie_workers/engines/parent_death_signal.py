"""A child that cannot outlive its parent, however the parent ends.

    python -m eyrie_workers.engines.parent_death_signal PARENT COMMAND ...

An engine that a stage starts for a measurement belongs to that stage. Told to stop, the stage stops it; killed with
SIGKILL, it cannot. So the kernel does it: this program asks to be killed when its parent ends (prctl PR_SET_PDEATHSIG)
and then becomes the command, which keeps the request. It is a program of its own because the alternative, code between
fork and exec of a process full of threads, may deadlock.

The kernel means the *thread* that started the child: start engines from a thread that lives as long as the program.
SGLang's own children make the same request of theirs. Other systems than Linux have no such request: there an engine
outlives a stage that was killed.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def with_parent_death_signal(argv: Sequence[str]) -> list[str]:
    """The command line that runs `argv` as a child of this process that dies with it."""
    return [sys.executable, "-m", "eyrie_workers.engines.parent_death_signal", str(os.getpid()), *argv]


def main() -> None:
    """Bind this process to its parent, then become the command. Does not return."""
    parent, argv = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it ended before the request was made
        sys.exit("the program that wanted this engine is gone")
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main()
