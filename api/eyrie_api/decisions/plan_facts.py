"""Sizes of the target and of the data, which a plan depends on together with the job's document. Pure;
`submission.target_facts` reads them from files.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from eyrie_api.decisions.sweep import Candidate
from eyrie_api.decisions.training_cost import TrainedDrafter
from eyrie_api.v1alpha1.families import FAMILIES, DecoderSizes, DrafterSizes

DEFAULT_AUX_LAYERS = 3
DEFAULT_DRAFT_VOCABULARY = 32_768


@dataclass(frozen=True)
class Experts:
    """The MLPs of a mixture of experts."""

    number: int
    """Per layer."""

    active: int
    """Of them, computed for a token."""

    intermediate_size: int


@dataclass(frozen=True)
class TargetFacts(DecoderSizes):
    """The values of a target's `config.json` that a plan depends on."""

    vocab_size: int
    tie_word_embeddings: bool
    source: str
    """Where the values come from; quoted in the assumptions."""

    dtype: str | None = None
    """Of the stored weights; None: the config does not say."""

    experts: Experts | None = None
    """None: dense."""

    @property
    def parameters(self) -> int:
        """Weights of a pre-norm decoder: embeddings, attention, gated MLPs, norms. Shared experts, dense layers of a
        mixture, and routers are left out."""
        return self._parameters(self.experts.number if self.experts else 1)

    @property
    def active_parameters(self) -> int:
        """Of them, those that compute one token."""
        return self._parameters(self.experts.active if self.experts else 1)

    def _parameters(self, num_mlps: int) -> int:
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        width = self.experts.intermediate_size if self.experts else self.intermediate_size
        layer = (self.attention_parameters(self.hidden_size) + num_mlps * self.mlp_parameters(width)
                 + 2 * self.hidden_size)
        return embeddings + self.num_layers * layer + self.hidden_size

    def drafter_parameters(self, candidate: Candidate) -> int:
        """Trainable weights of a candidate's drafter; norms and biases are left out."""
        return self.trained_drafter(candidate).parameters

    def trained_drafter(self, candidate: Candidate) -> TrainedDrafter:
        """A candidate's drafter, and what its training reads of this target."""
        drafter, row = candidate.drafter, FAMILIES[candidate.drafter.family]
        draft_vocabulary = drafter.draft_vocab_size or min(self.vocab_size, DEFAULT_DRAFT_VOCABULARY)
        return TrainedDrafter(drafter.family, DrafterSizes(
            target=self, output_vocab_size=self.vocab_size if row.whole_vocabulary else draft_vocabulary,
            num_aux_layers=len(drafter.aux_layers or candidate.spec.capture.aux_layers or ()) or DEFAULT_AUX_LAYERS,
            max_draft_tokens=_max_draft_tokens(candidate), hidden_size=drafter.hidden_size,
            intermediate_size=drafter.intermediate_size, num_layers=drafter.num_layers),
            self.vocab_size, self.tie_word_embeddings)

    def training_passes(self, candidate: Candidate) -> float:
        """Passes of one token of the data through the drafter's weights per optimiser step."""
        return FAMILIES[candidate.drafter.family].training_passes(candidate.train, _max_draft_tokens(candidate))


def _max_draft_tokens(candidate: Candidate) -> int:
    return candidate.drafter.max_draft_tokens or candidate.train.ttt_length


@dataclass(frozen=True)
class DataFacts:
    """Number and lengths of the conversations, estimated without reading them all."""

    rows: int | None = None
    """Available, or None when unknown."""

    prompt_tokens: float | None = None
    """Mean per row. None when unknown: the spec's limit is used then, an upper bound."""

    answer_tokens: float | None = None
    source: str = "limits of the spec (an upper bound)"
    source_rows: Mapping[str, int] | None = None
    """Available in each source by name, where all are known."""

    present: int = 0
    """Answers that the earlier job `present_in` has generated for the same data, and that this one takes over."""

    present_in: str = ""
    states_present: int = 0
    """Rows whose hidden states the earlier job `states_in` has captured in the format `states_as`, as far as the
    documents of both jobs say."""

    states_in: str = ""
    states_as: tuple[str, str] | None = None
    """Codec, and what is stored of the final state."""
