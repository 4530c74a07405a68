"""The page of a comparison of hardware."""

import base64
import re
import sys

import pytest

from eyrie_api.cli.reports import report_of
from eyrie_api.decisions.hardware_choice import compare_hardware, sentence
from eyrie_api.figures.job_figures import hardware
from eyrie_workers.hardware.page import html, speeds
from tests.api.test_hardware_choice import B200, H200S, load_report
from tests.workers.parsed_page import parsed_page


def test_the_page_begins_with_the_recommendation_and_has_every_row_of_the_report() -> None:
    report = compare_hardware((B200, H200S), load_report())
    page = parsed_page(html(report))
    assert sentence(report.choices[0], report) in page.text
    assert len(speeds(report).rows) == 4
    for row in speeds(report).rows:
        assert row in page.rows
    assert ["8", "h200-x2/drafted", "-", "16 of 16", "16 of 16"] in page.rows


def test_the_page_has_the_figure_of_a_jobs_page_for_light_and_dark_screens() -> None:
    pytest.importorskip("vl_convert", reason="pip install 'eyrie[plots]'")
    report = compare_hardware((B200, H200S), load_report())
    text = html(report)
    assert hardware(report).title in parsed_page(text).text
    pictures = [base64.b64decode(one).decode() for one in re.findall(r"data:image/svg\+xml;base64,([\w+/=]+)", text)]
    assert len(pictures) == 2
    assert pictures[0] != pictures[1]
    for drawn in pictures:
        assert "tokens per second of a GPU (throughput)" in drawn


def test_without_the_library_that_draws_the_page_has_the_values_and_says_what_to_install(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)  # as where it is not installed
    report = compare_hardware((B200, H200S), load_report())
    page = parsed_page(html(report))
    assert "eyrie[plots]" in page.text
    assert speeds(report).rows[0] in page.rows


def test_the_page_says_what_is_pushed_of_it() -> None:
    report = compare_hardware((B200, H200S), load_report())
    pushed = report_of(report.model_dump_json(), html(report), "report.html")
    assert (pushed.kind, pushed.title) == ("hardware", f"Hardware compared for {report.load.model}")
    assert pushed.decision == tuple(sentence(choice, report) for choice in report.choices)


def test_markup_in_what_describes_a_server_is_shown_as_text() -> None:
    markup = "<script>alert(1)</script>"
    load = load_report().model_copy(update={"model": markup, "variants": {"b200/off": markup}, "notes": (markup,)})
    page = parsed_page(html(compare_hardware((B200, H200S), load)))
    assert "script" not in page.elements
    assert ["b200/off", markup] in page.rows
    assert f"Hardware compared for {markup}" in page.text
