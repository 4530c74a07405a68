"""The text and the bytes of single tokens. Pure.

A token need not hold whole characters: byte-level tokenizers (GPT-2 and most since) and the byte fallback of
sentencepiece split a character's UTF-8 bytes over tokens, and each of those decodes to U+FFFD. Its bytes are read from
its piece, the spelling in the vocabulary: a character per byte in byte-level tokenizers, `<0xE2>` in byte fallback.
"""

import re
from dataclasses import dataclass

REPLACEMENT = "\ufffd"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
"""Sentencepiece's spelling of a space."""

# GPT-2's alphabet: printable bytes stand for themselves, the others for the characters from 256 on, in their order.
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + index): byte for index, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))}


@dataclass(frozen=True)
class TokenText:
    """One token, decoded alone."""

    text: str
    """With U+FFFD in place of bytes that are no whole character."""

    bytes: bytes | None
    """None where they are not known."""

    @property
    def is_whole(self) -> bool:
        """Whether the text is all of the token."""
        return self.bytes is not None and self.bytes == self.text.encode()


def token_text(decoded: str, piece: str | None) -> TokenText:
    """A token's text and bytes.

    decoded  the token decoded alone, special tokens included
    piece    its spelling in the vocabulary; None for an id that has none
    """
    # Decoders of sentencepiece drop the space before the first token, which a token decoded alone is.
    if piece is not None and piece.startswith(_SPACE) and not decoded.startswith(" "):
        decoded = " " + decoded
    if REPLACEMENT not in decoded:
        return TokenText(decoded, decoded.encode())
    return TokenText(decoded, _bytes_of(piece) if piece is not None else None)


def _bytes_of(piece: str) -> bytes | None:
    fallback = _BYTE_PIECE.fullmatch(piece)
    if fallback is not None:
        return bytes([int(fallback[1], 16)])
    if all(character in _BYTES for character in piece):
        return bytes(_BYTES[character] for character in piece)
    return None
