"""Validation of a job before it is accepted, without loading a model: resolved once, then checked.

    read_facts        what is on this machine: data sources, the target's files, the cluster profile     I/O
    resolve           defaults, candidates, GPUs: a `ResolvedJob`                                        pure
    checks            what no installation could run; the first problem refuses the job, and its plan
    make_plan         tokens, bytes and hours, where the target's sizes are known                        pure
    capacity          what this installation has no capacity for: it refuses the job, and a plan notes it

Each error names field, value and rule, and a hint says what to do instead. What is not on this machine (a Hub id) or
cannot be checked cheaply (single malformed rows) is left to the stage that reads it; the plan's notes say so for Hub
ids.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from eyrie_api.artifacts import read_manifest
from eyrie_api.artifacts.store_prices import store_prices
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.placement import S3Work
from eyrie_api.contract.plan import Plan
from eyrie_api.contract.read_rules import ReadRules
from eyrie_api.contract.reports import CaptureReport, RegenerateReport
from eyrie_api.contract.resolved import ResolvedJob
from eyrie_api.contract.status import Job
from eyrie_api.data_files import is_remote
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing, InvalidInput, reading
from eyrie_api.full_disk import free_bytes
from eyrie_api.planning.capacity import (
    CAPACITY_CHECKS,
    disk_without_room,
    gpus_without_room,
    memory_without_room,
    missing_here,
    requests_of,
)
from eyrie_api.planning.checks import CHECKS
from eyrie_api.planning.facts import gpu_memory_here, is_missing, read_facts, with_absolute_paths
from eyrie_api.planning.hardware import Rates
from eyrie_api.planning.plan import make_plan
from eyrie_api.planning.plan_stages import ObjectStore
from eyrie_api.planning.plan_work import DataFacts
from eyrie_api.planning.quantised import quantisation_config, read_quantisation
from eyrie_api.planning.resolve import held_out_prompts, resolve
from eyrie_api.planning.reuse import asks_the_same, jobs_with_answers, stores_the_same
from eyrie_api.planning.submission import Submission, is_on_hub
from eyrie_api.planning.target_files import weights_are_here
from eyrie_api.settings import Settings


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
            ("regenerate.concurrency", job.spec.regenerate.concurrency, spec.regenerate.concurrency))
                  if value != before]
        notes: list[str] = []
        if not job.on_cluster:  # for the reader of a plan, who may plan for another machine
            notes = [f"a job of this plan is refused on this machine: {error.message}"
                     for error in missing_here(submission)]
            notes += [f"{field}.gpu_type {request.gpu_type!r} is for the plan alone: on one machine a job runs on the "
                      "GPUs that are there"
                      for field, request in requests_of(job.spec) if request.gpu_type is not None]
        notes += planned.notes
        if chosen:
            notes.append("chosen for a target of your own on GPUs, since the job does not name them: "
                         + ", ".join(chosen))
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
    if is_on_hub(spec.target.model) and target is not None and not weights_are_here(target):
        notes.append(f"the weights of {spec.target.model} are not on this machine: the first stage checks the target's "
                     "files")
    notes += quantised_notes(submission)
    return notes + [f"the rows of {source.path} are not on this machine: the first stage checks them"
                    for source in spec.data.sources
                    if is_remote(source.path) or is_on_hub(source.path) or is_missing(source.path)]


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
