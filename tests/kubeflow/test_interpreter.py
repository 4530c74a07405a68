"""The double reads what kfp compiles: order, inputs, loops, what may start; and refuses what it does not read."""

# mypy: disable-error-code="untyped-decorator"

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kfp import dsl

from tests.kubeflow import samples
from tests.kubeflow.interpreter import (
    Node,
    Pipeline,
    Refused,
    Seen,
    State,
    arguments_of,
    executor_input,
    filled,
    local_path,
    merged_artifacts,
    outputs_of,
    refuse_what_is_not_read,
    startable,
    walk,
)

ROOT = "minio://bucket/run"
Play = Callable[[Node], Mapping[str, Any]]


def played(pipeline: Pipeline, play: Play, **arguments: Any) -> tuple[list[list[Node]], Node]:
    """(the containers that started together, the tree at the end) when each puts out what `play` says."""
    refuse_what_is_not_read(pipeline)
    inputs = arguments_of(pipeline, arguments)
    seen: dict[str, Seen] = {}
    waves: list[list[Node]] = []
    while True:
        tree = walk(pipeline, inputs, seen)
        wave = list(startable(tree))
        if not wave:
            return waves, tree
        waves.append(wave)
        seen |= {node.path: Seen(State.SUCCEEDED, play(node), merged_artifacts(
            executor_input(pipeline, node, ROOT), {}, ROOT)) for node in wave}


def counting(node: Node) -> dict[str, Any]:
    """What the samples' components put out. Numbers come back as protobuf has them."""
    name = node.name.rstrip("-0123456789")
    if name == "count":
        return {"Output": [float(one) for one in range(node.inputs["num"])]}
    if name == "double":
        return {"Output": node.inputs["number"] * 2.0}
    return {"Output": float(sum(node.inputs["numbers"]))} if name == "total" else {"Output": "done"}


def test_a_loop_over_a_tasks_output_runs_once_per_item_and_is_collected_in_order() -> None:
    waves, tree = played(samples.read(samples.doubled), counting)
    assert [[node.path for node in wave] for wave in waves] == [
        ["count"], ["for-loop-1/0/double", "for-loop-1/1/double", "for-loop-1/2/double"], ["total"]]
    assert waves[2][0].inputs["numbers"] == [0, 2, 4]
    assert tree.state is State.SUCCEEDED
    assert tree.outputs == {"Output": 6}


def test_constants_defaults_and_arguments_become_inputs_in_their_types() -> None:
    waves, _ = played(samples.read(samples.doubled), counting, num=2.0, name="you")
    inputs = waves[1][1].inputs
    assert {key: inputs[key] for key in ("number", "name", "more")} == {"number": 1, "name": "dear you", "more": {}}
    assert all(not isinstance(one.inputs["number"], float) for one in waves[1])


def test_an_empty_loop_is_done_at_once() -> None:
    waves, tree = played(samples.read(samples.doubled), counting, num=0)
    assert [node.path for wave in waves for node in wave] == ["count", "total"]
    assert tree.outputs == {"Output": 0}


def test_no_more_iterations_than_allowed_are_under_way_and_items_are_taken_apart() -> None:
    pipeline = samples.read(samples.two_at_a_time)
    first = list(startable(walk(pipeline, {}, {})))
    assert [(node.inputs["left"], node.inputs["right"]) for node in first] == [(1, 7), (2, 8)]
    running = {node.path: Seen(State.RUNNING) for node in first}
    assert not list(startable(walk(pipeline, {}, running)))
    one_done = running | {first[1].path: Seen(State.SUCCEEDED, {"Output": 4})}
    assert [node.inputs["left"] for node in startable(walk(pipeline, {}, one_done))] == [3]


def test_loops_in_loops_collect_one_flat_list() -> None:
    waves, tree = played(samples.read(samples.loops_in_loops), counting)
    assert len(waves[1]) == 6
    assert waves[2][0].inputs["numbers"] == [0, 2, 4, 0, 2, 4]
    assert tree.outputs == {"Output": 12}


def test_a_pipeline_in_a_loop_walks_at_its_own_pace() -> None:
    pipeline = samples.read(samples.pipelines_in_loops)
    first, second = (node.path for node in startable(walk(pipeline, {}, {})))
    ahead = startable(walk(pipeline, {}, {first: Seen(State.SUCCEEDED, {"Output": [0]})}))
    assert [node.path for node in ahead] == [first.replace("count", "for-loop-1/0/double"), second]
    _, tree = played(pipeline, counting)
    assert tree.outputs == {"Output": 0 + 2}


def test_what_a_container_receives_is_the_launchers_executor_input() -> None:
    pipeline = samples.read(samples.doubled)
    node = next(startable(walk(pipeline, arguments_of(pipeline, {}), {})))
    result = executor_input(pipeline, node)
    assert result == {"inputs": {"parameterValues": {"num": 3}},
                    "outputs": {"outputFile": "/tmp/kfp_outputs/output_metadata.json",
                                "parameters": {"Output": {"outputFile": "/tmp/kfp/outputs/Output"}}}}
    whole = filled("{{$}}", result["inputs"]["parameterValues"], outputs=result["outputs"])
    assert json.loads(whole) == result
    escaped = filled('"{{$.json_escape[1]}}"', result["inputs"]["parameterValues"], outputs=result["outputs"])
    assert json.loads(json.loads(escaped)) == result


def test_a_placeholder_for_an_input_that_was_not_given_is_refused_by_name() -> None:
    with pytest.raises(Refused, match="'name', which was not given"):
        filled("hello {{$.inputs.parameters['name']}}", {"nom": "you"})


def test_outputs_are_read_from_the_one_file_or_from_the_parameters_own() -> None:
    pipeline = samples.read(samples.doubled)
    both = {"/tmp/kfp_outputs/output_metadata.json": b'{"parameterValues": {"Output": [1.0, 2.5]}}'}
    assert outputs_of(pipeline, "comp-count", both) == {"Output": [1, 2.5]}
    assert outputs_of(pipeline, "comp-count", {"/tmp/kfp/outputs/Output": b"[3]"}) == {"Output": [3]}
    with pytest.raises(Refused, match="put out no parameter 'Output'"):
        outputs_of(pipeline, "comp-count", {})


def test_artifacts_go_into_loops_and_come_out_of_them_as_one_list() -> None:
    waves, tree = played(samples.read(samples.fitted), lambda node: {"Output": node.name})
    assert tree.state is State.SUCCEEDED
    (gather,), fits, (judge,) = waves
    assert gather.input_artifacts == {}
    rows = {"name": "rows", "type": {"schemaTitle": "system.Dataset", "schemaVersion": "0.0.1"},
            "uri": f"{ROOT}/gather/rows", "metadata": {}}
    assert [node.input_artifacts for node in fits] == [{"rows": [rows]}] * 2
    assert [one["uri"] for one in judge.input_artifacts["models"]] == [
        f"{ROOT}/for-loop-2/{number}/fit/model" for number in (0, 1)]
    given = executor_input(samples.read(samples.fitted), fits[0], ROOT)
    assert given["inputs"]["artifacts"] == {"rows": {"artifacts": [rows]}}
    text = filled("{{$.inputs.artifacts['rows'].path}} {{$.outputs.artifacts['model'].uri}}", {},
                  outputs=given["outputs"], artifacts=given["inputs"]["artifacts"])
    assert text == f"/minio/bucket/run/gather/rows {ROOT}/for-loop-2/0/fit/model"


@pytest.mark.parametrize(("uri", "kept"), [
    ("", f"{ROOT}/gather/rows"), (f"{ROOT}/elsewhere", f"{ROOT}/elsewhere"), ("eyrie://data", "eyrie://data"),
    ("s3://ours/data", None), ("minio://bucket/running/data", None)])
def test_a_component_may_set_metadata_but_no_uri_that_the_launcher_would_upload_elsewhere(
        uri: str, kept: str | None) -> None:
    pipeline = samples.read(samples.fitted)
    handed = executor_input(pipeline, next(startable(walk(pipeline, {}, {}))), ROOT)
    said = {"artifacts": {"rows": {"artifacts": [{"name": "rows", "uri": uri, "metadata": {"rows": 3}}]}}}
    files = {"/tmp/kfp_outputs/output_metadata.json": json.dumps(said).encode()}
    if kept is None:
        with pytest.raises(Refused, match="does not have expected bucket prefix"):
            merged_artifacts(handed, files, ROOT)
        return
    (artifact,) = merged_artifacts(handed, files, ROOT)["rows"]
    assert (artifact["uri"], artifact["metadata"]) == (kept, {"rows": 3})


def test_the_launcher_knows_three_schemes() -> None:
    uris = ("gs://b/k", "s3://b/k", "minio://b/k", "file:///k", "/k")
    assert [local_path(uri) for uri in uris] == ["/gcs/b/k", "/s3/b/k", "/minio/b/k", None, None]


def test_after_a_failure_nothing_new_starts_and_what_runs_decides_when_it_is_over() -> None:
    pipeline = samples.read(samples.two_branches)
    first = [node.path for node in startable(walk(pipeline, {}, {}))]
    seen = {first[0]: Seen(State.FAILED), first[1]: Seen(State.RUNNING)}
    tree = walk(pipeline, {}, seen)
    assert (tree.state, list(startable(tree))) == (State.RUNNING, [])
    tree = walk(pipeline, {}, seen | {first[1]: Seen(State.SUCCEEDED, {"Output": "done"})})
    assert (tree.state, list(startable(tree))) == (State.FAILED, [])


def test_missing_and_unknown_arguments_are_refused_by_name() -> None:
    pipeline = samples.read(samples.greeted())
    with pytest.raises(Refused, match=r"\['secret', 'who'\] are required"):
        arguments_of(pipeline, {})
    with pytest.raises(Refused, match=r"no input parameters \['whom'\]"):
        arguments_of(pipeline, {"whom": "x"})


def test_what_is_not_read_is_refused_before_anything_runs() -> None:
    @dsl.pipeline(name="conditional")
    def conditional(name: str) -> None:
        with dsl.If(name == "x"):
            samples.step()

    with pytest.raises(Refused, match="triggerPolicy is not read"):
        refuse_what_is_not_read(samples.read(conditional))


@pytest.mark.parametrize("together", [False, True])
def test_the_job_pipeline_is_read_from_its_first_stage_to_its_last(together: bool) -> None:
    from eyrie_api.contract.cluster import ClusterProfile
    from eyrie_api.planning.resolve import derive
    from eyrie_pipelines.placement import compile_for
    from tests.kubeflow.jobs import refuse_settings_not_read
    from tests.pipelines.conftest import spec_of

    profile = ClusterProfile.model_validate({
        "kubeflow": {"url": "http://kubeflow:8888"},
        "stages": {"image": samples.IMAGE, "work": {"kind": "volume", "claim": "work"},
                   "host_paths": [{"path": "/usr", "mount_path": "/usr"}]}})
    job = derive(spec_of()).model_copy(update={"trains_together": together})
    pipeline = Pipeline.of(compile_for(profile, job))
    refuse_settings_not_read(pipeline)

    def stage(node: Node) -> dict[str, Any]:
        lists = {"list-candidates": ["c0", "c1"], "list-checkpoints": ["c0-e1", "c1-e1", "c1-e2"]}
        return {"Output": lists.get(node.name, f"{node.name} of {node.inputs.get('checkpoint')}")}

    waves, tree = played(pipeline, stage, job_dir="/job", spec_digest="d", code_version="v", target="t", data="d",
                         sweep="s")
    names = [sorted({node.name for node in wave}) for wave in waves]
    assert names == [["list-candidates", "regenerate"], ["capture"], *([["sweep"]] if together else []), ["train"],
                     ["list-checkpoints"], ["benchmark"], ["benchmark"], ["benchmark"], ["select"], ["tune"], ["prove"]]
    assert [wave[0].inputs.get("checkpoint") for wave in waves[-6:-3]] == ["c0-e1", "c1-e1", "c1-e2"]
    assert waves[-3][0].inputs["benchmarked"] == [f"benchmark of {one}" for one in ("c0-e1", "c1-e1", "c1-e2")]
    assert tree.outputs == {"Output": "prove of select of None"}


@given(st.lists(st.sets(st.integers(0, 6)), min_size=1, max_size=7))
@settings(max_examples=20)
def test_every_task_starts_once_and_after_all_it_waits_for(waits: list[set[int]]) -> None:
    """`waits[i]`: tasks before the i-th for which it waits."""

    @dsl.pipeline(name="drawn")
    def drawn() -> None:
        tasks: list[Any] = []
        for needed in waits:
            task = samples.step()
            task.after(*(tasks[other] for other in needed if other < len(tasks)))
            tasks.append(task)

    names = ["step", *(f"step-{index}" for index in range(2, len(waits) + 1))]
    waves, tree = played(samples.read(drawn), counting)
    started = [node.path for wave in waves for node in wave]
    assert sorted(started) == sorted(names)
    assert tree.state is State.SUCCEEDED
    wave_of = {node.path: number for number, wave in enumerate(waves) for node in wave}
    for index, needed in enumerate(waits):
        before = [wave_of[names[other]] for other in needed if other < index]
        assert wave_of[names[index]] == max(before, default=-1) + 1
