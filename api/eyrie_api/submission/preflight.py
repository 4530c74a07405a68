"""Validation of a job before it is accepted, without loading a model.

Each error names field, value and rule, and a hint says what to do instead. Paths are the server's: they are made
absolute once here, because stage programs run elsewhere. A target's files are checked by their headers and a data file
by its first rows (`weight_files`, `tokenizer_files`, `data_files`). What is not on this machine (a Hub id) or cannot be
checked cheaply (single malformed rows) is left to the stage that reads it; the plan's notes say so for Hub ids. The
sweep is expanded once per job; every check gets the candidates.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from eyrie_api.artifacts import read_manifest
from eyrie_api.artifacts.store_prices import store_prices
from eyrie_api.data_files import data_files, is_remote
from eyrie_api.decisions.capture_support import (
    SUPPORTED_BY_SGLANG,
    require_capture,
    require_layer_outputs,
    sglang_layer_ids,
)
from eyrie_api.decisions.engine_support import (
    Device,
    check_blocks,
    check_engine,
    check_heads,
    with_engine_defaults,
    with_gpu_defaults,
)
from eyrie_api.decisions.families import fuses
from eyrie_api.decisions.hardware import Rates
from eyrie_api.decisions.plan import make_plan
from eyrie_api.decisions.plan_facts import DEFAULT_DRAFT_VOCABULARY, DataFacts, TargetFacts
from eyrie_api.decisions.plan_work import require_gpu_memory
from eyrie_api.decisions.reuse import asks_the_same, jobs_with_answers, stores_the_same
from eyrie_api.decisions.store_cost import ObjectStore
from eyrie_api.decisions.sweep import Candidate, expand, families_of
from eyrie_api.decisions.target_config import check_config, choose_source, computed_by_reference
from eyrie_api.decisions.training_cost import usable_bytes
from eyrie_api.decisions.training_defaults import gpu_bytes
from eyrie_api.errors import (
    ArtifactCorrupt,
    ArtifactMissing,
    DiskTooSmall,
    GpuTooSmall,
    InvalidInput,
    UnsupportedTarget,
    VocabularyTooLarge,
)
from eyrie_api.full_disk import free_bytes
from eyrie_api.settings import Settings
from eyrie_api.submission.data_files import check_data_source
from eyrie_api.submission.devices import computes_on_gpus, has_sglang, planned_device
from eyrie_api.submission.gpu_memory import gpus_without_room
from eyrie_api.submission.hardware_profiles import check_hardware
from eyrie_api.submission.placement import as_placed, check_scratch, read_profile
from eyrie_api.submission.published_drafters import check_published_drafters
from eyrie_api.submission.target_facts import (
    data_facts,
    exists,
    local_path,
    read_config,
    stored_dtype,
    target_dir,
    target_facts,
)
from eyrie_api.submission.this_machine import check_this_machine, notes_on_this_machine
from eyrie_api.submission.tokenizer_files import check_tokenizer
from eyrie_api.submission.weight_files import check_weights, weights_are_here
from eyrie_api.v1alpha1.benchmark import SuiteSpec
from eyrie_api.v1alpha1.cluster import ClusterProfile
from eyrie_api.v1alpha1.data import DataSource
from eyrie_api.v1alpha1.job import JobSpec
from eyrie_api.v1alpha1.placement import S3Work
from eyrie_api.v1alpha1.plan import Plan, PlannedStages
from eyrie_api.v1alpha1.reports import CaptureReport, RegenerateReport
from eyrie_api.v1alpha1.requests import PlacementRequest
from eyrie_api.v1alpha1.status import Job
from eyrie_api.v1alpha1.targets import (
    ELEMENT_BYTES,
    HELD_OUT,
    QUICKSTART,
    QUICKSTART_SUITE_NAMES,
    SUPPORTED_ARCHITECTURES,
    is_hub_id,
    resolve_dtype,
)

OWN_SUITE = SuiteSpec(name=HELD_OUT, path=HELD_OUT, max_prompts=32)  # as many as the shipped suites have together
_LARGEST_SHARE = 0.2
_CACHED_S = 2.0
_MAX_CACHED = 1000


@dataclass(frozen=True)
class CheckedJob:
    """A valid job with absolute paths, and its plan where the target's sizes are known."""

    spec: JobSpec
    plan: Plan | None

    @property
    def planned(self) -> PlannedStages | None:
        """Of the plan what is kept with the job."""
        return None if self.plan is None else PlannedStages(stages=self.plan.stages)


def check(spec: JobSpec, settings: Settings) -> CheckedJob:
    """Check a job before it is accepted. Raises InvalidInput or DiskTooSmall, with a hint."""
    spec, plan, lengths_known, too_small = _checked(spec, settings)
    check_this_machine(spec, settings)
    if too_small:
        raise too_small[0]
    # Only lengths sampled from the data refuse a job: without them the plan is an upper bound, which does not prove
    # that the job will not fit.
    if plan is not None and plan.fits_disk is False and lengths_known:
        raise DiskTooSmall(f"the job needs about {plan.total_bytes_on_disk / 2**30:.1f} GiB under {settings.home} and "
                           f"{free_bytes(settings.home) / 2**30:.1f} GiB are free",
                           "lower data.max_conversations or capture.max_length, use capture.codec int4 or "
                           "capture.final_state topk, or set EYRIE_HOME to a larger disk")
    return CheckedJob(absolute(spec), plan)


class PreflightCache:
    """`check` with its results cached for `_CACHED_S` seconds: jobs that differ only in name and labels are often
    submitted together, and files seldom change within that time."""

    def __init__(self, settings: Settings, elapsed: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._elapsed = settings, elapsed
        self._passed: dict[str, tuple[CheckedJob, float]] = {}

    def check(self, spec: JobSpec) -> CheckedJob:
        """Raises as `check`; refusals are not cached."""
        key, now = spec.model_dump_json(exclude={"name", "labels"}), self._elapsed()
        passed, until = self._passed.get(key, (None, 0.0))
        if passed is None or until <= now:
            passed = check(spec, self._settings)
            if len(self._passed) >= _MAX_CACHED:
                self._passed.clear()
            self._passed[key] = (passed, now + _CACHED_S)
        named = passed.spec.model_copy(update={"name": spec.name, "labels": spec.labels})
        return CheckedJob(named, passed.plan)


def plan(spec: JobSpec, settings: Settings, earlier: Sequence[Job] = ()) -> Plan:
    """The dry run behind `POST /plans`. Raises InvalidInput when the target's config.json is not on this machine.

    earlier   jobs of the same project, newest first: the answers that they have generated are not generated again
    """
    _, planned, _, too_small = _checked(spec, settings, earlier, for_other_machines=True)
    if planned is None:
        revision = "" if spec.target.revision is None else f" --revision {spec.target.revision}"
        raise InvalidInput(f"target.model {spec.target.model!r} is not in the Hub cache of the server, which contacts "
                           "no model hub, so its sizes are unknown",
                           f"where the server runs: `hf download {spec.target.model} config.json{revision}` is enough "
                           "for a plan; a job needs no download before")
    problems = tuple(f"{one.message}: such a job is refused; {one.hint}" for one in too_small)
    return planned.model_copy(update={"warnings": (*problems, *planned.warnings)})


def _checked(spec: JobSpec, settings: Settings, earlier: Sequence[Job] = (), *,
             for_other_machines: bool = False) -> tuple[JobSpec, Plan | None, bool, list[GpuTooSmall]]:
    """The job with its engine's defaults, its plan where the target is here, whether the plan rests on lengths sampled
    from the data, and which GPUs do not hold the target."""
    profile = None if settings.cluster_profile is None else read_profile(settings.cluster_profile)
    requested = spec if profile is None else as_placed(spec, profile)

    def placed(job: JobSpec) -> JobSpec:
        return job.model_copy(update={"placement": requested.placement, "serve": requested.serve})

    device, on_gpus = planned_device(requested, settings), computes_on_gpus(requested, settings)
    elsewhere = profile is not None
    for number, source in enumerate(spec.data.sources):
        try:
            _check_source(source, spec.data.answered, elsewhere)
        except InvalidInput as error:
            raise type(error)(f"data.sources[{number}].path: {error.message}", error.hint) from None
    asked, spec = spec, _with_dtype(spec, on_gpus=on_gpus)
    if on_gpus:
        spec = with_gpu_defaults(spec, has_sglang=device == "gpu" and has_sglang(settings))
    known = data_facts(spec.data)
    spec = with_engine_defaults(_with_suites(spec, known), device)
    candidates = expand(spec)
    _check_layers(spec, candidates)
    _check_windows(spec, candidates)
    facts = _check_target(placed(spec), candidates, device)
    check_blocks(spec, [one.spec for one in candidates])
    check_published_drafters(spec, candidates, facts,
                             None if settings.artifacts.url is None else settings.home.absolute() / "jobs")
    for suite in spec.benchmark.suites:
        _check_suite(suite, spec, elsewhere)
    check_hardware(spec, settings, facts)
    if profile is not None:
        check_scratch(spec, profile)
    if facts is None:
        return spec, None, False, []
    _check_sizes(candidates, facts)
    require_gpu_memory(placed(spec), candidates, facts, known)
    known = _with_what_is_present(known, absolute(spec), settings, earlier)
    planned = make_plan(placed(spec), candidates, facts, free_bytes(settings.home), data_facts=known,
                        rates=rates(settings), on_gpus=on_gpus, gpu_hour_prices=settings.prices,
                        store=_object_store(settings, profile))
    notes = (*notes_on_this_machine(spec, settings), *planned.notes, *_chosen_for_gpus(asked, spec), *_unread(spec))
    return (spec, planned.model_copy(update={"notes": notes}),
            known.prompt_tokens is not None,
            gpus_without_room(placed(spec), facts, profile, for_other_machines=for_other_machines))


def _chosen_for_gpus(asked: JobSpec, spec: JobSpec) -> list[str]:
    """What `with_gpu_defaults` added, for the plan's reader."""
    chosen = [f"{name} {value}" for name, value, before in (
        ("engine", spec.engine.kind, asked.engine.kind),
        ("data.max_conversations", spec.data.max_conversations, asked.data.max_conversations)) if value != before]
    return [f"chosen for a target of your own on GPUs, since the job does not name them: {', '.join(chosen)}"
            ] if chosen else []


def _object_store(settings: Settings, profile: ClusterProfile | None) -> ObjectStore | None:
    """The store of a cluster's jobs. Raises InvalidInput where EYRIE_STORE_PRICES does not suit it."""
    work = None if profile is None else profile.stages.work
    if not isinstance(work, S3Work):
        return None
    try:
        prices = store_prices(settings.store_prices, work.endpoint_url)
    except ValueError as error:
        raise InvalidInput(f"EYRIE_STORE_PRICES = {settings.store_prices!r}: {error}",
                           "an administrator corrects the setting") from None
    return ObjectStore(prices, work.states == "ranged", settings.artifacts.part_size_bytes)


def _with_what_is_present(known: DataFacts, spec: JobSpec, settings: Settings, earlier: Sequence[Job]) -> DataFacts:
    """With the answers of the earlier job that has most for the same data, and the states of the one that has most of
    those, as far as manifests on this machine say."""
    for job in jobs_with_answers(spec, earlier):
        if asks_the_same(spec, job.spec):
            with suppress(ArtifactMissing, ArtifactCorrupt):
                report = read_manifest(settings.job_dir(job.id) / "stages" / "regenerate").report
                if isinstance(report, RegenerateReport) and report.rows_answered > known.present:
                    known = replace(known, present=report.rows_answered, present_in=job.id)
            with suppress(ArtifactMissing, ArtifactCorrupt):
                captured = read_manifest(settings.job_dir(job.id) / "stages" / "capture").report
                if isinstance(captured, CaptureReport) and captured.rows > known.states_present \
                        and stores_the_same(spec, job.spec):
                    known = replace(known, states_present=captured.rows, states_in=job.id,
                                    states_as=(captured.codec, captured.final_state))
    return known


def _unread(spec: JobSpec) -> list[str]:
    """What the checks did not read, because it is not on this machine."""
    directory, notes = target_dir(spec.target), []
    if wanted := _held_out_prompts(spec.benchmark.suites):
        notes.append(f"drafters are measured on up to {wanted} prompts held out of the data "
                     f"(data.held_out_fraction {spec.data.held_out_fraction:.3g})")
    if _is_hub_id(spec.target.model) and directory is not None and not weights_are_here(directory):
        notes.append(f"the weights of {spec.target.model} are not on this machine: the first stage checks the target's "
                     "files")
    return notes + [f"the rows of {source.path} are not on this machine: the first stage checks them"
                    for source in spec.data.sources
                    if is_remote(source.path) or _is_hub_id(source.path) or _is_missing(source.path)]


def _is_hub_id(name: str) -> bool:
    return local_path(name) is None and is_hub_id(name)


def rates(settings: Settings) -> Rates | None:
    """Arithmetic rates of the machine, where one was set; None: those of the hardware that a job requests."""
    if not {"prefill_gflops", "decode_gflops", "single_gflops", "train_gflops"} & settings.model_fields_set:
        return None
    return Rates(prefill=settings.prefill_gflops, decode=settings.decode_gflops, single=settings.single_gflops,
                 train=settings.train_gflops, source="EYRIE_*_GFLOPS")


def _with_dtype(spec: JobSpec, *, on_gpus: bool) -> JobSpec:
    """The job with the dtype that `target.dtype: auto` means: stored with it, so that every attempt computes alike."""
    if spec.target.dtype != "auto":
        return spec
    directory = target_dir(spec.target)
    stored = None if directory is None else stored_dtype(read_config(directory))
    return spec.model_copy(update={"target": resolve_dtype(spec.target, stored, on_gpus=on_gpus)})


def _with_suites(spec: JobSpec, known: DataFacts) -> JobSpec:
    """The job with suites for its data, where it names none, and with enough held out for suites of `held-out`: of few
    conversations a larger part, unless the job names the part.

    The shipped suites are of the shipped conversations: they are used where there are no others, or where the shipped
    target has some of them. Any other target is measured on its own data.
    """
    data, suites = spec.data, spec.benchmark.suites
    shipped = [one.path == QUICKSTART for one in data.sources]
    if "suites" not in spec.benchmark.model_fields_set and not (
            all(shipped) or (any(shipped) and spec.target.model == QUICKSTART)):
        if data.held_out_fraction == 0.0:
            raise InvalidInput("data.held_out_fraction is 0 and benchmark.suites is omitted, which takes its prompts "
                               "from what is held out", "name suites, or omit data.held_out_fraction")
        suites = (OWN_SUITE,)
    wanted = _held_out_prompts(suites)
    if wanted:
        rows = min(data.max_conversations, known.rows or data.max_conversations)
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


def _held_out_prompts(suites: Sequence[SuiteSpec]) -> int:
    """The prompts that suites take from what is held out of the data."""
    return max((suite.max_prompts for suite in suites if suite.path == HELD_OUT), default=0)


def absolute(spec: JobSpec) -> JobSpec:
    """The job with absolute local paths."""
    target = spec.target.model_copy(update={"model": _absolute(spec.target.model)})
    # A relative path and its absolute one may end in different names: those that the mixes use are kept.
    named = spec.data.mix is not None or spec.sweep.varies_mix
    sources = tuple(source.model_copy(update={"path": _absolute(source.path)} | ({"name": name} if named else {}))
                    for source, name in zip(spec.data.sources, spec.data.source_names, strict=True))
    suites = tuple(suite.model_copy(update={"path": _absolute(suite.path)}) for suite in spec.benchmark.suites)
    rivals = tuple(one if one.path is None else one.model_copy(update={"path": _absolute(one.path)})
                   for one in spec.rivals)
    head = spec.drafter.init_from
    drafter = spec.drafter if head is None else spec.drafter.model_copy(update={"init_from": _absolute(head)})
    return spec.model_copy(update={
        "target": target, "data": spec.data.model_copy(update={"sources": sources}), "rivals": rivals,
        "drafter": drafter,
        "benchmark": spec.benchmark.model_copy(update={"suites": suites})})


def _absolute(path: str) -> str:
    if path in (QUICKSTART, HELD_OUT) or path.startswith(f"{QUICKSTART}:"):
        return path
    found = local_path(path)
    return path if found is None else str(found)


def _check_target(spec: JobSpec, candidates: Sequence[Candidate], device: Device | None) -> TargetFacts | None:
    families = families_of(candidates)
    directory = target_dir(spec.target)
    if directory is None:
        check_engine(spec, families, (), device)
        return None
    config = read_config(directory)
    named = config.get("architectures")
    architectures = [str(one) for one in named] if isinstance(named, list) else []
    check_engine(spec, families, architectures, device)
    known = bool(set(architectures) & set(SUPPORTED_ARCHITECTURES))
    if not architectures or (not known and spec.engine.kind == "embedded"):
        raise UnsupportedTarget(
            f"target.model {spec.target.model!r}: config.json names architecture "
            f"{', '.join(architectures) or '(none)'}, which the embedded engine does not compute",
            f"{_other_engine(architectures)}use a target of {', '.join(SUPPORTED_ARCHITECTURES)}")
    facts = target_facts(directory)
    if spec.engine.kind == "embedded":
        check_config(config)
    source = choose_source(config, spec.capture.source, engine=spec.engine.kind,
                           streams=spec.capture.feed == "stream", fits_device=_fits_one_gpu(spec, facts))
    if source == "sglang":
        if spec.engine.kind != "sglang":
            raise InvalidInput(f"capture.source 'sglang' with engine {spec.engine.kind!r}, which starts no such server",
                               "set engine to 'sglang', or omit capture.source")
        require_capture(architectures[0])
        for field, layers in _layer_choices(spec, candidates):
            require_layer_outputs(layers, field)
    if source != "reference" and spec.capture.probe_layers:
        raise InvalidInput(f"capture.probe_layers with a target that is captured through {source}: layers are probed "
                           "in the reference forward pass alone", "set capture.probe_layers to false")
    if config.get("auto_map"):
        raise UnsupportedTarget(
            f"target.model {spec.target.model!r}: config.json names Python code (auto_map), which is not executed",
            f"remove auto_map if the model computes what {architectures[0]} of transformers does")
    # A Hub snapshot may be incomplete: the first stage downloads the rest.
    if not _is_hub_id(spec.target.model) or weights_are_here(directory):
        check_weights(directory, config, facts, known=computed_by_reference(config))
        check_tokenizer(directory, config, facts.vocab_size)
    check_heads(spec.engine.tp_size, facts)
    # For every serving engine: a checkpoint's config.json names its layers as SGLang does, so such names must exist.
    for _, layers in _layer_choices(spec, candidates):
        sglang_layer_ids(architectures[0], facts.num_layers, layers)
    return facts


def _fits_one_gpu(spec: JobSpec, facts: TargetFacts) -> bool:
    """Whether a GPU of the capture stage can hold the target's weights; True where its label names no size."""
    placed = spec.placement.stages.get("capture", PlacementRequest()).gpu_type or spec.placement.every.gpu_type
    device = gpu_bytes(placed)
    return device is None or facts.parameters * ELEMENT_BYTES[spec.target.dtype] <= usable_bytes(device)


def _other_engine(architectures: Sequence[str]) -> str:
    return "set engine to 'sglang', or " if set(architectures) & set(SUPPORTED_BY_SGLANG) else ""


def _check_layers(spec: JobSpec, candidates: Sequence[Candidate]) -> None:
    """Rules for aux_layers that hold for any target; `sglang_layer_ids` checks those of one target."""
    for field, layers in _layer_choices(spec, candidates):
        if len(layers) < 2:
            raise InvalidInput(f"{field} {list(layers)} is one layer: SGLang treats a state of the "
                               "embedding's width as the drafter's own and skips its fc",
                               "give two or more, or omit it for a low, a middle and a high layer")
        if list(layers) != sorted(set(layers)):
            raise InvalidInput(f"{field} {list(layers)} are not distinct and ascending",
                               f"write {sorted(set(layers))}")
    named = spec.drafter.aux_layers
    if named is not None and not any(fuses(candidate) for candidate in candidates):
        raise InvalidInput(f"drafter.aux_layers {list(named)} is set and no family of the job fuses layers",
                           "omit drafter.aux_layers, or train eagle3 or dflash")


def _layer_choices(spec: JobSpec, candidates: Sequence[Candidate]) -> list[tuple[str, tuple[int, ...]]]:
    """Every set of layers that is fused, and the field that names it."""
    captured = [] if spec.capture.aux_layers is None else [("capture.aux_layers", spec.capture.aux_layers)]
    return captured + [(f"drafter.aux_layers (candidate {candidate.name})", candidate.drafter.aux_layers)
                       for candidate in candidates if candidate.drafter.aux_layers is not None and fuses(candidate)]


def _check_windows(spec: JobSpec, candidates: Sequence[Candidate]) -> None:
    """SGLang applies a drafter's sliding window in chains only (`eyrie_workers.engines.sglang.profiles`)."""
    widest = max(spec.tune.top_k)
    if spec.engine.kind != "sglang" or widest == 1:
        return
    for candidate in candidates:
        if candidate.spec.drafter.sliding_window is not None:
            raise InvalidInput(
                f"drafter.sliding_window {candidate.spec.drafter.sliding_window} (candidate {candidate.name}) with "
                f"tune.top_k up to {widest}: in a tree SGLang lets the drafter attend beyond its window",
                "set tune.top_k to [1], serve with the embedded engine, or omit drafter.sliding_window")


def _check_source(source: DataSource, answered: bool, elsewhere: bool) -> None:
    """`elsewhere`: stages run in pods, which may have files that this server has not."""
    if source.path == QUICKSTART or is_remote(source.path) or (elsewhere and _is_missing(source.path)):
        return
    if local_path(source.path) is None:
        if not is_hub_id(source.path):
            raise InvalidInput(f"data source {source.path!r} is neither a file here nor a Hub data set id",
                               "give a file, directory or pattern, an s3:// or https:// URL, a Hub id org/name, or "
                               "'quickstart'")
        return
    check_data_source(source, answered)


def _is_missing(path: str) -> bool:
    """Whether it is an absolute path of which nothing is on this machine."""
    return path.startswith("/") and not data_files(path) and not exists(path)


def _check_suite(suite: SuiteSpec, spec: JobSpec, elsewhere: bool) -> None:
    if suite.path == HELD_OUT:
        if spec.data.held_out_fraction == 0.0:
            raise InvalidInput(f"benchmark suite {suite.name!r} uses held-out prompts, but data.held_out_fraction is 0",
                               "omit data.held_out_fraction or raise it, or omit the suite")
        return
    kind, _, name = suite.path.partition(":")
    if kind == QUICKSTART:
        if name not in QUICKSTART_SUITE_NAMES:
            raise InvalidInput(f"benchmark suite {suite.name!r}: {suite.path!r} is not shipped with Eyrie",
                               f"quickstart suites are {', '.join(QUICKSTART_SUITE_NAMES)}")
        return
    if is_remote(suite.path) or (elsewhere and _is_missing(suite.path)):
        return
    path = local_path(suite.path)
    if path is None and not is_hub_id(kind):  # before the split of `org/name:split`
        raise InvalidInput(f"benchmark suite {suite.name!r}: {suite.path!r} is neither a file here nor a Hub id",
                           "give a JSONL file, an s3:// or https:// URL, a Hub id, quickstart:<suite>, or held-out")
    if path is not None and not path.is_file():
        raise InvalidInput(f"benchmark suite {suite.name!r}: no file {suite.path!r} on the server",
                           "give a JSONL file of messages or prompt rows")


def _check_sizes(candidates: Sequence[Candidate], facts: TargetFacts) -> None:
    _check_stored_vocabulary(candidates, facts)
    for candidate in candidates:
        wanted = candidate.drafter.draft_vocab_size
        if wanted is not None and wanted > facts.vocab_size:
            raise VocabularyTooLarge(f"drafter.draft_vocab_size {wanted} (candidate {candidate.name}) is larger than "
                                     f"the target's vocabulary of {facts.vocab_size}",
                                     f"give at most {facts.vocab_size}, or omit it")


def _check_stored_vocabulary(candidates: Sequence[Candidate], facts: TargetFacts) -> None:
    """A store of top-k logits has one draft vocabulary: every drafter trained from it must use that one."""
    for candidate in candidates:
        capture, wanted = candidate.spec.capture, candidate.drafter.draft_vocab_size
        stored = capture.draft_vocab_size or min(facts.vocab_size, DEFAULT_DRAFT_VOCABULARY)
        if capture.final_state == "topk" and wanted not in (None, stored):
            raise InvalidInput(
                f"drafter.draft_vocab_size {wanted} (candidate {candidate.name}) with capture.final_state topk, which "
                f"stores logits over {stored} draft tokens",
                f"set capture.draft_vocab_size {wanted} and no other in the sweep, or capture.final_state keep")
