"""The bytes that a training step allocates on a GPU are those that `planning.training_cost` predicts.

The GPU's code path runs on the CPU: tensors are on a pretended GPU (`pretended`), kernels allocate what they allocate
there and compute nothing, and `tests.live_bytes` counts. Sizes are chosen so that every component is visible: on the
tiny target's sizes, what the model leaves out (norms, indices of the plan) would be a large share.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from weakref import finalize

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from eyrie_api.contract.training import TrainSpec
from eyrie_api.planning.training_cost import StepSetting, step_bytes
from eyrie_kernels import packed_attention, soft_target_loss
from eyrie_workers.drafters.eagle3.drafter import (
    Eagle3Config,
    Eagle3Drafter,
    TrainingTimeTest,
    step_work,
    trained_drafter,
)
from eyrie_workers.drafters.initialisation import TargetEmbeddings
from eyrie_workers.hidden_states.packed_batch import PackedBatch
from eyrie_workers.targets.config import RopeConfig
from eyrie_workers.targets.device import device_scope
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.training import numerics
from eyrie_workers.training.distributed import Optimizer
from eyrie_workers.training.objective import StepContext
from tests.gpu.pretended import GPU, PretendedGpu
from tests.live_bytes import LiveBytes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TOLERANCE = 0.1
ONE_PART = 1 << 40


@dataclass(frozen=True)
class Shape:
    """Sizes of a drafter and of a batch."""

    hidden: int = 256
    intermediate: int = 704
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 4096
    draft_vocab: int = 1024
    num_aux: int = 3
    lengths: tuple[int, ...] = (700, 311)
    prompt: float = 0.5
    steps: int = 7
    unrolled: float = 0.33
    recompute: bool = False
    dtype: torch.dtype = torch.bfloat16
    kept_bytes: int = ONE_PART
    """Bound of a part's activations."""

    def drafter(self) -> Eagle3Drafter:
        """Of these sizes, on the pretended GPU."""
        config = Eagle3Config(
            hidden_size=self.hidden, intermediate_size=self.intermediate, num_heads=self.heads,
            num_kv_heads=self.kv_heads, head_dim=self.hidden // self.heads, vocab_size=self.vocab,
            draft_vocab_size=self.draft_vocab, aux_layers=tuple(range(1, self.num_aux + 1)), rms_eps=1e-5,
            rope=RopeConfig(theta=10000.0), max_position_embeddings=1024, eos_token_ids=(0,))
        ids = torch.arange(0, self.vocab, self.vocab // self.draft_vocab)
        return Eagle3Drafter(config, DraftVocabulary(ids, self.vocab)).to(GPU)

    def documents(self) -> PackedBatch:
        """Of zeros, on the CPU."""
        total = sum(self.lengths)
        mask = torch.cat([torch.arange(length) >= round(self.prompt * length) for length in self.lengths])
        return PackedBatch(torch.zeros(total, dtype=torch.int64), mask,
                           torch.zeros(total, self.num_aux, self.hidden, dtype=self.dtype),
                           torch.zeros(total, self.hidden, dtype=self.dtype), self.lengths)


class CountedGpu(PretendedGpu):
    """A pretended GPU that keeps no storage alive, with the products that only CUDA has."""

    def __init__(self, counter: LiveBytes) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        wide = (kwargs or {}).get("out_dtype")
        if func is not torch.mm or wide is None:
            return super().__torch_function__(func, types, args, kwargs)
        with self._counter.paused():  # bfloat16 summed in float32 without a copy of the operands
            operands = [part.to(wide) for part in args]
        out = torch.mm(*operands)
        self._put(out, GPU)
        return out

    def _put(self, x: Tensor, where: torch.device) -> None:
        with torch._C.DisableTorchFunction():
            storage = x.untyped_storage()
        key = int(storage._cdata)
        if key not in self._where:
            finalize(storage, self._where.pop, key, None)
        self._where[key] = torch.device(where)


@contextmanager
def kernels_that_only_allocate(counter: LiveBytes, chunks: list[int]) -> Iterator[None]:
    """Kernels allocate their results and launch nothing; `chunks` receives the rows of each chunk of the loss."""

    def launch_rows(logits: Tensor, grads: Tensor, losses: Tensor, *_rest: Any) -> None:
        chunks.append(logits.shape[0])
        losses.zero_()
        grads.zero_()

    with pytest.MonkeyPatch.context() as patch:
        for module in (packed_attention, soft_target_loss):
            patch.setattr(module, "runs_kernels", lambda _: True)
        patch.setattr(packed_attention, "launch", lambda *_args, **_constants: None)
        patch.setattr(soft_target_loss, "launch_rows", launch_rows)
        patch.setattr(numerics, "_onednn_is_faster", lambda: False)
        yield


def measured_and_predicted(shape: Shape, num_ranks: int = 1, *, accumulating: bool = False) -> tuple[int, int, str]:
    """Bytes at the peak of a step whose moments exist, those predicted, and what of."""
    counter, chunks = LiveBytes(), []  # type: LiveBytes, list[int]
    documents, context = shape.documents(), StepContext(0, 1, 0)
    with CountedGpu(counter), counter, kernels_that_only_allocate(counter, chunks):
        drafter = shape.drafter()
        for parameter in drafter.parameters():
            counter.count(parameter.data)
        with device_scope(GPU):
            embed, head = (torch.zeros(shape.vocab, shape.hidden, device=GPU, dtype=shape.dtype) for _ in range(2))
            objective = TrainingTimeTest(
                drafter, TargetEmbeddings(embed, head, torch.ones(shape.hidden)),
                TrainSpec(ttt_length=shape.steps, unrolled_fraction=shape.unrolled, single_step_ratio=0.0,
                          grad_checkpoint=shape.recompute),
                max_positions=max(shape.lengths), dtype=shape.dtype, max_kept_bytes=shape.kept_bytes)
        optimizer = Optimizer(list(drafter.parameters()), num_ranks, lr=1e-3)
        for parameter in drafter.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # creates the moments
        if not accumulating:
            optimizer.zero_grad()
        counter.peak = 0
        objective(documents, context).loss.backward()
        optimizer.reduce()
        optimizer.clip(0.5)
        optimizer.step()
    size = shape.dtype.itemsize
    setting = StepSetting(compute_bytes=size, target_bytes=size, state_bytes=size, num_parts=len(chunks),
                          num_ranks=num_ranks, recompute=shape.recompute, accumulating=accumulating)
    work = step_work(objective.plan(documents, context))
    predicted = step_bytes(trained_drafter(drafter.config), work, setting)
    return counter.peak, predicted.total, f"{predicted.moment}: {dict(predicted.components)}"


SHAPES = {
    "bfloat16": Shape(), "float32": Shape(dtype=torch.float32), "every root unrolled": Shape(unrolled=1.0, steps=3),
    "recomputed": Shape(unrolled=1.0, steps=3, recompute=True),
    "one step": Shape(steps=1, lengths=(1100,), kv_heads=4),
    "wide": Shape(hidden=512, intermediate=1024, heads=8), "few tokens": Shape(hidden=512, heads=8, lengths=(90, 61)),
    "large vocabulary": Shape(vocab=16_384, draft_vocab=4096, num_aux=5, prompt=0.7),
    "several parts": Shape(kept_bytes=12_000_000),
    "parts in float32": Shape(kept_bytes=20_000_000, dtype=torch.float32)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_steps_bytes_are_predicted_within_a_tenth(shape: Shape) -> None:
    measured, predicted, parts = measured_and_predicted(shape)
    assert predicted == pytest.approx(measured, rel=TOLERANCE), parts


def test_bytes_with_gradients_of_an_earlier_micro_batch_are_predicted() -> None:
    measured, predicted, parts = measured_and_predicted(Shape(), accumulating=True)
    assert predicted == pytest.approx(measured, rel=TOLERANCE), parts


def test_bytes_of_two_and_three_ranks_are_predicted(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "tests.gpu.test_step_memory", str(tmp_path)], cwd=ROOT, check=True,
                   timeout=200)
    found = [tuple(map(int, file.read_text().split())) for file in tmp_path.glob("bytes-*")]
    assert len(found) == 5
    for num_ranks in (2, 3):
        # The fullest rank is predicted: whole parameters are distributed, not all ranks have as many.
        measured = max(peak for size, peak, _ in found if size == num_ranks)
        [predicted] = {bytes_ for size, _, bytes_ in found if size == num_ranks}
        assert predicted == pytest.approx(measured, rel=TOLERANCE), (num_ranks, found)


def _measure_as_rank(rank: int, directory: Path) -> None:
    """Write, for each number of ranks that this one takes part in: the number, bytes measured, bytes predicted."""
    shape = Shape(hidden=512, heads=8, lengths=(90, 61))  # optimizer states are the largest part
    for num_ranks in range(max(2, rank + 1), 4):
        dist.init_process_group("gloo", init_method=f"file://{directory}/{num_ranks}", rank=rank, world_size=num_ranks)
        measured, predicted, _ = measured_and_predicted(shape, num_ranks)
        (directory / f"bytes-{num_ranks}-{rank}").write_text(f"{num_ranks} {measured} {predicted}")
        dist.destroy_process_group()


if __name__ == "__main__":  # all ranks, forked from a process that has imported torch and computed nothing
    import torch.distributed.optim

    torch.set_num_threads(1)
    ranks = [get_context("fork").Process(target=_measure_as_rank, args=(number, Path(sys.argv[1])))
             for number in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))
