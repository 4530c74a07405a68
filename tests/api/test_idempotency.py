"""Requests with an Idempotency-Key: done once, replayed, refused, free again when nothing was written."""

import threading

import pytest

from eyrie_api.contract.status import Job
from eyrie_api.database.engine import Database
from eyrie_api.database.idempotency import Idempotency, IdempotencyMismatch, Once
from eyrie_api.database.jobs import Jobs
from eyrie_api.planning.resolve import derive
from tests.api.samples import ManualClock, job_spec

ONCE = Once("k", "r", "d")


@pytest.fixture
def keyed(database: Database, clock: ManualClock) -> Jobs:
    return Jobs(database, clock, Idempotency(database, 3600.0, clock))


def test_a_response_is_replayed_until_it_expires(keyed: Jobs, clock: ManualClock) -> None:
    job = keyed.submit_once(derive(job_spec()), ONCE)
    assert isinstance(job, Job)
    clock.pass_(3599)
    replay = keyed.submit_once(derive(job_spec()), ONCE)
    assert isinstance(replay, dict)
    assert replay["id"] == job.id
    with pytest.raises(IdempotencyMismatch):
        keyed.submit_once(derive(job_spec()), Once("k", "r", "other"))
    assert isinstance(keyed.submit_once(derive(job_spec()), Once("k", "another route", "other")), Job)
    clock.pass_(2)
    assert isinstance(keyed.submit_once(derive(job_spec()), Once("k", "r", "other")), Job)


def test_a_job_that_could_not_be_written_leaves_its_key_free(
        keyed: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    first = keyed.submit(derive(job_spec()))
    with monkeypatch.context() as patched:
        patched.setattr("eyrie_api.database.jobs.new_job_id", lambda: first.id)  # a real constraint failure
        with pytest.raises(Exception, match=r"(?i)unique"):
            keyed.submit_once(derive(job_spec()), ONCE)
    assert len(keyed.list().items) == 1
    assert isinstance(keyed.submit_once(derive(job_spec()), ONCE), Job)


def test_of_many_requests_with_one_key_one_is_done_and_the_others_get_its_response(database: Database) -> None:
    jobs, outcomes = Jobs(database, idempotency=Idempotency(database, 60.0)), []

    def send() -> None:
        outcomes.append(type(jobs.submit_once(derive(job_spec()), ONCE)))

    threads = [threading.Thread(target=send) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (outcomes.count(Job), outcomes.count(dict)) == (1, 5)
