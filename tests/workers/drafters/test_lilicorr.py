"""LiLiCorr: scores and loss as the formulas read plainly, serving against training, and what is refused.

That SGLang's class proposes the same tokens is shown in `tests/sglang/test_blocks`.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.training import TrainSpec
from eyrie_api.errors import InvalidInput
from eyrie_workers.drafters.blocks import DFlashDrafter, DFlashProposer, create, load
from eyrie_workers.drafters.checkpoint import CheckpointInvalid
from eyrie_workers.drafters.dflash import FAMILY
from eyrie_workers.drafters.family import open_drafter
from eyrie_workers.drafters.initialisation import TargetEmbeddings
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.model import TargetModel
from tests.workers.drafters.test_dflash import (
    FIRST_STEP,
    HIDDEN,
    LAYERS,
    STEPS,
    VOCAB,
    check_drafts,
    documents,
    drafter_for,
    ends_of,
    naive_stream,
    rms,
    target,
)

__all__ = ["target"]  # the fixture
TOP_K, WIDTH, HEADS, SCALE = 8, 8, 8, 8.0


def lilicorr(target: TargetModel) -> DFlashDrafter:
    return drafter_for(target, causal_head="lilicorr")


def naive_scores(drafter: DFlashDrafter, ends: TargetEmbeddings, aux: Tensor,
                 settled: int) -> tuple[list[list[int]], Tensor, Tensor]:
    """Candidates of each slot, the scores [K] of the first slot and [S - 1, K, K] of the transitions; one candidate at
    a time. The log-probabilities have no gradient."""
    head, hidden, eps = drafter.lilicorr, naive_stream(drafter, ends, aux, settled)[1:], drafter.config.decoder.rms_eps
    assert head is not None
    assert head.token_proj is not None
    log_p = (hidden @ ends.lm_head.T).log_softmax(-1).detach()
    candidates = [log_p[slot].topk(TOP_K).indices.tolist() for slot in range(STEPS)]
    rows = []
    for slot, tokens in enumerate(candidates):
        for rank, token in enumerate(tokens):
            value = log_p[slot, token]
            features = torch.stack([value, value.exp(), value - log_p[slot].max(), value.new_tensor(rank / (TOP_K - 1)),
                                    value.new_tensor(float(rank == 0))])
            normed = F.layer_norm(features, (5,), head.feature_norm.weight, head.feature_norm.bias)
            rows.append(head.token_proj(ends.embed[token]) + head.pass_hidden_proj(hidden[slot])
                        + head.feature_mlp.down_proj(F.silu(head.feature_mlp.up_proj(normed)))
                        + head.slot_embedding[0, 0, slot, 0] + head.rank_embedding[0, 0, 0, rank])
    x, size = torch.stack(rows), WIDTH // HEADS
    for layer in head.layers:
        parts: Any = layer
        q, k, v = (rms(x, parts.attn_norm.weight, eps) @ parts.attn.in_proj_weight.T + parts.attn.in_proj_bias).chunk(
            3, -1)
        attended = []
        for place in range(len(rows)):
            of_heads = []
            for number in range(HEADS):
                part = slice(number * size, (number + 1) * size)
                distances = [place // TOP_K - other // TOP_K for other in range(len(rows))]
                bias = torch.stack([head.relative_slot_bias[number, distance + STEPS]
                                    + (distance == 0) * head.same_slot_bias[number] for distance in distances])
                weights = (k[:, part] @ q[place, part] * size ** -0.5 + bias).softmax(0)
                of_heads.append(weights @ v[:, part])
            attended.append(torch.cat(of_heads))
        x = x + parts.attn.out_proj(torch.stack(attended))
        x = x + parts.mlp.down_proj(F.silu(parts.mlp.up_proj(rms(x, parts.mlp_norm.weight, eps))))
    y = rms(x, head.output_norm.weight, eps)
    fused = rms(drafter.fc.weight @ aux[-1].flatten(), drafter.hidden_norm.weight, eps)
    anchor = rms(head.context_proj(fused), head.anchor_norm.weight, eps)
    factors = [F.silu(head.factor_input_proj(torch.cat([one, anchor, one * anchor]))) for one in y]

    def unit(x: Tensor) -> Tensor:
        return x / x.norm().clamp_min(1e-4)

    leaving, entering = ([unit(part(one)) for one in factors] for part in (head.out_head, head.in_head))
    start = torch.stack([SCALE * unit(head.anchor_out_head(anchor)) @ entering[place] for place in range(TOP_K)])
    pairs = [[[SCALE * leaving[slot * TOP_K + one] @ entering[(slot + 1) * TOP_K + other] for other in range(TOP_K)]
              for one in range(TOP_K)] for slot in range(STEPS - 1)]
    return candidates, start, torch.stack([torch.stack([torch.stack(row) for row in slot]) for slot in pairs])


def naive_logits(drafter: DFlashDrafter, ends: TargetEmbeddings, aux: Tensor, tokens: list[int]) -> list[Tensor]:
    """[V] scores of each step, -inf outside the candidates, given the settled token and those drafted after it."""
    candidates, node, pairs = naive_scores(drafter, ends, aux, tokens[0])
    steps = []
    for slot in range(min(STEPS, len(tokens))):
        if slot:
            node = pairs[slot - 1, candidates[slot - 1].index(tokens[slot])]
        steps.append(node.new_full((VOCAB,), -torch.inf).scatter(0, torch.tensor(candidates[slot]), node))
    return steps


def test_each_drafted_token_is_the_best_transition_from_the_one_before(target: TargetModel, tmp_path: Path) -> None:
    drafter, ends = lilicorr(target), ends_of(target)
    FAMILY.save(tmp_path / "drafter", drafter, "float32", None)
    proposer = open_drafter(tmp_path / "drafter", target)
    assert isinstance(proposer, DFlashProposer)
    check_drafts(drafter, ends, proposer, naive_logits)


@pytest.mark.parametrize("at_once", [512, 2])
def test_its_loss_and_gradients_are_those_of_the_formulas_next_to_the_blocks_own(
        at_once: int, target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyrie_workers.drafters.lilicorr._BLOCKS", at_once)
    drafter, packed, ends = lilicorr(target).double(), documents((9, 12), torch.float64), ends_of(target)
    ends = TargetEmbeddings(ends.embed.double(), ends.lm_head.double(), ends.norm.double(), ends.special)
    # The true tokens after each document's first root: its third candidates, but for one of the second that is none.
    ids, start = packed.token_ids.clone(), 0
    with torch.no_grad():
        for number, length in enumerate(packed.lengths):
            first = start + length // 2
            hidden = naive_stream(drafter, ends, packed.aux[start:first], int(ids[first]))[1:]
            ids[first + 1:first + 1 + STEPS] = (hidden @ ends.lm_head.T).topk(3).indices[:, 2]
            if number:
                ids[first + 2] = (hidden[1] @ ends.lm_head.T).argmin()
            start += length
    packed = replace(packed, token_ids=ids)
    settings = TrainSpec(ttt_length=STEPS, unrolled_fraction=1.0, step_decay=0.7)
    objective = FAMILY.objective(drafter, ends, settings, 12, torch.float64)
    outcome = objective(packed, FIRST_STEP)
    outcome.loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()
             if parameter.grad is not None}
    drafter.zero_grad()

    terms, counts, start = [list[Tensor]() for _ in range(STEPS)], [0] * STEPS, 0
    for length in packed.lengths:
        of, aux, last = (x[start:start + length] for x in (packed.token_ids, packed.aux, packed.last))
        start += length
        for root in range(length // 2 - 1, length - 2):
            steps = min(STEPS, length - 2 - root)
            for step in range(steps):
                counts[step] += 1
            if steps < STEPS:
                continue  # a block that reaches beyond the answer
            candidates, node, pairs = naive_scores(drafter, ends, aux[:root + 1], int(of[root + 1]))
            place = 0
            for slot in range(STEPS):
                true = int(of[root + 2 + slot])
                if slot:
                    node = pairs[slot - 1, place]
                if true not in candidates[slot]:
                    break
                place = candidates[slot].index(true)
                z, log_q = ends.lm_head @ last[root + 1 + slot], node.log_softmax(0)
                worse = torch.stack([(z[true] - z[token]).clamp_min(0) for token in candidates[slot]])
                terms[slot].append(0.25 * (log_q.exp() @ worse) - 0.25 * log_q[place])
    weights = torch.tensor([0.7 ** step for step in range(STEPS)], dtype=torch.float64)
    weights = weights / weights.sum()
    assert len(terms[0]) > len(terms[2]) > 0
    head, drafter.lilicorr = drafter.lilicorr, None
    assert head is not None
    expected = objective(packed, FIRST_STEP).loss
    drafter.lilicorr = head
    for step in range(STEPS):
        if terms[step]:
            expected = expected + weights[step] / counts[step] * torch.stack(terms[step]).sum()
    expected.backward()
    torch.testing.assert_close(outcome.loss, expected, rtol=1e-6, atol=1e-6)
    assert found.keys() == dict(drafter.named_parameters()).keys()
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_a_batch_without_a_whole_block_trains_the_block_alone(target: TargetModel) -> None:
    drafter, packed = lilicorr(target), documents((5,))  # three tokens of answer: two steps
    outcome = FAMILY.objective(drafter, ends_of(target), TrainSpec(unrolled_fraction=1.0), 5, torch.float32)(
        packed, FIRST_STEP)
    outcome.loss.backward()
    assert drafter.lilicorr is not None
    assert all(parameter.grad is not None and not bool(parameter.grad.any())
               for parameter in drafter.lilicorr.parameters())
    assert bool(drafter.fc.weight.grad is not None and drafter.fc.weight.grad.any())


def test_the_export_is_what_sglang_reads_and_training_continues_from_it(target: TargetModel, tmp_path: Path) -> None:
    drafter = lilicorr(target)
    FAMILY.save(tmp_path, drafter, "float32", None)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LiLiCorrDraftModel"]
    assert {key: value for key, value in config["dflash_config"].items() if key.startswith("lilicorr")} == {
        "lilicorr_candidate_topk": TOP_K, "lilicorr_hidden_size": WIDTH, "lilicorr_num_layers": 2,
        "lilicorr_num_heads": HEADS, "lilicorr_mlp_ratio": 2.0, "lilicorr_factor_dim": WIDTH,
        "lilicorr_vector_eps": 1e-4, "lilicorr_logit_scale": SCALE}
    again = load(tmp_path).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in drafter.state_dict().items())


def test_a_new_head_starts_without_biases_and_positions(target: TargetModel) -> None:
    wanted = DrafterSpec(family="dflash", max_draft_tokens=STEPS, num_layers=1, causal_head="lilicorr")
    vocabulary = DraftVocabulary(torch.arange(VOCAB), VOCAB)
    head = create(wanted, target.config, ends_of(target), LAYERS, vocabulary, 1).lilicorr
    assert head is not None
    for name, parameter in head.named_parameters():
        is_zero = name.endswith(("bias", "slot_embedding", "rank_embedding"))
        assert is_zero != bool(parameter.any()), name
    with pytest.raises(InvalidInput, match="scales or bounds its logits"):
        create(wanted, replace(target.config, logit_scale=0.5), ends_of(target), LAYERS, vocabulary, 1)


@pytest.mark.parametrize(("change", "named"), [
    ({"lilicorr_candidate_topk": 6}, "lilicorr_candidate_topk is 6"),
    ({"lilicorr_candidate_topk": 32}, "lilicorr_candidate_topk is 32"), ({"lilicorr_num_heads": 3}, "does not divide"),
    ({"lilicorr_vector_eps": 0}, "lilicorr_vector_eps"), ({"lilicorr_logit_scale": None}, "lilicorr_logit_scale"),
    ({"lilicorr_depth": 2}, "lilicorr_depth"), ({"conv_kernel_size": 2}, "conv_group_size")])
def test_a_head_that_is_not_computed_is_refused(change: dict[str, Any], named: str, target: TargetModel,
                                               tmp_path: Path) -> None:
    FAMILY.save(tmp_path, lilicorr(target), "float32", None)
    config = json.loads((tmp_path / "config.json").read_text())
    config["dflash_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointInvalid, match=named):
        open_drafter(tmp_path, target)


def test_a_head_as_wide_as_the_block_has_no_projection_of_tokens(target: TargetModel, tmp_path: Path) -> None:
    drafter = lilicorr(target)
    assert drafter.config.lilicorr is not None
    wide = DFlashDrafter(replace(drafter.config, lilicorr=replace(drafter.config.lilicorr, hidden_size=0)))
    assert wide.lilicorr is not None
    assert wide.lilicorr.token_proj is None
    assert wide.lilicorr.pass_hidden_proj.weight.shape == (HIDDEN, HIDDEN)
    FAMILY.save(tmp_path, wide, "float32", None)
    assert isinstance(open_drafter(tmp_path, target), DFlashProposer)
