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

from pydantic import ConfigDict, TypeAdapter

from eyrie_api.artifacts import read_report, write_atomically
from eyrie_api.contract.hardware import HardwareMeasurement, HardwareProfile
from eyrie_api.contract.prove import ProveReport
from eyrie_api.contract.stages import HardwareStage
from eyrie_api.contract.tuning import DrafterUse
from eyrie_api.decisions.hardware_choice import VARIANTS, variant_name
from eyrie_api.errors import ArtifactCorrupt, InvalidInput
from eyrie_workers.catalog import LOAD_RESULTS_FILE
from eyrie_workers.measure.benchmark.session import measuring, read_suites, reported
from eyrie_workers.measure.load.client import LoadEndpoint
from eyrie_workers.measure.load.report_statistics import LevelResults
from eyrie_workers.measure.load.run import LoadTestResults, load_report, measure_in_turn
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
        return reported(HardwareMeasurement(profile=profile, skipped=proven.skipped), stage)
    started = time.perf_counter()
    before = () if spec.baseline_dir is None else read_results(Path(spec.baseline_dir) / LOAD_RESULTS_FILE)
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
    return reported(HardwareMeasurement(profile=profile, load=load), stage, files)


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
        return LoadEndpoint(name, f"{pool.server(name).url}/v1", plan.model, what=describe_use(uses[name]))

    try:
        return measure_in_turn(list(uses), ready, prompts, spec.load, next(iter(uses)),
                               lambda done, total, label: stage.progress(done, total, "requests", label),
                               stage.pause_point, pool)
    finally:
        pool.stop()


_LEVELS = TypeAdapter(tuple[LevelResults, ...],
                      config=ConfigDict(extra="forbid", ser_json_bytes="base64", val_json_bytes="base64"))


def write_results(path: Path, levels: Iterable[LevelResults]) -> None:
    write_atomically(path, _LEVELS.dump_json(tuple(levels)).decode())


def read_results(path: Path) -> tuple[LevelResults, ...]:
    """Read it. Raises ArtifactCorrupt."""
    try:
        return _LEVELS.validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ArtifactCorrupt(f"{path} cannot be read: {' '.join(str(error).split())[:200]}",
                              "retry the job") from None


if __name__ == "__main__":
    sys.exit(run_program(HardwareStage, compare))
