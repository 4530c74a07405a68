"""Reads the small files of a model directory, and says why one cannot be used."""

import json
from pathlib import Path
from typing import Any

from eyrie_api.errors import UnsupportedTarget

GIT_LFS = b"version https://git-lfs"
LFS_HINT = "run `git lfs pull` where it was cloned, or download it with `hf download`"
_MAX_JSON_BYTES = 1 << 28
"""The largest tokenizers are 40 MB."""


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object. Raises UnsupportedTarget for a file that is not one or cannot be read."""
    if path.exists() and not path.is_file():  # opening a FIFO waits for its other end, a device may never end
        raise UnsupportedTarget(f"{path} is not a regular file", "put the file itself there, or a link to it")
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_JSON_BYTES + 1)
    except OSError as error:
        raise UnsupportedTarget(f"{path} cannot be read: {error.strerror}",
                                "make it readable for the server") from None
    if data.startswith(GIT_LFS):
        raise UnsupportedTarget(f"{path} is a git-LFS pointer, not the file itself", LFS_HINT)
    if len(data) > _MAX_JSON_BYTES:
        raise UnsupportedTarget(f"{path} is larger than {_MAX_JSON_BYTES >> 20} MiB", "save the model again")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UnsupportedTarget(f"{path} is not JSON: {error}", "download the model again") from None
    if not isinstance(value, dict):
        raise UnsupportedTarget(f"{path} is not a JSON object", "download the model again")
    return value
