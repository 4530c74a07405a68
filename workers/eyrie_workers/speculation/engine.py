"""The reference decode engine: several requests at once, with or without drafting, and the same output either way.

One `step` admits waiting requests while slots are free (each prompt is prefilled alone), then runs one round for all
rows:

    propose   the drafter builds a tree on the last token of each row       (without drafting: the tree is its root)
    verify    one target pass over all nodes of all rows; the target's token at every node; the longest accepted path
    commit    keys of accepted nodes move into place, finished rows leave, the drafter receives the committed tokens

Plain decoding is the same loop with trees of one node, so a comparison of the two uses the same kernels, the same cache
and the same bookkeeping. Rows join and leave between rounds; occupied slots are contiguous from 0, so the last row
takes the slot of a row that leaves. A prompt is never batched with another, a row's sums do not depend on its
neighbours (see `cache` for how far that holds), and noise is keyed by position: an answer depends on its request alone.

Adaptive drafting. Drafting pays while the target's pass over a few more tokens costs little more than a pass over one,
and that ends as rows are added. `set_tree_schedule` therefore gives the shape of each round as a function of the number
of rows. In rounds without drafting the drafter still receives every committed token, so that it can draft again in any
later round. The output does not depend on the shape, so a change needs no synchronisation.

On a GPU the host waits for the device once per round, for the accepted tokens: the scheduler must know them to end
rows and to admit others. All other numbers of a round are known on the host and uploaded without waiting
(`targets.device.upload`). The drafter has one state per engine, which grows with the texts, not one per shape.

Not implemented: paging, prefix sharing, chunked prefill. GPU engines have them; this engine is the reference for
correctness, and fast enough to show the effect of speculation on two CPU cores.
"""

# B rows, N nodes, T pairs, A aux layers, H hidden, V vocabulary

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.errors import Conflict, InvalidInput, UnsupportedTarget
from eyrie_workers.speculation import verify
from eyrie_workers.speculation.cache import KVCache, TreeAttention
from eyrie_workers.speculation.noise import NoiseTable, RowNoise
from eyrie_workers.speculation.protocol import NO_TOKEN, CommittedTokens, Drafter, DrafterState, DraftTree
from eyrie_workers.speculation.requests import (
    Generation,
    Request,
    RequestState,
    StepOutput,
    TracedRound,
    check_request,
    traced_round,
)
from eyrie_workers.speculation.tree import ancestors
from eyrie_workers.targets.causal_attention import CausalAttention
from eyrie_workers.targets.device import device_scope, upload
from eyrie_workers.targets.model import TargetModel

__all__ = ["Engine", "Generation", "Request", "StepOutput", "smallest_common_shape"]

Phase = Literal["prefill_s", "draft_s", "verify_s"]
Mark = float | torch.cuda.Event

TreeSchedule = Callable[[int], DraftTreeShape | None]
"""From the number of rows to the shape of the next round; None for a round without drafting."""


@dataclass
class EngineStats:
    """Seconds by phase, since the engine was created or `reset`."""

    prefill_s: float = 0.0
    """Prefill: the target's pass over prompts and the drafter's."""

    draft_s: float = 0.0
    """Drafter: `propose` and `extend`."""

    verify_s: float = 0.0
    """The target's pass over the trees, sampling (noise included) and the bookkeeping of plain decoding."""

    rounds: int = 0
    nodes: int = 0
    """Nodes of one row's trees, root included, summed over rounds."""

    def reset(self) -> None:
        self.prefill_s = self.draft_s = self.verify_s = 0.0
        self.rounds = self.nodes = 0

    def add(self, phase: Phase, seconds: float) -> None:
        setattr(self, phase, getattr(self, phase) + seconds)


class PhaseClock:
    """Marks the beginnings and ends of phases, and adds their durations to `stats`.

    On a CPU a phase lasts from one reading of the clock to the next. On a GPU the host launches a phase and goes on, so
    its clock shows the time to launch; there a mark is an event in the stream, and a phase is the time between two
    events. The device passes an event later than the host records it. Times are therefore added when the engine has
    waited for the device anyway (`settle`). Those of a round's proposal and verification are then known; what follows
    the wait (moving accepted keys, the drafter's `extend`) is added one round later.
    """

    def __init__(self, stats: EngineStats, device: torch.device) -> None:
        self._stats, self._by_events = stats, device.type == "cuda"
        self._pending: list[tuple[Phase, torch.cuda.Event, torch.cuda.Event]] = []

    def mark(self) -> Mark:
        if not self._by_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def count(self, phase: Phase, begin: Mark, end: Mark) -> None:
        """Add the time between two marks to a phase, on a GPU once the device has passed them."""
        if isinstance(begin, float) and isinstance(end, float):
            self._stats.add(phase, end - begin)
        elif not isinstance(begin, float) and not isinstance(end, float):
            self._pending.append((phase, begin, end))

    def settle(self, wait: bool = False) -> None:
        """Add the phases that the device has finished; with `wait` all of them."""
        unfinished = []
        for phase, begin, end in self._pending:
            if wait:
                end.synchronize()
            if end.query():
                self._stats.add(phase, begin.elapsed_time(end) / 1000.0)
            else:
                unfinished.append((phase, begin, end))
        self._pending = unfinished


class Engine:
    """Decodes requests with one target and, if given, one drafter. Not thread-safe: one thread owns it."""

    def __init__(self, target: TargetModel, drafter: Drafter | None = None, *, max_concurrency: int = 1,
                 max_length: int | None = None, tree: DraftTreeShape | None = None, exact: bool | None = None) -> None:
        """Create an engine of `max_concurrency` slots.

        max_length  longest text (prompt and answer) in tokens; default and upper limit: the target's context
        tree        shape of the draft tree for `submit`; None decodes without drafting. `generate` takes its own
        exact       float64 attention over the cache, so that drafting cannot change a bit; default: for float32 on CPU
        """
        config = target.config
        self.target = target
        self.drafter = drafter
        self.max_concurrency = max_concurrency
        self.max_length = min(max_length or config.max_position_embeddings, config.max_position_embeddings)
        self.stats = EngineStats()
        self._clock = PhaseClock(self.stats, target.device)
        if exact is None:
            exact = target.dtype == torch.float32 and target.device.type == "cpu"
        self.exact = exact
        self._cache = KVCache(config, max_concurrency, torch.float64 if exact else target.dtype, target.device)
        self._waiting: deque[tuple[Request, float]] = deque()
        self._rows: list[RequestState] = []  # row i decodes in slot i
        self._free_drafter_rows = list(range(max_concurrency))  # a heap: rows in use stay neighbours
        self._drafter_state: DrafterState | None = None  # of all rows, whatever the shape
        self._max_shape: DraftTreeShape | None = None
        self._schedule: TreeSchedule | None = None  # None: every round uses _max_shape
        self.round_tree: DraftTreeShape | None = None  # of the latest round
        self.tree = tree

    @property
    def tree(self) -> DraftTreeShape | None:
        """The shape in use (with a schedule: the one for a single row); None decodes without drafting. May only change
        while no request is being decoded."""
        return self._shape_for(1)

    @tree.setter
    def tree(self, shape: DraftTreeShape | None) -> None:
        if self._schedule is not None or shape != self._max_shape:
            self._switch(None, shape)

    def set_tree_schedule(self, schedule: TreeSchedule, shapes: Iterable[DraftTreeShape]) -> None:
        """Choose the shape of every round by the number of rows. `shapes` are all shapes that it may return.

        May only change while no request is being decoded. Raises Conflict, and InvalidInput without a drafter.
        """
        self._switch(schedule, smallest_common_shape(shapes))

    def _switch(self, schedule: TreeSchedule | None, max_shape: DraftTreeShape | None) -> None:
        if self._rows:
            raise Conflict(f"{len(self._rows)} requests are being decoded with another draft tree",
                           "finish or cancel them first")
        if max_shape is not None and self.drafter is None:
            raise InvalidInput(f"draft tree {max_shape.label()} was given, but the engine has no drafter",
                               "give a drafter, or no tree")
        self._schedule, self._max_shape = schedule, max_shape

    def _shape_for(self, num_rows: int) -> DraftTreeShape | None:
        return self._max_shape if self._schedule is None else self._schedule(num_rows)

    def generate(self, requests: Sequence[Request], tree: DraftTreeShape | None = None) -> list[Generation]:
        """Decode requests to their ends, up to `max_concurrency` at once; answers in the order of the requests."""
        self.tree = tree
        for request in requests:
            self.submit(request)
        done: dict[str, Generation] = {}
        while len(done) < len(requests):
            done |= {progress.id: progress.generation for progress in self.step() if progress.generation is not None}
        return [done[request.id] for request in requests]

    def submit(self, request: Request) -> None:
        """Queue a request. Raises InvalidInput, or Conflict when a request of this id is queued or running."""
        check_request(request, self.target.config.vocab_size, self.max_length)
        known = {row.request.id for row in self._rows} | {waiting.id for waiting, _ in self._waiting}
        if request.id in known:
            raise Conflict(f"request {request.id!r} is already queued or running", "give every request its own id")
        self._waiting.append((request, time.perf_counter()))

    @torch.inference_mode()  # a cache tensor allocated in this mode cannot be written outside it
    def cancel(self, request_id: str) -> None:
        """Drop a request and free its slot; an unknown id is ignored."""
        self._waiting = deque(entry for entry in self._waiting if entry[0].id != request_id)
        for slot, row in enumerate(self._rows):
            if row.request.id == request_id:
                self._leave(slot)
                return

    @property
    def num_running(self) -> int:
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def step(self) -> list[StepOutput]:
        """`advance`; raises the error of a request that ended with one."""
        outputs = self.advance()
        for output in outputs:
            if output.error is not None:
                raise output.error
        return outputs

    @torch.inference_mode()
    def advance(self) -> list[StepOutput]:
        """Admit waiting requests, run one round, and return the new tokens. Empty when there is nothing to do.

        A request for which the target's logits are not finite ends with an error in its output; the others go on.
        """
        outputs: list[StepOutput] = []
        with device_scope(self.target.device):
            while self._waiting and len(self._rows) < self.max_concurrency:
                outputs.append(self._admit(*self._waiting.popleft()))
            if self._rows:
                outputs += self._round()
            if not self._rows:  # nothing to launch while the device works
                self._clock.settle(wait=True)
        return outputs

    # Admission

    def _admit(self, request: Request, submitted_at: float) -> StepOutput:
        """Prefill the prompt into the next slot and sample the first token."""
        began = self._clock.mark()
        slot = len(self._rows)
        greedy = request.sampling.temperature == 0.0
        noise = None if greedy else NoiseTable(request.seed, self.target.config.vocab_size)
        row = RequestState(request, heapq.heappop(self._free_drafter_rows), submitted_at=submitted_at,
                           tokens=list(request.prompt_ids), noise=noise)
        self._rows.append(row)
        # The whole prompt in one pass, alone: with and without drafting the sums are then the same (see the module). In
        # the model's dtype therefore even in exact mode.
        num_prompt = len(row.tokens)
        self._cache.reserve(num_prompt + 1)
        prompt = upload(row.tokens)
        attend = CausalAttention(self.target.config, [num_prompt], self.target.dtype, self.target.device,
                                 partial(self._cache.write_prompt, slot))
        positions = torch.arange(num_prompt)
        aux, last = self.target.run(prompt, positions, attend, self._aux_layers())
        logits = self.target.logits(last[-1:])[None]
        # The first token is sampled as that of a tree of one node: one rule for prefill and verification.
        root = torch.zeros(1, 1, dtype=torch.int64)
        first = verify.sample_target_tokens(logits, root, [request.sampling], self._noise([row], 1))
        taken = self._take(row, first.flatten().tolist())
        row.first_token_s = time.perf_counter() - submitted_at
        if row.ended:
            self._leave(slot)
        elif self._max_shape is not None:
            row.drafting = self._may_draft(row)
            if row.drafting:
                assert self.drafter is not None
                self.drafter.admit(self._state(), row.drafter_row, row.request.prompt_ids)
                # The drafter's inputs are pairs: the target's state at i with token i + 1. The last is the new token.
                self.drafter.extend(self._state(), CommittedTokens(
                    rows=[row.drafter_row], starts=[0], tokens=[row.tokens[1:]], aux=aux[None]))
        # The row may have left its slot; its log probabilities are read from the logits of this pass, not from it.
        [logprobs] = verify.emitted_logprobs(logits, [[0]], [taken], [request.top_logprobs])
        self._clock.count("prefill_s", began, self._clock.mark())
        return row.progress(taken, [], [], logprobs, [TracedRound([], [], [], taken)] if request.trace else [])

    # A round

    def _round(self) -> list[StepOutput]:
        clock = self._clock
        began = clock.mark()
        # 1. Propose: one tree per row, of the same shape for all, under the noise of the positions ahead.
        shape = self.round_tree = self._shape_for(len(self._rows))
        noise = self._noise(self._rows, 1 + (shape.num_steps if shape is not None else 0))
        drafting = clock.mark()
        starts = [len(row.tokens) - 1 for row in self._rows]
        roots_B, starts_B = upload([[row.tokens[-1] for row in self._rows], starts]).unbind(0)
        tree = self._propose(roots_B[:, None], shape, noise)
        proposed = clock.mark()
        # 2. Verify all trees in one target pass.
        choices, aux, logits = self._verify(tree, starts_B, shape, noise)
        chosen = torch.stack([tree.tokens, tree.parents, choices], dim=1)
        launched = clock.mark()
        clock.count("verify_s", began, drafting)
        clock.count("draft_s", drafting, proposed)
        clock.count("verify_s", proposed, launched)
        # The only place of a round where the host waits for the device.
        trees = chosen.tolist()
        paths = [verify.accept_path(*tree_row) for tree_row in trees]
        clock.settle()
        # 3. Commit: accepted keys move to their text positions before the rows' lengths change.
        self._cache.commit(range(len(self._rows)), starts, [path.nodes for path in paths])
        emitted = [self._take(row, path.tokens) for row, path in zip(self._rows, paths, strict=True)]
        logprobs = verify.emitted_logprobs(logits, [path.nodes for path in paths], emitted,
                                           [row.request.top_logprobs for row in self._rows])
        outputs = []
        for row, taken, own, path, tree_row in zip(self._rows, emitted, logprobs, paths, trees, strict=True):
            rounds = [traced_round(tree_row[0], tree_row[1], path.nodes, taken)] if row.request.trace else []
            if row.error is not None:
                outputs.append(row.progress(taken, [], [], own, rounds))
                continue
            row.count_round(len(taken) - 1)
            drafted = shape.num_draft_tokens - 1 if shape is not None and row.drafting else 0
            outputs.append(row.progress(taken, [len(taken) - 1], [drafted], own, rounds))
        verified = clock.mark()
        # 4. The drafter receives the committed tokens, in rounds without drafting too.
        if self._max_shape is not None:
            self._extend(starts, paths, aux)
        clock.count("verify_s", launched, verified)
        clock.count("draft_s", verified, clock.mark())
        # 5. Finished rows leave, last slot first: the row that moves into a freed slot has been checked already.
        for slot in reversed(range(len(self._rows))):
            if self._rows[slot].ended:
                self._leave(slot)
        self.stats.rounds += 1
        self.stats.nodes += tree.tokens.shape[1]
        return outputs

    def _propose(self, roots: Tensor, shape: DraftTreeShape | None, noise: RowNoise | None) -> DraftTree:
        """One tree per row, on roots [B, 1]; rows that cannot draft get a root and NO_TOKEN nodes."""
        drafting = [index for index, row in enumerate(self._rows) if row.drafting]
        if shape is None or self.drafter is None or not drafting:
            return DraftTree(roots, torch.zeros_like(roots), torch.zeros_like(roots, dtype=torch.float32))
        # A row keeps its drafter row while it moves between slots: the drafter's state is never copied.
        rows = [self._rows[index].drafter_row for index in drafting]
        if len(drafting) == len(self._rows):
            drafts = _trimmed(self.drafter.propose(self._state(), rows, shape, noise))
        else:
            among = upload(drafting)
            if noise is not None:
                noise = RowNoise(noise.temperature[among], noise.gumbel[among])
            drafts = _spread(_trimmed(self.drafter.propose(self._state(), rows, shape, noise)), among, len(self._rows))
        return DraftTree(torch.cat([roots, drafts.tokens[:, 1:]], dim=1), drafts.parents, drafts.scores)

    def _verify(self, tree: DraftTree, starts: Tensor, shape: DraftTreeShape | None,
                noise: RowNoise | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """One target pass over all nodes: the target's token at each, [B, N], aux states [B, N, A, H], and the logits
        [B, N, V] where a row's log probabilities are requested."""
        target = self.target
        num_rows, num_nodes = tree.tokens.shape
        if shape is None or shape.top_k == 1 or num_nodes == 1:
            depths = torch.arange(num_nodes, device=target.device).expand(num_rows, -1)
            seen = None
        else:
            seen = ancestors(tree.parents, shape.num_steps)
            depths = seen.sum(dim=2) - 1
        attend = TreeAttention(self._cache, starts, seen, depths, target.dtype,
                               max_start=max(len(row.tokens) for row in self._rows) - 1)
        # Padding nodes (NO_TOKEN) run as token 0; they match no target token, so no accepted path contains them.
        aux, last = target.run(tree.tokens.clamp(min=0).flatten(), (starts[:, None] + depths).flatten(), attend,
                               self._aux_layers())
        logits = target.logits(last).view(num_rows, num_nodes, -1)
        choices = verify.sample_target_tokens(logits, depths, [row.request.sampling for row in self._rows], noise)
        # Not kept without need: B * N * V numbers would stay allocated while the drafter runs.
        kept = logits if any(row.request.top_logprobs is not None for row in self._rows) else None
        return choices, aux.view(num_rows, num_nodes, *aux.shape[1:]), kept

    def _extend(self, starts: Sequence[int], paths: Sequence[verify.AcceptedPath], aux: Tensor) -> None:
        """Give the drafter the committed tokens of all unfinished rows."""
        assert self.drafter is not None
        unfinished: list[int] = []
        for index, row in enumerate(self._rows):
            row.drafting = row.drafting and self._may_draft(row)
            if row.drafting and not row.ended:
                unfinished.append(index)
        if not unfinished:
            return
        longest, num_nodes = max(len(paths[index].nodes) for index in unfinished), aux.shape[1]
        # One gather for all rows: shorter paths repeat their last node, which the drafter reads as padding.
        nodes = upload([index * num_nodes + node for index in unfinished for node in (
            *paths[index].nodes, *paths[index].nodes[-1:] * (longest - len(paths[index].nodes)))])
        self.drafter.extend(self._state(), CommittedTokens(
            rows=[self._rows[index].drafter_row for index in unfinished],
            starts=[starts[index] for index in unfinished], tokens=[paths[index].tokens for index in unfinished],
            aux=aux.flatten(0, 1).index_select(0, nodes).unflatten(0, (len(unfinished), longest))))

    def _take(self, row: RequestState, tokens: list[int]) -> list[int]:
        """Append a round's tokens; those before NOT_FINITE, which is the last if any, are the target's own."""
        finite = tokens[:-1] if tokens[-1] == verify.NOT_FINITE else tokens
        taken = row.take(finite, self.max_length)
        if len(finite) < len(tokens) and not row.ended:
            dtype = str(self.target.dtype).removeprefix("torch.")
            row.error = UnsupportedTarget(
                f"request {row.request.id!r}: the target's logits after {len(row.tokens)} tokens are not finite (NaN "
                f"or infinity): its weights are damaged, or its states overflow in {dtype}",
                "compute in bfloat16 or float32 (target.dtype), or download the model again")
        return taken

    def _leave(self, slot: int) -> None:
        """Free a slot; the last row moves into it, so that occupied slots stay contiguous."""
        heapq.heappush(self._free_drafter_rows, self._rows[slot].drafter_row)
        if self._rows[slot].error is not None:
            self._cache.clear_slot(slot)
        # Race-free without a lock: one thread owns the engine, and rows move between rounds alone.
        last = self._rows.pop()
        if slot < len(self._rows):
            self._rows[slot] = last
            self._cache.copy_slot(len(self._rows), slot, len(last.tokens))

    def _aux_layers(self) -> tuple[int, ...]:
        return self.drafter.aux_layers if self._max_shape is not None and self.drafter is not None else ()

    def _may_draft(self, row: RequestState) -> bool:
        """Whether the request drafts, and the text and another round's drafts fit the drafter's context."""
        assert self.drafter is not None
        assert self._max_shape is not None
        return row.request.draft and len(row.tokens) + self._max_shape.num_steps <= self.drafter.max_length

    def _state(self) -> DrafterState:
        assert self.drafter is not None
        if self._drafter_state is None:
            self._drafter_state = self.drafter.new_state(self.max_concurrency)
        return self._drafter_state

    def _noise(self, rows: Sequence[RequestState], num_ahead: int) -> RowNoise | None:
        """Noise of the next `num_ahead` positions of each row; None when all are greedy."""
        if all(row.noise is None for row in rows):
            return None
        # Greedy rows of a mixed batch: zero noise and temperature 1 keep their argmax.
        zero = torch.zeros(num_ahead, self.target.config.vocab_size, dtype=torch.float64)
        gumbel = [zero if row.noise is None else row.noise.at(len(row.tokens), num_ahead) for row in rows]
        temperature = [row.request.sampling.temperature or 1.0 for row in rows]
        return RowNoise(upload(temperature, torch.float64), torch.stack(gumbel))


def smallest_common_shape(shapes: Iterable[DraftTreeShape]) -> DraftTreeShape | None:
    """The smallest shape that is at least as large as each in every number; None for none."""
    given = list(shapes)
    if not given:
        return None
    return DraftTreeShape(
        num_steps=max(shape.num_steps for shape in given), top_k=max(shape.top_k for shape in given),
        num_draft_tokens=max(shape.num_draft_tokens for shape in given))


def _trimmed(tree: DraftTree) -> DraftTree:
    """Drop trailing nodes that are padding in every row, so that a drafter without proposals does not widen the
    pass."""
    num_nodes = tree.num_filled
    if num_nodes is None:
        return tree
    return DraftTree(tree.tokens[:, :num_nodes], tree.parents[:, :num_nodes], tree.scores[:, :num_nodes])


def _spread(tree: DraftTree, rows: Tensor, num_rows: int) -> DraftTree:
    """Trees of some rows, scattered among rows that hold a root and padding."""
    num_nodes = tree.tokens.shape[1]
    tokens = tree.tokens.new_full((num_rows, num_nodes), NO_TOKEN)
    scores = tree.scores.new_full((num_rows, num_nodes), -torch.inf)
    # Rows without drafts have the parents of a chain: their nodes are never accepted, and a batch of chains stays one.
    parents = torch.arange(-1, num_nodes - 1, device=tokens.device).clamp_(min=0).repeat(num_rows, 1)
    return DraftTree(tokens.index_copy(0, rows, tree.tokens), parents.index_copy(0, rows, tree.parents),
                     scores.index_copy(0, rows, tree.scores))
