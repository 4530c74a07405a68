"""The console as a person uses it: a real Chromium, the real control plane; stages of its jobs do no work."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.campaigns.live_servers import Plane
from eyrie_api.contract.serving import EndpointServeSpec, ServeSpec
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.http.console import pages
from eyrie_api.planning.resolve import derive
from eyrie_api.quantities import size as size_in_words
from eyrie_pipelines.processes import wait_until
from tests.api.figures.job_values import NAMES, finish_job
from tests.api.samples import job_spec
from tests.browser.conftest import LOOKS, SHOTS, TOKEN, assert_accessible, key_in, signed_in, within
from tests.pipelines.conftest import Rehearsal, spec_of

BODY = spec_of(serve=ServeSpec(enabled=False)).model_dump(mode="json")
OpenPage = Callable[..., Any]
_PATIENCE_MS = 400_000


def submitted(plane: Plane, **fields: object) -> str:
    answer = plane.http.post("/v1alpha1/jobs", json=BODY | fields)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def address(plane: Plane, path: str = "/") -> str:
    return f"http://127.0.0.1:{plane.port}{path}"


def has_phase(page: Any, phase: str) -> None:
    page.locator("h1 .badge", has_text=phase).wait_for(timeout=_PATIENCE_MS)


def test_a_job_is_followed_from_submission_to_promotion_without_a_reload(
        plane: Plane, open_page: OpenPage, faults: list[str]) -> None:
    page = open_page()
    job = submitted(plane, name="nightly")
    page.goto(address(plane))
    streams = list[str]()
    page.on("request", lambda one: streams.append(one.url) if one.resource_type == "eventsource" else None)
    page.get_by_role("link", name="nightly").first.click()
    page.evaluate("window.stays = true")
    has_phase(page, "Succeeded")
    assert page.evaluate("window.stays"), "the page was loaded again"
    of_jobs = [one for one in streams if "/jobs/" in one]  # that of home may begin after the page has loaded
    assert of_jobs == [address(plane, f"/console/jobs/{job}/live")], "a page that is followed costs one stream"
    status = plane.http.get(f"/v1alpha1/jobs/{job}").json()["status"]
    shown = page.locator(".pipeline li h3").all_inner_texts()
    assert [one.split()[0] for one in shown] == list(dict.fromkeys(stage["stage"] for stage in status["stages"]))
    assert all("Succeeded" in one for one in shown)
    rows = page.locator("section[aria-labelledby=decision] tbody tr").count()
    assert rows == len(status["decision"]["checks"])
    entries = plane.http.get("/v1alpha1/leaderboard", params={"job_id": job}).json()["items"]
    first = page.locator("section[aria-labelledby=leaderboard] tbody tr").first.inner_text()
    assert entries[0]["checkpoint"] in first
    assert f"{entries[0]['tau']:.2f}" in first
    assert page.get_by_role("button", name="Cancel").count() == 0
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Promote").click()
    page.wait_for_url(address(plane, "/console/endpoints/default"), timeout=_PATIENCE_MS)
    page.get_by_text(f"promoted by hand from job {job}").first.wait_for()
    candidate = plane.http.get("/v1alpha1/endpoints/default").json()["revisions"][-1]
    assert (candidate["job_id"], candidate["checkpoint"]) == (job, entries[0]["checkpoint"])
    assert faults == []


def test_cancel_retry_and_delete_by_button_and_a_question_first(
        plane: Plane, rehearsal: Rehearsal, open_page: OpenPage, faults: list[str]) -> None:
    rehearsal.plan(train__base=["hang", "ok"])
    job, page, asked = submitted(plane), open_page(), list[str]()
    answers = [False, True, True, True]

    def answer(dialog: Any) -> None:
        asked.append(dialog.message)
        dialog.accept() if answers[len(asked) - 1] else dialog.dismiss()

    page.on("dialog", answer)
    page.goto(address(plane, f"/console/jobs/{job}"))
    page.locator(".pipeline li.running h3", has_text="train").wait_for(timeout=_PATIENCE_MS)
    page.get_by_role("button", name="Cancel").click()
    assert asked == ["Cancel it; finished stages are kept?"]
    assert plane.http.get(f"/v1alpha1/jobs/{job}").json()["status"]["phase"] == "Running", "no was answered"
    page.get_by_role("button", name="Cancel").click()
    has_phase(page, "Cancelled")
    page.get_by_role("button", name="Retry").click()
    has_phase(page, "Succeeded")
    # The figures of the ended job are loaded and drawn: they go with it.
    page.locator("#figures figure[data-name=tuning] svg").wait_for(timeout=_PATIENCE_MS)
    page.get_by_role("button", name="Delete").click()
    page.wait_for_url(address(plane), timeout=_PATIENCE_MS)
    assert plane.http.get(f"/v1alpha1/jobs/{job}").status_code == 404
    # What the page was still reading of the job when it went (files, figures) is answered with 404, which is logged.
    assert [one for one in faults if not ("404" in one and job in one)] == []


def test_a_failed_job_is_on_the_first_page_with_what_to_do(
        plane: Plane, rehearsal: Rehearsal, open_page: OpenPage) -> None:
    rehearsal.plan(capture=["permanent"])
    job, page = submitted(plane, name="broken"), open_page()
    page.goto(address(plane))
    attention = page.locator(".attention", has_text="Job broken failed in capture")
    attention.wait_for(timeout=_PATIENCE_MS)
    failed = next(one for one in plane.http.get(f"/v1alpha1/jobs/{job}").json()["status"]["stages"]
                  if one["state"] == "Failed")
    assert failed["hint"]
    assert failed["hint"] in attention.inner_text()


def test_the_page_says_when_the_server_is_gone_and_goes_on_when_it_is_back(
        plane: Plane, rehearsal: Rehearsal, open_page: OpenPage) -> None:
    rehearsal.plan(train__base=["hang"])
    page, job = open_page(), submitted(plane)
    page.goto(address(plane, f"/console/jobs/{job}"))
    page.locator(".pipeline li.running h3", has_text="train").wait_for(timeout=_PATIENCE_MS)
    os.kill(plane.pid, signal.SIGKILL)
    note = page.locator("#stale")
    note.wait_for(state="visible", timeout=_PATIENCE_MS)
    assert "Not current since" in note.inner_text()
    assert "the server does not answer" in note.inner_text()
    assert plane.start() is None
    note.wait_for(state="hidden", timeout=_PATIENCE_MS)
    plane.http.post(f"/v1alpha1/jobs/{job}/cancel", json={})
    has_phase(page, "Cancelled")


def test_signing_in_with_a_key_shows_its_projects_jobs_and_no_others(
        guarded: tuple[str, Database], open_page: OpenPage) -> None:
    url, database = guarded
    secret = key_in(database, "team", "operator")
    own = Jobs(database, scope=within("team", database)).submit(derive(job_spec(name="ours")))
    other = Jobs(database, scope=within("other", database)).submit(
        derive(job_spec(name="theirs", serve={"endpoint": "theirs"})))
    page = open_page()
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto(url)
    page.get_by_label("API key").fill("not-a-key")
    page.get_by_role("button", name="Sign in").click()
    page.locator("#refused", has_text="token").wait_for()
    page.get_by_label("API key").fill(secret)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("link", name="ours").first.wait_for()
    assert page.get_by_text("theirs").count() == 0
    assert page.goto(f"{url}/console/jobs/{other.id}").status == 404
    page.goto(f"{url}/console/jobs/{own.id}")
    page.get_by_role("button", name="Cancel").click()
    assert wait_until(lambda: Jobs(database).get(own.id).status.phase in ("Cancelling", "Cancelled"), 400.0)
    page.get_by_role("link", name="Sign out").click()
    page.get_by_label("API key").wait_for()


def test_a_page_that_is_refused_leads_to_signing_out_and_a_link_from_elsewhere_signs_nobody_out(
        guarded: tuple[str, Database], open_page: OpenPage) -> None:
    url, database = guarded
    page = signed_in(open_page(), url, key_in(database, "team", "viewer"))
    page.goto(f"{url}/console/sign-out?to=/console/new")
    page.goto(f"{url}/console/jobs/job-none")
    page.get_by_role("link", name="sign out").click()
    page.get_by_text("Signed in as key:").wait_for()
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("API key").wait_for()


def test_a_viewer_reads_and_has_no_buttons(guarded: tuple[str, Database], open_page: OpenPage) -> None:
    url, database = guarded
    job = Jobs(database, scope=within("team", database)).submit(derive(job_spec(name="ours")))
    page = open_page()
    page.goto(url)
    page.get_by_label("API key").fill(key_in(database, "team", "viewer"))
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("link", name="ours").first.click()
    page.locator("h1", has_text="ours").wait_for()
    page.get_by_text("No permission to change this job").wait_for()
    assert page.get_by_role("button").count() == 0
    assert job.id in page.url
    page.goto(f"{url}/console/new")
    page.get_by_text("No permission to start a job").wait_for()
    assert page.get_by_role("button", name="Start").count() == 0


def test_a_new_job_is_checked_while_it_is_written_and_started(
        plane: Plane, open_page: OpenPage, faults: list[str]) -> None:
    page = open_page()
    page.goto(address(plane))
    page.get_by_role("link", name="New job").click()
    page.get_by_label("JSON", exact=True).check()
    text, verdict = page.get_by_label("Document (JSON)"), page.locator("#verdict")
    verdict.filter(has_text="Valid. About").wait_for()
    for document, said in (('{"target": ', "Not JSON"), ("{}", "target"),
                           (json.dumps(BODY | {"train": {"epochs": -1}}), "/train/epochs"),
                           (json.dumps(BODY | {"target": {"model": "./missing"}}), "hint:")):
        text.fill(document)
        verdict.filter(has_text=said).wait_for()
        assert "failure" in verdict.get_attribute("class")
    text.fill(json.dumps(BODY | {"name": "written-here"}))
    verdict.filter(has_text="Valid. About").wait_for()
    page.get_by_role("button", name="Start").click()
    page.locator("h1", has_text="written-here").wait_for()
    has_phase(page, "Succeeded")
    page.get_by_role("link", name="Run again with changes").click()
    page.locator("h1", has_text="written-here again").wait_for()
    assert json.loads(page.get_by_label("Document (JSON)").input_value())["name"] == "written-here"
    refusals = [one for one in faults if "422" not in one and "404" not in one and "400" not in one]
    assert refusals == [], "Chromium logs each answer that refuses a document"


def test_the_figures_of_a_finished_job_are_drawn_each_with_its_table(
        plane: Plane, open_page: OpenPage, faults: list[str]) -> None:
    job = submitted(plane, name="measured")
    assert wait_until(lambda: plane.http.get(f"/v1alpha1/jobs/{job}").json()["status"]["finished_at"], 400.0)
    shutil.rmtree(plane.home / "jobs" / job / "stages")
    finish_job(plane.home / "jobs" / job, job)
    SHOTS.mkdir(parents=True, exist_ok=True)
    for (width, height), scheme in LOOKS:
        page = open_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        page.goto(address(plane, f"/console/jobs/{job}"))
        page.locator("figure[data-name=pareto] svg path").first.wait_for(timeout=_PATIENCE_MS)
        page.wait_for_load_state("networkidle")
        page.locator("#figures").screenshot(path=SHOTS / f"figures-{width}-{scheme}.png")
        for name in NAMES:
            figure = page.locator(f"figure[data-name={name}]")
            rows = len(plane.http.get(f"/v1alpha1/jobs/{job}/figures/{name}").json()["spec"]["data"]["values"])
            assert figure.locator("svg path").count() > rows, name
            figure.locator("summary").click()
            assert figure.locator("tbody tr").count() == rows
            assert figure.locator("table").is_visible()
        assert_accessible(page, f"all tables at {width}, {scheme}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.close()
    assert faults == []


def test_every_page_is_accessible_and_fits_a_phone_a_tablet_and_a_screen(
        plane: Plane, guarded: tuple[str, Database], rehearsal: Rehearsal, open_page: OpenPage,
        faults: list[str]) -> None:
    rehearsal.plan(capture=["ok", "permanent"])
    whole, broken = submitted(plane, name="whole"), submitted(plane, name="broken")
    assert wait_until(lambda: all(plane.http.get(f"/v1alpha1/jobs/{one}").json()["status"]["finished_at"]
                                  for one in (whole, broken)), 400.0)
    for path, body in (("keys", {"name": "nightly runs", "role": "operator"}),
                       ("webhooks", {"url": "http://127.0.0.1:9/a/rather/long/address/of/a/receiver"}),
                       ("projects/default/members", {"kind": "group", "value": "researchers", "role": "operator",
                                                     "issuer": "https://issuer.example/realms/team"})):
        assert plane.http.post(f"/v1alpha1/{path}", json=body).status_code == 201
    (hook,) = plane.http.get("/v1alpha1/webhooks").json()["items"]
    assert plane.http.post(f"/v1alpha1/webhooks/{hook['id']}/ping", json={}).status_code == 202
    captured = plane.home / "jobs" / whole / "stages" / "capture" / "shard-00099.states"
    captured.write_bytes(bytes(3 << 20))
    SHOTS.mkdir(parents=True, exist_ok=True)
    looked_at = {"home": address(plane), "job": address(plane, f"/console/jobs/{whole}"),
             "failed-job": address(plane, f"/console/jobs/{broken}"), "new-job": address(plane, "/console/new"),
             "admin": address(plane, "/console/admin"), "audit": address(plane, "/console/admin/audit"),
             "project": address(plane, "/console/admin/projects/default"), "sign-in": guarded[0],
             "api": address(plane, "/docs"), "refused": address(plane, "/console/jobs/job-none")}
    for (width, height), scheme in LOOKS:
        page = open_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        for name, url in looked_at.items():
            page.goto(url)
            page.wait_for_load_state("networkidle")
            page.screenshot(path=SHOTS / f"{name}-{width}-{scheme}.png", full_page=True)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} is wider than {width}"
            assert_accessible(page, f"{name} at {width}, {scheme}")
        page.close()
    refusals = [one for one in faults if "401" not in one and "404" not in one]
    assert refusals == [], "Chromium logs the sign-in page, a 401, and the page of a job that is not there"


def answer_with(text: str, route: Any) -> None:
    route.fulfill(body=text, content_type="text/html")


def test_refusals_and_the_pages_of_a_viewer_are_accessible_and_fit_a_phone_and_a_screen(
        guarded: tuple[str, Database], open_page: OpenPage, faults: list[str]) -> None:
    url, database = guarded
    job = Jobs(database, scope=within("team", database)).submit(derive(job_spec(name="ours"))).id
    Endpoints(database).create("chat", TargetSpec(model="quickstart"), EndpointServeSpec(), "quickstart", "team")
    keys = {role: key_in(database, "team", role) for role in ("viewer", "operator")}
    off = "/console/endpoints/chat/compare"
    paths = {"viewer": ("/", f"/console/jobs/{job}", "/console/new", f"/console/jobs/{job}/again",
                        "/console/admin", "/console/admin/audit", "/console/admin/projects/team",
                        "/console/endpoints/chat", off, f"/console/curves?job={job}", "/console/jobs/job-none"),
             "operator": (off, f"/console/jobs/{job}/again")}
    # The pages on the way back from an issuer, of which these servers have none. Nothing answers the way on.
    nobody = {"who": None, "change": "", "administers": False}
    refused = pages.sign_in_page("https://issuer.example", problem="the issuer refused: access_denied; sign in again")
    returned = {"/signed-in": pages.rendered("signed_in.html", nobody | {"to": "/stay"}),
                "/refused-sign-in": bytes(refused.body).decode()}

    def look(page: Any, path: str, who: str, width: int) -> None:
        page.goto(url + path)
        page.wait_for_load_state("networkidle")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{path} is wider than {width}"
        assert_accessible(page, f"{path} of {who} at {width}, {scheme}")

    for (width, height), scheme in (LOOKS[0], LOOKS[-1]):
        options = {"viewport": {"width": width, "height": height}, "color_scheme": scheme}
        for who, shown in paths.items():
            page = signed_in(open_page(**options), url, keys[who])
            for path in shown:
                look(page, path, who, width)
        page = open_page(**options)
        page.route("**/stay", lambda route: route.fulfill(status=204))
        for path, text in returned.items():
            page.route(f"**{path}", partial(answer_with, text))
            look(page, path, "nobody", width)
        page.goto(url)
        page.get_by_label("API key").fill("not-a-key")
        page.get_by_role("button", name="Sign in").click()
        page.locator("#refused", has_text="token").wait_for()
        assert_accessible(page, f"a refused key at {width}, {scheme}")
    refusals = [one for one in faults if not any(status in one for status in ("401", "404"))]
    assert refusals == [], "Chromium logs answers that refuse"


def test_administration_shows_what_the_api_says_of_storage(plane: Plane, open_page: OpenPage) -> None:
    jobs = [submitted(plane, name=name) for name in ("larger", "smaller")]
    assert wait_until(lambda: all(plane.http.get(f"/v1alpha1/jobs/{one}").json()["status"]["finished_at"]
                                  for one in jobs), 400.0)
    for job, size in zip(jobs, (3 << 20, 1 << 20), strict=True):
        shard = plane.home / "jobs" / job / "stages" / "capture" / "shard-00099.states"
        shard.write_bytes(bytes(size))
    page = open_page()
    page.goto(address(plane, "/console/admin"))
    found = plane.http.get("/v1alpha1/storage").json()
    assert [job["job_id"] for job in found["items"]] == jobs
    section = page.locator("section[aria-labelledby=storage]")
    rows = section.locator("[aria-labelledby=storage-jobs] tbody tr")
    assert [row.split("\t")[0] for row in rows.all_inner_texts()] == ["larger", "smaller"]
    for row, job in zip(rows.all_inner_texts(), found["items"], strict=True):
        assert size_in_words(job["size_bytes"]) in row
        assert all(held["reason"] in row for held in job["files"])
    assert size_in_words(found["disk_total_bytes"]) in section.inner_text()
    assert section.get_by_role("button").count() == 0
    section.get_by_role("link", name="larger").click()
    page.locator("h1", has_text="larger").wait_for()


def test_the_installations_token_signs_in(guarded: tuple[str, Database], open_page: OpenPage) -> None:
    page = open_page()
    page.goto(guarded[0])
    page.get_by_label("API key").fill(TOKEN)
    page.keyboard.press("Enter")
    page.get_by_role("link", name="Sign out").wait_for()
