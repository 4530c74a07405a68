"""The tau that a drafter needs: what a plan predicts before training, and what a job says when no drafter is faster."""

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benchmarks.plans import LLAMA_8B
from eyrie_api.cli.tables import plan_view
from eyrie_api.contract.families import FAMILIES
from eyrie_api.contract.plan import Plan
from eyrie_api.contract.reports import TuneReport
from eyrie_api.contract.tuning import NeededTau
from eyrie_api.decisions.what_would_pay import what_would_pay
from eyrie_api.planning.hardware import Rates
from eyrie_api.planning.needed_tau import needed_tau, pass_s
from eyrie_api.planning.plan import make_plan
from eyrie_api.planning.plan_work import Experts
from eyrie_api.planning.resolve import derive
from tests.api.samples import job_spec
from tests.workers.plots.synthetic import tuned_by_prediction

H100 = {"every": {"num_gpus": 1, "gpu_type": "NVIDIA-H100-80GB-HBM3"}}
LOADS = (1, 4, 16, 64, 256)
CROWD = {"concurrencies": [1, 2048]}


def plan_of(target: Any = LLAMA_8B, **changes: Any) -> Plan:
    return make_plan(derive(job_spec(**({"placement": H100, "tune": {"num_steps": [1, 3, 7], "concurrencies": [1]},
                                         "prove": {"concurrencies": [1]}} | changes))), target, None)


def taus(plan: Plan) -> dict[tuple[int, int], float | None]:
    return {(row.users, row.num_steps): row.tau for row in plan.needed_tau}


@given(st.integers(1, 16), st.floats(1e-4, 10.0), st.floats(1e-4, 10.0))
def test_the_needed_tau_is_at_least_the_targets_own_token_and_at_most_the_whole_draft(
        depth: int, round_s: float, budget_s: float) -> None:
    tau = needed_tau(depth, round_s, budget_s)
    if tau is None:
        assert round_s > (depth + 1) * budget_s
    else:
        assert 1.0 <= tau <= depth + 1.0 + 1e-9
        assert round_s / tau <= budget_s * (1 + 1e-9)


def test_nothing_is_enough_where_the_prefill_alone_takes_too_long() -> None:
    assert needed_tau(4, 0.1, 0.0) is None
    assert needed_tau(4, 0.1, -1.0) is None


def test_one_user_pays_for_the_drafters_weights_and_little_else_since_the_targets_are_read_once() -> None:
    plan, drafter = plan_of(), derive(job_spec()).candidates[0]
    share = LLAMA_8B.trained_drafter(drafter).parameters / LLAMA_8B.parameters
    for depth in (1, 3, 7):
        tau = taus(plan)[1, depth] or 0.0
        assert 1.0 < tau / (1.05 * (1 + depth * share)) < 1.05  # the rest: arithmetic of the verified tokens


def test_a_pass_over_more_tokens_takes_their_arithmetic_longer() -> None:
    """A target of 1e9 weights at 1,000 GFLOP/s for one request and 50,000 for a prefill: 2 ms, and 40 us a token."""
    rates = Rates(single=1_000.0, prefill=50_000.0)
    assert pass_s(10**9, 10**9, 1, rates) == pytest.approx(2e-3)
    assert pass_s(10**9, 10**9, 11, rates) == pytest.approx(2e-3 + 10 * 40e-6)


def test_a_pass_reads_the_experts_that_its_tokens_draw_and_every_other_weight_once() -> None:
    mixture = replace(LLAMA_8B, experts=Experts(number=128, active=8, intermediate_size=1536))
    per_expert = mixture.num_layers * mixture.mlp_parameters(1536)
    one = mixture.read_parameters(1)
    assert one == mixture.active_parameters
    assert (mixture.read_parameters(4) - one) / per_expert == 21  # 128 (1 - (120 / 128)^4) = 29.1, of four times 8
    assert mixture.read_parameters(1000) == mixture.parameters
    assert LLAMA_8B.read_parameters(1) == LLAMA_8B.read_parameters(1000) == LLAMA_8B.parameters


def test_more_users_need_no_lower_tau_and_with_many_speculation_loses_at_every_depth() -> None:
    found = taus(plan_of(prove=CROWD))
    assert {users for users, _ in found} == {*LOADS, 2048}
    for depth in (1, 3, 7):
        of_depth = [found[users, depth] or depth + 1.01 for users in (*LOADS, 2048)]
        assert of_depth == sorted(of_depth)
        assert found[2048, depth] is None
    assert all(found[16, depth] is not None for depth in (1, 3, 7))


def test_declared_loads_and_a_higher_bound_are_in_the_plan() -> None:
    usual = taus(plan_of())
    plan = plan_of(promotion={"min_speedup": 1.5}, prove={"concurrencies": [1, 32]})
    found = taus(plan)
    assert (32, 7) in found
    assert found[1, 7] == pytest.approx((usual[1, 7] or 0.0) * 1.5 / 1.05)
    assert found[1, 1] == pytest.approx((usual[1, 1] or 0.0) * 1.5 / 1.05)
    (bound,) = [one for one in plan.assumptions if one.name.startswith("speed-up that")]
    assert (bound.value, "promotion.min_speedup" in bound.source) == (1.5, True)


def test_every_family_has_a_cost_and_one_pass_for_all_depths_adds_the_verified_tokens_alone_with_depth() -> None:
    for family in FAMILIES:
        found = taus(plan_of(drafter={"family": family}))
        assert all((found[1, depth] or 0.0) > 1.05 for depth in (1, 3, 7)), family
        deeper = (found[1, 7] or 0.0) / (found[1, 1] or 1.0)
        assert (deeper < 1.05) == (family in ("medusa", "dflash", "dspark")), family


def test_a_verified_token_of_a_mixture_reads_experts_of_its_own() -> None:
    mixture = replace(LLAMA_8B, experts=Experts(number=64, active=2, intermediate_size=2048))
    dense = replace(LLAMA_8B, intermediate_size=64 * 2048)
    assert (taus(plan_of(mixture))[1, 3] or 9.0) > (taus(plan_of(dense))[1, 3] or 9.0) + 0.5


def test_the_plan_shows_a_line_per_load_with_a_dash_where_speculation_loses() -> None:
    out, plan = StringIO(), plan_of(prove=CROWD)
    Console(file=out, width=120).print(plan_view(plan))
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert ["TAU", "NEEDED", "DEPTH", "1", "DEPTH", "3", "DEPTH", "7"] in lines
    assert ["1", "user", *(f"{taus(plan)[1, depth]:.2f}" for depth in (1, 3, 7))] in lines
    assert ["2048", "users", "-", "-", "-"] in lines


def tuned(*needed: tuple[int, int, float | None]) -> TuneReport:
    """Chains with tau 2.00 at every load; that of 5 at one user and at 8 was measured."""
    rows = tuple(NeededTau(users=users, num_steps=depth, tau=tau) for users, depth, tau in needed)
    return tuned_by_prediction().model_copy(update={"needed_tau": rows})


def test_what_would_pay_names_the_closest_depth_and_all_that_would_change_it() -> None:
    words = what_would_pay(tuned((1, 3, 1.5), (1, 5, 1.8), (8, 3, 2.4), (8, 5, None)), [8], 1.05)
    assert "with 8 users at once a chain of 3 needs tau 2.40 for 1.05x and has 2.00. " in words
    for change in ("more data", "family", "fewer users: with 1 user at once its tau is enough"):
        assert change in words


def test_where_no_tau_is_enough_more_data_is_not_recommended() -> None:
    words = what_would_pay(tuned((1, 3, 2.5), (8, 3, None), (8, 5, None)), [8], 1.05)
    assert "with 8 users at once no tau of a chain of up to 5 tokens is enough for 1.05x" in words
    assert "data" not in words
    assert "fewer users" not in words  # its tau is not enough with one either
    assert "family" in words


def test_a_load_that_was_not_timed_is_that_below_it_and_a_tau_that_should_be_enough_is_named_as_such() -> None:
    words = what_would_pay(tuned((1, 3, 1.9)), [1, 4], 1.05)
    assert "with 4 users at once (timed at 1) a chain of 3 needs tau 1.90 for 1.05x and has 2.00, enough by" in words


def test_a_report_of_earlier_code_and_a_job_without_a_slow_load_say_nothing() -> None:
    assert what_would_pay(tuned(), [1], 1.05) == ""
    assert what_would_pay(tuned((1, 3, 1.9)), [], 1.05) == ""
