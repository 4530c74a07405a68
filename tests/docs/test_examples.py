"""The examples of docs/examples are planned as `eyrie plan` plans them, next to the files that they name."""

import gzip
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eyrie_api import yaml_text
from eyrie_api.contract.job import JobSpec
from eyrie_api.errors import InvalidInput
from eyrie_api.planning.preflight import check, plan
from eyrie_api.planning.sweep import expand
from eyrie_api.settings import Settings
from tests.house.sources import ROOT
from tests.workers.measure.tiny_bench import random_drafter

CANDIDATES = {"own_data": 1, "sweep": 8, "families": 4, "rivals": 1, "streaming": 1, "mixes": 3}
"""Examples whose files a test can make, with the drafters that each trains."""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a target, data in the three formats, and a published head."""
    rows = [{"messages": [{"role": "user", "content": f"Name {number} towns of the north."}]} for number in range(500)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "chats.jsonl").write_text(lines)
    (tmp_path / "code.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "tool-calls.parquet")
    target = ROOT / "workers/eyrie_workers/quickstart/target"
    (tmp_path / "my-model").symlink_to(target)
    random_drafter(tmp_path / "published-eagle3-head", target, layers=(2, 8, 13))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def example(name: str) -> JobSpec:
    return JobSpec.model_validate(yaml_text.load((ROOT / f"docs/examples/{name}.yaml").read_text()))


@pytest.mark.parametrize("name", CANDIDATES)
def test_an_example_is_accepted_and_planned_where_its_files_are(name: str, files: Path) -> None:
    spec, settings = example(name), Settings(home=files / "home")
    planned = plan(spec, settings)
    assert check(spec, settings).spec.target.model == str(files / "my-model")
    assert len(expand(spec)) == CANDIDATES[name]
    stages = {one.stage: one for one in planned.stages}
    assert {"regenerate", "capture", "train", "benchmark", "tune", "prove"} <= stages.keys()
    assert planned.total_hours > 0.0
    states = stages["capture"].tokens * planned.bytes_per_token
    assert (stages["capture"].bytes_on_disk < states) == (name == "streaming")
    assert len(planned.candidate_rows) == (3 if name == "mixes" else 0)


def test_the_example_with_a_drafter_from_elsewhere_is_accepted_and_trains_nothing(files: Path) -> None:
    (files / "prompts.jsonl").write_text('{"prompt": "Name towns."}\n')
    spec, settings = example("bring_your_own"), Settings(home=files / "home")
    assert [stage.stage for stage in plan(spec, settings).stages] == ["benchmark", "tune", "prove"]
    assert check(spec, settings).spec.drafters[0].path == str(files / "published-eagle3-head")
    (request,) = re.findall(r"-d '(\{.*?\})'\n", (ROOT / "docs/drafters.md").read_text(), re.DOTALL)
    accepted = check(JobSpec.model_validate_json(request), settings).spec
    assert (accepted.drafters[0].path, len(accepted.benchmark.suites)) == (str(files / "published-eagle3-head"), 1)


@pytest.mark.parametrize("on_a_cluster", [False, True])
def test_the_first_job_on_a_cluster_names_its_engine_serves_and_is_accepted(files: Path, on_a_cluster: bool) -> None:
    spec, profile = example("first_on_a_cluster"), files / "profile.json"
    profile.write_text(json.dumps({"kubeflow": {"url": "http://ml-pipeline:8888"}, "stages": {
        "image": "eyrie/workers", "num_gpus": 1, "work": {"kind": "s3", "url": "s3://bucket/eyrie"}}}))
    accepted = check(spec, Settings(home=files / "home", cluster_profile=profile if on_a_cluster else None)).spec
    assert "kind" in spec.engine.model_fields_set
    assert accepted.engine.kind == "embedded"
    assert accepted.serve.enabled


@pytest.mark.parametrize(("name", "missing"), [("own_data", "tool-calls.parquet"), ("rivals", "published-eagle3-head")])
def test_an_example_is_refused_naming_the_file_that_is_missing(name: str, missing: str, files: Path) -> None:
    (files / missing).rename(files / "elsewhere")
    with pytest.raises(InvalidInput, match=missing):
        plan(example(name), Settings(home=files / "home"))


def test_the_job_of_the_seed_is_planned_with_its_published_suites_and_both_kinds_of_hardware(files: Path) -> None:
    seed = yaml_text.load((ROOT / "docs/examples/olmo-3.1-32b.yaml").read_text())
    seed["target"]["model"] = "my-model"  # what is on the Hub or in a bucket is not on this machine
    paths = ("chats.jsonl", "tool-calls.parquet", "code.jsonl.gz")
    for source, path in zip(seed["data"]["sources"], paths, strict=True):
        source |= {"path": path, "name": source.get("name", "support")}
    profile = files / "profile.json"
    profile.write_text(json.dumps({"kubeflow": {"url": "http://ml-pipeline:8888"}, "stages": {
        "image": "eyrie/workers", "work": {"kind": "s3", "url": "s3://bucket/eyrie"}}}))
    settings = Settings(home=files / "home", cluster_profile=profile)
    planned = plan(JobSpec.model_validate(seed), settings)
    compared = [(one.num_gpus, one.gpu_type, one.cost) for one in planned.stages if one.stage == "hardware"]
    assert [one[:2] for one in compared] == [(2, "H200"), (1, "B200")]
    assert all(cost is not None and cost > 0.0 for *_, cost in compared)
    seed["benchmark"]["suites"][2]["path"] = "gsm8k-test"
    with pytest.raises(InvalidInput, match="suite 'gsm8k': 'gsm8k-test' is neither a file here nor a Hub id"):
        plan(JobSpec.model_validate(seed), settings)
