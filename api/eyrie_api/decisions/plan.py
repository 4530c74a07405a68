"""Estimates the tokens, bytes on disk and hours of a job before it runs. Pure; every assumption is listed in the plan.

Storage. A captured token stores `A` aux hidden states, an answer token also the final one, in a codec
(`v1alpha1.codecs`):

    bytes = tokens * (A * state + 5) + answer tokens * final state,     state ~ H * bytes per value

The size depends on the target through the hidden size only, not through its number of layers or parameters. The example
of the blog post "Making an EAGLE fly", which stores the final state of every token in two bytes per value, recomputed:
H = 5120, bfloat16, A = 3, 2048 tokens per sample: 4 * 5120 * 2 * 2048 = 83 886 080 bytes, exactly 80 MiB. 500 000
samples are 40 000 000 MiB = 38.147 TiB (41.943 TB), and with the post's 5 % for serialization 40.054 TiB. The post says
"~42 TiB": it divides 40 000 000 MiB by 1 000 000 instead of 1 048 576, which gives "40 TiB", and adding 5 % gives
42.000. The "40 TiB" of its last section is correct. (Ids and masks, which the post omits, add 4.8 GiB. Eyrie's shards
have an overhead of about 100 bytes per row instead of 5 %. In the default codec, with half of the tokens answers, the
same job stores 16.7 TiB.)

Time is FLOPs / effective FLOP/s by kind of work: 2 FLOPs per parameter and token for the target; for training those of
`decisions.training_cost` where it describes the family's step, else 6 per drafter parameter and pass of a token through
the drafter (`DrafterFamily.training_passes`). Candidates stopped at a rung skip the rest. The rates are those of the
GPUs that the job requests (`decisions.hardware`), with a range; without GPUs they are settings with measured defaults,
and a plan is accurate to about a factor of two of what is computed. Hours are of stages, and of a stage's parts, one
after the other. The start of programs and servers, and loading the target, are not counted: they are most of a job of
minutes.

Legend: A aux layers, H hidden, V vocabulary.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from pydantic import ValidationError

from eyrie_api.decisions.families import description, fuses, named_layers
from eyrie_api.decisions.hardware import ASSUMED, Rates, Speed, gpu_rates, known_gpu
from eyrie_api.decisions.row_draw import expected_union, quotas, shares
from eyrie_api.decisions.store_cost import ObjectStore, StageTransfer, month_cost, with_store_use
from eyrie_api.decisions.sweep import Candidate, families_of, may_train_together
from eyrie_api.decisions.training_cost import TrainedDrafter, eagle3_flops, expected_work, usable_bytes
from eyrie_api.decisions.training_defaults import GPU_TOKENS, TrainingOnGpus, gpu_bytes, tokens_per_step, with_tokens
from eyrie_api.quantities import size
from eyrie_api.v1alpha1.codecs import ID_AND_MASK_BYTES, StoredAs, choose
from eyrie_api.v1alpha1.draft_tree import DraftTreeShape
from eyrie_api.v1alpha1.families import FAMILIES, DecoderSizes, DrafterSizes
from eyrie_api.v1alpha1.job import JobSpec
from eyrie_api.v1alpha1.model import Interval
from eyrie_api.v1alpha1.plan import Assumption, Plan, Present, StagePlan
from eyrie_api.v1alpha1.requests import PlacementRequest, StageKey
from eyrie_api.v1alpha1.tuning import TuneSpec

STAGES: tuple[StageKey, ...] = get_args(StageKey)
DEFAULT_AUX_LAYERS = 3
ROW_JSON_BYTES_PER_TOKEN = 6
"""Token ids as decimal text with a comma."""

DEFAULT_DRAFT_VOCABULARY = 32_768
_LITTLE_OF_THE_UNION = 0.5
"""Share of the captured rows below which a draw for `data.mix` is warned of."""

_ASSUMED_GPU_BYTES = 80 * 10**9
"""Where the job names no type of GPU."""

_SECONDS_PER_HOUR = 3600.0


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


def make_plan(spec: JobSpec, candidates: Sequence[Candidate], target_facts: TargetFacts, free_bytes: int | None, *,
              data_facts: DataFacts | None = None, rates: Rates | None = None, on_gpus: bool = False,
              gpu_hour_prices: Mapping[str, float] | None = None, store: ObjectStore | None = None) -> Plan:
    """The cost of `spec` and its sweep's candidates for a target, stage by stage.

    free_bytes        free space where the job would write, None when unknown
    rates             of this machine, if they were set; by default those of the GPUs that the job requests, or measured
                      ones of a CPU
    on_gpus           whether the job computes on GPUs although it requests none: those of its machine
    gpu_hour_prices   by node label of the type
    store             where the job's stages exchange files; None: on this machine, or on a volume
    """
    data_facts = data_facts or DataFacts()
    work = _Work(spec, target_facts, data_facts, candidates)
    counts: dict[str, int] = {stage: _stage_gpus(spec, stage, len(candidates), on_gpus) for stage in STAGES}
    used: dict[str, Rates] = {stage: rates or _rates_of(work, stage, counts[stage], "expected") for stage in STAGES}
    stages = _stages(work, candidates, used)
    if rates is None and any(counts.values()):
        slow, fast = (_stages(work, candidates, {stage: _rates_of(work, stage, counts[stage], speed)
                                                 for stage in STAGES}) for speed in ("low", "high"))
        stages = tuple(_on_gpus(work, one, counts[one.stage], gpu_hour_prices or {}, (least.hours, most.hours))
                       if counts[one.stage] else one.model_copy(update={"bound_by": ""})
                       for one, least, most in zip(stages, fast, slow, strict=True))
    else:
        stages = tuple(one.model_copy(update={"bound_by": ""}) for one in stages)
    stages += _hardware(work, rates, counts["prove"])
    if store is not None:
        stages = with_store_use(stages, _transfers(work, candidates, store), store)
    uses = [stage.store for stage in stages if stage.store is not None]
    ranges = [use.cost_range for use in uses if use.cost_range is not None]
    total = sum(stage.bytes_on_disk for stage in stages)
    warnings = list(_warnings(work, candidates))
    if rates is None:
        warnings += _unknown_gpus(spec, counts)
    fits = None if free_bytes is None else total <= free_bytes
    if fits is False:
        warnings.append(f"the job needs {total} bytes on disk and {free_bytes} are free")
    if not work.within_budget:
        fits = False
    present = _present(work)
    costs = [stage.cost for stage in stages if stage.num_gpus]
    return Plan(
        stages=stages, total_tokens=sum(stage.tokens for stage in stages), total_bytes_on_disk=total,
        total_hours=sum(stage.hours for stage in stages), bytes_per_token=work.state_bytes,
        bottleneck=_bottleneck(stages), total_gpu_hours=sum(stage.gpu_hours for stage in stages),
        total_cost=sum(cost for cost in costs if cost is not None) if costs and None not in costs else None,
        total_store_cost=sum(use.cost or 0.0 for use in uses) if ranges else None,
        total_store_cost_range=Interval(low=sum(one.low for one in ranges), high=sum(one.high for one in ranges))
        if ranges else None, store_month_cost=None if store is None else month_cost(total, store),
        assumptions=(*_assumptions(work, candidates, used, counts), *_store_assumptions(store)),
        warnings=tuple(warnings), present=present,
        notes=(*((present.words,) if present else ()), *(description(family) for family in families_of(candidates)),
               *(f"{rival.checkpoint}: benchmarked like a checkpoint, from {rival.path or 'the text itself'}"
                 for rival in spec.benchmarked_rivals)), fits_disk=fits, candidate_rows=work.candidate_rows)


def _stages(work: "_Work", candidates: Sequence[Candidate], rates: Mapping[str, Rates]) -> tuple[StagePlan, ...]:
    return (
        _regenerate(work, rates["regenerate"]), _capture(work, rates["capture"]),
        _train(work, candidates, rates["train"]), _benchmark(work, candidates, rates["benchmark"]),
        _tune(work, rates["tune"]), _prove(work, rates["prove"]))


def _stage_gpus(spec: JobSpec, stage: StageKey, num_candidates: int, on_gpus: bool) -> int:
    """GPUs that a stage computes on together; 0: CPUs. On one machine an engine's GPUs are those of every stage."""
    request = spec.placement.stages.get(stage, PlacementRequest())
    placed = request.num_gpus if request.num_gpus is not None else spec.placement.every.num_gpus
    if placed is None:
        return spec.engine.num_gpus or int(on_gpus)
    return training_gpus(spec, num_candidates) if stage == "train" else placed


def _label(spec: JobSpec, stage: StageKey) -> str | None:
    return spec.placement.stages.get(stage, PlacementRequest()).gpu_type or spec.placement.every.gpu_type


def _rates_of(work: "_Work", stage: StageKey, num_gpus: int, speed: Speed) -> Rates:
    if not num_gpus:
        return Rates()
    spec = work.spec
    # Checkpoints and data are divided over all GPUs; settings and loads are measured with one server at a time.
    together = num_gpus if stage in ("regenerate", "capture", "train", "benchmark") else spec.engine.tp_size
    loads = {"regenerate": spec.regenerate.concurrency, "benchmark": max(spec.benchmark.concurrencies, default=1),
             "tune": max(spec.tune.concurrencies), "prove": max(spec.prove.loads, default=1)}
    return _gpu_rates(work, _label(spec, stage), speed, together,
                      together if stage == "benchmark" else spec.engine.tp_size, int(loads.get(stage, 1)))


def _gpu_rates(work: "_Work", label: str | None, speed: Speed, num_gpus: int, tp_size: int, batch: int) -> Rates:
    return gpu_rates(
        known_gpu(label) or ASSUMED, speed, num_gpus=num_gpus, tp_size=tp_size, batch=batch,
        weight_bytes=4 if work.spec.resolved_target.dtype == "float32" else 2,
        active_share=work.target.active_parameters / work.target.parameters)


def _on_gpus(work: "_Work", plan: StagePlan, num_gpus: int, prices: Mapping[str, float],
             hours_range: tuple[float, float]) -> StagePlan:
    label = _label(work.spec, plan.stage)  # type: ignore[arg-type]
    price = prices.get(label or "")
    return plan.model_copy(update={
        "num_gpus": num_gpus, "gpu_type": (known_gpu(label) or ASSUMED).name,
        "hours_range": Interval(low=hours_range[0], high=hours_range[1]),
        "cost": None if price is None else plan.hours * num_gpus * price})


def _bottleneck(stages: Sequence[StagePlan]) -> str:
    total, slowest = sum(stage.hours for stage in stages), max(stages, key=lambda stage: stage.hours)
    if not total:
        return ""
    limited = f", bound by {slowest.bound_by}" if slowest.bound_by else ""
    return f"{slowest.stage} takes {slowest.hours / total:.0%} of the time{limited}"


def _unknown_gpus(spec: JobSpec, counts: Mapping[str, int]) -> list[str]:
    labels = {_label(spec, stage) for stage in STAGES if counts[stage]}
    unknown = sorted(label or "none" for label in labels if known_gpu(label) is None)
    if not unknown:
        return []
    return [f"hours are those of an {ASSUMED.name}: the job's type of GPU ({', '.join(unknown)}) has no figures here; "
            "name it in placement.every.gpu_type, or set EYRIE_*_GFLOPS"]


class _Work:
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


def _transfers(work: _Work, candidates: Sequence[Candidate], store: ObjectStore) -> dict[str, StageTransfer]:
    """What each stage writes to the object store and reads of it."""
    spec, rows_bytes = work.spec, (round(work.rows * (work.prompt + work.answer)) * ROW_JSON_BYTES_PER_TOKEN)
    per_token = work.state_bytes + ID_AND_MASK_BYTES
    states = work.captured * ID_AND_MASK_BYTES if work.streamed else work.store_bytes
    shards = max(1, math.ceil(states / spec.capture.shard_size_bytes))
    per_row = store.parts(work.row_tokens * per_token)
    drafters = [work.target.drafter_parameters(one) * 4 for one in candidates]
    together = may_train_together(spec.sweep)
    if store.ranged and not work.streamed:
        read = round(_shared_tokens(work, candidates) * per_token)
        gets = round(_shared_tokens(work, candidates) / max(1.0, work.row_tokens)) * per_row + shards
    else:
        read = states * (1 if together else len(candidates))
        gets = store.parts(read)
    exported = [(size, one.train.num_checkpoints) for one, size in zip(candidates, drafters, strict=True)]
    one_drafter = StageTransfer(get_requests=store.parts(max(drafters)), read_bytes=max(drafters))
    copied = round(states * work.states_share)
    # Answers that stay in the store: parts are read for the digest of the ordered rows and to write these; capture
    # reads the rows to plan its shards and to compute them. As files they are downloaded once.
    ordering, passes = (2, 2) if store.ranged else (0, 1)
    return {
        "regenerate": StageTransfer(
            2, store.put_requests(rows_bytes), ordering * store.parts(rows_bytes), ordering * rows_bytes),
        "capture": StageTransfer(
            shards, shards * store.put_requests(states / shards),
            # Of each uploaded shard size and end are read back.
            passes * store.parts(rows_bytes) + 2 * shards + round(work.rows * work.states_share) * per_row,
            passes * rows_bytes + copied),
        "train": StageTransfer(
            sum(number for _, number in exported), sum(store.put_requests(size) * number for size, number in exported),
            gets, read),
        "benchmark": StageTransfer(
            0, 0, sum(store.parts(size) * number for size, number in exported),
            sum(size * number for size, number in exported)),
        "tune": one_drafter, "prove": one_drafter, "hardware": one_drafter}


def _store_assumptions(store: ObjectStore | None) -> tuple[Assumption, ...]:
    if store is None or store.prices is None:
        return ()
    prices = store.prices
    return tuple(Assumption(name=f"{prices.name}: {name}", value=value, unit=unit, source=prices.source)
                 for name, value, unit in (
        ("storage", round(prices.storage, 3), "per TB (10^12 bytes) and month"),
        ("writing requests", prices.put, "per million"), ("reading requests", prices.get, "per million"),
        ("traffic", prices.traffic, "per TB read; 0 within the provider's region")))


def _hours(flops: float, gflops: float) -> float:
    return flops / (gflops * 1e9) / _SECONDS_PER_HOUR


def _store_hours(num_bytes: float, rates: Rates) -> float:
    """To move so many bytes of states."""
    return 0.0 if rates.store_bytes_per_s is None else num_bytes / rates.store_bytes_per_s / _SECONDS_PER_HOUR


def _regenerate(work: _Work, rates: Rates) -> StagePlan:
    prompts, answers = round(work.rows * work.prompt), round(work.rows * work.answer)
    tokens = prompts + answers
    if work.spec.data.answered:
        return StagePlan(stage="regenerate", tokens=tokens, bytes_on_disk=tokens * ROW_JSON_BYTES_PER_TOKEN, hours=0.0)
    hours = _hours(prompts * work.flops_per_token, rates.prefill) + _hours(answers * work.flops_per_token, rates.decode)
    return StagePlan(stage="regenerate", tokens=tokens, bytes_on_disk=tokens * ROW_JSON_BYTES_PER_TOKEN,
                     hours=hours * (1.0 - work.present / max(1, work.rows)),
                     bound_by="memory bandwidth" if rates.decode < rates.prefill else "compute")


def _present(work: _Work) -> Present | None:
    if not work.present:
        return None
    data, states = work.data, round(work.store_bytes * work.states_share)
    words = f"{work.present:,} of {work.rows:,} answers are present, in job {data.present_in}"
    if states:
        where = "" if data.states_in == data.present_in else f", in job {data.states_in}"
        words += f", and {size(states)} of {size(work.store_bytes)} of their hidden states{where}"
    return Present(
        answers=work.present, all_answers=work.rows, answers_in=data.present_in, state_bytes=states,
        all_state_bytes=0 if work.streamed else work.store_bytes, states_in=data.states_in if states else "",
        words=f"{words}: they are not made again, unless the data or the target has changed (reuse: never makes all)")


def _capture(work: _Work, rates: Rates) -> StagePlan:
    if work.streamed:  # only ids and masks are written; the target's forward passes run, and count, in training
        return StagePlan(stage="capture", tokens=work.captured,
                         bytes_on_disk=work.captured * ID_AND_MASK_BYTES, hours=0.0)
    computing = _hours(work.captured * work.flops_per_token, rates.prefill) * (1.0 - work.states_share)
    storing = _store_hours(work.store_bytes * (1.0 + work.states_share), rates)  # what is copied is read first
    return StagePlan(stage="capture", tokens=work.captured, bytes_on_disk=work.store_bytes,
                     hours=max(computing, storing), bound_by="compute" if computing >= storing else "storage")


def _train(work: _Work, candidates: Sequence[Candidate], rates: Rates) -> StagePlan:
    tokens = num_bytes = 0
    hours, share = 0.0, _share_of_steps(work.spec, candidates)
    for candidate in candidates:
        train = candidate.train
        seen = _tokens_seen(work, candidate)
        tokens += round(seen * share)
        hours += _hours(_training_flops(work, candidate, round(seen * share)), rates.train)
        # Exported checkpoints, and one resumable state: weights and two moments.
        num_bytes += work.target.drafter_parameters(candidate) * 4 * (train.num_checkpoints + 3)
    reading = 0.0
    if work.streamed:
        hours += _hours(_shared_tokens(work, candidates) * work.flops_per_token, rates.prefill)
    else:
        shared = _shared_tokens(work, candidates) * (work.state_bytes + ID_AND_MASK_BYTES)
        reading = _store_hours(shared, rates)
    return StagePlan(stage="train", tokens=tokens, bytes_on_disk=num_bytes, hours=max(hours, reading),
                     bound_by="compute" if hours >= reading else "storage")


def _training_flops(work: _Work, candidate: Candidate, tokens: int) -> float:
    """Operations of training on so many tokens."""
    train, drafter = candidate.train, work.target.trained_drafter(candidate)
    if not FAMILIES[drafter.family].step_cost_known:
        return 6.0 * drafter.parameters * work.target.training_passes(candidate) * tokens
    single = round(tokens * train.single_step_ratio)
    return sum(eagle3_flops(drafter, expected_work(
        part, supervised_share=work.supervised_share, ttt_length=steps, unrolled_fraction=train.unrolled_fraction,
        row_tokens=work.row_tokens)) for part, steps in ((single, 1), (tokens - single, train.ttt_length)))


def training_gpus(spec: JobSpec, num_candidates: int) -> int:
    """GPUs that compute one candidate's steps; 0: CPUs do. One program that trains all candidates gives each one GPU;
    where `sweep.together` leaves open whether there is such a program, all GPUs are assumed for each."""
    train = spec.placement.stages.get("train", PlacementRequest())
    num_gpus = (spec.placement.every.num_gpus or 0) if train.num_gpus is None else train.num_gpus
    if num_candidates > 1 and spec.sweep.together == "always":
        return min(1, num_gpus)
    return num_gpus * spec.placement.train_nodes


def _training_on_gpus(work: _Work, candidate: Candidate) -> TrainingOnGpus | None:
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
    device = gpu_bytes(_planned_gpu(spec)) or _ASSUMED_GPU_BYTES
    longest = min(spec.capture.max_length, spec.data.max_prompt_tokens + spec.regenerate.max_new_tokens)
    return training.fitted(device, usable_bytes(device), longest)


def require_gpu_memory(spec: JobSpec, candidates: Sequence[Candidate], target: TargetFacts, data: DataFacts) -> None:
    """Raises GpuTooSmall for a training step that does not fit the requested type of GPU, if its label names a size."""
    label, work = _planned_gpu(spec), _Work(spec, target, data, candidates)
    device = gpu_bytes(label)
    if label is None or device is None:
        return
    for candidate in candidates:
        training = _training_on_gpus(work, candidate)
        if training is not None:
            training.require(device, label, usable_bytes(device))


def _planned_gpu(spec: JobSpec) -> str | None:
    """The node label of the GPUs that training requests."""
    return spec.placement.stages.get("train", PlacementRequest()).gpu_type or spec.placement.every.gpu_type


def _tokens_seen(work: _Work, candidate: Candidate) -> int:
    train, seen = candidate.train, round(work.trained * candidate.train.epochs)
    return seen if train.max_steps is None else min(seen, train.max_steps * work.step_tokens(candidate))


def _shared_tokens(work: _Work, candidates: Sequence[Candidate]) -> int:
    """Tokens whose states are read for all candidates, or computed by the target where none are stored. Candidates with
    the same seed and batch size see the same documents at the same steps and share one pass; every epoch needs them
    again."""
    if not may_train_together(work.spec.sweep):
        return sum(_tokens_seen(work, one) for one in candidates)
    longest: dict[tuple[int, int], int] = {}
    for one in candidates:
        key = (one.train.seed, work.step_tokens(one))
        longest[key] = max(longest.get(key, 0), _tokens_seen(work, one))
    return sum(longest.values())


def _share_of_steps(spec: JobSpec, candidates: Sequence[Candidate]) -> float:
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


def _benchmark(work: _Work, candidates: Sequence[Candidate], rates: Rates) -> StagePlan:
    # Rivals are benchmarked like checkpoints; no drafter is the baseline of each.
    checkpoints = sum(candidate.train.num_checkpoints for candidate in candidates) + len(work.spec.benchmarked_rivals)
    alone = checkpoints * _suite_tokens(work.spec)
    together = checkpoints * _concurrent_tokens(work.spec)
    return StagePlan(stage="benchmark", tokens=alone + together, bytes_on_disk=0, bound_by="memory bandwidth",
                     hours=_hours(alone * work.flops_per_token, rates.single)
                     + _hours(together * work.flops_per_token, rates.decode))


def _suite_tokens(spec: JobSpec) -> int:
    """Tokens generated by one drafter and by the baseline without a drafter, over all suites, one request at a time."""
    benchmark = spec.benchmark
    prompts = sum(suite.max_prompts for suite in benchmark.suites)
    return 2 * prompts * len(benchmark.temperatures) * benchmark.repeats * benchmark.max_new_tokens


def _concurrent_tokens(spec: JobSpec) -> int:
    """The same at the higher `benchmark.concurrencies`: each asks every prompt once per repeat, in at least two blocks
    of two requests per slot."""
    benchmark = spec.benchmark
    prompts = sum(suite.max_prompts for suite in benchmark.suites) * benchmark.repeats
    requests = sum(2 * one * max(2, math.ceil(prompts / (2 * one))) for one in benchmark.concurrencies if one > 1)
    return 2 * requests * len(benchmark.temperatures) * benchmark.max_new_tokens


def _tune(work: _Work, rates: Rates) -> StagePlan:
    """Trials of the settings at every concurrency, then a benchmark of the chosen setting; again for a rival that the
    winner has to beat."""
    tune, benchmark = work.spec.tune, work.spec.benchmark
    settings = len(tree_shapes(tune)) + (len(set(tune.num_steps)) if tune.ngram else 0) + 1
    variants = tune.trials(settings) * len(set(tune.concurrencies))
    raced = variants * tune.max_prompts * len(tune.temperatures) * tune.repeats * benchmark.max_new_tokens
    confirmed = _suite_tokens(work.spec)
    hours = min(_hours(raced * work.flops_per_token, rates.single), tune.budget_s / _SECONDS_PER_HOUR)
    tuned = 1 + _tunes_rival(work.spec)
    return StagePlan(stage="tune", tokens=tuned * (raced + confirmed), bytes_on_disk=0, bound_by="memory bandwidth",
                     hours=tuned * (hours + _hours(confirmed * work.flops_per_token, rates.single)))


def _tunes_rival(spec: JobSpec) -> bool:
    return spec.promotion.beat == "rivals" and bool(spec.rival_drafters)


def _prove(work: _Work, rates: Rates) -> StagePlan:
    """Parity (two servers and the reference engine), then every declared load and the changed system prompt, each with
    and without the drafter, and with a rival that the winner has to beat."""
    prove = work.spec.prove
    each = (2 + _tunes_rival(work.spec)) * prove.requests * prove.max_new_tokens
    together = each * sum(load > 1 for load in prove.loads)
    alone = (each * (sum(load <= 1 for load in prove.loads) + bool(prove.system_prompt))
             + 3 * prove.parity_prompts * prove.max_new_tokens)
    return StagePlan(stage="prove", tokens=alone + together, bytes_on_disk=0, bound_by="memory bandwidth",
                     hours=_hours(alone * work.flops_per_token, rates.single)
                     + _hours(together * work.flops_per_token, rates.decode))


def _hardware(work: _Work, rates: Rates | None, default_gpus: int) -> tuple[StagePlan, ...]:
    """Each profile of `prove.hardware`: its server without a drafter before and after the one with it, at every load.

    rates          of this machine, if they were set
    default_gpus   of a profile that names no number
    """
    prove, hardware = work.spec.prove, work.spec.prove.hardware
    if hardware is None:
        return ()
    loads = hardware.concurrencies or prove.loads
    # At least two requests per user in each of two blocks.
    alone = 3 * prove.max_new_tokens * sum(max(prove.requests, 4 * load) for load in loads if load <= 1)
    together = 3 * prove.max_new_tokens * sum(max(prove.requests, 4 * load) for load in loads if load > 1)

    def hours(rates: Rates) -> float:
        return (_hours(alone * work.flops_per_token, rates.single)
                + _hours(together * work.flops_per_token, rates.decode))

    found = []
    for one in hardware.profiles:
        num_gpus = default_gpus if one.placement.num_gpus is None else one.placement.num_gpus
        label = one.placement.gpu_type or _label(work.spec, "prove")
        plan = StagePlan(stage="hardware", key=one.name, tokens=alone + together, bytes_on_disk=0,
                         hours=hours(rates or Rates()))
        if rates is None and num_gpus:
            low, middle, high = (hours(_gpu_rates(work, label, speed, num_gpus, num_gpus, max(loads)))
                                 for speed in ("high", "expected", "low"))
            plan = plan.model_copy(update={
                "hours": middle, "hours_range": Interval(low=low, high=high), "num_gpus": num_gpus,
                "gpu_type": (known_gpu(label) or ASSUMED).name, "cost": middle * one.price_per_hour,
                "bound_by": "memory bandwidth"})
        found.append(plan)
    return tuple(found)


def tree_shapes(tune: TuneSpec) -> tuple[DraftTreeShape, ...]:
    """The valid shapes of the grid: one chain per depth, and the trees whose depth and width allow that many nodes."""
    shapes: list[DraftTreeShape] = []
    for depth in tune.num_steps:
        for width in tune.top_k:
            for nodes in (depth + 1,) if width == 1 else tune.num_draft_tokens:
                try:
                    shapes.append(DraftTreeShape(num_steps=depth, top_k=width, num_draft_tokens=nodes))
                except ValidationError:
                    continue  # invalid shapes of the grid are skipped
    return tuple(dict.fromkeys(shapes))


def _warnings(work: _Work, candidates: Sequence[Candidate]) -> tuple[str, ...]:
    found = []
    if work.data.prompt_tokens is None:
        found.append("row lengths are the limits of the spec: tokens, bytes and hours are upper bounds")
    capture = work.spec.capture
    if not work.within_budget:
        found.append(f"no codec fits capture.max_bytes {capture.max_bytes}: {work.captured} tokens of which "
                     f"{work.supervised} answer need more")
    elif (work.stored.codec, work.stored.final_state) != (capture.codec, capture.final_state):
        found.append(f"states will be stored as {work.stored.name}: capture.codec {capture.codec} does not fit "
                     f"capture.max_bytes {capture.max_bytes}")
    if work.prompt + work.answer > work.spec.capture.max_length:
        found.append(f"rows of up to {work.prompt + work.answer:.0f} tokens are cut at capture.max_length "
                     f"{work.spec.capture.max_length}")
    stored, asked = work.target.dtype, work.spec.target.dtype
    if work.num_gpus and asked == "float32" and stored in ("bfloat16", "float16"):
        found.append(f"target.dtype is float32 and the checkpoint stores {stored}, which takes half of the "
                     f"memory: set target.dtype {stored}")
    unknown = sorted({one.drafter.family for one in candidates if not FAMILIES[one.drafter.family].step_cost_known})
    if work.num_gpus and unknown:
        found.append(f"the memory of a training step of {', '.join(unknown)} is not known before it runs: should a GPU "
                     "run out of it, lower train.max_tokens_per_gpu")
    smallest = min(work.step_tokens(candidate) for candidate in candidates)
    if work.trained < 10 * smallest:
        found.append(f"{work.trained} captured tokens are fewer than ten batches of {smallest}: expect a weak drafter")
    rows, candidate, name = work.scarcest
    if candidate and rows < _LITTLE_OF_THE_UNION * work.rows:
        found.append(f"every candidate trains on {rows} of {work.rows} captured rows: candidate {candidate} takes all "
                     f"of source {name}; give it a larger weight in data.sources, or a smaller share in the mixes")
    return tuple(found)


def _why_stored(work: _Work) -> str:
    if work.streamed:
        return "capture.codec; in memory alone, capture.feed: stream"
    return "capture.codec" if work.spec.capture.max_bytes is None else "capture.max_bytes"


def _training_memory(work: _Work, candidates: Sequence[Candidate]) -> tuple[Assumption, ...]:
    """Tokens of a step, and on GPUs the memory that the candidate with the highest need takes of each."""
    trainings = [found for candidate in candidates
                 if (found := _training_on_gpus(work, candidate)) is not None]
    given = candidates[0].train.max_tokens_per_batch is not None
    tokens = Assumption(
        name="tokens per training step", value=float(work.step_tokens(candidates[0])), unit="tokens",
        source="train.max_tokens_per_batch" if given else f"default for {work.num_gpus} GPUs (0: on CPUs)")
    if not trainings:
        return (tokens,)
    device = gpu_bytes(_planned_gpu(work.spec))
    assumed = "" if device else "; for a GPU of 80 GB: placement names none"
    highest = max(trainings, key=lambda one: one.need(device or _ASSUMED_GPU_BYTES).total)
    need = highest.need(device or _ASSUMED_GPU_BYTES)
    largest = f"{need.largest} {need.components[need.largest] / 1e9:.1f} GB"
    fits = need.total <= usable_bytes(device or _ASSUMED_GPU_BYTES)
    at_a_time = "train.max_tokens_per_gpu" if any(one.train.max_tokens_per_gpu for one in candidates) else (
        f"{'the largest that fits, of' if fits else 'not fitting, like all of'} {GPU_TOKENS}, its half, its quarter, "
        f"...{assumed}")
    return (tokens, Assumption(
        name="training tokens at a time on each GPU", value=float(highest.tokens), unit="tokens", source=at_a_time,
    ), Assumption(
        name="training memory of each GPU", value=round(need.total / 1e9, 1), unit="GB",
        source=f"computed, not measured (decisions.training_cost); most of it: {largest}{assumed}"))


def _in_unit(num_bytes: float) -> tuple[float, str]:
    """Bytes as value and unit: MB below a tenth of a GB, so that a small model is not 0."""
    return (round(num_bytes / 1e9, 2), "GB") if num_bytes >= 1e8 else (round(num_bytes / 1e6, 2), "MB")


def _rates_named(used: Mapping[str, Rates], counts: Mapping[str, int]) -> tuple[Assumption, ...]:
    """The rates that hours rest on, each of the stage where it matters."""
    named = (("prefill rate", "capture", used["capture"].prefill),
             ("decode rate, many requests", "regenerate", used["regenerate"].decode),
             ("decode rate, one request", "prove", used["prove"].single),
             ("training rate", "train", used["train"].train))
    found = [Assumption(name=name, value=round(value, 1), unit="GFLOP/s", source=used[stage].source)
             for name, stage, value in named]
    store = used["capture"].store_bytes_per_s
    if counts["capture"] and store is not None:
        found.append(Assumption(name="transfer of states", value=store / 1e9, unit="GB/s",
                                source="an assumption (0.3 to 3): a pod and an object store or shared file system"))
    return tuple(found)


def _assumptions(work: _Work, candidates: Sequence[Candidate], used: Mapping[str, Rates],
                 counts: Mapping[str, int]) -> tuple[Assumption, ...]:
    target, data, dtype = work.target, work.data, work.spec.resolved_target.dtype

    def say(name: str, value: float, unit: str, source: str) -> Assumption:
        return Assumption(name=name, value=float(value), unit=unit, source=source)

    return (
        say("rows answered", work.rows, "rows", data.source if data.rows is not None else "data.max_conversations"),
        say("prompt length", work.prompt, "tokens", data.source),
        say("answer length", work.answer, "tokens",
            data.source if data.answer_tokens is not None else "regenerate.max_new_tokens (an upper bound)"),
        say("hidden size", target.hidden_size, "values", target.source),
        say("target parameters", target.parameters, "parameters", f"estimated from {target.source}"),
        say("target weights", *_in_unit(target.parameters * (4 if dtype == "float32" else 2)),
            f"{dtype}: target.dtype; auto is the checkpoint's on GPUs and float32 on CPUs"),
        say("drafter parameters", target.drafter_parameters(candidates[0]), "parameters",
            f"estimated for candidate {candidates[0].name}"),
        say("states of every token", work.num_aux, "layers",
            f"what {', '.join(families_of(candidates))} read"
            + ("" if work.spec.capture.aux_layers else "; by default low, middle and high are fused")),
        say("streamed states" if work.streamed else "stored states", work.state_bytes, "bytes per token",
            f"{work.stored.name}: {_why_stored(work)}"),
        say("token id and loss mask", ID_AND_MASK_BYTES, "bytes per token", "layout of the store"),
        say("candidates", len(candidates), "drafters", "sweep"),
        *_training_memory(work, candidates),
        *_rates_named(used, counts),
    )
