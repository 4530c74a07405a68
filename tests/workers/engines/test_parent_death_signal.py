"""A with_parent_death_signal child ends with its parent, even when the parent could do nothing about it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from eyrie_pipelines.processes import identify
from eyrie_workers.engines.parent_death_signal import with_parent_death_signal

PARENT = """
import subprocess, sys, time
from eyrie_workers.engines.parent_death_signal import with_parent_death_signal
child = subprocess.Popen(with_parent_death_signal(["sleep", "600"]), start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_parent_killed_outright_takes_its_leashed_child_along_into_whatever_session_it_went() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    deadline = time.monotonic() + 60
    while "sleep" not in Path(f"/proc/{child}/cmdline").read_text().split("\0")[0]:
        assert time.monotonic() < deadline, "the child did not become its command"
        time.sleep(0.02)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    while identify(child) is not None:
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.02)


def test_a_child_whose_parent_is_another_process_by_then_does_not_begin() -> None:
    argv = with_parent_death_signal([sys.executable, "-c", "print('began')"])
    argv[argv.index(str(os.getpid()))] = "1"  # as if the one who wanted it had died and init had taken the child over
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "began" not in ended.stdout
