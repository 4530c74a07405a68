"""What a job will cost before it runs: the answer to `POST /v1alpha1/plans`."""

from typing import Literal

from pydantic import Field

from eyrie_api.contract.model import Frozen, Interval
from eyrie_api.contract.tuning import NeededTau


class Assumption(Frozen):
    """One number the plan rests on, and where it comes from."""

    name: str
    value: float
    unit: str
    source: str
    """Measured here, read from the target's config, given by the spec, or a default."""


class StoreUse(Frozen):
    """What a stage does with the object store through which a cluster's jobs exchange files."""

    objects: int = Field(ge=0)
    """Written."""

    put_requests: int = Field(ge=0)
    """Requests that write; large objects are written in parts."""

    get_requests: int = Field(ge=0)
    read_bytes: int = Field(ge=0)
    cost: float | None = None
    """Of its requests and traffic, and of storing, while the stage runs, what the job has written so far. None where
    the store's prices are not known (EYRIE_STORE_PRICES)."""

    cost_range: Interval | None = None
    """By the range of the stage's hours."""


class StagePlan(Frozen):
    """One stage's share."""

    stage: str
    key: str = ""
    """Of a profile of `prove.hardware`, its name: it has a row of its own."""

    tokens: int = Field(ge=0)
    bytes_on_disk: int = Field(ge=0)
    hours: float = Field(ge=0.0)
    """Wall time, parts of a stage one after the other."""

    hours_range: Interval | None = None
    """Between the fast and the slow end of what a GPU is assumed to reach; None on CPUs, whose rates are measured."""

    num_gpus: int = Field(0, ge=0)
    """GPUs that the stage computes on together."""

    gpu_type: str = ""
    """The type whose rates were used."""

    cost: float | None = None
    """GPU hours at the price of EYRIE_GPU_HOUR_PRICES, in its currency; None where the type has no price. Of a hardware
    profile, hours at its own price."""

    bound_by: Literal["", "compute", "memory bandwidth", "requests at once", "storage"] = ""
    """What the hours are limited by; empty on CPUs."""

    hint: str = ""
    """A field that limits the stage, and its hours with another value; empty where none would shorten it by much."""

    store: StoreUse | None = None
    """None where files are exchanged on one machine or a volume."""

    @property
    def gpu_hours(self) -> float:
        """Hours times GPUs."""
        return self.hours * self.num_gpus


class PlannedStages(Frozen):
    """What a job was planned to take when it was accepted."""

    stages: tuple[StagePlan, ...]


class TimeLeft(Frozen):
    """About what a running job will still take, in seconds."""

    seconds: float
    low: float | None = None
    high: float | None = None
    """The ends of its range; null where the plan has no range, as on CPUs."""


class StageComparison(Frozen):
    """What was planned for a stage and what it took."""

    stage: str
    planned: StagePlan | None
    """Profiles of `prove.hardware` together."""

    seconds: float | None
    """Time in which any part of the stage ran, so far; null before it has started."""

    is_running: bool
    size_bytes: int | None
    """Of its files; null until it has finished: what an unfinished stage has written is not known."""

    @property
    def planned_seconds(self) -> float | None:
        """Of the plan, by its middle."""
        return None if self.planned is None else self.planned.hours * 3600

    @property
    def time_ratio(self) -> float | None:
        """Actual over planned time of a stage that has ended."""
        if self.seconds is None or self.is_running or not self.planned_seconds:
            return None
        return self.seconds / self.planned_seconds


class PlannedAndActual(Frozen):
    """The plan that a job was accepted with against what its stages have taken so far."""

    stages: tuple[StageComparison, ...]
    """Those of the plan and of the job, in order."""

    time_left: TimeLeft | None
    """null of a job that does not run, and below ten minutes: on CPUs a plan does not count the start of programs."""

    rates: dict[str, float] = Field(default_factory=dict)
    """Settings of the control plane (EYRIE_*_GFLOPS) with which the plan would have had the times of the finished
    stages; of stages on CPUs, since rates of GPUs are published ones."""


class Present(Frozen):
    """What earlier jobs of the project have of this job (`reuse: auto`)."""

    answers: int = Field(ge=0)
    """Generated before, and not generated again."""

    all_answers: int = Field(ge=0)
    """Rows of this job."""

    answers_in: str
    """The job that has them."""

    state_bytes: int = Field(0, ge=0)
    """Hidden states captured before, in this job's format: they are copied instead of computed."""

    all_state_bytes: int = Field(0, ge=0)
    states_in: str = ""
    """The job that has them; empty where none has."""

    words: str
    """The same as a sentence."""


class ServingMemory(Frozen):
    """GPU memory of one engine of the endpoint."""

    num_gpus: int
    gpu_type: str
    available_bytes: int
    """Of all its GPUs, for weights and for keys and values."""

    weight_bytes: int
    """Of the target."""

    drafter_bytes: int
    user_bytes: int
    """Keys and values of one user's context, on all GPUs together."""

    context_tokens: int
    users: int
    """Declared: the highest of `prove.concurrencies`."""

    users_that_fit: int
    update_gpus: int
    """That hold the serving engine and, next to it, the one with a new drafter."""

    words: str
    """The same as a sentence."""


class Plan(Frozen):
    """Tokens, bytes and hours by stage, with every assumption named."""

    stages: tuple[StagePlan, ...]
    total_tokens: int
    total_bytes_on_disk: int
    total_hours: float
    bytes_per_token: int
    """Captured hidden states, per token."""

    assumptions: tuple[Assumption, ...]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """On each family of drafters that the job trains: what it suits and what it costs."""

    candidate_rows: dict[str, dict[str, int]] = {}
    """With `data.mix`: about how many rows of each source every candidate trains on, by candidate and source. All
    candidates have the same number of rows in total; a few of the captured rows are kept for evaluation."""

    needed_tau: tuple[NeededTau, ...] = ()
    """What a drafter like the first candidate has to accept, by users and depth: predicted from the machine's rates,
    unless `timed_by` is set. Empty where nothing is trained."""

    timed_by: str | None = None
    """The job whose rounds were timed for `needed_tau` (`eyrie plan --measure`)."""

    present: Present | None = None
    """None: no earlier job has answers of this one."""

    serving: ServingMemory | None = None
    """None: nothing is served on GPUs, or their memory is not known."""

    possible: bool = True
    """False: a job like this is refused, because memory or disk are too small; warnings say why. GPUs or an SGLang that
    are missing on the machine that plans do not count."""

    bottleneck: str = ""
    """The stage that takes most of the time, its share, and what limits it."""

    total_gpu_hours: float = 0.0
    total_cost: float | None = None
    """Of all stages on GPUs; None where one has no price."""

    total_store_cost: float | None = None
    """Of all stages together, beside `total_cost`; None where the store's prices are not known."""

    total_store_cost_range: Interval | None = None
    store_month_cost: float | None = None
    """What the files cost for each month that they stay after the job. Most of it are hidden states, which `eyrie
    storage --clean` removes."""

    fits_disk: bool | None = None
    """Whether the free space where the job would write holds it; None when unknown."""
