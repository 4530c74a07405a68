"""Pushed reports as a person sees them: a real Chromium, the page of a comparison in a frame, and a hostile one."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from eyrie_api.cli.reports import report_of as pushed
from eyrie_api.client import Client
from eyrie_api.database.engine import Database
from eyrie_api.v1alpha1.stored_reports import StoredReport, StoreReport
from eyrie_workers.comparison.answer import answer, decision
from eyrie_workers.comparison.page import html
from eyrie_workers.comparison.report import CompareReport
from tests.api.samples import report_body
from tests.browser.conftest import SHOTS, SIZES, assert_accessible, key_in, signed_in
from tests.browser.test_report_page import VARIANTS
from tests.workers.comparison.ledger import report_of

OpenPage = Callable[..., Any]
HOSTILE = """<!doctype html><html lang="en"><head><meta http-equiv="refresh" content="0; url={url}/console/new"></head>
<body><p id="said">measured</p><script>document.getElementById("said").textContent = "ran"</script>
<img src="{url}/console/static/console.css?leak" onerror="document.getElementById('said').textContent = 'ran'" alt="">
<iframe src="{url}/console/new" title="x"></iframe><form action="{url}/leak"><button>Send</button></form>
<a target="_top" href="{url}/leak">Go</a></body></html>"""


def comparison() -> CompareReport:
    found = report_of(VARIANTS)
    return found.model_copy(update={"verdict": answer(found), "notes": ("one seed",)})


def store(url: str, key: str, report: StoreReport) -> StoredReport:
    with Client(url, token=key) as client:
        return client.store_report(report)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_reports_are_listed_and_shown_readable_and_accessible_at_every_width(
        scheme: str, guarded: tuple[str, Database], open_page: OpenPage, faults: list[str]) -> None:
    url, database = guarded
    key, report = key_in(database, "team", "operator"), comparison()
    SHOTS.mkdir(parents=True, exist_ok=True)
    page = signed_in(open_page(viewport={"width": 1440, "height": 900}, color_scheme=scheme), url, key)

    def look(name: str, width: int) -> None:
        page.screenshot(path=SHOTS / f"{name}-{width}-{scheme}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} is wider than {width}"
        assert_accessible(page, f"{name} at {width}, {scheme}")

    page.get_by_role("link", name="Reports").click()
    page.get_by_text("No report yet").wait_for()
    look("no-reports", 1440)
    store(url, key, pushed(report.model_dump_json(), html(report), "report.html"))
    store(url, key, StoreReport.model_validate(report_body("Hardware compared for quickstart") | {
        "kind": "hardware", "decision": [f"{users} users at once: h200, EAGLE-3, is the cheapest per token"
                                         for users in (1, 4, 16)]}))
    for width, height in SIZES:
        page.set_viewport_size({"width": width, "height": height})
        page.goto(f"{url}/console/reports")
        assert page.locator("tbody tr").count() == 2
        look("reports", width)
        page.get_by_role("link", name="Which drafter for").click()
        page.locator("h1", has_text=f"Which drafter for {report.target}").wait_for()
        assert decision(report) in page.locator("section[aria-labelledby=found]").inner_text()
        frame = page.frame_locator("iframe")
        frame.get_by_text(decision(report)).wait_for()
        look("report", width)
        frame.locator("summary").first.click()
        frame.locator("details[open] table").first.wait_for()
        # Not by a click: after one, the driver waits for scripts of the page, which runs none.
        page.goto(url + page.get_by_role("link", name="Open the report alone").get_attribute("href"))
        page.locator(".decision", has_text=decision(report)).wait_for()
        assert page.locator("figure img").first.evaluate("one => one.naturalWidth") > 300
    assert [one for one in faults if "401" not in one] == [], "the sign-in page is a 401, which Chromium logs"


def test_a_hostile_page_runs_loads_and_reaches_nothing_in_the_frame_and_alone(
        guarded: tuple[str, Database], open_page: OpenPage) -> None:
    url, database = guarded
    key = key_in(database, "team", "operator")
    stored = store(url, key, StoreReport.model_validate(report_body("hostile", HOSTILE.format(url=url))))
    page = signed_in(open_page(), url, key)
    requests: list[str] = []
    page.on("response", lambda response: requests.append(response.url.removeprefix(url)))
    own = f"/v1alpha1/reports/{stored.id}/page"
    page.goto(f"{url}/console/reports/{stored.id}")
    frame = page.frame_locator("iframe.report")
    frame.locator("#said", has_text="measured").wait_for()
    frame.get_by_role("button", name="Send").click()
    frame.get_by_role("link", name="Go").click()
    page.wait_for_load_state("networkidle")
    assert frame.locator("#said").inner_text() == "measured"
    assert page.url == f"{url}/console/reports/{stored.id}"
    assert own in requests
    page.goto(url + own)
    page.wait_for_load_state("networkidle")
    assert page.locator("#said").inner_text() == "measured", "no script ran"
    assert page.url == url + own, "no refresh led away"
    assert [one for one in requests if "leak" in one or one == "/console/new"] == []


def test_a_viewer_has_no_button_and_who_deletes_is_asked_first(
        guarded: tuple[str, Database], open_page: OpenPage) -> None:
    url, database = guarded
    operator, viewer = key_in(database, "team", "operator"), key_in(database, "team", "viewer")
    stored = store(url, operator, StoreReport.model_validate(report_body("to be deleted")))
    page = signed_in(open_page(), url, viewer)
    page.goto(f"{url}/console/reports/{stored.id}")
    page.get_by_role("heading", name="to be deleted").wait_for()
    assert page.get_by_role("button").count() == 0
    page = signed_in(open_page(), url, operator)
    page.goto(f"{url}/console/reports/{stored.id}")
    page.on("dialog", lambda dialog: dialog.accept())
    with page.expect_response(lambda response: response.request.method == "DELETE") as deleted:
        page.get_by_role("button", name="Delete").click()
    assert deleted.value.status == 204
    listed = httpx.get(f"{url}/v1alpha1/reports", headers={"authorization": f"Bearer {viewer}"})
    assert listed.json()["items"] == []
