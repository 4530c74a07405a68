"""The report of a job: time by stage, figures of every checkpoint, what was promoted and why. Pure.

The report is plain JSON: times in seconds, temperatures as keys in their shortest form (`"0"`, `"1"`), speed-ups
against the same engine without a drafter, `identical` the number of prompts (or, for what was promoted, whether all of
them) whose tokens equal the undrafted engine's. Parts that a job did not reach are empty or null: a failed job has a
report as well.
"""

from collections.abc import Sequence
from datetime import datetime
from statistics import fmean

from pydantic import JsonValue

from eyrie_api.contract.hardware import HardwareReport
from eyrie_api.contract.load import LoadReport
from eyrie_api.contract.prove import ParityReport, ProveReport, SampledParityReport
from eyrie_api.contract.reports import BenchmarkReport, CaptureReport, PromotionDecision, RegenerateReport, TuneReport
from eyrie_api.contract.stages import Manifest, StageName
from eyrie_api.contract.status import Condition, Endpoint
from eyrie_operator.conditions import find


def build_report(job_id: str, manifests: Sequence[Manifest], conditions: Sequence[Condition], total_s: float,
                 decision: PromotionDecision | None, endpoint: Endpoint | None,
                 hardware: HardwareReport | None = None, *, stages: Sequence[StageName]) -> dict[str, JsonValue]:
    """The report of a job from its stages' manifests, conditions, decision and endpoint.

    total_s   since its submission
    stages    that the job has
    """
    stage_reports = [manifest.report for manifest in manifests]
    benchmarks = [report for report in stage_reports if isinstance(report, BenchmarkReport)]
    tuned = next((report for report in stage_reports if isinstance(report, TuneReport)), None)
    proof = next((report for report in stage_reports if isinstance(report, ProveReport)), None)
    # Wall time of the programs by stage, all candidates and checkpoints together.
    spent: dict[str, float] = dict.fromkeys(stages, 0.0)
    for manifest in manifests:
        took = datetime.fromisoformat(manifest.finished_at) - datetime.fromisoformat(manifest.started_at)
        spent[manifest.stage] = spent.get(manifest.stage, 0.0) + took.total_seconds()
    # What was taken over from earlier jobs, of what there is (`reuse`).
    reused: dict[str, JsonValue] = {}
    for report in stage_reports:
        if isinstance(report, RegenerateReport):
            reused |= {"answers": report.rows_reused, "all_answers": report.rows_answered}
        elif isinstance(report, CaptureReport):
            reused |= {"state_bytes": report.bytes_reused, "all_state_bytes": report.bytes}
    return {
        "job": job_id,
        "outcome": _outcome(conditions),
        "seconds": {**{stage: round(seconds, 2) for stage, seconds in spent.items()}, "total": round(total_s, 2)},
        "reused": reused,
        "checkpoints": [_checkpoint(report) for report in benchmarks],
        "baseline": _baseline(benchmarks),
        "tuning": [] if tuned is None else [
            {**cell.tree.model_dump(), "tau": cell.tau, "tokens_per_s": cell.tokens_per_s, "speedup": cell.speedup}
            for cell in tuned.cells],
        "proof": None if proof is None else _proof(proof),
        "hardware": None if hardware is None else hardware.model_dump(mode="json", exclude={"load"}),
        "finding": None if tuned is None else tuned.finding,
        "promoted": None if tuned is None or decision is None or not decision.promote else _promoted(tuned, decision),
        "decision": None if decision is None else decision.model_dump(mode="json"),
        "endpoint": None if endpoint is None or endpoint.url is None else {
            "name": endpoint.name, "url": endpoint.url, "model": endpoint.model},
    }


def results_for_card(final: BenchmarkReport, proof: ProveReport) -> dict[str, JsonValue]:
    """The measurements of a promoted drafter, for its card (`eyrie_workers.drafters.card --results`)."""
    environment = final.environment.model_dump(mode="json")
    return {"benchmark": {**_checkpoint(final), "environment": environment},
            "proof": {**_proof(proof), "environment": proof.environment.model_dump(mode="json")}}


def _outcome(conditions: Sequence[Condition]) -> dict[str, JsonValue]:
    succeeded = find(conditions, "Succeeded")
    if succeeded is None:
        return {"succeeded": None, "reason": "Running", "message": ""}
    return {"succeeded": succeeded.status == "True", "reason": succeeded.reason, "message": succeeded.message}


def _checkpoint(report: BenchmarkReport) -> dict[str, JsonValue]:
    suites: dict[str, JsonValue] = {}
    for suite in dict.fromkeys(cell.suite for cell in report.cells):
        suites[suite] = {f"{cell.temperature:g}": {
            "tau": cell.tau, "tokens_per_s": cell.tokens_per_s, "baseline_tokens_per_s": cell.baseline_tokens_per_s,
            "speedup": cell.speedup, "identical": cell.identical, "prompts": cell.prompts,
            "acceptance": list(cell.acceptance), "repeated_share": cell.repeated_share,
            "tau_of_new_text": cell.tau_of_new_text} for cell in report.cells if cell.suite == suite}
    return {"name": report.checkpoint, "candidate": report.candidate, "speedup": report.speedup,
            "rival": report.rival, "dropped": report.dropped,
            "lossless": report.lossless, "suites": suites,
            "concurrent": [{"concurrency": load.concurrency, "temperature": load.temperature, "speedup": load.speedup,
                            "speedup_interval": [load.speedup_interval.low, load.speedup_interval.high],
                            "tau": load.tau, "tokens_per_s": load.tokens_per_s,
                            "baseline_tokens_per_s": load.baseline_tokens_per_s, "identical": load.identical,
                            "requests": load.requests} for load in report.concurrent]}


def _baseline(benchmarks: Sequence[BenchmarkReport]) -> dict[str, JsonValue]:
    """The engine without a drafter against `transformers` generate: the same prompts, greedy, interleaved.

    `prompts` is null when `transformers` was not timed; `tokens_per_s` is then over everything the first benchmark
    measured.
    """
    compared = next((report for report in benchmarks if report.transformers_generate_tokens_per_s is not None), None)
    if compared is None:
        return {"tokens_per_s": benchmarks[0].baseline_tokens_per_s if benchmarks else None,
                "transformers_generate_tokens_per_s": None, "prompts": None}
    return {"tokens_per_s": compared.transformers_baseline_tokens_per_s,
            "transformers_generate_tokens_per_s": compared.transformers_generate_tokens_per_s,
            "prompts": compared.transformers_prompts}


def _proof(proof: ProveReport) -> dict[str, JsonValue]:
    """The candidate in the serving engine; seconds to the first token are those of the 99th percentile."""
    parity = proof.parity
    return {
        "engine": proof.engine, "setting": proof.use.setting.label(), "follows_load": proof.use.map is not None,
        "skipped": proof.skipped,
        "parity": None if parity is None else {
            "passed": parity.passed, "identical": parity.identical, "prompts": parity.prompts, "tau": parity.tau,
            "tau_interval": [parity.tau_interval.low, parity.tau_interval.high], "reference_tau": parity.reference_tau,
            "reasons": list(parity.reasons)},
        "loaded_parity": _compared(proof.loaded_parity), "sampled_parity": _compared(proof.sampled_parity),
        "loads": [] if proof.load is None else _variants(proof.load),
        "changed_prompt": [] if proof.changed_prompt is None else _variants(proof.changed_prompt),
    }


def _compared(parity: ParityReport | SampledParityReport | None) -> JsonValue:
    return None if parity is None else {"passed": parity.passed, "reasons": list(parity.reasons)}


def _variants(load: LoadReport) -> list[JsonValue]:
    """Every drafted variant at every load, against no drafter; `speedup` for all users together and for a single
    one."""
    cells = {(level.variant, level.level): level.total for level in load.levels}
    variants: list[JsonValue] = []
    for pair in load.comparisons:
        mine, plain = cells[pair.variant, pair.level], cells[pair.baseline, pair.level]
        variants.append({
            "variant": pair.variant, "users": pair.level, "speedup": pair.throughput_ratio,
            "speedup_interval": [pair.throughput_interval.low, pair.throughput_interval.high],
            "user_speedup": pair.user_ratio, "tokens_per_s": mine.tokens_per_s, "off_tokens_per_s": plain.tokens_per_s,
            "ttft_p99_s": None if mine.ttft_s is None else mine.ttft_s.p99,
            "off_ttft_p99_s": None if plain.ttft_s is None else plain.ttft_s.p99, "tau": mine.tau,
            "identical": pair.identical, "compared": pair.compared})
    return variants


def _promoted(tuned: TuneReport, decision: PromotionDecision) -> dict[str, JsonValue]:
    cells = {"greedy": [cell for cell in tuned.final.cells if cell.temperature == 0.0],
             "sampled": [cell for cell in tuned.final.cells if cell.temperature > 0.0]}
    compared = {kind: [cell for cell in those if cell.compared] for kind, those in cells.items()}
    return {
        "checkpoint": tuned.checkpoint, **tuned.winner.model_dump(),
        "tau": fmean(cell.tau for cell in tuned.final.cells),
        "speedup": {kind: fmean(cell.speedup for cell in those) if those else None for kind, those in cells.items()},
        "baseline_tokens_per_s": tuned.final.baseline_tokens_per_s,
        "identical": {kind: all(cell.identical == cell.prompts for cell in those) if those else None
                      for kind, those in compared.items()},
        "reasons": list(decision.reasons),
    }
