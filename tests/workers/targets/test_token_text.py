"""Text and bytes of single tokens: no byte of a text is lost, whatever the kind of tokenizer."""


import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyrie_workers.targets.templates import ChatTokenizer, TokenText, token_text
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(tiny_target(tmp_path_factory.mktemp("target") / "t"))


@given(text=st.text(max_size=30))
def test_the_bytes_of_a_byte_level_tokenizers_tokens_are_those_of_the_text(
        text: str, tokenizer: ChatTokenizer) -> None:
    tokens = [tokenizer.token_text(token) for token in tokenizer.encode(text)]
    assert b"".join(token.bytes or b"" for token in tokens) == text.encode()
    assert all(token.is_whole for token in tokens if "\ufffd" not in token.text)


def test_every_byte_alone_is_a_token_with_that_byte(tokenizer: ChatTokenizer) -> None:
    found = {tokenizer.token_text(token).bytes for token in range(320)}
    assert found >= {bytes([byte]) for byte in range(256)}


def test_a_special_token_has_its_name_and_an_id_without_token_has_no_text(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.token_text(2) == TokenText("<|im_end|>", b"<|im_end|>")
    assert tokenizer.token_text(5000) == TokenText("", b"")


@pytest.mark.parametrize(("decoded", "piece", "text", "content"), [
    ("Hello", "\u2581Hello", " Hello", b" Hello"),  # sentencepiece drops the space before a text's first token
    (" Hello", "\u2581Hello", " Hello", b" Hello"),
    ("\ufffd", "<0xE2>", "\ufffd", b"\xe2"),
    ("\n", "<0x0A>", "\n", b"\n"),
    (" \ufffd", "\u0120\u00e2", " \ufffd", b" \xe2"),
    ("\ufffd", "\u00ef\u00bf\u00bd", "\ufffd", b"\xef\xbf\xbd"),  # the character U+FFFD itself
    ("\ufffd", "\u2603\ufffd", "\ufffd", None),
    ("\ufffd", None, "\ufffd", None),
])
def test_a_token_is_spelled_by_its_text_and_its_piece(decoded: str, piece: str | None, text: str,
                                                      content: bytes | None) -> None:
    assert token_text(decoded, piece) == TokenText(text, content)


def test_only_the_text_of_whole_characters_is_all_of_a_token() -> None:
    assert token_text("\ufffd", "\u00ef\u00bf\u00bd").is_whole
    assert not token_text("\ufffd", "<0xE2>").is_whole
    assert not token_text("\ufffd", None).is_whole
