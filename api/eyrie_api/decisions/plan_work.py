"""Rows, tokens and bytes of a job, and what training takes of a GPU, as its plan estimates them. Pure.

A captured token stores `A` aux hidden states, an answer token also the final one, in a codec (`v1alpha1.capture`):

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

from collections import Counter
from collections.abc import Sequence

from eyrie_api.decisions.families import fuses, named_layers
from eyrie_api.decisions.plan_facts import DEFAULT_AUX_LAYERS, DEFAULT_DRAFT_VOCABULARY, DataFacts, TargetFacts
from eyrie_api.decisions.row_draw import expected_union, quotas, shares
from eyrie_api.decisions.sweep import Candidate, may_train_together
from eyrie_api.decisions.training_cost import eagle3_flops, expected_work, usable_bytes
from eyrie_api.decisions.training_defaults import TrainingOnGpus, gpu_bytes, tokens_per_step, with_tokens
from eyrie_api.v1alpha1.capture import ID_AND_MASK_BYTES, StoredAs, choose
from eyrie_api.v1alpha1.families import FAMILIES
from eyrie_api.v1alpha1.job import JobSpec
from eyrie_api.v1alpha1.requests import PlacementRequest

ASSUMED_GPU_BYTES = 80 * 10**9
"""Where the job names no type of GPU."""


class PlannedWork:
    """Numbers of rows, tokens and bytes that several stages use, computed once."""

    def __init__(self, spec: JobSpec, target: TargetFacts, data: DataFacts, candidates: Sequence[Candidate]) -> None:
        self.spec, self.target, self.data = spec, target, data
        self.num_gpus = training_gpus(spec, len(candidates))
        available = spec.data.max_conversations if data.rows is None else min(data.rows, spec.data.max_conversations)
        self.rows = available - int(available * spec.data.held_out_fraction)
        self.present = min(data.present, self.rows)
        limit, most = spec.data.max_prompt_tokens, spec.regenerate.max_new_tokens
        self.prompt = float(limit) if data.prompt_tokens is None else min(data.prompt_tokens, float(limit))
        self.answer = float(most) if data.answer_tokens is None else min(data.answer_tokens, float(most))
        union = expected_union(self.rows, dict(zip(
            spec.data.source_names, (source.weight for source in spec.data.sources), strict=True)), data.source_rows)
        mixes = {one.name: one.spec.data.mix for one in candidates if one.spec.data.mix is not None}
        self.scarcest = min(((int(union[name] / share), candidate, name) for candidate, mix in mixes.items()
                             for name, share in shares(mix).items()), default=(self.rows, "", ""))
        """Rows that every candidate trains on, and the candidate and source that allow no more."""

        self.candidate_rows = {name: quotas(mix, self.scarcest[0]) for name, mix in mixes.items()}
        self.row_tokens = min(self.prompt + self.answer, float(spec.capture.max_length))
        self.captured = round(self.rows * self.row_tokens)
        self.num_aux = _num_stored(spec, candidates)
        self.supervised = round(self.rows * max(0.0, self.row_tokens - self.prompt))
        capture = spec.capture
        vocabulary = capture.draft_vocab_size or min(target.vocab_size, DEFAULT_DRAFT_VOCABULARY)
        wanted = StoredAs(capture.codec, capture.final_state, capture.final_top_k, vocabulary)
        sizes = (self.captured, self.supervised, self.num_aux, target.hidden_size)
        self.streamed = capture.feed == "stream"
        chosen = choose(wanted, None if self.streamed else capture.max_bytes, *sizes)
        self.within_budget = chosen is not None
        self.stored = chosen or wanted
        self.store_bytes = self.stored.bytes_of(*sizes)
        in_format = not self.streamed and data.states_as == (self.stored.codec, self.stored.final_state)
        rows = min(data.states_present, self.rows) if in_format else 0
        self.states_share = rows / max(1, self.rows)
        """Of the states, those that an earlier job has."""

    @property
    def state_bytes(self) -> int:
        """Bytes of stored states per captured token, without ids and masks."""
        return round(self.store_bytes / max(1, self.captured)) - ID_AND_MASK_BYTES if self.captured else 0

    def step_tokens(self, candidate: Candidate) -> int:
        """Packed tokens of a candidate's training step."""
        return tokens_per_step(candidate.train, self.num_gpus)

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


def _num_stored(spec: JobSpec, candidates: Sequence[Candidate]) -> int:
    """Number of states stored for every token: the layers that families fuse by default, the layers that candidates
    name, and the state after the final norm if a family reads it. An upper bound: named layers may be among the default
    ones, which are not known here."""
    reads = {FAMILIES[one.drafter.family].target_states for one in candidates}
    default = any(fuses(one) and one.drafter.aux_layers is None for one in candidates) or reads == {"none"}
    chosen = spec.capture.aux_layers or ()
    named = set(named_layers(candidates)) - set(chosen if default else ())
    return (len(chosen) or DEFAULT_AUX_LAYERS) * default + len(named) + ("final" in reads)


def training_gpus(spec: JobSpec, num_candidates: int) -> int:
    """GPUs that compute one candidate's steps; 0: CPUs do. One program that trains all candidates gives each one GPU;
    where `sweep.together` leaves open whether there is such a program, all GPUs are assumed for each."""
    train = spec.placement.stages.get("train", PlacementRequest())
    num_gpus = (spec.placement.every.num_gpus or 0) if train.num_gpus is None else train.num_gpus
    if num_candidates > 1 and spec.sweep.together == "always":
        return min(1, num_gpus)
    return num_gpus * spec.placement.train_nodes


def tokens_seen(work: PlannedWork, candidate: Candidate) -> int:
    """Tokens of the data that a candidate is trained on in all epochs, if no rung stops it."""
    train, seen = candidate.train, round(work.trained * candidate.train.epochs)
    return seen if train.max_steps is None else min(seen, train.max_steps * work.step_tokens(candidate))


def shared_tokens(work: PlannedWork, candidates: Sequence[Candidate]) -> int:
    """Tokens whose states are read for all candidates, or computed by the target where none are stored. Candidates with
    the same seed and batch size see the same documents at the same steps and share one pass; every epoch needs them
    again."""
    if not may_train_together(work.spec.sweep):
        return sum(tokens_seen(work, one) for one in candidates)
    longest: dict[tuple[int, int], int] = {}
    for one in candidates:
        key = (one.train.seed, work.step_tokens(one))
        longest[key] = max(longest.get(key, 0), tokens_seen(work, one))
    return sum(longest.values())


def share_of_steps(spec: JobSpec, candidates: Sequence[Candidate]) -> float:
    """The share of all candidates' steps that is executed: at each rung half of every group stops, rounded down.

    A group is the candidates of one family with the same seed and batch size, which see the same documents at the same
    steps.
    """
    if not may_train_together(spec.sweep):
        return 1.0
    steps, num_gpus = 0.0, training_gpus(spec, len(candidates))
    for left in Counter((one.drafter.family, one.train.seed, tokens_per_step(one.train, num_gpus))
                        for one in candidates).values():
        before = 0.0
        for rung in (*spec.sweep.rungs, 1.0):
            steps, before, left = steps + left * (rung - before), rung, left - left // 2
    return steps / len(candidates)


def training_flops(work: PlannedWork, candidate: Candidate, tokens: int) -> float:
    """Operations of training on so many tokens."""
    train, drafter = candidate.train, work.target.trained_drafter(candidate)
    if not FAMILIES[drafter.family].step_cost_known:
        return 6.0 * drafter.parameters * work.target.training_passes(candidate) * tokens
    single = round(tokens * train.single_step_ratio)
    return sum(eagle3_flops(drafter, expected_work(
        part, supervised_share=work.supervised_share, ttt_length=steps, unrolled_fraction=train.unrolled_fraction,
        row_tokens=work.row_tokens)) for part, steps in ((single, 1), (tokens - single, train.ttt_length)))


def planned_gpu(spec: JobSpec) -> str | None:
    """The node label of the GPUs that training requests."""
    return spec.placement.stages.get("train", PlacementRequest()).gpu_type or spec.placement.every.gpu_type


def training_on_gpus(work: PlannedWork, candidate: Candidate) -> TrainingOnGpus | None:
    """A candidate's training where it requests GPUs and its family's step is described; else None. Tokens at a time
    that the job leaves open fit the type of GPU that it requests."""
    spec, target, num_gpus = work.spec, work.target, work.num_gpus
    if not num_gpus or not FAMILIES[candidate.drafter.family].step_cost_known:
        return None
    training = TrainingOnGpus(
        target.trained_drafter(candidate), with_tokens(candidate.train, num_gpus), num_gpus, work.supervised_share,
        work.row_tokens, compute_bytes=4 if candidate.train.dtype == "float32" else 2,
        top_k=spec.capture.final_top_k if spec.capture.final_state == "topk" else None)
    if candidate.train.max_tokens_per_gpu is not None:
        return training
    device = gpu_bytes(planned_gpu(spec)) or ASSUMED_GPU_BYTES
    longest = min(spec.capture.max_length, spec.data.max_prompt_tokens + spec.regenerate.max_new_tokens)
    return training.fitted(device, usable_bytes(device), longest)


def require_gpu_memory(spec: JobSpec, candidates: Sequence[Candidate], target: TargetFacts, data: DataFacts) -> None:
    """Raises GpuTooSmall for a training step that does not fit the requested type of GPU, if its label names a size."""
    label, work = planned_gpu(spec), PlannedWork(spec, target, data, candidates)
    device = gpu_bytes(label)
    if label is None or device is None:
        return
    for candidate in candidates:
        training = training_on_gpus(work, candidate)
        if training is not None:
            training.require(device, label, usable_bytes(device))
