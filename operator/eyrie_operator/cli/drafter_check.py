"""`eyrie check-drafter`: whether SGLang and vLLM can serve a drafter directory as it was trained.

The check needs tensors, so it runs in a child process with torch: `python -m eyrie_workers.drafters.check`. Its output
is one JSON document, rendered here: errors first, each with its hint.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from eyrie_api.cli.verbs import printable
from eyrie_api.errors import EyrieError, InvalidInput, Permanent, TargetNotFound

PROGRAM = "eyrie_workers.drafters.check"
EXIT_DEFECTIVE = 65  # EX_DATAERR
_STYLE = {"error": "bold red", "warning": "yellow"}


class CheckFailed(Permanent):
    """The check program ended without a result."""

    reason = "CheckFailed"


def run_check(arguments: Sequence[str]) -> dict[str, Any]:
    """Run the check with these arguments; returns its document. Raises the error it reports, or CheckFailed."""
    done = subprocess.run([sys.executable, "-m", PROGRAM, *arguments], capture_output=True, text=True, check=False)
    try:
        document = json.loads(done.stdout)
    except json.JSONDecodeError:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise CheckFailed(f"the check ended with {done.returncode}: {printable(last[0])}",
                          "install the workers extra (torch) here, or report this") from None
    if "error" in document:
        raise refusal(document["error"])
    assert isinstance(document, dict)
    return document


def refusal(error: Mapping[str, Any]) -> EyrieError:
    """The child's error as one of our classes."""
    kind = TargetNotFound if error["reason"] == TargetNotFound.reason else InvalidInput
    return kind(str(error["message"]), str(error.get("hint", "")))


def is_defective(document: Mapping[str, Any]) -> bool:
    """Whether any finding is an error."""
    return any(finding["severity"] == "error" for finding in document["findings"])


def verdict(document: Mapping[str, Any]) -> RenderableType:
    """The findings, rendered."""
    findings = document["findings"]
    parts: list[RenderableType] = []
    for severity in ("error", "warning"):
        selected = [finding for finding in findings if finding["severity"] == severity]
        if selected:
            parts.append(Text(_counted(len(selected), severity), style=_STYLE[severity]))
            parts += [_finding(finding) for finding in selected]
    engines = " and ".join(f"{name} {version}" for name, version in document["engines"].items())
    target = f" for {document['target']}" if document.get("target") else ", by itself (name its --target to check both)"
    if not findings:
        parts.append(Text.assemble(("Sound: ", "bold green"), f"{document['drafter']}{target}. No findings by the "
                                                              f"rules of {engines}."))
    elif not is_defective(document):
        parts.append(Text.assemble(("Servable, ", "bold green"),
                                   f"with warnings: {document['drafter']}{target}, by the rules of {engines}."))
    else:
        parts.append(Text.assemble(("Not servable: ", "bold red"), f"{document['drafter']}{target}, by the rules of "
                                                                   f"{engines}."))
    return Group(*parts)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")


def _finding(finding: Mapping[str, Any]) -> RenderableType:
    message = Text.assemble((f"{finding['code']}: ", _STYLE[finding["severity"]]), printable(finding["what"]))
    hint = Text.assemble(("hint: ", "green"), printable(finding["hint"]))
    return Group(Padding(message, (0, 0, 0, 2), expand=False), Padding(hint, (0, 0, 0, 4), expand=False))
