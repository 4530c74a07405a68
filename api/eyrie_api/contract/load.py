"""Load tests: their specification and report, used by the load generator, the prove stage and promotion.

A *variant* is one server (for example `off`, `candidate`, `incumbent`); a *level* is one closed-loop concurrency or one
open-loop rate. Every level is measured for all variants in interleaved blocks, so that a slow minute affects all of
them.

Times are seconds on the client's clock: time to first token (TTFT) from sending the request to the first token that
arrives, inter-token latency between the arrivals of tokens (tokens that arrive together share the gap evenly),
end-to-end to the last byte. Acceptance comes from the histograms each answer carries, never from lifetime averages.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from eyrie_api.contract.model import Frozen, Interval
from eyrie_api.contract.reports import Environment


class ServiceLevel(Frozen):
    """A service level objective: a request is good when it keeps every bound that is given."""

    ttft_s: float | None = Field(None, gt=0.0)
    inter_token_s: float | None = Field(None, gt=0.0)
    """Mean inter-token latency of the request."""

    end_to_end_s: float | None = Field(None, gt=0.0)


class LoadSpec(Frozen):
    """The requests sent to every variant."""

    concurrencies: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = (1,)
    """Closed loop: this many users, each sending its next request when the previous one has completed."""

    rates_per_s: tuple[Annotated[float, Field(gt=0.0, le=1e5)], ...] = ()
    """Open loop: requests arrive at these mean rates with exponential gaps (a Poisson process), whether or not earlier
    ones have completed."""

    requests: int = Field(32, ge=1, le=1_000_000)
    """Requests per level, variant and repeat; prompts are drawn in turn from the categories. A closed loop of several
    users sends at least two per user."""

    repeats: int = Field(1, ge=1, le=10_000)
    """Interleaved blocks per level; the order of the variants alternates. The proof ends a level earlier when it is
    clear."""

    warmup_requests: int = Field(2, ge=0, le=10_000)
    """Requests sent to every variant before each level, not counted."""

    temperature: float = Field(0.0, ge=0.0, le=4.0)
    max_new_tokens: int = Field(96, ge=1, le=131_072)
    system_prompt: str | None = Field(None, max_length=65_536)
    """Replaces the system message of every prompt, to test whether acceptance depends on it."""

    slo: ServiceLevel | None = None
    timeout_s: float = Field(600.0, gt=0.0)
    seed: int = Field(0, ge=0, le=2**31 - 1)

    @model_validator(mode="after")
    def _some_level(self) -> "LoadSpec":
        if not self.concurrencies and not self.rates_per_s:
            raise ValueError("load has no level: give concurrencies (closed loop) or rates_per_s (open loop)")
        return self


def fewest_requests(users: int) -> int:
    """Of a block in a closed loop. One user is at its concurrency all the time; of several, each sends two, because one
    would only be ramp-up."""
    return 1 if users == 1 else 2 * users


class Quantiles(Frozen):
    """Seconds over the requests of a level (inter-token: over the gaps between tokens)."""

    mean: float
    p50: float
    p90: float
    p99: float


class LoadCell(Frozen):
    """One variant at one level, for one category of prompts or all of them."""

    requests: int
    completed: int
    failed: dict[str, int] = Field(default_factory=dict)
    """Requests without a complete response, by reason."""

    output_tokens: int
    seconds: float
    """Wall clock of the level's blocks."""

    tokens_per_s: float
    """All output tokens over `seconds`: aggregate throughput."""

    tokens_per_s_per_user: float
    """Mean over requests of output tokens over end-to-end time: the speed one user experiences."""

    ttft_s: Quantiles | None
    inter_token_s: Quantiles | None
    end_to_end_s: Quantiles | None
    goodput_per_s: float | None = None
    """Requests per second that kept the service level; None without one."""

    tau: float | None = None
    """None when the server reports no rounds or does not draft."""

    tau_interval: Interval | None = None
    """By bootstrap over prompts."""

    acceptance: tuple[float, ...] = ()
    """Conditional acceptance by position."""

    accepted_histogram: tuple[int, ...] = ()


class LoadLevel(Frozen):
    """One variant at one level."""

    variant: str
    mode: Literal["closed", "open"]
    level: float
    """Users (closed) or requests per second (open)."""

    total: LoadCell
    by_category: dict[str, LoadCell] = Field(default_factory=dict)
    generator_cpu_share: float | None = None
    """Share of one processor core the load generator itself used: near 1 the figures are limited by the generator
    itself."""


class LoadComparison(Frozen):
    """A variant against the baseline variant at one level.

    With `pairs` of blocks, ratio and interval of the throughput are over these pairs, and valid though the measurement
    ended when they were clear; all other intervals by bootstrap over prompts, both variants together."""

    variant: str
    baseline: str
    mode: Literal["closed", "open"]
    level: float
    throughput_ratio: float
    throughput_interval: Interval
    user_ratio: float
    """Ratio of tokens_per_s_per_user."""

    user_interval: Interval
    pairs: int = 0
    """Blocks of requests that both answered right after one another. 0: one server was measured after the other, or
    requests arrived at a rate."""

    ttft_ratio: float | None = None
    """Time to first token, geometric mean over the pairs; None without them."""

    ttft_interval: Interval | None = None
    ttft_p99_ratio: float | None = None
    by_category: dict[str, float] = Field(default_factory=dict)
    """user_ratio within each category."""

    compared: int
    """Prompts completed by both variants."""

    identical: int
    """Of those, answers whose text (or token ids, where the server gives them) are equal. Meaningful when greedy."""


class LoadReport(Frozen):
    """The result of a load test."""

    model: str
    spec: LoadSpec
    variants: dict[str, str]
    """Name of the variant -> what it is (URL without credentials, setting)."""

    levels: tuple[LoadLevel, ...]
    comparisons: tuple[LoadComparison, ...] = ()
    crossover: float | None = None
    """Closed loop: the lowest concurrency, interpolated between levels, at which the first non-baseline variant's
    aggregate throughput falls below the baseline's; None when it does not within the levels measured."""

    notes: tuple[str, ...] = ()
    """Limits of the figures: what a server did not report, whether the generator kept up."""

    environment: Environment
    """Of the load generator; the servers are described in `variants`."""

    seconds: float
