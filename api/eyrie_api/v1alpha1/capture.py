"""Which hidden states of the target are recorded for training, and how they are stored."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from eyrie_api.v1alpha1.codecs import Codec, FinalState
from eyrie_api.v1alpha1.model import Frozen


class CaptureSpec(Frozen):
    """Which hidden states are recorded, and how."""

    aux_layers: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(None, min_length=1, max_length=16)
    """`hidden_states` indices, ascending. Default: low, middle, high; moved onto full-attention layers on hybrids."""

    codec: Codec = "int8"
    """How states are stored. docs/results/hidden_states.md has the acceptance length of each, with its spread."""

    final_state: FinalState = "keep"
    """`topk` stores the target's opinion (`final_top_k` logits and the mass of the rest) instead of its final state."""

    final_top_k: int = Field(16, ge=1, le=256)
    draft_vocab_size: int | None = Field(None, ge=8, le=4_194_304)
    """The draft vocabulary of `final_state: topk`, built from the answers: drafters trained from the store have it.
    Default: the whole vocabulary up to 32768."""

    max_bytes: int | None = Field(None, ge=2**16)
    """Disk for the store. `codec` is then the best that may be taken: where it does not fit, the best that does is."""

    shard_size_bytes: int = Field(256 * 2**20, ge=2**16, le=2**40)
    max_length: int = Field(2048, ge=16, le=1_048_576)
    """Longer rows are cut at the end of this many tokens."""

    batch_tokens: int = Field(4096, ge=64)
    """Tokens per target forward pass."""

    feed: Literal["store", "stream"] = "store"
    """`stream`: no state is written. Training computes them with the target as it goes, just ahead of the drafter, in
    every epoch anew: for disks that hold no store, and data that is seen once or twice."""

    stream_buffer_bytes: int = Field(512 * 2**20, ge=2**16)
    """Of `feed: stream`: states held in memory, those being learnt from included. A batch that is larger is computed
    when it is asked for, and none ahead of it."""

    probe_layers: bool = False
    """Before states are captured, rank the target's layers by what a linear reading of each foresees of the target's
    next choices. Told in an event beside the layers chosen; `aux_layers` chooses."""

    check_rows: int = Field(2, ge=0, le=64)
    """Rows whose states are compared with `transformers` before anything is stored. It loads the target once more, and
    lets it go before our own is loaded; 0 leaves the check out."""

    @model_validator(mode="after")
    def _vocabulary_has_a_use(self) -> "CaptureSpec":
        if self.draft_vocab_size is not None and self.final_state != "topk":
            raise ValueError("capture.draft_vocab_size is given with capture.final_state 'keep', which serves any "
                             "draft vocabulary: set drafter.draft_vocab_size, or capture.final_state to 'topk'")
        return self
