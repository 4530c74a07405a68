"""Routes of a job's results: files, report, figures, leaderboard, and its plan against what it took.

Only files listed in the manifest of a finished stage can be downloaded, by exactly the listed path, so that no other
path of a request is opened. A link to a file outside of the stage's directory is refused (`JobFiles.path`).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Query
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from starlette.responses import FileResponse, Response, StreamingResponse

from eyrie_api.artifacts.directories import StageManifest
from eyrie_api.clock import utc_now
from eyrie_api.contract.engine import EngineKind
from eyrie_api.contract.figures import Figure, FigureList, FigureSummary
from eyrie_api.contract.model import Items, Name
from eyrie_api.contract.plan import PlannedAndActual, TimeLeft
from eyrie_api.contract.stages import StageName
from eyrie_api.contract.status import Job, JobReport, Leaderboard, StageFile
from eyrie_api.database.results import ResultFilter
from eyrie_api.decisions.job_report import planned_and_actual, report_of, time_left
from eyrie_api.decisions.leaderboard import Selection
from eyrie_api.errors import NotFound
from eyrie_api.figures.job_figures import figure_of, figures_of
from eyrie_api.http.control import Control, EndsWithClient, RequestControl
from eyrie_api.http.routes.jobs import JOBS, kept_plan
from eyrie_api.planning.plan import measured_rates

router = APIRouter(tags=["outcomes"])


@router.get(JOBS + "/{job_id}/artifacts")
def list_artifacts(job_id: str, control: RequestControl, stage: StageName | None = None) -> Items[StageFile]:
    """Files of the finished stages, with digests and where to download them."""
    control.jobs.get(job_id)
    manifests = control.files.manifests(job_id)
    return files_of(job_id, [finished for finished in manifests if stage in (None, finished.stage)])


def files_of(job_id: str, manifests: Iterable[StageManifest]) -> Items[StageFile]:
    """The files that manifests of a job list. Pure."""
    return Items[StageFile](items=tuple(
        StageFile(stage=finished.stage, key=finished.key, path=entry.path, size_bytes=entry.size_bytes,
                  sha256=entry.sha256, url=f"{JOBS}/{job_id}/artifacts/{finished.stage}/{quote(entry.path)}"
                  + (f"?key={quote(finished.key)}" if finished.key else ""))
        for finished in manifests for entry in finished.manifest.files))


@router.get(JOBS + "/{job_id}/plan/actual")
def compare_plan(job_id: str, control: RequestControl) -> PlannedAndActual:
    """The plan that the job was accepted with against time and bytes of its stages so far, about what a running job
    will still take, and the machine's rates by what it took. 404 for a job without a plan."""
    job, plan = control.jobs.get(job_id), kept_plan(job_id, control)
    sizes: Counter[str] = Counter()
    for finished in control.files.manifests(job_id):
        sizes[finished.stage] += sum(entry.size_bytes for entry in finished.manifest.files)
    stages = planned_and_actual(plan, job.status.stages, sizes, utc_now())
    return PlannedAndActual(stages=stages, rates=measured_rates(plan, stages),
                            time_left=times_left(control, (job,)).get(job_id))


def times_left(control: Control, jobs: Sequence[Job]) -> dict[str, TimeLeft]:
    """`time_left` of those that run and were planned to take so long that the plan has one, by id."""
    running, now = [job for job in jobs if job.status.phase == "Running"], utc_now()
    resolved = control.jobs.all_resolved([job.id for job in running])
    return {job.id: left for job in running if job.id in resolved
            and (left := time_left(resolved[job.id].plan, job.status.stages, now)) is not None}


@router.get(JOBS + "/{job_id}/artifacts/{stage}/{path:path}", response_class=FileResponse,
            dependencies=[EndsWithClient])
def download(job_id: str, stage: StageName, path: str, control: RequestControl,
             key: Annotated[Name | None, Query(description="candidate or checkpoint")] = None) -> Response:
    """One file of a finished stage."""
    control.jobs.get(job_id)
    for finished in control.files.manifests(job_id):
        entry = next((entry for entry in finished.manifest.files if entry.path == path), None)
        if (finished.stage, finished.key) == (stage, key or "") and entry is not None:
            file, name = control.files.path(finished, entry), Path(entry.path).name
            if file is not None:
                return FileResponse(file, filename=name)
            disposition = f"attachment; filename*=UTF-8''{quote(name)}"
            return StreamingResponse(control.files.pieces(finished, entry), media_type="application/octet-stream",
                                     headers={"Content-Length": str(entry.size_bytes),
                                              "Content-Disposition": disposition})
    raise NotFound(f"no file {path!r} in the manifest of stage {stage} {key or ''}".rstrip(),
                   "list the job's artifacts: only files of finished stages can be downloaded")


@router.get(JOBS + "/{job_id}/report")
def report(job_id: str, control: RequestControl) -> JobReport:
    """Everything measured of a job, as far as it has come."""
    job = control.jobs.get(job_id)
    entries = control.results.leaderboard(ResultFilter(job_id=job_id))
    return report_of(job, control.files.manifests(job_id), entries)


class LeaderboardQuery(BaseModel):
    """What of a job's leaderboard is selected, by the address of its page and of its figures: a form's fields, empty
    where nothing is chosen."""

    model_config = ConfigDict(frozen=True)

    family: str = Field("", max_length=32)
    suite: str = Field("", max_length=63)
    temperature: Annotated[Annotated[float, Field(ge=0.0, le=4.0)] | None,
                           BeforeValidator(lambda value: None if value == "" else value),
                           WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0, "maximum": 4},
                                                     {"const": ""}]})] = None
    engine: Literal["", EngineKind] = ""

    def board(self, control: Control, job_id: str) -> Leaderboard:
        """The job's leaderboard by the selection."""
        return control.results.board(ResultFilter(job_id=job_id, family=self.family or None),
                                     Selection(self.suite or None, self.temperature, self.engine or None))

    @property
    def chosen(self) -> dict[str, str | float]:
        """What is selected, by field."""
        return {name: value for name, value in self.model_dump().items() if value not in ("", None)}

    def address(self, path: str) -> str:
        """The path with the selection."""
        return f"{path}?{urlencode(self.chosen)}" if self.chosen else path

    def words(self) -> str:
        """The selection as text: suite math, temperature 1."""
        return ", ".join(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
                         for name, value in self.chosen.items())


@router.get(JOBS + "/{job_id}/figures")
def list_figures(job_id: str, control: RequestControl, selected: Annotated[LeaderboardQuery, Query()]) -> FigureList:
    """The figures that a job has data for so far. With a family, suite, temperature or engine, that of the leaderboard
    is of those measurements alone, and left out where there are none."""
    return FigureList(items=tuple(
        FigureSummary(name=figure.name, title=figure.title, caption=figure.caption, rows=figure.rows)
        for figure in figures_of(_selected(job_id, control, selected), selected.words())))


@router.get(JOBS + "/{job_id}/figures/{figure}")
def read_figure(job_id: str, figure: str, control: RequestControl,
                selected: Annotated[LeaderboardQuery, Query()]) -> Figure:
    """One figure as a Vega-Lite specification with its values; that of the leaderboard by the selection."""
    return figure_of(_selected(job_id, control, selected), figure, selected.words())


def _selected(job_id: str, control: Control, selected: LeaderboardQuery) -> JobReport:
    """The report with the selected entries of the leaderboard."""
    return report(job_id, control).model_copy(update={"leaderboard": selected.board(control, job_id).items})


@router.get("/v1alpha1/leaderboard")
def leaderboard(
    control: RequestControl,
    target: Annotated[str | None, Query(max_length=4096)] = None,
    job_id: Annotated[str | None, Query(max_length=63)] = None,
    family: Annotated[str | None, Query(max_length=32)] = None,
    suite: Annotated[str | None, Query(max_length=63)] = None,
    temperature: Annotated[float | None, Query(ge=0.0, le=4.0)] = None,
    engine: EngineKind | None = None,
    tuned: bool | None = None,
    lossless: bool | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Leaderboard:
    """Measured checkpoints, best average first; lossless ones before the others. With a suite, a temperature or an
    engine, figures and ranks are of the measurements made with it alone; `choices` has the values that occur."""
    wanted = ResultFilter(job_id=job_id, target=target, family=family, tuned=tuned, lossless=lossless)
    return control.results.board(wanted, Selection(suite, temperature, engine), limit)
