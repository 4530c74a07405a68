"""The examples for a model and data of one's own run to their decisions on one machine, with smaller sizes.

`example-sizes.yaml` is laid over each, and `FEWER` over some. The target is random and tiny, so what a job decides of
its drafters is not prescribed. `smallest.yaml` runs as it is (test_documentation); the others need GPUs or a cluster.
Those of a test run in one home, one after the other, so that later ones may take the answers of earlier ones.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eyrie_api import yaml_text
from eyrie_api.client import Client
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.status import JobReport
from tests.cluster.seed_job import laid_over
from tests.house.sources import ROOT
from tests.tiny import tiny_target
from tests.walkthrough.test_one_machine import finished, plane

LIMIT_S = 900.0
"""Of one job; a bound against hanging."""

FEWER: dict[str, dict[str, Any]] = {
    "sweep": {"sweep": {"families": ["eagle3"], "rungs": [0.5],
                        "axes": [{"field": "train.learning_rate", "values": [1.0e-4, 4.0e-4]}]}}}
"""Two candidates in place of eight; the families are those of another example."""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with what the examples name: a target, conversations in three formats, a published head."""
    from eyrie_workers.drafters.export import to_speculators
    from tests.workers.measure.tiny_bench import random_drafter

    rows = [{"messages": [{"role": "user", "content": f"What is {number} plus {2 * number}?"}]} for number in range(60)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "chats.jsonl").write_text(lines)
    (tmp_path / "code.jsonl.gz").write_bytes(gzip.compress(lines.replace("What is", "Write code for").encode()))
    pq.write_table(pa.Table.from_pylist([{"messages": [{"role": "user", "content": f"Name {number} towns."}]}
                                         for number in range(60)]), tmp_path / "tool-calls.parquet")
    target = tiny_target(tmp_path / "my-model", num_layers=8)
    head = random_drafter(tmp_path / "head", target, layers=(2, 4, 5))
    to_speculators(head, tmp_path / "published-eagle3-head", target="org/my-model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(client: Client, name: str) -> JobReport:
    """Run an example with the overlay to its end; its report."""
    document = yaml_text.load((ROOT / f"docs/examples/{name}.yaml").read_text())
    for over in (yaml_text.load(Path(__file__).with_name("example-sizes.yaml").read_text()), FEWER.get(name, {})):
        document = laid_over(document, over)
    job = finished(client, client.create_job(JobSpec.model_validate(document)).id, LIMIT_S)
    assert job.status.phase == "Succeeded", f"{name}: {job.status}"
    report = client.report(job.id)
    assert report.decision is not None, name
    assert report.decision.checks, name
    return report


CANDIDATES = {"own_data": 1, "sweep": 2, "families": 4, "rivals": 1, "streaming": 1, "mixes": 3}


def run_all(home: Path, *names: str) -> dict[str, JobReport]:
    """Run examples in one home; their reports."""
    with plane(home) as (client, _):
        reports = {name: run(client, name) for name in names}
    trained = {name: {one.candidate for one in report.leaderboard if not one.rival} for name, report in reports.items()}
    assert {name: len(candidates) for name, candidates in trained.items()} == {name: CANDIDATES[name] for name in names}
    return reports


@pytest.mark.slow
@pytest.mark.timeout(4 * LIMIT_S)
def test_the_examples_for_a_model_and_data_of_ones_own_run_to_their_decisions(files: Path) -> None:
    reports = run_all(files / "home", "own_data", "families", "rivals", "streaming")
    assert {one.family for one in reports["families"].leaderboard} == {"eagle3", "eagle1", "hydra", "medusa"}
    rivals = {one.checkpoint for one in reports["rivals"].leaderboard if one.rival}
    assert rivals == {"rival-ngram", "rival-off", "rival-published-eagle3-head"}
    reused = {name: report.regenerate.rows_reused for name, report in reports.items() if report.regenerate is not None}
    assert reused["own_data"] == 0
    assert min(reused[name] for name in ("families", "rivals", "streaming")) > 0


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_the_examples_of_sweeps_run_to_their_decisions(files: Path) -> None:
    run_all(files / "home", "sweep", "mixes")
