"""No text is released that a later token could change, and all of it is released at the end."""

from hypothesis import given
from hypothesis import strategies as st

from eyrie_workers.engines.responses import Detokenizer, ResponseText, StopMatcher


def decode_bytes(ids: list[int]) -> str:
    """A byte-level tokenizer: token i is byte i."""
    return bytes(ids).decode("utf-8", errors="replace")


def decode_with_byte_fallback(ids: list[int]) -> str:
    """As SentencePiece's byte fallback: a run of bytes that is not whole decodes to U+FFFD as a whole."""
    try:
        return bytes(ids).decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(ids)


def pushed(text: str, stops: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(character) for character in text)
    return shown + matcher.flush(), matcher.matched


@given(st.text(max_size=40))
def test_the_bytes_of_any_text_are_detokenised_to_that_text(text: str) -> None:
    for decode in (decode_bytes, decode_with_byte_fallback):
        detokenizer = Detokenizer(decode)
        pieces = [detokenizer.push(byte) for byte in text.encode()]
        assert "".join(pieces) + detokenizer.flush() == text


@given(st.text(alphabet="a\u00e9\u20ac\U0001f600", max_size=20))
def test_no_incomplete_character_is_released(text: str) -> None:
    detokenizer = Detokenizer(decode_bytes)
    for byte in text.encode():
        assert "\ufffd" not in detokenizer.push(byte)


@given(st.lists(st.integers(0, 255), max_size=40))
def test_any_bytes_are_detokenised_as_if_decoded_at_once(ids: list[int]) -> None:
    detokenizer = Detokenizer(decode_bytes)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == decode_bytes(ids)


def test_a_character_split_over_tokens_is_held_back_until_complete() -> None:
    detokenizer = Detokenizer(decode_bytes)
    assert [detokenizer.push(byte) for byte in "x\u20acy".encode()] == ["x", "", "", "\u20ac", "y"]


@given(st.text(alphabet="abc", max_size=30), st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4))
def test_text_is_cut_before_the_first_stop_string_however_it_is_split(text: str, stops: list[str]) -> None:
    shown, matched = pushed(text, stops)
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    if not ends:
        assert (shown, matched) == (text, False)
        return
    seen = text[:min(ends)]  # a stop is noticed with its last character; of those ending there, the longest cuts most
    assert matched
    assert shown == seen[:min(at for stop in stops if (at := seen.find(stop)) >= 0)]


def test_a_suffix_that_may_begin_a_stop_string_is_held_back_and_released_if_it_does_not() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in ("one E", "N", "X two")] == ["one ", "", "ENX two"]


def test_text_after_a_bracket_is_held_back_if_the_request_has_tools() -> None:
    text = ResponseText(decode_bytes, hold_tool_calls=True)
    shown = "".join(text.push(byte) for byte in b'I look it up. {"name": "f"}') + text.finish()
    assert shown == "I look it up. "
    assert text.held_back == '{"name": "f"}'
    assert text.text == shown + text.held_back


def test_without_tools_a_bracket_is_text_like_any_other() -> None:
    text = ResponseText(decode_bytes)
    assert "".join(text.push(byte) for byte in b"a[0]") + text.finish() == "a[0]"
