"""Contract values for tests: the smallest job, benchmark reports with chosen speed-ups, a finished stage on disk."""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from math import prod
from pathlib import Path
from typing import Any

from eyrie_api.artifacts import MANIFEST, list_files, write_model
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.model import Interval
from eyrie_api.contract.plan import Plan, StagePlan
from eyrie_api.contract.records import MetricRecord
from eyrie_api.contract.reports import BenchmarkReport, CellReport, Environment
from eyrie_api.contract.resolved import ResolvedJob
from eyrie_api.contract.stages import Manifest, StageName
from eyrie_api.contract.status import Condition, JobStatus, Phase, StageStatus
from eyrie_api.database.jobs import Jobs, NewEvent, put_metric
from eyrie_api.errors import UnsupportedTarget
from eyrie_api.planning.facts import target_facts
from eyrie_api.planning.resolve import derive
from eyrie_api.planning.target_files import expected_tensors

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


class ManualClock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> datetime:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


def job_spec(**changes: Any) -> JobSpec:
    """The quickstart job with top-level fields replaced."""
    return JobSpec.model_validate(job_body(**changes))


def planned(spec: JobSpec, *stages: StagePlan) -> ResolvedJob:
    """The job as it is submitted, with a plan of these stages."""
    plan = Plan(stages=stages, total_tokens=0, total_bytes_on_disk=0, total_hours=0.0, bytes_per_token=0,
                assumptions=())
    return derive(spec).model_copy(update={"plan": plan})


def job_body(**changes: Any) -> dict[str, Any]:
    """The same, as a user would post it."""
    return {"target": {"model": "quickstart"}, "data": {"sources": [{"path": "quickstart"}]}} | changes


def ended(kind: Phase, now: datetime = NOW) -> JobStatus:
    """The status of a job that ended so."""
    condition = Condition(type=kind, status="True", reason="Test", last_transition_time=now)
    return JobStatus(phase=kind, conditions=(condition,), finished_at=now)


def benchmark_report(checkpoint: str, speedups: Mapping[str, tuple[float, ...]], *, lossless: bool = True,
                     path: str = "checkpoints/x") -> BenchmarkReport:
    """A report with one cell per suite and temperature (0, then 1)."""
    cells = tuple(_cell(suite, float(place), speedup, lossless)
                  for suite, values in speedups.items() for place, speedup in enumerate(values))
    return BenchmarkReport(
        checkpoint=checkpoint, candidate=checkpoint.partition("-step-")[0], path=path, cells=cells, lossless=lossless,
        speedup=sum(cell.speedup for cell in cells) / len(cells), baseline_tokens_per_s=100.0,
        environment=Environment(hardware="test", cpu_count=1, threads=1, torch="none", python="3", dtype="float32",
                                code_version="0", date="2026-11-21"), seconds=1.0)


def _cell(suite: str, temperature: float, speedup: float, lossless: bool) -> CellReport:
    return CellReport(
        suite=suite, temperature=temperature, tree=DraftTreeShape(), prompts=8, tokens=100, tau=2.0 * speedup,
        acceptance=(0.9, 0.8), accepted_histogram=(1, 2, 3), tokens_per_s=100.0 * speedup,
        baseline_tokens_per_s=100.0, speedup=speedup, speedup_interval=Interval(low=speedup, high=speedup),
        ttft_s=0.01, baseline_ttft_s=0.01, identical=8 if lossless else 7)


def set_stage(jobs: Jobs, job_id: str, stage: StageStatus) -> None:
    """A driver stores the status of one stage."""
    jobs.save_status(job_id, jobs.get(job_id).status.model_copy(update={"stages": (stage,)}))


def record_event(jobs: Jobs, job_id: str, reason: str, message: str, *, stage: StageName | None = None,
                 key: str = "") -> None:
    """A driver records an event."""
    jobs.save_status(job_id, jobs.get(job_id).status, events=[NewEvent(reason, message, stage=stage, key=key)])


def record_metrics(jobs: Jobs, job_id: str, stage: StageName, key: str,
                   points: Iterable[tuple[str, int, float, datetime]]) -> None:
    """Points of series (name, step, value, time), as `Ingest` stores those that a stage has written."""
    with jobs.database.writing() as session:
        for name, step, value, time in points:
            put_metric(session, job_id, stage, key, MetricRecord(name=name, step=step, value=value, time=time))


def finish_stage(directory: Path, stage: str, report: Any, files: Mapping[str, bytes], job_id: str) -> None:
    """Write what a finished stage leaves: its files, then its manifest."""
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    write_model(directory / MANIFEST, Manifest.model_validate({
        "stage": stage, "job_id": job_id, "spec_digest": "sha256:" + "0" * 64, "code_version": "0",
        "started_at": NOW.isoformat(), "finished_at": (NOW + timedelta(seconds=3)).isoformat(),
        "files": list_files(directory, [directory / name for name in files]), "report": report}))


def target_directory(path: Path, **changes: Any) -> Path:
    """A Hugging Face directory as far as the control plane looks: config, headers of the weights, tokenizer, template.

    The weights are holes in a sparse file.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 4,
              "vocab_size": 320, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
              "eos_token_id": 2} | changes
    (path / "config.json").write_text(json.dumps(config))
    with suppress(UnsupportedTarget):  # a config that is to be refused may have no sizes
        write_weights(path / "model.safetensors", expected_tensors(config, target_facts(path)))
    (path / "tokenizer.json").write_text(json.dumps({
        "model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<end>", "special": True}]}))
    (path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}", "eos_token": "<end>"}')
    return path


def write_weights(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str = "BF16") -> None:
    """A safetensors file of zeros, two bytes each."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)
