"""Parity next to other requests: what is asked and compared, and faults planted in the drafted engine."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.tuning import DrafterUse, Setting
from eyrie_workers.engines.process import READY_FILE, EngineCommand, EngineProcess, start_process
from eyrie_workers.measure.parity import Served, is_same, request_answers
from eyrie_workers.measure.parity_reference import Reference
from eyrie_workers.measure.parity_under_load import (
    LoadRequest,
    compare_sampled,
    compare_under_load,
    num_under_load,
    request_under_load,
    requests_under_load,
    sampled_requests,
)
from eyrie_workers.targets.templates import ChatTokenizer
from tests.tiny import tiny_target
from tests.workers.measure.faulty_engine import FAULTS, IN_A_BATCH
from tests.workers.measure.tiny_bench import random_drafter

CHAIN = DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4)
PROMPTS, LENGTH = [[5 + n, *range(40, 44 + 2 * n)] for n in range(5)], 24


def letters(ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token) for token in ids)


def served(*ids: int, text: str | None = None) -> Served:
    return Served(token_ids=ids, histogram=(), text=text)


def unexplained(request: LoadRequest, one: Served, two: Served) -> tuple[str, bool]:
    return request.title, False


def test_a_prompt_returns_in_another_shape_and_each_shape_has_the_answer_of_one_user() -> None:
    alone = [served(*range(n, n + 8), text=letters(range(n, n + 8))) for n in range(4)]
    requests = requests_under_load("embedded", [[10 + n] for n in range(4)], alone, 9, 3, letters)
    assert len(requests) == num_under_load(4, 3) == 8
    assert [(one.turn, one.shape) for one in requests] == [
        (0, "plain"), (1, "streamed"), (2, "stopped"), (3, "continued"),
        (3, "plain"), (2, "streamed"), (1, "stopped"), (0, "continued")]
    assert [one.expected for one in requests[:2]] == alone[:2]
    stopped, continued = requests[2:4]
    # The text of prompt 2 is cdefghij; the tokens of the stop string are part of the answer, its text is not.
    assert (stopped.stop, stopped.expected) == ("ghij", served(*range(2, 10), text="cdef"))
    assert (continued.prompt_ids, continued.max_new_tokens, continued.expected) == (
        (13, 3, 4, 5, 6), 5, served(7, 8, 9, 10))


def test_sglang_is_also_asked_within_a_json_schema_and_for_calls_of_the_tools_of_a_prompt() -> None:
    alone = [served(*range(n, n + 8)) for n in range(6)]
    tools = [[], [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}, {"name": "sub"}]]
    requests = requests_under_load("sglang", [[n] for n in range(6)], alone, 9, 3, letters, tools * 3)
    assert [one.shape for one in requests[:6]] == ["plain", "streamed", "stopped", "continued", "formatted", "called"]
    # The text that ends at the stop string is that of the tokens: SGLang's own is not read.
    assert (requests[2].stop, requests[2].expected) == ("ghij", served(*range(2, 10), text="cdef"))
    formatted, called = requests[4:6]
    assert (formatted.expected, called.expected) == (None, None), "that of the engine without a drafter"
    assert "answer" in json.loads(formatted.json_schema)["properties"]
    assert json.loads(called.json_schema)["items"]["properties"]["name"] == {"enum": ["add", "sub"]}
    assert requests_under_load("sglang", [[n] for n in range(6)], alone, 9, 3, letters)[5].shape == "formatted"


def test_within_a_grammar_the_answer_of_the_engine_without_a_drafter_is_expected() -> None:
    requests = [LoadRequest("formatted", number, (1,), 2, json_schema="{}") for number in range(2)]
    plain = [served(3, 4), served(5, 6)]
    same = compare_under_load("sglang", CHAIN, requests, plain, plain, unexplained, 2)
    assert (same.passed, same.identical) == (True, 2)
    assert "2 in a JSON schema, next to aborted requests; without a drafter 0 of 2 answers differ" in same.reasons[-1]
    changed = compare_under_load("sglang", CHAIN, requests, plain, [plain[0], served(5, 7)], unexplained, 2)
    assert (changed.passed, changed.divergences) == (False, ("prompt 1, under load, in a JSON schema",))


def test_an_answer_without_whole_characters_is_asked_plainly() -> None:
    alone = [served(1, 2, text="\ufffd"), served(7, 8, text="hi")]
    shapes = [one.shape for one in requests_under_load("embedded", [[1], [2]], alone, 4, 2, letters)]
    assert shapes == ["plain", "streamed", "stopped", "continued"]
    assert [one.shape for one in requests_under_load("embedded", [[1]], alone[:1], 4, 3, letters)][2] == "plain"


def test_an_answer_that_changes_under_load_is_drafting_s_fault_unless_it_changes_without_a_drafter_too() -> None:
    alone = [served(n, n + 1) for n in range(3)]
    requests = [LoadRequest("plain", number % 3, (1,), 2, alone[number % 3]) for number in range(6)]
    batched = served(9, 9)
    plain = [*alone, alone[0], alone[1], batched]
    drafted = [one.model_copy(update={"histogram": (1,)}) for one in plain]
    same = compare_under_load("embedded", CHAIN, requests, plain, drafted, unexplained, 3)
    assert (same.passed, same.prompts, same.identical, same.explained) == (True, 6, 5, 1)
    assert "3 at a time, 6 plain, next to aborted requests; without a drafter 1 of 6 answers differ" in same.reasons[-1]
    drafted[4] = batched
    changed = compare_under_load("embedded", CHAIN, requests, plain, drafted, unexplained, 3)
    assert (changed.passed, changed.identical, changed.explained) == (False, 4, 1)
    assert "prompt 1, under load, plain" in changed.divergences


def test_equal_tokens_with_another_text_are_another_answer_and_a_text_that_is_not_known_is_not_compared() -> None:
    assert not is_same(served(1, 2, text="ab"), served(1, 2, text="a"))
    assert is_same(served(1, 2, text="ab"), served(1, 2))


def test_sampled_answers_of_an_engine_with_its_own_noise_are_compared_by_their_distribution() -> None:
    prompts = [[1], [2], [3]]
    requests = sampled_requests("sglang", prompts, 64)
    assert {one.seed for one in requests} == {None}
    assert {one.max_new_tokens for one in requests} == {16}
    # Eight answers to each prompt, in turn; the drafted engine has them in the other order, or gives one alone.
    answers = [served(one.turn, number // 3 % 8) for number, one in enumerate(requests)]
    others = [served(one.turn, 7 - number // 3 % 8) for number, one in enumerate(requests)]
    same = compare_sampled("sglang", requests, answers, others, answers, unexplained)
    assert same.passed
    assert (same.prompts, same.answers, same.identical) == (3, len(requests), None)
    assert same.power is not None
    assert same.power > 0.5
    one_alone = [served(one.turn, 0) for one in requests]
    changed = compare_sampled("sglang", requests, answers, one_alone, answers, unexplained)
    assert not changed.passed
    assert "do NOT come from one distribution" in changed.reasons[0]


@contextmanager
def servers(tmp_path: Path, target: Path, use: DrafterUse, fault: str) -> Iterator[tuple[str, str]]:
    """URLs of the unchanged engine without a drafter and of the drafted one with the fault."""
    started = list[EngineProcess]()
    try:
        for name, setting in (("off", DrafterUse()), ("drafted", use)):
            log = tmp_path / name / "engine.log"
            argv = EngineCommand(target, "m", setting, max_concurrency=3, threads=1).argv(log.with_name(READY_FILE))
            argv[1:3] = ["-m", "tests.workers.measure.faulty_engine", fault if name == "drafted" else "none"]
            started.append(EngineProcess(start_process(argv, log), log))
        off, drafted = (process.wait_ready(120) for process in started)
        yield off, drafted
    finally:
        for process in started:
            process.stop()


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_plain_requests_of_one_user_do_not_meet_is_found_under_load_in_its_shape_and_by_nothing_else(
        fault: str, tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target", max_position_embeddings=256)
    drafter = random_drafter(tmp_path / "drafter", target)
    use = DrafterUse(drafter_dir=str(drafter), setting=Setting(tree=CHAIN))
    with servers(tmp_path, target, use, fault) as urls:
        alone, drafted_alone = (request_answers("embedded", url, "m", PROMPTS, LENGTH) for url in urls)
        assert all(map(is_same, alone, drafted_alone))
        requests = requests_under_load("embedded", PROMPTS, alone, LENGTH, 3, ChatTokenizer(target).decode)
        answers = [request_under_load("embedded", url, "m", requests, 3) for url in urls]
        for _ in range(20):  # which requests a batch holds is a matter of moments: until one meets the fault
            if fault not in IN_A_BATCH or not all(map(is_same, *answers)):
                break
            answers[1] = request_under_load("embedded", urls[1], "m", requests, 3)
        sampled = sampled_requests("embedded", PROMPTS, LENGTH)
        # As for an engine with noise of its own: other seeds for the drafted server.
        many = [[replace(one, max_new_tokens=4, seed=100 * side + number) for number in range(16) for one in sampled]
                for side in range(2)]
        if fault not in IN_A_BATCH:
            by_seed, drawn = ([request_under_load("embedded", url, "m", some, 3)
                               for url, some in zip(urls, both, strict=True)] for both in ([sampled, sampled], many))
    reference = Reference(target, drafter, "embedded", CHAIN, "float32")

    def divergence(request: LoadRequest, one: Served, two: Served) -> tuple[str, bool]:
        return reference.divergence(request.title, request.prompt_ids, one, two)

    assert {one.shape for one in requests} == {"plain", "streamed", "stopped", "continued"}
    assert all(is_same(one, request.expected or served()) for request, one in zip(requests, answers[0], strict=True))

    report = compare_under_load("embedded", CHAIN, requests, *answers, divergence, 3)
    found = {request.shape for request, one, two in zip(requests, *answers, strict=True) if not is_same(one, two)}
    if fault in IN_A_BATCH:
        # In any shape: which requests a batch holds is a matter of moments.
        assert not report.passed
        return
    assert found == {"late stop": {"stopped"}, "lost piece": {"streamed"}}.get(fault, set())
    assert report.passed == (not found), report
    compared = [compare_sampled("embedded", sampled, *by_seed, alone, divergence),
                compare_sampled("embedded", [replace(one, seed=None) for one in many[0]], *drawn, alone, divergence)]
    assert [one.passed for one in compared] == [fault != "argmax at temperature 1"] * 2, compared
