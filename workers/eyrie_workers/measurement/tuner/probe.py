"""Timed rounds of every kind, and the texts that come of them: the one run all predictions rest on.

The engine answers some prompts while the shape of drafting changes from round to round: each width shallow and deep,
and not at all. Text does not depend on the shape, so the answers are as good as any; neighbouring rounds meet the same
machine and nearly the same text, so the differences between shapes are those of the shapes. Only rounds with all slots
taken are kept; each time is the median of its rounds, which a stray interruption does not move.

Prompts are asked again, from the first, until every shape has had its rounds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.draft_tree import DraftTreeShape
from eyrie_api.v1alpha1.tuning import DraftTime, Method, Setting, StepTime
from eyrie_workers.speculation.engine import Engine, Request

_MOST_TIMES = 100  # the prompts are asked again; an answer of some tokens has as many rounds


@dataclass(frozen=True)
class Round:
    """One round at full load."""

    shape: DraftTreeShape | None
    nodes: int
    """What was verified per row, root included."""

    draft_s: float
    verify_s: float


@dataclass
class Probe:
    """What a run left behind."""

    texts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Answers by request."""

    rounds: list[Round] = field(default_factory=list)
    prefill_s: list[float] = field(default_factory=list)
    """Of each request."""


def shapes_to_time(shapes: Sequence[DraftTreeShape]) -> list[DraftTreeShape]:
    """Of each width the shallowest and the deepest shape, and the fewest and the most nodes."""
    chosen: dict[DraftTreeShape, None] = {}
    for width in sorted({shape.top_k for shape in shapes}):
        same = sorted((shape for shape in shapes if shape.top_k == width),
                      key=lambda shape: (shape.num_steps, shape.num_draft_tokens))
        for shape in (same[0], same[-1]):
            chosen[shape] = None
    return list(chosen)


def run_probe(engine: Engine, requests: Sequence[Request], concurrency: int, shapes: Sequence[DraftTreeShape | None],
              between: Callable[[], None], rounds: int) -> Probe:
    """Answer all requests at this concurrency, in turning shapes. Leaves the engine idle."""
    probe, turn = Probe(), _Turning(dict.fromkeys(shapes, 0))
    engine.set_tree_schedule(turn, [shape for shape in shapes if shape is not None])
    rows = min(concurrency, len(requests))
    names = {request.id for request in requests}
    again = 0
    waiting = list(requests)
    while True:
        if not waiting and min(turn.counts.values()) < rounds:
            again += 1
            if again > _MOST_TIMES:
                raise InvalidInput(f"answers are too short to time {rounds} rounds at concurrency {concurrency}",
                                   "raise benchmark.max_new_tokens, or name suites with longer answers")
            waiting = [replace(request, id=_again(request, again)) for request in requests]
        while waiting and engine.num_running + engine.num_waiting < rows:
            engine.submit(waiting.pop(0))
        between()
        before = replace(engine.stats)
        said = engine.step()
        spent = engine.stats
        for progress in said:
            if progress.generation is not None and progress.id in names:
                probe.texts[progress.id] = tuple(progress.generation.token_ids)
        admitted = sum(not progress.accepted for progress in said)
        probe.prefill_s += [(spent.prefill_s - before.prefill_s) / admitted] * admitted if admitted else []
        if len(said) - admitted == rows:
            probe.rounds.append(Round(turn.last, spent.nodes - before.nodes, spent.draft_s - before.draft_s,
                                      spent.verify_s - before.verify_s))
            turn.counts[turn.last] += 1
        if len(probe.texts) == len(requests) and min(turn.counts.values()) >= rounds:
            break
    for request in requests:
        for number in range(again + 1):
            engine.cancel(_again(request, number))
    engine.tree = None
    return probe


def _again(request: Request, number: int) -> str:
    return f"{request.id} (asked again, {number})" if number else request.id


@dataclass
class _Turning:
    """Each round another shape: the first of those with the fewest rounds kept, so that none can miss its turn."""

    counts: dict[DraftTreeShape | None, int]
    last: DraftTreeShape | None = None

    def __call__(self, _num_rows: int) -> DraftTreeShape | None:
        self.last = min(self.counts, key=lambda shape: self.counts[shape])
        return self.last


def step_times(probe: Probe, concurrency: int, temperature: float) -> list[StepTime]:
    """The curve of target passes: one point per kind and number of nodes."""
    grouped: dict[tuple[bool, int], list[float]] = {}
    for one in probe.rounds:
        grouped.setdefault((one.shape is not None and one.shape.top_k > 1, one.nodes), []).append(one.verify_s)
    return [StepTime(concurrency=concurrency, temperature=temperature, verified_tokens=nodes, tree=tree,
                     verify_s=median(times), rounds=len(times))
            for (tree, nodes), times in sorted(grouped.items())]


def draft_times(probe: Probe, method: Method, concurrency: int, temperature: float) -> list[DraftTime]:
    """What drafting took, by shape; the rounds without drafting, in which the drafter is only kept fed, left out."""
    grouped: dict[DraftTreeShape, list[float]] = {}
    for one in probe.rounds:
        if one.shape is not None:
            grouped.setdefault(one.shape, []).append(one.draft_s)
    return [DraftTime(concurrency=concurrency, temperature=temperature, setting=Setting(method=method, tree=shape),
                      draft_s=median(times), rounds=len(times)) for shape, times in grouped.items()]


