"""Which hidden states of the target are recorded for training, how they are stored, and what a token then weighs: what
the plan and the store both know. Pure.

A captured token stores `A` aux hidden states. The final state is stored only before answer tokens, since the loss does
not use the target's distribution over prompt tokens. Token id and loss mask are 5 bytes more.

| codec    | an aux state of H values                              | the final state            |
|----------|-------------------------------------------------------|----------------------------|
| float32  | 4 H                                                   | float32                    |
| bfloat16 | 2 H                                                   | bfloat16                   |
| int8     | H + 2: one bfloat16 scale per token and layer         | int8, one scale per token  |
| fp8      | H + 2: e4m3, one bfloat16 scale per token and layer   | fp8, one scale per token   |
| int4     | 18 per 32 values: 16 levels, one bfloat16 scale       | int8, one scale per token  |

`final_state: topk` stores the target's distribution in place of the final state: the k most likely tokens of the draft
vocabulary with their logits, and the mass of all others. Its size does not grow with H.

`choose` takes the best way that fits a budget of bytes. The order follows measurements
(docs/results/hidden_states.md).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from eyrie_api.contract.model import Frozen

Codec = Literal["float32", "bfloat16", "int8", "fp8", "int4"]
FinalState = Literal["keep", "topk"]

BEST_FIRST: tuple[Codec, ...] = ("float32", "bfloat16", "int8", "fp8", "int4")
BLOCK_VALUES = 32
"""Values of one int4 block. Small, so that an outlier affects few neighbours; the scale costs half a bit per value."""

ID_AND_MASK_BYTES = 4 + 1
SCALE_BYTES = 2
NARROW_VOCABULARY = 32_768
"""Draft ids up to this many are stored in two bytes, else in four."""

_FINAL_CODEC: dict[Codec, Codec] = {"int4": "int8"}
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "int8": 1, "fp8": 1}

StateSourceName = Literal["reference", "transformers", "sglang"]
"""What computes the states: Eyrie's own forward pass, the model class of transformers, or a server of SGLang."""

StateSource = Literal["auto", StateSourceName]


class CaptureSpec(Frozen):
    """Which hidden states are recorded, and how."""

    source: StateSource = "auto"
    """What computes the states. `auto`: the reference forward pass for architectures it knows, else transformers; with
    `engine: sglang` that engine for targets that are quantised, or larger than one GPU. `sglang` needs
    `engine: sglang`, whose `tp_size` it uses."""

    aux_layers: tuple[Annotated[int, Field(ge=0, le=1000)], ...] | None = Field(None, min_length=1, max_length=16)
    """`hidden_states` indices, ascending; below the target's number of layers for a drafter that fuses them. Default:
    low, middle, high; moved onto full-attention layers on hybrids."""

    codec: Codec = "int8"
    """How states are stored. docs/results/hidden_states.md has the acceptance length of each, with its spread."""

    final_state: FinalState = "keep"
    """`topk` stores the target's `final_top_k` largest logits and the probability mass of the rest instead of its final
    state."""

    final_top_k: int = Field(16, ge=1, le=256)
    """Logits kept for each position by `final_state: topk`."""

    draft_vocab_size: int | None = Field(None, ge=8, le=4_194_304)
    """Size of the draft vocabulary of `final_state: topk`, built from the answers; all drafters trained from the store
    use it. Default: as that of `drafter.draft_vocab_size`."""

    max_bytes: int | None = Field(None, ge=2**16, le=2**60)
    """Upper bound of the store's size. When `codec` does not fit, the most exact codec that fits is used instead."""

    shard_size_bytes: int = Field(256 * 2**20, ge=2**16, le=2**40)
    """Size of one file of the store: what a killed capture repeats at most."""

    max_length: int = Field(2048, ge=16, le=1_048_576)
    """Longer rows are cut at the end of this many tokens."""

    batch_tokens: int = Field(4096, ge=64, le=2**24)
    """Tokens per target forward pass."""

    mode: Literal["store", "stream"] = "store"
    """`stream`: hidden states are not written to disk. Training computes them with the target just before each batch,
    and again in every epoch: for disks too small for a store, and for one or two epochs."""

    stream_buffer_bytes: int = Field(512 * 2**20, ge=2**16, le=2**44)
    """For `mode: stream`: memory for hidden states, the current batch included. A larger batch is computed on demand,
    without prefetching."""

    probe_layers: bool = False
    """Before capture, rank the target's layers by how well a linear probe of each predicts the target's next tokens.
    The ranking is reported in an event; `aux_layers` still selects the layers."""

    check_rows: int = Field(2, ge=0, le=64)
    """Rows whose hidden states are compared with those of `transformers` before anything is stored. Loads the target
    one more time, and frees it before our own is loaded; 0 skips the check."""

    @model_validator(mode="after")
    def _fields_agree(self) -> "CaptureSpec":
        if self.source == "sglang" and self.mode == "stream":
            raise ValueError("capture.source 'sglang' with capture.mode 'stream': training starts no servers; set mode "
                             "to 'store', or source to 'transformers'")
        if self.draft_vocab_size is not None and self.final_state != "topk":
            raise ValueError("capture.draft_vocab_size is set with capture.final_state 'keep', which supports any "
                             "draft vocabulary: set drafter.draft_vocab_size, or capture.final_state to 'topk'")
        return self


@dataclass(frozen=True)
class StoredAs:
    """One way to store states."""

    codec: Codec
    final_state: FinalState = "keep"
    top_k: int = 16
    draft_vocab_size: int = NARROW_VOCABULARY

    @property
    def name(self) -> str:
        """Name in reports."""
        return self.codec if self.final_state == "keep" else f"{self.codec}+top{self.top_k}"

    def token_bytes(self, num_aux_layers: int, hidden_size: int) -> int:
        """Of any captured token: its aux states, id and mask."""
        return num_aux_layers * vector_bytes(self.codec, hidden_size) + ID_AND_MASK_BYTES

    def supervised_token_bytes(self, hidden_size: int) -> int:
        """What an answer token adds: the final state, or the top-k distribution, that the loss compares with."""
        if self.final_state == "keep":
            return vector_bytes(final_codec(self.codec), hidden_size)
        # k ids, k float16 logits, the float32 masses of the rest and of all, the target's first choice.
        id_bytes = 2 if self.draft_vocab_size <= NARROW_VOCABULARY else 4
        return self.top_k * (id_bytes + 2) + 8 + id_bytes

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


def choose(wanted: StoredAs, max_bytes: int | None, tokens: int, answer_tokens: int, num_aux_layers: int,
           hidden_size: int) -> StoredAs | None:
    """`wanted` where no budget is given or it fits; else the most exact smaller one that fits; None if none does."""
    if max_bytes is None:
        return wanted
    fitting = (way for way in candidates(wanted)
               if way.bytes_of(tokens, answer_tokens, num_aux_layers, hidden_size) <= max_bytes)
    return next(fitting, None)


def candidates(wanted: StoredAs) -> Iterator[StoredAs]:
    """`wanted`, then the smaller codecs, with the same final state: a top-k distribution belongs to one draft
    vocabulary, which a budget must not change."""
    for codec in BEST_FIRST[BEST_FIRST.index(wanted.codec):]:
        yield StoredAs(codec, wanted.final_state, wanted.top_k, wanted.draft_vocab_size)
