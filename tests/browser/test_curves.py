"""Training curves as a person uses them: a real Chromium, the real API, metrics of made-up trainings."""

import itertools
import json
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from eyrie_api.clock import utc_now
from eyrie_api.contract.status import JobStatus, Progress, StageStatus
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.planning.resolve import derive
from tests.api.samples import job_spec, record_metrics
from tests.browser.conftest import LOOKS, SHOTS, TOKEN, assert_accessible, key_in, picture, signed_in, within

OpenPage = Callable[..., Any]
POSITIONS = (0.8, 0.7, 0.6)


def trained(jobs: Jobs, name: str, ends: dict[str, int], project: str = "default") -> str:
    """A job whose candidates have metrics up to the given steps."""
    job_id = jobs.submit(derive(job_spec(name=name, serve={"endpoint": f"{project}-endpoint"})), project=project).id
    for number, (key, end) in enumerate(ends.items()):
        record(jobs, job_id, key, range(10, end + 1, 10), 1.0 + 0.2 * number)
    return job_id


def record(jobs: Jobs, job_id: str, key: str, steps: range, scale: float) -> None:
    """Metrics as the train stage logs them: every ten steps, and of an evaluation every hundred."""
    now, points = utc_now(), list[tuple[str, int, float, datetime]]()
    for step in steps:
        wave = 0.3 * ((step * 7919) % 97) / 97
        logged = {"loss": scale * (0.5 + 4.0 / (1 + step / 60)) + wave, "learning_rate": 1e-4 * (1 - step / 2000),
                  "grad_norm": scale + wave, "tokens_per_s": 5000.0 * scale + 900 * wave}
        if step % 100 == 0:
            grown = 1 - 1 / (1 + step / 100)
            logged |= {"evaluation_loss": scale * (0.6 + 4.0 / (1 + step / 60)), "theoretical_speedup": 1 + grown}
            for place, most in enumerate(POSITIONS):
                logged |= {f"acceptance/{place}": most * grown / scale, f"accuracy/{place}": 0.9 * most * grown / scale}
        points += [(metric, step, value, now) for metric, value in logged.items()]
    record_metrics(jobs, job_id, "train", key, points)


def in_training(jobs: Jobs, job_id: str, keys: tuple[str, ...]) -> None:
    """The answers and states are there, and these candidates are being trained."""
    now = utc_now()
    before = [StageStatus(stage=one, state="Succeeded", attempt=1, started_at=now - timedelta(seconds=ago),
                          finished_at=now - timedelta(seconds=ago - 300))
              for one, ago in (("regenerate", 900), ("capture", 600))]
    training = [StageStatus(stage="train", key=key, state="Running", attempt=1, started_at=now - timedelta(seconds=290),
                            progress=Progress(done=1000.0, total=2000.0, unit="steps", rate=3.5, eta_s=286.0))
                for key in keys]
    jobs.save_status(job_id, JobStatus(phase="Running", stages=(*before, *training),
                                       started_at=now - timedelta(seconds=900)))


def record_rung(jobs: Jobs, job_id: str, step: int, goes_on: dict[str, bool]) -> None:
    """What a rung decided of each candidate."""
    for key, on in goes_on.items():
        record_metrics(jobs, job_id, "train", key, [("rung", step, float(on), utc_now())])


def charts(page: Any) -> Any:
    return page.locator("#curves-charts figure")


def drawn(page: Any, chart: str) -> Any:
    """What is drawn of a chart: labels of its axes and lines, whether its y axis is logarithmic, its steps, and the
    points of each line."""
    return page.evaluate("""(chart) => {
        const { view, series, spec } = plots.get(chart), lines = new Map(), faint = new Set();
        for (const { label } of series) lines.set(label, []);
        for (const { series, kind, step, value } of view.data("points")) {
          if (kind === "drawn") lines.get(series).push([step, value]); else faint.add(series);
        }
        const { x, y } = spec.layer[0].encoding;
        return { labels: [...lines.keys()], faint: [...faint], axes: [x.title, y.title],
                 log: view.scale("y").type === "log", x: view.scale("x").domain(),
                 points: [...lines.values()] }; }""", chart)


def test_curves_of_a_sweep_are_accessible_and_fit_a_phone_and_a_screen(
        guarded: tuple[str, Database], open_page: OpenPage, faults: list[str]) -> None:
    url, database = guarded
    jobs = Jobs(database)
    job = trained(jobs, "sweep", {"eagle3-a": 1000, "eagle3-b": 1000, "mtp-a": 500})
    record_rung(jobs, job, 500, {"eagle3-a": True, "eagle3-b": True, "mtp-a": False})
    in_training(jobs, job, ("eagle3-a", "eagle3-b"))
    other = trained(Jobs(database), "alone", {"": 800})
    SHOTS.mkdir(parents=True, exist_ok=True)
    paths = {"job": f"/console/jobs/{job}", "jobs": f"/console/curves?job={job}&job={other}",
             "one": f"/console/curves?job={other}"}
    for (width, height), scheme in LOOKS:
        page = signed_in(open_page(viewport={"width": width, "height": height}, color_scheme=scheme), url, TOKEN)
        for name, path in paths.items():
            page.goto(url + path)
            charts(page).nth(6).wait_for()
            page.get_by_label("Smoothing").fill("0.8")
            if name == "job":
                picture(page, "pipeline", "section[aria-labelledby=pipeline]")
                picture(page, "training", "section[aria-labelledby=training]")
            charts(page).first.locator("summary").click()
            shot = SHOTS / f"curves-{name}-{width}-{scheme}.png"
            page.locator("section[aria-labelledby=training]").screenshot(path=shot)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            assert_accessible(page, f"{name} at {width}, {scheme}")
    assert [one for one in faults if "401" not in one] == [], "the sign-in page is a 401, which Chromium logs"


def test_runs_are_chosen_by_keyboard_and_the_choice_log_and_smoothing_stay_when_values_arrive(
        guarded: tuple[str, Database], open_page: OpenPage, faults: list[str]) -> None:
    url, database = guarded
    jobs = Jobs(database)
    job = trained(jobs, "sweep", {"a": 400, "b": 400})
    page = signed_in(open_page(), url, TOKEN)
    page.goto(f"{url}/console/curves?job={job}")
    charts(page).nth(6).wait_for()
    assert drawn(page, "training-loss")["labels"] == ["a loss", "a evaluation_loss", "b loss", "b evaluation_loss"]
    assert not drawn(page, "training-loss")["log"]
    speedups = drawn(page, "training-speedup")
    assert speedups["labels"][:3] == ["a theoretical_speedup", "a theoretical_speedup/1", "a theoretical_speedup/2"]
    page.get_by_label("a", exact=True).focus()
    page.keyboard.press("Space")
    page.get_by_label("Logarithmic y axis").focus()
    page.keyboard.press("Space")
    page.get_by_label("Smoothing").focus()
    page.keyboard.press("ArrowRight")
    chosen = drawn(page, "training-loss")
    assert chosen["log"]
    assert chosen["labels"] == chosen["faint"] == ["b loss", "b evaluation_loss"], "raw and smoothed"
    row = page.locator("#curves-runs tbody tr", has_text="b")
    assert row.locator("td").nth(1).inner_text() == "400"
    page.evaluate("showSteps([100, 200])")
    page.get_by_label("b", exact=True).focus()
    record(jobs, job, "b", range(410, 501, 10), 1.2)
    record(jobs, job, "c", range(10, 501, 10), 1.4)
    page.locator("#curves-runs tbody tr", has_text="c").wait_for()
    assert row.locator("td").nth(1).inner_text() == "500"
    assert page.evaluate("document.activeElement.closest('tr').innerText").startswith("b"), "the focus stays"
    assert not page.get_by_label("a", exact=True).is_checked()
    after = drawn(page, "training-loss")
    assert after["log"]
    assert after["x"] == [100, 200], "the zoom stays"
    assert {label.split()[0] for label in after["labels"]} == {"b", "c"}
    page.get_by_label("All runs").check()
    assert {label.split()[0] for label in drawn(page, "training-loss")["labels"]} == {"a", "b", "c"}
    page.get_by_label("All runs").uncheck()
    page.get_by_text("No run is chosen.").wait_for()
    assert charts(page).count() == 0
    assert [one for one in faults if "401" not in one] == []


def test_the_charts_are_those_of_the_api_in_words_names_and_values(
        guarded: tuple[str, Database], open_page: OpenPage) -> None:
    url, database = guarded
    jobs = Jobs(database)
    alone, sweep = trained(jobs, "alone", {"": 300}), trained(jobs, "sweep", {"b-10": 300, "b-2": 400})
    page = signed_in(open_page(), url, TOKEN)
    for shown in ([alone], [sweep], [alone, sweep]):
        answers = [page.request.get(f"{url}/v1alpha1/jobs/{one}/curves").json() for one in shown]
        names = ["alone", "sweep"] if len(shown) > 1 else [""]
        page.goto(f"{url}/console/curves?{'&'.join(f'job={one}' for one in shown)}")
        charts(page).nth(6).wait_for()
        assert page.locator("#curves-charts figcaption").all_inner_texts() == [
            one["title"] for one in answers[0]["charts"]]
        assert page.locator("#curves-runs thead th").all_inner_texts() == [
            "All runs", "Step", *(one["title"] for one in answers[0]["runs"][0]["latest"])]
        for place, chart in enumerate(answers[0]["charts"]):
            assert charts(page).nth(place).get_by_text(chart["caption"], exact=True).is_visible()
            seen = drawn(page, chart["name"])
            assert seen["axes"] == [chart["x_label"], chart["y_label"]]
            curves = [(name, one) for name, answer in zip(names, answers, strict=True)
                      for one in answer["charts"][place]["curves"]]
            assert seen["labels"] == [" ".join(filter(None, (name, one["key"], one["name"])))
                                          for name, one in curves]
            assert seen["points"] == [[list(point) for point in zip(one["steps"], one["values"], strict=True)]
                                      for _, one in curves]


def test_a_line_that_is_pointed_at_says_its_value_and_dragging_zooms_in_and_a_double_click_out(
        guarded: tuple[str, Database], open_page: OpenPage) -> None:
    url, database = guarded
    job = trained(Jobs(database), "sweep", {"a": 400, "b": 400})
    page = signed_in(open_page(), url, TOKEN, f"/console/curves?job={job}")
    charts(page).nth(6).wait_for()
    page.evaluate("plots.get('training-learning-rate').figure.scrollIntoView()")

    def at(step: int, value: float) -> tuple[float, float]:
        across, down = page.evaluate("""([step, value]) => { const { view } = plots.get('training-learning-rate');
            const canvas = view.container().querySelector('canvas'), [left, top] = view.origin();
            const { x, y } = canvas.getBoundingClientRect();
            return [x + left + view.scale('x')(step), y + top + view.scale('y')(value)]; }""", [step, value])
        return across, down

    rate = 1e-4 * (1 - 200 / 2000)
    page.mouse.move(*at(190, rate))
    page.mouse.move(*at(200, rate))
    said = page.locator("figure", has_text="Learning rate").locator(".nearest")
    said.filter(has_text="learning_rate: 9e-5 at step 200").wait_for()  # and not where the line was first reached
    whole = drawn(page, "training-learning-rate")["x"]
    page.mouse.move(*at(100, rate))
    page.mouse.down()
    page.mouse.move(*at(300, rate), steps=5)
    page.mouse.up()
    assert drawn(page, "training-learning-rate")["x"] == pytest.approx([100, 300], abs=3)
    page.mouse.dblclick(*at(200, rate))
    assert drawn(page, "training-learning-rate")["x"] == whole


def test_steps_are_chosen_by_keyboard_alone_for_all_charts_and_follow_the_mouse(
        guarded: tuple[str, Database], open_page: OpenPage, faults: list[str]) -> None:
    url, database = guarded
    job = trained(Jobs(database), "sweep", {"a": 400, "b": 600})
    page = signed_in(open_page(), url, TOKEN, f"/console/curves?job={job}")
    charts(page).nth(6).wait_for()
    start, end = page.get_by_label("From step"), page.get_by_label("to step", exact=True)
    refused = page.locator("#curves-steps-refused")

    def shown() -> list[list[float]]:
        return [drawn(page, name)["x"] for name in ("training-loss", "training-acceptance", "training-gradient-norm")]

    assert page.evaluate("[...plots.values()].every(({ view, figure }) => view.width() < figure.clientWidth)")
    whole = shown()
    assert whole == [[10, 600], [100, 600], [10, 600]]
    assert (start.get_attribute("placeholder"), end.get_attribute("placeholder")) == ("10", "600")
    page.get_by_label("Smoothing").focus()
    page.keyboard.press("Tab")
    page.keyboard.type("200")
    page.keyboard.press("Enter")
    assert shown() == 3 * [[200, 600]], "an end that is left empty is that of the runs"
    page.keyboard.press("Tab")
    page.keyboard.type("100")
    page.keyboard.press("Enter")
    refused.filter(has_text="from step 200 to step 100: the chosen runs have steps 10 to 600").wait_for()
    assert end.get_attribute("aria-invalid") == "true"
    assert shown() == 3 * [[200, 600]]
    page.keyboard.press("Control+a")
    page.keyboard.type("300")
    page.keyboard.press("Tab")
    assert shown() == 3 * [[200, 300]]
    assert (refused.inner_text(), end.get_attribute("aria-invalid")) == ("", "false")
    page.keyboard.press("Enter")
    assert (shown(), start.input_value(), end.input_value()) == (whole, "", "")

    def axes() -> Any:
        """The rectangle of the axes of the first chart."""
        charts(page).first.scroll_into_view_if_needed()
        return page.evaluate("""() => { const { view } = plots.get('training-loss'), [left, top] = view.origin();
            const { x, y } = view.container().querySelector('canvas').getBoundingClientRect();
            return { x: x + left, y: y + top, width: view.width() }; }""")

    box = axes()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50, steps=5)
    page.mouse.up()
    dragged = shown()
    assert dragged == 3 * [dragged[0]]
    assert dragged[0] == pytest.approx([10 + 590 / 4, 10 + 590 / 2], abs=5)
    assert [int(start.input_value()), int(end.input_value())] == pytest.approx(dragged[0], abs=0.5)
    page.get_by_label("Logarithmic y axis").check()
    assert shown() == dragged
    box = axes()
    page.mouse.dblclick(box["x"] + box["width"] / 2, box["y"] + 50)
    assert (shown(), start.input_value(), end.input_value()) == (whole, "", "")
    assert [one for one in faults if "401" not in one] == []


def cells(chart: Any, number: int) -> list[list[str]]:
    """Texts of a table below a chart, the head's first."""
    found = chart.locator("table").nth(number).evaluate(
        "(table) => [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent))")
    return [[str(text) for text in row] for row in found]


def test_the_table_by_step_below_a_chart_has_the_values_of_the_api_and_is_made_when_opened(
        guarded: tuple[str, Database], open_page: OpenPage, faults: list[str]) -> None:
    url, database = guarded
    job = trained(Jobs(database), "sweep", {"a": 400, "b": 1000})
    page = signed_in(open_page(), url, TOKEN, f"/console/curves?job={job}")
    charts(page).nth(6).wait_for()
    assert page.locator("#curves-charts table").count() == 0
    answer = page.request.get(f"{url}/v1alpha1/jobs/{job}/curves").json()

    def compare(number: int) -> list[int]:
        """The steps of a table whose every cell is the API's value at its step, or empty where it has none."""
        head, *rows = cells(charts(page).nth(number), 1)
        curves = [(f"{one['key']} {one['name']}", dict(zip(one["steps"], one["values"], strict=True)))
                  for one in answer["charts"][number]["curves"]]
        assert head == ["Step", *(label for label, _ in curves)]
        for step, *texts in rows:
            for text, (label, values) in zip(texts, curves, strict=True):
                value = values.get(int(step))
                assert text == "" if value is None else float(text) == pytest.approx(value, rel=1e-3), (label, step)
        return [int(step) for step, *_ in rows]

    for number, chart in enumerate(answer["charts"]):
        charts(page).nth(number).locator("summary").click()
        charts(page).nth(number).locator("table").nth(1).wait_for()
        steps, had = compare(number), sorted({step for one in chart["curves"] for step in one["steps"]})
        if len(had) <= 50:
            assert steps == had
        else:
            assert len(steps) == 50
            assert steps[-1] == had[-1]
            assert max(after - before for before, after in itertools.pairwise(steps)) <= 40, "evenly"
    charts(page).first.get_by_text("Values of 50 of the 100 steps that are shown").wait_for()
    assert [one for one in compare(0) if one % 100 == 0] == list(range(100, 1001, 100)), "where most have a value"
    page.get_by_label("From step").fill("205")
    page.get_by_label("to step", exact=True).fill("250")
    page.keyboard.press("Enter")
    charts(page).first.get_by_text("Values of all 5 steps that are shown").wait_for()
    assert compare(0) == list(range(210, 251, 10)), "fewer steps have all of them"
    record(Jobs(database), job, "c", range(10, 301, 10), 1.4)
    charts(page).first.locator("th", has_text="c loss").wait_for()
    answer = page.request.get(f"{url}/v1alpha1/jobs/{job}/curves").json()
    assert compare(0) == list(range(210, 251, 10)), "open tables get newer values"
    assert [one for one in faults if "401" not in one] == []


def test_what_is_loading_refused_or_without_an_answer_is_said_and_goes_away_when_values_arrive(
        guarded: tuple[str, Database], open_page: OpenPage) -> None:
    url, database = guarded
    job = trained(Jobs(database), "alone", {"base": 300})
    page, path = signed_in(open_page(), url, TOKEN), f"/console/curves?job={job}"
    held = list[Any]()
    page.route("**/v1alpha1/jobs/*/curves", lambda route: held.append(route), times=1)
    page.goto(url + path)
    page.get_by_text("Loading the metrics.").wait_for()
    while not held:  # the words are there before the request; the test's time limit ends this
        page.wait_for_timeout(20)
    held[0].continue_()
    charts(page).nth(6).wait_for()
    failed = page.locator("#curves-failed")
    assert not failed.is_visible()
    page.context.set_offline(True)
    failed.filter(has_text="Not current since").wait_for()
    assert failed.inner_text().endswith(": the server does not answer; trying again"), "in the words of the header"
    assert charts(page).count() == 7, "what is drawn stays"
    page.context.set_offline(False)
    failed.wait_for(state="hidden")
    page.context.clear_cookies()
    failed.filter(has_text="alone: ").filter(has_text="; hint: ").wait_for()


def test_rungs_of_a_sweep_are_marked_as_they_are_decided_and_said_in_words(
        guarded: tuple[str, Database], open_page: OpenPage, faults: list[str]) -> None:
    url, database = guarded
    jobs = Jobs(database)
    job = trained(jobs, "sweep", {"a": 200, "b": 200})
    page = signed_in(open_page(), url, TOKEN, f"/console/curves?job={job}")
    charts(page).nth(6).wait_for()
    said = page.locator("#curves-rungs")
    assert not said.is_visible()

    def inked(at_step: int) -> int:
        """Pixels of the ink of rungs in the column of a step of the loss chart."""
        return int(page.evaluate("""(step) => {
            const { view } = plots.get('training-loss'), [left, top] = view.origin();
            const canvas = view.container().querySelector('canvas'), dense = canvas.width / canvas.clientWidth;
            const x = Math.round(dense * (left + view.scale('x')(step)));
            const { data } = canvas.getContext('2d').getImageData(x - 1, dense * top, 3, dense * view.height());
            const [r, g, b] = theme().style.ink.color.match(/[0-9a-f]{2}/g).map((part) => parseInt(part, 16));
            let found = 0;
            for (let at = 0; at < data.length; at += 4) {
              const apart = Math.abs(data[at] - r) + Math.abs(data[at + 1] - g) + Math.abs(data[at + 2] - b);
              if (data[at + 3] > 100 && apart < 60) found++;
            }
            return found; }""", at_step))

    unmarked = inked(200)
    record_rung(jobs, job, 200, {"a": True, "b": False})
    record(jobs, job, "a", range(210, 401, 10), 1.0)
    said.get_by_text("Step 200: 1 of 2 went on (a), 1 ended (b)").wait_for()
    assert inked(200) > unmarked + 30
    assert page.evaluate("plots.get('training-loss').view.data('ends').map(({ series }) => series)") == [
        "b loss", "b evaluation_loss"]
    page.get_by_label("a", exact=True).uncheck()
    page.get_by_label("b", exact=True).uncheck()
    page.get_by_label("a", exact=True).check()
    assert inked(200) > unmarked + 30
    assert [one for one in faults if "401" not in one] == []


def test_several_jobs_are_drawn_together_and_one_of_another_project_is_not_there(
        guarded: tuple[str, Database], open_page: OpenPage) -> None:
    url, database = guarded
    secret, own = key_in(database, "team", "viewer"), Jobs(database, scope=within("team", database))
    first, second = (trained(own, name, {"base": 300}, project="team") for name in ("first", "second"))
    within("other", database)
    foreign = trained(Jobs(database), "theirs", {"base": 300}, project="other")
    page = signed_in(open_page(), url, secret)
    page.goto(f"{url}/console/jobs/{first}")
    page.get_by_role("link", name="Together with other jobs").click()
    page.get_by_text("Add a job").click()
    assert page.get_by_role("link", name="Add theirs").count() == 0
    page.get_by_role("link", name="Add second").click()
    charts(page).nth(6).wait_for()
    assert drawn(page, "training-gradient-norm")["labels"] == ["first base grad_norm", "second base grad_norm"]
    assert page.locator("#curves-runs tbody tr").count() == 2
    page.get_by_role("link", name="Remove first").click()
    page.get_by_role("link", name="Remove").wait_for(state="detached")
    assert page.url.endswith(f"?job={second}")
    assert page.goto(f"{url}/console/curves?job={first}&job={foreign}").status == 404


def test_the_mathematics_of_curves(guarded: tuple[str, Database], open_page: OpenPage) -> None:
    url, database = guarded
    job = trained(Jobs(database), "alone", {"": 100})
    page = signed_in(open_page(), url, TOKEN)
    page.goto(f"{url}/console/jobs/{job}")
    charts(page).first.wait_for()

    def computed(expression: str) -> Any:
        return json.loads(page.evaluate(f"JSON.stringify({expression})"))

    assert computed("smoothed([1, 3, 3], 0)") == [1, 3, 3]
    assert computed("smoothed([2, 2, 2], 0.9)") == pytest.approx([2, 2, 2])
    assert computed("smoothed([0, 3], 0.5)") == [0, 2], "(0.25 * 0 + 0.5 * 3) / 0.75"
    assert computed("thinned([1, 2], [5, 6], 2)") == [[1, 2], [5, 6]]
    assert computed("thinned([1, 2, 3, 4, 5, 6], [1, 1, 9, 1, 1, 1], 3)") == [[1, 3, 5], [1, 9, 1]], "spikes stay"
    assert computed("[5, 14, 16, 99].map((step) => nearest([10, 20, 30], step))") == [0, 0, 1, 2]
    series = "[{ label: 'a', steps: [10, 20, 30, 40], values: [1, -1, 3, 4] }]"
    rows = computed(f"rowsOf({series}, false, 0, 20, 30).map(({{ step }}) => step)")
    assert rows == [10, 20, 30, 40], "with the neighbours of the steps that are shown"
    assert computed(f"rowsOf({series}, true, 0, 0, 99).map(({{ step }}) => step)") == [10, 30, 40], "logarithmic"
    assert computed(f"rowsOf({series}, false, 0, 50, 99)") == []
