"""A prefork worker for tests: `python chores_worker.py DIRECTORY`, settings from EYRIE_* variables.

Its step drives a job as the operator does: lease, look, act, store. The act takes as long as DIRECTORY/gate is not
there, and notes its beginning in DIRECTORY/begun, so that a test can kill it in the middle. With DIRECTORY/dies the
worker and its children are killed where the act begins: a test that looks for the beginning may come so late that Redis
has handed the message out again, to the other child.
"""

import os
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from eyrie_api.chores.tasks import make_celery
from eyrie_api.chores.worker import run_worker
from eyrie_api.contract.status import StageStatus
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.settings import Settings
from tests.api.samples import set_stage

LEASE_S = 1.0


def main(directory: Path) -> None:
    settings = Settings.from_env()
    database = Database(settings.resolved_database_url)
    jobs = Jobs(database)

    def advance(job_id: str) -> None:
        owner = str(os.getpid())
        if not jobs.take_lease(job_id, owner, LEASE_S):
            return
        try:
            if jobs.get(job_id).status.stages:
                return
            with (directory / "begun").open("a") as file:
                file.write(f"{owner}\n")
            if (directory / "dies").exists():
                os.killpg(0, signal.SIGKILL)
            while not (directory / "gate").exists():
                time.sleep(0.02)
                jobs.renew_lease(job_id, owner, LEASE_S)
            now = datetime.now(UTC)
            set_stage(jobs, job_id, StageStatus(stage="train", state="Succeeded", started_at=now, finished_at=now))
        finally:
            jobs.release_lease(job_id, owner)

    run_worker(make_celery(settings, advance, database=database), settings, concurrency=2, database=database)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
