"""Parity next to other requests: several shapes of requests in flight at once, greedy and sampled.

`requests_under_load` and `sampled_requests` say what is sent and what has to be answered; `request_under_load` sends it
to a server; `compare_under_load` and `compare_sampled` are pure. The greedy requests take turns:

    plain       the whole answer at once
    streamed    the pieces of the stream, joined
    stopped     with a stop string from the middle of the answer. Its tokens are those up to the one that completes the
                string, also where a round accepts more
    continued   the prompt and half of its answer: an engine with a prefix cache finds them there
    formatted   in a JSON schema, as `response_format` asks for; SGLang alone has grammars
    called      in the schema of calls of the prompt's tools, as `tool_choice: required` asks for; formatted where it
                has none. The arguments are any objects: a schema that the engine cannot compile fails the request

An answer has to be that of one user without a drafter; one within a grammar, that of the engine without a drafter under
the same load. What a server without a drafter changes too under the same
load, drafting did not change: sums may depend on the batch.

Sampled answers are compared at temperature 1, as callers have it by default. The embedded engine's depend on request
and seed alone, so they are compared token by token. SGLang draws its own noise: many short answers to each prompt, with
the drafter and without, must come from one distribution (`two_samples`).
"""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from eyrie_api.contract.engine import DraftTreeShape, EngineKind
from eyrie_api.contract.prove import ParityReport, SampledParityReport
from eyrie_workers.measure import two_samples
from eyrie_workers.measure.parity import TIMEOUT_S, Served, compare_answers, is_same, request_answer, request_body

Shape = Literal["plain", "streamed", "stopped", "continued", "formatted", "called", "sampled"]
_WORDS: dict[Shape, str] = {"plain": "plain", "streamed": "streamed", "stopped": "cut at a stop string",
                            "continued": "continuing an answer", "formatted": "in a JSON schema",
                            "called": "calling tools"}
_GREEDY: dict[EngineKind, tuple[Shape, ...]] = {
    "embedded": ("plain", "streamed", "stopped", "continued"),
    "sglang": ("plain", "streamed", "stopped", "continued", "formatted", "called")}
_FORMAT = {"type": "object", "properties": {"answer": {"type": "string"}, "sure": {"type": "boolean"}},
           "required": ["answer", "sure"]}

# For the two-sample test. 16 answers to each of 12 prompts find argmax in half of the answers nearly always
# (tests/workers/measure/test_two_samples.py), and further tokens of an answer repeat what its first ones say.
_SAMPLED_PROMPTS, _SAMPLES, _SAMPLED_TOKENS = 16, 16, 16


@dataclass(frozen=True)
class LoadRequest:
    """A request, and what has to be answered."""

    shape: Shape
    turn: int  # number of the prompt
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    expected: Served | None = None
    """None for a sampled request, and for one within a grammar."""

    stop: str = ""
    json_schema: str = ""
    seed: int | None = None

    @property
    def title(self) -> str:
        return f"prompt {self.turn}, {'sampled' if self.shape == 'sampled' else f'under load, {_WORDS[self.shape]}'}"


Divergence = Callable[[LoadRequest, Served, Served], tuple[str, bool]]
"""Of a request and two answers: a line for the report, and whether it is a near-tie."""


def requests_under_load(kind: EngineKind, prompts: Sequence[Sequence[int]], alone: Sequence[Served],
                        max_new_tokens: int, in_flight: int, decode: Callable[[Sequence[int]], str],
                        tools: Sequence[Sequence[Mapping[str, Any]]] = ()) -> list[LoadRequest]:
    """The greedy requests: `num_under_load` of them, the prompts forwards and backwards in turn, so that a prompt
    returns in another shape.

    alone    the answers to the prompts of one user without a drafter
    decode   the text of token ids
    tools    of each prompt
    """
    shapes, requests = _GREEDY[kind], []
    for number in range(num_under_load(len(prompts), in_flight)):
        turn = number % len(prompts)
        if number // len(prompts) % 2:
            turn = len(prompts) - 1 - turn
        requests.append(_shaped(shapes[number % len(shapes)], turn, tuple(prompts[turn]), alone[turn], max_new_tokens,
                                decode, tools[turn] if tools else ()))
    return requests


def num_under_load(num_prompts: int, in_flight: int) -> int:
    """Answers of `requests_under_load`: every prompt at least twice, for an engine with a prefix cache."""
    return 2 * max(num_prompts, in_flight)


def _shaped(shape: Shape, turn: int, prompt_ids: tuple[int, ...], alone: Served, max_new_tokens: int,
            decode: Callable[[Sequence[int]], str], tools: Sequence[Mapping[str, Any]]) -> LoadRequest:
    ids, half = alone.token_ids, len(alone.token_ids) // 2
    if shape == "continued" and half:
        # Its text is not compared: a character may have begun in the first half.
        return LoadRequest(shape, turn, (*prompt_ids, *ids[:half]), max_new_tokens - half,
                           Served(token_ids=ids[half:], histogram=()))
    if shape == "called" and tools:
        names = [tool.get("function", tool)["name"] for tool in tools]
        call = {"type": "object", "properties": {"name": {"enum": names}, "parameters": {"type": "object"}},
                "required": ["name", "parameters"]}
        return LoadRequest(shape, turn, prompt_ids, max_new_tokens,
                           json_schema=json.dumps({"type": "array", "minItems": 1, "items": call}))
    if shape in ("formatted", "called"):
        return LoadRequest("formatted", turn, prompt_ids, max_new_tokens, json_schema=json.dumps(_FORMAT))
    if shape == "stopped" and (stop := _stop_string(text := decode(ids) if alone.text is None else alone.text)):
        length = next((n for n in range(1, len(ids)) if stop in decode(ids[:n])), len(ids))
        return LoadRequest(shape, turn, prompt_ids, max_new_tokens, stop=stop, expected=Served(
            token_ids=ids[:length], histogram=(), text=text[:text.index(stop)]))
    return LoadRequest("streamed" if shape == "streamed" else "plain", turn, prompt_ids, max_new_tokens, alone)


def _stop_string(text: str) -> str:
    """Up to eight characters from the second half of a text, all of them whole; empty when there are none."""
    found = re.search("[^\N{REPLACEMENT CHARACTER}]{1,8}", text[len(text) // 2:])
    return found.group() if found is not None else ""


def sampled_requests(kind: EngineKind, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[LoadRequest]:
    """The requests at temperature 1: with a seed each, or as many short ones as the two-sample test needs."""
    if kind == "embedded":
        return [LoadRequest("sampled", turn, tuple(prompt), max_new_tokens, seed=turn)
                for turn, prompt in enumerate(prompts)]
    return [LoadRequest("sampled", turn, tuple(prompt), min(max_new_tokens, _SAMPLED_TOKENS))
            for _ in range(_SAMPLES) for turn, prompt in enumerate(prompts[:_SAMPLED_PROMPTS])]


def request_under_load(kind: EngineKind, url: str, model: str, requests: Sequence[LoadRequest], in_flight: int,
                       pause: Callable[[], None] = lambda: None) -> list[Served]:
    """The answers to the requests in their order, `in_flight` at a time.

    Next to every fourth request another is sent whose client leaves after the first token. `pause` is called after each
    answer and may raise. Raises EngineFailed.
    """
    with ThreadPoolExecutor(in_flight + 1) as pool:
        waiting: list[Future[Served]] = []
        try:
            for number, request in enumerate(requests):
                if number % 4 == 0:
                    pool.submit(_leave_early, kind, url, model, requests[-1 - number])
                waiting.append(pool.submit(
                    request_answer, kind, url, model, request.prompt_ids, request.max_new_tokens,
                    temperature=1.0 if request.shape == "sampled" else 0.0, seed=request.seed, stop=request.stop,
                    json_schema=request.json_schema, stream=request.shape == "streamed"))
            answers = []
            for future in waiting:
                answers.append(future.result())
                pause()
            return answers
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _leave_early(kind: EngineKind, url: str, model: str, request: LoadRequest) -> None:
    """A streamed request whose connection is closed after the first piece of its answer."""
    path, body = request_body(kind, model, request.prompt_ids, request.max_new_tokens)
    # An engine that fails here fails the requests next to it, which are reported.
    with contextlib.suppress(httpx.HTTPError), httpx.stream("POST", f"{url}{path}", json={**body, "stream": True},
                                                            timeout=TIMEOUT_S) as response:
        next(response.iter_bytes(), None)


def compare_under_load(kind: EngineKind, tree: DraftTreeShape, requests: Sequence[LoadRequest],
                       plain: Sequence[Served], drafted: Sequence[Served], divergence: Divergence,
                       in_flight: int) -> ParityReport:
    """The answers to `requests_under_load`, without the drafter (`plain`) and with it."""
    expected = [request.expected or answer for request, answer in zip(requests, plain, strict=True)]

    def explained(index: int) -> tuple[str, bool]:
        if is_same(plain[index], drafted[index]):
            return f"{requests[index].title}: as without a drafter", True
        return divergence(requests[index], expected[index], drafted[index])

    batched = sum(not is_same(one, two) for one, two in zip(expected, plain, strict=True))
    shapes = Counter(request.shape for request in requests)
    return compare_answers(kind, tree, expected, drafted, explained, (
        f"{in_flight} at a time, " + ", ".join(f"{count} {_WORDS[shape]}" for shape, count in shapes.items())
        + f", next to aborted requests; without a drafter {batched} of {len(plain)} answers differ from those of one "
        "user"))


def compare_sampled(kind: EngineKind, requests: Sequence[LoadRequest], plain: Sequence[Served],
                    drafted: Sequence[Served], alone: Sequence[Served], divergence: Divergence) -> SampledParityReport:
    """The answers to `sampled_requests`, without the drafter (`plain`) and with it.

    alone   the greedy answers to the prompts without a drafter
    """
    turns = sorted({request.turn for request in requests})
    report = SampledParityReport(engine=kind, prompts=len(turns), answers=len(requests), passed=True, reasons=())
    if all(request.seed is not None for request in requests):
        lines = [divergence(request, one, two) for request, one, two in zip(requests, plain, drafted, strict=True)
                 if not is_same(one, two)]
        num_ties = sum(is_tie for _, is_tie in lines)
        return report.model_copy(update={
            "identical": len(requests) - len(lines), "explained": num_ties, "passed": len(lines) == num_ties,
            "divergences": tuple(line for line, _ in lines), "reasons": (
                f"{len(requests) - len(lines)} of {len(requests)} answers at temperature 1 are identical with and "
                "without the drafter, from the same seeds",
                *([f"{len(lines) - num_ties} differ by more than a rounding tie"] if len(lines) > num_ties else []))})
    first, second = ([[answer.token_ids for request, answer in zip(requests, answers, strict=True)
                       if request.turn == turn] for turn in turns] for answers in (plain, drafted))
    greedy = [alone[turn].token_ids[:requests[0].max_new_tokens] for turn in turns]
    p_value, power = two_samples.p_value(first, second), two_samples.power(first, greedy)
    passed = p_value > two_samples.LEVEL
    return report.model_copy(update={"p_value": p_value, "power": power, "passed": passed, "reasons": (
        f"{len(requests)} answers at temperature 1 with the drafter and as many without "
        f"{'may come from one distribution' if passed else 'do NOT come from one distribution'}: p = {p_value:.2g}, "
        f"level {two_samples.LEVEL:g}",
        f"if half of the answers were greedy, this would be found with probability {power:.2f}")})


def sampled_not_compared(kind: EngineKind, why: str) -> SampledParityReport:
    """The report of an engine that cannot be compared."""
    return SampledParityReport(engine=kind, prompts=0, answers=0, passed=None,
                               reasons=(f"sampled answers were not compared: {why}",))
