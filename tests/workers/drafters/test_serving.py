"""The unroll of training and the steps of serving are the same function: what is trained is what serves."""

from itertools import pairwise

import pytest
import torch

from eyrie_api.v1alpha1.job import DraftTreeShape
from eyrie_workers.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from eyrie_workers.drafters.protocol import DraftStep, SettledPairs
from eyrie_workers.drafters.rotary import Rotary
from eyrie_workers.drafters.serving import Eagle3Server, Eagle3State
from eyrie_workers.drafters.vocabulary import DraftVocabulary
from eyrie_workers.targets.config import RopeConfig
from eyrie_workers.training.layout import lay_out
from eyrie_workers.training.unroll import PackedDocuments, unroll

HIDDEN, VOCAB, STEPS = 16, 40, 4
# Same weights, same sums in another order: float32 rounding only. Logits here are of order one.
TOLERANCE = 2e-5


def random_drafter(seed: int = 0, *, draft_ids: torch.Tensor | None = None, **flags: bool) -> Eagle3Drafter:
    """A drafter of random weights, norms included, large enough that every part shows in the logits."""
    ids = torch.arange(0, VOCAB, 3) if draft_ids is None else draft_ids
    config = Eagle3Config(
        hidden_size=HIDDEN, intermediate_size=24, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=VOCAB,
        draft_vocab_size=ids.numel(), aux_layers=(1, 2, 4), rms_eps=1e-5, rope=RopeConfig(theta=100.0),
        max_position_embeddings=256, eos_token_ids=(2,), **flags)
    drafter = Eagle3Drafter(config, DraftVocabulary(ids, VOCAB))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(0.0, 0.4, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(1.0)
    return drafter


def random_documents(lengths: tuple[int, ...], seed: int = 1) -> PackedDocuments:
    """Documents whose second half is the answer."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    mask = torch.cat([torch.arange(length) >= length // 2 for length in lengths])
    return PackedDocuments(
        token_ids=torch.randint(VOCAB, (total,), generator=generator), loss_mask=mask,
        aux=torch.randn(total, 3, HIDDEN, generator=generator), last=torch.randn(total, HIDDEN, generator=generator),
        lengths=lengths)


def embedding(seed: int = 2) -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(seed))


def pairs_of(documents: PackedDocuments, start: int, first: int, stop: int, row: int = 0) -> SettledPairs:
    """Pairs first .. stop-1 of the document that begins at packed position `start`."""
    return SettledPairs(
        rows=torch.tensor([row]), starts=torch.tensor([first]), lengths=torch.tensor([stop - first]),
        tokens=documents.token_ids[None, start + first + 1: start + stop + 1],
        aux=documents.aux[None, start + first: start + stop])


def chain(server: Eagle3Server, state: Eagle3State, tokens: torch.Tensor, row: int = 0) -> list[torch.Tensor]:
    """Logits of each drafting step when the given tokens [S - 1] are what is drafted; [S] of [D]."""
    step = DraftStep(state.logits[row][None, None], state.hidden[row][None, None])
    logits = [step.logits[0, 0]]
    for depth, token in enumerate(tokens.tolist(), start=1):
        step = server._step(state, [row], torch.tensor([[token]]), step.hidden, torch.ones(1, 1, depth, dtype=bool),
                            depth)
        logits.append(step.logits[0, 0])
    return logits


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True}, {"norm_output": True}], ids=["plain", "fc_norm", "output"])
def test_unrolled_logits_equal_serving_logits_at_every_root_and_step(flags: dict[str, bool]) -> None:
    drafter, documents, embed = random_drafter(**flags), random_documents((14, 9, 17)), embedding()
    layout = lay_out(documents.loss_mask, documents.lengths, STEPS)
    rotary = Rotary(drafter.config.rope, drafter.config.head_dim, 64)
    with torch.no_grad():
        unrolled = list(unroll(drafter.weights(), rotary, embed, documents, layout))
    server = Eagle3Server(drafter, embed)
    starts = [0, 14, 23, 40]
    compared = 0
    for row_of_roots, root in enumerate(layout.roots.tolist()):
        start = next(a for a, b in pairwise(starts) if a <= root < b)
        position = root - start
        state = server.new_state(1, 64, DraftTreeShape(num_steps=STEPS, top_k=1, num_draft_tokens=STEPS + 1))
        server.extend(state, pairs_of(documents, start, 0, position + 1))
        life = sum(row_of_roots < alive for alive in layout.alive)
        served = chain(server, state, documents.token_ids[root + 2: root + 1 + life])
        for step in range(life):
            torch.testing.assert_close(unrolled[step].logits[row_of_roots], served[step], atol=TOLERANCE, rtol=0)
            assert unrolled[step].teacher[row_of_roots] == root + 1 + step
            compared += 1
    assert compared == layout.num_supervised > 40


def test_pairs_settled_in_pieces_leave_the_same_state_as_at_once() -> None:
    drafter, documents, embed = random_drafter(), random_documents((20,)), embedding()
    server = Eagle3Server(drafter, embed)
    shape = DraftTreeShape(num_steps=3, top_k=2, num_draft_tokens=6)
    whole, pieces = server.new_state(1, 32, shape), server.new_state(1, 32, shape)
    server.extend(whole, pairs_of(documents, 0, 0, 15))
    for first, stop in ((0, 6), (6, 7), (7, 11), (11, 15)):
        server.extend(pieces, pairs_of(documents, 0, first, stop))
        server.propose(pieces, torch.tensor([0]), shape)  # scratch keys of a proposal must not outlive it
    torch.testing.assert_close(pieces.logits, whole.logits, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(pieces.keys[:, :15], whole.keys[:, :15], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("shape", [DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4),
                                   DraftTreeShape(num_steps=3, top_k=2, num_draft_tokens=7)], ids=["chain", "tree"])
def test_a_batch_of_rows_proposes_what_each_row_proposes_alone(shape: DraftTreeShape) -> None:
    drafter, embed = random_drafter(), embedding()
    server = Eagle3Server(drafter, embed)
    together, lengths = server.new_state(4, 48, shape), (5, 11, 8)
    documents = [random_documents((length + 1,), seed=length) for length in lengths]
    rows, longest = torch.tensor([2, 0, 3]), max(lengths)
    tokens, aux = torch.zeros(3, longest, dtype=torch.int64), torch.zeros(3, longest, 3, HIDDEN)
    for b, (document, length) in enumerate(zip(documents, lengths, strict=True)):
        tokens[b, :length], aux[b, :length] = document.token_ids[1:], document.aux[:-1]
    server.extend(together, SettledPairs(rows, torch.zeros(3, dtype=torch.int64), torch.tensor(lengths), tokens, aux))
    batched = server.propose(together, rows, shape)
    for b, (document, length) in enumerate(zip(documents, lengths, strict=True)):
        alone = server.new_state(1, 48, shape)
        server.extend(alone, pairs_of(document, 0, 0, length))
        tree = server.propose(alone, torch.tensor([0]), shape)
        assert torch.equal(tree.tokens[0], batched.tokens[b])
        assert torch.equal(tree.parents[0], batched.parents[b])
        torch.testing.assert_close(tree.scores[0], batched.scores[b], atol=1e-4, rtol=0)


def test_a_tree_path_is_scored_as_the_chain_of_its_tokens() -> None:
    drafter, documents, embed = random_drafter(), random_documents((12,)), embedding()
    server, shape = Eagle3Server(drafter, embed), DraftTreeShape(num_steps=4, top_k=3, num_draft_tokens=20)
    state = server.new_state(1, 32, shape)
    server.extend(state, pairs_of(documents, 0, 0, 9))
    tree = server.propose(state, torch.tensor([0]), shape)
    draft_id = {int(token): index for index, token in enumerate(drafter.vocabulary.ids)}
    for node in range(1, tree.tokens.shape[1]):
        path = [node]
        while tree.parents[0, path[0]] != 0:
            path.insert(0, int(tree.parents[0, path[0]]))
        tokens = tree.tokens[0, path]
        logits = chain(server, state, tokens[:-1])
        score = sum(one.log_softmax(-1)[draft_id[int(token)]] for one, token in zip(logits, tokens, strict=True))
        assert abs(float(score - tree.scores[0, node])) < 1e-4


def test_proposals_are_target_ids_of_the_draft_vocabulary() -> None:
    ids = torch.tensor([1, 5, 6, 20, 33, 39])
    server = Eagle3Server(random_drafter(draft_ids=ids), embedding())
    shape = DraftTreeShape(num_steps=3, top_k=2, num_draft_tokens=7)
    state, documents = server.new_state(1, 32, shape), random_documents((10,))
    server.extend(state, pairs_of(documents, 0, 0, 8))
    tokens = server.propose(state, torch.tensor([0]), shape).tokens[0, 1:]
    assert set(tokens.tolist()) <= set(ids.tolist())


def test_a_row_taken_anew_forgets_its_past() -> None:
    server, documents = Eagle3Server(random_drafter(), embedding()), random_documents((16,))
    shape = DraftTreeShape(num_steps=2, top_k=1, num_draft_tokens=3)
    fresh, used = server.new_state(1, 32, shape), server.new_state(1, 32, shape)
    server.extend(used, pairs_of(random_documents((16,), seed=9), 0, 0, 15))
    server.admit(used, 0, [1, 2, 3])
    for state in (fresh, used):
        server.extend(state, pairs_of(documents, 0, 0, 7))
    assert torch.equal(fresh.logits, used.logits)
