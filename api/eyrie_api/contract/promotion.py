"""When a candidate replaces the incumbent, how traffic moves to it, and what happens when acceptance drifts."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from eyrie_api.contract.model import Frozen, Probability


class CanarySpec(Frozen):
    """How traffic moves to a new revision."""

    shares: tuple[Annotated[float, Field(gt=0.0, lt=1.0)], ...] = (0.2,)
    """Shares of the requests routed to the new revision, step by step, before all of them; empty switches
    immediately."""

    min_requests: int = Field(5, ge=0, le=1_000_000)
    """Requests a step must have answered before the next, unless `max_step_s` passes first."""

    max_step_s: float = Field(10.0, ge=0.0, le=86_400.0)
    """A step ends after this long even with fewer requests, so that an idle endpoint finishes its rollout."""

    @model_validator(mode="after")
    def _ascending(self) -> "CanarySpec":
        if list(self.shares) != sorted(set(self.shares)):
            raise ValueError(f"canary.shares {list(self.shares)} must ascend: traffic moves to the new revision step "
                             "by step, as in [0.05, 0.2, 0.5]")
        return self


class DriftSpec(Frozen):
    """Reaction to slowly falling live acceptance, which means that the traffic no longer resembles the training
    data."""

    ratio: Probability = 0.85
    """Drift is reported when windowed tau stays below this share of the proven one for `windows` windows in a row."""

    windows: int = Field(3, ge=1, le=1000)
    """Windows in a row below `ratio` before drift is reported."""

    window_s: float = Field(60.0, ge=0.0, le=86_400.0)
    """A window lasts at least this long, and until it has enough verify rounds for a reliable mean."""

    action: Literal["ignore", "offer", "retrain"] = "offer"
    """offer: an event and a ready-made job spec. retrain: the job is started."""

    traffic_file: str | None = Field(None, max_length=4096)
    """JSONL of recent requests (`messages` rows) to retrain on, or its `s3://` or `https://` address, which is read
    when the job runs; default: the prompts recorded by the gateway (`serve.record_prompts`)."""


class PromotionPolicy(Frozen):
    """When a candidate replaces the incumbent."""

    mode: Literal["auto", "manual", "never"] = "auto"
    """auto: a winner that passes is promoted. manual: it waits for `eyrie endpoints promote`. never: it is only
    reported."""

    min_speedup: float = Field(1.05, gt=0.0, le=1000.0)
    """Over no drafter, in every required suite and temperature, and at every declared load (prove.concurrencies)."""

    min_speedup_over_incumbent: float = Field(1.02, gt=0.0, le=1000.0)
    """Over the incumbent's speed-up, averaged over suites and temperatures, and at the declared loads together; with
    `must_beat: rivals` also over the best rival's, each tuned, in the final benchmark and at the declared loads
    together."""

    must_beat: Literal["incumbent", "rivals"] = "incumbent"
    """rivals: the best of the job's rivals is tuned too and takes part in the proof's load test, and the winner must be
    faster, by `min_speedup_over_incumbent` and with `require_confidence` beyond the interval. incumbent: rivals are
    benchmarked alone; a faster one is reported and does not refuse."""

    rivals: Literal["compare", "promote"] = "compare"
    """compare: the best candidate is tuned and proven, whatever the rivals do. promote: the fastest checkpoint is, a
    rival's included, and may be promoted."""

    require_identical: bool = True
    """Refuse when any greedy or position-keyed sampled output differed from the target's."""

    require_confidence: bool = True
    """The lower end of the 95 % interval of the speed-up at each declared load must be above 1."""

    max_ttft_p99_ratio: float = Field(1.5, gt=0.0, le=1000.0)
    """p99 time to first token relative to no drafter, at each declared load; the median below 100 requests per load
    (prove.requests), where p99 would be a single request. The bound is deliberately loose."""

    ttft_tolerance_s: float = Field(0.05, ge=0.0, le=1e6)
    """Increases of the time to first token up to this many seconds are accepted whatever the ratio: they are not
    noticeable, and where prefill takes milliseconds one round of drafting exceeds any ratio."""

    max_ttft_p99_s: float | None = Field(None, gt=0.0, le=1e6)
    """Upper bound of the p99 time to first token at each declared load, in seconds. Default: none."""

    min_speedup_changed_prompt: float = Field(1.0, gt=0.0, le=1000.0)
    """With prove.system_prompt in place of the prompts' own."""

    canary: CanarySpec = CanarySpec()
    """How traffic moves to the promoted drafter."""

    drift: DriftSpec = DriftSpec()
    """What happens when live acceptance falls slowly."""
