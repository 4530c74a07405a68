"""Whether two engines draw their answers from one distribution: a two-sample permutation test, and its power. Pure.

Statistic: the squared maximum mean discrepancy (Gretton et al., JMLR 13, 2012, "A kernel two-sample test") between two
groups of answers to one prompt, summed over prompts. The kernel is the number of leading tokens that two answers share.
It counts common prefixes, so the statistic is the sum over all prefixes of the squared difference of their shares in
the two groups: answers are compared as sequences, the first tokens most, since every later one depends on them.

Level: when both groups come from one distribution, every assignment of the answers of a prompt to the groups is equally
probable. p is the share of random assignments, the real one included, whose statistic is as large (Phipson and Smyth,
Stat. Appl. Genet. Mol. Biol. 9, 2010), so the level holds for any number of answers.

Power: depends on how certain the target is of its answers, so it is simulated from those that were drawn. The stated
alternative is an engine that returns the greedy answer in place of a sampled one in a share of the answers: both groups
are drawn again from the undrafted answers, and that share of the second is replaced.
"""

# N answers, T tokens, R assignments

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

LEVEL = 0.001
"""Of a thousand lossless drafters one is refused."""

_ASSIGNMENTS = 1999
_EXPERIMENTS = 100  # the power's standard error is then at most 0.05

Answers = Sequence[Sequence[Sequence[int]]]
"""By prompt, then by answer: its tokens."""

FloatArray = npt.NDArray[np.float64]


def p_value(first: Answers, second: Answers, seed: int = 0) -> float:
    """The probability of so large a difference between answers to the same prompts from one distribution."""
    random = np.random.default_rng(seed)
    observed, assigned_R = 0.0, np.zeros(_ASSIGNMENTS)
    for ours, theirs in zip(first, second, strict=True):
        kernel_NN = shared_tokens([*ours, *theirs])
        weights_N = np.repeat([1.0 / len(ours), -1.0 / len(theirs)], [len(ours), len(theirs)])
        weights_RN = random.permuted(np.tile(weights_N, (_ASSIGNMENTS, 1)), axis=1)
        observed += float(weights_N @ kernel_NN @ weights_N)
        assigned_R += ((weights_RN @ kernel_NN) * weights_RN).sum(1)
    # Equal statistics are summed in different orders: the tolerance counts them as equal.
    return float(1 + (assigned_R >= observed - 1e-9).sum()) / (1 + _ASSIGNMENTS)


def shared_tokens(answers: Sequence[Sequence[int]]) -> FloatArray:
    """[N, N]: the number of leading tokens that two answers share; those that have ended share the rest."""
    longest = max(map(len, answers))
    tokens_NT = np.array([[*answer, *[-1] * (longest - len(answer))] for answer in answers], dtype=np.int64)
    return (tokens_NT[:, None] == tokens_NT[None]).cumprod(axis=2).sum(axis=2).astype(np.float64)


def power(drawn: Answers, greedy: Sequence[Sequence[int]], share: float = 0.5, seed: int = 0) -> float:
    """How often the test finds an engine that returns the greedy answer in place of `share` of the sampled ones.

    drawn    of an engine that samples
    greedy   the greedy answer to each prompt, as long as those
    """
    random = np.random.default_rng(seed)
    found = 0
    for experiment in range(_EXPERIMENTS):
        first = [[answers[index] for index in random.integers(0, len(answers), len(answers))] for answers in drawn]
        second = [[best if random.random() < share else answers[index]
                   for index in random.integers(0, len(answers), len(answers))]
                  for answers, best in zip(drawn, greedy, strict=True)]
        found += p_value(first, second, experiment) <= LEVEL
    return found / _EXPERIMENTS
