"""Election and fencing: a manual clock, and a lease kept as the API server keeps it."""

import threading
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from eyrie_api.errors import Transient
from eyrie_operator.cluster.leases import (
    Elector,
    Fence,
    LeaseRecord,
    LeaseTimings,
    NotLeader,
    decide,
    run_election,
    timings_of,
)

NOW = datetime(2026, 11, 21, tzinfo=UTC)
TIMINGS = LeaseTimings(duration_s=15.0, renew_within_s=10.0, retry_s=2.0)


class StepContext:
    """A monotonic clock that the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Shelf:
    """A lease with optimistic locking, as an API server has it; `away` while nobody answers."""

    def __init__(self) -> None:
        self.record: LeaseRecord | None = None
        self.version = 0
        self.away = False

    def read_lease(self) -> LeaseRecord | None:
        if self.away:
            raise Transient("the API server does not answer")
        return self.record

    def write_lease(self, record: LeaseRecord) -> LeaseRecord | None:
        if self.away:
            raise Transient("the API server does not answer")
        if record.resource_version != (self.record.resource_version if self.record else None):
            return None
        self.version += 1
        self.record = replace(record, resource_version=str(self.version))
        return self.record


class Candidate:
    def __init__(self, name: str, shelf: Shelf, clock: StepContext) -> None:
        self.fence = Fence(clock)
        self.elector = Elector(name, shelf, TIMINGS, self.fence, monotonic=clock, clock=lambda: NOW)

    def leads(self) -> bool:
        return self.elector.step()


@pytest.fixture
def clock() -> StepContext:
    return StepContext()


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def record(holder: str) -> LeaseRecord:
    return LeaseRecord(holder, 15.0, NOW, NOW, resource_version="1")


@pytest.mark.parametrize(("seen", "unchanged_s", "move"), [
    (None, 0.0, "create"), (record("me"), 99.0, "renew"), (record(""), 0.0, "acquire"), (record("other"), 15.0, "wait"),
    (record("other"), 15.1, "acquire"),
])
def test_what_a_candidate_does(seen: LeaseRecord | None, unchanged_s: float, move: str) -> None:
    assert decide("me", seen, unchanged_s) == move


def test_the_first_leads_and_the_second_waits_for_as_long_as_it_renews(shelf: Shelf, clock: StepContext) -> None:
    first, second = Candidate("first", shelf, clock), Candidate("second", shelf, clock)
    for _ in range(50):
        assert first.leads()
        assert not second.leads()
        clock.now += 2.0


def test_a_silent_holder_is_replaced_after_its_term_and_not_before(shelf: Shelf, clock: StepContext) -> None:
    first, second = Candidate("first", shelf, clock), Candidate("second", shelf, clock)
    assert first.leads()
    assert not second.leads()
    clock.now += 15.0
    assert not second.leads()
    clock.now += 0.1
    assert second.leads()
    assert shelf.record is not None
    assert (shelf.record.holder, shelf.record.transitions) == ("second", 1)


def test_a_stale_lease_may_not_write_before_another_can_take_it(shelf: Shelf, clock: StepContext) -> None:
    first, second = Candidate("first", shelf, clock), Candidate("second", shelf, clock)
    first.leads()
    second.leads()
    for _ in range(300):
        clock.now += 0.1
        if second.leads():
            break
        if not first.fence.is_open:
            with pytest.raises(NotLeader):
                first.fence.check()
    assert second.fence.is_open
    assert not first.fence.is_open
    assert not first.leads(), "and it does not take it back from a live holder"


def test_of_two_that_take_at_once_one_gets_it(shelf: Shelf, clock: StepContext) -> None:
    first, second = Candidate("first", shelf, clock), Candidate("second", shelf, clock)
    seen = shelf.read_lease()
    assert shelf.write_lease(LeaseRecord("first", 15.0, NOW, NOW)) is not None
    assert seen is None
    assert shelf.write_lease(LeaseRecord("second", 15.0, NOW, NOW)) is None
    assert first.leads()
    assert not second.leads()


def test_a_holder_that_cannot_renew_stops_by_itself(shelf: Shelf, clock: StepContext) -> None:
    first = Candidate("first", shelf, clock)
    assert first.leads()
    shelf.away = True
    clock.now += 9.9
    assert first.fence.is_open
    clock.now += 0.1
    assert not first.fence.is_open


def test_a_lease_given_back_is_taken_at_once(shelf: Shelf, clock: StepContext) -> None:
    first, second = Candidate("first", shelf, clock), Candidate("second", shelf, clock)
    first.leads()
    second.leads()
    first.elector.resign()
    assert not first.fence.is_open
    assert second.leads()


def test_a_campaign_tells_of_winning_and_of_losing(shelf: Shelf) -> None:
    clock, stopping, result = StepContext(), threading.Event(), list[str]()
    first = Candidate("first", shelf, clock)

    def won() -> None:
        result.append("leads")
        shelf.record = record("other")  # somebody else has it now, whatever we believed
        clock.now += 10.0

    run_election(first.elector, first.fence, LeaseTimings(retry_s=0.0), stopping, won, lambda: result.append("lost"))
    assert result == ["leads", "lost"]


def test_a_campaign_that_is_ended_gives_the_lease_back(shelf: Shelf) -> None:
    stopping = threading.Event()
    first = Candidate("first", shelf, StepContext())
    run_election(first.elector, first.fence, LeaseTimings(retry_s=0.0), stopping, stopping.set, stopping.set)
    assert shelf.record is not None
    assert shelf.record.holder == ""


def test_terms_keep_their_proportions() -> None:
    assert timings_of(15.0) == LeaseTimings()
