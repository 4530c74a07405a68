"""What a user requests: one target, conversations, and how the drafter is trained, measured and served.

Every field has a default that suits a first run except `target` and one of `data` and `drafters`; every number has a
bound and a unit. Each section has a module of its own (`targets`, `data`, `capture`, ...) and is passed whole to the
stage it configures (`contract.stages`), never copied field by field.
"""

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field, model_validator

from eyrie_api.contract.benchmark import BenchmarkSpec, BroughtDrafter, RivalSpec
from eyrie_api.contract.capture import CaptureSpec
from eyrie_api.contract.data import DataSpec
from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import DraftServing, EngineSpec, Verification
from eyrie_api.contract.families import AUTO, FAMILIES, VARIANT_FIELDS, Family, sglang_families
from eyrie_api.contract.model import Frozen, Name
from eyrie_api.contract.placement import JobPlacement
from eyrie_api.contract.promotion import PromotionPolicy
from eyrie_api.contract.prove import ProveSpec
from eyrie_api.contract.regeneration import RegenerateSpec
from eyrie_api.contract.serving import ServeSpec
from eyrie_api.contract.stages import STAGES, TRAINING_STAGES, StageName
from eyrie_api.contract.sweep import SweepSpec
from eyrie_api.contract.targets import HELD_OUT, JobTarget
from eyrie_api.contract.training import TrainSpec
from eyrie_api.contract.tuning import TuneSpec

_OF_TRAINING = ("data", "regenerate", "reuse", "capture", "drafter", "train", "sweep")
"""Fields of jobs that train."""


class JobSpec(Frozen):
    """Train a drafter for one target, or take drafters that were trained elsewhere; choose, tune and serve the best."""

    name: Name | None = None
    """Display name; the server assigns the id."""

    target: JobTarget
    data: DataSpec = DataSpec()
    drafters: tuple[BroughtDrafter, ...] = Field((), max_length=16)
    """Trained elsewhere: they are the candidates, which are benchmarked, and the best of them is tuned, proven and
    promoted. Nothing is regenerated, captured or trained, so the sections that say how are left out."""

    engine: EngineSpec = EngineSpec()
    """In which it regenerates, benchmarks, tunes, proves and serves. Where hidden states come from is
    `capture.source`."""

    regenerate: RegenerateSpec = RegenerateSpec()
    reuse: Literal["auto", "never"] = "auto"
    """`auto`: answers that earlier jobs of the project have generated for the same prompts, by the same target with the
    same sampling and seed, are taken over, and so are hidden states of the same rows. `never`: every answer is
    generated and every state computed."""

    capture: CaptureSpec = CaptureSpec()
    drafter: DrafterSpec = DrafterSpec()
    train: TrainSpec = TrainSpec()
    sweep: SweepSpec = SweepSpec()
    rivals: tuple[RivalSpec, ...] = Field((), max_length=16)
    """Measured next to the candidates, for comparison (`promotion.must_beat`, `promotion.rivals`)."""

    benchmark: BenchmarkSpec = BenchmarkSpec()
    tune: TuneSpec = TuneSpec()
    prove: ProveSpec = ProveSpec()
    promotion: PromotionPolicy = PromotionPolicy()
    serve: ServeSpec = ServeSpec()
    placement: JobPlacement = JobPlacement()
    """Where its stages run on a cluster."""

    labels: dict[Name, str] = Field(default_factory=dict, max_length=64)
    """Your own, to find the job by."""

    @model_validator(mode="after")
    def _trains_or_is_given_drafters(self) -> "JobSpec":
        if self.trains:
            if not self.data.sources:
                raise ValueError("data.sources is empty, and so is drafters: give conversations to train on, or "
                                 "drafters that were trained elsewhere")
            return self
        for section in _OF_TRAINING:
            if getattr(self, section) != JobSpec.model_fields[section].default:
                raise ValueError(f"drafters names drafters that were trained elsewhere, so the job trains none, and "
                                 f"{section} is set: omit it; to measure drafters next to trained ones, name them in "
                                 "rivals")
        for suite in self.benchmark.suites:
            if suite.path == HELD_OUT:
                raise ValueError(f"benchmark suite {suite.name!r} uses prompts held out of the data, and a job with "
                                 "drafters has no data: give a file of prompts, or a Hub data set")
        return self

    @model_validator(mode="after")
    def _sections_agree(self) -> "JobSpec":
        if self.data.answered and self.regenerate.engine is not None:
            raise ValueError(f"data.answered is true, which generates nothing, and regenerate.engine is "
                             f"{self.regenerate.engine!r}: omit one of them")
        for number, profile in enumerate(self.prove.profiles):
            if profile.threads is not None and self.engine.kind != "embedded":
                raise ValueError(f"prove.hardware.profiles.{number}.threads is {profile.threads} and engine is "
                                 f"{self.engine.kind!r}, which takes no number of threads: omit it")
        deepest = max(self.benchmark.tree.num_steps, *self.tune.num_steps)
        if self.trains and deepest > self.train.ttt_length + 4:
            raise ValueError(f"num_steps {deepest} is far beyond train.ttt_length {self.train.ttt_length}: "
                             "the drafter would be served at depths it was not trained for; raise "
                             "ttt_length or lower num_steps")
        variants = [field for field in VARIANT_FIELDS if getattr(self.drafter, field)]
        for family in self.trained_families:
            for field in variants:
                if field not in FAMILIES[family].variant_fields:
                    owners = ", ".join(name for name, row in FAMILIES.items() if field in row.variant_fields)
                    raise ValueError(f"drafter.{field} is a variant of {owners}, and {family!r} is to be trained too: "
                                     "leave it out, or train that family in a job of its own")
        for field, names in (("rivals", [rival.checkpoint for rival in self.rivals]),
                             ("drafters", [drafter.checkpoint for drafter in self.drafters])):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{field}: {', '.join(twice)} is named twice: list each once, and give those of equal "
                                 "file names a name")
        if not self.tune.ngram and any(rival.method == "ngram" for rival in self.rivals):
            raise ValueError("rivals names ngram, which tuning compares, and tune.ngram is false: set it to true, or "
                             "leave the rival out")
        for field, named in (("rivals", self.rivals), ("drafters", self.drafters)):
            if self.engine.kind == "embedded" and any(drafter.method == "nextn" for drafter in named):
                raise ValueError(f"{field} names nextn, and engine is 'embedded', which does not compute the target's "
                                 "MTP layers: set engine to 'sglang', or leave it out")
        for family in self.trained_families if self.engine.kind == "sglang" else ():
            if family not in sglang_families():
                field = "sweep.families" if self.sweep.families else "drafter.family"
                raise ValueError(f"{field} names {family!r}, which engine 'sglang' cannot serve: use one of "
                                 f"{', '.join(sglang_families())}, or engine 'embedded'")
        if self.engine.kind == "sglang" and self.benchmark.tree.static:
            raise ValueError("benchmark.tree.static is true, and engine 'sglang' supports dynamic trees only: set it "
                             "to false, or engine to 'embedded'")
        if self.engine.kind == "embedded" and self.drawn_drafts:
            raise ValueError(f"tune.verifications or benchmark.tree.verification is {self.drawn_drafts[0]!r}, and "
                             "engine is 'embedded', whose draws are the same with any drafter: omit it, or set engine "
                             "to 'sglang'")
        if self.engine.kind == "embedded" and self.draft_servings:
            raise ValueError(f"tune.drafts or benchmark.tree.draft has {self.draft_servings[0].label()[1:]!r}, and "
                             "engine is 'embedded', which computes drafter and target alike: omit it, or set engine to "
                             "'sglang'")
        if self.benchmark.tree.draft.step_rates == ():
            raise ValueError("benchmark.tree.draft.step_rates is empty, and rates are measured after the benchmark: "
                             "give some, or omit it; in tune.drafts an empty list is filled")
        if self.sweep.shared_passes == "always" and self.placement.train_launcher == "trainjob":
            raise ValueError("sweep.shared_passes is 'always', one program in one pod, and placement.train_launcher is "
                             "'trainjob': set sweep.shared_passes to 'auto', or the launcher to 'pod'")
        return self

    def with_paths(self, change: Callable[[str, str], str]) -> "JobSpec":
        """With other paths, URLs or ids in place of those of its files, data sets and models.

        change   from the field that names one, and the name
        """
        def changed(named: Frozen, field: str, name: str = "path") -> Any:
            path = getattr(named, name)
            return named if path is None else named.model_copy(update={name: change(f"{field}.{name}", path)})

        def each(field: str, named: tuple[Frozen, ...]) -> tuple[Any, ...]:
            return tuple(changed(one, f"{field}[{number}]") for number, one in enumerate(named))

        axis_field = "drafter.init_from"
        sections = {
            "target": changed(self.target, "target", "model"),
            "data": self.data.model_copy(update={"sources": each("data.sources", self.data.sources)}),
            "benchmark": self.benchmark.model_copy(update={"suites": each("benchmark.suites", self.benchmark.suites)}),
            "drafters": each("drafters", self.drafters), "rivals": each("rivals", self.rivals),
            "drafter": changed(self.drafter, "drafter", "init_from"),
            "sweep": self.sweep.model_copy(update={"axes": tuple(
                axis if axis.field != axis_field else axis.model_copy(update={"values": tuple(
                    change(f"sweep.axes: {axis_field}", value) if isinstance(value, str) else value
                    for value in axis.values)}) for axis in self.sweep.axes)}),
            "promotion": self.promotion.model_copy(update={
                "drift": changed(self.promotion.drift, "promotion.drift", "traffic_file")})}
        # A section without a change is left as it is, since a default that is open stays open.
        return self.model_copy(update={
            name: section for name, section in sections.items() if section != getattr(self, name)})

    @property
    def trains(self) -> bool:
        """Whether the job trains its candidates; else they are `drafters`."""
        return not self.drafters

    @property
    def drawn_drafts(self) -> tuple[Verification, ...]:
        """The verifications of drafts that are drawn from the drafter's distribution, as the job asks for them."""
        asked = (*self.tune.verifications, self.benchmark.tree.verification)
        return tuple(name for name in dict.fromkeys(asked) if name != "target")

    @property
    def draft_servings(self) -> tuple[DraftServing, ...]:
        """How the job asks for its drafter to be computed, where otherwise than the target."""
        asked = (*self.tune.drafts, self.benchmark.tree.draft)
        return tuple(draft for draft in dict.fromkeys(asked) if draft != DraftServing())

    @property
    def trained_families(self) -> tuple[Family, ...]:
        """Those that the job trains; none while they are to be predicted (`sweep.families: [auto]`)."""
        families = self.sweep.families or (self.drafter.family,)
        return tuple(name for name in families if name != AUTO) if self.trains else ()

    @property
    def stages(self) -> tuple[StageName, ...]:
        """Those that the job has, in order."""
        return tuple(stage for stage in STAGES if (self.trains or stage not in TRAINING_STAGES)
                     and (stage != "hardware" or self.prove.hardware is not None))
