"""DFlash2: a block as the formulas read plainly, the trees, what is refused, and how its two parts are trained.

That SGLang's class proposes the same tokens is shown in `tests/sglang/test_blocks`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.training import TrainSpec
from eyrie_api.planning.drafter_forms import convert
from eyrie_api.planning.drafter_rules import expected_tensors
from eyrie_workers.drafters.blocks import DFlashDrafter, DFlashProposer, create, load
from eyrie_workers.drafters.checkpoint import CheckpointInvalid
from eyrie_workers.drafters.dflash import FAMILY
from eyrie_workers.drafters.family import open_drafter
from eyrie_workers.drafters.initialisation import TargetEmbeddings
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.training.objective import StepContext
from tests.workers.drafters.test_dflash import (
    CHAIN,
    FIRST_STEP,
    HIDDEN,
    LAYERS,
    STEPS,
    VOCAB,
    apply_rotary,
    documents,
    drafter_for,
    ends_of,
    naive_stream,
    rms,
    state_of_two_texts,
    target,
)

__all__ = ["target"]  # the fixture
SELECTOR = {"selector_rank": 6, "selector_top_k": 5, "conv_kernel_size": 2, "conv_group_size": 8}
CAPPED = SELECTOR | {"output_multiplier": 0.5, "final_logit_softcapping": 3.0}


def published(target: TargetModel, directory: Path, own: Mapping[str, Any] = SELECTOR) -> Path:
    """A DFlash2 drafter of random weights, with convolutions near the identity."""
    FAMILY.save(directory, drafter_for(target), "float32", None)
    config = json.loads((directory / "config.json").read_text())
    config["architectures"] = ["DFlash2DraftModel"]
    config["dflash_config"] |= own
    tensors, generator = load_file(directory / "model.safetensors"), torch.Generator().manual_seed(11)
    for name, shape in expected_tensors("dflash", config).items():
        if name not in tensors:
            tensors[name] = torch.randn(shape, generator=generator) * 0.3
            if name.endswith("base_kernel"):
                tensors[name][:, 0] += 1.0
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def convolved(t: Mapping[str, Tensor], name: str, side: int, normed: Tensor, x: Tensor) -> Tensor:
    """[C, H] of x [C, H], with the kernels that follow from `normed`; one place and one channel group at a time."""
    base, places = t[f"{name}base_kernel"], []
    for place in range(x.shape[0]):
        delta = (t[f"{name}kernel_projection.weight"] @ normed[place]).view(2, base.shape[1], -1)[side]
        total = torch.zeros(HIDDEN)
        for tap in range(min(base.shape[1], place + 1)):
            total += (base[side, tap] + delta[tap].repeat_interleave(HIDDEN // delta.shape[1])) * x[place - tap]
        places.append(total)
    return torch.stack(places)


def naive_states(directory: Path, target: TargetModel, ends: TargetEmbeddings, aux: Tensor, token: int) -> Tensor:
    """[S, H] states of the mask positions behind the final norm."""
    t, config = load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text())
    eps, theta, settled, size = config["rms_norm_eps"], config["rope_theta"], aux.shape[0], config["head_dim"]
    features = rms(aux.flatten(1) @ t["fc.weight"].T, t["hidden_norm.weight"], eps)
    stream = ends.embed[[token] + [config["dflash_config"]["mask_token_id"]] * STEPS]
    for layer in range(config["num_hidden_layers"]):
        a, m = f"layers.{layer}.self_attn.", f"layers.{layer}.mlp."

        def heads(part: str, x: Tensor, position: int, a: str = a) -> Tensor:
            return apply_rotary(rms((t[f"{a}{part}_proj.weight"] @ x).view(-1, size), t[f"{a}{part}_norm.weight"], eps),
                                position, theta)

        normed = rms(stream, t[f"layers.{layer}.input_layernorm.weight"], eps)
        inner = convolved(t, f"layers.{layer}.attention_conv.", 0, normed, normed)
        read = [*enumerate(features), *((settled + place, x) for place, x in enumerate(inner))]
        group = config["num_attention_heads"] // config["num_key_value_heads"]
        keys = torch.stack([heads("k", x, position) for position, x in read]).repeat_interleave(group, 1)
        values = torch.stack([(t[f"{a}v_proj.weight"] @ x).view(-1, size) for _, x in read]).repeat_interleave(group, 1)
        attended = torch.stack([torch.einsum("hl,lhe->he", (torch.einsum(
            "he,lhe->hl", heads("q", x, settled + place), keys) * size ** -0.5).softmax(-1), values).flatten()
            for place, x in enumerate(inner)])
        out = attended @ t[f"{a}o_proj.weight"].T
        stream = stream + convolved(t, f"layers.{layer}.attention_conv.", 1, normed, out)
        normed = rms(stream, t[f"layers.{layer}.post_attention_layernorm.weight"], eps)
        inner = convolved(t, f"layers.{layer}.mlp_conv.", 0, normed, normed)
        out = (F.silu(inner @ t[f"{m}gate_proj.weight"].T) * (inner @ t[f"{m}up_proj.weight"].T)
               ) @ t[f"{m}down_proj.weight"].T
        stream = stream + convolved(t, f"layers.{layer}.mlp_conv.", 1, normed, out)
    return rms(stream, t["norm.weight"], eps)[1:]


def naive_log_q(directory: Path, ends: TargetEmbeddings, state: Tensor, before: int) -> dict[int, float]:
    """Log probability of each candidate for the token after `before`."""
    t, own = load_file(directory / "model.safetensors"), json.loads(
        (directory / "config.json").read_text())["dflash_config"]
    name, scores = "candidate_selector.", {}
    context = t[f"{name}predecessor_codebook"][before] * (t[f"{name}hidden_projection.weight"] @ state)
    logits = ends.lm_head @ state
    for token in logits.topk(own["selector_top_k"]).indices.tolist():
        unary = logits[token] * own.get("output_multiplier", 1.0)
        if cap := own.get("final_logit_softcapping"):
            unary = (unary / cap).tanh() * cap
        scores[token] = unary + context @ t[f"{name}successor_codebook"][token]
    return dict(zip(scores, torch.stack(list(scores.values())).log_softmax(-1).tolist(), strict=True))


@pytest.mark.parametrize("own", [SELECTOR, CAPPED])
def test_trees_are_of_the_scores_of_the_formulas(own: dict[str, Any], target: TargetModel, tmp_path: Path) -> None:
    directory, ends = published(target, tmp_path / "drafter", own), ends_of(target)
    proposer = open_drafter(directory, target)
    assert isinstance(proposer, DFlashProposer)
    state, texts = state_of_two_texts(proposer)
    chain = proposer.propose(state, [0, 1], CHAIN)
    wide = proposer.propose(state, [0, 1], DraftTreeShape(num_steps=STEPS, top_k=2, num_draft_tokens=7))
    for row, (ids, aux) in enumerate(texts):
        states, before, drafted = naive_states(directory, target, ends, aux[:-1], int(ids[-1])), int(ids[-1]), []
        for step in range(STEPS):
            log_q = naive_log_q(directory, ends, states[step], before)
            before = max(log_q, key=lambda token: log_q[token])
            drafted.append(before)
        assert chain.tokens[row, 1:].tolist() == drafted
        for node in range(1, 7):
            path, place = [], node
            while place:
                path.append(int(wide.tokens[row, place]))
                place = int(wide.parents[row, place])
            before, score = int(ids[-1]), 0.0
            for step, token in enumerate(reversed(path)):
                score += naive_log_q(directory, ends, states[step], before)[token]
                before = token
            assert float(wide.scores[row, node]) == pytest.approx(score, abs=1e-4)


def test_a_drafter_without_convolutions_is_read(target: TargetModel, tmp_path: Path) -> None:
    own = {key: value for key, value in SELECTOR.items() if key.startswith("selector")}
    assert isinstance(open_drafter(published(target, tmp_path / "drafter", own), target), DFlashProposer)


@pytest.mark.parametrize(("change", "named"), [
    ({"selector_rank": 0}, "selector_rank is 0"), ({"selector_top_k": VOCAB + 1}, "selector_top_k"),
    ({"conv_group_size": 7}, "a divisor of 32"), ({"conv_group_size": None}, "conv_group_size"),
    ({"output_multiplier": -1.0}, "output_multiplier"), ({"selector_depth": 2}, "selector_depth")])
def test_a_selector_that_is_not_computed_is_refused(change: dict[str, Any], named: str, target: TargetModel,
                                                   tmp_path: Path) -> None:
    directory = published(target, tmp_path / "drafter")
    config = json.loads((directory / "config.json").read_text())
    config["dflash_config"] |= change
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointInvalid, match=named):
        open_drafter(directory, target)


def test_tensors_of_another_width_are_refused(target: TargetModel, tmp_path: Path) -> None:
    directory = published(target, tmp_path / "drafter")
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {"candidate_selector.hidden_projection.weight": torch.zeros(7, HIDDEN)},
              directory / "model.safetensors")
    with pytest.raises(CheckpointInvalid, match="hidden_projection"):
        open_drafter(directory, target)


@pytest.mark.parametrize("names", [["DFlash2DraftModel"], ["DFlash2BeamDraftModel"], ["MiniMaxDFlash2DraftModel"],
                                   ["DFlashDraftModel"]])
def test_every_published_name_becomes_one(names: list[str], target: TargetModel, tmp_path: Path) -> None:
    config = json.loads((published(target, tmp_path / "drafter") / "config.json").read_text())
    if names == ["DFlashDraftModel"]:
        config["dflash_config"]["projector_type"] = "dflash2"
    form = convert(config | {"architectures": names}, None, None, target.config.num_layers)
    assert (form.family, form.config["architectures"]) == ("dflash", ["DFlash2DraftModel"])
    assert "projector_type" not in form.config["dflash_config"]
    assert form.name_of("candidate_selector.successor_codebook") == "candidate_selector.successor_codebook"


@pytest.mark.parametrize("recompute", [False, True])
def test_convolutions_are_trained_as_the_formulas_read_and_as_they_are_decoded(
        recompute: bool, target: TargetModel, tmp_path: Path) -> None:
    drafter, ends, packed = drafter_for(target, causal_head="dflash2"), ends_of(target), documents((9, 12))
    FAMILY.save(tmp_path, drafter, "float32", None)
    settings = TrainSpec(unrolled_fraction=1.0, grad_checkpoint=recompute)
    objective = FAMILY.objective(drafter, ends, settings, 12, torch.float32)
    plan = objective.plan(packed, FIRST_STEP)
    states = objective.predict(packed, plan, False).states
    for row in (0, 1):
        root = int(plan.roots[row])
        expected = naive_states(tmp_path, target, ends, packed.aux[:root + 1], int(packed.token_ids[root + 1]))
        found = torch.stack([of_step[row] for of_step in states]).detach()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    objective(packed, FIRST_STEP).loss.backward()
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in drafter.parameters())
    assert isinstance(open_drafter(tmp_path, target), DFlashProposer)
    again = load(tmp_path).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in drafter.state_dict().items())


def test_a_new_convolution_passes_on_its_own_place(target: TargetModel) -> None:
    vocabulary = DraftVocabulary(torch.arange(VOCAB), VOCAB)
    drafter = create(DrafterSpec(family="dflash", max_draft_tokens=STEPS, num_layers=1, causal_head="dflash2"),
                     target.config, ends_of(target), LAYERS, vocabulary, 1)
    kernel = drafter.state_dict()["layers.0.mlp_conv.base_kernel"]
    assert kernel.shape == (2, 2, HIDDEN)
    assert bool((kernel[:, 0] == 1).all())
    assert not bool(kernel[:, 1].any())


def test_a_selectors_loss_is_its_cross_entropy_with_the_true_token_among_the_candidates(target: TargetModel) -> None:
    generator, ends = torch.Generator().manual_seed(5), ends_of(target)
    selector = drafter_for(target, causal_head="selector").candidate_selector
    assert selector is not None
    states, previous = torch.randn(4, HIDDEN, generator=generator), torch.tensor([3, 9, 9, 0])
    logits = states @ ends.lm_head.T
    true = torch.tensor([int(logits[0].argmax()), int(logits[1].argmin()), 7, int(logits[3].topk(2).indices[1])])
    found = selector.losses(states, ends.lm_head, 1.0, previous, true).detach()
    for row, token in enumerate(true.tolist()):
        candidates = logits[row].topk(selector.top_k).indices.tolist()
        if token not in candidates:
            candidates[-1] = token
        context = selector.predecessor_codebook[previous[row]] * (selector.hidden_projection.weight @ states[row])
        scores = torch.stack([logits[row, one] + context @ selector.successor_codebook[one] for one in candidates])
        assert float(found[row]) == pytest.approx(
            -float(scores.detach().log_softmax(0)[candidates.index(token)]), abs=1e-5)


def test_a_selector_is_trained_next_to_the_block_whose_loss_it_does_not_change(target: TargetModel) -> None:
    packed, with_selector = documents((9, 12)), drafter_for(target, causal_head="selector")
    plain, settings = drafter_for(target), TrainSpec(ttt_length=STEPS, unrolled_fraction=1.0)
    plain.load_state_dict({name: tensor for name, tensor in with_selector.state_dict().items()
                           if not name.startswith("candidate_selector.")})

    def loss(drafter: DFlashDrafter, context: StepContext | None) -> Tensor:
        return FAMILY.objective(drafter, ends_of(target), settings, 12, torch.float32)(packed, context).loss

    both, alone = (loss(drafter, FIRST_STEP) for drafter in (with_selector, plain))
    both.backward()
    alone.backward()
    selector = with_selector.candidate_selector
    assert selector is not None
    assert float(both.detach()) > float(alone.detach())
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in selector.parameters())
    assert float(loss(with_selector, None).detach()) == float(loss(plain, None).detach())


def test_a_trained_selector_drafts_as_it_is_trained_and_is_trained_further(target: TargetModel, tmp_path: Path) -> None:
    drafter, ends = drafter_for(target, causal_head="selector"), ends_of(target)
    FAMILY.save(tmp_path, drafter, "float32", None)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlash2DraftModel"]
    assert {"selector_rank": HIDDEN // 2, "selector_top_k": 16, "output_multiplier": 1.0}.items() <= config[
        "dflash_config"].items()
    proposer = open_drafter(tmp_path, target)
    assert isinstance(proposer, DFlashProposer)
    state, texts = state_of_two_texts(proposer)
    chain = proposer.propose(state, [0, 1], CHAIN)
    with torch.no_grad():
        for row, (ids, aux) in enumerate(texts):
            states, before = naive_stream(drafter, ends, aux[:-1], int(ids[-1]))[1:], int(ids[-1])
            for step in range(STEPS):
                log_q = naive_log_q(tmp_path, ends, states[step], before)
                before = max(log_q, key=lambda token: log_q[token])
                assert int(chain.tokens[row, 1 + step]) == before
    again = load(tmp_path).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in drafter.state_dict().items())


def test_training_continues_with_scaled_and_capped_candidates_which_its_checkpoints_keep(target: TargetModel,
                                                                                        tmp_path: Path) -> None:
    directory, ends = published(target, tmp_path / "drafter", CAPPED), ends_of(target)
    drafter = load(directory)
    selector, generator = drafter.candidate_selector, torch.Generator().manual_seed(5)
    assert selector is not None
    states, previous = torch.randn(3, HIDDEN, generator=generator), torch.tensor([3, 9, 0])
    ranked = (states @ ends.lm_head.T).argsort(1, descending=True)
    true = torch.tensor([int(ranked[row, row]) for row in range(3)])
    for scale in (1.0, 0.25):
        found = selector.losses(states, ends.lm_head * scale, scale, previous, true)
        for row, token in enumerate(true.tolist()):
            log_q = naive_log_q(directory, ends, states[row], int(previous[row]))
            assert float(found[row].detach()) == pytest.approx(-log_q[token], abs=1e-4)
    FAMILY.save(tmp_path / "again", drafter, "float32", None)
    kept = json.loads((tmp_path / "again" / "config.json").read_text())["dflash_config"]
    assert (kept["output_multiplier"], kept["final_logit_softcapping"]) == (0.5, 3.0)
