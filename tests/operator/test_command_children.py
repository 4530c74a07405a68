"""Verbs that are programs of the workers: started as children, their words and exit codes are the command's."""

import subprocess
import sys

from eyrie_api.errors import InvalidInput


def test_a_comparison_that_cannot_be_is_refused_with_the_hint_and_the_exit_code() -> None:
    command = [sys.executable, "-m", "eyrie_operator.command", "compare"]
    done = subprocess.run([*command, "--target", "my-model"], capture_output=True,
                          text=True, check=False, timeout=240)
    assert done.returncode == InvalidInput.exit_code
    assert "give --data" in done.stderr
    assert done.stdout == ""
