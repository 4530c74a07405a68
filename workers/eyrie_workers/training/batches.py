"""Which documents each optimizer step trains on, and their batches, read ahead of the training loop.

**Rows.** All rows of the store but those held out for evaluation; in a job with `data.mix` a draw of them, of the size
that every candidate of the job can have (`planning.row_draw`). Every candidate is evaluated on the same rows of the
union, whatever its mix.

**Schedule.** The documents of each step are a pure function of (lengths, seed, step). They are packed end to end;
nothing is padded, so a step costs what its tokens cost. Every epoch is a new permutation drawn from (seed, epoch). It
is cut into as few batches as `max_tokens` allows, and then as evenly as that number allows: a greedy cut leaves a last
batch of any size, whose few tokens would weigh as much as a full batch. A document longer than `max_tokens` is a batch
of its own. Because a step's documents depend on the step's number alone, the position to resume from is that number: no
iterator state is saved, and a run interrupted anywhere repeats no document and skips none.

**Reading.** One interface of two sources of hidden states (`Features`); `open_features` chooses from what capture
wrote:

    store      `hidden_states.store`: read from a directory, or from S3 by ranges, and decoded while the previous batch
               is trained on
    stream     `hidden_states.streaming`: nothing is stored; the target computes states just ahead of the trainer

Several trainers may share a `BatchLoader` (`stages.sweep`): one read, or one forward pass of the target, for all.

**Parts.** A step of more tokens than `train.max_tokens_per_gpu` is divided by documents into micro-batches, as evenly
as documents allow. A single row of more is cut at that length: its first tokens are trained on, the rest is not. The
cut is made on reading, so that schedule and counts see the shorter row, and the number of rows is reported.

    T packed tokens, M supervised positions
"""

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from eyrie_api.contract.reports import SourceRows
from eyrie_api.contract.stages import RowDraw
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.errors import NoUsableData
from eyrie_api.planning.row_draw import draw_rows, largest_size
from eyrie_workers.hidden_states.packed_batch import PackedBatch
from eyrie_workers.hidden_states.shard_format import supervised_positions
from eyrie_workers.hidden_states.storage_backend import open_backend
from eyrie_workers.hidden_states.store import FeatureStore
from eyrie_workers.hidden_states.streaming import StreamedFeatures, read_plan
from eyrie_workers.targets.device import target_device
from eyrie_workers.targets.state_source import open_source
from eyrie_workers.training.distributed import SINGLE_PROCESS, DistContext

# --- rows ------------------------------------------------------------------------------------------------------------

_HELD_OUT_FRACTION = 0.05
# Evaluations are for a curve and for ranking checkpoints: 64 rows put the standard error of an acceptance near .01.
_MAX_HELD_OUT_ROWS = 64


def split_rows(num_rows: int, train_seed: int) -> tuple[list[int], list[int]]:
    """Rows to train on and rows to evaluate on, of a store of `num_rows`: disjoint, ascending, together all rows.

    At least one row is held out as soon as there are two; a single row is trained on and evaluated on nothing.
    """
    num_held_out = min(_MAX_HELD_OUT_ROWS, max(1, round(num_rows * _HELD_OUT_FRACTION))) if num_rows > 1 else 0
    # A permutation of its own: the seeds of epochs are (seed, epoch), and no epoch has this number.
    order = np.random.default_rng((train_seed, 0x5EED)).permutation(num_rows)
    return sorted(order[num_held_out:].tolist()), sorted(order[:num_held_out].tolist())


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
        raise NoUsableData("data.mix is set, and the capture does not name the sources of its rows",
                           "delete the stages regenerate and capture of the job and retry it")
    # All candidates train on as many rows: the most that the mix of every one of them can have.
    available = {seed: Counter(sources[row] for row in split_rows(num_rows, seed)[0])
                 for seed in {candidate.train_seed for candidate in draw.compared}}
    size = min(_size(candidate.mix, available[candidate.train_seed]) for candidate in draw.compared)
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


# --- schedule --------------------------------------------------------------------------------------------------------


def cut_evenly(lengths: Sequence[int], max_tokens: int) -> list[range]:
    """Cut a sequence of documents into the fewest consecutive batches of at most `max_tokens`, as even as possible.

    lengths   tokens of each document, in order, each > 0.
    returns   ranges of positions that cover the sequence in order. A batch exceeds `max_tokens` only when it is one
              document that does.

    Among all cuts with the fewest batches this takes the one whose largest batch is smallest: a bisection over the
    capacity, each trial one greedy pass over the running sum.
    """
    if not lengths:
        return []
    ends = np.cumsum(lengths).tolist()
    fewest = len(_greedy_cut(ends, max_tokens))
    # Invariant: `high` is enough capacity for the fewest batches, `low` is not.
    low, high = 0, max_tokens
    # The largest batch of a cut is a sum of lengths: whole numbers, so the bisection ends at the smallest.
    while high - low > 1:
        middle = (low + high) // 2
        if len(_greedy_cut(ends, middle)) <= fewest:
            high = middle
        else:
            low = middle
    return _greedy_cut(ends, high)


def _greedy_cut(ends: list[int], capacity: int) -> list[range]:
    batches, start, used = [], 0, 0
    while start < len(ends):
        stop = max(start + 1, bisect_right(ends, used + capacity))
        batches.append(range(start, stop))
        start, used = stop, ends[stop - 1]
    return batches


@dataclass(frozen=True)
class StepPlan:
    """The documents of one optimizer step."""

    step: int
    epoch: float
    """Epochs finished before this step, plus the finished fraction of the current one."""

    rows: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """Every step of a run, addressable by number."""

    rows: Sequence[int]
    """The training rows (`choose_rows`)."""

    lengths: Sequence[int]
    """Tokens of every row of the store, indexed by row number."""

    max_tokens: int
    epochs: float
    seed: int
    max_steps: int | None = None
    _epochs: dict[int, list[tuple[int, ...]]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.rows:
            raise NoUsableData("no captured row is left to train on",
                               "give more conversations, or check why their answers were quarantined")

    def epoch(self, number: int) -> list[tuple[int, ...]]:
        """The batches of one epoch, each the row numbers of its documents."""
        if number not in self._epochs:
            # From (seed, epoch) alone: any epoch is computed without those before it.
            order = np.random.default_rng((self.seed, number)).permutation(np.asarray(self.rows)).tolist()
            cuts = cut_evenly([self.lengths[row] for row in order], self.max_tokens)
            if len(self._epochs) > 2:  # steps are read in order: keep the current epoch and its neighbours
                self._epochs.pop(min(self._epochs))
            self._epochs[number] = [tuple(order[cut.start:cut.stop]) for cut in cuts]
        return self._epochs[number]

    @cached_property
    def _first_steps(self) -> list[int]:
        """First step of each epoch, and after the last the number of steps."""
        firsts = [0]
        # A last epoch that is not whole: its first batches.
        whole, part = int(self.epochs), self.epochs - int(self.epochs)
        for number in range(whole):
            firsts.append(firsts[-1] + len(self.epoch(number)))
        if part > 1e-9:
            firsts.append(firsts[-1] + max(1, round(part * len(self.epoch(whole)))))
        return firsts

    @property
    def num_steps_of_epochs(self) -> int:
        """Optimizer steps of all epochs, whatever `max_steps`."""
        return self._first_steps[-1]

    @cached_property
    def num_steps(self) -> int:
        return min(self.num_steps_of_epochs, self.max_steps or self.num_steps_of_epochs)

    def at(self, step: int) -> StepPlan:
        assert 0 <= step < self.num_steps
        number = bisect_right(self._first_steps, step) - 1
        batches = self.epoch(number)
        index = step - self._first_steps[number]
        return StepPlan(step=step, epoch=number + index / len(batches), rows=batches[index])


def checkpoint_steps(num_steps: int, num_checkpoints: int) -> list[int]:
    """The step counts after which a drafter is exported: evenly spaced, distinct, the last at the end."""
    return sorted({max(1, round(num_steps * k / num_checkpoints)) for k in range(1, num_checkpoints + 1)})


def shard_batch(rows: Sequence[int], lengths: Sequence[int], num_shards: int) -> list[list[int]]:
    """Divide a step's documents, nearly equal in tokens: longest first, each to the shard with the fewest tokens.

    rows     the step's documents.
    lengths  tokens of every row of the store.
    returns  the places among `rows` of each shard's documents, ascending.
    """
    loads, shards = [0] * num_shards, [[] for _ in range(num_shards)]  # type: list[int], list[list[int]]
    # Ties go to the earlier document and the lower rank: all processes compute the same division.
    for index in sorted(range(len(rows)), key=lambda index: (-lengths[rows[index]], index)):
        lightest = loads.index(min(loads))
        loads[lightest] += lengths[rows[index]]
        shards[lightest].append(index)
    return [sorted(shard) for shard in shards]


# --- reading ---------------------------------------------------------------------------------------------------------


Features = FeatureStore | StreamedFeatures
"""Random access to captured rows; both have the same members."""


def open_features(where: str, target: TargetSpec) -> Features:
    """What capture left in a directory or below `s3://bucket/prefix`. Raises ArtifactMissing, StoreDamaged, and
    InvalidInput for a device of the target that does not exist."""
    place = open_backend(where)
    plan = read_plan(place)
    if plan is None:
        return FeatureStore(place)
    device = target_device()
    return StreamedFeatures(*plan, lambda: open_source(plan[0].source, target, device))


@dataclass(frozen=True)
class StepBatch:
    """This process's part of one step's documents."""

    plan: StepPlan
    documents: PackedBatch
    starts: tuple[int, ...]
    """First token of each document in the step's whole batch."""

    num_tokens: int
    """0 where this process has no document of the step: it then holds one in which nothing is supervised."""


class BatchLoader:
    """The batches of a schedule, in order, each read while the previous one is trained on.

    A batch's states are valid until the next one is taken: their memory is reused. Any step may be requested; reading
    ahead continues from there.
    """

    def __init__(self, schedule: Schedule, features: Features, dist: DistContext = SINGLE_PROCESS,
                 most_tokens: int | None = None) -> None:
        """most_tokens: of a row; the schedule's lengths are those of the cut rows. None: rows are not cut."""
        self._schedule, self._features, self._dist, self._most_tokens = schedule, features, dist, most_tokens
        self._next_step = -1
        # One entry per group of rows that the reader has been given and whose batch has not been taken yet: the step,
        # and where this process's documents start in its whole batch.
        self._shards: deque[tuple[StepPlan, tuple[int, ...]]] = deque()
        self._batches: Generator[PackedBatch, None, None] | None = None

    def take(self, step: int) -> StepBatch:
        # 1. A reader that continues here. After a resume, or in a sweep whose candidates differ, another one starts.
        if self._batches is None or step != self._next_step:
            self.close()
            self._batches = self._features.batches(self._groups(step), ahead=1, reuse=True)
        # 2. Invalid until the read succeeds: after an error the same step starts a new reader.
        self._next_step = -1
        documents = first_tokens(next(self._batches), self._most_tokens)
        plan, starts = self._shards.popleft()
        self._next_step = step + 1
        # 3. The batch, with the places of its documents in the whole step's.
        if starts:
            return StepBatch(plan, documents, starts, documents.token_ids.numel())
        # More processes than documents: this one still takes part in the step's collectives, with loss 0.
        return StepBatch(plan, replace(documents, loss_mask=torch.zeros_like(documents.loss_mask)), (0,), 0)

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()
        self._batches = None
        self._shards.clear()

    def _groups(self, step: int) -> Iterator[Sequence[int]]:
        """Rows to read for each step from `step` on. The reader's threads are ahead of `take`: hence the queue."""
        for number in range(step, self._schedule.num_steps):
            plan, lengths = self._schedule.at(number), self._schedule.lengths
            own = shard_batch(plan.rows, lengths, self._dist.size)[self._dist.rank]
            starts = [*accumulate((lengths[row] for row in plan.rows), initial=0)]
            self._shards.append((plan, tuple(starts[place] for place in own)))
            # A process without a document reads one, and does not train on it.
            yield [plan.rows[place] for place in own] or plan.rows[:1]


# --- parts -----------------------------------------------------------------------------------------------------------


def micro_batches(documents: PackedBatch, most_tokens: int | None) -> list[tuple[range, PackedBatch]]:
    """The batch in as few parts as `most_tokens` allows: the numbers of each part's documents, and the part, whose
    tensors are views."""
    if most_tokens is None or sum(documents.lengths) <= most_tokens:
        return [(range(len(documents.lengths)), documents)]
    starts = list(accumulate(documents.lengths, initial=0))
    parts = []
    for cut in cut_evenly(documents.lengths, most_tokens):
        tokens, topk_logits = slice(starts[cut.start], starts[cut.stop]), documents.topk_logits
        if topk_logits is not None:
            # Top-k logits have a row for each supervised position alone: count those of the documents before.
            before = list(accumulate((int(part.sum()) for part in _supervised(documents)), initial=0))
            topk_logits = topk_logits.map(itemgetter(slice(before[cut.start], before[cut.stop])))
        parts.append((cut, replace(
            documents, token_ids=documents.token_ids[tokens], loss_mask=documents.loss_mask[tokens],
            aux=documents.aux[tokens], last=documents.last[tokens], lengths=documents.lengths[cut.start:cut.stop],
            topk_logits=topk_logits)))
    return parts


def _supervised(batch: PackedBatch) -> list[Tensor]:
    """[T] bool of each document: its supervised positions."""
    return [supervised_positions(mask) for mask in batch.loss_mask.split(batch.lengths)]


def first_tokens(batch: PackedBatch, most_tokens: int | None) -> PackedBatch:
    """The batch with each document cut after its first `most_tokens`; None: with whole documents."""
    if most_tokens is None or max(batch.lengths, default=0) <= most_tokens:
        return batch
    lengths = tuple(min(length, most_tokens) for length in batch.lengths)
    starts = accumulate(batch.lengths, initial=0)
    kept_T = torch.cat([torch.arange(start, start + length)
                        for start, length in zip(starts, lengths, strict=False)])
    loss_mask = batch.loss_mask[kept_T]
    topk_logits = batch.topk_logits
    if topk_logits is not None:
        # Rows of the positions that are still supervised: the last token of a cut document has no successor.
        row_T = torch.cat(_supervised(batch)).cumsum(0) - 1
        still_T = torch.cat([supervised_positions(mask) for mask in loss_mask.split(lengths)])
        rows_M = row_T[kept_T][still_T]
        topk_logits = topk_logits.map(lambda x: x[rows_M])
    return replace(batch, token_ids=batch.token_ids[kept_T], loss_mask=loss_mask, aux=batch.aux[kept_T],
                   last=batch.last[kept_T], lengths=lengths, topk_logits=topk_logits)
