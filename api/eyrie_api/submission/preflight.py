"""Refuse early: what can be known to be wrong with a job before anything has run, without loading a model.

Each check names field, value and rule, and says what to do instead. Paths are the server's: they are made absolute once
here, because stage programs run elsewhere. What cannot be known cheaply (a Hub id that is not in the cache, rows that
turn out malformed) is left to the stage that meets it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eyrie_api.decisions.capture_support import require_capture, sglang_layer_ids
from eyrie_api.decisions.families import fuses
from eyrie_api.decisions.plan import DEFAULT_DRAFT_VOCABULARY, Rates, TargetFacts, make_plan
from eyrie_api.decisions.sweep import Candidate, expand
from eyrie_api.errors import (
    DiskTooSmall,
    InvalidInput,
    NoChatTemplate,
    NoUsableData,
    UnsupportedTarget,
    VocabularyTooLarge,
)
from eyrie_api.settings import Settings
from eyrie_api.submission.target_facts import (
    HUB_ID,
    data_facts,
    free_bytes,
    local_path,
    read_config,
    target_dir,
    target_facts,
)
from eyrie_api.v1alpha1.benchmark import SuiteSpec
from eyrie_api.v1alpha1.data import DataSource
from eyrie_api.v1alpha1.job import JobSpec
from eyrie_api.v1alpha1.plan import Plan
from eyrie_api.v1alpha1.targets import HELD_OUT, QUICKSTART, QUICKSTART_SUITE_NAMES, SUPPORTED_ARCHITECTURES

_REMEMBERED_S = 2.0
_MAX_REMEMBERED = 1000
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


@dataclass(frozen=True)
class Checked:
    """A job that passed, with its paths absolute, and what it will cost where that is known."""

    spec: JobSpec
    plan: Plan | None


def check(spec: JobSpec, settings: Settings) -> Checked:
    """Check a job before it is accepted. Raises an InvalidInput or DiskTooSmall with the hint."""
    _check_layers(spec)
    _check_windows(spec)
    facts = _check_target(spec)
    for source in spec.data.sources:
        _check_source(source)
    for suite in spec.benchmark.suites:
        _check_suite(suite, spec)
    _check_sizes(spec, facts)
    if facts is None:
        return Checked(absolute(spec), None)
    known = data_facts(spec.data)
    plan = make_plan(spec, facts, free_bytes(settings.home), data_facts=known, rates=rates(settings))
    # Refused only on lengths sampled from the data: an upper bound that does not fit is no proof that the job won't.
    if plan.fits_disk is False and known.prompt_tokens is not None:
        raise DiskTooSmall(f"the job needs about {plan.total_bytes_on_disk / 2**30:.1f} GiB under {settings.home} and "
                           f"{free_bytes(settings.home) / 2**30:.1f} GiB are free",
                           "lower data.max_conversations or capture.max_length, use capture.codec int4 or "
                           "capture.final_state topk, or set EYRIE_HOME to a larger disk")
    return Checked(absolute(spec), plan)


class Checks:
    """`check`, remembering for a moment what passed. Many jobs that differ in nothing but their names come together,
    and what is asked of files holds for as long as that."""

    def __init__(self, settings: Settings, elapsed: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._elapsed = settings, elapsed
        self._passed: dict[str, tuple[Checked, float]] = {}

    def check(self, spec: JobSpec) -> Checked:
        """Raises as `check`; what was refused is not remembered."""
        same, now = spec.model_dump_json(exclude={"name", "labels"}), self._elapsed()
        passed, until = self._passed.get(same, (None, 0.0))
        if passed is None or until <= now:
            passed = check(spec, self._settings)
            if len(self._passed) >= _MAX_REMEMBERED:
                self._passed.clear()
            self._passed[same] = (passed, now + _REMEMBERED_S)
        named = passed.spec.model_copy(update={"name": spec.name, "labels": spec.labels})
        return Checked(named, passed.plan)


def plan(spec: JobSpec, settings: Settings) -> Plan:
    """The dry run behind `POST /plans`. Raises InvalidInput when the target's config cannot be read here."""
    _check_layers(spec)
    _check_windows(spec)
    facts = _check_target(spec)
    for source in spec.data.sources:
        _check_source(source)
    _check_sizes(spec, facts)
    if facts is None:
        raise InvalidInput(f"target.model {spec.target.model!r} is not on this machine, so its sizes are unknown",
                           "download it first (`hf download`), or give a local directory with its config.json")
    return make_plan(spec, facts, free_bytes(settings.home), data_facts=data_facts(spec.data), rates=rates(settings))


def rates(settings: Settings) -> Rates:
    """The machine's arithmetic as settings give it."""
    return Rates(prefill=settings.prefill_gflops, decode=settings.decode_gflops, single=settings.single_gflops,
                 train=settings.train_gflops)


def absolute(spec: JobSpec) -> JobSpec:
    """The job with every local path made absolute."""
    target = spec.target.model_copy(update={"model": _absolute(spec.target.model)})
    sources = tuple(one.model_copy(update={"path": _absolute(one.path)}) for one in spec.data.sources)
    suites = tuple(one.model_copy(update={"path": _absolute(one.path)}) for one in spec.benchmark.suites)
    return spec.model_copy(update={
        "target": target, "data": spec.data.model_copy(update={"sources": sources}),
        "benchmark": spec.benchmark.model_copy(update={"suites": suites})})


def _absolute(path: str) -> str:
    if path in (QUICKSTART, HELD_OUT) or path.startswith(f"{QUICKSTART}:"):
        return path
    found = local_path(path)
    return path if found is None else str(found)


def _check_target(spec: JobSpec) -> TargetFacts | None:
    directory = target_dir(spec.target)
    if directory is None:
        return None
    config = read_config(directory)
    named = config.get("architectures")
    architectures = [str(one) for one in named] if isinstance(named, list) else []
    if spec.serve.engine == "sglang" and architectures:
        require_capture(architectures[0])
    if not set(architectures) & set(SUPPORTED_ARCHITECTURES):
        raise UnsupportedTarget(
            f"target.model {spec.target.model!r}: config.json names architecture "
            f"{', '.join(architectures) or 'nowhere'}, which is not supported",
            f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}")
    _check_tokenizer(directory)
    facts = target_facts(directory)
    # Whatever serves now: a checkpoint's config.json names its layers for SGLang, so they must have such names.
    for _, layers in _layer_choices(spec):
        sglang_layer_ids(architectures[0], facts.num_layers, layers)
    return facts


def _check_layers(spec: JobSpec) -> None:
    """What of the layers named is wrong for any target; `sglang_layer_ids` knows what is wrong for this one."""
    for field, layers in _layer_choices(spec):
        if len(layers) < 2:
            raise InvalidInput(f"{field} {list(layers)} is one layer: SGLang takes a state as wide as the "
                               "embedding for the drafter's own and would skip its fc",
                               "give two or more, or leave it out for a low, a middle and a high one")
        if list(layers) != sorted(set(layers)):
            raise InvalidInput(f"{field} {list(layers)} are not distinct and ascending",
                               f"write {sorted(set(layers))}")
    named = spec.drafter.aux_layers
    if named is not None and not any(fuses(one) for one in expand(spec)):
        raise InvalidInput(f"drafter.aux_layers {list(named)} are named and no family of the job fuses layers",
                           "leave drafter.aux_layers out, or train eagle3 or dflash")


def _layer_choices(spec: JobSpec) -> list[tuple[str, tuple[int, ...]]]:
    """Every set of layers that is to be fused, and the field that names it."""
    found = [] if spec.capture.aux_layers is None else [("capture.aux_layers", spec.capture.aux_layers)]
    return found + [(f"drafter.aux_layers (candidate {one.name})", one.drafter.aux_layers)
                    for one in expand(spec) if one.drafter.aux_layers is not None and fuses(one)]


def _check_windows(spec: JobSpec) -> None:
    """SGLang keeps a drafter's window in chains only (`eyrie_workers.engines.sglang.profiles`)."""
    widest = max(spec.tune.top_k)
    if spec.serve.engine != "sglang" or widest == 1:
        return
    for candidate in expand(spec):
        if candidate.spec.drafter.sliding_window is not None:
            raise InvalidInput(
                f"drafter.sliding_window {candidate.spec.drafter.sliding_window} (candidate {candidate.name}) with "
                f"tune.top_k up to {widest}: in a tree SGLang lets the drafter see more than its window",
                "set tune.top_k to [1], serve with the embedded engine, or leave drafter.sliding_window out")


def _check_tokenizer(directory: Path) -> None:
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise NoChatTemplate(f"target directory {directory} has no tokenizer ({', '.join(_TOKENIZER_FILES)})",
                             "copy the model's tokenizer files beside its config.json")
    if (directory / "chat_template.jinja").is_file() or (directory / "chat_template.json").is_file():
        return
    if any(directory.glob("additional_chat_templates/*.jinja")):
        return
    try:
        text = (directory / "tokenizer_config.json").read_text(encoding="utf-8")
    except (OSError, ValueError):
        text = ""
    if '"chat_template"' not in text:
        raise NoChatTemplate(f"target directory {directory} has a tokenizer without chat template",
                             "use the chat model rather than the base model, or add chat_template.jinja")


def _check_source(source: DataSource) -> None:
    if source.path == QUICKSTART:
        return
    path = local_path(source.path)
    if path is None:
        if not HUB_ID.match(source.path):
            raise InvalidInput(f"data source {source.path!r} is neither a file here nor a Hub data set id",
                               "give a JSONL or parquet file, a Hub id org/name, or 'quickstart'")
        return
    if not path.is_file():
        raise NoUsableData(f"data file {source.path!r}: no such file on the server",
                           "give the path of a JSONL or parquet file, a Hub data set id, or 'quickstart'")
    if path.stat().st_size == 0:
        raise NoUsableData(f"data file {source.path!r} is empty", "give a file with one conversation per line")


def _check_suite(suite: SuiteSpec, spec: JobSpec) -> None:
    if suite.path == HELD_OUT:
        if spec.data.held_out_fraction == 0.0:
            raise InvalidInput(f"benchmark suite {suite.name!r} wants held-out prompts, but data.held_out_fraction is "
                               "0", "set data.held_out_fraction, or leave the suite out")
        return
    kind, _, name = suite.path.partition(":")
    if kind == QUICKSTART:
        if name not in QUICKSTART_SUITE_NAMES:
            raise InvalidInput(f"benchmark suite {suite.name!r}: {suite.path!r} is not shipped with Eyrie",
                               f"quickstart suites are {', '.join(QUICKSTART_SUITE_NAMES)}")
        return
    path = local_path(suite.path)
    if path is None and not HUB_ID.match(suite.path):
        raise InvalidInput(f"benchmark suite {suite.name!r}: {suite.path!r} is neither a file here nor a Hub id",
                           "give a JSONL file, a Hub id, quickstart:<suite>, or held-out")
    if path is not None and not path.is_file():
        raise InvalidInput(f"benchmark suite {suite.name!r}: no file {suite.path!r} on the server",
                           "give a JSONL file of messages or prompt rows")


def _check_sizes(spec: JobSpec, facts: TargetFacts | None) -> None:
    candidates = expand(spec)
    if facts is None:
        return
    _check_opinions(candidates, facts)
    for candidate in candidates:
        wanted = candidate.drafter.draft_vocab_size
        if wanted is not None and wanted > facts.vocab_size:
            raise VocabularyTooLarge(f"drafter.draft_vocab_size {wanted} (candidate {candidate.name}) is larger than "
                                     f"the target's vocabulary of {facts.vocab_size}",
                                     f"give at most {facts.vocab_size}, or leave it out")


def _check_opinions(candidates: Sequence[Candidate], facts: TargetFacts) -> None:
    """A store of opinions is about one draft vocabulary: every drafter trained from it must have that one."""
    for candidate in candidates:
        capture, wanted = candidate.spec.capture, candidate.drafter.draft_vocab_size
        stored = capture.draft_vocab_size or min(facts.vocab_size, DEFAULT_DRAFT_VOCABULARY)
        if capture.final_state == "topk" and wanted not in (None, stored):
            raise InvalidInput(
                f"drafter.draft_vocab_size {wanted} (candidate {candidate.name}) with capture.final_state topk, which "
                f"keeps opinions over {stored} draft tokens",
                f"set capture.draft_vocab_size {wanted} and no other in the sweep, or capture.final_state keep")
