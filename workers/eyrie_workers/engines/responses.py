"""Generation requests, and the OpenAI response objects built from the engine's tokens as they arrive.

`ResponseBuilder` turns the engine's progress into what a client receives. The result depends on the tokens alone, not
on how they are grouped: they are appended one by one and cut at the first stop id or stop string, so that text, usage
and finish reason are the same whether a round yields one token or seven. Speculation details count rounds as the engine
ran them, including a round whose last tokens a stop string removed.

Text is released only when no later token can change it (`ResponseText`). It is held back in three cases. A character
whose bytes are split over tokens: the tokenizer decodes an incomplete character to U+FFFD, so U+FFFD at the end waits.
A stop string that may have begun: the longest suffix that is a prefix of a stop string waits. A tool call that may have
begun: when the request has tools, text from the first bracket on waits until the response is complete, because only
then can a tool call be distinguished from content. Decoding uses a window: the tokens since the last release, with the
few before them that a tokenizer needs to place spaces correctly (the method of text-generation servers: decode(window)
minus decode(known part of the window)).

Log probabilities: there is one entry for each token that `usage` counts. That includes tokens which are not part of the
text: the end or stop token, special tokens, which are not shown, and those of a stop string, before which the text is
cut. Joined, the tokens of the entries may therefore be longer than the text. What the values are:
`speculation.verify`. Chat completions give a token's text and its bytes, since a token may hold part of a character.
Completions have no field for bytes; a token that is not whole characters is spelled `bytes:\\xe2\\x82` there, as in
OpenAI's API.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from eyrie_workers.engines.engine_thread import LoadedEngine
from eyrie_workers.engines.openai_api import (
    ChatCompletionRequest,
    CompletionRequest,
    FinishReason,
    ResponseMetadata,
    StreamOptions,
    chunk_choice,
    fit_context,
    spec_tokens_details,
)
from eyrie_workers.speculation.engine import Request, StepOutput
from eyrie_workers.targets.templates import REPLACEMENT, TokenText, parse_answer

# Seeds are 63-bit: what a signed 64-bit field of any client holds.
_SEED_MASK = 2**63 - 1

# The first character of a tool call in all supported chat templates: <tool_call>, [TOOL_CALLS], {"name": ...}, <|...|>.
_CALL_OPENERS = "<[{"

_LEAST_LOGPROB = -9999.0
"""OpenAI's value for a very improbable token. JSON has no infinity, which is what a logit of -inf yields."""


@dataclass(frozen=True)
class LogprobEntry:
    token: TokenText
    logprob: float
    top: tuple[tuple[TokenText, float], ...]
    """The most probable tokens of the position, best first."""

    text_offset: int
    """Characters of the answer before the token. A token within a character has the offset of the character."""


def chat_logprobs(entries: Sequence[LogprobEntry]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion or a chunk."""
    return {"content": [{**_scored(entry.token, entry.logprob),
                         "top_logprobs": [_scored(token, logprob) for token, logprob in entry.top]}
                        for entry in entries], "refusal": None}


def completion_logprobs(entries: Sequence[LogprobEntry]) -> dict[str, Any]:
    """`choices[].logprobs` of a completion or a chunk. `top_logprobs` has the token itself besides the alternatives."""
    by_spelling: list[dict[str, float]] = [{} for _ in entries]
    for entry, logprobs in zip(entries, by_spelling, strict=True):
        # Two ids may share a spelling: the more probable one comes first and stays.
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            logprobs.setdefault(_spelled(token), max(logprob, _LEAST_LOGPROB))
    return {"tokens": [_spelled(entry.token) for entry in entries],
            "token_logprobs": [max(entry.logprob, _LEAST_LOGPROB) for entry in entries],
            "top_logprobs": by_spelling, "text_offset": [entry.text_offset for entry in entries]}


def _scored(token: TokenText, logprob: float) -> dict[str, Any]:
    return {"token": token.text, "logprob": max(logprob, _LEAST_LOGPROB),
            "bytes": None if token.bytes is None else list(token.bytes)}


def _spelled(token: TokenText) -> str:
    if token.is_whole or token.bytes is None:
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)


class Detokenizer:
    """Decodes a growing list of token ids; releases only whole characters."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._window = 0  # index of the first token that is decoded again
        self._settled = 0  # the tokens before this index end with a complete character
        self._released = 0  # characters of the window's text already released

    def push(self, token_id: int) -> str:
        """Append a token; return the text that is now final, possibly empty."""
        self._ids.append(token_id)
        text = self._decode(self._ids[self._window:])
        # All trailing U+FFFD are held back: decoders with byte fallback decode a whole run of bytes to U+FFFD while its
        # last character is incomplete, and to text once it is complete.
        certain = text.rstrip(REPLACEMENT)
        fresh, self._released = certain[self._released:], max(self._released, len(certain))
        if certain == text:
            self._window, self._settled = self._settled, len(self._ids)
            self._released = len(self._decode(self._ids[self._window:]))
        return fresh

    def flush(self) -> str:
        """The text still held back; bytes that do not form a character remain U+FFFD."""
        text = self._decode(self._ids[self._window:])
        fresh, self._released = text[self._released:], len(text)
        return fresh


class StopMatcher:
    """Cuts text before the first stop string, however the text is split over pushes."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Append text; return what precedes every possible stop string. After a match nothing is released."""
        if self.matched:
            return ""
        if not self._stops:
            return text
        pending = self._held + text
        positions = [at for stop in self._stops if (at := pending.find(stop)) >= 0]
        if positions:
            self.matched, self._held = True, ""
            return pending[:min(positions)]
        # The longest proper prefix of a stop string that ends the text may be its beginning.
        keep = max((length for stop in self._stops for length in range(1, min(len(stop), len(pending) + 1))
                    if pending.endswith(stop[:length])), default=0)
        self._held = pending[len(pending) - keep:]
        return pending[:len(pending) - keep]

    def flush(self) -> str:
        """The text still held back, at the end of the response."""
        held, self._held = self._held, ""
        return held


class ResponseText:
    """The text of one response: detokenisation, then stop strings, then holding back tool calls."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = (), *,
                 hold_tool_calls: bool = False) -> None:
        self._characters = Detokenizer(decode)
        self._stops = StopMatcher(stops)
        self._hold_tool_calls = hold_tool_calls
        self.text = ""
        """The text so far, without the stop string and without what the detokenizer and the matcher hold back."""

        self._released = 0
        self.num_decoded = 0
        """Characters decoded so far, those of a stop string included."""

    @property
    def stopped(self) -> bool:
        return self._stops.matched

    @property
    def held_back(self) -> str:
        """Text not released because it may be a tool call; it is content if it turns out not to be one."""
        return self.text[self._released:]

    @property
    def released(self) -> str:
        return self.text[:self._released]

    def push(self, token_id: int) -> str:
        characters = self._characters.push(token_id)
        self.num_decoded += len(characters)
        return self._release(self._stops.push(characters))

    def finish(self) -> str:
        """End of the tokens: return the remaining text to send. A possible tool call stays in `held_back`."""
        rest = self._stops.push(self._characters.flush())
        return self._release(rest + self._stops.flush())

    def _release(self, text: str) -> str:
        self.text += text
        end = len(self.text)
        if self._hold_tool_calls:
            openers = [at for opener in _CALL_OPENERS if (at := self.text.find(opener)) >= 0]
            end = min(openers, default=end)
        released, self._released = self.text[self._released:end], max(end, self._released)
        return released


@dataclass(frozen=True)
class DecodingRequest:
    """A request, and what the engine decodes for it: the prompt rendered and every default resolved."""

    body: ChatCompletionRequest | CompletionRequest
    engine_request: Request


def build_generation_request(body: ChatCompletionRequest | CompletionRequest, request_id: str,
                             loaded: LoadedEngine) -> DecodingRequest:
    """Render the prompt and resolve the defaults. Raises ContextTooLong."""
    if isinstance(body, ChatCompletionRequest):
        prompt_ids = loaded.tokenizer.render(body.messages, body.offered_tools, variables=body.chat_template_kwargs)
    else:
        prompt = body.prompt[0] if isinstance(body.prompt, list) and isinstance(body.prompt[0], str) else body.prompt
        prompt_ids = loaded.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
    seed = secrets.randbits(63) if body.seed is None else body.seed & _SEED_MASK
    request = Request(
        id=request_id, prompt_ids=tuple(prompt_ids),
        max_new_tokens=fit_context(len(prompt_ids), body.token_limit, loaded.engine.max_length),
        sampling=body.sampling(), seed=seed,
        stop_ids=(*(() if body.ignore_eos else loaded.tokenizer.eos_ids), *(body.stop_token_ids or ())),
        top_logprobs=body.num_top_logprobs, draft=body.eyrie is None or body.eyrie.drafter,
        trace=body.eyrie is not None and body.eyrie.rounds,
    )
    return DecodingRequest(body, request)


@dataclass
class ResponseBuilder:
    generation: DecodingRequest
    metadata: ResponseMetadata
    decode: Callable[[list[int]], str]
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
        body = self.generation.body
        self._has_tools = isinstance(body, ChatCompletionRequest) and body.offered_tools is not None
        self._options = body.stream_options or StreamOptions()
        self._text = ResponseText(self.decode, body.stops(), hold_tool_calls=self._has_tools)

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
        for traced in progress.rounds:
            accepted, emitted = traced.accepted[:num_left], traced.emitted[:num_left]
            self._rounds.append({
                "nodes": [{"token_id": token, "token": self.token_text(token).text, "parent": parent,
                           "accepted": node in accepted}
                          for node, (token, parent) in enumerate(zip(traced.tokens, traced.parents, strict=True))],
                "tokens": [{"token_id": token, "token": self.token_text(token).text, "drafted": place < len(accepted)}
                           for place, token in enumerate(emitted)]})
        return text

    def _push(self, progress: StepOutput) -> str:
        text = ""
        for place, token in enumerate(progress.token_ids):
            self.token_ids.append(token)
            if progress.logprobs:
                scored = progress.logprobs[place]
                self._logprobs.append(LogprobEntry(
                    self.token_text(token), scored.logprob,
                    tuple((self.token_text(other), logprob) for other, logprob in scored.top),
                    text_offset=self._text.num_decoded))
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

    def usage(self) -> dict[str, int]:
        num_prompt, num_tokens = len(self.generation.engine_request.prompt_ids), len(self.token_ids)
        return {"prompt_tokens": num_prompt, "completion_tokens": num_tokens, "total_tokens": num_prompt + num_tokens}

    def response(self) -> dict[str, Any]:
        """The object of a request without `stream`."""
        message = self._message()
        assert self.finish is not None
        text = {"message": {"role": "assistant", **message}} if self.metadata.chat else {
            "text": message["content"] or ""}
        choice = {"index": 0, **text, "finish_reason": "tool_calls" if message.get("tool_calls") else self.finish,
                  "logprobs": self._logprob_object(0)}
        response = self.metadata.wrap([choice], chunk=False) | {"usage": self.usage()}
        if self.generation.body.return_token_ids:
            choice["token_ids"] = self.token_ids
            response["prompt_token_ids"] = list(self.generation.engine_request.prompt_ids)
        return response | self._extension()

    def first_chunk(self) -> dict[str, Any]:
        """The first chunk of a stream: the role, and the prompt's token ids if requested."""
        chunk = self.metadata.wrap([chunk_choice(self.metadata, text="", role="assistant")], chunk=True)
        if self.generation.body.return_token_ids:
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
        # `parse_answer` strips the content around calls; what was released is a prefix of it, except for spaces.
        remaining = self._text.held_back
        if calls:
            remaining = (message["content"] or "").removeprefix(self._text.released.strip())
        chunks = []
        if remaining or calls:
            choice = chunk_choice(self.metadata, text=remaining or None, tool_calls=calls)
            chunks.append(self._with_usage(self.metadata.wrap([self._with_tokens(choice)], chunk=True)))
        last = self._with_tokens(chunk_choice(self.metadata, reason="tool_calls" if calls else self.finish))
        chunks.append(self._with_usage(self.metadata.wrap([last], chunk=True) | self._extension()))
        if self._options.include_usage:
            chunks.append(self.metadata.wrap([], chunk=True) | {"usage": self.usage()})
        return chunks

    @property
    def has_unsent(self) -> bool:
        """Whether token ids or rounds have to be sent although no text does."""
        return bool(self._rounds) or (
            self.generation.body.return_token_ids and self._reported < len(self.token_ids))

    def _message(self) -> dict[str, Any]:
        text = self._text.text
        if not self._has_tools:
            return {"content": text}
        message = parse_answer(text)
        if not message.get("tool_calls"):
            return {"content": text}
        # Call ids are unique across responses, because the tool results of a later turn refer to them.
        calls = [call | {"id": f"call_{self.metadata.id.rsplit('-', 1)[-1]}_{index}"}
                 for index, call in enumerate(message["tool_calls"])]
        return {"content": message.get("content") or None, "tool_calls": calls}

    def _with_tokens(self, choice: dict[str, Any]) -> dict[str, Any]:
        choice["logprobs"] = self._logprob_object(self._reported)
        if self.generation.body.return_token_ids:
            choice["token_ids"] = self.token_ids[self._reported:]
        self._reported = len(self.token_ids)
        if self._rounds:
            choice["eyrie"] = {"rounds": self._rounds}
            self._rounds = []
        return choice

    def _logprob_object(self, first: int) -> dict[str, Any] | None:
        """The log probabilities from a token on; None when there are none."""
        entries = self._logprobs[first:]
        if not entries:
            return None
        return chat_logprobs(entries) if self.metadata.chat else completion_logprobs(entries)

    def _with_usage(self, chunk: dict[str, Any]) -> dict[str, Any]:
        return chunk | {"usage": self.usage()} if self._options.continuous_usage_stats else chunk

    def _extension(self) -> dict[str, Any]:
        if not self.generation.body.return_spec_tokens_details:
            return {}
        return {"sglext": {"spec_tokens_details": spec_tokens_details(self._histogram, self._drafted)}}
