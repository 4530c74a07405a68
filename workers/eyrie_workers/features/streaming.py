"""States without a store: the target computes them again, just ahead of whoever learns from them.

What capture leaves is then a plan, some five bytes a token:

    stream.json    the format, and of every row its id, its tokens and how many of these are prompt
    tokens.bin     the rows' token ids, int32, end to end

`StreamedFeatures` answers as `features.store.FeatureStore` does, so that a trainer cannot tell which of the two it
reads: states go through the format's codec and back, positions that teach nothing have no final state, opinions are
formed where the format keeps opinions. The target's products do not depend on the rows beside them (`targets.linear`),
so the numbers equal those of a store, whatever shares a pass.

`batches` runs the target in a thread ahead of its caller, and never holds more states than `buffer_bytes`, those in the
caller's hands included; a batch that is larger is computed when it is asked for. Every epoch pays the target's passes
again: that is the price of a disk that holds nothing.
"""

# T tokens, A aux layers, H hidden

import threading
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from eyrie_api.artifacts import digest_bytes, digest_model, write_atomically, write_model
from eyrie_api.errors import ArtifactCorrupt
from eyrie_api.v1alpha1.model import Digest, Frozen
from eyrie_workers.features.blocks import concat_topk_logits, decode_block, encode_block
from eyrie_workers.features.packed_batch import PackedBatch
from eyrie_workers.features.shard_format import FeatureRow, StoreFormat, supervised_positions
from eyrie_workers.features.storage_backend import StorageBackend
from eyrie_workers.features.store import Buffers
from eyrie_workers.features.topk_logits import compute_topk_logits
from eyrie_workers.targets.model import TargetModel

STREAM = "stream.json"
TOKENS = "tokens.bin"


class StreamPlan(Frozen):
    """`stream.json`: what would be stored, and of which rows."""

    format_version: Literal[1] = 1
    layout: StoreFormat
    row_ids: tuple[str, ...] = Field(min_length=1)
    lengths: tuple[int, ...]
    """Tokens of each row."""

    prompts: tuple[int, ...]
    """Of these, prompt."""

    tokens_digest: Digest
    """Of `tokens.bin`."""

    batch_tokens: int = Field(ge=1)
    """Of one pass of the target."""

    buffer_bytes: int = Field(ge=1)


def write_plan(directory: Path, fmt: StoreFormat, rows: Iterable[tuple[str, Sequence[int], int]], *,
               batch_tokens: int, buffer_bytes: int) -> StreamPlan:
    """Write a plan of rows (id, token ids, how many are prompt)."""
    row_ids, lengths, prompts, ids = [], [], [], array("i")
    for row_id, tokens, num_prompt in rows:
        row_ids.append(row_id)
        lengths.append(len(tokens))
        prompts.append(num_prompt)
        ids.extend(tokens)
    data = ids.tobytes()
    write_atomically(directory / TOKENS, data)
    plan = StreamPlan(layout=fmt, row_ids=tuple(row_ids), lengths=tuple(lengths), prompts=tuple(prompts),
                      tokens_digest=digest_bytes(data), batch_tokens=batch_tokens, buffer_bytes=buffer_bytes)
    write_model(directory / STREAM, plan)
    return plan


def read_plan(backend: StorageBackend) -> tuple[StreamPlan, bytes] | None:
    """A plan and its tokens; None where there is none. Raises ArtifactCorrupt."""
    data = backend.file(STREAM)
    if data is None:
        return None
    try:
        plan = StreamPlan.model_validate_json(data)
    except ValidationError as error:
        raise ArtifactCorrupt(f"{STREAM} in {backend.name} is not a readable plan: {error.errors()[0]['msg']}",
                              "delete it and run capture again") from error
    tokens = backend.file(TOKENS) or b""
    if digest_bytes(tokens) != plan.tokens_digest:
        raise ArtifactCorrupt(f"{TOKENS} in {backend.name} is gone or not what {STREAM} says", "run capture again")
    return plan, tokens


def plan_is_whole(backend: StorageBackend) -> bool:
    """Whether a readable plan and its tokens are there."""
    try:
        return read_plan(backend) is not None
    except ArtifactCorrupt:
        return False


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[range]:
    """Consecutive rows per forward pass, at most `batch_tokens` tokens or a single longer row."""
    start, size = 0, 0
    for row, length in enumerate(lengths):
        if row > start and size + length > batch_tokens:
            yield range(start, row)
            start, size = row, 0
        size += length
    if start < len(lengths):
        yield range(start, len(lengths))


def compute_rows(target: TargetModel, rows: Sequence[tuple[str, Tensor, Tensor]],
                 fmt: StoreFormat) -> list[FeatureRow]:
    """One teacher-forced pass over rows (id, token ids [T], loss mask [T]): states as the target computes them, on the
    CPU."""
    states = target.hidden_states([ids for _, ids, _ in rows], fmt.aux_layers)
    made = []
    for (row_id, ids, mask), (aux, last) in zip(rows, states, strict=True):
        topk_logits = None
        if fmt.final_state == "topk":
            supervised = last[supervised_positions(mask).to(last.device)]
            topk_logits = compute_topk_logits(supervised, target.lm_head_weight, fmt)
        made.append(FeatureRow(row_id, ids, mask, aux.cpu(), last.cpu(), topk_logits))
    return made


class StreamedFeatures:
    """A store's rows, computed when they are asked for."""

    def __init__(self, plan: StreamPlan, tokens: bytes, target: Callable[[], TargetModel]) -> None:
        """`target` is called when the first state is asked for, once."""
        self.plan, self.format = plan, plan.layout
        self.digest = digest_model(plan.model_copy(update={"batch_tokens": 1, "buffer_bytes": 1}))
        """Of the rows and what is computed of them; not of how."""

        self.lengths = list(plan.lengths)
        self.computed_tokens = 0
        """By the target, so far."""

        self.most_held_bytes = 0
        """Of states, at any time so far, by `batches`."""

        self._ids = torch.frombuffer(bytearray(tokens), dtype=torch.int32).to(torch.int64)
        self._starts = [0, *accumulate(plan.lengths)]
        self._load: Callable[[], TargetModel] | None = target
        self._target: TargetModel | None = None
        self._lock = threading.Lock()

    @property
    def num_rows(self) -> int:
        """Rows of the plan."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens over all rows."""
        return self._starts[-1]

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """Ids [T] int64 and loss mask [T] bool of a row."""
        ids = self._ids[self._starts[index]:self._starts[index + 1]]
        return ids, torch.arange(ids.numel()) >= self.plan.prompts[index]

    def read(self, rows: Sequence[int], dtype: torch.dtype | None = None,
             into: Buffers | None = None) -> PackedBatch:
        """As `FeatureStore.read`; the target computes them now."""
        fmt, keeps = self.format, self.format.final_state == "keep"
        told = [self.tokens(row) for row in rows]
        lengths = [ids.numel() for ids, _ in told]
        if into is None:
            states = (sum(lengths), len(fmt.aux_layers), fmt.hidden_size)
            into = Buffers(torch.empty(states, dtype=dtype or fmt.dtype),
                           torch.empty(states[0], fmt.hidden_size if keeps else 0, dtype=dtype or fmt.dtype))
        aux, last = into.aux[:sum(lengths)], into.last[:sum(lengths), :fmt.hidden_size if keeps else 0].zero_()
        opinions, at, target = [], 0, self._the_target()
        for batch in plan_batches(lengths, self.plan.batch_tokens):
            here = [(self.plan.row_ids[rows[i]], *told[i]) for i in batch]
            for row in compute_rows(target, here, fmt):
                num = row.token_ids.numel()
                tensors, _ = encode_block(row, fmt, range(num))
                decode_block(fmt, tensors, supervised_positions(row.loss_mask), aux[at:at + num], last[at:at + num])
                at += num
                if not keeps:
                    opinions.append(tensors)
            self.computed_tokens += sum(lengths[i] for i in batch)
        return PackedBatch(
            token_ids=torch.cat([ids for ids, _ in told]), loss_mask=torch.cat([mask for _, mask in told]), aux=aux,
            last=last, topk_logits=None if keeps else concat_topk_logits(opinions), lengths=tuple(lengths))

    def batches(self, groups: Iterable[Sequence[int]], *, ahead: int = 2, dtype: torch.dtype | None = None,
                reuse: bool = False) -> Generator[PackedBatch, None, None]:
        """`read` of each group in order; up to `ahead` of them are computed before they are asked for, as far as
        `buffer_bytes` goes. A batch counts until the next one is asked for.

        reuse   is for stores; here decoding is little beside the target's passes.
        """
        waiting: deque[tuple[Future[PackedBatch], int]] = deque()
        held, coming, source = 0, None, iter(groups)
        pool = ThreadPoolExecutor(1, thread_name_prefix="eyrie-stream")
        try:
            while True:
                while len(waiting) <= ahead and (coming := coming or next(source, None)) is not None:
                    size = self._state_bytes(coming, dtype)
                    if held and held + size > self.plan.buffer_bytes:
                        break
                    waiting.append((pool.submit(self.read, coming, dtype), size))
                    held, coming = held + size, None
                    self.most_held_bytes = max(self.most_held_bytes, held)
                if not waiting:
                    return
                future, size = waiting.popleft()
                yield future.result()
                del future  # or the batch would live on beside the next
                held -= size
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _state_bytes(self, rows: Sequence[int], dtype: torch.dtype | None) -> int:
        states = len(self.format.aux_layers) + (self.format.final_state == "keep")
        return sum(self.lengths[row] for row in rows) * states * self.format.hidden_size \
            * (dtype or self.format.dtype).itemsize

    def _the_target(self) -> TargetModel:
        with self._lock:  # an evaluation may ask beside the thread that computes ahead
            if self._target is None:
                assert self._load is not None
                self._target, self._load = self._load(), None
            return self._target
