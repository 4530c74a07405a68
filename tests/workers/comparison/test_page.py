"""The page of a comparison: it says what the report says, loads nothing, and shows markup in names as text."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from eyrie_api.cli.reports import report_of as report_of_files
from eyrie_workers.comparison.answer import answer, decision
from eyrie_workers.comparison.page import html
from eyrie_workers.comparison.report import CompareReport
from eyrie_workers.comparison.tables import facts, speed
from tests.workers.comparison.ledger import Made, report_of
from tests.workers.parsed_page import parsed_page

VARIANTS = {"EAGLE-1": Made(1.5), "EAGLE-3": Made(2.4, 3, 0.4), "n-gram": Made(1.1, 0, 0.01)}
MARKUP = '"><script>alert(1)</script><img src=x onerror=alert(2)> $x$ & {{ 7 * 7 }}'


def answered(report: CompareReport) -> CompareReport:
    return report.model_copy(update={"verdict": answer(report)})


def test_the_page_begins_with_the_decision_and_has_every_variant_with_its_figures() -> None:
    report = answered(report_of(VARIANTS))
    page = parsed_page(html(report))
    assert page.text.index(decision(report)) < page.text.index(report.verdict)
    assert decision(report).startswith("Serve with EAGLE-3 (tree 4/2/8): 2.4")
    for one in report.variants:
        row = next(row for row in page.rows if row[:2] == [str(one.rank), one.variant.title])
        assert row[3] == speed(one.overall)
        assert row[-2:] == [f"{one.overall.tau:.2f}", "yes"]
    for name, value in facts(report):
        assert name in page.text
        assert value in page.text


def test_the_page_says_what_is_pushed_of_it() -> None:
    report = answered(report_of(VARIANTS))
    pushed = report_of_files(report.model_dump_json(), html(report), "report.html")
    assert (pushed.kind, pushed.title) == ("comparison", f"Which drafter for {report.target}")
    assert pushed.decision == (decision(report),)
    assert CompareReport.model_validate(pushed.report) == report


def test_a_variant_that_changed_the_output_is_marked_and_not_recommended() -> None:
    report = answered(report_of({"EAGLE-3": Made(3.0, changed_output=True)}))
    page = parsed_page(html(report))
    assert "Serve without a drafter: no lossless variant is surely faster." in page.text
    assert next(row for row in page.rows if row[1:2] == ["EAGLE-3"])[-1] == "NO"


@pytest.mark.parametrize(("concurrencies", "figures"), [((1,), 3), ((1, 4), 4)])
def test_every_figure_is_drawn_for_light_and_dark_with_a_table_behind_it(
        concurrencies: tuple[int, ...], figures: int) -> None:
    page = parsed_page(html(answered(report_of(VARIANTS, concurrencies))))
    assert len(page.pictures) == 2 * figures
    assert len(set(page.pictures)) == 2 * figures
    assert all(ElementTree.fromstring(picture).tag.endswith("svg") for picture in page.pictures)
    assert page.elements.count("details") == figures


def test_the_page_has_no_script_and_names_no_address_to_load() -> None:
    page = parsed_page(html(answered(report_of(VARIANTS))))
    assert not {"script", "link", "iframe", "object", "form"} & set(page.elements)
    assert [value for name, value in page.attributes if name in ("href", "action") or name.startswith("on")] == []
    assert any(value.startswith("default-src 'none'") for name, value in page.attributes if name == "content")


def test_markup_in_names_of_variants_data_sets_and_targets_is_shown_as_text() -> None:
    plain = answered(report_of(VARIANTS)).model_copy(update={"failed": {"medusa": "why"}, "notes": ("limit",)})
    values = plain.model_dump_json()
    for name in ("EAGLE-1", "chat", "quickstart", "medusa", "why", "limit"):
        values = values.replace(f'"{name}"', json.dumps(MARKUP))
    report = CompareReport.model_validate_json(values)
    page, plain_page = parsed_page(html(report)), parsed_page(html(plain))
    assert page.elements == plain_page.elements, "no element comes from a value"
    assert f"Which drafter for {MARKUP}" in page.text
    assert any(row[1:2] == [MARKUP] for row in page.rows), "the variant"
    assert any(f"{MARKUP}, T = 0" in row for row in page.rows), "the data set"
    assert [MARKUP, "failed", MARKUP] in [row[:3] for row in page.rows]
    for picture in page.pictures:
        assert not [one for one in ElementTree.fromstring(picture).iter() if one.tag.endswith("script")]
