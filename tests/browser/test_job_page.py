"""The page of a job in a real Chromium: logs, artifacts, plan, compared documents, and the leaderboard in other orders."""

from collections.abc import Callable
from typing import Any

import pytest

from eyrie_api.quantities import size
from eyrie_api.v1alpha1.sweep import SweepAxis, SweepSpec
from eyrie_pipelines.processes import wait_until
from tests.browser.conftest import SHOTS
from tests.browser.test_console import address, has_phase, submitted
from tests.campaigns.live_servers import Plane
from tests.pipelines.conftest import Rehearsal

OpenPage = Callable[..., Any]
_PATIENCE_MS = 60_000
_FAMILIES = {"sweep": SweepSpec(axes=(SweepAxis(field="drafter.family", values=("eagle3", "dflash")),
                                      )).model_dump(mode="json")}


def ended(plane: Plane, *jobs: str) -> bool:
    return wait_until(lambda: all(plane.http.get(f"/v1alpha1/jobs/{one}").json()["status"]["finished_at"]
                                  for one in jobs), 120.0)


def write_log(plane: Plane, job: str, stage: str, text: str) -> None:
    with (plane.home / "jobs" / job / "stages" / stage / "log.txt").open("a") as log:
        log.write(text)


def test_the_log_of_a_running_stage_is_followed_and_stays_open_when_the_stage_ends(
        plane: Plane, rehearsal: Rehearsal, open_page: OpenPage, faults: list[str]) -> None:
    rehearsal.plan(train__base=["hang"])
    job, page = submitted(plane, name="nightly"), open_page()
    page.goto(address(plane, f"/console/jobs/{job}"))
    page.locator(".pipeline li.running h3", has_text="train").wait_for(timeout=_PATIENCE_MS)
    log = page.locator(".pipeline li.running details.log")
    log.locator("summary").click()
    write_log(plane, job, "train/base", "".join(f"step {step}\n" for step in range(900)) + "<b>not bold</b>\n")
    shown = page.get_by_role("region", name="Log of train base")
    shown.filter(has_text="<b>not bold</b>").wait_for(timeout=_PATIENCE_MS)
    assert "step 100\n" not in shown.inner_text(), "the last lines"
    shown.focus()
    plane.http.post(f"/v1alpha1/jobs/{job}/cancel", json={})
    has_phase(page, "Cancelled")
    shown.filter(has_text="<b>not bold</b>").wait_for()
    page.get_by_text("The last 500 lines.").wait_for(timeout=_PATIENCE_MS)
    assert shown.evaluate("one => one === document.activeElement"), "focus stays in the log"
    assert shown.evaluate("one => one.scrollTop > 0"), "and so does its position"
    assert faults == []


def test_a_log_that_is_missing_says_so_with_a_hint(plane: Plane, open_page: OpenPage, faults: list[str]) -> None:
    job, page = submitted(plane, name="nightly"), open_page()
    assert ended(plane, job)
    (plane.home / "jobs" / job / "stages" / "capture" / "log.txt").unlink()
    (plane.home / "jobs" / job / "stages" / "tune" / "log.txt").write_text("")
    page.goto(address(plane, f"/console/jobs/{job}"))
    for stage, said in (("capture", "has no log; hint: it has:"), ("tune", "The log is empty.")):
        box = page.locator(".pipeline li", has=page.locator("h3", has_text=stage))
        box.locator("summary").click()
        box.get_by_text(said).wait_for()
    assert [one for one in faults if "404" not in one] == [], "Chromium logs the answer that there is no log"


def test_files_are_listed_with_their_size_as_stages_finish_and_can_be_downloaded(
        plane: Plane, open_page: OpenPage, faults: list[str]) -> None:
    job, page = submitted(plane, name="nightly"), open_page()
    page.goto(address(plane, f"/console/jobs/{job}"))
    page.evaluate("window.stays = true")
    page.locator("h1 .badge", has_text="Succeeded").wait_for(timeout=2 * _PATIENCE_MS)
    assert page.evaluate("window.stays"), "the page was loaded again"
    items = plane.http.get(f"/v1alpha1/jobs/{job}/artifacts").json()["items"]
    assert items
    last = items[-1]
    rows = page.locator("#files tbody tr")
    page.locator(f"#files-{last['stage']}").wait_for(timeout=_PATIENCE_MS)
    assert rows.count() == len(items)
    row = rows.last.inner_text()
    assert last["path"] in row
    assert size(last["size_bytes"]) in row
    with page.expect_download() as download:
        rows.last.get_by_role("link").click()
    assert download.value.path().stat().st_size == last["size_bytes"]
    assert faults == []


def test_plan_and_actual_are_shown_side_by_side_and_a_refusal_with_its_hint(
        plane: Plane, open_page: OpenPage, faults: list[str]) -> None:
    job, page = submitted(plane, name="nightly"), open_page()
    assert ended(plane, job)
    page.goto(address(plane, f"/console/jobs/{job}"))
    page.get_by_text("Plan it now and compare").click()
    rows = page.locator("#plan tbody tr")
    rows.first.wait_for(timeout=_PATIENCE_MS)
    stages = plane.http.get(f"/v1alpha1/jobs/{job}").json()["status"]["stages"]
    assert [one.split("\t")[0] for one in rows.all_inner_texts()] == list(dict.fromkeys(one["stage"] for one in stages))
    assert "Planned now" in page.locator("#plan").inner_text()
    assert faults == []


def test_two_documents_are_compared_by_a_form_that_needs_no_script(plane: Plane, open_page: OpenPage) -> None:
    mine, other = submitted(plane, name="mine"), submitted(plane, name="other", train={"epochs": 3})
    page = open_page(java_script_enabled=False)
    page.goto(address(plane, f"/console/jobs/{mine}"))
    page.get_by_role("link", name="compare with another job").click()
    page.get_by_label("Id of the other job").fill("none-of-that-name")
    page.get_by_role("button", name="Compare").click()
    page.get_by_text("no job").wait_for()
    page.get_by_label("Id of the other job").fill(other)
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("heading", name="2 differences from other").wait_for()
    assert [row.split("\t")[0] for row in page.locator("tbody tr").all_inner_texts()] == ["/name", "/train/epochs"]


def test_the_leaderboard_is_sorted_and_filtered_and_stays_so_while_the_page_changes(
        plane: Plane, open_page: OpenPage, faults: list[str]) -> None:
    job, page = submitted(plane, name="families", **_FAMILIES), open_page()
    assert ended(plane, job)
    entries = plane.http.get("/v1alpha1/leaderboard", params={"job_id": job}).json()["items"]
    page.goto(address(plane, f"/console/jobs/{job}"))
    section = page.locator("section[aria-labelledby=leaderboard]")

    def names() -> list[str]:
        return [row.split("\t")[1] for row in section.locator("tbody tr:visible").all_inner_texts()]

    served = names()
    assert served == [one["checkpoint"] for one in entries], "in the server's order"
    head = section.locator("th", has_text="checkpoint")
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert names() == sorted(served)
    head.get_by_role("button").press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    section.get_by_label("Family").select_option("dflash")
    wanted = sorted((one["checkpoint"] for one in entries if one["family"] == "dflash"), reverse=True)
    assert names() == wanted
    # What a stream of a running job would send.
    html = plane.http.get(f"/console/jobs/{job}").text
    page.evaluate("html => replace(new DOMParser().parseFromString(html, 'text/html').getElementById('live'))",
                  html.replace("Nothing has happened yet", "changed").replace(">Events<", ">Events, changed<"))
    page.get_by_role("heading", name="Events, changed").wait_for()
    assert names() == wanted
    assert section.get_by_label("Family").input_value() == "dflash"
    assert faults == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible_and_fits_with_everything_open(
        scheme: str, plane: Plane, open_page: OpenPage, faults: list[str]) -> None:
    from axe_playwright_python.sync_playwright import Axe

    job, other = submitted(plane, name="families", **_FAMILIES), submitted(plane, name="other", train={"epochs": 3})
    assert ended(plane, job, other)
    write_log(plane, job, "capture", "".join(f"row {row}: a line that is rather longer than a telephone is wide {row}\n"
                                             for row in range(600)))
    SHOTS.mkdir(parents=True, exist_ok=True)
    for width, height in ((375, 812), (1440, 900)):
        page = open_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        for name, path in (("job-page", ""), ("job-diff", f"/diff?with={other}"), ("job-plan", "/plan")):
            page.goto(address(plane, f"/console/jobs/{job}{path}"))
            page.wait_for_load_state("networkidle")
            if not path:
                page.locator("details.log summary").nth(1).click()
                page.get_by_text("The last 500 lines.").wait_for()
                page.get_by_text("Plan it now and compare").click()
                page.locator("#plan table").wait_for(timeout=_PATIENCE_MS)
            page.screenshot(path=SHOTS / f"{name}-{width}-{scheme}.png", full_page=True)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} is wider than {width}"
            found = Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21aa", "wcag22aa"]})
            assert found.violations_count == 0, f"{name} at {width}, {scheme}: {found.generate_report()}"
    assert faults == []
