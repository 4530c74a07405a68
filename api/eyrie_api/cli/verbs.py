"""What all commands share: options for server and output, error handling, exit codes."""

import functools
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, ParamSpec
from urllib.parse import urlsplit

import typer

from eyrie_api.cli.running_plane import running_plane
from eyrie_api.cli.screen import Screen
from eyrie_api.client import DEFAULT_SERVER, Client, Unreachable
from eyrie_api.errors import EyrieError, InvalidInput
from eyrie_api.settings import Settings

Params = ParamSpec("Params")
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Server = Annotated[str, typer.Option("--server", envvar="EYRIE_SERVER", help="Address of the control plane.")]


def verb(function: Callable[Params, None]) -> Callable[Params, None]:
    """Print an EyrieError through the screen and exit with its code."""

    @functools.wraps(function)
    def with_exit_code(*args: Params.args, **kwargs: Params.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except EyrieError as error:
            if isinstance(error, Unreachable):
                error.hint = _with_running_plane(error.hint, str(kwargs.get("server")))
            Screen(as_json=bool(kwargs.get("as_json"))).error(error)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except BrokenPipeError:  # `eyrie events | head` is not an error
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the interpreter flushes stdout again at exit
            raise typer.Exit(0) from None

    return with_exit_code


def _with_running_plane(hint: str, server: str) -> str:
    """The hint of an unreachable server, with the address of the control plane that runs on this machine's home."""
    with suppress(OSError, EyrieError):  # settings that are not valid are reported by the control plane
        home = Settings.from_env().home
        plane = running_plane(home)
        if plane is not None and plane.url != server.rstrip("/"):
            return f"{hint}; the control plane of {home} is at {plane.url}: export EYRIE_SERVER={plane.url}"
    return hint


def connect(server: str, project: str | None = None) -> Client:
    """A client of the server, in a project if one is given. Raises InvalidInput for an invalid address."""
    if urlsplit(server).scheme not in ("http", "https") or not urlsplit(server).hostname:
        raise InvalidInput(f"--server {server!r} is not an address", f"write it like {DEFAULT_SERVER}")
    return Client(server, project=project)
