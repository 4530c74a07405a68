"""The prove stage with SGLang as the serving engine: the gate that a promotion to SGLang passes through, whole."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eyrie_api.artifacts import digest_model, read_manifest, write_model
from eyrie_api.contract.benchmark import BenchmarkSpec, SuiteSpec
from eyrie_api.contract.comparison import ANSWERS_FILE, RecordedAnswers
from eyrie_api.contract.engine import DraftTreeShape, EngineSpec
from eyrie_api.contract.prove import ProveReport, ProveSpec
from eyrie_api.contract.reports import TuneReport
from eyrie_api.contract.stages import Manifest, ProveStage
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.tuning import DrafterUse, Setting
from eyrie_workers.sglang.managed_engine import GREEDY_ONLY
from eyrie_workers.stage_program import run_program
from eyrie_workers.stages.prove import prove
from tests.pipelines.rehearsal.rehearsal_stage import ENVIRONMENT, benchmark_report
from tests.sglang.servers import READY_S, alive, descendants, let_stages_start_it
from tests.sglang.summary import add_to_summary
from tests.waiting import wait_for

CHAIN = DraftTreeShape(num_steps=5, top_k=1, num_draft_tokens=6)


def stage_directory(tmp_path: Path, drafter: Path, concurrencies: tuple[int, ...] = (1,)) -> Path:
    """A prove stage of a finished tune stage; returns the path of its manifest."""
    tuned = TuneReport(checkpoint="c-step-1", path=str(drafter), cells=(), winner=CHAIN, finding="-",
                       final=benchmark_report("c-step-1", 2.0), environment=ENVIRONMENT, seconds=1.0)
    spec = ProveStage(
        job_id="j", checkpoint="c-step-1", candidate="c", target=TargetSpec(model="quickstart", dtype="float32"),
        benchmark=BenchmarkSpec(suites=(SuiteSpec(name="chat", path="quickstart:chat", max_prompts=2),)),
        prove=ProveSpec(concurrencies=concurrencies, requests=4, most_pairs=3, max_new_tokens=24, parity_prompts=4),
        drafter_dir=str(drafter), tune_dir=str(tmp_path / "tune"), engine=EngineSpec(kind="sglang"), max_concurrency=4)
    write_model(tmp_path / "tune" / "manifest.json", Manifest(
        stage="tune", job_id="j", spec_digest=digest_model(spec), code_version="0", report=tuned, files=(),
        started_at="2026-01-01T00:00:00+00:00", finished_at="2026-01-01T00:00:00+00:00"))
    write_model(tmp_path / "prove" / "spec.json", spec)
    return tmp_path / "prove" / "manifest.json"


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers run on this CPU; the machine's measuring lock is not used."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    let_stages_start_it(monkeypatch)


@pytest.mark.usefixtures("sglang")
def test_killed_stage_and_killed_server_leave_no_process_and_lose_no_check(tmp_path: Path, drafter: Path) -> None:
    out = stage_directory(tmp_path, drafter)
    ledger = out.with_name("found.jsonl")
    command = [sys.executable, "-m", "eyrie_workers.stages.prove", "--spec", str(out.with_name("spec.json")), "--out",
               str(out)]

    def checks() -> int:
        return ledger.read_bytes().count(b"\n") - 1 if ledger.exists() else 0

    first = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    wait_for(lambda: checks() >= 1, "a check", READY_S, process=first)
    servers = descendants(first.pid)
    assert len(servers) >= 6, "two servers of three processes"
    first.kill()
    first.wait()
    wait_for(lambda: not alive(servers), "no server outlives its stage", 15)
    kept = ledger.read_bytes().split(b"\n")[:2]

    second = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    events = out.with_name("events.jsonl")
    wait_for(lambda: events.read_text().count('"ServersReady"') == 2, "the servers are ready", READY_S, process=second)
    servers = descendants(second.pid)
    os.kill(min(servers), signal.SIGKILL)
    assert second.wait(2 * READY_S) == 0
    assert not alive(servers)
    assert ledger.read_bytes().split(b"\n")[:2] == kept
    report = read_manifest(out).report
    assert isinstance(report, ProveReport)
    assert report.restarts == 1
    assert '"ServerRestarted"' in events.read_text()
    assert report.parity is not None
    assert report.parity.passed, report.parity.reasons
    assert report.load is not None
    assert all(not one.total.failed for one in report.load.levels)


@pytest.mark.slow
@pytest.mark.usefixtures("sglang")
def test_a_trained_drafter_is_proven_in_sglang_and_its_servers_are_gone_afterwards(
        tmp_path: Path, drafter: Path) -> None:
    out = stage_directory(tmp_path, drafter, (1, 2))
    before = descendants(os.getpid())  # other tests of this run keep theirs
    assert run_program(ProveStage, prove, ["--spec", str(out.with_name("spec.json")), "--out", str(out)]) == 0
    report = read_manifest(out).report
    assert isinstance(report, ProveReport)
    assert (report.engine, report.use) == ("sglang", DrafterUse(drafter_dir=str(drafter), setting=Setting(tree=CHAIN)))
    assert report.parity is not None
    assert report.parity.passed, report.parity.reasons
    assert (report.parity.identical, report.parity.histogram) == (4, report.parity.reference_histogram)
    assert report.load is not None
    assert {(one.variant, one.level) for one in report.load.levels} == {
        (variant, load) for variant in ("off", "candidate") for load in (1.0, 2.0)}
    assert all(one.total.completed >= 4 for one in report.load.levels)
    assert all(one.identical == one.compared >= 4 for one in report.load.comparisons if one.level == 1.0)
    assert next(one.total.tau for one in report.load.levels if one.variant == "candidate") is not None
    assert report.loaded_parity is not None
    assert report.loaded_parity.passed, report.loaded_parity
    assert ("2 at a time, 2 plain, 2 streamed, 1 cut at a stop string, 1 continuing an answer, 2 in a JSON schema"
            in report.loaded_parity.reasons[-1]), "these prompts have no tools to call"
    assert report.sampled_parity is not None
    assert report.sampled_parity.passed is None
    assert GREEDY_ONLY in report.sampled_parity.reasons[0]
    add_to_summary("prove stage, under load", report.loaded_parity)
    assert report.launch[-6:] == ("--speculative-num-steps", "5", "--speculative-eagle-topk", "1",
                                  "--speculative-num-draft-tokens", "6")
    recorded = RecordedAnswers.model_validate_json(out.with_name(ANSWERS_FILE).read_text()).answers
    assert len(recorded) == 1, "of the four prompts this many are one user message, without a system prompt"
    assert all(one.text and one.num_tokens <= 24 for one in recorded)
    assert descendants(os.getpid()) <= before
