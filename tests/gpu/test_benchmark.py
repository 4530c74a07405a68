"""The benchmark of a GPU runs to its end at tiny sizes, and one section's failure costs its own figures alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import sections
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.sections import SECTIONS
from tests.gpu.sizes import TINY, this_device


def test_every_section_runs_and_one_that_fails_leaves_the_others_on_the_page(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: sections.Bench) -> list[Any]:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setitem(SECTIONS, "libraries", (fail, 1.0))
    assert main(["--tiny", "--out", str(tmp_path)]) == 1
    document = json.loads((tmp_path / "gpu.json").read_text())
    found = document["sections"]
    assert found.pop("libraries")["error"] == "RuntimeError: an illegal memory access"
    assert found.keys() == {"target", *SECTIONS} - {"libraries"}
    assert all("error" not in outcome for outcome in found.values()), found
    assert {row["result"] for row in found["correctness"]["rows"][:-1]} == {"passed"}
    page = (tmp_path / "gpu.md").read_text()
    assert "an illegal memory access" in page
    assert "these figures mean nothing" in page
    assert "| draft | first_tokens_per_s | tokens_per_s |" in page


def test_flex_attention_and_packed_attention_are_timed_on_the_same_shape(tmp_path: Path) -> None:
    rows = sections.flex_attention_rows(sections.Bench(TINY, this_device(), tmp_path, budget_s=0.0))
    assert len({row["shape"] for row in rows}) == 1
