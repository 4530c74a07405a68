"""A chore worker whose runs have a disk of their own, with an artifact store between them and the control plane.

On a cluster `KubeflowRunner` starts pods with empty homes and reads what they upload. Here the same runner's files go
through a real S3 server, and a run is the local one in a second home, deleted before each start: as if its node were
lost. Boxes download and upload as in pods (`eyrie_pipelines.work_area`). Kubeflow and Kubernetes are not part of it.

    python -m benchmarks.campaigns.pods NODE     a worker; EYRIE_* as for `eyrie worker`, EYRIE_ARTIFACTS_* name the
    store
"""

import json
import os
import shutil
import sys
from pathlib import Path

from eyrie_api.artifacts import write_atomically
from eyrie_api.artifacts.open_store import open_store
from eyrie_api.artifacts.store import ArtifactStore
from eyrie_api.chores.tasks import make_celery
from eyrie_api.chores.worker import run_worker
from eyrie_api.contract.cluster import ClusterProfile, KubeflowSpec
from eyrie_api.contract.placement import Placement, S3Work
from eyrie_api.database.engine import Database
from eyrie_api.settings import Settings
from eyrie_operator.embedded.endpoints import EmbeddedEndpoints
from eyrie_operator.jobs.driver import Driver
from eyrie_pipelines import local
from eyrie_pipelines.kubeflow import KubeflowRunner
from eyrie_pipelines.local import LocalRunner
from eyrie_pipelines.run_records import work_done
from eyrie_pipelines.runner import JobFile, ObservedRun
from eyrie_workers.catalog import SYNC_VARIABLE

_NO_KUBEFLOW = "http://127.0.0.1:1"
_SYNC_S = 0.5


class PodRunner(KubeflowRunner):
    """Runs below `node`, a home of their own, that share files with `home` through the store alone."""

    def __init__(self, home: Path, node: Path, store: ArtifactStore) -> None:
        stages = Placement(image="eyrie/workers:1", work=S3Work(url=store.url))
        super().__init__(ClusterProfile(kubeflow=KubeflowSpec(url=_NO_KUBEFLOW), home=str(home.absolute()),
                                        stages=stages), home, store)
        self._node, self._runs_here = node, LocalRunner(node)

    def observe(self, job_id: str) -> ObservedRun:
        """See `Runner`."""
        return self._runs_here.observe(job_id)

    def start(self, job: JobFile) -> None:
        """See `Runner`: on an empty node."""
        seen = self.observe(job.id)
        if seen.attempt == job.attempt and (seen.alive or seen.state == "succeeded"):
            return
        job = self._write_job(job)
        directory = self._node / "jobs" / job.id
        directory.mkdir(parents=True, exist_ok=True)
        local.stop(directory)
        if self._got_further(directory):
            local.pause(directory)
        shutil.rmtree(directory / "stages", ignore_errors=True)
        local.start(directory, job)

    @staticmethod
    def _got_further(directory: Path) -> bool:
        """Whether the run that is gone did more than those before it. On a node that is emptied its leader cannot know,
        and would count every death of the job as one without progress."""
        kept, work = directory / "reached.json", work_done(directory)
        before = tuple(json.loads(kept.read_text())) if kept.exists() else (0, 0.0)
        if work <= before:
            return False
        write_atomically(kept, json.dumps(work))
        return True

    def stop(self, job_id: str) -> None:
        """See `Runner`."""
        self._runs_here.stop(job_id)

    def has_capacity(self, job_id: str, live: tuple[str, ...], num_running: int) -> bool:
        """See `Runner`."""
        return self._runs_here.has_capacity(job_id, live, num_running)


def main(node: Path) -> None:
    """Run chores until SIGTERM."""
    settings = Settings.from_env()
    database = Database(settings.resolved_database_url)
    os.environ[SYNC_VARIABLE] = str(_SYNC_S)  # of the boxes, which are children
    runner = PodRunner(settings.home, node, open_store(options=settings.artifacts))
    app = make_celery(settings, Driver(settings, database, runner).advance, forget=runner.delete, database=database,
                      reconcile_endpoint=EmbeddedEndpoints(settings, database).reconcile)
    database.engine.dispose()  # a forked child must not share the parent's connections
    run_worker(app, settings, concurrency=2, database=database)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
