"""A finished job's directory with plausible invented figures: for testing plots."""


from eyrie_api.artifacts import digest_bytes
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.model import Interval
from eyrie_api.contract.reports import (
    BenchmarkReport,
    CellReport,
    CheckpointReport,
    Environment,
    TrainReport,
    TuneCell,
    TuneReport,
    VocabularyReport,
)
from eyrie_api.contract.tuning import OFF, NeededTau, OperatingPoint, Setting, Trial, TuneSpec
from eyrie_api.planning.needed_tau import needed_tau
from eyrie_workers.measure.tuner.operating import compile_map, possible_settings

DIGEST = digest_bytes(b"synthetic")
WHEN = "2026-01-01T00:00:00+00:00"
ENVIRONMENT = Environment(hardware="invented processor", cpu_count=2, threads=2, torch="2.13.0", python="3.11",
                          dtype="float32", code_version="0", date=WHEN)
CHAIN = DraftTreeShape()
SUITES = {"chat": 0.85, "math": 1.1, "code": 1.15, "tools": 1.0}


def tau_of(shape: DraftTreeShape, acceptance: float) -> float:
    """Expected emitted tokens when every position accepts with the same probability; trees get a little more."""
    p = min(0.97, acceptance + 0.03 * (shape.top_k > 1))
    return float(sum(p**k for k in range(shape.num_steps + 1)))


def speed_of(shape: DraftTreeShape, acceptance: float) -> float:
    """Speed-up when a draft step costs 8 % of a target pass and a verified token 2 %."""
    return tau_of(shape, acceptance) / (1 + 0.08 * shape.num_steps + 0.02 * shape.num_draft_tokens)


def cell(suite: str, temperature: float, shape: DraftTreeShape, skill: float) -> CellReport:
    acceptance = min(0.95, skill * SUITES[suite] * (0.9 if temperature else 1.0))
    speed = speed_of(shape, acceptance)
    return CellReport(
        suite=suite, temperature=temperature, tree=shape, prompts=8, tokens=700, tau=tau_of(shape, acceptance),
        acceptance=tuple(acceptance - 0.01 * k for k in range(shape.num_steps)),
        accepted_histogram=(10,) * (shape.num_steps + 1), tokens_per_s=65 * speed, baseline_tokens_per_s=65.0,
        speedup=speed, speedup_interval=Interval(low=speed * 0.9, high=speed * 1.1), ttft_s=0.05,
        baseline_ttft_s=0.04, identical=8)


def benchmark_report(checkpoint: str, skill: float, shape: DraftTreeShape = CHAIN) -> BenchmarkReport:
    cells = tuple(cell(suite, t, shape, skill) for suite in SUITES for t in (0.0, 1.0))
    return BenchmarkReport(
        checkpoint=checkpoint, candidate="default", path="checkpoints/x", cells=cells, lossless=True,
        speedup=sum(c.speedup for c in cells) / len(cells), baseline_tokens_per_s=65.0, environment=ENVIRONMENT,
        seconds=20.0)


def tune_report() -> TuneReport:
    cells = []
    for shape in TuneSpec().shapes:
        speeds = {str(t): speed_of(shape, a) for t, a in ((0.0, 0.88), (1.0, 0.75))}
        mean = sum(speeds.values()) / 2
        cells.append(TuneCell(
            tree=shape, tau=tau_of(shape, 0.82), tau_by_temperature=dict.fromkeys(speeds, tau_of(shape, 0.82)),
            tokens_per_s=65 * mean, speedup=mean, speedup_by_temperature=speeds,
            speedup_interval=Interval(low=mean * 0.9, high=mean * 1.1), identical=4, prompts=4 + 4 * (mean > 1.9)))
    winner = max(cells, key=lambda c: c.speedup)
    return TuneReport(checkpoint="default-step-300", path="x", cells=tuple(cells), winner=winner.tree, finding="-",
                      final=benchmark_report("default-step-300", 0.8, winner.tree), environment=ENVIRONMENT,
                      seconds=50.0)


def tuned_by_prediction() -> TuneReport:
    """Every shape predicted at two loads, the best chain and off measured, off best at the higher load."""
    winner = Setting(tree=CHAIN)
    trials = [
        Trial(setting=setting, concurrency=load, predicted_tokens_per_s=65 * speed, predicted_speedup=speed,
              predicted_tau=2.0, **({"speedup": speed, "tau": 2.0, "blocks": 4,
                                     "speedup_interval": Interval(low=0.9 * speed, high=1.1 * speed)}
                                    if setting in (OFF, winner) else {}))
        for load, share in ((1, 1.0), (8, 0.4)) for setting in possible_settings(TuneSpec())
        for speed in (1.0 if setting == OFF else share * (speed_of(setting.tree, 0.8) if setting.tree else 1.0),)]
    points = [OperatingPoint(concurrency=load, setting=best, speedup=1.5, tokens_per_s=90.0, measured=True)
              for load, best in ((1, winner), (8, OFF))]
    return tune_report().model_copy(update={
        "winner": CHAIN, "trials": tuple(trials), "map": compile_map(points, trials, 20.0),
        # By the rounds of `speed_of`, longer with more users.
        "needed_tau": tuple(NeededTau(users=load, num_steps=depth,
                                      tau=needed_tau(depth, share * (1.02 + 0.1 * depth), 1 / 1.05))
                            for load, share in ((1, 1.0), (4, 2.0), (8, 4.0)) for depth in range(1, 8))})


def train_report(steps: tuple[int, ...] = (100, 200, 300)) -> TrainReport:
    def at(step: int, k: int) -> float:
        return (0.9 - 0.01 * k) * (1 - 0.7 ** (step / 60))

    return TrainReport(
        candidate="default", steps=steps[-1], tokens=400_000, supervised_tokens=160_000, seconds=90.0,
        tokens_per_s=4000.0, padding_share=0.01, data_wait_share=0.0, parameters=1_000_000,
        vocabulary=VocabularyReport(draft_vocab_size=1024, vocab_size=2048, coverage=0.999, coverage_curve={512: 0.9}),
        checkpoints=tuple(CheckpointReport(
            name=f"default-step-{step}", candidate="default", step=step, path=f"checkpoints/default-step-{step}",
            digest=DIGEST, epoch=step / 75, loss=1.0, accuracy=tuple(at(step, k) for k in range(7)),
            conditional_acceptance=tuple(at(step, k) + 0.02 for k in range(7)), theoretical_speedup=4.0)
            for step in steps))
