"""What passes between what steers and what works: a stage spec goes in, a manifest comes out.

A stage program reads `--spec spec.json` (a `StageSpec`), works in the directory of `--out manifest.json`, and writes
that manifest last. Paths in a spec are local paths of the machine that runs the stage; paths in a manifest are
relative to the manifest's directory, so an output directory may be moved or copied whole.
"""

from typing import Annotated, Literal

from pydantic import Field

from eyrie_api.contract.benchmark import BenchmarkSpec, BroughtDrafter, RivalSpec
from eyrie_api.contract.capture import CaptureSpec
from eyrie_api.contract.data import DataSpec, SourceMix
from eyrie_api.contract.drafter import DrafterSpec, PublishedDrafter
from eyrie_api.contract.engine import EngineSpec
from eyrie_api.contract.families import Family
from eyrie_api.contract.hardware import HardwareMeasurement, PlacedProfile
from eyrie_api.contract.load import LoadSpec
from eyrie_api.contract.model import Digest, Frozen
from eyrie_api.contract.promotion import PromotionPolicy
from eyrie_api.contract.prove import ProveReport, ProveSpec
from eyrie_api.contract.read_rules import ReadRules, reads_of_job
from eyrie_api.contract.regeneration import RegenerateSpec
from eyrie_api.contract.reports import (
    BenchmarkReport,
    CaptureReport,
    RegenerateReport,
    TrainReport,
    TuneReport,
)
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.training import TrainSpec
from eyrie_api.contract.tuning import DrafterUse, TuneSpec

StageName = Literal["regenerate", "capture", "train", "benchmark", "tune", "prove", "hardware"]
STAGES: tuple[StageName, ...] = ("regenerate", "capture", "train", "benchmark", "tune", "prove", "hardware")
JOB_STAGES: tuple[StageName, ...] = STAGES[:-1]
"""Those of a job that trains; `hardware` is one of jobs with `prove.hardware`."""
TRAINING_STAGES: tuple[StageName, ...] = STAGES[:3]
"""Those of jobs that train; a job with `drafters` begins after them."""


class RegenerateStage(Frozen):
    """Conversations in, `rows.jsonl` (answered), `held_out.jsonl` and `quarantine.jsonl` out."""

    stage: Literal["regenerate"] = "regenerate"
    job_id: str
    target: TargetSpec
    reads: ReadRules | None = reads_of_job()
    """Of the job: applied to the files and addresses that it names."""

    data: DataSpec
    engine: EngineSpec = EngineSpec()
    regenerate: RegenerateSpec
    exclude_prompts: tuple[str, ...] = ()
    """Suite files or names whose prompts must not be trained on (same paths as `SuiteSpec.path`)."""

    reuse: tuple[str, ...] = ()
    """Output directories of regenerate of earlier jobs, in order of preference: their answers are taken over where they
    are what would be generated. One that is missing, damaged or of another target is left out."""


class CaptureStage(Frozen):
    """Answered rows in, a feature store out (`index.json`, `shard-*.states`)."""

    stage: Literal["capture"] = "capture"
    job_id: str
    target: TargetSpec
    reads: ReadRules | None = reads_of_job()
    capture: CaptureSpec
    rows_dir: str
    """Output directory of regenerate."""

    engine: EngineSpec = EngineSpec()
    """Of the job; `capture.source: sglang` starts such a server."""

    families: tuple[Family, ...] = ("eagle3",)
    """What will be trained from the store: each family reads layers of its own."""

    init_from: tuple[PublishedDrafter, ...] = ()
    """Drafters that training continues from: the layers they read are stored too."""

    aux_layers: tuple[int, ...] = ()
    """Layers that candidates name themselves (`drafter.aux_layers`), stored beside those."""

    reuse: tuple[str, ...] = ()
    """Output directories of capture of earlier jobs, in order of preference: the states of rows with the same tokens
    are copied from there where they are stored in the same format. One that is missing or damaged is left out."""

    seed: int = 0


class ComparedMix(Frozen):
    """The mix of one candidate of a sweep, as far as it decides how many rows all of them have."""

    mix: SourceMix
    train_seed: int
    """`train.seed`: it decides which rows are evaluated on instead of trained on."""


class RowDraw(Frozen):
    """Which captured rows a candidate trains on, in a job with `data.mix` (`planning.row_draw`)."""

    mix: SourceMix
    seed: int
    """`data.seed`: the same for all candidates, whose rows overlap as far as their mixes allow."""

    compared: tuple[ComparedMix, ...] = Field(min_length=1)
    """The mixes of all candidates: each trains on as many rows as every one of them can have."""


class TrainStage(Frozen):
    """A feature store in, exported drafters out (`checkpoints/<name>/`)."""

    stage: Literal["train"] = "train"
    job_id: str
    candidate: str
    target: TargetSpec
    reads: ReadRules | None = reads_of_job()
    drafter: DrafterSpec
    train: TrainSpec
    store_dir: str
    """Output directory of capture."""

    rows: RowDraw | None = None
    """Which rows of the store; None: all."""


class MeasuringStage(Frozen):
    """What the specs of the stages that measure one drafter have in common."""

    job_id: str
    checkpoint: str
    candidate: str
    target: TargetSpec
    reads: ReadRules | None = reads_of_job()
    benchmark: BenchmarkSpec
    """tune and prove take its suites' prompts."""

    drafter_dir: str
    held_out_file: str | None = None
    """`held_out.jsonl` of regenerate, for suites whose path is `held-out`."""

    engine: EngineSpec = EngineSpec()


class BenchmarkStage(MeasuringStage):
    """One drafter in, one benchmark report out."""

    stage: Literal["benchmark"] = "benchmark"
    rival: RivalSpec | None = None
    """The source of a drafter that was not trained here: the stage copies it to `drafter_dir`, part of its output."""

    brought: BroughtDrafter | None = Field(None, exclude_if=lambda brought: brought is None)
    """The same of a candidate that was trained elsewhere. Left out where there is none: the digests of other specs are
    as before."""

    min_speedup: float = Field(PromotionPolicy().min_speedup,
                               exclude_if=lambda bound: bound == PromotionPolicy().min_speedup)
    """Of `promotion`: at the higher concurrencies pairs of blocks are measured until the interval of their ratio
    decides against it. Left out where it is the default: the digests of such specs are as before."""

    measure_transformers: bool = False
    """Also time `transformers` generate, once per job. Only in the embedded engine."""

    max_concurrency: int | None = Field(None, ge=1, exclude_if=lambda limit: limit is None)
    """Requests that a server of the serving engine decodes at once: the same in all stages of a job that measure, so
    that they can use one server. Left out in the embedded engine: the digests of such specs are as before."""

    @property
    def source(self) -> RivalSpec | None:
        """Where the drafter comes from; None: training of this job."""
        return self.brought or self.rival

    @property
    def source_field(self) -> str:
        """The field of the job that names the source."""
        return "rivals" if self.brought is None else "drafters"


class RivalDrafter(Frozen):
    """The best rival with a drafter of its own, as its benchmark stage left it."""

    checkpoint: str
    drafter_dir: str


class TuneStage(MeasuringStage):
    """The chosen drafter in, the measured grid of draft-tree shapes out."""

    stage: Literal["tune"] = "tune"
    tune: TuneSpec
    rival: RivalDrafter | None = None
    """Tuned after the chosen drafter, in the same way, where the winner has to beat it (`promotion.must_beat`)."""

    min_speedup: float = PromotionPolicy().min_speedup
    """Of `promotion`: what suites have to reach, and what the tau that chains need is for (`TuneReport.needed_tau`)."""

    max_concurrency: int | None = Field(None, ge=1, exclude_if=lambda limit: limit is None)
    """As in `BenchmarkStage`."""


class ProveStage(MeasuringStage):
    """The tuned drafter in the serving engine: parity, load, a changed system prompt."""

    stage: Literal["prove"] = "prove"
    prove: ProveSpec
    promotion: PromotionPolicy = PromotionPolicy()
    """What the load test measures until: its bounds."""

    tune_dir: str
    """Output directory of tune: its report says which setting to prove."""

    max_concurrency: int | None = Field(None, ge=1)
    """Of the endpoint: requests decoded at once; None as in `ServeSpec`."""

    rival_dir: str | None = None
    """The drafter of the rival that tune tuned too: a further variant of the load test."""

    incumbent: DrafterUse | None = None
    """What serves at the job's endpoint now, when that is a drafter; decided when the attempt began."""


class HardwareStage(Frozen):
    """The proven drafter, and no drafter, on one kind of hardware."""

    stage: Literal["hardware"] = "hardware"
    job_id: str
    candidate: str
    profile: PlacedProfile
    baseline: str
    """Name of the first profile."""

    baseline_dir: str | None = None
    """Output directory of the first profile's measurement, with whose requests these are compared; None: this is it."""

    proof: ProveStage
    """Target, drafter, engine and prompts. Without incumbent and rival, which are not measured here."""

    proof_dir: str
    """Output directory of prove: its report says which setting was proven."""

    load: LoadSpec


StageSpec = Annotated[
    RegenerateStage | CaptureStage | TrainStage | BenchmarkStage | TuneStage | ProveStage | HardwareStage,
    Field(discriminator="stage")
]
StageReport = (RegenerateReport | CaptureReport | TrainReport | BenchmarkReport | TuneReport | ProveReport
               | HardwareMeasurement)


class FileEntry(Frozen):
    """One file of an artifact."""

    path: str
    """Relative to the manifest, with forward slashes."""

    size_bytes: int = Field(ge=0)
    sha256: Digest


class Manifest(Frozen):
    """What a finished stage produced. Its presence means the stage is whole."""

    stage: StageName
    job_id: str
    candidate: str | None = None
    spec_digest: Digest
    """Of the spec that produced it: another spec in the same directory is refused."""

    code_version: str
    started_at: str
    finished_at: str
    files: tuple[FileEntry, ...]
    report: StageReport
