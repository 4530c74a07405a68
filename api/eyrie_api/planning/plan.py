"""Estimates the tokens, bytes on disk and hours of a job before it runs. Pure; every assumption is listed in the plan.

    plan_work      sizes of target and data; rows, tokens and bytes of the job
    plan_stages    each stage at given rates, and its use of an object store

The rates are those of the GPUs that the job requests (`planning.hardware`), with a range; without GPUs they are
settings with measured defaults, and a plan is accurate to about a factor of two of what is computed.
"""

from collections.abc import Iterator, Mapping, Sequence

from eyrie_api.artifacts.store_prices import StorePrices
from eyrie_api.contract.capture import ID_AND_MASK_BYTES
from eyrie_api.contract.data import FEW_ROWS
from eyrie_api.contract.families import FAMILIES
from eyrie_api.contract.model import Interval
from eyrie_api.contract.placement import StageKey
from eyrie_api.contract.plan import Assumption, Plan, Present, ServingMemory, StageComparison, StagePlan
from eyrie_api.contract.resolved import ResolvedJob
from eyrie_api.contract.targets import ELEMENT_BYTES
from eyrie_api.contract.tuning import FINAL_TIMES
from eyrie_api.planning.hardware import (
    ASSUMED,
    BATCH,
    Rates,
    Speed,
    fitting_sizes,
    gpu_rates,
    known_gpu,
    serving_memory,
    start_seconds,
)
from eyrie_api.planning.needed_tau import plan_needed_tau
from eyrie_api.planning.plan_stages import (
    ObjectStore,
    hours_of,
    plan_benchmark,
    plan_capture,
    plan_prove,
    plan_regenerate,
    plan_train,
    plan_tune,
    starts,
    with_store_use,
)
from eyrie_api.planning.plan_work import (
    ASSUMED_GPU_BYTES,
    LEAST_DRAFT_VOCABULARY,
    DataFacts,
    PlannedWork,
    TargetFacts,
    largest_draft_vocabulary,
    regeneration_bytes,
    training_gpus,
    training_on_gpus,
)
from eyrie_api.planning.training_cost import usable_bytes
from eyrie_api.planning.training_defaults import GPU_TOKENS, gpu_bytes
from eyrie_api.quantities import duration, size

_LITTLE_OF_THE_UNION = 0.5
"""Share of the captured rows below which a draw for `data.mix` is warned of."""


def make_plan(job: ResolvedJob, target_facts: TargetFacts, free_bytes: int | None, *,
              data_facts: DataFacts | None = None, rates: Rates | None = None, on_gpus: bool = False,
              gpu_hour_prices: Mapping[str, float] | None = None, store: ObjectStore | None = None,
              gpu_memory: int | None = None) -> Plan:
    """The cost of a job with all its candidates for a target, stage by stage.

    free_bytes        free space where the job would write, None when unknown
    rates             of this machine, if they were set; by default those of the GPUs that the job requests, or measured
                      ones of a CPU
    on_gpus           whether the job computes on GPUs although it requests none: those of its machine
    gpu_hour_prices   by node label of the type
    store             where the job's stages exchange files; None: on this machine, or on a volume
    gpu_memory        bytes of a GPU of this machine, for those that the job names no type of
    """
    work = PlannedWork(job, target_facts, data_facts or DataFacts())
    counts: dict[str, int] = {stage: stage_gpus(job, stage, on_gpus) for stage in work.stages}
    used: dict[str, Rates] = {stage: rates or _rates_of(work, stage, counts[stage], "expected")
                              for stage in work.stages}
    stages = tuple(_stage(work, stage, counts, "expected", rates) for stage in work.stages)
    if rates is None and any(counts.values()):
        speeds: tuple[Speed, Speed] = ("low", "high")
        slow, fast = ([_stage(work, stage, counts, speed) for stage in work.stages] for speed in speeds)
        stages = tuple(_on_gpus(work, _with_hint(work, plan, counts, gpu_memory), counts[plan.stage],
                                gpu_hour_prices or {}, (least.hours, most.hours)) if counts[plan.stage] else plan
                       for plan, least, most in zip(stages, fast, slow, strict=True))
    stages = tuple(plan if plan.num_gpus else plan.model_copy(update={"bound_by": ""}) for plan in stages)
    stages += _hardware(work, rates, counts["prove"])
    if store is not None:
        stages = with_store_use(stages, work, store)
    uses = [stage.store for stage in stages if stage.store is not None]
    ranges = [use.cost_range for use in uses if use.cost_range is not None]
    total = sum(stage.bytes_on_disk for stage in stages)
    warnings = list(_warnings(work))
    labels = {job.gpus[stage].gpu_type for stage in work.stages if counts[stage]}
    if rates is None and (unknown := sorted(label or "none" for label in labels if known_gpu(label) is None)):
        warnings.append(f"hours are those of an {ASSUMED.name}: the job's type of GPU ({', '.join(unknown)}) has no "
                        "figures here; name it in placement.every.gpu_type, or set EYRIE_*_GFLOPS")
    fits = None if free_bytes is None else total <= free_bytes
    if fits is False:
        warnings.append(f"the job needs {size(total)} on disk and {size(free_bytes or 0)} are free: lower "
                        "data.max_conversations or capture.max_length, or set capture.codec int4")
    if not work.within_budget:
        fits = False
    present = _present(work)
    hours, slowest = sum(stage.hours for stage in stages), max(stages, key=lambda stage: stage.hours)
    limited = f", bound by {slowest.bound_by}" if slowest.bound_by else ""
    serving = _serving(work, counts["prove"], gpu_memory)
    if serving is not None and serving.users_that_fit < serving.users:
        warnings.append(f"{serving.users_that_fit} of the {serving.users} declared users fit the endpoint: "
                        f"{serving.words.partition('; ')[0]}; raise engine.tp_size, or lower prove.concurrencies")
    costs = [stage.cost for stage in stages if stage.num_gpus]
    return Plan(
        stages=stages, total_tokens=sum(stage.tokens for stage in stages), total_bytes_on_disk=total,
        total_hours=hours, bytes_per_token=work.state_bytes,
        bottleneck=f"{slowest.stage} takes {slowest.hours / hours:.0%} of the time{limited}" if hours else "",
        total_gpu_hours=sum(stage.gpu_hours for stage in stages),
        total_cost=sum(cost for cost in costs if cost is not None) if costs and None not in costs else None,
        total_store_cost=sum(use.cost or 0.0 for use in uses) if ranges else None,
        total_store_cost_range=Interval(low=sum(cost.low for cost in ranges), high=sum(cost.high for cost in ranges))
        if ranges else None,
        # Of what the job leaves in the store.
        store_month_cost=None if store is None or store.prices is None else total / 1e12 * store.prices.storage,
        assumptions=(*_assumptions(work, used, counts), *_store_assumptions(None if store is None else store.prices)),
        warnings=tuple(warnings), present=present, needed_tau=plan_needed_tau(work, used["prove"]),
        notes=(*((present.words,) if present else ()),
               "prove measures every load until it is clear whether the drafter is faster: where other work disturbs "
               f"it, up to {duration(3600 * plan_prove(work, used['prove'], work.spec.prove.most_pairs).hours)} "
               "(prove.most_pairs); tune measures required suites that their prompts do not decide on further ones, up "
               f"to {duration(3600 * plan_tune(work, used['tune'], FINAL_TIMES).hours)}",
               *map(_description, job.families),
               *(f"{drafter.checkpoint}: benchmarked like a checkpoint, from "
                 + (drafter.path or ("the target's MTP layers" if drafter.method == "nextn" else "the text itself"))
                 for drafter in job.brought)),
        fits_disk=fits, candidate_rows=work.candidate_rows, serving=serving)


def _description(family: str) -> str:
    row = FAMILIES[family]
    engine = (f"SGLang serves it as {row.sglang_algorithm}" if row.sglang_algorithm
              else "served by the embedded engine alone")
    measured = "not measured" if row.quickstart_speedup is None else f"{row.quickstart_speedup:.2f}x"
    return (f"{family}: for {row.best_for}; drafting takes {row.drafting_cost}; {measured} on the "
            f"quickstart target, trained for 100 s; {engine}")


def _stage(work: PlannedWork, stage: StageKey, counts: Mapping[str, int], speed: Speed,
           rates: Rates | None = None) -> StagePlan:
    """With its starts, where it computes on GPUs. `rates` are those of this machine, if they were set."""
    plans = {"regenerate": plan_regenerate, "capture": plan_capture, "train": plan_train, "benchmark": plan_benchmark,
             "tune": plan_tune, "prove": plan_prove}
    plan = plans[stage](work, rates or _rates_of(work, stage, counts[stage], speed))
    start_s = starts(work, counts).get(stage, 0) * start_seconds(work, stage, speed)
    return plan.model_copy(update={"hours": plan.hours + start_s / 3600})


_SHORTER = 0.8
"""Of a stage's hours: what a change leaves at most that a hint names."""

_LONG_ANSWER = 256
"""Tokens, with which speed is measured as well as with more."""


def _with_hint(work: PlannedWork, plan: StagePlan, counts: Mapping[str, int], gpu_memory: int | None) -> StagePlan:
    """With the first field that shortens the stage by much, and its hours with another value."""
    for field, value in _changes(work, plan, counts[plan.stage], gpu_memory):
        section, name = field.split(".")
        before, stage = getattr(work.spec, section), plan.stage
        spec = work.spec.model_copy(update={section: before.model_copy(update={name: value})})
        other = PlannedWork(work.job.model_copy(update={"spec": spec}), work.target, work.data)
        hours = _stage(other, stage, counts, "expected").hours  # type: ignore[arg-type]
        if hours < _SHORTER * plan.hours:
            return plan.model_copy(update={
                "hint": f"{field} is {getattr(before, name)}; with {value} {stage} takes {duration(3600 * hours)} in "
                        f"place of {duration(3600 * plan.hours)}",
                "bound_by": "requests at once" if name == "concurrency" else plan.bound_by})
    return plan


def _changes(work: PlannedWork, plan: StagePlan, num_gpus: int, gpu_memory: int | None) -> Iterator[tuple[str, object]]:
    """Values of fields that may shorten a stage on GPUs."""
    spec, tp_size = work.spec, work.spec.engine.tp_size
    if plan.stage == "regenerate" and plan.bound_by == "memory bandwidth":
        memory = serving_memory(work, work.job.gpus["regenerate"].gpu_type, tp_size, gpu_memory)
        held = BATCH * tp_size if memory is None else min(BATCH * tp_size, memory.users_that_fit)
        yield "regenerate.concurrency", max(1, num_gpus // tp_size) * held
    if plan.bound_by == "storage" and spec.capture.codec != "int4":
        yield "capture.codec", "int4"
    if plan.stage == "benchmark" and spec.benchmark.max_new_tokens > _LONG_ANSWER:
        yield "benchmark.max_new_tokens", _LONG_ANSWER
    if plan.stage in ("tune", "prove") and spec.engine.kind == "sglang":  # one server at a time
        larger = [number for number in fitting_sizes(work.target) if tp_size < number <= num_gpus]
        yield from (("engine.tp_size", number) for number in larger[-1:])


def _serving(work: PlannedWork, prove_gpus: int, gpu_memory: int | None) -> ServingMemory | None:
    """Of the job's endpoint, on the GPUs of its placement or those that the proof has."""
    spec, placed = work.spec, work.job.serving_gpus
    if spec.promotion.mode == "never" or not spec.serve.enabled or placed.num_gpus == 0 or not (
            placed.num_gpus or prove_gpus):
        return None
    num_gpus = max(spec.engine.tp_size, placed.num_gpus or 0) if spec.engine.kind == "sglang" else 1
    return serving_memory(work, placed.gpu_type or work.job.gpus["prove"].gpu_type, num_gpus, gpu_memory)


def stage_gpus(job: ResolvedJob, stage: StageKey, on_gpus: bool) -> int:
    """GPUs that a stage computes on together; 0: CPUs. On one machine an engine's GPUs are those of every stage."""
    placed = job.gpus[stage].num_gpus
    if placed is None:
        return job.spec.engine.num_gpus or int(on_gpus)
    return training_gpus(job) if stage == "train" else placed


def _rates_of(work: PlannedWork, stage: StageKey, num_gpus: int, speed: Speed) -> Rates:
    if not num_gpus:
        return Rates()
    spec, tp_size = work.spec, 1 if stage == "train" else work.spec.engine.tp_size
    # Checkpoints and data are divided over all GPUs; settings and loads are measured with one server at a time.
    together = num_gpus if stage in ("regenerate", "capture", "train", "benchmark") else tp_size
    servers = max(1, together // tp_size)
    loads = {"regenerate": spec.regenerate.concurrency, "benchmark": servers * max(spec.benchmark.concurrencies),
             "tune": max(spec.tune.concurrencies), "prove": max(spec.prove.concurrencies)}
    return _gpu_rates(work, work.job.gpus[stage].gpu_type, speed, together, tp_size, int(loads.get(stage, 1)),
                      servers if stage == "benchmark" else 1)


def _gpu_rates(work: PlannedWork, label: str | None, speed: Speed, num_gpus: int, tp_size: int, batch: int,
               num_alone: int = 1) -> Rates:
    return gpu_rates(
        known_gpu(label) or ASSUMED, speed, num_gpus=num_gpus, tp_size=tp_size, batch=batch, num_alone=num_alone,
        weight_bytes=work.weight_bytes / work.target.parameters, compute_bytes=ELEMENT_BYTES[work.job.target.dtype],
        active_share=work.target.active_parameters / work.target.parameters)


def _on_gpus(work: PlannedWork, plan: StagePlan, num_gpus: int, prices: Mapping[str, float],
             hours_range: tuple[float, float]) -> StagePlan:
    label = work.job.gpus[plan.stage].gpu_type  # type: ignore[index]
    price = prices.get(label or "")
    return plan.model_copy(update={
        "num_gpus": num_gpus, "gpu_type": (known_gpu(label) or ASSUMED).name,
        "hours_range": Interval(low=hours_range[0], high=hours_range[1]),
        "cost": None if price is None else plan.hours * num_gpus * price})


def _hardware(work: PlannedWork, rates: Rates | None, default_gpus: int) -> tuple[StagePlan, ...]:
    """Each profile of `prove.hardware`: its server without a drafter before and after the one with it, at every load.

    rates          of this machine, if they were set
    default_gpus   of a profile that names no number
    """
    prove, hardware = work.spec.prove, work.spec.prove.hardware
    if hardware is None:
        return ()
    loads = hardware.concurrencies or prove.concurrencies
    # At least two requests per user in each of two blocks.
    alone = 3 * prove.max_new_tokens * sum(max(prove.requests, 4 * load) for load in loads if load <= 1)
    together = 3 * prove.max_new_tokens * sum(max(prove.requests, 4 * load) for load in loads if load > 1)

    def hours(rates: Rates, start_s: float = 0.0) -> float:
        return (2 * start_s / 3600 + hours_of(alone * work.flops_per_token, rates.single)
                + hours_of(together * work.flops_per_token, rates.decode))

    plans = []
    for profile in hardware.profiles:
        num_gpus = default_gpus if profile.placement.num_gpus is None else profile.placement.num_gpus
        label = profile.placement.gpu_type or work.job.gpus["prove"].gpu_type
        plan = StagePlan(stage="hardware", key=profile.name, tokens=alone + together, bytes_on_disk=0,
                         hours=hours(rates or Rates()))
        if rates is None and num_gpus:
            low, middle, high = (hours(_gpu_rates(work, label, speed, num_gpus, num_gpus, max(loads)),
                                       start_seconds(work, "prove", speed)) for speed in ("high", "expected", "low"))
            plan = plan.model_copy(update={
                "hours": middle, "hours_range": Interval(low=low, high=high), "num_gpus": num_gpus,
                "gpu_type": (known_gpu(label) or ASSUMED).name, "cost": middle * profile.price_per_hour,
                "bound_by": "memory bandwidth"})
        plans.append(plan)
    return tuple(plans)


def _present(work: PlannedWork) -> Present | None:
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


def _warnings(work: PlannedWork) -> tuple[str, ...]:
    warnings, job = [], work.job
    if not work.spec.trains:
        return ()
    if work.data.prompt_tokens is None:
        warnings.append("row lengths are the limits of the spec: tokens, bytes and hours are upper bounds")
    capture = work.spec.capture
    if not work.within_budget:
        warnings.append(f"no codec fits capture.max_bytes {size(capture.max_bytes or 0)}: {work.captured:,} tokens of "
                        f"which {work.supervised:,} answer need more; raise it, or lower data.max_conversations")
    elif (work.stored.codec, work.stored.final_state) != (capture.codec, capture.final_state):
        warnings.append(f"states will be stored as {work.stored.name}: capture.codec {capture.codec} does not fit "
                        f"capture.max_bytes {size(capture.max_bytes or 0)}")
    if work.prompt + work.answer > work.spec.capture.max_length:
        warnings.append(f"rows of up to {work.prompt + work.answer:.0f} tokens are cut at capture.max_length "
                        f"{work.spec.capture.max_length}")
    stored, requested = work.target.dtype, job.target.dtype
    if work.num_gpus and requested == "float32" and stored in ("bfloat16", "float16"):
        warnings.append(f"target.dtype is float32 and the checkpoint stores {stored}, which takes half of the "
                        f"memory: set target.dtype {stored}")
    unknown = sorted(family for family in job.families if not FAMILIES[family].step_cost_known)
    if work.num_gpus and unknown:
        warnings.append(f"the memory of a training step of {', '.join(unknown)} is not known before it runs: should a "
                        "GPU run out of it, lower train.max_tokens_per_gpu")
    smallest = min(map(work.step_tokens, job.candidates))
    if work.trained < 10 * smallest:
        warnings.append(f"{work.trained} captured tokens are fewer than ten batches of {smallest}: expect a weak "
                        "drafter")
    warnings += work.data.not_usable
    if work.rows < FEW_ROWS:
        warnings.append(f"at most {work.rows} conversations are left to train on, fewer than {FEW_ROWS}: expect a weak "
                        "drafter, and figures that vary by chance; give more in data.sources, or raise "
                        "data.max_conversations")
    rows, candidate, name = work.scarcest
    if candidate and rows < _LITTLE_OF_THE_UNION * work.rows:
        warnings.append(f"every candidate trains on {rows} of {work.rows} captured rows: candidate {candidate} takes "
                        f"all of source {name}; give it a larger weight in data.sources, or a smaller share in the "
                        "mixes")
    return tuple(warnings)


def _say(name: str, value: float, unit: str, source: str) -> Assumption:
    return Assumption(name=name, value=float(value), unit=unit, source=source)


def _assumptions(work: PlannedWork, used: Mapping[str, Rates], counts: Mapping[str, int]) -> tuple[Assumption, ...]:
    target, data, job = work.target, work.data, work.job
    # In MB below a tenth of a GB, so that a small model is not 0.
    weights, unit = (work.weight_bytes / 1e9, "GB") if work.weight_bytes >= 1e8 else (work.weight_bytes / 1e6, "MB")
    why_stored = "capture.codec" if work.spec.capture.max_bytes is None else "capture.max_bytes"
    if work.streamed:
        why_stored = "capture.codec; in memory alone, capture.mode: stream"

    of_target = (
        _say("hidden size", target.hidden_size, "values", target.source),
        _say("target parameters", target.parameters, "parameters", f"estimated from {target.source}"),
        _say("target weights", round(weights, 2), unit,
             "as SGLang loads them quantised: the files, else their index, else config.json"
             if target.quantised_bytes is not None else
             f"{job.target.dtype}: target.dtype; auto is the checkpoint's on GPUs and float32 on CPUs"))
    if not job.spec.trains:
        return (*of_target, *_rates_named(used, counts), *_starts_named(work, counts))
    first, largest = job.candidates[0], largest_draft_vocabulary(target.vocab_size)
    # A draft vocabulary that the job leaves open, and so the drafter's size, is known once there are answers.
    is_open = first.drafter.draft_vocab_size is None and not FAMILIES[first.drafter.family].whole_vocabulary
    at_most = f", at most: with {largest} draft tokens; the job takes as many as its answers need" if (
        is_open and largest > LEAST_DRAFT_VOCABULARY) else ""
    return (
        _say("rows answered", work.rows, "rows", data.source if data.rows is not None else "data.max_conversations"),
        _say("prompt length", work.prompt, "tokens", data.source),
        _say("answer length", work.answer, "tokens",
             data.source if data.answer_tokens is not None else "regenerate.max_new_tokens (an upper bound)"),
        *of_target,
        _say("drafter parameters", work.drafter(first).parameters, "parameters",
             f"estimated for candidate {first.name}{at_most}"),
        _say("states of every token", work.num_aux, "layers",
             f"what {', '.join(job.families)} read"
             + ("" if work.spec.capture.aux_layers else "; by default low, middle and high are fused")),
        _say("streamed states" if work.streamed else "stored states", work.state_bytes, "bytes per token",
             f"{work.stored.name}: {why_stored}"),
        _say("token id and loss mask", ID_AND_MASK_BYTES, "bytes per token", "layout of the store"),
        _say("candidates", len(job.candidates), "drafters", "sweep"),
        *_regeneration_memory(work, counts),
        *_training_memory(work),
        *_rates_named(used, counts),
        *_starts_named(work, counts),
        _say("speed-up that the tau needed is for", job.spec.promotion.min_speedup, "x over no drafter",
             f"promotion.min_speedup; a drafter like candidate {first.name}, predicted from the prefill "
             "rate and the decode rate of one request, without KV cache and launches; tune times its rounds"),
    )


def _starts_named(work: PlannedWork, counts: Mapping[str, int]) -> tuple[Assumption, ...]:
    """Seconds of a start on GPUs, by the stage with the most, and how often there is one."""
    started = starts(work, counts)
    if not started:
        return ()
    most = max(started, key=lambda stage: started[stage])
    fast, middle, slow = (round(start_seconds(work, most, speed)) for speed in ("high", "expected", "low"))
    often = ", ".join(f"{stage} {number}" for stage, number in started.items())
    return (_say("start with the target's weights", middle, "s",
                 f"assumed, {fast} to {slow} s in {most}; starts by stage: {often}"),)


def _regeneration_memory(work: PlannedWork, counts: Mapping[str, int]) -> tuple[Assumption, ...]:
    """Of the embedded engine on a CPU."""
    spec, section = work.spec, work.spec.regenerate
    if spec.data.answered or counts.get("regenerate") or (section.engine or spec.engine.kind) != "embedded":
        return ()
    longest = spec.data.max_prompt_tokens + max(
        section.max_new_tokens, *(source.max_new_tokens or 0 for source in spec.data.sources))
    most = regeneration_bytes(work.target, work.weight_bytes, work.job.target.dtype, section.concurrency, longest)
    return (_say("memory of regenerate", round(most / 1e9, 1), "GB",
                 f"computed, at most: weights, {section.concurrency} texts (regenerate.concurrency) of {longest} "
                 "tokens (data.max_prompt_tokens and the longest answer), and 1 GB"),)


def _training_memory(work: PlannedWork) -> tuple[Assumption, ...]:
    """Tokens of a step, and on GPUs the memory that the candidate with the highest need takes of each."""
    candidates = work.job.candidates
    trainings = [training for candidate in candidates if (training := training_on_gpus(work, candidate)) is not None]
    given = candidates[0].train.max_tokens_per_batch is not None
    tokens = _say("tokens per training step", work.step_tokens(candidates[0]), "tokens",
                  "train.max_tokens_per_batch" if given else
                  f"default for {work.num_gpus} GPUs (0: on CPUs) and {work.trained} tokens of an epoch")
    if not trainings:
        return (tokens,)
    known = gpu_bytes(work.job.gpus["train"].gpu_type)
    device, assumed = known or ASSUMED_GPU_BYTES, "" if known else "; for a GPU of 80 GB: placement names none"
    highest = max(trainings, key=lambda training: training.need(device).total)
    need = highest.need(device)
    largest = f"{need.largest} {need.components[need.largest] / 1e9:.1f} GB"
    fits = need.total <= usable_bytes(device)
    at_a_time = "train.max_tokens_per_gpu" if any(candidate.train.max_tokens_per_gpu for candidate in candidates) else (
        f"{'the largest that fits, of' if fits else 'not fitting, like all of'} {GPU_TOKENS}, its half, its quarter, "
        f"...{assumed}")
    return (tokens, _say("training tokens at a time on each GPU", highest.tokens, "tokens", at_a_time),
            _say("training memory of each GPU", round(need.total / 1e9, 1), "GB",
                 f"computed, not measured (decisions.training_cost); most of it: {largest}{assumed}"))


_RATES = (("prefill rate", "prefill", ("capture",)), ("decode rate, many requests", "decode", ("regenerate",)),
          ("decode rate, one request", "single", ("prove", "tune", "benchmark")),
          ("training rate", "train", ("train",)))
"""Each rate's name as an assumption, its field of `Rates`, and the stages whose hours rest on it."""


def measured_rates(plan: Plan, stages: Sequence[StageComparison]) -> dict[str, float]:
    """Settings of the control plane with which a plan's hours on CPUs would be those that its finished stages took. A
    stage with work of several kinds counts as its main one. Pure."""
    assumed, settings = {assumption.name: assumption.value for assumption in plan.assumptions}, {}
    for name, field, of_stages in _RATES:
        rows = [row for row in stages if row.stage in of_stages and row.time_ratio and row.size_bytes is not None
                and row.planned is not None and not row.planned.num_gpus]
        if rows and name in assumed:
            share = sum(row.planned_seconds or 0.0 for row in rows) / sum(row.seconds or 0.0 for row in rows)
            settings[f"EYRIE_{field.upper()}_GFLOPS"] = float(f"{assumed[name] * share:.3g}")
    return settings


def _rates_named(used: Mapping[str, Rates], counts: Mapping[str, int]) -> tuple[Assumption, ...]:
    """The rates that hours rest on, each of the stage where it matters."""
    rates = [_say(name, round(getattr(used[first], field), 1), "GFLOP/s", used[first].source)
             for name, field, (first, *_) in _RATES if first in used]
    store = used["capture"].store_bytes_per_s if "capture" in used else None
    if counts.get("capture") and store is not None:
        rates.append(_say("transfer of states", store / 1e9, "GB/s",
                          "an assumption (0.3 to 3): a pod and an object store or shared file system"))
    return tuple(rates)


def _store_assumptions(prices: StorePrices | None) -> tuple[Assumption, ...]:
    return () if prices is None else tuple(
        _say(f"{prices.name}: {name}", value, unit, prices.source) for name, value, unit in (
        ("storage", round(prices.storage, 3), "per TB (10^12 bytes) and month"),
        ("writing requests", prices.put, "per million"), ("reading requests", prices.get, "per million"),
        ("traffic", prices.traffic, "per TB read; 0 within the provider's region")))
