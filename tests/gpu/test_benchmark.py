"""The benchmark of a GPU runs to its end at tiny sizes, and one section's failure costs its own figures alone."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import sections
from benchmarks.gpu.__main__ import main, printed_rows
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.sections import SECTIONS
from benchmarks.gpu.sglang_rounds import SETTINGS, tuned_s
from eyrie_api.contract.engine import SGLANG_PROGRAM
from eyrie_api.contract.tuning import OFF
from eyrie_workers.measure.tuner.anchors import RoundCosts
from tests.gpu.sizes import TINY, this_device


def test_every_section_runs_and_one_that_fails_leaves_the_others_on_the_page(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Bench) -> list[Any]:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setitem(SECTIONS, "libraries", (fail, 1.0))
    monkeypatch.delenv(SGLANG_PROGRAM, raising=False)  # rounds of SGLang take minutes
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
    rows = sections.flex_attention_rows(Bench(TINY, this_device(), tmp_path, budget_s=0.0))
    assert len({row["shape"] for row in rows}) == 1


def test_rounds_that_the_tuner_does_not_time_are_predicted_from_those_that_it_does() -> None:
    costs = RoundCosts(undrafted_s=0.007, per_node_s=0.0001, fixed_s=0.001, per_step_s=0.0005, per_branch_s=0.0001,
                       lookup_s=0.0)
    measured = {setting: costs.round_s(setting) for setting in (OFF, *SETTINGS)}
    predicted = {setting.label(): tuned_s(setting, measured) for setting in SETTINGS}
    assert [label for label, seconds in predicted.items() if seconds is not None] == ["5/1/6", "5/4/16"]
    for setting in SETTINGS:
        seconds = predicted[setting.label()]
        assert seconds is None or seconds == pytest.approx(costs.round_s(setting), rel=0.05)
    measured.pop(OFF)
    assert all(tuned_s(setting, measured) is None for setting in SETTINGS)


def test_a_program_that_reaches_its_limit_or_fails_has_given_the_rows_that_it_printed() -> None:
    for ends, error in (("import time; time.sleep(600)", TimeoutError), ("raise SystemExit(3)", RuntimeError)):
        program = f'print("noise"); print(\'row: {{"users": 1}}\', flush=True); {ends}'
        rows = printed_rows([sys.executable, "-c", program], limit_s=5.0)
        assert next(rows) == {"users": 1}
        with pytest.raises(error):
            next(rows)
