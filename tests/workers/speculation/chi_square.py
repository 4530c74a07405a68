"""A chi-square test without scipy: the statistic turned into a standard normal score."""

import math
from collections.abc import Sequence


def chi_square_score(observed: Sequence[float], expected: Sequence[float]) -> float:
    """Wilson-Hilferty: about N(0, 1) when the counts come from the expectation, large when they do not.

    Cells expected fewer than five times are pooled, as the test's approximation asks.
    """
    pairs = sorted(zip(expected, observed, strict=True), reverse=True)
    cells = [(e, o) for e, o in pairs if e >= 5]
    rest = [(e, o) for e, o in pairs if e < 5]
    if rest:
        cells.append((sum(e for e, _ in rest), sum(o for _, o in rest)))
    cells = [(e, o) for e, o in cells if e > 0]
    statistic = sum((o - e) ** 2 / e for e, o in cells)
    freedom = len(cells) - 1
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
