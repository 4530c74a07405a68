"""Rows, tokens and bytes of a job, and what training takes of a GPU, as its plan estimates them. Pure: sizes of target
and data come from `planning.facts`, which reads them from files.

A captured token stores `A` aux hidden states, an answer token also the final one, in a codec (`contract.capture`):

    bytes = tokens * (A * state + 5) + answer tokens * final state,     state ~ H * bytes per value

The size depends on the target through the hidden size only, not through its number of layers or parameters. The example
of the blog post "Making an EAGLE fly", which stores the final state of every token in two bytes per value, recomputed:
H = 5120, bfloat16, A = 3, 2048 tokens per sample: 4 * 5120 * 2 * 2048 = 83 886 080 bytes, exactly 80 MiB. 500 000
samples are 40 000 000 MiB = 38.147 TiB (41.943 TB), and with the post's 5 % for serialization 40.054 TiB. The post says
"~42 TiB": it divides 40 000 000 MiB by 1 000 000 instead of 1 048 576, which gives "40 TiB", and adding 5 % gives
42.000. The "40 TiB" of its last section is correct. (Ids and masks, which the post omits, add 4.8 GiB. Eyrie's shards
have an overhead of about 100 bytes per row instead of 5 %. In the default codec, with half of the tokens answers, the
same job stores 16.7 TiB.)

Legend: A aux layers, H hidden.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from eyrie_api.contract.capture import ID_AND_MASK_BYTES, StoredAs, choose
from eyrie_api.contract.families import FAMILIES, DecoderSizes, DrafterSizes
from eyrie_api.contract.placement import StageKey
from eyrie_api.contract.resolved import Candidate, ResolvedJob
from eyrie_api.contract.targets import ELEMENT_BYTES
from eyrie_api.planning.row_draw import expected_union, quotas, shares
from eyrie_api.planning.sweep import may_train_together
from eyrie_api.planning.training_cost import (
    TrainedDrafter,
    eagle3_flops,
    expected_work,
    streamed_bytes,
    usable_bytes,
)
from eyrie_api.planning.training_defaults import TrainingOnGpus, gpu_bytes, tokens_per_step, with_tokens

ASSUMED_GPU_BYTES = 80 * 10**9
"""Where the job names no type of GPU."""
DEFAULT_AUX_LAYERS = 3
LEAST_DRAFT_VOCABULARY, DEFAULT_DRAFT_VOCABULARY = 4096, 32_768
"""The whole vocabulary is used up to the first size when the spec gives none; up to the second as much of it as pays.
EAGLE-3's drafters for 128k vocabularies use 32k."""


def largest_draft_vocabulary(vocab_size: int) -> int:
    """The most that a job without a draft vocabulary's size can have."""
    return min(vocab_size, DEFAULT_DRAFT_VOCABULARY)


def expected_draft_vocabulary(vocab_size: int, answer_tokens: int) -> int:
    """The size that such a job is planned to have: the tokens that occur in so many, by Heaps' law with the constants
    of Manning, Raghavan and Schuetze (Introduction to Information Retrieval, 5.1.1). For the 58,000 answer tokens of
    docs/results/published.md it gives 9,500; the job took 8,448."""
    expected = round(44 * math.pow(answer_tokens, 0.49))
    return min(largest_draft_vocabulary(vocab_size), max(LEAST_DRAFT_VOCABULARY, expected))


@dataclass(frozen=True)
class Experts:
    """The MLPs of a mixture of experts."""

    number: int
    """Per layer."""

    active: int
    """Of them, computed for a token."""

    intermediate_size: int
    shared_size: int = 0
    """Width of the MLP that every token passes besides."""

    dense_layers: int = 0
    """Layers with one MLP of the target's `intermediate_size` in place of experts."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): a token's keys and values are one short vector."""

    query_rank: int | None
    """None: queries are not compressed."""

    rank: int
    rotated: int
    """Elements of a key that all heads share."""

    plain: int
    """Elements of each head's key without positions."""

    value: int

    def parameters(self, hidden_size: int, num_heads: int) -> int:
        """Weights of one layer."""
        queries, rank = num_heads * (self.plain + self.rotated), self.query_rank
        return (hidden_size * queries if rank is None else rank * (hidden_size + queries)) + (
            hidden_size * (self.rank + self.rotated)
            + num_heads * (self.rank * (self.plain + self.value) + self.value * hidden_size))


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

    latent: LatentAttention | None = None
    """None: keys and values of every head."""

    block: tuple[int, int] | None = None
    """Rows and columns of the blocks that share a scale (`weight_block_size`); None: not quantised in blocks."""

    quantised_bytes: int | None = None
    """Of the weights as SGLang loads them, where it serves a quantised target."""

    @property
    def parameters(self) -> int:
        """Weights of a pre-norm decoder: embeddings, attention, gated MLPs, routers, norms."""
        return self._parameters(self.experts.number if self.experts else 1)

    @property
    def active_parameters(self) -> int:
        """Of them, those that compute one token."""
        return self._parameters(self.experts.active if self.experts else 1)

    def read_parameters(self, tokens: int) -> int:
        """Of them, those that a pass over so many tokens reads. Of a mixture's experts the mean number that is drawn at
        least once, if every token draws its own and all are equally likely; tokens of one text often share theirs."""
        if self.experts is None:
            return self.parameters
        left_out = (1.0 - self.experts.active / self.experts.number) ** tokens
        return self._parameters(round(self.experts.number * (1.0 - left_out)))

    @property
    def embedding_parameters(self) -> int:
        """Of embedding and output matrix, which no method quantises."""
        return self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)

    @property
    def key_values(self) -> int:
        """Keys and values of one token in all layers."""
        return super().key_values if self.latent is None else self.num_layers * (self.latent.rank + self.latent.rotated)

    def _parameters(self, num_mlps: int) -> int:
        experts, hidden = self.experts, self.hidden_size
        attention = (self.attention_parameters(hidden) if self.latent is None
                     else self.latent.parameters(hidden, self.num_heads))
        mlps = self.num_layers * self.mlp_parameters(self.intermediate_size)
        if experts is not None:
            mixture = (num_mlps * self.mlp_parameters(experts.intermediate_size)
                       + self.mlp_parameters(experts.shared_size) + hidden * experts.number)
            mlps = (experts.dense_layers * self.mlp_parameters(self.intermediate_size)
                    + (self.num_layers - experts.dense_layers) * mixture)
        return self.embedding_parameters + self.num_layers * (attention + 2 * hidden) + mlps + hidden

    def rows_of_a_step(self, num_steps: int) -> float:
        """How many rows of a drafter's output matrix cost as much as the rest of a draft step, in rounds of so many
        steps: a layer, and the step's share of the target's pass. As many weights cost the same: memory bounds the
        decoding of few users."""
        layer = self.attention_parameters(self.hidden_size) + self.mlp_parameters(self.intermediate_size)
        return (layer + self.active_parameters / num_steps) / self.hidden_size

    def trained_drafter(self, candidate: Candidate, aux_layers: Sequence[int] = ()) -> TrainedDrafter:
        """A candidate's drafter, and what its training reads of this target; `aux_layers` are the job's, for a
        candidate that names none. Norms and biases are left out."""
        drafter, row = candidate.drafter, FAMILIES[candidate.drafter.family]
        draft_vocabulary = drafter.draft_vocab_size or largest_draft_vocabulary(self.vocab_size)
        return TrainedDrafter(drafter.family, DrafterSizes(
            target=self, output_vocab_size=self.vocab_size if row.whole_vocabulary else draft_vocabulary,
            num_aux_layers=len(drafter.aux_layers or aux_layers) or DEFAULT_AUX_LAYERS,
            max_draft_tokens=drafter.max_draft_tokens or candidate.train.ttt_length, hidden_size=drafter.hidden_size,
            intermediate_size=drafter.intermediate_size, num_layers=drafter.num_layers,
            markov_rank=drafter.markov_rank, causal_head=drafter.causal_head),
            self.vocab_size, self.tie_word_embeddings)


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

    accepted: float = 1.0
    """Share of the rows that the target's chat template accepts, and that are no second copies."""

    not_usable: tuple[str, ...] = ()
    """Sentences about the rows that will not be answered, for the plan's warnings."""


class PlannedWork:
    """Numbers of rows, tokens and bytes that several stages use, computed once."""

    def __init__(self, job: ResolvedJob, target: TargetFacts, data: DataFacts) -> None:
        self.job, self.spec, self.target, self.data = job, job.spec, target, data
        spec = job.spec
        self.num_gpus = training_gpus(job)
        available = spec.data.max_conversations if data.rows is None else min(data.rows, spec.data.max_conversations)
        available = round(available * data.accepted)
        self.rows = available - int(available * spec.data.held_out_fraction)
        self.present = min(data.present, self.rows)
        limit, most = spec.data.max_prompt_tokens, spec.regenerate.max_new_tokens
        self.prompt = float(limit) if data.prompt_tokens is None else min(data.prompt_tokens, float(limit))
        self.answer = float(most) if data.answer_tokens is None else min(data.answer_tokens, float(most))
        union = expected_union(self.rows, dict(zip(
            spec.data.source_names, (source.weight for source in spec.data.sources), strict=True)), data.source_rows)
        mixes = {candidate.name: candidate.mix for candidate in job.candidates if candidate.mix is not None}
        self.scarcest = min(((int(union[name] / share), candidate, name) for candidate, mix in mixes.items()
                             for name, share in shares(mix).items()), default=(self.rows, "", ""))
        """Rows that every candidate trains on, and the candidate and source that allow no more."""

        self.candidate_rows = {name: quotas(mix, self.scarcest[0]) for name, mix in mixes.items()}
        self.row_tokens = min(self.prompt + self.answer, float(spec.capture.max_length))
        self.captured = round(self.rows * self.row_tokens)
        # States stored for every token: the layers that families fuse by default, the layers that candidates name, and
        # the state after the final norm if a family reads it. An upper bound: named layers may be among the default
        # ones, which are not known here.
        reads = {FAMILIES[family].target_states for family in job.families}
        default = (any(candidate.fuses and candidate.drafter.aux_layers is None for candidate in job.candidates)
                   or reads == {"none"})
        layers = spec.capture.aux_layers or ()
        named = set(job.captured.aux_layers) - set(layers if default else ())
        self.num_aux = (len(layers) or DEFAULT_AUX_LAYERS) * default + len(named) + ("final" in reads)
        self.supervised = round(self.rows * max(0.0, self.row_tokens - self.prompt))
        capture = spec.capture
        vocabulary = capture.draft_vocab_size or largest_draft_vocabulary(target.vocab_size)
        wanted = StoredAs(capture.codec, capture.final_state, capture.final_top_k, vocabulary)
        sizes = (self.captured, self.supervised, self.num_aux, target.hidden_size)
        self.streamed = capture.mode == "stream"
        chosen = choose(wanted, None if self.streamed else capture.max_bytes, *sizes)
        self.within_budget = chosen is not None
        self.stored = chosen or wanted
        self.store_bytes = self.stored.bytes_of(*sizes)
        in_format = not self.streamed and data.states_as == (self.stored.codec, self.stored.final_state)
        rows = min(data.states_present, self.rows) if in_format else 0
        self.states_share = rows / max(1, self.rows)
        """Of the states, those that an earlier job has."""

    @property
    def stages(self) -> tuple[StageKey, ...]:
        """Of the job, without profiles of `prove.hardware`, each of which is planned by itself."""
        return tuple(stage for stage in get_args(StageKey) if stage in self.spec.stages)

    @property
    def state_bytes(self) -> int:
        """Bytes of stored states per captured token, without ids and masks."""
        return round(self.store_bytes / max(1, self.captured)) - ID_AND_MASK_BYTES if self.captured else 0

    def step_tokens(self, candidate: Candidate) -> int:
        return tokens_per_step(with_tokens(candidate.train, self.num_gpus, self.trained))

    @property
    def trained(self) -> int:
        """Captured tokens that a candidate reads in an epoch: all, or those of its rows. Sources are taken to have rows
        of equal length."""
        return round(self.captured * self.scarcest[0] / max(1, self.rows))

    @property
    def supervised_share(self) -> float:
        """Of the captured tokens."""
        return self.supervised / max(1, self.captured)

    @property
    def flops_per_token(self) -> float:
        return 2.0 * self.target.active_parameters

    @property
    def weight_bytes(self) -> int:
        """Of the target, in the job's dtype or as SGLang loads it quantised."""
        return self.target.quantised_bytes or self.target.parameters * ELEMENT_BYTES[self.job.target.dtype]

    def drafter(self, candidate: Candidate) -> TrainedDrafter:
        """A candidate's drafter, and what its training reads of the target."""
        return self.target.trained_drafter(candidate, self.spec.capture.aux_layers or ())


OTHER_MEMORY = 10**9
"""Bytes: programs and libraries, a second copy of the embeddings, positions of the cache that are not used yet, and
what grows while its old copy is still there."""


def text_bytes(target: TargetFacts, dtype: str, engine: str) -> int:
    """Keys and values of one token. The embedded engine's of a float32 target are float64 (`speculation.cache`)."""
    return target.key_values * (8 if (dtype, engine) == ("float32", "embedded") else ELEMENT_BYTES[dtype])


def regeneration_bytes(target: TargetFacts, weight_bytes: int, dtype: str, concurrency: int, longest: int) -> int:
    """The most memory that the embedded engine takes on a CPU to generate so many answers at once: weights, and keys
    and values of that many texts of `longest` tokens."""
    return weight_bytes + concurrency * longest * text_bytes(target, dtype, "embedded") + OTHER_MEMORY


def training_gpus(job: ResolvedJob) -> int:
    """GPUs that compute one candidate's steps; 0: CPUs do. One program that trains all candidates gives each one GPU;
    where `sweep.shared_passes` leaves open whether there is such a program, all GPUs are assumed for each."""
    num_gpus = job.gpus["train"].num_gpus or 0
    if len(job.candidates) > 1 and job.spec.sweep.shared_passes == "always":
        return min(1, num_gpus)
    return num_gpus * job.spec.placement.train_nodes


def tokens_seen(work: PlannedWork, candidate: Candidate) -> int:
    """Tokens of the data that a candidate is trained on in all epochs, if no rung stops it."""
    train, seen = candidate.train, round(work.trained * candidate.train.epochs)
    return seen if train.max_steps is None else min(seen, train.max_steps * work.step_tokens(candidate))


def shared_tokens(work: PlannedWork) -> int:
    """Tokens whose states are read for all candidates, or computed by the target where none are stored. Candidates with
    the same seed and batch size see the same documents at the same steps and share one pass; every epoch needs them
    again."""
    if not may_train_together(work.spec.sweep):
        return sum(tokens_seen(work, candidate) for candidate in work.job.candidates)
    longest: dict[tuple[int, int], int] = {}
    for candidate in work.job.candidates:
        key = (candidate.train.seed, work.step_tokens(candidate))
        longest[key] = max(longest.get(key, 0), tokens_seen(work, candidate))
    return sum(longest.values())


def share_of_steps(work: PlannedWork) -> float:
    """The share of all candidates' steps that is executed: at each rung half of every group stops, rounded down.

    A group is the candidates of one family with the same seed and batch size, which see the same documents at the same
    steps.
    """
    sweep, candidates, steps = work.spec.sweep, work.job.candidates, 0.0
    if not may_train_together(sweep):
        return 1.0
    for left in Counter((candidate.drafter.family, candidate.train.seed, work.step_tokens(candidate))
                        for candidate in candidates).values():
        before = 0.0
        for rung in (*sweep.rungs, 1.0):
            steps, before, left = steps + left * (rung - before), rung, left - left // 2
    return steps / len(candidates)


STEP_OPERATIONS, UNROLLED_STEP_OPERATIONS = 8e8, 3.5e8
"""Operations that take a CPU as long as what a step does whatever its size, and each unrolled step of it: launches,
bookkeeping, kernels compiled for new shapes. Measured for the demo's drafter (2026-11-29, one core with AVX-512 and
AMX, bfloat16, steps of 210 to 3,900 tokens): 24 ms of CPU a step with one unrolled step and 66 ms with seven, next to
41 to 57 GFLOP/s. Not counted on GPUs, whose steps were measured at sizes where it is nothing."""


def training_flops(work: PlannedWork, candidate: Candidate, tokens: int) -> float:
    """Operations of training on so many tokens, and on CPUs what takes as long as operations."""
    train, drafter, row = candidate.train, work.drafter(candidate), FAMILIES[candidate.drafter.family]
    if candidate.drafter.draft_vocab_size is None and not row.whole_vocabulary:
        drafter = replace(drafter, sizes=replace(drafter.sizes, output_vocab_size=expected_draft_vocabulary(
            work.target.vocab_size, work.supervised)))
    steps = 0.0 if work.num_gpus else tokens / work.step_tokens(candidate)
    deep = steps * (1.0 - train.single_step_ratio) * (train.ttt_length - 1) if row.step_cost_known else 0.0
    own = steps * (STEP_OPERATIONS + UNROLLED_STEP_OPERATIONS) + deep * UNROLLED_STEP_OPERATIONS
    if not row.step_cost_known:
        passes = row.training_passes(train, candidate.drafter.max_draft_tokens or train.ttt_length)
        return own + 6.0 * drafter.parameters * passes * tokens
    single = round(tokens * train.single_step_ratio)
    return own + sum(eagle3_flops(drafter, expected_work(
        part, supervised_share=work.supervised_share, ttt_length=steps, unrolled_fraction=train.unrolled_fraction,
        row_tokens=work.row_tokens)) for part, steps in ((single, 1), (tokens - single, train.ttt_length)))


def training_on_gpus(work: PlannedWork, candidate: Candidate) -> TrainingOnGpus | None:
    """A candidate's training where it requests GPUs and its family's step is described; else None. Tokens at a time
    that the job leaves open fit the type of GPU that it requests."""
    spec, num_gpus = work.spec, work.num_gpus
    if not num_gpus or not FAMILIES[candidate.drafter.family].step_cost_known:
        return None
    drafter, element, streamed = work.drafter(candidate), ELEMENT_BYTES[work.job.target.dtype], 0
    if work.streamed:
        streamed = streamed_bytes(drafter, work.target.parameters * element, element, work.num_aux + 1,
                                  spec.capture.batch_tokens, spec.capture.stream_buffer_bytes)
    training = TrainingOnGpus(
        drafter, with_tokens(candidate.train, num_gpus, work.trained), num_gpus, work.supervised_share,
        work.row_tokens, compute_bytes=4 if candidate.train.dtype == "float32" else 2,
        top_k=spec.capture.final_top_k if spec.capture.final_state == "topk" else None,
        streamed_bytes=streamed)
    if candidate.train.max_tokens_per_gpu is not None:
        return training
    device = gpu_bytes(work.job.gpus["train"].gpu_type) or ASSUMED_GPU_BYTES
    longest = min(spec.capture.max_length, spec.data.max_prompt_tokens + spec.regenerate.max_new_tokens)
    return training.fitted(device, usable_bytes(device), longest)
