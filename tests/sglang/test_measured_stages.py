"""Benchmark and tune in SGLang: what they report, of rivals too, what they refuse, and going on after a kill."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from eyrie_api.artifacts import read_manifest
from eyrie_api.contract.benchmark import BenchmarkSpec, RivalSpec, SuiteSpec
from eyrie_api.contract.engine import DraftTreeShape, EngineSpec
from eyrie_api.contract.reports import BenchmarkReport, TuneReport
from eyrie_api.contract.stages import BenchmarkStage, RivalDrafter, TuneStage
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.tuning import OFF, TuneSpec
from eyrie_workers.catalog import command
from eyrie_workers.stage_program import run_program
from eyrie_workers.stages.benchmark import benchmark
from tests.sglang.servers import alive, descendants, let_stages_start_it
from tests.waiting import wait_for

CHAIN = DraftTreeShape(num_steps=5, top_k=1, num_draft_tokens=6)
SGLANG = EngineSpec(kind="sglang")


@pytest.fixture(autouse=True)
def _sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the machine's measuring lock is not ours
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    let_stages_start_it(monkeypatch)


def measured(drafter: Path, **fields: Any) -> dict[str, Any]:
    """Fields of both stages' specs."""
    suites = tuple(SuiteSpec(name=name, path=f"quickstart:{name}", max_prompts=2) for name in ("chat", "code"))
    return {"job_id": "j", "checkpoint": "c-step-1", "candidate": "c", "drafter_dir": str(drafter),
            "target": TargetSpec(model="quickstart", dtype="float32"), "engine": SGLANG,
            "benchmark": BenchmarkSpec(suites=suites, max_new_tokens=32, tree=CHAIN, temperatures=(0.0,))} | fields


def prepare(directory: Path, spec: BenchmarkStage | TuneStage) -> list[str]:
    directory.mkdir()
    (directory / "spec.json").write_text(spec.model_dump_json())
    return ["--spec", str(directory / "spec.json"), "--out", str(directory / "manifest.json")]


def test_a_checkpoint_is_benchmarked_in_sglang_and_accepts_what_the_reference_engine_accepts(
        tmp_path: Path, drafter: Path) -> None:
    reports, before = {}, descendants(os.getpid())
    answers: dict[str, dict[str, list[int]]] = {}
    two_turns = tmp_path / "two.jsonl"  # MT-Bench's layout
    two_turns.write_text(json.dumps({"question_id": 7, "category": "writing", "turns": [
        "Write a short note about the sea.", "Now write it for a child."]}) + "\n")
    fields = measured(drafter)
    fields["benchmark"] = fields["benchmark"].model_copy(update={"concurrencies": (1, 2), "suites": (
        *fields["benchmark"].suites, SuiteSpec(name="turns", path=str(two_turns)))})
    for kind in ("sglang", "embedded"):
        spec = BenchmarkStage.model_validate(fields | {"engine": EngineSpec(kind=kind)})  # type: ignore[arg-type]
        assert run_program(BenchmarkStage, benchmark, prepare(tmp_path / kind, spec)) == 0
        entries = [json.loads(line) for line in (tmp_path / kind / "cells.jsonl").read_text().splitlines()[1:]]
        answers[kind] = {entry["prompt_id"]: entry["samples"]["baseline"]["token_ids"] for entry in entries
                         if entry["suite"] == "turns"}
        report = read_manifest(tmp_path / kind).report
        assert isinstance(report, BenchmarkReport)
        reports[kind] = report
    found = reports["sglang"]
    assert found.engine is not None
    assert (found.engine.kind, found.engine.version, found.engine.restarts) == ("sglang", "0.5.23", 0)
    assert "not shown in this engine on this machine" in found.engine.limits[0]
    assert found.lossless
    # Both turns are asked; the second follows the engine's own answer to the first, which is the same in both engines.
    assert [name.endswith("/turn-2") for name in answers["sglang"]] == [False, True]
    assert answers["sglang"] == answers["embedded"]
    for report in reports.values():
        assert [(one.concurrency, one.requests >= 8, one.identical == one.requests) for one in report.concurrent] == [
            (2, True, True)]
        assert report.concurrent[0].tau > 1.0
    for ours, reference in zip(found.cells, reports["embedded"].cells, strict=True):
        assert (ours.suite, ours.prompts, ours.tokens) == (reference.suite, reference.prompts, reference.tokens)
        # SGLang also counts tokens that the last round accepted behind the end: at most one round per prompt differs.
        assert sum(ours.accepted_histogram) == sum(reference.accepted_histogram)
        assert ours.tau >= reference.tau > 1.0
        assert ours.tau - reference.tau <= 5 * ours.prompts / sum(ours.accepted_histogram)
    assert descendants(os.getpid()) <= before


def test_ngram_lookup_is_a_rival_of_the_benchmark_in_sglang(tmp_path: Path, drafter: Path) -> None:
    spec = BenchmarkStage.model_validate(measured(drafter) | {
        "rival": RivalSpec(method="ngram"), "checkpoint": "rival-ngram", "drafter_dir": str(tmp_path / "none")})
    assert run_program(BenchmarkStage, benchmark, prepare(tmp_path / "stage", spec)) == 0
    report = read_manifest(tmp_path / "stage").report
    assert isinstance(report, BenchmarkReport)
    assert (report.rival, report.family, report.dropped, report.lossless) == (True, "ngram", None, True)
    assert report.engine is not None
    assert report.engine.kind == "sglang"
    for cell in report.cells:
        assert cell.tree is not None
        assert (cell.tree.num_steps, cell.tree.top_k) == (5, 1)
        assert cell.identical == cell.prompts
    assert sum(sum(cell.accepted_histogram[1:]) for cell in report.cells) > 0


def test_sampled_benchmarks_in_sglang_on_a_cpu_are_refused_before_a_server_starts(
        tmp_path: Path, drafter: Path) -> None:
    fields = measured(drafter)
    fields["benchmark"] = fields["benchmark"].model_copy(update={"temperatures": (0.0, 1.0)})
    assert run_program(BenchmarkStage, benchmark,
                       prepare(tmp_path / "stage", BenchmarkStage.model_validate(fields))) == 65
    failure = json.loads((tmp_path / "stage" / "failure.json").read_text())
    assert "benchmark.temperatures contains 1: SGLang's CPU backend verifies drafts greedily" in failure["message"]
    assert not (tmp_path / "stage" / "servers").exists()


@pytest.mark.slow
def test_tuning_in_sglang_killed_in_the_race_leaves_no_server_and_goes_on_with_the_same_trials_and_the_rival(
        tmp_path: Path, drafter: Path) -> None:
    rival = RivalDrafter(checkpoint="rival-copy", drafter_dir=str(shutil.copytree(drafter, tmp_path / "rival")))
    spec = TuneStage.model_validate(measured(drafter, rival=rival, tune=TuneSpec(
        num_steps=(2, 5), top_k=(1, 2), num_draft_tokens=(8,), concurrencies=(1, 2), max_prompts=4, temperatures=(0.0,),
        trials_share=0.5)))
    directory = tmp_path / "tune"
    prepare(directory, spec)
    before = descendants(os.getpid())
    process = subprocess.Popen(command("tune", directory), env=os.environ)
    wait_for(lambda: (directory / "profile.json").exists() and lines(directory / "blocks.jsonl") >= 12,
             "twelve lines of the ledger", 900, process=process)
    started = descendants(process.pid)
    assert started
    process.kill()
    assert process.wait() == -signal.SIGKILL
    wait_for(lambda: not alive(started), "no server outlives its stage", 30)

    kept = (directory / "blocks.jsonl").read_bytes().split(b"\n")[:-1]
    subprocess.run(command("tune", directory), env=os.environ, check=True, timeout=900)
    assert (directory / "blocks.jsonl").read_bytes().split(b"\n")[: len(kept)] == kept
    report = read_manifest(directory).report
    assert isinstance(report, TuneReport)
    assert report.engine is not None
    assert report.engine.kind == "sglang"
    assert report.final.lossless
    assert report.map is not None
    for load in (1, 2):
        tried = {trial.setting for trial in report.trials if trial.concurrency == load and trial.blocks}
        assert OFF in tried
        assert report.map.at(load).setting in tried
        fastest = max((trial for trial in report.trials if trial.concurrency == load and trial.setting != OFF),
                      key=lambda trial: trial.predicted_speedup)
        assert fastest.setting in tried
    # What the winner has to beat with `promotion.must_beat: rivals`: the rival in its own best setting, measured here
    # too.
    assert report.rival is not None
    assert (report.rival.checkpoint, report.rival.final.lossless) == (rival.checkpoint, True)
    assert report.rival.map is not None
    assert {trial.setting.method for trial in report.rival.trials} == {"off", "drafter"}
    assert descendants(os.getpid()) <= before


def lines(ledger: Path) -> int:
    """Entries of a ledger."""
    return ledger.read_bytes().count(b"\n") - 1 if ledger.exists() else 0
