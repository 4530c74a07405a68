"""Reads a job's directory: reports of finished stages, metric series of running ones."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from eyrie_api.artifacts import MANIFEST, read_manifest
from eyrie_api.errors import NotFound
from eyrie_api.v1alpha1.prove import ProveReport
from eyrie_api.v1alpha1.records import STAGE_RECORD, MetricRecord
from eyrie_api.v1alpha1.reports import BenchmarkReport, TrainReport, TuneReport
from eyrie_workers.catalog import stage_dir

Series = dict[str, list[tuple[int, float]]]


@dataclass
class JobRecord:
    """Reports by stage; a stage that has not finished is missing."""

    train: list[TrainReport] = field(default_factory=list)
    training_series: dict[str, Series] = field(default_factory=dict)
    """By candidate: metric name -> (step, value), in order of step; also of a run in progress."""

    benchmarks: list[BenchmarkReport] = field(default_factory=list)
    tune: TuneReport | None = None
    prove: ProveReport | None = None


def read_job(job_dir: Path) -> JobRecord:
    """Read every manifest and event file under a job's directory. Raises NotFound when there is no such job."""
    if not (job_dir / "stages").is_dir():
        raise NotFound(f"{job_dir} is not a job's directory: it has no `stages` in it",
                       "give the directory that holds `stages/`")
    record = JobRecord()
    for directory in sorted(stage_dir(job_dir, "train").glob("*/")):
        record.training_series[directory.name] = read_series(directory / "events.jsonl")
    for stage in ("train", "benchmark", "tune", "prove"):
        base = job_dir / "stages" / stage
        for path in sorted([*base.glob(MANIFEST), *base.glob(f"*/{MANIFEST}")]):
            report = read_manifest(path).report
            if isinstance(report, TrainReport):
                record.train.append(report)
            elif isinstance(report, BenchmarkReport):
                record.benchmarks.append(report)
            elif isinstance(report, TuneReport):
                record.tune = report
            elif isinstance(report, ProveReport):
                record.prove = report
    return record


def read_series(path: Path) -> Series:
    """Metric series of one events file. A step logged twice, by a resumed run, keeps its last value."""
    points: dict[str, dict[int, float]] = defaultdict(dict)
    if not path.is_file():
        return {}
    for line in path.read_text().split("\n"):
        try:
            record = STAGE_RECORD.validate_json(line)
        except ValidationError:
            continue  # a torn last line of a running stage, or an empty one
        if isinstance(record, MetricRecord):
            points[record.name][record.step] = record.value
    return {name: sorted(by_step.items()) for name, by_step in points.items()}
