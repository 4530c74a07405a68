"""Every route of the server is walked by the admin of one project with the ids of another's: none of it is there.

The table below has an entry for each route. A route without one fails the first test, so that a new route is thought
about before it can show one project what another does.
"""

import re
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from eyrie_api.contract.access import AuditEntry
from eyrie_api.database.engine import Database
from eyrie_api.http.middleware import MUTATING
from eyrie_api.http.server import create_app
from eyrie_api.settings import Settings
from tests.api.access.harness import (
    ENDPOINTS,
    JOBS,
    KEYS,
    PROJECTS,
    TOKEN,
    WEBHOOKS,
    Harness,
    as_admin_of,
    two_projects,
)
from tests.api.samples import ended, job_body

DATABASES = ("sqlite",)  # what a statement is on PostgreSQL, `test_scopes` asks

Kind = Literal[
    "one",           # names a thing by its id: another's is answered with 404
    "many",          # lists: nothing of another's is in it
    "made",          # makes something, in one's own project
    "installation",  # of the whole installation: 403 to whoever is not its administrator
    "nobody's",      # holds nothing of any project
]
OPEN = ("/healthz", "/readyz", "/console/static/{file}")
SIGN_IN = ("/console/oidc/start", "/console/oidc/callback")
"""Open too; there is no issuer here, and no such page."""

CHANGING_NOTHING = ("/v1alpha1/plans", "/console/sign-in", "/console/sign-out", ENDPOINTS + "/{name}/compare")
ROUTES: dict[tuple[str, str], tuple[Kind, Any]] = {
    ("GET", "/openapi.json"): ("nobody's", None),
    ("GET", "/docs"): ("nobody's", None),
    ("GET", "/"): ("many", None),
    ("GET", "/console/live"): ("many", None),
    ("GET", "/console/jobs/{job_id}"): ("one", None),
    ("GET", "/console/jobs/{job_id}/live"): ("one", None),
    ("GET", "/console/jobs/{job_id}/again"): ("one", None),
    ("GET", "/console/jobs/{job_id}/plan"): ("one", None),
    ("GET", "/console/jobs/{job_id}/diff"): ("one", None),
    ("GET", "/console/new"): ("nobody's", None),
    ("GET", "/console/endpoints/{name}"): ("one", None),
    ("GET", "/console/endpoints/{name}/live"): ("one", None),
    ("GET", "/console/endpoints/{name}/compare"): ("one", None),
    ("GET", "/console/curves"): ("one", None),
    ("GET", "/console/admin"): ("many", None),
    ("GET", "/console/admin/projects/{project}"): ("one", None),
    ("GET", "/console/admin/audit"): ("many", None),
    ("GET", "/console/static/{file}"): ("nobody's", None),
    ("POST", "/console/sign-in"): ("nobody's", None),
    ("GET", "/console/sign-out"): ("nobody's", None),
    ("POST", "/console/sign-out"): ("nobody's", None),
    ("GET", "/console/oidc/start"): ("nobody's", None),
    ("GET", "/console/oidc/callback"): ("nobody's", None),
    ("GET", "/healthz"): ("nobody's", None),
    ("GET", "/readyz"): ("nobody's", None),
    ("GET", "/version"): ("nobody's", None),
    ("GET", "/metrics"): ("installation", None),
    ("GET", "/v1alpha1/whoami"): ("many", None),
    ("POST", JOBS): ("made", job_body()),
    ("GET", JOBS): ("many", None),
    ("GET", "/v1alpha1/waiting"): ("many", None),
    ("GET", "/v1alpha1/alerts"): ("many", None),
    ("GET", JOBS + "/{job_id}"): ("one", None),
    ("GET", JOBS + "/{job_id}/submitted"): ("one", None),
    ("GET", JOBS + "/{job_id}/plan"): ("one", None),
    ("GET", JOBS + "/{job_id}/plan/actual"): ("one", None),
    ("POST", JOBS + "/{job_id}/cancel"): ("one", None),
    ("POST", JOBS + "/{job_id}/retry"): ("one", None),
    ("DELETE", JOBS + "/{job_id}"): ("one", None),
    ("GET", JOBS + "/{job_id}/events"): ("one", None),
    ("GET", JOBS + "/{job_id}/metrics"): ("one", None),
    ("GET", JOBS + "/{job_id}/curves"): ("one", None),
    ("GET", JOBS + "/{job_id}/logs"): ("one", None),
    ("GET", JOBS + "/{job_id}/artifacts"): ("one", None),
    ("GET", JOBS + "/{job_id}/artifacts/{stage}/{path:path}"): ("one", None),
    ("GET", JOBS + "/{job_id}/report"): ("one", None),
    ("GET", JOBS + "/{job_id}/figures"): ("one", None),
    ("GET", JOBS + "/{job_id}/figures/{figure}"): ("one", None),
    ("POST", "/v1alpha1/plans"): ("nobody's", job_body()),
    ("GET", "/v1alpha1/leaderboard"): ("many", None),
    ("GET", "/v1alpha1/storage"): ("many", None),
    ("GET", ENDPOINTS): ("many", None),
    ("GET", "/v1alpha1/traffic"): ("many", None),
    ("GET", ENDPOINTS + "/{name}"): ("one", None),
    ("GET", ENDPOINTS + "/{name}/history"): ("one", None),
    ("GET", ENDPOINTS + "/{name}/figures"): ("one", None),
    ("GET", ENDPOINTS + "/{name}/figures/{figure}"): ("one", None),
    ("GET", ENDPOINTS + "/{name}/recorded-prompts"): ("one", None),
    ("POST", ENDPOINTS + "/{name}/promote"): ("one", {"job_id": "{job_id}"}),
    ("POST", ENDPOINTS + "/{name}/rollback"): ("one", None),
    ("POST", ENDPOINTS + "/{name}/off"): ("one", None),
    ("POST", ENDPOINTS + "/{name}/on"): ("one", None),
    ("POST", ENDPOINTS + "/{name}/compare"): ("one", {"prompt": "hello"}),
    ("POST", KEYS): ("made", {"name": "another"}),
    ("GET", KEYS): ("many", None),
    ("POST", KEYS + "/{key_id}/revoke"): ("one", None),
    ("POST", KEYS + "/{key_id}/rotate"): ("one", None),
    ("POST", PROJECTS): ("installation", {"name": "gamma"}),
    ("GET", PROJECTS): ("many", None),
    ("GET", PROJECTS + "/{project}"): ("one", None),
    ("PUT", PROJECTS + "/{project}/quotas"): ("one", {"max_jobs": 1}),
    ("GET", PROJECTS + "/{project}/members"): ("one", None),
    ("POST", PROJECTS + "/{project}/members"): ("one", {"kind": "group", "value": "x", "role": "admin",
                                                        "issuer": "https://issuer.example"}),
    ("DELETE", PROJECTS + "/{project}/members/{member_id}"): ("one", None),
    ("GET", "/v1alpha1/audit"): ("many", None),
    ("POST", WEBHOOKS): ("made", {"url": "http://127.0.0.1:9/made"}),
    ("GET", WEBHOOKS): ("many", None),
    ("DELETE", WEBHOOKS + "/{webhook_id}"): ("one", None),
    ("GET", WEBHOOKS + "/{webhook_id}/deliveries"): ("one", None),
    ("POST", WEBHOOKS + "/{webhook_id}/ping"): ("one", None),
    ("POST", WEBHOOKS + "/{webhook_id}/rotate"): ("one", None),
}


@pytest.fixture
def harness(settings: Settings, database: Database) -> Iterator[Harness]:
    with two_projects(settings, database) as made:
        yield made


def of_kind(*kinds: Kind) -> list[tuple[str, str, Any]]:
    return [(method, path, body) for (method, path), (kind, body) in ROUTES.items() if kind in kinds]


def filled(path: str, ids: dict[str, str]) -> str:
    """The path with its parameters, and the query that some routes need."""
    values = {"file": "console.css", "figure": "acceptance" if path.startswith(ENDPOINTS) else "throughput"} | ids
    made = re.sub(r"{(\w+)(?::path)?}", lambda found: values[found[1]], path)
    if path.endswith("/logs"):
        made += f"?stage=benchmark&key={ids['key']}"
    if "/artifacts/" in path:
        made += f"?key={ids['key']}"
    if path == "/console/curves":
        made += f"?job={ids['job_id']}"
    if path.endswith("/events"):
        made += "?limit=10"
    return made


def body_of(body: Any, ids: dict[str, str]) -> Any:
    return {key: ids[value[1:-1]] if isinstance(value, str) and value.startswith("{") else value
            for key, value in body.items()} if isinstance(body, dict) else body


NEVER = {"job_id": "job-never", "name": "never", "key_id": "000000000000", "project": "never", "member_id": "4711",
         "stage": "benchmark", "path": "never", "key": "never", "webhook_id": "whk_never"}


def words(answer: Any, ids: dict[str, str]) -> str:
    """What was said, but for the ids that were asked for."""
    problem = answer.json() | {"instance": None}
    result = "|".join(ids[name] for name in ("job_id", "name", "key_id", "project", "member_id", "webhook_id"))
    return re.sub(result, "-", f"{answer.status_code} {problem}")


def test_every_route_of_the_server_is_in_the_table(settings: Settings, database: Database) -> None:
    routes = create_app(settings, database=database).state.routes
    served = {(method, route.path) for route in routes for method in route.methods - {"HEAD"}}
    assert served == set(ROUTES)


def test_what_is_anothers_is_not_there_to_be_read_or_changed(harness: Harness) -> None:
    for method, path, body in of_kind("one"):
        asked = filled(path, harness.a.ids)
        for headers in ({}, {"Eyrie-Project": "south"}, {"Eyrie-Project": "north"}):
            answer = harness.ask(harness.b.secret, method, asked, json=body_of(body, harness.a.ids), headers=headers)
            assert answer.status_code == 404, f"{method} {path} {headers}: {answer.text}"
            never = harness.ask(harness.b.secret, method, filled(path, NEVER), json=body_of(body, NEVER),
                                headers={name: value.replace("north", "never") for name, value in headers.items()})
            assert words(answer, harness.a.ids) == words(never, NEVER), "hidden and missing differ"


def test_one_s_own_is_there_by_the_same_requests(harness: Harness) -> None:
    for method, path, _body in of_kind("one"):
        if method == "GET":
            asked = filled(path, harness.b.ids)
            answer = harness.ask(harness.b.secret, method, asked, headers={"Accept": "application/json"})
            assert answer.status_code == 200, f"{method} {path}: {answer.text}"


def test_lists_hold_one_s_own_and_nothing_of_anothers(harness: Harness) -> None:
    foreign = {"north", *(harness.a.ids[name] for name in ("job_id", "name", "key_id", "webhook_id"))}
    for method, path, _body in of_kind("many"):
        for headers in ({}, {"Eyrie-Project": "south"}):
            text = harness.ask(harness.b.secret, method, path, headers=headers).text
            assert "south" in text or harness.b.ids["job_id"] in text, f"{path} shows nothing of one's own: {text}"
            assert not [one for one in foreign if one in text], f"{path} shows another's: {text}"
        assert harness.ask(harness.b.secret, method, path, headers={"Eyrie-Project": "north"}).status_code == 404
        assert harness.ask(harness.b.secret, method, path + "?project=north").status_code == 404


def test_the_installation_is_not_for_a_projects_admin(harness: Harness) -> None:
    for method, path, body in of_kind("installation"):
        assert harness.ask(harness.b.secret, method, path, json=body).status_code == 403, path
        assert harness.ask(TOKEN, method, path, json=body).status_code in (200, 201), path


def test_prometheus_needs_a_key_of_every_project_that_reads_jobs_and_endpoints(harness: Harness) -> None:
    def status(**key: object) -> int:
        made = harness.ask(TOKEN, "POST", KEYS, json={"name": "prometheus", "role": "viewer"} | key).json()
        return harness.ask(made["secret"], "GET", "/metrics").status_code

    assert status(everywhere=True, scopes=["jobs:read", "endpoints:read"]) == 200
    assert status(everywhere=True, scopes=["jobs:read"]) == 403
    assert status() == 403


def test_without_a_token_or_with_a_wrong_one_only_the_probes_answer(harness: Harness) -> None:
    for (method, path), (_kind, body) in ROUTES.items():
        for secret in ("x", harness.b.secret + "x", "eyk_nobody"):
            answer = harness.ask(secret, method, filled(path, harness.a.ids), json=body_of(body, harness.a.ids))
            expected = 200 if path in OPEN else 404 if path in SIGN_IN else 401
            assert answer.status_code == expected, f"{method} {path}"


def test_what_is_made_is_made_in_one_s_own_project(harness: Harness) -> None:
    for _method, path, body in of_kind("made"):
        made = harness.ask(harness.b.secret, "POST", path, json=body)
        assert made.status_code in (201, 202), made.text
        response = harness.ask(harness.b.secret, "POST", path, json=body, headers={"Eyrie-Project": "north"})
        assert response.status_code == 404
    theirs = as_admin_of(harness.server.control, "north")
    assert [job.id for job in theirs.jobs.list().items] == [harness.a.ids["job_id"]]
    assert [key.id for key in theirs.keys.list()] == [harness.a.ids["key_id"]]


def test_a_drafter_does_not_cross_from_one_project_to_anothers_endpoint(harness: Harness) -> None:
    pairs = ((harness.a.ids["name"], harness.b.ids["job_id"]), (harness.b.ids["name"], harness.a.ids["job_id"]))
    for name, job in pairs:
        path = f"{ENDPOINTS}/{name}/promote"
        assert harness.ask(harness.b.secret, "POST", path, json={"job_id": job}).status_code == 404
        assert harness.ask(TOKEN, "POST", path, json={"job_id": job}).status_code == 409, "not even the administrator"
    body = job_body(serve={"endpoint": harness.a.ids["name"]})
    taken = harness.ask(harness.b.secret, "POST", JOBS, json=body)
    assert taken.status_code == 409, "said before the training, not after it"
    assert "belongs to another project" in taken.text


def test_every_change_and_every_refused_one_is_in_the_audit(harness: Harness) -> None:
    control = harness.server.control
    verbs = {(method, route.path): route.name for route in create_app(control.settings, database=control.database
                                                                      ).state.routes for method in route.methods}
    mutating = [(method, path, kind, body, verbs[method, path]) for (method, path), (kind, body) in ROUTES.items()
                if method in MUTATING and path not in CHANGING_NOTHING]
    for method, path, kind, body, verb in mutating:
        headers = {"X-Request-Id": f"refused-{verb}"} | ({"Eyrie-Project": "north"} if kind == "made" else {})
        refused = harness.ask(harness.b.secret, method, filled(path, harness.a.ids), json=body_of(body, harness.a.ids),
                              headers=headers)
        assert refused.status_code == (403 if kind == "installation" else 404)
        assert refused.headers["x-request-id"] == f"refused-{verb}"
    for method, path, _kind, body, verb in mutating:
        ids = harness.b.ids | fresh_ids(harness, verb)
        done = harness.ask(TOKEN, method, filled(path, ids), json=body_of(body, ids),
                           headers={"X-Request-Id": f"done-{verb}"})
        assert done.status_code < 300, f"{method} {path}: {done.text}"
    result = {(one.request_id, one.verb, one.actor, one.outcome.partition(":")[0]) for one in audited(harness)}
    for *_rest, verb in mutating:
        assert (f"done-{verb}", verb, "token", "done") in result
        assert (f"refused-{verb}", verb, f"key:{harness.b.ids['key_id']}", "refused") in result


def fresh_ids(harness: Harness, verb: str) -> dict[str, str]:
    """Ids of what the verb can be done to, once."""
    south = {"Eyrie-Project": "south"}
    if verb in ("job.cancel", "job.retry", "job.delete"):
        job_id = str(harness.ask(TOKEN, "POST", JOBS, json=job_body(), headers=south).json()["id"])
        if verb == "job.retry":
            harness.server.control.jobs.save_status(job_id, ended("Failed"))
        return {"job_id": job_id}
    if verb == "webhook.delete":
        made = harness.ask(TOKEN, "POST", WEBHOOKS, json={"url": "http://127.0.0.1:9/x"}, headers=south).json()
        return {"webhook_id": made["webhook"]["id"]}
    if verb in ("key.revoke", "key.rotate"):
        return {"key_id": harness.ask(TOKEN, "POST", KEYS, json={"name": "x"}, headers=south).json()["key"]["id"]}
    return {}


def audited(harness: Harness) -> list[AuditEntry]:
    """Every entry, page by page."""
    entries: list[AuditEntry] = []
    before: int | None = None
    while True:
        page = harness.server.control.audit.read(before=before, limit=7)
        entries += page.items
        before = page.next_before
        if before is None:
            return entries
