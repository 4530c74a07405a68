"""Claims: done once, replayed, refused, freed when their process died."""

import threading

import pytest

from eyrie_api.database.engine import Database
from eyrie_api.database.idempotency import (
    IN_FLIGHT_TTL_S,
    Claim,
    Idempotency,
    IdempotencyMismatch,
    Replay,
    RequestInFlight,
)
from eyrie_api.database.jobs import Jobs
from eyrie_api.submission.resolve import derive
from tests.api.samples import ManualClock, job_spec


@pytest.fixture
def idempotency(database: Database, clock: ManualClock) -> Idempotency:
    return Idempotency(database, 3600.0, clock)


def test_a_completed_claim_is_replayed_until_it_expires(
        idempotency: Idempotency, database: Database, clock: ManualClock) -> None:
    claim = idempotency.claim("k", "r", "d")
    assert isinstance(claim, Claim)
    job = Jobs(database, clock, idempotency).submit(derive(job_spec()), claim)
    clock.pass_(3599)
    replay = idempotency.claim("k", "r", "d")
    assert isinstance(replay, Replay)
    assert (replay.status, replay.response["id"]) == (202, job.id)
    with pytest.raises(IdempotencyMismatch):
        idempotency.claim("k", "r", "other")
    assert isinstance(idempotency.claim("k", "another route", "other"), Claim)
    clock.pass_(2)
    assert isinstance(idempotency.claim("k", "r", "other"), Claim)


def test_a_claim_whose_process_died_is_free_again_after_a_while(idempotency: Idempotency, clock: ManualClock) -> None:
    idempotency.claim("k", "r", "d")
    with pytest.raises(RequestInFlight):
        idempotency.claim("k", "r", "d")
    clock.pass_(IN_FLIGHT_TTL_S + 1)
    assert isinstance(idempotency.claim("k", "r", "d"), Claim)


def test_a_job_that_could_not_be_written_leaves_its_claim_uncompleted(
        idempotency: Idempotency, database: Database, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = idempotency.claim("k", "r", "d")
    assert isinstance(claim, Claim)
    jobs = Jobs(database, clock, idempotency)
    first = jobs.submit(derive(job_spec()))
    monkeypatch.setattr("eyrie_api.database.jobs.new_job_id", lambda: first.id)  # a real constraint failure
    with pytest.raises(Exception, match=r"(?i)unique"):
        jobs.submit(derive(job_spec()), claim)
    idempotency.release(claim)
    assert isinstance(idempotency.claim("k", "r", "d"), Claim)
    assert len(jobs.list().items) == 1


def test_of_many_requests_with_one_key_one_is_done(database: Database) -> None:
    idempotency, outcomes = Idempotency(database, 60.0), []

    def send() -> None:
        try:
            outcomes.append(type(idempotency.claim("k", "r", "d")))
        except RequestInFlight:
            outcomes.append(RequestInFlight)

    threads = [threading.Thread(target=send) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count(Claim) == 1
    assert outcomes.count(RequestInFlight) == 5
