"""The architecture of one drafter: its family and its sizes."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from eyrie_api.contract.families import FAMILIES, Family
from eyrie_api.contract.model import Frozen

MarkovHeadKind = Literal["vanilla", "gated", "rnn"]
CausalHead = Literal["domino", "selector", "dflash2", "lilicorr"]


class PublishedDrafter(Frozen):
    """A drafter from elsewhere."""

    path: str
    """Directory or Hub id."""

    revision: str | None = None
    """Of a Hub id."""


class DrafterSpec(Frozen):
    """The shape of the drafter."""

    family: Family = "eagle3"
    """What kind of drafter; `sweep.families` trains several."""

    init_from: str | None = Field(None, min_length=1, max_length=4096)
    """Directory or Hub id of a drafter of this family whose weights training continues from, or `job:ID` for the best
    checkpoint of a job of the same project, stored as that checkpoint's directory. The drafter's sizes, layers and
    draft vocabulary are kept; fields of this section that are set must agree with it."""

    init_revision: str | None = Field(None, min_length=1, max_length=256)
    """Revision of `init_from`, where that is a Hub id."""

    intermediate_size: int | None = Field(None, ge=8, le=1_048_576)
    """MLP width; default: the target's; for `standalone`, in proportion to its width."""

    hidden_size: int | None = Field(None, ge=8, le=65_536)
    """Width of a `standalone` drafter; default: the family's choice. The others have their target's."""

    num_layers: int | None = Field(None, ge=1, le=64)
    """Decoder layers of `standalone`, `dflash` and `dspark`; default: the family's choice. eagle3, eagle1 and mtp
    have one."""

    max_draft_tokens: int | None = Field(None, ge=1, le=16)
    """How far `medusa`, `hydra`, `dflash` and `dspark` can look ahead: their heads, or the tokens that their block
    proposes. Default: train.ttt_length. The other families have no such limit."""

    num_attention_heads: int | None = Field(None, ge=1, le=1024)
    """Default: the target's."""

    aux_layers: tuple[Annotated[int, Field(ge=0, le=1000)], ...] | None = Field(None, min_length=2, max_length=16)
    """`hidden_states` indices that eagle3, dflash and dspark fuse, ascending. As an axis of a sweep it compares choices
    of layers: the store then holds those of all candidates. Default: capture.aux_layers."""

    draft_vocab_size: int | None = Field(None, ge=8, le=4_194_304)
    """Reduced output vocabulary, built from the answers. Default: the whole vocabulary up to 4096; of a larger one, the
    tokens most often produced, at most 32768: as many as pay, by coverage of unseen answers and size of the target."""

    max_position_embeddings: int | None = Field(None, ge=16, le=2**24)
    """Default: the target's. Engines refuse a drafter with less context than they serve."""

    fc_norm: bool = False
    """EAGLE-3.1: normalise each aux state before they are fused."""

    norm_before_fc: bool = False
    """Normalise the concatenated aux states before they are fused (one norm over all of them)."""

    norm_output: bool = False
    """EAGLE-3.1: feed back the state after the final norm instead of before it."""

    sliding_window: int | None = Field(None, ge=8, le=1_048_576)
    """The drafter attends to this many latest positions; trained and served alike. Default: all."""

    markov_head: MarkovHeadKind | None = None
    """How `dspark` reads the token before: its row of a matrix (`vanilla`, the default), the row with a gate, or a
    recurrent state over the block."""

    markov_rank: int | None = Field(None, ge=1, le=4096)
    """Width of that row. Default: 256, of a small target half its width."""

    causal_head: CausalHead | None = None
    """What of `dflash` reads the drafted tokens of a block, so that later ones agree with earlier ones (experimental):
    `domino`, a GRU and a correction of low rank; `selector`, DFlash2's choice among the likeliest tokens of each
    position; `dflash2`, the same with its convolutions within the block; `lilicorr`, a transformer that compares the
    likeliest tokens of all positions. Default: nothing, each is a marginal."""

    @property
    def head(self) -> PublishedDrafter | None:
        """The drafter that training continues from."""
        return None if self.init_from is None else PublishedDrafter(path=self.init_from, revision=self.init_revision)

    @model_validator(mode="after")
    def _fields_agree(self) -> "DrafterSpec":
        if self.init_revision is not None and self.init_from is None:
            raise ValueError(f"drafter.init_revision is {self.init_revision!r} without a drafter: set "
                             "drafter.init_from, or leave it out")
        if FAMILIES[self.family].of_target:
            for field in ("intermediate_size", "hidden_size", "num_layers", "num_attention_heads"):
                if (value := getattr(self, field)) is not None:
                    raise ValueError(f"drafter.{field} is {value}, and family {self.family} trains the target's own "
                                     "layer, which has the target's sizes: leave it out, or train another family")
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("drafter.fc_norm and drafter.norm_before_fc are both true: no engine applies both; "
                             "choose fc_norm (EAGLE-3.1) or norm_before_fc")
        return self
