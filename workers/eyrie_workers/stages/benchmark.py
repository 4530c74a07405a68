"""The benchmark stage: one checkpoint against the same engine without it, on every suite and temperature.

    python -m eyrie_workers.stages.benchmark --spec spec.json --out manifest.json

Speed and acceptance come from the decode engine that serves, on prompts nobody trained on: training curves promise more
than they keep (the second seed). Every prompt is answered by both variants in turn (`measurement.benchmark.variants`),
every answer is compared token by token, and every finished prompt is a line of `cells.jsonl`, so that a killed
benchmark goes on where it was. Only one process of a machine measures at a time (`machine.machine_lock`).
"""

import sys
import time

from eyrie_api.artifacts import write_model
from eyrie_api.v1alpha1.stages import BenchmarkStage
from eyrie_workers.conversations.benchmark_suites import select
from eyrie_workers.measurement.benchmark import hf_baseline
from eyrie_workers.measurement.benchmark.samples import Variant
from eyrie_workers.measurement.benchmark.session import (
    LEDGER,
    REPORT,
    Progress,
    Session,
    ask,
    benchmark_report,
    interleave,
    measuring,
    open_ledger,
    open_session,
    read_suites,
    report_cells,
)
from eyrie_workers.stage_program import Result, Stage, run_program


def benchmark(spec: BenchmarkStage, stage: Stage) -> Result:
    """Measure one drafter checkpoint against the undrafted engine."""
    started = time.monotonic()
    suites = read_suites(spec, stage)
    ledger = open_ledger(stage, spec)
    prompts = interleave({
        suite.name: select(suites[suite.name], 0, suite.max_prompts) for suite in spec.benchmark.suites})
    variant = Variant(spec.benchmark.tree)
    variants = [Variant(None), variant]
    with measuring(stage):
        session = open_session(spec, suites)
        units = session.units(prompts, spec.benchmark.temperatures, spec.benchmark.repeats)
        session.bench.warm_up(units[: spec.benchmark.warmup_prompts], variants, stage.pause_point)
        entries = ask(session, units, variants, ledger, Progress(stage, total=len(units) * len(variants)))
        honest = _honesty(session, spec, stage) if spec.measure_transformers else None
    cells = report_cells(session, entries, units, variant)
    for step, cell in enumerate(cells):
        for name, value in (("tau", cell.tau), ("speedup", cell.speedup), ("tokens_per_s", cell.tokens_per_s)):
            stage.metric(f"{cell.suite}/t{cell.temperature:g}/{name}", step, value)
    report = benchmark_report(session, spec, entries, cells, honest.transformers if honest else None,
                              time.monotonic() - started)
    stage.event("Benchmarked", f"{spec.checkpoint}: {report.speedup:.2f}x over no drafter, mean of {len(cells)} cells, "
                               f"{'lossless' if report.lossless else 'NOT lossless'}")
    write_model(stage.out_dir / REPORT, report)
    return Result(report, [stage.out_dir / LEDGER, stage.out_dir / REPORT])


def _honesty(session: Session, spec: BenchmarkStage, stage: Stage) -> hf_baseline.Honesty:
    """Ours against `transformers`, greedily, on the first prompt of every suite."""
    first = interleave({name: select(prompts, 0, 1) for name, prompts in session.suites.items()})
    honest = hf_baseline.compare(session.bench, session.target_path, session.dtype, session.units(first, (0.0,), 1),
                                 stage.pause_point)
    stage.event("HonestBaseline", f"undrafted engine {honest.ours:.1f} tokens/s, transformers generate "
                                  f"{honest.transformers:.1f} tokens/s on the same {len(first)} prompts "
                                  f"({spec.target.dtype}, prefill included)",
                warning=honest.ours < honest.transformers)
    return honest


if __name__ == "__main__":
    sys.exit(run_program(BenchmarkStage, benchmark))
