"""The loss and its gradients against the plainest possible reading of the paper, and documents that do not leak."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from eyrie_api.contract.training import TrainSpec
from eyrie_kernels.soft_target_loss import Loss
from eyrie_workers.drafters.eagle3.drafter import Eagle3Drafter, TrainingTimeTest, loss_in_parts, shared_projections
from eyrie_workers.drafters.initialisation import TargetEmbeddings
from eyrie_workers.hidden_states.packed_batch import PackedBatch
from eyrie_workers.stages.sweep import shared_targets
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.operators import OutputHead, Rotary
from eyrie_workers.training.objective import (
    Normalization,
    StepContext,
    TargetHead,
    compute_target_table,
    shares,
    step_weights,
)
from tests.workers.drafters.test_eagle3_proposer import (
    HIDDEN,
    VARIANTS,
    VOCAB,
    embedding,
    random_documents,
    random_drafter,
)

STEPS, DECAY = 4, 0.8


def lm_head(seed: int = 5) -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(seed))


def ends() -> TargetEmbeddings:
    return TargetEmbeddings(embedding(), lm_head(), torch.ones(HIDDEN))


def objective(drafter: Eagle3Drafter, steps: int = STEPS, dtype: torch.dtype = torch.float32) -> TrainingTimeTest:
    return TrainingTimeTest(drafter, ends(), settings(ttt_length=steps), max_positions=64,
                            dtype=dtype)


def settings(**changed: Any) -> TrainSpec:
    """Every root unrolled at every step, by default."""
    return TrainSpec(**{"ttt_length": STEPS, "step_decay": DECAY, "unrolled_fraction": 1.0, "single_step_ratio": 0.0,
                        **changed})


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turn(x: torch.Tensor, position: int) -> torch.Tensor:
    """Rotary embedding of one row of heads [heads, E], written out."""
    half = x.shape[-1] // 2
    angles = position * 100.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def naive_loss(drafter: Eagle3Drafter, documents: PackedBatch) -> torch.Tensor:
    """Each root by itself, one position at a time: no packing, no tiles, no halves, no sharing."""
    config, layer = drafter.config, drafter.midlayer
    attention, embed, head = layer.self_attn, embedding().to(drafter.fc.weight.dtype), lm_head()
    sums, counts = [torch.zeros((), dtype=embed.dtype) for _ in range(STEPS)], [0] * STEPS
    start = 0
    for length in documents.lengths:
        ids, mask = documents.token_ids[start:start + length], documents.loss_mask[start:start + length]
        aux, last = documents.aux[start:start + length], documents.last[start:start + length]
        start += length

        def project(hidden: torch.Tensor, token: int, position: int) -> tuple[torch.Tensor, ...]:
            x = torch.cat([rms(embed[token], layer.input_layernorm.weight), rms(hidden, layer.hidden_norm.weight)])
            q, k, v = (p(x).view(-1, config.head_dim) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
            return turn(q, position), turn(k, position), v

        def fuse(states: torch.Tensor) -> torch.Tensor:
            if config.fc_norm:
                states = torch.stack([rms(one, n.weight) for one, n in zip(states, drafter.fc_norm, strict=True)])
            joined = states.flatten()
            return drafter.fc(rms(joined, drafter.input_norm.weight) if config.norm_before_fc else joined)

        window = config.sliding_window or length + STEPS
        fused = [fuse(aux[i].to(embed.dtype)) for i in range(length)]
        for root in range(length):
            keys, values, hidden = [], [], fused[root]
            for step in range(STEPS):
                if not all(t < length and mask[t] for t in range(root + 1, root + 3 + step)):
                    break
                if step == 0:
                    for j in range(root + 1):
                        q, k, v = project(fused[j], int(ids[j + 1]), j)
                        keys.append(k), values.append(v)
                else:
                    q, k, v = project(hidden, int(ids[root + 1 + step]), root + step)
                    keys.append(k), values.append(v)
                mixed = []
                for j in range(config.num_heads):
                    kv = j * config.num_kv_heads // config.num_heads
                    scores = torch.stack([q[j] @ key[kv] for key in keys[-window:]])
                    weights = scores.div(config.head_dim**0.5).softmax(0)
                    mixed.append(sum(w * value[kv] for w, value in zip(weights, values[-window:], strict=True)))
                hidden = hidden + attention.o_proj(torch.cat(mixed))
                x = rms(hidden, layer.post_attention_layernorm.weight)
                hidden = hidden + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(x)) * layer.mlp.up_proj(x))
                normed = rms(hidden, drafter.norm.weight)
                logits = drafter.lm_head(normed)
                hidden = normed if config.norm_output else hidden
                opinion = head.to(embed.dtype) @ last[root + 1 + step].to(embed.dtype)
                if drafter.t2d[opinion.argmax()]:
                    teacher = opinion[drafter.vocabulary.ids].softmax(0)
                    sums[step] = sums[step] - (teacher * logits.log_softmax(0)).sum()
                    counts[step] += 1
    weights = [DECAY**step for step in range(STEPS)]
    return sum(w / sum(weights) * s / max(1, n) for w, s, n in zip(weights, sums, counts, strict=True))


@pytest.mark.parametrize("name", ["plain", "norm_before_fc", "five-aux", "window-3", "window-6"])
def test_loss_and_every_gradient_equal_the_naive_reading_in_double_precision(name: str) -> None:
    drafter = random_drafter(**VARIANTS[name]).double()
    documents = random_documents((9, 6, 12), num_aux=drafter.config.num_aux)
    expected = naive_loss(drafter, documents)
    expected.backward()
    wanted = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}
    drafter.zero_grad()
    outcome = objective(drafter, dtype=torch.float64)(documents)
    outcome.loss.backward()
    # The teacher, the log-sum-exp and the rotary table are float32 by design: hence 1e-5 and not 1e-12.
    torch.testing.assert_close(outcome.loss.double(), expected, atol=1e-5, rtol=1e-5)
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], atol=2e-5, rtol=2e-4, msg=name)
        assert wanted[name].abs().max() > 1e-4, f"{name} was not tested by this data"


def gradients(drafter: Eagle3Drafter, documents: PackedBatch, counted: int) -> dict[str, torch.Tensor]:
    """Gradients when only the first `counted` tokens are answer tokens."""
    drafter.zero_grad()
    mask = documents.loss_mask.clone()
    mask[counted:] = False
    only = PackedBatch(documents.token_ids, mask, documents.aux, documents.last, documents.lengths)
    objective(drafter)(only).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}


def test_changing_document_b_changes_no_gradient_of_document_a() -> None:
    drafter, documents = random_drafter(), random_documents((13, 13))
    other = random_documents((13, 13), seed=77)
    changed = PackedBatch(
        torch.cat([documents.token_ids[:13], other.token_ids[13:]]), documents.loss_mask,
        torch.cat([documents.aux[:13], other.aux[13:]]), torch.cat([documents.last[:13], other.last[13:]]), (13, 13))
    before, after = gradients(drafter, documents, 13), gradients(drafter, changed, 13)
    for name, gradient in before.items():
        assert torch.equal(gradient, after[name]), name


def test_packing_documents_together_sums_what_they_give_apart() -> None:
    drafter, documents = random_drafter(), random_documents((14, 14))
    together = objective(drafter)(documents)
    parts = [PackedBatch(documents.token_ids[a:b], documents.loss_mask[a:b], documents.aux[a:b],
                             documents.last[a:b], (14,)) for a, b in ((0, 14), (14, 28))]
    apart = [objective(drafter)(part) for part in parts]
    counts = [[int(teach_inside(drafter, part, step)) for step in range(STEPS)] for part in parts]
    assert [int(hits.sum()) for hits in together.hits] == [
        sum(int(one.hits[step].sum()) for one in apart) for step in range(STEPS)]
    # One step alone, so that a loss is one mean over its predictions.
    learner = objective(drafter, steps=1)
    total = sum(learner(part).loss * count[0] for part, count in zip(parts, counts, strict=True))
    torch.testing.assert_close(learner(documents).loss, total / sum(count[0] for count in counts), atol=1e-5, rtol=1e-5)


def teach_inside(drafter: Eagle3Drafter, documents: PackedBatch, step: int) -> int:
    """Roots of one document alive at `step` whose teacher chooses inside the draft vocabulary."""
    first = int(documents.loss_mask.nonzero()[0])
    rows = documents.last[first + step: len(documents.token_ids) - 1]
    return int(drafter.t2d[(rows @ lm_head().T).argmax(-1)].sum())


def test_the_loss_does_not_depend_on_how_much_prompt_surrounds_the_answer() -> None:
    # Two copies of the same answer, one with unsupervised documents packed beside it.
    drafter, documents = random_drafter(), random_documents((12,))
    silent = random_documents((30,), seed=4)
    padded = PackedBatch(
        torch.cat([documents.token_ids, silent.token_ids]),
        torch.cat([documents.loss_mask, torch.zeros(30, dtype=torch.bool)]),
        torch.cat([documents.aux, silent.aux]), torch.cat([documents.last, silent.last]), (12, 30))
    alone, beside = objective(drafter)(documents).loss, objective(drafter)(padded).loss
    torch.testing.assert_close(alone, beside, atol=1e-6, rtol=1e-6)


def test_a_batch_without_answers_has_zero_loss_and_zero_gradients() -> None:
    drafter, documents = random_drafter(), random_documents((8,))
    silent = PackedBatch(documents.token_ids, torch.zeros(8, dtype=torch.bool), documents.aux, documents.last, (8,))
    outcome = objective(drafter)(silent)
    outcome.loss.backward()
    assert float(outcome.loss.detach()) == 0.0
    assert outcome.supervised == 0
    assert all(float(parameter.grad.abs().max()) == 0.0 for parameter in drafter.parameters())


def test_bfloat16_products_stay_near_float32() -> None:
    drafter, documents = random_drafter(), random_documents((20, 20))
    exact, rounded = (objective(drafter, dtype=dtype)(documents).loss for dtype in (torch.float32, torch.bfloat16))
    assert abs(float((exact - rounded).detach())) < 0.03 * float(exact.detach())


def test_step_weights_decay_and_sum_to_one() -> None:
    weights = step_weights(7, 0.8)
    assert abs(sum(weights) - 1) < 1e-12
    assert all(abs(b / a - 0.8) < 1e-12 for a, b in pairwise(weights))


def test_the_teacher_is_renormalised_over_the_draft_vocabulary() -> None:
    ids, last = torch.tensor([1, 4, 9]), torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0))
    member = torch.zeros(VOCAB, dtype=torch.bool)
    member[ids] = True
    teacher = compute_target_table(last, TargetHead.of(OutputHead(lm_head()), DraftVocabulary(ids, VOCAB)))
    full = (last @ lm_head().T).softmax(-1)
    torch.testing.assert_close(teacher.probabilities, full[:, ids] / full[:, ids].sum(-1, keepdim=True))
    assert teacher.inside_R.tolist() == member[full.argmax(-1)].tolist()
    torch.testing.assert_close(teacher.mass_R, full[:, ids].sum(-1))


def test_training_unrolls_a_drawn_share_and_the_draw_is_a_function_of_seed_and_step() -> None:
    drafter, documents = random_drafter(), random_documents((40, 40, 40))
    learner = TrainingTimeTest(drafter, ends(),
                               settings(unrolled_fraction=0.3, single_step_ratio=0.5), max_positions=64)
    judged = learner(documents)
    late = [learner(documents, StepContext(step=step, num_steps=10, seed=0)) for step in (5, 5, 6)]
    assert torch.equal(late[0].loss, late[1].loss)
    assert not torch.equal(late[0].loss, late[2].loss)
    assert judged.supervised > late[0].supervised > len(judged.hits[0])
    assert [bool(outcome.hits) for outcome in (judged, *late)] == [True, False, False, False]
    early = learner(documents, StepContext(step=4, num_steps=10, seed=0))
    assert early.supervised == len(judged.hits[0])  # the first half of the run trains the first step alone


def test_by_sequence_a_long_answer_weighs_as_much_as_a_short_one() -> None:
    step, document = torch.tensor([0, 0, 0, 0, 1]), torch.tensor([0, 1, 1, 1, 1])
    counts = torch.tensor([True, True, True, False, True])
    token = shares(step, document, 2, counts, 3, 0.5, "token", lambda x: x)
    sequence = shares(step, document, 2, counts, 3, 0.5, "sequence", lambda x: x)
    torch.testing.assert_close(token, torch.tensor([2 / 9, 2 / 9, 2 / 9, 0, 1 / 3]))
    torch.testing.assert_close(sequence, torch.tensor([1 / 3, 1 / 6, 1 / 6, 0, 1 / 3]))


@pytest.mark.parametrize("normalization", ["token", "sequence"])
def test_shares_of_two_processes_are_those_of_one(normalization: Normalization) -> None:
    step, document = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 1, 2, 0, 2])
    counts, parts = torch.tensor([True, False, True, True, True]), [document == 0, document > 0]
    result: list[torch.Tensor] = []

    def tell(counted: torch.Tensor) -> torch.Tensor:
        result.append(counted)
        return counted

    whole = shares(step, document, 3, counts, 3, 0.8, normalization, lambda x: x)
    for part in parts:
        shares(step[part], document[part], 3, counts[part], 3, 0.8, normalization, tell)
    apart = [shares(step[part], document[part], 3, counts[part], 3, 0.8, normalization, lambda _: result[0] + result[1])
             for part in parts]
    torch.testing.assert_close(torch.cat([apart[0], apart[1]]), torch.cat([whole[part] for part in parts]))


@pytest.mark.parametrize("loss", ["tv", "lk", "lk_hybrid"])
def test_every_loss_trains(loss: Loss) -> None:
    drafter, documents = random_drafter(), random_documents((20, 20))
    learner = TrainingTimeTest(drafter, ends(),
                               settings(loss=loss, normalization="sequence"), max_positions=64)
    optimizer, losses = torch.optim.AdamW(drafter.parameters(), lr=3e-3), []
    for _ in range(15):
        outcome = learner(documents)
        optimizer.zero_grad()
        outcome.loss.backward()
        optimizer.step()
        losses.append(float(outcome.loss.detach()))
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", ["plain", "norm_output", "window-3"])
def test_roots_unrolled_in_parts_give_the_gradients_of_all_at_once(name: str) -> None:
    drafter = random_drafter(**VARIANTS[name]).double()
    documents, found = random_documents((90, 30, 50), num_aux=drafter.config.num_aux), []
    for kept in (1, 1 << 40):  # one byte: the fewest roots at a time, 32
        learner = TrainingTimeTest(drafter, ends(), settings(), max_positions=128,
                                   max_kept_bytes=kept, dtype=torch.float64)
        drafter.zero_grad()
        outcome = learner(documents, StepContext(0, 1, 0))
        (2 * outcome.loss).backward()
        found.append([outcome.loss.detach(), *(parameter.grad.clone() for parameter in drafter.parameters())])
    for one, other in zip(*found, strict=True):
        # float32: the teacher and the log-sum-exp of the plain path are; sums differ in order
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def test_gradients_of_many_parts_are_summed_in_float32() -> None:
    drafter, documents = random_drafter(), random_documents((20,))
    weights = drafter.weights(torch.bfloat16)
    plan = objective(drafter).plan(documents, None)
    angles = Rotary(drafter.config.rope, drafter.config.head_dim, 64).at(torch.arange(64))
    projections = shared_projections(weights, angles, embedding(), documents, plan.positions)
    loss = loss_in_parts(600, lambda _, __, part: part.lm_head.float().sum(), projections, weights)
    loss.backward()
    assert (drafter.lm_head.weight.grad == 600).all()  # in bfloat16 the sum ends at 256: 256 + 1 is rounded to 256


def test_recomputation_changes_no_gradient() -> None:
    drafter, documents = random_drafter(), random_documents((20, 20))
    found = []
    for recompute in (False, True):
        learner = TrainingTimeTest(drafter, ends(), settings(grad_checkpoint=recompute),
                                   max_positions=64)
        drafter.zero_grad()
        learner(documents).loss.backward()
        found.append([parameter.grad.clone() for parameter in drafter.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_objectives_share_a_target_distribution_only_where_their_draft_vocabularies_are_one() -> None:
    documents = random_documents((14, 11))
    one, again, other = (objective(random_drafter(seed, draft_ids=torch.arange(first, first + 39, 3)))
                         for seed, first in enumerate((0, 0, 1)))
    assert one.vocabulary.size == other.vocabulary.size
    shared = shared_targets({"one": one, "again": again, "other": other}, documents, {})
    assert shared["one"] is shared["again"]
    found, wanted = shared["other"].table, other.target_distribution(
        documents, other.plan(documents, None).target_positions).table
    torch.testing.assert_close(found.probabilities, wanted.probabilities)
