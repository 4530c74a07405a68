"""The real tune program: predictions, races, the map, the fresh confirmation, and going on after a kill."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from eyrie_api.artifacts import digest_model, read_manifest, read_sealed, verify_files, write_sealed
from eyrie_api.contract.engine import DraftServing
from eyrie_api.contract.reports import TuneReport
from eyrie_api.contract.stages import RivalDrafter, TuneStage
from eyrie_api.contract.tuning import OFF, DrafterUse, Setting
from eyrie_api.errors import EyrieError
from eyrie_workers.catalog import command
from eyrie_workers.engines.decoding_engine import EmbeddedEngine, EngineRun
from eyrie_workers.engines.process import EngineFailed
from eyrie_workers.jsonl_ledger import JsonlLedger
from eyrie_workers.measure.benchmark.variants import BASELINE, Entry
from eyrie_workers.measure.tuner.operating import possible_settings
from eyrie_workers.measure.tuner.profile import TuningProfile
from eyrie_workers.stage_program import run_program
from eyrie_workers.stages.tune import tune
from tests.waiting import wait_for
from tests.workers.measure.tiny_bench import one_shape, random_drafter, stage_specs


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


def lines(ledger: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ledger.read_text().split("\n")[1:] if line]


def raced(directory: Path) -> set[str]:
    asked = [name for row in lines(directory / "blocks.jsonl") for name in row["answers"]]
    return {name.rsplit(" ", 1)[0].split("/")[1] for name in asked}


def test_every_setting_has_a_prediction_and_the_drafters_best_is_confirmed_on_other_prompts(tmp_path: Path) -> None:
    spec = stage_specs(tmp_path, prompts_per_suite=12, max_new_tokens=6)[1]
    directory = prepare(tmp_path, spec)
    assert run_here(directory) == 0
    verify_files(read_manifest(directory), directory)
    report = report_of(directory)
    settings, loads = set(possible_settings(spec.tune)), set(spec.tune.concurrencies)
    assert {(t.setting, t.concurrency) for t in report.trials} == {(s, load) for s in settings for load in loads}
    assert report.map is not None
    assert {point.concurrency for point in report.map.points if point.measured} == loads
    assert report.map.trials_measured == sum(trial.speedup is not None for trial in report.trials) <= 4 * len(loads)
    for load in loads:  # the drafter and off are measured everywhere, whoever wins
        tried = {t.setting for t in report.trials if t.concurrency == load and t.speedup is not None}
        assert report.map.at(load).setting in tried
        assert OFF in tried
        assert any(setting.method == "drafter" for setting in tried)
    assert all(cell.identical == cell.prompts for cell in report.cells)
    assert report.winner in {cell.tree for cell in report.cells}
    assert report.final.lossless
    assert {cell.tree for cell in report.final.cells} == {report.winner}
    assert not raced(directory) & {row["prompt_id"] for row in lines(directory / "final.jsonl")}
    assert "prompts the tuner had not used" in report.finding
    # Of chains, at the raced loads and the one between them.
    assert [(row.users, row.num_steps) for row in report.needed_tau] == [
        (users, depth) for users in (1, 2, 3) for depth in (2, 3)]
    assert all(row.tau is None or 1.0 <= row.tau <= row.num_steps + 1 for row in report.needed_tau)


def test_a_required_suite_that_its_prompts_do_not_decide_answers_further_ones_and_others_do_not(
        tmp_path: Path) -> None:
    spec = one_shape(stage_specs(tmp_path, prompts_per_suite=16, max_new_tokens=4)[1])
    sums, talk = (suite.model_copy(update={"max_prompts": 2}) for suite in spec.benchmark.suites)
    spec = spec.model_copy(update={"min_speedup": 2.0, "benchmark": spec.benchmark.model_copy(update={
        "suites": (sums, talk.model_copy(update={"required": False}))})})
    directory = prepare(tmp_path, spec)
    assert run_here(directory) == 0
    # The first look again, with seconds that do not decide: a prompt at a quarter of the speed, and one at 2.5 times.
    ledger, times = directory / "final.jsonl", dict[tuple[str, float], list[float]]()
    entries = JsonlLedger(ledger, Entry, digest_model(spec)).entries
    ledger.unlink()
    again = JsonlLedger(ledger, Entry, digest_model(spec))
    for entry in entries:
        drafted_s = times.setdefault((entry.suite, entry.temperature), [4.0, 0.4])
        if drafted_s:
            again.append(entry.model_copy(update={"samples": {
                name: sample.model_copy(update={"seconds": 1.0 if name == BASELINE else drafted_s[0]})
                for name, sample in entry.samples.items()}}))
            drafted_s.pop(0)
    for name in ("manifest.json", "report.json", "events.jsonl"):
        (directory / name).unlink()
    assert run_here(directory) == 0
    assert {(cell.suite, cell.temperature): cell.prompts for cell in report_of(directory).final.cells} == {
        (suite, temperature): prompts for suite, prompts in (("sums", 8), ("talk", 2))
        for temperature in spec.benchmark.temperatures}
    assert not raced(directory) & {row["prompt_id"] for row in lines(ledger)}
    (event,) = (line for line in (directory / "events.jsonl").read_text().splitlines() if "SuitesUndecided" in line)
    assert "sums at temperature 0 (0.45x" in event
    assert "talk" not in event


def test_a_suite_too_short_for_fresh_prompts_says_so_and_a_rival_is_tuned_in_the_same_way(tmp_path: Path) -> None:
    spec = one_shape(stage_specs(tmp_path, prompts_per_suite=2, max_new_tokens=6)[1])
    rival = random_drafter(tmp_path / "other", Path(spec.target.model), seed=5)
    directory = prepare(tmp_path, spec.model_copy(update={
        "rival": RivalDrafter(checkpoint="rival-other", drafter_dir=str(rival))}))
    assert run_here(directory) == 0
    manifest, report = read_manifest(directory), report_of(directory)
    verify_files(manifest, directory)
    assert "flatters" in report.finding
    assert report.rival is not None
    assert (report.rival.checkpoint, report.rival.path, report.rival.final.lossless) == (
        "rival-other", str(rival), True)
    # N-gram look-up has been raced against the candidate; the rival's ledgers are its own.
    assert {trial.setting.method for trial in report.rival.trials} == {"off", "drafter"}
    assert {"rival/blocks.jsonl", "rival/final.jsonl", "blocks.jsonl"} <= {entry.path for entry in manifest.files}
    assert {"Tuned", "RivalTuned"} <= {json.loads(line).get("reason") for line in (
        directory / "events.jsonl").read_text().splitlines()}
    assert not (directory / "rival" / "events.jsonl").exists()


def test_a_rival_that_cannot_be_tuned_is_reported_and_the_drafter_is_tuned_all_the_same(tmp_path: Path) -> None:
    spec = one_shape(stage_specs(tmp_path, prompts_per_suite=2, max_new_tokens=4)[1])
    directory = prepare(tmp_path, spec.model_copy(update={
        "rival": RivalDrafter(checkpoint="rival-gone", drafter_dir=str(tmp_path / "gone"))}))
    assert run_here(directory) == 0
    assert report_of(directory).rival is None
    assert "RivalNotTuned" in (directory / "events.jsonl").read_text()


@pytest.mark.slow
def test_killed_and_run_again_it_predicts_and_measures_nothing_twice(tmp_path: Path) -> None:
    spec = stage_specs(tmp_path, prompts_per_suite=8, max_new_tokens=24)[1]
    directory = prepare(tmp_path, spec)
    ledger = directory / "blocks.jsonl"
    process = subprocess.Popen(command("tune", directory), env=os.environ | {"TMPDIR": str(tmp_path)})
    wait_for(lambda: ledger.exists() and ledger.read_bytes().count(b"\n") >= 3, "three lines", 400.0, process=process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    kept, profile = ledger.read_bytes().split(b"\n")[:-1], (directory / "profile.json").read_bytes()
    assert run_here(directory) == 0
    assert ledger.read_bytes().split(b"\n")[: len(kept)] == kept
    assert (directory / "profile.json").read_bytes() == profile
    measured = [(row["concurrency"], row["temperature"], row["rung"], row["variant"]) for row in lines(ledger)]
    assert len(set(measured)) == len(measured) > len(kept) - 1


def test_settings_that_wait_for_step_rates_have_them_in_all_of_the_report_and_when_they_start_again(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = one_shape(stage_specs(tmp_path, prompts_per_suite=2, max_new_tokens=4)[1])
    spec = spec.model_copy(update={"tune": spec.tune.model_copy(update={
        "drafts": (DraftServing(step_rates=()),), "ngram": False})})
    directory = prepare(tmp_path, spec)
    assert run_here(directory) == 0
    report = report_of(directory)
    assert report.map is not None
    rates = report.winner.draft.step_rates or pytest.fail("no rates")
    assert [rate.batch_tokens for rate in rates] == [1, 2, 3, 4, 5]
    drafted = Setting(tree=report.winner)
    assert {trial.setting for trial in report.trials} == {OFF, drafted}
    assert {point.setting for point in report.map.points} <= {OFF, drafted}
    assert {cell.tree for cell in report.cells} == {report.winner}
    # Killed after the first rung, where servers replace each other: those of the next rungs start with the rates.
    ledger, profile = directory / "blocks.jsonl", directory / "profile.json"
    first, *rows = ledger.read_text().splitlines(keepends=True)
    ledger.write_text(first + "".join(row for row in rows if json.loads(row)["rung"] == 0))
    write_sealed(profile, read_sealed(profile.read_bytes(), TuningProfile).model_copy(update={"num_resident": 1}))
    for name in ("manifest.json", "report.json", "final.jsonl"):
        (directory / name).unlink()
    start, started = EmbeddedEngine.start, list[DrafterUse]()

    def recorded(engine: EmbeddedEngine, uses: dict[str, DrafterUse]) -> dict[str, EyrieError]:
        started.extend(uses.values())
        return start(engine, uses)

    monkeypatch.setattr(EmbeddedEngine, "start", recorded)
    assert run_here(directory) == 0
    assert [use.setting for use in started[:2]] == [OFF, drafted]


@pytest.mark.parametrize("ends_after", [0, 3], ids=["warming up", "in a rung"])
def test_a_setting_whose_server_ends_while_it_is_raced_is_dropped_with_its_reason_and_uses_no_trial(
        ends_after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, failing, calls = EmbeddedEngine.generate, list[str](), list[str]()

    def generate(engine: EmbeddedEngine, variant: str, *arguments: Any, **options: Any) -> EngineRun:
        if "/" in variant and not failing:  # the first setting that drafts
            failing.append(variant)
        calls.append(variant)
        if variant in failing and calls.count(variant) > ends_after and options.get("truncate"):
            raise EngineFailed("its server ended 4 times", "read its log")
        return answer(engine, variant, *arguments, **options)

    monkeypatch.setattr(EmbeddedEngine, "generate", generate)
    spec = one_shape(stage_specs(tmp_path, prompts_per_suite=2, max_new_tokens=4)[1])
    directory = prepare(tmp_path, spec.model_copy(update={
        "tune": spec.tune.model_copy(update={"top_k": (1, 2), "ngram": False})}))
    assert run_here(directory) == 0
    report = report_of(directory)
    dropped = [trial for trial in report.trials if trial.setting.label() in failing]
    assert {(trial.speedup, trial.reason) for trial in dropped} == {
        (None, "could not be measured: its server ended 4 times")}
    assert report.winner.label() not in failing
    assert "VariantDropped" in (directory / "events.jsonl").read_text()


def test_a_rung_in_which_a_server_ended_is_raced_again_by_all_settings_once_per_concurrency(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, measured = EmbeddedEngine.generate, list[str]()

    def generate(engine: EmbeddedEngine, variant: str, *arguments: Any, **options: Any) -> EngineRun:
        if options.get("truncate") and arguments[0][0].max_new_tokens == 20:  # not a warm-up
            measured.append(variant)
            engine.restarts += len(measured) in (1, 14)  # its server ended, and another has answered
        return answer(engine, variant, *arguments, **options)

    monkeypatch.setattr(EmbeddedEngine, "generate", generate)
    spec = one_shape(stage_specs(tmp_path, prompts_per_suite=2, max_new_tokens=20)[1])
    directory = prepare(tmp_path, spec.model_copy(update={"tune": spec.tune.model_copy(update={"ngram": False})}))
    assert run_here(directory) == 0
    rows = [(row["rung"], row["temperature"], row["variant"]) for row in lines(directory / "blocks.jsonl")]
    repeated = {row for row in rows if rows.count(row) == 2}
    assert repeated == {(0, temperature, variant) for temperature in (0.0, 1.0) for variant in ("off", "2/2/5")}
    assert rows[:4] == rows[4:8]
    assert len(rows) == len(set(rows)) + len(repeated)
    assert all(trial.blocks == len({row[:2] for row in rows}) for trial in report_of(directory).trials)
