"""The benchmark stage: one checkpoint against the same engine without a drafter, on every suite, at every temperature
and concurrency.

    python -m eyrie_workers.stages.benchmark --spec spec.json --out manifest.json

Speed and acceptance are measured in the engine of the spec, on prompts that no drafter was trained on: training metrics
overestimate both. Both variants answer every prompt in turn (`measure.benchmark.variants`), answers are compared
token by token, and every finished prompt is a line of `cells.jsonl`, from which an interrupted benchmark resumes. At
`benchmark.concurrencies` above 1 the prompts are answered in blocks (`measure.benchmark.blocks`), each a line
of `blocks.jsonl`. One process of a machine measures at a time (`machine.machine_lock`).

N-gram look-up as a rival is measured in the same way, in a chain as deep as the tree of the drafters.

A speed-up over a slow baseline means nothing, so the undrafted engine is also compared with `transformers` generate
(`compare`), with its KV cache and at the same dtype and thread count: both answer the same prompts greedily, in turn,
timed over the whole request, prefill included. The two rates are comparable with each other only: the benchmark's other
figures come from other prompts and temperatures.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.reports import BenchmarkReport
from eyrie_api.contract.stages import BenchmarkStage
from eyrie_api.contract.tuning import OFF, Setting
from eyrie_api.decisions.near_ties import is_lossless
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing, InvalidInput, UnsupportedTarget
from eyrie_api.planning.sglang_support import Unlaunchable
from eyrie_workers.data.suites import select
from eyrie_workers.drafters.checkpoint import CheckpointInvalid, files_of
from eyrie_workers.drafters.published import adopt, copy_mtp_layers, fetch
from eyrie_workers.engines.process import EngineFailed
from eyrie_workers.machine import environment
from eyrie_workers.measure.benchmark.blocks import BlockRun, ConcurrentBenchmark, MeasuredBlocks
from eyrie_workers.measure.benchmark.losslessness import explain
from eyrie_workers.measure.benchmark.reports import benchmark_report, report_cells
from eyrie_workers.measure.benchmark.session import (
    LEDGER,
    Session,
    is_measured,
    measure_units,
    measuring,
    open_ledger,
    open_session,
    read_suites,
    reported,
    round_robin,
    start_all,
    uses_of,
)
from eyrie_workers.measure.benchmark.variants import BASELINE, UNDRAFTED, Entry, Unit, Variant
from eyrie_workers.measure.intervals import interleaved
from eyrie_workers.stage_program import Result, Stage, run_program
from eyrie_workers.targets.loading import resolve, weight_bytes
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.targets.state_source import load_causal_model

BLOCKS = "blocks.jsonl"


def benchmark(spec: BenchmarkStage, stage: Stage) -> Result:
    """Measure one drafter checkpoint against the undrafted engine. A drafter from elsewhere that does not fit the
    target, or that the engine cannot run, is reported as dropped: the job goes on without it."""
    source, is_rival = spec.source, spec.brought is None
    if source is None:
        return _measure(spec, stage)
    try:
        # The drafter, if there is one, is copied into the output of this stage.
        family: str = source.method
        if source.method == "nextn":
            copy_mtp_layers(resolve(spec.target), Path(spec.drafter_dir))
        if source.path is not None:
            try:
                family = adopt(fetch(f"{spec.source_field}: path", source.path, source.revision),
                               Path(spec.drafter_dir), resolve(spec.target)).name
            except InvalidInput as error:
                raise CheckpointInvalid(error.message, error.hint) from error
        result = _measure(spec, stage)
    except (CheckpointInvalid, UnsupportedTarget, ArtifactMissing, ArtifactCorrupt, EngineFailed,
            Unlaunchable) as error:
        stage.event("RivalDropped" if is_rival else "DrafterDropped",
                    f"{spec.checkpoint}: {error.message}; {error.hint}", warning=True)
        return reported(BenchmarkReport(
            checkpoint=spec.checkpoint, candidate=spec.candidate, path=spec.drafter_dir, cells=(), rival=is_rival,
            dropped=error.message, lossless=False, speedup=0.0, baseline_tokens_per_s=0.0,
            environment=environment(spec.target.dtype), seconds=0.0), stage)
    assert isinstance(result.report, BenchmarkReport)
    adopted = files_of(Path(spec.drafter_dir)) if source.has_drafter else []
    return reported(result.report.model_copy(update={"rival": is_rival, "family": family}), stage,
                    [*result.files, *adopted])


def _measure(spec: BenchmarkStage, stage: Stage) -> Result:
    started = time.monotonic()
    suites = read_suites(spec, stage)
    ledger, block_ledger = open_ledger(Entry, stage, spec, LEDGER), open_ledger(BlockRun, stage, spec, BLOCKS)
    prompts = round_robin({
        suite.name: select(suites[suite.name], 0, suite.max_prompts) for suite in spec.benchmark.suites})
    tree, method = spec.benchmark.tree, "drafter" if spec.source is None else spec.source.method
    # N-gram look-up continues one text: a chain of the same depth.
    setting = Setting(tree=tree) if method != "ngram" else Setting(method="ngram", tree=DraftTreeShape(
        num_steps=tree.num_steps, top_k=1, num_draft_tokens=tree.num_steps + 1))
    variant = Variant(tree=setting.tree)
    variants = [UNDRAFTED, variant]
    uses = uses_of(spec, {BASELINE: OFF, variant.title: setting})
    in_blocks = uses_of(spec, {variant.label(): variant for variant in (OFF, setting)})
    with measuring(stage), open_session(spec, suites, uses | in_blocks, stage,
                                        spec.benchmark.concurrencies[-1]) as session:
        units = session.units(prompts, spec.benchmark.temperatures, spec.benchmark.repeats)
        if (spec.measure_transformers and spec.engine.kind == "embedded") or not is_measured(
                session, units, variants, ledger):
            start_all(session, uses)
            session.warm_up(units[: spec.benchmark.warmup_prompts], variants, stage.pause_point)
        measured = measure_units(session, units, variants, ledger, stage)
        compared = _compare_with_transformers(session, spec, stage) if spec.measure_transformers else None
        concurrent = ConcurrentBenchmark(spec.benchmark, setting, MeasuredBlocks(
            session, [prompt for _, prompt in prompts], block_ledger), spec.min_speedup)
        if not concurrent.is_measured:
            start_all(session, in_blocks)
            concurrent.measure(stage)
    # Where an answer differs, the reference implementation of the target is loaded to explain it: servers leave it a
    # share of the memory.
    cells, at_once = report_cells(session, measured, variant), concurrent.reports()
    for step, cell in enumerate(cells):
        for name, value in (("tau", cell.tau), ("speedup", cell.speedup), ("tokens_per_s", cell.tokens_per_s)):
            stage.metric(f"{cell.suite}/t{cell.temperature:g}/{name}", step, value)
    entries = [entry for _, entry in measured]
    report = benchmark_report(session, spec, entries, cells, time.monotonic() - started)
    report = report.model_copy(update={
        "concurrent": at_once,
        # Every compared request is identical, or differs by near-ties alone.
        "lossless": report.lossless and all(
            is_lossless(load.requests, load.identical, load.near_ties) for load in at_once if load.compared)})
    if compared is not None:
        report = report.model_copy(update={
            "transformers_generate_tokens_per_s": compared.transformers_tokens_per_s,
            "transformers_baseline_tokens_per_s": compared.tokens_per_s, "transformers_prompts": compared.prompts})
    loads = "".join(f", {load.speedup:.2f}x [{load.speedup_interval.low:.2f}, {load.speedup_interval.high:.2f}] "
                    f"{'' if concurrent.is_clear(load.speedup, load.speedup_interval) else '(too noisy to decide) '}"
                    f"with {load.concurrency} at once at temperature {load.temperature:g}" for load in at_once)
    stage.event("Benchmarked", f"{spec.checkpoint}: {report.speedup:.2f}x over no drafter, mean of {len(cells)} cells"
                               f"{loads}, {'lossless' if report.lossless else 'NOT lossless'}")
    return reported(report, stage, [stage.out_dir / LEDGER, stage.out_dir / BLOCKS])


def _compare_with_transformers(session: Session, spec: BenchmarkStage,
                               stage: Stage) -> "TransformersBaseline | None":
    """The comparison on the first prompt of every suite; None where the GPU has no room for both models."""
    if spec.engine.kind != "embedded":
        return None  # its server would compete with transformers for the device
    if not fits(session.target):
        stage.event("BaselineNotCompared", f"{session.target.device} has no room for a second copy of the target: the "
                    "undrafted engine is not compared with transformers generate", warning=True)
        return None
    first = round_robin({name: select(prompts, 0, 1) for name, prompts in session.suites.items()})
    compared = compare(session, session.units(first, (0.0,), 1), stage.pause_point)
    if compared.different:
        stage.event("BaselineDiffers", f"{len(compared.different)} of {compared.prompts} undrafted answers differ from "
                    f"those of transformers generate by more than rounding: {'; '.join(compared.different)}",
                    warning=True)
    stage.event("BaselineCompared", f"undrafted engine {compared.tokens_per_s:.1f} tokens/s, transformers generate "
                                    f"{compared.transformers_tokens_per_s:.1f} tokens/s on the same {compared.prompts} "
                                    f"prompts ({spec.target.dtype}, greedy, prefill included)",
                warning=compared.tokens_per_s < compared.transformers_tokens_per_s)
    return compared


@dataclass(frozen=True)
class TransformersBaseline:
    """Tokens per second of both engines on the same prompts."""

    tokens_per_s: float  # our engine without a drafter
    transformers_tokens_per_s: float
    prompts: int
    different: tuple[str, ...] = ()
    """Answers of ours that differ from theirs by more than a rounding tie."""


def fits(target: TargetModel) -> bool:
    """Whether the GPU of our target has room for a second copy of its weights; always on the CPU."""
    if target.device.type != "cuda" or target.path is None:
        return True
    free, _ = torch.cuda.mem_get_info(target.device)
    return free > weight_bytes(target.path, str(target.dtype).removeprefix("torch."))


def compare(session: Session, units: Sequence[Unit], between: Callable[[], None]) -> TransformersBaseline:
    """Time both engines on greedy `units`, interleaved. `between` is called before each answer and may raise."""
    model = load_causal_model(session.target_path, session.dtype, session.target.device)
    stop_ids = session.tokenizer.eos_ids
    session.warm_up(units[:1], [UNDRAFTED], between)
    _generate(model, units[0], stop_ids, 8)
    tokens = transformers_tokens = 0
    seconds = transformers_s = 0.0
    different = list[str]()
    for turn, unit in enumerate(units):
        for engine in interleaved(("ours", "transformers"), turn):
            between()
            if engine == "ours":
                sample = session.measure(unit, [UNDRAFTED], between).samples[BASELINE]
                tokens, seconds = tokens + len(sample.token_ids), seconds + sample.seconds
            else:
                started = time.perf_counter()
                answer = _generate(model, unit, stop_ids, session.spec.max_new_tokens)
                transformers_s += time.perf_counter() - started
                transformers_tokens += len(answer)
        divergence = explain(session.target, unit.prompt.id, unit.prompt_ids, answer, sample.token_ids)
        if divergence is not None and not divergence.is_tie(session.dtype):
            different.append(f"{unit.prompt.id} at token {divergence.position}, logit gap {divergence.first.gap:.3g}")
    return TransformersBaseline(
        tokens_per_s=tokens / seconds, transformers_tokens_per_s=transformers_tokens / transformers_s,
        prompts=len(units), different=tuple(different))


def _generate(model: "torch.nn.Module", unit: Unit, stop_ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """Answer greedily with `transformers`; returns the new tokens, the stop token included as in ours."""
    prompt = torch.tensor([unit.prompt_ids], device=next(model.parameters()).device)
    with torch.inference_mode():
        answer = model.generate(  # type: ignore[operator]
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens, do_sample=False,
            use_cache=True, eos_token_id=list(stop_ids), pad_token_id=stop_ids[0] if stop_ids else 0)
    ids: list[int] = answer[0, prompt.shape[1]:].tolist()  # one copy from the device
    return ids


if __name__ == "__main__":
    sys.exit(run_program(BenchmarkStage, benchmark))
