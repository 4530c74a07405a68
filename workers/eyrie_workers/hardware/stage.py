"""The hardware stage: a job's proven drafter, and no drafter, on one kind of hardware (`prove.hardware`).

    python -m eyrie_workers.hardware.stage --spec spec.json --out manifest.json

Each profile of the job is one run of this program, on a cluster in a pod on that hardware. It measures as
`eyrie compare-hardware` does: servers are started one after the other, the one without a drafter before and after the
other. The first profile's run leaves its requests without a drafter (`LOAD_RESULTS_FILE`); the others are compared with
them. `eyrie_api.decisions.hardware_choice` makes the job's report of all of them.

A run that was killed measures again from the beginning.
"""

import sys
import time
from pathlib import Path

from eyrie_api.artifacts import read_report, write_model
from eyrie_api.decisions.hardware_choice import variant_name
from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.hardware import HardwareMeasurement
from eyrie_api.v1alpha1.prove import ProveReport
from eyrie_api.v1alpha1.stages import HardwareStage
from eyrie_workers.catalog import LOAD_RESULTS_FILE
from eyrie_workers.engines.sglang.local_hardware import visible_gpus
from eyrie_workers.hardware.measuring import Proof, measure_in_turn_here
from eyrie_workers.hardware.results_file import read_results, write_results
from eyrie_workers.load.run import LoadTestResults, load_report
from eyrie_workers.measurement.benchmark.session import REPORT, measuring
from eyrie_workers.stage_program import Result, Stage, run_program


def compare(spec: HardwareStage, stage: Stage) -> Result:
    """Measure one profile. Raises InvalidInput where fewer GPUs are visible than it has."""
    profile = spec.profile.served_on(_gpus(spec))
    proven = read_report(Path(spec.proof_dir), ProveReport)
    if proven.skipped:
        stage.event("NothingToCompare", proven.skipped)
        return _finish(stage, HardwareMeasurement(profile=profile, skipped=proven.skipped), [])
    started = time.perf_counter()
    before = [] if spec.baseline_dir is None else read_results(Path(spec.baseline_dir) / LOAD_RESULTS_FILE)
    with measuring(stage):
        model, found = measure_in_turn_here([profile], Proof(spec.proof, proven.use), spec.load, stage)
    baseline, own = variant_name(spec.baseline, "off"), set(found.variants)
    together = LoadTestResults({baseline: "on the first profile"} | found.variants, [*before, *found.levels],
                               found.notes)
    load = load_report(model, together, spec.load, baseline, time.perf_counter() - started)
    load = load.model_copy(update={
        "variants": found.variants, "levels": tuple(one for one in load.levels if one.variant in own),
        "crossover": None})
    for one in load.comparisons:
        stage.event("HardwareMeasured", f"{one.level:g} users: {one.variant} {one.throughput_ratio:.2f}x "
                    f"({one.throughput_interval.low:.2f}-{one.throughput_interval.high:.2f}) the tokens per second of "
                    f"{one.baseline}")
    files = []
    if spec.baseline_dir is None:
        write_results(stage.out_dir / LOAD_RESULTS_FILE, [one for one in found.levels if one.variant == baseline])
        files = [stage.out_dir / LOAD_RESULTS_FILE]
    return _finish(stage, HardwareMeasurement(profile=profile, load=load), files)


def _finish(stage: Stage, report: HardwareMeasurement, files: list[Path]) -> Result:
    write_model(stage.out_dir / REPORT, report)
    return Result(report, [*files, stage.out_dir / REPORT])


def _gpus(spec: HardwareStage) -> tuple[str, ...]:
    """GPUs of the profile's servers: as many as its placement names, else those of one of the job's servers."""
    visible, named = visible_gpus(), spec.profile.placement.num_gpus
    wanted = named if named is not None else min(len(visible), spec.proof.engine.tp_size)
    if len(visible) < wanted:
        raise InvalidInput(f"profile {spec.profile.name!r} has {wanted} GPUs and this process sees {len(visible)}",
                           "lower placement.num_gpus of the profile, or check CUDA_VISIBLE_DEVICES")
    return tuple(visible[:wanted])


if __name__ == "__main__":
    sys.exit(run_program(HardwareStage, compare))
