"""The rows of the store that a training reads, and what a report says of them.

All rows but those held out for evaluation; in a job with `data.mix` a draw of them, of the size that every candidate of
the job can have (`decisions.row_draw`). Every candidate is evaluated on the same rows of the union, whatever its mix.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from eyrie_api.decisions.row_draw import draw_rows, largest_size
from eyrie_api.errors import NoUsableData
from eyrie_api.v1alpha1.reports import SourceRows
from eyrie_api.v1alpha1.stages import RowDraw
from eyrie_workers.training.packing import split_held_out

_HELD_OUT_FRACTION = 0.05
# Evaluations are for a curve and for ranking checkpoints: 64 rows put the standard error of an acceptance near .01.
_MAX_HELD_OUT_ROWS = 64


def split_rows(num_rows: int, train_seed: int) -> tuple[list[int], list[int]]:
    """Rows to train on and rows to evaluate on, of a store of `num_rows`."""
    return split_held_out(num_rows, _HELD_OUT_FRACTION, train_seed, _MAX_HELD_OUT_ROWS)


def choose_rows(draw: RowDraw | None, sources: Sequence[str] | None, num_rows: int,
                train_seed: int) -> tuple[list[int], list[int]]:
    """Rows to train on and rows to evaluate on, with a candidate's mix if it has one.

    sources   of every row, by name; None: not known

    Raises NoUsableData when the sources are not known, or when a mix has rows of a source that has none.
    """
    rows, held_out = split_rows(num_rows, train_seed)
    if draw is None:
        return rows, held_out
    if sources is None:
        raise NoUsableData("data.mix is set, and the capture does not name the sources of its rows: it is of an "
                           "earlier version", "delete the stages regenerate and capture of the job and retry it")
    available = {seed: Counter(sources[row] for row in split_rows(num_rows, seed)[0])
                 for seed in {one.train_seed for one in draw.compared}}
    size = min(_size(one.mix, available[one.train_seed]) for one in draw.compared)
    return draw_rows(sources, rows, draw.mix, size, draw.seed), held_out


def _size(mix: Mapping[str, float], available: Mapping[str, int]) -> int:
    size = largest_size(available, mix)
    if size == 0:
        lacking = [name for name, share in mix.items() if share > 0 and not available.get(name)]
        why = f"no captured row is of {lacking[0]}" if lacking else f"the captured rows are {dict(available)}"
        raise NoUsableData(f"data.mix {dict(mix)} leaves no row to train on: {why}",
                           "raise the weight of that source in data.sources, give it more conversations, or leave it "
                           "out of the mix (why its rows were lost is in the report of regeneration)")
    return size


def require_one_batch(draw: RowDraw | None, rows: Sequence[int], lengths: Sequence[int], step_tokens: int) -> None:
    """Raises NoUsableData for a draw of fewer tokens than one batch."""
    tokens = sum(lengths[row] for row in rows)
    if draw is not None and tokens < step_tokens:
        raise NoUsableData(f"data.mix {draw.mix} leaves {len(rows)} rows of {tokens} tokens to train on, fewer than "
                           f"one batch (train.max_tokens_per_batch {step_tokens}): every candidate has as many rows as "
                           "the scarcest source allows all of them",
                           "give that source more conversations or weight in data.sources, a smaller share in the "
                           "mixes, or lower train.max_tokens_per_batch")


def rows_by_source(sources: Sequence[str] | None, rows: Sequence[int], lengths: Sequence[int]) -> dict[str, SourceRows]:
    """The rows that were trained on, by source; empty where sources are not known."""
    if sources is None:
        return {}
    counts, tokens = Counter(sources[row] for row in rows), Counter[str]()
    for row in rows:
        tokens[sources[row]] += lengths[row]
    return {name: SourceRows(rows=counts[name], tokens=tokens[name]) for name in sorted(counts)}
