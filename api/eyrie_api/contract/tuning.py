"""Settings of speculation, and the operating map: which setting is best at which load, off included."""

import math
from itertools import product
from typing import Annotated, Literal

from pydantic import Field, JsonValue, ValidationError, model_validator

from eyrie_api.contract.engine import CHAIN_BACKENDS, DraftServing, DraftTreeShape, Verification
from eyrie_api.contract.model import Frozen, Interval, depends

Method = Literal["drafter", "ngram", "off"]


class Setting(Frozen):
    """One way to decode: with the trained drafter, with n-gram lookup, or without speculation."""

    method: Method = "drafter"
    tree: DraftTreeShape | None = None

    @model_validator(mode="after")
    def _tree_where_it_belongs(self) -> "Setting":
        if (self.tree is None) != (self.method == "off"):
            raise ValueError(f"setting {self.method!r} {'needs' if self.tree is None else 'takes no'} tree: "
                             "give num_steps, top_k and num_draft_tokens for drafter and ngram, nothing for off")
        if self.method == "ngram" and self.tree is not None and (
                self.tree.verification != "target" or self.tree.draft != DraftServing()):
            raise ValueError(f"setting {self.label()!r} has verification or draft, which are of a drafter, and n-gram "
                             "look-up has none: omit them")
        return self

    def label(self) -> str:
        """`off`, `5/1/6` or `ngram 3/1/4`."""
        if self.tree is None:
            return "off"
        return self.tree.label() if self.method == "drafter" else f"{self.method} {self.tree.label()}"


OFF = Setting(method="off")


class StepTime(Frozen):
    """Measured cost of one round: a point of the step-time curve."""

    concurrency: int
    temperature: float
    verified_tokens: int
    """Per row, root included; 1 is plain decoding."""

    tree: bool = False
    """Branching nodes cost a mask and a walk that a chain does not."""

    verify_s: float
    """Median seconds of one target pass over concurrency x verified_tokens tokens, choices included."""

    rounds: int
    """How many were timed."""


class DraftTime(Frozen):
    """Measured cost of drafting one round: proposing, and processing the accepted tokens."""

    concurrency: int
    temperature: float
    setting: Setting
    draft_s: float
    """Median."""

    rounds: int


class NeededTau(Frozen):
    """The acceptance length that makes a chain of one depth pay at one load."""

    users: int
    """Of one server, at once."""

    num_steps: int
    tau: float | None
    """For `promotion.min_speedup` over no drafter. None: the whole draft accepted, `num_steps` + 1 tokens a round, is
    not enough."""


class Trial(Frozen):
    """One setting at one concurrency: what was predicted, and what was measured if it was tried."""

    setting: Setting
    concurrency: int
    predicted_tokens_per_s: float
    """All rows together, prefill counted."""

    predicted_speedup: float
    predicted_tau: float
    measured_tokens_per_s: float | None = None
    speedup: float | None = None
    """Against off at the same concurrency, same prompts, interleaved. Off itself: 1."""

    speedup_interval: Interval | None = None
    tau: float | None = None
    blocks: int = 0
    """Blocks of prompts measured: one at concurrency 1, twice the concurrency above."""

    seconds: float = 0.0
    """Spent on measuring it."""

    reason: str = ""
    """Why it was dropped, not tried, or chosen."""


class OperatingPoint(Frozen):
    """The best setting at one concurrency."""

    concurrency: int
    setting: Setting
    speedup: float
    """Prediction and measurement weighted by their certainty; the measurement alone is in the trial."""

    speedup_interval: Interval | None = None
    """Of the measurement."""

    tokens_per_s: float
    measured: bool
    """False: predicted between or beyond measured concurrencies."""


class OperatingMap(Frozen):
    """The tuner's answer."""

    points: tuple[OperatingPoint, ...]
    """Ascending concurrency."""

    crossover: int | None = None
    """The lowest concurrency at which off is best; None when speculation pays at every load examined."""

    adaptive: dict[str, JsonValue] | None = None
    """SGLang's adaptive-speculation JSON (facts: keys are lower bounds of batch-size slots); None unless every
    setting on the map is a chain of the drafter or off."""

    trials_measured: int = 0
    """Pairs of setting and concurrency that were measured, off included."""

    trials_possible: int = 0
    """The same for the exhaustive grid."""

    finding: str = ""

    def at(self, concurrency: int) -> OperatingPoint:
        """The point for a load: the one of the highest concurrency that is not above it (the lowest, if all are)."""
        below = [point for point in self.points if point.concurrency <= concurrency]
        return below[-1] if below else self.points[0]


class DrafterUse(Frozen):
    """The decoding configuration of an endpoint."""

    drafter_dir: str | None = None
    setting: Setting = OFF
    map: OperatingMap | None = None
    """When given, an engine that supports it adapts its setting to the load."""

    context_length: int | None = Field(None, ge=16)


FINAL_TIMES = 4
"""The final measurement of a suite that its first prompts do not decide has at most so many times as many. Of two
prompts of the shipped suite `tools` at 1.55x, one pair in seven has less than 1.05x; of eight, none in 2,000 draws
from twelve (2026-11-29)."""


class TuneSpec(Frozen):
    """Which settings are compared for the chosen checkpoint, at which loads, and how much may be measured.

    Every setting is predicted from one run and its replay, so a wide grid costs little; settings that may be best are
    measured.
    """

    num_steps: tuple[Annotated[int, Field(ge=1, le=16)], ...] = Field((1, 2, 3, 4, 5, 6, 7), min_length=1)
    """Depths of drafts in the grid."""

    top_k: tuple[Annotated[int, Field(ge=1, le=64)], ...] = Field((1, 2, 4), min_length=1)
    """Widths of drafts in the grid; 1 is a chain."""

    num_draft_tokens: tuple[Annotated[int, Field(ge=2, le=512)], ...] = Field((4, 8, 16), min_length=1)
    """For trees (top_k > 1); a chain always verifies num_steps + 1. Impossible shapes are skipped."""

    verifications: tuple[Verification, ...] = Field(("target",), min_length=1)
    """For chains in SGLang on GPUs: how drafts are verified at temperatures above 0 (`benchmark.tree.verification`)."""

    drafts: tuple[DraftServing, ...] = Field((DraftServing(),), min_length=1)
    """For SGLang on GPUs: ways to compute the drafter, each with every shape (`benchmark.tree.draft`)."""

    ngram: bool = True
    """Also compare n-gram look-up, in chains of the same depths. Off is always compared."""

    concurrencies: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = depends((1, 4), min_length=1, max_length=32)
    """Requests decoded at once: the loads to find the best setting for. Omitted, those of `prove.concurrencies`."""

    trials_share: float = Field(0.25, gt=0.0, le=1.0)
    """The share of all pairs of setting and concurrency that may be measured; at least four per concurrency."""

    budget_s: float = Field(600.0, gt=0.0, le=1e6)
    """Seconds for racing, over all concurrencies. Each has one round however little is left, a round that has begun is
    finished, and another begins only if there is time for one as long as the last. Afterwards prediction and
    measurement together decide. Not counted: the measurements for the prediction, the start of servers, the final
    benchmark of the winner, and the tuning of a rival, which has as long again."""

    max_prompts: int = Field(8, ge=1, le=100_000)
    """Prompts for the prediction, and as many for the measurements, drawn evenly from the suites."""

    temperatures: tuple[Annotated[float, Field(ge=0.0, le=4.0)], ...] = depends((0.0, 1.0), min_length=1)
    """Temperatures at which settings are raced; all of them count equally. Omitted, 0 alone for SGLang on CPUs."""

    repeats: int = Field(1, ge=1, le=100)
    """Upper bound of how often the race answers its prompts."""

    @model_validator(mode="after")
    def _some_shape(self) -> "TuneSpec":
        if not self.shapes:
            raise ValueError(f"num_steps {list(self.num_steps)}, top_k {list(self.top_k)} and num_draft_tokens "
                             f"{list(self.num_draft_tokens)} give no possible shape: a tree has from num_steps + 1 to "
                             "1 + top_k + (num_steps - 1) * top_k^2 tokens, and drafts with attention_backend "
                             f"{' or '.join(CHAIN_BACKENDS)} are chains: add 1 to top_k (chains), or change the others")
        return self

    @property
    def shapes(self) -> tuple[DraftTreeShape, ...]:
        """Every shape of the grid that can exist, once, chains first, then by depth, width and tokens."""
        shapes: dict[DraftTreeShape, None] = {}
        for top_k, num_steps in product(sorted(self.top_k), sorted(self.num_steps)):
            tokens = (num_steps + 1,) if top_k == 1 else sorted(self.num_draft_tokens)
            verifications = self.verifications if top_k == 1 else ("target",)
            drafts = [draft for draft in self.drafts
                      if top_k == 1 or draft.attention_backend not in CHAIN_BACKENDS]
            for num_tokens, verification, draft in product(tokens, verifications, drafts):
                try:
                    shapes[DraftTreeShape(num_steps=num_steps, top_k=top_k, num_draft_tokens=num_tokens,
                                          verification=verification, draft=draft)] = None
                except ValidationError:
                    continue
        return tuple(shapes)

    def trials(self, num_settings: int) -> int:
        """How many of the settings may be measured at one concurrency: at least off, a leader and two rivals."""
        return min(num_settings, max(4, math.floor(self.trials_share * num_settings)))
