"""What all commands share: options for server and output, error handling, exit codes, the screen, and the control plane
that runs on this machine."""

import fcntl
import functools
import inspect
import json
import os
import sys
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec
from urllib.parse import urlsplit

import typer
from pydantic_core import to_jsonable_python
from rich.console import Console, RenderableType
from rich.text import Text

from eyrie_api.client import DEFAULT_SERVER, Client, Unreachable
from eyrie_api.errors import EyrieError, InvalidInput
from eyrie_api.settings import Settings

Params = ParamSpec("Params")
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Server = Annotated[str, typer.Option("--server", envvar="EYRIE_SERVER", help="Address of the control plane.")]
InProject = Annotated[str | None, typer.Option("--project", envvar="EYRIE_PROJECT", help="Default: your own.")]


def verb(function: Callable[Params, None]) -> Callable[Params, None]:
    """Print an EyrieError through the screen and exit with its code."""

    @functools.wraps(function)
    def with_exit_code(*args: Params.args, **kwargs: Params.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except EyrieError as error:
            # The address of the control plane that runs on this machine; invalid settings are reported by itself.
            with suppress(OSError, EyrieError):
                plane = running_plane(Settings.from_env().home) if isinstance(error, Unreachable) else None
                if plane is not None and plane.url != str(kwargs.get("server")).rstrip("/"):
                    error.hint += f"; the control plane of {plane.home} is at {plane.url}: " \
                                  f"export EYRIE_SERVER={plane.url}"
            Screen(as_json=bool(kwargs.get("as_json"))).error(error)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except BrokenPipeError:  # `eyrie events | head` is not an error
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the interpreter flushes stdout again at exit
            raise typer.Exit(0) from None

    return with_exit_code


def connect(server: str, project: str | None = None) -> Client:
    """A client of the server, in a project if one is given. Raises InvalidInput for an invalid address."""
    if urlsplit(server).scheme not in ("http", "https") or not urlsplit(server).hostname:
        raise InvalidInput(f"--server {server!r} is not an address", f"write it like {DEFAULT_SERVER}")
    return Client(server, project=project)


# Width for pipes: rich would assume 80 and truncate tables.
_PIPE_WIDTH = 160


class Screen:
    """One invocation's stdout and stderr: text or JSON, never both on one stream.

    With --json, stdout carries only JSON (one document, or one per line for streams), and errors go to stderr as JSON
    too. Otherwise stdout carries the result as text and stderr notes and errors. Colour and live redrawing follow the
    stream: a pipe gets plain lines.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self.out = _console(stderr=False)
        self.err = _console(stderr=True)

    def for_progress(self) -> "Screen":
        """One for what is seen on the way to one JSON document: with --json its stdout is stderr."""
        other = Screen(as_json=self.as_json)
        if self.as_json:
            other.out = other.err
        return other

    @property
    def live(self) -> bool:
        """Whether lines may be redrawn in place."""
        return self.out.is_terminal and not self.as_json

    def show(self, value: Any, words: RenderableType) -> None:
        """The result: `value` as one JSON document, or `words`."""
        if self.as_json:
            self.out.file.write(json.dumps(to_jsonable_python(value), indent=2) + "\n")
        else:
            self.out.print(words)

    def line(self, value: Any, words: RenderableType) -> None:
        """One item of a stream: a JSON line, or a line of words."""
        if self.as_json:
            self.out.file.write(json.dumps(to_jsonable_python(value)) + "\n")
            self.out.file.flush()
        else:
            self.out.print(words, soft_wrap=True)

    def note(self, words: str) -> None:
        """A note on stderr; omitted with --json."""
        if not self.as_json:
            self.err.print(words, soft_wrap=True)

    def error(self, error: EyrieError) -> None:
        if self.as_json:
            payload = {"reason": error.reason, "message": error.message, "hint": error.hint,
                       "exit_code": error.exit_code, "status": error.http_status}
            self.err.file.write(json.dumps({"error": payload}) + "\n")
            return
        self.err.print(Text.assemble(("error: ", "bold red"), f"{error.reason}: {error.message}"), soft_wrap=True)
        if error.hint:
            self.err.print(Text.assemble(("hint:  ", "bold green"), error.hint), soft_wrap=True)


def server_verb(function: Callable[Concatenate[Client, Screen, ...], None], *,
                in_project: bool = False) -> Callable[..., None]:
    """A verb that gets a client of the server and the screen. --server and --json, and in a project --project, follow
    its own options in the signature that typer reads."""

    @functools.wraps(function)
    def with_client(*, server: str, as_json: bool, project: str | None = None, **own: Any) -> None:
        with connect(server, project) as client:
            function(client, Screen(as_json=as_json), **own)

    shared: list[tuple[str, Any, Any]] = [("server", Server, DEFAULT_SERVER), ("as_json", Json, False)]
    if in_project:
        shared.insert(0, ("project", InProject, None))
    own = list(inspect.signature(function).parameters.values())[2:]
    with_client.__signature__ = inspect.Signature([*own, *(  # type: ignore[attr-defined]
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, kind, default in shared)])
    return verb(with_client)


project_verb = functools.partial(server_verb, in_project=True)


def printable(text: str) -> str:
    """Text without control characters: a model's output or a log must not control the terminal."""
    return "".join(character if character in "\n\t" or unicodedata.category(character) != "Cc" else "\ufffd"
                   for character in text)


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _PIPE_WIDTH
    return Console(file=stream, width=width, highlight=False, emoji=False, markup=False)


PLANE_FILE = "plane.json"


@dataclass(frozen=True)
class RunningPlane:
    """A control plane running on this machine."""

    pid: int
    url: str
    home: Path


def running_plane(home: Path) -> RunningPlane | None:
    """The control plane of a home of this machine; None when none is running.

    A running control plane holds a lock on `<home>/plane.json`, which the kernel releases however the process ends. A
    stale file is therefore never confused with a running plane, and a reused process id is never signalled. The file
    contains the URL.
    """
    file = home / PLANE_FILE
    try:
        with file.open() as opened:
            try:
                fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                content = json.loads(opened.read())
                return RunningPlane(pid=content["pid"], url=content["url"], home=home)
    except (FileNotFoundError, ValueError):
        return None
    return None
