"""Two servers that Eyrie did not start, one of them drafting: whether that changes an answer, and whether it is faster.

    python -m eyrie_workers.measure.running_servers --off http://127.0.0.1:30000 --drafted http://127.0.0.1:30001 \\
        --prompts prompts.jsonl                                        `eyrie certify --off URL --drafted URL` runs it

SGLang, vLLM and the embedded server are recognised by what they say of themselves. Servers that state different values
of what a drafter does not change (engine and version, model, dtype, context, chat template, quantisation, tensor
parallelism) are refused, and so is a pair of which the wrong one drafts; what a server does not state is listed in the
result. Whether both render conversations alike is not left to what they state: they return the token ids of every
prompt, or their number.

The servers get complete requests alone: nothing is flushed, reloaded or aborted, because they may have other clients.
Their prefix caches and n-gram tables therefore hold earlier answers, which the result says where prompts repeat.

Answers. Greedy, one user at a time, then at the highest load, by token ids where both servers return them, otherwise by
text. An answer under load that changes in the same way without a drafter was not changed by drafting. A difference is
a near-tie by the rule of `decisions.near_ties`, whose two parts need the target's logits: the server without a drafter
computes the log probabilities of the drafted answer in one prefill (SGLang's `/generate`, vLLM's `prompt_logprobs`).
Differences of log probabilities are those of logits; the size of the largest logit, on which its rounding depends, is
in no response, so it is taken to be `_TYPICAL_LOGIT`. The embedded server computes no such log probabilities: there
every difference counts.

Speed. Pairs of blocks as in the proof (`stages.prove`), until the intervals decide or `prove.most_pairs` is reached,
judged by promotion's own checks.
"""

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import httpx
from rich.console import Group
from rich.text import Text

from eyrie_api.cli.verbs import Screen
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.load import LoadReport, LoadSpec
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.promotion import PromotionPolicy
from eyrie_api.contract.prove import ProveSpec
from eyrie_api.contract.reports import PromotionCheck, PromotionDecision
from eyrie_api.decisions.certification import EXIT_CODES, WORDS, Verdict, certification
from eyrie_api.decisions.near_ties import is_lossless, rounding_step
from eyrie_api.decisions.promotion import CANDIDATE, OFF, checks_at_load, summarize_decision
from eyrie_api.errors import EyrieError, InvalidInput
from eyrie_workers.data.suites import Prompt
from eyrie_workers.measure.load.__main__ import ProgressLine, comparisons_table, read_key, read_prompts
from eyrie_workers.measure.load.client import EndpointUnusable, LoadEndpoint
from eyrie_workers.measure.load.http_client import parse_url
from eyrie_workers.measure.load.report_statistics import LevelResults, load_standing, paired_ratios
from eyrie_workers.measure.load.run import run_load
from eyrie_workers.measure.load.schedule import draw_prompts
from eyrie_workers.measure.parity import first_difference

_LOOK_S, _ANSWER_S = 30.0, 600.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0")
_MOST_LINES = 8  # differences that are described
_TOP = 5  # log probabilities per position

_TYPICAL_LOGIT = 16.0
"""The largest logits of chat models are 16 to 32 nearly everywhere: one rounding step is then 0.125 in bfloat16."""

Engine = Literal["sglang", "vllm", "embedded"]

_SGLANG_FACTS = {"model": "model_path", "revision": "revision", "dtype": "dtype", "chat template": "chat_template",
                 "quantisation": "quantization", "KV cache": "kv_cache_dtype", "tensor parallelism": "tp_size"}
_SGLANG_SETTINGS = ("attention_backend", "max_running_requests", "mem_fraction_static", "page_size")
"""They follow from speculation where they are not set, so they may differ; the result notes it."""

_IDS: dict[Engine, dict[str, bool]] = {
    "sglang": {"return_output_ids_in_sglext": True, "return_prompt_token_ids": True},
    "vllm": {"return_token_ids": True}, "embedded": {"return_token_ids": True}}
_EXPECTED_FACTS = ("model", "dtype", "context", "chat template")


class RunningServer(Frozen):
    """What a server says of itself."""

    url: str
    """Without /v1 and credentials."""

    engine: Engine
    model: str
    """In requests."""

    facts: dict[str, str]
    """What must be equal in both servers, as far as it is stated."""

    drafts: str | None
    """How it drafts; empty: it does not; None: not stated."""

    settings: dict[str, str] = {}


class AnswersCompared(Frozen):
    """Greedy answers with the drafter against those of one user without."""

    users: int
    compared: int
    identical: int
    as_undrafted: int = 0
    """Changed under load, in the same way without a drafter."""

    near_ties: int = 0
    by: Literal["token ids", "text"]
    differences: tuple[str, ...] = ()
    """Of the answers that differ otherwise, the first ones."""

    @property
    def lossless(self) -> bool:
        return is_lossless(self.compared, self.identical, self.as_undrafted + self.near_ties)

    @property
    def words(self) -> str:
        parts = [f"{'one user at a time' if self.users == 1 else f'{self.users} at a time'}: {self.identical} of "
                 f"{self.compared} answers are identical by {self.by}"]
        if self.as_undrafted:
            parts.append(f"{self.as_undrafted} changed as they do without a drafter")
        if self.near_ties:
            parts.append(f"{self.near_ties} differ by near-ties")
        return "; ".join([*parts, *self.differences])


class RunningCertificate(Frozen):
    """The result of `eyrie certify --off URL --drafted URL`."""

    verdict: Verdict
    exit_code: int
    summary: str
    off: RunningServer
    drafted: RunningServer
    answers: tuple[AnswersCompared, ...]
    load: LoadReport
    checks: tuple[PromotionCheck, ...]
    notes: tuple[str, ...] = ()


class Connection:
    """Requests to one server, without the environment's proxy: a load test would measure it."""

    def __init__(self, url: str, key: str | None) -> None:
        """Raises InvalidInput for what is not the URL of a server."""
        self.origin = parse_url(url)
        self.base = self.origin.url.removesuffix("/v1")
        authorization = {"Authorization": f"Bearer {key}"} if key else \
            {"Authorization": self.origin.basic} if self.origin.basic else {}
        self._client = httpx.Client(headers=authorization, timeout=_ANSWER_S, trust_env=False)

    def get(self, path: str) -> httpx.Response:
        """Raises EndpointUnusable when there is no response."""
        return self._send("GET", path, timeout=_LOOK_S)

    def read(self, path: str) -> dict[str, Any]:
        """The JSON object at a path; empty where the server has none there."""
        return _object_of(self.get(path)) or {}

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Raises EndpointUnusable for any other response than a JSON object."""
        answer = self._send("POST", path, json=dict(body))
        if (document := _object_of(answer)) is None:
            raise EndpointUnusable(f"{self.base}{path} answered {answer.status_code}: {answer.text[:300]}",
                                   "read the server's log")
        return document

    def close(self) -> None:
        self._client.close()

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return self._client.request(method, f"{self.base}{path}", **options)
        except httpx.HTTPError as error:
            raise EndpointUnusable(f"{self.base} did not answer {path}: {error or type(error).__name__}",
                                   "start the server, and check its address") from None


def _object_of(answer: httpx.Response) -> dict[str, Any] | None:
    """The JSON object of a successful response."""
    try:
        document = answer.json() if answer.is_success else None
    except ValueError:
        document = None
    return document if isinstance(document, dict) else None


def look(connection: Connection, option: str, model: str | None) -> RunningServer:
    """Recognise a server. Raises InvalidInput for another server, EndpointUnusable when none answers.

    option   that names it, for messages
    model    in requests; None: the only one that it lists
    """
    answer = connection.get("/v1/models")
    try:
        cards = {str(card["id"]): card for card in answer.json()["data"]}
    except (ValueError, KeyError, TypeError):
        hint = "give its API key: --api-key-env NAME" if answer.status_code in (401, 403) else \
            "give the address of an OpenAI-compatible server, with or without /v1"
        raise InvalidInput(f"{option} {connection.base}: /v1/models is no list of models "
                           f"(status {answer.status_code})", hint) from None
    if model not in cards and not (model is None and len(cards) == 1):
        raise InvalidInput(f"{option} {connection.base} serves {len(cards)} models: {', '.join(list(cards)[:8])}",
                           "name one that both serve: --model NAME")
    name = model or next(iter(cards))
    return recognise(connection, option, name, cards[name])


def recognise(connection: Connection, option: str, name: str, card: Mapping[str, Any]) -> RunningServer:
    """From the card of its model and its own pages."""
    context = _stated({"context": card.get("max_model_len")})
    if card.get("owned_by") == "eyrie":
        facts = _stated({"model": card.get("root"), "dtype": card.get("dtype")}) | context
        tree = card.get("speculation")
        return RunningServer(url=connection.base, engine="embedded", model=name, facts=facts | {"engine": "embedded"},
                             drafts=None if "drafts" not in card else "" if not card["drafts"] else "by load"
                             if tree is None else DraftTreeShape.model_validate(tree).label())
    info = connection.read("/server_info") or connection.read("/get_server_info")
    if "model_path" in info or card.get("owned_by") == "sglang":
        facts = _stated({fact: info.get(field) for fact, field in _SGLANG_FACTS.items()}) | context
        algorithm = info.get("speculative_algorithm")
        return RunningServer(
            url=connection.base, engine="sglang", model=name,
            facts=facts | {"engine": f"sglang {info.get('version', '')}".strip()},
            drafts=None if not info else "" if algorithm in (None, "NONE") else
            f"{algorithm} {info.get('speculative_num_steps')}/{info.get('speculative_eagle_topk')}/"
            f"{info.get('speculative_num_draft_tokens')}",
            settings=_stated({field: info.get(field) for field in _SGLANG_SETTINGS}))
    version = connection.read("/version").get("version")
    if version is not None or card.get("owned_by") == "vllm":
        # The counters of speculation exist where it is configured, whether or not a request was answered.
        metrics = connection.get("/metrics")
        drafts = None if not metrics.is_success else "drafts" if "vllm:spec_decode" in metrics.text else ""
        return RunningServer(url=connection.base, engine="vllm", model=name, drafts=drafts,
                             facts=_stated({"model": card.get("root")}) | context | {
                                 "engine": f"vllm {version or ''}".strip()})
    raise InvalidInput(f"{option} {connection.base} is not a server of SGLang, vLLM or Eyrie",
                       "compare servers of other engines with eyrie load-test, which certifies nothing")


def _stated(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items() if value is not None}


def check_one_server(off: Connection, drafted: Connection) -> None:
    """Raises InvalidInput when both URLs are one. A server under two other names is found by whether it drafts."""
    places = {("loopback" if origin.host in _LOOPBACK else origin.host, origin.port, origin.path.removesuffix("/v1"))
              for origin in (off.origin, drafted.origin)}
    if len(places) == 1:
        raise InvalidInput(f"--off and --drafted are one server: {drafted.base}",
                           "start a second one without the drafter, on another port, with the same options otherwise")


def check_comparable(off: RunningServer, drafted: RunningServer) -> None:
    """Raises InvalidInput for servers that differ in more than the drafter, or of which the wrong one drafts."""
    if off.drafts:
        raise InvalidInput(f"--off {off.url} drafts ({off.drafts})", "start it without a drafter; if it is the server "
                           "of --drafted under another name, start a second one")
    if drafted.drafts == "":
        raise InvalidInput(f"--drafted {drafted.url} does not draft", "start it with the drafter; if it is the server "
                           "of --off under another name, start a second one")
    unequal = [f"{fact}: {off.facts[fact]} (--off), {drafted.facts[fact]} (--drafted)"
               for fact in off.facts if fact in drafted.facts and off.facts[fact] != drafted.facts[fact]]
    if unequal:
        raise InvalidInput(f"the servers differ in more than the drafter: {'; '.join(unequal)}",
                           "start both with the same options except those of speculation")


def notes_of(off: RunningServer, drafted: RunningServer) -> list[str]:
    """What the servers do not state, and settings that differ."""
    notes = []
    unknown = [fact for fact in _EXPECTED_FACTS if fact not in off.facts or fact not in drafted.facts]
    if off.engine == "sglang" and off.drafts is not None:
        unknown = [fact for fact in unknown if fact != "chat template"]  # null: the model's own
    if off.drafts is None or drafted.drafts is None:
        unknown.append("whether it drafts")
    if unknown:
        notes.append(f"not compared, because a server does not state it: {', '.join(unknown)}")
    notes += [f"{name} differs: {off.settings[name]} without the drafter, {drafted.settings[name]} with it; set it to "
              "compare drafting alone" for name in off.settings
              if name in drafted.settings and off.settings[name] != drafted.settings[name]]
    return notes


@dataclass(frozen=True)
class Answer:
    """A greedy answer, and what it is an answer to."""

    prompt_ids: tuple[int, ...] | None
    num_prompt_tokens: int | None
    token_ids: tuple[int, ...] | None
    text: str

    def equals(self, other: "Answer") -> bool:
        if self.token_ids is not None and other.token_ids is not None:
            return self.token_ids == other.token_ids
        return self.text == other.text


def ask(connection: Connection, server: RunningServer, prompt: Prompt, max_new_tokens: int) -> Answer:
    """The greedy answer to a conversation. Raises EndpointUnusable."""
    body = {"model": server.model, "messages": list(prompt.messages), "max_tokens": max_new_tokens, "temperature": 0.0}
    tools = {"tools": list(prompt.tools)} if prompt.tools else {}
    return read_answer(connection.post("/v1/chat/completions", body | tools | _IDS[server.engine]), connection.base)


def read_answer(document: Mapping[str, Any], url: str) -> Answer:
    """A chat completion. Raises EndpointUnusable for another document."""
    try:
        choice = document["choices"][0]
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        lists = (document.get("sglext") or {}).get("output_ids") or [None]
        prompt_ids = document.get("prompt_token_ids") or choice.get("prompt_token_ids")
        token_ids = choice.get("token_ids") or lists[0]
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        text = "\x1f".join([reasoning, message.get("content") or "",
                            *(f"{call.get('name')}{call.get('arguments')}" for call in calls)])
        return Answer(None if prompt_ids is None else tuple(map(int, prompt_ids)),
                      (document.get("usage") or {}).get("prompt_tokens"),
                      None if token_ids is None else tuple(map(int, token_ids)), text)
    except (KeyError, IndexError, TypeError, ValueError):
        raise EndpointUnusable(f"{url} did not answer with a chat completion", "check that it serves chat") from None


def check_prompts(off: Sequence[Answer], drafted: Sequence[Answer]) -> None:
    """Raises InvalidInput when the servers made different prompts of the same conversation."""
    for number, (one, two) in enumerate(zip(off, drafted, strict=True), 1):
        if one.prompt_ids is not None and two.prompt_ids is not None:
            same, what = one.prompt_ids == two.prompt_ids, "token ids"
        else:
            same, what = one.num_prompt_tokens == two.num_prompt_tokens, "numbers of tokens"
        if not same:
            raise InvalidInput(f"the servers differ in more than the drafter: conversation {number} has other {what} "
                               "in each, so their tokenizer or chat template differs",
                               "start both with the same tokenizer and chat template")


IsTie = Callable[[Answer, Answer], bool | None]
"""Whether a drafted answer differs from the undrafted one by near-ties; None: not judged."""


def compare(users: int, alone: Sequence[Answer], plain: Sequence[Answer], drafted: Sequence[Answer],
            is_tie: IsTie) -> AnswersCompared:
    """Pure but for `is_tie`.

    alone   one user, no drafter
    plain   no drafter, with as many users as `drafted`; with one user the same as `alone`
    """
    identical = as_undrafted = near_ties = 0
    differences = []
    for number, (expected, without, answer) in enumerate(zip(alone, plain, drafted, strict=True), 1):
        if answer.equals(expected):
            identical += 1
        elif users > 1 and answer.equals(without):
            as_undrafted += 1
        elif (judged := is_tie(expected, answer)):
            near_ties += 1
        else:
            place = "" if expected.token_ids is None or answer.token_ids is None else \
                f" at token {first_difference(expected.token_ids, answer.token_ids)}"
            differences.append(f"answer {number} differs{place}"
                               + (" (near-ties are not judged here)" if judged is None else ""))
    by_ids = all(answer.token_ids is not None for answer in (*alone, *drafted))
    return AnswersCompared(users=users, compared=len(drafted), identical=identical, as_undrafted=as_undrafted,
                           near_ties=near_ties, by="token ids" if by_ids else "text",
                           differences=tuple(differences[:_MOST_LINES]))


def judge_tie(connection: Connection, server: RunningServer, expected: Answer, drafted: Answer) -> bool | None:
    """By the log probabilities that the server without a drafter computes of the drafted answer."""
    if server.engine == "embedded" or expected.prompt_ids is None or expected.token_ids is None \
            or drafted.token_ids is None:
        return None
    place = first_difference(expected.token_ids, drafted.token_ids)
    if place is None or place in (len(drafted.token_ids), len(expected.token_ids)):
        return False  # one answer ends where the other goes on, and the end has no token to judge
    rows = answer_rows(connection, server, expected.prompt_ids, drafted.token_ids, place)
    dtype = server.facts.get("dtype")
    return is_near_tie(rows, expected.token_ids[place], drafted.token_ids[place:],
                       dtype if dtype in ("float32", "float16") else "bfloat16")


Row = Mapping[int, float]
"""Log probabilities at one position of a prompt by token: the likeliest ones, and the prompt's own."""


def answer_rows(connection: Connection, server: RunningServer, prompt_ids: Sequence[int], answer_ids: Sequence[int],
                place: int) -> list[Row]:
    """Of an answer from the token at `place` on, in one prefill by SGLang or vLLM."""
    ids, num_rows = [*prompt_ids, *answer_ids], len(answer_ids) - place
    rows: list[Row]
    if server.engine == "sglang":
        about = connection.post("/generate", {
            "input_ids": ids, "sampling_params": {"temperature": 0.0, "max_new_tokens": 1}, "return_logprob": True,
            "top_logprobs_num": _TOP, "logprob_start_len": len(ids) - num_rows - 1})["meta_info"]
        rows = [{int(token): float(logprob) for logprob, token, *_ in (*(top or ()), own) if logprob is not None}
                for own, top in zip(about["input_token_logprobs"], about["input_top_logprobs"], strict=True)]
    else:
        answer = connection.post("/v1/completions", {
            "model": server.model, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": _TOP})
        rows = [{int(token): float(entry["logprob"]) for token, entry in (position or {}).items()}
                for position in answer["choices"][0]["prompt_logprobs"]]
    return rows[-num_rows:]  # the first position of a text has none


def is_near_tie(rows: Sequence[Row], expected: int, drafted: Sequence[int], dtype: str) -> bool:
    """The rule of `decisions.near_ties` on log probabilities. Pure.

    rows       of the positions of `drafted`, the tokens from the first difference on
    expected   the undrafted token at the first of them
    """
    step = rounding_step(_TYPICAL_LOGIT, dtype)

    def gap(row: Row, token: int) -> float:
        return max(row.values(), default=0.0) - row.get(token, -math.inf)

    return len(rows) == len(drafted) and gap(rows[0], expected) <= step and all(
        gap(row, token) <= step for row, token in zip(rows, drafted, strict=True))


def certify_running(off: Connection, drafted: Connection, prompts: Sequence[Prompt], prove: ProveSpec,
                    policy: PromotionPolicy, model: str | None, key: str | None,
                    screen: Screen) -> RunningCertificate:
    """Compare the two servers. Raises InvalidInput and EndpointUnusable."""
    check_one_server(off, drafted)
    plain, candidate = look(off, "--off", model), look(drafted, "--drafted", model)
    check_comparable(plain, candidate)
    asked = draw_prompts(prompts, 0, min(prove.parity_prompts, len(prompts)))
    most = max(prove.concurrencies)

    def answers(connection: Connection, server: RunningServer, users: int) -> list[Answer]:
        with ThreadPoolExecutor(users) as pool:
            return list(pool.map(lambda prompt: ask(connection, server, prompt, prove.max_new_tokens),
                                 draw_prompts(asked, 0, max(users, len(asked)))))

    def is_tie(expected: Answer, answer: Answer) -> bool | None:
        return judge_tie(off, plain, expected, answer)

    screen.note(f"comparing {len(asked)} answers of {candidate.url} ({candidate.drafts or 'a drafter'}) with those of "
                f"{plain.url}")
    alone, drafted_alone = answers(off, plain, 1), answers(drafted, candidate, 1)
    check_prompts(alone, drafted_alone)
    compared = [compare(1, alone, alone, drafted_alone, is_tie)]
    if most > 1:
        expected = [alone[number % len(alone)] for number in range(max(most, len(asked)))]
        compared.append(compare(most, expected, answers(off, plain, most), answers(drafted, candidate, most), is_tie))
    load = measure_load([LoadEndpoint(OFF, f"{off.base}/v1", plain.model, key),
                         LoadEndpoint(CANDIDATE, f"{drafted.base}/v1", candidate.model, key,
                                      candidate.drafts or "")], prompts, prove, policy, screen)
    checks = [PromotionCheck(
        name="parity" if result.users == 1 else "parity-load", passed=result.lossless, bound=float(result.compared),
        figure=float(result.identical + result.as_undrafted + result.near_ties), words=result.words)
        for result in compared]
    for users in prove.concurrencies:
        checks += checks_at_load(policy, load, users, again="run eyrie certify again")
    return judge(plain, candidate, compared, load, checks, len(prompts))


def measure_load(endpoints: Sequence[LoadEndpoint], prompts: Sequence[Prompt], prove: ProveSpec,
                 policy: PromotionPolicy, screen: Screen) -> LoadReport:
    """Pairs of blocks at every load, each until its comparison is not open any more."""
    def is_clear(levels: Sequence[LevelResults]) -> bool:
        level = {results.variant: results for results in levels}
        ratios = paired_ratios(level[CANDIDATE], level[OFF])
        return ratios is not None and len(level[OFF].results) >= prove.requests and load_standing(
            policy, ratios, level[CANDIDATE], level[OFF]) != "open"

    spec = LoadSpec(concurrencies=prove.concurrencies, requests=1, repeats=prove.most_pairs,
                    max_new_tokens=prove.max_new_tokens)
    return run_load(endpoints, prompts, spec, OFF, ProgressLine(screen).report, is_clear=is_clear)


def judge(off: RunningServer, drafted: RunningServer, answers: Sequence[AnswersCompared], load: LoadReport,
          checks: Sequence[PromotionCheck], num_prompts: int) -> RunningCertificate:
    """The verdict. Pure."""
    decision = PromotionDecision(promote=False, verdict="no-drafter", checks=tuple(checks),
                                 reasons=tuple(check.words for check in checks))
    notes = [*notes_of(off, drafted), *load.notes]
    requests = sum(level.total.requests for level in load.levels if level.variant == OFF)
    if requests > num_prompts:
        notes.append(f"{num_prompts} prompts were sent {requests} times, and nothing was flushed: prefix caches and "
                     f"n-gram tables held earlier answers. {requests} different prompts would not repeat")
    verdict = certification(decision)
    return RunningCertificate(
        verdict=verdict, exit_code=EXIT_CODES[verdict], summary=summarize_decision(decision), off=off, drafted=drafted,
        answers=tuple(answers), load=load, checks=tuple(checks), notes=tuple(notes))


def words(certificate: RunningCertificate) -> Group:
    """For a terminal. Pure."""
    colour = {"faster": "bold green", "not-lossless": "bold red"}.get(certificate.verdict, "bold yellow")
    return Group(
        *([comparisons_table(certificate.load.comparisons), Text()] if certificate.load.comparisons else ()),
        Text(WORDS[certificate.verdict], colour), Text(certificate.summary),
        *(Text(result.words) for result in certificate.answers),
        *(Text(f"note: {note}", "yellow") for note in certificate.notes))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Certify a drafter on two running servers.")
    parser.add_argument("--off", required=True, help="the server without a drafter")
    parser.add_argument("--drafted", required=True, help="the server with it")
    parser.add_argument("--prompts", action="append", required=True, help="as for eyrie load-test")
    parser.add_argument("--model", help="model name in requests; default: the only one that a server lists")
    parser.add_argument("--api-key-env", help="environment variable with the API key of both servers")
    parser.add_argument("--prove", default="{}", help="a ProveSpec in JSON")
    parser.add_argument("--promotion", default="{}", help="a PromotionPolicy in JSON")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    screen = Screen(as_json=arguments.json)
    connections: list[Connection] = []
    try:
        key = read_key(arguments.api_key_env)
        connections += (Connection(url, key) for url in (arguments.off, arguments.drafted))
        certificate = certify_running(
            connections[0], connections[1], read_prompts(arguments.prompts, 0),
            ProveSpec.model_validate_json(arguments.prove), PromotionPolicy.model_validate_json(arguments.promotion),
            arguments.model, key, screen)
        screen.show(certificate, words(certificate))
        return certificate.exit_code
    except EyrieError as error:
        screen.error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    finally:
        for connection in connections:
            connection.close()


if __name__ == "__main__":
    sys.exit(main())
