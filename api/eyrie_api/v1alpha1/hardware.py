"""Hardware compared: one drafter and "off" on several machines or parts of a machine, by speed and by money."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from eyrie_api.v1alpha1.load import LoadReport
from eyrie_api.v1alpha1.model import Frozen, Interval, Name, later
from eyrie_api.v1alpha1.placement import PlacementRequest

HardwareVariant = Literal["off", "drafted"]


class HardwareProfile(Frozen):
    """One way to serve: servers that run already, or servers to be started on a part of this machine."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    price_per_hour: float = Field(gt=0.0, le=1e6)
    """Of all devices of one server together, in any currency: the same for all profiles."""

    num_devices: int = Field(1, ge=1, le=4096)
    """GPUs of one server (or whatever the price is for); throughput is also given for each."""

    off_url: str | None = Field(None, max_length=2048)
    """A server without a drafter that runs already, up to and including /v1; with `drafted_url`."""

    drafted_url: str | None = Field(None, max_length=2048)
    """The one with the drafter."""

    gpus: tuple[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9-]+$")], ...] = ()
    """Ids for CUDA_VISIBLE_DEVICES of servers that are started here: SGLang computes on all of them together."""

    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads of embedded engines that are started here."""

    @model_validator(mode="after")
    def _one_way(self) -> "HardwareProfile":
        if (self.off_url is None) != (self.drafted_url is None):
            raise ValueError(f"profile {self.name!r} has one of off_url and drafted_url: a drafter is compared with "
                             "off on the same hardware, so give both")
        if self.off_url is not None and (self.gpus or self.threads):
            raise ValueError(f"profile {self.name!r} has URLs of running servers and gpus or threads of servers to "
                             "start: give one of the two")
        return self


class HardwareProfiles(Frozen):
    """The file that `eyrie compare-hardware` reads."""

    profiles: tuple[HardwareProfile, ...] = Field(min_length=1, max_length=32)

    @model_validator(mode="after")
    def _distinct(self) -> "HardwareProfiles":
        names = [one.name for one in self.profiles]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two profiles are named {min(twice)!r}: give each its own name")
        return self


class PlacedProfile(Frozen):
    """One kind of hardware that a job's drafter is measured on."""

    name: Name
    """Name of the profile in tables and figures."""

    price_per_hour: float = Field(gt=0.0, le=1e6)
    """Of all GPUs of the profile together, or of the node without GPUs; in one currency for all profiles."""

    placement: PlacementRequest = PlacementRequest()
    """Where its pod runs on a cluster, merged into the placement of the prove stage: `num_gpus`, on which the engine
    computes with tensor parallelism, `gpu_type`, node labels, a queue. On one machine `num_gpus` alone."""

    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads of the embedded engine. Default: all."""

    def served_on(self, gpus: tuple[str, ...]) -> HardwareProfile:
        """As a profile whose servers are started on these GPUs."""
        return HardwareProfile(name=self.name, price_per_hour=self.price_per_hour, num_devices=max(1, len(gpus)),
                               gpus=gpus, threads=self.threads)


class HardwareSpec(Frozen):
    """On which hardware the proven drafter, and no drafter, are compared."""

    profiles: tuple[PlacedProfile, ...] = Field(min_length=1, max_length=16)
    """The first one without a drafter is the baseline. It is measured first; on a cluster the others then run side by
    side, each in a pod of its own."""

    concurrencies: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = Field((), max_length=32)
    """Users at once. Default: `prove.loads`."""

    min_tokens_per_s_per_user: float = Field(0.0, ge=0.0, le=1e6)
    """Nothing that is slower for one user is recommended."""

    @model_validator(mode="after")
    def _distinct(self) -> "HardwareSpec":
        names = [one.name for one in self.profiles]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two profiles are named {min(twice)!r}: give each its own name")
        return self


class HardwareMeasurement(Frozen):
    """What one profile's measurement found."""

    profile: HardwareProfile
    load: LoadReport | None = None
    """Variants `profile/off` and `profile/drafted`, both compared with off on the first profile; None: see `skipped`.
    """

    skipped: str = ""
    """Why nothing was measured: the job proved no drafter."""


class HardwareRow(Frozen):
    """One variant on one profile, with so many users at once."""

    profile: str
    variant: HardwareVariant
    users: float
    tokens_per_s: float
    tokens_per_s_per_user: float
    tokens_per_s_per_device: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    money_per_million_tokens: float
    """Price of an hour over the tokens of an hour at this load; idle hours cost as much and are not counted."""

    money_ratio: float
    """To the baseline's at this load: off on the first profile."""

    money_interval: Interval
    """Of the ratio, 95 %, by bootstrap over prompts; of the baseline, the point 1."""


class HardwareChoice(Frozen):
    """The recommendation at one load."""

    users: float
    profile: str | None
    """The cheapest per token; None when no variant is fast enough."""

    variant: HardwareVariant | None
    money_ratio: float | None = later(None, 4)
    """Money per token over that of the baseline: off on the first profile."""

    money_interval: Interval | None = later(None, 4)
    """Of the ratio, 95 %."""

    indistinguishable: tuple[str, ...] = ()
    """Others, as `profile/variant`, whose interval overlaps with the cheapest one's."""


class HardwareReport(Frozen):
    """The result of `eyrie compare-hardware`, and of a job with `prove.hardware`."""

    profiles: tuple[HardwareProfile, ...]
    min_tokens_per_s_per_user: float
    rows: tuple[HardwareRow, ...]
    choices: tuple[HardwareChoice, ...]
    load: LoadReport
    """All figures; variants are named `profile/variant`."""
