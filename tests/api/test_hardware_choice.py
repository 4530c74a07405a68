"""Money per token from a load test, and what to recommend."""

import pytest
from pydantic import ValidationError

from eyrie_api.contract.hardware import HardwareProfile, HardwareRow, HardwareSpec, HardwareVariant
from eyrie_api.contract.load import LoadCell, LoadComparison, LoadLevel, LoadReport, LoadSpec, Quantiles
from eyrie_api.contract.model import Interval
from eyrie_api.contract.reports import Environment
from eyrie_api.decisions.hardware_choice import choose, compare_hardware, variant_name

ENVIRONMENT = Environment(hardware="here", cpu_count=1, threads=1, torch="none", python="3", dtype="float32",
                          code_version="0", date="2026-01-01")
B200 = HardwareProfile(name="b200", price_per_hour=5.0)
H200S = HardwareProfile(name="h200-x2", price_per_hour=7.0, num_devices=2)
SPEEDS: dict[tuple[str, HardwareVariant], float] = {
    ("b200", "off"): 1000.0, ("b200", "drafted"): 2000.0, ("h200-x2", "off"): 1400.0, ("h200-x2", "drafted"): 2500.0}


def load_report() -> LoadReport:
    """One load of 8 users; ratios within 5 % to each side."""
    seconds = Quantiles(mean=0.1, p50=0.1, p90=0.2, p99=0.3)
    levels = tuple(LoadLevel(variant=variant_name(profile, variant), mode="closed", level=8.0, total=LoadCell(
        requests=16, completed=16, output_tokens=1600, seconds=1.0, tokens_per_s=speed, tokens_per_s_per_user=speed / 8,
        ttft_s=seconds, inter_token_s=seconds, end_to_end_s=seconds)) for (profile, variant), speed in SPEEDS.items())
    ratios = {level.variant: level.total.tokens_per_s / 1000.0 for level in levels[1:]}
    comparisons = tuple(LoadComparison(
        variant=name, baseline="b200/off", mode="closed", level=8.0, throughput_ratio=ratio,
        throughput_interval=Interval(low=ratio * 0.95, high=ratio * 1.05), user_ratio=ratio,
        user_interval=Interval(low=ratio, high=ratio), compared=16, identical=16) for name, ratio in ratios.items())
    return LoadReport(model="m", spec=LoadSpec(concurrencies=(8,)), variants={}, levels=levels, comparisons=comparisons,
                      environment=ENVIRONMENT, seconds=1.0)


def test_a_token_costs_the_price_of_an_hour_over_its_tokens() -> None:
    report = compare_hardware((B200, H200S), load_report())
    rows = {(row.profile, row.variant): row for row in report.rows}
    assert rows["b200", "off"].money_per_million_tokens == pytest.approx(5.0 / 3.6)
    assert rows["b200", "drafted"].money_per_million_tokens == pytest.approx(5.0 / 7.2)
    assert rows["h200-x2", "drafted"].tokens_per_s_per_device == 1250.0
    assert rows["h200-x2", "drafted"].money_ratio == pytest.approx(1.4 / 2.5)
    for row in report.rows:
        cheaper = row.money_per_million_tokens / rows["b200", "off"].money_per_million_tokens
        assert row.money_ratio == pytest.approx(cheaper)
        assert row.money_interval.low <= row.money_ratio <= row.money_interval.high


def test_the_cheapest_is_recommended_and_what_overlaps_with_it_is_named() -> None:
    [choice] = compare_hardware((B200, H200S), load_report()).choices
    assert (choice.profile, choice.variant) == ("b200", "drafted")  # 0.50 against 0.56
    assert choice.indistinguishable == ()
    near = compare_hardware((B200, H200S.model_copy(update={"price_per_hour": 6.4})), load_report()).choices[0]
    assert near.indistinguishable == ("h200-x2/drafted",)  # 0.512, within 5 % to each side


def test_what_is_too_slow_for_a_user_is_not_recommended() -> None:
    assert compare_hardware((B200, H200S), load_report(), 300.0).choices[0].profile == "h200-x2"
    none = compare_hardware((B200, H200S), load_report(), 1e6).choices[0]
    assert (none.profile, none.variant) == (None, None)


def test_the_choice_does_not_depend_on_the_order_of_rows() -> None:
    rows: list[HardwareRow] = list(compare_hardware((B200, H200S), load_report()).rows)
    assert choose(rows, 8.0, 0.0) == choose(rows[::-1], 8.0, 0.0)


@pytest.mark.parametrize(("given", "words"), [
    ({"profiles": []}, "at least 1"),
    ({"profiles": [{"name": "a", "price_per_hour": 0}]}, "greater than 0"),
    ({"profiles": [{"name": "a", "price_per_hour": 1}, {"name": "a", "price_per_hour": 2}]}, "two profiles"),
    ({"profiles": [{"name": "a/b", "price_per_hour": 1}]}, "pattern"),
])
def test_profiles_that_cannot_be_measured_are_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        HardwareSpec.model_validate(given)
