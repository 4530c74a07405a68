"""What one training step costs here: `python -m benchmarks.training_step`.

One optimizer step of EAGLE-3 on random states, at a shape given by options: forward, backward, clipping, AdamW. The
defaults are what the peers were measured at: one row of 512 tokens, every one supervised and unrolled, hidden 512,
vocabulary 16384, draft vocabulary 4096, seven steps, float32.

It computes where training would: on the GPU if there is one (`make bench-gpu` takes the sizes of an 8B target's
drafter; memory is then the GPU's, and CPU seconds say little).

    --lengths 512            one document;  --lengths 700,90,310 several, packed;  --prompt 0.5 the share that is prompt

Printed as one JSON line: medians over the iterations of wall and CPU seconds, tokens per second of either, peak memory
above what the process held after its imports, the peak that a plan predicts for a GPU (`planning.training_cost`, roots
in one part), the part of it that no step can do without (parameters, gradients, moments, the target's two ends), and
MFU: the arithmetic the loss and its gradient need (recomputation is not counted) over the fastest matrix product this
process can do, by wall and by CPU seconds. The latter are the
steadier on a busy machine.

A bench, not a test: nothing here decides anything.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from eyrie_api.contract.training import TrainSpec
from eyrie_api.planning.training_cost import StepSetting, step_bytes
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
from eyrie_workers.targets.device import default_device, device_scope
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.training.numerics import peak_flops
from eyrie_workers.training.objective import StepContext

_PARSER = argparse.ArgumentParser(prog="python -m benchmarks.training_step", description=__doc__,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
for _name, _default, _help in (
        ("hidden", 512, "H"), ("intermediate", 1536, "width of the MLP"), ("heads", 8, "query heads"),
        ("kv-heads", 4, "key-value heads"), ("vocab", 16384, "V"), ("draft-vocab", 4096, "D"), ("aux", 3, "A"),
        ("ttt", 7, "steps unrolled"), ("threads", 2, "CPU threads"),
        ("iterations", 5, "steps timed, after two that are not")):
    _PARSER.add_argument(f"--{_name}", type=int, default=_default, help=f"{_help} (default {_default})")
_PARSER.add_argument("--lengths", default="512", help="tokens of each document, comma separated")
_PARSER.add_argument("--prompt", type=float, default=0.0, help="share of each document that is prompt")
_PARSER.add_argument("--vary", type=int, default=0, metavar="N",
                     help="lengthen the documents by N tokens from step to step, as in training no two are alike")
_PARSER.add_argument("--recompute", action="store_true", help="train.grad_checkpoint")
_PARSER.add_argument("--unrolled", type=float, default=1.0, help="train.unrolled_fraction")
_PARSER.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")


def drafter_of(options: argparse.Namespace) -> Eagle3Drafter:
    """A drafter at torch's default initialisation."""
    hidden, vocab, draft = options.hidden, options.vocab, options.draft_vocab
    config = Eagle3Config(
        hidden_size=hidden, intermediate_size=options.intermediate, num_heads=options.heads,
        num_kv_heads=options.kv_heads, head_dim=hidden // options.heads, vocab_size=vocab, draft_vocab_size=draft,
        aux_layers=tuple(range(1, options.aux + 1)), rms_eps=1e-5, rope=RopeConfig(theta=10000.0),
        max_position_embeddings=1 << 17, eos_token_ids=(0,))
    return Eagle3Drafter(config, DraftVocabulary(torch.arange(0, vocab, vocab // draft)[:draft], vocab))


def documents_of(options: argparse.Namespace, longer: int = 0) -> PackedBatch:
    """Random states; of each document the first share is prompt."""
    lengths = tuple(int(length) + longer for length in options.lengths.split(","))
    total = sum(lengths)
    mask = torch.cat([torch.arange(length) >= round(options.prompt * length) for length in lengths])
    return PackedBatch(torch.randint(options.vocab, (total,)), mask,
                           torch.randn(total, options.aux, options.hidden), torch.randn(total, options.hidden), lengths)


def memory_mb(name: str) -> float:
    """VmRSS, what this process holds, or VmHWM, the most it has held; of this very process, as `ru_maxrss` is not."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) / 1024


def import_the_rest() -> None:
    """An optimizer's first step imports another 70 MB of torch: imports like the others."""
    one = torch.nn.Parameter(torch.zeros(1))
    one.grad = torch.zeros(1)
    torch.nn.utils.clip_grad_norm_([one], 1.0, foreach=True)
    torch.optim.AdamW([one], fused=True).step()


def main(arguments: list[str] | None = None) -> None:
    """Time it and print."""
    print(json.dumps(measure(arguments)))


def measure(arguments: list[str] | None = None) -> dict[str, str | float]:
    """The figures of the module docstring, at the sizes of a command line."""
    options, device = _PARSER.parse_args(arguments), default_device()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    import_the_rest()
    on_gpu = device.type == "cuda"
    baseline_mb = torch.cuda.memory_allocated(device) / 2**20 if on_gpu else memory_mb("VmRSS")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    dtype = getattr(torch, options.dtype)

    def as_read(documents: PackedBatch) -> PackedBatch:
        """As training receives them: for a GPU in pinned memory, in the dtype that they were captured in."""
        if not on_gpu:
            return documents
        return replace(documents, aux=documents.aux.to(dtype).pin_memory(), last=documents.last.to(dtype).pin_memory())

    drafter, documents = drafter_of(options).to(device), as_read(documents_of(options))
    # On a GPU the target's matrices are those of a checkpoint, in the dtype of the products.
    target_dtype = dtype if on_gpu else torch.float32
    with device_scope(device):
        embed, head = (torch.randn(options.vocab, options.hidden).mul_(scale).to(target_dtype) for scale in (1.0, 0.1))
        objective = TrainingTimeTest(
            drafter, TargetEmbeddings(embed, head, torch.ones(options.hidden)),
            TrainSpec(ttt_length=options.ttt, unrolled_fraction=options.unrolled, single_step_ratio=0.0,
                      grad_checkpoint=options.recompute),
            max_positions=max(1 << 14, 2 * max(documents.lengths)), dtype=dtype)
    plan = objective.plan(documents, StepContext(0, 1, 0))
    parameters = list(drafter.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    walls, cpus, losses = [], [], []
    for number in range(2 + options.iterations):
        documents = as_read(documents_of(options, number * options.vary)) if options.vary else documents
        wall, cpu = time.perf_counter(), time.process_time()
        optimizer.zero_grad(set_to_none=True)
        outcome = objective(documents, StepContext(0, 1, 0))
        outcome.loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.5, foreach=True)
        optimizer.step()
        loss = float(outcome.loss.detach())  # waits for the GPU
        if number >= 2:
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
        losses.append(loss)
    peak_mb = (torch.cuda.max_memory_allocated(device) / 2**20 if on_gpu else memory_mb("VmHWM")) - baseline_mb
    predicted = step_bytes(trained_drafter(drafter.config), step_work(plan), StepSetting(
        compute_bytes=dtype.itemsize, target_bytes=target_dtype.itemsize, state_bytes=documents.aux.dtype.itemsize,
        recompute=options.recompute))
    floor_mb = (4 * sum(p.numel() for p in parameters) + 2 * options.vocab * options.hidden) * 4 / 2**20
    tokens, wall, cpu = documents.token_ids.numel(), median(walls), median(cpus)
    flops = objective.flops(plan)
    rate, cpu_rate = peak_flops(objective.dtype, device)
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "tokens": tokens, "supervised": outcome.supervised, "wall_s": round(wall, 4), "cpu_s": round(cpu, 4),
        "wall_s_min": round(min(walls), 4), "cpu_s_min": round(min(cpus), 4),
        "tokens_per_s": round(tokens / wall, 1), "tokens_per_cpu_s": round(tokens / cpu, 1),
        "peak_mb_above_imports": round(peak_mb, 1), "predicted_gpu_mb": round(predicted.total / 2**20, 1),
        "floor_mb": round(floor_mb, 1), "gflop": round(flops / 1e9, 2),
        "peak_gflop_per_s": round(rate / 1e9, 1), "mfu": round(flops / wall / rate, 3),
        "mfu_by_cpu_s": round(flops / cpu / cpu_rate, 3),
        "loss_first": losses[0], "loss_last": losses[-1], "threads": options.threads, "dtype": options.dtype}


if __name__ == "__main__":
    main()
