"""`eyrie compare-hardware` on two parts of this machine: one thread and two."""

import json
from pathlib import Path

import pytest

from eyrie_api.artifacts import digest_model, write_model
from eyrie_api.v1alpha1.hardware import HardwareReport
from eyrie_api.v1alpha1.stages import Manifest
from eyrie_workers.hardware.__main__ import REPORT, main
from tests.pipelines.rehearsal.rehearsal_stage import prove_report
from tests.workers.stages.test_prove import CHAIN, spec_in, tuned

PROFILES = """
profiles:
  - {name: one-thread, price_per_hour: 0.10, threads: 1}
  - {name: two-threads, price_per_hour: 0.19, num_devices: 2, threads: 2}
"""


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


@pytest.fixture(autouse=True)
def _own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.slow
def test_off_and_the_drafter_are_measured_on_every_profile_and_a_token_has_a_price(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "profiles.yaml").write_text(PROFILES)
    out = tmp_path / "out"
    assert main(["--profiles", str(tmp_path / "profiles.yaml"), "--proof", str(proof_in(tmp_path)), "--concurrency",
                 "1,2", "--requests", "4", "--max-new-tokens", "8", "--out", str(out), "--json"]) == 0
    report = HardwareReport.model_validate(json.loads(capsys.readouterr().out))
    assert report == HardwareReport.model_validate_json((out / REPORT).read_text())
    assert {(row.profile, row.variant, row.users) for row in report.rows} == {
        (profile, variant, users) for profile in ("one-thread", "two-threads") for variant in ("off", "drafted")
        for users in (1.0, 2.0)}
    assert {choice.users for choice in report.choices} == {1.0, 2.0}
    drafted = [level for level in report.load.levels if level.variant.endswith("/drafted")]
    assert all(level.total.tau is not None and level.total.tau >= 1.0 for level in drafted)
    assert all(comparison.identical == comparison.compared for comparison in report.load.comparisons)


@pytest.mark.parametrize(("profiles", "words"), [
    ("profiles: [", "not YAML"), ("profiles: []", "profiles"), ("- 1", "profiles.yaml"),
])
def test_a_file_that_has_no_profiles_is_named_with_its_fault(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], profiles: str, words: str) -> None:
    (tmp_path / "profiles.yaml").write_text(profiles)
    assert main(["--profiles", str(tmp_path / "profiles.yaml"), "--proof", str(tmp_path)]) == 65
    assert words in capsys.readouterr().err


def test_without_a_proof_of_a_drafter_there_is_nothing_to_compare(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "profiles.yaml").write_text(PROFILES)
    arguments = ["--profiles", str(tmp_path / "profiles.yaml"), "--concurrency", "1", "--out", str(tmp_path / "out")]
    assert main([*arguments, "--proof", str(tmp_path / "nowhere")]) != 0
    assert "nowhere" in capsys.readouterr().err
    skipped = proof_in(tmp_path, skipped="speculation pays at none of the declared loads")
    assert main([*arguments, "--proof", str(skipped)]) == 65
    assert "proved nothing" in capsys.readouterr().err
    assert main([*arguments[:2], "--proof", str(tmp_path / "prove"), "--concurrency", "none"]) == 65
