"""The load test of all profiles: servers that run already, and servers that are started here, one at a time.

Every server gets the same prompts, and the baseline (off on the first profile) is measured before and after the others.
Where all servers run already, their blocks are interleaved instead.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eyrie_api.artifacts import read_manifest
from eyrie_api.decisions.hardware_choice import VARIANTS, variant_name
from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.hardware import HardwareProfile
from eyrie_api.v1alpha1.load import LoadReport, LoadSpec
from eyrie_api.v1alpha1.prove import ProveReport
from eyrie_api.v1alpha1.stages import ProveStage
from eyrie_api.v1alpha1.tuning import DrafterUse
from eyrie_workers.conversations.suites import Prompt
from eyrie_workers.engines.sglang.servers import ServerPlan, ServerPool
from eyrie_workers.load.client import LoadEndpoint
from eyrie_workers.load.run import LoadTestResults, load_report, measure_in_turn, run_load
from eyrie_workers.measurement.benchmark.session import read_suites
from eyrie_workers.stage_program import Stage
from eyrie_workers.stages.prove import describe_use, select_prompts

Names = Mapping[str, tuple[HardwareProfile, DrafterUse]]
"""Profile and setting of each variant of the load test."""


@dataclass(frozen=True)
class Proof:
    """What a job's prove stage left: its input, and the drafter with the setting that it proved."""

    spec: ProveStage
    use: DrafterUse

    @classmethod
    def read(cls, directory: Path) -> "Proof":
        """Raises InvalidInput for a directory without a finished proof of a drafter, ArtifactMissing without any."""
        report = read_manifest(directory).report
        spec_file = directory / "spec.json"
        if not isinstance(report, ProveReport) or not spec_file.exists():
            raise InvalidInput(f"--proof {directory} is not the directory of a prove stage",
                               "name <home>/jobs/<job>/stages/prove")
        if report.skipped:
            raise InvalidInput(f"--proof {directory}: the job proved nothing: {report.skipped}",
                               "compare hardware for a job that has a drafter to serve")
        return cls(ProveStage.model_validate_json(spec_file.read_text()), report.use)


def measure(profiles: Sequence[HardwareProfile], proof: Proof, load: LoadSpec, stage: Stage) -> LoadReport:
    """The load test. Variants are named by `variant_name`; off on the first profile is the baseline."""
    if all(one.off_url for one in profiles):
        prompts, uses = _prompts(proof, stage), _uses(profiles, proof)
        endpoints = [_running(name, uses, proof) for name in uses]
        return run_load(endpoints, prompts, load, next(iter(uses)), _progress(stage), stage.pause_point)
    started = time.perf_counter()
    model, results = measure_in_turn_here(profiles, proof, load, stage)
    return load_report(model, results, load, variant_name(profiles[0].name, "off"), time.perf_counter() - started)


def measure_in_turn_here(profiles: Sequence[HardwareProfile], proof: Proof, load: LoadSpec,
                         stage: Stage) -> tuple[str, LoadTestResults]:
    """The requests of the load test, with servers started here one after the other; and the model's name."""
    uses = _uses(profiles, proof)
    servers = _Servers(uses, proof, max(load.concurrencies), stage)
    try:
        return measure_in_turn(list(uses), servers.ready, _prompts(proof, stage), load, next(iter(uses)),
                               _progress(stage), stage.pause_point)
    finally:
        servers.stop()


def _prompts(proof: Proof, stage: Stage) -> list[Prompt]:
    return select_prompts(proof.spec, read_suites(proof.spec, stage))


def _uses(profiles: Sequence[HardwareProfile], proof: Proof) -> dict[str, tuple[HardwareProfile, DrafterUse]]:
    return {variant_name(one.name, variant): (one, DrafterUse() if variant == "off" else proof.use)
            for one in profiles for variant in VARIANTS}


def _progress(stage: Stage) -> Callable[[int, int, str], None]:
    return lambda done, total, label: stage.progress(done, total, "requests", label)


def _running(name: str, uses: Names, proof: Proof) -> LoadEndpoint:
    profile, use = uses[name]
    url = profile.off_url if use == DrafterUse() else profile.drafted_url
    assert url is not None
    return LoadEndpoint(name, url, Path(proof.spec.target.model).name, what=describe_use(use))


class _Servers:
    """The servers of the profiles, at most one of them started here at a time."""

    def __init__(self, uses: Names, proof: Proof, max_concurrency: int, stage: Stage) -> None:
        self._uses, self._proof, self._stage = uses, proof, stage
        self._max_concurrency = max_concurrency
        self._pool: ServerPool | None = None

    def ready(self, name: str) -> LoadEndpoint:
        """The endpoint of a variant, whose server may replace the one before."""
        self.stop()
        profile, use = self._uses[name]
        if profile.off_url is not None:
            return _running(name, self._uses, self._proof)
        engine, target = self._proof.spec.engine, self._proof.spec.target
        plan = ServerPlan(engine.kind, target, self._max_concurrency, profile.threads,
                          tp_size=max(1, len(profile.gpus)), gpu_groups=(profile.gpus,) if profile.gpus else ())
        variants = {variant: given for variant, (one, given) in self._uses.items() if one == profile}
        self._stage.event("ServerStarted", f"{name}: {describe_use(use)}")
        self._pool = ServerPool(plan, variants, self._stage.out_dir / "servers", self._stage, capacity=1,
                                beside_reference=False)
        return LoadEndpoint(name, self._pool.server(name).url, plan.model, what=describe_use(use))

    def stop(self) -> None:
        """Stop the one that was started."""
        if self._pool is not None:
            self._pool.stop()
