"""Compared answers as a person sees them: a real Chromium, the quickstart's target behind a real gateway."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.tuning import DrafterUse, Setting
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_workers.engines.process import EngineCommand, start_engine
from tests.browser.conftest import LOOKS, SHOTS, TOKEN, assert_accessible, key_in, picture, signed_in
from tests.workers.engines.request_fields import behind_gateway

OpenPage = Callable[..., Any]
_PATIENCE_MS = 400_000
TREE = DraftTreeShape(num_steps=4, top_k=2, num_draft_tokens=8)
# Speeds of the runs at each change before the end; the answer without the drafter follows the one with it.
WATCHED = """() => {
  window.watched = { drafted: [], undrafted: [] };
  const said = document.getElementById('said');
  for (const [run, speeds] of Object.entries(watched)) {
    const place = document.querySelector(`[data-run=${run}] [data-figure=tokens_per_s]`);
    new MutationObserver(() => {
      if (said.textContent.startsWith('Answering')) speeds.push(Number(place.textContent));
    }).observe(place, { childList: true });
  }
}"""


@pytest.fixture(scope="module")
def endpoint_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    engine = start_engine(EngineCommand(target="quickstart", model="quickstart", threads=1, max_concurrency=2,
                                        use=DrafterUse(setting=Setting(method="ngram", tree=TREE))),
                          tmp_path_factory.mktemp("engine"))
    try:
        with behind_gateway(engine.wait_ready(120), "quickstart", tmp_path_factory.mktemp("gateway")) as served:
            yield f"{str(served.client.base_url).rstrip('/')}/v1"
    finally:
        engine.stop()


def test_both_answers_appear_side_by_side_equal_and_with_the_tree_of_a_round(
        guarded: tuple[str, Database], endpoint_url: str, open_page: OpenPage, faults: list[str]) -> None:
    url, database = guarded
    Endpoints(database).create("default", TargetSpec(model="quickstart"), EndpointServeSpec(), "quickstart")
    Endpoints(database).activate("default", 1, endpoint_url)
    SHOTS.mkdir(parents=True, exist_ok=True)
    for (width, height), scheme in LOOKS:
        page = signed_in(open_page(viewport={"width": width, "height": height}, color_scheme=scheme), url, TOKEN)
        page.goto(f"{url}/console/endpoints/default")
        page.get_by_role("link", name="Compare answers").click()
        page.get_by_label("Prompt").fill("Explain electricity in three sentences.")
        page.get_by_label("Tokens of an answer").fill("96")
        page.evaluate(WATCHED)
        page.get_by_role("button", name="Run").click()
        page.locator("#said", has_text="Both answers are equal").wait_for(timeout=_PATIENCE_MS)
        drafted, undrafted = page.locator("[data-run=drafted]"), page.locator("[data-run=undrafted]")
        assert drafted.locator(".answer").inner_text() == undrafted.locator(".answer").inner_text() != ""
        assert drafted.locator(".token.drafted").count() > 0
        assert undrafted.locator(".token.drafted").count() == 0
        assert float(drafted.locator("[data-figure=tau]").inner_text()) > 1.0
        assert float(undrafted.locator("[data-figure=tau]").inner_text()) == 1.0
        for run in (drafted, undrafted):
            assert float(run.locator("[data-figure=tokens_per_s]").inner_text()) > 0.0
        assert any(speed > 0.0 for speed in page.evaluate("watched.drafted")), "before the end"
        assert page.locator("#tree li li").count() > 0, "the round with most accepted drafts is chosen at the end"
        first = drafted.locator(".round").first
        first.focus()
        page.keyboard.press("ArrowRight")
        assert "Round 1: accepted" in drafted.locator(".round-said").inner_text()
        page.keyboard.press("Enter")
        page.locator("#tree", has_text="Round 1:").wait_for()
        with_drafts = drafted.locator(".round", has=page.locator(".drafted")).first
        with_drafts.hover()
        assert "rejected" in drafted.locator(".round-said").inner_text()
        with_drafts.click()
        page.locator("#tree li li", has_text="accepted").first.wait_for()
        drafted.locator("summary").click()
        assert drafted.locator("tbody tr").count() == drafted.locator(".round").count()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert_accessible(page, f"{width}, {scheme}")
        drafted.locator("summary").click()
        picture(page, "answers", "main")
        page.screenshot(path=SHOTS / f"compare-{width}-{scheme}.png", full_page=True)
    assert [one for one in faults if "401" not in one] == [], "the sign-in page is a 401, which Chromium logs"


def test_a_viewer_and_an_endpoint_that_fails_are_told_why(
        guarded: tuple[str, Database], open_page: OpenPage) -> None:
    url, database = guarded
    viewer, operator = key_in(database, "team", "viewer"), key_in(database, "team", "operator")
    Endpoints(database).create("default", TargetSpec(model="quickstart"), EndpointServeSpec(), "quickstart", "team")
    Endpoints(database).activate("default", 1, "http://127.0.0.1:1/v1")
    page = signed_in(open_page(), url, viewer)
    page.goto(f"{url}/console/endpoints/default/compare")
    page.get_by_text("your role reads only").wait_for()
    assert page.get_by_role("button").count() == 0
    page = signed_in(open_page(), url, operator)
    page.goto(f"{url}/console/endpoints/default/compare")
    page.get_by_role("button", name="Run").click()
    page.locator("[data-run=drafted] .failure", has_text="hint:").wait_for()
    page.locator("#said", has_text="Only complete answers").wait_for()
    Endpoints(database).set_desired("default", "off")
    page.get_by_role("button", name="Run").click()
    page.locator("#said", has_text="is off; hint: eyrie endpoints on default").wait_for()
    page.reload()
    page.get_by_text("The endpoint is off").wait_for()
