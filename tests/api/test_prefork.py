"""Chores on PostgreSQL, Redis and prefork workers, as on a cluster: killed, cut off, started again."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from sqlalchemy import make_url

from eyrie_api.chores.tasks import chore_queue, make_celery, queue_length, queue_lengths
from eyrie_api.chores.worker import Ticker, run_worker
from eyrie_api.contract.cluster import ClusterProfile, KubeflowSpec
from eyrie_api.contract.placement import Placement, S3Work
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.migrations import upgrade
from eyrie_api.database.outbox import Outbox
from eyrie_api.errors import InvalidInput
from eyrie_api.planning.resolve import derive
from eyrie_api.settings import Settings
from eyrie_pipelines.processes import group_members
from tests.api.artifacts.conftest import make_bucket
from tests.api.conftest import Running
from tests.api.samples import job_body, job_spec
from tests.api.test_tasks import LONG_S
from tests.servers import postgres
from tests.servers.cutting import relaying
from tests.servers.fixtures import or_skip
from tests.servers.processes import kept, private_dir
from tests.servers.redis import Redis
from tests.servers.s3 import S3Server
from tests.waiting import wait_for

DATABASES = ("postgresql",)
"""As on a cluster; that the chores do the same on SQLite, `test_tasks` shows."""


class Workers:
    """Prefork workers, each a process with two children."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        self._settings, self.directory = settings, directory
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, visibility_timeout_s: float = LONG_S) -> subprocess.Popen[bytes]:
        """A chore may take as long as its message is in a worker's hands: so long must a test be able to look on."""
        settings, root = self._settings, Path(__file__).parents[2]
        env = {**os.environ, "PYTHONPATH": str(root), "EYRIE_HOME": str(settings.home),
               "EYRIE_DATABASE_URL": settings.resolved_database_url, "EYRIE_BROKER_URL": settings.broker_url,
               "EYRIE_VISIBILITY_TIMEOUT_S": str(visibility_timeout_s)}
        program = Path(__file__).with_name("chores_worker.py")
        process = subprocess.Popen(kept([sys.executable, str(program), str(self.directory)]), env=env, cwd=root,
                                   start_new_session=True)
        self._running.append(process)
        return process

    @property
    def begun(self) -> list[int]:
        """Processes that have begun the chore, in order."""
        file = self.directory / "begun"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def let_go(self) -> None:
        """Let the chore end."""
        (self.directory / "gate").touch()

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """kill -9 a worker and its children, as a node that goes away."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(LONG_S)

    def end(self) -> None:
        for process in self._running:
            self.kill(process)


@pytest.fixture
def settings(settings: Settings, redis: Redis) -> Settings:
    return settings.model_copy(update={"broker_url": redis.url, "reconcile_interval_s": 3600.0})


@pytest.fixture
def workers(settings: Settings, tmp_path: Path) -> Iterator[Workers]:
    made = Workers(settings, tmp_path)
    yield made
    made.end()


@contextmanager
def ticking(settings: Settings, database: Database) -> Iterator[None]:
    """A control plane that gives chores and takes none."""
    ticker = Ticker(settings, make_celery(settings, print, database=database))
    ticker.start()
    try:
        yield
    finally:
        ticker.stop()


def has_trained(jobs: Jobs, job_id: str) -> Callable[[], bool]:
    return lambda: [stage.state for stage in jobs.get(job_id).status.stages] == ["Succeeded"]


def test_a_chore_whose_worker_was_killed_is_done_again_and_does_no_harm(
        settings: Settings, database: Database, workers: Workers) -> None:
    """One message, no tick: that it is done at all is Redis handing it out again."""
    jobs, app = Jobs(database), make_celery(settings, print, database=database)
    job_id = jobs.submit(derive(job_spec())).id
    app.send_task("eyrie.advance_job", args=[job_id])
    dies = workers.directory / "dies"
    dies.touch()
    assert workers.start(3.0).wait(LONG_S) == -signal.SIGKILL
    assert len(workers.begun) == 1
    assert not has_trained(jobs, job_id)()
    dies.unlink()
    workers.let_go()
    workers.start(3.0)
    wait_for(has_trained(jobs, job_id), "the job is trained")
    assert len(workers.begun) == 2, "by two processes, one after the other"
    assert [event.reason for event in jobs.events(job_id)] == ["Accepted"]
    wait_for(lambda: queue_length(app, chore_queue(settings)) == 0, "the queue is empty")


def test_a_chore_whose_child_process_was_killed_is_done_by_another(
        settings: Settings, database: Database, workers: Workers) -> None:
    """The out-of-memory killer's way. The message comes back before the dead child's lease has run out, and is let go;
    the tick finds the job when it has."""
    jobs, frequent = Jobs(database), settings.model_copy(update={"reconcile_interval_s": 0.2})
    with ticking(frequent, database):
        job_id = jobs.submit(derive(job_spec())).id
        workers.start()
        wait_for(lambda: len(workers.begun) >= 1, "a worker begins")
        os.kill(workers.begun[0], signal.SIGKILL)
        workers.let_go()
        wait_for(has_trained(jobs, job_id), "the job is trained")


def test_a_redis_that_is_away_for_a_while_delays_chores_and_loses_none(
        settings: Settings, database: Database, workers: Workers, redis: Redis) -> None:
    jobs, frequent = Jobs(database), settings.model_copy(update={"reconcile_interval_s": 0.2})
    workers.let_go()
    workers.start()
    with ticking(frequent, database):
        before = jobs.submit(derive(job_spec())).id
        wait_for(has_trained(jobs, before), "the job is trained")
        redis.kill()
        meanwhile = [jobs.submit(derive(job_spec())).id for _ in range(3)]
        assert Outbox(database).depth() >= 3, "promised, and kept"
        redis.start()
        for job_id in meanwhile:
            wait_for(has_trained(jobs, job_id), "the job is trained")
        wait_for(lambda: Outbox(database).depth() == 0, "nothing is pending")


def test_a_worker_asked_to_end_finishes_the_chore_in_hand(
        settings: Settings, database: Database, workers: Workers) -> None:
    jobs, app = Jobs(database), make_celery(settings, print, database=database)
    job_id = jobs.submit(derive(job_spec())).id
    app.send_task("eyrie.advance_job", args=[job_id])
    worker = workers.start()
    wait_for(lambda: len(workers.begun) >= 1, "a worker begins")
    worker.terminate()
    workers.let_go()
    assert worker.wait(LONG_S) == 0
    assert has_trained(jobs, job_id)()


def test_a_broker_within_one_process_cannot_be_shared(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    with pytest.raises(InvalidInput, match="memory://") as caught:
        run_worker(make_celery(settings, print), settings, concurrency=1)
    assert "EYRIE_BROKER_URL" in caught.value.hint


def test_a_postgresql_that_is_away_for_a_while_is_a_503_and_nothing_accepted_is_lost(
        tmp_path: Path, serve: Callable[..., Running]) -> None:
    cluster = or_skip(lambda: postgres.start(private_dir()))
    assert cluster.server is not None
    settings = Settings(home=tmp_path / "home", database_url=cluster.url(cluster.create()))
    database = Database(settings.resolved_database_url)
    upgrade(database)
    try:
        with serve(settings, database) as running:
            before = running.client.create_job(job_spec())
            cluster.server.kill()
            for path in ("/readyz", "/v1alpha1/jobs"):
                refused = httpx.get(running.url + path, timeout=LONG_S)
                assert refused.status_code == 503
                assert refused.headers["Retry-After"]
            refused = httpx.post(running.url + "/v1alpha1/jobs", json=job_body(), timeout=LONG_S)
            assert (refused.status_code, refused.json()["type"]) == (503, "urn:eyrie:problem:DatabaseUnavailable")
            cluster.server.start()
            wait_for(lambda: httpx.get(running.url + "/readyz", timeout=LONG_S).status_code == 200, "it is ready")
            after = running.client.create_job(job_spec())
            assert {job.id for job in Jobs(database).list().items} == {before.id, after.id}
    finally:
        database.close()
        cluster.server.kill()


def test_the_metrics_tell_what_waits_at_the_broker_and_do_without_it(
        settings: Settings, database: Database, redis: Redis, serve: Callable[..., Running]) -> None:
    app = make_celery(settings, print, database=database)
    app.send_task("eyrie.advance_job", args=["x"])
    with serve(settings, database, queues=queue_lengths(app, settings)) as running:
        text = httpx.get(f"{running.url}/metrics").text
        assert 'eyrie_queue_length{queue="chores"} 1.0' in text
        assert 'eyrie_queue_length{queue="shards"} 0.0' in text
        redis.kill()
        text = httpx.get(f"{running.url}/metrics", timeout=LONG_S).text
        assert "eyrie_outbox_depth" in text
        assert "eyrie_queue_length{" not in text


@pytest.mark.slow  # in the fast tier the next test starts the same command
def test_the_worker_command_takes_chores(settings: Settings, database: Database, tmp_path: Path) -> None:
    """`eyrie worker` beside a database and a Redis: the whole chain to the embedded world's step."""
    env = {**os.environ, "EYRIE_HOME": str(settings.home), "EYRIE_DATABASE_URL": settings.resolved_database_url,
           "EYRIE_BROKER_URL": settings.broker_url}
    app = make_celery(settings, print, database=database)
    for _ in range(3):
        app.send_task("eyrie.retention")
    process = subprocess.Popen(kept([sys.executable, "-m", "eyrie_operator.command", "worker", "--concurrency", "1"]),
                               env=env, cwd=tmp_path, start_new_session=True)
    try:
        wait_for(lambda: queue_length(app, chore_queue(settings)) == 0, "the queue is empty")
        process.terminate()
        assert process.wait(LONG_S) == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_children_of_a_worker_use_no_connection_of_their_parent(
        settings: Settings, database: Database, rclone_s3: S3Server, tmp_path: Path) -> None:
    """The parent checks the work area and migrates the database before it forks. Two children that sent requests over
    one of its connections would read each other's answers."""
    bucket, queue = make_bucket(rclone_s3, tmp_path), chore_queue(settings)
    url = make_url(settings.resolved_database_url)
    assert url.port is not None
    with relaying(int(rclone_s3.endpoint_url.rpartition(":")[2])) as store, relaying(url.port) as rows:
        home, profile = settings.home.absolute(), tmp_path / "profile.json"
        profile.write_text(ClusterProfile(
            kubeflow=KubeflowSpec(url="http://127.0.0.1:9"), home=str(home),
            stages=Placement(image="eyrie/workers:1", work=S3Work(
                url=f"s3://{bucket.name}/eyrie", endpoint_url=f"http://127.0.0.1:{store.port}"))).model_dump_json())
        env = {**os.environ, "EYRIE_HOME": str(home), "EYRIE_BROKER_URL": settings.broker_url,
               "EYRIE_DATABASE_URL": url.set(port=rows.port, host="127.0.0.1").render_as_string(hide_password=False),
               "EYRIE_CLUSTER_PROFILE": str(profile), "EYRIE_ARTIFACTS_CREDENTIALS_DIR": str(bucket.secret),
               "EYRIE_CHORE_QUEUE": queue}  # its default depends on the address of the database
        worker = subprocess.Popen(
            kept([sys.executable, "-m", "eyrie_operator.command", "worker", "--concurrency", "2"]),
            env=env, cwd=tmp_path, start_new_session=True)
        try:
            wait_for(lambda: len(group_members(worker.pid)) == 4, "its keeper, the worker, and two children run")
            of_parent = {relay.port: dict(relay.asked) for relay in (store, rows)}
            assert all(of_parent.values()), "the parent has used both"
            app = make_celery(settings, print, database=database)
            for _ in range(8):
                app.send_task("eyrie.retention")
            wait_for(lambda: queue_length(app, queue) == 0, "the queue is empty")
            worker.terminate()
            with suppress(subprocess.TimeoutExpired):  # a child may wait for an answer that the other one has read
                worker.wait(LONG_S)
            for relay in (store, rows):
                before = of_parent[relay.port]
                assert {connection: relay.asked[connection] for connection in before} == before
                assert len(relay.asked) > len(before), "the children have their own"
            assert worker.poll() == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
