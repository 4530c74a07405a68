"""`eyrie certify --check-only`: the child's findings become words and an exit code."""

import io
from pathlib import Path
from typing import Any

from rich.console import Console
from typer.testing import CliRunner

from eyrie_operator.cli.files import is_defective, refusal, verdict
from eyrie_operator.command import app


def words(document: dict[str, Any]) -> str:
    stream = io.StringIO()
    Console(file=stream, width=160).print(verdict(document))
    return stream.getvalue()


def document(*severities: str, target: str | None = "some-model") -> dict[str, Any]:
    findings = [{"severity": severity, "code": f"code-{number}", "what": f"what {number}", "hint": f"hint {number}"}
                for number, severity in enumerate(severities)]
    return {"drafter": "d", "target": target, "context": None, "engines": {"sglang": "0.5.23"}, "findings": findings}


def test_a_defective_directory_ends_with_65_and_says_the_hint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle"]}')
    done = CliRunner().invoke(app, ["certify", "--check-only", str(tmp_path)])
    assert done.exit_code == 65
    assert "1 error\n  weights-missing: " in done.output
    assert "    hint: give the directory of an exported drafter" in done.output


def test_the_name_of_the_check_before_0_2_says_the_new_one() -> None:
    done = CliRunner().invoke(app, ["check-drafter", "DIR", "--target", "quickstart"])
    assert done.exit_code == 65
    assert "`eyrie certify --check-only`" in done.output


def test_what_the_child_refuses_keeps_its_reason_and_exit_code() -> None:
    failure = {"reason": "TargetNotFound", "message": "no such directory", "hint": "name another", "exit_code": 66}
    refused = refusal(failure)
    assert (refused.reason, refused.exit_code, refused.hint) == ("TargetNotFound", 66, "name another")


def test_the_verdict_is_sound_servable_or_not() -> None:
    assert words(document()).startswith("Sound: d for some-model.")
    assert "Servable, with warnings: d" in words(document("warning"))
    assert not is_defective(document("warning"))
    text = words(document("error", "warning", "warning", target=None))
    assert text.index("1 error") < text.index("code-0") < text.index("2 warnings") < text.index("Not servable: d, by")
    assert "hint: hint 2" in text
