"""The report of a finished job with every figure, and its stages on disk."""

from pathlib import Path

from eyrie_api.contract.load import LoadReport
from eyrie_api.contract.prove import ProveReport
from eyrie_api.contract.reports import TuneReport
from eyrie_api.contract.status import JobReport
from eyrie_api.contract.tuning import DrafterUse
from eyrie_api.decisions.leaderboard import MeasuredCheckpoint, rank
from tests.api.samples import finish_stage
from tests.pipelines.rehearsal.rehearsal_stage import ENVIRONMENT
from tests.pipelines.rehearsal.rehearsal_stage import load_report as rehearsed_load
from tests.workers.plots.synthetic import benchmark_report, tuned_by_prediction

NAMES = ("leaderboard", "throughput", "tau-throughput", "tuning", "operating-map", "needed-tau", "pareto")


def load_report() -> LoadReport:
    """Off and a candidate at four loads; the candidate's advantage shrinks as the load grows."""
    made = rehearsed_load((1, 4, 16, 64), ("off", "candidate"), 1.8)
    gain = {1.0: 2.2, 4.0: 1.8, 16.0: 1.3, 64.0: 0.95}
    levels = []
    for one in made.levels:
        user = 60.0 / (1 + 0.06 * one.level) * (gain[one.level] if one.variant == "candidate" else 1.0)
        total = one.total.model_copy(update={"tokens_per_s_per_user": user, "tokens_per_s": user * one.level})
        levels.append(one.model_copy(update={"total": total}))
    return made.model_copy(update={"levels": tuple(levels)})


def prove_report() -> ProveReport:
    return ProveReport(checkpoint="default-step-300", path="x", engine="embedded", use=DrafterUse(),
                       load=load_report(), environment=ENVIRONMENT, seconds=1.0)


def tune_report() -> TuneReport:
    """Every shape predicted; the map's speed-ups are those of its trials."""
    made = tuned_by_prediction()
    assert made.map is not None
    speedups = {(one.setting, one.concurrency): one.speedup for one in made.trials}
    points = tuple(one.model_copy(update={"speedup": speedups[one.setting, one.concurrency]})
                   for one in made.map.points)
    return made.model_copy(update={"map": made.map.model_copy(update={"points": points})})


def job_report() -> JobReport:
    """Three checkpoints, tuned and proven."""
    benchmark = tuple(benchmark_report(f"default-step-{step}", skill)
                      for step, skill in ((100, 0.7), (200, 0.78), (300, 0.8)))
    return JobReport(
        job_id="job-1", name="nightly", target="t", phase="Succeeded", seconds={}, benchmark=benchmark,
        leaderboard=rank(MeasuredCheckpoint("job-1", "eagle3", "t", False, one) for one in benchmark),
        tune=tune_report(), prove=prove_report())


def finish_job(job_dir: Path, job_id: str) -> None:
    """Write the finished stages of `job_report` into a job's directory."""
    report = job_report()
    assert report.tune is not None
    assert report.prove is not None
    stages = [("benchmark", one.checkpoint, one) for one in report.benchmark]
    for stage, key, one in (*stages, ("tune", "", report.tune), ("prove", "", report.prove)):
        directory = job_dir / "stages" / stage / key
        directory.mkdir(parents=True)
        finish_stage(directory, stage, one, {}, job_id)
