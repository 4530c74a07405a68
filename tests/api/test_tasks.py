"""Chores on a real Celery worker thread over memory:// and over a real Redis."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from eyrie_api.chores.broker import BrokerUnavailable, RedisTransport
from eyrie_api.chores.tasks import chore_queue, make_celery, queue_length
from eyrie_api.chores.worker import ChoreLoop
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.idempotency import Idempotency, Once
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.outbox import Outbox
from eyrie_api.planning.resolve import derive
from eyrie_api.settings import Settings
from tests.api.samples import ended, job_spec
from tests.servers.fixtures import or_skip
from tests.servers.redis import Redis
from tests.waiting import wait_for

LONG_S = 60.0
"""A bound for a loaded machine; no test waits for it when all is well."""


class Seen:
    """Arguments a chore was called with."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.calls: list[str] = []

    def __call__(self, argument: str) -> None:
        with self._changed:
            self.calls.append(argument)
            self._changed.notify_all()

    def wait_for(self, enough: Callable[[list[str]], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: enough(self.calls), LONG_S), self.calls


@contextmanager
def running(settings: Settings, database: Database, advance: Callable[[str], None],
            tend: Callable[[str], None] | None = None) -> Iterator[ChoreLoop]:
    loop = ChoreLoop(settings, make_celery(settings, advance, reconcile_endpoint=tend, database=database))
    loop.start(LONG_S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eyrie_api.chores.worker._STOP_TIMEOUT_S", LONG_S)
        try:
            yield loop
        finally:
            loop.stop()
            assert not loop.is_running


@pytest.fixture
def rare(settings: Settings) -> Settings:
    """Settings whose ticks are too rare to help: only the outbox and `wake` move things."""
    return settings.model_copy(update={"reconcile_interval_s": 3600.0})


@pytest.fixture
def frequent(settings: Settings) -> Settings:
    return settings.model_copy(update={"reconcile_interval_s": 0.05, "retention_interval_s": 0.05})


def test_a_submitted_job_is_advanced_as_soon_as_the_loop_is_woken(rare: Settings, database: Database) -> None:
    advanced = Seen()
    with running(rare, database, advanced) as loop:
        assert loop.is_running
        job = Jobs(database).submit(derive(job_spec()))
        loop.wake()
        advanced.wait_for(lambda calls: job.id in calls)
        wait_for(lambda: Outbox(database).depth() == 0, "each entry is taken out once its chore is done")


def test_an_unfinished_job_nobody_drives_is_advanced_again_and_again(frequent: Settings, database: Database) -> None:
    jobs, advanced = Jobs(database), Seen()
    job = jobs.submit(derive(job_spec()))
    Outbox(database).mark_dispatched(chore.id for chore in Outbox(database).pending())  # the broker lost it
    with running(frequent, database, advanced):
        advanced.wait_for(lambda calls: calls.count(job.id) >= 3)


def test_a_job_with_a_live_lease_is_left_to_its_driver(frequent: Settings, database: Database) -> None:
    jobs, advanced = Jobs(database), Seen()
    patient = frequent.model_copy(update={"lease_ttl_s": 600.0})
    driven, free = jobs.submit(derive(job_spec())).id, jobs.submit(derive(job_spec())).id
    Outbox(database).mark_dispatched(chore.id for chore in Outbox(database).pending())
    jobs.take_lease(driven, "another process", 2 * patient.lease_ttl_s)
    with running(patient, database, advanced):
        advanced.wait_for(lambda calls: calls.count(free) >= 3)
    assert driven not in advanced.calls


def test_a_chore_that_raises_does_not_stop_the_others(frequent: Settings, database: Database) -> None:
    advanced = Seen()
    bad, good = Jobs(database).submit(derive(job_spec())).id, Jobs(database).submit(derive(job_spec())).id

    def advance(job_id: str) -> None:
        advanced(job_id)
        if job_id == bad:
            raise RuntimeError("this job is cursed")

    with running(frequent, database, advance):
        advanced.wait_for(lambda calls: calls.count(good) >= 2 and calls.count(bad) >= 2)


def test_an_endpoint_that_was_changed_is_tended(rare: Settings, database: Database) -> None:
    tended = Seen()
    with running(rare, database, Seen(), tended) as loop:
        Endpoints(database).create("default", TargetSpec(model="quickstart"), EndpointServeSpec(), "quickstart")
        loop.wake()
        tended.wait_for(lambda calls: "default" in calls)


def test_a_deleted_jobs_files_are_removed_and_another_jobs_are_not(rare: Settings, database: Database) -> None:
    jobs = Jobs(database)
    gone, kept = jobs.submit(derive(job_spec())).id, jobs.submit(derive(job_spec())).id
    for job_id in (gone, kept):
        rare.stage_dir(job_id, "train").mkdir(parents=True)
    jobs.save_status(gone, ended("Failed"))
    jobs.delete(gone)
    advanced = Seen()
    with running(rare, database, advanced) as loop:
        loop.wake()
        advanced.wait_for(lambda calls: kept in calls)
        wait_for(lambda: not rare.job_dir(gone).exists(), "the files are removed")
    assert rare.job_dir(kept).exists()


def test_a_job_marked_for_deletion_disappears_once_it_has_stopped(frequent: Settings, database: Database) -> None:
    jobs, advanced = Jobs(database), Seen()

    def advance(job_id: str) -> None:
        if jobs.intent(job_id).cancel_requested:
            jobs.save_status(job_id, ended("Cancelled"))
        advanced(job_id)

    job_id = jobs.submit(derive(job_spec())).id
    with running(frequent, database, advance):
        jobs.delete(job_id)
        other = jobs.submit(derive(job_spec())).id
        advanced.wait_for(lambda calls: calls.count(other) >= 2)
        wait_for(lambda: jobs.list().items[-1].id != job_id, "the job is deleted")
    assert [job.id for job in jobs.list().items] == [other]


def test_retention_sweeps_what_has_expired(frequent: Settings, database: Database) -> None:
    settings = frequent.model_copy(update={"outbox_ttl_s": 1e-6, "idempotency_ttl_s": 1e-6})
    idempotency, jobs = Idempotency(database, 1e-6), Jobs(database)
    with database.writing() as session:
        idempotency.store(session, Once("k", "r", "d"), {})
    jobs.submit(derive(job_spec()))
    advanced = Seen()
    with running(settings, database, advanced):
        advanced.wait_for(lambda calls: len(calls) >= 5)
    assert idempotency.sweep() == 0
    assert Outbox(database).sweep(0.0) <= 1, "at most the row dispatched after the last sweep"


CRASHING = """
import os, sys
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.planning.resolve import derive
from eyrie_api.contract.job import JobSpec
from pathlib import Path
job = Jobs(Database(sys.argv[1])).submit(derive(JobSpec.model_validate_json(sys.argv[2])))
print(job.id, flush=True)
os.kill(os.getpid(), 9)  # after the commit, before anything was published
"""


def test_a_job_whose_server_was_killed_after_the_commit_is_dispatched_by_the_next_one(
        rare: Settings, database: Database) -> None:
    argv = [sys.executable, "-c", CRASHING, rare.resolved_database_url, job_spec().model_dump_json()]
    crashed = subprocess.run(argv, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert crashed.returncode == -signal.SIGKILL
    job_id, advanced = crashed.stdout.strip(), Seen()
    with running(rare, database, advanced):
        advanced.wait_for(lambda calls: job_id in calls)


def test_redis_by_url_moves_the_same_chores_with_the_same_code(
        rare: Settings, database: Database, redis: Redis) -> None:
    advanced = Seen()
    with running(rare.model_copy(update={"broker_url": redis.url}), database, advanced) as loop:
        job = Jobs(database).submit(derive(job_spec()))
        loop.wake()
        advanced.wait_for(lambda calls: job.id in calls)


def test_a_broker_that_dies_and_comes_back_empty_loses_no_chore(
        frequent: Settings, database: Database, redis: Redis) -> None:
    jobs, advanced = Jobs(database), Seen()
    with running(frequent.model_copy(update={"broker_url": redis.url}), database, advanced):
        redis.kill()
        job_id = jobs.submit(derive(job_spec())).id
        redis.start()
        advanced.wait_for(lambda calls: job_id in calls)


def test_a_broker_that_cannot_be_reached_at_the_start_is_an_error_with_the_hint(
        frequent: Settings, database: Database) -> None:
    code = (
        "import sys\n"
        "from eyrie_api.settings import Settings\n"
        "from eyrie_api.chores.broker import BrokerUnavailable\n"
        "from eyrie_api.chores.tasks import make_celery\n"
        "from eyrie_api.chores.worker import ChoreLoop\n"
        "settings = Settings.model_validate_json(sys.argv[1])\n"
        "try:\n"
        "    ChoreLoop(settings, make_celery(settings, print)).start(0.5)\n"
        "except BrokerUnavailable as error:\n"
        "    sys.exit(error.hint)\n"
    )
    away = frequent.model_copy(update={"broker_url": "redis://127.0.0.1:1/0"})
    ended_with = subprocess.run([sys.executable, "-c", code, away.model_dump_json()], capture_output=True, text=True,
                                timeout=LONG_S, check=False)
    assert "EYRIE_BROKER_URL" in ended_with.stderr
    assert ended_with.returncode == 1


@pytest.mark.parametrize("kind", ["memory", "redis"])
def test_the_length_of_a_queue_is_what_waits_in_it(rare: Settings, kind: str, request: pytest.FixtureRequest,
                                                   tmp_path: Path) -> None:
    url = "memory://" if kind == "memory" else request.getfixturevalue("redis").url
    settings = rare.model_copy(update={"broker_url": url, "database_url": f"sqlite:///{tmp_path}/own.db"})
    app = make_celery(settings, print)
    assert queue_length(app, chore_queue(settings)) == 0
    for _ in range(3):
        app.send_task("eyrie.advance_job", args=["x"])
    assert queue_length(app, chore_queue(settings)) == 3


def test_a_broker_that_is_away_is_reported_without_its_password(rare: Settings) -> None:
    settings = rare.model_copy(update={"broker_url": "redis://:sesame@127.0.0.1:1/0"})
    with pytest.raises(BrokerUnavailable) as caught:
        queue_length(make_celery(settings, print), chore_queue(settings))
    assert "sesame" not in str(caught.value)


def test_a_tick_adds_nothing_to_a_queue_that_workers_do_not_keep_up_with(
        rare: Settings, database: Database, redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = rare.model_copy(update={"broker_url": redis.url})
    app = make_celery(settings, print, database=database)
    Jobs(database).submit(derive(job_spec()))
    monkeypatch.setattr("eyrie_api.chores.tasks._MAX_QUEUED", 2)
    for expected in (1, 2, 2, 2):
        app.tasks["eyrie.reconcile_tick"]()
        assert queue_length(app, chore_queue(settings)) == expected


def test_a_redis_behind_tls_is_spoken_to_when_its_certificate_is_trusted_and_not_otherwise(tmp_path: Path) -> None:
    server = or_skip(lambda: Redis(tmp_path, tls=True))
    or_skip(server.start)
    database = Database(f"sqlite:///{tmp_path / 'eyrie.db'}")
    try:
        strange = Settings(home=tmp_path, broker_url=f"{server.url}?ssl_cert_reqs=required")
        with pytest.raises(BrokerUnavailable):
            queue_length(make_celery(strange, print, database=database), "any")
        trusted = Settings(home=tmp_path, broker_url=f"{strange.broker_url}&ssl_ca_certs={server.certificate}")
        app = make_celery(trusted, print, database=database)
        app.send_task("eyrie.retention")

        def waiting() -> int:
            try:
                return queue_length(app, chore_queue(trusted))
            except BrokerUnavailable:  # a busy machine may take longer than the two seconds it is given to shake hands
                return 0

        assert wait_for(waiting, "the queue is read") == 1
        assert isinstance(app.connection_for_write().transport, RedisTransport), "lost acknowledgements are let go"
    finally:
        server.kill()
        database.close()
