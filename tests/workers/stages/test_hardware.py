"""The hardware stage on two parts of this machine, one thread and two, as a job runs it: a program for each profile."""

import json
from pathlib import Path

import numpy as np
import pytest

from eyrie_api.artifacts import digest_model, read_manifest, verify_files, write_model
from eyrie_api.contract.hardware import HardwareMeasurement, HardwareSpec, PlacedProfile
from eyrie_api.contract.load import LoadSpec
from eyrie_api.contract.stages import HardwareStage, Manifest, ProveStage
from eyrie_api.decisions.hardware_choice import hardware_of
from eyrie_api.errors import ArtifactCorrupt
from eyrie_workers.catalog import LOAD_RESULTS_FILE
from eyrie_workers.measure.load.client import RequestResult
from eyrie_workers.measure.load.report_statistics import LevelResults, comparison
from eyrie_workers.measure.load.schedule import RequestLevel
from eyrie_workers.stage_program import run_program
from eyrie_workers.stages.hardware import compare, read_results, write_results
from tests.api.artifacts.test_directories import a_stage
from tests.pipelines.rehearsal.rehearsal_stage import prove_report
from tests.workers.stages.test_prove import CHAIN, spec_in, tuned

PROFILES = HardwareSpec(profiles=(PlacedProfile(name="one-thread", price_per_hour=0.10, threads=1),
                                  PlacedProfile(name="two-threads", price_per_hour=0.19, threads=2)))
LOAD = LoadSpec(concurrencies=(1, 2), requests=4, repeats=2, warmup_requests=1, max_new_tokens=8)


@pytest.fixture(autouse=True)
def _own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def proof_in(tmp_path: Path, **changes: object) -> Path:
    """The directory of a finished prove stage."""
    spec = spec_in(tmp_path, tuned(None))
    directory = tmp_path / "prove"
    directory.mkdir()
    (directory / "spec.json").write_text(spec.model_dump_json())
    report = prove_report(spec)
    report = report.model_copy(update={"use": report.use.model_copy(update={"setting": CHAIN}), **changes})
    write_model(directory / "manifest.json", Manifest(
        stage="prove", job_id="j", spec_digest=digest_model(spec), code_version="0",
        started_at="2026-01-01T00:00:00+00:00", finished_at="2026-01-01T00:00:00+00:00", files=(), report=report))
    return directory


def run(tmp_path: Path, proof: Path, profile: PlacedProfile) -> int:
    """Run the stage of one profile; returns its exit code."""
    first = PROFILES.profiles[0].name
    spec = HardwareStage(
        job_id="j", candidate="c", profile=profile, baseline=first, proof_dir=str(proof), load=LOAD,
        baseline_dir=None if profile.name == first else str(tmp_path / first),
        proof=ProveStage.model_validate_json((proof / "spec.json").read_text()))
    directory = tmp_path / profile.name
    directory.mkdir()
    (directory / "spec.json").write_text(spec.model_dump_json())
    arguments = ["--spec", str(directory / "spec.json"), "--out", str(directory / "manifest.json")]
    return run_program(HardwareStage, compare, arguments)


def measured(tmp_path: Path, proof: Path, profile: PlacedProfile) -> HardwareMeasurement:
    """What the stage of one profile reports."""
    assert run(tmp_path, proof, profile) == 0
    directory = tmp_path / profile.name
    manifest = read_manifest(directory)
    verify_files(manifest, directory)
    report = manifest.report
    assert isinstance(report, HardwareMeasurement)
    return report


@pytest.mark.slow
def test_profiles_measured_by_programs_of_their_own_are_compared_with_the_first_one_without_a_drafter(
        tmp_path: Path) -> None:
    proof = proof_in(tmp_path)
    reports = [measured(tmp_path, proof, one) for one in PROFILES.profiles]
    report = hardware_of(PROFILES, reports)
    assert report is not None
    assert {(row.profile, row.variant, row.users) for row in report.rows} == {
        (profile, variant, users) for profile in ("one-thread", "two-threads") for variant in ("off", "drafted")
        for users in (1.0, 2.0)}
    assert {one.baseline for one in report.load.comparisons} == {"one-thread/off"}
    assert all(one.identical == one.compared > 0 for one in report.load.comparisons)
    for choice in report.choices:
        assert choice.money_interval is not None
        assert choice.money_ratio is not None
        assert choice.money_interval.low <= choice.money_ratio <= choice.money_interval.high
    assert not (tmp_path / "two-threads" / LOAD_RESULTS_FILE).exists()


def test_a_proof_of_no_drafter_leaves_nothing_to_compare(tmp_path: Path) -> None:
    why = "speculation pays at none of the declared loads"
    found = measured(tmp_path, proof_in(tmp_path, skipped=why), PROFILES.profiles[0])
    assert (found.load, found.skipped) == (None, why)
    assert hardware_of(PROFILES, [found]) is None


def test_prompts_of_the_proof_that_differ_from_their_manifest_are_refused_before_any_work(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    proof = proof_in(tmp_path, skipped="nothing to compare")
    answers = a_stage(tmp_path / "stages" / "regenerate")
    spec = ProveStage.model_validate_json((proof / "spec.json").read_text())
    read = spec.model_copy(update={"held_out_file": str(answers / "index.json")})
    (proof / "spec.json").write_text(read.model_dump_json())
    (answers / "index.json").write_text("other prompts")
    assert run(tmp_path, proof, PROFILES.profiles[0]) == ArtifactCorrupt.exit_code
    assert "ArtifactCorrupt" in (tmp_path / PROFILES.profiles[0].name / "failure.json").read_text()
    assert "index.json" in capsys.readouterr().err


def test_stored_requests_give_the_comparison_that_the_measured_ones_give(tmp_path: Path) -> None:
    def level(variant: str, speed: float) -> LevelResults:
        results = tuple(RequestResult(
            "chat", f"p{number}", 0, number, tokens=10 + number, ttft_s=0.1, gaps_s=np.full(9, 0.01),
            end_to_end_s=(1.0 + 0.1 * number) / speed, histogram=(2, 3), proposed=True, digest=bytes([255, number]),
            ids_digest=bytes([number, 200])) for number in range(8))
        failed = RequestResult("chat", "lost", 0, 9, failure="timeout")
        return LevelResults(variant, RequestLevel("closed", 2), (*results, failed), 4.0 / speed, 0.1)

    ours, theirs = level("b/off", 2.0), level("a/off", 1.0)
    write_results(tmp_path / "results.json", [theirs])
    [stored] = read_results(tmp_path / "results.json")
    assert comparison(ours, stored, LOAD) == comparison(ours, theirs, LOAD)
    assert json.loads((tmp_path / "results.json").read_text())[0]["variant"] == "a/off"
