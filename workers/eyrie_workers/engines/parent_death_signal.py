"""Child processes that end when their parent ends, even by SIGKILL.

    python parent_death_signal.py PARENT_PID COMMAND ...

A stage stops the engines it started for a measurement when it is asked to stop; killed with SIGKILL it cannot. So the
kernel does it: this program sets its parent-death signal to SIGKILL (prctl PR_SET_PDEATHSIG) and then executes the
command, which keeps the setting. It is a separate program because the alternative, a `preexec_fn` between fork and exec
of a multi-threaded process, may deadlock.

A program that torchrun starts cannot be wrapped like this and calls `die_with_parent` instead.

The signal is sent when the *thread* that created the child ends: start engines from a thread that lives as long as the
process. SGLang sets the same signal for its own children. PR_SET_PDEATHSIG exists on Linux only; on other systems an
engine outlives a stage that was killed.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterable, Sequence

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def with_parent_death_signal(argv: Sequence[str]) -> list[str]:
    """The command line that runs `argv` as a child which is killed when this process ends."""
    # By its path, not as a module: the child's PYTHONPATH may lead to SGLang's part of our package alone.
    return [sys.executable, "-P", __file__, str(os.getpid()), *argv]


def die_with_parent() -> None:
    """Have this process killed when its parent ends. A parent that has ended already goes unnoticed."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent has ended, so that `reap` can wait for them and
    their CPU time counts as this process's (`os.times`), not as other work on the machine. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap(pids: Iterable[int]) -> None:
    """Wait for those of these processes, all of them killed, that are children of this one."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def main() -> None:
    """Set the parent-death signal, then execute the command. Does not return."""
    parent, argv = int(sys.argv[1]), sys.argv[2:]
    die_with_parent()
    # Race: a parent that ended before prctl sends no signal any more, but this process then has another parent.
    if os.getppid() != parent:
        sys.exit("the parent process has ended")
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main()
