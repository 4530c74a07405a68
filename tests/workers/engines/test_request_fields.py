"""The embedded engine behind the gateway: fields that both engines have, and those that only SGLang has."""

from collections.abc import Iterator
from typing import Any

import pytest

from eyrie_workers.engines.process import EngineProcess
from tests.workers.engines.request_fields import CHAT, CHECKS, COMPLETIONS, Served, behind_gateway

SCHEMA = {"name": "answer", "schema": {"enum": ["yes", "no"]}}


@pytest.fixture(scope="module")
def served(engine: EngineProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    assert engine.url is not None
    with behind_gateway(engine.url, "tiny", tmp_path_factory.mktemp("gateway")) as served:
        yield served


@pytest.mark.parametrize("field", CHECKS)
def test_a_field_that_both_engines_have_works(field: str, served: Served) -> None:
    CHECKS[field](served)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("field", "value"), [
    ("response_format", {"type": "json_object"}), ("response_format", {"type": "json_schema", "json_schema": SCHEMA}),
    ("n", 2), ("presence_penalty", 1.5), ("frequency_penalty", -0.5), ("repetition_penalty", 1.1),
    ("logit_bias", {"5": -100}), ("min_p", 0.1), ("min_tokens", 5),
])
def test_a_field_that_only_sglang_has_is_refused_with_that_hint(
        field: str, value: Any, path: str, served: Served) -> None:
    answer = served.post(path, **{field: value})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, field, "invalid_request_error")
    assert "embedded engine" in error["message"]
    assert "engine: sglang" in error["message"]
    assert error["hint"]
