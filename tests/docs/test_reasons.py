"""The reasons of conditions and histories, as the sources create them, are on the page of errors."""

import re

from tests.docs.reasons import NAMED, POSITIONS, PROGRESS, REASONS, calls, created
from tests.house.sources import ROOT


def test_every_reason_of_a_condition_or_a_history_is_on_the_page_of_errors_or_is_plain_progress() -> None:
    listed = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/reference/errors.md").read_text(), re.MULTILINE))
    reasons = created()
    assert {reason: file for reason, file in reasons.items() if reason not in listed | PROGRESS} == {}, \
        "add what it means and what to do to tests/docs/reasons.py"
    assert ({one.name for one in REASONS} | PROGRESS) - reasons.keys() == set(), "no source has these reasons any more"
    assert listed & PROGRESS == set()
    assert [one.name for one in REASONS] == sorted(one.name for one in REASONS)


def test_the_calls_that_create_reasons_are_those_of_the_sources() -> None:
    assert {*POSITIONS, *NAMED} - calls() == set()
