"""From flags to a job spec, and the errors of wrong flags."""

from pathlib import Path

import pytest

from eyrie_api.cli.spec import build_job, measurement
from eyrie_api.errors import InvalidInput


def test_flags_alone_make_a_whole_job() -> None:
    job = build_job(name="mine", target="./model", data=["a.jsonl", "b.parquet"], dtype="bfloat16")
    assert (job.name, job.target.model, job.target.dtype) == ("mine", "./model", "bfloat16")
    assert [source.path for source in job.data.sources] == ["a.jsonl", "b.parquet"]


def test_settings_override_flags_and_flags_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: filed\ntarget: {model: one, revision: main}\ndata: {sources: [{path: x.jsonl}]}\n"
                    "train: {epochs: 2}\n")
    job = build_job(file=file, target="two", settings=["train.epochs=3", "name=set", "target.dtype=float16"])
    assert (job.name, job.target.model, job.target.revision, job.target.dtype) == ("set", "two", "main", "float16")
    assert job.train.epochs == 3
    assert job.data.sources[0].path == "x.jsonl"


@pytest.mark.parametrize(("setting", "field", "expected"), [
    ("train.learning_rate=5e-4", "learning_rate", 5e-4), ("train.max_steps=null", "max_steps", None),
    ("train.seed=7", "seed", 7), ("train.schedule=cosine", "schedule", "cosine"),
])
def test_values_mean_what_they_look_like(setting: str, field: str, expected: object) -> None:
    job = build_job(target="t", data=["d"], settings=[setting])
    assert getattr(job.train, field) == expected


def test_lists_and_flags_of_the_contract_can_be_set() -> None:
    job = build_job(target="t", data=["d"], settings=["tune.top_k=[1, 2]", "serve.enabled=false"])
    assert job.tune.top_k == (1, 2)
    assert job.serve.enabled is False


@pytest.mark.parametrize(("arguments", "named"), [
    ({"data": ["d"]}, "--target"), ({"target": "t"}, "--data"),
    ({"target": "t", "data": ["d"], "settings": ["train.epochs"]}, "--set"),
    ({"target": "t", "data": ["d"], "settings": ["train.epocs=3"]}, "train.epocs"),
    ({"target": "t", "data": ["d"], "settings": ["train.epochs=many"]}, "train.epochs"),
    ({"target": "t", "data": ["d"], "settings": ["name.x.y=1", "name=a"]}, "name"),
    ({"target": "t", "data": ["d"], "settings": ["drafter.draft_vocab_size=[1"]}, "--set"),
    ({"target": "t", "data": ["d"], "settings": ["tune.num_steps=[16]"]}, "num_steps 16"),
    ({"file": Path("nowhere.yaml")}, "nowhere.yaml"),
])
def test_what_is_wrong_is_named_with_a_hint(arguments: dict[str, object], named: str) -> None:
    if "name.x.y=1" in str(arguments):
        arguments = arguments | {"name": "text"}
    with pytest.raises(InvalidInput) as refused:
        build_job(**arguments)  # type: ignore[arg-type]
    assert named in str(refused.value)
    assert refused.value.hint


@pytest.mark.parametrize(("document", "hint"), [
    ("train: {learning_rat: 1}", "did you mean 'learning_rate'?"),
    ("trian: {}", "did you mean 'train'?"),
    ("promotion: {frobnicate: 1}", "remove it"),
    ("benchmark: {suites: [{name: a, path: held-out, max_prompt: 8}]}", "did you mean 'max_prompts'?"),
    ("placement: {stages: {train: {num_gpu: 1}}}", "did you mean 'num_gpus'?"),
    ("train: {epoch: 1, sede: 1}", "train.epoch: did you mean 'epochs'?; train.sede: did you mean 'seed'?")])
def test_a_misspelt_field_of_a_file_is_answered_with_the_right_one(tmp_path: Path, document: str, hint: str) -> None:
    (tmp_path / "job.yaml").write_text(document)
    with pytest.raises(InvalidInput) as refused:
        build_job(file=tmp_path / "job.yaml", target="t", data=["d"])
    assert refused.value.hint == hint


def test_the_job_of_a_kubernetes_object_is_taken_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "object.yaml"
    file.write_text("apiVersion: eyrie.dev/v1alpha1\nkind: DrafterJob\nmetadata: {name: bot}\nspec:\n"
                    "  job: {target: {model: one}, data: {sources: [{path: x.jsonl}]}, train: {epochs: 2}}\n")
    job = build_job(file=file, settings=["train.epochs=3"])
    assert (job.target.model, job.train.epochs) == ("one", 3)
    file.write_text("kind: DrafterJob\nspec: {}\n")
    with pytest.raises(InvalidInput, match=r"spec\.job"):
        build_job(file=file)


@pytest.mark.parametrize("content", ["- a list", "a: [", "just words", "\x00"])
def test_a_file_that_is_no_job_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(content)
    with pytest.raises(InvalidInput, match=r"job\.yaml"):
        build_job(file=file, target="t", data=["d"])


def test_the_job_that_times_rounds_keeps_engine_drafter_and_grid_trains_one_step_and_serves_nothing() -> None:
    job = build_job(target="org/model", data=["chats.jsonl"], settings=[
        "engine.kind=sglang", "drafter.intermediate_size=512", "sweep.families=[eagle1, dflash]",
        "tune.num_steps=[2, 4]", "tune.concurrencies=[1, 16]", "data.max_conversations=40", "train.epochs=9",
        "promotion.min_speedup=1.3", "rivals=[{method: ngram}]"])
    timed = measurement(job)
    assert (timed.target, timed.engine) == (job.target, job.engine)
    assert (timed.drafter.family, timed.drafter.intermediate_size) == ("eagle1", 512), "of the first candidate"
    assert (timed.tune.num_steps, timed.tune.concurrencies, timed.promotion.min_speedup) == ((2, 4), (1, 16), 1.3)
    assert (timed.train.max_steps, timed.train.num_checkpoints, timed.data.max_conversations) == (1, 1, 40)
    assert (timed.promotion.mode, timed.serve.enabled, timed.rivals, timed.sweep.families) == (
        "never", False, (), ())
    automatic = build_job(target="org/model", data=["chats.jsonl"], settings=["sweep.families=[auto]"])
    assert measurement(automatic).drafter.family == "eagle3", "the server knows which families it trains"
    with pytest.raises(InvalidInput, match="this job trains none"):
        measurement(build_job(target="org/model", drafters=["org/head"], prompts=["chats.jsonl"]))
