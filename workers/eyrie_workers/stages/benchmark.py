"""The benchmark stage: one checkpoint against the same engine without a drafter, on every suite, at every temperature
and concurrency.

    python -m eyrie_workers.stages.benchmark --spec spec.json --out manifest.json

Speed and acceptance are measured in the engine of the spec, on prompts that no drafter was trained on: training metrics
overestimate both. Both variants answer every prompt in turn (`measurement.benchmark.variants`), answers are compared
token by token, and every finished prompt is a line of `cells.jsonl`, from which an interrupted benchmark resumes. At
`benchmark.concurrencies` above 1 the prompts are answered in blocks (`measurement.benchmark.concurrency`), each a line
of `blocks.jsonl`. One process of a machine measures at a time (`machine.machine_lock`).

N-gram look-up as a rival is measured in the same way, in a chain as deep as the tree of the drafters.
"""

import sys
import time
from pathlib import Path

from eyrie_api.artifacts import write_model
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing, InvalidInput, UnsupportedTarget
from eyrie_api.v1alpha1.benchmark import RivalSpec
from eyrie_api.v1alpha1.engine import DraftTreeShape
from eyrie_api.v1alpha1.reports import BenchmarkReport
from eyrie_api.v1alpha1.stages import BenchmarkStage
from eyrie_api.v1alpha1.tuning import OFF, Setting
from eyrie_workers.conversations.suites import select
from eyrie_workers.drafters.checkpoint.files import CheckpointInvalid, files_of
from eyrie_workers.drafters.mtp import copy_mtp_layers
from eyrie_workers.drafters.published import adopt, fetch
from eyrie_workers.engines.process import EngineFailed
from eyrie_workers.machine.environment import environment
from eyrie_workers.measurement.benchmark import transformers_baseline
from eyrie_workers.measurement.benchmark.blocks import BlockRun, BlockRunner, Blocks
from eyrie_workers.measurement.benchmark.concurrency import ConcurrentBenchmark, all_lossless
from eyrie_workers.measurement.benchmark.samples import BASELINE, UNDRAFTED
from eyrie_workers.measurement.benchmark.session import (
    LEDGER,
    REPORT,
    Progress,
    Session,
    benchmark_report,
    is_measured,
    measure_units,
    measuring,
    open_ledger,
    open_ledger_for,
    open_session,
    read_suites,
    report_cells,
    round_robin,
    start_all,
    uses_of,
)
from eyrie_workers.measurement.variant import drafted
from eyrie_workers.stage_program import Result, Stage, run_program
from eyrie_workers.targets.loading import resolve
from eyrie_workers.targets.sglang_limits import Unlaunchable

BLOCKS = "blocks.jsonl"


def benchmark(spec: BenchmarkStage, stage: Stage) -> Result:
    """Measure one drafter checkpoint against the undrafted engine. A rival that does not fit the target, or that the
    engine cannot run, is reported as dropped: the job goes on without it."""
    if spec.rival is None:
        return _measure(spec, stage)
    try:
        family = _adopt(spec, spec.rival)
        result = _measure(spec, stage)
    except (CheckpointInvalid, UnsupportedTarget, ArtifactMissing, ArtifactCorrupt, EngineFailed,
            Unlaunchable) as error:
        stage.event("RivalDropped", f"{spec.checkpoint}: {error.message}; {error.hint}", warning=True)
        return _write_report(BenchmarkReport(
            checkpoint=spec.checkpoint, candidate=spec.candidate, path=spec.drafter_dir, cells=(), rival=True,
            dropped=error.message, lossless=False, speedup=0.0, baseline_tokens_per_s=0.0,
            environment=environment(spec.target.dtype), seconds=0.0), stage, [])
    assert isinstance(result.report, BenchmarkReport)
    adopted = files_of(Path(spec.drafter_dir)) if spec.rival.has_drafter else []
    return _write_report(result.report.model_copy(update={"rival": True, "family": family}), stage,
                         [*result.files, *adopted])


def _adopt(spec: BenchmarkStage, rival: RivalSpec) -> str:
    """Copy the rival's drafter, if it has one, into the output of this stage; returns its family."""
    if rival.method == "nextn":
        copy_mtp_layers(resolve(spec.target), Path(spec.drafter_dir))
    if rival.path is None:
        return rival.method
    target = resolve(spec.target)
    try:
        return adopt(fetch("rivals: path", rival.path, rival.revision), Path(spec.drafter_dir), target).name
    except InvalidInput as error:
        raise CheckpointInvalid(error.message, error.hint) from error


def _write_report(report: BenchmarkReport, stage: Stage, files: list[Path]) -> Result:
    write_model(stage.out_dir / REPORT, report)
    return Result(report, list(dict.fromkeys([*files, stage.out_dir / REPORT])))


def _measure(spec: BenchmarkStage, stage: Stage) -> Result:
    started = time.monotonic()
    suites = read_suites(spec, stage)
    ledger, block_ledger = open_ledger(stage, spec), open_ledger_for(BlockRun, stage, spec, BLOCKS)
    prompts = round_robin({
        suite.name: select(suites[suite.name], 0, suite.max_prompts) for suite in spec.benchmark.suites})
    setting = measured_setting(spec)
    assert setting.tree is not None
    variant = drafted(setting.tree)
    variants = [UNDRAFTED, variant]
    uses = uses_of(spec, {BASELINE: OFF, variant.title: setting})
    in_blocks = uses_of(spec, {one.label(): one for one in (OFF, setting)})
    with measuring(stage), open_session(spec, suites, uses | in_blocks, stage,
                                        spec.benchmark.concurrencies[-1]) as session:
        units = session.units(prompts, spec.benchmark.temperatures, spec.benchmark.repeats)
        if (spec.measure_transformers and spec.engine.kind == "embedded") or not is_measured(
                session, units, variants, ledger):
            start_all(session, uses)
            session.bench.warm_up(units[: spec.benchmark.warmup_prompts], variants, stage.pause_point)
        measured = measure_units(session, units, variants, ledger, Progress(stage, total=len(units) * len(variants)))
        compared = _compare_with_transformers(session, spec, stage) if spec.measure_transformers else None
        concurrent = ConcurrentBenchmark(spec.benchmark, setting, Blocks(
            BlockRunner(session, [prompt for _, prompt in prompts]), block_ledger,
            {run.key: run for run in block_ledger.entries}))
        if not concurrent.is_measured:
            start_all(session, in_blocks)
            concurrent.measure(stage)
    # The servers are gone: where an answer differs, the reference implementation of the target is loaded to explain it.
    cells, at_once = report_cells(session, measured, variant), concurrent.reports()
    for step, cell in enumerate(cells):
        for name, value in (("tau", cell.tau), ("speedup", cell.speedup), ("tokens_per_s", cell.tokens_per_s)):
            stage.metric(f"{cell.suite}/t{cell.temperature:g}/{name}", step, value)
    entries = [entry for _, entry in measured]
    report = benchmark_report(session, spec, entries, cells, compared, time.monotonic() - started)
    report = report.model_copy(update={
        "concurrent": at_once, "lossless": report.lossless and all_lossless(at_once)})
    loads = "".join(f", {one.speedup:.2f}x with {one.concurrency} at once at temperature {one.temperature:g}"
                    for one in at_once)
    stage.event("Benchmarked", f"{spec.checkpoint}: {report.speedup:.2f}x over no drafter, mean of {len(cells)} cells"
                               f"{loads}, {'lossless' if report.lossless else 'NOT lossless'}")
    return _write_report(report, stage, [stage.out_dir / LEDGER, stage.out_dir / BLOCKS])


def measured_setting(spec: BenchmarkStage) -> Setting:
    """What is measured against no drafter: the drafter in the tree of the spec; n-gram look-up, which continues one
    text, in a chain of the same depth."""
    tree = spec.benchmark.tree
    if spec.rival is None or spec.rival.method != "ngram":
        return Setting(tree=tree)
    return Setting(method="ngram", tree=DraftTreeShape(
        num_steps=tree.num_steps, top_k=1, num_draft_tokens=tree.num_steps + 1))


def _compare_with_transformers(session: Session, spec: BenchmarkStage,
                               stage: Stage) -> transformers_baseline.TransformersBaseline | None:
    """The undrafted engine against `transformers` generate, greedily, on the first prompt of every suite.

    None where the GPU has no room for both.
    """
    if spec.engine.kind != "embedded":
        return None  # its server would compete with transformers for the device
    if not transformers_baseline.fits(session.target):
        stage.event("BaselineNotCompared", f"{session.target.device} has no room for a second copy of the target: the "
                    "undrafted engine is not compared with transformers generate", warning=True)
        return None
    first = round_robin({name: select(prompts, 0, 1) for name, prompts in session.suites.items()})
    found = transformers_baseline.compare(session.bench, session.target, session.target_path, session.dtype,
                                          session.units(first, (0.0,), 1), stage.pause_point)
    stage.event("BaselineCompared", f"undrafted engine {found.tokens_per_s:.1f} tokens/s, transformers generate "
                                    f"{found.transformers_tokens_per_s:.1f} tokens/s on the same {found.prompts} "
                                    f"prompts ({spec.target.dtype}, greedy, prefill included)",
                warning=found.tokens_per_s < found.transformers_tokens_per_s)
    return found


if __name__ == "__main__":
    sys.exit(run_program(BenchmarkStage, benchmark))
