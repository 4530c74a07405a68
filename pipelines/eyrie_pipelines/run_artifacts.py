"""What a run shows in Kubeflow's own pages: typed artifacts with metadata, and the report of the run.

A component hands its output artifacts to this module when its stage has finished. Everything is a function of the
job's manifests, so that a task that runs again writes the same.

**The data stay in the work area.** An artifact's file is the manifest of its stage (a few kilobytes), and its
metadata have the address of the data (`data`). The artifact keeps the URI that Kubeflow gave it: the launcher uploads
the file of every artifact whose URI it knows how to open, and fails the task when that URI is not below the run's
pipeline root; one of another scheme would fail the tasks that receive the artifact (kubeflow/pipelines,
backend/src/v2/component/launcher_v2.go, `uploadOutputArtifacts` and `fetchNonDefaultBuckets`;
backend/src/v2/objectstore/config.go, `KeyFromURI`). Metadata reach Kubeflow by the file that kfp's executor writes
(kfp 2.17, kfp/dsl/executor.py, `write_executor_output`), where all numbers are doubles.

The names of metrics say what they depend on, since Kubeflow compares runs by name alone: tau has its data set,
temperature and draft tree.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from eyrie_api.artifacts import MANIFEST
from eyrie_api.contract.hardware import HardwareMeasurement
from eyrie_api.contract.load import LoadReport
from eyrie_api.contract.prove import ProveReport
from eyrie_api.contract.reports import (
    BenchmarkReport,
    CaptureReport,
    CellReport,
    ConcurrencyReport,
    RegenerateReport,
    TrainReport,
    TuneReport,
)
from eyrie_pipelines import run_report, stage_specs, tasks
from eyrie_pipelines.work_area import WorkArea

Metadata = dict[str, Any]
SHAPE = "num_steps/top_k/num_draft_tokens"


class OutputArtifact(Protocol):
    """The part of kfp's artifacts that is written here."""

    metadata: Metadata

    @property
    def path(self) -> str:
        """Where its file belongs on this machine."""


def write_dataset(job_dir: str, ref: str, artifact: OutputArtifact) -> None:
    """Answers or hidden states, from the stage that a reference names."""
    report = tasks.stage_manifest(job_dir, ref).report
    if isinstance(report, RegenerateReport):
        metadata = {
            "content": "answers of the target", "engine": report.engine, "rows": report.rows_answered,
            "rows held out": report.rows_held_out, "rows quarantined": report.rows_quarantined,
            "rows reused": report.rows_reused, "prompt tokens": report.prompt_tokens,
            "answer tokens": report.answer_tokens} | {f"rows of {name}": rows for name, rows in report.sources.items()}
    else:
        assert isinstance(report, CaptureReport)
        metadata = {
            "content": "hidden states of the target", "source": report.source, "rows": report.rows,
            "rows reused": report.rows_reused, "tokens": report.tokens, "supervised tokens": report.supervised_tokens,
            "bytes": report.bytes, "shards": report.shards, "codec": report.codec, "hidden size": report.hidden_size,
            "layers": list(report.layers.aux_layers)}
    _write_stage(job_dir, ref, artifact, metadata)


def write_training(job_dir: str, ref: str, drafter: OutputArtifact, learning: OutputArtifact) -> None:
    """The drafter of a candidate with its last checkpoint; how that predicts held-out rows, and what training took."""
    report = tasks.stage_report(job_dir, ref, TrainReport)
    last = max(report.checkpoints, key=lambda checkpoint: checkpoint.step, default=None)
    _write_stage(job_dir, ref, drafter, {
        "framework": "PyTorch", "family": report.family, "candidate": report.candidate,
        "parameters": report.parameters, "steps": report.steps, "tokens": report.tokens, "rows": report.rows,
        "draft vocabulary": report.vocabulary.draft_vocab_size, "continued from": report.init_from,
        "checkpoints": len(report.checkpoints), "checkpoint": last.name if last else None,
        "digest": last.digest if last else None})
    metadata: Metadata = {"candidate": report.candidate, "tokens per second": report.tokens_per_s,
                          "seconds": report.seconds, "vocabulary coverage": report.vocabulary.coverage}
    if last is not None:
        metadata |= {"loss": last.loss, "tokens per target pass if drafting were free": last.theoretical_speedup}
        metadata |= {f"accuracy at step {step}": value for step, value in enumerate(last.accuracy, 1)}
    _write_stage(job_dir, ref, learning, metadata)


def write_checkpoints(job_dir: str, spec_digest: str, names: Sequence[str], artifact: OutputArtifact) -> None:
    """All drafters that are benchmarked."""
    job, work = tasks.load_job(job_dir, spec_digest), WorkArea.of(Path(job_dir))
    known = tasks.checkpoints(job_dir, job)
    refs = [stage_specs.find_checkpoint(known, name) for name in names]
    _write(artifact, {"checkpoints": len(refs)} | {ref.name: work.address(Path(job_dir) / ref.path) for ref in refs})


def write_metrics(job_dir: str, ref: str, artifact: OutputArtifact) -> None:
    """The figures of benchmark, tune, prove or hardware."""
    report = tasks.stage_manifest(job_dir, ref).report
    metadata: Metadata
    if isinstance(report, BenchmarkReport):
        metadata = {
            "checkpoint": report.checkpoint, "candidate": report.candidate, "rival": report.rival,
            "dropped": report.dropped, "shapes": SHAPE, "speed-up": report.speedup, "lossless": report.lossless,
            "tokens per second without drafter": report.baseline_tokens_per_s} | _cells(report)
    elif isinstance(report, TuneReport):
        metadata = {
            "checkpoint": report.checkpoint, "shapes": SHAPE, "winner": report.winner.label(),
            "finding": report.finding, "speed-up": report.final.speedup, "lossless": report.final.lossless}
        if report.map is not None:
            metadata |= {"crossover": report.map.crossover, "trials measured": report.map.trials_measured}
            for point in report.map.points:  # the best setting at every load
                metadata |= {f"setting ({point.concurrency} at once)": point.setting.label(),
                             f"speed-up ({point.concurrency} at once)": point.speedup}
        metadata |= _cells(report.final)
    elif isinstance(report, HardwareMeasurement):
        metadata = {"profile": report.profile.name, "price per hour": report.profile.price_per_hour,
                    "skipped": report.skipped or None} | dict(_loads(report.load, ""))
    else:
        assert isinstance(report, ProveReport)
        parity = report.parity
        metadata = {"checkpoint": report.checkpoint, "engine": report.engine, "shapes": SHAPE,
                    "setting": report.use.setting.label(), "skipped": report.skipped or None}
        if parity is not None:
            metadata |= {"serves what was trained": parity.passed, "identical answers": parity.identical,
                         "answers compared": parity.prompts, f"tau (greedy, {parity.tree.label()})": parity.tau}
        if report.loaded_parity is not None:
            metadata |= {"unchanged under load": report.loaded_parity.passed}
        if report.sampled_parity is not None and report.sampled_parity.passed is not None:
            metadata |= {"unchanged at temperature 1": report.sampled_parity.passed}
        metadata |= dict(_loads(report.load, "")) | dict(_loads(report.changed_prompt, ", other system prompt"))
    _write_stage(job_dir, ref, artifact, metadata)


def write_winner(job_dir: str, checkpoint: str, artifact: OutputArtifact) -> None:
    """The selected checkpoint: a candidate's or a rival."""
    job = tasks.load_job(job_dir)
    reports = tasks.train_reports(job_dir, job)
    ref = stage_specs.find_checkpoint(stage_specs.benchmarked(job.resolved, reports), checkpoint)
    trained = next((exported for report in reports for exported in report.checkpoints if exported.name == checkpoint),
                   None)
    measured = tasks.stage_report(job_dir, stage_specs.reference("benchmark", checkpoint), BenchmarkReport)
    _write(artifact, {
        "data": WorkArea.of(Path(job_dir)).address(Path(job_dir) / ref.path), "checkpoint": checkpoint,
        "candidate": ref.candidate, "rival": measured.rival, "framework": "PyTorch",
        "digest": trained.digest if trained is not None else None,
        "speed-up": measured.speedup, "lossless": measured.lossless})


def write_report(job_dir: str, spec_digest: str, artifact: OutputArtifact) -> None:
    """The report of benchmark, tuning and decision as one HTML page, when every stage has finished."""
    job = tasks.load_job(job_dir, spec_digest)
    benchmarks = tasks.benchmark_reports(job_dir, tasks.checkpoints(job_dir, job))
    tuned = tasks.stage_report(job_dir, stage_specs.reference("tune"), TuneReport)
    proof = tasks.stage_report(job_dir, stage_specs.reference("prove"), ProveReport)
    _write(artifact, {"content": "benchmark, tuning map and decision"}, run_report.html(job, benchmarks, tuned, proof))


def _cells(report: BenchmarkReport) -> Metadata:
    """One checkpoint in every suite, at every temperature and concurrency."""
    metadata: Metadata = {}
    for cell in report.cells:
        metadata |= _measured(cell, f"{cell.suite}, T={cell.temperature:g}, {cell.shape}")
    shape = next((cell.shape for cell in report.cells), "")
    for load in report.concurrent:
        metadata |= _measured(load, f"all suites, T={load.temperature:g}, {shape}, {load.concurrency} at once")
    return metadata


def _measured(cell: CellReport | ConcurrencyReport, where: str) -> Metadata:
    return {f"speed-up ({where})": cell.speedup, f"speed-up, low ({where})": cell.speedup_interval.low,
            f"speed-up, high ({where})": cell.speedup_interval.high, f"tau ({where})": cell.tau}


def _loads(report: LoadReport | None, suffix: str) -> Iterator[tuple[str, float]]:
    for compared in report.comparisons if report is not None else ():
        where = f"{compared.variant} over {compared.baseline}, {compared.level:g} users{suffix}"
        yield f"speed-up ({where})", compared.throughput_ratio
        yield f"speed-up, low ({where})", compared.throughput_interval.low
        yield f"speed-up, high ({where})", compared.throughput_interval.high


def _write_stage(job_dir: str, ref: str, artifact: OutputArtifact, metadata: Metadata) -> None:
    """An artifact of one stage: its file is the stage's manifest."""
    directory = Path(job_dir) / ref
    manifest = tasks.stage_manifest(job_dir, ref)
    _write(artifact, {"data": WorkArea.of(Path(job_dir)).address(directory), "spec digest": manifest.spec_digest,
                      **metadata}, (directory / MANIFEST).read_text())


def _write(artifact: OutputArtifact, metadata: Mapping[str, Any], text: str | None = None) -> None:
    """Set the metadata, without what is unknown, and write the file: by default the metadata as JSON."""
    artifact.metadata = {name: value for name, value in metadata.items() if value is not None}
    Path(artifact.path).parent.mkdir(parents=True, exist_ok=True)
    Path(artifact.path).write_text(text or json.dumps(artifact.metadata, indent=2) + "\n")
