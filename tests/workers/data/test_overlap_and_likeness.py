"""What the report on a set of conversations counts: copies, near copies, benchmark text."""

from hypothesis import given
from hypothesis import strategies as st

from eyrie_workers.data.overlap import RUN_WORDS, NearDuplicates, Runs, words


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def numbered(start: int, stop: int) -> str:
    return " ".join(f"word{i}" for i in range(start, stop))


@given(st.integers(0, 30), st.integers(1, 40))
def test_conversations_overlap_exactly_from_thirteen_words_in_a_row(start: int, num: int) -> None:
    runs = Runs([said("short", numbered(0, 40))])
    shared = max(0, min(40, start + num) - start)
    assert runs.overlap(said(f"Please, {numbered(start, start + num).upper()}!")) == (shared >= RUN_WORDS)


def test_assistant_turns_do_not_overlap_and_turns_are_not_joined() -> None:
    runs = Runs([said(numbered(0, 20))])
    assert not runs.overlap([*said("hello"), {"role": "assistant", "content": numbered(0, 20)}])
    assert not runs.overlap(said(numbered(0, 10), numbered(10, 20)))
    assert not Runs().overlap(said(numbered(0, 20)))


def test_writing_without_spaces_counts_each_character() -> None:
    assert words("\u4eca\u5929 weather") == ["\u4eca", "\u5929", "weather"]


def test_a_text_with_few_tokens_changed_is_near_and_one_with_half_of_them_is_not() -> None:
    text = list(range(1000, 1300))
    near = NearDuplicates(0.8)
    assert not near.seen(text)
    assert near.seen(text)
    assert near.seen([*text[:100], 7, *text[101:]])  # 5 of 296 shingles are others
    assert not near.seen([*text[:150], *range(5000, 5150)])
    assert not near.seen([3])
    assert near.seen([3])


def test_likeness_does_not_depend_on_the_process() -> None:
    one, two = NearDuplicates(0.5), NearDuplicates(0.5)
    texts = [list(range(i, i + 60)) for i in range(0, 200, 7)]
    assert [one.seen(text) for text in texts] == [two.seen(text) for text in texts]
