"""The draft vocabulary: the most frequent tokens, the unavoidable ones, and two maps that agree."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyrie_api.errors import VocabularyTooLarge
from eyrie_api.planning.plan_work import TargetFacts
from eyrie_workers.targets.draft_vocabulary import (
    AnswerCounts,
    DraftVocabulary,
    build,
    choose_size,
    count_tokens,
    coverage,
    coverage_curve,
    default_size,
)

COUNTS = st.lists(st.integers(0, 9), min_size=4, max_size=120).map(torch.tensor)


@given(counts=COUNTS, data=st.data())
def test_it_holds_the_forced_tokens_and_then_the_most_frequent(counts: torch.Tensor, data: st.DataObject) -> None:
    size = data.draw(st.integers(2, counts.numel()))
    always = data.draw(st.sets(st.integers(0, counts.numel() - 1), max_size=size))
    ids = build(counts, size, always).ids.tolist()
    assert ids == sorted(set(ids))
    assert len(ids) == size
    assert always <= set(ids)
    free = set(ids) - always
    left_out = set(range(counts.numel())) - set(ids)
    # Whoever is in by rank beats whoever is out: by count, and on equal counts by the smaller id.
    assert all((-int(counts[a]), a) < (-int(counts[b]), b) for a in free for b in left_out)


@given(counts=COUNTS, data=st.data())
def test_offsets_and_membership_give_back_the_same_vocabulary(counts: torch.Tensor, data: st.DataObject) -> None:
    vocabulary = build(counts, data.draw(st.integers(1, counts.numel())))
    assert torch.equal(vocabulary.d2t + torch.arange(vocabulary.size), vocabulary.ids)
    assert torch.equal(vocabulary.t2d.nonzero().squeeze(1), vocabulary.ids)
    back = DraftVocabulary.from_buffers(vocabulary.d2t, vocabulary.t2d)
    assert torch.equal(back.ids, vocabulary.ids)
    assert back.vocab_size == counts.numel()


@given(counts=COUNTS)
def test_coverage_grows_with_size_and_is_whole_at_the_whole_vocabulary(counts: torch.Tensor) -> None:
    values = [coverage(counts, build(counts, size)) for size in range(1, counts.numel() + 1)]
    assert values == sorted(values)
    assert values[-1] == 1.0
    curve = coverage_curve(counts)
    assert curve[counts.numel()] == 1.0
    assert all(curve[size] == values[size - 1] for size in curve)


def test_the_whole_vocabulary_is_the_identity() -> None:
    vocabulary = build(torch.tensor([3, 0, 5]), 3)
    assert vocabulary.d2t.tolist() == [0, 0, 0]
    assert vocabulary.t2d.all()


def test_only_supervised_tokens_are_counted() -> None:
    counts = count_tokens(torch.tensor([1, 2, 2, 3]), torch.tensor([False, True, True, True]), 5)
    assert counts.tolist() == [0, 0, 2, 1, 0]


def test_more_than_the_target_has_is_refused() -> None:
    with pytest.raises(VocabularyTooLarge, match=r"draft_vocab_size 33 .* vocabulary of 32; give at most 32"):
        choose_size(32, 33)


def answers(vocab_size: int, num: int, exponent: float, seed: int) -> torch.Tensor:
    """[num, 100] answers whose tokens follow Zipf's law, the most frequent ones the largest ids."""
    weights = torch.arange(vocab_size, 0, -1).double() ** -exponent
    return torch.multinomial(weights, num * 100, replacement=True,
                             generator=torch.Generator().manual_seed(seed)).view(num, 100)


def counted(vocab_size: int, **sources: torch.Tensor) -> AnswerCounts:
    counts = AnswerCounts(vocab_size)
    for source, of_source in sources.items():
        for answer in of_source:
            counts.add(source, torch.bincount(answer, minlength=vocab_size))
    return counts


def target(layers: int, hidden: int, vocab_size: int = 49_152) -> TargetFacts:
    return TargetFacts(hidden_size=hidden, num_layers=layers, vocab_size=vocab_size, intermediate_size=4 * hidden,
                       num_heads=8, num_kv_heads=8, head_dim=hidden // 8, tie_word_embeddings=True, source="test")


SMALL, LARGE = target(30, 512), target(32, 4096)


@pytest.mark.parametrize("exponent", [1.1, 1.3, 1.6])
@pytest.mark.parametrize("size_of", [SMALL, LARGE], ids=["small target", "large target"])
def test_no_other_size_gives_more_tokens_for_the_cost_of_a_draft_step(exponent: float, size_of: TargetFacts) -> None:
    counts = counted(49_152, data=answers(49_152, 400, exponent, seed=0))
    size = default_size(counts, size_of, always=[0, 1])
    assert 4096 <= size <= 32_768
    assert size % 64 == 0
    [covered] = counts.unseen_coverage([0, 1]).values()
    hidden = size_of.hidden_size
    layer = 4 * hidden**2 + 3 * hidden * 4 * hidden
    rest = layer + (30 if size_of is SMALL else 32) * layer / 4 + 49_152 * hidden / 4

    def gain(number: int) -> float:
        accepted = 0.7 * float(covered[number - 1])
        return sum(accepted**step for step in range(5)) / (rest + number * hidden)

    assert all(gain(other) <= gain(size) * 1.001 for other in range(4096, 32_769, 512))


def test_a_larger_target_has_the_larger_draft_vocabulary() -> None:
    counts = counted(49_152, data=answers(49_152, 2000, 1.0, seed=0))
    assert 1.5 * default_size(counts, SMALL) < default_size(counts, LARGE)


def test_a_source_of_richer_text_needs_the_larger_vocabulary() -> None:
    plain, rich = answers(49_152, 300, 2.0, seed=0), answers(49_152, 100, 1.05, seed=1)
    both = default_size(counted(49_152, plain=plain, rich=rich), LARGE)
    assert default_size(counted(49_152, plain=plain), LARGE) == 4096
    assert both > 2 * 4096


def test_a_token_that_only_one_answer_repeats_is_not_expected_in_others() -> None:
    usual = torch.zeros(20, 100, dtype=torch.int64)
    usual[:, 50:] = torch.arange(20)[:, None] + 40_000  # half of each answer is a token of its own
    [covered] = counted(49_152, data=usual).unseen_coverage().values()
    assert float(covered[32_767]) == 0.5


def test_a_small_vocabulary_and_one_without_enough_answers_are_used_as_far_as_a_default_goes() -> None:
    few = counted(49_152, data=answers(49_152, 10, 1.2, seed=0))
    assert few.unseen_coverage() == {}
    assert default_size(few, SMALL) == 32_768
    assert default_size(AnswerCounts(49_152), SMALL) == 32_768
    assert default_size(counted(4096, data=answers(4096, 400, 2.0, seed=0)), SMALL) == 4096


def test_no_size_means_the_whole_up_to_a_bound() -> None:
    assert (choose_size(2048, None), choose_size(151_936, None), choose_size(151_936, 8000)) == (2048, 32_768, 8000)


def test_a_size_that_cannot_hold_the_special_tokens_is_refused() -> None:
    with pytest.raises(VocabularyTooLarge, match="at least 3"):
        build(torch.zeros(10, dtype=torch.int64), 2, always=[1, 2, 3])
