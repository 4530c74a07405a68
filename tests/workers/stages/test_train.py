"""The train program: its artifact, its refusals, and that killing it changes no bit of the result."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eyrie_api.artifacts import read_manifest, verify_files
from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.records import MetricRecord
from eyrie_api.contract.reports import TrainReport
from eyrie_api.contract.stages import TrainStage
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.training import TrainSpec
from eyrie_pipelines.processes import identify
from eyrie_workers.drafters.card import read_card, weights_digest
from eyrie_workers.drafters.eagle3.family import load_drafter
from eyrie_workers.hidden_states.row_sources import write_row_sources
from eyrie_workers.hidden_states.shard_format import StoreFormat
from eyrie_workers.hidden_states.store import FeatureStore
from eyrie_workers.hidden_states.writer import FeatureWriter
from eyrie_workers.machine import cpu_count
from eyrie_workers.stage_program import INTERRUPTED_EXIT_CODE, Stage, run_program
from eyrie_workers.stages.train import main as train_program
from eyrie_workers.stages.train import prepare, train
from eyrie_workers.targets.loading import load_target, target_digest
from tests.feature_rows import FeatureRow, write_shard
from tests.tiny import tiny_target
from tests.waiting import wait_for
from tests.workers.events import stage_records
from tests.workers.measure.tiny_bench import random_drafter

AUX_LAYERS = (1, 2, 3)


def write_store(directory: Path, target_dir: Path, num_rows: int, *, answers: bool = True,
                broken: bool = False) -> Path:
    """States of the tiny target over random tokens; the second half of each row is the answer. Broken: no numbers."""
    target = load_target(target_dir, "float32")
    generator = torch.Generator().manual_seed(0)
    writer = FeatureWriter(directory, StoreFormat(
        aux_layers=AUX_LAYERS, hidden_size=target.config.hidden_size, codec="bfloat16",
        target_digest=target_digest(target_dir)))
    rows = []
    for number in range(num_rows):
        length = int(torch.randint(8, 40, (), generator=generator))
        tokens = torch.randint(60, (length,), generator=generator)
        aux, last = target.hidden_states([tokens], AUX_LAYERS)[0]
        if broken:
            aux = torch.full_like(aux, float("nan"))
        mask = (torch.arange(length) >= length // 2) & answers
        rows.append(FeatureRow(f"row-{number}", tokens, mask, aux.bfloat16(), last.bfloat16()))
    write_shard(writer, rows)
    writer.finish()
    return directory


def write_spec(out: Path, target_dir: Path, store_dir: Path, *, drafter: dict[str, Any] | None = None,
               **fields: Any) -> TrainStage:
    out.mkdir(parents=True, exist_ok=True)
    spec = TrainStage(
        job_id="job", candidate="c0", target=TargetSpec(model=str(target_dir)), store_dir=str(store_dir),
        drafter=DrafterSpec(**{"draft_vocab_size": 64} | (drafter or {})),
        train=TrainSpec(**{"ttt_length": 3, "epochs": 4, "max_tokens_per_batch": 96, "threads": 1, "num_checkpoints": 2,
                           "save_every_steps": 3} | fields))
    (out / "spec.json").write_text(spec.model_dump_json())
    return spec


def run(out: Path) -> int:
    return run_program(TrainStage, train, ["--spec", str(out / "spec.json"), "--out", str(out / "manifest.json")])


def start(out: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "eyrie_workers.stages.train", "--spec", str(out / "spec.json"),
                             "--out", str(out / "manifest.json")], env=os.environ | {"OMP_NUM_THREADS": "1"},
                            stdout=subprocess.DEVNULL)


def metrics(out: Path) -> list[MetricRecord]:
    """Of what is written so far: the last line of a running or killed stage may be half a line."""
    return [record for record in stage_records(out / "events.jsonl") if isinstance(record, MetricRecord)]


def report_of(out: Path) -> TrainReport:
    report = read_manifest(out).report
    assert isinstance(report, TrainReport)
    return report


def weights(out: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {path.parent.name: load_file(path) for path in sorted(out.glob("checkpoints/*/model.safetensors"))}


def same(one: dict[str, dict[str, torch.Tensor]], other: dict[str, dict[str, torch.Tensor]]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name][key], other[name][key]) for name in one for key in one[name])


def wait_for_steps(out: Path, process: subprocess.Popen[bytes], steps: int) -> None:
    """Until the program has logged so many optimizer steps."""
    wait_for(lambda: sum(metric.name == "loss" for metric in metrics(out)) >= steps, f"{steps} steps", process=process)


def wait_for_saved_state(out: Path, process: subprocess.Popen[bytes]) -> None:
    """Until a state is on disk, which a thread writes while the steps go on: on a busy machine several later."""
    wait_for((out / "state/training.safetensors").exists, "a saved state", process=process)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, target_dir: Path, store_dir: Path) -> Path:
    out = tmp_path_factory.mktemp("finished")
    write_spec(out, target_dir, store_dir)
    assert run(out) == 0
    return out


def test_the_artifact_is_loadable_drafters_evenly_spaced(finished: Path) -> None:
    manifest, report = read_manifest(finished), report_of(finished)
    verify_files(manifest, finished)
    assert [c.step for c in report.checkpoints] == [round(report.steps / 2), report.steps]
    for checkpoint in report.checkpoints:
        assert checkpoint.name == f"c0-step-{checkpoint.step}"
        drafter = load_drafter(finished / checkpoint.path)
        assert drafter.config.aux_layers == AUX_LAYERS
        assert drafter.config.draft_vocab_size == 64
        assert len(checkpoint.accuracy) == len(checkpoint.conditional_acceptance) == 3
        assert 1.0 <= checkpoint.theoretical_speedup <= 4.0
    assert {entry.path for entry in manifest.files} == {
        f"{c.path}/{name}" for c in report.checkpoints
        for name in ("README.md", "config.json", "eyrie-card.json", "model.safetensors")}


def test_training_lowers_the_loss_on_rows_it_never_saw(finished: Path) -> None:
    losses = [metric.value for metric in metrics(finished) if metric.name == "evaluation_loss"]
    assert losses[-1] < losses[0]


def test_the_series_are_logged(finished: Path) -> None:
    names = {metric.name for metric in metrics(finished)}
    assert names == {"loss", "learning_rate", "grad_norm", "tokens_per_s", "mfu", "padding_share", "data_wait_share",
                     "theoretical_speedup", "evaluation_loss",
                     *(f"{kind}/{step}" for kind in ("accuracy", "acceptance") for step in range(3))}


def test_the_report_counts_what_was_trained_on(finished: Path) -> None:
    report = report_of(finished)
    assert report.supervised_tokens > report.steps
    assert report.vocabulary.draft_vocab_size == 64
    assert 0.9 < report.vocabulary.coverage <= 1.0
    assert report.vocabulary.coverage_curve[report.vocabulary.vocab_size] == 1.0
    assert report.vocabulary.held_out_coverage is not None
    assert 0.0 < report.vocabulary.held_out_coverage <= 1.0
    assert report.resumed_from_step == 0


def test_without_a_size_the_draft_vocabulary_follows_the_answers_and_its_coverage_is_reported_by_source(
        tmp_path: Path) -> None:
    target_dir = tiny_target(tmp_path / "target", vocab_size=6000)
    store_dir = write_store(tmp_path / "store", target_dir, 440)
    write_row_sources(store_dir, ["chats", "chats", "chats", "chats", "tools"] * 88)
    write_spec(tmp_path / "out", target_dir, store_dir, drafter={"draft_vocab_size": None}, max_steps=1,
               num_checkpoints=1)
    assert run(tmp_path / "out") == 0
    vocabulary = report_of(tmp_path / "out").vocabulary
    # The answers hold 60 tokens; those of tools are too few to judge from.
    assert (vocabulary.draft_vocab_size, vocabulary.vocab_size) == (4096, 6000)
    assert vocabulary.coverage_by_source == {"chats": 1.0}
    assert vocabulary.held_out_coverage == 1.0


def test_end_and_special_tokens_are_in_the_draft_vocabulary(finished: Path) -> None:
    ids = load_drafter(finished / report_of(finished).checkpoints[0].path).vocabulary.ids.tolist()
    assert {0, 1, 2} <= set(ids)  # <|end|>, <|im_start|>, <|im_end|>: never among the random answers' most frequent


def test_run_again_it_has_nothing_to_do(finished: Path) -> None:
    before = (finished / "manifest.json").read_bytes()
    assert run(finished) == 0
    assert (finished / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "eyrie-card.json"])
def test_a_damaged_checkpoint_of_a_killed_training_is_refused_and_gets_no_digest(
        name: str, finished: Path, tmp_path: Path) -> None:
    killed = shutil.copytree(finished, tmp_path / "killed")
    (killed / "manifest.json").unlink()
    directory = killed / report_of(finished).checkpoints[0].path
    (directory / name).write_bytes((directory / name).read_bytes()[:-1] + b" ")
    assert run(killed) != 0
    assert directory.name in json.loads((killed / "failure.json").read_text())["message"]
    assert not (killed / "manifest.json").exists()


@pytest.mark.slow
def test_kill_9_at_any_step_changes_no_bit_of_the_result(
        finished: Path, tmp_path: Path, target_dir: Path, store_dir: Path) -> None:
    write_spec(tmp_path, target_dir, store_dir)
    for steps in (4, 11):  # neither a multiple of save_every_steps: work is lost and must be redone
        process = start(tmp_path)
        wait_for_steps(tmp_path, process, steps)
        wait_for_saved_state(tmp_path, process)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert not (tmp_path / "manifest.json").exists()
    assert start(tmp_path).wait() == 0
    assert report_of(tmp_path).resumed_from_step > 0
    assert same(weights(tmp_path), weights(finished))
    ours, theirs = report_of(tmp_path), report_of(finished)
    assert [c.digest for c in ours.checkpoints] == [c.digest for c in theirs.checkpoints]
    assert [c.theoretical_speedup for c in ours.checkpoints] == [c.theoretical_speedup for c in theirs.checkpoints]
    assert (ours.tokens, ours.supervised_tokens) == (theirs.tokens, theirs.supervised_tokens)


def start_ranks(out: Path, number: int) -> subprocess.Popen[bytes]:
    program = Path(__file__).with_name("observed_train.py")
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number), str(program),
         "--spec", str(out / "spec.json"), "--out", str(out / "manifest.json")],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "later"), [(2, 1), (4, 2)])
def test_processes_killed_midway_and_fewer_that_go_on_make_the_drafter_of_one(
        number: int, later: int, finished: Path, tmp_path: Path, target_dir: Path, store_dir: Path) -> None:
    # 9 documents a step at most: some steps have more on one process than on another.
    write_spec(tmp_path, target_dir, store_dir, save_every_steps=None, save_every_s=0.001, threads=None)
    processes = start_ranks(tmp_path, number)
    wait_for_steps(tmp_path, processes, 6)
    children = Path(f"/proc/{processes.pid}/task/{processes.pid}/children").read_text().split()
    assert len(children) == number
    processes.kill()
    processes.wait()
    # The launcher gives each process a session of its own. They end with it all the same, and free the stage's lock.
    wait_for(lambda: not any(identify(int(pid)) for pid in children), "no rank outlives its launcher")
    assert sorted(path.name for path in tmp_path.glob("digest-*")) == ["digest-0"], "rank 0 alone reads the target"
    share = max(1, cpu_count() // number)
    assert [(tmp_path / f"threads-{rank}").read_text() for rank in range(number)] == [str(share)] * number
    assert sum(metric.name == "loss" for metric in metrics(tmp_path)) >= 6
    assert (start(tmp_path) if later == 1 else start_ranks(tmp_path, later)).wait() == 0
    ours, theirs = report_of(tmp_path), report_of(finished)
    assert ours.resumed_from_step >= 4, "of the step before the last, whose state may not have been written yet"
    assert (ours.tokens, ours.supervised_tokens) == (theirs.tokens, theirs.supervised_tokens)
    for mine, other in zip(weights(tmp_path).values(), weights(finished).values(), strict=True):
        for name, tensor in mine.items():
            # Sums in another order, through a few dozen optimizer steps; weights are of order 0.1. Where a gradient is
            # nearly 0, rounding decides the direction of an AdamW step: one weight in thousands is 4e-3 apart.
            distance = (tensor.float() - other[name].float()).abs()
            assert distance.max() < 6e-3, name
            assert distance.mean() < 2e-4, name


@pytest.mark.slow
def test_processes_agree_on_the_step_at_which_their_seconds_end(
        tmp_path: Path, target_dir: Path, store_dir: Path) -> None:
    write_spec(tmp_path, target_dir, store_dir, epochs=1000, max_seconds=3.0, save_every_steps=None)
    assert start_ranks(tmp_path, 2).wait() == 0
    report = report_of(tmp_path)
    assert report.processes == 2
    assert "TimeLimitReached" in (tmp_path / "events.jsonl").read_text()
    assert [c.step for c in report.checkpoints][-1] == report.steps


def test_gpus_that_are_not_there_are_refused_by_every_rank_before_any_work(
        tmp_path: Path, target_dir: Path, store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_spec(tmp_path, target_dir, store_dir)
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "1", "EYRIE_DEVICE": "cuda"}.items():
        monkeypatch.setenv(name, value)
    assert train_program(["--spec", str(tmp_path / "spec.json"), "--out", str(tmp_path / "manifest.json")]) == 65
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert failure["reason"] == "InvalidInput"
    assert "sees no GPU" in failure["message"]
    assert "EYRIE_DEVICE=cpu" in failure["hint"]


def test_patience_ends_a_run_with_a_checkpoint_of_where_it_stood(
        tmp_path: Path, target_dir: Path, store_dir: Path) -> None:
    write_spec(tmp_path, target_dir, store_dir, early_stop_patience=1, learning_rate=1e-7)  # nothing can get better
    assert run(tmp_path) == 0
    report = report_of(tmp_path)
    assert report.stopped_early
    assert report.checkpoints[-1].step == report.steps
    assert any("StoppedEarly" in line for line in (tmp_path / "events.jsonl").read_text().splitlines())


class Ticks:
    """A clock whose every reading is a millisecond after the one before: training takes as long on every machine."""

    def __init__(self) -> None:
        self._readings = count()

    def perf_counter(self) -> float:
        return 1e-3 * next(self._readings)


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = Ticks()
    monkeypatch.setattr("eyrie_workers.training.loop.time", ticks)
    monkeypatch.setattr("eyrie_workers.stages.train.time", ticks)


LIMITED = {"epochs": 1000, "max_seconds": 0.3, "save_every_steps": None}


@pytest.mark.usefixtures("ticking")
def test_a_limit_of_seconds_ends_the_run_with_its_schedule_and_its_checkpoints(
        tmp_path: Path, target_dir: Path, store_dir: Path) -> None:
    write_spec(tmp_path, target_dir, store_dir, **LIMITED)
    assert run(tmp_path) == 0
    verify_files(read_manifest(tmp_path), tmp_path)
    report = report_of(tmp_path)
    assert 20 < report.steps < 500, "of thousands"
    assert [c.step for c in report.checkpoints] == [pytest.approx(report.steps / 2, abs=3), report.steps]
    rates = [metric.value for metric in metrics(tmp_path) if metric.name == "learning_rate"]
    assert max(rates) in rates[len(rates) // 4:len(rates) // 2]
    assert rates[-1] < 0.2 * max(rates)
    assert f"after {report.steps} of" in (tmp_path / "events.jsonl").read_text()


@pytest.mark.usefixtures("ticking")
def test_a_run_that_is_resumed_has_the_seconds_that_are_left_of_its_limit(
        tmp_path: Path, target_dir: Path, store_dir: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for out in (whole, killed):
        spec = write_spec(out, target_dir, store_dir, **LIMITED)
    assert run(whole) == 0
    steps, begun = report_of(whole).steps, prepare(spec, Stage(killed))
    for _ in range(steps // 2):
        begun.after_step(begun.trainer.step())
    assert begun.reports, "the first checkpoint"
    begun.close()  # its last state is that of this checkpoint
    assert run(killed) == 0
    report = report_of(killed)
    assert report.resumed_from_step == begun.reports[0].step
    assert report.steps == pytest.approx(steps, abs=2)
    assert len(report.checkpoints) == 2


def test_a_limit_that_is_not_reached_changes_no_bit(
        finished: Path, tmp_path: Path, target_dir: Path, store_dir: Path) -> None:
    write_spec(tmp_path, target_dir, store_dir, max_seconds=86_400)
    assert run(tmp_path) == 0
    assert same(weights(tmp_path), weights(finished))


def test_a_tracker_that_is_not_installed_is_named_before_anything_is_trained(
        tmp_path: Path, target_dir: Path, store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not: it cannot be imported
    write_spec(tmp_path, target_dir, store_dir, trackers=("wandb",))
    failure = fails(tmp_path)
    assert failure["reason"] == "InvalidInput"
    assert "install wandb" in failure["hint"]


@pytest.mark.slow
def test_sigterm_ends_with_143_and_the_next_run_goes_on_from_that_step(
        finished: Path, tmp_path: Path, target_dir: Path, store_dir: Path) -> None:
    write_spec(tmp_path, target_dir, store_dir, save_every_steps=1000)
    process = start(tmp_path)
    wait_for_steps(tmp_path, process, 5)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == INTERRUPTED_EXIT_CODE
    assert not (tmp_path / "manifest.json").exists()
    assert not list(tmp_path.glob("checkpoints/.*"))
    assert start(tmp_path).wait() == 0
    assert report_of(tmp_path).resumed_from_step >= 5
    ours, theirs = (list(weights(out).values())[-1] for out in (tmp_path, finished))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_loss_that_is_no_number_ends_the_run_with_the_step_and_the_hint(
        tmp_path: Path, target_dir: Path) -> None:
    store = write_store(tmp_path / "store", target_dir, 6, broken=True)
    write_spec(tmp_path / "out", target_dir, store)
    assert run(tmp_path / "out") == 70
    failure = json.loads((tmp_path / "out" / "failure.json").read_text())
    assert failure["reason"] == "LossDiverged"
    assert "at step 1 of" in failure["message"]
    assert "learning_rate" in failure["hint"]
    assert not (tmp_path / "out" / "checkpoints").exists()


def fails(out: Path) -> dict[str, Any]:
    assert run(out) != 0
    assert not (out / "manifest.json").exists()
    failure: dict[str, Any] = json.loads((out / "failure.json").read_text())
    return failure


def test_a_draft_vocabulary_larger_than_the_vocabulary_is_refused(
        tmp_path: Path, target_dir: Path, store_dir: Path) -> None:
    write_spec(tmp_path, target_dir, store_dir, drafter={"draft_vocab_size": 321})
    failure = fails(tmp_path)
    assert failure["reason"] == "VocabularyTooLarge"
    assert "at most 320" in failure["hint"]


def test_states_of_another_target_are_refused(tmp_path: Path, store_dir: Path) -> None:
    other = tiny_target(tmp_path / "other", seed=5)
    write_spec(tmp_path / "out", other, store_dir)
    failure = fails(tmp_path / "out")
    assert failure["reason"] == "Conflict"
    assert "another target" in failure["message"]


def test_a_store_without_answers_is_refused(tmp_path: Path, target_dir: Path) -> None:
    write_spec(tmp_path / "out", target_dir, write_store(tmp_path / "store", target_dir, 4, answers=False))
    assert fails(tmp_path / "out")["reason"] == "NoUsableData"


def test_rows_longer_than_a_process_computes_are_cut_and_counted(tmp_path: Path, target_dir: Path,
                                                                 store_dir: Path) -> None:
    spec = write_spec(tmp_path, target_dir, store_dir)
    cut = spec.train.model_copy(update={"max_tokens_per_gpu": 20})  # fewer than a spec may have, as the rows are short
    started = prepare(spec.model_copy(update={"train": cut}), Stage(tmp_path, quiet=True))
    started.close()
    left_out = [length - 20 for length in FeatureStore(store_dir).lengths if length > 20]
    (event,) = [one for one in stage_records(tmp_path / "events.jsonl")
                if one.kind == "event" and one.reason == "RowsCut"]
    assert f"{len(left_out)} of 24 rows" in event.message
    assert f"the {sum(left_out)} tokens behind it are not trained on" in event.message
    assert max(started.trainer.schedule.lengths) == 20
    assert all(max(batch.lengths) <= 20 for batch in started.held_out())


def test_no_store_is_refused(tmp_path: Path, target_dir: Path) -> None:
    write_spec(tmp_path, target_dir, tmp_path / "nowhere")
    assert fails(tmp_path)["reason"] == "ArtifactMissing"


def test_a_state_of_other_settings_is_refused_not_continued(
        tmp_path: Path, target_dir: Path, store_dir: Path) -> None:
    write_spec(tmp_path, target_dir, store_dir, max_steps=4)
    assert run(tmp_path) == 0
    first = next(one for one in stage_records(tmp_path / "events.jsonl") if one.kind == "progress")
    assert first.message.startswith("step 1 of 4")
    assert first.total == pytest.approx(4 * first.done, rel=0.2), "the tokens of four steps, not of all epochs"
    (tmp_path / "manifest.json").unlink()
    write_spec(tmp_path, target_dir, store_dir, max_steps=4, learning_rate=5e-4)
    failure = fails(tmp_path)
    assert failure["reason"] == "Conflict"
    assert "other settings" in failure["message"]


def test_one_row_is_enough_to_train_and_is_evaluated_on_itself(tmp_path: Path, target_dir: Path) -> None:
    write_spec(tmp_path / "out", target_dir, write_store(tmp_path / "store", target_dir, 1), max_steps=2)
    assert run(tmp_path / "out") == 0
    assert report_of(tmp_path / "out").steps == 2


def test_training_continues_from_a_head_with_its_loss_layers_and_draft_vocabulary(
        tmp_path: Path, target_dir: Path, store_dir: Path) -> None:
    frozen = {"epochs": 1, "num_checkpoints": 1, "learning_rate": 1e-9}
    write_spec(tmp_path / "head", target_dir, store_dir, epochs=10, num_checkpoints=1, drafter={"fc_norm": True})
    assert run(tmp_path / "head") == 0
    head = report_of(tmp_path / "head").checkpoints[0]
    published = tmp_path / "head" / head.path
    write_spec(tmp_path / "new", target_dir, store_dir, drafter={"fc_norm": True}, **frozen)
    write_spec(tmp_path / "on", target_dir, store_dir, drafter={"init_from": str(published)}, **frozen)
    assert run(tmp_path / "new") == 0
    assert run(tmp_path / "on") == 0
    report = report_of(tmp_path / "on")
    started, fresh = report.checkpoints[0], report_of(tmp_path / "new").checkpoints[0]
    assert abs(started.loss - head.loss) < 0.01 * head.loss < fresh.loss - head.loss
    assert (report.init_from, report.init_digest) == (str(published), weights_digest(published))
    assert report.vocabulary.draft_vocab_size == 64
    mine, its = load_drafter(tmp_path / "on" / started.path), load_drafter(published)
    assert mine.config == its.config
    assert mine.vocabulary.ids.equal(its.vocabulary.ids)
    card = read_card(tmp_path / "on" / started.path)
    assert card is not None
    assert (card.init_digest, card.drafter.init_from, card.drafter.fc_norm) == (report.init_digest, None, True)


@pytest.mark.parametrize(("drafter", "says"), [
    ({"draft_vocab_size": 32}, "drafter.draft_vocab_size is 32, and that of .* is 320"),
    ({"intermediate_size": 40, "draft_vocab_size": None}, "drafter.intermediate_size is 40, and that of .* is 64"),
    ({"family": "eagle1"}, "is of family 'eagle3', and drafter.family is 'eagle1'"),
    ({"draft_vocab_size": None}, r"holds layers \[1, 2, 3\].*reads \[0\] too")])
def test_a_head_that_does_not_fit_the_spec_or_the_store_is_refused_with_both_values(
        tmp_path: Path, target_dir: Path, store_dir: Path, drafter: dict[str, Any], says: str) -> None:
    head = random_drafter(tmp_path / "head", target_dir, layers=(0, 1))
    write_spec(tmp_path / "on", target_dir, store_dir, drafter={"init_from": str(head)} | drafter)
    assert run(tmp_path / "on") != 0
    assert re.search(says, json.loads((tmp_path / "on" / "failure.json").read_text())["message"])
