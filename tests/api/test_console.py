"""The console's pages: what they show is what the API answers, nothing comes from elsewhere, and text stays text.

Chromium has looked at them by hand; no browser takes part here.
"""

import gzip
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest

from eyrie_api.artifacts import digest_model, write_model
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.model import Interval
from eyrie_api.contract.prove import ParityReport, ProveReport, SampledParityReport
from eyrie_api.contract.reports import TuneReport
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.stages import Manifest
from eyrie_api.contract.status import JobStatus, Progress, StageStatus
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.tuning import OFF, DrafterUse, OperatingMap, OperatingPoint, Setting, Trial
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.rendering import encode_cursor
from eyrie_api.http.console import pages
from eyrie_api.http.server import create_app
from eyrie_api.planning.resolve import derive
from eyrie_api.settings import Settings
from tests.api.figures.endpoint_values import endpoint_with_history
from tests.api.samples import ManualClock, job_body, job_spec, set_stage
from tests.pipelines.rehearsal.rehearsal_stage import ENVIRONMENT, benchmark_report, load_report

DATABASES = ("sqlite",)  # pages have no SQL of their own: what they read is tested on both elsewhere

HOSTILE = '"><script>alert(1)</script>'
NIGHTLY: dict[str, Any] = job_body(name="nightly", train={"epochs": 3})


@pytest.fixture
def client(settings: Settings, database: Database) -> httpx.Client:
    from starlette.testclient import TestClient

    return TestClient(create_app(settings, database=database), base_url="http://127.0.0.1:8642")


def text_of(page: httpx.Response) -> str:
    assert page.status_code == 200, page.text
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", page.text)).split())


def test_an_empty_installation_says_what_to_do(client: httpx.Client) -> None:
    shown = text_of(client.get("/"))
    assert "Nothing needs a person." in shown
    assert "No endpoint yet" in shown
    assert "eyrie train --target" in shown


def test_a_running_job_shows_its_stages_with_progress_rate_and_time_left(
        client: httpx.Client, database: Database) -> None:
    jobs = Jobs(database)
    job = jobs.submit(derive(job_spec(name="nightly")))
    stages = (StageStatus(stage="regenerate", state="Succeeded"),
              StageStatus(stage="capture", state="Running", progress=Progress(
                  done=300, total=1200, unit="rows", rate=12.5, eta_s=72.0, message="shard 3")))
    for stage in stages:
        set_stage(jobs, job.id, stage)
    jobs.save_status(job.id, JobStatus(phase="Running", stages=stages))
    page = client.get(f"/console/jobs/{job.id}")
    shown = text_of(page)
    for words in ("nightly Running", "regenerate Succeeded", "capture Running", "25 % of 1200 rows, 12.5/s, 1m12s left",
                  "shard 3", f"eyrie cancel {job.id}"):
        assert words in shown, words
    assert f'data-stream="/console/jobs/{job.id}/live"' in page.text, "until it ends"
    assert ("Not there yet: the leaderboard (after benchmark), the tuning (after tune), the proof (after prove), the "
            "decision (at the end).") in shown
    assert "nightly" in text_of(client.get("/"))


def test_a_failed_job_needs_a_person_and_is_shown_with_its_hint(client: httpx.Client, database: Database) -> None:
    jobs = Jobs(database)
    job = jobs.submit(derive(job_spec(name="broken")))
    failed = StageStatus(stage="capture", state="Failed", reason="DiskTooSmall", message="40 GB are needed",
                         hint="free some")
    set_stage(jobs, job.id, failed)
    jobs.save_status(job.id, JobStatus(phase="Failed", stages=(failed,)))
    assert "Nothing needs a person" not in text_of(client.get("/"))
    assert "Needs a person Job broken failed in capture 40 GB are needed hint: free some" in text_of(client.get("/"))
    page = client.get(f"/console/jobs/{job.id}")
    assert "DiskTooSmall : 40 GB are needed free some" in text_of(page)
    assert "data-stream" not in page.text, "an ended job is not followed"
    assert "Not there yet" not in page.text


def test_a_tuned_and_proven_job_shows_its_operating_map_and_its_proof(
        client: httpx.Client, database: Database, settings: Settings) -> None:
    jobs = Jobs(database)
    job = jobs.submit(derive(job_spec(name="finished")))
    stages = tuple(StageStatus(stage=stage, state="Succeeded") for stage in ("tune", "prove"))
    for stage in stages:
        set_stage(jobs, job.id, stage)
    jobs.save_status(job.id, JobStatus(phase="Succeeded", stages=stages))
    chain = Setting(tree=DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4))
    points = (OperatingPoint(concurrency=1, setting=chain, speedup=1.88, tokens_per_s=110.0, measured=True,
                             speedup_interval=Interval(low=1.57, high=2.29)),
              OperatingPoint(concurrency=8, setting=OFF, speedup=1.0, tokens_per_s=400.0, measured=False))
    trial = Trial(setting=chain, concurrency=1, predicted_tokens_per_s=105.0, predicted_speedup=1.8, predicted_tau=2.4,
                  speedup=1.88, tau=2.5, blocks=4, reason=HOSTILE)
    tuned = TuneReport(checkpoint="c", path="/d", cells=(), winner=chain.tree, finding="Off from 8.", trials=(trial,),
                       map=OperatingMap(points=points), final=benchmark_report("c", 1.9), environment=ENVIRONMENT,
                       seconds=1.0)
    proven = ProveReport(
        checkpoint="c", path="/d", engine="sglang", use=DrafterUse(setting=chain), environment=ENVIRONMENT, seconds=1.0,
        load=load_report((1, 4), ("off", "candidate"), 1.9), parity=ParityReport(
            engine="sglang", prompts=8, identical=8, tree=chain.tree, histogram=(1, 2), tau=4.055,
            tau_interval=Interval(low=3.6, high=4.5), reference_tau=4.055, passed=True, reasons=("all equal",)),
        sampled_parity=SampledParityReport(engine="sglang", prompts=8, answers=128, passed=False, reasons=(
            "128 answers do NOT come from one distribution",)))
    for name, report in (("tune", tuned), ("prove", proven)):
        write_model(settings.stage_dir(job.id, name, "") / "manifest.json", Manifest(
            stage=name, job_id=job.id, spec_digest=digest_model(job.spec), code_version="0", report=report, files=(),  # type: ignore[arg-type]
            started_at="2026-01-01T00:00:00+00:00", finished_at="2026-01-01T00:00:00+00:00"))
    page = client.get(f"/console/jobs/{job.id}")
    shown = text_of(page)
    for words in ("Off from 8.", "1 3/1/4 1.88x 1.57 to 2.29 110 measurement", "8 off 1.00x 400 prediction",
                  "All 1 settings, predicted and measured", "1 3/1/4 1.80x 1.88x", "Proof in the sglang engine",
                  "Passed 8 of 8 greedy answers are identical to those without the drafter, tau 4.055, 4.055 in the "
                  "reference engine, at 3/1/4", "candidate against off 1.90x",
                  "Refused at temperature 1: 128 answers do NOT come from one distribution"):
        assert words in shown, words
    assert HOSTILE not in page.text


def test_an_endpoint_shows_its_revisions_and_history(client: httpx.Client, database: Database) -> None:
    endpoints = Endpoints(database)
    endpoints.create("assistant", TargetSpec(model="quickstart"), EndpointServeSpec(), "tiny")
    endpoints.propose("assistant", job_id=None, checkpoint="base-step-7", drafter_dir="/d", reason="better", tau=2.5,
                      tree=DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4))
    shown = text_of(client.get("/console/endpoints/assistant"))
    assert "base-step-7 3/1/4" in shown
    assert "2.50" in shown
    assert "assistant" in text_of(client.get("/"))
    assert client.get("/console/endpoints/none").status_code == 404


def test_the_page_of_an_endpoint_says_that_its_traffic_has_drifted_and_what_to_do(
        client: httpx.Client, database: Database) -> None:
    endpoint_with_history(database, ManualClock())
    drift = next(one for one in client.get("/v1alpha1/traffic").json()["items"] if one["endpoint"] == "chat")["drift"]
    shown = text_of(client.get("/console/endpoints/chat"))
    assert "The traffic has drifted since" in shown
    assert drift["message"] in shown
    assert "hint: train a drafter on recent traffic" in shown


def documents(client: httpx.Client, job: str) -> dict[str, Any]:
    """The documents that the page of a job shows, by what it calls them."""
    return {name: json.loads(unescape(text)) for name, text in re.findall(
        r"<summary>([^<]*)</summary><pre tabindex=\"0\">(\{.*?)</pre>", client.get(f"/console/jobs/{job}").text,
        re.DOTALL)}


def test_the_document_of_a_job_is_shown_as_submitted_and_as_resolved(client: httpx.Client) -> None:
    spec = NIGHTLY | {"train": {"epochs": 3, "seed": JobSpec.model_validate(NIGHTLY).train.seed}}
    job = client.post("/v1alpha1/jobs", json=spec).json()["id"]
    shown = documents(client, job)
    assert shown == {"As submitted": spec, "As resolved": client.get(f"/v1alpha1/jobs/{job}").json()["spec"]}, (
        "a default that was sent is part of what was submitted")
    assert shown["As resolved"]["train"].items() > spec["train"].items()
    assert "as a DrafterJob" not in client.get(f"/console/jobs/{job}").text


@pytest.mark.parametrize(("path", "status", "words"), [
    ("/console/jobs/job-none", 404, "job-none"), ("/console/nowhere", 404, "no such route"),
    ("/console/curves", 422, "job")])
def test_a_refusal_is_a_page_with_its_hint_to_a_browser_and_a_problem_to_a_program(
        client: httpx.Client, path: str, status: int, words: str) -> None:
    problem, page = client.get(path), client.get(path, headers={"accept": "text/html,*/*"})
    assert (problem.status_code, page.status_code) == (status, status)
    assert problem.headers["content-type"] == "application/problem+json"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    shown = " ".join(unescape(re.sub(r"<[^>]+>", " ", page.text)).split())
    assert words in shown
    assert problem.json()["hint"] in shown
    assert "Home" in shown


def test_the_address_of_a_job_by_its_name_leads_to_the_newest_that_has_it(
        client: httpx.Client, database: Database) -> None:
    jobs = Jobs(database)
    jobs.submit(derive(job_spec(name="nightly-run")))
    newest = jobs.submit(derive(job_spec(name="nightly-run"))).id
    answer = client.get("/console/jobs/nightly-run", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, f"/console/jobs/{newest}")
    assert client.get("/console/jobs/nightly").status_code == 404


def test_every_page_with_an_action_has_the_lines_that_do_the_same(client: httpx.Client, database: Database) -> None:
    job = Jobs(database).submit(derive(job_spec(name="nightly"))).id
    Endpoints(database).create("assistant", TargetSpec(model="quickstart"), EndpointServeSpec(), "tiny")
    Endpoints(database).activate("assistant", 1, "http://127.0.0.1:9/v1")
    server = "http://127.0.0.1:8642/v1alpha1"
    for path, lines in (
            ("/console/new", ("eyrie plan --file job.json", f"-d @job.json {server}/plans",
                              "eyrie train --file job.json", f"-d @job.json {server}/jobs")),
            (f"/console/jobs/{job}/again", (f"-d @job.json {server}/jobs",)),
            (f"/console/jobs/{job}", (f"eyrie cancel {job}", f"{server}/jobs/{job}/cancel")),
            ("/console/endpoints/assistant", ("eyrie rollback assistant", "/assistant/rollback")),
            ("/console/endpoints/assistant/compare", ("curl -N", f"{server}/endpoints/assistant/compare"))):
        shown = text_of(client.get(path))
        assert [line for line in lines if line not in shown] == [], path


def test_curves_of_jobs_with_one_name_are_told_apart_and_lists_without_a_job_or_with_too_many_are_refused(
        client: httpx.Client, database: Database) -> None:
    jobs = Jobs(database)
    same = [jobs.submit(derive(job_spec(name="nightly"))).id for _ in range(2)]
    hostile = jobs.submit(derive(job_spec(labels={"note": HOSTILE}))).id
    query = "&".join(f"job={one}" for one in (*same, hostile, same[0]))
    page = client.get(f"/console/curves?{query}")
    shown = json.loads(unescape(re.search(r'data-jobs="([^"]*)"', page.text)[1]))  # type: ignore[index]
    assert [one["name"] for one in shown] == [f"nightly ({same[0]})", f"nightly ({same[1]})", hostile]
    assert not any(one["ended"] for one in shown)
    assert f'href="/console/curves?job={same[1]}&amp;job={hostile}"' in page.text, "without the first"
    assert client.get("/console/curves").status_code == 422
    assert client.get("/console/curves?" + "&".join(11 * [f"job={hostile}"])).status_code == 422
    assert client.get(f"/console/curves?job={hostile}&job=job-none").status_code == 404


def test_pages_load_nothing_from_elsewhere_and_run_nothing_inline(client: httpx.Client, database: Database) -> None:
    job = Jobs(database).submit(derive(job_spec(labels={"note": HOSTILE})))
    for path in ("/", f"/console/jobs/{job.id}", f"/console/curves?job={job.id}", "/console/new"):
        page = client.get(path)
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert re.findall(r"<script(?![^>]*src=\"/console/static/)|<style|\son\w+=|\sstyle=", page.text) == []
        assert re.findall(r"(?:src|href)=\"(?:https?:)?//", page.text) == []
        assert HOSTILE not in page.text
        for file in re.findall(r"/console/static/([\w.]+)", page.text):
            assert client.get(f"/console/static/{file}").status_code == 200
    assert client.get("/console/static/LICENSES.md").status_code == 404


def test_all_scripts_and_styles_are_less_than_500_kb_compressed() -> None:
    static = Path(pages.HERE) / "static"
    assert sum(len(gzip.compress((static / name).read_bytes())) for name in pages.STATIC) < 500_000


def links_of(page: httpx.Response) -> dict[str, str]:
    assert page.status_code == 200, page.text
    found = re.findall(r'<a href="([^"]*)">((?:Older|Newest) jobs)</a>', page.text)
    return {text: unescape(link) for link, text in found}


def test_older_jobs_are_on_further_pages_and_what_needs_a_person_is_of_the_newest_on_each(
        client: httpx.Client, database: Database) -> None:
    jobs = Jobs(database)
    names = [f"night-{number:03}" for number in range(103)]
    ids = [jobs.submit(derive(job_spec(name=name))).id for name in names]
    for place in (0, 102):
        jobs.save_status(ids[place], JobStatus(phase="Failed"))
    page, seen, number = client.get("/"), list[str](), 0
    while True:
        links, number = links_of(page), number + 1
        seen += re.findall(r'<tr>\s*<td><a href="/console/jobs/[^"]*">(night-\d+)</a>', page.text)
        assert "Job night-102 failed" in page.text
        assert "Job night-000 failed" not in page.text, "it is not among the newest 50"
        assert ("Newest jobs" in links) == (number > 1)
        assert f'data-stream="{links_path(page)}"' in page.text
        if "Older jobs" not in links:
            break
        page = client.get(links["Older jobs"])
    assert (number, seen) == (3, names[::-1])
    assert links["Newest jobs"] == "/"
    first = [one["id"] for one in client.get("/v1alpha1/jobs").json()["items"]]
    assert first == ids[:52:-1], "the pages are those of the API"


def links_path(page: httpx.Response) -> str:
    query = page.url.query.decode()
    return "/console/live" + (f"?{query}" if query else "")


def test_a_page_of_older_jobs_that_are_gone_says_so_and_a_wrong_cursor_is_refused_with_a_hint(
        client: httpx.Client, database: Database) -> None:
    job = Jobs(database).submit(derive(job_spec(name="only")))
    page = client.get("/", params={"before": encode_cursor(job.created_at, job.id)})
    assert "No older jobs" in page.text
    assert links_of(page) == {"Newest jobs": "/"}
    for path in ("/", "/console/live"):
        refused = client.get(path, params={"before": "other"}, headers={"accept": "text/html"})
        assert refused.status_code == 422
        assert "was not made by this server" in unescape(refused.text)
