"""The table of drafter families: one row holds all that is known of a family without loading torch.

To add a family, write its module (`eyrie_workers.drafters.family` describes what it must define) and add a row to
`FAMILIES`. The contract (`Family`), `eyrie plan`, `eyrie compare`, the launch line of SGLang and the registry of the
workers all read this table; none of them names a family. Tests add a family with `monkeypatch.setitem(FAMILIES, ..)`.

The size functions count trainable weights without norms and biases; tests compare them with the drafters' modules. The
texts are printed by `eyrie plan`. They state what follows from the architecture; the speed-ups are those of the
committed comparison on the shipped target (docs/results/comparison.md). Which family is fastest for another target is
what its leaderboard measures.

    H hidden, D draft vocabulary, V vocabulary, A aux layers, S tokens looked ahead, M rank of a Markov head
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, WithJsonSchema

from eyrie_api.contract.engine import Verification
from eyrie_api.contract.training import TrainSpec

TargetStates = Literal["fused", "final", "none"]
"""Hidden states of the target that a family reads: several layers fused; the one after the final norm; none."""

SGLangAlgorithm = Literal["EAGLE", "EAGLE3", "STANDALONE", "DFLASH", "DSPARK"]
"""`--speculative-algorithm` of drafters with weights."""

PUBLISHED_STEPS = 4
"""Depth of the chains with which families were compared on the published model."""

BLOCK_ALGORITHMS: tuple[SGLangAlgorithm, ...] = ("DFLASH", "DSPARK")
"""SGLang's algorithms for drafters of blocks: chains of one block, on GPUs alone."""

VERIFICATIONS: dict[SGLangAlgorithm, tuple[Verification, ...]] = {
    "EAGLE": ("target", "rejection", "block"), "EAGLE3": ("target", "rejection", "block"), "STANDALONE": ("target",),
    "DFLASH": ("target",), "DSPARK": ("target", "block")}
"""What SGLang 0.5.23 can verify the drafts of an algorithm with (`DraftTreeShape.verification`; its
arg_groups/speculative_hook.py). DFLASH takes `block` too, which changes nothing: its proposals are not drawn."""

_EAGLE3_VARIANTS = ("fc_norm", "norm_before_fc", "norm_output", "sliding_window")
_DSPARK_VARIANTS = ("markov_head", "markov_rank")
VARIANT_FIELDS = (*_EAGLE3_VARIANTS, *_DSPARK_VARIANTS, "causal_head")
"""Fields of `DrafterSpec` that select a variant of a family (`DrafterFamily.variant_fields`)."""


@dataclass(frozen=True)
class DecoderSizes:
    """Sizes of a dense decoder with gated MLPs."""

    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def attention_parameters(self, input_size: int) -> int:
        """Weights of q, k, v and the output projection, for inputs of `input_size`."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return input_size * (queries + 2 * keys) + queries * self.hidden_size

    def mlp_parameters(self, intermediate_size: int) -> int:
        """Weights of gate, up and down projection."""
        return 3 * self.hidden_size * intermediate_size

    @property
    def key_values(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class DrafterSizes:
    """What the number of a drafter's weights depends on. None: the spec leaves the value to the family."""

    target: DecoderSizes
    output_vocab_size: int
    """V for families that predict over the whole vocabulary, else D."""

    num_aux_layers: int
    max_draft_tokens: int
    hidden_size: int | None
    intermediate_size: int | None
    num_layers: int | None
    markov_rank: int | None = None
    causal_head: str | None = None

    @property
    def mlp_parameters(self) -> int:
        """Weights of one MLP at the target's width."""
        return self.target.mlp_parameters(self.intermediate_size or self.target.intermediate_size)


@dataclass(frozen=True)
class DrafterFamily:
    """One row: a family of drafters."""

    name: str
    """`DrafterSpec.family`."""

    title: str
    """Name in text."""

    module: str
    """Import path of the implementation; its `FAMILY` is an `eyrie_workers.drafters.family.FamilyImplementation`."""

    architecture: str
    """`architectures[0]` in the config.json of its checkpoints; identifies the family of a directory. With
    `of_target` it is the target's."""

    target_states: TargetStates
    whole_vocabulary: bool
    """It predicts over the target's whole vocabulary, whatever `draft_vocab_size` is."""

    parameters: Callable[[DrafterSizes], int]
    """Trainable weights; norms and biases are left out."""

    best_for: str
    drafting_cost: str
    quickstart_speedup: float | None
    """Speed-up of its best form on the shipped target: greedy, one request at a time, after 100 s of training. None:
    not measured; `eyrie compare` trains such a family where it is named."""

    published_tau: float | None = None
    """tau on the published model after eight minutes of training on two cores: greedy, chains of `PUBLISHED_STEPS`,
    mean of the seeds (docs/results/published.md). `sweep.families: [auto]` predicts with it. None: experimental, or
    not measured."""

    drafting_weights: Callable[[DrafterSizes, int], int] | None = None
    """Weights that drafting a chain of so many tokens reads; None: all trained ones for each token."""

    read_architectures: tuple[str, ...] = ()
    """Of further checkpoints of the family: other heads on the same block."""

    sglang_algorithm: SGLangAlgorithm | None = None
    """None: SGLang 0.5.23 cannot serve it."""

    variant_fields: tuple[str, ...] = ()
    """Fields of `DrafterSpec` that select a variant of this family; other families refuse them."""

    step_cost_known: bool = False
    """Whether `planning.training_cost` describes its training step."""

    continues: bool = False
    """Whether training can continue from a drafter of it (`drafter.init_from`)."""

    of_target: bool = False
    """Its drafter is a part of the target's own checkpoint, from which training starts. Its checkpoints name the
    target's architecture, and are recognised by a mark (`planning.sglang_support.holds_mtp_layers`)."""

    training_passes: Callable[[TrainSpec, int], float] = lambda _train, _max_draft_tokens: 1.0
    """Passes of one token of the data through the weights per optimizer step, from the spec and S."""

    @property
    def drafts_blocks(self) -> bool:
        """In SGLang a draft is one block, at most as long as those that its drafter was trained with."""
        return self.sglang_algorithm in BLOCK_ALGORITHMS


def _eagle3_parameters(sizes: DrafterSizes) -> int:
    # Fusion, one layer with doubled input, a reduced output matrix.
    hidden, target = sizes.target.hidden_size, sizes.target
    return (sizes.num_aux_layers * hidden**2 + target.attention_parameters(2 * hidden) + sizes.mlp_parameters
            + sizes.output_vocab_size * hidden)


def _eagle3_training_passes(train: TrainSpec, _max_draft_tokens: int) -> float:
    # Step 0 at all positions; the later steps at a fraction of them, after the single-step phase.
    return 1.0 + (1.0 - train.single_step_ratio) * train.unrolled_fraction * (train.ttt_length - 1)


def _eagle1_parameters(sizes: DrafterSizes) -> int:
    # Embedding and output matrix are the target's.
    hidden, target = sizes.target.hidden_size, sizes.target
    return 2 * hidden**2 + target.attention_parameters(hidden) + sizes.mlp_parameters


def _medusa_parameters(sizes: DrafterSizes) -> int:
    # A square matrix and an output matrix for each head.
    hidden = sizes.target.hidden_size
    return sizes.max_draft_tokens * (hidden**2 + sizes.output_vocab_size * hidden)


def _hydra_parameters(sizes: DrafterSizes) -> int:
    # Two matrices from (2 + s) H for head s, one output matrix for all heads.
    hidden = sizes.target.hidden_size
    return 2 * hidden**2 * sum(range(2, 2 + sizes.max_draft_tokens)) + sizes.output_vocab_size * hidden


def _standalone_width(sizes: DrafterSizes) -> int:
    # By default half the target's.
    target = sizes.target
    return sizes.hidden_size or max(1, round(target.hidden_size / 2 / target.head_dim)) * target.head_dim


def _standalone_parameters(sizes: DrafterSizes) -> int:
    # A decoder of its own width with embedding and output matrix; by default two layers.
    target, hidden = sizes.target, sizes.target.hidden_size
    width = _standalone_width(sizes)
    inner = sizes.intermediate_size or target.intermediate_size * width // hidden
    layer = target.attention_parameters(width) * width // hidden + 3 * width * inner
    return (sizes.num_layers or 2) * layer + 2 * sizes.output_vocab_size * width


def _dflash_parameters(sizes: DrafterSizes) -> int:
    # Fusion, and a few layers at the target's width.
    target, hidden = sizes.target, sizes.target.hidden_size
    return (sizes.num_aux_layers * hidden**2 + _dflash_layers(sizes) * (
        target.attention_parameters(hidden) + sizes.mlp_parameters) + _causal_parameters(sizes))


def domino_sizes(hidden_size: int) -> tuple[int, int]:
    """Size of the GRU's state, and rank, of a Domino head: SpecForge's 1024 and 256 of a width of 4096, of a small
    target less."""
    return max(1, hidden_size // 4), max(1, min(256, hidden_size // 2))


def convolution_sizes(hidden_size: int) -> tuple[int, int]:
    """Taps, and channels of a group, of DFlash2's convolutions: the published 2 and 16, or what divides the width."""
    return 2, math.gcd(16, hidden_size)


def lilicorr_width(hidden_size: int) -> int:
    """Width of LiLiCorr's head: the recipe's 1024 of a width of 4096, for eight attention heads."""
    return max(1, hidden_size // 32) * 8


def _causal_parameters(sizes: DrafterSizes) -> int:
    hidden, (state, rank) = sizes.target.hidden_size, domino_sizes(sizes.target.hidden_size)
    selector = (2 * sizes.output_vocab_size + hidden) * rank
    if sizes.causal_head == "domino":
        return (hidden + state) * (3 * state + rank) + rank * sizes.output_vocab_size
    if sizes.causal_head == "lilicorr":
        # Three projections from the block, one of the features, two layers, the input of the factors, three of them.
        width = lilicorr_width(hidden)
        return 3 * hidden * width + (1 + 2 * 8 + 3 + 3) * width**2
    return {"selector": selector, "dflash2": selector + _convolution_parameters(sizes)}.get(sizes.causal_head or "", 0)


def _dflash_layers(sizes: DrafterSizes) -> int:
    return sizes.num_layers or max(1, min(5, sizes.target.num_layers // 6))


def _convolution_parameters(sizes: DrafterSizes) -> int:
    hidden, (taps, group) = sizes.target.hidden_size, convolution_sizes(sizes.target.hidden_size)
    return 2 * _dflash_layers(sizes) * 2 * taps * hidden * (hidden // group + 1)


def _output_matrix(sizes: DrafterSizes) -> int:
    return sizes.output_vocab_size * sizes.target.hidden_size


def _dflash_drafting_weights(sizes: DrafterSizes, depth: int) -> int:
    # The layers once; Domino's head for every token but the first, LiLiCorr's once; of a selector the rows of
    # candidates, which are few.
    body = _dflash_parameters(sizes) + _output_matrix(sizes) - _causal_parameters(sizes)
    reads = {"domino": (depth - 1) * _causal_parameters(sizes), "lilicorr": _causal_parameters(sizes),
             "dflash2": _convolution_parameters(sizes)}
    return body + reads.get(sizes.causal_head or "", 0)


def _dflash_training_passes(train: TrainSpec, max_draft_tokens: int) -> float:
    return train.unrolled_fraction * (1 + max_draft_tokens)  # one block at a fraction of the positions


def markov_rank(hidden_size: int, chosen: int | None) -> int:
    """M: the paper's 256, of a small target half its width."""
    return chosen or max(1, min(256, hidden_size // 2))


def _markov_matrix(sizes: DrafterSizes) -> int:
    return sizes.output_vocab_size * markov_rank(sizes.target.hidden_size, sizes.markov_rank)


def _dspark_parameters(sizes: DrafterSizes) -> int:
    # DFlash's layers, and two matrices of [V, M]; a gate or a recurrent state is small next to them.
    return _dflash_parameters(sizes) + 2 * _markov_matrix(sizes)


def _dspark_training_passes(train: TrainSpec, max_draft_tokens: int) -> float:
    return train.unrolled_fraction * max_draft_tokens


_ROWS = (
    DrafterFamily(
        name="eagle3", title="EAGLE-3", module="eyrie_workers.drafters.eagle3.family", continues=True,
        architecture="LlamaForCausalLMEagle3", target_states="fused", whole_vocabulary=False,
        parameters=_eagle3_parameters, training_passes=_eagle3_training_passes, step_cost_known=True,
        sglang_algorithm="EAGLE3",
        variant_fields=_EAGLE3_VARIANTS,
        best_for="large targets and much data: it reads three layers of the target and is trained on its own errors, "
                 "so each second of training covers fewer tokens",
        drafting_cost="one small layer per token", quickstart_speedup=1.98, published_tau=1.52),
    DrafterFamily(
        name="eagle1", title="EAGLE-1/2", module="eyrie_workers.drafters.eagle1", continues=True,
        architecture="LlamaForCausalLMEagle", target_states="final", whole_vocabulary=True,
        parameters=_eagle1_parameters, sglang_algorithm="EAGLE",
        drafting_weights=lambda sizes, depth: depth * (_eagle1_parameters(sizes) + _output_matrix(sizes)),
        best_for="little data or short training, and engines without EAGLE-3; with a dynamic tree it is EAGLE-2",
        drafting_cost="one small layer per token, over the whole vocabulary", quickstart_speedup=2.41,
        published_tau=1.51),
    DrafterFamily(
        name="mtp", title="MTP layer", module="eyrie_workers.drafters.mtp", of_target=True,
        architecture="MiMoForCausalLM", target_states="final", whole_vocabulary=True,
        parameters=_eagle1_parameters, training_passes=_eagle3_training_passes, sglang_algorithm="EAGLE",
        drafting_weights=lambda sizes, depth: depth * (_eagle1_parameters(sizes) + _output_matrix(sizes)),
        best_for="targets that were published with a layer for multi-token prediction: it is trained on, unrolled, on "
                 "the target's own answers",
        drafting_cost="one layer of the target per token, over the whole vocabulary", quickstart_speedup=None),
    DrafterFamily(
        name="medusa", title="Medusa", module="eyrie_workers.drafters.medusa",
        architecture="MedusaModel", target_states="final", whole_vocabulary=False,
        parameters=_medusa_parameters, drafting_weights=lambda sizes, _depth: _medusa_parameters(sizes),
        best_for="shallow drafts at the lowest drafting cost: nothing is computed between two depths",
        drafting_cost="one pass for all depths", quickstart_speedup=2.33, published_tau=1.38),
    DrafterFamily(
        name="hydra", title="Hydra", module="eyrie_workers.drafters.hydra",
        architecture="EyrieHydra", target_states="final", whole_vocabulary=False,
        parameters=_hydra_parameters,
        drafting_weights=lambda sizes, depth: (2 * sizes.target.hidden_size**2 * sum(range(2, 2 + depth))
                                               + depth * _output_matrix(sizes)),
        best_for="targets on which Medusa's heads contradict one another: each head reads the tokens before its own",
        drafting_cost="one perceptron per token", quickstart_speedup=2.43, published_tau=1.56),
    DrafterFamily(
        name="standalone", title="Standalone", module="eyrie_workers.drafters.standalone", continues=True,
        architecture="LlamaForCausalLM", target_states="none", whole_vocabulary=True,
        parameters=_standalone_parameters, sglang_algorithm="STANDALONE",
        # Of the embedding only single rows are read.
        drafting_weights=lambda sizes, depth: depth * (
            _standalone_parameters(sizes) - sizes.output_vocab_size * _standalone_width(sizes)),
        best_for="targets of which only the text is available; it stores least, and has its own embedding and output "
                 "matrix",
        drafting_cost="a small language model per token", quickstart_speedup=1.80, published_tau=1.31),
    DrafterFamily(
        name="dflash", title="DFlash", module="eyrie_workers.drafters.dflash", continues=True,
        architecture="DFlashDraftModel", read_architectures=("DFlash2DraftModel", "LiLiCorrDraftModel"),
        target_states="fused", whole_vocabulary=True,
        parameters=_dflash_parameters, training_passes=_dflash_training_passes, sglang_algorithm="DFLASH",
        drafting_weights=_dflash_drafting_weights,
        variant_fields=("causal_head",),
        best_for="long drafts on hardware with spare arithmetic: a whole block in one pass",
        drafting_cost="one pass of a few layers per block", quickstart_speedup=1.61, published_tau=1.22),
    DrafterFamily(
        name="dspark", title="DSpark", module="eyrie_workers.drafters.dspark", continues=True,
        architecture="DSparkDraftModel", target_states="fused", whole_vocabulary=True,
        parameters=_dspark_parameters, training_passes=_dspark_training_passes, sglang_algorithm="DSPARK",
        variant_fields=_DSPARK_VARIANTS,
        drafting_weights=lambda sizes, depth: (_dflash_parameters(sizes) + _output_matrix(sizes)
                                               + depth * _markov_matrix(sizes)),
        best_for="targets on which DFlash's later tokens contradict its earlier ones: each reads the one before it "
                 "(experimental)",
        drafting_cost="one pass of a few layers per block, and a small product per token", quickstart_speedup=None),
)

FAMILIES: dict[str, DrafterFamily] = {row.name: row for row in _ROWS}
"""The families that are trained, by name. EAGLE-2 is eagle1's checkpoint in a dynamic tree; DDTree dflash's in a
tree."""


def known_family(name: str) -> str:
    """The name itself. Raises ValueError, which pydantic reports with the field, for one that is not in the table."""
    if name not in FAMILIES:
        raise ValueError(f"{name!r} is not a drafter family: use one of {', '.join(FAMILIES)}")
    return name


Family = Annotated[str, AfterValidator(known_family), WithJsonSchema({"type": "string", "enum": [*FAMILIES]})]
"""Name of a row of `FAMILIES`."""


AUTO = "auto"
"""In `sweep.families`: those that the plan predicts near the fastest (`planning.likely_families`)."""

SweptFamily = Annotated[str, AfterValidator(lambda name: name if name == AUTO else known_family(name)),
                        WithJsonSchema({"type": "string", "enum": [*FAMILIES, AUTO]})]


def sglang_families() -> tuple[str, ...]:
    """The families that SGLang 0.5.23 can serve."""
    return tuple(name for name, row in FAMILIES.items() if row.sglang_algorithm is not None)
