"""The form of a new job as a person fills it in: a real Chromium, the real control plane."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from benchmarks.campaigns.live_servers import Plane
from tests.browser.conftest import LOOKS, SHOTS, assert_accessible

OpenPage = Callable[..., Any]
EXAMPLES = sorted(path for path in (Path(__file__).parents[2] / "docs" / "examples").glob("*.yaml")
                  if "target" in yaml.safe_load(path.read_text()))
OPENED = "for (const one of document.querySelectorAll('details')) one.open = true"
RETYPED = """() => {
  const typed = [...document.querySelectorAll('[data-at]')].filter((one) => one.value !== '');
  for (const one of typed) one.dispatchEvent(new Event('input', { bubbles: true }));
  return typed.length;
}"""


def new_job(plane: Plane, page: Any) -> Any:
    page.goto(f"http://127.0.0.1:{plane.port}/console/new")
    page.locator("#verdict", has_text="Valid. About").wait_for()
    return page


def test_a_job_is_made_of_exactly_the_fields_filled_in_and_a_wrong_value_is_refused_beside_its_field(
        plane: Plane, open_page: OpenPage, faults: list[str]) -> None:
    page = new_job(plane, open_page())
    section = page.locator("details.section", has=page.get_by_label("train.epochs", exact=True))
    assert section.get_attribute("open") is None, "only the usual fields are open"
    page.get_by_label("drafter.family").select_option("medusa")
    section.locator("summary").focus()
    page.keyboard.press("Enter")
    page.get_by_label("train.seed", exact=True).fill("3")
    page.get_by_label("train.epochs", exact=True).fill("-1")
    error = page.locator("[id='e/train/epochs']")
    error.filter(has_text="greater than 0").wait_for()
    section.locator("summary").click()
    assert not error.is_visible()
    page.get_by_label("name", exact=True).fill("typed")
    error.filter(has_text="greater than 0").wait_for()
    field = page.get_by_label("train.epochs", exact=True)
    assert field.get_attribute("aria-invalid") == "true"
    assert "e/train/epochs" in field.get_attribute("aria-describedby").split()
    page.locator("#verdict.failure").wait_for()
    page.get_by_role("button", name="Start").click()
    page.locator("[id='f/train/epochs']:focus").wait_for()
    assert page.locator("#verdict li").count() == 0, "the error is beside its field"
    field.fill("")
    page.locator("#verdict", has_text="Valid. About").wait_for()
    assert not error.is_visible()
    assert field.get_attribute("aria-invalid") is None
    page.get_by_role("button", name="Add to data.sources").click()
    page.locator("[id='e/data/sources/1/path']", has_text="is missing").wait_for()
    page.get_by_label("data.sources.1.path").fill("quickstart")
    page.get_by_text("More of data.sources.1").click()
    page.get_by_label("data.sources.1.max_rows").fill("10")
    page.get_by_role("button", name="Remove data.sources.0").click()
    page.locator("summary", has_text="tune").click()
    page.get_by_label("tune.num_steps", exact=True).fill("1, 2")
    page.get_by_label("tune.ngram", exact=True).select_option("false")
    page.locator("summary", has_text="labels").click()
    page.get_by_label("labels", exact=True).fill('{"team": "a"}')
    page.locator("#verdict", has_text="Valid. About").wait_for()
    with page.expect_request(lambda one: one.method == "POST" and one.url.endswith("/v1alpha1/jobs")) as sent:
        page.get_by_role("button", name="Start").click()
    filled = {"name": "typed", "target": {"model": "quickstart"},
              "data": {"sources": [{"path": "quickstart", "max_rows": 10}]}, "drafter": {"family": "medusa"},
              "train": {"seed": 3}, "tune": {"num_steps": [1, 2], "ngram": False}, "labels": {"team": "a"}}
    assert sent.value.post_data_json == filled | {"serve": {"endpoint": "default"}}
    page.locator("h1", has_text="typed").wait_for()
    page.goto(f"{page.url}/again")
    assert json.loads(page.locator("#text").input_value()) == filled | {
        "target": {"model": "quickstart", "dtype": "float32"}}, "what differs from the defaults"
    assert page.get_by_label("train.seed", exact=True).input_value() == "3", "the form is filled from the document"
    assert page.locator(".set", has_text="2 set").count() == 1
    assert [one for one in faults if "422" not in one] == [], "Chromium logs each answer that refuses a document"


def test_form_and_json_are_views_of_one_document_and_keep_what_the_form_cannot_show(
        plane: Plane, open_page: OpenPage) -> None:
    page = new_job(plane, open_page())
    form, as_json = page.get_by_label("Form", exact=True), page.get_by_label("JSON", exact=True)
    text = page.get_by_label("Document (JSON)")
    documents = [yaml.safe_load(path.read_text()) for path in EXAMPLES]
    documents.append({"engine": "sglang", "rivals": ["ngram", {"path": "a, b"}], "train": {"max_steps": None},
                      "later": {"than": "this version"}, "sweep": {"rungs": [], "families": [["x"], "a,b"]},
                      "serve": {"enabled": "perhaps"}, "labels": {"a": None},
                      "target": {"model": "m", "revision": None}})
    for document in documents:
        as_json.check()
        text.fill(json.dumps(document))
        form.check()
        assert page.evaluate(RETYPED) > 2
        as_json.check()
        assert json.loads(text.input_value()) == document
    text.fill(json.dumps({"data": {"seed": 2**63 - 1}}))
    form.check()
    page.get_by_label("name", exact=True).fill("n")
    as_json.check()
    assert json.loads(text.input_value()) == {"data": {"seed": 2**63 - 1}, "name": "n"}
    text.fill("{")
    form.click()
    assert text.is_visible(), "what is not JSON stays in the text"


def test_the_form_is_accessible_with_all_its_fields_and_an_error_at_every_width(
        plane: Plane, open_page: OpenPage, faults: list[str]) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    for (width, height), scheme in LOOKS:
        page = new_job(plane, open_page(viewport={"width": width, "height": height}, color_scheme=scheme))
        page.screenshot(path=SHOTS / f"form-usual-{width}-{scheme}.png", full_page=True)
        page.evaluate(OPENED)
        page.get_by_label("train.epochs", exact=True).fill("-1")
        page.get_by_role("button", name="Add to rivals").click()
        page.locator("[id='e/train/epochs']", has_text="greater than 0").wait_for()
        page.screenshot(path=SHOTS / f"form-{width}-{scheme}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert_accessible(page, f"{width}, {scheme}")
    assert [one for one in faults if "422" not in one] == [], "Chromium logs each answer that refuses a document"
