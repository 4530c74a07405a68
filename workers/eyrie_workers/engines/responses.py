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
from eyrie_workers.engines.logprobs import LogprobEntry, chat_logprobs, completion_logprobs
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
from eyrie_workers.speculation.logprobs import TokenLogprobs
from eyrie_workers.speculation.requests import TracedRound
from eyrie_workers.targets.token_text import TokenText

# Seeds are 63-bit: what a signed 64-bit field of any client holds.
_SEED_MASK = 2**63 - 1


@dataclass(frozen=True)
class GenerationRequest:
    """A chat completion or completion request, with the prompt rendered and every default resolved."""

    engine_request: Request
    stops: tuple[str, ...]
    has_tools: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    """Usage so far in every chunk."""

    token_ids: bool
    spec_details: bool


def build_generation_request(body: ChatCompletionRequest | CompletionRequest, request_id: str,
                             loaded: LoadedEngine) -> GenerationRequest:
    """Render the prompt and resolve the defaults. Raises ContextTooLong."""
    tools = None
    if isinstance(body, ChatCompletionRequest):
        tools = body.offered_tools
        prompt_ids = loaded.tokenizer.render([message.for_template() for message in body.messages], tools,
                                             variables=body.chat_template_kwargs)
    else:
        prompt_ids = _prompt_ids(body, loaded)
    seed = secrets.randbits(63) if body.seed is None else body.seed & _SEED_MASK
    request = Request(
        id=request_id, prompt_ids=tuple(prompt_ids),
        max_new_tokens=fit_context(len(prompt_ids), body.token_limit, loaded.engine.max_length),
        sampling=body.sampling(), seed=seed,
        stop_ids=(*(() if body.ignore_eos else loaded.tokenizer.eos_ids), *(body.stop_token_ids or ())),
        top_logprobs=body.num_top_logprobs, draft=body.eyrie is None or body.eyrie.drafter,
        trace=body.eyrie is not None and body.eyrie.rounds,
    )
    return GenerationRequest(
        engine_request=request, stops=body.stops(), has_tools=tools is not None, stream=body.stream,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        continuous_usage=body.stream_options is not None and body.stream_options.continuous_usage_stats,
        token_ids=body.return_token_ids, spec_details=body.return_spec_tokens_details,
    )


def _prompt_ids(body: CompletionRequest, loaded: LoadedEngine) -> list[int]:
    prompt = body.prompt[0] if isinstance(body.prompt, list) and isinstance(body.prompt[0], str) else body.prompt
    if isinstance(prompt, str):
        return loaded.tokenizer.encode(prompt)
    return [int(token) for token in prompt]


@dataclass
class ResponseBuilder:
    """One response while its tokens arrive."""

    generation: GenerationRequest
    metadata: ResponseMetadata
    decode: Callable[[list[int]], str]
    parse: Callable[[str], dict[str, Any]]
    """Text to an assistant message, with `tool_calls` when the text contains any."""

    token_text: Callable[[int], TokenText]
    """A token alone, for log probabilities."""

    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    _logprobs: list[LogprobEntry] = field(default_factory=list)
    """Of each of `token_ids`, where they are requested."""

    _rounds: list[dict[str, Any]] = field(default_factory=list)
    """Traced rounds that no chunk has carried yet."""

    _histogram: list[int] = field(default_factory=list)
    _drafted: int = 0
    _reported: int = 0
    """Number of tokens whose ids and log probabilities were sent in chunks."""

    def __post_init__(self) -> None:
        self._text = ResponseText(self.decode, self.generation.stops, hold_tool_calls=self.generation.has_tools)

    def append(self, progress: StepOutput) -> str:
        """Append what one engine step yielded; return the text to send. Sets `finish` at the end of the response."""
        for count in progress.accepted:
            self._histogram += [0] * (count + 1 - len(self._histogram))
            self._histogram[count] += 1
        self._drafted += sum(progress.drafted)
        num_before = len(self.token_ids)
        text = self._push(progress)
        # A stop string cuts a round, whose trace then ends where the answer does.
        num_left = len(self.token_ids) - num_before
        self._rounds += [self._round_object(one, num_left) for one in progress.rounds]
        return text

    def _push(self, progress: StepOutput) -> str:
        text = ""
        for place, token in enumerate(progress.token_ids):
            self.token_ids.append(token)
            if progress.logprobs:
                self._logprobs.append(self._logprob_entry(token, progress.logprobs[place]))
            if token in self.generation.engine_request.stop_ids:
                break  # ends the response and is not part of its text
            text += self._text.push(token)
            if self._text.stopped:
                self.finish = "stop"
                return text
        if progress.finish_reason is not None:
            text += self._text.finish()
            self.finish = "stop" if self._text.stopped else progress.finish_reason
        return text

    def details(self) -> SpecDetails:
        """Statistics of speculation so far."""
        return SpecDetails(rounds=sum(self._histogram), proposed=self._drafted, histogram=tuple(self._histogram))

    def usage(self) -> dict[str, int]:
        """OpenAI's usage object."""
        return usage(len(self.generation.engine_request.prompt_ids), len(self.token_ids))

    def response(self) -> dict[str, Any]:
        """The response object of a request without `stream`."""
        message = self._message()
        assert self.finish is not None
        choice = completion_choice(self.metadata, message, "tool_calls" if message.get("tool_calls") else self.finish)
        response = self.metadata.wrap([choice], chunk=False) | {"usage": self.usage()}
        choice["logprobs"] = self._logprob_object(0)
        if self.generation.token_ids:
            choice["token_ids"] = self.token_ids
            response["prompt_token_ids"] = list(self.generation.engine_request.prompt_ids)
        return response | self._extension()

    def first_chunk(self) -> dict[str, Any]:
        """The first chunk of a stream: the role, and the prompt's token ids if requested."""
        chunk = self.metadata.wrap([chunk_choice(self.metadata, text="", role="assistant")], chunk=True)
        if self.generation.token_ids:
            chunk["prompt_token_ids"] = list(self.generation.engine_request.prompt_ids)
        return self._with_usage(chunk)

    def chunk(self, text: str) -> dict[str, Any]:
        """A chunk with text, and the ids and log probabilities of the tokens appended since the previous chunk."""
        choice = self._with_tokens(chunk_choice(self.metadata, text=text))
        return self._with_usage(self.metadata.wrap([choice], chunk=True))

    def last_chunks(self) -> list[dict[str, Any]]:
        """The last chunks of a stream: text or tool calls held back so far, the finish reason, usage if requested."""
        assert self.finish is not None
        message = self._message()
        calls = message.get("tool_calls") or ()
        # `parse` strips the content around tool calls; what was released already is a prefix of it, except for spaces.
        remaining = self._text.held_back
        if calls:
            remaining = (message["content"] or "").removeprefix(self._text.released.strip())
        chunks = []
        if remaining or calls:
            choice = chunk_choice(self.metadata, text=remaining or None, tool_calls=calls)
            chunks.append(self._with_usage(self.metadata.wrap([self._with_tokens(choice)], chunk=True)))
        last = self._with_tokens(chunk_choice(self.metadata, reason="tool_calls" if calls else self.finish))
        chunks.append(self._with_usage(self.metadata.wrap([last], chunk=True) | self._extension()))
        if self.generation.include_usage:
            chunks.append(self.metadata.wrap([], chunk=True) | {"usage": self.usage()})
        return chunks

    @property
    def has_unsent(self) -> bool:
        """Whether token ids or rounds have to be sent although no text does."""
        return bool(self._rounds) or (self.generation.token_ids and self._reported < len(self.token_ids))

    def _message(self) -> dict[str, Any]:
        text = self._text.text
        if not self.generation.has_tools:
            return {"content": text}
        message = self.parse(text)
        if not message.get("tool_calls"):
            return {"content": text}
        # Call ids are unique across responses, because the tool results of a later turn refer to them.
        calls = [call | {"id": f"call_{self.metadata.id.rsplit('-', 1)[-1]}_{index}"}
                 for index, call in enumerate(message["tool_calls"])]
        return {"content": message.get("content") or None, "tool_calls": calls}

    def _with_tokens(self, choice: dict[str, Any]) -> dict[str, Any]:
        choice["logprobs"] = self._logprob_object(self._reported)
        if self.generation.token_ids:
            choice["token_ids"] = self.token_ids[self._reported:]
        self._reported = len(self.token_ids)
        if self._rounds:
            choice["eyrie"] = {"rounds": self._rounds}
            self._rounds = []
        return choice

    def _round_object(self, traced: TracedRound, num_left: int) -> dict[str, Any]:
        accepted, emitted = traced.accepted[:num_left], traced.emitted[:num_left]
        return {
            "nodes": [{"token_id": token, "token": self.token_text(token).text, "parent": parent,
                       "accepted": node in accepted}
                      for node, (token, parent) in enumerate(zip(traced.tokens, traced.parents, strict=True))],
            "tokens": [{"token_id": token, "token": self.token_text(token).text, "drafted": place < len(accepted)}
                       for place, token in enumerate(emitted)]}

    def _logprob_entry(self, token: int, found: TokenLogprobs) -> LogprobEntry:
        return LogprobEntry(self.token_text(token), found.logprob,
                            tuple((self.token_text(other), logprob) for other, logprob in found.top),
                            text_offset=self._text.num_decoded)

    def _logprob_object(self, first: int) -> dict[str, Any] | None:
        """The log probabilities from a token on; None when there are none."""
        entries = self._logprobs[first:]
        if not entries:
            return None
        return chat_logprobs(entries) if self.metadata.chat else completion_logprobs(entries)

    def _with_usage(self, chunk: dict[str, Any]) -> dict[str, Any]:
        return chunk | {"usage": self.usage()} if self.generation.continuous_usage else chunk

    def _extension(self) -> dict[str, Any]:
        return {"sglext": {"spec_tokens_details": self.details().as_sglang()}} if self.generation.spec_details else {}
