"""Incremental detokenisation: token ids in, text out, without releasing text that a later token could change.

Text is held back in three cases. A character whose bytes are split over tokens: the tokenizer decodes an incomplete
character to U+FFFD, so U+FFFD at the end waits. A stop string that may have begun: the longest suffix that is a prefix
of a stop string waits. A tool call that may have begun: when the request has tools, text from the first bracket on
waits until the response is complete, because only then can a tool call be distinguished from content.

Decoding uses a window: the tokens since the last release, with the few before them that a tokenizer needs to place
spaces correctly (the method of text-generation servers: decode(window) minus decode(known part of the window)). Tokens
are pushed one by one even when a round of speculation yields several, so that the position where a stop string ends the
response, and with it the usage count, is the same with and without a drafter.
"""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
# The first character of a tool call in all supported chat templates: <tool_call>, [TOOL_CALLS], {"name": ...}, <|...|>.
_CALL_OPENERS = "<[{"


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
        keep = max(_overlap(pending, stop) for stop in self._stops)
        self._held = pending[len(pending) - keep:]
        return pending[:len(pending) - keep]

    def flush(self) -> str:
        """The text still held back, at the end of the response."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class ResponseText:
    """The text of one response: detokenisation, then stop strings, then holding back tool calls."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = (), *,
                 hold_tool_calls: bool = False) -> None:
        self._characters = Detokenizer(decode)
        self._stops = StopMatcher(stops)
        self._hold_tool_calls = hold_tool_calls
        self._text = ""
        self._released = 0
        self.num_decoded = 0
        """Characters decoded so far, those of a stop string included."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found, which ends the response."""
        return self._stops.matched

    @property
    def text(self) -> str:
        """The text so far, without the stop string and without what the detokenizer and the matcher hold back."""
        return self._text

    @property
    def held_back(self) -> str:
        """Text not released because it may be a tool call; it is content if it turns out not to be one."""
        return self._text[self._released:]

    @property
    def released(self) -> str:
        """The text released so far."""
        return self._text[:self._released]

    def push(self, token_id: int) -> str:
        """Append a token of the text; return the text to send."""
        characters = self._characters.push(token_id)
        self.num_decoded += len(characters)
        return self._release(self._stops.push(characters))

    def finish(self) -> str:
        """End of the tokens: return the remaining text to send. A possible tool call stays in `held_back`."""
        rest = self._stops.push(self._characters.flush())
        return self._release(rest + self._stops.flush())

    def _release(self, text: str) -> str:
        self._text += text
        end = len(self._text)
        if self._hold_tool_calls:
            openers = [at for opener in _CALL_OPENERS if (at := self._text.find(opener)) >= 0]
            end = min(openers, default=end)
        released, self._released = self._text[self._released:end], max(end, self._released)
        return released
