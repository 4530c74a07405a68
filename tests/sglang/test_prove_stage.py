"""The prove stage with SGLang as the serving engine: the gate that a promotion to SGLang passes through, whole."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from eyrie_api.artifacts import digest_model, read_manifest, write_model
from eyrie_api.v1alpha1.benchmark import BenchmarkSpec, SuiteSpec
from eyrie_api.v1alpha1.draft_tree import DraftTreeShape
from eyrie_api.v1alpha1.prove import ProveReport, ProveSpec
from eyrie_api.v1alpha1.reports import TuneReport
from eyrie_api.v1alpha1.stages import Manifest, ProveStage
from eyrie_api.v1alpha1.targets import TargetSpec
from eyrie_api.v1alpha1.tuning import DrafterUse, Setting
from eyrie_workers.engines.sglang.process import PROGRAM
from eyrie_workers.stage_program import run_program
from eyrie_workers.stages.prove import prove
from tests.pipelines.rehearsal.rehearsal_stage import ENVIRONMENT, benchmark_report
from tests.sglang.servers import environment, program

CHAIN = DraftTreeShape(num_steps=5, top_k=1, num_draft_tokens=6)


def own_servers() -> set[str]:
    """Process ids of living SGLang servers that this process has started."""
    shown = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "pid=,args="], text=True, capture_output=True,
                           check=False).stdout
    return {line.split()[0] for line in shown.splitlines() if "--model-path" in line}


def test_a_trained_drafter_is_proven_in_sglang_and_its_servers_are_gone_afterwards(
        tmp_path: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the machine's measuring lock is not ours
    monkeypatch.setenv(PROGRAM, shlex.join(program()))
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    tuned = TuneReport(checkpoint="c-step-1", path=str(drafter), cells=(), winner=CHAIN, finding="-",
                       final=benchmark_report("c-step-1", 2.0), environment=ENVIRONMENT, seconds=1.0)
    spec = ProveStage(
        job_id="j", checkpoint="c-step-1", candidate="c", target=TargetSpec(model="quickstart", dtype="float32"),
        benchmark=BenchmarkSpec(suites=(SuiteSpec(name="chat", path="quickstart:chat", max_prompts=2),)),
        prove=ProveSpec(loads=(1,), requests=4, max_new_tokens=24, parity_prompts=4), drafter_dir=str(drafter),
        tune_dir=str(tmp_path / "tune"), engine="sglang", max_concurrency=4)
    write_model(tmp_path / "tune" / "manifest.json", Manifest(
        stage="tune", job_id="j", spec_digest=digest_model(spec), code_version="0", report=tuned, files=(),
        started_at="2026-01-01T00:00:00+00:00", finished_at="2026-01-01T00:00:00+00:00"))
    write_model(tmp_path / "prove" / "spec.json", spec)

    before = own_servers()  # other tests of this run keep theirs
    out = tmp_path / "prove" / "manifest.json"
    assert run_program(ProveStage, prove, ["--spec", str(out.with_name("spec.json")), "--out", str(out)]) == 0
    report = read_manifest(out).report
    assert isinstance(report, ProveReport)
    assert (report.engine, report.use) == ("sglang", DrafterUse(drafter_dir=str(drafter), setting=Setting(tree=CHAIN)))
    assert report.parity is not None
    assert report.parity.passed, report.parity.reasons
    assert (report.parity.identical, report.parity.histogram) == (4, report.parity.reference_histogram)
    assert report.load is not None
    assert {one.variant: one.total.completed for one in report.load.levels} == {"off": 4, "candidate": 4}
    assert all(one.identical == one.compared == 4 for one in report.load.comparisons)
    assert next(one.total.tau for one in report.load.levels if one.variant == "candidate") is not None
    assert report.launch[-6:] == ("--speculative-num-steps", "5", "--speculative-eagle-topk", "1",
                                  "--speculative-num-draft-tokens", "6")
    assert own_servers() == before
