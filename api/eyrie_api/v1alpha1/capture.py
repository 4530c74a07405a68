"""Which hidden states of the target are recorded for training, and how they are stored."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from eyrie_api.v1alpha1.codecs import Codec, FinalState
from eyrie_api.v1alpha1.model import Frozen

StateSourceName = Literal["reference", "transformers", "sglang"]
"""What computes the states: Eyrie's own forward pass, the model class of transformers, or a server of SGLang."""

StateSource = Literal["auto", StateSourceName]


class CaptureSpec(Frozen):
    """Which hidden states are recorded, and how."""

    source: StateSource = "auto"
    """What computes the states. `auto`: the reference forward pass for architectures it knows, else transformers; with
    `engine: sglang` that engine for targets that neither can load, quantised or larger than one GPU. `sglang` needs
    `engine: sglang`, whose `tp_size` it uses."""

    aux_layers: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(None, min_length=1, max_length=16)
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
    use it. Default: the whole vocabulary up to 32768."""

    max_bytes: int | None = Field(None, ge=2**16)
    """Upper bound of the store's size. When `codec` does not fit, the most exact codec that fits is used instead."""

    shard_size_bytes: int = Field(256 * 2**20, ge=2**16, le=2**40)
    """Size of one file of the store: what a killed capture repeats at most."""

    max_length: int = Field(2048, ge=16, le=1_048_576)
    """Longer rows are cut at the end of this many tokens."""

    batch_tokens: int = Field(4096, ge=64)
    """Tokens per target forward pass."""

    feed: Literal["store", "stream"] = "store"
    """`stream`: hidden states are not written to disk. Training computes them with the target just before each batch,
    and again in every epoch: for disks too small for a store, and for one or two epochs."""

    stream_buffer_bytes: int = Field(512 * 2**20, ge=2**16)
    """For `feed: stream`: memory for hidden states, the current batch included. A larger batch is computed on demand,
    without prefetching."""

    probe_layers: bool = False
    """Before capture, rank the target's layers by how well a linear probe of each predicts the target's next tokens.
    The ranking is reported in an event; `aux_layers` still selects the layers."""

    check_rows: int = Field(2, ge=0, le=64)
    """Rows whose hidden states are compared with those of `transformers` before anything is stored. Loads the target
    one more time, and frees it before our own is loaded; 0 skips the check."""

    @model_validator(mode="after")
    def _servers_do_not_stream(self) -> "CaptureSpec":
        if self.source == "sglang" and self.feed == "stream":
            raise ValueError("capture.source 'sglang' with capture.feed 'stream': training starts no servers; set feed "
                             "to 'store', or source to 'transformers'")
        return self

    @model_validator(mode="after")
    def _vocabulary_has_a_use(self) -> "CaptureSpec":
        if self.draft_vocab_size is not None and self.final_state != "topk":
            raise ValueError("capture.draft_vocab_size is set with capture.final_state 'keep', which supports any "
                             "draft vocabulary: set drafter.draft_vocab_size, or capture.final_state to 'topk'")
        return self
