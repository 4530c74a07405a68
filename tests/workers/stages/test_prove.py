"""The real prove program on a tiny target: servers started together, their arguments, their shutdown."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from eyrie_api.artifacts import digest_model, read_manifest, verify_files, write_model
from eyrie_api.contract.comparison import ANSWERS_FILE, MAX_PROMPT, RecordedAnswers
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.promotion import PromotionPolicy
from eyrie_api.contract.prove import ProveReport, ProveSpec
from eyrie_api.contract.reports import TuneReport
from eyrie_api.contract.stages import Manifest, ProveStage
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.tuning import OFF, DrafterUse, OperatingMap, OperatingPoint, Setting
from eyrie_api.decisions.promotion import decide
from eyrie_workers.catalog import command
from eyrie_workers.data.suites import Prompt
from eyrie_workers.jsonl_ledger import JsonlLedger
from eyrie_workers.measure.parity import Served
from eyrie_workers.sglang.servers import ServerHistory, ServerPlan, ServerPool
from eyrie_workers.stage_program import Interrupted, Stage, run_program
from eyrie_workers.stages.prove import (
    FIXED,
    RIVAL,
    CheckResult,
    Proof,
    prove,
    record_answers,
    select_prompts,
    select_use,
    tuned_rival,
    variants_to_compare,
)
from eyrie_workers.stages.tune import draw_prompts
from eyrie_workers.targets.loading import resolve
from eyrie_workers.targets.templates import ChatTokenizer
from tests.pipelines.rehearsal.rehearsal_stage import ENVIRONMENT, benchmark_report
from tests.waiting import wait_for
from tests.workers.measure.tiny_bench import stage_specs

LIMIT_S = 400.0
"""For what has to happen in the end: a loaded machine starts servers slowly."""

CHAIN = Setting(tree=DraftTreeShape(num_steps=2, top_k=1, num_draft_tokens=3))
DEEP = Setting(tree=DraftTreeShape(num_steps=4, top_k=1, num_draft_tokens=5))
NGRAM = Setting(method="ngram", tree=CHAIN.tree)
SMALL = ProveSpec(concurrencies=(1, 2), requests=4, most_pairs=3, max_new_tokens=8, parity_prompts=2)


@pytest.fixture(autouse=True)
def _own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_speed_is_measured_on_prompts_of_required_suites_and_identity_on_those_of_all(tmp_path: Path) -> None:
    bench, tune = stage_specs(tmp_path)
    sums, talk = bench.benchmark.suites
    only_sums = bench.benchmark.model_copy(update={"suites": (sums, talk.model_copy(update={"required": False}))})
    none = only_sums.model_copy(update={"suites": tuple(
        suite.model_copy(update={"required": False}) for suite in only_sums.suites)})
    suites = {suite.name: [Prompt(str(number), suite.name, ()) for number in range(30)] for suite in (sums, talk)}
    spec = spec_in(tmp_path, tuned(None), benchmark=only_sums)
    assert {prompt.suite for prompt in select_prompts(spec, suites, only_sums.deciding_suites)} == {"sums"}
    assert {prompt.suite for prompt in select_prompts(spec, suites, only_sums.suites)} == {"sums", "talk"}
    drawn = draw_prompts(suites, tune.model_copy(update={"benchmark": only_sums}))
    assert {prompt.suite for prompt in [*drawn.probed, *drawn.raced]} == {"sums"}
    assert {name: bool(final) for name, final in drawn.final.items()} == {"sums": True, "talk": True}
    assert none.deciding_suites == none.suites


def best_at(points: dict[int, Setting]) -> OperatingMap:
    return OperatingMap(finding="found on the map", points=tuple(
        OperatingPoint(concurrency=load, setting=setting, speedup=1.0, tokens_per_s=1.0, measured=True)
        for load, setting in points.items()))


def tuned(chart: OperatingMap | None) -> TuneReport:
    assert CHAIN.tree is not None
    return TuneReport(checkpoint="c-step-1", path="drafter", cells=(), winner=CHAIN.tree, map=chart, finding="-",
                      final=benchmark_report("c-step-1", 2.0), environment=ENVIRONMENT, seconds=1.0)


def spec_in(tmp_path: Path, report: TuneReport, **fields: object) -> ProveStage:
    """A tiny target and drafter, a finished tune stage, and the spec of what follows."""
    benchmark = stage_specs(tmp_path)[0]
    digest = digest_model(benchmark)
    write_model(tmp_path / "tune" / "manifest.json", Manifest(
        stage="tune", job_id="j", spec_digest=digest, code_version="0", started_at="2026-01-01T00:00:00+00:00",
        finished_at="2026-01-01T00:00:00+00:00", files=(), report=report))
    return ProveStage.model_validate({
        "job_id": "j", "checkpoint": "c-step-1", "candidate": "c", "target": benchmark.target, "prove": SMALL,
        "benchmark": benchmark.benchmark, "drafter_dir": benchmark.drafter_dir, "tune_dir": str(tmp_path / "tune"),
        "engine": "embedded", "max_concurrency": 2} | fields)


def prepare(tmp_path: Path, spec: ProveStage) -> Path:
    directory = tmp_path / "stage"
    directory.mkdir()
    (directory / "spec.json").write_text(spec.model_dump_json())
    return directory


def run_here(directory: Path) -> ProveReport:
    arguments = ["--spec", str(directory / "spec.json"), "--out", str(directory / "manifest.json")]
    assert run_program(ProveStage, prove, arguments) == 0
    report = read_manifest(directory).report
    assert isinstance(report, ProveReport)
    return report


def servers_of(directory: Path) -> list[int]:
    """Living processes whose command line names a file in the stage's directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words, stat = (entry / "cmdline").read_text(), (entry / "stat").read_text()
            except OSError:
                continue
            state = stat[stat.rindex(")") + 2]
            if str(directory / "variants") in words and state not in "ZX":
                found.append(int(entry.name))
    return found


@pytest.mark.slow
def test_killed_it_takes_its_servers_along_and_run_again_it_keeps_the_answers_and_reports_every_variant(
        tmp_path: Path) -> None:
    spec = spec_in(tmp_path, tuned(None))
    spec = spec.model_copy(update={"incumbent": DrafterUse(drafter_dir=spec.drafter_dir, setting=DEEP)})
    directory = prepare(tmp_path, spec)
    ledger = directory / "found.jsonl"
    process = subprocess.Popen(command("prove", directory), env=os.environ | {"TMPDIR": str(tmp_path)})
    wait_for(lambda: ledger.exists() and ledger.read_bytes().count(b"\n") >= 2, "an answer", LIMIT_S, process=process)
    assert len(servers_of(directory)) == 3
    process.kill()
    assert process.wait() == -signal.SIGKILL
    wait_for(lambda: not servers_of(directory), "no server outlives its stage")
    kept = ledger.read_bytes().split(b"\n")[:-1]

    report = run_here(directory)
    assert ledger.read_bytes().split(b"\n")[: len(kept)] == kept
    assert [json.loads(line)["question"] for line in ledger.read_text().splitlines()[1:]] == [
        "answers", "load 1", "load 2", "changed system prompt", "parity"]
    assert servers_of(directory) == []
    verify_files(read_manifest(directory), directory)
    recorded = RecordedAnswers.model_validate_json((directory / ANSWERS_FILE).read_text())
    assert ANSWERS_FILE in {one.path for one in read_manifest(directory).files}
    assert len(recorded.answers) == SMALL.parity_prompts

    assert report.use == DrafterUse(drafter_dir=spec.drafter_dir, setting=CHAIN)
    assert report.parity is not None
    assert report.parity.passed
    assert (report.parity.identical, report.parity.prompts, report.parity.tree) == (2, 2, CHAIN.tree)
    assert report.parity.histogram == report.parity.reference_histogram
    assert report.changed_parity is not None
    assert (report.changed_parity.identical, report.changed_parity.reference_tau) == (2, None)
    assert report.loaded_parity is not None
    assert (report.loaded_parity.passed, report.loaded_parity.prompts) == (True, 4)
    assert "1 plain, 1 streamed, 1 cut at a stop string, 1 continuing an answer" in report.loaded_parity.reasons[-1]
    assert report.sampled_parity is not None
    assert (report.sampled_parity.passed, report.sampled_parity.identical) == (True, 2)
    assert report.load is not None
    assert {(one.variant, one.level) for one in report.load.levels} == {
        (variant, load) for variant in ("off", "candidate", "incumbent") for load in (1.0, 2.0)}
    assert all(one.total.completed == one.total.requests for one in report.load.levels)
    assert {(one.variant, one.level) for one in report.load.comparisons} == {
        (variant, load) for variant in ("candidate", "incumbent") for load in (1.0, 2.0)}
    assert all(one.identical == one.compared for one in report.load.comparisons)
    assert report.changed_prompt is not None
    assert report.changed_prompt.spec.system_prompt == SMALL.system_prompt
    assert {one.variant for one in report.changed_prompt.levels} == {"off", "candidate"}
    assert f'"{spec.drafter_dir}"' in " ".join(report.launch)
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    assert {"ServersReady", "Parity", "LoadMeasured", "ChangedPrompt", "Proved"} <= {
        event["reason"] for event in events if event["kind"] == "event"}
    assert any(event["kind"] == "progress" and event["done"] == event["total"] for event in events)
    # An untrained drafter drafts in vain, and the figures say so: hardly more than one token per target pass.
    assert all((one.total.tau or 1.0) < 1.5 for one in report.load.levels if one.variant != "off")


def test_where_off_is_best_at_every_declared_load_no_server_is_started_and_nothing_is_promoted(tmp_path: Path) -> None:
    directory = prepare(tmp_path, spec_in(tmp_path, tuned(best_at({1: OFF, 16: CHAIN}))))
    report = run_here(directory)
    assert "found on the map" in report.skipped
    assert "1, 2 users at once" in report.skipped
    assert report.use.setting == OFF
    assert (report.parity, report.load) == (None, None)
    assert not (directory / "variants").exists()
    decision = decide(PromotionPolicy(), benchmark_report("c-step-1", 2.0), None, ["chat"], report)
    assert decision.verdict == "no-drafter"
    assert "found on the map" in " ".join(decision.reasons)


def test_undrafted_answers_are_recorded_for_prompts_that_a_comparison_can_send() -> None:
    tokenizer = ChatTokenizer(resolve(TargetSpec(model="quickstart")))
    answers = [tuple(tokenizer.encode(text)) for text in ("One two three four five.", "It is so.")]
    cut, ended = answers[0], (*answers[1], tokenizer.eos_ids[0])
    ids = [cut, ended[:len(cut)], cut, cut, cut, cut]
    user = {"role": "user", "content": "Why?"}
    prompts = [Prompt("0", "s", (user,)), Prompt("1", "s", ({"role": "user", "content": "How?"},)),
               Prompt("2", "s", ({"role": "system", "content": "Be brief."}, user)),
               Prompt("3", "s", (user,), tools=({"type": "function"},)), Prompt("4", "s", (user,)),
               Prompt("5", "s", ({"role": "user", "content": "w" * (MAX_PROMPT + 1)},)),
               Prompt("6", "s", ({"role": "user", "content": "Not asked for parity."},))]
    found = record_answers(prompts, [Served(token_ids=one, histogram=()) for one in ids], tokenizer, len(cut))
    assert [(one.prompt, one.text, one.is_cut) for one in found.answers] == [
        ("Why?", "One two three four five.", True), ("How?", "It is so.", False)]
    assert [one.num_tokens for one in found.answers] == [len(cut), len(ended[:len(cut)])]


def test_a_map_that_the_engine_can_follow_is_proven_with_its_lowest_drafting_setting(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, tuned(None), prove=ProveSpec(concurrencies=(2, 8)))
    plan = ServerPlan("embedded", spec.target, 2)
    chart = best_at({1: DEEP, 2: CHAIN, 8: OFF})
    use = select_use(spec, tuned(chart), plan)
    assert use == DrafterUse(drafter_dir=spec.drafter_dir, setting=CHAIN, map=chart)
    # A single user would be served with another setting, so parity needs a server that is held to this one.
    assert variants_to_compare(spec, use, Stage(tmp_path))[FIXED].setting == CHAIN
    same = select_use(spec, tuned(best_at({1: CHAIN, 8: OFF})), plan)
    assert FIXED not in variants_to_compare(spec, same, Stage(tmp_path))


def test_a_map_that_changes_drafters_cannot_be_followed_and_one_setting_is_proven(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, tuned(None))
    plan = ServerPlan("embedded", spec.target, 2)
    assert select_use(spec, tuned(best_at({1: NGRAM, 2: CHAIN})), plan) == DrafterUse(setting=NGRAM)
    assert select_use(spec, tuned(best_at({1: CHAIN, 2: NGRAM})), plan) == DrafterUse(
        drafter_dir=spec.drafter_dir, setting=CHAIN)


def test_the_tuned_rival_is_a_variant_in_its_own_best_setting_unless_that_is_off(tmp_path: Path) -> None:
    rival = str(tmp_path / "rival")
    spec = spec_in(tmp_path, tuned(None), rival_dir=rival)
    plan, ours = ServerPlan("embedded", spec.target, 2), DrafterUse(drafter_dir=spec.drafter_dir, setting=CHAIN)
    both = tuned(None).model_copy(update={"rival": tuned(best_at({1: DEEP}))})
    uses = variants_to_compare(spec, ours, Stage(tmp_path), tuned_rival(spec, both, plan))
    assert list(uses) == ["off", "candidate", "rival"]
    assert (uses["rival"].drafter_dir, uses["rival"].setting) == (rival, DEEP)
    assert tuned_rival(spec, both.model_copy(update={"rival": tuned(best_at({1: OFF}))}), plan) is None
    assert tuned_rival(spec, tuned(None), plan) is None


def test_an_incumbent_whose_drafter_is_gone_is_left_out_and_reported(tmp_path: Path) -> None:
    gone = DrafterUse(drafter_dir=str(tmp_path / "deleted"), setting=CHAIN)
    spec = spec_in(tmp_path, tuned(None), incumbent=gone)
    uses = variants_to_compare(spec, DrafterUse(drafter_dir=spec.drafter_dir, setting=CHAIN), Stage(tmp_path))
    assert list(uses) == ["off", "candidate"]
    assert "IncumbentGone" in (tmp_path / "events.jsonl").read_text()


def test_asked_to_stop_while_servers_come_up_none_is_left(tmp_path: Path) -> None:
    stage = Stage(tmp_path, quiet=True)
    stage.stop_requested = True
    plan = ServerPlan("embedded", stage_specs(tmp_path)[0].target, 2)
    with pytest.raises(Interrupted):
        ServerPool(plan, {"off": DrafterUse()}, tmp_path / "variants", stage, capacity=1).make_ready(["off"])
    assert servers_of(tmp_path) == []


@pytest.mark.slow
def test_a_server_that_ends_is_started_again_when_it_is_flushed_and_a_rival_that_cannot_start_is_left_out(
        tmp_path: Path) -> None:
    spec, stage = spec_in(tmp_path, tuned(None)), Stage(tmp_path, quiet=True)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "config.json").write_text((Path(spec.drafter_dir) / "config.json").read_text())
    uses = {"off": DrafterUse(), RIVAL: DrafterUse(drafter_dir=str(damaged), setting=CHAIN)}
    history = ServerHistory(tmp_path, "d")
    pool = ServerPool(ServerPlan("embedded", spec.target, 2), uses, tmp_path / "variants", stage, history, capacity=1)
    proof = Proof(spec, stage, pool.plan, uses, [], [], JsonlLedger(tmp_path / "found.jsonl", CheckResult, "d"),
                  history, pool=pool)
    try:
        before = pool.flushed("off")
        assert pool.flushed("off") == before
        assert not pool.has_ended("off")
        [server] = servers_of(tmp_path)
        os.kill(server, signal.SIGKILL)
        wait_for(lambda: pool.server("off").process.poll() is not None, "it has ended")
        assert pool.flushed("off") != before
        [server] = servers_of(tmp_path)
        os.kill(server, signal.SIGKILL)
        assert pool.has_ended("off")
        assert (pool.resident, history.restarts) == ((), 2)
        assert proof.endpoint(RIVAL) is None
        assert list(proof.uses) == ["off"]
        assert "RivalFailed" in (tmp_path / "events.jsonl").read_text()
    finally:
        pool.stop()
