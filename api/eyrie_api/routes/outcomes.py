"""What a job leaves: files, its report, and its place on the leaderboard.

Only files named in a stage's manifest can be downloaded, so a path from outside never reaches the disk unless a
finished stage has listed exactly it; a link planted in a stage's directory afterwards is refused as well.
"""

from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Query
from starlette.responses import FileResponse, Response

from eyrie_api.control import Here
from eyrie_api.errors import ArtifactCorrupt, NotFound
from eyrie_api.manifests import StageManifest, read_manifests, report_of
from eyrie_api.results import ResultFilter
from eyrie_api.routes.jobs import JOBS
from eyrie_api.v1alpha1.model import Name
from eyrie_api.v1alpha1.stages import StageName
from eyrie_api.v1alpha1.status import JobReport, Leaderboard, StageFile, StageFileList

router = APIRouter(tags=["outcomes"])


@router.get(JOBS + "/{job_id}/artifacts")
def list_artifacts(job_id: str, control: Here, stage: StageName | None = None) -> StageFileList:
    """Files of the finished stages, with digests and where to download them."""
    control.jobs.get(job_id)
    found = read_manifests(control.settings.job_dir(job_id))
    return StageFileList(items=tuple(
        StageFile(stage=one.stage, key=one.key, path=entry.path, size_bytes=entry.size_bytes, sha256=entry.sha256,
                  url=_url(job_id, one, entry.path))
        for one in found if stage in (None, one.stage) for entry in one.manifest.files))


def _url(job_id: str, one: StageManifest, path: str) -> str:
    key = f"?key={quote(one.key)}" if one.key else ""
    return f"{JOBS}/{job_id}/artifacts/{one.stage}/{quote(path)}{key}"


@router.get(JOBS + "/{job_id}/artifacts/{stage}/{path:path}", response_class=FileResponse)
def download(job_id: str, stage: StageName, path: str, control: Here,
             key: Annotated[Name | None, Query(description="candidate or checkpoint")] = None) -> Response:
    """One file of a finished stage."""
    control.jobs.get(job_id)
    for one in read_manifests(control.settings.job_dir(job_id)):
        if (one.stage, one.key) == (stage, key or "") and any(entry.path == path for entry in one.manifest.files):
            return FileResponse(_inside(one.directory, path), filename=Path(path).name)
    raise NotFound(f"no file {path!r} in the manifest of stage {stage} {key or ''}".rstrip(),
                   "list the job's artifacts: only files of finished stages can be downloaded")


def _inside(directory: Path, path: str) -> Path:
    root, file = directory.resolve(), (directory / path).resolve()
    if not file.is_relative_to(root) or not file.is_file():
        raise ArtifactCorrupt(f"{path!r} is in the manifest but is not a file of its stage's directory",
                              "retry the job from that stage")
    return file


@router.get(JOBS + "/{job_id}/report")
def report(job_id: str, control: Here) -> JobReport:
    """Everything measured of a job, as far as it has come."""
    job = control.jobs.get(job_id)
    entries = control.results.leaderboard(ResultFilter(job_id=job_id))
    return report_of(job, read_manifests(control.settings.job_dir(job_id)), entries)


@router.get("/v1alpha1/leaderboard")
def leaderboard(
    control: Here,
    target: Annotated[str | None, Query(max_length=4096)] = None,
    job_id: Annotated[str | None, Query(max_length=63)] = None,
    family: Annotated[str | None, Query(max_length=32)] = None,
    tuned: bool | None = None,
    lossless: bool | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Leaderboard:
    """Measured checkpoints, best average first; lossless ones before the others."""
    wanted = ResultFilter(job_id=job_id, target=target, family=family, tuned=tuned, lossless=lossless)
    return Leaderboard(items=control.results.leaderboard(wanted, limit))
