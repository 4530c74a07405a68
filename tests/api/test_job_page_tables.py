"""Tables of a job's page: each row of the decision, the leaderboard and the proof has the values of the API."""

import re
from html import unescape
from typing import Any

import httpx
import pytest
from sqlalchemy import delete

from eyrie_api.contract.load import LoadCell, LoadReport, Quantiles
from eyrie_api.contract.model import Interval
from eyrie_api.contract.promotion import PromotionPolicy
from eyrie_api.contract.status import JobStatus, StageStatus
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.results import ResultFilter, ResultRecord, Results
from eyrie_api.database.tables import JobRow, ResultRow
from eyrie_api.decisions.leaderboard import MeasuredCheckpoint
from eyrie_api.decisions.promotion import decide
from eyrie_api.http.server import create_app
from eyrie_api.planning.resolve import derive
from eyrie_api.planning.sweep import expand
from eyrie_api.settings import Settings
from tests.api.figures.job_values import finish_job, prove_report
from tests.api.samples import benchmark_report, finish_stage, job_spec, set_stage
from tests.api.test_promotion import LOSSY, STEADY, SUITES, proof_of

DATABASES = ("sqlite",)  # pages have no SQL of their own: what they read is tested on both elsewhere


@pytest.fixture
def client(settings: Settings, database: Database) -> httpx.Client:
    from starlette.testclient import TestClient

    return TestClient(create_app(settings, database=database), base_url="http://127.0.0.1:8642")


def rows_of(client: httpx.Client, job: str, section: str) -> list[list[str]]:
    """Texts of the cells below a heading of the job's page."""
    page = client.get(f"/console/jobs/{job}").text
    (part,) = re.findall(rf'<section aria-labelledby="{section}">(.*?)</section>', page, re.DOTALL)
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", part.split("<tbody>")[1], re.DOTALL)
    return [[" ".join(unescape(re.sub(r"<[^>]+>", "", cell)).split())
             for cell in re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)] for row in rows]


def figure(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def within(interval: dict[str, float] | None) -> str:
    return "" if interval is None else f"{interval['low']:.2f} to {interval['high']:.2f}"


@pytest.mark.parametrize("candidate", [STEADY, LOSSY], ids=["promoted", "refused"])
def test_a_row_of_the_decision_has_name_result_value_interval_threshold_and_finding_of_its_check(
        client: httpx.Client, database: Database, candidate: Any) -> None:
    decision = decide(PromotionPolicy(), candidate, None, SUITES, proof_of(candidate))
    job = Jobs(database).submit(derive(job_spec())).id
    Jobs(database).save_status(job, JobStatus(phase="Succeeded", decision=decision))
    checks = client.get(f"/v1alpha1/jobs/{job}").json()["status"]["decision"]["checks"]
    assert len(checks) == len(decision.checks) > 3
    assert any(one["interval"] for one in checks)
    assert all(one["passed"] for one in checks) == decision.promote
    assert rows_of(client, job, "decision") == [
        [one["name"], "Passed" if one["passed"] else "Refused", figure(one["figure"], 3), within(one["interval"]),
         figure(one["bound"]), one["words"]] for one in checks]


def test_below_the_checks_of_a_decision_are_the_reasons_that_are_no_check_once(
        client: httpx.Client, database: Database) -> None:
    decision = decide(PromotionPolicy(), STEADY, None, SUITES, proof_of(STEADY))
    words = "with 4 users at once a chain of 3 needs tau 2.90 <for> 1.05x"
    decision = decision.model_copy(update={"reasons": (*decision.reasons, words)})
    job = Jobs(database).submit(derive(job_spec())).id
    Jobs(database).save_status(job, JobStatus(phase="Succeeded", decision=decision))
    page = unescape(client.get(f"/console/jobs/{job}").text)
    assert f"<p>{words}</p>" in page
    for check in decision.checks:
        assert f"<p>{check.words}</p>" not in page


def test_a_row_of_the_leaderboard_has_the_figures_of_its_entry(client: httpx.Client, database: Database) -> None:
    job = Jobs(database).submit(derive(job_spec())).id
    measured = {"a-step-1": ({"chat": (2.0, 1.8), "math": (2.2, 2.0)}, True),
                "b-step-1": ({"chat": (1.2, 1.1), "math": (3.4, 1.9)}, False)}
    for checkpoint, (speedups, lossless) in measured.items():
        made = benchmark_report(checkpoint, speedups, lossless=lossless)
        cells = tuple(one.model_copy(update={
            "speedup_interval": Interval(low=0.9 * one.speedup, high=1.2 * one.speedup)}) for one in made.cells)
        measured = MeasuredCheckpoint(job_id=job, target="t", family="eagle3", tuned=checkpoint == "a-step-1",
                                      report=made.model_copy(update={"cells": cells}))
        Results(database).record(measured, f"/{checkpoint}")
    entries = client.get("/v1alpha1/leaderboard", params={"job_id": job}).json()["items"]
    assert {one["lossless"] for one in entries} == {True, False}

    def row(one: dict[str, Any]) -> list[str]:
        tree, slowest = one["tree"], min(one["suites"], key=one["suites"].__getitem__)
        return [str(one["rank"]), one["checkpoint"] + (" (tuned)" if one["tuned"] else ""), one["family"],
                f"{tree['num_steps']}/{tree['top_k']}/{tree['num_draft_tokens']}" if tree else "no drafter",
                figure(one["tau"]), f"{one['speedup']:.2f}x", within(one["speedup_interval"]),
                figure(one["speedup_greedy"]), figure(one["speedup_sampled"]), figure(one["tokens_per_s"], 0),
                "identical" if one["lossless"] else "CHANGED", f"{slowest} {one['suites'][slowest]:.2f}x"]

    assert rows_of(client, job, "leaderboard") == [row(one) for one in entries]


def test_a_row_of_the_leaderboard_has_the_values_of_the_sweep_that_its_candidate_was_trained_with(
        client: httpx.Client, database: Database) -> None:
    axes = [{"field": "data.mix", "values": [{"chats": 2, "tools": 1}, {"chats": 1, "tools": 3}]},
            {"field": "drafter.intermediate_size", "values": [64, 128]}]
    spec = job_spec(data={"sources": [{"path": "c.jsonl", "name": "chats"}, {"path": "t.jsonl", "name": "tools"}]},
                    sweep={"axes": axes})
    job, last = Jobs(database).submit(derive(spec)).id, expand(spec)[-1].name
    made = benchmark_report(f"{last}-step-1", {"chat": (2.0, 1.8)}).model_copy(update={"candidate": last})
    measured = MeasuredCheckpoint(job_id=job, target="t", family="eagle3", tuned=False, report=made)
    Results(database).record(measured, "/there")
    (entry,) = client.get("/v1alpha1/leaderboard", params={"job_id": job}).json()["items"]
    assert entry["axes"] == {"data.mix": {"chats": 1, "tools": 3}, "drafter.intermediate_size": 128}
    assert "mix chats 1, tools 3; intermediate_size 128" in rows_of(client, job, "leaderboard")[0][1]


def test_a_job_that_is_deleted_while_the_leaderboard_is_read_is_no_error(database: Database) -> None:
    job = Jobs(database).submit(derive(job_spec())).id

    class Deleted(Results):
        def list(self, wanted: ResultFilter | None = None) -> tuple[ResultRecord, ...]:
            found = super().list(wanted)
            with database.writing() as session:
                session.execute(delete(ResultRow).where(ResultRow.job_id == job))
                session.execute(delete(JobRow).where(JobRow.id == job))
            return found

    results = Deleted(database)
    results.record(MeasuredCheckpoint(job_id=job, target="t", family="eagle3", tuned=False,
                                      report=benchmark_report("a-step-1", {"chat": (2.0, 1.8)})), "/there")
    assert [one.axes for one in results.leaderboard()] == [{}]
    assert results.leaderboard() == ()


def slower(load: LoadReport, cell: LoadCell, variant: str, level: float) -> LoadCell:
    """A time to first token of its own for each variant and level; none at the highest level without a drafter."""
    p50 = (0.0123 if variant == "off" else 0.0311) * level
    seconds = Quantiles(mean=p50, p50=p50, p90=2 * p50, p99=3 * p50)
    is_unknown = variant == "off" and level == max(one.level for one in load.levels)
    return cell.model_copy(update={"ttft_s": None if is_unknown else seconds})


def test_a_row_of_the_proof_has_the_first_token_of_both_variants_in_milliseconds_next_to_their_ratio(
        client: httpx.Client, database: Database, settings: Settings) -> None:
    jobs = Jobs(database)
    job = jobs.submit(derive(job_spec())).id
    stages = tuple(StageStatus(stage=stage, state="Succeeded") for stage in ("tune", "prove"))
    jobs.save_status(job, JobStatus(phase="Succeeded", stages=stages))
    for stage in stages:
        set_stage(jobs, job, stage)
    directory = settings.stage_dir(job, "prove", "").parents[1]
    finish_job(directory, job)
    made = prove_report()
    assert made.load is not None
    load = made.load.model_copy(update={"levels": tuple(
        one.model_copy(update={"total": slower(made.load, one.total, one.variant, one.level)})
        for one in made.load.levels)})
    finish_stage(directory / "stages" / "prove", "prove", made.model_copy(update={"load": load}), {}, job)
    answered = client.get(f"/v1alpha1/jobs/{job}/report").json()["prove"]["load"]
    found = {(one["variant"], one["level"]): one["total"]["ttft_s"] for one in answered["levels"]}

    def both(level: float, quantile: str) -> str:
        times = [found[variant, level] for variant in ("candidate", "off")]
        return " against ".join("-" if one is None else f"{1000 * one[quantile]:.0f}" for one in times)

    assert both(4.0, "p99") == "373 against 148"
    assert both(64.0, "p50") == "1990 against -"
    assert rows_of(client, job, "proof") == [
        [f"{one['level']:g}", "candidate against off", f"{one['throughput_ratio']:.2f}x",
         within(one["throughput_interval"]), both(one["level"], "p50"), both(one["level"], "p99"),
         f"{one['ttft_p99_ratio']:.2f}x", f"{one['identical']} of {one['compared']}"]
        for one in answered["comparisons"]]
