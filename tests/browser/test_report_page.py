"""The page of a comparison in a real Chromium, opened from the file system: readable, accessible, without a request."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyrie_workers.comparison.answer import answer, decision
from eyrie_workers.comparison.page import html
from tests.browser.conftest import SHOTS, assert_accessible
from tests.workers.comparison.ledger import Made, report_of

VARIANTS = {"EAGLE-1": Made(1.5), "EAGLE-2": Made(1.9, 2), "EAGLE-3": Made(2.4, 3, 0.4), "Medusa": Made(1.6, 1),
            "n-gram": Made(1.1, 0, 0.01), "DFlash": Made(1.7, 1, changed_output=True)}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 768, 1440])
def test_a_report_opened_as_a_file_is_readable_and_accessible(
        width: int, scheme: str, tmp_path: Path, open_page: Callable[..., Any], faults: list[str]) -> None:
    report = report_of(VARIANTS)
    file = tmp_path / "report.html"
    file.write_text(html(report.model_copy(update={"verdict": answer(report), "notes": ("one seed",)})))
    page = open_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(file.as_uri())
    assert decision(report) in page.locator(".decision").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "wide tables scroll in boxes of their own"
    for number, picture in enumerate(page.locator("figure img").all()):
        assert picture.evaluate("one => one.naturalWidth") > 300, f"picture {number} is drawn"
    shown = page.locator("figure img").first.evaluate("one => one.currentSrc")
    assert (shown == page.locator("source").first.get_attribute("srcset")) == (scheme == "dark")
    for summary in page.locator("summary").all():
        summary.click()
    assert page.locator("details table").count() == page.locator("figure").count() == 4
    assert_accessible(page, f"{width}, {scheme}")
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"report-{width}-{scheme}.png", full_page=True)
    assert [one for one in requests if not one.startswith("data:")] == [file.as_uri()]
    assert faults == []
