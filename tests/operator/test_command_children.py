"""Verbs that are programs of the workers: started as children, their words and exit codes are the command's."""

import subprocess
import sys
from pathlib import Path

from eyrie_api.errors import InvalidInput


def test_a_comparison_that_cannot_be_is_refused_with_the_hint_and_the_exit_code(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "eyrie_operator.command", "compare"]
    done = subprocess.run([*command, "--target", "my-model", "--out", str(tmp_path / "x")], capture_output=True,
                          text=True, check=False, timeout=240)
    assert done.returncode == InvalidInput.exit_code
    assert "--data chats.jsonl" in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "x").exists()
