"""A whole real job in a real Chromium, from the request to its promotion: `.ci/wheel` runs the short demo and gives its
address here. What the pages show is compared with the REST API."""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from eyrie_api.contract.stages import JOB_STAGES

OpenPage = Callable[..., Any]
URL = os.environ.get("EYRIE_DEMO_URL", "")
_FOLLOW_S = 1200.0
ENDED = ("Succeeded", "Failed", "Cancelled")


@pytest.mark.skipif(not URL, reason="follows a running demo (EYRIE_DEMO_URL): make test-wheel")
@pytest.mark.timeout(_FOLLOW_S + 300)
def test_a_demo_is_followed_to_its_end_without_a_reload_and_its_page_has_the_values_of_the_api(
        open_page: OpenPage, faults: list[str]) -> None:
    page = open_page()

    def get(path: str) -> Any:
        return page.request.get(f"{URL}/v1alpha1/{path}").json()

    page.goto(URL)
    page.get_by_role("link", name="demo", exact=True).first.click()
    page.wait_for_url("**/console/jobs/*")
    job_id = page.url.rsplit("/", 1)[-1]
    page.evaluate("window.stays = true")
    phase, ran, progress, deadline = "", set[str](), set[str](), time.monotonic() + _FOLLOW_S
    while phase not in ENDED:
        assert time.monotonic() < deadline, f"still {phase}: {page.locator('.pipeline').inner_text()}"
        for box in page.locator(".pipeline li.running").all_inner_texts():
            ran.add(box.split()[0])
            progress.add(box)
        phase = page.locator("h1 .badge").first.inner_text()
        page.wait_for_timeout(1000)
    assert page.evaluate("window.stays"), "the page was loaded again"
    # Without the first, which may be over before the browser is up.
    assert ran >= {"train", "benchmark"}, "stages were seen while they ran"
    assert len(progress) > 2 * len(ran), "and so was their progress"
    job, report = get(f"jobs/{job_id}"), get(f"jobs/{job_id}/report")
    status = job["status"]
    assert phase == status["phase"] == "Succeeded", status
    shown = page.locator(".pipeline li h3").all_inner_texts()
    had = {one["stage"] for one in status["stages"]}
    assert [one.split()[0] for one in shown] == [one for one in JOB_STAGES if one in had]
    assert page.locator("section[aria-labelledby=decision] tbody tr").count() == len(status["decision"]["checks"])
    best = get(f"leaderboard?job_id={job_id}")["items"][0]
    first = page.locator("section[aria-labelledby=leaderboard] tbody tr").first.inner_text()
    assert best["checkpoint"] in first
    assert f"{best['tau']:.2f}" in first
    assert page.locator("#trials tbody tr").count() == len(report["tune"]["trials"])
    parity = report["prove"]["parity"]
    if parity is not None:  # else tuning found no load at which speculation pays: there is nothing to prove
        proof = page.locator("section[aria-labelledby=proof]").inner_text()
        assert f"{parity['identical']} of {parity['prompts']} greedy answers are identical" in proof
    for one in get(f"jobs/{job_id}/figures")["items"]:
        page.locator(f"figure[data-name={one['name']}] svg path").first.wait_for(state="attached")
    if status["decision"]["verdict"] != "promote":  # where drafts do not pay, a person may serve them all the same
        page.on("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Promote").click()
        page.wait_for_url("**/console/endpoints/*")
    _is_promoted(page, get, job_id)
    assert faults == []


def _is_promoted(page: Any, get: Callable[[str], Any], job_id: str) -> None:
    """Home has the endpoint with the drafter of the job and its values; its page the steps that led there."""
    name = get(f"jobs/{job_id}")["spec"]["serve"]["endpoint"]
    deadline = time.monotonic() + 300
    while (endpoint := get(f"endpoints/{name}"))["active_revision"] != endpoint["revisions"][-1]["number"]:
        assert time.monotonic() < deadline, endpoint
        page.wait_for_timeout(1000)
    active = endpoint["revisions"][-1]
    assert active["job_id"] == job_id
    assert active["checkpoint"], "a drafter serves"
    page.goto(URL)
    row = page.locator("section[aria-labelledby=endpoints] tbody tr", has_text=name).first
    row.get_by_text("Serving").wait_for(timeout=120_000)
    cells = row.locator("td").all_inner_texts()
    assert cells[5:7] == [f"{active[key]:.2f}{unit}" if active[key] else ""
                          for key, unit in (("tau", ""), ("speedup", "x"))]
    assert active["checkpoint"] in cells[7]
    row.get_by_role("link").click()
    page.locator("#past tbody tr", has_text="romoted").first.wait_for()
