"""A whole comparison of two families on the tiny target: what it leaves, and that a killed one goes on."""

import json
from pathlib import Path

import pytest

from eyrie_api.artifacts import read_manifest
from eyrie_api.errors import Conflict
from eyrie_api.v1alpha1.capture import CaptureSpec
from eyrie_api.v1alpha1.data import DataSource, DataSpec
from eyrie_api.v1alpha1.drafter import DrafterSpec
from eyrie_api.v1alpha1.engine import DraftTreeShape
from eyrie_api.v1alpha1.regeneration import RegenerateSpec
from eyrie_api.v1alpha1.reports import TrainReport
from eyrie_api.v1alpha1.targets import TargetSpec
from eyrie_api.v1alpha1.training import TrainSpec
from eyrie_workers.comparison.answer import decision
from eyrie_workers.comparison.measuring import LEDGER
from eyrie_workers.comparison.plan import Budget, CompareSpec, blocks_of
from eyrie_workers.comparison.report import CompareReport
from eyrie_workers.comparison.run import compare
from eyrie_workers.comparison.tables import speed
from eyrie_workers.comparison.training import StageFailed, cpu_seconds
from eyrie_workers.drafters.export import to_speculators
from tests.tiny import chats_file, tiny_target
from tests.workers.measurement.tiny_bench import random_drafter, suite_file
from tests.workers.parsed_page import parsed_page


class Killed(BaseException):
    """Stands for a kill: nothing of ours catches it."""


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> CompareSpec:
    home = tmp_path_factory.mktemp("asked")
    target = tiny_target(home / "target")
    to_speculators(random_drafter(home / "head", target, layers=(1, 2)), home / "published", target="org/model")
    return CompareSpec.model_validate({
        "target": TargetSpec(model=str(target)), "rivals": (str(home / "published"),),
        "data": DataSpec(sources=(DataSource(path=str(chats_file(home / "chats.jsonl"))),)),
        "families": ("eagle1", "eagle3"), "budget": Budget(kind="tokens", amount=1200),
        "regenerate": RegenerateSpec(max_new_tokens=12), "capture": CaptureSpec(check_rows=0),
        "train": TrainSpec(ttt_length=2, max_tokens_per_batch=256, threads=1),
        "benchmark": {"suites": [suite_file(home, "sums", 4)], "tree": DraftTreeShape(
            num_steps=2, top_k=2, num_draft_tokens=5), "max_new_tokens": 6, "temperatures": (0.0, 1.0), "threads": 1},
        "concurrencies": (1, 2)})


def silent(_what: str, _where: Path) -> None:
    pass


def test_two_families_are_trained_measured_and_reported_and_a_killed_run_goes_on(
        spec: CompareSpec, tmp_path: Path) -> None:
    home, began = tmp_path / "out", []

    def killed_at_the_second_training(what: str, _where: Path) -> None:
        began.append(what)
        if what.endswith("training eagle3"):
            raise Killed

    with pytest.raises(Killed):
        compare(spec, home, killed_at_the_second_training)
    before = {path: path.stat().st_mtime_ns for path in home.rglob("manifest.json")}
    assert len(before) == 3

    again: list[str] = []
    report = compare(spec, home, lambda what, _where: again.append(what))
    assert again == ["4 of 5: training eagle3", "5 of 5: measuring"]
    assert {path: path.stat().st_mtime_ns for path in before} == before

    assert {one.variant.title for one in report.variants} == {
        "off", "EAGLE-1", "EAGLE-2", "EAGLE-1 chain", "EAGLE-3", "EAGLE-3 chain", "n-gram", "rival-published"}
    assert all(one.lossless for one in report.variants)
    assert len({one.tokens for one in report.trained}) == 1
    assert [one.family for one in report.trained] == ["eagle1", "eagle3"]
    assert all(one.cpu_seconds is not None and one.parameters > 0 for one in report.trained)
    assert report.trained[0].feature_bytes < report.trained[1].feature_bytes
    assert report.target_parameters > 0
    assert report.verdict
    assert CompareReport.model_validate_json((home / "report.json").read_bytes()) == report
    assert report.verdict in (home / "report.md").read_text()
    assert (home / "plots" / "speedup.svg").exists()
    page = parsed_page((home / "report.html").read_text())
    assert decision(report) in page.text
    assert report.verdict in page.text
    for one in report.variants:
        row = next(row for row in page.rows if row[:2] == [str(one.rank), one.variant.title])
        assert row[2:4] == [one.variant.shape, speed(one.overall)]
    assert len(page.pictures) == 2 * 4, "each figure for a light and for a dark screen"

    # The measuring killed in the middle of a line: what was whole stays, and only the rest is measured.
    ledger = home / "measure" / LEDGER
    lines = ledger.read_text().split("\n")[:-1]
    assert len(lines) == 1 + len(list(blocks_of(spec)))
    ledger.write_text("\n".join(lines[:-2]) + "\n" + lines[-2][:40])
    compare(spec, home, silent)
    whole = ledger.read_text().split("\n")[:-1]
    assert whole[:-2] == lines[:-2]
    assert [json.loads(line)["index"] for line in whole[-2:]] == [json.loads(line)["index"] for line in lines[-2:]]

    with pytest.raises(Conflict, match="budget"):
        compare(spec.model_copy(update={"budget": Budget(kind="tokens", amount=2400)}), home, silent)


@pytest.fixture(scope="module")
def half_failed(spec: CompareSpec, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CompareReport]:
    """A budget in seconds; a draft vocabulary larger than the target's, which families that have none do not mind."""
    home = tmp_path_factory.mktemp("half") / "out"
    return home, compare(spec.model_copy(update={
        "families": ("eagle3", "standalone"), "budget": Budget(kind="seconds", amount=0.3), "concurrencies": (1,),
        "rivals": (), "drafter": DrafterSpec(draft_vocab_size=321)}), home, silent)


def test_a_family_that_fails_is_left_out_and_said(half_failed: tuple[Path, CompareReport]) -> None:
    home, report = half_failed
    assert {one.variant.title for one in report.variants} == {"off", "draft model", "n-gram"}
    assert report.failed["eagle3"].startswith("VocabularyTooLarge")
    assert "| eagle3 | failed | VocabularyTooLarge" in (home / "report.md").read_text()


def test_a_comparison_whose_families_all_fail_ends_with_their_error(spec: CompareSpec, tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match="321"):
        compare(spec.model_copy(update={"families": ("eagle3",), "drafter": DrafterSpec(draft_vocab_size=321)}),
                tmp_path / "out", silent)


def test_seconds_are_turned_into_epochs_by_a_training_that_is_kept(half_failed: tuple[Path, CompareReport]) -> None:
    home, report = half_failed
    calibrated = read_manifest(home / "calibrate" / "standalone" / "manifest.json")
    (one,) = report.trained
    assert isinstance(calibrated.report, TrainReport)
    assert one.epochs == pytest.approx(0.3 / calibrated.report.seconds, rel=1e-4)


def test_processor_time_of_a_killed_call_is_not_guessed(tmp_path: Path) -> None:
    path = tmp_path / "spent.jsonl"
    path.write_text('{"name": "train/a", "begins": true}\n{"name": "train/a", "cpu_s": 2.5}\n'
                    '{"name": "train/b", "begins": true}\n{"name": "train/b", "begins": true}\n'
                    '{"name": "train/b", "cpu_s": 1.0}\n{"name": "train/a", "begins": true}\n'
                    '{"name": "train/a", "cpu_s": 0.5}\n')
    assert cpu_seconds(path, "train/a") == 3.0
    assert cpu_seconds(path, "train/b") is None
