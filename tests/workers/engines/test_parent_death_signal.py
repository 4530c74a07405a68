"""A child process ends with its parent, even after SIGKILL."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from eyrie_pipelines.processes import identify
from eyrie_workers.engines.parent_death_signal import with_parent_death_signal
from tests.waiting import wait_for

PARENT = """
import subprocess, sys, time
from eyrie_workers.engines.parent_death_signal import with_parent_death_signal
child = subprocess.Popen(with_parent_death_signal(["sleep", "600"]), start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_child_in_another_session_is_killed_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    wait_for(lambda: "sleep" in Path(f"/proc/{child}/cmdline").read_text().split("\0")[0], "the child is its command")
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: identify(child) is None, "the child ends with its parent")


def test_a_child_whose_parent_has_ended_already_does_not_run_its_command() -> None:
    argv = with_parent_death_signal([sys.executable, "-c", "print('began')"])
    argv[argv.index(str(os.getpid()))] = "1"  # as if the parent had ended and init had adopted the child
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "began" not in ended.stdout
