"""The page of a job in a real Chromium: logs, artifacts, plan, compared documents, the leaderboard in other orders."""

import itertools
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from eyrie_api.clock import utc_now
from eyrie_api.contract.model import Interval
from eyrie_api.contract.plan import StagePlan
from eyrie_api.contract.status import JobStatus, Progress, StageStatus
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.results import Results
from eyrie_api.decisions.leaderboard import MeasuredCheckpoint
from tests.api.figures.job_values import tune_report
from tests.api.samples import benchmark_report as reported
from tests.api.samples import finish_stage, job_spec, planned, record_event, set_stage
from tests.api.test_stage_tables import ANSWERS, STATES
from tests.browser.conftest import LOOKS, SHOTS, SIZES, TOKEN, assert_accessible, picture
from tests.pipelines.rehearsal.rehearsal_stage import benchmark_report
from tests.workers.plots.synthetic import train_report

OpenPage = Callable[..., Any]
Server = tuple[str, Database]
_SPEEDUPS = {"a-step-1": 1.5, "b-step-1": 1.9, "b-step-2": 0.9}
_FAMILIES = {"a-step-1": "eagle3", "b-step-1": "dflash", "b-step-2": "dflash"}
_PLANNED = tuple(
    StagePlan(stage=name, tokens=2_000, bytes_on_disk=2_000_000, hours=hours)
    for name, hours in (("regenerate", 0.02), ("capture", 0.01), ("train", 0.05), ("tune", 0.02)))


def job_in(server: Server, tmp_path: Path, name: str = "nightly", **fields: Any) -> tuple[str, Path]:
    """A job whose stages no worker runs, and the directory of its stages."""
    job = Jobs(server[1]).submit(planned(job_spec(name=name, target={"model": "quickstart"}, **fields), *_PLANNED))
    return job.id, tmp_path / "guarded" / "jobs" / job.id / "stages"


def set_stages(server: Server, job: str, phase: Any, *stages: StageStatus) -> None:
    for one in stages:
        set_stage(Jobs(server[1]), job, one)
    Jobs(server[1]).save_status(job, JobStatus(phase=phase, stages=stages, started_at=utc_now()))


def stage(name: Any, state: Any = "Succeeded", key: str = "", **fields: Any) -> StageStatus:
    now = utc_now()
    return StageStatus(stage=name, key=key, state=state, attempt=1, started_at=now - timedelta(seconds=90),
                       finished_at=None if state == "Running" else now, **fields)


def write_log(directory: Path, text: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "log.txt").open("a") as log:
        log.write(text)


def measure(server: Server, job: str) -> None:
    """Three checkpoints of two families."""
    for checkpoint, speedup in _SPEEDUPS.items():
        made, interval = benchmark_report(checkpoint, speedup), Interval(low=0.93 * speedup, high=1.06 * speedup)
        cells = tuple(cell.model_copy(update={"speedup_interval": interval}) for cell in made.cells)
        measured = MeasuredCheckpoint(job_id=job, target="quickstart", family=_FAMILIES[checkpoint], tuned=False,
                                      report=made.model_copy(update={"cells": cells}))
        Results(server[1]).record(measured, f"/{checkpoint}")


def signed_in(server: Server, open_page: OpenPage, path: str, **options: Any) -> Any:
    page = open_page(**options)
    answer = page.request.post(server[0] + "/console/sign-in", headers={"authorization": f"Bearer {TOKEN}"})
    assert answer.status == 204
    page.goto(server[0] + path)
    return page


def test_the_log_of_a_running_stage_is_followed_and_stays_open_when_the_stage_ends(
        guarded: Server, tmp_path: Path, open_page: OpenPage, faults: list[str]) -> None:
    job, stages = job_in(guarded, tmp_path)
    set_stages(guarded, job, "Running", stage("train", "Running", "base"))
    page = signed_in(guarded, open_page, f"/console/jobs/{job}")
    page.locator("details.log summary").click()
    page.get_by_text("Waiting for output of the stage.").wait_for()
    write_log(stages / "train" / "base", "".join(f"step {step}\n" for step in range(900)) + "<b>not bold</b>\n")
    shown = page.get_by_role("region", name="Log of train base")
    shown.filter(has_text="<b>not bold</b>").wait_for()
    assert "step 100\n" not in shown.inner_text(), "the last lines"
    shown.focus()
    set_stages(guarded, job, "Running", stage("train", "Running", "base", progress=Progress(done=1, total=2)))
    page.locator(".pipeline progress").wait_for()
    write_log(stages / "train" / "base", "the last line\n")
    shown.filter(has_text="the last line").wait_for()
    set_stages(guarded, job, "Cancelled", stage("train", "Cancelled", "base"))
    page.locator("h1 .badge", has_text="Cancelled").wait_for()
    page.get_by_text("The last 500 lines.").wait_for()
    assert "the last line" in shown.inner_text()
    assert shown.evaluate("one => one === document.activeElement"), "focus stays in the log"
    assert shown.evaluate("one => one.scrollTop > 0"), "and so does its position"
    assert faults == []


def test_the_pipeline_is_a_graph_whose_parts_fan_out_between_the_stages_before_and_after(
        guarded: Server, tmp_path: Path, open_page: OpenPage, faults: list[str]) -> None:
    sweep, stages = job_in(guarded, tmp_path, "sweep")
    parts = [stage("train", "Running" if number > 3 else "Succeeded", f"rate-{number}",
                   progress=Progress(done=2400, total=9000, unit="steps", rate=12.3, eta_s=540)) for number in range(8)]
    set_stages(guarded, sweep, "Running", stage("regenerate"), stage("capture"), *parts)
    write_log(stages / "train" / "rate-0", "the first line\n")
    single, _ = job_in(guarded, tmp_path, "single")
    set_stages(guarded, single, "Failed", stage("regenerate"), stage("capture", "Failed", reason="Crashed",
                                                                     message="it crashed", hint="look at its log"))
    SHOTS.mkdir(parents=True, exist_ok=True)
    for (width, height), scheme in LOOKS:
        for job, name in ((sweep, "sweep"), (single, "single")):
            page = signed_in(guarded, open_page, f"/console/jobs/{job}", color_scheme=scheme,
                             viewport={"width": width, "height": height})
            assert [one.split()[0] for one in page.locator("ol.pipeline > li h3").all_inner_texts()] == [
                "regenerate", "capture", "train", "benchmark", "tune", "prove"], "an ordered list"
            places = page.locator("ol.pipeline > li").evaluate_all("""stages => stages.map(one =>
                [...one.querySelectorAll(".node")].map(node => (({ x, y, right, bottom }) => [x, y, right, bottom])(
                    node.getBoundingClientRect())))""")
            assert [len(one) for one in places] == [1, 1, 8 if job == sweep else 1, 1, 1, 1]
            is_wide = width == SIZES[-1][0]
            for before, after in itertools.pairwise(places):
                edge, follows = (2, 0) if is_wide else (3, 1)
                assert max(one[edge] for one in before) < min(one[follows] for one in after), "in order, with room"
                assert not is_wide or before[0][1] == after[0][1], "edges between stages are straight"
            for above, below in itertools.pairwise(places[2]):
                assert above[0] == below[0]
                assert above[3] < below[1], "the parts of a stage are one below the other"
            arrows = page.locator("li:not(:first-child) > .box").evaluate_all("""boxes => boxes.map(one => {
                const edge = getComputedStyle(one, "::before");
                return edge.backgroundImage.includes("conic-gradient") && parseFloat(edge.width) > 12; })""")
            assert arrows == [True] * (12 if job == sweep else 5), "an arrow into each node but the first"
            page.locator("section[aria-labelledby=pipeline]").screenshot(
                path=SHOTS / f"pipeline-{name}-{width}-{scheme}.png")
            assert_accessible(page, f"{name} at {width}, {scheme}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            if job == sweep:
                page.locator("summary", has_text="Log of train rate-0").click()
                page.get_by_role("region", name="Log of train rate-0").filter(has_text="the first line").wait_for()
                shown = page.locator("#log-train-rate-0 .tail").evaluate("""one => {
                    const { top, bottom } = one.getBoundingClientRect();
                    return top >= 0 && bottom <= innerHeight + 1; }""")
                assert shown, "an open log is in sight, wherever it is drawn"
                assert_accessible(page, f"a log at {width}, {scheme}", "section[aria-labelledby=pipeline]")
            page.close()
    assert faults == []


def test_a_log_that_is_empty_or_missing_says_so_with_a_hint(
        guarded: Server, tmp_path: Path, open_page: OpenPage, faults: list[str]) -> None:
    job, stages = job_in(guarded, tmp_path)
    set_stages(guarded, job, "Failed", stage("capture"), stage("train", "Failed", "base", reason="Crashed"))
    write_log(stages / "capture", "")
    page = signed_in(guarded, open_page, f"/console/jobs/{job}")
    for name, said in (("capture", "The log is empty."), ("train", "has no log; hint: it has: capture, train base")):
        box = page.locator(".pipeline li", has=page.locator("h3", has_text=name))
        box.locator("summary").click()
        box.get_by_text(said).wait_for()
    assert [one for one in faults if "404" not in one] == [], "Chromium logs the answer that there is no log"


def test_files_and_reports_are_shown_as_stages_finish_and_files_can_be_downloaded(
        guarded: Server, tmp_path: Path, open_page: OpenPage, faults: list[str]) -> None:
    job, stages = job_in(guarded, tmp_path)
    set_stages(guarded, job, "Running", stage("tune", "Running"))
    page = signed_in(guarded, open_page, f"/console/jobs/{job}")
    page.get_by_text("No files yet").wait_for()
    page.get_by_text("No reports yet").wait_for()
    page.evaluate("window.stays = true")
    finish_stage(stages / "tune", "tune", tune_report(), {"a/tree.json": bytes(2048), "b.txt": b"text"}, job)
    (stages / "train" / "base").mkdir(parents=True)
    finish_stage(stages / "train" / "base", "train", train_report(), {}, job)
    set_stages(guarded, job, "Running", stage("tune"))
    page.get_by_text("tune: 2 files, 2.0 KiB").wait_for()
    assert page.locator("#files tbody tr").all_inner_texts() == ["tune\t\ta/tree.json\t2.0 KiB", "tune\t\tb.txt\t4 B"]
    assert page.get_by_role("region", name="Train: candidates").locator("tbody tr").count() == 1
    assert page.evaluate("window.stays"), "the page was loaded again"
    with page.expect_download() as download:
        page.get_by_role("link", name="a/tree.json").click()
    assert download.value.path().read_bytes() == bytes(2048)
    assert faults == []


def test_plan_and_actual_are_side_by_side_when_asked_for(
        guarded: Server, tmp_path: Path, open_page: OpenPage, faults: list[str]) -> None:
    job, _ = job_in(guarded, tmp_path)
    set_stages(guarded, job, "Running", stage("regenerate"), stage("capture", "Running"))
    page = signed_in(guarded, open_page, f"/console/jobs/{job}")
    page.get_by_text("Compare by stage").click()
    rows = page.locator("#plan tbody tr")
    rows.first.wait_for()
    assert [one.split("\t")[0] for one in rows.all_inner_texts()][:3] == ["regenerate", "capture", "train"]
    assert rows.all_inner_texts()[0].split("\t")[1:4] == ["1m12s", "1m30s", "1.25x"]
    assert "so far" in rows.all_inner_texts()[1].split("\t")[2]
    assert "As planned when the job was accepted" in page.locator("#plan").inner_text()
    assert faults == []


def test_two_documents_are_compared_by_a_form_that_needs_no_script(
        guarded: Server, tmp_path: Path, open_page: OpenPage) -> None:
    mine, _ = job_in(guarded, tmp_path, "mine", serve={"endpoint": "e"})
    other, _ = job_in(guarded, tmp_path, "other", serve={"endpoint": "e"}, train={"epochs": 3})
    page = signed_in(guarded, open_page, f"/console/jobs/{mine}", java_script_enabled=False)
    page.get_by_role("link", name="compare with another job").click()
    page.get_by_label("Id of the other job").fill("none-of-that-name")
    page.get_by_role("button", name="Compare").click()
    page.locator("#missing", has_text="none-of-that-name").wait_for()
    page.get_by_label("Id of the other job").fill(other)
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("heading", name="2 differences from other").wait_for()
    assert [row.split("\t")[0] for row in page.locator("tbody tr").all_inner_texts()] == ["/name", "/train/epochs"]


def test_the_leaderboard_is_sorted_and_filtered_and_stays_so_while_the_page_changes(
        guarded: Server, tmp_path: Path, open_page: OpenPage, faults: list[str]) -> None:
    job, _ = job_in(guarded, tmp_path)
    measure(guarded, job)
    set_stages(guarded, job, "Running", stage("tune", "Running"))
    page = signed_in(guarded, open_page, f"/console/jobs/{job}")
    section = page.locator("section[aria-labelledby=leaderboard]")

    def names() -> list[str]:
        return [row.split("\t")[1] for row in section.locator("tbody tr:visible").all_inner_texts()]

    assert names() == ["b-step-1", "a-step-1", "b-step-2"], "in the server's order"
    head = section.locator("th", has_text="checkpoint")
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert names() == ["a-step-1", "b-step-1", "b-step-2"]
    speedup = section.locator("th", has_text="speed-up")
    speedup.get_by_role("button").click()
    assert names() == ["b-step-1", "a-step-1", "b-step-2"], "numbers begin with the largest"
    speedup.get_by_role("button").press("Enter")
    assert speedup.get_attribute("aria-sort") == "ascending"
    assert section.locator("th[aria-sort]").count() == 1
    section.get_by_label("Family").select_option("dflash")
    section.locator("tbody tr", has_text="a-step-1").wait_for(state="detached")
    assert names() == ["b-step-2", "b-step-1"]
    record_event(Jobs(guarded[1]), job, "Measured", "another event")
    Results(guarded[1]).record(MeasuredCheckpoint(job_id=job, target="quickstart", family="dflash", tuned=False,
                                                  report=benchmark_report("b-step-3", 1.2)), "/b-step-3")
    set_stages(guarded, job, "Running", stage("tune", "Running", progress=Progress(done=1, total=2)))
    section.locator("tbody tr:visible", has_text="b-step-3").wait_for()
    assert names() == ["b-step-2", "b-step-3", "b-step-1"]
    assert section.get_by_label("Family").input_value() == "dflash"
    assert faults == []


def test_a_leaderboard_by_suite_and_temperature_has_their_ranks_and_its_address_brings_it_back(
        guarded: Server, tmp_path: Path, open_page: OpenPage, faults: list[str]) -> None:
    job, _ = job_in(guarded, tmp_path)
    measured = {"a-step-1": {"chat": (2.0, 1.8), "math": (2.2, 2.0)},
                "b-step-1": {"chat": (1.2, 1.1), "math": (3.4, 1.9)}}
    for checkpoint, speedups in measured.items():
        Results(guarded[1]).record(MeasuredCheckpoint(job_id=job, target="quickstart", family="eagle3", tuned=False,
                                                      report=reported(checkpoint, speedups)), f"/{checkpoint}")
    set_stages(guarded, job, "Succeeded", stage("tune"))
    page = signed_in(guarded, open_page, f"/console/jobs/{job}")
    section = page.locator("section[aria-labelledby=leaderboard]")

    def rows() -> list[tuple[str, str]]:
        cells = [row.split("\t") for row in section.locator("tbody tr").all_inner_texts()]
        return [(one[1], one[5]) for one in cells]

    assert rows() == [("a-step-1", "2.00x"), ("b-step-1", "1.90x")]
    figure = page.locator("figure[data-name=leaderboard] figcaption")
    figure.filter(has_text="a-step-1 leads with 2.00x").wait_for()
    assert section.locator("select").count() == 2, "what occurs once is no choice"
    suite, temperature = section.get_by_label("Suite"), section.get_by_label("Temperature")
    assert suite.locator("option").all_inner_texts() == ["all", "chat", "math"]
    held = list[Any]()
    page.route("**/live?suite=math", lambda route: held.append(route), times=1)
    suite.select_option("math")
    loading = section.get_by_text("Loading this selection.")
    loading.wait_for()
    while not held:  # the words are there before the request; the test's time limit ends this
        page.wait_for_timeout(20)
    held[0].continue_()
    section.locator("tbody tr", has_text="2.65x").wait_for()
    assert loading.count() == 0
    assert rows() == [("b-step-1", "2.65x"), ("a-step-1", "2.10x")]
    figure.filter(has_text="b-step-1 leads with 2.65x").wait_for()
    temperature.select_option(label="1")
    section.locator("tbody tr", has_text="1.90x").wait_for()
    assert rows() == [("a-step-1", "2.00x"), ("b-step-1", "1.90x")]
    assert page.url.endswith(f"/console/jobs/{job}?suite=math&temperature=1.0")
    page.reload()
    assert rows() == [("a-step-1", "2.00x"), ("b-step-1", "1.90x")]
    page.get_by_text("of the selection (suite math, temperature 1)").wait_for()
    assert suite.input_value() == "math"
    asked = page.request.get(f"{guarded[0]}/v1alpha1/leaderboard?job_id={job}&suite=math&temperature=1").json()
    assert [(one["checkpoint"], f"{one['speedup']:.2f}x") for one in asked["items"]] == rows()
    assert faults == []
    plain = signed_in(guarded, open_page, f"/console/jobs/{job}", java_script_enabled=False)
    section = plain.locator("section[aria-labelledby=leaderboard]")
    section.get_by_label("Suite").select_option("math")
    section.get_by_role("button", name="Show").click()
    section.locator("tbody tr", has_text="2.65x").wait_for()


def test_the_page_is_accessible_and_fits_with_everything_open(
        guarded: Server, tmp_path: Path, open_page: OpenPage, faults: list[str]) -> None:
    job, stages = job_in(guarded, tmp_path, labels={"note": "a long value " * 12})
    other, _ = job_in(guarded, tmp_path, "other", train={"epochs": 3}, serve={"endpoint": "elsewhere"})
    measure(guarded, job)
    finish_stage(stages / "tune", "tune", tune_report(),
                 {f"shard-{number:05}.states": bytes(1000 * number) for number in range(12)}, job)
    for name, key, report in (("regenerate", "", ANSWERS), ("capture", "", STATES), ("train", "a", train_report())):
        (stages / name / key).mkdir(parents=True)
        finish_stage(stages / name / key, name, report, {}, job)
    write_log(stages / "capture", "".join(f"row {row}: a line that is rather longer than a telephone is wide {row}\n"
                                          for row in range(600)))
    set_stages(guarded, job, "Failed", stage("regenerate"), stage("capture"), stage("train", key="a"),
               stage("train", key="b"), stage("tune"), stage("prove", "Failed", reason="Crashed", message="exit 1"))
    SHOTS.mkdir(parents=True, exist_ok=True)
    for (width, height), scheme in LOOKS:
        options = {"viewport": {"width": width, "height": height}, "color_scheme": scheme}
        page = signed_in(guarded, open_page, f"/console/jobs/{job}", **options)
        for name, path in (("job-page", ""), ("job-diff", f"/diff?with={other}"), ("job-plan", "/plan")):
            page.goto(f"{guarded[0]}/console/jobs/{job}{path}")
            page.wait_for_load_state("networkidle")
            if not path:
                picture(page, "selection", "section[aria-labelledby=leaderboard]", "figure[data-name=leaderboard]")
                page.locator("#log-capture- summary").click()
                page.get_by_text("The last 500 lines.").wait_for()
                page.get_by_text("Compare by stage").click()
                page.locator("#plan table").wait_for()
                page.locator("#files summary").click()
            page.screenshot(path=SHOTS / f"{name}-{width}-{scheme}.png", full_page=True)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} is wider than {width}"
            assert_accessible(page, f"{name} at {width}, {scheme}")
    assert faults == []
