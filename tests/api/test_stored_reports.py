"""Reports that are pushed: kept once, listed newest first, shown with a policy that runs nothing of them."""

import concurrent.futures
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from eyrie_api.access.scope import Scope
from eyrie_api.cli.commands import app
from eyrie_api.client import Client
from eyrie_api.database.engine import Database
from eyrie_api.database.projects import ApiKeys, KeyRequest, Projects
from eyrie_api.database.stored_reports import StoredReports
from eyrie_api.errors import Forbidden, InvalidInput, NotFound
from eyrie_api.http.authentication import LOCAL
from eyrie_api.settings import Settings
from eyrie_api.v1alpha1.access import Action, CreateProject, Role
from eyrie_api.v1alpha1.stored_reports import MAX_PAGE_CHARACTERS, StoreReport
from tests.api.conftest import Running
from tests.api.samples import ManualClock, report_body

REPORTS = "/v1alpha1/reports"
TOKEN = "installation-token-of-this-test"
PAGE = ('<!doctype html><html lang="en"><head><meta name="eyrie-report" content="{kind}"><title>{title}</title></head>'
        '<body><main><h1>{title}</h1><div class="decision">\n<p>{found}</p>\n<p>And slower\n alone.</p></div>'
        '<div><p>Not a decision.</p></div></main></body></html>')


def report(title: str = "Which drafter", **changes: Any) -> StoreReport:
    return StoreReport.model_validate(report_body(title) | changes)


@pytest.fixture
def guarded(settings: Settings, database: Database, serve: Callable[..., Any]) -> Iterator[Running]:
    for name in ("team", "other"):
        Projects(database).create(CreateProject(name=name))
    with serve(settings.model_copy(update={"token": TOKEN}), database) as running:
        yield running


def key_of(database: Database, role: Role, project: str = "team", scopes: frozenset[Action] | None = None) -> str:
    keys = ApiKeys(database, scope=Scope(LOCAL, project))
    return keys.create(KeyRequest(name="k", role=role, scopes=scopes))[1]


def client_of(running: Running, *key: Any, **options: Any) -> Client:
    return Client(running.url, token=key_of(*key, **options))


def test_a_report_comes_back_as_it_was_pushed_and_is_kept_once(server: Running) -> None:
    wanted = report(report={"nested": {"rows": [1, 2.5, None, "\u00e9"]}}, page="<p>caf\u00e9 &amp; \U0001f600</p>")
    stored = server.client.store_report(wanted)
    again = httpx.post(server.url + REPORTS, json=wanted.model_dump(mode="json"))
    assert (again.status_code, again.json()["id"]) == (200, stored.id)
    assert again.headers["location"] == f"{REPORTS}/{stored.id}"
    found = server.client.stored_report(stored.id)
    assert found.report == wanted.report
    assert (found.title, found.decision, found.kind) == (wanted.title, wanted.decision, "comparison")
    assert server.client.report_page(stored.id) == wanted.page
    assert stored.size_bytes == len(json.dumps(wanted.report)) + len(wanted.page.encode())
    assert server.client.stored_reports().items == (stored,)
    server.client.delete_report(stored.id)
    assert server.client.stored_reports().items == ()
    with pytest.raises(NotFound):
        server.client.delete_report(stored.id)


def test_pushed_by_several_at_once_a_report_is_kept_once(server: Running) -> None:
    wanted = report("at once")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        ids = {stored.id for stored in pool.map(server.client.store_report, [wanted] * 8)}
    assert [one.id for one in server.client.stored_reports().items] == list(ids)
    verbs = [entry.verb for entry in server.control.audit.read().items]
    assert verbs == ["report.create"], "what changed nothing is not audited"


def test_reports_are_listed_newest_first_a_page_at_a_time(database: Database, clock: ManualClock) -> None:
    reports = StoredReports(database, clock)
    made = []
    for number in range(5):
        clock.pass_(0 if number == 3 else 60)  # two of one time: their ids order them
        made.append(reports.store(report(f"number {number}"))[0])
    expected = [one.id for one in sorted(made, key=lambda one: (one.created_at, one.id), reverse=True)]
    listed, cursor = list[str](), None
    while True:
        page = reports.list(limit=2, cursor=cursor)
        listed += [one.id for one in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert listed == expected
    with pytest.raises(InvalidInput, match="cursor"):
        reports.list(cursor="nonsense")


def test_a_page_is_answered_with_a_policy_by_which_it_runs_and_loads_nothing(server: Running) -> None:
    stored = server.client.store_report(report(page="<script>alert(1)</script>"))
    answer = httpx.get(f"{server.url}{REPORTS}/{stored.id}/page")
    policy = [part.strip() for part in answer.headers["content-security-policy"].split(";")]
    assert {"sandbox", "default-src 'none'", "form-action 'none'", "base-uri 'none'"} <= set(policy)
    assert not [part for part in policy if "script" in part or "allow" in part or "http" in part]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-type"] == "text/html; charset=utf-8"


@pytest.mark.parametrize(("changes", "field"), [
    ({"kind": "poem"}, "/kind"), ({"title": ""}, "/title"), ({"title": "two\nlines"}, "/title"),
    ({"decision": []}, "/decision"), ({"report": [1]}, "/report"), ({"page": ""}, "/page"),
    ({"script": "x"}, "/script"),
    ({"page": "x" * (MAX_PAGE_CHARACTERS + 1)}, "/page"),
])
def test_what_cannot_be_kept_or_shown_is_refused_with_its_field(
        changes: dict[str, Any], field: str, server: Running) -> None:
    answer = httpx.post(server.url + REPORTS, json=report_body("t"), headers={"content-type": "application/json"})
    assert answer.status_code == 201
    body = json.dumps(report_body("u") | changes)
    answer = httpx.post(server.url + REPORTS, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422, answer.text
    assert [one["pointer"] for one in answer.json()["errors"]] == [field]
    assert len(server.client.stored_reports().items) == 1


@pytest.mark.parametrize(("changes", "field"), [
    ({"decision": ["a", "\x00"]}, "/decision/1"), ({"page": "a\x00b"}, "/page"),
    ({"report": {"a": "\ud800"}}, "/report/a")])
def test_text_that_cannot_be_kept_is_refused_with_its_field(
        changes: dict[str, Any], field: str, server: Running) -> None:
    answer = httpx.post(server.url + REPORTS, content=json.dumps(report_body("u") | changes),
                        headers={"content-type": "application/json"})
    assert (answer.status_code, field in answer.json()["detail"]) == (422, True), answer.text


def test_figures_that_are_no_numbers_are_refused(server: Running) -> None:
    for value in ("NaN", "-Infinity", "1e999"):
        body = json.dumps(report_body("t")).replace("[1, 2]", f"[{value}]")
        answer = httpx.post(server.url + REPORTS, content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "/report/rows/list/0/float"), value


def test_a_report_may_be_larger_than_other_bodies_up_to_a_limit_of_its_own(
        settings: Settings, database: Database, serve: Callable[..., Any]) -> None:
    with serve(settings.model_copy(update={"max_body_bytes": 2048}), database) as server:
        assert server.client.store_report(report(page="x" * 3_000_000)).size_bytes > 3_000_000
        assert httpx.post(server.url + "/v1alpha1/jobs", json={"x": "y" * 4000}).status_code == 413
        answer = httpx.post(server.url + REPORTS, json=report_body("t", "x" * 9_000_000))
        assert (answer.status_code, answer.json()["title"]) == (413, "Too large")


def test_a_viewer_reads_and_does_not_write_and_another_project_sees_nothing(
        guarded: Running, database: Database) -> None:
    operator, viewer = (client_of(guarded, database, role) for role in ("operator", "viewer"))
    stranger = client_of(guarded, database, "admin", "other")
    stored = operator.store_report(report())
    assert stored.project == "team"
    assert stored.created_by.startswith("key:")
    assert viewer.stored_reports().items == (stored,)
    assert viewer.report_page(stored.id)
    for change in (lambda: viewer.store_report(report("mine")), lambda: viewer.delete_report(stored.id)):
        with pytest.raises(Forbidden):
            change()
    assert stranger.stored_reports().items == ()
    for attempt in (stranger.stored_report, stranger.report_page, stranger.delete_report):
        with pytest.raises(NotFound):
            attempt(stored.id)
    same = stranger.store_report(report())
    assert same.id != stored.id, "an id says nothing about another project"
    assert client_of(guarded, database, "viewer", scopes=frozenset({"endpoints:read"})).stored_reports().items == ()
    operator.delete_report(stored.id)
    assert stranger.stored_reports().items == (same,)


def signed_in(running: Running, *key: Any, **options: Any) -> httpx.Client:
    browser = httpx.Client(base_url=running.url, headers={"accept": "text/html"})
    bearer = {"authorization": f"Bearer {key_of(*key, **options)}"}
    browser.post("/console/sign-in", headers=bearer).raise_for_status()
    return browser


def test_the_console_shows_reports_with_a_sandboxed_frame_and_a_button_for_who_may(
        guarded: Running, database: Database) -> None:
    stored = client_of(guarded, database, "operator").store_report(report("<b>Which</b> drafter"))
    operator, viewer = (signed_in(guarded, database, role) for role in ("operator", "viewer"))
    listed = viewer.get("/console/reports")
    assert f'<a href="/console/reports/{stored.id}">&lt;b&gt;Which&lt;/b&gt; drafter</a>' in listed.text
    assert "frame-src" not in listed.headers["content-security-policy"]
    shown = viewer.get(f"/console/reports/{stored.id}")
    assert ('<iframe class="report" sandbox title="Report: &lt;b&gt;Which&lt;/b&gt; drafter" '
            f'src="{REPORTS}/{stored.id}/page">') in shown.text
    assert shown.headers["content-security-policy"].endswith("; frame-src 'self'")
    assert "Serve with EAGLE-3." in shown.text
    assert stored.created_by in shown.text
    assert "<button" not in shown.text
    assert 'data-method="DELETE"' in operator.get(f"/console/reports/{stored.id}").text
    assert viewer.get("/console/reports/rep_never").status_code == 404
    stranger = signed_in(guarded, database, "admin", project="other")
    assert stranger.get(f"/console/reports/{stored.id}").status_code == 404
    assert "No report yet" in stranger.get("/console/reports").text
    narrowed = signed_in(guarded, database, "admin", scopes=frozenset({"endpoints:read"}))
    assert "No permission" in narrowed.get("/console/reports").text


def run(server: Running, *words: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["reports", *words], env={"EYRIE_SERVER": server.url})
    assert result.exit_code == code, result.output
    return result


def written(directory: Path, name: str, kind: str = "hardware") -> Path:
    (directory / f"{name}.json").write_text('{"rows": []}')
    page = directory / f"{name}.html"
    page.write_text(PAGE.format(kind=kind, title=f"Hardware &amp; {name}", found="2 users: h200 is cheapest"))
    return page


def test_the_command_pushes_lists_shows_and_deletes(server: Running, tmp_path: Path) -> None:
    first = written(tmp_path, "first")
    written(tmp_path, "second")
    (tmp_path / "alone.html").write_text("no figures beside it")
    assert run(server, "list").stdout.startswith("No reports yet")
    pushed = json.loads(run(server, "push", str(tmp_path), "--json").stdout)["items"]
    assert [one["title"] for one in pushed] == ["Hardware & first", "Hardware & second"]
    assert pushed[0]["decision"] == ["2 users: h200 is cheapest", "And slower alone."]
    by_json = json.loads(run(server, "push", str(first.with_suffix(".json")), "--json").stdout)["items"]
    assert by_json == pushed[:1], "a report is named by either of its files"
    assert f"{server.url}/console/reports/{pushed[0]['id']}" in run(server, "push", str(first)).stdout
    assert {one["id"] for one in json.loads(run(server, "--json").stdout)["items"]} == {one["id"] for one in pushed}
    table = run(server).stdout
    assert "Hardware & second" in table
    assert "--cursor" in run(server, "list", "--limit", "1").stderr
    assert "And slower alone." in run(server, "show", pushed[0]["id"]).stdout
    assert json.loads(run(server, "show", pushed[0]["id"], "--json").stdout)["report"] == {"rows": []}
    run(server, "delete", pushed[0]["id"])
    assert json.loads(run(server, "--json").stdout)["items"] == pushed[1:]
    assert "no report" in run(server, "delete", pushed[0]["id"], code=66).output


def test_what_no_program_of_eyrie_wrote_is_not_pushed(server: Running, tmp_path: Path) -> None:
    assert "no report in this directory" in run(server, "push", str(tmp_path), code=65).output
    assert "cannot be read" in run(server, "push", str(tmp_path / "x.html"), code=65).output
    page = written(tmp_path, "mine")
    page.with_suffix(".json").write_text("{")
    assert "not JSON" in run(server, "push", str(page), code=65).output
    page.write_text("<title>Mine</title>")
    assert "not a report of this version" in run(server, "push", str(page), code=65).output
    written(tmp_path, "mine", kind="poem")
    assert "kind: must be " in run(server, "push", str(page), code=65).output
    assert json.loads(run(server, "--json").stdout)["items"] == []
