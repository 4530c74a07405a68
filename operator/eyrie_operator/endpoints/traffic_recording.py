"""Recent chat requests of an endpoint, kept to retrain on when the traffic drifts. Off unless the user switches it on.

Privacy: what users wrote lies here in clear. It is kept only on request (`serve.record_prompts`), only the messages
(no headers, keys or addresses), in one file readable by the operating user alone, bounded to the latest N requests: the
file is cut back whenever it holds a quarter more. Recording off deletes it. Nothing is ever sent anywhere.
"""

import json
import os
from collections import deque
from pathlib import Path
from typing import Any

TRAFFIC_FILE = "traffic.jsonl"
CHAT_PATH = "/v1/chat/completions"

_MAX_ROW_BYTES = 256 * 1024
"""A longer conversation is beyond what a drafter is trained on (`data.max_prompt_tokens`) and would fill the disk."""


class Traffic:
    """A bounded file of `{"messages": [...]}` rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: int | None = None

    def keep(self, body: bytes, latest: int) -> None:
        """Keep the messages of one chat request among the `latest`; with 0, keep and leave nothing."""
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
    """Write the last rows of a traffic file, atomically and for our eyes only; returns how many there are."""
    with source.open("rb") as file:
        rows = deque(file, maxlen=latest)
    aside = to.with_name(to.name + ".new")
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.writelines(rows)
    aside.replace(to)
    return len(rows)


def _messages(body: bytes) -> bytes | None:
    try:
        parsed: Any = json.loads(body)
    except ValueError:
        return None
    messages = parsed.get("messages") if isinstance(parsed, dict) else None
    if not isinstance(messages, list) or not messages:
        return None
    row = json.dumps({"messages": messages}, ensure_ascii=False).encode() + b"\n"
    return row if len(row) <= _MAX_ROW_BYTES else None
