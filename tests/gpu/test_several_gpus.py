"""`make test-gpu-multi`: stages on several GPUs of one machine, each compared with one GPU.

Training and capture run as the product starts them, under torchrun, on all GPUs (NCCL); where there are fewer than two,
as four processes on the CPU (gloo). What SGLang divides or repeats over GPUs needs two, and the program that
EYRIE_SGLANG_PROGRAM names. Nothing of this file has run on GPUs yet.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from eyrie_api.artifacts import read_manifest, write_model
from eyrie_api.contract.benchmark import BenchmarkSpec, SuiteSpec
from eyrie_api.contract.capture import CaptureSpec
from eyrie_api.contract.data import DataSource, DataSpec
from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import SGLANG_PROGRAM, DraftTreeShape, EngineSpec, SamplingSpec
from eyrie_api.contract.prove import ProveReport, ProveSpec
from eyrie_api.contract.regeneration import RegenerateSpec
from eyrie_api.contract.stages import CaptureStage, ProveStage, RegenerateStage, TrainStage
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.training import TrainSpec
from eyrie_pipelines.several_gpus import under_torchrun
from eyrie_workers.data.rows import read_rows
from eyrie_workers.hidden_states.store import FeatureStore
from tests.tiny import tiny_target
from tests.workers.stages.test_capture import artifact, write_rows
from tests.workers.stages.test_train import report_of, weights, write_store

NUM_GPUS = torch.cuda.device_count()
ON_GPUS = NUM_GPUS >= 2
PROCESSES = NUM_GPUS if ON_GPUS else 4
QUICKSTART = TargetSpec(model="quickstart", dtype="bfloat16")

pytestmark = [pytest.mark.skipif("EYRIE_TEST_SEVERAL_GPUS" not in os.environ, reason="make test-gpu-multi sets it"),
              pytest.mark.timeout(1200)]
in_sglang = pytest.mark.skipif(not ON_GPUS or SGLANG_PROGRAM not in os.environ,
                               reason=f"needs two GPUs, and {SGLANG_PROGRAM}")


def run_stage(spec: Any, out: Path, processes: int = 1, *, on_first_gpu: bool = False) -> Path:
    """Run a stage program as the product does, as so many processes; returns its directory."""
    write_model(out / "spec.json", spec)
    program = [sys.executable, "-m", f"eyrie_workers.stages.{spec.stage}", "--spec", str(out / "spec.json"), "--out",
               str(out / "manifest.json")]
    environment = {"EYRIE_DEVICE": "cuda" if ON_GPUS else "cpu", "OMP_NUM_THREADS": "1"}
    if on_first_gpu and ON_GPUS:
        environment["CUDA_VISIBLE_DEVICES"] = "0"
    command = under_torchrun(program, processes) if processes > 1 else program
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=1100,
                          check=False)
    assert done.returncode == 0, (out / "failure.json").read_text() if (out / "failure.json").exists() else done.stderr
    return out


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target") / "tiny")


def test_a_drafter_trained_on_all_of_them_is_that_of_one(target_dir: Path, tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", target_dir, 48)
    spec = TrainStage(
        job_id="job", candidate="c", target=TargetSpec(model=str(target_dir)), store_dir=str(store),
        drafter=DrafterSpec(draft_vocab_size=64), train=TrainSpec(
            ttt_length=3, epochs=4, max_tokens_per_batch=192, num_checkpoints=1, dtype="float32"))
    one = run_stage(spec, tmp_path / "one", on_first_gpu=True)
    all_of_them = run_stage(spec, tmp_path / "all", PROCESSES)
    assert report_of(all_of_them).processes == PROCESSES
    assert report_of(all_of_them).tokens == report_of(one).tokens
    assert len(report_of(one).checkpoints) == 1
    for mine, other in zip(weights(all_of_them).values(), weights(one).values(), strict=True):
        for name, tensor in mine.items():  # sums in another order: where a gradient is nearly 0 an AdamW step turns
            distance = (tensor.float() - other[name].float()).abs()
            assert float(distance.max()) < 6e-3, name
            assert float(distance.mean()) < 2e-4, name


def test_a_store_captured_by_all_of_them_has_the_states_of_one(target_dir: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows", target_dir, 64)
    spec = CaptureStage(job_id="job", target=TargetSpec(model=str(target_dir)), rows_dir=str(tmp_path / "rows"),
                        capture=CaptureSpec(codec="float32", check_rows=0, shard_size_bytes=2**16, batch_tokens=64))
    one = run_stage(spec, tmp_path / "one", on_first_gpu=True)
    all_of_them = run_stage(spec, tmp_path / "all", PROCESSES)
    assert artifact(all_of_them).keys() == artifact(one).keys()
    mine, other = FeatureStore(all_of_them), FeatureStore(one)
    for row in range(other.num_rows):
        torch.testing.assert_close(mine.read([row]).aux, other.read([row]).aux, atol=1e-5, rtol=1e-5)


@in_sglang
def test_regeneration_repeats_the_server_on_each_of_them(tmp_path: Path) -> None:
    """Greedy answers in batches of other sizes: bfloat16 turns near-ties, and an answer differs from there on."""
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"messages": [{"role": "user", "content": f"What is {i} and {i + 1}?"}]}) + "\n"
                             for i in range(200)))
    found = {}
    for number in (1, NUM_GPUS):
        out = run_stage(RegenerateStage(
            job_id="j", target=QUICKSTART, engine=EngineSpec(kind="sglang", num_gpus=number),
            data=DataSpec(sources=(DataSource(path=str(chats), max_new_tokens=24),), held_out_fraction=0.0),
            regenerate=RegenerateSpec(sampling=SamplingSpec(temperature=0.0), concurrency=32)), tmp_path / str(number))
        found[number] = {row.id: row.answer_ids for row in read_rows(out / "rows.jsonl")}
        assert len(list(out.glob("servers/*"))) == number
    one, several = found.values()
    assert one.keys() == several.keys()
    assert sum(one[row] == several[row] for row in one) >= 0.8 * len(one)


@in_sglang
def test_states_of_a_target_divided_over_two_are_those_of_one(tmp_path: Path) -> None:
    """Within bfloat16: the two parts of a sum are rounded before they are added."""
    from eyrie_workers.targets.loading import resolve

    write_rows(tmp_path / "rows", resolve(QUICKSTART), 24)
    stores = [FeatureStore(run_stage(CaptureStage(
        job_id="job", target=QUICKSTART, rows_dir=str(tmp_path / "rows"),
        engine=EngineSpec(kind="sglang", tp_size=size, num_gpus=size),
        capture=CaptureSpec(source="sglang", codec="bfloat16")), tmp_path / str(size))) for size in (1, 2)]
    for row in range(stores[0].num_rows):
        one, two = (store.read([row]).aux.float() for store in stores)
        assert float((one - two).abs().max()) < 0.05 * float(one.abs().max())


@in_sglang
def test_a_drafter_of_a_target_divided_over_two_changes_no_answer_and_is_accepted_as_on_one(tmp_path: Path) -> None:
    """The proof's own parity check, by SGLang with `tp_size` 2; rounds differ from one GPU's by near-ties alone."""
    from tests.sglang.trained_drafter import trained_drafter

    taus = []
    for size in (1, 2):
        report = read_manifest(run_stage(ProveStage(
            job_id="j", checkpoint="c", candidate="c", drafter_dir=str(trained_drafter("eagle3")), target=QUICKSTART,
            engine=EngineSpec(kind="sglang", tp_size=size, num_gpus=size), max_concurrency=4,
            benchmark=BenchmarkSpec(suites=(SuiteSpec(name="chat", path="quickstart:chat"),), max_new_tokens=48,
                                    tree=DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4)),
            prove=ProveSpec(concurrencies=(1, 4), requests=16, most_pairs=8, max_new_tokens=48, parity_prompts=8)),
            tmp_path / str(size))).report
        assert isinstance(report, ProveReport)
        assert report.parity is not None
        assert report.parity.passed, report.parity.reasons
        taus.append(report.parity.tau)
    assert taus[1] == pytest.approx(taus[0], rel=0.1)
