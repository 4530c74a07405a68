"""What an endpoint needs next, with plain values; and that a working world always comes to serve what is asked."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.promotion import CanarySpec, DriftSpec
from eyrie_api.contract.records import Wait
from eyrie_api.contract.status import Endpoint, Revision
from eyrie_api.contract.tuning import OFF, DrafterUse, OperatingMap, OperatingPoint, Setting
from eyrie_operator.endpoints.engine_metrics import EngineCounters
from eyrie_operator.endpoints.plan import (
    CANARY_ROUNDS,
    KILL_MARGIN_S,
    MIN_ROUNDS,
    Activate,
    AnnounceGap,
    CanaryStep,
    CloseWindow,
    EndEngine,
    ObservedCanary,
    ObservedEndpoint,
    ObservedEngine,
    ProposeNoDrafter,
    Reject,
    ReportDrift,
    RollBack,
    Route,
    ServePolicy,
    ShareRoute,
    StartEngine,
    StartGateway,
    StopGateway,
    highest_tau,
    plan_endpoint,
)
from eyrie_operator.unscheduled import GRACE

NOW = datetime(2026, 1, 2, tzinfo=UTC)
AT_ONCE = ServePolicy(canary=CanarySpec(shares=()), drift=DriftSpec(window_s=0.0))
TRIED = ServePolicy(canary=CanarySpec(shares=(0.2, 0.5), min_requests=5, max_step_s=10.0))
BARE = Revision(number=1, job_id=None, checkpoint=None, tree=None, drafter_dir=None, created_at=NOW, reason="bare")


def drafted(number: int, state: Any = "proposed") -> Revision:
    use = DrafterUse(drafter_dir=f"/d/{number}", setting=Setting(tree=DraftTreeShape()))
    return Revision(number=number, job_id="job-1", checkpoint=f"c{number}", tree=DraftTreeShape(), use=use,
                    drafter_dir=f"/d/{number}", tau=3.0, created_at=NOW, reason="promoted", state=state)


def endpoint(active: int | None, candidate: int | None = None, *, num: int = 2, desired: str = "on",
             state: Any = "proposed") -> Endpoint:
    """`state` is of the candidate."""
    revisions = tuple(one.model_copy(update={"state": state if one.number == candidate else "retired"})
                      for one in (BARE, *(drafted(number) for number in range(2, num + 1))))
    return Endpoint.model_validate({
        "name": "default", "target": "t", "url": None, "model": "m", "desired": desired, "active_revision": active,
        "candidate_revision": candidate, "revisions": revisions, "updated_at": NOW})


def engine(revision: int, state: Any = "healthy", **known: Any) -> ObservedEngine:
    return ObservedEngine(revision=revision, state=state, **({"started_at": NOW} | known))


def counted(tau: float, rounds: float = MIN_ROUNDS) -> EngineCounters:
    return EngineCounters(rounds, tau * rounds)


def plan(wanted: Endpoint, *engines: ObservedEngine, routed: int | None = None, gateway: bool = True,
         now: datetime = NOW, policy: ServePolicy = AT_ONCE, **seen: Any) -> Any:
    return plan_endpoint(wanted, policy, ObservedEndpoint(gateway, routed, engines, **seen), now)


def kinds(planned: Any) -> list[type]:
    return [type(one) for one in planned.actions]


def test_a_new_endpoint_listens_and_starts_its_first_engine() -> None:
    assert plan(endpoint(None, 1), gateway=False).actions == (StartGateway(), StartEngine(1, 1))


def test_a_window_with_answers_past_their_end_is_closed_without_a_judgement() -> None:
    window = EngineCounters(10.0 * MIN_ROUNDS, 10.0 * MIN_ROUNDS, answered=3.0)
    collapsed: dict[str, Any] = {"window": window, "window_since": NOW - timedelta(seconds=60)}
    wanted = endpoint(2, num=2)
    assert RollBack in kinds(plan(wanted, engine(2, **collapsed), routed=2))
    assert plan(wanted, engine(2, window_unended=True, **collapsed), routed=2).actions == (
        CloseWindow(2, None, None, window, seconds=60.0),)
    tried = ObservedCanary(2, 0.5, NOW)
    for unended, rejects in ((False, True), (True, False)):
        engines = engine(1), engine(2, window_unended=unended, **collapsed)
        assert (Reject in kinds(plan(endpoint(1, 2), *engines, routed=1, policy=TRIED, canary=tried))) == rejects


def test_where_two_engines_do_not_fit_the_old_one_is_stopped_first_and_the_gap_announced() -> None:
    wanted, why = endpoint(1, 2), "another engine needs 9.0 GiB"
    found = plan(wanted, engine(1), routed=1, no_room=why)
    assert kinds(found) == [AnnounceGap, EndEngine]
    assert why in found.actions[0].message
    stopping = engine(1, retiring_since=NOW)
    waiting = plan(wanted, stopping, routed=1, no_room=why)
    assert (waiting.actions, waiting.serving) == ((), "True")
    late = NOW + timedelta(seconds=AT_ONCE.drain_s + KILL_MARGIN_S + 1)
    assert plan(wanted, stopping, routed=1, no_room=why, now=late).actions == (EndEngine("kill", 1),)
    # The memory is free now, and it is the candidate's.
    stopped = engine(1, "dead", retiring_since=NOW)
    assert plan(wanted, stopped, routed=1).actions == (StartEngine(2, 1, alone=True),)
    starting = plan(wanted, stopped, engine(2, "starting", alone=True), routed=1)
    assert (starting.actions, starting.serving, starting.reason) == ((), "False", "ReplacingEngine")
    ready = plan(wanted, stopped, engine(2, alone=True), routed=1)
    assert ready.actions[:2] == (Route(2), Activate(2))


def test_a_candidate_that_fails_in_the_gap_gives_its_memory_back_before_the_old_engine_starts() -> None:
    stopped, failed = engine(1, "dead", retiring_since=NOW), engine(2, "dead", alone=True)
    rejected = plan(endpoint(1, 2), stopped, failed, routed=1)
    assert isinstance(rejected.actions[0], Reject)
    timed_out = engine(2, "starting", alone=True)
    assert plan(endpoint(1), stopped, timed_out, routed=1).actions == (EndEngine("retire", 2),)
    restarted = plan(endpoint(1), stopped, failed, routed=1, now=NOW + timedelta(minutes=1))
    assert StartEngine(1, 2) in restarted.actions


def test_a_candidate_that_ended_with_its_machine_is_started_again_but_not_for_ever() -> None:
    wanted, down = endpoint(1, 2), engine(1, "dead")
    found = plan(wanted, down, engine(2, "dead"), gateway=False)
    assert StartEngine(2, 2) in found.actions
    assert Reject not in kinds(found)
    assert Reject in kinds(plan(wanted, down, engine(2, "dead")))  # the gateway lives: the engine ended alone
    assert Reject in kinds(plan(wanted, engine(1), engine(2, "dead"), gateway=False))
    assert Reject in kinds(plan(wanted, down, engine(2, "dead", starts=3), gateway=False))


def test_a_revision_that_is_still_being_stopped_is_started_again_and_gets_no_requests_before() -> None:
    wanted, stopping = endpoint(1, 2, state="retired"), engine(2, retiring_since=NOW)
    assert plan(wanted, engine(1), stopping, routed=1).actions == ()
    late = NOW + timedelta(seconds=AT_ONCE.drain_s + KILL_MARGIN_S + 1)
    assert plan(wanted, engine(1), stopping, routed=1, now=late).actions == (EndEngine("kill", 2),)
    ended = engine(2, "dead", retiring_since=NOW)
    assert plan(wanted, engine(1), ended, routed=1).actions == (StartEngine(2, 1),)


def test_a_canary_that_loses_a_pod_is_waited_for_from_then_on() -> None:
    wanted, hour = endpoint(1, 2, state="canary"), timedelta(hours=1)
    tried: dict[str, Any] = {"routed": 1, "policy": TRIED, "now": NOW + hour, "canary": ObservedCanary(2, 0.2, NOW)}
    for unready, rejected in ((timedelta(seconds=30), False), (timedelta(seconds=90), True)):
        lost = engine(2, "starting", unready_since=NOW + hour - unready)
        assert (Reject in kinds(plan(wanted, engine(1), lost, **tried))) == rejected
    assert Reject in kinds(plan(wanted, engine(1), engine(2, "starting"), **tried))
    never = engine(2, "starting", unready_since=NOW + hour)  # it has had no share: its start has a limit
    assert Reject in kinds(plan(wanted, engine(1), never, **tried | {"canary": None}))


def test_the_route_moves_only_when_the_candidate_is_healthy_and_the_old_engine_serves_until_then() -> None:
    waiting = plan(endpoint(1, 2), engine(1), engine(2, "starting"), routed=1)
    assert waiting.actions == ()
    assert waiting.serving == "True"
    moved = plan(endpoint(1, 2), engine(1), engine(2), routed=1)
    assert moved.actions == (Route(2), Activate(2))
    after = plan(endpoint(2), engine(1), engine(2), routed=2)
    assert after.actions == (EndEngine("retire", 1),)


def test_a_crash_between_route_and_activation_does_not_send_the_route_back() -> None:
    assert plan(endpoint(1, 2), engine(1), engine(2), routed=2).actions == (Route(2), Activate(2))


def test_a_candidate_that_dies_or_is_late_is_rejected_and_the_old_engine_keeps_the_route() -> None:
    died = plan(endpoint(1, 2), engine(1), engine(2, "dead", message="no such file"), routed=1)
    assert isinstance(died.actions[0], Reject)
    assert "no such file" in died.actions[0].message
    late = plan(endpoint(1, 2), engine(1), engine(2, "starting"), routed=1, now=NOW + timedelta(seconds=61))
    assert [type(one) for one in late.actions] == [Reject, EndEngine]
    assert late.serving == "True"


def test_when_the_first_drafter_does_not_come_up_the_bare_target_is_served_but_not_proposed_forever() -> None:
    assert ProposeNoDrafter() in plan(endpoint(None, None)).actions
    only_bare = endpoint(None, None, num=1)
    assert plan(only_bare).actions == ()
    assert plan(only_bare).reason == "NothingToServe"


def test_an_engine_whose_pod_has_no_node_is_waited_for_with_reason_and_hint_after_a_grace() -> None:
    wait = Wait(reason="WaitingForNodes", message="no node fits: 0/3 nodes", hint="scale the pool up", since=NOW)
    first = engine(1, "starting", message=wait.message, wait=wait)
    early = plan(endpoint(None, 1), first, now=NOW + timedelta(seconds=5))
    assert (early.serving, early.reason) == ("Unknown", "Deploying")
    patient = ServePolicy(health_timeout_s=1800.0)
    late = plan(endpoint(None, 1), first, now=NOW + GRACE, policy=patient)
    assert (late.serving, late.reason) == ("Unknown", "WaitingForNodes")
    assert late.message == "revision 1 is starting: no node fits: 0/3 nodes; hint: scale the pool up"
    again = plan(endpoint(1), first, now=NOW + GRACE, policy=patient)
    assert (again.serving, again.reason) == ("Unknown", "WaitingForNodes")


def test_a_candidate_whose_pod_has_no_node_is_named_beside_the_revision_that_serves() -> None:
    wait = Wait(reason="WaitingForNodes", message="no node fits: 0/3 nodes", hint="scale the pool up", since=NOW)
    planned = plan(endpoint(1, 2), engine(1), engine(2, "starting", message=wait.message, wait=wait), routed=1,
                   now=NOW + GRACE, policy=ServePolicy(health_timeout_s=1800.0))
    assert (planned.serving, planned.reason) == ("True", "Healthy")
    assert planned.message.endswith("; revision 2 has not started yet: no node fits: 0/3 nodes; "
                                    "hint: scale the pool up")


def test_a_dead_engine_is_restarted_at_once_after_the_clock_was_set_back() -> None:
    dead = engine(2, "dead", starts=40, started_at=NOW + timedelta(minutes=6))
    assert plan(endpoint(2), dead).actions == (StartEngine(2, 41),)


def test_a_serving_drafter_that_is_damaged_is_replaced_by_the_target_without_one() -> None:
    damaged = plan(endpoint(3, num=3), engine(3, "dead"), drafter_damage="model.safetensors differs")
    assert damaged.actions == (RollBack(3, "DrafterDamaged", "model.safetensors differs", without_drafter=True),)
    ahead = plan(endpoint(3, 1, num=3), engine(3, "dead"), drafter_damage="model.safetensors differs")
    assert ahead.actions == (StartEngine(1, 1),), "the damaged one is not started again"


def test_a_damaged_serving_drafter_does_not_hold_back_a_candidate_which_gets_all_requests_at_once() -> None:
    ahead = plan(endpoint(2, 3, num=3), engine(2, "dead"), engine(3), drafter_damage="differs", policy=TRIED)
    assert ahead.actions[:2] == (Route(3), Activate(3))


def test_a_dead_engine_is_restarted_with_growing_pauses() -> None:
    dead = engine(2, "dead", starts=2)
    assert plan(endpoint(2), dead, routed=2).actions == ()
    assert plan(endpoint(2), dead, routed=2, now=NOW + timedelta(seconds=2)).actions == (StartEngine(2, 3),)
    lasting = engine(2, "dead", starts=0)
    assert plan(endpoint(2), lasting, routed=2).actions == (StartEngine(2, 1),)
    tired = engine(2, "dead", starts=40)
    assert plan(endpoint(2), tired, routed=2, now=NOW + timedelta(seconds=29)).actions == ()


def test_collapsed_acceptance_goes_back_and_a_thin_window_proves_nothing() -> None:
    poor = counted(1.2)
    actions = plan(endpoint(2), engine(2, window=poor), routed=2).actions
    assert [type(one) for one in actions] == [CloseWindow, RollBack]
    assert "1.50" in actions[1].message
    thin = counted(1.2, MIN_ROUNDS - 1.0)
    assert plan(endpoint(2), engine(2, window=thin), routed=2).actions == ()
    good = replace(counted(2.9), accepted=(180.0, 120.0))
    closed = CloseWindow(2, 2.9, 3.0, good, rollback_below=1.5, drift_below=2.55)
    assert plan(endpoint(2), engine(2, window=good), routed=2).actions == (closed,)
    # The bare target has no acceptance to lose.
    assert plan(endpoint(1), engine(1, window=poor), routed=1).actions == ()


def test_acceptance_whose_interval_reaches_the_threshold_is_watched_further_and_does_not_roll_back() -> None:
    for rounds, decided in ((float(MIN_ROUNDS), []), (4.0 * MIN_ROUNDS, [CloseWindow, RollBack])):
        seen = engine(2, window=counted(1.3, rounds))
        assert kinds(plan(endpoint(2), seen, routed=2)) == decided
    rounds = 20.0 * MIN_ROUNDS  # an acceptance at the threshold is never decided, and its window ends all the same
    seen = engine(2, window=counted(1.49, rounds))
    assert kinds(plan(endpoint(2), seen, routed=2)) == [CloseWindow]


def test_a_window_is_closed_when_it_is_long_enough_too_but_a_collapse_does_not_wait_for_that() -> None:
    policy = ServePolicy(drift=DriftSpec(window_s=60.0))
    for seconds, closed in ((59, False), (60, True)):
        seen = engine(2, window=counted(2.9, 2.0 * MIN_ROUNDS), window_since=NOW)
        now = NOW + timedelta(seconds=seconds)
        assert bool(plan(endpoint(2), seen, routed=2, policy=policy, now=now).actions) == closed
    poor = engine(2, window=counted(1.2, 2.0 * MIN_ROUNDS), window_since=NOW)
    assert RollBack in kinds(plan(endpoint(2), poor, routed=2, policy=policy))


def test_an_engine_that_switches_itself_off_under_load_is_blamed_for_its_drafted_rounds_alone() -> None:
    poor = counted(1.0)
    points = tuple(OperatingPoint(concurrency=load, setting=setting, speedup=1.0, tokens_per_s=1.0, measured=True)
                   for load, setting in ((1, Setting(tree=DraftTreeShape())), (8, OFF)))
    wanted = endpoint(2)
    use = wanted.revisions[1].use.model_copy(update={"map": OperatingMap(points=points)})
    follows = wanted.revisions[1].model_copy(update={"use": use})
    wanted = wanted.model_copy(update={"revisions": (wanted.revisions[0], follows)})
    assert plan(wanted, engine(2, window=poor), routed=2).actions == ()
    assert plan(wanted, engine(2), routed=2, policy=DRIFTING, windows=(1.0, 1.0, 1.0)).actions == ()
    apart = replace(AT_ONCE, counts_drafted=True)
    assert kinds(plan(wanted, engine(2, window=poor), routed=2, policy=apart)) == [CloseWindow, RollBack]
    apart = replace(DRIFTING, counts_drafted=True)
    assert kinds(plan(wanted, engine(2), routed=2, policy=apart, windows=(1.0, 1.0, 1.0))) == [ReportDrift]


def test_acceptance_is_not_judged_while_another_revision_is_coming_up() -> None:
    poor = counted(1.2)
    assert plan(endpoint(2, 1), engine(2, window=poor), engine(1, "starting"), routed=2).actions == ()


def test_a_retired_engine_is_killed_only_after_its_grace_and_forgotten_when_dead() -> None:
    retired = engine(1, retiring_since=NOW)
    assert plan(endpoint(2), engine(2), retired, routed=2).actions == ()
    late = NOW + timedelta(seconds=AT_ONCE.drain_s + KILL_MARGIN_S + 1)
    assert plan(endpoint(2), engine(2), retired, routed=2, now=late).actions == (EndEngine("kill", 1),)
    assert plan(endpoint(2), engine(2), engine(1, "dead"), routed=2).actions == (EndEngine("delete", 1),)


def test_off_closes_the_port_and_ends_every_engine() -> None:
    off = plan(endpoint(2, desired="off"), engine(2), routed=2)
    assert off.actions == (StopGateway(), EndEngine("retire", 2))
    assert (off.serving, off.reason) == ("False", "Off")


def on_trial(share: float = 0.2, **counted: int) -> dict[str, Any]:
    return {"canary": ObservedCanary(2, share, NOW, **counted), "routed": 1, "policy": TRIED}


def test_a_new_revision_gets_its_shares_step_by_step_and_then_everything() -> None:
    wanted, engines = endpoint(1, 2), (engine(1), engine(2))
    assert plan(wanted, *engines, routed=1, policy=TRIED).actions == (ShareRoute(2, 1, 0.2),)
    wanted = endpoint(1, 2, state="canary")
    assert plan(wanted, *engines, **on_trial(answered=4)).actions == ()
    assert plan(wanted, *engines, **on_trial(answered=5)).actions == (ShareRoute(2, 1, 0.5, CanaryStep(5, 0)),)
    last = plan(wanted, *engines, **on_trial(0.5, answered=5))
    assert last.actions == (Route(2), Activate(2, CanaryStep(5, 0)))
    assert "revision 2 is the canary with 50% of the requests" in last.message


def test_a_quiet_endpoint_does_not_wait_for_requests_that_do_not_come() -> None:
    wanted, engines = endpoint(1, 2, state="canary"), (engine(1), engine(2))
    for seconds, actions in ((9.9, ()), (10.0, (ShareRoute(2, 1, 0.5, CanaryStep(0, 0)),))):
        assert plan(wanted, *engines, **on_trial(), now=NOW + timedelta(seconds=seconds)).actions == actions


def test_two_failed_requests_on_trial_send_everything_back_and_one_is_no_evidence() -> None:
    wanted = endpoint(1, 2, state="canary")
    assert plan(wanted, engine(1), engine(2), **on_trial(answered=3, errors=1)).actions == ()
    planned = plan(wanted, engine(1), engine(2), **on_trial(answered=3, errors=2))
    assert planned.actions == (
        Reject(2, "CanaryFailed", "2 of its 5 requests failed while it had 20% of them", CanaryStep(3, 2)), Route(1),
        EndEngine("retire", 2))


def test_an_engine_that_dies_on_trial_is_rejected_and_the_route_is_whole_again() -> None:
    planned = plan(endpoint(1, 2, state="canary"), engine(1), engine(2, "dead", message="killed"), **on_trial())
    assert planned.actions == (Reject(2, "EngineDied", "the new engine ended: killed"), Route(1),
                               EndEngine("delete", 2))


def test_a_step_of_a_canary_ends_with_its_acceptance_and_the_interval_that_is_judged_by() -> None:
    seen = engine(2, window=counted(2.9, 100.0))
    (shared,) = plan(endpoint(1, 2, state="canary"), engine(1), seen, **on_trial(answered=5)).actions
    high = highest_tau(drafted(2), 2.9, 100.0)
    assert shared.ended == CanaryStep(5, 0, 2.9, 100.0, 2 * 2.9 - high, high)
    poor = engine(2, window=counted(1.05, 100.0))
    rejected = plan(endpoint(1, 2, state="canary"), engine(1), poor, **on_trial(answered=5)).actions[0]
    assert (rejected.ended.tau, rejected.ended.tau_low) == (1.05, 1.0), "a round produces a token at least"


def test_a_closed_window_says_how_many_requests_ended_and_tokens_were_generated_in_how_many_seconds() -> None:
    full = replace(counted(2.9, 2.0 * MIN_ROUNDS), answered=89.0, failed=1.0, generated=5400.0)
    for since, seconds in ((NOW - timedelta(seconds=60), 60.0), (None, None)):
        (closed,) = plan(endpoint(2), engine(2, window=full, window_since=since), routed=2).actions
        assert (closed.window, closed.seconds) == (full, seconds)


def test_requests_of_the_target_without_a_drafter_are_counted_in_windows_that_are_long_enough() -> None:
    policy = ServePolicy(drift=DriftSpec(window_s=60.0))
    for requests, seconds, closed in ((90.0, 61.0, True), (90.0, 59.0, False), (0.0, 61.0, False)):
        window = EngineCounters(answered=requests, generated=5400.0)
        seen = engine(1, window=window, window_since=NOW - timedelta(seconds=seconds))
        wanted = (CloseWindow(1, None, None, window, seconds=61.0),) if closed else ()
        assert plan(endpoint(1), seen, routed=1, policy=policy).actions == wanted


def test_acceptance_that_collapses_on_trial_rejects_and_a_few_rounds_prove_nothing() -> None:
    poor = engine(2, window=counted(1.1, CANARY_ROUNDS))
    planned = plan(endpoint(1, 2, state="canary"), engine(1), poor, **on_trial(answered=5))
    assert kinds(planned) == [Reject, Route, EndEngine]
    assert (planned.actions[0].reason, "1.10" in planned.actions[0].message) == ("AcceptanceCollapsed", True)
    uncertain = engine(2, window=counted(1.3, CANARY_ROUNDS))
    assert kinds(plan(endpoint(1, 2, state="canary"), engine(1), uncertain, **on_trial(answered=5))) == [ShareRoute]
    few = engine(2, window=EngineCounters(CANARY_ROUNDS - 1.0, 1.1 * CANARY_ROUNDS))
    assert kinds(plan(endpoint(1, 2, state="canary"), engine(1), few, **on_trial(answered=5))) == [ShareRoute]


def test_a_revision_that_has_served_before_is_gone_back_to_at_once() -> None:
    for state in ("retired", "rolled-back"):
        planned = plan(endpoint(2, 1, state=state), engine(2), engine(1), routed=2, policy=TRIED)
        assert planned.actions == (Route(1), Activate(1))


def test_without_a_healthy_engine_to_spare_users_the_new_one_is_not_tried_but_used() -> None:
    for serving in (engine(1, "dead"), engine(1, "starting")):
        planned = plan(endpoint(1, 2), serving, engine(2), routed=1, policy=TRIED)
        assert planned.actions[:2] == (Route(2), Activate(2))
    # Unless it has failed requests already.
    failed = plan(endpoint(1, 2, state="canary"), engine(1, "dead"), engine(2), **on_trial(errors=2))
    assert kinds(failed)[0] == Reject


def test_a_trial_nobody_wants_any_more_gives_its_share_back() -> None:
    """Somebody rolled back, or proposed another revision, while it ran."""
    assert plan(endpoint(1), engine(1), engine(2), **on_trial()).actions == (Route(1), EndEngine("retire", 2))
    proposed = plan(endpoint(1, 3, num=3), engine(1), engine(2), **on_trial())
    assert proposed.actions == (StartEngine(3, 1), Route(1), EndEngine("retire", 2))


DRIFTING = ServePolicy(drift=DriftSpec(ratio=0.85, windows=3))


def test_acceptance_below_the_drift_ratio_for_some_windows_in_a_row_is_reported_once() -> None:
    wanted, serving = endpoint(2), engine(2)

    def outcome(*windows: float, drift_reported: bool = False, policy: ServePolicy = DRIFTING) -> bool:
        planned = plan(wanted, serving, routed=2, policy=policy, windows=windows, drift_reported=drift_reported)
        return ReportDrift in kinds(planned)

    assert outcome(3.0, 2.5, 2.4, 2.5)
    assert not outcome(2.5, 2.4)
    assert not outcome(2.5, 2.6, 2.4, 2.5)  # 2.55 is the bound: the second one recovered
    assert not outcome(2.5, 2.5, 2.5, drift_reported=True)
    assert outcome(2.5, 2.8, 2.5, 2.5, 2.5, drift_reported=True)
    assert not outcome(2.5, 2.5, 2.5, policy=ServePolicy(drift=DriftSpec(action="ignore")))
    drift = plan(wanted, serving, routed=2, policy=DRIFTING, windows=(2.5, 2.4, 2.5)).actions[0]
    assert (drift.revision, drift.taus, drift.proven) == (2, (2.5, 2.4, 2.5), 3.0)
    assert "below 2.55 = 0.85 x the proven 3.00 for 3 windows in a row: 2.50, 2.40, 2.50" in drift.message


def test_the_bare_target_does_not_drift() -> None:
    assert plan(endpoint(1), engine(1), routed=1, policy=DRIFTING, windows=(1.0, 1.0, 1.0)).actions == ()


@settings(max_examples=150, deadline=None)
@given(num=st.integers(1, 4), broken=st.sets(st.integers(2, 4)), failing=st.sets(st.integers(2, 4)),
       candidate=st.integers(1, 4), active=st.none() | st.integers(1, 4),
       deaths=st.lists(st.integers(1, 5), max_size=4), tried=st.booleans())
def test_a_world_that_does_its_part_always_comes_to_serve_something_healthy(
        num: int, broken: set[int], failing: set[int], candidate: int, active: int | None, deaths: list[int],
        tried: bool) -> None:
    """Whatever is proposed, and whichever drafters cannot start, the endpoint ends up serving; never two routes."""
    broken = {number for number in broken if number <= num}
    active = active if active is not None and active <= num and active not in broken else None
    wanted = endpoint(active, min(candidate, num), num=num)
    engines: dict[int, ObservedEngine] = {}
    routed, gateway, now, canary = None, False, NOW, None
    result = None
    for step in range(40):
        now += timedelta(seconds=31)
        for number in list(engines):
            if engines[number].state == "starting":
                engines[number] = replace(engines[number], state="dead" if number in broken else "healthy")
            elif engines[number].retiring_since is not None or step in deaths:
                engines[number] = replace(engines[number], state="dead")
        if canary is not None and canary.revision in failing:
            canary = replace(canary, errors=2)
        result = plan_endpoint(wanted, TRIED if tried else AT_ONCE,
                               ObservedEndpoint(gateway, routed, tuple(engines.values()), canary), now)
        assert sum(isinstance(one, Route | ShareRoute) for one in result.actions) <= 1
        for action in result.actions:
            if isinstance(action, StartGateway):
                gateway = True
            elif isinstance(action, StartEngine):
                engines[action.revision] = ObservedEngine(action.revision, "starting", now, action.starts)
            elif isinstance(action, Route):
                assert engines[action.revision].state == "healthy"
                routed, canary = action.revision, None
            elif isinstance(action, ShareRoute):
                assert {engines[one].state for one in (action.revision, action.serving)} == {"healthy"}
                routed, canary = action.serving, ObservedCanary(action.revision, action.share, now)
            elif isinstance(action, EndEngine) and action.how == "retire":
                assert action.revision != routed
                assert canary is None or action.revision != canary.revision
                engines[action.revision] = replace(engines[action.revision], retiring_since=now)
            elif isinstance(action, EndEngine) and action.how == "delete":
                del engines[action.revision]
            elif isinstance(action, Activate):
                wanted = wanted.model_copy(update={"active_revision": action.revision, "candidate_revision": None})
            elif isinstance(action, Reject):
                wanted = wanted.model_copy(update={"candidate_revision": None})
            elif isinstance(action, ProposeNoDrafter):
                new = BARE.model_copy(update={"number": wanted.revisions[-1].number + 1})
                wanted = wanted.model_copy(update={"revisions": (*wanted.revisions, new),
                                                   "candidate_revision": new.number})
    assert result is not None
    assert result.serving == "True", (wanted, engines)
    assert set(engines) == {wanted.active_revision}
    assert canary is None
