"""A streamed chat completion, read after it has ended: text, tokens, when they came, what speculation did. Pure.

How many tokens a piece of the stream carried is told by servers in four ways, the best of which is used:

    ids        `choices[].token_ids` in each chunk (vLLM and Eyrie, when asked)
    usage      `usage.completion_tokens` running along (`continuous_usage_stats`: vLLM and SGLang, when asked)
    text       only the total at the end: it is shared out by the length of each chunk's text
    chunks     not even that: one token per chunk that has text, which is too few when tokens come in bundles

Tokens that arrive together share the time since the arrival before them evenly. That is what a reader of the stream
sees on average, and it makes a request's mean inter-token latency (last - first) / (tokens - 1), however tokens were
bundled. The tokens that arrive with the first one have no such time: their gaps are 0.

Speculation is read from `sglext.spec_tokens_details` (SGLang's name, spoken by Eyrie too): index k of the histogram
counts rounds that accepted exactly k draft tokens. SGLang gives all token ids once, at the end, in `sglext.output_ids`.
"""

import hashlib
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from eyrie_workers.load.endpoint_url import RequestFailed

FloatArray = npt.NDArray[np.float64]
TokenCounting = Literal["ids", "usage", "text", "chunks"]

_DONE = "[DONE]"
_SLICE = 32  # events read between two looks at the sockets: about a quarter of a millisecond
# Not whole: SGLang says `abort` for what it gave up, vLLM `abort` or `error`.
_UNFINISHED = ("abort", "error")


@dataclass(frozen=True, eq=False)
class StreamedCompletion:
    """A whole answer."""

    id: str
    tokens: int
    counting: TokenCounting
    first_at: float | None
    """When the first token came; None for an answer without any."""

    gaps_s: FloatArray
    """Inter-token times, one per token after the first."""

    finish_reason: str
    text: str
    """What was said, thought and called, in the order of its kinds; without ids that differ from answer to answer."""

    token_ids: tuple[int, ...] | None
    histogram: tuple[int, ...] | None
    """None when the server tells nothing of its rounds."""

    proposed: bool = False
    """The server said that something was drafted. One that does not say so may have drafted all the same."""

    def digest(self) -> bytes:
        """Equal for equal texts."""
        return hashlib.blake2b(self.text.encode(), digest_size=16).digest()

    def ids_digest(self) -> bytes | None:
        """Equal for equal token ids; None where the server does not give them."""
        if self.token_ids is None:
            return None
        return hashlib.blake2b(np.asarray(self.token_ids, dtype=np.int64).tobytes(), digest_size=16).digest()


def events(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    """Server-sent events with the time at which each was complete. Comments and field names but `data` are skipped.

    Raises RequestFailed for bytes that are not UTF-8 or an event that never ended.
    """
    rest = b""
    data: list[bytes] = []
    for at, piece in pieces:
        lines = (rest + piece).split(b"\n")
        rest = lines.pop()
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield at, _decoded(b"\n".join(data))
                data = []
    if data or rest.strip():
        raise RequestFailed("CutShort", "the stream ended in the middle of an event")


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise RequestFailed("Malformed", "an event of the stream is not UTF-8") from None


@dataclass
class _Seen:
    """What the chunks said, column by column: one entry per chunk that could carry tokens."""

    at: list[float] = field(default_factory=list)
    num_ids: list[int] = field(default_factory=list)
    running_usage: list[int | None] = field(default_factory=list)
    text_lengths: list[int] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=lambda: {"reasoning": [], "content": [], "calls": []})
    ids: list[int] = field(default_factory=list)
    last_ids: list[int] | None = None
    id: str = ""
    total: int | None = None
    finish_reason: str | None = None
    histogram: tuple[int, ...] | None = None
    proposed: bool = False


def read_stream_in_slices(pieces: Sequence[tuple[float, bytes]]) -> Generator[None, None, StreamedCompletion]:
    """Read the answer of a stream that has ended, a slice of its events at a time: other streams come in between.

    Returns the answer. Raises RequestFailed when it is not a whole chat completion.
    """
    seen = _Seen()
    done = False
    for number, (at, data) in enumerate(events(pieces), start=1):
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
            _take(seen, at, chunk)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            raise RequestFailed("Malformed", f"an event is not a chat completion chunk: {data[:80]!r}") from None
    if seen.finish_reason is None:
        raise RequestFailed("CutShort", "the stream ended without a finish reason" if done or seen.at
                             else "the stream holds no answer")
    if seen.finish_reason in _UNFINISHED:
        raise RequestFailed("Aborted", f"the server ended the answer with finish reason {seen.finish_reason!r}")
    return _settled(seen)


def read_stream(pieces: Sequence[tuple[float, bytes]]) -> StreamedCompletion:
    """The same in one go."""
    steps = read_stream_in_slices(pieces)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast(StreamedCompletion, end.value)


def _take(seen: _Seen, at: float, chunk: Mapping[str, Any]) -> None:
    error = chunk.get("error")
    if error is not None or chunk.get("object") == "error":
        said = error.get("message") if isinstance(error, Mapping) else error or chunk.get("message")
        raise RequestFailed("ErrorInStream", f"the server reported an error in the stream: {str(said)[:200]}")
    seen.id = seen.id or str(chunk.get("id") or "")
    usage = chunk.get("usage")
    running = None if usage is None else int(usage["completion_tokens"])
    if running is not None:
        seen.total = running
    _take_extension(seen, chunk.get("sglext"))
    for choice in chunk["choices"]:
        _take_choice(seen, at, choice, running)


def _take_choice(seen: _Seen, at: float, choice: Mapping[str, Any], running: int | None) -> None:
    delta = choice.get("delta") or {}
    ids = choice.get("token_ids") or ()
    length = 0
    for kind, said in (("reasoning", delta.get("reasoning_content") or delta.get("reasoning")),
                       ("content", delta.get("content"))):
        if said:
            seen.texts[kind].append(said)
            length += len(said)
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        said = (function.get("name") or "") + (function.get("arguments") or "")
        seen.texts["calls"].append(said)
        length += len(said)
    seen.ids += map(int, ids)
    finish = choice.get("finish_reason")
    if finish is not None:
        seen.finish_reason = str(finish)
    if length or ids or running is not None or finish is not None:
        seen.at.append(at)
        seen.num_ids.append(len(ids))
        seen.running_usage.append(running)
        seen.text_lengths.append(length)


def _take_extension(seen: _Seen, extension: Mapping[str, Any] | None) -> None:
    if not extension:
        return
    details = extension.get("spec_tokens_details")
    if details:
        seen.histogram = tuple(int(count) for count in details.get("spec_correct_drafts_histogram") or ())
        seen.proposed = bool(details.get("spec_num_proposed_drafts"))
    output_ids = extension.get("output_ids")
    if output_ids:
        seen.last_ids = [int(token) for token in output_ids[0]]


def _settled(seen: _Seen) -> StreamedCompletion:
    counting, counts = _token_counts(seen)
    arrived = counts > 0
    at, counts = np.asarray(seen.at, dtype=np.float64)[arrived], counts[arrived]
    # The finish reason is a chunk of its own, so there is always one; a text may still have no token at all.
    ids = seen.last_ids if seen.last_ids is not None else (seen.ids or None)
    return StreamedCompletion(
        id=seen.id, tokens=int(counts.sum()), counting=counting, first_at=float(at[0]) if len(at) else None,
        gaps_s=_gaps(at, counts), finish_reason=seen.finish_reason or "",
        text="\x1f".join("".join(said) for said in seen.texts.values()),
        token_ids=None if ids is None else tuple(ids), histogram=seen.histogram, proposed=seen.proposed)


def _gaps(at: FloatArray, counts: npt.NDArray[np.int64]) -> FloatArray:
    if len(at) == 0:
        return np.zeros(0)
    later = np.diff(at) / counts[1:]
    return np.concatenate([np.zeros(counts[0] - 1), np.repeat(later, counts[1:])])


def _token_counts(seen: _Seen) -> tuple[TokenCounting, npt.NDArray[np.int64]]:
    """Tokens of every chunk, by the best of the four ways (see the module's essay)."""
    ids = np.asarray(seen.num_ids, dtype=np.int64)
    if seen.ids and (seen.total is None or int(ids.sum()) == seen.total):
        return "ids", ids
    running = [usage for usage in seen.running_usage if usage is not None]
    if seen.total is not None and running:
        reached = np.maximum.accumulate([0 if usage is None else usage for usage in seen.running_usage])
        counts = np.diff(reached, prepend=0)
        # An end token that no chunk counted came with the finish reason.
        counts[-1] += max(0, seen.total - int(reached[-1]))
        return "usage", counts
    lengths = np.asarray(seen.text_lengths, dtype=np.int64)
    if seen.total is not None:
        if lengths.sum() == 0:
            lengths[-1] = 1
        reached = np.round(np.cumsum(lengths) / lengths.sum() * seen.total).astype(np.int64)
        # A chunk with text carried a token at least, so the first one has the first token.
        reached = np.maximum(reached, np.minimum(1, seen.total) * (np.cumsum(lengths) > 0))
        return "text", np.diff(reached, prepend=0)
    return "chunks", (lengths > 0).astype(np.int64)
