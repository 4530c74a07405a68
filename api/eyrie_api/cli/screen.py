"""Output of the commands: text or JSON, never both on one stream.

With --json, stdout carries only JSON (one document, or one per line for streams), and errors go to stderr as JSON too.
Otherwise stdout carries the result as text and stderr notes and errors. Colour and live redrawing follow the stream: a
pipe gets plain lines.
"""

import json
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from rich.console import Console, RenderableType
from rich.text import Text

from eyrie_api.errors import EyrieError

# Width for pipes: rich would assume 80 and truncate tables.
_PIPE_WIDTH = 160


class Screen:
    """One invocation's stdout and stderr."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self.out = _console(stderr=False)
        self.err = _console(stderr=True)

    @property
    def live(self) -> bool:
        """Whether lines may be redrawn in place."""
        return self.out.is_terminal and not self.as_json

    def show(self, value: Any, words: RenderableType) -> None:
        """The result: `value` as one JSON document, or `words`."""
        if self.as_json:
            self.out.file.write(json.dumps(plain(value), indent=2) + "\n")
        else:
            self.out.print(words)

    def line(self, value: Any, words: RenderableType) -> None:
        """One item of a stream: a JSON line, or a line of words."""
        if self.as_json:
            self.out.file.write(json.dumps(plain(value)) + "\n")
            self.out.file.flush()
        else:
            self.out.print(words, soft_wrap=True)

    def note(self, words: str) -> None:
        """A note on stderr; omitted with --json."""
        if not self.as_json:
            self.err.print(words, soft_wrap=True)

    def error(self, error: EyrieError) -> None:
        """Print an error and its hint."""
        if self.as_json:
            payload = {"reason": error.reason, "message": error.message, "hint": error.hint,
                       "exit_code": error.exit_code, "status": error.http_status}
            self.err.file.write(json.dumps({"error": payload}) + "\n")
            return
        self.err.print(Text.assemble(("error: ", "bold red"), f"{error.reason}: {error.message}"), soft_wrap=True)
        if error.hint:
            self.err.print(Text.assemble(("hint:  ", "bold green"), error.hint), soft_wrap=True)


def printable(text: str) -> str:
    """Text without control characters: a model's output or a log must not control the terminal."""
    return "".join(character if character in "\n\t" or unicodedata.category(character) != "Cc" else "\ufffd"
                   for character in text)


def plain(value: Any) -> Any:
    """Contract values as JSON-ready objects, also inside lists and dictionaries."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    return value


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _PIPE_WIDTH
    return Console(file=stream, width=width, highlight=False, emoji=False, markup=False)
