"""EAGLE-1: learnt as the paper says, served as it was learnt, and on disk what SGLang loads."""

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
from eyrie_api.errors import ArtifactMissing, InvalidInput
from eyrie_workers.drafters.checkpoint import CheckpointInvalid
from eyrie_workers.drafters.eagle1 import (
    FAMILY,
    NOISE,
    REGRESSION_WEIGHT,
    Eagle1Drafter,
    Eagle1Proposer,
    FeatureRegression,
    load,
    noisy,
    save,
)
from eyrie_workers.drafters.family import open_drafter
from eyrie_workers.drafters.initialisation import TargetEmbeddings, read_target_embeddings
from eyrie_workers.hidden_states.packed_batch import PackedBatch
from eyrie_workers.speculation.engine import Engine, Request
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.loading import load_target
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.targets.operators import Rotary
from eyrie_workers.training.objective import StepContext
from eyrie_workers.training.unroll_plan import plan_unroll
from tests.packed_rows import pack_rows
from tests.tiny import tiny_target
from tests.workers.drafters.unrolled import compare_with_decoding

STEPS, LONGEST = 4, 64
CHAIN = DraftTreeShape(num_steps=STEPS, top_k=1, num_draft_tokens=STEPS + 1)
TREE = DraftTreeShape(num_steps=STEPS, top_k=3, num_draft_tokens=12)
STATIC = TREE.model_copy(update={"static": True})
SHAPES = [CHAIN, TREE, STATIC]


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    """A random target; the Qwen 2 one has biases on q, k, v and one matrix for both ends."""
    return load_target(tiny_target(tmp_path_factory.mktemp("target") / "tiny", request.param, seed=5, num_layers=2,
                                   initializer_range=0.15, tie_word_embeddings=request.param == "qwen2"))


@pytest.fixture(scope="module")
def ends(target: TargetModel) -> TargetEmbeddings:
    assert target.path is not None
    return read_target_embeddings(target.path, target.config.tie_word_embeddings)


@pytest.fixture(scope="module")
def documents(target: TargetModel) -> PackedBatch:
    """The target's own greedy answers and its states, as capture stores them."""
    generator, rows = torch.Generator().manual_seed(1), []
    prompts = [torch.randint(3, 320, (length,), generator=generator).tolist() for length in (5, 9, 3, 7)]
    answers = Engine(target, max_concurrency=4).generate(
        [Request(str(i), ids, 24 - 3 * i, SamplingSpec(temperature=0.0), seed=i) for i, ids in enumerate(prompts)])
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor(prompt + answer.token_ids)
        (aux, last), = target.hidden_states([ids], (target.config.num_layers,))
        rows.append((ids, torch.arange(ids.numel()) >= len(prompt), aux, last))
    return pack_rows(rows)


def new_drafter(target: TargetModel, ends: TargetEmbeddings, seed: int = 0, **spec: Any) -> Eagle1Drafter:
    """As the family makes it; for a test of arithmetic `shaken`, so that every part shows."""
    vocabulary = DraftVocabulary(torch.arange(target.config.vocab_size), target.config.vocab_size)
    drafter = FAMILY.create(DrafterSpec(family="eagle1", **spec), target.config, ends,
                            FAMILY.layers((1,), target.config.num_layers), vocabulary, seed)
    assert isinstance(drafter, Eagle1Drafter)
    return drafter


def shaken(drafter: Eagle1Drafter) -> Eagle1Drafter:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.2, generator=generator))
    return drafter


def objective(drafter: Eagle1Drafter, ends: TargetEmbeddings, dtype: torch.dtype = torch.float32,
              **train: Any) -> FeatureRegression:
    return FeatureRegression(drafter, ends, TrainSpec(**{"ttt_length": STEPS} | train), LONGEST, dtype)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def naive_features(drafter: Eagle1Drafter, ends: TargetEmbeddings, ids: torch.Tensor,
                   read: torch.Tensor) -> torch.Tensor:
    """f'_{i+1} of every position i but the last of ONE document, written out; read [T, H] features."""
    config, layer = drafter.config, drafter.layers[0]
    attention, half = layer.self_attn, config.head_dim // 2
    embed = ends.embed.to(read.dtype)
    x = torch.stack([drafter.fc(torch.cat([embed[ids[i + 1]], read[i]])) for i in range(len(ids) - 1)])

    def turned(heads: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(heads.shape[0])[:, None] * torch.tensor(
            config.rope.inverse_frequencies(config.head_dim))[None]
        cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
        one, two = heads[..., :half], heads[..., half:]
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)

    q, k, v = (project(x).unflatten(-1, (-1, config.head_dim))
               for project in (attention.q_proj, attention.k_proj, attention.v_proj))
    q, k = turned(q), turned(k)
    group = config.num_heads // config.num_kv_heads
    mixed = []
    for i in range(x.shape[0]):
        heads = []
        for head in range(config.num_heads):
            scores = torch.stack([q[i, head] @ k[j, head // group] for j in range(i + 1)]) / config.head_dim**0.5
            heads.append(scores.softmax(0) @ v[: i + 1, head // group])
        mixed.append(torch.cat(heads))
    x = x + attention.o_proj(torch.stack(mixed))
    normed = rms(x, layer.post_attention_layernorm.weight, config.rms_eps)
    return x + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(normed)) * layer.mlp.up_proj(normed))


def naive_loss(drafter: Eagle1Drafter, ends: TargetEmbeddings, documents: PackedBatch,
               context: StepContext) -> torch.Tensor:
    """CE + 10 SmoothL1, each the mean over positions i whose tokens i+1 and i+2 are the target's."""
    read = noisy(documents.aux[:, 0], documents.lengths, context)
    losses, start = [], 0
    for length in documents.lengths:
        here = slice(start, start + length)
        start += length
        ids, mask = documents.token_ids[here], documents.loss_mask[here]
        aim, dtype = documents.aux[here, 0].to(drafter.fc.weight.dtype), drafter.fc.weight.dtype
        features = naive_features(drafter, ends, ids, read[here].to(dtype))
        head = ends.lm_head.to(dtype)
        for i in range(length - 2):
            if mask[i + 1] and mask[i + 2]:
                far = (features[i] - aim[i + 1]).abs()
                smooth = torch.where(far < 1, far.square() / 2, far - 0.5).mean()
                teacher = (head @ documents.last[here][i + 1].to(dtype)).softmax(0)
                losses.append(REGRESSION_WEIGHT * smooth - (teacher * (head @ features[i]).log_softmax(0)).sum())
    return torch.stack(losses).mean()


def test_loss_and_gradients_equal_a_naive_implementation_in_double_precision(
        target: TargetModel, ends: TargetEmbeddings, documents: PackedBatch) -> None:
    drafter, context = shaken(new_drafter(target, ends)).double(), StepContext(3, 10, seed=4)
    expected = naive_loss(drafter, ends, documents, context)
    expected.backward()
    wanted = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()
              if parameter.grad is not None}
    drafter.zero_grad()
    outcome = objective(drafter, ends, torch.float64)(documents, context)
    outcome.loss.backward()
    # The teacher, the log-sum-exp, the noise and the rotary table are float32 by design.
    torch.testing.assert_close(outcome.loss.double(), expected, atol=1e-5, rtol=1e-5)
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], atol=2e-4, rtol=2e-3, msg=name)
        assert wanted[name].abs().max() > 1e-3, f"{name} was not tested by this data"


def test_documents_packed_together_predict_what_each_predicts_alone(
        target: TargetModel, ends: TargetEmbeddings, documents: PackedBatch) -> None:
    learner = objective(shaken(new_drafter(target, ends)), ends)
    together = learner(documents)
    alone = [learner(some(documents, number, number + 1)) for number in range(len(documents.lengths))]
    for step in range(STEPS):
        hits = torch.cat([one.hits[step] for one in alone if step < len(one.hits)])
        assert int(together.hits[step].sum()) == int(hits.sum())


def test_training_unrolls_one_step_and_evaluation_all(
        target: TargetModel, ends: TargetEmbeddings, documents: PackedBatch) -> None:
    learner = objective(shaken(new_drafter(target, ends)), ends)
    learnt, judged = learner(documents, StepContext(0, 1, 0)), learner(documents)
    assert learnt.supervised == judged.hits[0].numel()
    assert judged.supervised == sum(hits.numel() for hits in judged.hits) > 2 * learnt.supervised
    assert not learnt.hits
    silent = replace(documents, loss_mask=torch.zeros_like(documents.loss_mask))
    nothing = learner(silent, StepContext(0, 1, 0))
    nothing.loss.backward()
    assert (float(nothing.loss.detach()), nothing.supervised) == (0.0, 0)


def test_noise_is_bounded_by_each_states_magnitude_and_depends_on_document_and_step() -> None:
    features = torch.randn(20, 8, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 21)[:, None]
    whole = noisy(features, (6, 14), StepContext(2, 9, seed=1))
    shift = (whole - features) / features.square().mean(-1, keepdim=True).sqrt()
    assert 0.8 * NOISE < float(shift.abs().max()) <= NOISE * (1 + 1e-4)
    assert float(shift.mean().abs()) < NOISE / 4
    second = noisy(features[6:], (14,), StepContext(2, 9, seed=1, starts=(6,)))
    assert torch.equal(whole[6:], second)
    assert not torch.equal(whole, noisy(features, (6, 14), StepContext(3, 9, seed=1)))


def some(documents: PackedBatch, first: int, stop: int) -> PackedBatch:
    """Documents first .. stop-1 of a pack."""
    starts = torch.tensor((0, *documents.lengths)).cumsum(0).tolist()
    here = slice(starts[first], starts[stop])
    return PackedBatch(documents.token_ids[here], documents.loss_mask[here], documents.aux[here],
                           documents.last[here], documents.lengths[first:stop])


def test_a_batch_spread_over_two_processes_has_the_loss_and_gradients_of_one(
        target: TargetModel, ends: TargetEmbeddings, documents: PackedBatch) -> None:
    drafter = shaken(new_drafter(target, ends))
    learner = objective(drafter, ends)
    whole = learner(documents, StepContext(1, 4, seed=3))
    whole.loss.backward()
    wanted = [parameter.grad.clone() for parameter in drafter.parameters() if parameter.grad is not None]
    drafter.zero_grad()
    first = documents.lengths[0]
    parts = [(some(documents, 0, 1), (0,)), (some(documents, 1, 4), (
        first, first + documents.lengths[1], first + sum(documents.lengths[1:3])))]
    sums: list[torch.Tensor] = []

    def tell(counts: torch.Tensor) -> torch.Tensor:
        sums.append(counts)
        return counts

    for mine, starts in parts:
        learner(mine, StepContext(1, 4, 3, starts, tell))
    losses = [learner(mine, StepContext(1, 4, 3, starts, lambda _: sums[0] + sums[1])).loss for mine, starts in parts]
    torch.stack(losses).sum().backward()
    torch.testing.assert_close(torch.stack(losses).sum(), whole.loss, atol=1e-4, rtol=1e-5)
    for parameter, gradient in zip(drafter.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-4, rtol=1e-3)


def test_bfloat16_products_stay_near_float32(
        target: TargetModel, ends: TargetEmbeddings, documents: PackedBatch) -> None:
    drafter, context = shaken(new_drafter(target, ends)), StepContext(0, 1, 0)
    exact, rounded = (float(objective(drafter, ends, dtype)(documents, context).loss.detach())
                      for dtype in (torch.float32, torch.bfloat16))
    assert abs(exact - rounded) < 0.03 * exact


def trained(target: TargetModel, ends: TargetEmbeddings, documents: PackedBatch, steps: int = 60) -> Eagle1Drafter:
    drafter = new_drafter(target, ends)
    learner, optimizer = objective(drafter, ends), torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    for number in range(steps):
        optimizer.zero_grad()
        learner(documents, StepContext(number, steps, 0)).loss.backward()
        optimizer.step()
    return drafter


@pytest.fixture(scope="module")
def fitted(target: TargetModel, ends: TargetEmbeddings, documents: PackedBatch) -> Eagle1Drafter:
    return trained(target, ends, documents)


def test_training_lowers_the_loss_and_raises_the_hits_of_every_step(
        target: TargetModel, ends: TargetEmbeddings, documents: PackedBatch, fitted: Eagle1Drafter) -> None:
    before, after = (objective(drafter, ends)(documents) for drafter in (new_drafter(target, ends), fitted))
    # What is left is mostly the target's own entropy: a random target is sure of little.
    assert float(after.loss.detach()) < float(before.loss.detach()) - 0.2
    for old, new in zip(before.hits, after.hits, strict=True):
        assert float(new.float().mean()) > float(old.float().mean()) + 0.2


def test_unrolled_logits_equal_decoding_logits_at_every_root_and_step(
        target: TargetModel, ends: TargetEmbeddings, documents: PackedBatch) -> None:
    drafter = shaken(new_drafter(target, ends))
    plan = plan_unroll(documents.loss_mask, documents.lengths, STEPS)
    rotary = Rotary(drafter.config.rope, drafter.config.head_dim, LONGEST + STEPS)
    with torch.no_grad():
        unrolled = [states @ ends.lm_head.T for states in drafter.feature_layer(torch.float32).unroll(
            rotary, ends.embed, documents, plan)]
    compare_with_decoding(unrolled, Eagle1Proposer(drafter, target), documents, plan)


@pytest.mark.parametrize("sampling", [SamplingSpec(temperature=0.0), SamplingSpec(temperature=1.0)],
                         ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", SHAPES, ids=["chain", "dynamic", "static"])
def test_answers_are_those_of_the_target_alone(shape: DraftTreeShape, sampling: SamplingSpec, target: TargetModel,
                                               documents: PackedBatch, fitted: Eagle1Drafter) -> None:
    first = documents.lengths[0]
    asked = [Request("known", documents.token_ids[:5].tolist(), 16, sampling, seed=1),
             Request("unknown", documents.token_ids[first + 2: first + 9].flip(0).tolist(), 20, sampling, seed=2)]
    plain = [answer.token_ids for answer in Engine(target).generate(asked)]
    drafted = Engine(target, Eagle1Proposer(fitted, target), max_concurrency=2).generate(asked, shape)
    assert [answer.token_ids for answer in drafted] == plain
    if sampling.temperature == 0:  # it has learnt the first answer: something longer than one token was accepted
        assert len(drafted[0].accepted_histogram) > 2


def test_a_saved_drafter_is_loaded_to_the_last_bit_and_opened_by_its_architecture(
        tmp_path: Path, target: TargetModel, ends: TargetEmbeddings) -> None:
    drafter = shaken(new_drafter(target, ends, intermediate_size=48, num_attention_heads=2))
    save(tmp_path / "one", drafter)
    again = load(tmp_path / "one")
    assert again.config == drafter.config
    stored = again.state_dict()
    assert set(stored) == {"fc.weight", "fc.bias", "layers.0.post_attention_layernorm.weight",
                           *(f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
                           *(f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))}
    assert all(torch.equal(tensor, stored[name]) for name, tensor in drafter.state_dict().items())
    save(tmp_path / "two", again)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    opened = open_drafter(tmp_path / "one", target)
    assert isinstance(opened, Eagle1Proposer)
    assert opened.aux_layers == (target.config.num_layers,)


def test_violations_of_the_format_are_named(tmp_path: Path, target: TargetModel, ends: TargetEmbeddings) -> None:
    directory = tmp_path / "drafter"
    save(directory, new_drafter(target, ends))
    weights, config = directory / "model.safetensors", directory / "config.json"
    tensors, result = load_file(weights), json.loads(config.read_text())

    def changed(**tensor: torch.Tensor | None) -> None:
        names = {name.replace("__", "."): value for name, value in tensor.items()}
        save_file({name: value for name, value in (tensors | names).items() if value is not None}, weights)

    for tensor, message in (({"fc__bias": None}, "fc.bias is missing"),
                            ({"norm__weight": torch.ones(32)}, "norm.weight is not known"),
                            ({"fc__weight": torch.zeros(32, 32)}, "fc.weight has shape")):
        changed(**tensor)
        with pytest.raises(CheckpointInvalid, match=message):
            load(directory)
    changed()
    for field, value in (("num_hidden_layers", 2), ("attention_bias", True), ("hot_vocab_size", 100),
                         ("model_type", "qwen2")):
        config.write_text(json.dumps(result | {field: value}))
        with pytest.raises(CheckpointInvalid, match=field):
            load(directory)
    config.write_text(json.dumps(result | {"vocab_size": 300}))
    with pytest.raises(CheckpointInvalid, match="vocabulary 300"):
        open_drafter(directory, target)
    with pytest.raises(ArtifactMissing):
        load(tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match="fc_norm"):
        new_drafter(target, ends, fc_norm=True)
