"""Answers of endpoints, over real HTTP against a double of the OpenAI API (`openai_double`)."""

import dataclasses
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import copytree
from typing import Any

import httpx
import pytest

from eyrie_api.contract.engine import SamplingSpec
from eyrie_api.contract.read_rules import ReadRules
from eyrie_api.contract.regeneration import RegenerateSpec
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.errors import InvalidInput, Permanent, Transient
from eyrie_workers.regeneration.answers import (
    AnswerRetokenizer,
    GeneratedAnswer,
    GenerationFailure,
    GenerationOutcome,
    GenerationRequest,
)
from eyrie_workers.regeneration.batch import BatchClient, PinnedTransport
from eyrie_workers.regeneration.endpoint import (
    GenerationEndpoint,
    endpoint_of,
    parse_generated,
    request_body,
    retry_delay_s,
)
from eyrie_workers.regeneration.online import OnlineClient
from eyrie_workers.targets.templates import ChatTokenizer
from tests.tiny import TEMPLATE, tiny_target
from tests.workers.measure.load.servers import certified
from tests.workers.regeneration.openai_double import Service, Troubles, answer_text, openai_double, token_ids

CALLS = [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(tiny_target(tmp_path_factory.mktemp("target")))


def prompts(tokenizer: ChatTokenizer, num: int) -> list[GenerationRequest]:
    result = []
    for i in range(num):
        messages = [{"role": "user", "content": f"What is {i}?"}]
        result.append(GenerationRequest(f"{i:032x}", messages, [], tokenizer.render(messages), seed=100 + i))
    return result


def endpoint(service: Service, **changes: Any) -> GenerationEndpoint:
    settings: dict[str, Any] = {"sampling": SamplingSpec(temperature=0.7, top_k=5), "max_new_tokens": 16,
                                "max_retries": 2, "concurrency": 4, "endpoints": (service.url,)} | changes
    own = {name: settings.pop(name) for name in ("api_key", "context", "reads") if name in settings}
    return GenerationEndpoint(RegenerateSpec(engine="openai", **settings), "tiny", **own)


class World:
    """An engine and what it warned of."""

    def __init__(self, service: Service, tokenizer: ChatTokenizer, **changes: Any) -> None:
        self.warnings: list[str] = []
        self.engine = OnlineClient(endpoint(service, **changes), AnswerRetokenizer(tokenizer),
                                   lambda reason, _: self.warnings.append(reason), first_delay_s=0.001)

    def ask(self, asked: list[GenerationRequest]) -> dict[str, GenerationOutcome]:
        outcomes = list(self.engine.answers(iter(asked), lambda: None))
        found = {outcome.row_id: outcome for outcome in outcomes}
        assert len(outcomes) == len(found)
        return found


def test_every_prompt_is_answered_once_with_its_own_seed_and_so_many_in_flight(tokenizer: ChatTokenizer) -> None:
    asked = prompts(tokenizer, 20)
    with openai_double(Troubles(meeting=threading.Barrier(4))) as service:
        outcomes = World(service, tokenizer, concurrency=4).ask(asked)
        assert service.most_at_once == 4
        assert len(service.bodies) == 20
    body = service.bodies[0]
    assert (body["model"], body["max_tokens"], body["temperature"], body["top_k"]) == ("tiny", 16, 0.7, 5)
    for prompt in asked:
        answer = outcomes[prompt.row_id]
        assert isinstance(answer, GeneratedAnswer)
        assert answer.text == answer_text({"messages": prompt.messages, "seed": prompt.seed})
        assert tokenizer.decode(answer.answer_ids) == answer.text
        assert answer.answer_ids[-1] in tokenizer.eos_ids
        assert answer.finish_reason == "stop"


def test_token_ids_are_taken_as_they_come_where_the_endpoint_returns_them(tokenizer: ChatTokenizer) -> None:
    with openai_double(Troubles(know_token_ids=True)) as service:
        world = World(service, tokenizer)
        (answer,) = world.ask(prompts(tokenizer, 1)).values()
    assert isinstance(answer, GeneratedAnswer)
    assert answer.ids_exact
    assert answer.answer_ids == [*token_ids(answer.text), AnswerRetokenizer(tokenizer).eos_ids[0]]
    assert answer.prompt_ids == [7, 8, 9]
    assert world.warnings == []


def test_without_token_ids_the_answer_is_tokenised_again_and_said_so_once(tokenizer: ChatTokenizer) -> None:
    with openai_double() as service:
        world = World(service, tokenizer)
        outcomes = world.ask(prompts(tokenizer, 6))
    assert not any(answer.ids_exact for answer in outcomes.values() if isinstance(answer, GeneratedAnswer))
    assert world.warnings == ["TokenIdsNotReturned"]


def test_an_endpoint_that_refuses_the_field_for_token_ids_is_asked_without_it(tokenizer: ChatTokenizer) -> None:
    with openai_double(Troubles(forbid_token_ids=True)) as service:
        outcomes = World(service, tokenizer).ask(prompts(tokenizer, 12))
    assert all(isinstance(outcome, GeneratedAnswer) for outcome in outcomes.values())
    assert sum("return_token_ids" in body for body in service.bodies) <= 4  # those in flight together


def test_a_cut_answer_has_no_end_of_turn(tokenizer: ChatTokenizer) -> None:
    with openai_double(Troubles(finish_reason="length")) as service:
        (answer,) = World(service, tokenizer).ask(prompts(tokenizer, 1)).values()
    assert isinstance(answer, GeneratedAnswer)
    assert answer.finish_reason == "length"
    assert answer.answer_ids[-1] not in tokenizer.eos_ids


def test_a_tool_call_is_spelled_out_by_the_chat_template(tokenizer: ChatTokenizer) -> None:
    trouble = Troubles(finish_reason="tool_calls", message={"role": "assistant", "content": None, "tool_calls": CALLS})
    (prompt,) = prompts(tokenizer, 1)
    with openai_double(trouble) as service:
        (answer,) = World(service, tokenizer).ask([prompt]).values()
    assert isinstance(answer, GeneratedAnswer)
    whole = tokenizer.render([*prompt.messages, trouble.message or {}], add_generation_prompt=False)
    assert answer.finish_reason == "stop"
    assert whole[: len(prompt.prompt_ids) + len(answer.answer_ids)] == [*prompt.prompt_ids, *answer.answer_ids]
    assert "weather" in tokenizer.decode(answer.answer_ids)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_trouble_that_passes_is_retried(tokenizer: ChatTokenizer, status: int) -> None:
    with openai_double(Troubles(fail_first={"What is 3?": 2}, fail_status=status)) as service:
        outcomes = World(service, tokenizer).ask(prompts(tokenizer, 8))
    assert all(isinstance(outcome, GeneratedAnswer) for outcome in outcomes.values())
    assert service.attempts["What is 3?"] == 3
    assert service.attempts["What is 4?"] == 1


def test_an_endpoint_that_stays_away_is_transient(tokenizer: ChatTokenizer) -> None:
    with openai_double(Troubles(everything=503)) as service, pytest.raises(Transient, match="failed 3 times"):
        World(service, tokenizer).ask(prompts(tokenizer, 8))
    gone = World(service, tokenizer)
    with pytest.raises(Transient, match="Unreachable"):
        gone.ask(prompts(tokenizer, 2))


def test_one_prompt_that_always_fails_does_not_stop_the_others(tokenizer: ChatTokenizer) -> None:
    with openai_double(Troubles(fail_first={"What is 3?": 99}, fail_status=500)) as service:
        outcomes = World(service, tokenizer).ask(prompts(tokenizer, 40))
    refused = [outcome for outcome in outcomes.values() if isinstance(outcome, GenerationFailure)]
    assert [outcome.row_id for outcome in refused] == [f"{3:032x}"]
    assert "status 500" in refused[0].reason


def test_a_declined_prompt_is_refused_without_quoting_the_reply(tokenizer: ChatTokenizer) -> None:
    with openai_double(Troubles(decline={"What is 1?": 400})) as service:
        outcomes = World(service, tokenizer).ask(prompts(tokenizer, 3))
    refusal = outcomes[f"{1:032x}"]
    assert isinstance(refusal, GenerationFailure)
    assert "400" in refusal.reason
    assert "context is too short" not in refusal.reason
    assert service.attempts["What is 1?"] == 1


@pytest.mark.parametrize("status", [302, 401, 404])
def test_what_would_meet_every_request_ends_the_stage(tokenizer: ChatTokenizer, status: int) -> None:
    with openai_double(Troubles(everything=status)) as service, pytest.raises(Permanent) as caught:
        World(service, tokenizer).ask(prompts(tokenizer, 3))
    assert caught.value.hint.startswith("check regenerate.")


@pytest.mark.parametrize(("troubles", "words"), [
    (Troubles(finish_reason="content_filter"), "content_filter"),
    (Troubles(finish_reason="length", message={"role": "assistant", "content": ""}), "empty"),
    (Troubles(message="text"), "not a chat completion"),  # type: ignore[arg-type]
    (Troubles(message={"role": "assistant", "content": "x", "reasoning_content": "hm"}), "does not render this answer"),
])
def test_a_filtered_or_unusable_answer_is_refused(tmp_path: Path, tokenizer: ChatTokenizer, troubles: Troubles,
                                                  words: str) -> None:
    if words.startswith("does not"):
        target = tmp_path / "thinking"
        copytree(tokenizer.path, target)
        # As templates of reasoning targets do that open the thought in the generation prompt.
        text = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
        (target / "chat_template.jinja").write_text(text)
        tokenizer = ChatTokenizer(target)
    with openai_double(troubles) as service:
        (outcome,) = World(service, tokenizer).ask(prompts(tokenizer, 1)).values()
    assert isinstance(outcome, GenerationFailure)
    assert words in outcome.reason


def test_the_key_comes_from_the_environment_and_is_never_shown(tokenizer: ChatTokenizer,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RegenerateSpec(engine="openai", base_url="http://127.0.0.1:1/v1/", api_key_env="EYRIE_TEST_KEY")
    monkeypatch.delenv("EYRIE_TEST_KEY", raising=False)
    with pytest.raises(InvalidInput, match="EYRIE_TEST_KEY"):
        endpoint_of(spec, TargetSpec(model="org/name"))
    monkeypatch.setenv("EYRIE_TEST_KEY", "sesame")
    made = endpoint_of(spec, TargetSpec(model="org/name"))
    assert (made.model, made.base_url) == ("org/name", "http://127.0.0.1:1/v1")
    assert "sesame" not in repr(made)
    with openai_double(Troubles(api_key="sesame")) as service:
        assert len(World(service, tokenizer, api_key="sesame").ask(prompts(tokenizer, 2))) == 2
        with pytest.raises(Permanent, match="401") as caught:
            World(service, tokenizer, api_key="simsim").ask(prompts(tokenizer, 2))
        assert "simsim" not in str(caught.value)


def test_a_request_to_stop_is_heard_while_waiting(tokenizer: ChatTokenizer) -> None:
    class Stop(BaseException):
        pass

    def pause() -> None:
        raise Stop

    with openai_double() as service, pytest.raises(Stop):
        list(World(service, tokenizer).engine.answers(iter(prompts(tokenizer, 4)), pause))


def test_retry_delays_double_up_to_a_minute_and_obey_the_server() -> None:
    assert [retry_delay_s(n, None, 0.5, 0.999999) for n in (0, 1, 2)] == pytest.approx([0.5, 1.0, 2.0], rel=1e-3)
    assert retry_delay_s(50, None, 0.5, 0.0) == 30.0
    assert retry_delay_s(0, "7", 0.5, 0.0) == 7.0
    assert retry_delay_s(0, "99999", 0.5, 0.0) == 300.0
    assert retry_delay_s(0, "Wed, 21 Oct 2026 07:28:00 GMT", 0.5, 0.0) == 0.25


def batch_engine(service: Service, tokenizer: ChatTokenizer, memory: Path, **changes: Any) -> BatchClient:
    return BatchClient(endpoint(service), AnswerRetokenizer(tokenizer), memory, lambda *_: None, first_delay_s=0.001,
                       poll_s=0.001, **changes)


RULES = ReadRules(home="/nowhere")
"""Of a project's job: public addresses alone."""


def test_a_projects_job_asks_no_private_endpoint_unless_an_administrator_allows_it(
        tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    asked = prompts(tokenizer, 2)
    with openai_double() as service:
        by_name = service.url.replace("127.0.0.1", "localhost")
        for url in (service.url, by_name):
            for number, rules in enumerate((RULES, RULES.model_copy(update={"private_hosts": ("other.example",)}))):
                named = endpoint(service, reads=rules, endpoints=(url,))
                for engine in (OnlineClient(named, AnswerRetokenizer(tokenizer), lambda *_: None),
                               BatchClient(named, AnswerRetokenizer(tokenizer), tmp_path / f"batch-{number}.json",
                                           lambda *_: None)):
                    with pytest.raises(InvalidInput, match="not public"):
                        list(engine.answers(iter(asked), lambda: None))
        assert (service.bodies, service.batches) == ([], {})
        for rules in (None, RULES.model_copy(update={"allow_private": True}),
                      RULES.model_copy(update={"private_hosts": ("localhost",)})):
            named = endpoint(service, reads=rules, endpoints=(by_name,))
            for engine in (OnlineClient(named, AnswerRetokenizer(tokenizer), lambda *_: None),
                           BatchClient(named, AnswerRetokenizer(tokenizer), tmp_path / "batch.json", lambda *_: None,
                                       poll_s=0.001)):
                assert len(list(engine.answers(iter(asked), lambda: None))) == 2


def test_a_name_that_leads_inside_later_is_not_connected_to(
        tokenizer: ChatTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DNS rebinding: the first look-up is of a public address, the one for the connection is not."""
    system, looked_up = socket.getaddrinfo, list[str]()

    def two_faced(host: str, *arguments: Any, **options: Any) -> Any:
        if host != "rebinding.example":
            return system(host, *arguments, **options)
        looked_up.append(host)
        return system("93.184.215.14" if len(looked_up) == 1 else "127.0.0.1", *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", two_faced)
    with openai_double() as service:
        named = endpoint(service, reads=RULES,
                         endpoints=(service.url.replace("127.0.0.1", "rebinding.example"),))
        for engine in (OnlineClient(named, AnswerRetokenizer(tokenizer), lambda *_: None),
                       BatchClient(named, AnswerRetokenizer(tokenizer), tmp_path / "batch.json", lambda *_: None)):
            looked_up.clear()
            with pytest.raises(InvalidInput, match="not public"):
                list(engine.answers(iter(prompts(tokenizer, 1)), lambda: None))
            assert len(looked_up) > 1
        assert (service.bodies, service.batches) == ([], {})


def test_a_batch_is_sent_over_tls_under_the_name_of_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, context = certified(tmp_path, "DNS:localhost")
    names: list[str | None] = []
    context.sni_callback = lambda _socket, name, _context: names.append(name)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    heads: list[str | None] = []

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heads.append(self.headers["Host"])
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        with httpx.Client(transport=PinnedTransport(None)) as client:
            assert client.get(f"https://localhost:{port}/x").text == "ok"
            with pytest.raises(httpx.ConnectError):  # the certificate is of another name
                client.get(f"https://127.0.0.1:{port}/x")
        server.shutdown()
    assert names[0] == "localhost"
    assert heads == [f"localhost:{port}"]


def test_a_batch_answers_every_prompt_and_forgets_itself(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    asked, memory = prompts(tokenizer, 10), tmp_path / "batch.json"
    with openai_double() as service:
        engine = batch_engine(service, tokenizer, memory, max_requests=4)
        outcomes = {o.row_id: o for o in engine.answers(iter(asked), lambda: None)}
        assert len(service.batches) == 3
    assert set(outcomes) == {prompt.row_id for prompt in asked}
    for prompt in asked:
        answer = outcomes[prompt.row_id]
        assert isinstance(answer, GeneratedAnswer)
        assert not answer.ids_exact
        assert answer.text == answer_text({"messages": prompt.messages, "seed": prompt.seed})
    assert not memory.exists()


def taken(engine: BatchClient, asked: Iterator[GenerationRequest], num: int) -> list[str]:
    """Take some answers and drop the generator, as a killed program does: its `finally` writes nothing."""
    found = []
    for outcome in engine.answers(asked, lambda: None):
        found.append(outcome.row_id)
        if len(found) == num:
            break
    return found


@pytest.mark.parametrize("answered", [0, 3, 6])
def test_a_batch_under_way_is_found_again_and_not_paid_twice(tokenizer: ChatTokenizer, tmp_path: Path,
                                                           answered: int) -> None:
    class Killed(BaseException):
        pass

    asked, memory = prompts(tokenizer, 9), tmp_path / "batch.json"
    with openai_double(Troubles(hold_batches=True)) as service:
        def die_while_polling() -> None:
            if service.batches:
                raise Killed

        with pytest.raises(Killed):
            list(batch_engine(service, tokenizer, memory, max_requests=6).answers(iter(asked), die_while_polling))
        service.troubles.hold_batches = False
        done = taken(batch_engine(service, tokenizer, memory, max_requests=6), iter(asked), answered) if answered \
            else []
        left = [prompt for prompt in asked if prompt.row_id not in done]
        rest = list(batch_engine(service, tokenizer, memory, max_requests=6).answers(iter(left), lambda: None))
        assert len(service.batches) == 2
        assert max(service.attempts.values()) == 1
    assert sorted([*done, *(o.row_id for o in rest)]) == [prompt.row_id for prompt in asked]


def test_a_batch_created_but_not_remembered_is_found_by_its_file(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    asked, memory = prompts(tokenizer, 3), tmp_path / "batch.json"
    with openai_double() as service:
        engine = batch_engine(service, tokenizer, memory)
        with httpx.Client() as client:
            remembered = engine._upload(client, asked, lambda: None)
            engine._create(client, remembered, lambda: None)
        memory.write_text(remembered.model_dump_json())  # as it was before the batch was created
        assert len(list(engine.answers(iter(asked), lambda: None))) == 3
        assert len(service.batches) == 1


def test_expired_requests_are_asked_again_and_declined_ones_are_not(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    asked = prompts(tokenizer, 7)
    with openai_double(Troubles(expire_every=3, decline={"What is 2?": 400})) as service:
        engine = batch_engine(service, tokenizer, tmp_path / "batch.json")
        outcomes = {o.row_id: o for o in engine.answers(iter(asked), lambda: None)}
        assert len(service.batches) == 2
    assert set(outcomes) == {prompt.row_id for prompt in asked}
    assert [row_id for row_id, o in outcomes.items() if isinstance(o, GenerationFailure)] == [f"{2:032x}"]


def test_a_row_that_fails_in_every_batch_is_refused_in_the_end(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    with openai_double(Troubles(fail_first={"What is 1?": 99}, fail_status=500)) as service:
        engine = batch_engine(service, tokenizer, tmp_path / "batch.json")
        outcomes = {o.row_id: o for o in engine.answers(iter(prompts(tokenizer, 3)), lambda: None)}
    assert isinstance(outcomes[f"{1:032x}"], GenerationFailure)
    assert len(outcomes) == 3


def test_sglangs_own_api_gets_token_ids_and_returns_them(tokenizer: ChatTokenizer) -> None:
    prompt = dataclasses.replace(prompts(tokenizer, 1)[0], max_new_tokens=40)
    spec = RegenerateSpec(engine="openai", base_url="http://a", max_new_tokens=16)
    native = GenerationEndpoint(spec, "tiny", native=True, context=len(prompt.prompt_ids) + 30)
    assert native.path == "/generate"
    assert request_body(native, prompt, ids_field="return_token_ids") == {
        "input_ids": prompt.prompt_ids, "sampling_params": {
            "temperature": 0.7, "top_p": 1.0, "top_k": -1, "max_new_tokens": 30, "sampling_seed": 100}}
    retokenizer = AnswerRetokenizer(tokenizer)
    ids, end = tokenizer.encode("four")[-2:], retokenizer.eos_ids[0]
    for finish, output, whole in (("stop", [*ids, end], [*ids, end]), ("stop", ids, [*ids, end]), ("length", ids, ids)):
        answer = parse_generated(prompt, {"output_ids": output, "meta_info": {"finish_reason": {"type": finish}}},
                                 retokenizer)
        assert isinstance(answer, GeneratedAnswer)
        assert (answer.answer_ids, answer.finish_reason, answer.text) == (whole, finish, tokenizer.decode(ids))
    for unusable in ({"error": "x"}, {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}}):
        assert isinstance(parse_generated(prompt, unusable, retokenizer), GenerationFailure)


def test_template_variables_are_sent_to_a_chat_endpoint(tokenizer: ChatTokenizer) -> None:
    prompt = dataclasses.replace(prompts(tokenizer, 1)[0], chat_template_kwargs={"enable_thinking": False})
    endpoint = GenerationEndpoint(RegenerateSpec(engine="openai", base_url="http://a/v1"), "tiny")
    assert request_body(endpoint, prompt, ids_field=None)["chat_template_kwargs"] == {"enable_thinking": False}
