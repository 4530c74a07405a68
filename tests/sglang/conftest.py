"""Tests that run the real SGLang, in an environment of its own: `make test-sglang`. No other run collects them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyrie_workers.sglang.process import SglangServer

collect_ignore_glob = [] if os.environ.get("EYRIE_TEST_SGLANG") == "1" else ["*.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the collected figures after the test results."""
    from tests.sglang.summary import SUMMARY

    if SUMMARY:
        terminalreporter.section("figures measured with SGLang")
        for line in SUMMARY:
            terminalreporter.line(line)


@pytest.fixture(scope="session")
def drafter() -> Path:
    """A drafter trained by the stages, read-only. EYRIE_SGLANG_DRAFTER replaces it by another for the same target."""
    from tests.sglang.trained_drafter import trained_drafter

    given = os.environ.get("EYRIE_SGLANG_DRAFTER")
    return Path(given) if given else trained_drafter()


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    """SGLang without a drafter. Its chat template is the target's, with a variable at the end (`request_fields`)."""
    from eyrie_workers.targets.config import read_json
    from tests.sglang.servers import TARGET, flags, serving
    from tests.workers.engines.request_fields import CLOSING

    directory = tmp_path_factory.mktemp("plain")
    template = directory / "template.jinja"
    template.write_text(str(read_json(TARGET / "tokenizer_config.json")["chat_template"]) + CLOSING)
    with serving(flags("--chat-template", str(template)), directory) as server:
        yield server


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Token ids of four prompts of each quickstart suite."""
    from eyrie_api.contract.benchmark import SuiteSpec
    from eyrie_workers.data.suites import load_suite
    from eyrie_workers.targets.templates import ChatTokenizer
    from tests.sglang.servers import TARGET
    from tests.sglang.trained_drafter import SUITES

    tokenizer = ChatTokenizer(TARGET)
    return [tokenizer.render(list(prompt.messages), list(prompt.tools) or None) for name in SUITES
            for prompt in load_suite(SuiteSpec(name=name, path=f"quickstart:{name}"))[:4]]
