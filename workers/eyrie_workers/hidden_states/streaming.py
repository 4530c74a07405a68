"""Hidden states as the target computes them: one pass over whole rows, for capture, and a stream of them for training.

`compute_pass` serves both. Nothing of a pass leaves the target's device: which positions are supervised is decided on
the host, where the loss masks are, so no pass waits for the device.

With `capture.mode: stream` there is no store: the target computes the states during training, ahead of the training
loop, and capture writes only a plan, about five bytes per token:

    stream.json    the store's format, and the id, the number of tokens and of prompt tokens of every row
    tokens.bin     the rows' token ids, int32, end to end

`StreamedFeatures` has the interface of `hidden_states.store.FeatureStore` and returns the same numbers: states go
through the format's codec and back, unsupervised positions have no final state, and top-k logits are computed where the
format stores them. On the CPU the reference's products do not depend on the other rows of a pass (`targets.operators`),
so its numbers equal those of a store for any batching; another source rounds differently in another batch.

States stay where they were computed, which is the trainer's own GPU or another (EYRIE_TARGET_DEVICE, `targets.device`);
tokens and loss mask of a batch are on the CPU, where training plans.

`batches` runs the target in a thread ahead of its caller, on a GPU also in a stream of its own, and never holds more
than `buffer_bytes` of states, including the batch in use; a larger batch is computed when it is requested. Every epoch
repeats the target's passes.
"""

import threading
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from eyrie_api.artifacts import digest_bytes, digest_model, write_atomically, write_model
from eyrie_api.contract.model import Digest, Frozen
from eyrie_api.contract.rules import first_problem
from eyrie_api.errors import ArtifactCorrupt
from eyrie_workers.hidden_states.codecs import concat_topk_logits, decode_block, encode_states
from eyrie_workers.hidden_states.packed_batch import PackedBatch
from eyrie_workers.hidden_states.shard_format import (
    StoreFormat,
    TokenRow,
    TopKLogits,
    consecutive,
    supervised_positions,
)
from eyrie_workers.hidden_states.storage_backend import StorageBackend
from eyrie_workers.hidden_states.topk_logits import compute_topk_logits
from eyrie_workers.targets.state_source import StateSource

# T tokens, M tokens of the pass, S supervised positions of it, A aux layers, H hidden


@dataclass(frozen=True)
class TargetPass:
    """States of some rows, end to end, as the target computes them and on its device."""

    aux: Tensor  # [M, A, H]
    last: Tensor  # [M, H], after the final norm
    is_supervised: Tensor  # [M] bool, on the CPU
    supervised: Tensor  # [S] int64: the supervised positions, on the target's device
    topk_logits: TopKLogits | None  # of these positions, where the format stores them

    def encode(self, fmt: StoreFormat) -> dict[str, Tensor]:
        """The sections of `codecs.encode_states`."""
        return encode_states(fmt, self.aux, self.last, self.supervised, self.topk_logits)


def compute_pass(target: StateSource, rows: Sequence[TokenRow], fmt: StoreFormat) -> TargetPass:
    aux_MAH, last_MH = target.packed_states([row.token_ids for row in rows], fmt.aux_layers)
    by_row = [supervised_positions(row.loss_mask) for row in rows]
    is_supervised = torch.cat(by_row)
    supervised = is_supervised.nonzero().squeeze(1).to(target.device, non_blocking=True)
    topk_logits = None
    if fmt.final_state == "topk":
        parts = last_MH.index_select(0, supervised).split([int(positions.sum()) for positions in by_row])
        topk_logits = compute_topk_logits(parts, target.output_head, fmt)
    return TargetPass(aux_MAH, last_MH, is_supervised, supervised, topk_logits)


STREAM = "stream.json"
TOKENS = "tokens.bin"


class StreamPlan(Frozen):
    """`stream.json`: the rows and the format their states would be stored in."""

    format_version: Literal[1] = 1
    layout: StoreFormat
    source: Literal["reference", "transformers"] = "reference"
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
               source: Literal["reference", "transformers"], batch_tokens: int, buffer_bytes: int) -> StreamPlan:
    """Write a plan of rows (id, token ids, number of prompt tokens)."""
    row_ids, lengths, prompts, ids = [], [], [], array("i")
    for row_id, tokens, num_prompt in rows:
        row_ids.append(row_id)
        lengths.append(len(tokens))
        prompts.append(num_prompt)
        ids.extend(tokens)
    data = ids.tobytes()
    write_atomically(directory / TOKENS, data)
    plan = StreamPlan(layout=fmt, source=source, row_ids=tuple(row_ids), lengths=tuple(lengths), prompts=tuple(prompts),
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
        raise ArtifactCorrupt(f"{STREAM} in {backend.name} is not a readable plan: {first_problem(error)}",
                              "delete it and run capture again") from error
    tokens = backend.file(TOKENS) or b""
    if digest_bytes(tokens) != plan.tokens_digest:
        raise ArtifactCorrupt(f"{TOKENS} in {backend.name} is missing or differs from its digest", "run capture again")
    return plan, tokens


class StreamedFeatures:
    """The rows of a plan; their states are computed when they are read."""

    def __init__(self, plan: StreamPlan, tokens: bytes, target: Callable[[], StateSource]) -> None:
        """`target` loads the target; it is called once, at the first read."""
        self.plan, self.format = plan, plan.layout
        self.digest = digest_model(plan.model_copy(update={"batch_tokens": 1, "buffer_bytes": 1}))
        """Digest of the rows and their format; batching does not enter it."""

        self.lengths = list(plan.lengths)
        self.computed_tokens = 0  # tokens that the target has computed so far
        self.most_held_bytes = 0  # largest number of bytes of states held by `batches` so far
        self._ids = torch.frombuffer(bytearray(tokens), dtype=torch.int32).to(torch.int64)
        self._starts = [0, *accumulate(plan.lengths)]
        self._load: Callable[[], StateSource] | None = target
        self._target: StateSource | None = None
        self._stream: torch.cuda.Stream | None = None
        self._lock = threading.Lock()

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def is_loaded(self) -> bool:
        """Whether the target's weights are on its device already."""
        return self._target is not None

    @property
    def num_tokens(self) -> int:
        return self._starts[-1]

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """Ids [T] int64 and loss mask [T] bool of a row."""
        ids = self._ids[self._starts[index]:self._starts[index + 1]]
        return ids, torch.arange(ids.numel()) >= self.plan.prompts[index]

    def read(self, rows: Sequence[int]) -> PackedBatch:
        """As `FeatureStore.read`, with the states on the target's device, which computes them now."""
        fmt, keeps, target = self.format, self.format.final_state == "keep", self._loaded_target()
        documents = [TokenRow(self.plan.row_ids[row], *self.tokens(row)) for row in rows]
        lengths = [row.token_ids.numel() for row in documents]
        num_tokens = sum(lengths)
        aux = torch.empty(num_tokens, len(fmt.aux_layers), fmt.hidden_size, dtype=fmt.dtype, device=target.device)
        last = torch.zeros(num_tokens, fmt.hidden_size if keeps else 0, dtype=fmt.dtype, device=target.device)
        topk_parts, at = [], 0
        for batch in consecutive(lengths, self.plan.batch_tokens):
            computed = compute_pass(target, documents[batch.start:batch.stop], fmt)
            tokens = slice(at, at + computed.aux.shape[0])
            tensors = computed.encode(fmt)
            decode_block(fmt, tensors, computed.is_supervised, aux[tokens], last[tokens])
            at = tokens.stop
            if not keeps:
                topk_parts.append(tensors)
            self.computed_tokens += computed.aux.shape[0]
        return PackedBatch(
            token_ids=torch.cat([row.token_ids for row in documents]),
            loss_mask=torch.cat([row.loss_mask for row in documents]),
            aux=aux, last=last, topk_logits=None if keeps else concat_topk_logits(topk_parts), lengths=tuple(lengths))

    def batches(self, groups: Iterable[Sequence[int]], *, ahead: int = 2,
                reuse: bool = False) -> Generator[PackedBatch, None, None]:
        """`read` of each group in order; up to `ahead` of them are computed in advance, within `buffer_bytes`.
        A batch counts until the next one is requested.

        reuse   ignored, for the interface of stores: decoding costs little compared with the target's passes.
        """
        num_states = len(self.format.aux_layers) + (self.format.final_state == "keep")
        token_bytes = num_states * self.format.hidden_size * self.format.dtype.itemsize
        waiting: deque[tuple[Future[PackedBatch], int]] = deque()
        held, coming, source = 0, None, iter(groups)
        pool = ThreadPoolExecutor(1, thread_name_prefix="eyrie-stream")
        try:
            while True:
                while len(waiting) <= ahead and (coming := coming or next(source, None)) is not None:
                    size = token_bytes * sum(self.lengths[row] for row in coming)
                    # Without held states a batch is submitted at any size, or a large one would never be computed.
                    if held and held + size > self.plan.buffer_bytes:
                        break
                    waiting.append((pool.submit(self._read_ahead, coming), size))
                    held, coming = held + size, None
                    self.most_held_bytes = max(self.most_held_bytes, held)
                if not waiting:
                    return
                future, size = waiting.popleft()
                batch = future.result()
                if batch.aux.device.type == "cuda":
                    # The memory belongs to the prefetch stream: without this it would be given to a later pass while
                    # kernels of the caller's stream still read it.
                    for tensor in batch.states():
                        tensor.record_stream(torch.cuda.current_stream(tensor.device))
                yield batch
                del batch, future  # both reference the states: dropped before the next batch is computed
                held -= size
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _read_ahead(self, rows: Sequence[int]) -> PackedBatch:
        """`read` in the prefetch thread, and finished: on a GPU in a stream of its own, during the training step."""
        device = self._loaded_target().device
        if device.type != "cuda":
            return self.read(rows)
        self._stream = self._stream or torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            batch = self.read(rows)
        self._stream.synchronize()  # this thread alone waits
        return batch

    def _loaded_target(self) -> StateSource:
        with self._lock:  # an evaluation may read while the prefetch thread does
            if self._target is None:
                assert self._load is not None
                self._target, self._load = self._load(), None
                if self._target.device.type == "cuda":  # its weights are read in other streams than they were made in
                    torch.cuda.synchronize(self._target.device)
            return self._target
