"""Tokens, bytes and hours of each stage, at given rates, and what it costs in the object store of a cluster. Pure.

Time is FLOPs / effective FLOP/s by kind of work: 2 FLOPs per parameter and token for the target; for training those of
`planning.training_cost` where it describes the family's step, else 6 per drafter parameter and pass of a token through
the drafter (`DrafterFamily.training_passes`); on CPUs each step adds what it takes whatever its
size. Candidates stopped at a rung skip the rest. Hours are of stages, and of a stage's parts, one after the other. On
GPUs each start of a program or server with the target (`starts`) is added by `planning.plan`; on CPUs it is not
counted, and is most of a job of minutes.

The use of an object store is objects, requests, bytes read, and the time that bytes stay. Counted is what grows with
the job: answers, hidden states and exported drafters, in parts as the store transfers them. Not counted are single
small files, and the uploads of unfinished work, which depend on how often a pod is killed. States stay from capture to
the end of the job, and after it until `eyrie storage --clean` removes them: a plan says what each month costs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from eyrie_api.artifacts.store_prices import StorePrices
from eyrie_api.contract.capture import ID_AND_MASK_BYTES
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.load import fewest_requests
from eyrie_api.contract.model import Interval
from eyrie_api.contract.placement import StageKey
from eyrie_api.contract.plan import StagePlan, StoreUse
from eyrie_api.contract.resolved import ResolvedJob
from eyrie_api.contract.tuning import TuneSpec
from eyrie_api.planning.hardware import Rates
from eyrie_api.planning.plan_work import PlannedWork, share_of_steps, shared_tokens, tokens_seen, training_flops
from eyrie_api.planning.sweep import may_train_together
from eyrie_api.quantities import duration

_HOURS_PER_MONTH = 730.0
_SMALL_FILES = 4
"""Manifest, log, events and spec of a stage."""

ROW_JSON_BYTES_PER_TOKEN = 6
"""Token ids as decimal text with a comma."""

_SECONDS_PER_HOUR = 3600.0


def hours_of(flops: float, gflops: float) -> float:
    """Of so many operations at a rate in 10^9 operations per second."""
    return flops / (gflops * 1e9) / _SECONDS_PER_HOUR


def _store_hours(num_bytes: float, rates: Rates) -> float:
    return 0.0 if rates.store_bytes_per_s is None else num_bytes / rates.store_bytes_per_s / _SECONDS_PER_HOUR


def starts(work: PlannedWork, num_gpus: Mapping[str, int]) -> dict[StageKey, int]:
    """How often the target is loaded, one start after the other, in each stage that computes on GPUs.

    In SGLang settings of a drafter are arguments of a server, so each is a start. On one machine the stages that
    measure share the server without a drafter and that of tuning's choice (`eyrie_workers.engines.server_keeper`);
    where the choice may change with the load, a server that follows the load is another.
    """
    spec = work.spec
    servers = max(1, num_gpus["benchmark"] // spec.engine.tp_size)  # that run side by side
    if spec.engine.kind != "sglang":
        benchmark = tune = prove = 1
    else:
        in_turn, rivals = math.ceil(_checkpoints(work.job) / servers), work.job.rivals_to_tune
        benchmark, tune, prove = 2 * in_turn, _variants(spec.tune) * (1 + rivals), 2 + rivals
        if not work.job.on_cluster:
            benchmark = in_turn + 1 if servers == 1 else 2 * in_turn
            tune = (_variants(spec.tune) - 1) * (1 + rivals) + (servers > 1)  # side by side they keep nothing
            prove = rivals + (len(set(spec.tune.concurrencies)) > 1)
    is_answered = spec.data.answered or work.present >= work.rows
    numbers: dict[StageKey, int] = {
        "regenerate": 0 if is_answered else 1, "capture": 0 if work.streamed else 1, "train": int(work.streamed),
        "benchmark": benchmark, "tune": tune, "prove": prove}
    return {stage: number for stage, number in numbers.items() if number and num_gpus.get(stage)}


def plan_regenerate(work: PlannedWork, rates: Rates) -> StagePlan:
    """Prompts are read and answers generated, without those that an earlier job has."""
    prompts, answers = round(work.rows * work.prompt), round(work.rows * work.answer)
    tokens = prompts + answers
    if work.spec.data.answered:
        return StagePlan(stage="regenerate", tokens=tokens, bytes_on_disk=tokens * ROW_JSON_BYTES_PER_TOKEN, hours=0.0)
    hours = (hours_of(prompts * work.flops_per_token, rates.prefill)
             + hours_of(answers * work.flops_per_token, rates.decode))
    return StagePlan(stage="regenerate", tokens=tokens, bytes_on_disk=tokens * ROW_JSON_BYTES_PER_TOKEN,
                     hours=hours * (1.0 - work.present / max(1, work.rows)),
                     bound_by="memory bandwidth" if rates.decode < rates.prefill else "compute")


def plan_capture(work: PlannedWork, rates: Rates) -> StagePlan:
    """A pass of the target over all rows; what is streamed is computed in training."""
    if work.streamed:  # only ids and masks are written; the target's forward passes run, and count, in training
        return StagePlan(stage="capture", tokens=work.captured,
                         bytes_on_disk=work.captured * ID_AND_MASK_BYTES, hours=0.0)
    computing = hours_of(work.captured * work.flops_per_token, rates.prefill) * (1.0 - work.states_share)
    storing = _store_hours(work.store_bytes * (1.0 + work.states_share), rates)  # what is copied is read first
    return StagePlan(stage="capture", tokens=work.captured, bytes_on_disk=work.store_bytes,
                     hours=max(computing, storing), bound_by="compute" if computing >= storing else "storage")


def plan_train(work: PlannedWork, rates: Rates) -> StagePlan:
    """All candidates, with the states that they read or that the target computes for them."""
    tokens = num_bytes = 0
    hours, share = 0.0, share_of_steps(work)
    for candidate in work.job.candidates:
        seen = tokens_seen(work, candidate)
        tokens += round(seen * share)
        hours += hours_of(training_flops(work, candidate, round(seen * share)), rates.train)
        # Exported checkpoints, and one resumable state: weights and two moments.
        num_bytes += work.drafter(candidate).parameters * 4 * (candidate.train.num_checkpoints + 3)
    reading = 0.0
    if work.streamed:
        hours += hours_of(shared_tokens(work) * work.flops_per_token, rates.prefill)
    else:
        shared = shared_tokens(work) * (work.state_bytes + ID_AND_MASK_BYTES)
        reading = _store_hours(shared, rates)
    plan = StagePlan(stage="train", tokens=tokens, bytes_on_disk=num_bytes, hours=max(hours, reading),
                     bound_by="compute" if hours >= reading else "storage")
    limit_s = sum(math.inf if candidate.train.max_seconds is None else candidate.train.max_seconds
                  for candidate in work.job.candidates)
    planned_s = plan.hours * _SECONDS_PER_HOUR
    if planned_s <= limit_s:
        return plan
    return plan.model_copy(update={
        "tokens": round(tokens * limit_s / planned_s), "hours": limit_s / _SECONDS_PER_HOUR,
        "hint": f"train.max_seconds ends it; without it train takes {duration(planned_s)}"})


def plan_benchmark(work: PlannedWork, rates: Rates) -> StagePlan:
    """Every checkpoint and rival, each with its baseline."""
    checkpoints, benchmark = _checkpoints(work.job), work.spec.benchmark
    alone = checkpoints * _suite_tokens(work.spec)
    # At the higher concurrencies pairs of blocks of two requests per slot, where the fewest are clear.
    requests = sum(_CLEAR_PAIRS * fewest_requests(users) for users in benchmark.concurrencies if users > 1)
    together = checkpoints * 2 * requests * len(benchmark.temperatures) * benchmark.max_new_tokens
    return StagePlan(stage="benchmark", tokens=alone + together, bytes_on_disk=0, bound_by="memory bandwidth",
                     hours=hours_of(alone * work.flops_per_token, rates.single)
                     + hours_of(together * work.flops_per_token, rates.decode))


def _checkpoints(job: ResolvedJob) -> int:
    """Drafters and rivals are benchmarked like checkpoints; no drafter is the baseline of each."""
    return sum(candidate.train.num_checkpoints for candidate in job.candidates) + len(job.brought)


def _suite_tokens(spec: JobSpec) -> int:
    """Tokens generated by one drafter and by the baseline without a drafter, over all suites, one request at a time."""
    benchmark = spec.benchmark
    prompts = sum(suite.max_prompts for suite in benchmark.suites)
    return 2 * prompts * len(benchmark.temperatures) * benchmark.repeats * benchmark.max_new_tokens


def plan_tune(work: PlannedWork, rates: Rates, final_times: int = 1) -> StagePlan:
    """Trials of the settings at every concurrency, then a benchmark of the chosen setting; again for a rival that the
    winner has to beat.

    final_times   benchmarks of the chosen setting; FINAL_TIMES: no suite is decided by its first prompts
    """
    tune, benchmark = work.spec.tune, work.spec.benchmark
    variants = _variants(tune) * len(set(tune.concurrencies))
    raced = variants * tune.max_prompts * len(tune.temperatures) * tune.repeats * benchmark.max_new_tokens
    confirmed = final_times * _suite_tokens(work.spec)
    hours = min(hours_of(raced * work.flops_per_token, rates.single), tune.budget_s / _SECONDS_PER_HOUR)
    tuned = 1 + work.job.rivals_to_tune
    return StagePlan(stage="tune", tokens=tuned * (raced + confirmed), bytes_on_disk=0, bound_by="memory bandwidth",
                     hours=tuned * (hours + hours_of(confirmed * work.flops_per_token, rates.single)))


def _variants(tune: TuneSpec) -> int:
    """Settings that are measured at one concurrency, off among them."""
    return tune.trials(len(tune.shapes) + (len(set(tune.num_steps)) if tune.ngram else 0) + 1)


_CLEAR_PAIRS = 6  # of blocks: what a drafter of 1.5x or more takes on a quiet machine


def plan_prove(work: PlannedWork, rates: Rates, pairs: int = _CLEAR_PAIRS) -> StagePlan:
    """Parity (two servers and the reference engine), then every declared load and the changed system prompt, each with
    and without the drafter, and with a rival that the winner has to beat.

    pairs   of blocks until a load is clear; `prove.most_pairs`: none is clear before its budget ends
    """
    prove = work.spec.prove
    variants = 2 + work.job.rivals_to_tune

    def tokens(users: int, least: int, pairs: int) -> int:
        block = fewest_requests(users)
        return max(math.ceil(least / block), min(pairs, prove.most_pairs)) * block * prove.max_new_tokens

    together = variants * sum(tokens(load, prove.requests, pairs) for load in prove.concurrencies if load > 1)
    if (most := max(prove.concurrencies)) > 1:  # parity under load: every prompt twice, or two per user; and sampled
        together += 2 * (2 * max(prove.parity_prompts, most) + prove.parity_prompts) * prove.max_new_tokens
    alone = (variants * sum(tokens(load, prove.requests, pairs) for load in prove.concurrencies if load <= 1)
             + (3 if most > 1 else 5) * prove.parity_prompts * prove.max_new_tokens)
    if prove.system_prompt:
        alone += 2 * tokens(min(prove.concurrencies), prove.requests // 2, math.ceil(pairs / 2))
    return StagePlan(stage="prove", tokens=alone + together, bytes_on_disk=0, bound_by="memory bandwidth",
                     hours=hours_of(alone * work.flops_per_token, rates.single)
                     + hours_of(together * work.flops_per_token, rates.decode))


@dataclass(frozen=True)
class ObjectStore:
    """Where the jobs of a cluster exchange files."""

    prices: StorePrices | None
    """None: unknown."""

    ranged: bool
    """Hidden states stay there and are read by ranges (`placement.work.states`)."""

    part_bytes: int
    """Of one request."""

    def parts(self, size_bytes: float) -> int:
        """Requests that read so many bytes."""
        return math.ceil(size_bytes / self.part_bytes)

    def put_requests(self, size_bytes: float) -> int:
        """Requests that write one object: one, or its parts with their beginning and their end."""
        parts = self.parts(size_bytes)
        return parts + 2 if parts > 1 else 1


def with_store_use(stages: tuple[StagePlan, ...], work: PlannedWork, store: ObjectStore) -> tuple[StagePlan, ...]:
    """The stages with their use of the store. What a stage wrote stays until the last one; while it is being written,
    half of it on average is there."""
    plans, before, transfers, prices = [], 0, _store_transfers(work, store), store.prices
    for plan in stages:
        objects, puts, gets, read = transfers.get(plan.stage, (0, 0, 0, 0))
        use = StoreUse(objects=objects + _SMALL_FILES, put_requests=puts + _SMALL_FILES,
                       get_requests=gets + _SMALL_FILES, read_bytes=read)
        if prices is not None:
            hours = plan.hours_range or Interval(low=plan.hours, high=plan.hours)
            stored = (before + plan.bytes_on_disk / 2) / 1e12 / _HOURS_PER_MONTH * prices.storage
            moved = (use.put_requests / 1e6 * prices.put + use.get_requests / 1e6 * prices.get
                     + read / 1e12 * prices.traffic)
            use = use.model_copy(update={
                "cost": stored * plan.hours + moved,
                "cost_range": Interval(low=stored * hours.low + moved, high=stored * hours.high + moved)})
        plans.append(plan.model_copy(update={"store": use}))
        before += plan.bytes_on_disk
    return tuple(plans)


def _store_transfers(work: PlannedWork, store: ObjectStore) -> dict[str, tuple[int, int, int, int]]:
    """What each stage that trains, or reads what was trained, writes to the object store and reads of it: objects,
    requests that write and that read, bytes read."""
    if not work.spec.trains:
        return {}  # the sizes of drafters from elsewhere are not known
    spec, rows_bytes = work.spec, (round(work.rows * (work.prompt + work.answer)) * ROW_JSON_BYTES_PER_TOKEN)
    per_token = work.state_bytes + ID_AND_MASK_BYTES
    states = work.captured * ID_AND_MASK_BYTES if work.streamed else work.store_bytes
    shards = max(1, math.ceil(states / spec.capture.shard_size_bytes))
    per_row = store.parts(work.row_tokens * per_token)
    candidates = work.job.candidates
    drafters = [work.drafter(candidate).parameters * 4 for candidate in candidates]
    together = may_train_together(spec.sweep)
    if store.ranged and not work.streamed:
        read = round(shared_tokens(work) * per_token)
        gets = round(shared_tokens(work) / max(1.0, work.row_tokens)) * per_row + shards
    else:
        read = states * (1 if together else len(candidates))
        gets = store.parts(read)
    exported = [(size, candidate.train.num_checkpoints) for candidate, size in zip(candidates, drafters, strict=True)]
    one_drafter = (0, 0, store.parts(max(drafters)), max(drafters))
    copied = round(states * work.states_share)
    # Answers that stay in the store: parts are read for the digest of the ordered rows and to write these; capture
    # reads the rows to plan its shards and to compute them. As files they are downloaded once.
    ordering, passes = (2, 2) if store.ranged else (0, 1)
    return {
        "regenerate": (
            2, store.put_requests(rows_bytes), ordering * store.parts(rows_bytes), ordering * rows_bytes),
        "capture": (
            shards, shards * store.put_requests(states / shards),
            # Of each uploaded shard size and end are read back.
            passes * store.parts(rows_bytes) + 2 * shards + round(work.rows * work.states_share) * per_row,
            passes * rows_bytes + copied),
        "train": (
            sum(number for _, number in exported), sum(store.put_requests(size) * number for size, number in exported),
            gets, read),
        "benchmark": (
            0, 0, sum(store.parts(size) * number for size, number in exported),
            sum(size * number for size, number in exported)),
        "tune": one_drafter, "prove": one_drafter, "hardware": one_drafter}
