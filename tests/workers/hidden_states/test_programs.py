"""The bench and the trial run whole, small; what they report is what they did."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import capture_overlap, feature_store
from benchmarks.codecs.measure import hadamard_error, way_named
from benchmarks.codecs.plot import draw
from benchmarks.codecs.report import CodecReport, SeedResult, WayResult
from eyrie_workers.hidden_states.codecs import relative_error


def test_the_bench_reads_every_store_whole_in_every_way(tmp_path: Path) -> None:
    out = tmp_path / "store.json"
    code = feature_store.main(["--out", str(out), "--codecs", "int8", "--hidden-size", "32", "--tokens", "3000",
                       "--passes", "1", "--batch-tokens", "1000", "--fed-batches", "2", "--trainer-tokens-per-s", "1e6",
                       "--s3", (tmp_path / "elsewhere").as_uri()])
    assert code == 0
    report = json.loads(out.read_text())
    assert {(pace["place"], pace["way"]) for pace in report["paces"]} == {
        (place, way) for place in ("directory", "S3") for way in ("first", "again", "fed", "fed, nothing ahead")}
    assert all(pace["tokens_per_s"] > 0 for pace in report["paces"])


def test_the_overlap_bench_writes_whole_stores_and_reports_every_side(tmp_path: Path) -> None:
    out = tmp_path / "overlap.json"
    assert capture_overlap.main(["--out", str(out), "--hidden-size", "32", "--tokens", "40", "--passes", "5",
                                 "--passes-per-shard", "2"]) == 0
    report = json.loads(out.read_text())
    assert report["num_bytes"] > 0
    assert min(report["forward_s"], report["writing_s"], report["together_s"]) > 0


def test_a_way_is_named_as_the_report_names_it() -> None:
    for name in ("bfloat16", "int4", "int8+top16"):
        assert way_named(name).name == name


def test_rotation_changes_nothing_for_gaussian_states_and_spreads_an_outlier() -> None:
    states = torch.randn(16, 1, 64, generator=torch.Generator().manual_seed(0))
    plain = float(relative_error(states, "int4").mean())
    assert hadamard_error(states) == pytest.approx(plain, rel=0.1)
    states[:, :, 3] = 1000.0
    assert float(relative_error(states, "int4").mean()) < hadamard_error(states)


def test_the_plot_is_drawn_for_any_number_of_seeds(tmp_path: Path) -> None:
    def way(name: str, tau: float, size: float) -> WayResult:
        return WayResult(name=name, bytes_per_token=size, share_of_bfloat16=0.4, aux_error={"1": 0.01},
                         aux_error_worst=0.02, teacher_kl=1e-5,
                         seeds=(SeedResult(seed=0, tau=tau, theoretical_speedup=tau, train_s=1.0),), tau=tau,
                         tau_spread=0.0, lost=0.0, lost_spread=0.0, within_seed_noise=True)

    report = CodecReport(target="t", conversations=1, tokens=1, answer_tokens=1, prompts=1, seed_spread=0.1,
                         hadamard_int4_error=0.1, ways=(way("float32", 2.0, 4000.0), way("int8", 1.9, 900.0)),
                         seconds=1.0, environment={})
    paths = draw(report, tmp_path)
    assert [path.suffix for path in paths] == [".png", ".svg"]
    assert all(path.stat().st_size > 5000 for path in paths)
