"""Runs one server for as long as the tests last: `python keeper.py LIFELINE USER -- command ...`.

LIFELINE is a FIFO whose writing end the test session holds. However the session ends, `kill -9` included, the kernel
closes that end, and the server is ended. Should this process be killed instead, the kernel kills the server too
(PR_SET_PDEATHSIG). So nothing that the tests start outlives them. SIGUSR1 is kill -9 for the server, from its parent:
no zombie keeps its process id. SIGTERM is passed on.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading

_PR_SET_PDEATHSIG = 1
_GRACE_S = 5.0


def wait_for_the_end(lifeline: str) -> None:
    """Return when nobody holds the writing end any more."""
    descriptor = os.open(lifeline, os.O_RDONLY | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while True:
        try:
            if not os.read(descriptor, 64):
                return
        except BlockingIOError:
            poll.poll()


def main(lifeline: str, user: str, argv: list[str]) -> int:
    """Run `argv` as `user` (empty: as we are) until it ends or the lifeline does."""
    libc = ctypes.CDLL(None)
    # PostgreSQL refuses to run as root; extra groups would be root's.
    identity = {"user": user, "group": user if user != "nobody" else "nogroup", "extra_groups": []} if user else {}
    child = subprocess.Popen(argv, preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
                             **identity)  # type: ignore[call-overload]
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    signal.signal(signal.SIGUSR1, lambda *_: child.kill())

    def end() -> None:
        wait_for_the_end(lifeline)
        child.send_signal(signal.SIGINT)  # PostgreSQL then ends its own children, which a killed one leaves to others
        try:
            child.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()

    threading.Thread(target=end, daemon=True).start()
    return int(child.wait())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[4:]))
