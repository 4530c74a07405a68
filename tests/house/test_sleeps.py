"""Tests wait for what they wait for (`tests.waiting`); those that take time on purpose are listed."""

import ast
from pathlib import Path

from tests.house.sources import ROOT

ALLOWED = {
    "tests/waiting.py": "polls",
    "tests/servers/processes.py": "polls a server that may end, and pauses before another try",
    "tests/servers/hub.py": "a hub that sends slowly",
    "tests/api/chores_worker.py": "a chore that takes until it is let go, and renews its lease",
    "tests/api/test_cli.py": "a server that is away for longer than a watch waits",
    "tests/api/test_web_server.py": "clients that send slowly or nothing",
    "tests/pipelines/rehearsal/rehearsal_stage.py": "stages that hang, or wait for others",
    "tests/pipelines/test_full_disk.py": "space that is freed later than measured",
    "tests/workers/data/test_stored_rows.py": "kills at several times after the last line is read",
    "tests/workers/regeneration/test_sharded.py": "a shard that takes longer than its message stays invisible",
}
PROGRAMS = ("benchmarks", "campaigns", "cluster")
"""Programs that measure, inject faults, or look at a cluster at intervals."""


def test_nothing_sleeps_but_what_takes_time_on_purpose() -> None:
    sleeping = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")
                if path.relative_to(ROOT / "tests").parts[0] not in PROGRAMS and _sleeps(path)}
    assert sleeping == set(ALLOWED), "wait_for of tests.waiting waits for a condition"


def _sleeps(path: Path) -> bool:
    text = path.read_text()
    return "time.sleep" in text and any(isinstance(node, ast.Call) and ast.unparse(node.func) == "time.sleep"
                                        for node in ast.walk(ast.parse(text)))
