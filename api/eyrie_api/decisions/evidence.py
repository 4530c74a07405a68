"""Whether a measured ratio decides against its bound, and how many pairs would if it does not. Pure.

The proof measures pairs until these functions say `passed` or `failed`, or its budget (`prove.most_pairs`) ends, and
promotion judges the final figures by the same functions. `open` in the end is neither fast nor slow: too noisy to
decide. The intervals are valid at every look (`eyrie_workers.measure.intervals.anytime_interval`).
"""

import math
from typing import Literal

from eyrie_api.contract.model import Interval
from eyrie_api.contract.promotion import PromotionPolicy

Standing = Literal["passed", "failed", "open"]

_SAYS_NOTHING = 100.0  # an interval as wide as this factor holds no estimate of the noise


def speedup_standing(policy: PromotionPolicy, ratio: float, interval: Interval) -> Standing:
    """A speed-up over no drafter at a load: `min_speedup` reached and, with `require_confidence`, surely above 1."""
    if not policy.require_confidence:
        return "passed" if ratio >= policy.min_speedup else "failed"
    if ratio >= policy.min_speedup and interval.low > 1.0:
        return "passed"
    return "failed" if interval.high < policy.min_speedup else "open"


def suite_standing(min_speedup: float, ratio: float, interval: Interval) -> Standing:
    """A suite's speed-up over no drafter at one temperature: open where only its interval reaches `min_speedup`."""
    if ratio >= min_speedup:
        return "passed"
    return "failed" if interval.high < min_speedup else "open"


def no_slowdown_standing(policy: PromotionPolicy, interval: Interval) -> Standing:
    """Where speculation is off: shown to be not slower than no drafter, by more than `min_speedup` would gain."""
    if interval.low > 1.0 / max(policy.min_speedup, 1.0 + 1e-3):
        return "passed"
    return "failed" if interval.high < 1.0 else "open"


def first_token_standing(policy: PromotionPolicy, ratio: float, interval: Interval | None, later_s: float) -> Standing:
    """The time to first token against `max_ttft_p99_ratio`. `later_s`: by how much it is later than without a drafter.

    A ratio above the bound refuses when its interval is above too; without an interval at once.
    """
    if ratio <= policy.max_ttft_p99_ratio or later_s <= policy.ttft_tolerance_s:
        return "passed"
    return "failed" if interval is None or interval.low > policy.max_ttft_p99_ratio else "open"


def changed_prompt_standing(policy: PromotionPolicy, interval: Interval) -> Standing:
    """A speed-up with another system prompt against `min_speedup_changed_prompt`."""
    if interval.low > policy.min_speedup_changed_prompt:
        return "passed"
    return "failed" if interval.high < policy.min_speedup_changed_prompt else "open"


def pairs_needed(ratio: float, interval: Interval, pairs: int, bound: float) -> int | None:
    """About how many pairs would be enough for this ratio and noise: the width shrinks with the square root.

    None where that cannot be said: an interval that says nothing yet, or a ratio that is the bound.
    """
    # A ratio that reaches the bound has to be shown to be above 1, another to be below the bound.
    distance = abs(math.log(ratio if ratio >= bound else bound / ratio))
    reach = math.log(interval.high / interval.low) / 2.0
    if pairs == 0 or distance < 1e-3 or interval.high / interval.low > _SAYS_NOTHING:
        return None
    return math.ceil(pairs * (reach / distance) ** 2)
