"""Parses a streamed chat completion after it has ended: text, tokens, arrival times, speculation. Pure.

The number of tokens in a chunk is taken from the most precise of four sources:

    ids        `choices[].token_ids` in each chunk (vLLM and Eyrie, on request)
    usage      cumulative `usage.completion_tokens` (`continuous_usage_stats`: vLLM and SGLang, on request)
    text       only the total at the end: distributed over the chunks by the length of their text
    chunks     no count at all: one token per chunk that has text, too few when a chunk has several tokens

Tokens that arrive together share the time since the previous arrival equally. That is the average that a reader of the
stream observes, and it makes a request's mean inter-token latency (last - first) / (tokens - 1), however tokens are
grouped. The tokens that arrive with the first one have no such time: their latency is 0.

Speculation is read from `sglext.spec_tokens_details` (SGLang's extension, also in Eyrie): entry k of the histogram
counts rounds that accepted exactly k draft tokens. SGLang returns all token ids at the end, in `sglext.output_ids`.
"""

import hashlib
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from eyrie_workers.measure.load.http_client import RequestFailed

FloatArray = npt.NDArray[np.float64]
TokenCounting = Literal["ids", "usage", "text", "chunks"]

_DONE = "[DONE]"
_SLICE = 32  # events parsed before the event loop may poll the sockets: about a quarter of a millisecond
# Finish reasons of incomplete completions: `abort` in SGLang, `abort` or `error` in vLLM.
_UNFINISHED = ("abort", "error")


@dataclass(frozen=True, eq=False)
class StreamedCompletion:
    id: str
    tokens: int
    counting: TokenCounting
    first_at: float | None
    """When the first token arrived; None for a completion without tokens."""

    gaps_s: FloatArray
    """Inter-token latencies, one per token after the first."""

    finish_reason: str
    text: str
    """Reasoning, content and tool calls, in this order; without ids, which differ between equal completions."""

    token_ids: tuple[int, ...] | None
    histogram: tuple[int, ...] | None
    """Verify rounds by accepted draft tokens; None when the server does not report it."""

    proposed: bool = False
    """Whether the server reported proposed draft tokens. Servers that do not report them may draft too."""

    def digest(self) -> bytes:
        """Equal for equal texts."""
        return hashlib.blake2b(self.text.encode(), digest_size=16).digest()

    def ids_digest(self) -> bytes | None:
        """Equal for equal token ids; None when the server does not return them."""
        if self.token_ids is None:
            return None
        return hashlib.blake2b(np.asarray(self.token_ids, dtype=np.int64).tobytes(), digest_size=16).digest()


def server_sent_events(chunks: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    """Server-sent events with the time at which each was complete. Comments and fields other than `data` are skipped.
    Raises RequestFailed for bytes that are not UTF-8 or an incomplete event."""
    rest = b""
    data: list[bytes] = []
    for at, data_chunk in chunks:
        lines = (rest + data_chunk).split(b"\n")
        rest = lines.pop()
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                try:
                    yield at, b"\n".join(data).decode()
                except UnicodeDecodeError:
                    raise RequestFailed("Malformed", "an event of the stream is not UTF-8") from None
                data = []
    if data or rest.strip():
        raise RequestFailed("CutShort", "the stream ended in the middle of an event")


@dataclass
class _Columns:
    """The chunks' fields as columns: one entry per chunk that may contain tokens."""

    at: list[float] = field(default_factory=list)
    num_ids: list[int] = field(default_factory=list)
    cumulative_usage: list[int | None] = field(default_factory=list)
    text_lengths: list[int] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=lambda: {"reasoning": [], "content": [], "calls": []})
    ids: list[int] = field(default_factory=list)
    last_ids: list[int] | None = None
    id: str = ""
    total: int | None = None
    finish_reason: str | None = None
    histogram: tuple[int, ...] | None = None
    proposed: bool = False


def read_stream_in_slices(chunks: Sequence[tuple[float, bytes]]) -> Generator[None, None, StreamedCompletion]:
    """Parse a stream that has ended, yielding after every few events so that the caller can serve other streams.

    Returns the completion. Raises RequestFailed when it is not a complete chat completion.
    """
    columns = _Columns()
    done = False
    for number, (at, data) in enumerate(server_sent_events(chunks), start=1):
        if number % _SLICE == 0:
            yield
        if data == _DONE:
            done = True
            break
        try:
            chunk = json.loads(data)
        except ValueError:
            raise RequestFailed("Malformed", f"an event of the stream is not JSON: {data[:80]!r}") from None
        try:
            _add_chunk(columns, at, chunk)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            raise RequestFailed("Malformed", f"an event is not a chat completion chunk: {data[:80]!r}") from None
    if columns.finish_reason is None:
        raise RequestFailed("CutShort", "the stream ended without a finish reason" if done or columns.at
                             else "the stream contains no completion")
    if columns.finish_reason in _UNFINISHED:
        raise RequestFailed("Aborted", f"the server ended the completion with finish reason {columns.finish_reason!r}")
    counting, counts = _token_counts(columns)
    arrived = counts > 0
    times, counts = np.asarray(columns.at, dtype=np.float64)[arrived], counts[arrived]
    # There is at least one chunk, the one with the finish reason, but there may be no token.
    ids = columns.last_ids if columns.last_ids is not None else (columns.ids or None)
    # Tokens that arrive together share the time since the previous arrival; those of the first arrival have none.
    gaps_s = np.zeros(0) if len(times) == 0 else np.concatenate(
        [np.zeros(counts[0] - 1), np.repeat(np.diff(times) / counts[1:], counts[1:])])
    return StreamedCompletion(
        id=columns.id, tokens=int(counts.sum()), counting=counting, first_at=float(times[0]) if len(times) else None,
        gaps_s=gaps_s, finish_reason=columns.finish_reason,
        text="\x1f".join("".join(text) for text in columns.texts.values()),
        token_ids=None if ids is None else tuple(ids), histogram=columns.histogram, proposed=columns.proposed)


def read_stream(chunks: Sequence[tuple[float, bytes]]) -> StreamedCompletion:
    """`read_stream_in_slices` without interruption."""
    steps = read_stream_in_slices(chunks)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast(StreamedCompletion, end.value)


def _add_chunk(columns: _Columns, at: float, chunk: Mapping[str, Any]) -> None:
    error = chunk.get("error")
    if error is not None or chunk.get("object") == "error":
        text = error.get("message") if isinstance(error, Mapping) else error or chunk.get("message")
        raise RequestFailed("ErrorInStream", f"the server reported an error in the stream: {str(text)[:200]}")
    columns.id = columns.id or str(chunk.get("id") or "")
    usage = chunk.get("usage")
    cumulative = None if usage is None else int(usage["completion_tokens"])
    if cumulative is not None:
        columns.total = cumulative
    extension = chunk.get("sglext") or {}
    if details := extension.get("spec_tokens_details"):
        columns.histogram = tuple(int(count) for count in details.get("spec_correct_drafts_histogram") or ())
        columns.proposed = bool(details.get("spec_num_proposed_drafts"))
    if output_ids := extension.get("output_ids"):
        columns.last_ids = [int(token) for token in output_ids[0]]
    for choice in chunk["choices"]:
        _add_choice(columns, at, choice, cumulative)


def _add_choice(columns: _Columns, at: float, choice: Mapping[str, Any], cumulative: int | None) -> None:
    delta = choice.get("delta") or {}
    ids = choice.get("token_ids") or ()
    length = 0
    for kind, text in (("reasoning", delta.get("reasoning_content") or delta.get("reasoning")),
                       ("content", delta.get("content"))):
        if text:
            columns.texts[kind].append(text)
            length += len(text)
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        text = (function.get("name") or "") + (function.get("arguments") or "")
        columns.texts["calls"].append(text)
        length += len(text)
    columns.ids += map(int, ids)
    finish = choice.get("finish_reason")
    if finish is not None:
        columns.finish_reason = str(finish)
    if length or ids or cumulative is not None or finish is not None:
        columns.at.append(at)
        columns.num_ids.append(len(ids))
        columns.cumulative_usage.append(cumulative)
        columns.text_lengths.append(length)


def _token_counts(columns: _Columns) -> tuple[TokenCounting, npt.NDArray[np.int64]]:
    """Tokens of every chunk, by the most precise source available (see the module docstring)."""
    ids = np.asarray(columns.num_ids, dtype=np.int64)
    if columns.ids and (columns.total is None or int(ids.sum()) == columns.total):
        return "ids", ids
    cumulative = [usage for usage in columns.cumulative_usage if usage is not None]
    if columns.total is not None and cumulative:
        reached = np.maximum.accumulate([0 if usage is None else usage for usage in columns.cumulative_usage])
        counts = np.diff(reached, prepend=0)
        # Tokens that no chunk counted, such as the end token, are attributed to the chunk of the finish reason.
        counts[-1] += max(0, columns.total - int(reached[-1]))
        return "usage", counts
    lengths = np.asarray(columns.text_lengths, dtype=np.int64)
    if columns.total is not None:
        if lengths.sum() == 0:
            lengths[-1] = 1
        reached = np.round(np.cumsum(lengths) / lengths.sum() * columns.total).astype(np.int64)
        # A chunk with text contains at least one token, so the first such chunk contains the first token.
        reached = np.maximum(reached, np.minimum(1, columns.total) * (np.cumsum(lengths) > 0))
        return "text", np.diff(reached, prepend=0)
    return "chunks", (lengths > 0).astype(np.int64)
