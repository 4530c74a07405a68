"""A job whose stages have all finished, as files: specs and manifests are real, the reports are rehearsed."""

from datetime import UTC, datetime
from pathlib import Path

from eyrie_api.artifacts import code_version, digest_model, write_model
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.reports import TrainReport
from eyrie_api.contract.stages import Manifest, StageSpec
from eyrie_api.planning.resolve import derive
from eyrie_pipelines import stage_specs, tasks
from eyrie_pipelines.runner import JOB_FILE, JobFile
from eyrie_workers.catalog import stage_dir
from tests.pipelines.rehearsal.rehearsal_stage import report_of

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def lay_out(root: Path, job_id: str, spec: JobSpec) -> None:
    """Write `job.json` and the manifest of every stage of a job with one candidate."""
    job = JobFile(id=job_id, resolved=derive(spec))
    write_model(root / JOB_FILE, job)
    train = stage_specs.train_spec(job, root, "base")
    trained = report_of(train)
    assert isinstance(trained, TrainReport)
    refs = stage_specs.benchmarked(job.resolved, [trained])
    _finish(root, stage_specs.regenerate_spec(job, root))
    _finish(root, stage_specs.capture_spec(job, root))
    _finish(root, train, "base")
    benchmarks = [stage_specs.benchmark_spec(job, root, ref, first=number == 0) for number, ref in enumerate(refs)]
    for ref, benchmark in zip(refs, benchmarks, strict=True):
        _finish(root, benchmark, ref.name)
    chosen = tasks.select(str(root), [stage_specs.reference("benchmark", ref.name) for ref in refs])
    best = next(ref for ref in refs if ref.name == chosen)
    measured = [report_of(one) for one in benchmarks]
    rival = stage_specs.rival_to_beat(job.resolved, refs, measured, chosen)  # type: ignore[arg-type]
    _finish(root, stage_specs.tune_spec(job, root, best, rival))
    _finish(root, stage_specs.prove_spec(job, root, best, stage_specs.reference("tune"), rival))


def _finish(root: Path, spec: StageSpec, key: str = "") -> None:
    write_model(stage_dir(root, spec.stage, key) / "manifest.json", Manifest(
        stage=spec.stage, job_id=spec.job_id, spec_digest=digest_model(spec), code_version=code_version(),
        started_at=NOW.isoformat(), finished_at=NOW.isoformat(), files=(), report=report_of(spec)))
