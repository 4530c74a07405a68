"""How captured hidden states may be stored, and what a token then weighs: what the plan and the store both know. Pure.

A captured token stores `A` aux hidden states. A final state is stored only where it teaches: before an answer token,
because the target's opinion on a prompt token is never asked. Token id and loss mask are 5 bytes more.

| codec    | an aux state of H values                              | the final state            |
|----------|-------------------------------------------------------|----------------------------|
| float32  | 4 H                                                   | float32                    |
| bfloat16 | 2 H                                                   | bfloat16                   |
| int8     | H + 2: one bfloat16 scale per token and layer         | int8, one scale per token  |
| fp8      | H + 2: e4m3, one bfloat16 scale per token and layer   | fp8, one scale per token   |
| int4     | 18 per 32 values: 16 levels, one bfloat16 scale       | int8, one scale per token  |

`final_state: topk` replaces the final state by the target's opinion itself: the k most likely tokens of the draft
vocabulary with their logits, and the mass of all others. Its size does not grow with H.

`choose` takes the best way that fits a budget of bytes. The order follows measurements
(docs/results/hidden_states.md).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Codec = Literal["float32", "bfloat16", "int8", "fp8", "int4"]
FinalState = Literal["keep", "topk"]

BEST_FIRST: tuple[Codec, ...] = ("float32", "bfloat16", "int8", "fp8", "int4")
BLOCK_VALUES = 32
"""Values of one int4 block. Small, so that an outlier spoils few neighbours; its scale then costs half a bit each."""

ID_AND_MASK_BYTES = 4 + 1
SCALE_BYTES = 2
NARROW_VOCABULARY = 32_768
"""Draft ids up to this many are stored in two bytes, else in four."""

_FINAL_CODEC: dict[Codec, Codec] = {"int4": "int8"}
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "int8": 1, "fp8": 1}


@dataclass(frozen=True)
class StoredAs:
    """One way to store states."""

    codec: Codec
    final_state: FinalState = "keep"
    top_k: int = 16
    draft_vocab_size: int = NARROW_VOCABULARY

    @property
    def name(self) -> str:
        """As people and reports say it."""
        return self.codec if self.final_state == "keep" else f"{self.codec}+top{self.top_k}"

    def token_bytes(self, num_aux_layers: int, hidden_size: int) -> int:
        """Of any captured token: its aux states, id and mask."""
        return num_aux_layers * vector_bytes(self.codec, hidden_size) + ID_AND_MASK_BYTES

    def supervised_token_bytes(self, hidden_size: int) -> int:
        """What an answer token adds: the final state, or the opinion, that it is compared with."""
        if self.final_state == "keep":
            return vector_bytes(final_codec(self.codec), hidden_size)
        return topk_bytes(self.top_k, self.draft_vocab_size)

    def bytes_of(self, tokens: int, answer_tokens: int, num_aux_layers: int, hidden_size: int) -> int:
        """A whole store, but for its headers (some 100 bytes per row)."""
        return (tokens * self.token_bytes(num_aux_layers, hidden_size)
                + answer_tokens * self.supervised_token_bytes(hidden_size))


def final_codec(codec: Codec) -> Codec:
    """What the final state is stored in: its error is the logits' error, so 4 bits are not enough."""
    return _FINAL_CODEC.get(codec, codec)


def vector_bytes(codec: Codec, hidden_size: int) -> int:
    """One state of `hidden_size` values with its scales."""
    if codec == "int4":
        return -(-hidden_size // BLOCK_VALUES) * (BLOCK_VALUES // 2 + SCALE_BYTES)
    return hidden_size * _ITEMSIZE[codec] + (SCALE_BYTES if codec in ("int8", "fp8") else 0)


def topk_bytes(top_k: int, draft_vocab_size: int) -> int:
    """One opinion: k ids, k float16 logits, the float32 masses of the rest and of all, the target's first choice."""
    id_bytes = 2 if draft_vocab_size <= NARROW_VOCABULARY else 4
    return top_k * (id_bytes + 2) + 8 + id_bytes


def choose(wanted: StoredAs, max_bytes: int | None, tokens: int, answer_tokens: int, num_aux_layers: int,
           hidden_size: int) -> StoredAs | None:
    """`wanted` where no budget is given or it fits; else the best of what is smaller and fits; None if nothing does."""
    if max_bytes is None:
        return wanted
    fitting = (way for way in candidates(wanted)
               if way.bytes_of(tokens, answer_tokens, num_aux_layers, hidden_size) <= max_bytes)
    return next(fitting, None)


def candidates(wanted: StoredAs) -> Iterator[StoredAs]:
    """`wanted`, then the lesser codecs, with the final state as wanted: an opinion is about one draft vocabulary, which
    is not for a budget to decide."""
    for codec in BEST_FIRST[BEST_FIRST.index(wanted.codec):]:
        yield StoredAs(codec, wanted.final_state, wanted.top_k, wanted.draft_vocab_size)
