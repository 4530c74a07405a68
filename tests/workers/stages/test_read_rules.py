"""A stage reads what its job's rules allow, by what a path leads to when it is opened: links may have been changed
since the job was submitted."""

import json
from pathlib import Path
from typing import Any

import pytest

from eyrie_api.contract.benchmark import BenchmarkSpec, BroughtDrafter, RivalSpec, SuiteSpec
from eyrie_api.contract.capture import CaptureSpec
from eyrie_api.contract.data import DataSource, DataSpec
from eyrie_api.contract.drafter import DrafterSpec, PublishedDrafter
from eyrie_api.contract.read_rules import ReadRules
from eyrie_api.contract.regeneration import RegenerateSpec
from eyrie_api.contract.stages import BenchmarkStage, CaptureStage, RegenerateStage, TrainStage
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.training import TrainSpec
from eyrie_api.errors import InvalidInput
from eyrie_api.file_rules import open_file
from eyrie_workers.data.suites import excluded_prompts, load_suite
from eyrie_workers.stage_program import run_program, verify_inputs
from eyrie_workers.stages.regenerate import regenerate
from tests.tiny import chats_file, tiny_target


class Tenant:
    """A directory of data that a tenant may change, and another project's rows below EYRIE_HOME."""

    def __init__(self, root: Path) -> None:
        self.home, self.data = root / "home", root / "data"
        self.theirs = self.home / "jobs/theirs/stages/regenerate"
        self.mine = self.home / "jobs/mine"
        for directory in (self.theirs, self.mine, self.data):
            directory.mkdir(parents=True)
        chats_file(self.theirs / "rows.jsonl", 14)
        chats_file(self.mine / "rows.jsonl", 14)
        self.rules = ReadRules(home=str(self.home), places=("jobs/mine",))

    def link(self, name: str, to: Path) -> Path:
        """A link of the data directory, replaced where it is there."""
        path = self.data / name
        path.unlink(missing_ok=True)
        path.symlink_to(to)
        return path


@pytest.fixture
def tenant(tmp_path: Path) -> Tenant:
    return Tenant(tmp_path)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target") / "model")


def run(out: Path, target: Path, path: Path, rules: ReadRules | None, exclude: tuple[str, ...] = ()) -> dict[str, Any]:
    """Regenerate from one source: the failure's record, empty where there is none."""
    out.mkdir(parents=True)
    spec = RegenerateStage(
        job_id="job", target=TargetSpec(model=str(target)), reads=rules, exclude_prompts=exclude,
        data=DataSpec(sources=(DataSource(path=str(path)),)),
        regenerate=RegenerateSpec(max_new_tokens=4, concurrency=4))
    (out / "spec.json").write_text(spec.model_dump_json())
    code = run_program(RegenerateStage, regenerate, ["--spec", str(out / "spec.json"), "--out",
                                                     str(out / "manifest.json")])
    failure = out / "failure.json"
    assert (code == 0) != failure.exists()
    return dict(json.loads(failure.read_text())) if failure.exists() else {}


def test_a_link_that_was_changed_after_the_submission_is_not_followed(
        tmp_path: Path, target: Path, tenant: Tenant) -> None:
    path = tenant.link("chats.jsonl", tenant.mine / "rows.jsonl")
    assert run(tmp_path / "first", target, path, tenant.rules) == {}
    tenant.link("chats.jsonl", tenant.theirs / "rows.jsonl")
    for number, source in enumerate((path, tenant.data, tenant.data / "*.jsonl")):
        out = tmp_path / f"out-{number}"
        failure = run(out, target, source, tenant.rules)
        assert failure["reason"] == "InvalidInput"
        assert "not of your project" in failure["message"]
        assert not any("What is" in file.read_text(errors="replace") for file in out.iterdir() if file.is_file())
    assert run(tmp_path / "free", target, path, None) == {}, "an administrator's job has no rules"


def test_a_suites_link_is_judged_where_it_is_measured_and_where_it_is_excluded(
        tmp_path: Path, target: Path, tenant: Tenant) -> None:
    suite = tenant.link("suite.jsonl", tenant.theirs / "rows.jsonl")
    with pytest.raises(InvalidInput, match="not of your project"):
        load_suite(SuiteSpec(name="s", path=str(suite)), rules=tenant.rules)
    with pytest.raises(InvalidInput, match="not of your project"):
        list(excluded_prompts([str(suite)], pytest.fail, tenant.rules))
    failure = run(tmp_path / "out", target, tenant.mine / "rows.jsonl", tenant.rules, exclude=(str(suite),))
    assert "not of your project" in failure["message"]
    assert len(load_suite(SuiteSpec(name="s", path=str(suite)))) == 14


def test_a_hub_data_set_with_a_split_is_not_a_directory_of_this_machine(
        tenant: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tenant.home)
    for path in (f"{tenant.theirs}:train", "jobs/theirs:train"):
        with pytest.raises(InvalidInput, match=r"not a Hub data set|not of your project"):
            load_suite(SuiteSpec(name="s", path=path), rules=tenant.rules)
    with pytest.raises(InvalidInput, match="not a Hub data set"):
        list(excluded_prompts(["jobs/theirs:train"], pytest.fail, tenant.rules))


def test_a_file_exchanged_between_the_judgement_and_the_opening_is_not_read(tenant: Tenant) -> None:
    # The data source was judged as a directory of plain files; then one became a link.
    path = tenant.link("a.jsonl", tenant.theirs / "rows.jsonl")
    with pytest.raises(InvalidInput, match="not of your project"):
        open_file(path, tenant.rules, "data source")
    with open_file(tenant.link("a.jsonl", tenant.mine / "rows.jsonl"), tenant.rules, "data source") as file:
        assert b"What is" in file.readline()


def test_directories_of_models_are_judged_before_any_work(tmp_path: Path, target: Path, tenant: Tenant) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in target.iterdir():
        (linked / file.name).symlink_to(file)
    head = PublishedDrafter(path=str(linked))
    fields: dict[str, Any] = {"job_id": "job", "target": TargetSpec(model=str(target)), "reads": tenant.rules}
    stages = [
        RegenerateStage(**fields | {"target": TargetSpec(model=str(linked))}, regenerate=RegenerateSpec(),
                        data=DataSpec(sources=(DataSource(path="quickstart"),))),
        CaptureStage(**fields, capture=CaptureSpec(), rows_dir=str(tmp_path), init_from=(head,)),
        TrainStage(**fields, candidate="c", drafter=DrafterSpec(init_from=str(linked)), train=TrainSpec(),
                   store_dir=str(tmp_path)),
        BenchmarkStage(**fields, checkpoint="c", candidate="c", benchmark=BenchmarkSpec(), drafter_dir=str(tmp_path),
                       rival=RivalSpec(path=str(linked))),
        BenchmarkStage(**fields, checkpoint="c", candidate="c", benchmark=BenchmarkSpec(), drafter_dir=str(tmp_path),
                       brought=BroughtDrafter(path=str(linked)))]
    for stage in stages:
        verify_inputs(stage.model_copy(update={"rows_dir": None, "drafter_dir": None}))
    (linked / "config.json").unlink()
    (linked / "config.json").symlink_to(tenant.theirs / "rows.jsonl")
    for stage in stages:
        with pytest.raises(InvalidInput, match="not of your project"):
            verify_inputs(stage)
