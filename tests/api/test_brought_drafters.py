"""Jobs with `drafters`, which train nothing: what their documents may say, what they are resolved and planned to."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from eyrie_api.contract.job import JobSpec
from eyrie_api.errors import InvalidInput
from eyrie_api.planning.facts import Facts
from eyrie_api.planning.plan import make_plan
from eyrie_api.planning.preflight import check, plan
from eyrie_api.planning.resolve import derive, resolve
from eyrie_api.settings import Settings
from eyrie_operator.endpoints.records import retraining_job
from eyrie_pipelines.runner import JobFile
from tests.api.test_plan import SMALL
from tests.house.sources import ROOT
from tests.workers.measure.tiny_bench import random_drafter

SHIPPED = ROOT / "workers/eyrie_workers/quickstart/target"


def job(**sections: Any) -> JobSpec:
    return JobSpec.model_validate({"target": {"model": "quickstart"}, "drafters": ["/heads/a", "org/b"]} | sections)


def test_a_job_with_drafters_has_no_stage_of_training_and_no_candidate_to_train() -> None:
    spec = job()
    assert spec.stages == ("benchmark", "tune", "prove")
    assert [drafter.checkpoint for drafter in spec.drafters] == ["a", "b"]
    resolved = derive(spec)
    assert resolved.candidates == ()
    assert [drafter.checkpoint for drafter in resolved.brought] == ["a", "b"]
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec, "documents are stored with all defaults"
    assert JobFile(id="j", resolved=resolved).run_parameters()["sweep"] == "2 candidates: a, b"


@pytest.mark.parametrize(("sections", "says"), [
    ({"drafters": []}, "data.sources is empty, and so is drafters"),
    ({"drafters": [], "data": {"sources": []}}, "data.sources is empty, and so is drafters"),
    ({"train": {"epochs": 3}}, "train is set"),
    ({"data": {"sources": [{"path": "quickstart"}]}}, "data is set"),
    ({"sweep": {"families": ["eagle1"]}}, "sweep is set"),
    ({"reuse": "never"}, "reuse is set"),
    ({"benchmark": {"suites": [{"name": "mine", "path": "held-out"}]}}, "suite 'mine' uses prompts held out"),
    ({"drafters": ["org/a", "other/a"]}, "drafters: a is named twice"),
    ({"drafters": ["ngram"]}, "drafter"),
    ({"drafters": ["org/rival-a"]}, "'rival-a' begins with 'rival-'"),
    ({"drafters": ["nextn"]}, "drafters names nextn, and engine is 'embedded'"),
])
def test_a_document_that_neither_trains_nor_measures_what_it_names_is_refused(sections: dict[str, Any],
                                                                              says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        job(**sections)


def test_depths_beyond_the_ttt_length_of_training_are_none_of_a_drafter_from_elsewhere() -> None:
    deep = {"num_steps": 14, "top_k": 1, "num_draft_tokens": 15}
    assert job(benchmark={"tree": deep}).benchmark.tree.num_steps == 14


def test_the_shipped_suites_are_those_of_the_shipped_target_alone() -> None:
    assert [suite.name for suite in resolve(job(), Facts()).spec.benchmark.suites] == ["chat", "math", "code", "tools"]
    with pytest.raises(InvalidInput, match=r"benchmark\.suites is omitted, and a job with drafters has no data"):
        resolve(job(target={"model": "org/model"}), Facts())
    named = job(target={"model": "org/model"}, benchmark={"suites": [{"name": "mine", "path": "org/prompts"}]})
    assert [suite.name for suite in resolve(named, Facts()).spec.benchmark.suites] == ["mine"]


@pytest.mark.parametrize("num_gpus", [None, 2])
def test_a_plan_has_what_is_measured_and_nothing_of_data_or_training(num_gpus: int | None) -> None:
    spec = job(placement={} if num_gpus is None else {"every": {"num_gpus": num_gpus, "gpu_type": "NVIDIA-H200"}})
    planned = make_plan(derive(spec), SMALL, None)
    assert [stage.stage for stage in planned.stages] == ["benchmark", "tune", "prove"]
    assert planned.total_hours > 0.0
    assert planned.total_bytes_on_disk == 0
    assert planned.needed_tau == (), "the cost of a drafter from elsewhere is not known"
    assert planned.notes[1:] == ("a: benchmarked like a checkpoint, from /heads/a",
                             "b: benchmarked like a checkpoint, from org/b")
    assert not {"rows answered", "candidates", "training rate", "prefill rate"} & {
        assumption.name for assumption in planned.assumptions}
    assert not any("conversations" in warning for warning in planned.warnings)


def test_a_job_is_accepted_with_absolute_paths_and_refused_with_the_field_of_what_is_missing(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_drafter(tmp_path / "head", SHIPPED, layers=(2, 8, 13))
    monkeypatch.chdir(tmp_path)
    settings = Settings(home=tmp_path / "home")
    accepted = check(job(drafters=["./head"]), settings)
    assert [drafter.path for drafter in accepted.spec.drafters] == [str(tmp_path / "head")]
    assert [stage.stage for stage in plan(job(drafters=["./head"]), settings).stages] == ["benchmark", "tune", "prove"]
    with pytest.raises(InvalidInput, match=r"drafters: '.*/elsewhere' is not a directory with config\.json"):
        check(job(drafters=["./elsewhere"]), settings)


def test_after_drift_a_drafter_of_the_targets_traffic_is_trained_since_this_one_cannot_be() -> None:
    again = retraining_job("j", derive(job()), "default", "/traffic.jsonl", checkpoint="a").spec
    assert JobSpec.model_validate(again.model_dump(mode="json")) == again
    assert (again.drafters, [source.path for source in again.data.sources]) == ((), ["/traffic.jsonl"])
