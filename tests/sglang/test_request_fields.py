"""Request fields through the gateway to the real SGLang: none is lost or changed on the way."""

import json
from collections.abc import Iterator

import httpx
import pytest

from eyrie_workers.sglang.process import SglangServer
from eyrie_workers.speculation.engine import Engine, Request
from eyrie_workers.targets.loading import load_target
from eyrie_workers.targets.templates import ChatTokenizer
from tests.sglang.servers import MODEL, TARGET
from tests.workers.engines.request_fields import CHECKS, PROMPT, Served, behind_gateway, text_of


@pytest.fixture(scope="module")
def served(plain: SglangServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with behind_gateway(plain.url, MODEL, tmp_path_factory.mktemp("gateway")) as served:
        yield served


@pytest.mark.parametrize("field", CHECKS)
def test_a_field_that_both_engines_have_works(field: str, served: Served) -> None:
    CHECKS[field](served)


def test_log_probabilities_of_greedy_answers_equal_those_of_the_embedded_engine(served: Served) -> None:
    found = served.asked(logprobs=True, top_logprobs=5)["choices"][0]["logprobs"]["content"]
    tokenizer = ChatTokenizer(TARGET)
    engine = Engine(load_target(TARGET))
    engine.submit(Request("r", tokenizer.render([{"role": "user", "content": PROMPT}]), 24, top_logprobs=5))
    entries = []
    while engine.num_running or engine.num_waiting:
        for output in engine.step():
            entries += list(zip(output.token_ids, output.logprobs, strict=True))
    for theirs, (token, ours) in zip(found, entries, strict=True):
        text = tokenizer.token_text(token)
        assert (theirs["token"], bytes(theirs["bytes"])) == (text.text, text.bytes)
        assert theirs["logprob"] == pytest.approx(ours.logprob, abs=1e-3)  # float32 sums in another order
        assert [top["logprob"] for top in theirs["top_logprobs"]] == pytest.approx(
            [value for _, value in ours.top], abs=1e-3)


def test_sglang_scales_its_log_probabilities_by_the_temperature(served: Served) -> None:
    """The embedded engine does not, which docs/serving.md says; this fails when SGLang's default changes."""
    gap, doubled = (
        best["logprob"] - second["logprob"] for best, second in (
            served.asked(logprobs=True, top_logprobs=2, max_tokens=1, temperature=temperature)
            ["choices"][0]["logprobs"]["content"][0]["top_logprobs"] for temperature in (0, 0.5)))
    assert doubled == pytest.approx(2 * gap, abs=1e-3)


def test_the_answer_has_the_requested_format(served: Served) -> None:
    schema = {"name": "answer", "schema": {"enum": ["yes", "no"]}}
    answer = served.asked(response_format={"type": "json_schema", "json_schema": schema})
    assert json.loads(text_of(answer)) in ("yes", "no")
    assert text_of(served.asked(response_format={"type": "json_object"})).lstrip().startswith("{")


@pytest.mark.parametrize(("field", "value"), [
    ("presence_penalty", 2.5), ("response_format", {"type": "json_schema"}), ("max_tokens", 5000)])
def test_a_refusal_of_sglang_is_relayed_as_it_is(field: str, value: object, served: Served,
                                                 plain: SglangServer) -> None:
    with httpx.Client(base_url=plain.url, timeout=120, trust_env=False) as client:
        direct = Served(client, MODEL).post(**{field: value})
    relayed = served.post(**{field: value})
    assert relayed.status_code == direct.status_code == 400
    assert relayed.json() == direct.json()


def test_n_answers_are_returned(served: Served) -> None:
    answer = served.asked(n=2, temperature=1.0)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(choice["message"]["content"] for choice in answer["choices"])


@pytest.mark.parametrize(("field", "value"), [
    ("presence_penalty", -2.0), ("frequency_penalty", -2.0), ("repetition_penalty", 2.0), ("logit_bias", {"52": -100})])
def test_a_penalty_or_a_bias_changes_the_greedy_answer(field: str, value: object, served: Served) -> None:
    fields = {"max_tokens": 64, "ignore_eos": True}
    assert text_of(served.asked(**fields, **{field: value})) != text_of(served.asked(**fields))
