"""Validation of a job before it is accepted, without loading a model: resolved once, then checked by `CHECKS`.

    read_facts        what is on this machine: data sources, the target's files, the cluster profile     I/O
    resolve           defaults, candidates, GPUs: a `ResolvedJob`                                        pure
    CHECKS            what no installation could run; the first problem refuses the job, and its plan
    make_plan         tokens, bytes and hours, where the target's sizes are known                        pure
    CAPACITY_CHECKS   what this installation has no capacity for: it refuses the job, and a plan notes it

Each error names field, value and rule, and a hint says what to do instead. A target's files are checked by their
headers and a data file by its first rows. What is not on this machine (a Hub id) or cannot be checked cheaply (single
malformed rows) is left to the stage that reads it; the plan's notes say so for Hub ids.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from eyrie_api.artifacts import read_manifest
from eyrie_api.artifacts.store_prices import store_prices
from eyrie_api.contract.capture import StateSourceName
from eyrie_api.contract.engine import SGLANG_PROGRAM, EngineKind
from eyrie_api.contract.families import BLOCK_ALGORITHMS, FAMILIES
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.placement import PlacementRequest, S3Work
from eyrie_api.contract.plan import Plan
from eyrie_api.contract.read_rules import ReadRules
from eyrie_api.contract.reports import CaptureReport, RegenerateReport
from eyrie_api.contract.resolved import ResolvedJob
from eyrie_api.contract.status import Job
from eyrie_api.contract.targets import (
    ELEMENT_BYTES,
    HELD_OUT,
    QUICKSTART,
    QUICKSTART_SUITE_NAMES,
    SUPPORTED_ARCHITECTURES,
    is_hub_id,
)
from eyrie_api.data_files import is_remote
from eyrie_api.errors import (
    ArtifactCorrupt,
    ArtifactMissing,
    DiskTooSmall,
    EyrieError,
    InvalidInput,
    UnsupportedTarget,
    VocabularyTooLarge,
    reading,
)
from eyrie_api.full_disk import free_bytes
from eyrie_api.planning.facts import (
    DEVICES,
    WITHOUT_A_NUMBER,
    Facts,
    gpu_memory_here,
    gpu_names_here,
    gpus_of,
    has_sglang,
    is_missing,
    local_path,
    memory_here,
    read_facts,
    with_absolute_paths,
)
from eyrie_api.planning.hardware import GPUS, Rates, fitting_sizes, known_gpu, memory_of, too_small_gpus, undivided
from eyrie_api.planning.main_memory import too_small_memory
from eyrie_api.planning.plan import make_plan, stage_gpus
from eyrie_api.planning.plan_stages import ObjectStore
from eyrie_api.planning.plan_work import (
    LEAST_DRAFT_VOCABULARY,
    DataFacts,
    PlannedWork,
    TargetFacts,
    training_on_gpus,
)
from eyrie_api.planning.published_drafters import check_published_drafters
from eyrie_api.planning.quantised import quantisation_config, read_quantisation
from eyrie_api.planning.resolve import block_chain, held_out_prompts, resolve
from eyrie_api.planning.reuse import asks_the_same, jobs_with_answers, stores_the_same
from eyrie_api.planning.sglang_attention import PROFILES, choose_attention, labelled, needs_of, preferred
from eyrie_api.planning.sglang_support import (
    SGLANG_VERSION,
    SUPPORTED_BY_SGLANG,
    require_block_capture,
    require_capture,
    require_layer_outputs,
    require_quantisation,
    sglang_layer_ids,
)
from eyrie_api.planning.target_config import check_config, choose_source, computed_by_reference
from eyrie_api.planning.target_files import check_tokenizer, check_weights, served_bytes, weights_are_here
from eyrie_api.planning.training_cost import usable_bytes
from eyrie_api.planning.training_defaults import gpu_bytes
from eyrie_api.quantities import size
from eyrie_api.settings import Settings

_UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
          "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}


@dataclass(frozen=True)
class Submission:
    job: ResolvedJob
    facts: Facts
    settings: Settings

    @property
    def architectures(self) -> list[str]:
        """Of the target's config.json; empty where it is not here."""
        named = self.facts.config.get("architectures")
        return [str(name) for name in named] if isinstance(named, list) else []

    @property
    def target_is_here(self) -> bool:
        """Whether the target's files are all on this machine; a Hub snapshot may hold its config.json alone."""
        return self.facts.target is not None and (
            not _is_hub_id(self.job.spec.target.model) or weights_are_here(self.facts.target))

    @cached_property
    def target_warnings(self) -> tuple[str, ...]:
        """Of the target's tokenizer and chat template, which are read once. Raises as `check_tokenizer`."""
        facts = self.facts
        if facts.target is None or facts.sizes is None or not self.target_is_here:
            return ()
        return check_tokenizer(facts.target, facts.config, facts.sizes.vocab_size)

    @cached_property
    def source(self) -> StateSourceName:
        """What computes the hidden states of a target whose config.json is here. Raises as `choose_source`."""
        job, facts = self.job, self.facts
        assert facts.sizes is not None
        # Whether a GPU of the capture stage can hold the target's weights; assumed where its label names no size.
        device = gpu_bytes(job.gpus["capture"].gpu_type)
        fits = device is None or facts.sizes.parameters * ELEMENT_BYTES[job.target.dtype] <= usable_bytes(device)
        return choose_source(facts.config, job.spec.capture.source, engine=job.spec.engine.kind,
                             streams=job.spec.capture.mode == "stream", fits_device=fits)

    def weight_bytes(self, engine: EngineKind) -> int | None:
        """Of the target in an engine, the embedded one standing for transformers too; None where it is not known."""
        facts = self.facts
        if facts.target is None or facts.sizes is None:
            return None
        return served_bytes(facts.target, facts.config, facts.sizes, self.job.target.dtype, engine)

    @property
    def is_computed_here(self) -> bool:
        """Whether a stage computes the target with Eyrie's own engine, or through transformers, from its weights."""
        spec = self.job.spec
        return "embedded" in (spec.engine.kind, spec.regenerate.engine) or (spec.trains and self.source != "sglang")

    def layer_choices(self) -> list[tuple[str, tuple[int, ...]]]:
        """Every set of layers that is fused, and the field that names it."""
        named = self.job.spec.capture.aux_layers
        return ([] if named is None else [("capture.aux_layers", named)]) + [
            (f"drafter.aux_layers (candidate {candidate.name})", candidate.drafter.aux_layers)
            for candidate in self.job.candidates if candidate.drafter.aux_layers is not None and candidate.fuses]


Check = Callable[[Submission], None]
"""Raises an error of `eyrie_api.errors` whose message names the field, its value and the rule."""


def check(spec: JobSpec, settings: Settings, rules: ReadRules | None = None) -> ResolvedJob:
    """The job as it is accepted, with its plan where the target's sizes are known. Raises InvalidInput, DiskTooSmall
    and the like, with a hint.

    rules   of `spec_policy.check`, which its stages follow; None: its submitter has a role in all projects
    """
    submission = _checked(spec, settings, rules)
    for lacks in CAPACITY_CHECKS:
        for error in lacks(submission):
            raise error
    return submission.job


def plan(spec: JobSpec, settings: Settings, earlier: Sequence[tuple[Job, ResolvedJob]] = (),
         rules: ReadRules | None = None) -> Plan:
    """The dry run behind `POST /plans`. Raises InvalidInput when the target's config.json is not on this machine.

    earlier   jobs of the same project, newest first: the answers that they have generated are not generated again
    """
    submission = _checked(spec, settings, rules, earlier)
    planned = submission.job.plan
    if planned is None:
        revision = "" if spec.target.revision is None else f" --revision {spec.target.revision}"
        raise InvalidInput(f"target.model {spec.target.model!r} is not in the Hub cache of the server, which contacts "
                           "no model hub, so its sizes are unknown",
                           f"where the server runs: `hf download {spec.target.model} config.json{revision}` is enough "
                           "for a plan; a job needs no download before")
    too_small = (*gpus_without_room(submission, for_other_machines=True), *memory_without_room(submission))
    warnings = [f"{error.message}: such a job is refused; {error.hint}" for error in too_small]
    return planned.model_copy(update={"warnings": (*warnings, *planned.warnings),
                                      "possible": not (too_small or disk_without_room(submission))})


def _checked(spec: JobSpec, settings: Settings, rules: ReadRules | None,
             earlier: Sequence[tuple[Job, ResolvedJob]] = ()) -> Submission:
    with reading(f"target.model {spec.target.model!r}, or the data or a drafter of the job"):
        return _checks(spec, settings, rules, earlier)


def _checks(spec: JobSpec, settings: Settings, rules: ReadRules | None,
            earlier: Sequence[tuple[Job, ResolvedJob]]) -> Submission:
    facts = read_facts(spec, settings, rules)
    resolved = resolve(with_absolute_paths(spec), facts).model_copy(update={"reads": rules})
    submission = Submission(resolved, facts, settings)
    for passes in CHECKS:
        passes(submission)
    if facts.sizes is None:
        return submission
    job = submission.job
    on_gpus, sizes = facts.computes_on_gpus(job.gpus, job.serving_gpus), facts.sizes
    if job.spec.engine.kind == "sglang" and quantisation_config(facts.config) is not None:
        sizes = replace(sizes, quantised_bytes=submission.weight_bytes("sglang"))
    store = _object_store(submission)
    # What a store holds is on no disk of this machine.
    planned = make_plan(job, sizes, None if store else free_bytes(settings.home), rates=rates(settings),
                        on_gpus=on_gpus, data_facts=_with_what_is_present(facts.data, job, settings, earlier),
                        gpu_hour_prices=settings.prices, store=store,
                        gpu_memory=None if job.on_cluster else gpu_memory_here())
    chosen = [f"{name} {value}" for name, value, before in (
        ("engine", job.spec.engine.kind, spec.engine.kind),
        ("data.max_conversations", job.spec.data.max_conversations, spec.data.max_conversations),
        ("regenerate.concurrency", job.spec.regenerate.concurrency, spec.regenerate.concurrency)) if value != before]
    notes: list[str] = []
    if not job.on_cluster:  # for the reader of a plan, who may plan for another machine
        notes = [f"a job of this plan is refused on this machine: {error.message}"
                 for error in missing_here(submission)]
        notes += [f"{field}.gpu_type {request.gpu_type!r} is for the plan alone: on one machine a job runs on the GPUs "
                  "that are there" for field, request in _requests(job.spec) if request.gpu_type is not None]
    notes += planned.notes
    if chosen:
        notes.append(f"chosen for a target of your own on GPUs, since the job does not name them: {', '.join(chosen)}")
    planned = planned.model_copy(update={"notes": (*notes, *_unread(submission)),
                                         "warnings": planned.warnings + submission.target_warnings})
    return replace(submission, job=job.model_copy(update={"plan": planned}))


def rates(settings: Settings) -> Rates | None:
    """Arithmetic rates of the machine, where one was set; None: those of the hardware that a job requests."""
    if not {"prefill_gflops", "decode_gflops", "single_gflops", "train_gflops"} & settings.model_fields_set:
        return None
    return Rates(prefill=settings.prefill_gflops, decode=settings.decode_gflops, single=settings.single_gflops,
                 train=settings.train_gflops, source="EYRIE_*_GFLOPS")


def _object_store(submission: Submission) -> ObjectStore | None:
    """The store of a cluster's jobs. Raises InvalidInput where EYRIE_STORE_PRICES does not suit it."""
    profile, settings = submission.facts.profile, submission.settings
    work = None if profile is None else profile.stages.work
    if not isinstance(work, S3Work):
        return None
    try:
        prices = store_prices(settings.store_prices, work.endpoint_url)
    except ValueError as error:
        raise InvalidInput(f"EYRIE_STORE_PRICES = {settings.store_prices!r}: {error}",
                           "an administrator corrects the setting") from None
    return ObjectStore(prices, work.states == "ranged", settings.artifacts.part_size_bytes)


def _with_what_is_present(known: DataFacts, job: ResolvedJob, settings: Settings,
                          earlier: Sequence[tuple[Job, ResolvedJob]]) -> DataFacts:
    """With the answers of the earlier job that has most for the same data, and the states of the one that has most of
    those, as far as manifests on this machine say."""
    resolved = {other.id: of_other for other, of_other in earlier}
    for other in jobs_with_answers(job.spec, (other for other, _ in earlier)):
        if not asks_the_same(job.spec, other.spec):
            continue
        stages = settings.job_dir(other.id) / "stages"
        with suppress(ArtifactMissing, ArtifactCorrupt):
            report = read_manifest(stages / "regenerate").report
            if isinstance(report, RegenerateReport) and report.rows_answered > known.present:
                known = replace(known, present=report.rows_answered, present_in=other.id)
        with suppress(ArtifactMissing, ArtifactCorrupt):
            captured = read_manifest(stages / "capture").report
            if isinstance(captured, CaptureReport) and captured.rows > known.states_present \
                    and stores_the_same(job, resolved[other.id]):
                known = replace(known, states_present=captured.rows, states_in=other.id,
                                states_as=(captured.codec, captured.final_state))
    return known


def _unread(submission: Submission) -> list[str]:
    """What the checks did not read, because it is not on this machine."""
    spec, target, notes = submission.job.spec, submission.facts.target, []
    if wanted := held_out_prompts(spec.benchmark.suites):
        notes.append(f"drafters are measured on up to {wanted} prompts held out of the data "
                     f"(data.held_out_fraction {spec.data.held_out_fraction:.3g})")
    if _is_hub_id(spec.target.model) and target is not None and not weights_are_here(target):
        notes.append(f"the weights of {spec.target.model} are not on this machine: the first stage checks the target's "
                     "files")
    notes += quantised_notes(submission)
    return notes + [f"the rows of {source.path} are not on this machine: the first stage checks them"
                    for source in spec.data.sources
                    if is_remote(source.path) or _is_hub_id(source.path) or is_missing(source.path)]


def quantised_notes(submission: Submission) -> list[str]:
    """What computes a quantised target, and where that differs from what SGLang serves."""
    spec, facts = submission.job.spec, submission.facts
    quantised = quantisation_config(facts.config)
    if facts.sizes is None or quantised is None:
        return []
    method = quantised.get("quant_method")
    if not submission.is_computed_here:
        return [f"the target is quantised ({method}): states are captured as SGLang computes them, and are not "
                "compared with those of transformers"]
    quantisation = read_quantisation(facts.config)
    assert quantisation is not None
    notes = [f"the target is quantised ({method}): Eyrie and transformers compute with its weights in "
             f"{submission.job.target.dtype}"]
    if quantisation.rounds_activations:
        differs = ("SGLang serves slightly other states than drafters are trained on; capture.source 'sglang' trains "
                   "them on its own" if spec.engine.kind == "sglang" else
                   "its states and answers in another engine differ slightly")
        notes.append(f"a serving engine also quantises this target's activations, Eyrie and transformers do not: "
                     f"{differs}")
    return notes


def _is_hub_id(name: str) -> bool:
    return local_path(name) is None and is_hub_id(name)


# Checks of the document.


def layers_are_distinct(submission: Submission) -> None:
    """Rules for aux_layers that hold for any target."""
    job = submission.job
    for field, layers in submission.layer_choices():
        if len(layers) < 2:
            raise InvalidInput(f"{field} {list(layers)} is one layer: SGLang treats a state of the "
                               "embedding's width as the drafter's own and skips its fc",
                               "give two or more, or omit it for a low, a middle and a high layer")
        if list(layers) != sorted(set(layers)):
            raise InvalidInput(f"{field} {list(layers)} are not distinct and ascending",
                               f"write {sorted(set(layers))}")
    named = job.spec.drafter.aux_layers
    if named is not None and not any(candidate.fuses for candidate in job.candidates):
        raise InvalidInput(f"drafter.aux_layers {list(named)} is set and no family of the job fuses layers",
                           "omit drafter.aux_layers, or train eagle3, dflash or dspark")


def windows_are_of_chains(submission: Submission) -> None:
    """SGLang applies a drafter's sliding window in chains only (`sglang_attention.attention_problem`)."""
    widest = max(submission.job.spec.tune.top_k)
    if submission.job.spec.engine.kind != "sglang" or widest == 1:
        return
    for candidate in submission.job.candidates:
        if candidate.drafter.sliding_window is not None:
            raise InvalidInput(
                f"drafter.sliding_window {candidate.drafter.sliding_window} (candidate {candidate.name}) with "
                f"tune.top_k up to {widest}: in a tree SGLang lets the drafter attend beyond its window",
                "set tune.top_k to [1], serve with the embedded engine, or omit drafter.sliding_window")


def blocks_are_drafted_whole(submission: Submission) -> None:
    """A drafter of blocks would be ranked by a draft that SGLang refuses, after it was trained. A continued drafter has
    the block that it was trained with, which is not known here."""
    job, tree = submission.job, submission.job.spec.benchmark.tree
    if job.spec.engine.kind != "sglang":
        return
    for candidate in job.candidates:
        if not FAMILIES[candidate.drafter.family].drafts_blocks or candidate.drafter.init_from is not None:
            continue
        chain = block_chain(candidate.drafter, candidate.train)
        if tree != chain:
            raise InvalidInput(
                f"benchmark.tree is {tree.label()} and a drafter of family {candidate.drafter.family!r} has blocks of "
                f"{chain.num_draft_tokens} tokens (drafter.max_draft_tokens, by default train.ttt_length, and one "
                "more), which SGLang drafts as a whole",
                f"set benchmark.tree to num_steps {chain.num_steps}, top_k 1 and num_draft_tokens "
                f"{chain.num_draft_tokens}; in a sweep, drafter.max_draft_tokens is the same for all of them")


def drafters_of_the_target(submission: Submission) -> None:
    """Drafters, rivals, and drafters that training continues from, are of this target."""
    stored = None if submission.settings.artifacts.url is None else submission.settings.home.absolute() / "jobs"
    check_published_drafters(submission.job, submission.facts, stored)


def suites_exist(submission: Submission) -> None:
    """Files and names of benchmark suites, and that prompts are held out for those that use them."""
    spec, in_pods = submission.job.spec, submission.job.on_cluster
    for suite in spec.benchmark.suites:
        if suite.path == HELD_OUT:
            if spec.data.held_out_fraction == 0.0:
                raise InvalidInput(
                    f"benchmark suite {suite.name!r} uses held-out prompts, but data.held_out_fraction is 0",
                    "omit data.held_out_fraction or raise it, or omit the suite")
            continue
        kind, _, name = suite.path.partition(":")
        if kind == QUICKSTART:
            if name not in QUICKSTART_SUITE_NAMES:
                raise InvalidInput(f"benchmark suite {suite.name!r}: {suite.path!r} is not shipped with Eyrie",
                                   f"quickstart suites are {', '.join(QUICKSTART_SUITE_NAMES)}")
            continue
        if is_remote(suite.path) or (in_pods and is_missing(suite.path)):
            continue
        path = local_path(suite.path)
        if path is None and not is_hub_id(kind):  # before the split of `org/name:split`
            raise InvalidInput(f"benchmark suite {suite.name!r}: {suite.path!r} is neither a file here nor a Hub id",
                               "give a JSONL file, an s3:// or https:// URL, a Hub id, quickstart:<suite>, or held-out")
        if path is not None and not path.is_file():
            raise InvalidInput(f"benchmark suite {suite.name!r}: no file {suite.path!r} on the server",
                               "give a JSONL file of messages or prompt rows")


# Checks of the engine and the target.


def engine_can_compute(submission: Submission) -> None:
    """What SGLang refuses after it has loaded the weights, or serves differently with only a warning in its log. Limits
    of single launch lines, which depend on the GPU's generation, are in `eyrie_workers.sglang.launch`.

    On a CPU, SGLang 0.5.23 verifies drafts greedily whatever the temperature (`_verify_uses_greedy` in its source):
    output at a temperature above 0 would not be the target's. Sampled generation without a drafter is not affected, so
    regeneration may sample there."""
    job, architectures = submission.job, submission.architectures
    if job.spec.engine.kind != "sglang":
        return
    device = submission.facts.engine_device(job.gpus, job.serving_gpus)
    if device == "gpu" and job.target.dtype == "float32":
        raise InvalidInput("target.dtype is 'float32' and engine is 'sglang', whose attention kernels on GPUs have no "
                           "float32", "set target.dtype to 'bfloat16', or engine to 'embedded'")
    if device == "cpu" and job.target.dtype == "float16":
        raise InvalidInput("target.dtype is 'float16' and engine is 'sglang', whose CPU kernels compute in bfloat16",
                           "set target.dtype to 'bfloat16', or engine to 'embedded'")
    for name, section in (("benchmark", job.spec.benchmark), ("tune", job.spec.tune)):
        above = [value for value in section.temperatures if value > 0.0]
        if above and device == "cpu":
            raise InvalidInput(
                f"{name}.temperatures has {above[0]:g} and engine is 'sglang' on a CPU, which verifies drafts greedily "
                "only: drafted output at a temperature above 0 would not be the target's",
                f"set {name}.temperatures to [0], or engine to 'embedded'")
    for family in job.families:
        algorithm = FAMILIES[family].sglang_algorithm
        if algorithm in BLOCK_ALGORITHMS and device == "cpu":
            raise InvalidInput(
                f"drafters of family {family!r} and engine 'sglang' on a CPU: SGLang runs them on GPUs only",
                "train another family, or set engine to 'embedded'")
        if architectures and algorithm == "EAGLE3":
            require_capture(architectures[0])
        elif architectures and algorithm in BLOCK_ALGORITHMS:
            require_block_capture(architectures[0])


def attention_backend_serves(submission: Submission) -> None:
    """The attention backend that a job names serves its target and draft trees on GPUs that are known by name, else on
    any; the stages apply the same rules to the machine that they find (`sglang_attention`)."""
    job, spec, facts = submission.job, submission.job.spec, submission.facts
    given = spec.engine.attention_backend
    if given is None or not facts.config:
        return
    hardware = () if spec.prove.hardware is None else spec.prove.hardware.profiles
    labels = gpu_names_here() if facts.profile is None else [
        *(placed.gpu_type for stage, placed in job.gpus.items() if stage != "train"), job.serving_gpus.gpu_type,
        *(measured.placement.gpu_type for measured in hardware)]
    known = [machine for label in dict.fromkeys(labels) if (machine := labelled(label)) is not None]
    if facts.engine_device(job.gpus, job.serving_gpus) == "cpu":
        known = [PROFILES["cpu"]]
    widths = {0, spec.benchmark.tree.top_k, *(spec.tune.top_k if "tune" in spec.stages else ())}
    windowed = any(candidate.drafter.sliding_window is not None for candidate in job.candidates)
    needs = replace(needs_of(facts.config), windowed_draft=max(widths) if windowed else 0)
    gpus = [machine for machine in PROFILES.values() if machine.platform != "cpu"]
    for machine in known or [machine for machine in gpus if given in preferred(machine, needs)][:1] or gpus[:1]:
        choose_attention(machine, needs, widths, given)


def target_is_computed(submission: Submission) -> None:
    """The engine computes the target's architecture as its config describes it, without code of the checkpoint."""
    spec, config, architectures = submission.job.spec, submission.facts.config, submission.architectures
    if submission.facts.target is None:
        return
    embedded = spec.engine.kind == "embedded"
    if not architectures or (embedded and not set(architectures) & set(SUPPORTED_ARCHITECTURES)):
        other_engine = "set engine to 'sglang', or " if set(architectures) & set(SUPPORTED_BY_SGLANG) else ""
        raise UnsupportedTarget(
            f"target.model {spec.target.model!r}: config.json names architecture "
            f"{', '.join(architectures) or '(none)'}, which the embedded engine does not compute",
            f"{other_engine}use a target of {', '.join(SUPPORTED_ARCHITECTURES)}")
    assert submission.facts.sizes is not None  # read here, so that a config without sizes is named first
    if embedded:
        check_config(config)


def states_are_captured(submission: Submission) -> None:
    """The source of hidden states can record what the candidates read."""
    spec, facts = submission.job.spec, submission.facts
    if facts.sizes is None or not spec.trains:
        return
    source = submission.source
    if source == "sglang":
        if spec.engine.kind != "sglang":
            raise InvalidInput(f"capture.source 'sglang' with engine {spec.engine.kind!r}, which starts no such server",
                               "set engine to 'sglang', or omit capture.source")
        require_capture(submission.architectures[0])
        for field, layers in submission.layer_choices():
            require_layer_outputs(layers, field)
    if source != "reference" and spec.capture.probe_layers:
        raise InvalidInput(f"capture.probe_layers with a target that is captured through {source}: layers are probed "
                           "in the reference forward pass alone", "set capture.probe_layers to false")


def quantised_weights_are_computed(submission: Submission) -> None:
    """Whatever computes a quantised target can: Eyrie and transformers from its values, SGLang with its kernels."""
    spec, facts = submission.job.spec, submission.facts
    quantised = quantisation_config(facts.config)
    if facts.sizes is None or quantised is None:
        return
    method = quantised.get("quant_method")
    if spec.engine.kind == "sglang":
        require_quantisation(quantised)
        if facts.engine_device(submission.job.gpus, submission.job.serving_gpus) == "cpu":
            raise UnsupportedTarget(f"quantization_config: quant_method {method!r} and engine 'sglang' on a CPU, where "
                                    "its kernels for quantised weights need Intel's AMX and were never run",
                                    "set engine to 'embedded', give the unquantised model, or submit the job where "
                                    "there are GPUs")
    if submission.is_computed_here:
        read_quantisation(facts.config)


def target_files_are_whole(submission: Submission) -> None:
    """Weights and tokenizer. A Hub snapshot may be incomplete: the first stage downloads the rest."""
    facts, model = submission.facts, submission.job.spec.target.model
    if facts.target is None or facts.sizes is None:
        return
    if facts.config.get("auto_map"):
        raise UnsupportedTarget(
            f"target.model {model!r}: config.json names Python code (auto_map), which is not executed",
            f"remove auto_map if the model computes what {submission.architectures[0]} of transformers does")
    if submission.target_is_here:
        check_weights(facts.target, facts.config, facts.sizes, known=computed_by_reference(facts.config),
                      computed_here=submission.is_computed_here)
        _ = submission.target_warnings  # raises for what is no warning


def heads_are_divided(submission: Submission) -> None:
    """The GPUs of one server divide the target, and each stage with servers has as many."""
    job, facts = submission.job, submission.facts.sizes
    tp_size = job.spec.engine.tp_size
    if facts is not None and job.spec.engine.kind == "sglang":
        check_divided(tp_size, facts)
    without_servers = ("capture", "train", *(() if job.spec.regenerate.engine is None else ("regenerate",)))
    for stage, placed in job.gpus.items():
        if stage in job.spec.stages and stage not in without_servers and 0 < (placed.num_gpus or 0) < tp_size:
            raise InvalidInput(f"engine.tp_size is {tp_size} and {stage} has {placed.num_gpus} GPUs "
                               "(placement.num_gpus)", f"give it {tp_size} or more, or lower engine.tp_size")


def check_divided(tp_size: int, facts: TargetFacts, field: str = "engine.tp_size") -> None:
    """Raises InvalidInput when so many GPUs cannot divide the target; `field` gives their number."""
    if (what := undivided(facts, tp_size)) is not None:
        sizes = ", ".join(map(str, fitting_sizes(facts)))
        raise InvalidInput(f"{field} {tp_size} does not divide {what}",
                           f"use a number that does: {sizes}" if sizes else "give the unquantised model")


def layers_have_sglang_ids(submission: Submission) -> None:
    """For every serving engine: a checkpoint's config.json names its layers as SGLang does, so they need such names."""
    if submission.facts.sizes is not None:
        for _, layers in submission.layer_choices():
            sglang_layer_ids(submission.architectures[0], submission.facts.sizes.num_layers, layers)


def vocabularies_fit(submission: Submission) -> None:
    """Draft vocabularies are no larger than the target's. A store of top-k logits has one draft vocabulary, which every
    drafter trained from it must use."""
    facts, capture = submission.facts.sizes, submission.job.spec.capture
    if facts is None:
        return
    # None: it follows from the answers.
    stored = capture.draft_vocab_size or (facts.vocab_size if facts.vocab_size <= LEAST_DRAFT_VOCABULARY else None)
    for candidate in submission.job.candidates:
        wanted = candidate.drafter.draft_vocab_size
        if capture.final_state == "topk" and wanted not in (None, stored):
            raise InvalidInput(
                f"drafter.draft_vocab_size {wanted} (candidate {candidate.name}) with capture.final_state topk, which "
                f"stores logits over {stored or 'as many'} draft tokens{'' if stored else ' as the answers need'}",
                f"set capture.draft_vocab_size {wanted} and no other in the sweep, or capture.final_state keep")
        if wanted is not None and wanted > facts.vocab_size:
            raise VocabularyTooLarge(f"drafter.draft_vocab_size {wanted} (candidate {candidate.name}) is larger than "
                                     f"the target's vocabulary of {facts.vocab_size}",
                                     f"give at most {facts.vocab_size}, or omit it")


# Checks of the hardware.


def hardware_profiles_exist(submission: Submission) -> None:
    """Each profile of `prove.hardware` is one that can be there, and the target fits it.

    On one machine a profile is a part of it: its GPUs, or threads of its CPU. On a cluster a profile names a type of
    GPU by the label of its nodes. Which nodes there are changes with the autoscaler, so a type without nodes is waited
    for; one that neither the table of GPUs nor the administrator's prices name is taken for a typing error, for which a
    job would wait without end."""
    spec, facts, prices = submission.job.spec, submission.facts.sizes, submission.settings.prices
    gpus, processors = gpus_of(os.environ), len(os.sched_getaffinity(0))
    for number, profile in enumerate(spec.prove.hardware.profiles if spec.prove.hardware is not None else ()):
        field, placed, label = f"prove.hardware.profiles.{number}", profile.placement, profile.placement.gpu_type
        num_gpus = placed.num_gpus or 0
        if submission.job.on_cluster:
            if label is not None and known_gpu(label) is None and label not in prices:
                known = ", ".join(sorted({*prices, *(gpu.name for gpu in GPUS)}))
                raise InvalidInput(f"{field}.placement.gpu_type {label!r} is not a known type of GPU",
                                   f"known are labels that name one of {known}; an administrator adds others to "
                                   "EYRIE_GPU_HOUR_PRICES")
        else:
            named = [name for name, default in PlacementRequest() if name != "num_gpus"
                     and getattr(placed, name) != default]
            if named:
                raise InvalidInput(
                    f"{field}.placement.{named[0]} is set and this server runs jobs on one machine, which has no nodes "
                    "to choose from", "name num_gpus or threads, or submit the job to a cluster")
            if num_gpus > len(gpus):
                raise InvalidInput(f"{field}.placement.num_gpus is {num_gpus} and this machine has {len(gpus)} GPUs",
                                   "lower it, or submit the job to a cluster")
            if (profile.threads or 0) > processors:
                raise InvalidInput(
                    f"{field}.threads is {profile.threads} and this machine has {processors} processors", "lower it")
        if facts is None or not num_gpus:
            continue
        if spec.engine.kind == "sglang":
            check_divided(num_gpus, facts, f"{field}.placement.num_gpus")
        device, weights = gpu_bytes(label), facts.parameters * ELEMENT_BYTES[submission.job.target.dtype]
        if quantisation_config(submission.facts.config) is not None:
            weights = submission.weight_bytes(spec.engine.kind) or 0
        if device is not None and weights > num_gpus * usable_bytes(device):
            raise InvalidInput(f"{field}: the target's weights are {weights / 1e9:.0f} GB, and {num_gpus} x {label} "
                               f"hold {num_gpus * usable_bytes(device) / 1e9:.0f} GB",
                               "raise placement.num_gpus of the profile, or name a larger GPU")


def shards_fit_the_pod(submission: Submission) -> None:
    """Two shards of each process of capture fit the pod's work area: Kubernetes evicts a pod that exceeds it. Of
    `ranged` states alone; `copied` ones need room for all of them."""
    profile, capture = submission.facts.profile, submission.job.spec.capture
    work, shard = None if profile is None else profile.stages.work, capture.shard_size_bytes
    if (not isinstance(work, S3Work) or work.states != "ranged" or work.scratch_size is None
            or capture.mode == "stream"):
        return
    number = work.scratch_size.rstrip("mkMGTPi")
    scratch = int(float(number) * _UNITS[work.scratch_size.removeprefix(number)])
    processes = submission.job.num_processes("capture")
    if 2 * processes * shard > scratch:
        raise InvalidInput(
            f"capture.shard_size_bytes = {shard}: two shards of each of {processes} processes are "
            f"{size(2 * processes * shard)}, and the work area of a pod has {work.scratch_size}",
            f"give at most {scratch // (2 * processes)}, or fewer GPUs to capture; an administrator changes "
            "cluster.stages.work.scratch_size")


def training_steps_fit(submission: Submission) -> None:
    """A training step of every candidate fits the requested type of GPU, if its label names a size."""
    job, facts = submission.job, submission.facts
    label = job.gpus["train"].gpu_type
    device = gpu_bytes(label)
    if facts.sizes is None or label is None or device is None:
        return
    work = PlannedWork(job, facts.sizes, facts.data)
    for candidate in job.candidates:
        training = training_on_gpus(work, candidate)
        if training is not None:
            if os.environ.get("EYRIE_TARGET_DEVICE") and not job.on_cluster:  # the target has devices of its own
                training = replace(training, streamed_bytes=0)
            training.require(device, label, usable_bytes(device))


CHECKS: tuple[Check, ...] = (
    layers_are_distinct, windows_are_of_chains, engine_can_compute, target_is_computed, attention_backend_serves,
    states_are_captured, quantised_weights_are_computed, target_files_are_whole, heads_are_divided,
    layers_have_sglang_ids, blocks_are_drafted_whole, drafters_of_the_target, suites_exist, hardware_profiles_exist,
    shards_fit_the_pod, vocabularies_fit, training_steps_fit)
"""In order: later ones assume what earlier ones have checked."""


# What this installation has no capacity for.


def missing_here(submission: Submission, devices: Path = DEVICES) -> list[InvalidInput]:
    """What a job asks for and this machine does not have: GPUs, SGLang; on a cluster nothing.

    GPUs are counted by their device files. Where those give no number, nothing is refused: the stage that needs them
    counts them with torch."""
    if submission.job.on_cluster:
        return []
    errors, on_cpu = [], os.environ.get("EYRIE_DEVICE") == "cpu"
    if on_cpu or not any((devices / name).exists() for name in WITHOUT_A_NUMBER):
        num_gpus = len(gpus_of(os.environ, devices))
        has = f"this machine has {num_gpus} GPU{'' if num_gpus == 1 else 's'}"
        what = "EYRIE_DEVICE is cpu, with which this machine uses no GPUs" if on_cpu else has
        lower = f"lower it to at most {num_gpus}" if num_gpus else "omit it"
        errors = [InvalidInput(f"{field}.num_gpus is {request.num_gpus} and {what}",
                               f"{lower}, or submit the job where there are as many")
                  for field, request in _requests(submission.job.spec) if (request.num_gpus or 0) > num_gpus]
    if submission.job.spec.engine.kind == "sglang" and not has_sglang(submission.settings):
        errors.append(InvalidInput(
            f"engine.kind is 'sglang', and this server finds no SGLang: {SGLANG_PROGRAM} is not set, and SGLang is not "
            "installed next to Eyrie",
            f"`pip install sglang=={SGLANG_VERSION}` in an environment of its own, and set {SGLANG_PROGRAM}="
            "'ENVIRONMENT/bin/python -m sglang.launch_server' before `eyrie up`; or set engine to 'embedded'"))
    return errors


def _requests(spec: JobSpec) -> list[tuple[str, PlacementRequest]]:
    """Every placement that a job requests, by the field that names it."""
    return [("placement.every", spec.placement.every),
            *((f"placement.stages.{stage}", request) for stage, request in spec.placement.stages.items()),
            ("serve.placement", spec.serve.placement)]


def gpus_without_room(submission: Submission, *, for_other_machines: bool = False) -> Sequence[EyrieError]:
    """One error for each kind of GPUs, of a stage or the endpoint, that the target does not fit; none where a size is
    not known. On a cluster a GPU's memory is that of its label. On one machine a job runs on the GPUs that are there,
    and a label is for plans alone.

    for_other_machines   where jobs run on one machine: take a GPU of the job's label, as a plan does
    """
    job, facts = submission.job, submission.facts
    weights, computed = (submission.weight_bytes(engine) for engine in (job.spec.engine.kind, "embedded"))
    if facts.sizes is None or weights is None or computed is None:
        return []
    if facts.profile is not None:
        return too_small_gpus(job, facts.sizes, weights, computed=computed, serves=facts.profile.serving is not None)
    here = gpu_memory_here()
    return too_small_gpus(job, facts.sizes, weights, computed=computed, serves=True, memory=lambda label: (
        memory_of(label) if for_other_machines and label is not None else here))


def memory_without_room(submission: Submission) -> Sequence[EyrieError]:
    """One error for each stage of a job of one machine that computes on CPUs and exceeds its main memory. A pod has
    what its placement requests, which is not compared."""
    job, facts, available = submission.job, submission.facts, memory_here()
    if job.on_cluster or facts.sizes is None or available is None:
        return []
    on_gpus = facts.computes_on_gpus(job.gpus, job.serving_gpus)
    return too_small_memory(PlannedWork(job, facts.sizes, facts.data),
                            {stage: stage_gpus(job, stage, on_gpus) for stage in job.gpus}, available)


def disk_without_room(submission: Submission) -> Sequence[EyrieError]:
    """An error where the disk under EYRIE_HOME has no room for what the job writes. Only lengths sampled from the data
    refuse a job: without them the plan is an upper bound, which does not prove that the job will not fit."""
    planned, home = submission.job.plan, submission.settings.home
    if planned is None or planned.fits_disk is not False or submission.facts.data.prompt_tokens is None:
        return []
    return [DiskTooSmall(f"the job needs about {size(planned.total_bytes_on_disk)} under {home} and "
                         f"{size(free_bytes(home))} are free",
                         "lower data.max_conversations or capture.max_length, use capture.codec int4 or "
                         "capture.final_state topk, or set EYRIE_HOME to a larger disk")]


CAPACITY_CHECKS: tuple[Callable[[Submission], Sequence[EyrieError]], ...] = (
    missing_here, gpus_without_room, disk_without_room, memory_without_room)
