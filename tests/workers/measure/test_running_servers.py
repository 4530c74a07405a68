"""`eyrie certify --off URL --drafted URL`: real embedded servers, and documents in the forms of SGLang and vLLM."""

import http.server
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.load import LoadReport
from eyrie_api.contract.prove import ProveSpec
from eyrie_api.contract.reports import PromotionCheck
from eyrie_api.contract.tuning import DrafterUse, Setting
from eyrie_api.errors import InvalidInput
from eyrie_workers.engines.process import EngineCommand, start_engine
from eyrie_workers.machine import client_environment
from eyrie_workers.measure.load.client import EndpointUnusable
from eyrie_workers.measure.running_servers import (
    Answer,
    Connection,
    RunningServer,
    check_comparable,
    check_prompts,
    compare,
    is_near_tie,
    judge,
    judge_tie,
    look,
    main,
    notes_of,
    read_answer,
)
from tests.tiny import tiny_target

NGRAM = DrafterUse(setting=Setting(method="ngram", tree=DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4)))
SMALL = ProveSpec(concurrencies=(1, 2), requests=4, most_pairs=6, max_new_tokens=12, parity_prompts=3)


@dataclass(frozen=True)
class Servers:
    off: str
    drafted: str
    other: str
    """Without a drafter, of another target."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    target = tiny_target(tmp_path_factory.mktemp("target") / "tiny")
    other = tiny_target(tmp_path_factory.mktemp("target") / "other", seed=1)
    with ExitStack() as stack:
        urls = []
        for command in (EngineCommand(target=target, model="tiny", threads=1, max_concurrency=2),
                        EngineCommand(target=target, model="tiny", threads=1, max_concurrency=2, use=NGRAM),
                        EngineCommand(target=other, model="tiny", threads=1)):
            engine = start_engine(command, tmp_path_factory.mktemp("engine"))
            stack.callback(engine.stop)
            urls.append(engine)
        yield Servers(*(engine.wait_ready(120) for engine in urls))


def certify(prompts: Path, off: str, drafted: str, *more: str) -> int:
    return main(["--off", off, "--drafted", drafted, "--prompts", str(prompts), "--prove", SMALL.model_dump_json(),
                 "--json", *more])


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Name {number} towns."}) + "\n" for number in range(2, 7)))
    return file


def test_two_running_servers_are_compared_and_judged(servers: Servers, prompts: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    code = certify(prompts, servers.off, f"{servers.drafted}/v1")
    output = capsys.readouterr()
    certificate = json.loads(output.out)
    assert code == certificate["exit_code"]
    # How fast two processes are next to other work is not what this test decides.
    assert certificate["verdict"] in ("faster", "not-faster", "undecided"), certificate["summary"]
    assert [(part["users"], part["compared"], part["identical"], part["by"]) for part in certificate["answers"]] == [
        (1, 3, 3, "token ids"), (2, 3, 3, "token ids")]
    assert (certificate["off"]["drafts"], certificate["drafted"]["drafts"]) == ("", "3/1/4")
    assert certificate["off"]["facts"] == certificate["drafted"]["facts"] == {
        "engine": "embedded", "model": "tiny", "dtype": "float32", "context": "512"}
    assert [check["name"] for check in certificate["checks"]] == [
        "parity", "parity-load", "load:1", "ttft:1", "answered:1", "load:2", "ttft:2", "answered:2"]
    assert [pair["pairs"] for pair in certificate["load"]["comparisons"]] == [6, 6] or code in (0, 3)
    assert any("nothing was flushed" in note for note in certificate["notes"])


@pytest.mark.parametrize(("off", "drafted", "says"), [
    ("off", "off", "are one server"),
    ("drafted", "drafted", "are one server"),
    ("drafted", "off", "--off .* drafts .3/1/4."),
    ("off", "other", "does not draft"),
    ("other", "drafted", r"model: other \(--off\), tiny \(--drafted\)"),
])
def test_servers_that_differ_in_more_than_the_drafter_are_refused(
        off: str, drafted: str, says: str, servers: Servers, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert certify(prompts, getattr(servers, off), getattr(servers, drafted)) == 65
    output = capsys.readouterr()
    error = json.loads(output.err.splitlines()[-1])["error"]
    assert output.out == ""
    assert error["hint"]
    assert re.search(says, error["message"])


def test_one_server_by_two_names_of_this_machine_is_refused(servers: Servers, prompts: Path,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    assert certify(prompts, servers.off, servers.off.replace("127.0.0.1", "localhost")) == 65
    assert "are one server" in capsys.readouterr().err


def test_bad_input_is_refused_with_the_reason(servers: Servers, prompts: Path, tmp_path: Path,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "no prompt"}\n')
    for code, says, arguments in (
            (65, "prompt", (rows, servers.off, servers.drafted)),
            (66, "there is no file", (tmp_path / "missing.jsonl", servers.off, servers.drafted)),
            (65, "is not an endpoint URL", (prompts, servers.off, "server:30000")),
            (EndpointUnusable.exit_code, "did not answer", (prompts, servers.off, "http://127.0.0.1:1")),
            (65, "serves 1 models: tiny", (prompts, servers.off, servers.drafted, "--model", "large")),
            (65, "which is not set", (prompts, servers.off, servers.drafted, "--api-key-env", "EYRIE_NO_SUCH_KEY"))):
        assert certify(*arguments) == code, says
        assert says in capsys.readouterr().err


# Pages and answers of SGLang and vLLM, in their forms.

Pages = Mapping[str, Any]
ASKED: list[tuple[str, str, Any]] = []


@contextmanager
def pages(documents: Pages, posted: Callable[[str, Any], Any] = lambda _path, _body: None) -> Iterator[Connection]:
    """A server with these documents; texts are sent as they are. Requests are appended to ASKED."""
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ASKED.append(("GET", self.path, None))
            self._send(documents.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            ASKED.append(("POST", self.path, body))
            self._send(posted(self.path, body))

        def _send(self, document: Any) -> None:
            data = (document if isinstance(document, str) else json.dumps(document)).encode()
            self.send_response(404 if document is None else 200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    ASKED.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    connection = Connection(f"http://127.0.0.1:{server.server_port}/v1", None)
    try:
        yield connection
    finally:
        connection.close()
        server.shutdown()
        server.server_close()
        thread.join(60.0)


def listing(owner: str, name: str = "m", **card: Any) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": name, "owned_by": owner, "max_model_len": 8192, **card}]}


SGLANG = {"model_path": "org/model", "revision": None, "dtype": "bfloat16", "chat_template": None, "quantization": None,
          "kv_cache_dtype": "auto", "tp_size": 1, "version": "0.5.23", "speculative_algorithm": None,
          "attention_backend": "fa3", "max_running_requests": 48, "admin_api_key": "secret"}
EAGLE3 = SGLANG | {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_eagle_topk": 1,
                   "speculative_num_draft_tokens": 4}


def sglang(**info: Any) -> Pages:
    return {"/v1/models": listing("sglang"), "/get_server_info": SGLANG | info}


def vllm(metrics: str | None, **card: Any) -> Pages:
    known = {"/v1/models": listing("vllm", **({"root": "org/model"} | card)), "/version": {"version": "0.32.0"}}
    return known if metrics is None else known | {"/metrics": metrics}


def look_at(documents: Pages) -> RunningServer:
    with pages(documents) as connection:
        seen = look(connection, "--off", None)
    assert {kind for kind, _, _ in ASKED} == {"GET"}
    assert not {path for _, path, _ in ASKED} & {"/flush_cache", "/abort_request", "/update_weights_from_disk"}
    return seen


def test_sglang_and_vllm_are_recognised_with_what_they_state() -> None:
    off, drafted = look_at(sglang()), look_at({"/v1/models": listing("sglang"), "/server_info": EAGLE3})
    check_comparable(off, drafted)
    assert off.facts == {"engine": "sglang 0.5.23", "model": "org/model", "dtype": "bfloat16", "KV cache": "auto",
                         "tensor parallelism": "1", "context": "8192"}
    assert (off.drafts, drafted.drafts) == ("", "EAGLE3 3/1/4")
    assert "secret" not in off.model_dump_json()
    assert notes_of(off, drafted) == []
    bare, counting = look_at(vllm("vllm:num_requests 0\n")), look_at(vllm("vllm:spec_decode_num_drafts_total 0\n"))
    check_comparable(bare, counting)
    assert (bare.drafts, counting.drafts) == ("", "drafts")
    assert notes_of(bare, counting) == ["not compared, because a server does not state it: dtype, chat template"]
    hidden = look_at(vllm(None))
    check_comparable(hidden, hidden)
    assert "whether it drafts" in notes_of(hidden, hidden)[0]
    guarded = look_at({"/v1/models": listing("sglang", root="m")})
    assert (guarded.engine, guarded.drafts) == ("sglang", None)


@pytest.mark.parametrize(("changed", "says"), [
    ({"dtype": "float16"}, r"dtype: bfloat16 \(--off\), float16 \(--drafted\)"),
    ({"model_path": "org/other"}, "model: org/model .*org/other"),
    ({"kv_cache_dtype": "fp8_e5m2"}, "KV cache: auto"),
    ({"tp_size": 2}, "tensor parallelism: 1"),
    ({"version": "0.5.22"}, "engine: sglang 0.5.23"),
])
def test_every_other_difference_of_sglang_servers_is_named(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        check_comparable(look_at(sglang()), look_at(sglang(**EAGLE3 | changed)))


def test_servers_of_two_engines_and_of_two_contexts_are_refused() -> None:
    drafts = "vllm:spec_decode_num_drafts_total 3\n"
    with pytest.raises(InvalidInput, match="engine: sglang 0"):
        check_comparable(look_at(sglang()), look_at(vllm(drafts)))
    with pytest.raises(InvalidInput, match="context: 8192"):
        check_comparable(look_at(vllm("")), look_at(vllm(drafts, max_model_len=4096)))


def test_settings_that_follow_from_speculation_are_noted_and_do_not_refuse() -> None:
    off = look_at(sglang(max_running_requests=2048))
    drafted = look_at({"/v1/models": listing("sglang"), "/server_info": EAGLE3})
    check_comparable(off, drafted)
    [note] = notes_of(off, drafted)
    assert note.startswith("max_running_requests differs: 2048 without the drafter, 48 with it")


def test_what_is_no_server_of_the_three_engines_is_refused() -> None:
    for documents, says in (({}, "is no list of models"),
                            ({"/v1/models": listing("someone")}, "not a server of SGLang"),
                            ({"/v1/models": {"data": []}}, "serves 0 models")):
        with pages(documents) as connection, pytest.raises(InvalidInput, match=says):
            look(connection, "--drafted", None)


def answer(*ids: int, prompt: tuple[int, ...] = (1, 2), text: str = "") -> Answer:
    return Answer(prompt, len(prompt), ids or None, text)


def test_answers_of_all_three_engines_are_read() -> None:
    message = {"message": {"role": "assistant", "content": "hi"}}
    usage = {"usage": {"prompt_tokens": 2}}
    ids = {"sglext": {"output_ids": [[7, 8]]}}
    assert read_answer({"choices": [message | {"prompt_token_ids": [1, 2]}], **ids, **usage},
                       "u") == answer(7, 8, text="\x1fhi")
    assert read_answer({"choices": [message | {"token_ids": [7, 8]}], "prompt_token_ids": [1, 2], **usage},
                       "u") == answer(7, 8, text="\x1fhi")
    assert read_answer({"choices": [message], **usage}, "u") == Answer(None, 2, None, "\x1fhi")
    with pytest.raises(EndpointUnusable, match="not answer with a chat completion"):
        read_answer({"choices": []}, "u")


def test_another_chat_template_is_found_by_the_prompts_tokens() -> None:
    check_prompts([answer(5)], [answer(6)])
    with pytest.raises(InvalidInput, match="conversation 2 has other token ids"):
        check_prompts([answer(5), answer(5)], [answer(5), answer(5, prompt=(1, 3))])
    with pytest.raises(InvalidInput, match="conversation 1 has other numbers of tokens"):
        check_prompts([Answer(None, 2, None, "a")], [Answer(None, 3, None, "a")])


def test_differences_count_unless_they_are_near_ties_or_occur_without_the_drafter_too() -> None:
    alone = [answer(5, 6), answer(5, 6), answer(5, 6), answer(5, 6)]
    plain = [answer(5, 6), answer(5, 7), answer(5, 6), answer(5, 6)]
    drafted = [answer(5, 6), answer(5, 7), answer(5, 8), answer(9, 6)]
    loaded = compare(4, alone, plain, drafted, lambda _, two: two.token_ids == (5, 8))
    assert (loaded.identical, loaded.as_undrafted, loaded.near_ties, loaded.lossless) == (1, 1, 1, False)
    assert loaded.differences == ("answer 4 differs at token 0",)
    # One user at a time, an answer without a drafter is the expected one.
    single = compare(1, alone, alone, drafted, lambda _one, _two: None)
    assert (single.identical, single.as_undrafted) == (1, 0)
    assert "near-ties are not judged here" in single.differences[0]
    by_text = compare(1, [Answer(None, 2, None, "a")], [Answer(None, 2, None, "a")], [Answer(None, 2, None, "b")],
                      lambda _one, _two: None)
    assert (by_text.by, by_text.lossless) == ("text", False)


def test_a_near_tie_needs_both_tokens_and_every_later_one_within_a_rounding_step() -> None:
    rows = [{5: -0.70, 6: -0.75}, {7: -0.1}, {8: -1.0, 9: -0.95}]
    assert is_near_tie(rows, 5, (6, 7, 8), "bfloat16")
    assert not is_near_tie(rows, 5, (6, 7, 8), "float32"), "a step of float32 is far smaller"
    assert not is_near_tie([{5: -0.1, 6: -2.0}, *rows[1:]], 5, (6, 7, 8), "bfloat16")
    assert not is_near_tie([{4: -0.1, 6: -0.1}, *rows[1:]], 5, (6, 7, 8), "bfloat16"), "the undrafted token is unlikely"
    assert not is_near_tie([*rows[:2], {8: -2.0, 9: -0.1}], 5, (6, 7, 8), "bfloat16"), "a later token is not the choice"
    assert not is_near_tie(rows[:2], 5, (6, 7, 8), "bfloat16"), "a row is missing"


def test_ties_are_judged_by_one_prefill_of_the_server_without_a_drafter() -> None:
    expected, drafted = answer(4, 5, 9), answer(4, 6, 7)

    def generate(_path: str, body: Any) -> Any:
        assert body["input_ids"] == [1, 2, 4, 6, 7]
        assert body["logprob_start_len"] == 2
        return {"output_ids": [1], "meta_info": {
            "input_token_logprobs": [[None, 4, None], [-0.75, 6, None], [-0.1, 7, None]],
            "input_top_logprobs": [None, [[-0.70, 5, None], [-0.75, 6, None]], [[-0.1, 7, None]]]}}

    def completions(_path: str, body: Any) -> Any:
        assert body["prompt"] == [1, 2, 4, 6, 7]
        rows = [{"6": {"logprob": -2.5, "rank": 3}, "5": {"logprob": -0.1, "rank": 1}}, {"7": {"logprob": -0.1}}]
        return {"choices": [{"text": "", "prompt_logprobs": [None, {"2": {"logprob": -1.0}}, {"4": {"logprob": -1.0}},
                                                             *rows]}]}

    with pages({}, generate) as connection:
        server = RunningServer(url="", engine="sglang", model="m", facts={"dtype": "bfloat16"}, drafts="")
        assert judge_tie(connection, server, expected, drafted) is True
        assert judge_tie(connection, server, expected, answer(4, 5)) is False, "it ends earlier"
        assert len(ASKED) == 1
    with pages({}, completions) as connection:
        server = RunningServer(url="", engine="vllm", model="m", facts={}, drafts="")
        assert judge_tie(connection, server, expected, drafted) is False
    assert judge_tie(connection, server.model_copy(update={"engine": "embedded"}), expected, drafted) is None


@pytest.mark.parametrize(("checks", "verdict", "code"), [
    ((("parity", True, False), ("load:1", True, False)), "faster", 0),
    ((("parity", True, False), ("load:1", False, False)), "not-faster", 3),
    ((("parity", False, False), ("load:1", False, False)), "not-lossless", 4),
    ((("parity-load", False, False), ("load:1", True, False)), "not-lossless", 4),
    ((("parity", True, False), ("load:1", False, True)), "undecided", 5),
])
def test_the_exit_code_is_that_of_a_certified_job(checks: tuple[tuple[str, bool, bool], ...], verdict: str,
                                                   code: int) -> None:
    server = RunningServer(url="", engine="vllm", model="m", facts={}, drafts="")
    load = LoadReport.model_validate({"model": "m", "spec": {}, "variants": {}, "levels": [], "comparisons": [],
                                      "environment": client_environment(), "seconds": 1.0})
    made = [PromotionCheck(name=name, passed=passed, undecided=undecided, words=name)
            for name, passed, undecided in checks]
    certificate = judge(server, server, (), load, made, 3)
    assert (certificate.verdict, certificate.exit_code) == (verdict, code)

