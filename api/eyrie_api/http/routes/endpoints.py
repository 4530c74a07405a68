"""Routes of endpoints: state, history, figures, four changes (promote, rollback, on, off), and compared answers.

A change is written to the database; the reconciler of endpoints carries it out. A comparison changes nothing, but takes
the engine's time: it needs the role that changes need, which a viewer has not.
"""

from pathlib import Path
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Body, Query, Response
from starlette.responses import StreamingResponse

from eyrie_api.contract.comparison import CompareRequest, RecordedPrompts
from eyrie_api.contract.endpoints import EndpointTraffic, History, HistoryKind
from eyrie_api.contract.figures import Figure, FigureList
from eyrie_api.contract.model import Items, Name
from eyrie_api.contract.status import Endpoint, PromoteRequest, RollbackRequest
from eyrie_api.contract.tuning import DrafterUse, Setting
from eyrie_api.database.endpoint_history import MAX_PAGE
from eyrie_api.decisions.leaderboard import WITHOUT_DRAFTER
from eyrie_api.errors import Conflict
from eyrie_api.figures import endpoint_figures
from eyrie_api.http.compared_answers import ServedEndpoint, compare, live_revision, read_recording
from eyrie_api.http.control import Control, RequestControl

router = APIRouter(tags=["endpoints"])
ENDPOINTS = "/v1alpha1/endpoints"


@router.get(ENDPOINTS)
def list_endpoints(control: RequestControl) -> Items[Endpoint]:
    """All endpoints with their revisions."""
    return control.endpoints.list()


@router.get("/v1alpha1/traffic")
def list_traffic(control: RequestControl) -> Items[EndpointTraffic]:
    """What the traffic of every endpoint shows now: the latest window with acceptance and requests per second, the
    canary and its share, drift."""
    return Items[EndpointTraffic](items=control.traffic(control.endpoints.list().items))


@router.get(ENDPOINTS + "/{name}")
def get_endpoint(name: Name, control: RequestControl) -> Endpoint:
    """One endpoint."""
    return control.endpoints.get(name)


@router.get(ENDPOINTS + "/{name}/history")
def read_history(name: Name, control: RequestControl, limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 200,
                 before: Annotated[int | None, Query(ge=1, le=2**53)] = None,
                 kind: HistoryKind | None = None) -> History:
    """What was decided for it, what changed, what was seen: the latest entries, oldest first."""
    return control.histories.read(name, limit=limit, before=before, kind=kind)


@router.get(ENDPOINTS + "/{name}/figures")
def list_figures(name: Name, control: RequestControl) -> FigureList:
    """The figures of live acceptance and of canaries that there is data for, and why there are no others."""
    return endpoint_figures.list_figures(_watched(name, control))


@router.get(ENDPOINTS + "/{name}/figures/{figure}")
def read_figure(name: Name, figure: str, control: RequestControl) -> Figure:
    """One figure as a Vega-Lite specification with its values."""
    return endpoint_figures.figure_of(_watched(name, control), figure)


def _watched(name: str, control: Control) -> endpoint_figures.Watched:
    """What the figures of an endpoint are drawn from. Raises NotFound."""
    history = control.histories.read(name, limit=MAX_PAGE, kind="window")
    windows = [entry for entry in history.items if "tau" in entry.figures]
    changes = [entry for kind in endpoint_figures.CHANGES for entry in control.histories.read(name, kind=kind).items]
    return endpoint_figures.Watched(control.endpoints.get(name), control.endpoints.serving(name).serve.engine.kind,
                                    windows, changes)


@router.post(ENDPOINTS + "/{name}/promote", status_code=202, name="endpoint.promote")
def promote(name: Name, request: PromoteRequest, control: RequestControl) -> Endpoint:
    """Serve a measured drafter of a job, blue/green. A person's decision: the promotion policy is not applied."""
    job_id = request.job_id
    job, result = control.jobs.resolved(job_id), control.results.find(job_id, request.checkpoint)
    report = result.measured.report
    model = Path(job.target.model).name if Path(job.target.model).is_absolute() else job.target.model
    control.endpoints.create(name, job.target, job.endpoint_serve.model_copy(update={"endpoint": name}), model,
                             control.jobs.project_of(job_id), job.demand.num_replicas, reads=job.endpoint_rules)
    tau = sum(cell.tau for cell in report.cells) / len(report.cells)
    tree, family = report.cells[0].tree, result.measured.family
    if family in WITHOUT_DRAFTER:
        use = DrafterUse(setting=Setting(method="off" if tree is None else "ngram", tree=tree))
    else:
        drafter_dir = control.settings.job_dir(job_id) / result.drafter_dir  # an absolute path stays as it is
        use = DrafterUse(drafter_dir=str(drafter_dir), setting=Setting(tree=tree))
    control.endpoints.propose(name, job_id=job_id, checkpoint=report.checkpoint, use=use, speedup=report.speedup,
                              tau=tau, reason=f"promoted by hand from job {job_id}", actor="person")
    return _after(control, name)


@router.post(ENDPOINTS + "/{name}/rollback", status_code=202, name="endpoint.rollback")
def roll_back(name: Name, control: RequestControl,
              request: Annotated[RollbackRequest | None, Body()] = None) -> Endpoint:
    """Serve an earlier revision again, by default the one before."""
    control.endpoints.roll_back(name, request.revision if request is not None else None)
    return _after(control, name)


@router.post(ENDPOINTS + "/{name}/off", status_code=202, name="endpoint.off")
def off(name: Name, control: RequestControl) -> Endpoint:
    """End its engine. Name, URL and history stay."""
    control.endpoints.set_desired(name, "off")
    return _after(control, name)


@router.post(ENDPOINTS + "/{name}/on", status_code=202, name="endpoint.on")
def on(name: Name, control: RequestControl) -> Endpoint:
    """Serve again what was active."""
    control.endpoints.set_desired(name, "on")
    return _after(control, name)


@router.post(ENDPOINTS + "/{name}/compare", name="endpoint.compare",
             responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}})
async def compare_answers(name: Name, request: CompareRequest, control: RequestControl) -> Response:
    """Answer a prompt with and without the drafter, one after the other: server-sent events `progress` (new rounds with
    their draft trees, tokens/s, tau), `recorded` (what the proof recorded in place of SGLang's answer without the
    drafter), `unavailable`, `failed` and, last, `end` (whether both answers are equal)."""
    served = await to_thread.run_sync(_comparable, control, name)
    return StreamingResponse(compare(served, request), media_type="text/event-stream",
                             headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})


@router.get(ENDPOINTS + "/{name}/recorded-prompts")
def recorded_prompts(name: Name, control: RequestControl) -> RecordedPrompts:
    """Prompts whose answers without the drafter the proof recorded, for comparisons where SGLang serves."""
    recording = read_recording(control, control.endpoints.get(name))
    return RecordedPrompts(job_id=None) if recording is None else RecordedPrompts(
        job_id=recording.job_id, prompts=tuple(answer.prompt for answer in recording.answers))


def _comparable(control: Control, name: str) -> ServedEndpoint:
    engine = control.endpoints.serving(name, "endpoints:write").serve.engine.kind
    endpoint = control.endpoints.get(name)
    if endpoint.desired == "off" or endpoint.url is None:
        state = "is off" if endpoint.desired == "off" else "does not serve yet"
        raise Conflict(f"endpoint {name!r} {state}", f"eyrie endpoints on {name}" if endpoint.desired == "off" else
                       "eyrie endpoints shows its conditions")
    return ServedEndpoint(
        endpoint.url, endpoint.model, engine, live_revision(endpoint, drafts=True),
        live_revision(endpoint, drafts=False), {rev.number: rev.url for rev in endpoint.revisions if rev.url},
        read_recording(control, endpoint))


def _after(control: Control, name: str) -> Endpoint:
    control.wake()
    return control.endpoints.get(name)
