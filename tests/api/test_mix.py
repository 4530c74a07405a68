"""Mixes as a job names them: names of sources, the axis of a sweep, plans, and what is refused at submission."""

import re
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from rich.console import Console

from eyrie_api.cli.spec import read_document, validate
from eyrie_api.cli.tables import plan_view
from eyrie_api.contract.data import DataSource, DataSpec
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.plan import Plan
from eyrie_api.contract.status import Problem
from eyrie_api.errors import InvalidInput
from eyrie_api.planning import preflight
from eyrie_api.planning.plan import make_plan
from eyrie_api.planning.plan_work import DataFacts
from eyrie_api.planning.resolve import derive
from eyrie_api.planning.sweep import expand, trains_together
from eyrie_api.settings import Settings
from eyrie_pipelines.runner import JobFile
from eyrie_pipelines.stage_specs import train_spec
from tests.api.conftest import Running
from tests.api.samples import job_body, job_spec
from tests.api.test_plan import SMALL
from tests.tiny import chats_file

SOURCES = [{"path": "chats.jsonl", "weight": 3}, {"path": "tools.jsonl"}]
HUB = {"sources": [{"path": "org/chats", "weight": 3}, {"path": "org/tools"}]}
MIXES = [{"chats": 1, "tools": 1}, {"chats": 3, "tools": 1}]


def mixing(*mixes: Any, sources: Any = SOURCES, data: Any = None, **sweep: Any) -> JobSpec:
    return job_spec(data={"sources": sources} | (data or {}),
                    sweep={"axes": [{"field": "data.mix", "values": list(mixes)}]} | sweep)


@pytest.mark.parametrize(("path", "name"), [
    ("chats.jsonl", "chats"), ("/data/Tool Calls.jsonl.gz", "tool-calls"), ("chats/*.jsonl.gz", "chats"),
    ("s3://bucket/support/2024-*.parquet", "support"), ("s3://bucket", "bucket"), ("https://host/a/b.json.zst", "b"),
    ("allenai/Dolci-Think-SFT-3.1-32B", "dolci-think-sft-3-1-32b"), ("quickstart", "quickstart"),
    ("..", "source"), ("/*.jsonl", "source"), ("a" * 200, "a" * 48)])
def test_a_source_is_called_after_the_last_part_of_its_path(path: str, name: str) -> None:
    assert DataSpec(sources=(DataSource(path=path),)).source_names == (name,)


def test_names_are_distinct_and_given_ones_are_kept() -> None:
    data = DataSpec(sources=(DataSource(path="a/chats.jsonl"), DataSource(path="b/chats.jsonl"),
                             DataSource(path="c.jsonl", name="chats-2"), DataSource(path="chats")))
    assert data.source_names == ("chats", "chats-3", "chats-2", "chats-4")
    with pytest.raises(ValidationError, match=r"data\.sources has two sources of the name 'chats'"):
        DataSpec(sources=(DataSource(path="a", name="chats"), DataSource(path="b", name="chats")))
    with pytest.raises(ValidationError, match="name"):
        DataSource(path="a", name="Chats!")


@pytest.mark.parametrize(("mix", "says"), [
    ({"chats": 1, "code": 1}, r"data\.mix names 'code', which is no source.*chats, tools"),
    ({"chats": 1}, r"names fewer than two sources.*share 0"),
    ({}, "names fewer than two sources"),
    ({"chats": 0, "tools": 0}, "no share above 0"),
    ({"chats": -1, "tools": 1}, "greater than or equal to 0"),
    ({"chats": "much", "tools": 1}, "number"),
    ({"chats": 1e7, "tools": 1}, "less than or equal to 1000000"),
    ([1, 2], "valid dictionary|an object with named values"),
])
def test_a_mix_that_cannot_be_drawn_is_refused_as_a_field_and_as_a_value_of_an_axis(mix: Any, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        job_spec(data={"sources": SOURCES, "mix": mix})
    with pytest.raises(InvalidInput, match=says) as caught:
        expand(mixing(*MIXES, mix))
    assert "candidate 3" in caught.value.message
    assert "data.mix" in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("share", [float("nan"), float("inf")])
def test_a_share_that_is_no_number_is_refused_where_it_is_written(share: float) -> None:
    mix = {"chats": share, "tools": 1}
    axis = {"field": "data.mix", "values": [MIXES[0], mix]}
    for where, document in {"data.mix.chats": {"data": {"sources": SOURCES, "mix": mix}}, "sweep.axes.0.values.1": {
            "data": {"sources": SOURCES}, "sweep": {"axes": [axis]}}}.items():
        with pytest.raises(InvalidInput, match=rf"{where}.*finite number"):
            validate({"target": {"model": "quickstart"}} | document)


@pytest.mark.parametrize(("mixes", "says"), [
    ([{"chats": 1, "tools": 1}, {"tools": 2, "chats": 2}], "the same shares"),
    ([{"chats": 1, "tools": 1}, None], "contain null"),
    ([{"chats": 1, "tools": 1}, {"chats": 1, "tools": 1}], "twice"),
])
def test_an_axis_compares_different_mixes_alone(mixes: list[Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as caught:
        expand(mixing(*mixes))
    assert caught.value.hint


def test_one_source_has_no_mix() -> None:
    with pytest.raises(ValidationError, match="names fewer than two sources"):
        job_spec(data={"sources": [{"path": "chats.jsonl"}], "mix": {"chats": 1}})


def test_other_fields_of_the_data_are_no_axis_and_a_mix_has_no_range() -> None:
    with pytest.raises(ValidationError, match=r"sweep\.axes"):
        job_spec(sweep={"axes": [{"field": "data.seed", "values": [1, 2]}]})
    with pytest.raises(InvalidInput, match="takes no numbers"):
        expand(job_spec(sweep={"axes": [{"field": "data.mix", "low": 0, "high": 1}], "random": 2}))


def test_a_source_that_a_file_gives_twice_in_a_mix_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("data:\n  mix: {chats: 3,\n    tools: 1,\n    chats: 1}\n")
    with pytest.raises(InvalidInput, match=r"'chats' is given twice.*line 4"):
        read_document(file)
    file.write_text("data: {mix: {chats: 3, tools: 1}}\n")
    assert read_document(file) == {"data": {"mix": {"chats": 3, "tools": 1}}}


def test_candidates_are_named_after_their_mixes() -> None:
    found = expand(mixing(*MIXES, {"chats": 0.5, "tools": 2}))
    assert [one.name for one in found] == [
        "c1-mix-chats-1-tools-1", "c2-mix-chats-3-tools-1", "c3-mix-chats-0p5-tools-2"]
    long = [{"path": "chats.jsonl", "name": "c" * 63}, {"path": "tools.jsonl"}]
    (only,) = expand(mixing({"c" * 63: 3, "tools": 1}, sources=long))
    assert re.match(r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", f"{only.name}-step-100000")


def test_every_candidate_knows_the_mixes_and_seeds_of_all_and_the_seed_of_the_data() -> None:
    spec = job_spec(data={"sources": SOURCES, "seed": 7}, sweep={"axes": [
        {"field": "data.mix", "values": MIXES}, {"field": "train.seed", "values": [0, 1]},
        {"field": "train.loss", "values": ["kl", "tv"]}]})
    job = JobFile(id="j", resolved=derive(spec))
    draws = [train_spec(job, Path("/j"), candidate.name).rows for candidate in job.resolved.candidates]
    assert len({str(draw.compared) for draw in draws if draw is not None}) == 1
    first = draws[0]
    assert first is not None
    assert (first.mix, first.seed) == ({"chats": 1.0, "tools": 1.0}, 7)
    assert [(one.mix, one.train_seed) for one in first.compared] == [
        (mix, seed) for mix in ({"chats": 1.0, "tools": 1.0}, {"chats": 3.0, "tools": 1.0}) for seed in (0, 1)]
    assert train_spec(JobFile(id="j", resolved=derive(job_spec())), Path("/j"), "base").rows is None


def test_candidates_of_different_mixes_are_trained_separately() -> None:
    spec = mixing(*MIXES)
    assert not trains_together(spec, 2, 1, on_cluster=False)
    same_mix = job_spec(data={"sources": SOURCES, "mix": MIXES[0]},
                        sweep={"axes": [{"field": "train.loss", "values": ["kl", "tv"]}]})
    assert trains_together(same_mix, 2, 1, on_cluster=False)
    with pytest.raises(ValidationError, match=r"sweep\.shared_passes is 'always' with an axis over data\.mix.*'auto'"):
        mixing(*MIXES, shared_passes="always")


def planned(spec: JobSpec, facts: DataFacts) -> Plan:
    return make_plan(derive(spec), SMALL, None, data_facts=facts)


def test_a_plan_shows_the_rows_of_each_candidate_and_costs_the_capture_once() -> None:
    union = {"max_conversations": 4000, "held_out_fraction": 0.0}
    facts = DataFacts(10_000, 50.0, 50.0, "a sample", {"chats": 9000, "tools": 1000})
    spec = mixing(*MIXES, data=union)
    plan = planned(spec, facts)
    # Of 4000 rows 3000 are chats and 1000 tools; one to one takes all tools.
    assert plan.candidate_rows == {"c1-mix-chats-1-tools-1": {"chats": 1000, "tools": 1000},
                                   "c2-mix-chats-3-tools-1": {"chats": 1500, "tools": 500}}
    whole = planned(job_spec(data={"sources": SOURCES} | union), facts)
    of = [{stage.stage: stage for stage in one.stages} for one in (plan, whole)]
    assert of[0]["capture"] == of[1]["capture"]
    assert of[0]["regenerate"] == of[1]["regenerate"]
    assert of[0]["train"].tokens == of[1]["train"].tokens, "two candidates of half the rows"
    assert whole.candidate_rows == {}


def test_the_table_of_a_plan_has_a_row_for_each_candidate_and_a_column_for_each_source() -> None:
    facts = DataFacts(10_000, 50.0, 50.0, "a sample", {"chats": 9000, "tools": 1000})
    console = Console(width=160, record=True, file=StringIO())
    console.print(plan_view(planned(mixing(*MIXES, data={"max_conversations": 4000, "held_out_fraction": 0.0}), facts)))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["CANDIDATE", "ROWS", "OF", "chats", "ROWS", "OF", "tools", "ROWS"] in lines
    assert ["c2-mix-chats-3-tools-1", "1,500", "500", "2,000"] in lines


def test_a_plan_warns_of_a_mix_that_leaves_most_of_the_capture_unused_and_names_the_scarce_source() -> None:
    facts = DataFacts(4000, 50.0, 50.0, "a sample", {"chats": 3900, "tools": 100})
    plan = planned(mixing(*MIXES, data={"max_conversations": 4000, "held_out_fraction": 0.0}), facts)
    assert any("trains on 200 of 4000 captured rows" in one and "takes all of source tools" in one
               for one in plan.warnings)


def test_a_submitted_job_keeps_the_names_its_mixes_use_where_paths_become_absolute(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    chats_file(tmp_path / "data" / "chats.jsonl", 40)
    chats_file(tmp_path / "tools.jsonl", 20)
    sources = [{"path": f"{tmp_path}/data/.", "weight": 3}, {"path": f"{tmp_path}/tools.jsonl"}]
    names = DataSpec.model_validate({"sources": sources}).source_names
    assert names == ("data", "tools")
    spec = mixing({"data": 1, "tools": 1}, {"data": 3, "tools": 1}, sources=sources)
    checked = preflight.check(spec, Settings(home=tmp_path / "home"))
    assert checked.spec.data.source_names == names
    assert [source.name for source in checked.spec.data.sources] == ["data", "tools"]
    assert [one.name for one in expand(checked.spec)] == [one.name for one in expand(spec)]
    assert checked.plan is not None
    assert checked.plan.candidate_rows.keys() == {"c1-mix-data-1-tools-1", "c2-mix-data-3-tools-1"}
    with pytest.raises(InvalidInput, match="names 'chat', which is no source"):
        preflight.check(mixing({"chat": 1, "tools": 1}, sources=sources), Settings(home=tmp_path / "home"))


@pytest.mark.parametrize(("changes", "pointer", "says"), [
    ({"data": HUB | {"mix": {"chat": 1, "tools": 1}}}, "/data", "data.mix names 'chat'"),
    ({"data": HUB | {"mix": {"chats": -1, "tools": 1}}}, "/data/mix/chats", "greater than or equal to 0"),
    ({"data": HUB, "sweep": {"shared_passes": "always", "axes": [{"field": "data.mix", "values": MIXES}]}},
     "/sweep", "sweep.shared_passes is 'always'"),
    ({"data": HUB, "sweep": {"axes": [{"field": "data.mix", "values": [{"chats": 1}]}]}}, None,
     "names fewer than two sources"),
])
def test_a_job_with_a_mix_that_cannot_be_drawn_is_answered_with_the_field_the_rule_and_a_hint(
        server: Running, changes: dict[str, Any], pointer: str | None, says: str) -> None:
    answer = httpx.post(f"{server.url}/v1alpha1/jobs", json=job_body(**changes))
    assert answer.status_code == 422
    document = Problem.model_validate_json(answer.content)
    assert document.type.endswith("InvalidInput")
    assert says in document.detail
    assert [one["pointer"] for one in document.errors] == ([] if pointer is None else [pointer])
    assert document.hint
