"""Rehearsed runs and small disks, as in tests/pipelines, driven by the embedded world; the command in this process."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from eyrie_operator.command import app
from tests.pipelines.conftest import disk, rehearsal

__all__ = ["disk", "rehearsal"]

Eyrie = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def eyrie(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Eyrie]:
    """The `eyrie` command in this process: a process of its own would import for one to two seconds."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*arguments: str | Path, cwd: Path | None = None,
            env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        capfd.readouterr()
        with monkeypatch.context() as patch:
            patch.delenv("EYRIE_SERVER", raising=False)
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            with contextlib.chdir(cwd or os.getcwd()), pytest.raises(SystemExit) as ended:
                app([str(argument) for argument in arguments])
        code = ended.value.code
        return subprocess.CompletedProcess(arguments, code if isinstance(code, int) else 0, *capfd.readouterr())

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
