"""Records recent chat requests of an endpoint for retraining after drift. Off by default.

Privacy: users' messages are stored in clear text. They are recorded only on request (`serve.record_prompts`), without
headers, keys or addresses, in one file with mode 0600, bounded to the latest N requests: the file is truncated whenever
it has a quarter more. Switching recording off deletes it. Nothing is sent anywhere.

`Recording`, a part of the route, says which requests: a share of them, with `consented_only` those alone that carry the
header `Eyrie-Record: yes`. What is older than `serve.record_days` is deleted by the control plane (`delete_older`),
copies for retraining included. EYRIE_REDACT names a function of the administrator, `module:function`, that gets the
messages of a request and returns what may be stored, or None; a request at which it fails is not stored.
"""

import importlib
import json
import logging
import os
import random
from collections import deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any

from pydantic import Field

from eyrie_api.contract.model import Frozen
from eyrie_api.errors import InvalidInput

log = logging.getLogger(__name__)

TRAFFIC_FILE, SNAPSHOTS = "traffic.jsonl", "traffic"
CHAT_PATH = "/v1/chat/completions"
CONSENT_HEADER, CONSENT = "eyrie-record", "yes"
REDACT = "EYRIE_REDACT"

Redact = Callable[[list[Any]], list[Any] | None]

_MAX_ROW_BYTES = 256 * 1024
"""Longer conversations exceed what a drafter is trained on (`data.max_prompt_tokens`) and would fill the disk."""


class Recording(Frozen):
    """Which chat requests are recorded."""

    latest: int = Field(0, ge=0)
    """Latest requests to keep; 0 keeps none."""

    share: float = Field(1.0, gt=0.0, le=1.0)
    consented_only: bool = False


def redaction() -> Redact | None:
    """The function that EYRIE_REDACT names. Raises InvalidInput for one that cannot be imported."""
    named = os.environ.get(REDACT)
    if not named:
        return None
    module, _, function = named.partition(":")
    try:
        redact: Redact = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidInput(f"{REDACT} {named!r} cannot be imported: {error}",
                           "write module:function, of a module in Eyrie's environment") from None
    return redact


class TrafficRecorder:
    """A bounded file of `{"messages": [...], "recorded_at": ...}` rows."""

    def __init__(self, path: Path, redact: Redact | None = None) -> None:
        self._path, self._redact = path, redact
        self._rows: int | None = None
        self._inode = 0
        self._random = random.Random()
        self._failing = False

    def record(self, body: bytes, rules: Recording, consent: str = "") -> None:
        """Record the messages of one chat request and keep the `rules.latest` requests; 0 deletes the file. What a full
        disk does not take is not recorded: the request is answered all the same.

        consent   the value of the request's header `Eyrie-Record`
        """
        try:
            self._record(body, rules, consent)
            self._failing = False
        except OSError as error:
            if not self._failing:
                log.warning("chat requests are not recorded: %s", error)
            self._failing = True
            self._rows, self._inode = None, 0  # counted again

    def _record(self, body: bytes, rules: Recording, consent: str) -> None:
        if rules.latest == 0:
            if self._rows != 0:
                self._path.unlink(missing_ok=True)
                self._rows, self._inode = 0, 0
            return
        if rules.consented_only and consent.strip().lower() != CONSENT:
            return
        if rules.share < 1.0 and self._random.random() >= rules.share:
            return
        row = self._row(body)
        if row is None:
            return
        with open(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "a+b") as file:
            if (number := os.fstat(file.fileno()).st_ino) != self._inode:  # new, or old rows were deleted from it
                file.seek(0)
                self._inode, self._rows = number, sum(1 for _ in file)
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":  # a full disk cut the last row: this one is not joined to it
                        file.write(b"\n")
            file.write(row)
        assert self._rows is not None
        self._rows += 1
        if self._rows > rules.latest + rules.latest // 4:
            with self._path.open("rb") as file:
                self._rows = write_latest(file, self._path, rules.latest)
            self._inode = self._path.stat().st_ino

    def _row(self, body: bytes) -> bytes | None:
        try:
            parsed: Any = json.loads(body)
            messages = parsed.get("messages") if isinstance(parsed, dict) else None
            if not isinstance(messages, list) or not messages:
                return None
            if self._redact is not None:
                try:
                    messages = self._redact(messages)
                except Exception as error:  # noqa: BLE001 - a program of the administrator's
                    # Without its message, which may quote the request.
                    log.warning("%s failed with %s: the request is not recorded", REDACT, type(error).__name__)
                    return None
                if not messages:
                    return None
            row = json.dumps({"messages": messages, "recorded_at": datetime.now(UTC).isoformat(timespec="seconds")},
                             ensure_ascii=False).encode() + b"\n"
        except (ValueError, RecursionError):  # lone surrogates and deep nesting too: the engine refuses such a body
            return None
        return row if len(row) <= _MAX_ROW_BYTES else None


def delete_older(directory: Path, days: float, now: datetime) -> None:
    """Delete rows of an endpoint's traffic that are older, and copies of it that were made so long ago."""
    oldest = now - timedelta(days=days)
    file = directory / TRAFFIC_FILE
    if file.exists():
        with file.open("rb") as rows:
            is_old = _recorded_before(rows.readline(), oldest)
            kept = [row for row in rows if not _recorded_before(row, oldest)] if is_old else []
        if is_old:
            _replace(file, kept, ".kept")  # the gateway, another process, may be writing `.new`
    for copy in (directory / SNAPSHOTS).glob("*.jsonl"):
        if datetime.fromtimestamp(copy.stat().st_mtime, UTC) < oldest:
            copy.unlink(missing_ok=True)


def _recorded_before(row: bytes, oldest: datetime) -> bool:
    """A row that was cut, or has no time, is older than any."""
    try:
        return datetime.fromisoformat(str(json.loads(row).get("recorded_at"))) < oldest
    except (ValueError, AttributeError):
        return bool(row)


def write_latest(source: IO[bytes], to: Path, latest: int) -> int:
    """Write the last rows of a traffic file atomically, with mode 0600; returns their number."""
    rows = deque(source, maxlen=latest)
    _replace(to, rows, ".new")
    return len(rows)


def _replace(to: Path, rows: Iterable[bytes], suffix: str) -> None:
    temporary = to.with_name(to.name + suffix)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.writelines(rows)
    temporary.replace(to)
