"""The sections of the GPU benchmark. Each gives rows of figures; none depends on another.

The target has the widths of an 8B model and four of its layers, at random (`stages`: all 32): rates of capture and
decoding are those of four layers and one output matrix, not of an 8B model. Acceptance of a random drafter says
nothing; its cost does.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks import training_step
from benchmarks.gpu.bench import Bench, Row
from benchmarks.kernels.__main__ import report
from benchmarks.kernels.timing import seconds
from eyrie_api.artifacts import read_manifest
from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import SGLANG_PROGRAM, DraftTreeShape
from eyrie_api.contract.reports import TrainReport
from eyrie_api.contract.stages import TrainStage
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.training import TrainSpec
from eyrie_kernels.packed_attention import key_ranges, packed_attention
from eyrie_workers.drafters.family import family_named, open_drafter
from eyrie_workers.speculation.engine import Engine, Request
from eyrie_workers.stage_program import run_program
from eyrie_workers.stages.train import train
from eyrie_workers.targets.loading import load_target
from tests.gpu import test_kernels_at_size
from tests.gpu.workload import AUX_LAYERS, drafter_of, run_capture, step, write_rows


def sglang(bench: Bench) -> Iterator[Row]:
    """Rounds of SGLang, where it is at hand."""
    if not os.environ.get(SGLANG_PROGRAM) and find_spec("sglang") is None:
        yield {"draft": "-", "result": f"SGLang is not installed, and {SGLANG_PROGRAM} names none"}
        return
    from benchmarks.gpu.sglang_rounds import measure_rounds  # imports packages that an image without SGLang lacks

    yield from measure_rounds(bench)


def correctness(bench: Bench) -> list[Row]:
    """Kernels against their references, and a bfloat16 step of EAGLE-3 against float32, at the sizes of the run."""
    rows: list[Row] = []
    for dtype in test_kernels_at_size.TOLERANCE:
        for check in (test_kernels_at_size.test_packed_attention_is_its_reference_forward_and_backward,
                      test_kernels_at_size.test_the_soft_target_loss_is_its_reference_forward_and_backward):
            try:
                check(bench.sizes, dtype, bench.device)
                result = "passed"
            except AssertionError as error:
                result = f"FAILED: {error}".splitlines()[0]
            rows.append({"check": check.__name__.removeprefix("test_"), "dtype": str(dtype), "result": result})
    exact, rounded = (step("eagle3", bench.target, bench.sizes, bench.device, dtype)
                      for dtype in (torch.float32, torch.bfloat16))
    rows.append({"check": "loss of an EAGLE-3 step in bfloat16 over its loss in float32", "dtype": "torch.bfloat16",
                 "result": f"{rounded[0] / exact[0]:.6f}"})
    return rows


def kernels(bench: Bench) -> list[Row]:
    """Each kernel and its floor (`benchmarks.kernels.timing`)."""
    found = report(bench.machine)
    measured = {"name": "this device", "copy_GB_per_s": round(found["copy_bytes_per_s"] / 1e9, 1),
                "product_TFLOP_per_s": round(found["product_flops_per_s"] / 1e12, 2)}
    return [measured, *found["kernels"]]


def libraries(bench: Bench) -> list[Row]:
    """The same work by torch's FlexAttention, and the products of the loss in Liger's fused cross-entropy."""
    rows = flex_attention_rows(bench)
    if find_spec("liger_kernel") is None:
        return [*rows, {"name": "Liger fused linear cross-entropy", "result": "liger_kernel is not installed"}]
    return [*rows, liger_row(bench)]


def flex_attention_rows(bench: Bench) -> list[Row]:
    """Step 0 of the unroll over packed documents: FlexAttention and `packed_attention`. With the backward pass on a
    GPU; FlexAttention has none for the CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    sizes, device = bench.sizes, bench.device
    tokens, lengths = sizes.kernel_tokens, sizes.lengths(sizes.kernel_tokens)
    dtype = torch.bfloat16 if bench.machine.cuda else torch.float32
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
    start = torch.repeat_interleave(torch.tensor([0, *lengths[:-1]]).cumsum(0), torch.tensor(lengths)).to(device)
    shapes = ((sizes.kv_heads, sizes.heads // sizes.kv_heads, sizes.head), (sizes.kv_heads, sizes.head),
              (sizes.kv_heads, sizes.head))
    backward = bench.machine.cuda
    q, k, v = (torch.randn(tokens, *shape, dtype=dtype, device=device, requires_grad=backward) for shape in shapes)
    upstream = torch.randn_like(q)

    def visible(_b: Any, _h: Any, query: Any, key: Any) -> Any:
        return (query >= key) & (document[query] == document[key])

    mask = create_block_mask(visible, None, None, tokens, tokens, device=str(device))
    attend = torch.compile(flex_attention) if bench.machine.cuda else flex_attention

    def flex() -> None:
        out = attend(q.flatten(1, 2).transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None],
                     block_mask=mask, enable_gqa=True)
        if backward:
            torch.autograd.grad(out, (q, k, v), upstream.flatten(1, 2).transpose(0, 1)[None])

    ranges = key_ranges(torch.arange(tokens, device=device), start, 0)

    def ours() -> None:
        out = packed_attention(q, k, v, [], ranges)
        if backward:
            torch.autograd.grad(out, (q, k, v), upstream)

    shape = f"T={tokens} K={sizes.kv_heads} W={sizes.heads // sizes.kv_heads} E={sizes.head} {dtype}"
    return [{"name": name, "shape": shape, "backward": str(backward), "seconds": seconds(work, bench.machine)}
            for name, work in (("packed_attention, step 0", ours), ("FlexAttention", flex))]


def liger_row(bench: Bench) -> Row:
    """Another loss (hard labels) with the same products as `soft_target_loss`."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # type: ignore[import-not-found]

    sizes, rows = bench.sizes, bench.sizes.kernel_tokens
    x = torch.randn(rows, sizes.hidden, dtype=torch.bfloat16, device=bench.device, requires_grad=True)
    weight = torch.randn(sizes.draft_vocab, sizes.hidden, dtype=torch.bfloat16, device=bench.device).requires_grad_()
    labels, loss = torch.randint(sizes.draft_vocab, (rows,), device=bench.device), LigerFusedLinearCrossEntropyLoss()
    taken = seconds(lambda: torch.autograd.grad(loss(weight, x, labels), (x, weight)), bench.machine)
    return {"name": "Liger fused linear cross-entropy", "shape": f"T={rows} H={sizes.hidden} D={sizes.draft_vocab}",
            "seconds": taken}


def training(bench: Bench) -> list[Row]:
    """One optimizer step of EAGLE-3 with seven unrolled steps: MFU and memory (`benchmarks.training_step`)."""
    sizes = bench.sizes
    lengths = ",".join(map(str, sizes.lengths(sizes.kernel_tokens)))
    iterations = 10 if bench.machine.cuda else 1
    return [training_step.measure([
        "--hidden", str(sizes.hidden), "--intermediate", str(sizes.intermediate), "--heads", str(sizes.heads),
        "--kv-heads", str(sizes.kv_heads), "--vocab", str(sizes.vocab), "--draft-vocab", str(sizes.draft_vocab),
        "--lengths", lengths, "--prompt", "0.3", "--dtype", bench.dtype, "--iterations", str(iterations), "--threads",
        str(torch.get_num_threads()), "--unrolled", str(unrolled)]) | {"unrolled_fraction": unrolled}
        for unrolled in (1.0, 0.33)]


def capture(bench: Bench) -> list[Row]:
    """Rows captured by the stage program, in passes of a quarter and of all of the tokens, and the target alone."""
    sizes, rows = bench.sizes, []
    for tokens in (sizes.kernel_tokens // 4, sizes.kernel_tokens):
        source, out = bench.work / f"rows-{tokens}", bench.work / f"states-{tokens}"
        write_rows(source, bench.target, sizes, (tokens,) * max(2, 4 * sizes.kernel_tokens // tokens))
        found = run_capture(out, bench.target, source, sizes, bench.dtype, batch_tokens=tokens, aux_layers=AUX_LAYERS)
        target = load_target(bench.target, bench.dtype)
        ids = torch.randint(3, sizes.vocab, (tokens,))

        def forward(target: Any = target, ids: torch.Tensor = ids) -> None:
            target.hidden_states([ids], AUX_LAYERS)

        alone = tokens / seconds(forward, bench.machine)
        rows.append({"tokens_per_pass": tokens, "codec": found.codec, "captured_tokens_per_s": found.tokens_per_s,
                     "prefill_tokens_per_s": found.prefill_tokens_per_s, "target_tokens_per_s": alone,
                     "share": round(found.tokens_per_s / alone, 3)})
    return rows


def stages(bench: Bench) -> list[Row]:
    """Capture and training as a job runs them, for a target with all its layers: what both take as whole programs, with
    loading, digests, writing and reading, evaluation and saving. The checkpoint takes 16 GB, the states 4 GB."""
    real = bench.machine.cuda
    sizes = replace(bench.sizes, target_layers=32) if real else bench.sizes
    length, count, steps = (2048, 128, 40) if real else (64, 8, 2)
    source, layers = bench.work / "whole", (2, 16, 29) if real else AUX_LAYERS
    found: list[Row] = []
    began = time.perf_counter()
    target = sizes.target(source / "target", bench.dtype)
    found.append({"what": "target written", "seconds": round(time.perf_counter() - began, 1)})
    began = time.perf_counter()
    write_rows(source / "rows", target, sizes, (length,) * count)
    found.append({"what": "its digest", "seconds": round(time.perf_counter() - began, 1)})
    began = time.perf_counter()
    captured = run_capture(source / "states", target, source / "rows", sizes, bench.dtype, max_length=length,
                           aux_layers=layers, batch_tokens=sizes.kernel_tokens)
    found.append({"what": f"capture, {captured.codec}", "seconds": round(time.perf_counter() - began, 1),
                  "tokens": captured.tokens, "tokens_per_s": captured.tokens_per_s,
                  "prefill_tokens_per_s": captured.prefill_tokens_per_s, "GB": captured.bytes / 1e9})
    out = source / "drafter"
    out.mkdir()
    spec = TrainStage(
        job_id="job", candidate="c", target=TargetSpec(model=str(target), dtype=bench.dtype),
        store_dir=str(source / "states"),
        drafter=DrafterSpec(draft_vocab_size=sizes.draft_vocab),
        train=TrainSpec(max_steps=steps, num_checkpoints=1, max_tokens_per_batch=sizes.kernel_tokens))
    (out / "spec.json").write_text(spec.model_dump_json())
    began = time.perf_counter()
    if run_program(TrainStage, train, ["--spec", str(out / "spec.json"), "--out", str(out / "manifest.json")]):
        raise RuntimeError(json.loads((out / "failure.json").read_text()))
    report = read_manifest(out).report
    assert isinstance(report, TrainReport)
    found.append({"what": f"training, {report.steps} steps", "seconds": round(time.perf_counter() - began, 1),
                  "tokens": report.tokens, "tokens_per_s": report.tokens_per_s,
                  "inside_s": report.seconds, "data_wait_share": report.data_wait_share, "mfu": report.mfu})
    return found


def decode(bench: Bench) -> list[Row]:
    """One request, greedy, undrafted and with drafts of a random EAGLE-3 drafter."""
    dtype, new = bench.dtype, 128 if bench.machine.cuda else 6
    target = load_target(bench.target, dtype)
    directory = bench.work / "drafter"
    family_named("eagle3").save(directory, drafter_of("eagle3", bench.target, bench.sizes)[0], dtype, None)
    engine, rows = Engine(target, open_drafter(directory, target)), []
    for shape in (None, DraftTreeShape(num_steps=5, top_k=1, num_draft_tokens=6),
                  DraftTreeShape(num_steps=5, top_k=4, num_draft_tokens=16)):
        # What a process does once, at other lengths than those below.
        engine.generate([Request(id=f"{shape}", prompt_ids=tuple(range(1, 9)), max_new_tokens=4)], shape)
        speeds = []
        for turn in range(2):  # the first shows what new lengths cost a user
            engine.stats.reset()
            began = time.perf_counter()
            request = Request(id=f"{shape}-{turn}", prompt_ids=tuple(range(1, 65)), max_new_tokens=new)
            tokens = len(engine.generate([request], shape)[0].token_ids)
            if bench.machine.cuda:
                torch.cuda.synchronize()
            speeds.append(round(tokens / (time.perf_counter() - began), 2))
        stats = engine.stats
        rows.append({"draft": "none" if shape is None else shape.label(), "first_tokens_per_s": speeds[0],
                     "tokens_per_s": speeds[1], "rounds": stats.rounds,
                     "draft_ms_per_round": round(1e3 * stats.draft_s / stats.rounds, 3),
                     "verify_ms_per_round": round(1e3 * stats.verify_s / stats.rounds, 3)})
    return rows


SECTIONS: dict[str, tuple[Callable[[Bench], Iterable[Row]], float]] = {
    "correctness": (correctness, 100), "kernels": (kernels, 70), "libraries": (libraries, 70),
    "training": (training, 90), "capture": (capture, 100), "decode": (decode, 70), "stages": (stages, 200),
    "sglang": (sglang, 480)}
"""Section -> its function, and the seconds after which it is ended. With the target's 100 they are 21 minutes."""
