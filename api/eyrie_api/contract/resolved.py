"""A job as everything after its submission reads it: the document with every default filled in, and what follows.

`eyrie_api.planning.resolve` makes a `ResolvedJob` once, when a job is submitted. It is stored with the job and
written into `job.json`; the driver, the pipeline, the leaderboard and drift reports read it and derive nothing again.

What an administrator gives to pods (images, Secrets, service accounts) is not part of it: a job that waited while the
cluster profile was changed runs with the profile of its start.
"""

from pydantic import Field, JsonValue

from eyrie_api.contract.benchmark import RivalSpec
from eyrie_api.contract.data import SourceMix
from eyrie_api.contract.drafter import DrafterSpec, PublishedDrafter
from eyrie_api.contract.families import FAMILIES, Family
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.placement import LabelValue, StageKey
from eyrie_api.contract.plan import Plan
from eyrie_api.contract.read_rules import EndpointRules, ReadRules
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.stages import ComparedMix
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.training import TrainSpec


class Candidate(Frozen):
    """One point of a job's sweep: the sections that candidates may differ in. All else is the job's."""

    name: str
    """Also of directories and Kubernetes objects."""

    axes: dict[str, JsonValue] = Field(default_factory=dict)
    """Its value on each axis of the sweep, by field."""

    drafter: DrafterSpec
    train: TrainSpec
    mix: SourceMix | None = None
    """Shares of the captured rows that it trains on; None: all rows."""

    @property
    def fuses(self) -> bool:
        """Whether its family fuses several layers of the target."""
        return FAMILIES[self.drafter.family].target_states == "fused"

    def in_job(self, spec: JobSpec) -> JobSpec:
        """The job's document with this candidate's sections."""
        return spec.model_copy(update={"drafter": self.drafter, "train": self.train,
                                       "data": spec.data.model_copy(update={"mix": self.mix})})


class PlacedGpus(Frozen):
    """GPUs of one pod of a stage or an endpoint, or of one program on one machine."""

    num_gpus: int | None = None
    """None: neither the job nor a cluster profile names a number, so those of the machine are used."""

    gpu_type: LabelValue | None = None
    """Node label value of the GPU model."""


class CapturedLayers(Frozen):
    """What capture stores, so that every candidate finds the layers that it reads."""

    families: tuple[Family, ...]
    """Of candidates that neither name layers nor continue from a drafter with layers of its own: capture chooses."""

    init_from: tuple[PublishedDrafter, ...] = ()
    """Drafters from which the training of fusing candidates continues: the layers that they read."""

    aux_layers: tuple[int, ...] = ()
    """Layers that fusing candidates name, ascending."""


class Demand(Frozen):
    """What a job uses of its project's quotas, besides one job and one endpoint."""

    num_gpus: int = 0
    """The most that its stages request at one time."""

    num_replicas: int = 1
    """Of its endpoint."""


class ResolvedJob(Frozen):
    """One job, resolved at its submission."""

    spec: JobSpec
    """The document with every default filled in and absolute paths."""

    target: TargetSpec
    """With the dtype that `auto` means."""

    candidates: tuple[Candidate, ...]
    """Those that are trained, in the order of the sweep's grid, or of its draws. None in a job with `drafters`."""

    compared_mixes: tuple[ComparedMix, ...] = ()
    """Of all candidates with a mix: each trains on as many rows as every one of them can have."""

    captured: CapturedLayers
    rivals: tuple[RivalSpec, ...] = ()
    """Those with a benchmark stage: all but `off`, which is the baseline of each."""

    trains_together: bool = False
    """Whether one program trains all candidates."""

    on_cluster: bool = False
    """Whether stages run in pods; else as processes of one machine."""

    gpus: dict[StageKey, PlacedGpus]
    """By stage."""

    serving_gpus: PlacedGpus = PlacedGpus()
    """Of its endpoint."""

    endpoint_serve: EndpointServeSpec
    """How an endpoint serves what this job promotes."""

    demand: Demand = Demand()
    reads: ReadRules | None = None
    """None: its submitter has a role in all projects."""

    plan: Plan | None = None
    """None where the target's sizes were not known."""

    @property
    def endpoint_rules(self) -> EndpointRules | None:
        """The rules for an endpoint that serves what it made; None where a version without rules accepted the job."""
        return EndpointRules(rules=self.reads) if "reads" in self.model_fields_set else None

    @property
    def brought(self) -> tuple[RivalSpec, ...]:
        """Drafters that the job does not train and that have a benchmark stage: its candidates, if it trains none, and
        rivals."""
        return (*self.spec.drafters, *self.rivals)

    @property
    def families(self) -> tuple[Family, ...]:
        """Of the candidates that it trains, each once."""
        return tuple(dict.fromkeys(candidate.drafter.family for candidate in self.candidates))

    @property
    def rivals_to_tune(self) -> int:
        """How many rivals are tuned and proven beside the winner: one, if there is one to beat."""
        return int(self.spec.promotion.must_beat == "rivals" and any(rival.has_drafter for rival in self.spec.rivals))

    @property
    def measured_at_once(self) -> int | None:
        """Requests that SGLang's servers decode at once while drafters are measured: as many as the proof's, or as the
        highest load of another stage. None in the embedded engine, which measures without servers before the proof."""
        spec = self.spec
        return None if spec.engine.kind == "embedded" else max(
            spec.prove.at_once(spec.serve.max_concurrency), *spec.benchmark.concurrencies, *spec.tune.concurrencies)

    def num_processes(self, stage: StageKey) -> int:
        """Processes that one program of a stage divides its work among: one for each GPU."""
        return max(1, self.gpus[stage].num_gpus or 0)
