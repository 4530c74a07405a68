"""The shared workspace, with the shipped target and very little data."""

import json
from pathlib import Path

from benchmarks.experiments import on_policy
from benchmarks.experiments.program import README, command_line, run_experiment
from benchmarks.experiments.report import ExperimentReport
from benchmarks.experiments.workspace import Scale, Workspace
from benchmarks.published.demo import local_job
from eyrie_workers.data.rows import ROWS, read_rows
from tests.house.sources import ROOT

SMALL = Scale(conversations=6, steps=2, seeds=1, prompts=1, tokens=6, seconds=1.0)


def test_an_experiment_runs_shares_its_artifacts_and_writes_its_report(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "work", SMALL)
    rows = workspace.rows()
    few = workspace.rows(2)
    whole = (rows / ROWS).read_bytes().splitlines()
    assert (few / ROWS).read_bytes().splitlines() == whole[:2]

    foreign = list(read_rows(on_policy.off_policy_rows(workspace, rows) / ROWS))
    own = list(read_rows(rows / ROWS))
    assert [row.prompt_ids for row in foreign] == [row.prompt_ids for row in own]
    assert all(row.answer_ids[-1] in workspace.tokenizer.eos_ids for row in foreign)
    assert [row.answer_ids for row in foreign] != [row.answer_ids for row in own]

    options = command_line("").parse_args(["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")])
    run_experiment(on_policy.NAME, on_policy.CLAIM, lambda _: on_policy.measure(workspace), options)
    report = ExperimentReport.model_validate(json.loads((tmp_path / "out" / "on_policy.json").read_text()))
    assert len(report.table) == 2
    assert report.found[0] in (tmp_path / "out" / README).read_text()

    artifacts = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("*.safetensors")}
    again = on_policy.measure(Workspace(tmp_path / "work", SMALL))
    assert tuple(again.found) == report.found
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("*.safetensors")} == artifacts


def test_an_experiment_on_the_published_job_answers_its_prompts_and_counts_on_its_suites(tmp_path: Path) -> None:
    job = local_job(ROOT / "workers/eyrie_workers/quickstart/target")
    workspace = Workspace(tmp_path / "work", SMALL, job)
    sources = {row.source_name for row in read_rows(workspace.rows() / ROWS)}
    assert sources
    assert sources <= {"mathematics", "code", "role-play"}
    counted = workspace.decode(workspace.train(workspace.store(workspace.rows())).last)
    assert [of.suite for of in counted] == ["gsm8k", "humaneval", "mt-bench"]
