"""Claims: done once, replayed, refused, freed when their process died."""

import threading

import pytest

from eyrie_api.database.engine import Database
from eyrie_api.database.idempotency import Idempotency, IdempotencyMismatch, Once, Replay
from eyrie_api.database.jobs import Jobs
from eyrie_api.submission.resolve import derive
from eyrie_api.v1alpha1.status import Job
from tests.api.samples import ManualClock, job_spec


@pytest.fixture
def idempotency(database: Database, clock: ManualClock) -> Idempotency:
    return Idempotency(database, 3600.0, clock)


def test_a_stored_response_is_replayed_until_it_expires(
        idempotency: Idempotency, database: Database, clock: ManualClock) -> None:
    once, job = Once("k", "r", "d"), derive(job_spec())
    jobs = Jobs(database, clock, idempotency)
    first = jobs.submit_once(job, once)
    assert isinstance(first, Job)
    clock.pass_(3599)
    replay = jobs.submit_once(job, once)
    assert isinstance(replay, Replay)
    assert (replay.status, replay.response["id"]) == (202, first.id)
    with pytest.raises(IdempotencyMismatch):
        jobs.submit_once(job, Once("k", "r", "other"))
    assert isinstance(jobs.submit_once(job, Once("k", "another route", "other")), Job)
    clock.pass_(2)
    assert isinstance(jobs.submit_once(job, Once("k", "r", "other")), Job)


def test_a_job_that_could_not_be_written_leaves_its_key_free(
        idempotency: Idempotency, database: Database, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    once, jobs = Once("k", "r", "d"), Jobs(database, clock, idempotency)
    first = jobs.submit(derive(job_spec()))
    monkeypatch.setattr("eyrie_api.database.jobs.new_job_id", lambda: first.id)  # a real constraint failure
    with pytest.raises(Exception, match=r"(?i)unique"):
        jobs.submit_once(derive(job_spec()), once)
    assert idempotency.find(once) is None
    assert len(jobs.list().items) == 1


def test_of_many_requests_with_one_key_one_is_done_and_the_others_get_its_response(database: Database) -> None:
    jobs, outcomes = Jobs(database, idempotency=Idempotency(database, 60.0)), list[Job | Replay]()

    def send() -> None:
        outcomes.append(jobs.submit_once(derive(job_spec()), Once("k", "r", "d")))

    threads = [threading.Thread(target=send) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(outcome, Job) for outcome in outcomes) == 1
    assert len(outcomes) == 6
