"""Records recent chat requests of an endpoint for retraining after drift. Off by default.

Privacy: users' messages are stored in clear text. They are recorded only on request (`serve.record_prompts`), without
headers, keys or addresses, in one file with mode 0600, bounded to the latest N requests: the file is truncated whenever
it has a quarter more. Switching recording off deletes it. Nothing is sent anywhere.
"""

import json
import os
from collections import deque
from pathlib import Path
from typing import Any

TRAFFIC_FILE = "traffic.jsonl"
CHAT_PATH = "/v1/chat/completions"

_MAX_ROW_BYTES = 256 * 1024
"""Longer conversations exceed what a drafter is trained on (`data.max_prompt_tokens`) and would fill the disk."""


class TrafficRecorder:
    """A bounded file of `{"messages": [...]}` rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: int | None = None

    def record(self, body: bytes, latest: int) -> None:
        """Record the messages of one chat request and keep the `latest` requests; 0 deletes the file."""
        if latest == 0:
            if self._rows != 0:
                self._path.unlink(missing_ok=True)
                self._rows = 0
            return
        row = _messages(body)
        if row is None:
            return
        if not self._path.exists():
            self._rows = 0
        elif self._rows is None:
            self._rows = sum(1 for _ in self._path.open("rb"))
        with open(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
            file.write(row)
        assert self._rows is not None
        self._rows += 1
        if self._rows > latest + latest // 4:
            self._rows = write_latest(self._path, self._path, latest)


def write_latest(source: Path, to: Path, latest: int) -> int:
    """Write the last rows of a traffic file atomically, with mode 0600; returns their number."""
    with source.open("rb") as file:
        rows = deque(file, maxlen=latest)
    temporary = to.with_name(to.name + ".new")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.writelines(rows)
    temporary.replace(to)
    return len(rows)


def _messages(body: bytes) -> bytes | None:
    try:
        parsed: Any = json.loads(body)
        messages = parsed.get("messages") if isinstance(parsed, dict) else None
        if not isinstance(messages, list) or not messages:
            return None
        row = json.dumps({"messages": messages}, ensure_ascii=False).encode() + b"\n"
    except (ValueError, RecursionError):  # lone surrogates and deep nesting too: the engine refuses such a body
        return None
    return row if len(row) <= _MAX_ROW_BYTES else None
