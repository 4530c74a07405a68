"""Token ids in, text out, one token at a time: nothing shown that a later token could take back.

Three things hold text back. A character whose bytes are split over tokens: the tokenizer decodes the first half to
U+FFFD, so a tail of U+FFFD waits. A stop string that may have begun: the longest tail of the text
that is a prefix of a stop waits for the next token. And a tool call that may have begun: when tools were offered,
text from the first bracket on waits until the answer is whole, because only then can it be told from content.

Decoding works on a window: the tokens since the last release, with the few before them that a tokenizer needs to
place spaces rightly (the scheme of text-generation servers: decode(window) minus decode(known part of the window)).
Tokens are pushed one by one even when a round of speculation yields several, so that the place where a stop string
ends the answer, and so the usage count, is the same with and without a drafter.
"""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
# Every chat template known to us opens a call with one of these: <tool_call>, [TOOL_CALLS], {"name": ...}, <|...|>.
_CALL_OPENERS = "<[{"


class Detokenizer:
    """Decodes a growing list of token ids; releases only whole characters."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._window = 0  # index of the first token still decoded
        self._settled = 0  # tokens before this index ended on a whole character
        self._shown = 0  # characters of the window's text already released

    def push(self, token_id: int) -> str:
        """Take one more token; return the text that is now certain, possibly empty."""
        self._ids.append(token_id)
        text = self._decode(self._ids[self._window:])
        # However long the run of U+FFFD is: decoders with byte fallback turn a whole run of bytes to U+FFFD while
        # its last character is incomplete, and back to text when it is complete.
        certain = text.rstrip(REPLACEMENT)
        fresh, self._shown = certain[self._shown:], max(self._shown, len(certain))
        if certain == text:
            self._window, self._settled = self._settled, len(self._ids)
            self._shown = len(self._decode(self._ids[self._window:]))
        return fresh

    def flush(self) -> str:
        """The text of what was held back; bytes that never became a character stay U+FFFD."""
        text = self._decode(self._ids[self._window:])
        fresh, self._shown = text[self._shown:], len(text)
        return fresh


class StopMatcher:
    """Cuts text before the first of some stop strings, however it is split over pushes."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Take more text; return what certainly precedes every stop. After a match nothing more is released."""
        if self.matched:
            return ""
        if not self._stops:
            return text
        pending = self._held + text
        found = [at for stop in self._stops if (at := pending.find(stop)) >= 0]
        if found:
            self.matched, self._held = True, ""
            return pending[:min(found)]
        keep = max(_overlap(pending, stop) for stop in self._stops)
        self._held = pending[len(pending) - keep:]
        return pending[:len(pending) - keep]

    def flush(self) -> str:
        """What was held back, once no more text can come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class ResponseText:
    """One answer's text as it grows: characters, then stops, then the gate before tool calls."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = (), *,
                 gate_calls: bool = False) -> None:
        self._characters = Detokenizer(decode)
        self._stops = StopMatcher(stops)
        self._gate = gate_calls
        self._whole = ""
        self._shown = 0

    @property
    def stopped(self) -> bool:
        """A stop string has been met: the answer is over."""
        return self._stops.matched

    @property
    def whole(self) -> str:
        """All text so far, stops cut off, held text not included."""
        return self._whole

    @property
    def unshown(self) -> str:
        """Text behind the gate: to be shown as content if it turns out to hold no tool call."""
        return self._whole[self._shown:]

    @property
    def shown(self) -> str:
        """Text already released."""
        return self._whole[:self._shown]

    def push(self, token_id: int) -> str:
        """Take one token that belongs to the text; return what may be shown."""
        return self._show(self._stops.push(self._characters.push(token_id)))

    def finish(self) -> str:
        """No more tokens: return the rest that may be shown. Text behind the gate stays in `unshown`."""
        rest = self._stops.push(self._characters.flush())
        return self._show(rest + self._stops.flush())

    def _show(self, text: str) -> str:
        self._whole += text
        end = len(self._whole)
        if self._gate:
            openers = [at for opener in _CALL_OPENERS if (at := self._whole.find(opener)) >= 0]
            end = min(openers, default=end)
        shown, self._shown = self._whole[self._shown:end], max(end, self._shown)
        return shown
