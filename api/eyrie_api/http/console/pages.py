"""Pages of the console: home, an endpoint, compared answers, curves of several jobs, signing in. Pages of one job, the
form of a new one and administration are modules beside this one.

They call the functions that the REST routes call and show nothing else. A page is whole without script; with it the
live part follows a stream, and figures and curves are drawn by Vega-Lite with the expression interpreter, loaded by a
page that has some. The libraries are the unchanged files of their npm packages (`static/LICENSES.md`). Each action is a
button that calls the public REST route, next to the `eyrie` and the `curl` line that does the same.

Where requests need a token, a page asks for an API key and exchanges it for a cookie, or sends the
browser to the OIDC issuer and gives a cookie to whoever comes back (`access.browser_sign_in`). It reads; for a change,
script sends the token in the page's text with it, and with both it may do what the key or the person may.

Strict Content-Security-Policy: script, style and data from this server alone, nothing inline.
"""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode, urlsplit

from fastapi import APIRouter, Query, Request
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response, StreamingResponse

from eyrie_api.access.browser_sign_in import COOKIE, LIFETIME_S, PENDING_COOKIE, PENDING_S, BrowserSignIn, local_path
from eyrie_api.access.oidc import IssuerUnavailable
from eyrie_api.access.roles import ALL_PROJECTS
from eyrie_api.clock import utc_now
from eyrie_api.contract.access import Action
from eyrie_api.contract.comparison import CompareRequest
from eyrie_api.contract.status import Problem
from eyrie_api.database.rendering import TIME_CURSOR, decode_cursor
from eyrie_api.decisions.alerts import drift_hint
from eyrie_api.errors import NotFound, Unauthorized
from eyrie_api.http.authentication import LOCAL
from eyrie_api.http.control import Control, RequestControl
from eyrie_api.http.live_pages import LivePages, PageKey, Rendered
from eyrie_api.http.routes.alerts import NEWEST_JOBS, alerts_now
from eyrie_api.http.routes.endpoints import list_figures, recorded_prompts
from eyrie_api.http.routes.outcomes import times_left
from eyrie_api.planning.sweep import axes_words
from eyrie_api.quantities import duration, size

router = APIRouter(tags=["console"], include_in_schema=False)

HERE = Path(__file__).parent
STATIC_PATH, SIGN_IN, SIGN_OUT = "/console/static/", "/console/sign-in", "/console/sign-out"
SIGN_IN_START, SIGN_IN_END = "/console/oidc/start", "/console/oidc/callback"
STATIC = {**dict.fromkeys(("console.css", "compare.css", "form.css", "admin.css", "curves.css", "job.css"), "text/css"),
          **dict.fromkeys(("console.js", "vega.min.js", "vega-lite.min.js", "vega-interpreter.min.js", "compare.js",
                           "form.js", "admin.js", "curves.js", "job.js"), "text/javascript")}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
                               "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "same-origin", "Cache-Control": "no-store"}
_HISTORY = 60
_MAX_CURVE_JOBS = 10  # each job's metrics are a request every few seconds
_LISTED = 50


def with_code(text: str) -> Markup:
    """A docstring as HTML: what is between backticks is code."""
    parts = re.split(r"`([^`]+)`", text)
    return Markup("").join(Markup("<code>{}</code>").format(part) if place % 2 else escape(part)
                           for place, part in enumerate(parts))


_ENVIRONMENT = Environment(loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined,
                           trim_blocks=True, lstrip_blocks=True)
_ENVIRONMENT.filters |= {"duration": duration, "size": size, "with_code": with_code, "shell": shlex.quote,
                         "figure": lambda value, digits=2: "" if value is None else f"{value:.{digits}f}",
                         "axes_words": axes_words}


Before = Annotated[str | None, Query(max_length=512, description="next_cursor of `GET /v1alpha1/jobs`")]


@router.get("/", response_class=HTMLResponse)
def home(control: RequestControl, request: Request, before: Before = None) -> Response:
    """Endpoints, one page of jobs, and what needs a person."""
    return render_page("home.html", control, request, **home_values(control, before))


def home_values(control: Control, before: str | None) -> dict[str, Any]:
    """What its template shows: of jobs the newest, or those before a cursor. Raises InvalidInput."""
    before_time = None if before is None else decode_cursor(before, TIME_CURSOR)[0]
    endpoints, newest = control.endpoints.list().items, control.jobs.list(limit=NEWEST_JOBS)
    listed = newest if before is None else control.jobs.list(limit=NEWEST_JOBS, cursor=before)
    traffic = control.traffic(endpoints)
    return {"endpoints": list(zip(endpoints, traffic, strict=True)), "jobs": listed.items,
            "before": before_time, "live": home_address("/console/live", before),
            "older": None if listed.next_cursor is None else home_address("/", listed.next_cursor),
            "attention": alerts_now(control, newest.items, endpoints, traffic).items,
            "left": times_left(control, listed.items), "now": datetime.now(UTC)}


@router.get("/console/live")
def home_stream(control: RequestControl, request: Request, before: Before = None) -> Response:
    """Home with one page of jobs, as it changes. Its readers share it, those of the newest jobs as those of older
    ones."""
    if before is not None:
        decode_cursor(before, TIME_CURSOR)
    return stream(control, request, lambda: Rendered(rendered("home_live.html", home_values(control, before))),
                  home_address(request.url.path, before))


def home_address(path: str, before: str | None) -> str:
    """Of home or its stream, for one page of jobs."""
    return path if before is None else f"{path}?{urlencode({'before': before})}"


@router.get("/console/endpoints/{name}", response_class=HTMLResponse)
def endpoint(name: str, control: RequestControl, request: Request) -> Response:
    """One endpoint: what serves, its revisions, its acceptance, its history."""
    return render_page("endpoint.html", control, request, **endpoint_values(control, name, server_of(request)))


def endpoint_values(control: Control, name: str, server: str) -> dict[str, Any]:
    """What its templates show. Raises NotFound."""
    endpoint = control.endpoints.get(name)
    history = control.histories.read(name, limit=_HISTORY)
    return {"endpoint": endpoint, "traffic": control.traffic((endpoint,))[0], "server": server,
            "drift_hint": drift_hint, "may_serve": may(control, "endpoints:write", control.endpoints.project_of(name)),
            "figures": list_figures(name, control),
            "history": history.model_copy(update={"items": history.items[::-1]})}  # newest first


@router.get("/console/endpoints/{name}/live")
def endpoint_stream(name: str, control: RequestControl, request: Request) -> Response:
    """An endpoint's page, as it changes."""
    control.endpoints.get(name)
    server = server_of(request)
    parts = ("endpoint_live.html", "endpoint_unmeasured.html", "endpoint_history.html", "endpoint_actions.html")

    def render() -> Rendered:
        values = endpoint_values(control, name, server)
        return Rendered("".join(rendered(part, values) for part in parts))

    return stream(control, request, render, request.url.path)


@router.get("/console/endpoints/{name}/compare", response_class=HTMLResponse)
def compare(name: str, control: RequestControl, request: Request) -> Response:
    """The form, or why there is none."""
    endpoint = control.endpoints.get(name)
    active = endpoint.revision(endpoint.active_revision)
    return render_page("compare.html", control, request, endpoint=endpoint, active=active,
                       engine=control.endpoints.serving(name).serve.engine.kind,
                       recorded=recorded_prompts(name, control),
                       default_tokens=CompareRequest.model_fields["max_tokens"].default,
                       may_compare=may(control, "endpoints:write", control.endpoints.project_of(name)))


@router.get("/console/curves", response_class=HTMLResponse)
def curves(control: RequestControl, request: Request,
           job: Annotated[list[str], Query(min_length=1, max_length=_MAX_CURVE_JOBS)]) -> Response:
    """Curves of the jobs, with links to add and remove one."""
    ids = tuple(dict.fromkeys(job))
    jobs = [control.jobs.get(job_id) for job_id in ids]
    others = control.jobs.list(limit=_LISTED).items if len(ids) < _MAX_CURVE_JOBS else ()
    return render_page(
        "curves.html", control, request, jobs=jobs,
        curve_jobs=[{"id": shown.id, "name": label, "ended": shown.status.finished_at is not None}
                    for shown, label in zip(jobs, labels([(each.id, each.spec.name) for each in jobs]), strict=True)],
        without={job_id: _address([other for other in ids if other != job_id]) for job_id in ids},
        others=[(other, _address([*ids, other.id])) for other in others if other.id not in ids])


def labels(jobs: Sequence[tuple[str, str | None]]) -> list[str]:
    """A job's name, with its id where another of them has the same name."""
    names = [name or job_id for job_id, name in jobs]
    return [f"{name} ({job_id})" if names.count(name) > 1 else name
            for name, (job_id, _) in zip(names, jobs, strict=True)]


def _address(ids: Sequence[str]) -> str:
    return f"/console/curves?{urlencode([('job', job_id) for job_id in ids])}"


def stream(control: Control, request: Request, render: Callable[[], Rendered], path: str,
           job_id: str | None = None) -> Response:
    """Server-sent events with the live part of a page whenever it has changed, rendered once for all readers with equal
    rights (`http.live_pages`).

    Each has the same HTML that the page was loaded with; `static/console.js` puts it in place of the elements with the
    same ids.
    """
    principal = control.scope.principal
    rights = "" if principal is None else repr((sorted(principal.roles.items()), principal.scopes
                                                and sorted(principal.scopes), control.scope.project))
    live: LivePages = request.app.state.live_pages
    key = PageKey(path, rights, server_of(request), job_id)
    return StreamingResponse(live.stream(key, render), media_type="text/event-stream",
                             headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})


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
def sign_in(control: RequestControl, request: Request) -> Response:
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
    sign_in: BrowserSignIn | None = request.app.state.authenticator.sign_in
    if sign_in is None:
        raise NotFound("people do not sign in at an issuer here",
                       "sign in with an API key, or set EYRIE_OIDC_CLIENT_ID")
    return sign_in


def _redirect_uri(request: Request) -> str:
    """As it is registered at the issuer, which refuses any other, of a forged Host too."""
    scheme = "https" if _is_https(request.headers, request.url.scheme) else "http"
    return f"{scheme}://{request.url.netloc}{SIGN_IN_END}"


@router.get(SIGN_OUT, response_class=HTMLResponse)
def ask_to_sign_out(control: RequestControl, request: Request, to: str = "/") -> Response:
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
    headers = {name: value for name, value in answer.headers.items() if name in ("retry-after", "allow")}
    page.headers.update(headers)
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
    common = {"who": who, "change": change, "administers": principal is None or "admin" in principal.roles.values(),
              "server": server_of(request)}
    return HTMLResponse(rendered(template, common | values), headers=_HEADERS)


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
