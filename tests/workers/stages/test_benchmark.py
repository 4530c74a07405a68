"""The real benchmark program: whole, killed and run again, and refused."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eyrie_api.artifacts import read_manifest, verify_files
from eyrie_api.contract.benchmark import BroughtDrafter, RivalSpec
from eyrie_api.contract.engine import EngineSpec
from eyrie_api.contract.reports import BenchmarkReport
from eyrie_api.contract.stages import BenchmarkStage
from eyrie_workers.catalog import command
from eyrie_workers.drafters.eagle3.family import load_drafter
from eyrie_workers.machine import machine_lock
from eyrie_workers.stage_program import INTERRUPTED_EXIT_CODE, run_program
from eyrie_workers.stages.benchmark import benchmark
from tests.api.samples import benchmark_report, finish_stage
from tests.tiny import tiny_target
from tests.waiting import wait_for
from tests.workers.measure.tiny_bench import random_drafter, stage_specs


def prepare(tmp_path: Path, spec: BenchmarkStage) -> Path:
    directory = tmp_path / "stage"
    directory.mkdir()
    (directory / "spec.json").write_text(spec.model_dump_json())
    return directory


def longer_spec(tmp_path: Path) -> BenchmarkStage:
    """24 answers of 24 tokens in two variants: long enough to be interrupted, seconds to finish."""
    spec = stage_specs(tmp_path, prompts_per_suite=6, max_new_tokens=24)[0]
    suites = tuple(suite.model_copy(update={"max_prompts": 6}) for suite in spec.benchmark.suites)
    return spec.model_copy(update={"benchmark": spec.benchmark.model_copy(update={"suites": suites})})


def run_here(directory: Path) -> int:
    arguments = ["--spec", str(directory / "spec.json"), "--out", str(directory / "manifest.json")]
    return run_program(BenchmarkStage, benchmark, arguments)


def start(directory: Path, tmp_path: Path) -> "subprocess.Popen[bytes]":
    # Its own temporary directory: the machine's measuring lock belongs to real measurements.
    return subprocess.Popen(command("benchmark", directory), env=os.environ | {"TMPDIR": str(tmp_path)})


@pytest.fixture(autouse=True)
def _own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def wait_for_entries(ledger: Path, num: int) -> None:
    wait_for(lambda: ledger.exists() and ledger.read_bytes().count(b"\n") > num, f"{num} entries of the ledger")


def test_the_program_reports_every_suite_and_temperature_lossless(tmp_path: Path) -> None:
    spec = stage_specs(tmp_path, max_new_tokens=6)[0]
    directory = prepare(tmp_path, spec.model_copy(update={
        "benchmark": spec.benchmark.model_copy(update={"concurrencies": (1, 3)})}))
    assert run_here(directory) == 0
    manifest = read_manifest(directory)
    verify_files(manifest, directory)
    report = manifest.report
    assert isinstance(report, BenchmarkReport)
    # At 3 at once blocks of six requests at each temperature: five to ten pairs of them, until it is clear.
    assert [(one.concurrency, one.temperature) for one in report.concurrent] == [(3, 0.0), (3, 1.0)]
    assert all(one.requests in range(30, 61, 6) and one.identical == one.requests for one in report.concurrent)
    assert all(one.tau >= 1.0 and one.baseline_tokens_per_s > 0 for one in report.concurrent)
    blocks = [json.loads(line) for line in (directory / "blocks.jsonl").read_text().splitlines()[1:]]
    assert sorted({row["variant"] for row in blocks}) == ["5/1/6", "off"]
    assert [row["variant"] for row in blocks[:4]] == ["off", "5/1/6", "5/1/6", "off"]
    assert {(cell.suite, cell.temperature) for cell in report.cells} == {
        (suite, t) for suite in ("sums", "talk") for t in (0.0, 1.0)}
    assert report.lossless
    assert all(cell.identical == cell.prompts == 2 for cell in report.cells)
    assert report.speedup == pytest.approx(sum(c.speedup for c in report.cells) / 4)
    assert report.environment.threads == 1
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    assert any(e["kind"] == "progress" and e["done"] == e["total"] == 16 for e in events)
    assert any(e["kind"] == "metric" and e["name"] == "sums/t0/speedup" for e in events)


def test_a_rival_becomes_a_checkpoint_of_the_stage_and_is_measured_like_one(tmp_path: Path) -> None:
    ours = stage_specs(tmp_path, max_new_tokens=6)[0]
    head = random_drafter(tmp_path / "published", Path(ours.target.model), seed=5, layers=(1, 2))
    drafter = tmp_path / "stage" / "drafter"
    directory = prepare(tmp_path, ours.model_copy(update={
        "drafter_dir": str(drafter), "rival": RivalSpec(path=str(head)), "checkpoint": "rival-published"}))
    assert run_here(directory) == 0
    manifest = read_manifest(directory)
    verify_files(manifest, directory)
    report = manifest.report
    assert isinstance(report, BenchmarkReport)
    assert (report.rival, report.family, report.dropped, report.lossless) == (True, "eagle3", None, True)
    assert len(report.cells) == 4
    assert load_drafter(drafter).config.aux_layers == (1, 2)
    assert "drafter/model.safetensors" in {entry.path for entry in manifest.files}


def test_n_gram_look_up_is_measured_like_a_checkpoint_without_a_drafter_of_its_own(tmp_path: Path) -> None:
    ours = stage_specs(tmp_path, max_new_tokens=6)[0]
    directory = prepare(tmp_path, ours.model_copy(update={
        "drafter_dir": str(tmp_path / "none"), "rival": RivalSpec(method="ngram"), "checkpoint": "rival-ngram"}))
    assert run_here(directory) == 0
    report = read_manifest(directory).report
    assert isinstance(report, BenchmarkReport)
    assert (report.rival, report.family, report.dropped, report.lossless) == (True, "ngram", None, True)
    assert {cell.shape for cell in report.cells} == {"5/1/6"}


def test_a_rival_of_another_target_is_dropped_with_the_reason_and_the_stage_succeeds(tmp_path: Path) -> None:
    other = tiny_target(tmp_path / "other", hidden_size=48)
    head = random_drafter(tmp_path / "published", other, layers=(1, 2))
    ours = stage_specs(tmp_path)[0]
    directory = prepare(tmp_path, ours.model_copy(update={
        "drafter_dir": str(tmp_path / "stage" / "drafter"), "rival": RivalSpec(path=str(head)),
        "checkpoint": "rival-published"}))
    assert run_here(directory) == 0
    report = read_manifest(directory).report
    assert isinstance(report, BenchmarkReport)
    assert report.cells == ()
    assert report.dropped is not None
    assert "states of 48, the target's are 32" in report.dropped
    assert "RivalDropped" in (directory / "events.jsonl").read_text()


def test_a_drafter_from_elsewhere_is_a_candidate_and_one_of_another_target_is_dropped_with_the_reason(
        tmp_path: Path) -> None:
    ours = stage_specs(tmp_path, max_new_tokens=6)[0]
    wide = random_drafter(tmp_path / "wide", tiny_target(tmp_path / "other", hidden_size=48), layers=(1, 2))
    reports = []
    for name, path in (("mine", random_drafter(tmp_path / "head", Path(ours.target.model), layers=(1, 2))),
                       ("theirs", wide)):
        (tmp_path / name).mkdir()
        directory = prepare(tmp_path / name, ours.model_copy(update={
            "drafter_dir": str(tmp_path / name / "stage" / "drafter"), "brought": BroughtDrafter(path=str(path)),
            "checkpoint": name, "candidate": name}))
        assert run_here(directory) == 0
        reports.append(read_manifest(directory).report)
    mine, theirs = reports
    assert isinstance(mine, BenchmarkReport)
    assert isinstance(theirs, BenchmarkReport)
    assert (mine.rival, mine.family, mine.dropped, mine.lossless) == (False, "eagle3", None, True)
    assert (theirs.rival, theirs.cells) == (False, ())
    assert "states of 48, the target's are 32" in (theirs.dropped or "")
    assert "DrafterDropped" in (tmp_path / "theirs" / "stage" / "events.jsonl").read_text()


def test_a_rival_that_the_engine_does_not_run_is_dropped_with_the_reason(tmp_path: Path) -> None:
    spec = stage_specs(tmp_path)[0]
    head = random_drafter(tmp_path / "published", Path(spec.target.model), family="medusa")
    directory = prepare(tmp_path, spec.model_copy(update={
        "engine": EngineSpec(kind="sglang"), "drafter_dir": str(tmp_path / "stage" / "drafter"),
        "rival": RivalSpec(path=str(head)), "checkpoint": "rival-published",
        "benchmark": spec.benchmark.model_copy(update={"temperatures": (0.0,)})}))
    assert run_here(directory) == 0
    report = read_manifest(directory).report
    assert isinstance(report, BenchmarkReport)
    assert "is of a family that SGLang cannot serve" in (report.dropped or "")


@pytest.mark.slow
def test_terminated_and_killed_it_keeps_every_finished_answer(tmp_path: Path) -> None:
    directory = prepare(tmp_path, longer_spec(tmp_path))
    ledger = directory / "cells.jsonl"
    process = start(directory, tmp_path)
    wait_for_entries(ledger, 1)
    process.terminate()
    assert process.wait(120) == INTERRUPTED_EXIT_CODE
    assert not (directory / "manifest.json").exists()
    process = start(directory, tmp_path)
    wait_for_entries(ledger, ledger.read_bytes().count(b"\n") + 2)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not (directory / "manifest.json").exists()
    kept = ledger.read_bytes().split(b"\n")[:-1]
    assert len(kept) < 25, "the program finished before it was killed; make it longer"
    assert run_here(directory) == 0
    assert ledger.read_bytes().split(b"\n")[: len(kept)] == kept
    rows = [json.loads(line) for line in ledger.read_text().split("\n")[1:] if line]
    assert len(rows) == 24
    assert len({(r["suite"], r["prompt_id"], r["temperature"]) for r in rows}) == 24
    report = read_manifest(directory).report
    assert isinstance(report, BenchmarkReport)
    assert sum(cell.prompts for cell in report.cells) == 24


def test_while_another_process_measures_it_waits_and_says_so(tmp_path: Path) -> None:
    directory = prepare(tmp_path, stage_specs(tmp_path, max_new_tokens=4)[0])
    events = directory / "events.jsonl"
    with machine_lock(lambda: None, tmp_path):
        process = start(directory, tmp_path)
        wait_for(lambda: events.exists() and "Waiting" in events.read_text(), "the program says that it waits")
        assert process.poll() is None
        assert not (directory / "cells.jsonl").read_text().count("\n") > 1
    assert process.wait(timeout=60) == 0


def test_a_missing_drafter_and_a_missing_suite_end_with_a_hint_and_no_manifest(tmp_path: Path) -> None:
    spec = stage_specs(tmp_path)[0]
    directory = prepare(tmp_path, spec.model_copy(update={"drafter_dir": str(tmp_path / "gone")}))
    assert run_here(directory) == 66
    failure = json.loads((directory / "failure.json").read_text())
    assert failure["reason"] == "ArtifactMissing"
    assert failure["hint"]
    Path(spec.benchmark.suites[0].path).unlink()
    (directory / "spec.json").write_text(spec.model_dump_json())
    assert run_here(directory) == 66
    assert "sums" in json.loads((directory / "failure.json").read_text())["message"]
    assert not (directory / "manifest.json").exists()


def test_a_drafter_that_differs_from_its_manifest_is_refused_before_any_work(tmp_path: Path) -> None:
    made, weights = tmp_path / "stages" / "train" / "a", "checkpoints/c/model.safetensors"
    finish_stage(made, "benchmark", benchmark_report("c", {"chat": (2.0,)}), {weights: b"weights"}, "j")
    (made / weights).write_bytes(b"weightz")
    spec = stage_specs(tmp_path)[0].model_copy(update={"drafter_dir": str(made / "checkpoints/c")})
    directory = prepare(tmp_path, spec)
    assert run_here(directory) == 74
    assert "model.safetensors" in json.loads((directory / "failure.json").read_text())["message"]


def test_measuring_needs_neither_transformers_nor_a_second_target(tmp_path: Path) -> None:
    script = ("import sys; import eyrie_workers.stages.benchmark, eyrie_workers.stages.tune; "
              "sys.exit('transformers' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_transformers_figure_is_reported_when_asked_for(tmp_path: Path) -> None:
    spec = stage_specs(tmp_path, max_new_tokens=6)[0].model_copy(update={"measure_transformers": True})
    directory = prepare(tmp_path, spec)
    assert run_here(directory) == 0
    report = read_manifest(directory).report
    assert isinstance(report, BenchmarkReport)
    assert report.transformers_generate_tokens_per_s is not None
    assert report.transformers_generate_tokens_per_s > 0
    assert report.transformers_baseline_tokens_per_s is not None
    assert report.transformers_baseline_tokens_per_s > 0
    assert report.transformers_prompts == 2
    assert "BaselineCompared" in (directory / "events.jsonl").read_text()
