"""What a job says about SGLang's servers reaches every stage's, with `echo` in SGLang's place: its log is the line."""

from pathlib import Path

import pytest

from eyrie_api.contract.capture import CaptureSpec
from eyrie_api.contract.data import DataSource, DataSpec
from eyrie_api.contract.engine import SGLANG_PROGRAM, EngineSpec
from eyrie_api.contract.regeneration import RegenerateSpec
from eyrie_api.contract.stages import (
    BenchmarkStage,
    CaptureStage,
    HardwareStage,
    ProveStage,
    RegenerateStage,
    TuneStage,
)
from eyrie_workers.stage_program import run_program
from eyrie_workers.stages.benchmark import benchmark
from eyrie_workers.stages.capture import capture
from eyrie_workers.stages.hardware import compare
from eyrie_workers.stages.prove import prove
from eyrie_workers.stages.regenerate import regenerate
from eyrie_workers.stages.tune import tune
from tests.tiny import chats_file
from tests.workers.measure.tiny_bench import stage_specs
from tests.workers.stages.test_capture import write_rows
from tests.workers.stages.test_hardware import LOAD, PROFILES, proof_in
from tests.workers.stages.test_prove import CHAIN, best_at, spec_in, tuned

ENGINE = EngineSpec.model_validate({"kind": "sglang", "attention_backend": "intel_amx", "sglang_arguments": {
    "chunked_prefill_size": 128, "disable_prefill_cuda_graph": True, "mem_fraction_static": 0.25}})
PROGRAMS = {RegenerateStage: regenerate, CaptureStage: capture, BenchmarkStage: benchmark, TuneStage: tune,
            ProveStage: prove, HardwareStage: compare}
Spec = RegenerateStage | CaptureStage | BenchmarkStage | TuneStage | ProveStage | HardwareStage


def spec_of(kind: type[Spec], path: Path) -> Spec:
    if kind is HardwareStage:
        proof = proof_in(path)
        proven = ProveStage.model_validate_json((proof / "spec.json").read_text())
        return HardwareStage(job_id="j", candidate="c", profile=PROFILES.profiles[0], baseline="one-thread", load=LOAD,
                             proof_dir=str(proof), proof=proven.model_copy(update={"engine": ENGINE}))
    if kind is ProveStage:
        return spec_in(path, tuned(best_at({1: CHAIN, 2: CHAIN})), engine=ENGINE)
    measured = stage_specs(path)
    if kind in (BenchmarkStage, TuneStage):
        spec = measured[kind is TuneStage]
        greedy = {"temperatures": (0.0,)}
        changes = {"engine": ENGINE, "benchmark": spec.benchmark.model_copy(update=greedy)}
        if isinstance(spec, TuneStage):
            changes["tune"] = spec.tune.model_copy(update=greedy)
        return spec.model_copy(update=changes)
    target = measured[0].target
    if kind is CaptureStage:
        write_rows(path / "rows", Path(target.model), 4)
        return CaptureStage(job_id="j", target=target, rows_dir=str(path / "rows"), engine=ENGINE,
                            capture=CaptureSpec(source="sglang", check_rows=0))
    return RegenerateStage(job_id="j", target=target, engine=ENGINE, regenerate=RegenerateSpec(), data=DataSpec(
        sources=(DataSource(path=str(chats_file(path / "chats.jsonl"))),), held_out_fraction=0.0))


@pytest.mark.parametrize("kind", PROGRAMS)
def test_the_servers_of_every_stage_are_started_with_the_jobs_arguments(
        kind: type[Spec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv(SGLANG_PROGRAM, "echo")
    out = tmp_path / "out"
    out.mkdir()
    (out / "spec.json").write_text(spec_of(kind, tmp_path).model_dump_json())
    assert run_program(kind, PROGRAMS[kind], ["--spec", str(out / "spec.json"), "--out", str(out / "manifest.json")])
    lines = [log.read_text() for log in out.rglob("sglang.log")]
    assert lines
    for line in lines:
        assert "--attention-backend intel_amx" in line
        assert "--chunked-prefill-size 128" in line
        assert "--disable-prefill-cuda-graph" in line
        assert "--mem-fraction-static 0.25" in line
