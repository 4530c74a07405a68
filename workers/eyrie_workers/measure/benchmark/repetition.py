"""Text that an answer repeats, and tau without it.

A small target repeats itself, and repeated text is easy to draft: tau of such answers says little about text that is
new. A token is *repeated* when the `LENGTH` tokens up to and including it occur earlier in the same answer, the two
places overlapping or not. The first `LENGTH` - 1 tokens of a repetition are not counted, and a phrase that is shorter
than `LENGTH` is none.

A round counts as new text when none of its tokens is repeated. Needed is what every round accepted; engines that report
sums alone give no tau of new text.
"""

from collections.abc import Sequence

from eyrie_workers.measure.benchmark.variants import Sample

LENGTH = 8


def repeated(tokens: Sequence[int]) -> list[bool]:
    """Which tokens of an answer are repeated."""
    seen: set[tuple[int, ...]] = set()
    marks = [False] * min(len(tokens), LENGTH - 1)
    for end in range(LENGTH, len(tokens) + 1):
        gram = tuple(tokens[end - LENGTH:end])
        marks.append(gram in seen)
        seen.add(gram)
    return marks


def repeated_share(samples: Sequence[Sample]) -> float:
    """Of the tokens of all answers."""
    marks = [mark for sample in samples for mark in repeated(sample.token_ids)]
    return sum(marks) / max(1, len(marks))


def tau_of_new_text(samples: Sequence[Sample]) -> float | None:
    """Mean tokens of the rounds without a repeated token; None where there are none, or rounds are not known."""
    lengths = []
    for sample in samples:
        marks, begin = repeated(sample.token_ids), 1  # the first token is the prefill's
        for accepted in sample.accepted:
            end = begin + accepted + 1
            if not any(marks[begin:end]):
                lengths.append(accepted + 1)
            begin = end
    return sum(lengths) / len(lengths) if lengths else None
