"""Whether a file that a job names may be read, judged by the file that is opened.

A path of a job may be relative, begin with `~`, hold a pattern, or lead through symbolic links; a directory's files may
be links. `reached` follows all of that, and `check_path` judges every path that it gives: at submission, and in the
stage that reads, since a link may have been changed in between. `open_file` judges once more what it has opened.

Refused are files of the system, and EYRIE_HOME except the directories of the project's own jobs and endpoints
(`contract.read_rules`). Where there are no rules (`None`), nothing is refused.
"""

import io
import os
from collections.abc import Iterator
from pathlib import Path

from eyrie_api import client_left
from eyrie_api.contract.read_rules import ReadRules
from eyrie_api.contract.targets import is_hub_id
from eyrie_api.data_files import data_files, is_pattern, is_remote, open_regular
from eyrie_api.errors import InvalidInput

_SYSTEM = tuple(Path(path) for path in ("/proc", "/sys", "/dev", "/etc", "/run", "/var/run", "/root"))
_KINDS = ("jobs", "endpoints")
_NESTED = "additional_chat_templates"  # the one directory of a model whose files are read


def check_path(field: str, text: str | Path, rules: ReadRules | None) -> None:
    """Raises InvalidInput, naming the field, where a file that the path expands to may not be read."""
    if rules is not None:
        for path in reached(field, text):
            judge(field, text, path, rules)


def open_file(path: Path, rules: ReadRules | None, field: str) -> io.BufferedReader:
    """Open a file for reading. Raises InvalidInput where what was opened may not be read, OSError as `open_regular`."""
    file = open_regular(path)
    if rules is None:
        return file
    try:
        real = path.resolve(strict=True)
        judge(field, path, real, rules)
        # Race: the path, or a link in it, is changed between the two lines above.
        if not os.path.samestat(os.fstat(file.fileno()), os.lstat(real)):
            raise InvalidInput(f"{field} {path} changed while it was opened", "retry when nothing writes there")
    except BaseException:
        file.close()
        raise
    return file


def reached(field: str, text: str | Path) -> Iterator[Path]:
    """The real paths that reading `text` leads to: its own (of a pattern, that of its directory) first, then those of
    symbolic links among the files that it names. Nothing for a name of something else: a Hub id, a shipped data set, a
    URL. Raises InvalidInput for what is not a path."""
    text = str(text)
    if is_remote(text):
        return
    try:
        path = Path(text).expanduser().absolute()
        if not os.path.lexists(path) and not text.startswith(("/", ".", "~")) and (
                is_hub_id(text.partition(":")[0]) or not set(text) & set("/*?[")):
            return
        is_listed = is_pattern(text) and not path.is_file() and not path.is_dir()
        yield (path.parent if is_listed else path).resolve()
        if is_listed:
            entries = data_files(text)
        else:
            entries = [entry for directory in (path, path / _NESTED) if directory.is_dir()
                       for entry in directory.iterdir()]
        for entry in entries:
            client_left.check()
            if entry.is_symlink():
                yield entry.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # NUL in the path; a loop of links; the home of no user
        raise InvalidInput(f"{field} {text!r} cannot be followed: {error}", "give the path of a file or a directory") \
            from None


def judge(field: str, text: str | Path, path: Path, rules: ReadRules) -> None:
    """Raises InvalidInput where a real path that `text` led to may not be read. The message does not say where links
    lead."""
    home = Path(rules.home).resolve()
    if any(path.is_relative_to(directory) for directory in _SYSTEM if not home.is_relative_to(directory)):
        raise InvalidInput(f"{field} {text} leads to a file of the system", "give a model or data meant for jobs")
    if home.is_relative_to(path):
        raise InvalidInput(f"{field} {text} holds Eyrie's own directory", "name the file or directory that is meant")
    if path.is_relative_to(home) and place_of(path, home) not in rules.places:
        raise InvalidInput(f"{field} {text} is not there, or not of your project", "list the jobs you may read")


def place_of(path: Path, home: Path) -> str | None:
    """The job's or endpoint's directory below `home` that a real path is in, as `jobs/ID`; None for any other."""
    parts = path.relative_to(home).parts if path.is_relative_to(home) else ()
    return "/".join(parts[:2]) if len(parts) >= 2 and parts[0] in _KINDS else None
