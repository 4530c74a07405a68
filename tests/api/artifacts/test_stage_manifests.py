"""Finished stages of a job, read while the job changes."""

import shutil
import threading
from pathlib import Path

from eyrie_api.artifacts import MANIFEST, write_model
from eyrie_api.artifacts.directories import read_manifests
from eyrie_api.contract.stages import Manifest
from tests.api.samples import NOW
from tests.pipelines.rehearsal.rehearsal_stage import benchmark_report


def test_stages_of_a_job_that_is_deleted_meanwhile_are_left_out(tmp_path: Path) -> None:
    manifest = Manifest(stage="benchmark", job_id="job", spec_digest=f"sha256:{0:064}", code_version="0", files=(),
                        report=benchmark_report("c", 1.9), started_at=NOW.isoformat(), finished_at=NOW.isoformat())
    for number in range(30):
        job_dir = tmp_path / f"job-{number}"
        for key in range(20):
            write_model(job_dir / "stages" / "benchmark" / f"step-{key}" / MANIFEST, manifest)
        removal = threading.Thread(target=shutil.rmtree, args=(job_dir,))
        removal.start()
        assert len(read_manifests(job_dir)) <= 20
        removal.join()
        assert read_manifests(job_dir) == ()
