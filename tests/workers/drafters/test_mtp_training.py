"""A target's MTP layer: trained from the target's own, as it drafts, and on disk what SGLang loads."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import DraftTreeShape, SamplingSpec
from eyrie_api.contract.training import TrainSpec
from eyrie_api.errors import InvalidInput, UnsupportedTarget
from eyrie_api.planning.sglang_support import MTP_LAYER, holds_mtp_layers, require_mtp_layer
from eyrie_workers.drafters.check import check_directory
from eyrie_workers.drafters.family import open_drafter
from eyrie_workers.drafters.initialisation import TargetEmbeddings, read_target_embeddings
from eyrie_workers.drafters.mtp import FAMILY, MtpDrafter, MtpProposer, UnrolledPrediction, load, save
from eyrie_workers.drafters.published import copy_mtp_layers
from eyrie_workers.hidden_states.packed_batch import PackedBatch
from eyrie_workers.speculation.engine import Engine, Request
from eyrie_workers.targets.config import RopeConfig, read_json
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.loading import load_target
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.targets.operators import Rotary
from eyrie_workers.training.objective import StepContext
from eyrie_workers.training.unroll_plan import plan_unroll
from tests.packed_rows import pack_rows
from tests.tiny import tiny_mimo, tiny_target
from tests.workers.drafters.unrolled import compare_with_decoding
from tests.workers.stages import test_train

STEPS, LONGEST = 4, 64
WHOLE = TrainSpec(ttt_length=STEPS, unrolled_fraction=1.0, single_step_ratio=0.0)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_mimo(tmp_path_factory.mktemp("target") / "tiny", seed=5, num_layers=2, initializer_range=0.15)


@pytest.fixture(scope="module")
def target(target_dir: Path) -> TargetModel:
    return load_target(target_dir)


@pytest.fixture(scope="module")
def ends(target_dir: Path) -> TargetEmbeddings:
    return read_target_embeddings(target_dir, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def documents(target: TargetModel) -> PackedBatch:
    """The target's own greedy answers and its states, as capture stores them."""
    generator, rows = torch.Generator().manual_seed(1), []
    prompts = [torch.randint(3, 320, (length,), generator=generator).tolist() for length in (5, 1, 7)]
    answers = Engine(target, max_concurrency=4).generate(
        [Request(str(i), ids, 22 - 3 * i, SamplingSpec(temperature=0.0), seed=i) for i, ids in enumerate(prompts)])
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor(prompt + answer.token_ids)
        (aux, last), = target.hidden_states([ids], (target.config.num_layers,))
        rows.append((ids, torch.arange(ids.numel()) >= len(prompt), aux, last))
    return pack_rows(rows)


def made(target: TargetModel, ends: TargetEmbeddings, **spec: Any) -> MtpDrafter:
    drafter = FAMILY.create(DrafterSpec(family="mtp", **spec), target.config, ends, (target.config.num_layers,),
                            DraftVocabulary(torch.arange(320), 320), 0)
    assert isinstance(drafter, MtpDrafter)
    return drafter


def rms(x: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), norm, eps)


def first_states(drafter: MtpDrafter, ends: TargetEmbeddings, ids: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """f'_i+1 of every position i but the last of one document, by transformers' layer of Qwen 2."""
    from transformers import Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

    own = drafter.config
    config = Qwen2Config(
        hidden_size=own.hidden_size, intermediate_size=own.intermediate_size, num_attention_heads=own.num_heads,
        num_key_value_heads=own.num_kv_heads, rms_norm_eps=own.rms_eps, num_hidden_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": own.rope.theta})
    config._attn_implementation = "eager"
    layer = Qwen2DecoderLayer(config, 0)
    stored = drafter.state_dict()
    layer.load_state_dict({name: stored[name] for name in layer.state_dict()})
    embed = ends.embed[ids[1:]].clone()
    embed[0] = 0.0
    x = drafter.input_proj(torch.cat([rms(read[:-1], drafter.hidden_layernorm.weight, own.rms_eps),
                                      rms(embed, drafter.token_layernorm.weight, own.rms_eps)], -1))[None]
    places = torch.arange(x.shape[1])[None]
    mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)[None, None]
    out = layer(x, attention_mask=mask, position_ids=places,
                position_embeddings=Qwen2RotaryEmbedding(config)(x, places))
    return rms(out[0] if isinstance(out, tuple) else out, drafter.final_layernorm.weight, own.rms_eps).view(
        -1, own.hidden_size)


def test_training_starts_from_the_targets_own_layer(target_dir: Path, target: TargetModel,
                                                    ends: TargetEmbeddings, tmp_path: Path) -> None:
    save(tmp_path / "trained", made(target, ends))
    copy_mtp_layers(target_dir, tmp_path / "copied")
    ours, published = (load_file(tmp_path / name / "model.safetensors") for name in ("trained", "copied"))
    assert ours.keys() == published.keys()
    assert all(torch.equal(ours[name], published[name]) for name in ours)
    # The final norm that other families begin with is the target's, not this layer's of a similar name.
    assert torch.equal(ends.norm, load_file(target_dir / "model.safetensors")["model.norm.weight"])


def test_the_first_step_is_that_of_transformers_layer(target: TargetModel, ends: TargetEmbeddings,
                                                      documents: PackedBatch) -> None:
    drafter, start = made(target, ends), 0
    plan = plan_unroll(documents.loss_mask, documents.lengths, 1)
    rotary = Rotary(drafter.config.rope, drafter.config.head_dim, LONGEST)
    with torch.no_grad():
        (states,) = drafter.feature_layer(torch.float32).unroll(rotary, ends.embed, documents, plan)
        expected = torch.zeros(documents.token_ids.numel(), drafter.config.hidden_size)
        for length in documents.lengths:
            here = slice(start, start + length)
            expected[start: start + length - 1] = first_states(drafter, ends, documents.token_ids[here],
                                                               documents.aux[here, 0])
            start += length
    # The second document's prompt is one token: its first root stands at position 0, where no token is read.
    assert 0 in plan.positions[plan.roots].tolist()
    torch.testing.assert_close(states, expected[plan.roots], atol=1e-4, rtol=1e-4)


def test_unrolled_logits_equal_decoding_logits_at_every_root_and_step(target: TargetModel, ends: TargetEmbeddings,
                                                                      documents: PackedBatch) -> None:
    drafter = made(target, ends)
    plan = plan_unroll(documents.loss_mask, documents.lengths, STEPS)
    rotary = Rotary(drafter.config.rope, drafter.config.head_dim, LONGEST + STEPS)
    with torch.no_grad():
        unrolled = [states @ ends.lm_head.T for states in drafter.feature_layer(torch.float32).unroll(
            rotary, ends.embed, documents, plan)]
    compare_with_decoding(unrolled, MtpProposer(drafter, target), documents, plan)


def test_every_step_is_trained_and_its_gradient_reaches_every_parameter(target: TargetModel, ends: TargetEmbeddings,
                                                                        documents: PackedBatch) -> None:
    drafter = made(target, ends)
    learner = UnrolledPrediction(drafter, ends, WHOLE, LONGEST, torch.float32)
    outcome = learner(documents, StepContext(0, 1, 0))
    outcome.loss.backward()
    assert outcome.supervised == learner(documents).supervised
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) > 0, name


def test_training_raises_the_hits_of_every_step_and_changes_no_answer(
        target: TargetModel, ends: TargetEmbeddings, documents: PackedBatch, tmp_path: Path) -> None:
    drafter = made(target, ends)
    learner = UnrolledPrediction(drafter, ends, WHOLE, LONGEST, torch.float32)
    before, optimizer = learner(documents), torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    for number in range(60):
        optimizer.zero_grad()
        learner(documents, StepContext(number, 60, 0)).loss.backward()
        optimizer.step()
    after = learner(documents)
    for old, new in zip(before.hits, after.hits, strict=True):
        assert float(new.float().mean()) > float(old.float().mean()) + 0.2
    save(tmp_path / "trained", drafter)
    asked = [Request("known", documents.token_ids[:5].tolist(), 16, SamplingSpec(temperature=0.0), seed=1),
             Request("unknown", [9, 8, 7], 20, SamplingSpec(temperature=1.0), seed=2)]
    plain = [answer.token_ids for answer in Engine(target).generate(asked)]
    shape = DraftTreeShape(num_steps=STEPS, top_k=1, num_draft_tokens=STEPS + 1)
    drafted = Engine(target, open_drafter(tmp_path / "trained", target), max_concurrency=2).generate(asked, shape)
    assert [answer.token_ids for answer in drafted] == plain
    assert len(drafted[0].accepted_histogram) > 2


def test_a_saved_layer_is_loaded_to_the_last_bit_and_names_the_target(
        tmp_path: Path, target_dir: Path, target: TargetModel, ends: TargetEmbeddings) -> None:
    drafter = made(target, ends)
    save(tmp_path / "one", drafter)
    again, config = load(tmp_path / "one"), read_json(tmp_path / "one" / "config.json")
    assert again.config == drafter.config
    assert all(torch.equal(tensor, drafter.state_dict()[name]) for name, tensor in again.state_dict().items())
    assert holds_mtp_layers(config)
    assert config["architectures"] == read_json(target_dir / "config.json")["architectures"]
    assert [finding.code for finding in check_directory(tmp_path / "one", target_dir=target_dir)] == ["no-card"]


def test_a_target_without_such_a_layer_is_refused_with_the_alternatives(tmp_path: Path, target_dir: Path) -> None:
    mimo = json.loads((target_dir / "config.json").read_text())
    for config, message in ((mimo | {"architectures": ["LlamaForCausalLM"]}, "names architecture"),
                            (mimo | {"model_type": "mimo"}, "with model_type 'mimo'"),
                            (mimo, "no tensors model.mtp_layers")):
        with pytest.raises(UnsupportedTarget, match=message) as refusal:
            require_mtp_layer(config, ("model.norm.weight",))
        assert "another family" in refusal.value.hint
    with pytest.raises(UnsupportedTarget) as refusal:
        require_mtp_layer({"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe"}, ())
    assert "add nextn to rivals" in refusal.value.hint
    with pytest.raises(ValueError, match=r"drafter\.intermediate_size is 64, and family mtp trains the target's own"):
        DrafterSpec(family="mtp", intermediate_size=64)


def test_a_layer_of_another_class_or_with_other_positions_is_refused(
        target: TargetModel, ends: TargetEmbeddings, tmp_path: Path) -> None:
    yarn = replace(target.config, rope=RopeConfig(kind="yarn", factor=4.0))
    with pytest.raises(InvalidInput, match="has rope type 'yarn'"):
        FAMILY.create(DrafterSpec(family="mtp"), yarn, ends, (2,), DraftVocabulary(torch.arange(320), 320), 0)
    other = tiny_target(tmp_path / "llama")
    tensors = load_file(other / "model.safetensors") | {f"{MTP_LAYER}self_attn.q_norm.weight": torch.ones(8)}
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    ends = read_target_embeddings(other, tie_word_embeddings=False)
    with pytest.raises(InvalidInput, match=r"differs from SGLang's class MiMoMTP in .*self_attn\.q_norm\.weight"):
        made(target, ends)


def test_the_train_stage_continues_from_the_targets_layer_and_refuses_a_target_without(
        target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_train, "AUX_LAYERS", (1, 2))
    store = test_train.write_store(tmp_path / "store", target_dir, 8)
    test_train.write_spec(tmp_path / "train", target_dir, store, max_steps=2, learning_rate=1e-9,
                          drafter={"family": "mtp", "draft_vocab_size": None})
    assert test_train.run(tmp_path / "train") == 0
    *_, trained = test_train.weights(tmp_path / "train").values()
    copy_mtp_layers(target_dir, tmp_path / "copied")
    for name, tensor in load_file(tmp_path / "copied" / "model.safetensors").items():
        torch.testing.assert_close(trained[name].float(), tensor.float(), atol=1e-2, rtol=1e-2)
    without = tiny_mimo(tmp_path / "without", with_mtp=False, seed=5, num_layers=2, initializer_range=0.15)
    other = test_train.write_store(tmp_path / "other", without, 8)
    test_train.write_spec(tmp_path / "refused", without, other, max_steps=2,
                          drafter={"family": "mtp", "draft_vocab_size": None})
    assert test_train.run(tmp_path / "refused") != 0
    assert "no tensors model.mtp_layers" in (tmp_path / "refused" / "failure.json").read_text()
