"""The unroll of training and the steps of serving are the same function: what is trained is what serves."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_workers.drafters.eagle3.drafter import Eagle3Config, Eagle3Drafter, shared_projections, unroll
from eyrie_workers.drafters.eagle3.family import Eagle3Proposer
from eyrie_workers.drafters.kv_cache import RowLengths
from eyrie_workers.drafters.layer_proposer import LayerState
from eyrie_workers.hidden_states.packed_batch import PackedBatch
from eyrie_workers.speculation.protocol import CommittedTokens, DraftStep
from eyrie_workers.targets.config import RopeConfig
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.operators import Rotary
from eyrie_workers.training.unroll_plan import UnrollPlan, plan_unroll
from tests.workers.drafters.allocations import largest

HIDDEN, VOCAB, STEPS = 16, 40, 4
# Same weights, same sums in another order: float32 rounding only. Logits here are of order one.
TOLERANCE = 2e-5
# Every way a drafter may differ from plain EAGLE-3. Windows of 3 and 6: smaller than the unrolled steps, and between
# them and the documents.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {}, "fc_norm": {"fc_norm": True}, "norm_before_fc": {"norm_before_fc": True},
    "norm_output": {"norm_output": True}, "eagle-3.1": {"fc_norm": True, "norm_output": True},
    "two-aux": {"aux_layers": (1, 4)}, "five-aux": {"aux_layers": (1, 2, 3, 4, 6), "norm_before_fc": True},
    "window-3": {"sliding_window": 3}, "window-6": {"sliding_window": 6, "fc_norm": True, "norm_output": True},
}
variants = pytest.mark.parametrize("flags", list(VARIANTS.values()), ids=list(VARIANTS))


def random_drafter(seed: int = 0, *, draft_ids: torch.Tensor | None = None, aux_layers: tuple[int, ...] = (1, 2, 4),
                   **flags: Any) -> Eagle3Drafter:
    """A drafter of random weights, norms included, large enough that every part shows in the logits."""
    ids = torch.arange(0, VOCAB, 3) if draft_ids is None else draft_ids
    config = Eagle3Config(
        hidden_size=HIDDEN, intermediate_size=24, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=VOCAB,
        draft_vocab_size=ids.numel(), aux_layers=aux_layers, rms_eps=1e-5, rope=RopeConfig(theta=100.0),
        max_position_embeddings=256, eos_token_ids=(2,), **flags)
    drafter = Eagle3Drafter(config, DraftVocabulary(ids, VOCAB))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(0.0, 0.4, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(1.0)
    return drafter


def random_documents(lengths: tuple[int, ...], seed: int = 1, num_aux: int = 3) -> PackedBatch:
    """Documents whose second half is the answer."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    mask = torch.cat([torch.arange(length) >= length // 2 for length in lengths])
    return PackedBatch(
        token_ids=torch.randint(VOCAB, (total,), generator=generator), loss_mask=mask,
        aux=torch.randn(total, num_aux, HIDDEN, generator=generator),
        last=torch.randn(total, HIDDEN, generator=generator), lengths=lengths)


def embedding(seed: int = 2) -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(seed))


def pairs_of(documents: PackedBatch, start: int, first: int, stop: int, row: int = 0) -> CommittedTokens:
    """Pairs first .. stop-1 of the document that begins at packed position `start`."""
    return CommittedTokens(
        rows=[row], starts=[first], tokens=[documents.token_ids[start + first + 1: start + stop + 1].tolist()],
        aux=documents.aux[None, start + first: start + stop])


def chain(proposer: Eagle3Proposer, state: LayerState, tokens: torch.Tensor, row: int = 0) -> list[torch.Tensor]:
    """Logits of each drafting step when the given tokens [S - 1] are what is drafted; [S] of [D]."""
    step = DraftStep(state.logits[row][None, None], state.hidden[row][None, None])
    logits = [step.logits[0, 0]]
    for depth, token in enumerate(tokens.tolist(), start=1):
        step = proposer._step(state, RowLengths.of([row], [state.cache.settled[row]]), torch.tensor([[token]]),
                              step.hidden, torch.ones(1, 1, depth, dtype=bool), depth)
        logits.append(step.logits[0, 0])
    return logits


def unrolled_steps(drafter: Eagle3Drafter, embed: torch.Tensor, documents: PackedBatch,
                   plan: UnrollPlan) -> Iterator[torch.Tensor]:
    weights, config = drafter.weights(), drafter.config
    angles = Rotary(config.rope, config.head_dim, 64).at(torch.arange(64))
    return unroll(weights, angles, shared_projections(weights, angles, embed, documents, plan.positions), plan)


@variants
def test_unrolled_logits_equal_decoding_logits_at_every_root_and_step(flags: dict[str, Any]) -> None:
    drafter, embed = random_drafter(**flags), embedding()
    documents = random_documents((14, 9, 17), num_aux=drafter.config.num_aux)
    plan = plan_unroll(documents.loss_mask, documents.lengths, STEPS)
    with torch.no_grad():
        unrolled = list(unrolled_steps(drafter, embed, documents, plan))
    proposer = Eagle3Proposer(drafter, embed)
    starts = [0, 14, 23, 40]
    compared = 0
    for row_of_roots, root in enumerate(plan.roots.tolist()):
        start = next(a for a, b in pairwise(starts) if a <= root < b)
        position = root - start
        state = proposer.new_state(1)
        proposer.extend(state, pairs_of(documents, start, 0, position + 1))
        life = sum(row_of_roots < alive for alive in plan.alive)
        served = chain(proposer, state, documents.token_ids[root + 2: root + 1 + life])
        for step in range(life):
            logits = drafter.lm_head(unrolled[step][row_of_roots])
            torch.testing.assert_close(logits, served[step], atol=TOLERANCE, rtol=0)
            compared += 1
    assert compared == plan.num_predictions > 40


@pytest.mark.parametrize("window", [3, 4, 7])
def test_keys_outside_the_window_have_no_influence_and_the_oldest_inside_has(window: int) -> None:
    drafter, embed, root = random_drafter(sliding_window=window), embedding(), 9

    def predictions(changed: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Unrolled and served logits [S, D] of one root, the states at one position replaced."""
        documents = random_documents((16,))
        if changed is not None:
            documents.aux[changed] += 1.0
        plan = plan_unroll(documents.loss_mask, documents.lengths, STEPS)
        with torch.no_grad():
            steps = list(unrolled_steps(drafter, embed, documents, plan))
        row = plan.roots.tolist().index(root)
        proposer = Eagle3Proposer(drafter, embed)
        state = proposer.new_state(1)
        proposer.extend(state, pairs_of(documents, 0, 0, root + 1))
        served = chain(proposer, state, documents.token_ids[root + 2: root + 1 + STEPS])
        return torch.stack([drafter.lm_head(step[row]).detach() for step in steps]), torch.stack(served)

    oldest_seen = root - window + 1
    unchanged, outside, inside = (predictions(at) for at in (None, oldest_seen - 1, oldest_seen))
    for before, behind, within in zip(unchanged, outside, inside, strict=True):
        assert torch.equal(before, behind)
        assert float((before[0] - within[0]).abs().max()) > 1e-3


def test_extending_in_pieces_gives_the_same_state_as_at_once() -> None:
    drafter, documents, embed = random_drafter(), random_documents((20,)), embedding()
    proposer = Eagle3Proposer(drafter, embed)
    shape = DraftTreeShape(num_steps=3, top_k=2, num_draft_tokens=6)
    whole, pieces = proposer.new_state(1), proposer.new_state(1)
    proposer.extend(whole, pairs_of(documents, 0, 0, 15))
    for first, stop in ((0, 6), (6, 7), (7, 11), (11, 15)):
        proposer.extend(pieces, pairs_of(documents, 0, first, stop))
        proposer.propose(pieces, [0], shape)  # scratch keys of a proposal must not outlive it
    torch.testing.assert_close(pieces.logits, whole.logits, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(pieces.cache.data[0, :, :15], whole.cache.data[0, :, :15], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("window", [None, 2, 6])
@pytest.mark.parametrize("shape", [
    DraftTreeShape(num_steps=4, top_k=1, num_draft_tokens=5), DraftTreeShape(num_steps=4, top_k=2, num_draft_tokens=9),
    DraftTreeShape(num_steps=4, top_k=3, num_draft_tokens=9, static=True)], ids=["chain", "tree", "static"])
@pytest.mark.parametrize("rows", [[2, 0, 3], [3, 1, 2], [1, 2, 3]], ids=["apart", "neighbours", "in order"])
def test_a_batch_of_rows_proposes_what_each_row_proposes_alone(rows: list[int], shape: DraftTreeShape,
                                                               window: int | None) -> None:
    drafter, embed = random_drafter(sliding_window=window), embedding()
    proposer = Eagle3Proposer(drafter, embed)
    together, lengths = proposer.new_state(4), (5, 11, 8)
    documents = [random_documents((length + 1,), seed=length) for length in lengths]
    aux = torch.zeros(3, max(lengths), 3, HIDDEN)
    for b, (document, length) in enumerate(zip(documents, lengths, strict=True)):
        aux[b, :length] = document.aux[:-1]
    proposer.extend(together, CommittedTokens(rows, [0, 0, 0], [one.token_ids[1:].tolist() for one in documents], aux))
    batched = proposer.propose(together, rows, shape)
    for b, (document, length) in enumerate(zip(documents, lengths, strict=True)):
        alone = proposer.new_state(1)
        proposer.extend(alone, pairs_of(document, 0, 0, length))
        tree = proposer.propose(alone, [0], shape)
        assert torch.equal(tree.tokens[0], batched.tokens[b])
        assert torch.equal(tree.parents[0], batched.parents[b])
        torch.testing.assert_close(tree.scores[0], batched.scores[b], atol=1e-4, rtol=0)


@pytest.mark.parametrize("window", [None, 2, 6])
@pytest.mark.parametrize("static", [False, True])
def test_a_tree_path_is_scored_as_the_chain_of_its_tokens(static: bool, window: int | None) -> None:
    drafter, documents, embed = random_drafter(sliding_window=window), random_documents((12,)), embedding()
    proposer = Eagle3Proposer(drafter, embed)
    shape = DraftTreeShape(num_steps=4, top_k=3, num_draft_tokens=10 if static else 20, static=static)
    state = proposer.new_state(1)
    proposer.extend(state, pairs_of(documents, 0, 0, 9))
    tree = proposer.propose(state, [0], shape)
    draft_id = {int(token): index for index, token in enumerate(drafter.vocabulary.ids)}
    for node in range(1, tree.tokens.shape[1]):
        path = [node]
        while tree.parents[0, path[0]] != 0:
            path.insert(0, int(tree.parents[0, path[0]]))
        tokens = tree.tokens[0, path]
        logits = chain(proposer, state, tokens[:-1])
        score = sum(one.log_softmax(-1)[draft_id[int(token)]] for one, token in zip(logits, tokens, strict=True))
        assert abs(float(score - tree.scores[0, node])) < 1e-4


def test_proposals_are_target_ids_of_the_draft_vocabulary() -> None:
    ids = torch.tensor([1, 5, 6, 20, 33, 39])
    proposer = Eagle3Proposer(random_drafter(draft_ids=ids), embedding())
    shape = DraftTreeShape(num_steps=3, top_k=2, num_draft_tokens=7)
    state, documents = proposer.new_state(1), random_documents((10,))
    proposer.extend(state, pairs_of(documents, 0, 0, 8))
    tokens = proposer.propose(state, [0], shape).tokens[0, 1:]
    assert set(tokens.tolist()) <= set(ids.tolist())


def test_a_reused_row_is_cleared() -> None:
    proposer, documents = Eagle3Proposer(random_drafter(), embedding()), random_documents((16,))
    fresh, used = proposer.new_state(1), proposer.new_state(1)
    proposer.extend(used, pairs_of(random_documents((16,), seed=9), 0, 0, 15))
    proposer.admit(used, 0, [1, 2, 3])
    for state in (fresh, used):
        proposer.extend(state, pairs_of(documents, 0, 0, 7))
    assert torch.equal(fresh.logits, used.logits)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_a_round_with_a_window_allocates_nothing_that_grows_with_the_text(num_rows: int) -> None:
    proposer, rows = Eagle3Proposer(random_drafter(sliding_window=6), embedding()), range(num_rows)
    shape, state, found = DraftTreeShape(num_steps=3, top_k=2, num_draft_tokens=8), proposer.new_state(2), []
    documents = random_documents((900,))
    for stop in (40, 800):
        for row in rows:
            proposer.extend(state, pairs_of(documents, 0, 0, stop + row, row))
        proposer.propose(state, rows, shape)  # the caches have grown
        found.append(largest(lambda: proposer.propose(state, rows, shape)))
    assert found[0] == found[1] < 800


def test_a_round_of_neighbouring_rows_does_not_copy_their_keys() -> None:
    proposer, documents, length = Eagle3Proposer(random_drafter(), embedding()), random_documents((900,)), 800
    state, shape = proposer.new_state(3), DraftTreeShape(num_steps=3, top_k=2, num_draft_tokens=8)
    for row in (2, 1):
        proposer.extend(state, pairs_of(documents, 0, 0, length + row, row))
    proposer.propose(state, [2, 1], shape)  # the caches have grown
    assert largest(lambda: proposer.propose(state, [2, 1], shape)) < 2 * length * 2 * 8  # keys [2, L, 2, 8]
