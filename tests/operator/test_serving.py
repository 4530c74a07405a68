"""What an endpoint needs next, with plain values; and that a working world always comes to serve what is asked."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie_api.v1alpha1.job import DraftTreeShape
from eyrie_api.v1alpha1.status import Endpoint, Revision
from eyrie_operator.serving import (
    DRAIN_S,
    MIN_ROUNDS,
    Activate,
    EndpointSeen,
    EngineSeen,
    ForgetEngine,
    GoBack,
    KillEngine,
    Reject,
    RestartWindow,
    RetireEngine,
    Route,
    ServeBare,
    ServePolicy,
    StartEngine,
    StartGateway,
    StopGateway,
    plan_endpoint,
)

NOW = datetime(2026, 1, 2, tzinfo=UTC)
POLICY = ServePolicy(health_timeout_s=60.0, min_acceptance_ratio=0.5)
BARE = Revision(number=1, job_id=None, checkpoint=None, tree=None, drafter_dir=None, created_at=NOW, reason="bare")


def drafted(number: int, tau: float = 3.0) -> Revision:
    return Revision(number=number, job_id="job-1", checkpoint=f"c{number}", tree=DraftTreeShape(),
                    drafter_dir=f"/d/{number}", tau=tau, created_at=NOW, reason="promoted")


def endpoint(active: int | None, candidate: int | None = None, *, num: int = 2, desired: str = "on") -> Endpoint:
    revisions = (BARE, *(drafted(number) for number in range(2, num + 1)))
    return Endpoint.model_validate({
        "name": "default", "target": "t", "url": None, "model": "m", "desired": desired, "active_revision": active,
        "candidate_revision": candidate, "revisions": revisions, "updated_at": NOW})


def engine(revision: int, state: Any = "healthy", **known: Any) -> EngineSeen:
    return EngineSeen(revision=revision, state=state, **({"started_at": NOW} | known))


def plan(wanted: Endpoint, *engines: EngineSeen, routed: int | None = None, gateway: bool = True,
         now: datetime = NOW) -> Any:
    return plan_endpoint(wanted, POLICY, EndpointSeen(gateway, routed, engines), now)


def test_a_new_endpoint_listens_and_starts_its_first_engine() -> None:
    assert plan(endpoint(None, 1), gateway=False).actions == (StartGateway(), StartEngine(1, 1))


def test_the_route_moves_only_when_the_candidate_is_healthy_and_the_old_engine_serves_until_then() -> None:
    waiting = plan(endpoint(1, 2), engine(1), engine(2, "starting"), routed=1)
    assert waiting.actions == ()
    assert waiting.serving == "True"
    moved = plan(endpoint(1, 2), engine(1), engine(2), routed=1)
    assert moved.actions == (Route(2), Activate(2))
    after = plan(endpoint(2), engine(1), engine(2), routed=2)
    assert after.actions == (RetireEngine(1),)


def test_a_crash_between_route_and_activation_does_not_send_the_route_back() -> None:
    assert plan(endpoint(1, 2), engine(1), engine(2), routed=2).actions == (Route(2), Activate(2))


def test_a_candidate_that_dies_or_is_late_is_rejected_and_the_old_engine_keeps_the_route() -> None:
    died = plan(endpoint(1, 2), engine(1), engine(2, "dead", message="no such file"), routed=1)
    assert isinstance(died.actions[0], Reject)
    assert "no such file" in died.actions[0].message
    late = plan(endpoint(1, 2), engine(1), engine(2, "starting"), routed=1, now=NOW + timedelta(seconds=61))
    assert [type(one) for one in late.actions] == [Reject, RetireEngine]
    assert late.serving == "True"


def test_when_the_first_drafter_does_not_come_up_the_bare_target_is_served_but_not_proposed_forever() -> None:
    assert ServeBare() in plan(endpoint(None, None)).actions
    only_bare = endpoint(None, None, num=1)
    assert plan(only_bare).actions == ()
    assert plan(only_bare).reason == "NothingToServe"


def test_a_dead_engine_is_restarted_with_growing_pauses() -> None:
    dead = engine(2, "dead", starts=2)
    assert plan(endpoint(2), dead, routed=2).actions == ()
    assert plan(endpoint(2), dead, routed=2, now=NOW + timedelta(seconds=2)).actions == (StartEngine(2, 3),)
    lasting = engine(2, "dead", starts=0)
    assert plan(endpoint(2), lasting, routed=2).actions == (StartEngine(2, 1),)
    tired = engine(2, "dead", starts=40)
    assert plan(endpoint(2), tired, routed=2, now=NOW + timedelta(seconds=29)).actions == ()


def test_collapsed_acceptance_goes_back_and_a_thin_window_proves_nothing() -> None:
    poor = {"window_tokens": 1.2 * MIN_ROUNDS, "window_rounds": float(MIN_ROUNDS)}
    actions = plan(endpoint(2), engine(2, **poor), routed=2).actions
    assert [type(one) for one in actions] == [RestartWindow, GoBack]
    assert "1.50" in actions[1].message
    thin = {"window_tokens": 1.2 * (MIN_ROUNDS - 1), "window_rounds": MIN_ROUNDS - 1.0}
    assert plan(endpoint(2), engine(2, **thin), routed=2).actions == ()
    good = {"window_tokens": 2.9 * MIN_ROUNDS, "window_rounds": float(MIN_ROUNDS)}
    assert plan(endpoint(2), engine(2, **good), routed=2).actions == (RestartWindow(2),)
    # The bare target has no acceptance to lose.
    assert plan(endpoint(1), engine(1, **poor), routed=1).actions == (RestartWindow(1),)


def test_acceptance_is_not_judged_while_another_revision_is_coming_up() -> None:
    poor = {"window_tokens": 1.2 * MIN_ROUNDS, "window_rounds": float(MIN_ROUNDS)}
    assert plan(endpoint(2, 1), engine(2, **poor), engine(1, "starting"), routed=2).actions == ()


def test_a_retired_engine_is_killed_only_after_its_grace_and_forgotten_when_dead() -> None:
    retired = engine(1, retiring_since=NOW)
    assert plan(endpoint(2), engine(2), retired, routed=2).actions == ()
    late = NOW + timedelta(seconds=DRAIN_S + 1)
    assert plan(endpoint(2), engine(2), retired, routed=2, now=late).actions == (KillEngine(1),)
    assert plan(endpoint(2), engine(2), engine(1, "dead"), routed=2).actions == (ForgetEngine(1),)


def test_off_closes_the_port_and_ends_every_engine() -> None:
    off = plan(endpoint(2, desired="off"), engine(2), routed=2)
    assert off.actions == (StopGateway(), RetireEngine(2))
    assert (off.serving, off.reason) == ("False", "Off")


@settings(max_examples=150, deadline=None)
@given(num=st.integers(1, 4), broken=st.sets(st.integers(2, 4)), candidate=st.integers(1, 4),
       active=st.none() | st.integers(1, 4), deaths=st.lists(st.integers(1, 5), max_size=4))
def test_a_world_that_does_its_part_always_comes_to_serve_something_healthy(
        num: int, broken: set[int], candidate: int, active: int | None, deaths: list[int]) -> None:
    """Whatever is proposed, and whichever drafters cannot start, the endpoint ends up serving; never two routes."""
    broken = {number for number in broken if number <= num}
    active = active if active is not None and active <= num and active not in broken else None
    wanted = endpoint(active, min(candidate, num), num=num)
    engines: dict[int, EngineSeen] = {}
    routed, gateway, now = None, False, NOW
    result = None
    for step in range(40):
        now += timedelta(seconds=31)
        for number in list(engines):
            if engines[number].state == "starting":
                engines[number] = replace(engines[number], state="dead" if number in broken else "healthy")
            elif engines[number].retiring_since is not None or step in deaths:
                engines[number] = replace(engines[number], state="dead")
        result = plan_endpoint(wanted, POLICY, EndpointSeen(gateway, routed, tuple(engines.values())), now)
        assert sum(isinstance(one, Route) for one in result.actions) <= 1
        for action in result.actions:
            if isinstance(action, StartGateway):
                gateway = True
            elif isinstance(action, StartEngine):
                engines[action.revision] = EngineSeen(action.revision, "starting", now, action.starts)
            elif isinstance(action, Route):
                assert engines[action.revision].state == "healthy"
                routed = action.revision
            elif isinstance(action, RetireEngine):
                assert action.revision != routed
                engines[action.revision] = replace(engines[action.revision], retiring_since=now)
            elif isinstance(action, ForgetEngine):
                del engines[action.revision]
            elif isinstance(action, Activate):
                wanted = wanted.model_copy(update={"active_revision": action.revision, "candidate_revision": None})
            elif isinstance(action, Reject):
                wanted = wanted.model_copy(update={"candidate_revision": None})
            elif isinstance(action, ServeBare):
                new = BARE.model_copy(update={"number": wanted.revisions[-1].number + 1})
                wanted = wanted.model_copy(update={"revisions": (*wanted.revisions, new),
                                                   "candidate_revision": new.number})
    assert result is not None
    assert result.serving == "True", (wanted, engines)
    assert set(engines) == {wanted.active_revision}
