"""Paths of a job by which a project's operator would read another project's files, or the host's: each is refused where
it is submitted, by what it leads to and not by how it is written."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eyrie_api.database.engine import Database
from eyrie_api.planning.facts import quickstart_dir
from eyrie_api.settings import Settings
from tests.api.access.harness import JOBS, TOKEN, Harness, two_projects
from tests.api.samples import job_body
from tests.tiny import chats_file

PLANS = "/v1alpha1/plans"


@pytest.fixture
def harness(settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    """The server works in the directory that holds its home, so that relative paths lead there."""
    monkeypatch.chdir(settings.home.parent)
    with two_projects(settings, database) as made:
        stage = rows_of_north(made).parent
        stage.mkdir(parents=True)
        chats_file(stage / "selection.jsonl")
        (stage / "config.json").write_text(json.dumps({"vocab_size": 7, "hidden_size": 7}))
        yield made


def rows_of_north(harness: Harness) -> Path:
    """What regenerate left of the other project's conversations."""
    return harness.server.control.settings.job_dir(harness.a.ids["job_id"]) / "stages/regenerate/selection.jsonl"


def refused(harness: Harness, field: str, says: str, **changes: Any) -> None:
    for route in (JOBS, PLANS):
        answer = harness.ask(harness.b.secret, "POST", route, json=job_body(**changes))
        assert answer.status_code == 422, answer.text
        assert field in answer.text
        assert says in answer.text, answer.text
        assert "plus" not in answer.text, "a row"


def source(path: object) -> dict[str, Any]:
    return {"sources": [{"path": str(path)}]}


NOT_YOURS, SYSTEM = "not of your project", "file of the system"


def test_a_relative_pattern_does_not_read_another_projects_rows(harness: Harness) -> None:
    rows, here = rows_of_north(harness), Path.cwd()
    below = rows.parent.relative_to(here)
    for path in (below / "[sh]el*.jsonl", below / "selection.jsonl", Path("x") / ".." / below / "*.jsonl",
                 rows.parent / "[s]election.jsonl"):
        refused(harness, "data.sources[0].path", NOT_YOURS, data=source(path))
        suites = [{"name": "s", "path": str(path)}]
        refused(harness, "benchmark.suites[0].path", NOT_YOURS, benchmark={"suites": suites})
        refused(harness, "promotion.drift.traffic_file", NOT_YOURS, promotion={"drift": {"traffic_file": str(path)}})


def test_a_pattern_does_not_open_a_file_of_the_system(harness: Harness) -> None:
    up = "/".join([".."] * (len(Path.cwd().parts) - 1))
    for path in (f"{up}/etc/passw[d]", f"{up}/etc/passwd", "/etc/passw[d]", "/etc/*", "/proc/self/environ"):
        refused(harness, "data.sources[0].path", SYSTEM, data=source(path))


def test_a_tilde_is_the_servers_home_and_of_no_user_an_error(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(harness.server.control.settings.home))
    below = rows_of_north(harness).parent.relative_to(harness.server.control.settings.home)
    for path in (f"~/{below}/selection.jsonl", f"~/{below}/[s]election.jsonl"):
        refused(harness, "data.sources[0].path", NOT_YOURS, data=source(path))
    refused(harness, "data.sources[0].path", "cannot be followed", data=source("~nobody-of-this-name/x.jsonl"))


def test_symbolic_links_are_followed_before_they_are_judged(harness: Harness, tmp_path: Path) -> None:
    rows, data = rows_of_north(harness), tmp_path / "data"
    data.mkdir()
    chats_file(data / "a.jsonl")
    (data / "link.jsonl").symlink_to(rows)
    (data / "to-job").symlink_to(rows.parent)
    for path in (data / "link.jsonl", data / "to-job" / "selection.jsonl", data / "to-job" / "*.jsonl",
                 data / "to-job", data, data / "*.jsonl", data / "[l]ink.jsonl"):
        refused(harness, "data.sources[0].path", NOT_YOURS, data=source(path))
    (data / "link.jsonl").unlink()
    for path in (data / "a.jsonl", data / "*.jsonl"):
        accepted = harness.ask(harness.b.secret, "POST", JOBS, json=job_body(data=source(path)))
        assert accepted.status_code == 202, accepted.text


def test_a_directory_of_a_model_whose_files_are_links_is_refused(harness: Harness, tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "config.json").symlink_to(rows_of_north(harness).parent / "config.json")
    refused(harness, "drafter.init_from", NOT_YOURS, drafter={"init_from": str(drafter)})
    refused(harness, "rivals[0].path", NOT_YOURS, rivals=[str(drafter)])
    refused(harness, "drafters[0].path", NOT_YOURS, drafters=[str(drafter)], data={})
    refused(harness, "target.model", NOT_YOURS, target={"model": str(drafter)})
    refused(harness, "sweep.axes: drafter.init_from", NOT_YOURS, sweep={"axes": [
        {"field": "drafter.init_from", "values": ["org/head", str(drafter)]}]})
    (drafter / "config.json").unlink()
    (drafter / "additional_chat_templates").mkdir()
    (drafter / "additional_chat_templates" / "tools.jinja").symlink_to("/etc/passwd")
    refused(harness, "target.model", SYSTEM, target={"model": str(drafter)})


def test_a_revision_is_a_name_and_no_path(harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    (cache / "models--org--name" / "refs").mkdir(parents=True)
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    elsewhere = rows_of_north(harness).parent
    (tmp_path / "ref").write_text(str(elsewhere))
    for revision in (str(elsewhere), str(tmp_path / "ref"), "../../../ref", "a/../../b", "~", "-x", "a\tb"):
        refused(harness, "revision", "no branch, tag or commit", target={"model": "org/name", "revision": revision})
        refused(harness, "revision", "no branch, tag or commit", rivals=[{"path": "org/name", "revision": revision}])
        refused(harness, "revision", "no branch, tag or commit", data={},
                drafters=[{"path": "org/name", "revision": revision}])


def test_weights_outside_of_a_targets_directory_are_not_read(harness: Harness, tmp_path: Path) -> None:
    here = quickstart_dir()
    assert here is not None
    target = Path(shutil.copytree(here, tmp_path / "target"))
    index = {"weight_map": {"model.embed_tokens.weight": str(rows_of_north(harness))}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(harness, "weight_map", "", target={"model": str(target)})


def test_a_callers_own_files_and_everything_of_an_administrator_are_read_as_before(harness: Harness) -> None:
    own = harness.server.control.settings.job_dir(harness.b.ids["job_id"]) / "stages/regenerate"
    own.mkdir(parents=True)
    chats_file(own / "rows.jsonl")
    accepted = harness.ask(harness.b.secret, "POST", JOBS, json=job_body(data=source(own / "*.jsonl")))
    assert accepted.status_code == 202, accepted.text
    reads = harness.server.control.jobs.resolved(accepted.json()["id"]).reads
    assert reads is not None
    assert reads.places == (f"jobs/{harness.b.ids['job_id']}",)
    accepted = harness.ask(TOKEN, "POST", JOBS, json=job_body(data=source(rows_of_north(harness))))
    assert accepted.status_code == 202, accepted.text
    assert harness.server.control.jobs.resolved(accepted.json()["id"]).reads is None
