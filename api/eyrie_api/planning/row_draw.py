"""Which of the captured rows each candidate trains on, where a job has mixes of its sources (`data.mix`). Pure.

A job captures one union of its sources. A mix is a share for each source; a candidate with a mix trains on a draw from
the union that has these shares, counted in rows. All candidates of a job draw the same number of rows, so that their
mixes are compared at equal data:

    size = min over candidates c and sources s of   rows of s / share of s in the mix of c      (rounded down)

Each source has one order, drawn from the seed; a candidate takes the first rows of it, as many as its mix needs. Of two
candidates the one that needs fewer rows of a source therefore has a subset of the other's, and a larger size keeps the
rows of a smaller one as far as rounding allows: candidates differ in what their mixes differ in, and in no more.

Rows, not tokens: a source of long answers has a larger share of the tokens than of the rows, and candidates of equal
rows may have unequal numbers of tokens. The reports of the training name both.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from random import Random


def shares(mix: Mapping[str, float]) -> dict[str, Fraction]:
    """Exact shares that sum to 1, by source, without those that are 0."""
    weights = {name: Fraction(weight) for name, weight in mix.items() if weight > 0}
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def largest_size(available: Mapping[str, int], mix: Mapping[str, float]) -> int:
    """The largest number of rows of which no source's exact share exceeds its rows; 0 where a source has none.

    available   rows by source
    """
    return min(int(available.get(name, 0) / share) for name, share in shares(mix).items())


def quotas(mix: Mapping[str, float], size: int) -> dict[str, int]:
    """Rows of each source in a draw of `size` rows: the exact share rounded down or up, `size` in total.

    Largest remainders are rounded up, of equal ones the first by name. Sources of share 0 are left out.
    """
    exact = {name: share * size for name, share in sorted(shares(mix).items())}
    rounded = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: rounded[name] - exact[name])
    for name in by_remainder[:size - sum(rounded.values())]:
        rounded[name] += 1
    return rounded


def draw_rows(sources: Sequence[str], rows: Sequence[int], mix: Mapping[str, float], size: int,
              seed: int) -> list[int]:
    """`size` different rows with the shares of `mix`, in ascending order. A source must have its quota of rows.

    sources   source of every row of the store, by row number
    rows      the rows that may be drawn
    """
    rng = Random(f"rows:{seed}")
    order = [rng.random() for _ in sources]
    of_source: dict[str, list[int]] = {}
    for row in rows:
        of_source.setdefault(sources[row], []).append(row)
    drawn: list[int] = []
    for name, quota in quotas(mix, size).items():
        ordered = sorted(of_source.get(name, ()), key=lambda row: (order[row], row))
        assert len(ordered) >= quota, (name, len(ordered), quota)
        drawn += ordered[:quota]
    return sorted(drawn)


def expected_union(num_rows: int, weights: Mapping[str, float], available: Mapping[str, int] | None) -> dict[str, int]:
    """About how many of `num_rows` drawn rows are of each source: by weight; the others take the share of a source that
    has fewer rows.

    available   rows by source, where they are known
    """
    if available is None:
        return {name: int(share * num_rows) for name, share in shares(weights).items()}
    left, taken = num_rows, dict.fromkeys(weights, 0)
    open_sources = dict(weights)
    while open_sources and left > 0:
        wanted = {name: share * left for name, share in shares(open_sources).items()}
        exhausted = [name for name in open_sources if wanted[name] >= available[name]]
        if not exhausted:
            return taken | {name: int(rows) for name, rows in wanted.items()}
        for name in exhausted:
            taken[name] = available[name]
            left -= available[name]
            del open_sources[name]
    return taken
