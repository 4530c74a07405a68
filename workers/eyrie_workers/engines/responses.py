"""Generation requests, and the OpenAI response objects built from the engine's tokens as they arrive.

`ResponseBuilder` turns the engine's progress into what a client receives. The result depends on the tokens alone, not
on how they are grouped: they are appended one by one and cut at the first stop id or stop string, so that text, usage
and finish reason are the same whether a round yields one token or seven. Speculation details count rounds as the engine
ran them, including a round whose last tokens a stop string removed.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from eyrie_workers.engines.detokenizer import ResponseText
from eyrie_workers.engines.engine_thread import LoadedEngine
from eyrie_workers.engines.openai_api import (
    ChatCompletionRequest,
    CompletionRequest,
    FinishReason,
    ResponseMetadata,
    SpecDetails,
    chunk_choice,
    completion_choice,
    fit_context,
    usage,
)
from eyrie_workers.speculation.engine import Request, StepOutput

# Seeds are 63-bit: what a signed 64-bit field of any client holds.
_SEED_MASK = 2**63 - 1


@dataclass(frozen=True)
class GenerationRequest:
    """A request both APIs boil down to."""

    request: Request
    stops: tuple[str, ...]
    has_tools: bool
    stream: bool
    include_usage: bool
    token_ids: bool
    spec_details: bool


def want(body: ChatCompletionRequest | CompletionRequest, request_id: str, loaded: LoadedEngine) -> GenerationRequest:
    """Render the prompt and settle every number. Raises ContextTooLong."""
    tools = None
    if isinstance(body, ChatCompletionRequest):
        tools = body.offered_tools
        prompt_ids = loaded.tokenizer.render([message.for_template() for message in body.messages], tools)
    else:
        prompt_ids = _prompt_ids(body, loaded)
    seed = secrets.randbits(63) if body.seed is None else body.seed & _SEED_MASK
    request = Request(
        id=request_id, prompt_ids=tuple(prompt_ids),
        max_new_tokens=fit_context(len(prompt_ids), body.most_tokens, loaded.engine.max_length),
        sampling=body.sampling(), seed=seed,
        stop_ids=() if body.ignore_eos else tuple(loaded.tokenizer.eos_ids),
    )
    return GenerationRequest(
        request=request, stops=body.stops(), has_tools=tools is not None, stream=body.stream,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        token_ids=body.return_token_ids, spec_details=body.return_spec_tokens_details,
    )


def _prompt_ids(body: CompletionRequest, loaded: LoadedEngine) -> list[int]:
    prompt = body.prompt[0] if isinstance(body.prompt, list) and isinstance(body.prompt[0], str) else body.prompt
    if isinstance(prompt, str):
        return loaded.tokenizer.encode(prompt)
    return [int(token) for token in prompt]


@dataclass
class ResponseBuilder:
    """One answer as it grows."""

    wanted: GenerationRequest
    head: ResponseMetadata
    decode: Callable[[list[int]], str]
    parse: Callable[[str], dict[str, Any]]
    """Text to an assistant message with `tool_calls`, when it holds any."""

    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    _histogram: list[int] = field(default_factory=list)
    _drafted: int = 0
    _reported: int = 0
    """Token ids already sent in chunks."""

    def __post_init__(self) -> None:
        self._text = ResponseText(self.decode, self.wanted.stops, gate_calls=self.wanted.has_tools)

    def take(self, progress: StepOutput) -> str:
        """Take in what one step yielded; return the text to show. Sets `finish` at the end."""
        for count in progress.accepted:
            self._histogram += [0] * (count + 1 - len(self._histogram))
            self._histogram[count] += 1
        self._drafted += sum(progress.drafted)
        shown = ""
        for token in progress.token_ids:
            self.token_ids.append(token)
            if token in self.wanted.request.stop_ids:
                break  # ends the answer and is not part of its text
            shown += self._text.push(token)
            if self._text.stopped:
                self.finish = "stop"
                return shown
        if progress.finish_reason is not None:
            shown += self._text.finish()
            self.finish = "stop" if self._text.stopped else progress.finish_reason
        return shown

    def details(self) -> SpecDetails:
        """What speculation did so far."""
        return SpecDetails(rounds=sum(self._histogram), proposed=self._drafted, histogram=tuple(self._histogram))

    def usage(self) -> dict[str, int]:
        """Tokens in and out."""
        return usage(len(self.wanted.request.prompt_ids), len(self.token_ids))

    def whole(self) -> dict[str, Any]:
        """The answer object of a request that did not stream."""
        message = self._message()
        assert self.finish is not None
        choice = completion_choice(self.head, message, "tool_calls" if message.get("tool_calls") else self.finish)
        answer = self.head.wrap([choice], chunk=False) | {"usage": self.usage()}
        if self.wanted.token_ids:
            choice["token_ids"] = self.token_ids
            answer["prompt_token_ids"] = list(self.wanted.request.prompt_ids)
        return answer | self._extension()

    def opening(self) -> dict[str, Any]:
        """The first chunk of a stream: the role, and the prompt's token ids when asked for."""
        chunk = self.head.wrap([chunk_choice(self.head, text="", role="assistant")], chunk=True)
        if self.wanted.token_ids:
            chunk["prompt_token_ids"] = list(self.wanted.request.prompt_ids)
        return chunk

    def chunk(self, text: str) -> dict[str, Any]:
        """A chunk with text, and the token ids that came since the last chunk."""
        return self.head.wrap([self._with_ids(chunk_choice(self.head, text=text))], chunk=True)

    def closing(self) -> list[dict[str, Any]]:
        """The last chunks of a stream: what the gate held back, the finish reason, usage when asked for."""
        assert self.finish is not None
        message = self._message()
        calls = message.get("tool_calls") or ()
        # `parse` strips the content around calls; what was shown before the gate is a prefix of it, but for blanks.
        late = (message["content"] or "").removeprefix(self._text.shown.strip()) if calls else self._text.unshown
        chunks = []
        if late or calls:
            choice = chunk_choice(self.head, text=late or None, tool_calls=calls)
            chunks.append(self.head.wrap([self._with_ids(choice)], chunk=True))
        last = self._with_ids(chunk_choice(self.head, reason="tool_calls" if calls else self.finish))
        chunks.append(self.head.wrap([last], chunk=True) | self._extension())
        if self.wanted.include_usage:
            chunks.append(self.head.wrap([], chunk=True) | {"usage": self.usage()})
        return chunks

    @property
    def has_unsent(self) -> bool:
        """Token ids wait to be sent, though no text does."""
        return self.wanted.token_ids and self._reported < len(self.token_ids)

    def _message(self) -> dict[str, Any]:
        text = self._text.whole
        if not self.wanted.has_tools:
            return {"content": text}
        message = self.parse(text)
        if not message.get("tool_calls"):
            return {"content": text}
        # Ids unique among all answers, so that the results of a later turn find their call.
        calls = [call | {"id": f"call_{self.head.id.rsplit('-', 1)[-1]}_{index}"}
                 for index, call in enumerate(message["tool_calls"])]
        return {"content": message.get("content") or None, "tool_calls": calls}

    def _with_ids(self, choice: dict[str, Any]) -> dict[str, Any]:
        if self.wanted.token_ids:
            choice["token_ids"] = self.token_ids[self._reported:]
            self._reported = len(self.token_ids)
        return choice

    def _extension(self) -> dict[str, Any]:
        return {"sglext": {"spec_tokens_details": self.details().as_sglang()}} if self.wanted.spec_details else {}
