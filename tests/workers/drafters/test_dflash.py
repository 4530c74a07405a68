"""DFlash: the block as the paper reads plainly, serving against training, the export against what SGLang loads."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.training import TrainSpec
from eyrie_api.errors import InvalidInput
from eyrie_workers.drafters.blocks import DFlashDrafter, DFlashProposer, load, mask_token
from eyrie_workers.drafters.checkpoint import CheckpointInvalid
from eyrie_workers.drafters.dflash import FAMILY
from eyrie_workers.drafters.family import FamilyImplementation, open_drafter
from eyrie_workers.drafters.initialisation import TargetEmbeddings, read_target_embeddings
from eyrie_workers.hidden_states.packed_batch import PackedBatch
from eyrie_workers.speculation.protocol import NO_TOKEN, CommittedTokens, DrafterState
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.loading import load_target
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.training.objective import StepContext
from tests.packed_rows import pack_rows
from tests.tiny import tiny_target

VOCAB, HIDDEN, STEPS, LAYERS = 320, 32, 3, (1, 2, 3)
FIRST_STEP = StepContext(0, 1, 0)
CHAIN = DraftTreeShape(num_steps=STEPS, top_k=1, num_draft_tokens=STEPS + 1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return load_target(tiny_target(tmp_path_factory.mktemp("target"), "llama", seed=5))


def ends_of(target: TargetModel) -> TargetEmbeddings:
    assert target.path is not None
    return read_target_embeddings(target.path, target.config.tie_word_embeddings)


def drafter_for(target: TargetModel, layers: tuple[int, ...] = LAYERS, **spec: object) -> DFlashDrafter:
    """Random weights, large enough that every part shows in the logits."""
    wanted = DrafterSpec.model_validate({"family": "dflash", "max_draft_tokens": STEPS, "num_layers": 2} | spec)
    vocabulary = DraftVocabulary(torch.arange(VOCAB), VOCAB)
    drafter = FAMILY.create(wanted, target.config, ends_of(target), layers, vocabulary, 1)
    assert isinstance(drafter, DFlashDrafter)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(1.0)
    return drafter


def documents(lengths: tuple[int, ...], dtype: torch.dtype = torch.float32) -> PackedBatch:
    """Documents whose second half is the answer."""
    generator = torch.Generator().manual_seed(7)
    return pack_rows([(torch.randint(VOCAB, (length,), generator=generator), torch.arange(length) >= length // 2,
                  torch.randn(length, len(LAYERS), HIDDEN, generator=generator).to(dtype),
                  torch.randn(length, HIDDEN, generator=generator).to(dtype)) for length in lengths])


def state_of_two_texts(proposer: DFlashProposer) -> tuple[DrafterState, list[tuple[Tensor, Tensor]]]:
    """A state that has read two texts of eight tokens, and the token ids [8] and states [8, A, H] of
    each."""
    state, packed = proposer.new_state(2), documents((8, 8))
    texts = list(zip(packed.token_ids.split([8, 8]), packed.aux.split([8, 8]), strict=True))
    for row, (ids, aux) in enumerate(texts):
        proposer.admit(state, row, ids[:1].tolist())
        proposer.extend(state, CommittedTokens([row], [0], [ids[1:].tolist()], aux[None, :-1]))
    return state, texts


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def apply_rotary(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotary embedding of one place's heads [heads, E], written out."""
    half = x.shape[-1] // 2
    angles = position * theta ** (-torch.arange(half, dtype=x.dtype) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def naive_marginals(drafter: DFlashDrafter, ends: TargetEmbeddings, aux: Tensor, token: int) -> Tensor:
    """[S, V] logits behind one settled token. aux [i + 1, A, H] of the positions before it."""
    return naive_stream(drafter, ends, aux, token)[1:] @ ends.lm_head.T


def naive_stream(drafter: DFlashDrafter, ends: TargetEmbeddings, aux: Tensor, token: int) -> Tensor:
    """[C, H] states of the block behind the final norm, one place at a time."""
    config, decoder = drafter.config, drafter.config.decoder
    eps, theta, settled = decoder.rms_eps, decoder.rope.theta, aux.shape[0]
    features = rms(aux.flatten(1) @ drafter.fc.weight.T, drafter.hidden_norm.weight, eps)
    block = [token] + [config.mask_token_id] * (config.block_size - 1)
    stream = ends.embed[block]
    for layer in drafter.layers:
        attention: Any = layer.self_attn

        def key(x: Tensor, position: int, attention: Any = attention) -> tuple[Tensor, Tensor]:
            k = rms((attention.k_proj.weight @ x).view(-1, decoder.head_dim), attention.k_norm.weight, eps)
            return apply_rotary(k, position, theta), (attention.v_proj.weight @ x).view(-1, decoder.head_dim)

        normed = rms(stream, layer.input_layernorm.weight, eps)
        pairs = [key(feature, position) for position, feature in enumerate(features)]
        pairs += [key(x, settled + place) for place, x in enumerate(normed)]
        keys, values = (torch.stack(part).repeat_interleave(decoder.num_heads // decoder.num_kv_heads, 1)
                        for part in zip(*pairs, strict=True))
        attended = []
        for place, x in enumerate(normed):
            q = rms((attention.q_proj.weight @ x).view(-1, decoder.head_dim), attention.q_norm.weight, eps)
            rotated = apply_rotary(q, settled + place, theta)
            scores = torch.einsum("he,lhe->hl", rotated, keys) * decoder.head_dim ** -0.5
            attended.append(torch.einsum("hl,lhe->he", scores.softmax(-1), values).flatten())
        stream = stream + torch.stack(attended) @ attention.o_proj.weight.T
        normed, mlp = rms(stream, layer.post_attention_layernorm.weight, eps), layer.mlp
        stream = stream + (F.silu(normed @ mlp.gate_proj.weight.T) * (normed @ mlp.up_proj.weight.T)
                           ) @ mlp.down_proj.weight.T
    return rms(stream, drafter.norm.weight, eps)


def test_loss_and_gradients_equal_a_plain_implementation_of_the_paper(target: TargetModel) -> None:
    check_loss_and_gradients(FAMILY, drafter_for(target), target, lambda drafter, ends, aux, tokens: naive_marginals(
        drafter, ends, aux, tokens[0]))


ConfidenceOf = Callable[[DFlashDrafter, TargetEmbeddings, Tensor, list[int], int], Tensor]
"""The logit of a confidence head at one step, from the same."""
LogitsOf = Callable[[DFlashDrafter, TargetEmbeddings, Tensor, list[int]], Sequence[Tensor] | Tensor]
"""[V] logits of each step, from the aux states up to a root and the tokens after it: the settled one first."""


def check_loss_and_gradients(family: FamilyImplementation, drafter: DFlashDrafter, target: TargetModel,
                             logits_of: LogitsOf, confidence_of: ConfidenceOf | None = None,
                             loss: Literal["kl", "tv"] = "kl", context: StepContext = FIRST_STEP) -> None:
    """Those of a batch, in float64, equal the ones that follow from plain logits."""
    drafter, packed, ends = drafter.double(), documents((9, 12), torch.float64), ends_of(target)
    ends = TargetEmbeddings(ends.embed.double(), ends.lm_head.double(), ends.norm.double(), ends.special)
    settings = TrainSpec(ttt_length=STEPS, unrolled_fraction=1.0, step_decay=0.7, loss=loss)
    outcome = family.objective(drafter, ends, settings, 12, torch.float64)(packed, context)
    outcome.loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()
             if parameter.grad is not None}
    drafter.zero_grad()
    losses: list[list[Tensor]] = [[] for _ in range(STEPS)]
    start = 0
    for length in packed.lengths:
        ids, aux, last = (x[start:start + length] for x in (packed.token_ids, packed.aux, packed.last))
        start += length
        for root in range(length // 2 - 1, length - 2):  # token root + 1 is of the answer, and root + 2 is there
            steps = min(STEPS, length - 2 - root)
            tokens = ids[root + 1: root + 1 + steps].tolist()
            logits = logits_of(drafter, ends, aux[:root + 1], tokens)
            for step in range(steps):
                p = (last[root + 1 + step] @ ends.lm_head.T).softmax(-1)
                tv = (p - logits[step].softmax(-1)).abs().sum() / 2
                losses[step].append(tv if loss == "tv" else -(p * logits[step].log_softmax(-1)).sum())
                if confidence_of is not None:
                    c = confidence_of(drafter, ends, aux[:root + 1], tokens, step).sigmoid()
                    accepted = 1 - tv.detach()
                    losses[step][-1] = losses[step][-1] - accepted * c.log() - (1 - accepted) * (1 - c).log()
    weights = torch.tensor([0.7 ** step for step in range(STEPS)], dtype=torch.float64)
    expected = (torch.stack([torch.stack(step).mean() for step in losses]) * weights / weights.sum()).sum()
    expected.backward()
    assert outcome.supervised == sum(len(step) for step in losses)
    torch.testing.assert_close(outcome.loss, expected, rtol=1e-6, atol=1e-6)
    assert found.keys() == dict(drafter.named_parameters()).keys()
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


def check_drafts(drafter: DFlashDrafter, ends: TargetEmbeddings, proposer: DFlashProposer, logits_of: LogitsOf) -> None:
    """Chains, of the block and deeper, and trees are those of the plain logits along each path."""
    state, texts = state_of_two_texts(proposer)
    tree = proposer.propose(state, [0, 1], CHAIN)
    wide = proposer.propose(state, [0, 1], DraftTreeShape(num_steps=STEPS, top_k=2, num_draft_tokens=7))
    deeper = proposer.propose(state, [0, 1], DraftTreeShape(num_steps=STEPS + 2, top_k=1, num_draft_tokens=STEPS + 3))
    assert deeper.tokens[:, 1:STEPS + 1].tolist() == tree.tokens[:, 1:].tolist()
    with torch.no_grad():
        for row, (ids, aux) in enumerate(texts):
            tokens = tree.tokens[row, 1:].tolist()
            log_q = torch.stack(list(logits_of(drafter, ends, aux[:-1], [int(ids[-1]), *tokens]))).log_softmax(-1)
            assert tokens == log_q.argmax(-1).tolist()
            torch.testing.assert_close(tree.scores[row, 1:], log_q.max(-1).values.cumsum(0), rtol=0, atol=1e-4)
            for node in range(1, 7):  # every node's score is of its own path
                path, place = [], node
                while place:
                    path.append(int(wide.tokens[row, place]))
                    place = int(wide.parents[row, place])
                path.reverse()
                log_q = torch.stack(list(logits_of(drafter, ends, aux[:-1], [int(ids[-1]), *path]))).log_softmax(-1)
                score = sum(float(log_q[step, token]) for step, token in enumerate(path))
                assert float(wide.scores[row, node]) == pytest.approx(score, abs=1e-4)


def test_decoding_proposes_the_marginals_of_training(target: TargetModel, tmp_path: Path) -> None:
    drafter, ends = drafter_for(target), ends_of(target)
    FAMILY.save(tmp_path / "drafter", drafter, "float32", None)
    proposer = open_drafter(tmp_path / "drafter", target)
    assert isinstance(proposer, DFlashProposer)
    assert proposer.aux_layers == LAYERS
    state = proposer.new_state(3)
    packed = documents((8, 13))
    texts = list(zip(packed.token_ids.split([8, 13]), packed.aux.split([8, 13]), strict=True))
    for row, (ids, aux) in zip((2, 0), texts, strict=True):
        proposer.admit(state, row, ids[:4].tolist())
        proposer.extend(state, CommittedTokens([row], [0], [ids[1:5].tolist()], aux[None, :4]))
    proposer.propose(state, [0], CHAIN)  # its scratch keys must not stay
    rest = [len(ids) - 5 for ids, _ in texts]
    states = torch.stack([F.pad(aux[4:-1], (0, 0, 0, 0, 0, max(rest) - left))
                          for (_, aux), left in zip(texts, rest, strict=True)])
    proposer.extend(state, CommittedTokens([2, 0], [4, 4], [ids[5:].tolist() for ids, _ in texts], states))
    tree = proposer.propose(state, [2, 0], CHAIN)
    for row, (ids, aux) in enumerate(texts):
        with torch.no_grad():
            log_q = naive_marginals(drafter, ends, aux[:-1], int(ids[-1])).log_softmax(-1)
        best, choice = log_q.max(-1)
        assert tree.tokens[row, 1:].tolist() == choice.tolist()
        torch.testing.assert_close(tree.scores[row, 1:], best.cumsum(0), rtol=0, atol=1e-4)
    alone = proposer.propose(state, [0], CHAIN)
    assert torch.equal(alone.tokens[0], tree.tokens[1])
    deeper = proposer.propose(state, [0], DraftTreeShape(num_steps=5, top_k=1, num_draft_tokens=6))
    assert deeper.tokens[0, 1:].tolist() == [*alone.tokens[0, 1:].tolist(), NO_TOKEN, NO_TOKEN]


def test_anchors_are_redrawn_at_every_step_and_evaluation_uses_all(target: TargetModel) -> None:
    packed = documents((40, 60))
    objective = FAMILY.objective(drafter_for(target), ends_of(target), TrainSpec(unrolled_fraction=0.4), 60,
                                 torch.float32)
    first, second, again = (objective.plan(packed, StepContext(step, 10, 0)).roots.tolist() for step in (0, 1, 0))
    every = objective.plan(packed, None).roots.tolist()
    assert first == again
    assert set(first) != set(second)
    assert set(first) | set(second) < set(every)
    assert len(every) == 20 + 30 - 2
    outcome = objective(packed)
    assert [hit.numel() for hit in outcome.hits] == [48, 46, 44]


def test_the_mask_is_the_last_special_token_that_ends_no_answer(target: TargetModel) -> None:
    assert ends_of(target).special == (0, 1, 2)
    assert target.config.eos_token_ids == (2,)
    assert drafter_for(target).config.mask_token_id == 1
    assert mask_token((), target.config) == VOCAB - 1


def test_the_export_is_what_sglang_reads_and_other_configs_are_refused(target: TargetModel, tmp_path: Path) -> None:
    directory = tmp_path / "drafter"
    FAMILY.save(directory, drafter_for(target), "float32", None)
    config, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"] == {"block_size": 4, "mask_token_id": 1, "num_target_layers": 4,
                                       "target_layer_ids": [0, 1, 2]}
    layer = {f"layers.{i}.{name}.weight" for i in range(2) for name in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm",
        "self_attn.k_norm", "input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj",
        "mlp.down_proj")}
    assert set(tensors) == layer | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert tuple(tensors["fc.weight"].shape) == (HIDDEN, len(LAYERS) * HIDDEN)

    def changed(**fields: Any) -> dict[str, Any]:
        return config | {"dflash_config": config["dflash_config"] | fields}

    for wrong, named in ((changed(mask_token_id=VOCAB), "mask_token_id"), (changed(block_size=1), "block_size"),
                         (changed(target_layer_ids=[2, 1]), "target_layer_ids"), (changed(gru=1), "gru"),
                         (changed(target_layer_ids=[0, 3]), "target_layer_ids"),
                         (changed(num_target_layers=True), "num_target_layers"),
                         (config | {"dflash_config": None}, "dflash_config"),
                         (config | {"attention_bias": True}, "bias"), (config | {"model_type": "llama"}, "Qwen3")):
        (directory / "config.json").write_text(json.dumps(wrong))
        with pytest.raises(CheckpointInvalid, match=named):
            load(directory)
    (directory / "config.json").write_text(json.dumps(config))
    other = load_target(tiny_target(tmp_path / "other", num_layers=6))
    with pytest.raises(CheckpointInvalid, match="this target has"):
        open_drafter(directory, other)
    with pytest.raises(CheckpointInvalid, match="ends answers"):
        load(directory, replace(target.config, eos_token_ids=(1,)))
    save_file(tensors | {"embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}, directory / "model.safetensors")
    with pytest.raises(CheckpointInvalid, match="is not known"):
        open_drafter(directory, target)


def test_transformers_reads_the_configuration_as_that_of_qwen3_layers(target: TargetModel, tmp_path: Path) -> None:
    from transformers import AutoConfig, Qwen3Config

    FAMILY.save(tmp_path / "drafter", drafter_for(target), "float32", None)
    config = AutoConfig.from_pretrained(tmp_path / "drafter")
    assert isinstance(config, Qwen3Config)
    assert (config.num_hidden_layers, config.head_dim, config.layer_types) == (2, 8, ["full_attention"] * 2)


def test_layers_that_sglang_cannot_capture_are_refused(target: TargetModel) -> None:
    for layers in ((0, 2), (2, 4)):
        with pytest.raises(InvalidInput, match=r"capture\.aux_layers"):
            drafter_for(target, layers)
