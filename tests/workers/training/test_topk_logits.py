"""A stored opinion teaches what the final state would have taught, up to what was rounded and evenly spread."""

import torch

from eyrie_workers.hidden_states.shard_format import StoreFormat
from eyrie_workers.hidden_states.topk_logits import compute_topk_logits, topk_rows
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.operators import OutputHead
from eyrie_workers.training.objective import TargetHead, compute_target_table, topk_table

VOCAB, HIDDEN, ROWS = 60, 16, 25
DRAFT_IDS = torch.arange(0, VOCAB, 2)


def parts(top_k: int) -> tuple[StoreFormat, torch.Tensor, TargetHead]:
    generator = torch.Generator().manual_seed(0)
    layout = StoreFormat(aux_layers=(1,), hidden_size=HIDDEN, codec="int8", target_digest="sha256:" + "0" * 64,
                         final_state="topk", top_k=top_k, draft_ids=tuple(DRAFT_IDS.tolist()))
    last, matrix = (torch.randn(size, HIDDEN, generator=generator) for size in (ROWS, VOCAB))
    return layout, last, TargetHead.of(OutputHead(matrix), DraftVocabulary(DRAFT_IDS, VOCAB))


def test_with_every_token_kept_the_teacher_is_that_of_the_final_states() -> None:
    layout, last, head = parts(top_k=DRAFT_IDS.numel())
    wanted = compute_target_table(last, head)
    order = torch.tensor([3, 0, 24, 7])
    stored = compute_topk_logits([last], head.output, layout).map(lambda x: x[order])
    given = topk_table(stored, DRAFT_IDS.numel())
    # Logits are kept in float16: 11 bits, and differences reach 30 here.
    torch.testing.assert_close(given.rows(torch.arange(4)), wanted.probabilities[order], atol=1e-5, rtol=2e-2)
    torch.testing.assert_close(given.mass_R, wanted.mass_R[order], atol=1e-6, rtol=1e-5)
    assert torch.equal(given.inside_R, wanted.inside_R[order])
    inside = given.inside_R
    assert torch.equal(given.choice_R[inside], wanted.choice_R[order][inside])


def test_with_few_kept_the_rest_of_the_mass_is_exact_and_evenly_spread() -> None:
    layout, last, head = parts(top_k=4)
    wanted = compute_target_table(last, head).probabilities
    given = topk_table(compute_topk_logits([last], head.output, layout), DRAFT_IDS.numel()).rows(torch.arange(ROWS))
    kept = torch.zeros_like(wanted, dtype=torch.bool).scatter_(1, wanted.topk(4).indices, True)
    torch.testing.assert_close(given.sum(-1), torch.ones(ROWS), atol=1e-6, rtol=0)
    torch.testing.assert_close((given * ~kept).sum(-1), (wanted * ~kept).sum(-1), atol=1e-6, rtol=1e-4)
    for row in range(ROWS):
        assert given[row][~kept[row]].unique().numel() == 1


def test_opinions_of_packed_rows_are_found_at_their_positions() -> None:
    mask = torch.tensor([False, True, True, False, False, True, True, True, False])
    assert topk_rows(mask, (4, 5)).tolist() == [0, 1, -1, -1, 2, 3, 4, -1, -1]
