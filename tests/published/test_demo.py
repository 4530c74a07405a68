"""`make demo-published`: the job with local files asks what the example with Hub ids asks."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published import demo
from eyrie_api import yaml_text
from eyrie_api.contract.benchmark import SuiteSpec
from eyrie_api.contract.data import DataSource
from eyrie_api.contract.job import JobSpec
from eyrie_api.conversation import Conversation
from eyrie_api.planning.preflight import check
from eyrie_api.settings import Settings
from eyrie_workers.data.readers import read_conversations
from eyrie_workers.data.suites import load_suite
from tests.house.sources import ROOT

TARGET = ROOT / "workers/eyrie_workers/quickstart/target"

SOURCES: dict[str, dict[str, Any]] = {
    "openai/gsm8k": {
        "question": "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
                    "How many clips did Natalia sell altogether in April and May?",
        "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72"},
    "codegen-instruct.json": {
        "instruction": "Write a C++ program that calculates the area of a rectangle, given its width and height.",
        "input": "width: 5, height: 8", "response": "int main() {}"},
    "roleplay-instruct.json": {
        "instruction": "Imagine you are a detective trying to solve a murder mystery in a fictional Victorian-era "
                       "town. Describe the scene of the crime, the main suspects, and your plan to investigate the "
                       "case.",
        "input": "", "response": "The scene of the crime is a dimly lit study."},
}
"""The first row of each data set, by the end of its path in the example, with the fields that it has there."""

SUITES: dict[str, dict[str, Any]] = {
    "openai/gsm8k:test": {
        "question": "A robe takes 2 bolts of blue fiber and half that much white fiber.  How many bolts in total does "
                    "it take?", "answer": "#### 3"},
    "openai/openai_humaneval": {
        "task_id": "HumanEval/53", "prompt": "\n\ndef add(x: int, y: int):\n    \"\"\"Add two numbers x and y\n    >>> "
                                             "add(2, 3)\n    5\n    >>> add(5, 7)\n    12\n    \"\"\"\n",
        "canonical_solution": "    return x + y\n", "test": "", "entry_point": "add"},
    "HuggingFaceH4/mt_bench_prompts": {
        "category": "writing", "prompt_id": 76595198, "reference": [], "prompt": [
            "Compose an engaging travel blog post about a recent trip to Hawaii, highlighting cultural experiences and "
            "must-see attractions.", "Rewrite your previous response. Start every sentence with the letter A."]},
}
"""One row of each suite, likewise."""


def written(path: Path, row: dict[str, Any]) -> Path:
    path.write_text(json.dumps(row) + "\n")
    return path


def first_prompt(path: Path) -> tuple[str, Any]:
    row = next(iter(read_conversations(DataSource(path=str(path)))))
    assert isinstance(row, Conversation)
    return row.id, row.prompt


@pytest.mark.parametrize("name", SOURCES)
def test_a_row_of_a_source_on_the_hub_is_the_prompt_of_the_local_file(name: str, tmp_path: Path) -> None:
    (local,) = (file for path, file in demo.LOCAL.items() if path.endswith(name))
    assert first_prompt(written(tmp_path / "hub.jsonl", SOURCES[name])) == first_prompt(local)


@pytest.mark.parametrize("name", SUITES)
def test_a_row_of_a_suite_on_the_hub_is_a_prompt_of_the_local_file(name: str, tmp_path: Path) -> None:
    (hub,) = load_suite(SuiteSpec(name="s", path=str(written(tmp_path / "hub.jsonl", SUITES[name]))))
    local = load_suite(SuiteSpec(name="s", path=str(demo.LOCAL[name])))
    assert [(prompt.messages, prompt.further) for prompt in local].count((hub.messages, hub.further)) == 1


def without_paths(job: JobSpec) -> Any:
    document = job.model_dump(mode="json")
    document["target"].pop("model")
    for named in (*document["data"]["sources"], *document["benchmark"]["suites"]):
        named.pop("path")
        named.pop("config", None)
    return document


def test_the_local_job_differs_from_the_example_in_paths_alone_and_is_accepted(tmp_path: Path) -> None:
    example = JobSpec.model_validate(yaml_text.load(demo.EXAMPLE.read_text()))
    local = demo.local_job(TARGET)
    assert without_paths(local) == without_paths(example)
    accepted = check(local, Settings(home=tmp_path)).spec
    assert [suite.required for suite in accepted.benchmark.suites] == [True, False, False]
    paths = [source.path for source in accepted.data.sources] + [suite.path for suite in accepted.benchmark.suites]
    assert paths == [str(file) for file in demo.LOCAL.values()]


def test_the_short_job_keeps_every_stage_and_shrinks_each(tmp_path: Path) -> None:
    whole, short = demo.local_job(TARGET), demo.local_job(TARGET, short=True)
    assert check(short, Settings(home=tmp_path)).spec.serve.enabled
    for section, field in (("data", "max_conversations"), ("regenerate", "max_new_tokens"), ("train", "epochs"),
                           ("benchmark", "max_new_tokens"), ("tune", "budget_s"), ("prove", "requests")):
        assert getattr(getattr(short, section), field) < getattr(getattr(whole, section), field), f"{section}.{field}"


def test_the_shipped_prompts_are_small_and_their_licences_are_listed() -> None:
    files = list((ROOT / "benchmarks/published/data").glob("*.gz"))
    assert set(files) == set(demo.LOCAL.values())
    assert sum(file.stat().st_size for file in files) < 4e6
    page = (ROOT / "benchmarks/published/data/README.md").read_text()
    assert [file.name for file in files if f"| {file.name} |" not in page] == []
