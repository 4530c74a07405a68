"""`JobSpec -> ResolvedJob`, once, when a job is submitted. Pure: all that it needs besides the document is in `Facts`.

1. `resolve` fills in the defaults that depend on hardware, target and data: GPUs that a cluster profile gives, dtype,
   engine, number of conversations, requests at once, benchmark suites, temperatures, draft tree.
2. `derive` adds what follows from a document without open defaults: candidates, layers to capture, whether one program
   trains all candidates, the job's share of its project's quotas.
3. `preflight` checks the result and adds the plan.

Everything downstream reads the `ResolvedJob` and calls none of this again. A retraining job, which drift makes of a job
that was resolved before, is derived without step 1.
"""

from collections.abc import Mapping, Sequence
from typing import get_args

from eyrie_api.contract.benchmark import SuiteSpec
from eyrie_api.contract.cluster import ClusterProfile
from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import DraftTreeShape, EngineSpec
from eyrie_api.contract.families import AUTO, FAMILIES
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.placement import StageKey
from eyrie_api.contract.resolved import CapturedLayers, Demand, PlacedGpus, ResolvedJob
from eyrie_api.contract.serving import EndpointServeSpec, ServeSpec
from eyrie_api.contract.stages import ComparedMix
from eyrie_api.contract.targets import HELD_OUT, QUICKSTART, JobTarget, resolve_dtype
from eyrie_api.contract.training import TrainSpec
from eyrie_api.errors import InvalidInput
from eyrie_api.planning.facts import Device, Facts, stored_dtype
from eyrie_api.planning.hardware import BATCH
from eyrie_api.planning.likely_families import with_likely_families
from eyrie_api.planning.placement import resolve_hardware_placement, resolve_stage_placement, serving_gpus
from eyrie_api.planning.sweep import expand, trains_together

OWN_SUITE = SuiteSpec(name=HELD_OUT, path=HELD_OUT, max_prompts=32)  # as many as the shipped suites have together
_LARGEST_SHARE = 0.2

GPU_CONVERSATIONS = 20_000
"""Where a job for a target of one's own computes on GPUs and names no number: an evening for 8 billion parameters on
one H100 (docs/results/plans.md)."""

_STAGES: tuple[StageKey, ...] = get_args(StageKey)


def resolve(spec: JobSpec, facts: Facts) -> ResolvedJob:
    """The job with every default filled in, without a plan. Raises InvalidInput for a placement that does not merge
    with the cluster profile, held-out suites without held-out prompts, a job without data that names no suites, and as
    `expand`."""
    profile = facts.profile
    gpus, serving = _requested_gpus(spec), serving_gpus(profile, spec.serve)
    if profile is not None:
        for stage in _STAGES:
            placed = resolve_stage_placement(profile, spec.placement, stage)
            gpus[stage] = PlacedGpus(num_gpus=placed.num_gpus, gpu_type=placed.gpu_type)
    device = facts.engine_device(gpus, serving)
    on_gpus = facts.computes_on_gpus(gpus, serving)
    dtype = resolve_dtype(spec.target, stored_dtype(facts.config), on_gpus=on_gpus).dtype
    spec = spec.model_copy(update={
        "target": JobTarget(model=spec.target.model, revision=spec.target.revision, dtype=dtype)})
    if on_gpus:
        num_gpus = gpus["regenerate"].num_gpus
        spec = with_gpu_defaults(spec, has_sglang=device == "gpu" and facts.has_sglang,
                                 num_gpus=(spec.engine.num_gpus or 1) if num_gpus is None else num_gpus)
    if AUTO in spec.sweep.families:
        architectures = facts.config.get("architectures") or [""]
        spec = with_likely_families(spec, facts.sizes, str(architectures[0]), gpus["prove"].gpu_type, device == "gpu")
    spec = _with_engine_defaults(_with_suites(with_declared_loads(spec), facts.data.rows), device)
    job = derive(spec, gpus, serving, on_cluster=profile is not None)
    if profile is not None:
        job = job.model_copy(update={"demand": Demand(num_gpus=_gpus_at_once(job, profile),
                                                      num_replicas=replicas_of(spec.serve, profile))})
    return job


def derive(spec: JobSpec, gpus: Mapping[StageKey, PlacedGpus] | None = None, serving: PlacedGpus | None = None, *,
           on_cluster: bool = False, demand: Demand | None = None) -> ResolvedJob:
    """What follows from a document that leaves no default open.

    gpus      of each stage; None: those that the document requests
    demand    None: that of one machine. It runs one program at a time and uses `num_gpus` of the training alone; a job
              that names none counts none there, also where the machine has one.

    Raises as `expand`.
    """
    gpus = _requested_gpus(spec) if gpus is None else gpus
    candidates = expand(spec)
    fusing = [candidate for candidate in candidates if candidate.fuses]
    default_layers = [candidate.drafter.family for candidate in candidates if not candidate.fuses or (
        candidate.drafter.aux_layers is None and candidate.drafter.init_from is None)]
    mixes = [ComparedMix(mix=candidate.mix, train_seed=candidate.train.seed)
             for candidate in candidates if candidate.mix is not None]
    train_gpus = gpus["train"].num_gpus or 0
    return ResolvedJob(
        spec=spec, target=resolve_dtype(spec.target, None, on_gpus=False), candidates=candidates,
        compared_mixes=tuple(mix for number, mix in enumerate(mixes) if mix not in mixes[:number]),
        captured=CapturedLayers(
            families=tuple(dict.fromkeys(default_layers)),
            init_from=tuple(dict.fromkeys(candidate.drafter.head for candidate in fusing if candidate.drafter.head)),
            aux_layers=tuple(sorted({layer for candidate in fusing for layer in candidate.drafter.aux_layers or ()}))),
        rivals=tuple(rival for rival in spec.rivals if rival.method != "off"),
        trains_together=trains_together(spec, len(candidates), train_gpus if on_cluster else max(1, train_gpus),
                                        on_cluster=on_cluster),
        on_cluster=on_cluster, gpus=dict(gpus), serving_gpus=serving or serving_gpus(None, spec.serve),
        endpoint_serve=EndpointServeSpec(**dict(spec.serve), engine=spec.engine),
        demand=demand or Demand(num_gpus=train_gpus))


# GPUs and quotas.


def _requested_gpus(spec: JobSpec) -> dict[StageKey, PlacedGpus]:
    every = spec.placement.every
    requests = {stage: spec.placement.stages.get(stage, every) for stage in _STAGES}
    return {stage: PlacedGpus(num_gpus=every.num_gpus if request.num_gpus is None else request.num_gpus,
                              gpu_type=request.gpu_type or every.gpu_type) for stage, request in requests.items()}


def _gpus_at_once(job: ResolvedJob, profile: ClusterProfile) -> int:
    """The most GPUs that the stages of a job request at one time on a cluster. Stages run one after the other. Within a
    stage these run side by side: all training runs, unless one program trains all candidates; all benchmarks that have
    GPUs; the profiles of `prove.hardware` but the first (`eyrie_pipelines.placement`). Raises InvalidInput."""
    spec, gpus = job.spec, {stage: placed.num_gpus or 0 for stage, placed in job.gpus.items()}
    first, *others = [resolve_hardware_placement(profile, spec.placement, pool).num_gpus
                      for pool in spec.prove.profiles] or [0]
    gpus["train"] *= spec.placement.train_nodes * (1 if job.trains_together else len(job.candidates))
    gpus["benchmark"] *= sum(candidate.train.num_checkpoints for candidate in job.candidates) + len(job.brought)
    return max(first, sum(others), *(num_gpus for stage, num_gpus in gpus.items() if stage in spec.stages))


def replicas_of(serve: ServeSpec, profile: ClusterProfile | None) -> int:
    """Replicas of an endpoint; with autoscaling, the most it may have. One on one machine."""
    if profile is None or profile.serving is None:
        return 1
    replicas, scale = serve.replicas or profile.serving.replicas, profile.serving.autoscale
    return replicas if scale is None else max(replicas, scale.max_replicas)


# Defaults.


def with_gpu_defaults(spec: JobSpec, *, has_sglang: bool, num_gpus: int = 1) -> JobSpec:
    """The job with what it omits and what a target of one's own needs on GPUs: SGLang, where there is one (it computes
    no float32 there), as many requests at once as the `num_gpus` of regeneration hold (none: on CPUs), and more
    conversations than are right for the shipped target."""
    if spec.target.model == QUICKSTART:
        return spec
    if has_sglang and "kind" not in spec.engine.model_fields_set and spec.target.dtype != "float32":
        spec = spec.model_copy(update={"engine": EngineSpec.model_validate({**dict(spec.engine), "kind": "sglang"})})
    regenerate = spec.regenerate
    if num_gpus and spec.engine.kind == "sglang" and regenerate.engine is None and (
            "concurrency" not in regenerate.model_fields_set):
        spec = spec.model_copy(update={
            "regenerate": regenerate.model_copy(update={"concurrency": BATCH * num_gpus})})
    if spec.trains and "max_conversations" not in spec.data.model_fields_set:
        spec = spec.model_copy(update={
            "data": spec.data.model_copy(update={"max_conversations": GPU_CONVERSATIONS})})
    return spec


def with_declared_loads(spec: JobSpec) -> JobSpec:
    """The job with settings tuned for the loads that it declares, unless it names others."""
    if "concurrencies" in spec.tune.model_fields_set:
        return spec
    return spec.model_copy(update={
        "tune": spec.tune.model_copy(update={"concurrencies": spec.prove.concurrencies})})


def _with_engine_defaults(spec: JobSpec, device: Device) -> JobSpec:
    """The job with defaults that its engine on this device can follow: temperature 0 alone for SGLang on a CPU, where
    the job does not name temperatures itself; and for drafters of blocks, on GPUs, the chain of one block."""
    if spec.engine.kind != "sglang":
        return spec
    if device != "cpu":
        blocks = any(FAMILIES[family].drafts_blocks for family in spec.trained_families)
        if not blocks or "tree" in spec.benchmark.model_fields_set:
            return spec
        tree = block_chain(spec.drafter, spec.train)
        return spec.model_copy(update={"benchmark": spec.benchmark.model_copy(update={"tree": tree})})
    return spec.model_copy(update={
        name: section.model_copy(update={"temperatures": (0.0,)})
        for name, section in (("benchmark", spec.benchmark), ("tune", spec.tune))
        if "temperatures" not in section.model_fields_set})


def block_chain(drafter: DrafterSpec, train: TrainSpec) -> DraftTreeShape:
    """The longest draft of SGLang with a drafter of blocks that is trained so: its whole block."""
    num_steps = drafter.max_draft_tokens or train.ttt_length
    return DraftTreeShape(num_steps=num_steps, top_k=1, num_draft_tokens=num_steps + 1)


def _with_suites(spec: JobSpec, known_rows: int | None) -> JobSpec:
    """The job with suites for its data, where it names none, and with enough held out for suites of `held-out`: of few
    conversations a larger part, unless the job names the part.

    The shipped suites are of the shipped conversations: they are used where there are no others, or where the shipped
    target has some of them. Any other target is measured on its own data.
    """
    data, suites = spec.data, spec.benchmark.suites
    if not spec.trains:
        if "suites" not in spec.benchmark.model_fields_set and spec.target.model != QUICKSTART:
            raise InvalidInput("benchmark.suites is omitted, and a job with drafters has no data to hold prompts out "
                               "of", "name suites: a file of `messages` or `prompt` rows, or a Hub data set")
        return spec
    shipped = [source.path == QUICKSTART for source in data.sources]
    if "suites" not in spec.benchmark.model_fields_set and not (
            all(shipped) or (any(shipped) and spec.target.model == QUICKSTART)):
        if data.held_out_fraction == 0.0:
            raise InvalidInput("data.held_out_fraction is 0 and benchmark.suites is omitted, which takes its prompts "
                               "from what is held out", "name suites, or omit data.held_out_fraction")
        suites = (OWN_SUITE,)
    wanted = held_out_prompts(suites)
    if wanted:
        rows = min(data.max_conversations, known_rows or data.max_conversations)
        given = data.held_out_fraction
        if "held_out_fraction" not in data.model_fields_set:
            fraction = min(_LARGEST_SHARE, max(given, 2 * wanted / rows))
            data = data.model_copy(update={"held_out_fraction": fraction})
        elif 0.0 < given * rows < 1.0:
            raise InvalidInput(f"data.held_out_fraction {given:g} of about {rows} conversations is less than one "
                               "prompt, and a benchmark suite uses held-out prompts",
                               "omit data.held_out_fraction, or raise it")
    return spec.model_copy(update={
        "data": data, "benchmark": spec.benchmark.model_copy(update={"suites": suites})})


def held_out_prompts(suites: Sequence[SuiteSpec]) -> int:
    """The prompts that suites take from what is held out of the data."""
    return max((suite.max_prompts for suite in suites if suite.path == HELD_OUT), default=0)
