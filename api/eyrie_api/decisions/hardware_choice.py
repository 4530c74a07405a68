"""What a token costs on each hardware profile, and which to choose. Pure.

Throughput at a load and the price of an hour give the money per million tokens. Ratios of throughput to the baseline,
with their intervals, come from the load test; prices are exact, so the ratio of money has the same relative interval.
Two profiles whose intervals overlap are called indistinguishable, which is cautious: both contain the baseline's noise.
"""

from collections.abc import Sequence

from eyrie_api.v1alpha1.hardware import (
    HardwareChoice,
    HardwareProfile,
    HardwareReport,
    HardwareRow,
    HardwareVariant,
)
from eyrie_api.v1alpha1.load import LoadReport
from eyrie_api.v1alpha1.model import Interval

VARIANTS: tuple[HardwareVariant, HardwareVariant] = ("off", "drafted")


def variant_name(profile: str, variant: HardwareVariant) -> str:
    """The variant's name in the load report."""
    return f"{profile}/{variant}"


def compare_hardware(profiles: Sequence[HardwareProfile], load: LoadReport,
                     min_tokens_per_s_per_user: float = 0.0) -> HardwareReport:
    """The report of a load test whose variants are `variant_name`s, with off on the first profile as baseline.

    min_tokens_per_s_per_user   slower variants are not recommended at that load
    """
    baseline = profiles[0]
    ratios = {(one.variant, one.level): (one.throughput_ratio, one.throughput_interval) for one in load.comparisons}
    rows = []
    for level in load.levels:
        if level.mode != "closed":
            continue
        profile = next(one for one in profiles for variant in VARIANTS
                       if variant_name(one.name, variant) == level.variant)
        is_baseline = level.variant == variant_name(baseline.name, "off")
        found = (1.0, Interval(low=1.0, high=1.0)) if is_baseline else ratios.get((level.variant, level.level))
        if found is None or level.total.tokens_per_s <= 0:
            continue  # it completed no prompt of the baseline's: the load report counts its failures
        ratio, interval = found
        dearer = profile.price_per_hour / baseline.price_per_hour
        ttft = level.total.ttft_s
        rows.append(HardwareRow(
            profile=profile.name, variant="off" if level.variant.endswith("/off") else "drafted", users=level.level,
            tokens_per_s=level.total.tokens_per_s, tokens_per_s_per_user=level.total.tokens_per_s_per_user,
            tokens_per_s_per_device=level.total.tokens_per_s / profile.num_devices,
            ttft_p50_s=None if ttft is None else ttft.p50, ttft_p99_s=None if ttft is None else ttft.p99,
            money_per_million_tokens=profile.price_per_hour / 3600.0 / level.total.tokens_per_s * 1e6,
            money_ratio=dearer / ratio,
            money_interval=Interval(low=dearer / interval.high, high=dearer / max(interval.low, 1e-9))))
    loads = sorted({row.users for row in rows})
    return HardwareReport(
        profiles=tuple(profiles), min_tokens_per_s_per_user=min_tokens_per_s_per_user, rows=tuple(rows), load=load,
        choices=tuple(choose([row for row in rows if row.users == users], users, min_tokens_per_s_per_user)
                      for users in loads))


def choose(rows: Sequence[HardwareRow], users: float, min_tokens_per_s_per_user: float) -> HardwareChoice:
    """The cheapest variant at one load that is fast enough for a user."""
    fast = sorted((row for row in rows if row.tokens_per_s_per_user >= min_tokens_per_s_per_user),
                  key=lambda row: row.money_ratio)
    if not fast:
        return HardwareChoice(users=users, profile=None, variant=None)
    best, *others = fast
    return HardwareChoice(
        users=users, profile=best.profile, variant=best.variant,
        indistinguishable=tuple(variant_name(row.profile, row.variant) for row in others
                                if row.money_interval.low <= best.money_interval.high))
