"""The page of an endpoint in a real Chromium: live acceptance over time and by position, canaries; and what of it the
first page shows."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from eyrie_api.clock import utc_now
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.status import Condition
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.database.endpoint_history import Histories
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.planning.resolve import derive
from tests.api.figures.endpoint_values import endpoint_with_history, serve_drafter, try_canary, watch
from tests.api.samples import ManualClock, job_spec
from tests.browser.conftest import LOOKS, SHOTS, TOKEN, assert_accessible, picture, signed_in
from tests.browser.test_curves import in_training

OpenPage = Callable[..., Any]
Server = tuple[str, Database]
NAMES = ("acceptance", "acceptance-by-position", "canary")


@pytest.fixture
def clock() -> ManualClock:
    """Begins an hour ago."""
    made = ManualClock()
    made.now = utc_now().replace(microsecond=0) - timedelta(hours=1)
    return made


def figure(page: Any, name: str) -> Any:
    return page.locator(f"#figures figure[data-name={name}]")


def drawn(page: Any, name: str) -> Any:
    found = figure(page, name)
    found.locator("svg path:visible").first.wait_for()  # some frames are empty
    return found


def test_figures_follow_new_windows_without_a_reload_an_open_table_stays_open_and_a_button_rolls_back(
        guarded: Server, clock: ManualClock, open_page: OpenPage, faults: list[str]) -> None:
    url, database = guarded
    first = endpoint_with_history(database, clock)
    page = signed_in(open_page(timezone_id="Asia/Tokyo"), url, TOKEN, "/console/endpoints/chat")
    over_time = drawn(page, "acceptance")
    assert "rolled-back" in over_time.inner_text()
    for name in NAMES:
        drawn(page, name).locator("summary").click()
        rows = page.request.get(f"{url}/v1alpha1/endpoints/chat/figures/{name}").json()["spec"]["data"]["values"]
        assert figure(page, name).locator("tbody tr").count() == len(rows)
    times = over_time.locator("tbody time")
    at_server, shown = times.last.get_attribute("datetime"), times.last.inner_text()
    in_tokyo = clock.now + timedelta(hours=9)
    assert at_server.startswith(clock.now.isoformat()[:19])
    assert in_tokyo.strftime("%M:%S") in shown
    assert str(int(in_tokyo.strftime("%I"))) in shown.split(",")[1], "in the reader's zone"
    page.evaluate("window.stays = true")
    over_time.locator("summary").focus()
    watch(database, clock, first, (2.77,))
    page.get_by_text("Acceptance length now 2.77").wait_for()
    assert page.evaluate("window.stays"), "the page was loaded again"
    assert drawn(page, "acceptance").locator("tbody tr", has_text="2.77").is_visible(), "the table stays open"
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY", "and so does the focus"
    page.locator("#past tbody tr", has_text="tau 2.77").wait_for()  # by the stream; the figure is asked for by itself
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Roll back").click()
    page.locator("#past tbody tr", has_text="rolled-back: RolledBack").filter(has_text="person").wait_for()
    assert Endpoints(database).get("chat").candidate_revision == 1, "the target without a drafter"
    for button, after, desired in (("Switch off", "Switch on", "off"), ("Switch on", "Switch off", "on")):
        page.get_by_role("button", name=button).click()
        page.get_by_role("button", name=after).wait_for()
        assert Endpoints(database).get("chat").desired == desired
    assert [one for one in faults if "401" not in one] == []


def test_what_is_not_known_or_not_there_yet_is_said(
        guarded: Server, clock: ManualClock, open_page: OpenPage, faults: list[str]) -> None:
    url, database = guarded
    revision = serve_drafter(database, clock, engine="sglang")
    page = signed_in(open_page(), url, TOKEN, "/console/endpoints/chat")
    page.get_by_text("No window of acceptance has closed yet").wait_for()
    assert "not known where SGLang serves" in page.locator("#unmeasured").inner_text()
    assert page.locator("#figures figure").count() == 0
    watch(database, clock, revision, (2.9, 2.8), positions=False)
    drawn(page, "acceptance")
    page.get_by_text("No window of acceptance has closed yet").wait_for(state="detached")
    assert figure(page, "acceptance-by-position").count() == 0
    assert "not known where SGLang serves" in page.locator("#unmeasured").inner_text()
    assert [one for one in faults if "401" not in one] == []


def test_the_page_is_accessible_and_fits_a_phone_and_a_screen(
        guarded: Server, clock: ManualClock, open_page: OpenPage, faults: list[str]) -> None:
    url, database = guarded
    endpoint_with_history(database, clock)
    serve_drafter(database, clock, "busy")
    tried = Endpoints(database, clock).propose("busy", job_id=None, checkpoint="wide-step-9", tree=DraftTreeShape(),
                                               drafter_dir="/d/wide", reason="test").number
    try_canary(database, clock, tried, (0.2,), "busy")
    Endpoints(database, clock).create("plain", TargetSpec(model="quickstart"), EndpointServeSpec(), "quickstart")
    Endpoints(database, clock).activate("plain", 1, "http://127.0.0.1:9/v1")
    Histories(database, clock).record_window("plain", 1, None, 0.0, None, requests=18.0, seconds=60.0)
    serving = Condition(type="Serving", status="True", reason="Healthy", message="", last_transition_time=clock())
    for one in ("busy", "chat", "plain"):
        Endpoints(database, clock).observe(one, url=None, conditions=(serving,))
    in_training(Jobs(database), Jobs(database).submit(derive(job_spec(name="nightly"))).id, ("base",))
    SHOTS.mkdir(parents=True, exist_ok=True)
    for (width, height), scheme in LOOKS:
        page = signed_in(open_page(viewport={"width": width, "height": height}, color_scheme=scheme), url, TOKEN,
                         "/console/endpoints/chat")
        for name in NAMES:
            drawn(page, name)
        picture(page, "endpoint", "#live", "section[aria-labelledby=acceptance]")
        figure(page, "acceptance").locator("summary").click()
        page.screenshot(path=SHOTS / f"endpoint-{width}-{scheme}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert_accessible(page, f"at {width}, {scheme}")
        page.goto(url)
        page.get_by_text("Endpoint chat: the traffic has drifted").wait_for()
        shown = page.locator("section[aria-labelledby=endpoints] tbody tr", has_text="chat").inner_text()
        live = page.request.get(f"{url}/v1alpha1/traffic").json()["items"]
        window = next(one["window"] for one in live if one["endpoint"] == "chat")
        assert [f"{window['tau']:.2f}", f"{window['requests_per_s']:.3g}"] == shown.split("\t")[2:4]
        assert f"Canary revision {tried} gets 20 %" in " ".join(page.get_by_role(
            "row", name="busy").inner_text().split())
        assert page.get_by_role("row", name="plain").inner_text().split("\t")[2:4] == ["", "0.3"]
        picture(page, "home", "#live")
        page.screenshot(path=SHOTS / f"home-endpoints-{width}-{scheme}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert_accessible(page, f"home at {width}, {scheme}")
    assert [one for one in faults if "401" not in one] == []
