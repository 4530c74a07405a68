"""Compared answers where SGLang serves, as a person sees them: the proof's recorded answer beside the served one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eyrie_api.database.engine import Database
from eyrie_api.settings import Settings
from tests.api.sglang_endpoint import PROMPT, Engines, add_sglang_endpoint, two_engines
from tests.browser.conftest import LOOKS, SHOTS, TOKEN, assert_accessible
from tests.browser.test_compare import signed_in

OpenPage = Callable[..., Any]
_PATIENCE_MS = 400_000
OTHER = "What is <b>light</b> & how fast?"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with two_engines(tmp_path_factory.mktemp("engines")) as found:
        yield found


def test_a_recorded_prompt_has_both_answers_and_another_one_the_reason(
        guarded: tuple[str, Database], tmp_path: Path, engines: Engines, open_page: OpenPage,
        faults: list[str]) -> None:
    url, database = guarded
    engines.route(canary=False)
    asked = tuple(engines.answer(prompt, 48) for prompt in (PROMPT, OTHER))
    job = add_sglang_endpoint(Settings(home=tmp_path / "guarded"), database, engines.url, asked)
    SHOTS.mkdir(parents=True, exist_ok=True)
    for (width, height), scheme in LOOKS:
        page = signed_in(open_page(viewport={"width": width, "height": height}, color_scheme=scheme), url, TOKEN)
        page.goto(f"{url}/console/endpoints/default/compare")
        assert page.get_by_label("Prompt", exact=True).input_value() == PROMPT
        page.get_by_label("Prompts that the proof recorded").select_option(OTHER)
        assert page.get_by_label("Prompt", exact=True).input_value() == OTHER
        page.get_by_role("button", name="Run").click()
        page.locator("#said", has_text="Both answers have the same text, up to the shorter").wait_for(
            timeout=_PATIENCE_MS)
        drafted, undrafted = page.locator("[data-run=drafted]"), page.locator("[data-run=undrafted]")
        assert undrafted.locator(".answer").inner_text() == asked[1].text
        assert drafted.locator(".answer").inner_text().startswith(asked[1].text)
        assert drafted.locator(".token.several").count() > 0
        assert f"recorded by the proof of job {job}" in undrafted.locator(".recorded").inner_text()
        assert undrafted.locator("[data-figure=tokens_per_s]").inner_text() == "10.0"
        assert undrafted.locator("[data-figure=num_tokens]").inner_text() == str(asked[1].num_tokens)
        assert undrafted.locator("summary").count() == 1
        assert not undrafted.locator("summary").is_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert_accessible(page, f"{width}, {scheme}")
        page.screenshot(path=SHOTS / f"compare-sglang-{width}-{scheme}.png", full_page=True)
        page.get_by_label("Prompt", exact=True).fill("Something that was never asked.")
        assert page.get_by_label("Prompts that the proof recorded").input_value() == ""
        page.get_by_role("button", name="Run").click()
        page.locator("#said", has_text="There is no answer without the drafter").wait_for(timeout=_PATIENCE_MS)
        assert PROMPT in undrafted.locator(".failure").inner_text()
        assert undrafted.locator(".answer").inner_text() == ""
        assert not undrafted.locator(".recorded").is_visible()
    assert [one for one in faults if "401" not in one] == [], "the sign-in page is a 401, which Chromium logs"
