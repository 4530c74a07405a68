"""What is refused before anything runs, and what is let through."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from eyrie_api.artifacts.store import StoreOptions
from eyrie_api.contract.engine import SGLANG_PROGRAM, DraftTreeShape
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.placement import JobPlacement
from eyrie_api.contract.reports import LeaderboardEntry
from eyrie_api.contract.status import Job, JobStatus
from eyrie_api.contract.targets import JobTarget, resolve_dtype
from eyrie_api.errors import (
    DiskTooSmall,
    EyrieError,
    GpuTooSmall,
    InvalidInput,
    NoChatTemplate,
    NotFound,
    NoUsableData,
    TargetNotFound,
    UnsupportedTarget,
    VocabularyTooLarge,
)
from eyrie_api.planning.facts import target_facts
from eyrie_api.planning.preflight import check, plan
from eyrie_api.planning.published_drafters import with_drafters_of_jobs
from eyrie_api.planning.resolve import with_gpu_defaults
from eyrie_api.settings import Settings
from tests.api.samples import job_spec, target_directory
from tests.tiny import tiny_mimo, tiny_target

ROW = '{"messages": [{"role": "user", "content": "hi"}]}\n'


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests that only read it: a template is probed, in a process, once per directory."""
    return target_directory(tmp_path_factory.mktemp("target") / "target")


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has SGLang, as far as its control plane sees."""
    monkeypatch.setenv(SGLANG_PROGRAM, "python -m sglang.launch_server")


def data(path: object, **more: Any) -> dict[str, Any]:
    return {"sources": [{"path": str(path)}], **more}


def refused(settings: Settings, kind: type[EyrieError], says: str, **changes: Any) -> None:
    with pytest.raises(kind, match=says) as caught:
        check(job_spec(**changes), settings)
    assert caught.value.hint


def test_a_local_target_with_local_data_is_accepted_with_absolute_paths(
        settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_directory(tmp_path / "target")
    (tmp_path / "chats.jsonl").write_text(ROW)
    monkeypatch.chdir(tmp_path)
    checked = check(job_spec(target={"model": "./target"}, data=data("chats.jsonl")), settings)
    assert checked.spec.target.model == str(target)
    assert checked.spec.data.sources[0].path == str(tmp_path / "chats.jsonl")
    assert checked.plan is not None


def test_a_hub_target_that_is_not_in_the_cache_is_left_to_the_stages(
        settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    spec = job_spec(target={"model": "org/name"})
    assert check(spec, settings).plan is None
    with pytest.raises(InvalidInput, match="not in the Hub cache of the server") as refusal:
        plan(spec, settings)
    assert "`hf download org/name config.json`" in refusal.value.hint


def test_config_json_in_the_hub_cache_is_enough_for_a_plan(
        settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--org--name" / "refs").mkdir(parents=True)
    (tmp_path / "models--org--name" / "refs" / "main").write_text("0" * 40)
    config = target_directory(tmp_path / "complete") / "config.json"
    snapshot = tmp_path / "models--org--name" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    config.rename(snapshot / "config.json")
    assert plan(job_spec(target={"model": "org/name"}), settings).total_bytes_on_disk > 0


def test_a_training_step_that_no_gpu_of_the_requested_type_holds_is_refused_with_the_number_to_change(
        settings: Settings, target: Path, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(ROW)
    job: dict[str, Any] = {"target": {"model": str(target)}, "data": data(tmp_path / "chats.jsonl")}
    placed = {"stages": {"train": {"num_gpus": 2, "gpu_type": "Some-1GB"}}}
    refused(settings, GpuTooSmall, "Some-1GB has", **job, placement=placed, train={"max_tokens_per_gpu": 1_000_000})
    large = {"stages": {"train": {"num_gpus": 2, "gpu_type": "Some-80GB"}}}
    planned = plan(job_spec(**job, placement=large, train={"max_tokens_per_batch": 32_768}), settings)
    shown = {one.name: one for one in planned.assumptions}
    assert shown["tokens per training step"].value == 2 * 16_384
    assert 0.0 < shown["training memory of each GPU"].value < 80.0
    assert "computed, not measured" in shown["training memory of each GPU"].source
    assert "training memory of each GPU" not in {one.name for one in plan(job_spec(**job), settings).assumptions}


def test_a_target_that_streams_its_states_counts_with_the_training_step_unless_it_has_devices_of_its_own(
        settings: Settings, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chats.jsonl").write_text(ROW)
    job: dict[str, Any] = {
        "target": {"model": str(target)}, "data": data(tmp_path / "chats.jsonl"), "train": {"max_tokens_per_gpu": 512},
        "placement": {"stages": {"train": {"num_gpus": 2, "gpu_type": "Some-2GB"}}}}

    def memory(**capture: Any) -> float:
        planned = plan(job_spec(**job, capture=capture), settings)
        return next(one.value for one in planned.assumptions if one.name == "training memory of each GPU")

    streamed = {"mode": "stream", "stream_buffer_bytes": 500_000_000}
    assert memory(**streamed) >= memory() + 0.5
    large = streamed | {"stream_buffer_bytes": 2**31}
    refused(settings, GpuTooSmall, "set capture.mode to 'store', or ", **job, capture=large)
    monkeypatch.setenv("EYRIE_TARGET_DEVICE", "cuda:1")
    assert memory(**large) > 2.0


def test_a_hub_target_in_the_cache_is_checked_like_a_directory(
        settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--org--name"
    target_directory(model / "snapshots" / "abc", architectures=["GPT2LMHeadModel"])
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc\n")
    refused(settings, UnsupportedTarget, "GPT2LMHeadModel", target={"model": "org/name"})


@pytest.mark.parametrize("model", ["/no/such/dir", "./nope", "~/nope", "a/b/c", "nothing", "~nobody/x", "bad\0name",
                                   "x" * 4000])
def test_a_target_that_does_not_exist_is_not_found(settings: Settings, model: str) -> None:
    refused(settings, TargetNotFound, "target.model", target={"model": model})


def test_a_directory_without_config_is_not_a_target(settings: Settings, tmp_path: Path) -> None:
    refused(settings, TargetNotFound, "config.json", target={"model": str(tmp_path)})


@pytest.mark.parametrize("text", ["{", "[]", '"x"', "\x80", "[" * 100_000, '{"a": ' * 100_000,
                                  '{"a": ' + "9" * 5000 + "}"], ids=range(7))
def test_an_unreadable_config_is_refused(settings: Settings, tmp_path: Path, text: str) -> None:
    target = target_directory(tmp_path / "target")
    (target / "config.json").write_bytes(text.encode("latin-1"))
    refused(settings, UnsupportedTarget, "config.json", target={"model": str(target)})


@pytest.mark.parametrize("change", [{"hidden_size": "big"}, {"num_hidden_layers": 0}, {"vocab_size": True},
                                    {"num_attention_heads": 1.5}])
def test_a_config_figure_that_is_not_a_positive_integer_is_named(
        settings: Settings, tmp_path: Path, change: dict[str, Any]) -> None:
    path = target_directory(tmp_path / "t", **change)
    refused(settings, UnsupportedTarget, next(iter(change)), target={"model": str(path)})


@pytest.mark.parametrize("architectures", [["MixtralForCausalLM"], [], None, "LlamaForCausalLM"])
def test_an_architecture_we_cannot_decode_is_refused_and_the_supported_ones_are_named(
        settings: Settings, tmp_path: Path, architectures: Any) -> None:
    path = target_directory(tmp_path / "t", architectures=architectures)
    with pytest.raises(UnsupportedTarget) as caught:
        check(job_spec(target={"model": str(path)}), settings)
    assert "Qwen3ForCausalLM" in caught.value.hint


def test_a_target_without_tokenizer_or_without_chat_template_is_refused(settings: Settings, tmp_path: Path) -> None:
    target = target_directory(tmp_path / "target")
    (target / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 10, "eos_token": "<end>"}))
    refused(settings, NoChatTemplate, "without a chat template", target={"model": str(target)})
    (target / "chat_template.jinja").write_text("{{ messages }}")
    check(job_spec(target={"model": str(target)}), settings)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).unlink()
    refused(settings, UnsupportedTarget, "no tokenizer", target={"model": str(target)})


def test_data_that_is_missing_or_empty_is_refused(settings: Settings, target: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text("\n\n")
    model = {"model": str(target)}
    refused(settings, NoUsableData, "no such file", target=model, data=data(tmp_path / "missing.jsonl"))
    refused(settings, NoUsableData, "no such file", target=model, data=data("missing.jsonl"))
    refused(settings, NoUsableData, "is empty", target=model, data=data(tmp_path / "empty.jsonl"))
    refused(settings, NoUsableData, "no rows", target=model, data=data(tmp_path / "blank.jsonl"))
    (tmp_path / "none").mkdir()
    refused(settings, NoUsableData, "a directory without data files", target=model, data=data(tmp_path / "none"))
    refused(settings, NoUsableData, "matches no file", target=model, data=data(tmp_path / "x*.jsonl"))
    refused(settings, InvalidInput, "neither a file", target=model, data=data("chats"))


@pytest.mark.parametrize(("path", "says"), [
    ("quickstart:poetry", "not shipped"), ("/no/suite.jsonl", "no file"), ("suite", "neither")])
def test_a_suite_that_does_not_exist_is_refused(settings: Settings, path: str, says: str) -> None:
    refused(settings, InvalidInput, says, benchmark={"suites": [{"name": "s", "path": path}]})


def test_files_of_a_directory_or_pattern_are_all_checked(settings: Settings, target: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats"
    chats.mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (chats / name).write_text(ROW)
    for path in (chats, chats / "*.jsonl"):
        assert check(job_spec(target={"model": str(target)}, data=data(path)), settings).spec.data.sources[0].path \
            == str(path)
    (chats / "b.jsonl").write_text("{}\n")
    refused(settings, NoUsableData, "b.jsonl': none of its first 1 rows", target={"model": str(target)},
            data=data(chats))


@pytest.mark.parametrize(("rows", "given", "fraction"), [
    (10, {}, 0.2), (400, {}, 0.16), (100_000, {}, 0.064), (400, {"held_out_fraction": 0.05}, 0.05)])
def test_own_data_without_suites_is_held_out_in_part(
        settings: Settings, target: Path, tmp_path: Path, rows: int, given: dict[str, float], fraction: float) -> None:
    (tmp_path / "chats.jsonl").write_text(ROW * rows)
    spec = job_spec(target={"model": str(target)}, data=data(tmp_path / "chats.jsonl", max_conversations=1000, **given))
    assert "suites" not in spec.benchmark.model_fields_set
    checked = check(spec, settings)
    assert [suite.path for suite in checked.spec.benchmark.suites] == ["held-out"]
    assert checked.spec.data.held_out_fraction == pytest.approx(fraction)
    assert checked.plan is not None
    assert any("prompts held out of the data" in note for note in checked.plan.notes)


@pytest.mark.parametrize(("rows", "max_prompts", "fraction"), [(10, 8, 0.2), (1000, 40, 0.08), (100_000, 80, 0.02)])
def test_enough_is_held_out_for_a_suite_that_names_held_out_prompts(
        settings: Settings, target: Path, tmp_path: Path, rows: int, max_prompts: int, fraction: float) -> None:
    (tmp_path / "chats.jsonl").write_text(ROW * rows)
    checked = check(job_spec(
        target={"model": str(target)}, data=data(tmp_path / "chats.jsonl", max_conversations=20_000),
        benchmark={"suites": [{"name": "ours", "path": "held-out", "max_prompts": max_prompts}]}), settings)
    assert checked.spec.data.held_out_fraction == pytest.approx(fraction)
    assert checked.plan is not None
    assert any(f"up to {max_prompts} prompts held out" in note for note in checked.plan.notes)


def test_a_fraction_that_holds_out_less_than_one_prompt_is_refused(
        settings: Settings, target: Path, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(ROW * 20)
    refused(settings, InvalidInput, r"data\.held_out_fraction 0\.02 of about 20 conversations",
            target={"model": str(target)}, data=data(tmp_path / "chats.jsonl", held_out_fraction=0.02),
            benchmark={"suites": [{"name": "ours", "path": "held-out"}]})


def test_quickstart_data_and_named_suites_are_left_as_they_are(settings: Settings, target: Path,
                                                              tmp_path: Path) -> None:
    shipped = check(job_spec(target={"model": str(target)}, data=data("quickstart")), settings).spec
    assert [suite.path for suite in shipped.benchmark.suites][:1] == ["quickstart:chat"]
    (tmp_path / "chats.jsonl").write_text(ROW)
    named = check(job_spec(target={"model": str(target)}, data=data(tmp_path / "chats.jsonl"), benchmark={
        "suites": [{"name": "s", "path": "quickstart:math"}]}), settings).spec
    assert [suite.path for suite in named.benchmark.suites] == ["quickstart:math"]
    refused(settings, InvalidInput, "benchmark.suites is omitted", target={"model": str(target)},
            data=data(tmp_path / "chats.jsonl", held_out_fraction=0.0))


@pytest.mark.parametrize(("model", "suite"), [("own", "held-out"), ("quickstart", "quickstart:chat")])
def test_own_data_next_to_quickstart_is_held_out_in_part_except_with_the_shipped_target(
        settings: Settings, target: Path, tmp_path: Path, model: str, suite: str) -> None:
    (tmp_path / "chats.jsonl").write_text(ROW * 400)
    sources = {"sources": [{"path": str(tmp_path / "chats.jsonl")}, {"path": "quickstart"}]}
    checked = check(job_spec(target={"model": str(target) if model == "own" else model}, data=sources), settings)
    assert checked.spec.benchmark.suites[0].path == suite


def test_a_held_out_suite_needs_held_out_prompts(settings: Settings) -> None:
    suites = {"suites": [{"name": "s", "path": "held-out"}]}
    refused(settings, InvalidInput, "held_out_fraction", benchmark=suites,
            data=data("quickstart", held_out_fraction=0.0))


def test_a_draft_vocabulary_larger_than_the_targets_is_refused_in_the_job_and_in_a_sweep(
        settings: Settings, target: Path) -> None:
    model = {"model": str(target)}
    refused(settings, VocabularyTooLarge, "321 .*320", target=model, drafter={"draft_vocab_size": 321})
    refused(settings, VocabularyTooLarge, "candidate c2", target=model,
            sweep={"axes": [{"field": "drafter.draft_vocab_size", "values": [64, 999]}]})
    check(job_spec(target=model, drafter={"draft_vocab_size": 320}), settings)


def test_stored_opinions_are_about_one_draft_vocabulary_which_every_candidate_must_have(
        settings: Settings, target: Path) -> None:
    topk = {"final_state": "topk", "draft_vocab_size": 64}
    refused(settings, InvalidInput, "128 .*candidate c2.* 64 draft tokens", target={"model": str(target)},
            capture=topk, sweep={"axes": [{"field": "drafter.draft_vocab_size", "values": [64, 128]}]})
    check(job_spec(target={"model": str(target)}, capture=topk, drafter={"draft_vocab_size": 64}), settings)


def test_stored_opinions_about_a_vocabulary_that_follows_the_answers_allow_no_drafter_of_another_size(
        settings: Settings, tmp_path: Path) -> None:
    model, topk = {"model": str(tiny_target(tmp_path / "target", vocab_size=6000))}, {"final_state": "topk"}
    refused(settings, InvalidInput, "as many draft tokens as the answers need", target=model, capture=topk,
            drafter={"draft_vocab_size": 5000})
    check(job_spec(target=model, capture=topk), settings)


def test_layers_the_target_does_not_have_are_refused(settings: Settings, target: Path) -> None:
    refused(settings, InvalidInput, r"\[5\] of a target with 4 layers", target={"model": str(target)},
            capture={"aux_layers": [1, 2, 5]})


@pytest.mark.parametrize(("values", "says"), [
    ([[1, 2], [3, 2]], r"drafter\.aux_layers \(candidate c2-aux-3-2\) \[3, 2\] are not distinct and ascending"),
    ([[1, 99]], r"\[99\]"),
])
def test_layers_that_a_candidate_cannot_have_are_refused(settings: Settings, values: Any, says: str) -> None:
    refused(settings, InvalidInput, says, sweep={"axes": [{"field": "drafter.aux_layers", "values": values}]})


def test_layers_are_refused_where_no_family_fuses_any(settings: Settings) -> None:
    refused(settings, InvalidInput, "no family of the job fuses", drafter={"family": "medusa", "aux_layers": [1, 2]})


def test_a_limit_of_seconds_and_rungs_which_compare_equal_steps_are_refused_together(settings: Settings) -> None:
    axes = [{"field": "train.learning_rate", "values": [1e-3, 2e-3]}]
    refused(settings, InvalidInput, r"train.max_seconds 60.0 \(candidate c1-.*\) with sweep.rungs \[0.25, 0.5\]",
            train={"max_seconds": 60}, sweep={"axes": axes})
    for sweep in ({}, {"axes": axes, "rungs": []}, {"axes": axes, "shared_passes": "never"}):
        check(job_spec(train={"max_seconds": 60}, sweep=sweep), settings)


def test_a_sweep_over_a_field_that_does_not_exist_is_refused(settings: Settings) -> None:
    refused(settings, InvalidInput, "does not exist", sweep={"axes": [{"field": "train.speed", "values": [1]}]})


def test_a_job_that_does_not_fit_the_disk_is_refused_with_both_sizes(settings: Settings, tmp_path: Path) -> None:
    path = target_directory(tmp_path / "huge", hidden_size=8_388_608, head_dim=16)
    with pytest.raises(DiskTooSmall, match=r"needs about .*iB under .*iB are free") as caught:
        check(job_spec(target={"model": str(path)}, data=data("quickstart", max_conversations=100_000_000)), settings)
    assert "max_conversations" in caught.value.hint


def test_a_target_sglang_cannot_draft_for_is_refused_when_sglang_is_to_serve_it(settings: Settings,
                                                                                tmp_path: Path) -> None:
    mixtral = target_directory(tmp_path / "mixtral", architectures=["MixtralForCausalLM"])
    refused(settings, UnsupportedTarget, "SGLang", target={"model": str(mixtral)}, engine="sglang")
    refused(settings, UnsupportedTarget, "embedded engine does not compute", target={"model": str(mixtral)})


@pytest.mark.usefixtures("sglang")
def test_a_target_the_embedded_engine_does_not_compute_is_accepted_for_sglang_where_that_captures_its_layers(
        settings: Settings, tmp_path: Path) -> None:
    mixture = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
               "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    job = {"target": {"model": str(target_directory(tmp_path / "target", **mixture))}, "engine": "sglang"}
    assert check(job_spec(**job), settings).plan is not None
    with pytest.raises(UnsupportedTarget) as caught:
        check(job_spec(**job | {"engine": "embedded"}), settings)
    assert caught.value.hint.startswith("set engine to 'sglang', or use a target of LlamaForCausalLM")
    refused(settings, InvalidInput, "probe_layers", **job, capture={"probe_layers": True})
    refused(settings, UnsupportedTarget, "'qwen3_moe' is not supported", **job, capture={"source": "reference"})
    refused(settings, InvalidInput, "layer 0, the embeddings", **job,
            capture={"source": "sglang", "aux_layers": [0, 2]})
    # A GPU too small for the weights: the engine itself computes the states.
    job["placement"] = {"stages": {"capture": {"gpu_type": "Tiny-0GB"}}}
    refused(settings, InvalidInput, "layer 0, the embeddings", **job, capture={"aux_layers": [0, 2]})


def test_a_mixture_of_experts_is_counted_whole_for_memory_and_by_its_active_experts_for_time(tmp_path: Path) -> None:
    # Qwen3-235B-A22B, whose name has both numbers.
    path = target_directory(tmp_path / "t", hidden_size=4096, num_hidden_layers=94, num_attention_heads=64,
                            head_dim=128, num_key_value_heads=4, vocab_size=151_936, intermediate_size=12_288,
                            num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536)
    facts = target_facts(path)
    assert facts.parameters == pytest.approx(235e9, rel=0.01)
    assert facts.active_parameters == pytest.approx(22e9, rel=0.02)


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize("engine", ["embedded", "sglang"])
@pytest.mark.parametrize(("layers", "says"), [
    ([1, 2, 4], "last layer"), ([2], "one layer"), ([1, 3, 2], "ascending"), ([1, 1, 3], "distinct")])
def test_layers_no_checkpoint_can_name_are_refused_at_submission(settings: Settings, target: Path, engine: str,
                                                                layers: list[int], says: str) -> None:
    job = {"target": {"model": str(target)}, "engine": engine}
    refused(settings, InvalidInput, says, **job, capture={"aux_layers": layers})
    with pytest.raises(InvalidInput, match=says):
        plan(job_spec(**job, capture={"aux_layers": layers}), settings)
    for good in (None, [1, 2, 3], [0, 3]):
        assert check(job_spec(**job, capture={"aux_layers": good}), settings).plan is not None


@pytest.mark.usefixtures("sglang")
def test_a_windowed_drafter_is_not_tuned_into_a_tree_that_sglang_would_serve(settings: Settings, target: Path) -> None:
    job = {"target": {"model": str(target)}, "engine": "sglang"}
    refused(settings, InvalidInput, "sliding_window 512", **job, drafter={"sliding_window": 512})
    refused(settings, InvalidInput, "sliding_window 64", **job,
            sweep={"axes": [{"field": "drafter.sliding_window", "values": [64]}]})
    assert check(job_spec(**job, drafter={"sliding_window": 512}, tune={"top_k": [1]}), settings).plan is not None
    assert check(job_spec(**job | {"engine": "embedded"}, drafter={"sliding_window": 512}), settings).plan is not None


@pytest.mark.parametrize(("asked", "stored", "placed", "accepted"), [
    (None, "bfloat16", {}, "float32"),
    ("auto", "bfloat16", {"every": {"num_gpus": 1}}, "bfloat16"),
    ("auto", "float32", {"stages": {"capture": {"num_gpus": 1}}}, "float32"),
    ("float32", "bfloat16", {"every": {"num_gpus": 1}}, "float32"),
])
def test_an_accepted_job_names_the_dtype_that_auto_means(
        asked: str | None, stored: str, placed: dict[str, Any], accepted: str, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EYRIE_DEVICE", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # counted as one GPU, on any machine
    target = target_directory(tmp_path, dtype=stored)
    spec = job_spec(target={"model": str(target)} | ({} if asked is None else {"dtype": asked}), placement=placed)
    checked = check(spec, Settings(home=tmp_path))
    assert (checked.spec.target.dtype, checked.target.dtype) == (accepted, accepted)
    assert checked.plan is not None
    (weights,) = [one for one in checked.plan.assumptions if one.name == "target weights"]
    assert weights.source.startswith(accepted)
    # A job accepted before is not resolved a second time: neither on another machine nor after config.json changed.
    again = check(checked.spec.model_copy(update={"placement": JobPlacement()}), Settings(home=tmp_path))
    assert again.spec.target == checked.spec.target


H100 = "NVIDIA-H100-80GB-HBM3"


def on_cluster(tmp_path: Path, **stages: Any) -> Settings:
    """The settings of a cluster whose administrator places stages like this."""
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({"kubeflow": {"url": "http://ml-pipeline:8888"}, "stages": {
        "image": "eyrie/workers", "work": {"kind": "s3", "url": "s3://bucket/eyrie"}} | stages}))
    return Settings(home=tmp_path, cluster_profile=file)


def test_the_gpus_of_the_clusters_profile_decide_dtype_engine_and_plan_as_those_of_the_job_do(tmp_path: Path) -> None:
    settings = on_cluster(tmp_path, num_gpus=1, gpu_type=H100)
    target = target_directory(tmp_path / "own", dtype="bfloat16")
    short = job_spec(target={"model": str(target), "dtype": "auto"}, data={"sources": [{"path": "org/chats"}]})
    checked = check(short, settings)
    assert (checked.spec.target.dtype, checked.spec.engine.kind) == ("bfloat16", "sglang")
    assert (checked.spec.data.max_conversations, checked.spec.regenerate.concurrency) == (20_000, 64)
    assert checked.spec.placement == JobPlacement(), "what is stored requests what the job says"
    assert checked.plan is not None
    assert {(one.num_gpus, one.gpu_type) for one in checked.plan.stages} == {(1, "H100")}
    assert "engine sglang, data.max_conversations 20000" in " ".join(plan(short, settings).notes)
    exact = check(short.model_copy(update={"target": JobTarget(model=str(target), dtype="float32")}), settings)
    assert exact.spec.engine.kind == "embedded", "SGLang's kernels on GPUs have no float32"
    declined = short.model_copy(update={"placement": JobPlacement.model_validate({"every": {"num_gpus": 0}})})
    assert check(declined, settings).spec.target.dtype == "float32"


def test_what_a_job_names_stays_and_the_shipped_target_needs_no_more(tmp_path: Path) -> None:
    settings = on_cluster(tmp_path, num_gpus=1, gpu_type=H100)
    target = target_directory(tmp_path / "own", dtype="bfloat16")
    named = check(job_spec(target={"model": str(target)}, engine="embedded",
                           data={"sources": [{"path": "org/chats"}], "max_conversations": 300}), settings).spec
    assert (named.engine.kind, named.data.max_conversations) == ("embedded", 300)
    shipped = check(job_spec(target={"model": "quickstart"}, data={"sources": [{"path": "quickstart"}]}), settings).spec
    assert (shipped.engine.kind, shipped.data.max_conversations) == ("embedded", 1000)


@pytest.mark.parametrize(("fields", "num_gpus", "in_flight"), [
    ({}, 8, 512), ({}, 0, 24), ({"regenerate": {"concurrency": 100}}, 8, 100), ({"engine": "embedded"}, 8, 24),
    ({"regenerate": {"engine": "openai", "base_url": "http://127.0.0.1:1/v1"}}, 8, 24)])
def test_requests_at_once_follow_the_gpus_on_which_sglang_answers_unless_the_job_names_them(
        fields: dict[str, Any], num_gpus: int, in_flight: int) -> None:
    own = job_spec(**({"target": {"model": "/models/own"}, "engine": "sglang"} | fields))
    assert with_gpu_defaults(own, has_sglang=True, num_gpus=num_gpus).regenerate.concurrency == in_flight


def test_settings_are_tuned_for_the_loads_that_a_job_declares_unless_it_names_others(
        settings: Settings, target: Path) -> None:
    declared = job_spec(target={"model": str(target)}, prove={"concurrencies": [1, 2, 8]})
    assert check(declared, settings).spec.tune.concurrencies == (1, 2, 8)
    named = job_spec(target={"model": str(target)}, prove={"concurrencies": [1, 2, 8]}, tune={"concurrencies": [1, 4]})
    assert check(named, settings).spec.tune.concurrencies == (1, 4)


def test_sglang_on_a_cluster_without_gpus_is_asked_for_greedy_answers_alone(tmp_path: Path) -> None:
    settings = on_cluster(tmp_path)
    target = target_directory(tmp_path / "own")
    assert check(job_spec(target={"model": str(target)}, engine="sglang"), settings).spec.tune.temperatures == (0.0,)
    refused(settings, InvalidInput, "verifies drafts greedily", target={"model": str(target)}, engine="sglang",
            tune={"temperatures": [1.0]})


@pytest.mark.parametrize(("program", "engine"), [("python -m sglang.launch_server", "sglang"), ("", "embedded")])
def test_on_one_machine_with_a_gpu_sglang_is_chosen_where_there_is_one(program: str, engine: str) -> None:
    own = job_spec(target={"model": "/models/own"})
    assert with_gpu_defaults(own, has_sglang=bool(program)).engine.kind == engine


def test_a_target_that_cannot_be_read_at_submission_is_bfloat16_on_gpus() -> None:
    unread = JobTarget(model="org/not-in-the-cache")
    assert resolve_dtype(unread, None, on_gpus=True).dtype == "bfloat16"
    assert resolve_dtype(unread, None, on_gpus=False).dtype == "float32"


def test_training_continues_from_a_jobs_best_checkpoint_or_the_field_is_refused_with_the_reason(
        settings: Settings, target: Path) -> None:
    entry = LeaderboardEntry(
        job_id="job-a", checkpoint="c0-step-90", candidate="c0", family="eagle3", target="org/model",
        tree=DraftTreeShape(num_steps=7, top_k=1, num_draft_tokens=8), tau=4.0, tokens_per_s=99.0, speedup=2.5,
        speedup_greedy=None, speedup_sampled=None, lossless=True, tuned=True, suites={}, rank=1)
    now = datetime(2026, 1, 1, tzinfo=UTC)
    jobs = {name: Job(id=name, created_at=now, updated_at=now, spec=job_spec(), status=JobStatus(best=best))
            for name, best in (("job-a", entry), ("job-rival", entry.model_copy(update={"rival": True})),
                               ("job-new", None))}

    def job_of(name: str) -> Job:
        if name not in jobs:
            raise NotFound(f"no job {name}")
        return jobs[name]

    def resolved(**changes: Any) -> JobSpec:
        return with_drafters_of_jobs(job_spec(target={"model": str(target)}, **changes), job_of, settings.home)

    best = settings.home / "jobs/job-a/stages/train/c0/checkpoints/c0-step-90"
    spec = resolved(drafter={"init_from": "job:job-a"})
    assert spec.drafter.init_from == str(best)
    swept = resolved(sweep={"axes": [{"field": "drafter.init_from", "values": [None, "org/head", "job:job-a"]}]})
    assert swept.sweep.axes[0].values == (None, "org/head", str(best))
    for name, says in (("job-b", "no such job"), ("job-new", "has measured no checkpoint"),
                       ("job-rival", "has not trained its best, 'c0-step-90'")):
        with pytest.raises(InvalidInput, match=f"drafter.init_from 'job:{name}'.*{says}"):
            resolved(drafter={"init_from": f"job:{name}"})

    with pytest.raises(InvalidInput, match=r"drafter\.init_from.*is not a directory"):
        check(spec, settings)
    stored = settings.model_copy(update={"artifacts": StoreOptions(url="s3://bucket/eyrie")})
    assert check(spec, stored).spec.drafter.init_from == str(best), "its files are in the store: the stage brings them"


def test_mtp_layers_of_a_target_that_sglang_does_not_draft_with_are_no_rival(settings: Settings, target: Path) -> None:
    refused(settings, UnsupportedTarget, "nextn: SGLang does not draft with MTP layers of Qwen3ForCausalLM",
            target={"model": str(target)}, rivals=["nextn"], engine={"kind": "sglang"}, drafter={"family": "eagle3"})


def test_a_drafter_of_the_targets_own_mtp_layer_needs_a_target_with_one(
        settings: Settings, target: Path, tmp_path: Path) -> None:
    refused(settings, UnsupportedTarget, "drafter.family is mtp and config.json names architecture",
            target={"model": str(target)}, drafter={"family": "mtp"})
    without = tiny_mimo(tmp_path / "without", with_mtp=False)
    refused(settings, UnsupportedTarget, "the target's checkpoint has no tensors model.mtp_layers",
            target={"model": str(without)}, sweep={"families": ["eagle1", "mtp"]})
    checked = check(job_spec(target={"model": str(tiny_mimo(tmp_path / "mimo"))}, drafter={"family": "mtp"}), settings)
    assert checked.plan is not None
    assert [candidate.drafter.family for candidate in checked.candidates] == ["mtp"]


@pytest.mark.parametrize("path", ["s3://bucket/chats/*.parquet", "https://data.example/chats.jsonl.gz"])
def test_data_elsewhere_is_checked_where_it_is_read_and_the_plan_says_so(
        path: str, settings: Settings, target: Path) -> None:
    checked = check(job_spec(target={"model": str(target)}, data=data(path)), settings)
    assert checked.spec.data.sources[0].path == path
    assert checked.plan is not None
    assert f"the rows of {path} are not on this machine: the first stage checks them" in checked.plan.notes


def test_on_a_cluster_a_path_that_only_stages_may_have_is_left_to_them_and_the_plan_says_so(tmp_path: Path) -> None:
    settings, there = on_cluster(tmp_path), "/mnt/conversations/*.jsonl"
    spec = job_spec(data={"sources": [{"path": there}]},
                    benchmark={"suites": [{"name": "own", "path": "/mnt/suites/own.jsonl"}]})
    assert f"the rows of {there} are not on this machine: the first stage checks them" in plan(spec, settings).notes
    assert check(spec, settings).spec.data.sources[0].path == there
    with pytest.raises(NoUsableData, match="matches no file"):  # here is where it is read
        check(spec, Settings(home=tmp_path))


def test_on_a_cluster_a_file_that_is_here_and_a_relative_path_are_checked(tmp_path: Path) -> None:
    empty = tmp_path / "rows.jsonl"
    empty.write_text("")
    for path in (str(empty), "chats.jsonl"):
        with pytest.raises(NoUsableData):
            check(job_spec(data={"sources": [{"path": path}]}), on_cluster(tmp_path))
