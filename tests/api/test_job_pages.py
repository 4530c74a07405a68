"""Pages beside that of a job: its files, its plan against what it took, its document against another job's."""

import re
from datetime import UTC, datetime, timedelta
from html import unescape

import httpx
import pytest

from eyrie_api.access.scope import Scope
from eyrie_api.clock import utc_now
from eyrie_api.contract.access import CreateProject
from eyrie_api.contract.model import Interval
from eyrie_api.contract.plan import PlannedAndActual, PlannedStages, StagePlan, TimeLeft
from eyrie_api.contract.status import JobStatus, Progress, StageStatus
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.projects import ApiKeys, Projects
from eyrie_api.decisions.job_report import planned_and_actual, time_left
from eyrie_api.http.authentication import LOCAL
from eyrie_api.http.console.job_pages import Difference, differences
from eyrie_api.http.server import create_app
from eyrie_api.planning.resolve import derive
from eyrie_api.settings import Settings
from tests.api.samples import job_body, job_spec, planned, set_stage

DATABASES = ("sqlite",)  # pages have no SQL of their own: what they read is tested on both elsewhere

T0 = datetime(2026, 1, 1, tzinfo=UTC)
HOSTILE = '"><script>alert(1)</script>'


@pytest.fixture
def client(settings: Settings, database: Database) -> httpx.Client:
    from starlette.testclient import TestClient

    return TestClient(create_app(settings, database=database), base_url="http://127.0.0.1:8642")


def test_fields_that_differ_are_found_at_any_depth_and_equal_ones_left_out() -> None:
    mine = {"name": "a", "train": {"epochs": 1, "lr": 0.1}, "sources": [{"path": "x"}, {"path": "y"}], "same": [1]}
    other = {"name": "b", "train": {"epochs": 2, "lr": 0.1}, "sources": [{"path": "x"}], "same": [1]}
    assert differences(mine, other) == (
        Difference("/name", '"a"', '"b"'), Difference("/train/epochs", "1", "2"),
        Difference("/sources/1", '{"path": "y"}', None))
    assert differences(other, other) == ()


def test_a_missing_field_is_not_null_and_a_number_is_not_a_truth_value() -> None:
    assert differences({"a": None}, {}) == (Difference("/a", "null", None),)
    assert differences({}, {"a": None}) == (Difference("/a", None, "null"),)
    assert differences({"a": True}, {"a": 1}) == (Difference("/a", "true", "1"),)
    assert differences({"a": {"b": 1}}, {"a": [1]}) == (Difference("/a", '{"b": 1}', "[1]"),)


def test_names_with_slashes_and_tildes_are_escaped_as_json_pointers_are() -> None:
    assert [one.pointer for one in differences({"a/b~c": 1}, {"a/b~c": 2})] == ["/a~1b~0c"]


def _part(key: str, start_s: int, stop_s: int | None, state: str = "Succeeded") -> StageStatus:
    stop = None if stop_s is None else T0 + timedelta(seconds=stop_s)
    return StageStatus(stage="train", key=key, state=state, started_at=T0 + timedelta(seconds=start_s),  # type: ignore[arg-type]
                       finished_at=stop)


def test_parts_of_a_stage_that_ran_together_are_counted_once_and_pauses_not_at_all() -> None:
    plan = PlannedStages(stages=(StagePlan(stage="train", tokens=1, bytes_on_disk=5, hours=0.01),))
    stages = (_part("a", 0, 100), _part("b", 50, 120), _part("c", 200, 210))
    (row,) = planned_and_actual(plan, stages, {"train": 7}, T0)
    assert row.seconds == 130.0
    assert row.time_ratio == pytest.approx(130 / 36)
    assert row.size_bytes == 7


def test_a_running_stage_has_its_time_so_far_and_no_ratio_nor_size() -> None:
    plan = PlannedStages(stages=(StagePlan(stage="train", tokens=1, bytes_on_disk=5, hours=0.01),))
    (row,) = planned_and_actual(plan, (_part("a", 0, 20), _part("b", 20, None, "Running")), {"train": 3},
                                T0 + timedelta(seconds=60))
    assert (row.seconds, row.is_running, row.time_ratio, row.size_bytes) == (60.0, True, None, None)


def test_a_stage_that_has_not_started_or_was_not_planned_has_a_row_too() -> None:
    rows = planned_and_actual(PlannedStages(stages=(StagePlan(stage="capture", tokens=1, bytes_on_disk=5, hours=1.0),)),
                              (StageStatus(stage="prove"),), {}, T0)
    assert [(row.stage, row.planned_seconds, row.seconds) for row in rows] == [
        ("capture", 3600.0, None), ("prove", None, None)]


HOURS = PlannedStages(stages=tuple(
    StagePlan(stage=stage, key=key, tokens=1, bytes_on_disk=1, hours=hours,
              hours_range=Interval(low=hours / 2, high=2 * hours))
    for stage, key, hours in (("capture", "", 1.0), ("train", "", 2.0), ("hardware", "a", 0.5),
                              ("hardware", "b", 0.5))))


def test_the_time_left_is_what_was_planned_less_what_was_taken_with_its_range() -> None:
    stages = (StageStatus(stage="capture", state="Succeeded"), _part("a", 0, 600), _part("b", 600, None, "Running"))
    left = time_left(HOURS, stages, T0 + timedelta(seconds=1800))
    assert left == TimeLeft(seconds=3600 * (2.0 + 1.0) - 1800, low=3600 * (1.0 + 0.5) - 1800,
                            high=3600 * (4.0 + 2.0) - 1800)


def test_a_running_stage_takes_at_least_as_long_as_it_expects() -> None:
    running = _part("a", 0, None, "Running").model_copy(update={
        "progress": Progress(done=1, total=9, unit="steps", eta_s=9000.0)})
    left = time_left(HOURS, (StageStatus(stage="capture", state="Succeeded"), running), T0 + timedelta(hours=5))
    assert left == TimeLeft(seconds=9000 + 3600, low=9000 + 1800, high=9000 + 7200), "it takes longer than was planned"


def test_without_a_range_of_every_stage_the_time_left_has_none() -> None:
    mixed = PlannedStages(stages=(*HOURS.stages, StagePlan(stage="tune", tokens=1, bytes_on_disk=1, hours=1.0)))
    assert time_left(mixed, (), T0) == TimeLeft(seconds=5 * 3600.0)


def test_without_a_plan_and_below_what_a_plan_knows_no_time_left_is_told() -> None:
    assert time_left(None, (), T0) is None
    short = PlannedStages(stages=(StagePlan(stage="train", tokens=1, bytes_on_disk=1, hours=0.166),))
    assert time_left(short, (), T0) is None
    assert time_left(PlannedStages(stages=(short.stages[0].model_copy(update={"hours": 0.167}),)), (), T0) is not None


def test_the_plan_that_a_job_was_accepted_with_is_answered_and_its_time_left_is_on_both_pages(
        client: httpx.Client, database: Database) -> None:
    jobs = Jobs(database)
    job, without = jobs.submit(planned(job_spec(), *HOURS.stages)).id, jobs.submit(derive(job_spec())).id
    assert PlannedStages.model_validate(client.get(f"/v1alpha1/jobs/{job}/plan").json()) == HOURS
    assert client.get(f"/v1alpha1/jobs/{without}/plan").status_code == 404
    assert "whole job" not in client.get("/").text, "none of them runs"
    for one in (job, without):
        jobs.save_status(one, JobStatus(phase="Running", started_at=utc_now()))
        set_stage(jobs, one, StageStatus(stage="capture", state="Running", started_at=utc_now()))
    said = re.findall(r"whole job: about (\S+) left \((\S+) to (\S+)\)", client.get("/").text)
    assert said in ([("4h00m", "2h00m", "8h00m")], [("3h59m", "1h59m", "7h59m")]), "of the one with a plan"
    page = client.get(f"/console/jobs/{job}").text
    assert "so far, about" in page
    assert "by the plan it was accepted with" in page
    assert "so far, about" not in client.get(f"/console/jobs/{without}").text


def test_the_figures_of_plan_against_actual_and_the_time_left_are_answered_as_the_page_has_them(
        client: httpx.Client, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, now = Jobs(database), T0 + timedelta(hours=3)
    job, without = jobs.submit(planned(job_spec(), *HOURS.stages)).id, jobs.submit(derive(job_spec())).id
    monkeypatch.setattr("eyrie_api.http.routes.outcomes.utc_now", lambda: now)
    for one in (job, without):
        jobs.save_status(one, JobStatus(phase="Running", started_at=T0))
        set_stage(jobs, one, StageStatus(stage="capture", state="Succeeded", started_at=T0,
                                        finished_at=T0 + timedelta(hours=2)))
        set_stage(jobs, one, StageStatus(stage="train", state="Running", started_at=T0 + timedelta(hours=2)))
    answer = PlannedAndActual.model_validate(client.get(f"/v1alpha1/jobs/{job}/plan/actual").json())
    stages = {one.stage: one for one in answer.stages}
    assert (stages["capture"].seconds, stages["capture"].time_ratio) == (7200.0, 2.0)
    assert (stages["train"].seconds, stages["train"].is_running) == (3600.0, True)
    assert stages["hardware"].seconds is None
    assert answer.time_left == time_left(HOURS, jobs.get(job).status.stages, now)
    assert answer.time_left == TimeLeft(seconds=7200.0, low=3600 * 0.5, high=3600 * 5.0)
    words = "about 2h00m left (30m00s to 5h00m)"
    assert words in client.get("/").text
    assert words in client.get(f"/console/jobs/{job}").text
    assert words.capitalize() in client.get(f"/console/jobs/{job}/plan").text
    assert client.get(f"/v1alpha1/jobs/{without}/plan/actual").status_code == 404
    jobs.save_status(job, JobStatus(phase="Cancelled", started_at=T0, finished_at=now))
    assert client.get(f"/v1alpha1/jobs/{job}/plan/actual").json()["time_left"] is None


def test_a_submitted_job_is_kept_with_its_plan(client: httpx.Client) -> None:
    job = client.post("/v1alpha1/jobs", json=job_body()).json()["id"]
    stages = client.get(f"/v1alpha1/jobs/{job}/plan").json()["stages"]
    planned = client.post("/v1alpha1/plans", json=job_body(reuse="never")).json()["stages"]
    assert [(one["stage"], one["hours"]) for one in stages] == [(one["stage"], one["hours"]) for one in planned]


def test_a_stage_is_compared_with_what_was_planned_when_its_job_was_accepted(
        client: httpx.Client, database: Database) -> None:
    jobs = Jobs(database)
    job, without = jobs.submit(planned(job_spec(), *HOURS.stages)).id, jobs.submit(
        derive(job_spec(target={"model": "/gone"}))).id
    set_stage(jobs, job, StageStatus(stage="capture", state="Succeeded", started_at=T0,
                                    finished_at=T0 + timedelta(hours=3)))
    page = client.get(f"/console/jobs/{job}/plan").text
    row = [unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", page.split("<td>capture</td>")[1])]
    assert row[:4] == ["1h00m", "30m00s to 2h00m", "3h00m", "3.00x"]
    page = client.get(f"/console/jobs/{without}/plan")
    assert page.status_code == 200
    assert "No plan was kept" in page.text


def test_compared_documents_show_fields_as_text(client: httpx.Client, database: Database) -> None:
    mine, other = (Jobs(database).submit(derive(job_spec(name=name, labels=labels))) for name, labels in (
        ("mine", {"note": HOSTILE}), ("other", {})))
    page = client.get(f"/console/jobs/{mine.id}/diff", params={"with": other.id})
    assert HOSTILE not in page.text
    assert "/labels/note" in page.text
    assert "script" in unescape(page.text)
    assert "form-action 'self'" in page.headers["content-security-policy"]
    assert client.get(f"/console/jobs/{mine.id}/diff").status_code == 200


def test_a_job_that_the_caller_may_not_read_is_not_compared_with(settings: Settings, database: Database) -> None:
    from starlette.testclient import TestClient

    scopes = []
    for project in ("team", "others"):
        Projects(database).create(CreateProject(name=project))
        scopes.append(Scope(LOCAL, project))
    secret = ApiKeys(database, scope=scopes[0]).create(name="k", role="viewer")[1]
    mine = Jobs(database, scope=scopes[0]).submit(derive(job_spec(name="mine")))
    other = Jobs(database, scope=scopes[1]).submit(derive(job_spec(name="theirs", serve={"endpoint": "theirs"})))
    app = create_app(settings.model_copy(update={"token": "installation-token-of-these-tests"}), database=database)
    client = TestClient(app, base_url="http://127.0.0.1:8642", headers={"authorization": f"Bearer {secret}"})
    page = client.get(f"/console/jobs/{mine.id}/diff", params={"with": other.id})
    assert page.status_code == 404
    assert "theirs" not in page.text
    assert client.get(f"/console/jobs/{other.id}/diff", params={"with": mine.id}).status_code == 404


def test_a_stage_that_waits_for_a_node_says_why_and_what_to_do_on_the_page_of_its_job(
        client: httpx.Client, database: Database) -> None:
    job = Jobs(database).submit(derive(job_spec()))
    set_stage(Jobs(database), job.id, StageStatus(stage="train", key="base", reason="WaitingForNodes",
                                                 message="no node fits: 0/3 nodes", hint="scale the pool up"))
    page = client.get(f"/console/jobs/{job.id}").text
    assert "<strong>WaitingForNodes</strong>: no node fits: 0/3 nodes<br>scale the pool up" in page
