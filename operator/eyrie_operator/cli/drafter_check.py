"""`eyrie check-drafter`: is this directory what SGLang will serve as it was trained? Told to a person.

The rules need tensors, so they run where torch is, as a child: `python -m eyrie_workers.drafters.check`. What it prints
is one JSON document; here it becomes words, errors first, each with its hint.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from eyrie_api.cli.screen import printable
from eyrie_api.errors import EyrieError, InvalidInput, Permanent, TargetNotFound

PROGRAM = "eyrie_workers.drafters.check"
EXIT_DEFECTIVE = 65  # EX_DATAERR
_STYLE = {"error": "bold red", "warning": "yellow"}


class CheckFailed(Permanent):
    """The check itself ended without an answer."""

    reason = "CheckFailed"


def run_check(arguments: Sequence[str]) -> dict[str, Any]:
    """Run the check with these arguments; its document. Raises what it refused its input with, or CheckFailed."""
    done = subprocess.run([sys.executable, "-m", PROGRAM, *arguments], capture_output=True, text=True, check=False)
    try:
        document = json.loads(done.stdout)
    except json.JSONDecodeError:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise CheckFailed(f"the check ended with {done.returncode}: {printable(last[0])}",
                          "install the workers extra (torch) here, or report this") from None
    if "error" in document:
        raise refusal(document["error"])
    assert isinstance(document, dict)
    return document


def refusal(told: Mapping[str, Any]) -> EyrieError:
    """The child's error as one of ours."""
    kind = TargetNotFound if told["reason"] == TargetNotFound.reason else InvalidInput
    return kind(str(told["message"]), str(told.get("hint", "")))


def is_defective(document: Mapping[str, Any]) -> bool:
    """Whether any finding is an error."""
    return any(finding["severity"] == "error" for finding in document["findings"])


def verdict(document: Mapping[str, Any]) -> RenderableType:
    """The findings in words."""
    findings = document["findings"]
    parts: list[RenderableType] = []
    for severity in ("error", "warning"):
        chosen = [finding for finding in findings if finding["severity"] == severity]
        if chosen:
            parts.append(Text(_counted(len(chosen), severity), style=_STYLE[severity]))
            parts += [_finding(finding) for finding in chosen]
    engines = " and ".join(f"{name} {version}" for name, version in document["engines"].items())
    beside = f" for {document['target']}" if document.get("target") else ", by itself (name its --target to check both)"
    if not findings:
        parts.append(Text.assemble(("Sound: ", "bold green"), f"{document['drafter']}{beside}. Nothing to find by the "
                                                              f"rules of {engines}."))
    elif not is_defective(document):
        parts.append(Text.assemble(("Servable, ", "bold green"), f"with care: {document['drafter']}{beside}, by the "
                                                                 f"rules of {engines}."))
    else:
        parts.append(Text.assemble(("Not servable: ", "bold red"), f"{document['drafter']}{beside}, by the rules of "
                                                                   f"{engines}."))
    return Group(*parts)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")


def _finding(finding: Mapping[str, Any]) -> RenderableType:
    told = Text.assemble((f"{finding['code']}: ", _STYLE[finding["severity"]]), printable(finding["what"]))
    hint = Text.assemble(("hint: ", "green"), printable(finding["hint"]))
    return Group(Padding(told, (0, 0, 0, 2), expand=False), Padding(hint, (0, 0, 0, 4), expand=False))
