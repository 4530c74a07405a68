"""The hardware stage: a job's proven drafter, and no drafter, on one kind of hardware (`prove.hardware`).

    python -m eyrie_workers.stages.hardware --spec spec.json --out manifest.json

Each profile of the job is one run of this program, on a cluster in a pod on that hardware. Servers are started one
after the other, and all get the same prompts; the one without a drafter is measured before and after the other. A ratio
of two profiles has its interval by bootstrap over prompts of both sides' requests, so the first profile's run leaves
its requests without a drafter (`LOAD_RESULTS_FILE`), and the others are compared with them.
`eyrie_api.decisions.hardware_choice` makes the job's report of all of them.

A run that was killed measures again from the beginning.
"""

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np

from eyrie_api.artifacts import read_report, write_atomically, write_model
from eyrie_api.contract.hardware import HardwareMeasurement, HardwareProfile
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.prove import ProveReport
from eyrie_api.contract.stages import HardwareStage
from eyrie_api.contract.tuning import DrafterUse
from eyrie_api.decisions.hardware_choice import VARIANTS, variant_name
from eyrie_api.errors import ArtifactCorrupt, InvalidInput
from eyrie_workers.catalog import LOAD_RESULTS_FILE
from eyrie_workers.measure.benchmark.session import REPORT, measuring, read_suites
from eyrie_workers.measure.load.client import LoadEndpoint, RequestResult
from eyrie_workers.measure.load.report_statistics import LevelResults
from eyrie_workers.measure.load.run import LoadTestResults, load_report, measure_in_turn
from eyrie_workers.measure.load.schedule import RequestLevel
from eyrie_workers.sglang.local_hardware import visible_gpus
from eyrie_workers.sglang.servers import ServerPlan, ServerPool
from eyrie_workers.stage_program import Result, Stage, run_program
from eyrie_workers.stages.prove import describe_use, select_prompts


def compare(spec: HardwareStage, stage: Stage) -> Result:
    """Measure one profile. Raises InvalidInput where fewer GPUs are visible than it has."""
    visible, named = visible_gpus(), spec.profile.placement.num_gpus
    # As many GPUs as the placement names, else those of one of the job's servers.
    wanted = named if named is not None else min(len(visible), spec.proof.engine.tp_size)
    if len(visible) < wanted:
        raise InvalidInput(f"profile {spec.profile.name!r} has {wanted} GPUs and this process sees {len(visible)}",
                           "lower placement.num_gpus of the profile, or check CUDA_VISIBLE_DEVICES")
    profile = spec.profile.served_on(tuple(visible[:wanted]))
    proven = read_report(Path(spec.proof_dir), ProveReport)
    if proven.skipped:
        stage.event("NothingToCompare", proven.skipped)
        return _finish(stage, HardwareMeasurement(profile=profile, skipped=proven.skipped), [])
    started = time.perf_counter()
    before = [] if spec.baseline_dir is None else read_results(Path(spec.baseline_dir) / LOAD_RESULTS_FILE)
    with measuring(stage):
        model, measured = _measure(profile, spec, proven.use, stage)
    baseline, own = variant_name(spec.baseline, "off"), set(measured.variants)
    together = LoadTestResults({baseline: "on the first profile"} | measured.variants, [*before, *measured.levels],
                               measured.notes)
    load = load_report(model, together, spec.load, baseline, time.perf_counter() - started)
    load = load.model_copy(update={
        "variants": measured.variants, "levels": tuple(level for level in load.levels if level.variant in own),
        "crossover": None})
    for ratio in load.comparisons:
        stage.event("HardwareMeasured", f"{ratio.level:g} users: {ratio.variant} {ratio.throughput_ratio:.2f}x "
                    f"({ratio.throughput_interval.low:.2f}-{ratio.throughput_interval.high:.2f}) the tokens per second "
                    f"of {ratio.baseline}")
    files = []
    if spec.baseline_dir is None:
        write_results(stage.out_dir / LOAD_RESULTS_FILE,
                      [level for level in measured.levels if level.variant == baseline])
        files = [stage.out_dir / LOAD_RESULTS_FILE]
    return _finish(stage, HardwareMeasurement(profile=profile, load=load), files)


def _finish(stage: Stage, report: HardwareMeasurement, files: list[Path]) -> Result:
    write_model(stage.out_dir / REPORT, report)
    return Result(report, [*files, stage.out_dir / REPORT])


def _measure(profile: HardwareProfile, spec: HardwareStage, use: DrafterUse,
             stage: Stage) -> tuple[str, LoadTestResults]:
    """The requests of the load test, with at most one server running at a time; and the model's name."""
    engine, target = spec.proof.engine, spec.proof.target
    uses = {variant_name(profile.name, variant): DrafterUse() if variant == "off" else use for variant in VARIANTS}
    plan = ServerPlan(engine.kind, target, max(spec.load.concurrencies), profile.threads,
                      engine=engine.model_copy(update={"tp_size": max(1, len(profile.gpus))}),
                      gpu_groups=(profile.gpus,) if profile.gpus else ())
    prompts = select_prompts(spec.proof, read_suites(spec.proof, stage), spec.proof.benchmark.deciding_suites)
    # One server at a time: two would share the GPUs.
    pool = ServerPool(plan, uses, stage.out_dir / "servers", stage, capacity=1, beside_reference=False)

    def ready(name: str) -> LoadEndpoint:
        stage.event("ServerStarted", f"{name}: {describe_use(uses[name])}")
        return LoadEndpoint(name, pool.server(name).url, plan.model, what=describe_use(uses[name]))

    try:
        return measure_in_turn(list(uses), ready, prompts, spec.load, next(iter(uses)),
                               lambda done, total, label: stage.progress(done, total, "requests", label),
                               stage.pause_point, pool)
    finally:
        pool.stop()


class StoredResult(Frozen):
    """What the statistics read of a request; times in seconds."""

    category: str
    prompt_id: str
    repeat: int
    index: int
    failure: str | None = None
    tokens: int = 0
    ttft_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    end_to_end_s: float = 0.0
    histogram: tuple[int, ...] | None = None
    proposed: bool = False
    digest: str = ""
    """Hexadecimal, of the answer's text."""

    ids_digest: str | None = None

    @classmethod
    def of(cls, measured: RequestResult) -> "StoredResult":
        return cls.model_validate({name: getattr(measured, name) for name in cls.model_fields} | {
            "gaps_s": tuple(measured.gaps_s.tolist()), "digest": measured.digest.hex(),
            "ids_digest": None if measured.ids_digest is None else measured.ids_digest.hex()})

    def result(self) -> RequestResult:
        return RequestResult(**self.model_dump() | {
            "gaps_s": np.array(self.gaps_s), "digest": bytes.fromhex(self.digest),
            "ids_digest": None if self.ids_digest is None else bytes.fromhex(self.ids_digest)})


class StoredLevel(Frozen):
    """One variant at one level: a line of the file."""

    variant: str
    mode: Literal["closed", "open"]
    value: float
    seconds: float
    cpu_s: float
    results: tuple[StoredResult, ...]


def write_results(path: Path, levels: Iterable[LevelResults]) -> None:
    stored = (StoredLevel(variant=of.variant, mode=of.level.mode, value=of.level.value, seconds=of.seconds,
                          cpu_s=of.cpu_s, results=tuple(map(StoredResult.of, of.results))) for of in levels)
    write_atomically(path, "".join(line.model_dump_json() + "\n" for line in stored))


def read_results(path: Path) -> list[LevelResults]:
    """Read it. Raises ArtifactCorrupt."""
    try:
        stored = [StoredLevel.model_validate_json(line) for line in path.read_text().splitlines()]
        return [LevelResults(of.variant, RequestLevel(of.mode, of.value), tuple(each.result() for each in of.results),
                             of.seconds, of.cpu_s) for of in stored]
    except (OSError, ValueError) as error:
        raise ArtifactCorrupt(f"{path} cannot be read: {' '.join(str(error).split())[:200]}",
                              "retry the job") from None


if __name__ == "__main__":
    sys.exit(run_program(HardwareStage, compare))
