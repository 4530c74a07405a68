"""The reports of regenerate, capture and train as tables, and on the page of a job."""

import re
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest

from eyrie_api.contract.reports import CaptureReport, LayerChoice, Lengths, RegenerateReport
from eyrie_api.contract.status import JobReport
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.http.console.job_pages import StageTable, stage_tables
from eyrie_api.http.server import create_app
from eyrie_api.planning.resolve import derive
from eyrie_api.settings import Settings
from tests.api.samples import finish_stage, job_spec
from tests.workers.plots.synthetic import train_report

DATABASES = ("sqlite",)
ANSWERS = RegenerateReport(
    engine="sglang", rows_read=12_000, rows_answered=11_400, rows_held_out=500, rows_quarantined=100, rows_reused=400,
    duplicates=70, near_duplicates=30, outcomes={
        "chats": {"answered": 9_000, "truncated": 12, "too-long": 80},
        "code": {"answered": 2_400, "truncated": 0, "too-long": 5, "failed": 15}},
    overlaps={"chat": 2}, prompt_lengths=Lengths(p50=120, p90=900, p99=1_500, most=2_000),
    prompt_tokens=2_345_678, answer_tokens=4_000_000, finish_reasons={"length": 12, "stop": 11_388},
    sources={"chats": 9_000, "code": 2_400}, seconds=3725.0, tokens_per_s=1073.8)
STATES = CaptureReport(
    source="reference", rows=11_400, tokens=6_345_678, supervised_tokens=4_000_000, bytes=3 * 2**30,
    bytes_per_token=512.0, shards=12, rows_reused=400, bytes_reused=2**28,
    layers=LayerChoice(aux_layers=(2, 14, 25), reason="low, middle, high"), hidden_size=1024, codec="int8",
    states_error={"2": 0.0041, "final": 0.0052}, checked={"2": 1.2e-6}, rows_cut=7, seconds=600.0,
    tokens_per_s=10_576.0)


def report(**fields: Any) -> JobReport:
    return JobReport(job_id="j", name=None, target="t", phase="Running", seconds={}, **fields)


def facts(table: StageTable) -> dict[str, str]:
    assert table.heads == ()
    return dict(table.rows)  # type: ignore[arg-type]


def test_regenerate_says_what_became_of_the_conversations_with_units() -> None:
    answers, by_source = stage_tables(report(regenerate=ANSWERS))
    assert facts(answers) == {
        "answers by": "sglang", "conversations read": "12,000", "rows answered": "11,400 (400 from earlier jobs)",
        "rows held out for the benchmark": "500", "rows not used": "100 (too-long 85, failed 15)",
        "duplicates left out": "70 equal, 30 nearly equal", "rows that share text with a suite": "chat 2",
        "tokens": "2,345,678 of prompts, 4,000,000 of answers",
        "length of a prompt": "half up to 120 tokens, 90 % up to 900, longest 2,000",
        "answers ended by": "stop 11,388, length 12", "time": "1h02m, 1,074 tokens/s"}
    assert by_source.rows == (("chats", "9,000", "12", "too-long 80"), ("code", "2,400", "0", "failed 15, too-long 5"))


def test_one_source_has_no_table_of_sources() -> None:
    one = ANSWERS.model_copy(update={"outcomes": {"chats": {"answered": 1}}})
    assert [table.caption for table in stage_tables(report(regenerate=one))] == [
        "Regenerate: conversations and answers"]


def test_capture_says_what_was_stored_how_exactly_and_how_large() -> None:
    (states,) = stage_tables(report(capture=STATES))
    assert facts(states) == {
        "states computed by": "reference", "rows": "11,400 (400 from earlier jobs, 256.0 MiB)",
        "rows too long": "7 cut, 0 left out", "tokens": "6,345,678, of them 4,000,000 trained on",
        "size": "3.0 GiB in 12 files, 512 B a token", "stored as": "int8",
        "layers": "2, 14, 25 (low, middle, high)", "error of storing, by layer": "2: 0.41 %, final: 0.52 %",
        "distance to transformers, by layer": "2: 1.2e-06", "time": "10m00s, 10,576 tokens/s"}


def test_train_has_a_row_for_each_candidate_and_each_checkpoint() -> None:
    wide = train_report((100,)).model_copy(update={
        "candidate": "wide", "rows": 950, "mfu": 0.314, "resumed_from_step": 40, "stopped_early": True})
    candidates, checkpoints = stage_tables(report(train=(train_report(), wide)))
    assert [len(row) for row in candidates.rows] == [len(candidates.heads)] * 2
    first, second = (dict(zip(candidates.heads, row, strict=True)) for row in candidates.rows)
    assert (first["candidate"], first["#steps"], first["#time"], first["#tokens/s"]) == (
        "default", "300", "1m30s", "4,000")
    assert (first["#rows"], first["#MFU"], first["note"]) == ("", "", ""), "not known"
    assert (first["#draft vocabulary"], first["#padding"]) == ("1,024 (99.9 %)", "1 %")
    assert (second["#rows"], second["#MFU"]) == ("950", "31.4 %")
    assert second["note"] == "resumed from step 40; stopped early"
    assert [row[0] for row in checkpoints.rows] == ["default-step-100", "default-step-200", "default-step-300",
                                                    "default-step-100"]
    assert checkpoints.rows[0][1:4] == ("1.33", "1.000", "4.00x")
    assert checkpoints.rows[0][4] == "40.3, 39.9, 39.4, 39.0, 38.5, 38.1, 37.6"


@pytest.fixture
def client(settings: Settings, database: Database) -> httpx.Client:
    from starlette.testclient import TestClient

    return TestClient(create_app(settings, database=database), base_url="http://127.0.0.1:8642")


def reports_on(client: httpx.Client, job: str) -> str:
    found = re.search(r'<section id="reports".*?</section>', client.get(f"/console/jobs/{job}").text, re.DOTALL)
    assert found is not None
    return found.group()


def test_the_page_of_a_job_has_the_reports_of_its_finished_stages_and_says_when_there_is_none(
        client: httpx.Client, database: Database, settings: Settings) -> None:
    job = Jobs(database).submit(derive(job_spec()))
    assert "No reports yet: that of a stage appears when it has finished." in reports_on(client, job.id)
    stages = settings.job_dir(job.id) / "stages"
    finish_stage(made(stages / "regenerate"), "regenerate", ANSWERS, {}, job.id)
    finish_stage(made(stages / "train" / "default"), "train", train_report(), {}, job.id)
    html = reports_on(client, job.id)
    shown = " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())
    assert "rows answered 11,400 (400 from earlier jobs)" in shown
    assert "default-step-300 4.00 1.000 4.00x" in shown
    assert "No reports yet" not in shown
    assert html.count("<caption") == html.count("<table>") == 4
    assert html.count("<th>") == 0, "every head has its scope"


def made(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory
