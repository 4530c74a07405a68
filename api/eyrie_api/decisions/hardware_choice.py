"""What a token costs on each hardware profile, and which to choose. Pure.

Throughput at a load and the price of an hour give the money per million tokens. Ratios of throughput to the baseline,
with their intervals, come from the load test; prices are exact, so the ratio of money has the same relative interval.
Two profiles whose intervals overlap are called indistinguishable, which is cautious: both contain the baseline's noise.
"""

from collections.abc import Sequence

from eyrie_api.contract.hardware import (
    HardwareChoice,
    HardwareMeasurement,
    HardwareProfile,
    HardwareReport,
    HardwareRow,
    HardwareSpec,
    HardwareVariant,
)
from eyrie_api.contract.load import LoadReport
from eyrie_api.contract.model import Interval
from eyrie_api.decisions.what_would_pay import at_once

VARIANTS: tuple[HardwareVariant, HardwareVariant] = ("off", "drafted")


def variant_name(profile: str, variant: HardwareVariant) -> str:
    return f"{profile}/{variant}"


def compare_hardware(profiles: Sequence[HardwareProfile], load: LoadReport,
                     min_tokens_per_s_per_user: float = 0.0) -> HardwareReport:
    """The report of a load test whose variants are `variant_name`s, with off on the first profile as baseline.

    min_tokens_per_s_per_user   slower variants are not recommended at that load
    """
    baseline = profiles[0]
    ratios = {(ratio.variant, ratio.level): (ratio.throughput_ratio, ratio.throughput_interval)
              for ratio in load.comparisons}
    rows = []
    for level in load.levels:
        if level.mode != "closed":
            continue
        profile = next(candidate for candidate in profiles for variant in VARIANTS
                       if variant_name(candidate.name, variant) == level.variant)
        is_baseline = level.variant == variant_name(baseline.name, "off")
        relative = (1.0, Interval(low=1.0, high=1.0)) if is_baseline else ratios.get((level.variant, level.level))
        if relative is None or level.total.tokens_per_s <= 0:
            continue  # it completed no prompt of the baseline's: the load report counts its failures
        ratio, interval = relative
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


def hardware_of(spec: HardwareSpec, measured: Sequence[HardwareMeasurement]) -> HardwareReport | None:
    """The report of a job's measurements, in the order of its profiles; None before the first profile's."""
    by_name = {each.profile.name: (each.profile, each.load) for each in measured if each.load is not None}
    ordered = [by_name[profile.name] for profile in spec.profiles if profile.name in by_name]
    if spec.profiles[0].name not in by_name:
        return None
    profiles, loads = [profile for profile, _ in ordered], [load for _, load in ordered]
    first = loads[0]
    together = LoadReport(
        model=first.model, spec=first.spec,
        variants={name: what for load in loads for name, what in load.variants.items()},
        levels=tuple(level for load in loads for level in load.levels),
        comparisons=tuple(compared for load in loads for compared in load.comparisons),
        notes=tuple(dict.fromkeys(note for load in loads for note in load.notes)), environment=first.environment,
        seconds=sum(load.seconds for load in loads))
    return compare_hardware(profiles, together, spec.min_tokens_per_s_per_user)


def choose(rows: Sequence[HardwareRow], users: float, min_tokens_per_s_per_user: float) -> HardwareChoice:
    """The cheapest variant at one load that is fast enough for a user."""
    fast = sorted((row for row in rows if row.tokens_per_s_per_user >= min_tokens_per_s_per_user),
                  key=lambda row: row.money_ratio)
    if not fast:
        return HardwareChoice(users=users, profile=None, variant=None)
    best, *others = fast
    return HardwareChoice(
        users=users, profile=best.profile, variant=best.variant, money_ratio=best.money_ratio,
        money_interval=best.money_interval,
        indistinguishable=tuple(variant_name(row.profile, row.variant) for row in others
                                if row.money_interval.low <= best.money_interval.high))


def sentence(choice: HardwareChoice, report: HardwareReport) -> str:
    """The recommendation at one load."""
    users = at_once(choice.users)
    if choice.profile is None or choice.variant is None:
        return (f"{users}: nothing answers one user with {report.min_tokens_per_s_per_user:g} tokens/s; "
                "lower that speed or add a faster profile")
    words = f"{users}: {choice.profile}, {choice.variant}, is the cheapest per token"
    baseline = variant_name(report.profiles[0].name, "off")
    if choice.money_interval is not None and variant_name(choice.profile, choice.variant) != baseline:
        words += (f", {choice.money_ratio:.2f}x the money of {baseline} ({choice.money_interval.low:.2f} to "
                  f"{choice.money_interval.high:.2f})")
    if choice.indistinguishable:
        words += f"; not distinguishable from it: {', '.join(choice.indistinguishable)}"
    return words
