"""A page that is followed, in a real Chromium: its stream breaks, falls silent or is refused while the server answers
everything else, and the page says so or goes on."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from eyrie_api.contract.status import Progress, StageStatus
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.migrations import upgrade
from eyrie_api.database.projects import ApiKeys
from eyrie_api.database.tables import JobRow
from eyrie_api.planning.resolve import derive
from eyrie_api.settings import Settings
from tests.api.conftest import Running, serving
from tests.api.samples import NOW, ended, job_spec, set_stage
from tests.api.test_live_pages import rename_table
from tests.api.test_waiting import waiting
from tests.browser.conftest import TOKEN, assert_accessible
from tests.servers.cutting import Relay, relaying

OpenPage = Callable[..., Any]
STREAM = b"/live HTTP/1.1"
_PATIENCE_MS = 400_000


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """The API with a token, quick heartbeats, and credentials that are looked up again at once."""
    monkeypatch.setattr("eyrie_api.http.authentication.CACHED_S", 0.0)
    monkeypatch.setattr("eyrie_api.http.middleware._REAUTHENTICATE_S", 0.1)
    settings = Settings(home=tmp_path / "home", token=TOKEN, sse_heartbeat_s=1.0)
    settings.home.mkdir()
    database = Database(settings.resolved_database_url)
    upgrade(database)
    with serving(settings, database) as running:
        yield running
    database.close()


@pytest.fixture
def relay(server: Running) -> Iterator[Relay]:
    """Between the browser and the server."""
    with relaying(int(server.url.rpartition(":")[2])) as running:
        yield running


def opened(relay: Relay, open_page: OpenPage, job_id: str, secret: str = TOKEN) -> Any:
    """The page of a job, signed in and followed."""
    page, url = open_page(), f"http://127.0.0.1:{relay.port}"
    page.set_default_timeout(_PATIENCE_MS)
    answer = page.request.post(f"{url}/console/sign-in", headers={"authorization": f"Bearer {secret}"})
    assert answer.status == 204
    with page.expect_response("**/live"):
        page.goto(f"{url}/console/jobs/{job_id}")
    page.evaluate("window.stays = true")
    return page


def advance(server: Running, job_id: str, done: int) -> None:
    set_stage(Jobs(server.control.database), job_id, StageStatus(
        stage="capture", state="Running", progress=Progress(done=done, total=100, unit="rows")))


def shows(page: Any, done: int) -> None:
    """What `advance` has set, on the page as it was loaded, which says that it is current."""
    page.locator(".pipeline", has_text=f"{done} % of 100 rows").wait_for()
    page.locator("#stale").wait_for(state="hidden")
    assert page.evaluate("window.stays"), "the page was loaded again"


def test_a_stream_that_is_cut_is_opened_again_and_shows_what_has_changed_without_a_reload(
        server: Running, relay: Relay, open_page: OpenPage) -> None:
    job = Jobs(server.control.database).submit(derive(job_spec())).id
    page = opened(relay, open_page, job)
    advance(server, job, 10)
    shows(page, 10)
    for done in (20, 30):
        relay.cut(STREAM)
        advance(server, job, done)
        shows(page, done)


def test_a_page_says_since_when_it_is_not_current_while_its_database_fails_or_nothing_arrives_and_goes_on_by_itself(
        server: Running, relay: Relay, open_page: OpenPage) -> None:
    job = Jobs(server.control.database).submit(derive(job_spec())).id
    page = opened(relay, open_page, job)
    advance(server, job, 10)
    shows(page, 10)
    said = page.locator("#stale", has_text="Not current since")
    rename_table(server, "stages", "elsewhere")
    said.filter(has_text="the database is unavailable").wait_for()
    rename_table(server, "elsewhere", "stages")
    advance(server, job, 20)
    shows(page, 20)
    relay.silent_at = STREAM
    said.filter(has_text="the server does not answer; trying again").wait_for()
    advance(server, job, 30)
    relay.silent_at = None
    shows(page, 30)


@pytest.mark.parametrize("how", ["key-revoked", "cookie-gone"])
def test_a_page_whose_session_has_ended_says_that_it_is_signed_out(
        how: str, server: Running, relay: Relay, open_page: OpenPage) -> None:
    keys = ApiKeys(server.control.database)
    job = Jobs(server.control.database).submit(derive(job_spec())).id
    key, secret = keys.create(name="k", role="viewer", everywhere=True)
    page = opened(relay, open_page, job, secret)
    if how == "key-revoked":
        keys.revoke(key.id)
    else:
        page.context.clear_cookies()
        relay.cut(STREAM)
    page.locator("#stale", has_text="Signed out: load the page again").wait_for()


@pytest.mark.parametrize("is_followed", [True, False])
def test_a_page_says_that_its_job_was_deleted_also_when_its_stream_was_cut_before(
        is_followed: bool, server: Running, relay: Relay, open_page: OpenPage) -> None:
    jobs = Jobs(server.control.database)
    job = jobs.submit(derive(job_spec())).id
    page = opened(relay, open_page, job)
    if is_followed:
        with server.control.database.writing() as session:
            session.delete(session.get(JobRow, job))
    else:
        relay.silent_at = STREAM
        jobs.save_status(job, ended("Cancelled"))
        assert jobs.delete(job)
        relay.silent_at = None
        relay.cut(STREAM)
    page.locator("#stale", has_text="Deleted").wait_for()


def test_what_waits_is_listed_with_its_time_in_the_zone_of_the_viewer(
        server: Running, relay: Relay, open_page: OpenPage) -> None:
    server.control.waiting.record(waiting())
    page, url = open_page(timezone_id="Asia/Tokyo", locale="en-GB"), f"http://127.0.0.1:{relay.port}"
    page.set_default_timeout(_PATIENCE_MS)
    page.request.post(f"{url}/console/sign-in", headers={"authorization": f"Bearer {TOKEN}"})
    page.goto(url)
    since = f"{NOW + timedelta(hours=9):%d/%m/%Y, %H:%M:%S}"
    page.locator(".attention li", has_text=f"since {since}, in project team").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_home_leads_to_older_jobs_and_back_and_each_page_of_them_is_followed(
        scheme: str, server: Running, open_page: OpenPage, faults: list[str]) -> None:
    jobs = Jobs(server.control.database)
    ids = [jobs.submit(derive(job_spec(name=f"night-{number:02}"))).id for number in range(53)]
    page = open_page(color_scheme=scheme)
    page.set_default_timeout(_PATIENCE_MS)
    page.request.post(f"{server.url}/console/sign-in", headers={"authorization": f"Bearer {TOKEN}"})
    page.goto(server.url)
    names = page.locator("section[aria-labelledby=jobs] tbody a")
    assert (names.count(), names.first.inner_text()) == (50, "night-52")
    with page.expect_response("**/console/live?before=*"):
        page.get_by_role("link", name="Older jobs").click()
    page.evaluate("window.stays = true")
    assert names.all_inner_texts() == ["night-02", "night-01", "night-00"]
    assert page.get_by_role("link", name="Older jobs").count() == 0
    jobs.submit(derive(job_spec(name="night-53")))
    jobs.save_status(ids[1], ended("Cancelled"))
    page.locator("section[aria-labelledby=jobs] tr", has_text="night-01").filter(has_text="Cancelled").wait_for()
    assert names.all_inner_texts() == ["night-02", "night-01", "night-00"]
    assert page.evaluate("window.stays"), "the page was loaded again"
    assert_accessible(page, f"older jobs, {scheme}")
    with page.expect_response("**/console/live"):
        page.get_by_role("link", name="Newest jobs").click()
    page.get_by_role("link", name="night-53").wait_for()
    assert_accessible(page, f"newest jobs, {scheme}")
    assert faults == []
