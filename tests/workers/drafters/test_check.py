"""Every defect that a serving engine loads without a word: the check names it and says the hint. One row per defect."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.planning.drafter_rules import Finding, Target
from eyrie_workers.drafters.card import Card, DataIdentity, identify, weights_digest, with_results
from eyrie_workers.drafters.check import check_directory, main
from eyrie_workers.drafters.eagle3.directory import ENGINES, validate
from eyrie_workers.drafters.eagle3.family import load_drafter, save_drafter
from eyrie_workers.drafters.validation import ValidationRequest
from tests.architectures.vllm_classes import VLLM_VERSION
from tests.workers.drafters.test_eagle3_proposer import HIDDEN, VOCAB, embedding, random_drafter

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
Tensors = dict[str, torch.Tensor]
Damage = Callable[["Pair"], None]


class Pair:
    """A drafter directory and its target's, to be damaged."""

    def __init__(self, root: Path) -> None:
        self.drafter, self.target = root / "drafter", root / "target"

    def config(self, which: str = "drafter", **changes: Any) -> None:
        """Set keys of a config.json; the value `...` removes one."""
        file = getattr(self, which) / "config.json"
        result = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({key: value for key, value in result.items() if value is not ...}))

    def eagle_config(self, **changes: Any) -> None:
        """Set keys of eagle_config."""
        old = json.loads((self.drafter / "config.json").read_text())["eagle_config"]
        result = {key: value for key, value in (old | changes).items() if value is not ...}
        self.config(eagle_config=result)

    def tensors(self, change: Callable[[Tensors], Any]) -> None:
        """Change the stored tensors in place."""
        stored = load_file(self.drafter / "model.safetensors")
        change(stored)
        save_file({name: tensor.contiguous() for name, tensor in stored.items()}, self.drafter / "model.safetensors")

    def card(self, **changes: Any) -> None:
        """Change the card; `target` and `drafter` are merged."""
        file = self.drafter / "eyrie-card.json"
        result = json.loads(file.read_text())
        for key, value in changes.items():
            result[key] = result[key] | value if isinstance(value, dict) else value
        file.write_text(json.dumps(result))

    def findings(self, **settings: Any) -> tuple[Finding, ...]:
        return check_directory(self.drafter, target_dir=self.target, **settings)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound pair: what `identify` and `save_drafter` write for a target of 16 layers."""
    root = tmp_path_factory.mktemp("sound")
    target = root / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "num_hidden_layers": 16, "num_attention_heads": 4, "intermediate_size": 24, "max_position_embeddings": 256,
        "rope_theta": 100.0, "dtype": "float32"}))
    (target / "tokenizer.json").write_text('{"model": {}}')
    save_file({"model.embed_tokens.weight": embedding()}, target / "model.safetensors")
    card = Card(target=identify(target), drafter=DrafterSpec(), aux_layers=(1, 2, 4), code_version="0",
                data=DataIdentity(store_digest="sha256:" + "1" * 64, rows=3, tokens=300, longest_row=100))
    save_drafter(root / "drafter", random_drafter(), card=card)
    return root


@pytest.fixture
def pair(sound: Path, tmp_path: Path) -> Pair:
    shutil.copytree(sound, tmp_path / "pair")
    return Pair(tmp_path / "pair")


def test_an_exported_drafter_has_no_findings_with_its_target(pair: Pair) -> None:
    assert pair.findings(context=256) == ()


def drafter(**changes: Any) -> Damage:
    return lambda pair: pair.config(**changes)


def target(**changes: Any) -> Damage:
    return lambda pair: pair.config("target", **changes)


def eagle(**changes: Any) -> Damage:
    return lambda pair: pair.eagle_config(**changes)


def stored(change: Callable[[Tensors], Any]) -> Damage:
    return lambda pair: pair.tensors(change)


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return stored(lambda tensors: tensors.update({name: change(tensors[name])}))


def drop(*names: str) -> Damage:
    return stored(lambda tensors: [tensors.pop(name) for name in names])


def add(name: str, *shape: int) -> Damage:
    return stored(lambda tensors: tensors.update({name: torch.rand(*shape)}))


def both(*damages: Damage) -> Damage:
    return lambda pair: [damage(pair) for damage in damages] and None


def rename(old: str, new: str) -> Damage:
    return stored(lambda tensors: [tensors.update({name.replace(old, new): tensors.pop(name)})
                                   for name in list(tensors) if old in name])


def second_layer(*norms: str) -> Damage:
    """A drafter of two layers whose second has these norms before attention."""
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("midlayer.")]:
            kept = tensors[name][:, :HIDDEN] if any(part in name for part in ("q_proj", "k_proj", "v_proj")) else (
                tensors[name])
            tensors[name.replace("midlayer.", "layers.1.")] = kept.clone()
        for norm in {"hidden_norm", "input_layernorm"} - set(norms):
            tensors.pop(f"layers.1.{norm}.weight")
        if len(norms) == 2:
            tensors["layers.1.input_layernorm.weight"] = tensors["layers.1.hidden_norm.weight"].clone()
    return both(drafter(num_hidden_layers=2), stored(change))


def write(name: str, text: str, where: str = "drafter") -> Damage:
    return lambda pair: (getattr(pair, where) / name).write_text(text) and None


def unlink(name: str) -> Damage:
    return lambda pair: (pair.drafter / name).unlink()


def deepseek(nested: list[int], top: list[int]) -> Damage:
    return both(target(architectures=["DeepseekV3ForCausalLM"]), eagle(**{LAYER_IDS: nested}),
                drafter(**{LAYER_IDS: top}),
                lambda pair: pair.card(target={"architecture": "DeepseekV3ForCausalLM"}, aux_layers=top))


ERRORS: dict[str, tuple[str, Damage]] = {
    # config.json: is it an EAGLE-3 drafter for SGLang at all?
    "no-config": ("config-missing", unlink("config.json")),
    "config-not-json": ("config-unreadable", write("config.json", "{")),
    "speculators-directory": ("speculators-format", drafter(speculators_model_type="eagle3")),
    "eagle-1-name": ("contract", drafter(architectures=["LlamaForCausalLMEagle"])),
    "other-eagle-1-name": ("eagle-1-2", drafter(architectures=["Qwen2ForCausalLMEagle"])),
    "safeailab-name": ("architecture-name", drafter(architectures=["LlamaForCausalLM"])),
    "vllm-name": ("architecture-name", drafter(architectures=["Eagle3LlamaForCausalLM"])),
    "mla-drafter": ("architecture-unknown", drafter(architectures=["Eagle3DeepseekV2ForCausalLM"])),
    "no-architecture": ("architecture-unknown", drafter(architectures=...)),
    # Keys that are missing, ignored or misread.
    **{f"no-{key}": ("key-missing", drafter(**{key: ...})) for key in (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "rms_norm_eps",
        "max_position_embeddings")},
    "flag-as-text": ("key-kind", drafter(norm_output="false")),
    "rope-as-list": ("key-kind", drafter(rope_parameters=["default"])),
    "layers-as-text": ("key-not-a-count", drafter(num_hidden_layers="1")),
    "no-draft-vocab-size": ("draft-vocab-size-missing", drafter(draft_vocab_size=...)),
    "draft-vocab-too-large": ("draft-vocab-size", drafter(draft_vocab_size=VOCAB + 1)),
    "heads": ("heads-not-divisible", drafter(num_key_value_heads=3)),
    "tied": ("tied", drafter(tie_word_embeddings=True)),
    "norm-before-residual": ("norm-before-residual", drafter(norm_before_residual=True)),
    "attention-bias": ("bias-ignored", drafter(attention_bias=True)),
    "activation": ("activation", drafter(hidden_act="gelu")),
    "qwen-model-type": ("model-type", drafter(model_type="qwen3")),
    "quantised": ("quantised-drafter", drafter(quantization_config={"quant_method": "fp8"})),
    "aux-states-off": ("no-aux-states", eagle(use_aux_hidden_state=False)),
    "two-dtypes-declared": ("dtype-declared", drafter(torch_dtype="bfloat16")),
    "two-rope-thetas": ("rope-disagrees", drafter(rope_theta=10_000.0)),
    "two-rope-types": ("rope-disagrees", drafter(rope_scaling={"rope_type": "linear", "factor": 2.0})),
    # Norms of EAGLE-3.1.
    "fc-norm-flag-alone": ("flag-without-tensors", drafter(fc_norm=True)),
    "fc-norm-tensors-alone": ("flag-missing", add("fc_norm.0.weight", HIDDEN)),
    "input-norm-flag-alone": ("flag-without-tensors", eagle(norm_before_fc=True)),
    "input-norm-tensor-alone": ("flag-missing", add("input_norm.weight", 3 * HIDDEN)),
    "fc-bias-alone": ("flag-missing", add("fc.bias", HIDDEN)),
    "bias-flag-alone": ("flag-without-tensors", drafter(bias=True)),
    "norm-before-fc-twice": ("norm-before-fc-twice", both(drafter(norm_before_fc=True), eagle(norm_before_fc=False))),
    "both-norms": ("two-norms", drafter(fc_norm=True, norm_before_fc=True)),
    "fc-norm-misplaced": ("flag-misplaced", eagle(fc_norm=True)),
    "norm-output-flipped": ("card-disagrees", drafter(norm_output=True)),
    # Layer ids.
    "ids-nowhere": ("layer-ids-missing", both(eagle(**{LAYER_IDS: ...}), drafter(**{LAYER_IDS: ...}))),
    "ids-for-vllm-alone": ("layer-ids-missing", eagle(**{LAYER_IDS: ...})),
    "ids-shifted-by-one": ("layer-ids-disagree", eagle(**{LAYER_IDS: [1, 2, 4]})),
    "ids-shifted-in-both": ("card-disagrees", both(eagle(**{LAYER_IDS: [1, 2, 4]}), drafter(**{LAYER_IDS: [2, 3, 5]}))),
    "ids-not-ascending": ("layer-ids-malformed", eagle(**{LAYER_IDS: [3, 1, 0]})),
    "ids-not-numbers": ("layer-ids-malformed", eagle(**{LAYER_IDS: ["low"]})),
    "last-layer": ("layer-not-captured", both(eagle(**{LAYER_IDS: [0, 1, 15]}), drafter(**{LAYER_IDS: [1, 2, 16]}))),
    "aux-count": ("aux-count", drafter(num_aux_hidden_states=2)),
    "one-aux-layer": ("single-aux-layer", eagle(**{LAYER_IDS: [1]})),
    "deepseek-minus-one": ("layer-ids-disagree", deepseek([2, 7, 12], [3, 8, 13])),
    "deepseek-first-is-one": ("layer-ids-disagree", deepseek([1, 7, 12], [1, 7, 12])),
    # The sliding window.
    "window-without-kinds": ("window-kinds", drafter(sliding_window=8)),
    "kinds-without-window": ("window-kinds", drafter(layer_types=["sliding_attention"])),
    "window-of-one": ("window", drafter(sliding_window=1, layer_types=["sliding_attention"])),
    "window-not-trained": ("card-disagrees", drafter(sliding_window=8, layer_types=["sliding_attention"])),
    # Tensors.
    "no-weights": ("weights-missing", unlink("model.safetensors")),
    "pickled-weights": ("weights-missing", both(unlink("model.safetensors"), write("pytorch_model.bin", "x"))),
    "cut-weights": ("weights-unreadable", write("model.safetensors", "x" * 100)),
    "tensor-missing": ("tensor-missing", drop("midlayer.hidden_norm.weight")),
    "tensor-unknown": ("tensor-unknown", add("midlayer.self_attn.q_norm.weight", 8)),
    "tensor-renamed": ("tensor-unknown", rename("midlayer.", "decoder.")),
    "tensor-twice": ("tensor-twice", add("layers.0.hidden_norm.weight", HIDDEN)),
    "fc-of-another-width": ("tensor-shape", tensor("fc.weight", lambda x: x[:, :-1])),
    "head-of-another-size": ("tensor-shape", tensor("lm_head.weight", lambda x: x[:-1])),
    "two-dtypes": ("tensor-dtype", tensor("norm.weight", lambda x: x.bfloat16())),
    "dtype-no-engine-takes": ("tensor-dtype", tensor("norm.weight", lambda x: x.double())),
    "float8": ("tensor-dtype", tensor("fc.weight", lambda x: x.to(torch.float8_e4m3fn))),
    "layers-promised": ("tensor-missing", drafter(num_hidden_layers=2)),
    "layer-too-many": ("tensor-unknown", add("layers.1.hidden_norm.weight", HIDDEN)),
    "head-beside-the-targets": ("tensor-unknown", drafter(draft_vocab_size=None)),
    "other-width-without-embedding": ("tensor-missing", drafter(target_hidden_size=32)),
    "nan": ("not-finite", tensor("fc.weight", lambda x: x * torch.nan)),
    "infinite": ("not-finite", tensor("norm.weight", lambda x: x / 0)),
    "zero-head": ("constant-tensor", tensor("lm_head.weight", torch.zeros_like)),
    "second-layer-vllm-norm": ("layer-norm-name", second_layer("input_layernorm")),
    # The draft vocabulary.
    "d2t-absolute": ("d2t-absolute", tensor("d2t", lambda x: x + torch.arange(14))),
    "d2t-absolute-in-range": ("d2t-absolute", both(drafter(draft_vocab_size=3), stored(lambda t: t.update({
        "d2t": torch.tensor([1, 5, 9]), "lm_head.weight": t["lm_head.weight"][:3],
        "t2d": torch.isin(torch.arange(VOCAB), torch.tensor([1, 5, 9]))})))),
    "d2t-beyond": ("d2t-range", tensor("d2t", lambda x: x + VOCAB)),
    "d2t-negative": ("d2t-range", tensor("d2t", lambda x: x - 1)),
    "d2t-unsorted": ("d2t-order", tensor("d2t", lambda x: torch.cat([x[1:2] + 1, x[:1] - 1, x[2:]]))),
    "d2t-int32": ("map-dtype", tensor("d2t", lambda x: x.int())),
    "t2d-bytes": ("map-dtype", tensor("t2d", lambda x: x.to(torch.uint8))),
    "t2d-shifted": ("t2d-disagrees", tensor("t2d", lambda x: x.roll(1))),
    "no-d2t": ("d2t-missing", drop("d2t", "t2d")),
    # The pair.
    "another-vocabulary": ("vocab-differs", target(vocab_size=VOCAB + 8)),
    "another-width": ("hidden-size-differs", target(hidden_size=2 * HIDDEN)),
    "another-depth": ("target-differs", target(num_hidden_layers=24)),
    "another-model": ("target-differs", target(bos_token_id=1)),
    "another-tokenizer": ("tokenizer-differs", write("tokenizer.json", '{"model": {"x": 1}}', "target")),
    "tokenizer-beside": ("tokenizer-differs", write("tokenizer.json", "{}")),
    "uncapturable-target": ("target-not-captured", target(architectures=["MixtralForCausalLM"])),
    "mrope-target": ("rope-sections", target(rope_scaling={"mrope_section": [2, 3, 3], "rope_type": "default"})),
    "own-embedding": ("embedding-differs", add("embed_tokens.weight", VOCAB, HIDDEN)),
    "card-cut": ("card-unreadable", write("eyrie-card.json", "{}")),
}

WARNINGS: dict[str, tuple[str, Damage]] = {
    "embedding-copied": ("embedding-ignored", stored(lambda t: t.update({"embed_tokens.weight": embedding()}))),
    "prefixed-names": ("tensor-prefix", rename("midlayer.", "model.midlayer.")),
    "no-t2d": ("t2d-missing", drop("t2d")),
    "no-t2d-and-like-ids": ("d2t-unconfirmed", drop("t2d")),
    "ids-for-sglang-alone": ("layer-ids-vllm", drafter(**{LAYER_IDS: ...})),
    "second-layer-sglang-norm": ("layer-norm-vllm", second_layer("hidden_norm")),
    "second-layer": ("reference-engine", second_layer("hidden_norm", "input_layernorm")),
    "fc-bias": ("bias-vllm", both(drafter(bias=True), add("fc.bias", HIDDEN))),
    "old-norm-name": ("use-aux-norm", both(drafter(use_aux_norm=True), *(
        add(f"aux_norm_{name}.weight", HIDDEN) for name in ("low", "mid", "high")),
        lambda pair: pair.card(drafter={"fc_norm": True}))),
    "another-rope-base": ("rope-differs", target(rope_theta=10_000.0)),
    "shorter-than-target": ("context-shorter-than-target", target(max_position_embeddings=4096)),
    "half-target": ("dtype-differs", target(dtype="bfloat16")),
    "quantised-target": ("target-quantised", target(quantization_config={"quant_method": "fp8"})),
    "no-card": ("no-card", unlink("eyrie-card.json")),
    "post-norm-without-card": ("norm-output-unproven", both(unlink("eyrie-card.json"), drafter(norm_output=True))),
}


@pytest.mark.parametrize(("code", "damage"), ERRORS.values(), ids=ERRORS)
def test_a_defect_is_an_error_with_a_hint(pair: Pair, code: str, damage: Damage) -> None:
    damage(pair)
    errors = {finding.code: finding for finding in pair.findings() if finding.severity == "error"}
    assert code in errors, f"found {sorted(errors)}"
    assert errors[code].what
    assert len(errors[code].hint) > 5


@pytest.mark.parametrize(("code", "damage"), WARNINGS.values(), ids=WARNINGS)
def test_a_defect_that_sglang_tolerates_is_a_warning(pair: Pair, code: str, damage: Damage) -> None:
    damage(pair)
    findings = pair.findings(compare_weights=False)
    assert code in {finding.code for finding in findings}
    assert [finding for finding in findings if finding.severity == "error"] == []


def test_a_context_longer_than_the_drafters_is_an_error(pair: Pair) -> None:
    assert [finding.code for finding in pair.findings(context=257)] == ["context-too-short"]


def test_a_context_far_beyond_the_training_lengths_is_a_warning_without_a_window(pair: Pair) -> None:
    pair.config(max_position_embeddings=4096)
    assert [finding.code for finding in pair.findings(context=1000)] == ["context-beyond-training"]
    pair.config(sliding_window=32, layer_types=["sliding_attention"])
    pair.card(drafter={"sliding_window": 32})
    assert pair.findings(context=1000) == ()


def test_another_revision_of_a_hub_model_is_reported(pair: Pair, tmp_path: Path) -> None:
    commits = [letter * 40 for letter in "ab"]
    snapshot = tmp_path / "snapshots" / commits[0]
    shutil.copytree(pair.target, snapshot)
    pair.card(target={"revision": commits[1]})
    assert "revision-differs" in {finding.code for finding in check_directory(pair.drafter, target_dir=snapshot)}
    pair.card(target={"revision": commits[0]})
    assert check_directory(pair.drafter, target_dir=snapshot) == ()


def test_the_targets_weights_are_read_only_when_asked(pair: Pair) -> None:
    save_file({"model.embed_tokens.weight": embedding(seed=9)}, pair.target / "model.safetensors")
    assert {finding.code for finding in pair.findings()} == {"target-differs"}
    assert pair.findings(compare_weights=False) == ()


@pytest.mark.parametrize(("nested", "top"), [([1, 7, 12], [2, 8, 13]), ([3, 8, 13], [3, 8, 13])])
def test_deepseek_ids_in_either_of_sglangs_readings_are_sound(pair: Pair, nested: list[int], top: list[int]) -> None:
    deepseek(nested, top)(pair)
    assert pair.findings(compare_weights=False) == ()


@pytest.mark.parametrize(("nested", "top"), [([1, 7, 16], [1, 7, 16]), ([1, 7, 12], [2, 8, 13])])
def test_gpt_oss_ids_are_taken_as_they_are_when_they_reach_the_last_layer(pair: Pair, nested: list[int],
                                                                          top: list[int]) -> None:
    deepseek(nested, top)(pair)
    pair.config("target", architectures=["GptOssForCausalLM"])
    pair.card(target={"architecture": "GptOssForCausalLM"})
    assert pair.findings(compare_weights=False) == ()


def test_no_value_of_any_key_raises_in_validation(pair: Pair) -> None:
    tensors, target = load_file(pair.drafter / "model.safetensors"), Target(
        pair.target, json.loads((pair.target / "config.json").read_text()))
    config = json.loads((pair.drafter / "config.json").read_text())
    optional = ("fc_norm", "norm_before_fc", "use_aux_norm", "norm_output", "bias", "sliding_window", "layer_types",
                "rope_scaling", "quantization_config")
    for key in (*config, *optional):
        for value in (None, "text", [None], {"rope_type": []}, -1, 1.5, True, 10**9):
            changed = Target(target.path, target.config | {key: value})
            for written, against in ((config | {key: value}, target), (config, changed)):
                findings = validate(ValidationRequest(written, tensors, target=against, context=64,
                                                      compare_weights=False))
                assert all(finding.hint for finding in findings), key


def test_a_drafter_is_validated_without_a_target(pair: Pair) -> None:
    assert check_directory(pair.drafter) == ()
    pair.config(tie_word_embeddings=True)
    assert [finding.code for finding in check_directory(pair.drafter)] == ["tied"]


def test_all_findings_are_returned_at_once_errors_first(pair: Pair) -> None:
    both(drafter(tie_word_embeddings=True), target(dtype="bfloat16"), drop("norm.weight"))(pair)
    findings = pair.findings(compare_weights=False)
    assert [finding.code for finding in findings] == ["tied", "tensor-missing", "dtype-differs"]


def test_an_engine_version_the_rules_are_not_tested_with_is_a_warning(pair: Pair) -> None:
    assert [finding.code for finding in check_directory(pair.drafter, engines={"sglang": "0.6.0"})] == [
        "engine-version"]
    assert check_directory(pair.drafter, engines={"sglang": "0.5.23", "vllm": "0.32.0"}) == ()


def test_the_engines_named_are_those_that_drafters_are_served_with_in_tests() -> None:
    root = Path(__file__).parents[3]
    installed = {"sglang": root / "tests/sglang/environment/requirements.txt",
                 "vllm": root / "tests/vllm/environment/requirements.txt"}
    for name, version in ENGINES.items():
        assert re.search(rf"^{name}(-cpu)?=={re.escape(version)}$", installed[name].read_text(), re.MULTILINE), name
    assert ENGINES["vllm"] == VLLM_VERSION


def test_the_program_prints_findings_as_json_and_ends_with_65(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(pair.drafter), "--target", str(pair.target)]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []
    pair.config(tie_word_embeddings=True)
    assert main([str(pair.drafter), "--target", str(pair.target), "--context", "100", "--fast"]) == 65
    result = json.loads(capsys.readouterr().out)
    assert [finding["code"] for finding in result["findings"]] == ["tied"]
    assert result["context"] == 100


def test_results_are_added_to_a_copy_with_the_same_weights_digest(pair: Pair, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in pair.drafter.iterdir()}
    copy = with_results(pair.drafter, tmp_path / "promoted", {"benchmark": {"speedup": 2.13, "tau": 3.42}})
    assert weights_digest(copy) == weights_digest(pair.drafter)
    assert {path.name: path.read_bytes() for path in pair.drafter.iterdir()} == before
    assert json.loads((copy / "eyrie-card.json").read_text())["results"] == {
        "benchmark": {"speedup": 2.13, "tau": 3.42}}
    assert "benchmark: speedup 2.13, tau 3.42" in (copy / "README.md").read_text()
    assert check_directory(copy, target_dir=pair.target) == ()
    assert load_drafter(copy).config == load_drafter(pair.drafter).config
