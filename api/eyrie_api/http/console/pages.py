"""Pages of the console: home, a job, an endpoint, and the document of a new job. Others are modules beside this one.

They call the functions that the REST routes call and show nothing else. A page is whole without script; with it the
live part follows a stream (`console.live`), curves are drawn (uPlot), and so are figures (Vega-Lite with the expression
interpreter, loaded by a page that has figures). The libraries are the unchanged files of
their npm packages (`static/LICENSES.md`). Each action is a button that calls the public REST
route, next to the `eyrie` and the `curl` line that does the same.

Where requests need a token, a page asks for an API key and exchanges it for a cookie, or sends the
browser to the OIDC issuer and gives a cookie to whoever comes back (`access.browser_sign_in`). It reads; for a change,
script sends the token in the page's text with it, and with both it may do what the key or the person may.

Strict Content-Security-Policy: script, style and data from this server alone, nothing inline.
"""

import json
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode, urlsplit

from fastapi import APIRouter, Query, Request
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response

from eyrie_api.access.browser_sign_in import COOKIE, LIFETIME_S, PENDING_COOKIE, PENDING_S, BrowserSignIn, local_path
from eyrie_api.access.oidc import IssuerUnavailable
from eyrie_api.access.roles import ALL_PROJECTS
from eyrie_api.clock import utc_now
from eyrie_api.database.jobs import JobFilter
from eyrie_api.database.rendering import decode_cursor
from eyrie_api.database.results import ResultFilter
from eyrie_api.decisions.attention import drift_hint
from eyrie_api.decisions.endpoint_traffic import KINDS, traffic_of
from eyrie_api.decisions.hardware_choice import sentence
from eyrie_api.decisions.job_report import report_of
from eyrie_api.decisions.sweep import axes_words
from eyrie_api.errors import EyrieError, NotFound, Unauthorized
from eyrie_api.http.authentication import LOCAL
from eyrie_api.http.console.job_details import by_stage
from eyrie_api.http.console.job_form import job_form, with_code
from eyrie_api.http.console.stage_tables import stage_tables
from eyrie_api.http.control import Control, Here
from eyrie_api.http.routes.attention import NEWEST_JOBS, attention_now
from eyrie_api.http.routes.endpoints import list_figures
from eyrie_api.http.routes.outcomes import LeaderboardQuery, files_of, times_left
from eyrie_api.quantities import duration, size
from eyrie_api.v1alpha1.access import Action
from eyrie_api.v1alpha1.endpoints import History
from eyrie_api.v1alpha1.stages import JOB_STAGES, STAGES
from eyrie_api.v1alpha1.status import Job, Problem, StageStatus

router = APIRouter(tags=["console"], include_in_schema=False)

HERE = Path(__file__).parent
STATIC_PATH, SIGN_IN, SIGN_OUT = "/console/static/", "/console/sign-in", "/console/sign-out"
SIGN_IN_START, SIGN_IN_END = "/console/oidc/start", "/console/oidc/callback"
STATIC = {"console.css": "text/css", "console.js": "text/javascript",
          "uplot.min.js": "text/javascript", "uplot.min.css": "text/css", "vega.min.js": "text/javascript",
          "vega-lite.min.js": "text/javascript", "vega-interpreter.min.js": "text/javascript",
          "compare.js": "text/javascript", "compare.css": "text/css", "form.js": "text/javascript",
           "form.css": "text/css", "admin.js": "text/javascript", "admin.css": "text/css",
           "report.css": "text/css", "curves.js": "text/javascript", "curves.css": "text/css",
           "job.js": "text/javascript", "job.css": "text/css"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
                               "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "same-origin", "Cache-Control": "no-store"}
_EVENTS, _HISTORY = 100, 60
_FIRST_JOB = {"name": "first", "target": {"model": "quickstart"}, "data": {"sources": [{"path": "quickstart"}]},
              "serve": {"endpoint": "default"}}
"""The shipped target and data: it needs nothing else."""
ENDED = ("Succeeded", "Failed", "Cancelled")


def _figure(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


_ENVIRONMENT = Environment(loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined,
                           trim_blocks=True, lstrip_blocks=True)
_ENVIRONMENT.filters |= {"duration": duration, "size": size, "figure": _figure, "with_code": with_code,
                         "shell": shlex.quote, "axes_words": axes_words}


Before = Annotated[str | None, Query(max_length=512, description="next_cursor of `GET /v1alpha1/jobs`")]


@router.get("/", response_class=HTMLResponse)
def home(control: Here, request: Request, before: Before = None) -> Response:
    """Endpoints, one page of jobs, and what needs a person."""
    return render_page("home.html", control, request, **home_values(control, before))


def home_values(control: Control, before: str | None) -> dict[str, Any]:
    """What its template shows: of jobs the newest, or those before a cursor. Raises InvalidInput."""
    before_time = None if before is None else decode_cursor(before)[0]
    endpoints, newest = control.endpoints.list().items, control.jobs.list(limit=NEWEST_JOBS)
    listed = newest if before is None else control.jobs.list(limit=NEWEST_JOBS, cursor=before)
    traffic = traffic_of(endpoints, control.histories.latest_of_all(KINDS))
    return {"endpoints": list(zip(endpoints, traffic, strict=True)), "jobs": listed.items,
            "before": before_time, "live": home_address("/console/live", before),
            "older": None if listed.next_cursor is None else home_address("/", listed.next_cursor),
            "attention": attention_now(control, newest.items, endpoints, traffic).items,
            "left": times_left(control, listed.items), "now": datetime.now(UTC)}


def home_address(path: str, before: str | None) -> str:
    """Of home or its stream, for one page of jobs."""
    return path if before is None else f"{path}?{urlencode({'before': before})}"


@router.get("/console/jobs/{job_id}", response_class=HTMLResponse)
def job(job_id: str, control: Here, request: Request, selected: Annotated[LeaderboardQuery, Query()]) -> Response:
    """One job: its pipeline, decision, leaderboard, operating map, proof, curves, events, artifacts and document.

    A name, which is what the command line takes, leads to the newest job that has it.
    """
    try:
        values = job_values(control, job_id, server_of(request), selected)
    except NotFound:
        named = control.jobs.list(JobFilter(name=job_id), limit=1).items
        if not named:
            raise
        return RedirectResponse(f"/console/jobs/{named[0].id}")
    return may_submit(render_page("job.html", control, request, submitted=control.jobs.submitted(job_id), **values,
                                  **_artifacts(values["job"], control)))


def _artifacts(job: Job, control: Control) -> dict[str, Any]:
    """Files and reports by stage, or why they cannot be read: the rest of the page does not need them."""
    try:
        found = control.files.manifests(job.id)
    except EyrieError as error:
        return {"files": (), "tables": (), "unlisted": error}
    return {"files": by_stage(files_of(job.id, found).items), "tables": stage_tables(report_of(job, found, ())),
            "unlisted": None}


def job_values(control: Control, job_id: str, server: str, selected: LeaderboardQuery) -> dict[str, Any]:
    """What its templates show. Raises NotFound."""
    found = control.jobs.get(job_id)
    entries = control.results.leaderboard(ResultFilter(job_id=job_id))
    # The reports are files: they are read once there is one to show.
    is_tuned = any((one.stage, one.state) == ("tune", "Succeeded") for one in found.status.stages)
    measured = report_of(found, control.files.manifests(job_id), entries) if is_tuned else None
    project = control.jobs.project_of(job_id)
    return {"job": found, "pipeline": pipeline(found), "board": selected.board(control, job_id), "selected": selected,
            "leaderboard": entries, "measured": measured, "left": times_left(control, (found,)).get(job_id),
            "choices": [] if measured is None or measured.hardware is None else [
                sentence(choice, measured.hardware) for choice in measured.hardware.choices],
            "events": control.jobs.events(job_id, limit=_EVENTS), "now": datetime.now(UTC), "ended": ENDED,
            "may_work": may(control, "jobs:write", project), "may_serve": may(control, "endpoints:write", project),
            "server": server}


@router.get("/console/new", response_class=HTMLResponse)
def new_job(control: Here, request: Request) -> Response:
    """A document to begin with, as a form and as JSON, and what the server says of it while it is written."""
    return _job_form(control, request, None, _FIRST_JOB)


@router.get("/console/jobs/{job_id}/again", response_class=HTMLResponse)
def again(job_id: str, control: Here, request: Request) -> Response:
    """The same with the document of a job, as far as it differs from the defaults: jobs are stored with all of them."""
    spec = control.jobs.get(job_id).spec
    return _job_form(control, request, spec.name or job_id, spec.model_dump(mode="json", exclude_defaults=True))


def _job_form(control: Control, request: Request, source: str | None, document: Mapping[str, Any]) -> Response:
    principal = control.scope.principal
    # In which project is known with the request that starts the job: here, whether there is one.
    may_start = principal is None or principal.model_copy(update={"scopes": None}).readable("jobs:write") != frozenset()
    return render_page("new_job.html", control, request, source=source, form=job_form(), may_start=may_start,
                       server=server_of(request), document=json.dumps(document, indent=2))


@router.get("/console/endpoints/{name}", response_class=HTMLResponse)
def endpoint(name: str, control: Here, request: Request) -> Response:
    """One endpoint: what serves, its revisions, its acceptance, its history."""
    return render_page("endpoint.html", control, request, **endpoint_values(control, name, server_of(request)))


def endpoint_values(control: Control, name: str, server: str) -> dict[str, Any]:
    """What its templates show. Raises NotFound."""
    found = control.endpoints.get(name)
    latest = filter(None, (control.histories.latest(name, kind) for kind in KINDS))
    return {"endpoint": found, "traffic": traffic_of((found,), latest)[0], "server": server, "drift_hint": drift_hint,
            "may_serve": may(control, "endpoints:write", control.endpoints.project_of(name)),
            "figures": list_figures(name, control), "history": _recent(control.histories.read(name, limit=_HISTORY))}


def server_of(request: Request) -> str:
    """This server's address, as the caller named it."""
    return str(request.base_url).rstrip("/")


def rendered(template: str, values: Mapping[str, Any]) -> str:
    """A template by itself."""
    return _ENVIRONMENT.get_template(template).render(**values)


@router.get("/console/static/{file}", response_class=FileResponse)
def static(file: str) -> Response:
    """A script or a style of the pages."""
    if file not in STATIC:
        raise NotFound(f"no file {file!r} of the console", "load the page again")
    return FileResponse(HERE / "static" / file, media_type=STATIC[file], headers={"Cache-Control": "max-age=300"})


@router.post(SIGN_IN, status_code=204)
def sign_in(control: Here, request: Request) -> Response:
    """Exchange the request's API key for a cookie."""
    assert control.scope.principal is not None, "a request without a caller reached a route"
    cookie = request.app.state.authenticator.session_for(control.scope.principal)
    answer = Response(status_code=204)
    if cookie is not None:
        answer.headers.append("set-cookie", set_cookie(cookie, request.headers, request.url.scheme).decode())
    return answer


@router.get(SIGN_IN_START)
def start_sign_in(request: Request, to: str = "/") -> Response:
    """Send the browser to the issuer, and back to the page `to`."""
    url, pending = _sign_in(request).start(_redirect_uri(request), to, utc_now().timestamp())
    answer = RedirectResponse(url, status_code=303, headers={"Cache-Control": "no-store"})
    # Lax: it must come along when the issuer sends the browser back.
    answer.set_cookie(PENDING_COOKIE, pending, max_age=PENDING_S, path=SIGN_IN_END, httponly=True, samesite="lax",
                      secure=_is_https(request.headers, request.url.scheme))
    return answer


@router.get(SIGN_IN_END, response_class=HTMLResponse)
def end_sign_in(request: Request, code: str = "", state: str = "", error: str = "") -> Response:
    """The issuer sent the browser back, with a code that is exchanged for the user's identity."""
    sign_in = _sign_in(request)
    pending, now_s = request.cookies.get(PENDING_COOKIE, ""), utc_now().timestamp()
    try:
        if error:
            raise Unauthorized(f"the issuer refused: {error[:60]}", "sign in again, or ask its administrator")
        claims, to = sign_in.finish(pending, _redirect_uri(request), code, state, now_s)
        cookie = sign_in.session_of(claims, now_s)
    except (Unauthorized, IssuerUnavailable) as refused:
        answer = sign_in_page(sign_in.issuer.url, problem=f"{refused.message}; {refused.hint}")
    else:
        # A page, not a redirect: the way here began at another site, and along it browsers send no strict cookie.
        page = _ENVIRONMENT.get_template("signed_in.html").render(who=None, change="", administers=False, to=to)
        answer = HTMLResponse(page, headers=_HEADERS)
        answer.headers.append("set-cookie", set_cookie(cookie, request.headers, request.url.scheme).decode())
    answer.delete_cookie(PENDING_COOKIE, path=SIGN_IN_END, httponly=True, samesite="lax")
    return answer


def _sign_in(request: Request) -> BrowserSignIn:
    found: BrowserSignIn | None = request.app.state.authenticator.sign_in
    if found is None:
        raise NotFound("people do not sign in at an issuer here",
                       "sign in with an API key, or set EYRIE_OIDC_CLIENT_ID")
    return found


def _redirect_uri(request: Request) -> str:
    """As it is registered at the issuer, which refuses any other, of a forged Host too."""
    scheme = "https" if _is_https(request.headers, request.url.scheme) else "http"
    return f"{scheme}://{request.url.netloc}{SIGN_IN_END}"


@router.get(SIGN_OUT, response_class=HTMLResponse)
def ask_to_sign_out(control: Here, request: Request, to: str = "/") -> Response:
    """A button that signs out and goes to the page `to`: a page that a refusal rendered has no token for a change. The
    button needs script, as all changes do."""
    return render_page("sign_out.html", control, request, to=local_path(to))


@router.post(SIGN_OUT, status_code=204)
def sign_out() -> Response:
    """Drop the cookie."""
    answer = Response(status_code=204)
    answer.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
    return answer


def set_cookie(cookie: str, headers: Mapping[str, str], scheme: str) -> bytes:
    """The value of a Set-Cookie header; Secure where the browser's connection is."""
    secure = "; Secure" if _is_https(headers, scheme) else ""
    return f"{COOKIE}={cookie}; Path=/; Max-Age={LIFETIME_S}; HttpOnly; SameSite=Strict{secure}".encode()


def _is_https(headers: Mapping[str, str], scheme: str) -> bool:
    """Whether the browser's connection is encrypted: up to here, or up to a proxy."""
    return "https" in (scheme, headers.get("x-forwarded-proto"))


def is_asked_for(method: str, headers: Mapping[str, str], path: str) -> bool:
    """Whether a request is a browser's for a page."""
    is_page = path == "/" or path.startswith("/console/")
    return method == "GET" and is_page and "text/html" in headers.get("accept", "")


def for_a_browser(request: Request, answer: Response) -> Response:
    """The answer, a problem, as a page where a browser asked for one, with its status and headers."""
    if not is_asked_for(request.method, request.headers, request.url.path):
        return answer
    problem = Problem.model_validate_json(bytes(answer.body))
    page = HTMLResponse(rendered("refused.html", {
        "who": None, "change": "", "administers": False, "problem": problem,
        "is_signed_in": COOKIE in request.cookies}), status_code=answer.status_code, headers=_HEADERS)
    kept = {name: value for name, value in answer.headers.items() if name in ("retry-after", "allow")}
    page.headers.update(kept)
    return page


def sign_in_page(issuer: str | None, to: str = "/", problem: str = "") -> HTMLResponse:
    """The page that asks for an API key, and leads to the issuer where people sign in there."""
    page = _ENVIRONMENT.get_template("sign_in.html").render(
        who=None, change="", administers=False, problem=problem,
        issuer=issuer and (urlsplit(issuer).hostname or issuer), start=f"{SIGN_IN_START}?{urlencode({'to': to})}")
    return HTMLResponse(page, status_code=401, headers=_HEADERS)


def render_page(template: str, control: Control, request: Request, **values: Any) -> HTMLResponse:
    principal = control.scope.principal
    who = None if principal is None or principal == LOCAL else principal.subject
    change = "" if principal is None else request.app.state.authenticator.change_token_for(principal)
    given = {"who": who, "change": change, "administers": principal is None or "admin" in principal.roles.values()}
    return HTMLResponse(rendered(template, given | values), headers=_HEADERS)


def may_submit(page: HTMLResponse) -> HTMLResponse:
    """The page with leave for its forms to lead to pages of this server."""
    policy = page.headers["Content-Security-Policy"]
    page.headers["Content-Security-Policy"] = policy.replace("form-action 'none'", "form-action 'self'")
    return page


def may(control: Control, action: Action, project: str | None) -> bool:
    """Whether the caller's role allows the action, for the buttons of a page. What a request may do is decided again
    when it arrives, by the credential it comes with."""
    principal = control.scope.principal
    # A cookie alone only reads; with the page's proof it may do what its role allows.
    return principal is None or principal.model_copy(update={"scopes": None}).allows(action, project or ALL_PROJECTS)


def _recent(history: History) -> History:
    """Newest first."""
    return history.model_copy(update={"items": history.items[::-1]})


def pipeline(job: Job) -> list[dict[str, Any]]:
    """The stages in order, each with its boxes (one per candidate or checkpoint) and the state of all of them. Pure."""
    found = []
    for stage in STAGES if job.spec.prove.hardware is not None else JOB_STAGES:
        boxes = [one for one in job.status.stages if one.stage == stage]
        found.append({"stage": stage, "boxes": boxes, "state": _state(boxes)})
    return found


def _state(boxes: list[StageStatus]) -> str:
    states = {box.state for box in boxes}
    for state in ("Failed", "Running", "Cancelled"):
        if state in states:
            return state
    return "Succeeded" if states and states <= {"Succeeded", "Skipped"} else "Pending"
