"""Hidden states without a store: the target computes them during training, ahead of the training loop.

Capture then writes only a plan, about five bytes per token:

    stream.json    the store's format, and the id, the number of tokens and of prompt tokens of every row
    tokens.bin     the rows' token ids, int32, end to end

`StreamedFeatures` has the interface of `features.store.FeatureStore` and returns the same numbers: states go through
the format's codec and back, unsupervised positions have no final state, and top-k logits are computed where the format
stores them. The target's products do not depend on the other rows of a pass (`targets.linear`), so the numbers equal
those of a store for any batching.

`batches` runs the target in a thread ahead of its caller, and never holds more than `buffer_bytes` of states, including
the batch in use; a larger batch is computed when it is requested. Every epoch repeats the target's passes.
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
    """`stream.json`: the rows and the format their states would be stored in."""

    format_version: Literal[1] = 1
    layout: StoreFormat
    row_ids: tuple[str, ...] = Field(min_length=1)
    lengths: tuple[int, ...]
    """Tokens of each row."""

    prompts: tuple[int, ...]
    """Prompt tokens of each row."""

    tokens_digest: Digest
    """Digest of `tokens.bin`."""

    batch_tokens: int = Field(ge=1)
    """Tokens of one pass of the target."""

    buffer_bytes: int = Field(ge=1)


def write_plan(directory: Path, fmt: StoreFormat, rows: Iterable[tuple[str, Sequence[int], int]], *,
               batch_tokens: int, buffer_bytes: int) -> StreamPlan:
    """Write a plan of rows (id, token ids, number of prompt tokens)."""
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
    """A plan and its tokens; None when there is no plan. Raises ArtifactCorrupt."""
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
        raise ArtifactCorrupt(f"{TOKENS} in {backend.name} is missing or differs from its digest", "run capture again")
    return plan, tokens


def plan_is_whole(backend: StorageBackend) -> bool:
    """Whether a readable plan and its tokens exist."""
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
    """One teacher-forced pass over rows (id, token ids [T], loss mask [T]): states as the target computes them, copied
    to the CPU."""
    states = target.hidden_states([ids for _, ids, _ in rows], fmt.aux_layers)
    features = []
    for (row_id, ids, mask), (aux, last) in zip(rows, states, strict=True):
        topk_logits = None
        if fmt.final_state == "topk":
            supervised = last[supervised_positions(mask).to(last.device)]
            topk_logits = compute_topk_logits(supervised, target.lm_head_weight, fmt)
        features.append(FeatureRow(row_id, ids, mask, aux.cpu(), last.cpu(), topk_logits))
    return features


class StreamedFeatures:
    """The rows of a plan; their states are computed when they are read."""

    def __init__(self, plan: StreamPlan, tokens: bytes, target: Callable[[], TargetModel]) -> None:
        """`target` loads the target; it is called once, at the first read."""
        self.plan, self.format = plan, plan.layout
        self.digest = digest_model(plan.model_copy(update={"batch_tokens": 1, "buffer_bytes": 1}))
        """Digest of the rows and their format; batching does not enter it."""

        self.lengths = list(plan.lengths)
        self.computed_tokens = 0
        """Tokens that the target has computed so far."""

        self.most_held_bytes = 0
        """Largest number of bytes of states held by `batches` so far."""

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
        """As `FeatureStore.read`; the target computes the states now."""
        fmt, keeps = self.format, self.format.final_state == "keep"
        documents = [self.tokens(row) for row in rows]
        lengths = [ids.numel() for ids, _ in documents]
        if into is None:
            states = (sum(lengths), len(fmt.aux_layers), fmt.hidden_size)
            into = Buffers(torch.empty(states, dtype=dtype or fmt.dtype),
                           torch.empty(states[0], fmt.hidden_size if keeps else 0, dtype=dtype or fmt.dtype))
        aux, last = into.aux[:sum(lengths)], into.last[:sum(lengths), :fmt.hidden_size if keeps else 0].zero_()
        topk_parts, at, target = [], 0, self._loaded_target()
        for batch in plan_batches(lengths, self.plan.batch_tokens):
            here = [(self.plan.row_ids[rows[i]], *documents[i]) for i in batch]
            for row in compute_rows(target, here, fmt):
                num = row.token_ids.numel()
                tensors, _ = encode_block(row, fmt, range(num))
                decode_block(fmt, tensors, supervised_positions(row.loss_mask), aux[at:at + num], last[at:at + num])
                at += num
                if not keeps:
                    topk_parts.append(tensors)
            self.computed_tokens += sum(lengths[i] for i in batch)
        return PackedBatch(
            token_ids=torch.cat([ids for ids, _ in documents]), loss_mask=torch.cat([mask for _, mask in documents]),
            aux=aux, last=last, topk_logits=None if keeps else concat_topk_logits(topk_parts), lengths=tuple(lengths))

    def batches(self, groups: Iterable[Sequence[int]], *, ahead: int = 2, dtype: torch.dtype | None = None,
                reuse: bool = False) -> Generator[PackedBatch, None, None]:
        """`read` of each group in order; up to `ahead` of them are computed in advance, within `buffer_bytes`.
        A batch counts until the next one is requested.

        reuse   ignored, for the interface of stores: decoding costs little compared with the target's passes.
        """
        waiting: deque[tuple[Future[PackedBatch], int]] = deque()
        held, coming, source = 0, None, iter(groups)
        pool = ThreadPoolExecutor(1, thread_name_prefix="eyrie-stream")
        try:
            while True:
                while len(waiting) <= ahead and (coming := coming or next(source, None)) is not None:
                    size = self._state_bytes(coming, dtype)
                    # Without held states a batch is submitted at any size, or a large one would never be computed.
                    if held and held + size > self.plan.buffer_bytes:
                        break
                    waiting.append((pool.submit(self.read, coming, dtype), size))
                    held, coming = held + size, None
                    self.most_held_bytes = max(self.most_held_bytes, held)
                if not waiting:
                    return
                future, size = waiting.popleft()
                yield future.result()
                del future  # the future references the batch: drop it before the next one is computed
                held -= size
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _state_bytes(self, rows: Sequence[int], dtype: torch.dtype | None) -> int:
        states = len(self.format.aux_layers) + (self.format.final_state == "keep")
        return sum(self.lengths[row] for row in rows) * states * self.format.hidden_size \
            * (dtype or self.format.dtype).itemsize

    def _loaded_target(self) -> TargetModel:
        with self._lock:  # an evaluation may read while the prefetch thread does
            if self._target is None:
                assert self._load is not None
                self._target, self._load = self._load(), None
            return self._target
