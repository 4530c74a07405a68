"""What we answer: a job with its status, events, metric series, endpoints.

Status is conditions (metav1.Condition shape); `phase` is derived for display and never read by code.
"""

from datetime import datetime
from typing import Literal

from pydantic import Field, JsonValue

from eyrie_api.contract.engine import DraftTreeShape, EngineKind
from eyrie_api.contract.hardware import HardwareReport
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.prove import ProveReport
from eyrie_api.contract.reports import (
    BenchmarkReport,
    CaptureReport,
    LeaderboardEntry,
    PromotionDecision,
    RegenerateReport,
    TrainReport,
    TuneReport,
)
from eyrie_api.contract.stages import StageName
from eyrie_api.contract.tuning import DrafterUse

ConditionStatus = Literal["True", "False", "Unknown"]
ConditionType = Literal[
    "Accepted", "Regenerated", "Captured", "Trained", "Benchmarked", "Tuned", "Proved", "HardwareCompared",
    "Promoted", "Serving", "Succeeded", "Failed", "Cancelled",
]
Phase = Literal["Pending", "Running", "Succeeded", "Failed", "Cancelling", "Cancelled"]
StageState = Literal["Pending", "Running", "Succeeded", "Failed", "Cancelled", "Skipped"]


class Condition(Frozen):
    """One observation about a job or endpoint."""

    type: str
    status: ConditionStatus
    reason: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9]*$")
    message: str = ""
    last_transition_time: datetime
    observed_generation: int = 1


class Progress(Frozen):
    """How far a stage is."""

    done: float = 0.0
    total: float | None = None
    unit: str = ""
    rate: float | None = None
    """Units per second."""

    eta_s: float | None = None
    message: str = ""


class StageStatus(Frozen):
    """One box of the pipeline; train and benchmark have one per candidate or checkpoint."""

    stage: StageName
    key: str = ""
    """Candidate or checkpoint; empty for the stages that run once."""

    state: StageState = "Pending"
    attempt: int = 0
    started_at: datetime | None = None
    finished_at: datetime | None = None
    progress: Progress | None = None
    reason: str | None = None
    message: str | None = None
    hint: str | None = None


class JobStatus(Frozen):
    """Everything observed of a job."""

    phase: Phase = "Pending"
    observed_generation: int = 1
    conditions: tuple[Condition, ...] = ()
    stages: tuple[StageStatus, ...] = ()
    run_id: str | None = None
    attempt: int = 1
    """Counts retries."""

    restarted_from: StageName | None = None
    """The stage from which the latest attempt runs everything again; None: it went on after the finished stages."""

    best: LeaderboardEntry | None = None
    decision: PromotionDecision | None = None
    endpoint: str | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None


class Job(Frozen):
    """A job as the API shows it."""

    api_version: Literal["eyrie.dev/v1alpha1"] = "eyrie.dev/v1alpha1"
    kind: Literal["DrafterJob"] = "DrafterJob"
    id: str
    generation: int = 1
    created_at: datetime
    updated_at: datetime
    spec: JobSpec
    status: JobStatus


class JobList(Frozen):
    """One page of jobs."""

    items: tuple[Job, ...]
    next_cursor: str | None = None


class Event(Frozen):
    """One thing that happened, in order of id; also the SSE payload."""

    id: int
    job_id: str
    time: datetime
    type: Literal["Normal", "Warning"] = "Normal"
    reason: str
    message: str
    stage: StageName | None = None
    key: str = ""
    data: dict[str, JsonValue] = Field(default_factory=dict)


class MetricPoint(Frozen):
    """One point of a series."""

    step: int
    time: datetime
    value: float


class MetricSeries(Frozen):
    """One logged quantity, for example `train/acceptance/3`."""

    name: str
    stage: StageName
    key: str = ""
    points: tuple[MetricPoint, ...]


class StageFile(Frozen):
    """One downloadable file of a stage."""

    stage: StageName
    key: str
    path: str
    size_bytes: int
    sha256: str
    url: str


RevisionState = Literal["proposed", "canary", "active", "retired", "rejected", "rolled-back"]


class Revision(Frozen):
    """One thing an endpoint has served or may serve: a drafter with its tree, or no drafter at all."""

    number: int
    job_id: str | None
    checkpoint: str | None
    """None serves the target without a drafter."""

    tree: DraftTreeShape | None
    drafter_dir: str | None
    use: DrafterUse = DrafterUse()
    """What its engine decodes with; `tree` and `drafter_dir` say the same of a drafter with one tree."""

    speedup: float | None = None
    tau: float | None = None
    """Proven acceptance length: what live traffic is held against."""

    created_at: datetime
    reason: str
    """Why it was proposed."""

    state: RevisionState = "proposed"
    """proposed: waits for its engine. canary: gets a share of the requests. active: serves. retired: has served and
    gave way. rejected: never served. rolled-back: served and was given up."""

    rejected_reason: str | None = None
    """Of a revision rejected or rolled back: `<Reason>: <what was seen>`."""

    url: str | None = None
    """Base URL of this revision alone, up to and including `/v1`, where it has one (a Service of the cluster), since it
    first got requests. It is reached there while it is the canary or active."""


class Endpoint(Frozen):
    """A stable URL and the engine behind it."""

    api_version: Literal["eyrie.dev/v1alpha1"] = "eyrie.dev/v1alpha1"
    kind: Literal["DraftEndpoint"] = "DraftEndpoint"
    name: str
    target: str
    url: str | None
    """OpenAI-compatible base URL, up to and including `/v1`."""

    model: str
    desired: Literal["on", "off"] = "on"
    active_revision: int | None
    candidate_revision: int | None = None
    revisions: tuple[Revision, ...] = ()
    conditions: tuple[Condition, ...] = ()
    updated_at: datetime

    def revision(self, number: int | None) -> Revision | None:
        """The revision of this number; None where there is none."""
        return next((each for each in self.revisions if each.number == number), None)


class Problem(Frozen):
    """RFC 9457 problem details, with a hint."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    hint: str = ""
    instance: str | None = None
    errors: tuple[dict[str, JsonValue], ...] = ()
    """For validation: JSON pointer, value, rule."""


class LeaderboardChoices(Frozen):
    """The values that occur in results, to select measurements by."""

    families: tuple[str, ...] = ()
    suites: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = ()
    engines: tuple[EngineKind, ...] = ()


class Leaderboard(Frozen):
    """Measured checkpoints, best first."""

    items: tuple[LeaderboardEntry, ...]
    choices: LeaderboardChoices = LeaderboardChoices()
    """Of the results before family, suite, temperature and engine are selected."""


class JobReport(Frozen):
    """Everything measured of one job, as far as it has come."""

    job_id: str
    name: str | None
    target: str
    phase: Phase
    seconds: dict[str, float]
    """By finished stage, summed over its keys; `total` is their sum."""

    regenerate: RegenerateReport | None = None
    capture: CaptureReport | None = None
    train: tuple[TrainReport, ...] = ()
    benchmark: tuple[BenchmarkReport, ...] = ()
    tune: TuneReport | None = None
    prove: ProveReport | None = None
    hardware: HardwareReport | None = None
    """Of a job with `prove.hardware`: the profiles that are measured so far."""

    leaderboard: tuple[LeaderboardEntry, ...] = ()
    decision: PromotionDecision | None = None
    endpoint: str | None = None
    devices_per_server: int = 1
    """GPUs of one server of `prove` (`engine.tp_size`); 1 where it computes on the CPU."""


class RetryRequest(Frozen):
    """Go on with a job that has ended."""

    from_stage: StageName | None = None
    """Run again from this stage: its output and that of the later stages is removed. Default: finished stages are
    kept."""


class PromoteRequest(Frozen):
    """Serve a measured drafter."""

    job_id: str = Field(min_length=1, max_length=63)
    checkpoint: str | None = Field(None, max_length=63)
    """Default: the job's best."""


class RollbackRequest(Frozen):
    """Serve an earlier revision again."""

    revision: int | None = Field(None, ge=1, le=2**31 - 1)
    """Default: the one before the active one."""


class Version(Frozen):
    """Which Eyrie answers."""

    version: str
    code_version: str
    """With a digest of the source."""

    api_version: Literal["eyrie.dev/v1alpha1"] = "eyrie.dev/v1alpha1"
