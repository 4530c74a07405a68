"""Target, capture, training and decoding on the GPU, at tiny sizes against the CPU and at real sizes against float32.

`make test-gpu` runs this on a machine with a GPU. Elsewhere the same code runs at tiny sizes on the CPU, where the
comparisons with the CPU are trivial, and the rest is skipped with its reason.
"""

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from benchmarks import training_step
from eyrie_api.artifacts import read_manifest
from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import DraftTreeShape, SamplingSpec
from eyrie_api.contract.families import FAMILIES
from eyrie_api.contract.reports import TrainReport
from eyrie_api.contract.stages import TrainStage
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.training import TrainSpec
from eyrie_workers.drafters import eagle1
from eyrie_workers.drafters.family import family_named, open_drafter
from eyrie_workers.hidden_states.store import FeatureStore
from eyrie_workers.speculation.engine import Engine, Request
from eyrie_workers.stage_program import run_program
from eyrie_workers.stages.train import train
from eyrie_workers.targets.device import CPU
from eyrie_workers.targets.loading import load_target
from tests.gpu.sizes import NO_GPU, REAL, TINY, Sizes
from tests.gpu.workload import AUX_LAYERS, STEPS, drafter_of, run_capture, step, write_rows

NAMES = list(FAMILIES)
SHAPES = (DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4),
          DraftTreeShape(num_steps=3, top_k=2, num_draft_tokens=6),
          DraftTreeShape(num_steps=3, top_k=2, num_draft_tokens=6, static=True))
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, also where there is a GPU."""
    return TINY.target(tmp_path_factory.mktemp("target") / "tiny")


def test_hidden_states_are_those_of_the_cpu(tiny: Path, device: torch.device) -> None:
    tokens = [torch.arange(1, 30) % 60, torch.arange(5, 12)]
    here, there = (load_target(tiny, "float32", one) for one in (CPU, device))
    for mine, others in zip(here.hidden_states(tokens, (1, 2)), there.hidden_states(tokens, (1, 2)), strict=True):
        for one, other in zip(mine, others, strict=True):
            # float32 sums in another order, through a few layers
            torch.testing.assert_close(other.cpu(), one, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_float32_step_has_the_loss_and_the_gradients_of_the_cpu(
        name: str, tiny: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eagle1, "NOISE", 0.0)  # a GPU draws numbers of its own
    loss, gradients = step(name, tiny, TINY, CPU, torch.float32)
    found, found_gradients = step(name, tiny, TINY, device, torch.float32)
    assert found == pytest.approx(loss, rel=1e-4)
    assert found_gradients.keys() == gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(found_gradients[key].cpu(), gradient, atol=1e-4, rtol=1e-3, msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_a_bfloat16_step_differs_from_float32_by_rounding_alone(
        name: str, sizes: Sizes, target_of_size: Path, device: torch.device) -> None:
    loss, gradients = step(name, target_of_size, sizes, device, torch.float32)
    found, found_gradients = step(name, target_of_size, sizes, device, torch.bfloat16)
    assert found == pytest.approx(loss, rel=2e-2)
    assert found_gradients.keys() == gradients.keys()
    product, mine, other = (sum(float((one[key].double() * another[key]).sum()) for key in gradients)
                            for one, another in ((gradients, found_gradients), (gradients, gradients),
                                                 (found_gradients, found_gradients)))
    # bfloat16 keeps 8 bits, and the error of a sum of products grows with the root of its length relative to a term.
    assert product / (mine * other) ** 0.5 > 0.99
    assert (other / mine) ** 0.5 == pytest.approx(1.0, abs=0.05)


@pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)
def test_a_steps_peak_memory_is_what_the_plan_predicts() -> None:
    sizes = REAL  # at tiny sizes what the prediction leaves out is most of the memory
    found = training_step.measure([
        "--hidden", str(sizes.hidden), "--intermediate", str(sizes.intermediate), "--heads", str(sizes.heads),
        "--kv-heads", str(sizes.kv_heads), "--vocab", str(sizes.vocab), "--draft-vocab", str(sizes.draft_vocab),
        "--lengths", ",".join(map(str, sizes.lengths(sizes.step_tokens))), "--prompt", "0.3", "--iterations", "1",
        "--unrolled", "0.33", "--threads", "1"])
    assert found["peak_mb_above_imports"] == pytest.approx(found["predicted_gpu_mb"], rel=0.15)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES[:2], ids=lambda shape: shape.label())
def test_drafting_changes_no_token(tiny: Path, device: torch.device, tmp_path: Path, temperature: float,
                                   shape: DraftTreeShape) -> None:
    target = load_target(tiny, "float32", device)
    family_named("eagle3").save(tmp_path / "drafter", drafter_of("eagle3", tiny, TINY)[0], "float32", None)
    engine = Engine(target, open_drafter(tmp_path / "drafter", target), max_concurrency=2, exact=True)
    requests = [Request(id=str(n), prompt_ids=tuple(range(1 + n, 9 + n)), max_new_tokens=24, seed=n,
                        sampling=SamplingSpec(temperature=temperature)) for n in range(4)]
    plain = [one.token_ids for one in engine.generate(requests)]
    assert [one.token_ids for one in engine.generate(requests, shape)] == plain


@contextmanager
def synchronisations(device: torch.device) -> Iterator[list[str]]:
    """The operations within the block that made the host wait for the GPU; on the CPU none are seen."""
    seen: list[str] = []
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
            seen += [str(one.message) for one in raised if "called a synchronizing" in str(one.message)]


@pytest.mark.parametrize(("name", "shape"), [*((name, SHAPES[0]) for name in NAMES),
                                             *(("eagle3", shape) for shape in SHAPES[1:])])
def test_a_round_waits_for_the_gpu_at_most_once(
        name: str, shape: DraftTreeShape, sizes: Sizes, target_of_size: Path, device: torch.device,
        tmp_path: Path) -> None:
    target = load_target(target_of_size, "bfloat16", device)
    family_named(name).save(tmp_path / name, drafter_of(name, target_of_size, sizes)[0], "bfloat16", None)
    engine = Engine(target, open_drafter(tmp_path / name, target), max_concurrency=2, tree=shape)
    for number, temperature in enumerate((0.0, 1.0)):
        engine.submit(Request(id=str(number), prompt_ids=tuple(range(1, 9)), max_new_tokens=40, seed=number,
                              sampling=SamplingSpec(temperature=temperature)))
    for _ in range(2):  # the prompts, and a round whose buffers are allocated
        engine.step()
    rounds = 4
    with synchronisations(device) as seen:
        for _ in range(rounds):
            engine.step()
    assert engine.num_running == 2, "a request ended: the rounds are not alike"
    assert len(seen) <= rounds, seen


@pytest.mark.parametrize("feed", ["store", "stream"])
def test_captured_states_are_the_targets_and_a_drafter_trains_on_them(
        feed: str, sizes: Sizes, target_of_size: Path, tmp_path: Path) -> None:
    lengths = (*sizes.lengths(sizes.kernel_tokens), 17, 40)
    write_rows(tmp_path / "rows", target_of_size, sizes, lengths)
    run_capture(tmp_path / "states", target_of_size, tmp_path / "rows", sizes, mode=feed, codec="float32")
    if feed == "store":
        store, target = FeatureStore(tmp_path / "states"), load_target(target_of_size)
        for number in (len(lengths) - 1, 0):  # one that shares its pass with others, and the longest
            row = store.read([number])
            [(aux, _)] = target.hidden_states([row.token_ids], AUX_LAYERS)
            # Alone instead of among others: another shape of the same products, in the arithmetic of the target.
            torch.testing.assert_close(row.aux.float(), aux.float().cpu(), atol=2e-2, rtol=2e-2)
        del target
    out = tmp_path / "drafter"
    out.mkdir()
    spec = TrainStage(
        job_id="job", candidate="c", target=TargetSpec(model=str(target_of_size)), store_dir=str(tmp_path / "states"),
        drafter=DrafterSpec(draft_vocab_size=sizes.draft_vocab),
        train=TrainSpec(ttt_length=STEPS, max_steps=2, num_checkpoints=1, max_tokens_per_batch=sizes.kernel_tokens))
    (out / "spec.json").write_text(spec.model_dump_json())
    code = run_program(TrainStage, train, ["--spec", str(out / "spec.json"), "--out", str(out / "manifest.json")])
    assert code == 0, json.loads((out / "failure.json").read_text())
    report = read_manifest(out).report
    assert isinstance(report, TrainReport)
    assert report.steps == 2


def test_two_processes_exchange_sums_errors_and_slices_of_the_optimizer(tmp_path: Path) -> None:
    """With NCCL where there are two GPUs, else with gloo on the CPU."""
    environment = {"EYRIE_DEVICE": "cuda" if torch.cuda.device_count() >= 2 else "cpu"}
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                    str(Path(__file__).with_name("collectives.py")), str(tmp_path)],
                   check=True, timeout=120, env=os.environ | environment)
    devices = [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)]
    assert devices == (["cuda:0", "cuda:1"] if torch.cuda.device_count() >= 2 else ["cpu", "cpu"])


def test_the_kernels_access_no_memory_that_is_not_theirs() -> None:
    if not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer is not on PATH: it comes with the CUDA toolkit")
    ended = subprocess.run(
        ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "99", sys.executable, "-m", "pytest", "-q",
         "--confcutdir", "tests/kernels", "tests/kernels"],
        cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:]
