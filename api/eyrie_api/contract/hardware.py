"""Hardware compared: one drafter and "off" on several machines or parts of a machine, by speed and by money."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from eyrie_api.contract.load import LoadReport
from eyrie_api.contract.model import Frozen, Interval, Name
from eyrie_api.contract.placement import PlacementRequest

HardwareVariant = Literal["off", "drafted"]


class HardwareProfile(Frozen):
    """What the servers of one profile ran on."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    price_per_hour: float = Field(gt=0.0, le=1e6)
    """Of all devices of one server together, in any currency: the same for all profiles."""

    num_devices: int = Field(1, ge=1, le=4096)
    """GPUs of one server (or whatever the price is for); throughput is also given for each."""

    gpus: tuple[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9-]+$")], ...] = ()
    """Ids for CUDA_VISIBLE_DEVICES: SGLang computes on all of them together."""

    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads of embedded engines."""


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
    """Users at once. Default: `prove.concurrencies`."""

    min_tokens_per_s_per_user: float = Field(0.0, ge=0.0, le=1e6)
    """Nothing that is slower for one user is recommended."""

    @model_validator(mode="after")
    def _distinct(self) -> "HardwareSpec":
        names = [profile.name for profile in self.profiles]
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
    money_ratio: float | None = None
    """Money per token over that of the baseline: off on the first profile."""

    money_interval: Interval | None = None
    """Of the ratio, 95 %."""

    indistinguishable: tuple[str, ...] = ()
    """Others, as `profile/variant`, whose interval overlaps with the cheapest one's."""


class HardwareReport(Frozen):
    """The result of a job with `prove.hardware`."""

    profiles: tuple[HardwareProfile, ...]
    min_tokens_per_s_per_user: float
    rows: tuple[HardwareRow, ...]
    choices: tuple[HardwareChoice, ...]
    load: LoadReport
    """All figures; variants are named `profile/variant`."""
