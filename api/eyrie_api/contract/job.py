"""What a user requests: one target, conversations, and how the drafter is trained, measured and served.

Every field has a default that suits a first run except `target` and `data`; every number has a bound and a unit.
Each section has a module of its own (`targets`, `data`, `capture`, ...) and is passed whole to the stage it configures
(`contract.stages`), never copied field by field.
"""

from typing import Literal

from pydantic import Field, model_validator

from eyrie_api.contract.benchmark import BenchmarkSpec, RivalSpec
from eyrie_api.contract.capture import CaptureSpec
from eyrie_api.contract.data import DataSpec
from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import EngineSpec
from eyrie_api.contract.families import FAMILIES, VARIANT_FIELDS, sglang_families
from eyrie_api.contract.model import Frozen, Name
from eyrie_api.contract.placement import JobPlacement
from eyrie_api.contract.promotion import PromotionPolicy
from eyrie_api.contract.prove import ProveSpec
from eyrie_api.contract.regeneration import RegenerateSpec
from eyrie_api.contract.serving import ServeSpec
from eyrie_api.contract.sweep import SweepSpec
from eyrie_api.contract.targets import JobTarget
from eyrie_api.contract.training import TrainSpec
from eyrie_api.contract.tuning import TuneSpec


class JobSpec(Frozen):
    """Train, choose, tune and serve a drafter for one target."""

    name: Name | None = None
    """Display name; the server assigns the id."""

    target: JobTarget
    data: DataSpec
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
    def _sections_agree(self) -> "JobSpec":
        if self.data.answered and self.regenerate.engine is not None:
            raise ValueError(f"data.answered is true, which generates nothing, and regenerate.engine is "
                             f"{self.regenerate.engine!r}: omit one of them")
        profiles = self.prove.hardware.profiles if self.prove.hardware is not None else ()
        for number, profile in enumerate(profiles):
            if profile.threads is not None and self.engine.kind != "embedded":
                raise ValueError(f"prove.hardware.profiles.{number}.threads is {profile.threads} and engine is "
                                 f"{self.engine.kind!r}, which takes no number of threads: omit it")
        deepest = max(self.benchmark.tree.num_steps, *self.tune.num_steps)
        if deepest > self.train.ttt_length + 4:
            raise ValueError(f"num_steps {deepest} is far beyond train.ttt_length {self.train.ttt_length}: "
                             "the drafter would be served at depths it was not trained for; raise "
                             "ttt_length or lower num_steps")
        variants = [field for field in VARIANT_FIELDS if getattr(self.drafter, field)]
        for family in self.sweep.families or (self.drafter.family,):
            for field in variants:
                if field not in FAMILIES[family].variant_fields:
                    owners = ", ".join(name for name, row in FAMILIES.items() if field in row.variant_fields)
                    raise ValueError(f"drafter.{field} is a variant of {owners}, and {family!r} is to be trained too: "
                                     "leave it out, or train that family in a job of its own")
        names = [rival.checkpoint for rival in self.rivals]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"rivals: {', '.join(twice)} is named twice: list each rival once, and give those of "
                             "equal file names a name")
        if not self.tune.ngram and any(rival.method == "ngram" for rival in self.rivals):
            raise ValueError("rivals names ngram, which tuning compares, and tune.ngram is false: set it to true, or "
                             "leave the rival out")
        if self.engine.kind == "embedded" and any(rival.method == "nextn" for rival in self.rivals):
            raise ValueError("rivals names nextn, and engine is 'embedded', which does not compute the target's MTP "
                             "layers: set engine to 'sglang', or leave the rival out")
        for family in (self.sweep.families or (self.drafter.family,)) if self.engine.kind == "sglang" else ():
            if family not in sglang_families():
                field = "sweep.families" if self.sweep.families else "drafter.family"
                raise ValueError(f"{field} names {family!r}, which engine 'sglang' cannot serve: use one of "
                                 f"{', '.join(sglang_families())}, or engine 'embedded'")
        if self.engine.kind == "sglang" and self.benchmark.tree.static:
            raise ValueError("benchmark.tree.static is true, and engine 'sglang' supports dynamic trees only: set it "
                             "to false, or engine to 'embedded'")
        if self.sweep.shared_passes == "always" and self.placement.train_launcher == "trainjob":
            raise ValueError("sweep.shared_passes is 'always', one program in one pod, and placement.train_launcher is "
                             "'trainjob': set sweep.shared_passes to 'auto', or the launcher to 'pod'")
        return self
