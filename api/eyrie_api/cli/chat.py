"""Chat with an endpoint: the text as it arrives, then its speed and the acceptance length.

Uses OpenAI's streaming API, so that any endpoint will do; acceptance is shown where the server reports it (Eyrie,
SGLang). Tokens per second are the answer's tokens over the whole time that the client waited, prompt included.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.text import Text

from eyrie_api.cli.verbs import Screen, printable
from eyrie_api.contract.status import Endpoint
from eyrie_api.errors import EyrieError, InvalidInput, NotFound, Transient

QUESTION = "Explain electricity in three sentences."
"""Of examples."""

_CONNECT_S = 5.0
# Between two chunks; a cold engine or a long line of waiting requests may need it.
_READ_S = 300.0


class AnswerRefused(InvalidInput):
    """The endpoint answered with an error."""


@dataclass(frozen=True)
class ChatSettings:
    """Parameters of the requests."""

    base_url: str
    model: str
    temperature: float = 0.7
    max_tokens: int | None = None
    seed: int | None = None


@dataclass
class Reply:
    """One answer and what is known about it."""

    content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float | None = None
    total_s: float = 0.0
    acceptance_length: float | None = None
    verify_rounds: int | None = None

    @property
    def tokens_per_s(self) -> float:
        """Answer tokens over the whole wait."""
        return self.completion_tokens / self.total_s if self.total_s > 0 else 0.0

    def footer(self) -> str:
        """Speed and acceptance in a line."""
        words = f"{self.completion_tokens} tokens in {self.total_s:.2f} s, {self.tokens_per_s:.0f} tok/s"
        if self.first_token_s is not None:
            words += f", first after {self.first_token_s:.2f} s"
        if self.acceptance_length is not None and self.verify_rounds:
            words += f", acceptance length {self.acceptance_length:.2f} over {self.verify_rounds} rounds"
        if self.finish_reason == "length":
            words += ", cut at max tokens"
        return words

    def as_json(self) -> dict[str, Any]:
        return {
            "content": self.content, "tool_calls": self.tool_calls, "finish_reason": self.finish_reason,
            "usage": {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens},
            "tokens_per_s": self.tokens_per_s, "first_token_s": self.first_token_s, "total_s": self.total_s,
            "acceptance_length": self.acceptance_length, "verify_rounds": self.verify_rounds,
        }


def curl_line(url: str, model: str) -> str:
    """A curl command for the endpoint. Pure."""
    body = json.dumps({"model": model, "temperature": 0, "messages": [{"role": "user", "content": QUESTION}]})
    return f"curl {url}/chat/completions -H 'content-type: application/json' -d '{body}'"


def pick_endpoint(endpoints: tuple[Endpoint, ...], name: str | None) -> Endpoint:
    """The endpoint to talk to: the named one, else the only one that is on. Raises NotFound."""
    if name is not None:
        named = next((e for e in endpoints if e.name == name), None)
        if named is None:
            raise NotFound(f"no endpoint named {name!r}", "eyrie endpoints lists them")
        if named.desired == "off" or named.url is None:
            raise NotFound(f"endpoint {name!r} is off", f"eyrie endpoints on {name}")
        return named
    usable = [e for e in endpoints if e.desired == "on" and e.url is not None]
    if not usable:
        raise NotFound("no endpoint is on", "train a drafter first (eyrie train ...), or eyrie endpoints on <name>")
    if len(usable) > 1:
        raise InvalidInput(f"{len(usable)} endpoints are on: {', '.join(e.name for e in usable)}",
                           "name one with --endpoint")
    return usable[0]


def ask(settings: ChatSettings, messages: list[dict[str, Any]], on_text: Callable[[str], None]) -> Reply:
    """Send the conversation, call `on_text` with each piece, return the whole. Raises AnswerRefused or Transient."""
    body: dict[str, Any] = {"model": settings.model, "messages": messages, "temperature": settings.temperature,
                            "stream": True, "stream_options": {"include_usage": True},
                            "return_spec_tokens_details": True}
    for name, value in (("max_tokens", settings.max_tokens), ("seed", settings.seed)):
        if value is not None:
            body[name] = value
    began = time.monotonic()
    reply = Reply()
    url = f"{settings.base_url.rstrip('/')}/chat/completions"
    try:
        with httpx.stream("POST", url, json=body, timeout=httpx.Timeout(_READ_S, connect=_CONNECT_S)) as answer:
            if answer.status_code != 200:
                answer.read()
                try:
                    error = answer.json().get("error", {})
                except (ValueError, AttributeError):
                    error = {}
                message = error.get("message") or answer.text[:200] or answer.reason_phrase
                hint = error.get("hint") or "correct the request"
                if answer.status_code in (429, 503):
                    raise Transient(f"the endpoint is not ready: {message}", hint)
                raise AnswerRefused(
                    f"the endpoint answered {answer.status_code}: {message.removesuffix('; ' + hint)}", hint)
            for line in answer.iter_lines():
                data = line.removeprefix("data:").strip()
                if line.startswith("data:") and data != "[DONE]":
                    _take(reply, json.loads(data), on_text, time.monotonic() - began)
    except httpx.HTTPError as error:
        raise Transient(f"{url}: {type(error).__name__}: {error}",
                        "eyrie endpoints shows whether it is on; try again in a moment") from error
    reply.total_s = time.monotonic() - began
    return reply


def say(settings: ChatSettings, messages: list[dict[str, Any]], screen: Screen) -> Reply:
    """Ask and show the answer as it comes, its speed on the side; one JSON document on a screen for machines."""

    def on_text(text: str) -> None:
        if not screen.as_json:
            screen.out.file.write(printable(text))
            screen.out.file.flush()

    reply = ask(settings, messages, on_text)
    if screen.as_json:
        screen.show(reply.as_json(), "")
        return reply
    if reply.content and not reply.content.endswith("\n"):
        screen.out.file.write("\n")
    for call in reply.tool_calls:
        screen.out.print(Text(printable(f"{call['function']['name']}({call['function']['arguments']})"), "magenta"))
    screen.err.print(Text(reply.footer(), "dim"), soft_wrap=True)
    return reply


def talk(settings: ChatSettings, opening: list[dict[str, Any]], screen: Screen) -> None:
    """A conversation until /exit or the end of input. A failed answer is reported and may be requested again."""
    screen.note(f"{settings.model} at {settings.base_url}; /reset starts a new conversation, /exit or Ctrl-D ends")
    messages = list(opening)
    while True:
        try:
            line = screen.out.input(Text("> ", "bold cyan")).strip()
        except EOFError:
            return
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            messages = list(opening)
            continue
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        try:
            reply = say(settings, messages, screen)
        except EyrieError as error:
            messages.pop()
            screen.error(error)
            continue
        answer: dict[str, Any] = {"role": "assistant", "content": reply.content}
        messages.append(answer | ({"tool_calls": reply.tool_calls} if reply.tool_calls else {}))


def _take(reply: Reply, chunk: dict[str, Any], on_text: Callable[[str], None], now_s: float) -> None:
    if "error" in chunk:
        raise AnswerRefused(str(chunk["error"].get("message")), chunk["error"].get("hint") or "send it again")
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        if text := delta.get("content"):
            if reply.first_token_s is None:
                reply.first_token_s = now_s
            reply.content += text
            on_text(text)
        for call in delta.get("tool_calls") or ():
            reply.tool_calls.append(call)
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
    if usage := chunk.get("usage"):
        reply.prompt_tokens, reply.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    if details := (chunk.get("sglext") or {}).get("spec_tokens_details"):
        reply.acceptance_length = details.get("spec_accept_length")
        reply.verify_rounds = details.get("spec_verify_ct")
