"""The real tune program: the grid, the fresh confirmation, and going on after a kill."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from eyrie_api.artifacts import read_manifest, verify_files
from eyrie_api.v1alpha1.reports import TuneReport
from eyrie_api.v1alpha1.stages import TuneStage
from eyrie_workers.catalog import command
from eyrie_workers.measurement.grid import possible_shapes
from eyrie_workers.stages.program import run_program
from eyrie_workers.stages.tune import tune
from tests.workers.measurement.tiny_bench import stage_specs


@pytest.fixture(autouse=True)
def _own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def prepare(tmp_path: Path, spec: TuneStage) -> Path:
    directory = tmp_path / "stage"
    directory.mkdir()
    (directory / "spec.json").write_text(spec.model_dump_json())
    return directory


def run_here(directory: Path) -> int:
    arguments = ["--spec", str(directory / "spec.json"), "--out", str(directory / "manifest.json")]
    return run_program(TuneStage, tune, arguments)


def report_of(directory: Path) -> TuneReport:
    report = read_manifest(directory).report
    assert isinstance(report, TuneReport)
    return report


def prompts_in(ledger: Path) -> set[str]:
    return {json.loads(line)["prompt_id"] for line in ledger.read_text().split("\n")[1:] if line}


def test_the_whole_grid_is_reported_and_the_winner_confirmed_on_other_prompts(tmp_path: Path) -> None:
    spec = stage_specs(tmp_path, prompts_per_suite=6)[1]
    directory = prepare(tmp_path, spec)
    assert run_here(directory) == 0
    verify_files(read_manifest(directory), directory)
    report = report_of(directory)
    assert {cell.tree for cell in report.cells} == set(possible_shapes(spec.tune))
    assert report.winner in {cell.tree for cell in report.cells if cell.prompts == 4}
    assert all(cell.identical == cell.prompts for cell in report.cells)
    assert report.final.lossless
    assert {cell.tree for cell in report.final.cells} == {report.winner}
    assert not prompts_in(directory / "cells.jsonl") & prompts_in(directory / "final.jsonl")
    assert "prompts the grid did not use" in report.finding
    assert report.winner.label() in report.finding


def test_a_suite_too_short_for_fresh_prompts_says_that_the_figure_is_flattered(tmp_path: Path) -> None:
    directory = prepare(tmp_path, stage_specs(tmp_path, prompts_per_suite=2)[1])
    assert run_here(directory) == 0
    assert "flatters" in report_of(directory).finding


def test_killed_and_run_again_it_asks_no_prompt_twice(tmp_path: Path) -> None:
    spec = stage_specs(tmp_path, prompts_per_suite=8, max_new_tokens=24)[1]
    spec = spec.model_copy(update={"tune": spec.tune.model_copy(update={"max_prompts": 8})})
    directory = prepare(tmp_path, spec)
    ledger = directory / "cells.jsonl"
    process = subprocess.Popen(command("tune", directory), env=os.environ | {"TMPDIR": str(tmp_path)})
    deadline = time.monotonic() + 60
    while not ledger.exists() or ledger.read_bytes().count(b"\n") < 3:
        assert time.monotonic() < deadline, "tune wrote no ledger"
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    kept = ledger.read_bytes().split(b"\n")[:-1]
    assert run_here(directory) == 0
    assert ledger.read_bytes().split(b"\n")[: len(kept)] == kept
    rows = [json.loads(line) for line in ledger.read_text().split("\n")[1:] if line]
    assert len({(r["suite"], r["prompt_id"], r["temperature"]) for r in rows}) == len(rows) == 16


def test_a_grid_without_any_possible_shape_is_refused(tmp_path: Path) -> None:
    spec = stage_specs(tmp_path)[1]
    impossible = spec.tune.model_copy(update={"num_steps": (9,), "top_k": (4,), "num_draft_tokens": (5,)})
    directory = prepare(tmp_path, spec.model_copy(update={"tune": impossible}))
    assert run_here(directory) == 65
    assert "num_draft_tokens" in json.loads((directory / "failure.json").read_text())["mend"]
