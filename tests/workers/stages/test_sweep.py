"""Candidates trained together are what they would have been alone, and cost less."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eyrie_api.artifacts import digest_model, write_model
from eyrie_api.contract.families import FAMILIES
from eyrie_api.contract.stages import TrainStage
from eyrie_api.errors import ArtifactCorrupt, Conflict
from eyrie_api.planning.eagle3_rules import num_aux
from eyrie_workers.catalog import STATE_DIR
from eyrie_workers.hidden_states.shard_format import shard_name
from eyrie_workers.stage_program import INTERRUPTED_EXIT_CODE, Stage
from eyrie_workers.stages.sweep import DecidedRungs, group_candidates, rung_steps, slower_half, sweep
from eyrie_workers.targets.config import read_config
from eyrie_workers.targets.loading import target_digest
from tests.waiting import wait_for
from tests.workers.stages import test_train
from tests.workers.stages.test_train import metrics, report_of, run, weights, write_spec, write_store


def test_candidates_trained_together_are_those_trained_alone(
        tmp_path: Path, target_dir: Path, store_dir: Path) -> None:
    settings = {"rate": {"learning_rate": 3e-3}, "loss": {"loss": "lk_hybrid", "normalization": "sequence"},
                "shorter": {"max_steps": 5, "ttt_length": 2},
                "narrow": {"drafter": {"intermediate_size": 24, "draft_vocab_size": 48}}}
    for name, fields in settings.items():
        for way in ("together", "alone"):
            write_spec(tmp_path / way / name, target_dir, store_dir,
                       **{"max_steps": 8} | fields)  # type: ignore[operator]
    assert sweep([tmp_path / "together" / name for name in settings]) == 0
    for name in settings:
        assert run(tmp_path / "alone" / name) == 0
        ours, theirs = (report_of(tmp_path / way / name) for way in ("together", "alone"))
        assert (ours.steps, ours.tokens, ours.supervised_tokens) == (theirs.steps, theirs.tokens,
                                                                     theirs.supervised_tokens)
        for mine, other in zip(*(weights(tmp_path / way / name).values() for way in ("together", "alone")),
                               strict=True):
            for key, tensor in mine.items():  # the teacher's products have more rows: the last bits may differ
                torch.testing.assert_close(tensor.float(), other[key].float(), atol=2e-3, rtol=2e-2, msg=key)
        # The train program finds the manifest and has nothing to do.
        before = (tmp_path / "together" / name / "manifest.json").read_bytes()
        assert run(tmp_path / "together" / name) == 0
        assert (tmp_path / "together" / name / "manifest.json").read_bytes() == before


def test_the_target_is_read_for_its_digest_once_for_all_candidates(
        tmp_path: Path, target_dir: Path, store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []
    for module in ("sweep", "train"):
        monkeypatch.setattr(f"eyrie_workers.stages.{module}.target_digest",
                            lambda path: reads.append(path) or target_digest(path))
    for seed, name in enumerate(("a", "b", "c")):  # two groups
        write_spec(tmp_path / name, target_dir, store_dir, max_steps=1, seed=seed // 2)
    assert sweep([tmp_path / name for name in ("a", "b", "c")]) == 0
    assert len(reads) == 1


def test_candidates_that_name_their_layers_share_a_store_of_all_of_them(
        tmp_path: Path, target_dir: Path, store_dir: Path) -> None:
    chosen = {"low": [1, 2], "high": [2, 3], "default": None}
    for name, layers in chosen.items():
        write_spec(tmp_path / name, target_dir, store_dir, max_steps=2, drafter={"aux_layers": layers})
    write_spec(tmp_path / "missing", target_dir, store_dir, max_steps=2, drafter={"aux_layers": [2, 4]})
    assert sweep([tmp_path / name for name in (*chosen, "missing")]) != 0
    for name, layers in chosen.items():
        config = json.loads(next((tmp_path / name).glob("checkpoints/*/config.json")).read_text())
        assert num_aux(config) == len(layers or "123")
    assert json.loads((tmp_path / "missing" / "failure.json").read_text())["reason"] == "Conflict"


def test_every_family_trains_with_the_others_and_none_is_stopped_for_another(
        tmp_path: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_train, "AUX_LAYERS", (1, 2, 3, read_config(target_dir).num_layers))
    store_dir = write_store(tmp_path / "store", target_dir, 12)
    names = [name for name, row in FAMILIES.items() if not row.of_target]
    for name in names:
        write_spec(tmp_path / name, target_dir, store_dir, max_steps=4, drafter={"family": name, "aux_layers": [1, 2]})
    assert sweep([tmp_path / name for name in names], rungs=(0.25, 0.5)) == 0
    for name in names:
        report = report_of(tmp_path / name)
        assert (report.family, report.steps, report.stopped_early) == (name, 4, False)


def rungs_of(directory: Path) -> dict[int, float]:
    """What each rung decided of a candidate, by step: 1 it went on, 0 it ended."""
    records = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    return {one["step"]: one["value"] for one in records if one["kind"] == "metric" and one["name"] == "rung"}


def test_at_a_rung_the_slower_half_stops_with_a_checkpoint(tmp_path: Path, target_dir: Path, store_dir: Path) -> None:
    rates = {"a": 1e-7, "b": 1e-2, "c": 1e-7, "d": 5e-3}
    for name, rate in rates.items():
        write_spec(tmp_path / name, target_dir, store_dir, learning_rate=rate, max_steps=10)
    assert sweep([tmp_path / name for name in rates], rungs=(0.5,)) == 0
    stopped = {name: report_of(tmp_path / name).stopped_early for name in rates}
    assert sum(stopped.values()) == 2
    steps = {name: report_of(tmp_path / name).steps for name in rates}
    assert len({steps[name] for name in rates if stopped[name]}) == 1
    assert max(steps[n] for n in rates if stopped[n]) < min(steps[n] for n in rates if not stopped[n])
    rung = min(steps.values())
    for name in rates:
        assert report_of(tmp_path / name).checkpoints[-1].step == steps[name]
        assert rungs_of(tmp_path / name) == {rung: 0.0 if stopped[name] else 1.0}


def test_a_rung_that_was_decided_before_an_interruption_is_not_decided_again_from_other_figures(
        tmp_path: Path, target_dir: Path, store_dir: Path) -> None:
    rates = {"a": 1e-7, "b": 1e-2}
    for name, rate in rates.items():
        write_spec(tmp_path / name, target_dir, store_dir, learning_rate=rate, max_steps=10)
    directories = [tmp_path / name for name in rates]
    for directory in directories:  # as if measured otherwise before the kill: the one that is slower now goes on
        spec = TrainStage.model_validate_json((directory / "spec.json").read_text())
        write_model(directory / STATE_DIR / "rungs.json", DecidedRungs(
            spec_digest=digest_model(spec), goes_on={step: {"a": True, "b": False} for step in range(1, 10)}))
    assert sweep(directories, rungs=(0.5,)) == 0
    assert {name: report_of(tmp_path / name).stopped_early for name in rates} == {"a": False, "b": True}


@pytest.mark.slow
def test_a_sweep_killed_after_a_rung_and_resumed_on_two_processes_decides_as_it_would_have(
        tmp_path: Path, target_dir: Path, store_dir: Path) -> None:
    rates = {"a": 1e-7, "b": 1e-2, "c": 2e-7, "d": 5e-3}
    for way in ("killed", "whole"):
        for name, rate in rates.items():  # who goes on is saved at its end alone, and so goes back to before the rung
            write_spec(tmp_path / way / name, target_dir, store_dir, learning_rate=rate, max_steps=40, epochs=99,
                       num_checkpoints=1, save_every_steps=1000)
    assert sweep([tmp_path / "whole" / name for name in rates], rungs=(0.25, 0.5)) == 0
    result = [sys.executable, "-m", "eyrie_workers.stages.sweep", "--rungs", "0.25,0.5",
            *(part for name in rates for part in ("--train", str(tmp_path / "killed" / name)))]
    process = subprocess.Popen(result, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    wait_for(lambda: any("StoppedEarly" in path.read_text() for path in tmp_path.glob("killed/*/events.jsonl")),
             "a candidate is stopped", process=process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    # One process gets a and c, which are slower, the other b and d: neither could decide by itself.
    _, _, _, *arguments = result
    program = [str(Path(__file__).with_name("observed_sweep.py")), *arguments]
    assert subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                           *program], env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL,
                          timeout=240, check=False).returncode == 0
    assert [path.name for path in (tmp_path / "killed").glob("digest-*")] == ["digest-0"], "rank 0 reads the target"
    steps = [{name: report_of(tmp_path / way / name).steps for name in rates} for way in ("killed", "whole")]
    assert steps[0] == steps[1]
    assert sorted(steps[0].values()) == [8, 8, 20, 40]


@pytest.mark.slow
def test_sigterm_saves_every_candidate_and_the_sweep_resumes(
        tmp_path: Path, target_dir: Path, store_dir: Path) -> None:
    names = ("a", "b")
    for name in names:
        write_spec(tmp_path / name, target_dir, store_dir, max_steps=40, epochs=99, save_every_steps=1000)
    command = [sys.executable, "-m", "eyrie_workers.stages.sweep",
               *(part for name in names for part in ("--train", str(tmp_path / name)))]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    wait_for(lambda: sum('"loss"' in path.read_text() for path in tmp_path.glob("*/events.jsonl")) == len(names),
             "a step of each", process=process)
    process.terminate()
    assert process.wait() == INTERRUPTED_EXIT_CODE
    for name in names:
        assert "Interrupted" in (tmp_path / name / "events.jsonl").read_text()
        assert (tmp_path / name / "state" / "training.safetensors").exists()
    assert sweep([tmp_path / name for name in names]) == 0
    assert all(report_of(tmp_path / name).resumed_from_step > 0 for name in names)


def test_a_stop_between_two_candidates_saves_both(tmp_path: Path, target_dir: Path, store_dir: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    directories = [tmp_path / name for name in ("a", "b")]
    for directory in directories:
        write_spec(directory, target_dir, store_dir, max_steps=4, epochs=99, save_every_steps=1000)
    logged, stages = Stage.metric, list[Stage]()

    def metric(stage: Stage, name: str, step: int, value: float) -> None:
        logged(stage, name, step, value)
        if name == "loss" and stage not in stages:
            stages.append(stage)
            if len(stages) == len(directories):  # the first has gone on
                for one in stages:
                    one.stop_requested = True

    with monkeypatch.context() as patched:
        patched.setattr(Stage, "metric", metric)
        assert sweep(directories) == INTERRUPTED_EXIT_CODE
    assert all((directory / "state" / "training.safetensors").exists() for directory in directories)
    assert sweep(directories) == 0
    assert [report_of(directory).resumed_from_step for directory in directories] == [1, 1]


def test_a_rung_stands_where_an_evaluation_is_due_anyway() -> None:
    assert rung_steps(100, (0.25, 0.5)) == (20, 50)
    assert rung_steps(8, (0.25, 0.5)) == (2, 4)
    assert rung_steps(1, (0.25, 0.5)) == ()
    assert rung_steps(1000, (0.05,)) == (100,)
    assert rung_steps(100, ()) == ()


def test_one_candidates_failure_is_its_own(tmp_path: Path, target_dir: Path, store_dir: Path) -> None:
    write_spec(tmp_path / "bad", target_dir, store_dir, drafter={"draft_vocab_size": 321})
    write_spec(tmp_path / "good", target_dir, store_dir, max_steps=4)
    assert sweep([tmp_path / "bad", tmp_path / "good"]) != 0
    assert json.loads((tmp_path / "bad" / "failure.json").read_text())["reason"] == "VocabularyTooLarge"
    assert report_of(tmp_path / "good").steps == 4


def test_damage_to_the_shared_store_is_the_failure_of_every_candidate_of_the_group(
        tmp_path: Path, target_dir: Path) -> None:
    store_dir = write_store(tmp_path / "store", target_dir, 12)
    for name in ("a", "b"):
        write_spec(tmp_path / name, target_dir, store_dir, max_steps=4)
    shard = store_dir / shard_name(0)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(bytes(data))
    assert sweep([tmp_path / "a", tmp_path / "b"]) == ArtifactCorrupt.exit_code
    for name in ("a", "b"):
        assert json.loads((tmp_path / name / "failure.json").read_text())["reason"] == "ArtifactCorrupt"


def test_a_directory_that_another_program_works_in_is_refused_and_the_others_are_trained(
        tmp_path: Path, target_dir: Path, store_dir: Path) -> None:
    for name in ("locked", "free"):
        write_spec(tmp_path / name, target_dir, store_dir, max_steps=2)
    with (tmp_path / "locked" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert sweep([tmp_path / "locked", tmp_path / "free"]) == Conflict.exit_code
    assert report_of(tmp_path / "free").steps == 2
    assert not (tmp_path / "locked" / "manifest.json").exists()


def test_a_candidate_that_was_further_waits_for_the_others(tmp_path: Path, target_dir: Path, store_dir: Path) -> None:
    write_spec(tmp_path / "a", target_dir, store_dir, max_steps=6, save_every_steps=1)
    write_spec(tmp_path / "b", target_dir, store_dir, max_steps=6, learning_rate=2e-3)
    assert run(tmp_path / "a") == 0
    assert sweep([tmp_path / "a", tmp_path / "b"]) == 0
    assert sum(metric.name == "loss" for metric in metrics(tmp_path / "a")) == 6
    assert report_of(tmp_path / "b").steps == 6


def test_candidates_of_the_same_documents_are_a_group(tmp_path: Path, target_dir: Path, store_dir: Path) -> None:
    one = ({"learning_rate": 1e-4}, {"epochs": 2, "ttt_length": 5}, {"seed": 1}, {"max_tokens_per_batch": 128},
           {"loss": "tv"})
    specs = {str(number): write_spec(tmp_path / str(number), target_dir, store_dir, **fields)  # type: ignore[arg-type]
             for number, fields in enumerate(one)}
    assert [*group_candidates(specs).values()] == [["0", "1", "4"], ["2"], ["3"]]


def test_the_slower_half_loses_and_of_an_odd_number_the_middle_stays() -> None:
    assert slower_half({"a": 2.0, "b": 3.0, "c": 1.0}) == {"c"}
    assert slower_half({"a": 2.0, "b": 2.0}) == {"b"}
    assert slower_half({"a": 2.0}) == set()
